"""A checkpoint is there whole, and the one before it until then."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from blockpilot.errors import UserError
from blockpilot.learning.checkpoint_files import WholeCheckpoints


def test_a_checkpoint_that_does_not_fit_leaves_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files, path = WholeCheckpoints(), tmp_path / "checkpoints/last.ckpt"
    files.save_checkpoint({"step": 1, "weights": torch.ones(5)}, path)

    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(UserError) as caught:
            files.save_checkpoint({"step": 2}, path)
    assert str(caught.value).startswith(f"hydra.run.dir: {path} cannot be written: No space left")
    assert files.load_checkpoint(path, weights_only=True)["step"] == 1
    assert list(path.parent.iterdir()) == [path]
    files.save_checkpoint({"step": 3}, path)
    assert files.load_checkpoint(path, weights_only=True)["step"] == 3


def test_what_a_killed_writer_left_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    killed = (
        "import os, signal, sys; from pathlib import Path; from blockpilot.oracle.files import write_whole\n"
        "write_whole(Path(sys.argv[1]), lambda f: (f.write(b'half'), f.flush(), os.kill(os.getpid(), signal.SIGKILL)))"
    )
    done = subprocess.run([sys.executable, "-c", killed, str(path)], capture_output=True, timeout=120)
    assert done.returncode == -9 and len(list(tmp_path.iterdir())) == 1, done.stderr
    WholeCheckpoints().save_checkpoint({"step": 1}, path)
    assert list(tmp_path.iterdir()) == [path]
