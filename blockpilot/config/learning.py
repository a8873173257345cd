"""The predictor: what it reads, what it is and how it is trained."""

from __future__ import annotations

from dataclasses import dataclass

from blockpilot.config.checks import one_of, require
from blockpilot.config.places import preset_names


@dataclass
class PreprocessConfig:
    """Which view of the prefill the predictor reads."""

    kind: str = "probs"
    """One of conf/preprocess: probs, logits, log_probs, topk, stats or hidden."""
    top_k: int = 64
    """Number of sorted probabilities for kind=topk."""

    def __post_init__(self) -> None:
        one_of("preprocess.kind", self.kind, tuple(preset_names("preprocess")))
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
        one_of("predictor.loss", self.loss, ("ce", "soft", "regret"))
        require(self.soft_temperature > 0, "predictor.soft_temperature", self.soft_temperature, "a number above 0")
        one_of("predictor.class_weights", self.class_weights, ("none", "balanced"))
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
        one_of("objective.name", self.name, ("tau", "speed"))


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
