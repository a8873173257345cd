"""Typed configuration: every key a run reads, its type, its meaning and its limits.

Values live in ``conf/*.yaml``; this module holds their types and the checks. It is the only one that touches
OmegaConf or Hydra's composition: below it, code sees plain dataclasses and never changes them.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, cast

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from blockpilot.errors import UserError

ROOT = Path(__file__).resolve().parents[1]
CONF_DIR = ROOT / "conf"
LATENCY_DIR = "data/latency"
MODELS_DIR = "data/models"

T = TypeVar("T")

DTYPES = ("auto", "float32", "bfloat16", "float16")


def require(condition: bool, key: str, value: object, allowed: str) -> None:
    """Raises ``UserError`` naming key, value and what is allowed, unless ``condition`` holds."""
    if not condition:
        raise UserError(f"{key}={value!r} is not allowed; expected {allowed}")


def check_device(device: str) -> None:
    """Raises ``UserError`` unless ``device`` is the name of one (whether it is here is another question)."""
    known = device in ("auto", "cpu", "cuda") or (device.startswith("cuda:") and device[5:].isdigit())
    require(known, "device", device, "auto, cpu, cuda or cuda:N")


def _one_of(key: str, value: str, allowed: tuple[str, ...]) -> None:
    require(value in allowed, key, value, "one of " + ", ".join(allowed))


def expand_block_sizes(key: str, values: Sequence[object]) -> list[int]:
    """Rising block sizes without repeats; ``...`` between two of them stands for all in between.

    Raises:
        UserError: none is given, one is below 1 or too large for the cache (2**15), or ``...`` has no number on a side.
    """
    sizes: list[int] = []
    for place, value in enumerate(values):
        around = values[place - 1 : place + 2] if place else ()
        if value == "..." and len(around) == 3 and all(type(end) is int for end in (around[0], around[2])):
            sizes += range(cast(int, around[0]), cast(int, around[2]))
        else:
            allowed = "sizes of 1 or more, and ... between two of them, as [2,...,32]"
            require(type(value) is int and 1 <= value < 2**15, key, list(values), allowed)
            sizes.append(cast(int, value))
    require(len(sizes) > 0, key, list(values), "at least one block size, as [2,...,32]")
    return sorted(set(sizes))


@dataclass
class ModelConfig:
    """The target language model."""

    name: str
    """Name of the preset, as in conf/model."""
    target: str
    """Local folder, Hub id, GGUF file (converted once, to data/models), pkg:// folder inside the package, or
    pip://PACKAGE@VERSION/FILE of an installed package. "A or B" takes B where A cannot be had, and says so."""
    revision: str | None = None
    """Hub revision of the target; None is the default branch."""
    tokenizer: str | None = None
    """Tokenizer folder or Hub id; None takes the target's."""
    dtype: str = "auto"
    """auto (the checkpoint's own), float32, bfloat16 or float16."""
    attention: str = "sdpa"
    """Attention implementation handed to transformers: sdpa, eager or flash_attention_2."""
    thinking: bool = False
    """Value of enable_thinking given to chat templates that know it."""

    def __post_init__(self) -> None:
        _one_of("model.dtype", self.dtype, DTYPES)
        _one_of("model.attention", self.attention, ("sdpa", "eager", "flash_attention_2"))


@dataclass
class DrafterConfig:
    """The block-diffusion drafter; its block size is read from its checkpoint, never typed here."""

    name: str
    """Name of the preset, as in conf/drafter."""
    path: str
    """Local folder, Hub id, or pkg:// folder inside the package."""
    revision: str | None = None
    """Hub revision; None is the default branch."""


@dataclass
class PromptSource:
    """Where the prompts of one split come from."""

    kind: str
    """jsonl (rows with id, dataset, turns), txt (a line is a prompt) or hub (a data set on the Hub)."""
    path: str | None = None
    """File of a jsonl or txt source; relative paths start at the working directory, then at the project."""
    repo: str | None = None
    """Hub data set of a hub source, such as openai/gsm8k."""
    subset: str | None = None
    """Hub configuration name."""
    split: str | None = None
    """Hub split name, such as test."""
    field: str | None = None
    """Column that holds the prompt: a string, a list of strings, or a list of chat messages."""
    template: str = "{prompt}"
    """Text around the prompt; {prompt} is the column's value, other names are other columns."""
    only: dict[str, list[str]] | None = None
    """Columns of a jsonl or hub source and the values to keep, as {category: [story, recipe]}; None keeps all rows."""
    limit: int | None = None
    """At most so many rows, from the start; None takes all."""

    def __post_init__(self) -> None:
        _one_of("dataset source kind", self.kind, ("jsonl", "txt", "hub"))
        require(self.kind != "txt" or not self.only, "only", self.only, "null for kind=txt, which has no columns")
        require(self.limit is None or self.limit > 0, "limit", self.limit, "a number above 0, or null")


