"""The final table and figures of a run in Weights & Biases.

Knows Lightning loggers; with any other logger, or none, the files in the run's folder are all there is.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence

from lightning.pytorch.loggers import Logger, WandbLogger
from lightning.pytorch.utilities import rank_zero_only
from matplotlib.figure import Figure
from PIL import Image

from blockpilot.metrics import PolicySummary
from blockpilot.report.table import summary_rows


@rank_zero_only
def log_summary(
    logger: Logger | None, summaries: Sequence[PolicySummary], figures: Mapping[str, Figure] | None = None
) -> None:
    """Logs ``policies`` (a table with the keys of ``summary_rows``) and one ``figures/<caption>`` image per figure.

    Does nothing unless ``logger`` is a ``WandbLogger``. The caller still owns the run and finishes it.
    """
    if not isinstance(logger, WandbLogger):
        return
    import wandb  # imported late: takes a second, and most loggers do not need it

    rows = summary_rows(summaries)
    table = wandb.Table(columns=list(rows[0]), data=[list(row.values()) for row in rows])
    images = {f"figures/{caption}": wandb.Image(_pixels(figure)) for caption, figure in (figures or {}).items()}
    logger.experiment.log({"policies": table, **images})


def _pixels(figure: Figure) -> Image.Image:
    """A figure as an image on white: W&B shows it on a page of its own colour."""
    png = io.BytesIO()
    figure.savefig(png, format="png", dpi=160, facecolor="white")
    return Image.open(png)
