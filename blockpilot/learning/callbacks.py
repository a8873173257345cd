"""Trainer callbacks: real decoding during and after training, early stopping, checkpoints.

Know when to act and where figures go; what decoding is, the callable they are given knows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.seed import isolate_rng
from torch import nn

from blockpilot.learning.module import BlockSizeModule


def monitored(objective: str) -> str:
    """The figure that training minimises over its epochs: regret in the objective's utility."""
    return "val/regret" if objective == "tau" else f"val/regret_{objective}"


class DecodingEvaluation(Callback):
    """Decodes held-out prompts with the predictor as it stands and logs the figures.

    Args:
        evaluate: takes the module, in evaluation mode and without gradients, and returns figures by the key they
            are logged under, such as ``eval/tau`` and ``eval/speedup``.
        every_n_epochs: decode after every so many validation epochs; 0 only at the end.
        at_end: decode when training ends, unless these very weights have been decoded just before. Those are the
            last weights; a run that goes on to evaluate its best checkpoint switches this off.

    Attributes:
        results: figures of each evaluation, by the number of optimizer steps taken.
    """

    def __init__(
        self,
        evaluate: Callable[[BlockSizeModule], Mapping[str, float]],
        every_n_epochs: int = 0,
        at_end: bool = True,
    ):
        super().__init__()
        self._evaluate = evaluate
        self.every_n_epochs = every_n_epochs
        self.at_end = at_end
        self.results: dict[int, dict[str, float]] = {}

    def on_fit_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Forgets the figures of an earlier fit."""
        self.results = {}

    def on_validation_epoch_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Decodes if this epoch is due; the figures join the epoch's other ``val/`` figures."""
        fitting = trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking
        if fitting and self.every_n_epochs > 0 and (trainer.current_epoch + 1) % self.every_n_epochs == 0:
            pl_module.log_dict(self._run(trainer, pl_module))

    def on_train_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Decodes with the final weights, while the module is still on its device (``on_fit_end`` is too late)."""
        if self.at_end and trainer.global_step not in self.results:
            figures = self._run(trainer, pl_module)
            last_step = max(trainer.global_step - 1, 0)  # Lightning counts from 0: where this epoch's val/ figures are
            for logger in trainer.loggers:  # the module's own log() is closed by now
                logger.log_metrics(figures, step=last_step)

    def _run(self, trainer: lightning.Trainer, module: lightning.LightningModule) -> dict[str, float]:
        assert isinstance(module, BlockSizeModule)
        with evaluating(module), isolate_rng():  # watching a training run must not change it
            figures = {key: float(value) for key, value in self._evaluate(module).items()}
        self.results[trainer.global_step] = figures
        return figures


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients; afterwards every submodule is back in the mode it was in."""
    modes = {part: part.training for part in module.modules()}
    module.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for part, training in modes.items():
            part.training = training


class MovableCheckpoint(ModelCheckpoint):
    """A ``ModelCheckpoint`` that knows its files again after their folder was moved or copied."""

    @property
    def state_key(self) -> str:
        """That of the class it extends."""
        return super().state_key.replace(type(self).__qualname__, ModelCheckpoint.__qualname__, 1)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes the paths of an earlier folder for those of this one; Lightning would forget the best score."""
        assert self.dirpath is not None
        folder = Path(self.dirpath)

        def here(path: str) -> str:
            return str(folder / Path(path).name) if path else path

        moved = {name: here(state_dict[name]) for name in ("best_model_path", "kth_best_model_path")}
        best = {here(path): score for path, score in state_dict["best_k_models"].items()}
        super().load_state_dict({**state_dict, **moved, "best_k_models": best, "dirpath": self.dirpath})


LAST = "last.ckpt"
"""Checkpoint of the last epoch, from which training can be resumed."""


def early_stopping_and_checkpoints(patience: int, dirpath: str | Path, figure: str) -> list[Callback]:
    """Stops when ``figure`` has not fallen for ``patience`` epochs; keeps the epoch where it was lowest, and the last.

    The best is ``<dirpath>/epoch-<number>.ckpt``, weights only: a metric's name in it would make folders of its "/" and
    break Hydra overrides with its "=". The last, ``<dirpath>/last.ckpt``, holds all that a resumed run needs.
    """
    best = MovableCheckpoint(
        dirpath=dirpath,
        filename="epoch-{epoch:03d}",
        monitor=figure,
        mode="min",
        save_top_k=1,
        save_weights_only=True,
        auto_insert_metric_name=False,
    )
    # after the best one, whose score it records
    last = MovableCheckpoint(dirpath=dirpath, filename=LAST.removesuffix(".ckpt"), enable_version_counter=False)
    return [EarlyStopping(monitor=figure, mode="min", patience=patience), best, last]