@dataclass
class DatasetConfig:
    """One data set: prompts to learn from and prompts to test on. Without ``test``, train is split by prompt id."""

    train: PromptSource
    """Prompts the predictor learns from (and is validated on)."""
    test: PromptSource | None = None
    """Held-out prompts; None holds out part of train by a hash of the prompt id."""


@dataclass
class GenerationConfig:
    """How the target draws tokens; the same for labels, baseline and decoding."""

    max_new_tokens: int = 160
    """Output budget in tokens, the prefill token included."""
    temperature: float = 0.0
    """0 (or below 1e-5) is greedy."""
    top_p: float = 1.0
    """Nucleus mass, in (0, 1]."""
    top_k: int = 0
    """Number of most likely tokens kept; 0 keeps all."""
    seed: int = 0
    """Seed of the position-keyed noise."""

    def __post_init__(self) -> None:
        require(self.max_new_tokens >= 1, "generation.max_new_tokens", self.max_new_tokens, "a number of at least 1")
        require(0 <= self.temperature < float("inf"), "generation.temperature", self.temperature, "0 or more")
        require(0 < self.top_p <= 1, "generation.top_p", self.top_p, "a number in (0, 1]")
        require(self.top_k >= 0, "generation.top_k", self.top_k, "0 (off) or more")
        require(0 <= self.seed < 2**64, "generation.seed", self.seed, "a number in [0, 2**64)")


@dataclass
class OracleConfig:
    """What labels are made and what is kept beside them."""

    method: str = "replay"
    """replay (draft along the known trajectory) or enumerate (decode once per block size; the check)."""
    radius: int = 3
    """Candidates are {B - radius .. B + radius}, cut at 2 from below."""
    block_sizes: list[Any] | None = None
    """Candidates by hand, such as [8,16,24] or [2,...,32] (all from 2 to 32); null takes them from radius."""
    per_round: bool = False
    """Also store what every candidate would commit at every position: the bound of policies that decide each round."""
    latency_profile: str | None = "auto"
    """Costs of a round for that bound: auto (the stored profile of this device and model, if there is one), the file of
    a profile, or null (rounds are counted only)."""
    max_batch_tokens: int | None = None
    """Most positions held, and most tokens drafted, at once; null starts high and halves where memory runs out."""
    tail_mass: float = 1e-3
    """Probability mass dropped from a stored prefill distribution; 0 keeps all of it."""
    store_logits: bool = False
    """Also store dense prefill logits (preprocess=logits needs them)."""
    store_hidden: bool = False
    """Also store the last-layer hidden state of the last prompt position (preprocess=hidden needs it)."""
    tau_convention: str = "committed"
    """committed, or reference (DFlash's own count: the last round is not cut; only for published figures)."""

    def __post_init__(self) -> None:
        _one_of("oracle.method", self.method, ("replay", "enumerate"))
        require(self.radius >= 0, "oracle.radius", self.radius, "a number of at least 0")
        if self.block_sizes is not None:
            self.block_sizes = expand_block_sizes("oracle.block_sizes", self.block_sizes)
        require(
            not self.per_round or self.method == "replay",
            "oracle.per_round",
            self.per_round,
            f"false with oracle.method={self.method}, which decodes and cannot start at every position",
        )
        fine = self.max_batch_tokens is None or self.max_batch_tokens >= 1
        require(fine, "oracle.max_batch_tokens", self.max_batch_tokens, "a number of at least 1, or null")
        require(0 <= self.tail_mass < 1, "oracle.tail_mass", self.tail_mass, "a number in [0, 1)")
        _one_of("oracle.tau_convention", self.tau_convention, ("committed", "reference"))


