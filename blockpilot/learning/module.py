"""The predictor as a LightningModule: losses, optimizer and the figures logged per epoch.

Knows label batches and the predictor; nothing of files, splits or decoding. Hyper-parameters are plain containers
only, so a checkpoint loads with ``weights_only=True`` and needs no class of ours to be unpickled.

Shapes: N prompts, K candidate block sizes.
"""

from __future__ import annotations

from typing import Any

import lightning
import torch
from torch import Tensor
from torchmetrics import MetricCollection

from blockpilot.config import PredictorConfig, TrainerConfig, require
from blockpilot.learning.datamodule import LabelBatch
from blockpilot.learning.features import FeatureExtractor, Features
from blockpilot.learning.losses import has_rounds, loss_per_prompt
from blockpilot.learning.predictor import BlockSizePredictor
from blockpilot.metrics import tau_per_prompt
from blockpilot.metrics.modules import (
    ChoicePooledTau,
    ChoiceRegret,
    ChoiceTau,
    HeadroomCaptured,
    TieAwareAccuracy,
)


class BlockSizeModule(lightning.LightningModule):
    """Trains a :class:`BlockSizePredictor`.

    Logs ``train/loss``, and under ``val/`` and ``test/``: ``loss``, ``regret``, ``tau``, ``tau_pooled``,
    ``accuracy`` (any tied best counts), ``headroom_captured`` and ``tau_always`` (always-B on the same prompts).

    Args:
        block_sizes: the K candidates, rising.
        always_block_size: B, the drafter's trained block size; one of the candidates.
        vocab_size: V of the target.
        hidden_size: D of the target; only ``kind="hidden"`` needs it.
        preprocess: arguments of :class:`FeatureExtractor`.
        predictor: fields of ``PredictorConfig``.
        trainer: fields of ``TrainerConfig``.

    Raises:
        UserError: B is no candidate, or a setting is outside its limits.
    """

    def __init__(
        self,
        block_sizes: list[int],
        always_block_size: int,
        vocab_size: int,
        hidden_size: int | None = None,
        preprocess: dict[str, Any] | None = None,
        predictor: dict[str, Any] | None = None,
        trainer: dict[str, Any] | None = None,
    ):
        super().__init__()
        # Runs log their whole configuration themselves; a second, partial copy would only clash with it.
        self.save_hyperparameters(logger=False)
        allowed = f"one of the candidates {list(block_sizes)}"
        require(always_block_size in block_sizes, "always_block_size", always_block_size, allowed)
        self.extractor = FeatureExtractor(**(preprocess or {}))
        self.predictor_config = PredictorConfig(**(predictor or {}))
        self.trainer_config = TrainerConfig(**(trainer or {}))
        self.always_column = list(block_sizes).index(always_block_size)
        self.predictor = BlockSizePredictor(
            self.extractor.input_size(vocab_size, hidden_size),
            block_sizes,
            sparse_input=self.extractor.is_sparse,
            depth=self.predictor_config.depth,
            width=self.predictor_config.width,
            dropout=self.predictor_config.dropout,
            residual=self.predictor_config.residual,
        )
        self.val_metrics = self._choice_metrics("val/")
        self.val_tau_always = ChoiceTau()
        self.test_metrics = self._choice_metrics("test/")
        self.test_tau_always = ChoiceTau()

    def _choice_metrics(self, prefix: str) -> MetricCollection:
        return MetricCollection(
            {
                "regret": ChoiceRegret(),
                "tau": ChoiceTau(),
                "tau_pooled": ChoicePooledTau(),
                "accuracy": TieAwareAccuracy(),
                "headroom_captured": HeadroomCaptured(self.always_column),
            },
            prefix=prefix,
            compute_groups=False,
        )

    @property
    def block_sizes(self) -> tuple[int, ...]:
        """The K candidates."""
        return self.predictor.block_sizes

    def forward(self, features: Features) -> Tensor:
        """Scores, ``[N, K]``."""
        return self.predictor(features)

    def choose(self, features: Features) -> Tensor:
        """Block sizes with the highest score, int64 ``[N]`` on the CPU."""
        return self.predictor.choose(features)

    def training_step(self, batch: LabelBatch) -> Tensor:
        """One optimizer step's loss."""
        return self._loss("train/loss", self(batch.features), batch)

    def validation_step(self, batch: LabelBatch) -> None:
        """Adds a batch to the ``val/`` figures."""
        self._evaluation_step("val/", batch, self.val_metrics, self.val_tau_always)

    def test_step(self, batch: LabelBatch) -> None:
        """Adds a batch to the ``test/`` figures."""
        self._evaluation_step("test/", batch, self.test_metrics, self.test_tau_always)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW over all parameters; fused, which needs no temporaries of the size of the first layer."""
        return torch.optim.AdamW(
            self.parameters(),
            lr=self.trainer_config.learning_rate,
            weight_decay=self.trainer_config.weight_decay,
            fused=True,
        )

    def _evaluation_step(self, prefix: str, batch: LabelBatch, metrics: MetricCollection, always: ChoiceTau) -> None:
        logits_NK = self(batch.features)
        self._loss(f"{prefix}loss", logits_NK, batch)
        choice_N = logits_NK.argmax(dim=-1)
        metrics.update(batch.committed_tokens, batch.rounds, choice_N)
        always.update(batch.committed_tokens, batch.rounds, torch.full_like(choice_N, self.always_column))
        self.log_dict(metrics, on_step=False, on_epoch=True)
        self.log(f"{prefix}tau_always", always, on_step=False, on_epoch=True)

    def _loss(self, name: str, logits_NK: Tensor, batch: LabelBatch) -> Tensor:
        """Mean loss over the batch's prompts with rounds, logged so that an epoch's value is the mean over prompts."""
        kept_N = has_rounds(batch.rounds)
        num_kept = int(kept_N.sum())
        if num_kept == 0:
            return 0 * logits_NK.sum()  # a step that changes nothing by itself, and no figure to log
        tau_NK = tau_per_prompt(batch.committed_tokens, batch.rounds)[kept_N]
        config = self.predictor_config
        loss = loss_per_prompt(config.loss, logits_NK[kept_N], tau_NK, config.soft_temperature).mean()
        self.log(name, loss, on_step=False, on_epoch=True, prog_bar=True, batch_size=num_kept)
        return loss
