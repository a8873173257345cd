"""How far a long step is: a bar on a terminal, a few log lines elsewhere.

Knows Rich, logging and Lightning's hooks; nothing of what is being done.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import lightning
from lightning.pytorch.callbacks import ProgressBar
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

log = logging.getLogger(__name__)

Advance = Callable[..., None]
"""``advance(count, note="")``: so much more is done; ``note`` is shown beside it until the next."""
FIRST_LINE_SECONDS = 60.0
"""Off a terminal nothing is said of a step before."""


@contextmanager
def progress_bar(title: str, total: int, unit: str = "prompts", where: Path | None = None) -> Iterator[Advance]:
    """Shows a step of ``total`` units, its rate and the time left, while the block runs; then one line says it is done.

    On a terminal that is a bar. Elsewhere it is a log line after 1, 2, 4, 8 ... minutes, so that a short step leaves
    none and a day's leaves eleven.

    Args:
        title: what is being done.
        total: units in all.
        unit: their name, in the plural.
        where: what is being written.

    Yields:
        A function to be called as ``advance(count, note="")`` whenever ``count`` more are done.
    """
    began, done = time.monotonic(), 0
    show = _bar if Console().is_terminal else _lines
    with show(title, total, unit) as move:

        def advance(count: int, note: str = "") -> None:
            nonlocal done
            done += count
            move(count, note)

        yield advance
    took = duration(time.monotonic() - began)
    log.info("%s: %d %s in %s%s", title, done, unit, took, "" if where is None else f"; written to {where}")


def duration(seconds: float) -> str:
    """Seconds as people say them: ``8 s``, ``3 min 20 s``, ``2 h 5 min``."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


class TrainingProgress(ProgressBar):
    """The progress of a whole fit, in epochs or in optimizer steps, with the newest figures beside it.

    Args:
        title: what is being trained.
        total: units in all; a fit may stop earlier.
        unit: ``epochs`` or ``steps``.
        figures: keys of logged figures to show, once they are there.
    """

    def __init__(self, title: str, total: int, unit: str, figures: tuple[str, ...]) -> None:
        super().__init__()
        if unit not in ("epochs", "steps"):
            raise ValueError(f"unit={unit!r}; expected epochs or steps")
        self._title, self._total, self._unit, self._figures = title, total, unit, figures
        self._open: ExitStack | None = None
        self._advance: Advance = lambda count, note="": None
        self._done = 0

    def disable(self) -> None:
        """Lightning calls this in all processes but the first."""
        self._total = 0

    def on_train_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Shows it, as far as an earlier job has come that this one goes on from."""
        if self._total and self._open is None:
            self._open, self._done = ExitStack(), 0
            self._advance = self._open.enter_context(progress_bar(self._title, self._total, self._unit))
            self._move_to(trainer, trainer.current_epoch)

    def on_train_batch_end(self, trainer: lightning.Trainer, *args: Any, **kwargs: Any) -> None:
        """One more step."""
        self._move_to(trainer, trainer.current_epoch)

    def on_train_epoch_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """One more epoch."""
        self._move_to(trainer, trainer.current_epoch + 1)

    def on_train_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Takes it away."""
        self._close()

    def on_exception(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, exception: BaseException
    ) -> None:
        """Takes it away before anything is said of the error."""
        self._close(exception)

    def _move_to(self, trainer: lightning.Trainer, epochs: int) -> None:
        done = epochs if self._unit == "epochs" else trainer.global_step
        known = {name: trainer.callback_metrics[name] for name in self._figures if name in trainer.callback_metrics}
        self._advance(done - self._done, note="  ".join(f"{name} {float(value):.4g}" for name, value in known.items()))
        self._done = done

    def _close(self, error: BaseException | None = None) -> None:
        if self._open is not None:
            self._open.__exit__(type(error) if error else None, error, error.__traceback__ if error else None)
            self._open, self._advance = None, lambda count, note="": None


@contextmanager
def _lines(title: str, total: int, unit: str) -> Iterator[Advance]:
    """Log lines at times that lie ever further apart."""
    began, done, following = time.monotonic(), 0, FIRST_LINE_SECONDS

    def advance(count: int, note: str = "") -> None:
        nonlocal done, following
        done += count
        seconds = time.monotonic() - began
        if seconds < following or not 0 < done < total:
            return
        while following <= seconds:
            following *= 2
        left = duration(seconds / done * (total - done))
        rest = f" ({note})" if note else ""
        log.info("%s: %d of %d %s, %s, %s left%s", title, done, total, unit, rate(done / seconds), left, rest)

    yield advance


@contextmanager
def _bar(title: str, total: int, unit: str) -> Iterator[Advance]:
    """A bar; log lines appear above it, since their handlers write where Rich has put itself for the time."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn(unit),
        _Rate(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
    )
    console = sys.stdout
    with Progress(*columns, transient=True) as progress:
        moved = [
            handler
            for handler in logging.getLogger().handlers
            if isinstance(handler, logging.StreamHandler) and handler.stream is console
        ]
        for handler in moved:
            handler.setStream(sys.stdout)
        task = progress.add_task(title, total=total, note="")
        try:
            yield lambda count, note="": progress.update(task, advance=count, note=note)
        finally:
            for handler in moved:
                handler.setStream(console)


def rate(per_second: float) -> str:
    """``3.2/s``, or seconds of each where they are more than one."""
    if per_second <= 0:
        return "-"
    return f"{per_second:.1f}/s" if per_second >= 1 else f"{1 / per_second:.1f} s each"


class _Rate(ProgressColumn):
    """Units per second of the last half minute."""

    def render(self, task: Task) -> Text:
        return Text(rate(task.speed or 0.0), style="progress.data.speed")
