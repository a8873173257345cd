"""Noise and filters, the verification rule, the engine. Knows no policy: it is handed one.

The door for ``model.generate`` stays in ``decoding.custom_generate``: it loads more of ``transformers``.
"""

from blockpilot.decoding.engine import BlockSizePolicy, Generation, Prefill, Round, generate
from blockpilot.decoding.sampling import Sampling, draw_tokens, prompt_key
from blockpilot.decoding.trajectory import Trajectory, generate_batch

__all__ = [
    "BlockSizePolicy",
    "Generation",
    "Prefill",
    "Round",
    "Sampling",
    "Trajectory",
    "draw_tokens",
    "generate",
    "generate_batch",
    "prompt_key",
]
