"""Reads back the file that W&B leaves of a run, ``run-<id>.wandb``: records of its protocol in LevelDB's log format."""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from wandb.proto import wandb_internal_pb2

BLOCK, HEADER = 32768, struct.Struct("<IHB")
FULL, LAST = 1, 4


def records(path: Path) -> Iterator[Any]:
    """All records of a file, whose checksums hold."""
    content = path.read_bytes()
    assert content[:4] == b":W&B"
    place, parts = 7, b""
    while place < len(content):
        if BLOCK - place % BLOCK < HEADER.size:
            place += BLOCK - place % BLOCK
            continue
        checksum, length, kind = HEADER.unpack_from(content, place)
        place += HEADER.size
        part = content[place : place + length]
        assert len(part) == length and zlib.crc32(bytes([kind]) + part) == checksum
        place, parts = place + length, parts + part
        if kind in (FULL, LAST):
            record = wandb_internal_pb2.Record()  # type: ignore[attr-defined]  # made when it is imported
            record.ParseFromString(parts)
            yield record
            parts = b""


@dataclass
class LoggedRun:
    """What a run's file holds."""

    run: Any = None
    config: dict[str, Any] = field(default_factory=dict)
    history: list[dict[str, Any]] = field(default_factory=list)
    summary: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, Any] = field(default_factory=dict)
    artifacts: dict[str, Any] = field(default_factory=dict)
    exit_code: int | None = None
    folder: Path = Path()
    """Files of the run."""

    def table(self, key: str) -> dict[str, Any]:
        """Columns and data of a table."""
        (row,) = [row[key] for row in self.history if key in row]
        return json.loads((self.folder / row["path"]).read_text(encoding="utf-8"))

    def metadata(self, name: str) -> dict[str, Any]:
        """Of an artifact."""
        return json.loads(self.artifacts[name].metadata)


def read_run(folder: Path) -> LoggedRun:
    """The one W&B run of an output folder."""
    (path,) = (folder / "wandb").glob("offline-run-*/*.wandb")
    found = LoggedRun(folder=path.parent / "files")
    for record in records(path):
        kind = record.WhichOneof("record_type")
        content = getattr(record, kind)
        if kind == "run":
            found.run = content
        if kind in ("config", "summary"):
            _put(getattr(found, kind), content.update)
        if kind == "history":
            found.history.append(_put({}, content.item))
        if kind == "metric":
            found.metrics[content.name or content.glob_name] = content
        if kind == "artifact":
            found.artifacts[content.name] = content
        if kind == "exit":
            found.exit_code = content.exit_code
    return found


def _put(values: dict[str, Any], items: Iterable[Any]) -> dict[str, Any]:
    """Values by key; parts of one come by nested keys."""
    for item in items:
        keys = list(item.nested_key) or [item.key]
        inner = values
        for key in keys[:-1]:
            inner = inner.setdefault(key, {})
        inner[keys[-1]] = json.loads(item.value_json)
    return values
