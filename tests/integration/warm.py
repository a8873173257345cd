"""What the server of ``test_cache_reliability.py`` loads before it forks: libraries and their tables.

A process that forks must not have started torch's threads; with one they are never started. Figures of the labels are
not drawn there: that takes as long as the labels of these few prompts, and comes behind them.
"""

import pandas
import pyarrow.parquet
import torch

import blockpilot.runs.collect
from blockpilot.models import load_pair

torch.set_num_threads(1)
load_pair("tiny", device="cpu")
blockpilot.runs.collect.write_labels = lambda *given: None

__all__ = ["blockpilot", "pandas", "pyarrow"]
