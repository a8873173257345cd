"""What a second run takes from the cache of a first: nothing where content would differ, all of it otherwise.

Both through the real configuration: what ``python -m blockpilot.collect OVERRIDES`` would do.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir
from safetensors.torch import load_file, save_file

from blockpilot.config import CONF_DIR, CollectRunConfig, to_dataclass
from blockpilot.models import assemble_pair
from blockpilot.oracle import LabelCache
from blockpilot.runs.collect import collect
from blockpilot.runs.labels import Labels, read_sources

from .conftest import ROOT

TINY = ROOT / "blockpilot/models/tiny"
BASE = ["dataset.tiny.train.limit=6", "dataset.tiny.test=null", "generation.max_new_tokens=6", "oracle.radius=1",
        "collect.shard_size=3", "model.target=${oc.env:PAIR}/target", "drafter.path=${oc.env:PAIR}/drafter",
        "model.tokenizer=${oc.env:PAIR}/tokenizer"]  # fmt: skip


def configured(cache_dir: Path, overrides: Sequence[str]) -> CollectRunConfig:
    with initialize_config_dir(str(CONF_DIR), version_base="1.3"):
        return to_dataclass(compose("collect", [*overrides, f"cache_dir={cache_dir}"]), CollectRunConfig)


def the_cache(config: CollectRunConfig) -> LabelCache:
    pair = assemble_pair(config.model, config.drafter, device=config.device)
    [cache] = Labels(config, pair, read_sources(config)).caches
    return cache


@pytest.fixture(autouse=True)
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the embedded pair that may be changed in place."""
    monkeypatch.setenv("PAIR", str(tmp_path / "pair"))
    return Path(shutil.copytree(TINY, tmp_path / "pair"))


