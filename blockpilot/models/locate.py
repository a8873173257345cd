"""Finds the folder of a checkpoint: a local folder, one inside the package, or a Hub snapshot.

Knows paths and the Hub client; nothing of what the files hold. Without a network it fails in seconds.
"""

from __future__ import annotations

import re
from pathlib import Path

from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, RepositoryNotFoundError

from blockpilot.config import project_path
from blockpilot.errors import UserError

PACKAGE_PREFIX = "pkg://"
_MODELS = Path(__file__).resolve().parent
_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "merges.txt"]
_CONNECT_SECONDS = 5


def locate(source: str, *, key: str, revision: str | None = None) -> Path:
    """Folder with the files of ``source``.

    Args:
        source: a local folder, ``pkg://<folder>`` for one that ships in this package, or a Hub id.
        key: the configuration key to name in errors, such as ``model.target``.
        revision: Hub revision; ignored for folders.

    Raises:
        UserError: it is nowhere; the message says where was looked and how to point to a local folder.
    """
    if source.startswith(PACKAGE_PREFIX):
        folder = _MODELS / source.removeprefix(PACKAGE_PREFIX)
        if not folder.is_dir():
            raise UserError(f"{key}={source!r}: the package has no folder {source.removeprefix(PACKAGE_PREFIX)!r}")
        return folder
    folder = project_path(source)
    if folder.is_dir():
        return folder
    try:
        return Path(snapshot_download(source, revision=revision, allow_patterns=_FILES, local_files_only=True))
    except HFValidationError:
        raise UserError(f"{key}={source!r}: there is no such local folder, and it is not a Hub id") from None
    except (LocalEntryNotFoundError, OSError):
        return _download(source, key=key, revision=revision)


def _download(source: str, *, key: str, revision: str | None) -> Path:
    try:
        # asks first, with a short limit: the download itself would retry for minutes without a network
        HfApi().model_info(source, revision=revision, timeout=_CONNECT_SECONDS)
        return Path(snapshot_download(source, revision=revision, allow_patterns=_FILES))
    except RepositoryNotFoundError:
        reason = "the Hub has no such model, or it needs a login"
    except HfHubHTTPError as error:
        reason = f"the Hub answered: {str(error).splitlines()[0]}"
    except Exception as error:  # the client raises the errors of its HTTP library when there is no network
        reason = f"the Hub cannot be reached ({type(error).__name__})"
    raise UserError(
        f"{key}={source!r} could not be loaded: it is not a local folder, not in the Hub's local cache, and {reason}; "
        f"to use a local copy set {key}=/path/to/folder"
    ) from None


def hub_commit(folder: Path) -> str | None:
    """Commit of a folder in the Hub's local cache (``.../models--<id>/snapshots/<commit>``), else None.

    A user's own folder may be called ``snapshots`` too, and what lies in it may change under its name.
    """
    of_the_hub = folder.parent.name == "snapshots" and folder.parents[1].name.startswith("models--")
    return folder.name if of_the_hub and re.fullmatch("[0-9a-f]{40}", folder.name) else None