@dataclass
class CollectConfig:
    """How a cache is filled; nothing here changes its content."""

    batch_size: int = 64
    """Prompts decoded and replayed at once."""
    shard_size: int = 256
    """Rows in a Parquet shard: what a killed run loses at most."""
    num_shards: int = 1
    """Number of writers that share the work."""
    shard_index: int = 0
    """Which of them this is, from 0."""

    def __post_init__(self) -> None:
        require(self.batch_size >= 1, "collect.batch_size", self.batch_size, "a number of at least 1")
        require(self.shard_size >= 1, "collect.shard_size", self.shard_size, "a number of at least 1")
        require(self.num_shards >= 1, "collect.num_shards", self.num_shards, "a number of at least 1")
        require(
            0 <= self.shard_index < self.num_shards,
            "collect.shard_index",
            self.shard_index,
            f"a number from 0 to collect.num_shards - 1 = {self.num_shards - 1}",
        )


@dataclass
class PreprocessConfig:
    """Which view of the prefill the predictor reads."""

    kind: str = "probs"
    """probs, logits, log_probs, topk, stats or hidden."""
    top_k: int = 64
    """Number of sorted probabilities for kind=topk."""

    def __post_init__(self) -> None:
        _one_of("preprocess.kind", self.kind, ("probs", "logits", "log_probs", "topk", "stats", "hidden"))
        require(self.top_k >= 1, "preprocess.top_k", self.top_k, "a number of at least 1")


@dataclass
class PredictorConfig:
    """The block-size classifier."""

    k: int = 2
    """Radius of its candidates {B - k .. B + k}; at most oracle.radius."""
    depth: int = 2
    """Number of hidden layers."""
    width: int = 2048
    """Units per hidden layer."""
    dropout: float = 0.2
    """Dropout after each hidden layer."""
    residual: bool = True
    """Residual connection around every hidden layer after the first."""
    standardize: bool = True
    """Shift and scale dense inputs (topk, stats, hidden, logits) by their mean and deviation over training prompts."""
    loss: str = "ce"
    """ce (paper), soft (cross-entropy against a softmax of the tau curve) or regret (expected regret)."""
    soft_temperature: float = 0.05
    """Softmax temperature of loss=soft, in units of the relative difference in utility."""
    class_weights: str = "none"
    """Weights of the candidates in loss=ce: none, or balanced (one over a candidate's share of the best labels)."""
    min_gain: float | None = None
    """Keep B unless another candidate's expected relative gain in utility exceeds this; null: the highest score."""

    def __post_init__(self) -> None:
        require(self.k >= 0, "predictor.k", self.k, "a number of at least 0")
        require(self.depth >= 1, "predictor.depth", self.depth, "a number of at least 1")
        require(self.width >= 1, "predictor.width", self.width, "a number of at least 1")
        require(0 <= self.dropout < 1, "predictor.dropout", self.dropout, "a number in [0, 1)")
        _one_of("predictor.loss", self.loss, ("ce", "soft", "regret"))
        require(self.soft_temperature > 0, "predictor.soft_temperature", self.soft_temperature, "a number above 0")
        _one_of("predictor.class_weights", self.class_weights, ("none", "balanced"))
        require(
            self.class_weights == "none" or self.loss == "ce",
            "predictor.class_weights",
            self.class_weights,
            f"none with predictor.loss={self.loss}; only ce has classes",
        )
        fine = self.min_gain is None or self.min_gain >= 0
        require(fine, "predictor.min_gain", self.min_gain, "a number of at least 0, as 0.01 for 1 %, or null")


@dataclass
class ObjectiveConfig:
    """What the best block size is best at."""

    name: str = "tau"
    """Utility that labels, losses and regret are about: tau (paper; acceptance length), or speed (tokens per second of
    rounds by evaluation.latency_profile)."""

    def __post_init__(self) -> None:
        _one_of("objective.name", self.name, ("tau", "speed"))


