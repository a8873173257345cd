"""The drafter as a LightningModule.

Knows text batches, the objective and the schedule; nothing of files or of how acceptance is simulated. The target's
embedding and head are used and never trained, and no checkpoint holds them.
"""

from __future__ import annotations

import math
import time
from typing import Any

import lightning
import torch
from torch import Tensor, nn

from blockpilot.drafter_training.objective import TextBatch, dflash_loss, draw_anchors
from blockpilot.models.drafter import DFlashDrafter

_LOWEST_RATE = 0.02
"""Share of the learning rate that is left at the end."""


class DrafterModule(lightning.LightningModule):
    """Trains a drafter with the DFlash objective.

    Logs ``train/loss`` and ``train/accuracy_1`` .. ``train/accuracy_{B-1}`` (share of right drafts so many places
    behind the anchor) per step.

    Args:
        drafter: the one that learns.
        embedding: the target's input embedding.
        head: the target's head.
        settings: fields of ``DrafterTrainingConfig``.
        seed: of the anchors, anew each step, so that a resumed run draws what it would have drawn.
        texts: names of what it learns from; only kept, so that a checkpoint says so.
    """

    def __init__(
        self, drafter: DFlashDrafter, embedding: nn.Module, head: nn.Linear, settings: dict[str, Any], seed: int,
        texts: list[str],
    ) -> None:  # fmt: skip
        super().__init__()
        self.save_hyperparameters({"drafter_training": settings, "seed": seed, "texts": texts})
        self.drafter = drafter
        # in a tuple they are no submodules: not in checkpoints, not in parameters()
        self._frozen = (embedding, head)
        self.settings = settings
        self.seconds = 0.0
        """Wall-clock time of all steps and validations so far, over interruptions too."""
        self._since = time.perf_counter()

    def on_fit_start(self) -> None:
        """The clock starts, or goes on."""
        self._since = time.perf_counter()

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Keeps the time that was taken."""
        self._count_seconds()
        checkpoint["seconds"] = self.seconds

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Takes it up."""
        self.seconds = checkpoint["seconds"]

    def on_fit_end(self) -> None:
        """The clock stops."""
        self._count_seconds()

    def _count_seconds(self) -> None:
        now = time.perf_counter()
        self.seconds, self._since = self.seconds + now - self._since, now

    def training_step(self, batch: TextBatch, batch_idx: int) -> Tensor:
        """The objective on anchors that depend on seed and step alone."""
        embedding, head = self._frozen
        generator = torch.Generator().manual_seed((self.hparams["seed"] * 1_000_003 + self.global_step) % 2**32)
        s = self.settings
        anchors, valid = draw_anchors(batch.prompt_lengths_R, batch.lengths_R, s["num_anchors"], generator)
        result = dflash_loss(
            self.drafter, embedding, head.weight, batch, anchors, valid, decay=s["loss_decay"],
            soft_weight=s["soft_weight"], occurring_only=s["occurring_only"],
        )  # fmt: skip
        accuracy = (result.right_S / result.counted_S.clamp(min=1)).tolist()
        self.log("train/loss", result.loss, batch_size=len(batch.lengths_R), prog_bar=True)
        names = {f"train/accuracy_{place}": value for place, value in enumerate(accuracy, start=1)}
        self.log_dict(names, batch_size=len(batch.lengths_R))
        return result.loss

    def validation_step(self, batch: TextBatch, batch_idx: int) -> None:
        """Nothing: validation simulates decoding, in a callback."""

    def configure_optimizers(self) -> Any:
        """AdamW with a linear warm-up and a cosine decay over all steps."""
        s = self.settings
        optimizer = torch.optim.AdamW(
            self.drafter.parameters(), lr=s["learning_rate"], betas=(0.9, 0.95), weight_decay=s["weight_decay"]
        )

        def rate(step: int) -> float:
            done = min(1.0, step / s["max_steps"])
            cosine = 0.5 * (1 + math.cos(math.pi * done))
            return min(1.0, (step + 1) / s["warmup_steps"]) * (_LOWEST_RATE + (1 - _LOWEST_RATE) * cosine)

        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}
