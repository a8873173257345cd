"""A drafter of one's own."""

from __future__ import annotations

from dataclasses import dataclass, field

from blockpilot.config.checks import LARGEST_BLOCK, check_device, require
from blockpilot.config.collection import DatasetConfig, ModelConfig
from blockpilot.config.evaluation import LoggerConfig

FIRST_WEIGHTS = ("target", "random")
"""What a new drafter may start from; anything else names a drafter."""


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
    """First weights: target (its last layers), random, or a trained drafter to go on from (folder, Hub id or pkg://)."""
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
        size = self.block_size
        require(size <= LARGEST_BLOCK, f"{key}.block_size", size, f"a number of at most {LARGEST_BLOCK}")
        fine = len(set(self.temperatures)) == len(self.temperatures) > 0
        fine = fine and all(0 <= t < float("inf") for t in self.temperatures)
        require(fine, f"{key}.temperatures", self.temperatures, "one or more different numbers of 0 or more")
        if self.loss_decay is None:
            self.loss_decay = max(1.0, self.block_size * 3 / 8 + 1)
        # far below this the weight of every place but the first is 0 in fp32
        require(self.loss_decay >= 0.01, f"{key}.loss_decay", self.loss_decay, "a number of at least 0.01, or null")
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
