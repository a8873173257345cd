"""What ``python -m blockpilot.collect`` says of its labels once they are whole."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

from blockpilot.config import CONF_DIR, CollectRunConfig, to_dataclass
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


def test_labels_without_figures_are_no_error(
    collect_here: Callable[..., Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "long.jsonl").write_text(json.dumps({"id": "a", "turns": ["Count. " * 2000]}))
    data = ["dataset=jsonl", f"dataset.jsonl.train.path={tmp_path / 'long.jsonl'}"]
    folder = collect_here("run", *data, quick=False)
    assert "holds no prompt: 1 were longer than the model allows" in caplog.text
    assert list(folder.iterdir()) == []