@dataclass
class TrainerConfig:
    """The training loop."""

    max_epochs: int = 60
    """Most passes over the training prompts."""
    batch_size: int = 64
    """Prompts per optimizer step, over all processes."""
    learning_rate: float = 1e-3
    """AdamW step size."""
    weight_decay: float = 0.01
    """AdamW decoupled weight decay."""
    patience: int = 10
    """Epochs without a lower validation regret before training stops."""
    validation_share: float = 0.2
    """Share of the training prompts, by a hash of their ids, kept for validation."""
    test_share: float = 0.2
    """Share kept for testing where a data set brings no test prompts of its own."""
    devices: int = 1
    """Processes that train side by side (DDP), on a GPU one each. batch_size is that of all of them."""
    resume: bool = False
    """Go on from checkpoints/last.ckpt of this output folder (hydra.run.dir=FOLDER), if there is one."""

    def __post_init__(self) -> None:
        require(self.max_epochs >= 1, "trainer.max_epochs", self.max_epochs, "a number of at least 1")
        require(self.batch_size >= 1, "trainer.batch_size", self.batch_size, "a number of at least 1")
        require(0 < self.learning_rate < 1e3, "trainer.learning_rate", self.learning_rate, "a number in (0, 1000)")
        require(0 <= self.weight_decay < 1e3, "trainer.weight_decay", self.weight_decay, "a number in [0, 1000)")
        require(self.patience >= 1, "trainer.patience", self.patience, "a number of at least 1")
        require(self.devices >= 1, "trainer.devices", self.devices, "a number of at least 1")
        for name in ("validation_share", "test_share"):
            require(0 < getattr(self, name) < 1, f"trainer.{name}", getattr(self, name), "a number in (0, 1)")


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
        _one_of("evaluation.method", self.method, ("decode", "simulate"))
        rows = tuple(name for name in preset_names("policy") if name not in ("fixed", "predictor"))
        for name in self.policies:
            _one_of("evaluation.policies", name, rows)
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
    """wandb, csv or none."""
    project: str = "blockpilot"
    """W&B project."""
    mode: str | None = None
    """online, offline or disabled; None takes WANDB_MODE, else offline."""
    group: str | None = None
    """W&B group; None is the sweep's name in a multirun, else no group."""
    name: str | None = None
    """W&B run name; None lets W&B choose."""

    def __post_init__(self) -> None:
        _one_of("logger.kind", self.kind, ("wandb", "csv", "none"))
        if self.mode is not None:
            _one_of("logger.mode", self.mode, ("online", "offline", "disabled"))


@dataclass
class PolicyConfig:
    """Which policy evaluate.py compares with the standard rows, and its settings."""

    name: str = "predictor"
    """One of conf/policy: predictor, per_round (both a trained policy's folder), fixed, best_fixed, random, oracle, ema
    or confidence."""
    path: str | None = None
    """Folder of a trained policy, for predictor and per_round."""
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
        _one_of("policy.name", self.name, tuple(preset_names("policy")))
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


@dataclass
class CollectRunConfig:
    """All that ``python -m blockpilot.collect`` reads: the part every command shares."""

    model: ModelConfig
    drafter: DrafterConfig
    dataset: dict[str, DatasetConfig]
    generation: GenerationConfig = field(default_factory=GenerationConfig)
    oracle: OracleConfig = field(default_factory=OracleConfig)
    collect: CollectConfig = field(default_factory=CollectConfig)
    device: str = "auto"
    """auto (a GPU when there is one), cpu, cuda or cuda:N."""
    seed: int = 0
    """Seed of everything that is not decoding: splits' order, initial weights, bootstrap."""
    cache_dir: str = "data/cache"
    """Where caches live; relative paths start at the project."""

    def __post_init__(self) -> None:
        require(len(self.dataset) >= 1, "dataset", list(self.dataset), "at least one data set")
        check_device(self.device)
        require(0 <= self.seed < 2**32, "seed", self.seed, "a number in [0, 2**32)")


@dataclass
class ProfileConfig:
    """What the latency profile measures."""

    block_sizes: list[int] | None = None
    """Sizes to measure; null is 1 .. B + 4: autoregressive decoding, what a policy may shrink to, and the candidates
    of every oracle.radius up to 4."""
    contexts: list[int] = field(default_factory=lambda: [64, 256, 1024])
    """Prompt lengths in tokens; those the model has no positions for are left out."""
    warmup: int = 3
    """Turns of every block size before the first that counts."""
    repeats: int = 15
    """Turns that count; figures are medians over them."""

    def __post_init__(self) -> None:
        for name in ("block_sizes", "contexts"):
            values = getattr(self, name)
            fine = values is None or (len(values) > 0 and min(values) >= 1)
            require(fine, f"profile.{name}", values, "one or more numbers of at least 1")
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


