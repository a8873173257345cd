"""Training in several processes: who is first, and what has to be put back afterwards.

Lightning starts the other processes by running this command again, so each of them comes through the same story; only
the first collects, decodes, logs and writes. Knows processes; nothing of what they train.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode

from blockpilot.errors import UserError

_RANK = "LOCAL_RANK"
_LEFT_BEHIND = ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK", _RANK, "WORLD_SIZE")
"""What Lightning's launcher puts into the environment, where the next job of this process would find it."""
_LOST = re.compile(r"gloo|nccl|connection (reset|closed|refused)", re.IGNORECASE)
"""In what a backend says when another process is gone."""


def is_first() -> bool:
    """Whether this is the process the user started."""
    return os.environ.get(_RANK, "0") == "0"


@contextmanager
def side_by_side(devices: int) -> Iterator[None]:
    """Around training in so many processes: afterwards this process is on its own again.

    Raises:
        UserError: several processes in a multirun, whose command cannot be run again for one of its jobs; or one of
            them ended early.
    """
    if devices > 1 and HydraConfig.initialized() and HydraConfig.get().mode == RunMode.MULTIRUN:
        raise UserError(f"trainer.devices={devices} is not allowed in a multirun; expected 1, or one run at a time")
    before = {name: os.environ.get(name) for name in _LEFT_BEHIND}
    try:
        yield
    except RuntimeError as error:
        if devices > 1 and _LOST.search(str(error)):
            raise UserError(
                f"trainer.devices={devices}: another process ended before training did (killed, or out of memory); "
                "trainer.resume=true with the same hydra.run.dir goes on from the last epoch"
            ) from error
        raise
    finally:
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        if before[_RANK] is None:
            for name, value in before.items():
                os.environ.pop(name, None) if value is None else os.environ.update({name: value})
