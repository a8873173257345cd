"""What is labelled and how: model, drafter, prompts, generation, oracle, collection."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from blockpilot.config.checks import check_device, expand_block_sizes, one_of, require

DTYPES = ("auto", "float32", "bfloat16", "float16")


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
        one_of("model.dtype", self.dtype, DTYPES)
        one_of("model.attention", self.attention, ("sdpa", "eager", "flash_attention_2"))


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
        one_of("dataset source kind", self.kind, ("jsonl", "txt", "hub"))
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
        one_of("oracle.method", self.method, ("replay", "enumerate"))
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
        one_of("oracle.tau_convention", self.tau_convention, ("committed", "reference"))


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
