"""Noise and filters, the verification rule, the engine. Knows no policy: it is handed one."""

from blockpilot.decoding.custom_generate import CustomGenerate, custom_generate
from blockpilot.decoding.engine import BlockSizePolicy, Generation, Prefill, Round, generate
from blockpilot.decoding.sampling import Sampling, draw_tokens, prompt_key
from blockpilot.decoding.trajectory import Trajectory, generate_batch

__all__ = [
    "BlockSizePolicy",
    "CustomGenerate",
    "Generation",
    "Prefill",
    "Round",
    "Sampling",
    "Trajectory",
    "custom_generate",
    "draw_tokens",
    "generate",
    "generate_batch",
    "prompt_key",
]
