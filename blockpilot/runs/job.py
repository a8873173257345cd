"""What every job does first: seeds, and libraries that talk less."""

from __future__ import annotations

import logging
import warnings

import lightning
import transformers


def start_job(seed: int) -> None:
    """Seeds Python, NumPy and torch anew for this job, whatever an earlier job of the process did.

    Notes of libraries that no user of this project can act on are left out.
    """
    lightning.seed_everything(seed, workers=True, verbose=False)
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    logging.getLogger("lightning.fabric").setLevel(logging.WARNING)
    transformers.utils.logging.disable_progress_bar()
    for message in (".*does not have many workers.*", ".*isinstance.treespec, LeafSpec.*", ".*Checkpoint directory.*"):
        warnings.filterwarnings("ignore", message=message)
