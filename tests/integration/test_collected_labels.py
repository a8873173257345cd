"""``python -m blockpilot.collect``: many writers of one command, and what the last says of the labels."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from hydra import compose, initialize_config_dir

import blockpilot as bp
from blockpilot.config import CONF_DIR, CollectRunConfig, to_dataclass
from blockpilot.decoding import measure_latency
from blockpilot.errors import UserError
from blockpilot.oracle import LabelCache, best_sequence
from blockpilot.runs.collect import collect

from .conftest import QUICK_COLLECT, Finished

SIZES = "oracle.block_sizes=[8,15,16,17]"


@pytest.fixture
def collect_here(tmp_path: Path) -> Callable[..., Path]:
    """The command's work in this process; returns its output folder."""

    def collect_into(name: str, *overrides: str, quick: bool = True) -> Path:
        (folder := tmp_path / name).mkdir()
        given = [f"cache_dir={tmp_path / 'cache'}", *(QUICK_COLLECT if quick else []), *overrides]
        with initialize_config_dir(str(CONF_DIR), version_base="1.3"):
            collect(to_dataclass(compose("collect", given), CollectRunConfig), folder)
        return folder

    return collect_into


def test_the_last_writer_tells_what_the_labels_are_worth(
    collect_here: Callable[..., Path], run: Callable[..., Finished], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    writers = [SIZES, "collect.shard_size=4", "collect.num_shards=2"]
    with caplog.at_level(logging.INFO):
        folder = collect_here("first", *writers, "collect.shard_index=1")
    missing = "shards are missing of tiny-train: collect.shard_index=0 of 2; tiny-test: collect.shard_index=0 of 2"
    assert missing in caplog.text
    assert list(folder.iterdir()) == []

    last = run("-m", "blockpilot.collect", *writers, "collect.shard_index=0")
    assert last.code == 0, last.output
    for words in ("always-16", "best of 15..17 (k=1)", "best of all", "upper bound"):
        assert words in last.output
    values = json.loads((tmp_path / "run/labels.json").read_text())
    assert list(values) == ["tiny-train", "tiny-test", "all"]
    assert values["all"]["num_prompts"] == values["tiny-train"]["num_prompts"] + values["tiny-test"]["num_prompts"]
    assert [one["radius"] for one in values["all"]["oracles"]] == [1, None]
    assert (tmp_path / "run/locality.png").read_bytes().startswith(b"\x89PNG")


def test_candidates_without_b_have_no_gains(
    collect_here: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    few = ["dataset.tiny.train.limit=2", "dataset.tiny.test.limit=2"]
    folder = collect_here("run", "oracle.block_sizes=[8,24]", *few)
    shown = capsys.readouterr().out
    assert "best of all" in shown and "always-16" not in shown
    [one] = json.loads((folder / "labels.json").read_text())["all"]["oracles"]
    assert one["block_sizes"] == [8, 24] and one["gain"] is None
    assert (folder / "locality.png").read_bytes().startswith(b"\x89PNG")


def test_what_deciding_every_round_could_add(
    collect_here: Callable[..., Path], tmp_path: Path, caplog: pytest.LogCaptureFixture, pair: bp.Pair
) -> None:
    few = ["dataset.tiny.train.limit=4", "dataset.tiny.test.limit=4", SIZES]
    measured = measure_latency(pair, [8, 15, 16, 17], [32, 128], warmup=0, repeats=1)
    measured.save(tmp_path / "latency.json")
    with caplog.at_level(logging.INFO):
        folder = collect_here("run", "oracle.per_round=true", f"oracle.latency_profile={tmp_path}/latency.json", *few)
    assert "best size of every round (upper bound): tau " in caplog.text
    assert "best size of every round (upper bound): tokens/s by the latency profile " in caplog.text
    values = json.loads((folder / "labels.json").read_text())
    bounds = values["per_round"]
    assert bounds["tau"]["num_prompts"] == bounds["tokens/s by the latency profile"]["num_prompts"] == 8
    assert bounds["tau"]["utility"]["value"] >= values["all"]["oracles"][-1]["tau"]["value"]
    for bound in bounds.values():
        assert bound["gain_over_oracle"]["low"] >= -1e-9 and bound["gain_over_always"]["value"] >= 0
    # by hand, from the records that are stored: fewest rounds, and least seconds
    caches = [LabelCache.existing(path.parent) for path in sorted(tmp_path.rglob("manifest.json"))]
    records = [record for cache in caches for record in cache.records()]
    assert len(records) == 8
    taus, speeds = [], []
    for record in records:
        count, table = len(record.output_ids) - 1, record.acceptance_table
        assert table is not None and table.shape == (count, 4)
        taus.append(count / len(best_sequence(table, measured.block_sizes).block_sizes))
        seconds = [0.0] * (count + 1)
        for place in reversed(range(count)):
            context = len(record.prompt_ids) + place
            seconds[place] = min(
                measured.round_seconds_at(b, context) + seconds[place + int(table[place, column])]
                for column, b in enumerate(measured.block_sizes)
            )
        speeds.append(count / seconds[0])
    for name, own in (("tau", taus), ("tokens/s by the latency profile", speeds)):
        assert bounds[name]["utility"]["value"] == pytest.approx(sum(own) / len(own))
    # the rows of the cache run through a simulation as fresh records do
    found = bp.oracle.simulate(pair, records, bp.FixedPolicy(15))
    assert [one.acceptance_lengths for one in found] == [record.acceptance_lengths[15] for record in records]


def test_a_stored_profile_without_a_candidate_is_left_alone(
    collect_here: Callable[..., Path], tmp_path: Path, pair: bp.Pair
) -> None:
    measure_latency(pair, [16], [32], warmup=0, repeats=1).save(tmp_path / "latency.json")
    with pytest.raises(UserError, match="block size 8 is not in the latency profile"):
        collect_here("run", "oracle.per_round=true", f"oracle.latency_profile={tmp_path}/latency.json", SIZES)
    with pytest.raises(UserError, match=r"latency profile .* cannot be read"):
        collect_here("other", "oracle.per_round=true", f"oracle.latency_profile={tmp_path}/none.json", SIZES)


def test_labels_without_figures_are_no_error(
    collect_here: Callable[..., Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "long.jsonl").write_text(json.dumps({"id": "a", "turns": ["Count. " * 2000]}))
    data = ["dataset=jsonl", f"dataset.jsonl.train.path={tmp_path / 'long.jsonl'}"]
    folder = collect_here("run", *data, quick=False)
    assert "holds no prompt: 1 were longer than the model allows" in caplog.text
    assert list(folder.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize(("launcher", "plugin"), [("joblib", "joblib"), ("submitit_local", "submitit")])
def test_writers_of_one_command_fill_the_cache_of_one_writer(
    launcher: str, plugin: str, run: Callable[..., Finished], collect_here: Callable[..., Path], tmp_path: Path
) -> None:
    pytest.importorskip(f"hydra_plugins.hydra_{plugin}_launcher", reason="needs the extras cluster and joblib")
    shards = ["oracle.radius=1", "collect.shard_size=2", "dataset.tiny.train.limit=8", "dataset.tiny.test.limit=4",
              "generation.max_new_tokens=16"]  # fmt: skip
    done = run("-m", "blockpilot.collect", "-m", f"hydra/launcher={launcher}", *shards, "collect.num_shards=2",
               "collect.shard_index=0,5,1", f"hydra.sweep.dir={tmp_path / 'sweep'}", quick=False)  # fmt: skip
    # there is no writer 5: its job says so, the others are not lost
    assert done.code == 2 and "Traceback" not in done.output, done.output
    assert "error: job 1: collect.shard_index=5 is not allowed" in done.output
    logs = [(tmp_path / f"sweep/{job}/collect.log").read_text() for job in (0, 2)]
    lines = [re.findall(r"collecting tiny-\w+: (\d+) prompts in", text) for text in logs]
    collected = [[int(number) for number in found] for found in lines]
    assert collected == [[4, 2], [4, 2]]  # of 8 and 4 prompts: nothing twice
    assert list((tmp_path / "sweep").glob("*/locality.png"))

    collect_here("one", *shards, f"cache_dir={tmp_path / 'whole'}")
    ours, theirs = (sorted((tmp_path / name).rglob("shard-*.parquet")) for name in ("cache", "whole"))
    assert [path.name for path in ours] == [path.name for path in theirs] and len(ours) == 6
    for own, other in zip(ours, theirs, strict=True):
        assert own.parent.name == other.parent.name
        rows, expected = (pq.read_table(path).replace_schema_metadata(None) for path in (own, other))
        assert rows.equals(expected)
