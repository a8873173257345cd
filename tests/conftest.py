"""What every test stands on: no network, no account, the same random cases each time."""

from __future__ import annotations

import os

import hypothesis
import pytest

os.environ.setdefault("WANDB_MODE", "offline")
os.environ.setdefault("WANDB_SILENT", "true")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# shared machines stall now and then: how long one example takes says nothing
hypothesis.settings.register_profile("blockpilot", deadline=None, derandomize=True)
hypothesis.settings.load_profile("blockpilot")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips what needs a GPU where there is none."""
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if not on_gpu:
        return
    import torch

    if not torch.cuda.is_available():
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
