"""The latency profile."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from blockpilot.config.checks import check_device, expand_block_sizes, require
from blockpilot.config.collection import DrafterConfig, ModelConfig
from blockpilot.config.places import LATENCY_DIR


@dataclass
class ProfileConfig:
    """What the latency profile measures."""

    block_sizes: list[Any] | None = None
    """Sizes to measure, such as [1,8,16] or [1,...,16] (all from 1 to 16); null is 1 .. B + 4: autoregressive decoding,
    what a policy may shrink to, and the candidates of every oracle.radius up to 4."""
    contexts: list[int] = field(default_factory=lambda: [64, 256, 1024])
    """Prompt lengths in tokens; those the model has no positions for are left out."""
    warmup: int = 3
    """Turns of every block size before the first that counts."""
    repeats: int = 15
    """Turns that count; figures are medians over them."""

    def __post_init__(self) -> None:
        if self.block_sizes is not None:
            self.block_sizes = expand_block_sizes("profile.block_sizes", self.block_sizes)
        fine = len(self.contexts) > 0 and min(self.contexts) >= 1
        require(fine, "profile.contexts", self.contexts, "one or more numbers of at least 1")
        require(self.warmup >= 0, "profile.warmup", self.warmup, "a number of at least 0")
        require(self.repeats >= 1, "profile.repeats", self.repeats, "a number of at least 1")


@dataclass
class ProfileRunConfig:
    """All that ``python -m blockpilot.profile`` reads."""

    model: ModelConfig
    drafter: DrafterConfig
    profile: ProfileConfig = field(default_factory=ProfileConfig)
    device: str = "auto"
    """auto (a GPU when there is one), cpu, cuda or cuda:N."""
    seed: int = 0
    """Seed of the prompts' tokens."""
    latency_dir: str = LATENCY_DIR
    """Where profiles live; relative paths start at the project."""

    def __post_init__(self) -> None:
        check_device(self.device)
        require(0 <= self.seed < 2**32, "seed", self.seed, "a number in [0, 2**32)")
