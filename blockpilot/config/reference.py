"""Every key of every command with type, default and meaning, as Markdown: ``python -m blockpilot.config.reference``.

Types and defaults are those of the dataclasses, meanings the texts under their fields, which only the source has.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import types
import typing
from collections.abc import Iterator
from functools import cache

from blockpilot.config.collection import CollectRunConfig
from blockpilot.config.commands import EvaluateConfig, TrainConfig
from blockpilot.config.drafter_training import TrainDrafterConfig
from blockpilot.config.profiling import ProfileRunConfig

COMMANDS: dict[str, type] = {
    "python train.py": TrainConfig,
    "python evaluate.py": EvaluateConfig,
    "python -m blockpilot.collect": CollectRunConfig,
    "python -m blockpilot.profile": ProfileRunConfig,
    "python -m blockpilot.train_drafter": TrainDrafterConfig,
}
"""What each command reads."""


@dataclasses.dataclass(frozen=True)
class Key:
    """One key of the configuration."""

    name: str
    """With dots, as on the command line; NAME stands for the name of a data set."""
    type: str
    default: str
    meaning: str
    commands: tuple[str, ...]
    """Commands that have it."""


def keys() -> list[Key]:
    """All keys of all commands, each once, in the order of the dataclasses."""
    found: dict[str, Key] = {}
    for command, schema in COMMANDS.items():
        for key in _keys_of(schema, "", command):
            known = found.get(key.name)
            if known is None:
                found[key.name] = key
            elif known.meaning == key.meaning:
                found[key.name] = dataclasses.replace(known, commands=(*known.commands, command))
            else:  # seed: the same word for what a command draws
                found[f"{key.name} ({command})"] = key
    return list(found.values())


def markdown() -> str:
    """The reference: a section per part of the configuration, a row per key."""
    sections: dict[str, list[Key]] = {}
    for key in keys():
        sections.setdefault(key.name.partition(".")[0] if "." in key.name else "", []).append(key)
    top = sections.pop("", [])
    parts = [_section("Without a group", top, with_commands=True)]
    parts += [_section(f"`{name}`", rows, with_commands=False) for name, rows in sections.items()]
    return "\n\n".join(parts) + "\n"


def _section(title: str, rows: list[Key], with_commands: bool) -> str:
    used = dict.fromkeys(command for row in rows for command in row.commands)
    lines = [f"## {title}", ""]
    if not with_commands:
        lines += [f"Of {', '.join(f'`{command}`' for command in used)}.", ""]
    lines += ["| key | type | default | meaning |", "| --- | --- | --- | --- |"]
    for row in rows:
        of = f" Of {', '.join(f'`{command}`' for command in row.commands)}." if with_commands else ""
        cells = (f"`{row.name}`", f"`{row.type}`", f"`{row.default}`" if row.default else "", row.meaning + of)
        lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return "\n".join(lines)


def _keys_of(schema: type, before: str, command: str) -> Iterator[Key]:
    hints, meanings = typing.get_type_hints(schema), _meanings(schema)
    for field in dataclasses.fields(schema):
        name, hint = f"{before}{field.name}", hints[field.name]
        parts = [one for one in (hint, *typing.get_args(hint)) if dataclasses.is_dataclass(one)]
        if not parts:
            yield Key(name, _type(hint), _default(field), meanings.get(field.name, ""), (command,))
            continue
        if field.name in meanings:
            yield Key(name, "keys below", _default(field), meanings[field.name], (command,))
        inside = f"{name}.NAME." if typing.get_origin(hint) is dict else f"{name}."
        yield from _keys_of(typing.cast(type, parts[0]), inside, command)


def _type(hint: object) -> str:
    if isinstance(hint, types.UnionType):
        return " or ".join(_type(one) for one in typing.get_args(hint))
    if hint is type(None):
        return "null"
    return getattr(hint, "__name__", str(hint)) if not typing.get_args(hint) else str(hint).replace("typing.", "")


def _default(field: dataclasses.Field[typing.Any]) -> str:
    """As YAML has it; empty where a preset has to say."""
    value = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
    if value is dataclasses.MISSING or dataclasses.is_dataclass(value):
        return ""
    return value if isinstance(value, str) else json.dumps(value)


@cache
def _meanings(schema: type) -> dict[str, str]:
    """The text under each field of a dataclass, those of its bases included, on one line."""
    found: dict[str, str] = {}
    for owner in reversed([one for one in schema.__mro__ if dataclasses.is_dataclass(one)]):
        (body,) = ast.parse(inspect.getsource(owner)).body
        assert isinstance(body, ast.ClassDef)
        for field, text in zip(body.body, body.body[1:], strict=False):
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(text, ast.Expr):
                found[field.target.id] = " ".join(str(ast.literal_eval(text.value)).split()).replace("``", "`")
    return found


if __name__ == "__main__":
    print(markdown(), end="")
