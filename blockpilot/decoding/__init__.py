"""Noise and filters, the verification rule, the engine, the latency profile. Knows no policy: it is handed one.

The door for ``model.generate`` stays in ``decoding.custom_generate``: it loads more of ``transformers``.
"""

from blockpilot.decoding.engine import BlockSizePolicy, Draft, Generation, Prefill, Round, generate
from blockpilot.decoding.latency import LatencyProfile, measure_latency
from blockpilot.decoding.sampling import Sampling, draw_tokens, prompt_key
from blockpilot.decoding.trajectory import Trajectory, generate_batch

__all__ = [
    "BlockSizePolicy",
    "Draft",
    "Generation",
    "LatencyProfile",
    "Prefill",
    "Round",
    "Sampling",
    "Trajectory",
    "draw_tokens",
    "generate",
    "generate_batch",
    "measure_latency",
    "prompt_key",
]
