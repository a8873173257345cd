"""All that ``train.py`` and ``evaluate.py`` read."""

from __future__ import annotations

from dataclasses import dataclass, field

from blockpilot.config.checks import require
from blockpilot.config.collection import CollectRunConfig, OracleConfig
from blockpilot.config.evaluation import EvaluationConfig, LoggerConfig, PolicyConfig
from blockpilot.config.learning import ObjectiveConfig, PredictorConfig, PreprocessConfig, TrainerConfig
from blockpilot.errors import UserError


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
