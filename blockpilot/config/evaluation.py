"""Evaluation, the policies in it, and where figures go."""

from __future__ import annotations

from dataclasses import dataclass, field

from blockpilot.config.checks import one_of, require
from blockpilot.config.places import LATENCY_DIR, preset_names

MOST_TAG_LETTERS = 64
"""W&B takes no longer tag."""


@dataclass
class EvaluationConfig:
    """Speculative decoding of held-out prompts under several policies."""

    method: str = "decode"
    """decode (for real, some prompts, with times) or simulate (along the labels' outputs, all prompts, no times)."""
    policies: list[str] = field(default_factory=lambda: ["best_fixed", "random", "oracle"])
    """Rows beside autoregressive, always-B and the policy in question, by their names in conf/policy. per_round is left
    out where there is no trained policy; best_fixed labels the training prompts where no trained policy recorded it."""
    num_prompts: int = 64
    """Test prompts decoded for real, evenly spaced over the test set; offline figures use all of them."""
    every_n_epochs: int = 0
    """Decode during training (for real) every so many epochs; 0 only at the end."""
    bootstrap_samples: int = 2000
    """Resamplings of the prompts behind each interval."""
    latency_profile: str | None = "auto"
    """Costs of a round for cost-aware regret: auto (the stored profile of this device and model, if there is one),
    the file of a profile (of another device too), or null (no cost-aware figures)."""
    latency_dir: str = LATENCY_DIR
    """Where ``auto`` looks; relative paths start at the project."""

    def __post_init__(self) -> None:
        one_of("evaluation.method", self.method, ("decode", "simulate"))
        rows = tuple(name for name in preset_names("policy") if name not in ("fixed", "predictor"))
        for name in self.policies:
            one_of("evaluation.policies", name, rows)
        repeated = len(set(self.policies)) < len(self.policies)
        require(not repeated, "evaluation.policies", self.policies, "every name once")
        require(self.num_prompts >= 1, "evaluation.num_prompts", self.num_prompts, "a number of at least 1")
        require(
            self.every_n_epochs >= 0, "evaluation.every_n_epochs", self.every_n_epochs, "0 (only at the end) or more"
        )
        require(
            self.bootstrap_samples >= 1,
            "evaluation.bootstrap_samples",
            self.bootstrap_samples,
            "a number of at least 1",
        )


@dataclass
class LoggerConfig:
    """Where metrics go besides the output folder."""

    kind: str = "wandb"
    """wandb, tensorboard, csv or none."""
    project: str = "blockpilot"
    """W&B project."""
    mode: str | None = None
    """online, offline or disabled; None takes WANDB_MODE, else offline."""
    group: str | None = None
    """W&B group; None is the sweep's name in a multirun, else no group."""
    name: str | None = None
    """W&B run name; None lets W&B choose."""
    tags: list[str] = field(default_factory=list)
    """W&B tags beside the names of the model and the data sets."""

    def __post_init__(self) -> None:
        one_of("logger.kind", self.kind, ("wandb", "tensorboard", "csv", "none"))
        if self.mode is not None:
            one_of("logger.mode", self.mode, ("online", "offline", "disabled"))
        for tag in self.tags:
            fine = 1 <= len(tag) <= MOST_TAG_LETTERS
            require(fine, "logger.tags", tag, f"tags of 1 to {MOST_TAG_LETTERS} letters, which is what W&B takes")


@dataclass
class PolicyConfig:
    """Which policy evaluate.py compares with the standard rows, and its settings."""

    name: str = "predictor"
    """One of conf/policy: predictor, per_round (both a trained policy's folder), fixed, best_fixed, random, oracle, ema
    or confidence."""
    path: str | None = None
    """Folder of a trained policy, for predictor and per_round; None is that of the newest run of the same target and
    drafter under outputs/."""
    block_size: int | None = None
    """Block size of fixed, and the one that confidence drafts; None is B."""
    tiers: list[int] | None = None
    """Block sizes that ema changes between; None takes the candidates."""
    start: int | None = None
    """Block size that ema begins a prompt with; None is B."""
    alpha: float = 0.2
    """Weight of the latest round in ema's average."""
    warmup_rounds: int = 0
    """First rounds of a prompt in which ema only watches."""
    update_interval: int = 5
    """Rounds between ema's decisions."""
    down_hysteresis: float = -0.25
    """Added to the average at which ema goes a tier down."""
    up_hysteresis: float = 0.0
    """Added to the average at which ema goes a tier up."""
    threshold: float = 0.4
    """Probability below which confidence leaves a drafted token, and those behind it, unverified."""

    def __post_init__(self) -> None:
        one_of("policy.name", self.name, tuple(preset_names("policy")))
        for name in ("block_size", "start"):
            value = getattr(self, name)
            require(value is None or value >= 1, f"policy.{name}", value, "1 or more")
        fine = self.tiers is None or (len(self.tiers) > 0 and min(self.tiers) >= 1)
        require(fine, "policy.tiers", self.tiers, "one or more block sizes of at least 1, or null")
        require(0 < self.alpha <= 1, "policy.alpha", self.alpha, "a number in (0, 1]")
        require(self.warmup_rounds >= 0, "policy.warmup_rounds", self.warmup_rounds, "a number of at least 0")
        require(self.update_interval >= 1, "policy.update_interval", self.update_interval, "a number of at least 1")
        for name in ("down_hysteresis", "up_hysteresis"):
            value = getattr(self, name)
            require(abs(value) < float("inf"), f"policy.{name}", value, "a finite number")
        require(0 <= self.threshold <= 1, "policy.threshold", self.threshold, "a number in [0, 1]")
