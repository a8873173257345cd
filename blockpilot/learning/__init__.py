"""Learning which block size a prompt wants: features, predictor, losses, Lightning modules and callbacks."""

from __future__ import annotations

from blockpilot.learning.callbacks import DecodingEvaluation, early_stopping_and_checkpoint, evaluating
from blockpilot.learning.datamodule import LabelBatch, LabelDataModule, LabelDataset, hash_fraction, split_table
from blockpilot.learning.features import FeatureExtractor, Features
from blockpilot.learning.losses import cross_entropy_loss, has_rounds, loss_per_prompt, regret_loss, soft_loss
from blockpilot.learning.module import BlockSizeModule
from blockpilot.learning.predictor import BlockSizePredictor

__all__ = [
    "BlockSizeModule",
    "BlockSizePredictor",
    "DecodingEvaluation",
    "FeatureExtractor",
    "Features",
    "LabelBatch",
    "LabelDataModule",
    "LabelDataset",
    "cross_entropy_loss",
    "early_stopping_and_checkpoint",
    "evaluating",
    "has_rounds",
    "hash_fraction",
    "loss_per_prompt",
    "regret_loss",
    "soft_loss",
    "split_table",
]