@dataclass
class DrafterTrainingConfig:
    """A new drafter, what it learns from and how."""

    block_size: int = 16
    """B: positions of a block, the anchor included."""
    num_layers: int = 5
    """Layers of the drafter."""
    num_taps: int = 5
    """Target layers whose outputs it reads, spread evenly from the second to the third from last."""
    mask_token: str | None = None
    """Token that stands for a position to be drafted, one that texts do not hold; null takes the tokenizer's own."""
    initial: str = "target"
    """First weights: target (its last layers) or random."""
    temperatures: list[float] = field(default_factory=lambda: [0.0])
    """Every prompt is answered once at each of these."""
    max_new_tokens: int = 160
    """Output budget of an answer in tokens."""
    self_written: int = 0
    """Prompts the target begins to write itself, beside those of the data sets; a share of them is kept."""
    shard_size: int = 96
    """Prompts answered at once; a killed run loses at most so many answers."""
    num_anchors: int = 24
    """Blocks per text and step."""
    loss_decay: float | None = None
    """Tokens over which a place's weight in the loss falls to 1/e; null takes the straight line
    through DFlash's own 4 for B = 8 and 7 for B = 16."""
    soft_weight: float = 0.0
    """Share of the loss that is cross-entropy against the target's own distribution instead of its text."""
    occurring_only: bool = True
    """Compare with tokens that occur in the batch only, instead of the whole vocabulary; a fraction of the work."""
    max_steps: int = 2000
    """Optimizer steps."""
    batch_size: int = 8
    """Texts per step."""
    learning_rate: float = 1e-3
    """Highest AdamW step size."""
    weight_decay: float = 0.01
    """AdamW decoupled weight decay."""
    warmup_steps: int = 30
    """Steps in which the step size rises; afterwards it falls along a cosine."""
    steps_per_validation: int = 100
    """Steps between simulations of held-out texts, each of which leaves a checkpoint to go on from."""
    validation_share: float = 0.03
    """Share of the prompts, by a hash of their ids, held out for it."""
    resume: bool = False
    """Go on from checkpoints/last.ckpt of this output folder (hydra.run.dir=FOLDER), if there is one."""

    def __post_init__(self) -> None:
        key = "drafter_training"
        least = {
            "block_size": 2, "num_layers": 1, "num_taps": 1, "max_new_tokens": 2, "self_written": 0, "shard_size": 1,
            "num_anchors": 1, "max_steps": 1, "batch_size": 1, "warmup_steps": 1, "steps_per_validation": 1,
        }  # fmt: skip
        for name, low in least.items():
            require(getattr(self, name) >= low, f"{key}.{name}", getattr(self, name), f"a number of at least {low}")
        _one_of(f"{key}.initial", self.initial, ("target", "random"))
        fine = len(set(self.temperatures)) == len(self.temperatures) > 0
        fine = fine and all(0 <= t < float("inf") for t in self.temperatures)
        require(fine, f"{key}.temperatures", self.temperatures, "one or more different numbers of 0 or more")
        if self.loss_decay is None:
            self.loss_decay = max(1.0, self.block_size * 3 / 8 + 1)
        require(self.loss_decay > 0, f"{key}.loss_decay", self.loss_decay, "a number above 0, or null")
        require(0 <= self.soft_weight <= 1, f"{key}.soft_weight", self.soft_weight, "a number in [0, 1]")
        require(0 < self.learning_rate < 1e3, f"{key}.learning_rate", self.learning_rate, "a number in (0, 1000)")
        require(0 <= self.weight_decay < 1e3, f"{key}.weight_decay", self.weight_decay, "a number in [0, 1000)")
        share = self.validation_share
        require(0 < share < 1, f"{key}.validation_share", share, "a number in (0, 1)")


@dataclass
class TrainDrafterConfig:
    """All that ``python -m blockpilot.train_drafter`` reads."""

    model: ModelConfig
    dataset: dict[str, DatasetConfig]
    drafter_training: DrafterTrainingConfig = field(default_factory=DrafterTrainingConfig)
    logger: LoggerConfig = field(default_factory=LoggerConfig)
    device: str = "auto"
    """auto (a GPU when there is one), cpu, cuda or cuda:N."""
    seed: int = 0
    """Seed of first weights, order, anchors and noise."""
    answers_dir: str = "data/answers"
    """Where texts of the target live; relative paths start at the project."""

    def __post_init__(self) -> None:
        require(len(self.dataset) >= 1, "dataset", list(self.dataset), "at least one data set")
        check_device(self.device)
        require(0 <= self.seed < 2**32, "seed", self.seed, "a number in [0, 2**32)")


