"""The predictor as a LightningModule: losses, optimizer and the figures logged per epoch.

Knows label batches and the predictor; nothing of files, splits or decoding. Hyper-parameters are plain containers
only, so a checkpoint loads with ``weights_only=True`` and needs no class of ours to be unpickled.

Shapes: N prompts, K candidate block sizes.
"""

from __future__ import annotations

from typing import Any, cast

import lightning
import torch
from torch import Tensor
from torchmetrics import MeanMetric, Metric, MetricCollection

from blockpilot.config import ObjectiveConfig, PredictorConfig, TrainerConfig, require
from blockpilot.learning.datamodule import LabelBatch
from blockpilot.learning.features import FeatureExtractor, Features
from blockpilot.learning.losses import balanced_weights, has_rounds, loss_per_prompt
from blockpilot.learning.optimizer import LazyAdamW
from blockpilot.learning.predictor import BlockSizePredictor, DenseLinear
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
    ``accuracy`` (any tied best counts), ``headroom_captured`` and ``tau_always`` (always-B on the same prompts). Where
    batches carry seconds, ``regret_speed``, ``accuracy_speed`` and ``headroom_captured_speed`` are the same in tokens
    per second. All are sums over prompts, so they do not depend on batches or on the number of processes.

    Args:
        block_sizes: the K candidates, rising.
        always_block_size: B, the drafter's trained block size; one of the candidates.
        vocab_size: V of the target.
        hidden_size: D of the target; only ``kind="hidden"`` needs it.
        objective: utility to learn: ``tau``, or ``speed`` (batches need seconds).
        preprocess: arguments of :class:`FeatureExtractor`.
        predictor: fields of ``PredictorConfig``.
        trainer: fields of ``TrainerConfig``.
        seed: of dropout, anew each step, so that a resumed run drops what it would have dropped.
        labels: names of the label caches and of costs; only kept, so that a checkpoint says what it learned from.

    Raises:
        UserError: B is no candidate, or a setting is outside its limits.
    """

    class_weights: Tensor
    """float32 ``[K]``; 1 unless ``predictor.class_weights`` is ``balanced``."""

    def __init__(
        self,
        block_sizes: list[int],
        always_block_size: int,
        vocab_size: int,
        hidden_size: int | None = None,
        objective: str = "tau",
        preprocess: dict[str, Any] | None = None,
        predictor: dict[str, Any] | None = None,
        trainer: dict[str, Any] | None = None,
        seed: int = 0,
        labels: list[str] | None = None,
    ):
        super().__init__()
        # Runs log their whole configuration themselves; a second, partial copy would only clash with it.
        self.save_hyperparameters(logger=False)
        allowed = f"one of the candidates {list(block_sizes)}"
        require(always_block_size in block_sizes, "always_block_size", always_block_size, allowed)
        self.objective = ObjectiveConfig(objective).name
        self.extractor = FeatureExtractor(**(preprocess or {}))
        self.predictor_config = PredictorConfig(**(predictor or {}))
        self.trainer_config = TrainerConfig(**(trainer or {}))
        self.seed = seed
        self.always_column = list(block_sizes).index(always_block_size)
        self.predictor = BlockSizePredictor(
            self.extractor.input_size(vocab_size, hidden_size),
            block_sizes,
            sparse_input=self.extractor.is_sparse,
            depth=self.predictor_config.depth,
            width=self.predictor_config.width,
            dropout=self.predictor_config.dropout,
            residual=self.predictor_config.residual,
            always_block_size=always_block_size,
            min_gain=self.predictor_config.min_gain,
        )
        self.register_buffer("class_weights", torch.ones(len(block_sizes)))
        self.train_loss = MeanMetric()
        self.figures = torch.nn.ModuleDict({stage: _Figures(self.always_column) for stage in ("val", "test")})

    @property
    def block_sizes(self) -> tuple[int, ...]:
        """The K candidates."""
        return self.predictor.block_sizes

    def forward(self, features: Features) -> Tensor:
        """Scores, ``[N, K]``."""
        return self.predictor(features)

    def choose(self, features: Features) -> Tensor:
        """Chosen block sizes, int64 ``[N]`` on the CPU."""
        return self.predictor.choose(features)

    def on_fit_start(self) -> None:
        """Takes from the training prompts what decision, loss and first layer need to know: gains, weights, scale."""
        batch = self.trainer.datamodule.batch("train").to(self.device)  # type: ignore[attr-defined]
        utility_MK = batch.utility(self.objective)[has_rounds(batch.rounds)]
        self.predictor.decision.learn_gains(utility_MK)
        if self.predictor_config.standardize and isinstance(self.predictor.first, DenseLinear):
            self.predictor.first.standardize(batch.features.values)
        if self.predictor_config.class_weights == "balanced":
            self.class_weights.copy_(balanced_weights(utility_MK))

    def calibrate(self, batch: LabelBatch) -> None:
        """Sets the decision's temperature by validation prompts; to be called on what training kept."""
        batch = batch.to(self.device)
        kept_N = has_rounds(batch.rounds)
        scores_NK, utility_NK = self.predictor.scores(batch.features), batch.utility(self.objective)
        self.predictor.decision.calibrate(scores_NK[kept_N], utility_NK[kept_N])

    def on_train_batch_start(self, batch: LabelBatch, batch_idx: int) -> None:
        """Seeds dropout by step and process."""
        torch.manual_seed((self.seed * 1_000_003 + self.global_step) * 1_009 + self.global_rank)

    def training_step(self, batch: LabelBatch) -> Tensor:
        """One optimizer step's loss: the mean over the prompts with rounds of all processes' shares of the batch."""
        losses_M = self._losses(self(batch.features), batch)
        total = torch.tensor(float(len(losses_M)), device=self.device)
        self.train_loss.update(losses_M.detach(), torch.ones_like(losses_M))
        self.log("train/loss", self.train_loss, on_step=False, on_epoch=True, prog_bar=True)
        if torch.distributed.is_initialized():
            # gradients are averaged over processes, whose shares need not be equal
            torch.distributed.all_reduce(total)
            total /= torch.distributed.get_world_size()
        return losses_M.sum() / total.clamp_min(1e-9)

    def validation_step(self, batch: LabelBatch) -> None:
        """Adds a batch to the ``val/`` figures."""
        self._evaluation_step("val", batch)

    def test_step(self, batch: LabelBatch) -> None:
        """Adds a batch to the ``test/`` figures."""
        self._evaluation_step("test", batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW over all parameters; of a sparse first layer, a step touches the rows of the batch's tokens."""
        return LazyAdamW(
            self.parameters(),
            lr=self.trainer_config.learning_rate,
            weight_decay=self.trainer_config.weight_decay,
        )

    def _evaluation_step(self, stage: str, batch: LabelBatch) -> None:
        scores_NK = self(batch.features)
        figures = cast(_Figures, self.figures[stage])
        figures.update(self._losses(scores_NK, batch), batch, self.predictor.decision(scores_NK))
        for name, metric in figures.logged(batch).items():
            self.log(f"{stage}/{name}", metric, on_step=False, on_epoch=True, prog_bar=name == "loss")

    def _losses(self, scores_NK: Tensor, batch: LabelBatch) -> Tensor:
        """``[M]``: losses of the prompts with rounds."""
        kept_N = has_rounds(batch.rounds)
        config = self.predictor_config
        weights_K = self.class_weights if config.class_weights != "none" else None
        utility_MK = batch.utility(self.objective)[kept_N]
        return loss_per_prompt(config.loss, scores_NK[kept_N], utility_MK, config.soft_temperature, weights_K)


class _Figures(torch.nn.Module):
    """The figures of one stage, by the name they are logged under."""

    def __init__(self, always_column: int) -> None:
        super().__init__()
        self.always_column = always_column
        self.loss, self.tau_always = MeanMetric(), ChoiceTau()
        by_cost = {
            "regret": ChoiceRegret(),
            "accuracy": TieAwareAccuracy(),
            "headroom_captured": HeadroomCaptured(always_column),
        }
        self.tokens = MetricCollection({"tau": ChoiceTau(), "tau_pooled": ChoicePooledTau()}, compute_groups=False)
        self.by_rounds = MetricCollection(by_cost, compute_groups=False)
        # the same formulas: tokens over seconds instead of over rounds
        self.by_seconds = self.by_rounds.clone()

    def update(self, losses_M: Tensor, batch: LabelBatch, choice_N: Tensor) -> None:
        self.loss.update(losses_M, torch.ones_like(losses_M))
        self.tau_always.update(batch.committed_tokens, batch.rounds, torch.full_like(choice_N, self.always_column))
        self.tokens.update(batch.committed_tokens, batch.rounds, choice_N)
        self.by_rounds.update(batch.committed_tokens, batch.rounds, choice_N)
        if batch.seconds is not None:
            self.by_seconds.update(batch.committed_tokens, batch.seconds, choice_N)

    def logged(self, batch: LabelBatch) -> dict[str, Metric]:
        """Metrics by name; those in seconds where the batch has them."""
        metrics: dict[str, Metric] = {"loss": self.loss, "tau_always": self.tau_always}
        metrics |= {name: cast(Metric, one) for group in (self.tokens, self.by_rounds) for name, one in group.items()}
        if batch.seconds is not None:
            metrics |= {f"{name}_speed": cast(Metric, one) for name, one in self.by_seconds.items()}
        return metrics