@pytest.fixture(scope="session")
def first(tmp_path_factory: pytest.TempPathFactory) -> LabelCache:
    """A complete cache; not to be changed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PAIR", str(TINY))
        config = configured(tmp_path_factory.mktemp("first"), BASE)
        collect(config, tmp_path_factory.mktemp("output"))
        cache = the_cache(config)
    assert cache.num_shards == 2 and cache.missing() == []
    return cache


def root_of(cache: LabelCache) -> Path:
    return cache.folder.parents[1]


def state(folder: Path) -> dict[str, tuple[int, int]]:
    """Inode and time of every file and folder."""
    return {str(path): (path.stat().st_ino, path.stat().st_mtime_ns) for path in [folder, *folder.rglob("*")]}


# ---- content

Change = Callable[[Path], object]


def nudge(part: str) -> Change:
    """The least change of one weight."""

    def change(folder: Path) -> None:
        file = folder / part / "model.safetensors"
        weights = load_file(file)
        flat = next(iter(weights.values())).view(-1)
        flat[0] = torch.nextafter(flat[0], torch.tensor(9.0, dtype=flat.dtype))
        save_file(weights, file, metadata={"format": "pt"})

    return change


def edit(path: str, change: Callable[[dict], object]) -> Change:
    """A change of a JSON file."""

    def apply(folder: Path) -> None:
        content = json.loads((folder / path).read_text())
        change(content)
        (folder / path).write_text(json.dumps(content))

    return apply


def template(folder: Path) -> None:
    path = folder / "tokenizer/chat_template.jinja"
    path.write_text(path.read_text() + " ")


# what is changed: the override or the file, and the fields of the key that must say so
CONTENT: dict[str, tuple[str | Change, set[str]]] = {
    "temperature": ("generation.temperature=0.7", {"temperature"}),
    "a low temperature": ("generation.temperature=1e-3", {"temperature"}),
    "top_p": ("generation.top_p=0.9", {"top_p"}),
    "top_k": ("generation.top_k=5", {"top_k"}),
    "budget": ("generation.max_new_tokens=7", {"max_new_tokens"}),
    "decoding's seed": ("generation.seed=1", {"seed"}),
    "radius": ("oracle.radius=2", {"block_sizes"}),
    "block sizes": ("oracle.block_sizes=[15,16]", {"block_sizes"}),
    "tail mass": ("oracle.tail_mass=0", {"tail_mass"}),
    "a little tail mass": ("oracle.tail_mass=1.1e-3", {"tail_mass"}),
    "dense logits": ("oracle.store_logits=true", {"store_logits"}),
    "hidden states": ("oracle.store_hidden=true", {"store_hidden"}),
    "per-round tables": ("oracle.per_round=true", {"per_round"}),
    "tau's convention": ("oracle.tau_convention=reference", {"tau_convention"}),
    "thinking": ("model.thinking=true", {"pair.thinking"}),
    "dtype": ("model.dtype=bfloat16", {"pair.dtype", "pair.target", "pair.drafter"}),
    "text around the prompts": ("dataset.tiny.train.template='Please: {prompt}'", {"prompts"}),
    "number of prompts": ("dataset.tiny.train.limit=5", {"prompts"}),
    "other prompts": ("dataset.tiny.train.path=data/prompts/tiny_test.jsonl", {"prompts"}),
    "a weight of the target": (nudge("target"), {"pair.target"}),
    "a weight of the drafter": (nudge("drafter"), {"pair.drafter"}),
    "the drafter's layers": (
        edit("drafter/config.json", lambda c: c["dflash_config"]["target_layer_ids"].reverse()), {"pair.drafter"}),
    "the drafter's B": (edit("drafter/config.json", lambda c: c.update(block_size=15)),
                        {"pair.drafter", "block_sizes"}),
    "the target's epsilon": (edit("target/config.json", lambda c: c.update(rms_norm_eps=2e-6)), {"pair.target"}),
    "stop tokens": (edit("target/generation_config.json", lambda c: c.update(eos_token_id=[2, 9])), {"stop_token_ids"}),
    "chat template": (template, {"pair.chat_template"}),
    "a merge": (edit("tokenizer/tokenizer.json", lambda c: c["model"]["merges"].pop()), {"pair.tokenizer"}),
    "spelling": (edit("tokenizer/tokenizer.json", lambda c: c.update(normalizer={"type": "Lowercase"})),
                 {"pair.tokenizer"}),
}  # fmt: skip


@pytest.mark.parametrize("what", CONTENT)
def test_other_content_is_never_taken(first: LabelCache, folders: Path, tmp_path: Path, what: str) -> None:
    change, fields = CONTENT[what]
    cache_dir = Path(shutil.copytree(root_of(first), tmp_path / "cache"))
    before = state(cache_dir / first.folder.relative_to(root_of(first)))
    if not isinstance(change, str):
        change(folders)
    second = the_cache(configured(cache_dir, [*BASE, *([change] if isinstance(change, str) else [])]))
    assert second.folder.relative_to(cache_dir) != first.folder.relative_to(root_of(first))
    assert second.missing() == list(range(second.num_shards))
    there, wanted = first.key.fields(), second.key.fields()
    assert {name for name in there.keys() | wanted.keys() if there.get(name) != wanted.get(name)} == fields
    assert before.items() <= state(cache_dir).items()


# ---- everything else

SAME: dict[str, list[str]] = {
    "nothing": [],
    "batch size": ["collect.batch_size=2"],
    "shard size": ["collect.shard_size=256"],
    "writers": ["collect.num_shards=3", "collect.shard_index=1"],
    "memory": ["oracle.max_batch_tokens=64"],
    "method": ["oracle.method=enumerate"],
    "device": ["device=cpu"],
    "attention": ["model.attention=eager"],
    "training's seed": ["seed=5"],
    "output folder": ["hydra.run.dir=elsewhere", "hydra.job.name=other"],
    "candidates by hand": ["oracle.radius=3", "oracle.block_sizes=[17,15,16]"],
    "a range of candidates": ["oracle.block_sizes=[15,...,17]"],
    "the same numbers": ["generation.temperature=0", "generation.top_p=1", "oracle.tail_mass=0.001"],
    "the tokenizer of the package": ["model.tokenizer=pkg://tiny/tokenizer"],
}


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures of the labels come behind what is looked at here, and take longer."""
    monkeypatch.setattr("blockpilot.runs.collect.write_labels", lambda *given: None)


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("what", SAME)
def test_what_changes_no_content_reuses_all(first: LabelCache, tmp_path: Path, what: str) -> None:
    before = state(root_of(first))
    config = configured(root_of(first), [*BASE, *SAME[what]])
    collect(config, tmp_path)
    assert state(root_of(first)) == before


@pytest.mark.usefixtures("undrawn")
def test_the_order_of_overrides_changes_nothing(first: LabelCache, tmp_path: Path) -> None:
    before = state(root_of(first))
    for overrides in (BASE[::-1], [*BASE[3:], *BASE[:3]]):
        config = configured(root_of(first), overrides)
        collect(config, tmp_path)
    assert state(root_of(first)) == before


@pytest.mark.usefixtures("undrawn")
def test_a_cache_that_was_moved_is_reused(first: LabelCache, tmp_path: Path) -> None:
    moved = Path(shutil.copytree(root_of(first), tmp_path / "moved"))
    before = state(moved)
    config = configured(moved, BASE)
    collect(config, tmp_path)
    assert state(moved) == before
