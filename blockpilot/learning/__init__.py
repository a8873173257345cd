"""Learning which block size a prompt wants: features, predictor, losses, Lightning modules and callbacks.

What needs Lightning stays in ``learning.module``, ``.datamodule`` and ``.callbacks``: a policy in use does not.
"""

from __future__ import annotations

from blockpilot.learning.features import FeatureExtractor, Features
from blockpilot.learning.losses import cross_entropy_loss, has_rounds, loss_per_prompt, regret_loss, soft_loss
from blockpilot.learning.predictor import BlockSizePredictor

__all__ = [
    "BlockSizePredictor",
    "FeatureExtractor",
    "Features",
    "cross_entropy_loss",
    "has_rounds",
    "loss_per_prompt",
    "regret_loss",
    "soft_loss",
]
