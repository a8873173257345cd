"""What a cache says of itself: the key of what made it, and the manifest.json that holds it.

Knows names, values and versions; nothing of shards.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from blockpilot.errors import UserError
from blockpilot.oracle.files import write_whole

MANIFEST = "manifest.json"
SCHEMA_VERSION = 2


@dataclass(frozen=True)
class CacheKey:
    """Everything that changes a cache's content, and nothing else.

    Device, batch size, number of writers and the method (replay and enumeration agree) are not here.
    """

    pair: Mapping[str, str]
    """Identity of target, drafter, dtype, tokenizer, chat template and thinking switch."""
    prompts: str
    """Digest of the prompt rows, in order."""
    block_sizes: tuple[int, ...]
    vocab_size: int
    max_new_tokens: int
    temperature: float
    top_p: float
    top_k: int
    seed: int
    stop_token_ids: tuple[int, ...]
    tail_mass: float
    store_logits: bool
    store_hidden: bool
    tau_convention: str
    per_round: bool = False
    schema_version: int = SCHEMA_VERSION

    def fields(self) -> dict[str, Any]:
        """Flat plain values; the pair's are named ``pair.target`` and so on."""
        values = asdict(self)
        pair = {f"pair.{name}": value for name, value in sorted(values.pop("pair").items())}
        return json.loads(json.dumps(pair | values))

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> CacheKey:
        """The key whose :meth:`fields` these are.

        Raises:
            ValueError: a field is missing, unknown or of another kind.
        """
        pair = {name.removeprefix("pair."): value for name, value in fields.items() if name.startswith("pair.")}
        rest = {name: value for name, value in fields.items() if not name.startswith("pair.")}
        kinds = {"int": int, "float": (int, float), "bool": bool, "str": str, "tuple[int, ...]": list}
        known = {field.name: kinds[str(field.type)] for field in dataclasses.fields(cls) if field.name != "pair"}
        odd = sorted(known.keys() ^ rest.keys()) + [n for n, kind in known.items() if not isinstance(rest.get(n), kind)]
        if odd:
            raise ValueError(f"key field {odd[0]} is missing, unknown or of a wrong kind")
        values: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in rest.items()
        }
        return cls(pair=pair, **values)

    def digest(self) -> str:
        """Digest of all fields."""
        return content_digest(self.fields())

    def folder(self, root: Path, pair_name: str, source: str) -> Path:
        """``<root>/<pair>-<digest of all but the prompts>/<source>-<digest of the prompts>``."""
        settings = {name: value for name, value in self.fields().items() if name != "prompts"}
        return root / f"{pair_name}-{content_digest(settings)[:12]}" / f"{source}-{self.prompts[:12]}"


def prompts_digest(rows: Iterable[object]) -> str:
    """Digest of prompt rows (dataclasses), in order."""
    digest = hashlib.sha256()
    for row in rows:
        digest.update(json.dumps(asdict(row), sort_keys=True).encode() + b"\n")  # type: ignore[call-overload]
    return digest.hexdigest()


def read_manifest(folder: Path, schema_version: int = SCHEMA_VERSION) -> dict[str, Any]:
    """What is in the manifest of a cache.

    Returns:
        ``key``, ``num_rows``, ``shard_size``, ``provenance`` and, once the cache is complete, ``skipped_too_long``.

    Raises:
        UserError: it cannot be read, or the cache has another schema version.
    """
    path = folder / MANIFEST
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        version = content["key"]["schema_version"]
        if version == schema_version:
            return _checked(content)
    except OSError as error:
        raise UserError(f"cache_dir: cache manifest {path} cannot be read: {error.strerror}") from None
    except (ValueError, LookupError, TypeError) as error:
        raise _damaged(path, error) from None
    raise UserError(
        f"cache {folder} has schema_version={version!r}, this version of blockpilot reads and writes "
        f"schema_version={schema_version!r}; collect again (that goes to another folder) and remove this one"
    )


def _checked(content: dict[str, Any]) -> dict[str, Any]:
    kinds = {"key": dict, "provenance": dict, "num_rows": int, "shard_size": int}
    wrong = [name for name, kind in kinds.items() if not isinstance(content.get(name), kind)]
    wrong = wrong or [name for name, least in (("num_rows", 0), ("shard_size", 1)) if content[name] < least]
    if wrong:
        raise ValueError(f"{wrong[0]} is missing or wrong")
    return content


def read_key(folder: Path) -> CacheKey:
    """The key of the cache in ``folder``.

    Raises:
        UserError: as :func:`read_manifest`.
    """
    fields = read_manifest(folder)["key"]
    try:
        return CacheKey.from_fields(fields)
    except ValueError as error:
        raise _damaged(folder / MANIFEST, error) from None


def _damaged(path: Path, error: Exception) -> UserError:
    reason = f"{error} is missing" if isinstance(error, KeyError) else error
    return UserError(
        f"cache manifest {path} cannot be read ({reason}); remove this file alone, and the same command with the "
        "same collect.shard_size makes it anew and keeps the shards beside it"
    )


def differing_field(there: Mapping[str, Any], wanted: Mapping[str, Any]) -> str | None:
    """The first field, by name, in which two keys differ."""
    return next((n for n in sorted(there.keys() | wanted.keys()) if there.get(n) != wanted.get(n)), None)


def require_same(folder: Path, there: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Raises ``UserError`` naming the first field in which a cache is not what a run asks for, and both values."""
    name = differing_field(there, wanted)
    if name is not None:
        raise UserError(
            f"cache {folder} was collected with {name}={there.get(name)!r}, this run asks for "
            f"{name}={wanted.get(name)!r}; use another cache_dir or remove that folder"
        )


def write_manifest(folder: Path, content: Mapping[str, Any], *, keep_existing: bool = False) -> None:
    """Writes a manifest; with ``keep_existing`` one that is there by then stays.

    Raises:
        UserError: it cannot be written.
    """
    text = json.dumps(content, indent=2).encode()
    write_whole(folder / MANIFEST, lambda file: file.write(text), keep_existing=keep_existing)


def content_digest(content: object) -> str:
    """Digest of plain values, whatever the order of their keys."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
