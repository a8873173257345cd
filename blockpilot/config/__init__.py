"""Typed configuration: every key a run reads, its type, its meaning and its limits.

Values live in ``conf/*.yaml``; this package holds their types and the checks. It is the only one that touches OmegaConf
or Hydra's composition: below it, code sees plain dataclasses and never changes them.
"""

from blockpilot.config.checks import LARGEST_BLOCK, check_device, expand_block_sizes, require
from blockpilot.config.collection import (
    DTYPES,
    CollectConfig,
    CollectRunConfig,
    DatasetConfig,
    DrafterConfig,
    GenerationConfig,
    ModelConfig,
    OracleConfig,
    PromptSource,
)
from blockpilot.config.commands import EvaluateConfig, TrainConfig
from blockpilot.config.compose import compose_command, load_preset, names_of, to_dataclass, to_plain, to_yaml
from blockpilot.config.drafter_training import FIRST_WEIGHTS, DrafterTrainingConfig, TrainDrafterConfig
from blockpilot.config.evaluation import MOST_TAG_LETTERS, EvaluationConfig, LoggerConfig, PolicyConfig
from blockpilot.config.learning import ObjectiveConfig, PredictorConfig, PreprocessConfig, TrainerConfig
from blockpilot.config.places import CONF_DIR, LATENCY_DIR, MODELS_DIR, OUTPUTS_DIR, ROOT, preset_names, project_path
from blockpilot.config.profiling import ProfileConfig, ProfileRunConfig

__all__ = [
    "CONF_DIR",
    "DTYPES",
    "FIRST_WEIGHTS",
    "LARGEST_BLOCK",
    "LATENCY_DIR",
    "MODELS_DIR",
    "MOST_TAG_LETTERS",
    "OUTPUTS_DIR",
    "ROOT",
    "CollectConfig",
    "CollectRunConfig",
    "DatasetConfig",
    "DrafterConfig",
    "DrafterTrainingConfig",
    "EvaluateConfig",
    "EvaluationConfig",
    "GenerationConfig",
    "LoggerConfig",
    "ModelConfig",
    "ObjectiveConfig",
    "OracleConfig",
    "PolicyConfig",
    "PredictorConfig",
    "PreprocessConfig",
    "ProfileConfig",
    "ProfileRunConfig",
    "PromptSource",
    "TrainConfig",
    "TrainDrafterConfig",
    "TrainerConfig",
    "check_device",
    "compose_command",
    "expand_block_sizes",
    "load_preset",
    "names_of",
    "preset_names",
    "project_path",
    "require",
    "to_dataclass",
    "to_plain",
    "to_yaml",
]
