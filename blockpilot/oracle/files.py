"""Files that appear whole or not at all, however their writer ends, and the pieces that killed writers leave.

Knows names and the file system; nothing of what the files hold.
"""

from __future__ import annotations

import glob
import os
import platform
import secrets
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from blockpilot.errors import UserError

# processes of two containers may share host name and number, and so may a killed one and the one that follows it
_THIS_PROCESS = secrets.token_hex(4)


def write_whole(
    path: Path, write: Callable[[BinaryIO], object], *, keep_existing: bool = False, key: str = "cache_dir"
) -> None:
    """Makes a file of a cache: beside its place, flushed to disk, then moved there.

    Args:
        path: its place.
        write: told the open file.
        keep_existing: whether a file that is there by then (another writer was faster) stays.
        key: configuration key of the folder, named in errors.

    Raises:
        UserError: it cannot be written; the message names the file and the reason. No piece of it is left.
    """
    partial = path.with_name(f".{path.name}.{platform.node()}.{os.getpid()}.{_THIS_PROCESS}")
    try:
        try:
            with partial.open("wb") as file:
                write(file)
                file.flush()
                os.fsync(file.fileno())
            if keep_existing:
                with suppress(FileExistsError):
                    os.link(partial, path)
            else:
                os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)
        _sync_folder(path.parent)
    except OSError as error:
        raise UserError(
            f"{key}: {path} cannot be written: {error.strerror or error}; what was stored before it is kept, and "
            "the same command goes on from there"
        ) from None


def remove_leftovers(folder: Path) -> None:
    """Removes the pieces of :func:`write_whole` in ``folder`` whose writers, of this machine, are gone."""
    for piece in folder.glob(f".*.{glob.escape(platform.node())}.*"):
        *_, number, process = piece.name.split(".")
        if number.isdigit() and not _alive(int(number), process):
            with suppress(OSError):  # another one removed it, or may and this one may not
                piece.unlink()


def _alive(number: int, process: str) -> bool:
    """Whether a process of this machine is running."""
    if number == os.getpid():
        return process == _THIS_PROCESS
    try:
        os.kill(number, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
