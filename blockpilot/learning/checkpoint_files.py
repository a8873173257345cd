"""Training checkpoints as files that appear whole or not at all.

Knows how Lightning writes a checkpoint; nothing of what is in it or of when it is written.
"""

from __future__ import annotations

import io
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.io import TorchCheckpointIO

from blockpilot.oracle.files import remove_leftovers, write_whole


class WholeCheckpoints(TorchCheckpointIO):
    """Writes a checkpoint beside its place and moves it there.

    Lightning's own writes to the folder of temporary files. Where that is on another file system the checkpoint is
    copied over the last good one, so a full disk, or a kill at that moment, would leave nothing to go on from.
    """

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Mapping[str, Any] | None = None
    ) -> None:
        """Stores ``checkpoint``; until it is whole, what was at ``path`` stays.

        Raises:
            UserError: it cannot be written.
        """
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        remove_leftovers(path.parent)
        content = io.BytesIO()
        torch.save(checkpoint, content)
        write_whole(path, lambda file: file.write(content.getbuffer()), key="hydra.run.dir")
