"""Several folders that writers filled on different machines become one cache.

Knows keys and shards as files; what is in a shard matters here only as far as it is whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from blockpilot.errors import UserError
from blockpilot.oracle.audit import find_caches
from blockpilot.oracle.cache import LabelCache
from blockpilot.oracle.manifest import MANIFEST, differing_field
from blockpilot.oracle.shards import ContentDigest, DamagedShard


@dataclass
class Merged:
    """What became of one cache."""

    cache: LabelCache
    """The merged one."""
    copied: int = 0
    """Shards that came from a source."""
    kept: int = 0
    """Shards that were whole in the target."""
    missing: list[str] = field(default_factory=list)
    """Names of the shards that were whole nowhere."""
    notes: list[str] = field(default_factory=list)
    """One line for every file that was not taken though it was there."""


def merge(target: Path, sources: Sequence[Path]) -> list[Merged]:
    """Copies what ``target`` lacks from ``sources``; these are left as they are.

    A source is the folder of a cache, and ``target`` is then one too, or a folder above, and its caches then go to the
    same places below ``target``. A shard that is in several places is taken once: the target's own first, then by the
    order of the sources; one line says where another one holds other rows. Whoever is killed may start again.

    Args:
        target: new or existing.
        sources: at least one.

    Raises:
        UserError: sources differ in their key, the number of prompts or the shard size, from each other or from the
            target (nothing is copied then), or a file cannot be read or written.
    """
    places = _places(target, sources)
    opened = {place: [LabelCache.existing(folder) for folder in folders] for place, folders in places.items()}
    for place, caches in opened.items():
        there = [LabelCache.existing(place)] if (place / MANIFEST).exists() else []
        first, *others = there + caches
        for other in others:
            _refuse_other(first, other)
    _refuse_scattered(opened)
    return [_merge_one(place, caches) for place, caches in opened.items()]


def _places(target: Path, sources: Sequence[Path]) -> dict[Path, list[Path]]:
    """For every cache to be, the caches that go into it."""
    places: dict[Path, list[Path]] = {}
    kinds = {target: _kind(target)} if target.exists() else {}
    for source in sources:
        caches = find_caches(source)
        kinds[source] = _kind(source)
        odd = next((path for path, kind in kinds.items() if kind not in (None, kinds[source])), None)
        if odd is not None:
            raise UserError(
                f"{source} {kinds[source]} and {odd} {kinds[odd]}; expected the same of all, the folders of caches or "
                "folders above"
            )
        here, there = source.resolve(), target.resolve()
        if kinds[source] == _ABOVE and (here in there.parents or there in here.parents):
            raise UserError(
                f"one of {target} and {source} is inside the other; expected a target apart from its sources"
            )
        for folder in caches:
            places.setdefault(target / folder.relative_to(source), []).append(folder)
    return places


_ONE, _ABOVE = "is the folder of one cache", "holds caches"


def _kind(folder: Path) -> str | None:
    if (folder / MANIFEST).exists():
        return _ONE
    return _ABOVE if any(folder.rglob(MANIFEST)) else None


def _refuse_other(first: LabelCache, other: LabelCache) -> None:
    ours, theirs = (_settings(cache) for cache in (first, other))
    name = differing_field(ours, theirs)
    if name is not None:
        why = "their shards hold other rows" if name == "shard_size" else "their rows do not belong together"
        raise UserError(
            f"{other.folder} has {name}={theirs.get(name)!r} and {first.folder} has {name}={ours.get(name)!r}; {why}, "
            "so nothing was merged"
        )


def _settings(cache: LabelCache) -> dict[str, Any]:
    return {**cache.key.fields(), "num_rows": cache.manifest["num_rows"], "shard_size": cache.shard_size}


def _refuse_scattered(opened: dict[Path, list[LabelCache]]) -> None:
    """One cache in two places: the sources are folders of different levels."""
    seen: dict[str, LabelCache] = {}
    for caches in opened.values():
        digest = caches[0].key.digest()
        if digest in seen:
            raise UserError(
                f"{seen[digest].folder} and {caches[0].folder} have the same key but would go to different places; "
                "give folders of the same level, or the folders of the caches themselves"
            )
        seen[digest] = caches[0]


def _merge_one(place: Path, sources: Sequence[LabelCache]) -> Merged:
    first = sources[0]
    facts = {name: value for name, value in first.manifest["provenance"].items() if name != "seconds"}
    target = LabelCache(place, first.key, first.manifest["num_rows"], first.shard_size, facts)
    merged = Merged(target)
    others = [source for source in sources if source.folder.resolve() != place.resolve()]
    for shard in range(target.num_shards):
        _merge_shard(merged, shard, others)
    if not merged.missing:
        target.finish()
    return merged


def _merge_shard(merged: Merged, shard: int, sources: Sequence[LabelCache]) -> None:
    target = merged.cache
    taken, best = target, _whole(target, shard, merged.notes)
    merged.kept += best is not None
    for source in sources:
        found = _whole(source, shard, merged.notes)
        if found is None:
            continue
        if best is None:
            taken, best = source, found
            target.put(shard, lambda file, data=found.data: file.write(data))
            merged.copied += 1
        elif found.rows != best.rows:
            merged.notes.append(
                f"{source.path(shard)} holds other rows than {taken.path(shard)}, which was taken: the first in the "
                "order of target and sources is"
            )
    if best is None:
        merged.missing.append(target.path(shard).name)


@dataclass(frozen=True)
class _Whole:
    data: bytes
    """The file."""
    rows: str
    """Digest of its rows alone: seconds and device differ between writers."""


def _whole(cache: LabelCache, shard: int, notes: list[str]) -> _Whole | None:
    """A shard's file, if it is there and whole; what was checked is what is copied."""
    path, digest = cache.path(shard), ContentDigest({})
    try:
        data = path.read_bytes()
        for table in cache.open_shard(shard, data).checked():
            digest.add(table)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    except DamagedShard as error:
        notes.append(f"{path} is damaged ({error}) and was not taken")
        return None
    return _Whole(data, digest.value())