@dataclass
class EvaluateConfig(CollectRunConfig):
    """All that ``evaluate.py`` reads."""

    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    logger: LoggerConfig = field(default_factory=LoggerConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        _require_committed(self.oracle)


@dataclass
class TrainConfig(CollectRunConfig):
    """All that ``train.py`` reads."""

    preprocess: PreprocessConfig = field(default_factory=PreprocessConfig)
    predictor: PredictorConfig = field(default_factory=PredictorConfig)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    logger: LoggerConfig = field(default_factory=LoggerConfig)
    optimized_metric: str = "eval/regret"
    """The figure of metrics.json that a job hands to a sweeper that searches (hydra/sweeper=optuna)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.predictor.k <= self.oracle.radius or self.oracle.block_sizes is not None,
            "predictor.k",
            self.predictor.k,
            f"at most oracle.radius={self.oracle.radius}; raise oracle.radius to collect labels for more block sizes",
        )
        _require_committed(self.oracle)
        require(
            self.trainer.devices == 1 or self.evaluation.every_n_epochs == 0,
            "evaluation.every_n_epochs",
            self.evaluation.every_n_epochs,
            f"0 with trainer.devices={self.trainer.devices}: decoding beside training would be timed with it",
        )
        require(
            self.objective.name == "tau" or self.evaluation.latency_profile is not None,
            "objective",
            self.objective.name,
            "tau where evaluation.latency_profile is null; speed needs the costs of rounds",
        )
        needs = {"logits": "oracle.store_logits", "hidden": "oracle.store_hidden"}.get(self.preprocess.kind)
        if needs is not None and not getattr(self.oracle, needs.removeprefix("oracle.")):
            raise UserError(f"preprocess={self.preprocess.kind} needs {needs}=true, got false")


def _require_committed(oracle: OracleConfig) -> None:
    require(
        oracle.tau_convention == "committed",
        "oracle.tau_convention",
        oracle.tau_convention,
        "committed; reference is for python -m blockpilot.collect, to compare labels with published figures",
    )


def to_dataclass(config: DictConfig, schema: type[T]) -> T:
    """A composed Hydra config as a checked ``schema`` instance.

    Raises:
        UserError: an unknown key, a value of the wrong type, a missing value or a broken limit.
    """
    missing = sorted(OmegaConf.missing_keys(config))
    if missing:
        raise UserError(f"not set: {', '.join(missing)}; give a value to each, as in {missing[0]}=VALUE")
    try:
        merged = OmegaConf.merge(OmegaConf.structured(schema), config)
        result = OmegaConf.to_object(merged)
    except OmegaConfBaseException as error:
        key = getattr(error, "full_key", None) or "config"
        raise UserError(f"{key}: {str(error).splitlines()[0]}") from error
    assert isinstance(result, schema)
    return result


def to_plain(config: object) -> dict[str, Any]:
    """A config dataclass as nested plain containers, fit for JSON, hyper-parameters and W&B."""
    assert dataclasses.is_dataclass(config) and not isinstance(config, type)
    return dataclasses.asdict(config)


def to_yaml(config: object) -> str:
    """A config dataclass as YAML text."""
    return OmegaConf.to_yaml(OmegaConf.create(to_plain(config)))


def preset_names(group: str) -> list[str]:
    """Names of the presets in one folder of ``conf/``."""
    return sorted(path.stem for path in (CONF_DIR / group).glob("*.yaml"))


def load_preset(group: str, name: str, schema: type[T]) -> T:
    """One YAML of ``conf/`` as a dataclass.

    Raises:
        UserError: there is no such preset; the message lists those there are.
    """
    names = preset_names(group)
    require(name in names, group, name, "one of " + ", ".join(names))
    loaded = OmegaConf.load(CONF_DIR / group / f"{name}.yaml")
    assert isinstance(loaded, DictConfig)
    return to_dataclass(loaded, schema)


def project_path(path: str | os.PathLike[str]) -> Path:
    """``path`` itself if absolute or there; otherwise the same path inside the project."""
    given = Path(path).expanduser()
    return given if given.is_absolute() or given.exists() else ROOT / given
