"""From what Hydra says of a command line it cannot compose to one line that says what to type instead.

Knows Hydra's exceptions, and the keys and presets a command has; nothing of what a command does.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from hydra.errors import MissingConfigException, OverrideParseException

from blockpilot.config import names_of, preset_names
from blockpilot.errors import did_you_mean

ADDED = ("sweep",)
"""Groups that no command has from the start: ``+sweep=radius``."""


def explain(error: Exception, command: str, arguments: Sequence[str]) -> str:
    """One line for an exception of Hydra's composition.

    Args:
        error: what Hydra raised.
        command: the configuration it composed, as in ``conf/``.
        arguments: the command line behind the program's name.
    """
    text = " ".join(str(error).split())
    if isinstance(error, OverrideParseException):
        return (
            f"{error.override!r} cannot be read; expected KEY=VALUE (quote what the shell or Hydra takes for its own)"
        )
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        group, _, name = error.missing_cfg_file.rpartition("/")
        return _no_preset(group, name, error.options or ())
    if several := re.match(r"Ambiguous value for argument '([^=]+)=(.*?)' 1\.", text):
        key, values = several.groups()
        return f"{key}={values} is several values; add -m to run each of them, or write {key}=[{values}] for a list"
    if group := re.match(r"Could not override '([^']+)'\. No match in the defaults list", text):
        return _no_group(group[1], command, arguments)
    if key := re.match(r"Could not (?:override|delete from config\.) '([^']+)'", text):
        return _no_key(key[1], command, arguments)
    return text or type(error).__name__


def _no_preset(group: str, name: str, options: Sequence[str]) -> str:
    known = sorted(options or preset_names(group))
    close = did_you_mean(name, known, f"{group}=")
    return f"{group}={name} is not a preset (there are {', '.join(known) or 'none'}){close}"


def _no_group(group: str, command: str, arguments: Sequence[str]) -> str:
    if group in ADDED:
        return f"{group} is not a group yet; write +{group}=PRESET to add it"
    _, groups = names_of(command, _presets(arguments))
    return f"{group} is not a group of this command (there are {', '.join(groups)}){did_you_mean(group, groups)}"


def _no_key(key: str, command: str, arguments: Sequence[str]) -> str:
    keys, groups = names_of(command, _presets(arguments))
    if command != "train" and key in names_of("train", _presets(arguments))[0]:
        return f"{key} is a key of train.py, not of this command"
    place, dot, name = key.rpartition(".")
    beside = [one[len(place + dot) :] for one in (*keys, *groups) if one.rpartition(".")[0] == place]
    elsewhere = [one for one in keys if one.rpartition(".")[2] == name]
    close = (
        did_you_mean(name, beside, place + dot)
        or did_you_mean(key, elsewhere, cutoff=0.0)
        or ("" if beside else did_you_mean(key, keys))
        or (f"; {place} has {', '.join(beside)}" if beside and place else "")
    )
    return f"{key} is not a key{close}"


def _presets(arguments: Sequence[str]) -> dict[str, str]:
    """The presets among the arguments that are there, by group."""
    pairs = (one.partition("=")[::2] for one in arguments)
    return {group: name for group, name in pairs if name in preset_names(group)}
