"""``python -m blockpilot.report sweep``: figures of a folder, and the one line it answers to what it cannot read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from matplotlib.patches import Rectangle

from blockpilot.metrics import summarize_sweep
from blockpilot.report import locality_figure, sweep_values
from blockpilot.report.__main__ import main
from blockpilot.report.sweep import choice_lines, runs, sizes_table
from blockpilot.report.sweep_files import read_sweep

SAMPLE = Path(__file__).resolve().parents[4] / "shared/data/blockpilot_official/gsm8k_T0"

FILES = {
    "3.json": {"a": 3.0, "b": 6, "c": 3.0},
    "4.json": {"b": 4.0, "a": 4, "c": 3.0},  # another order
    "5.json": {"a": 5.0, "b": 5.0, "c": 2.0},
}


def write(folder: Path, files: Mapping[str, object]) -> Path:
    folder.mkdir(exist_ok=True)
    for name, content in files.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (folder / name).write_text(text, encoding="utf-8")
    return folder


def test_a_folder_is_told_in_full(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    choices = {"1.json": {"a": 5, "b": 4, "c": 3}, "notes.json": "not read", "readme.txt": "nor this"}
    folder, png = write(tmp_path / "sweep", FILES | choices), tmp_path / "figure.png"
    assert main(["sweep", str(folder), "--trained", "4", "--png", str(png)]) == 0
    shown = capsys.readouterr().out
    assert "3 prompts, block sizes 3..5, trained block size B = 4" in shown
    lines = [" ".join(line.replace("│", " ").split()) for line in shown.splitlines()]
    assert any(line.startswith("3 (best) 4.000 [3.000, 6.000] +9.09% [") and line.endswith(" 1.5") for line in lines)
    assert any(line.startswith("4 (B) 3.667 [3.000, 4.000] - - 0.5") for line in lines)
    assert any(line.startswith("best of all (k=1) 4.667 [") and line.endswith(" upper bound 1 16.7%") for line in lines)
    assert "tau 4.000" in shown and "regret 11.11% [0.00%, 33.33%], a best size on 2 of 3 prompts" in shown
    assert "against always-4: +9.09% [" in shown and "not distinguishable at 95%" in shown
    assert png.read_bytes().startswith(b"\x89PNG")


def test_choices_that_are_the_labels_are_called_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "sweep", FILES | {"1.json": {"a": 5, "b": 3, "c": 4}})
    assert main(["sweep", str(tmp_path / "sweep"), "--trained=4"]) == 0
    assert "no choice is wrong" in capsys.readouterr().out


def test_prompts_without_rounds_are_left_out_and_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = {name: content | {"d": float("nan")} for name, content in FILES.items()}
    assert main(["sweep", str(write(tmp_path / "sweep", files)), "--trained=4"]) == 0
    assert "3 prompts (1 without rounds left out)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({}, ["has no file {block size}.json"]),
        ({"notes.json": {"a": 1}}, ["has no file {block size}.json"]),
        ({"1.json": {"a": 4}}, ["has no file {block size}.json"]),
        (FILES | {"4.json": "{"}, ["4.json cannot be read as JSON"]),
        (FILES | {"4.json": [1, 2]}, ["4.json holds [1, 2]", "expected numbers by prompt"]),
        (FILES | {"4.json": {}}, ["4.json holds {}"]),
        (FILES | {"4.json": {"a": 4, "b": "4", "c": 3}}, ["4.json: prompt 'b' is '4'"]),
        (FILES | {"4.json": {"a": 4, "b": 0.5, "c": 3}}, ["4.json: prompt 'b' is 0.5", "1 or more"]),
        (FILES | {"4.json": {"a": 4, "b": True, "c": 3}}, ["4.json: prompt 'b' is True"]),
        (FILES | {"4.json": '{"a": 4, "b": Infinity, "c": 3}'}, ["4.json: prompt 'b' is inf"]),
        (FILES | {"4.json": '{"a": 4, "b": NaN, "c": 3}'}, ["4.json: prompt 'b' is NaN"]),
        (FILES | {"4.json": {"a": 4, "b": 4}}, ["4.json lacks prompt 'c', which 3.json has"]),
        (FILES | {"4.json": {"a": 4, "b": 4, "c": 3, "d": 1}}, ["4.json has prompt 'd', which 3.json lacks"]),
        (FILES | {"1.json": {"a": 4, "b": 4}}, ["1.json lacks prompt 'c'"]),
        (FILES | {"1.json": {"a": 4, "b": 6, "c": 3}}, ["1.json: prompt 'b' has block size 6", "no file", "[3, 4, 5]"]),
        (FILES | {"1.json": {"a": 4, "b": [4], "c": 3}}, ["1.json: prompt 'b' has block size [4]"]),
        ({"3.json": FILES["3.json"]}, ["--trained 4", "has no 4.json", "3"]),
    ],
)
def test_a_mistake_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], files: dict[str, object], words: list[str]
) -> None:
    assert main(["sweep", str(write(tmp_path / "sweep", files)), "--trained=4"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 2 and err.startswith("error: ") and "(HYDRA_FULL_ERROR=1 " in err
    for word in words:
        assert word in err


def test_no_such_folder_and_no_such_place_for_a_figure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sweep", str(tmp_path / "nowhere")]) == 2
    assert "nowhere is not a folder" in capsys.readouterr().err
    folder = write(tmp_path / "sweep", FILES)
    assert main(["sweep", str(folder), "--trained=4", "--png", str(tmp_path / "no/figure.png")]) == 2
    assert "figure.png cannot be written: No such file" in capsys.readouterr().err


def test_the_published_sample(capsys: pytest.CaptureFixture[str]) -> None:
    """Figures that others computed from the same files."""
    if not SAMPLE.is_dir():
        pytest.skip("the authors' published sweep is not beside this checkout")
    sweep = read_sweep(SAMPLE)
    summary = summarize_sweep(sweep.tau, sweep.block_sizes, 16, sweep.chosen)
    tau = {one.block_size: round(one.tau.value, 3) for one in summary.fixed}
    assert summary.num_prompts == 32
    assert (tau[16], tau[17], summary.best_fixed) == (6.509, 6.528, 17)
    best = {one.radius: one for one in summary.oracles}
    assert best[2].block_sizes == (14, 15, 16, 17, 18)
    assert (round(best[2].tau.value, 3), best[2].tied_prompts) == (6.735, 6)
    assert best[3].radius == 3 and best[None].block_sizes == sweep.block_sizes
    # the published choices are the labels over {14 .. 18}
    assert summary.choice is not None and summary.choice.candidates == best[2].block_sizes
    assert (summary.choice.regret.value, summary.choice.best_prompts) == (0, 32)
    assert main(["sweep", str(SAMPLE)]) == 0
    assert "6.735 [" in capsys.readouterr().out


def test_the_figure_holds_its_numbers(tmp_path: Path) -> None:
    sweep = read_sweep(write(tmp_path / "sweep", FILES | {"32.json": {"a": 1.0, "b": 1.0, "c": 1.0}}))
    for trained in (4, 16):  # 16 has no labels: it is marked all the same
        curve, shares = locality_figure(summarize_sweep(sweep.tau, sweep.block_sizes, trained)).axes
        bars = {
            bar.get_x() + bar.get_width() / 2: bar.get_height() for bar in shares.patches if isinstance(bar, Rectangle)
        }
        assert bars == pytest.approx({3: 0.5, 4: 0.5 / 3, 5: 1 / 3, 32: 0})
        line = next(one for one in curve.lines if one.get_label() == "same for all prompts")
        assert list(line.get_ydata()) == pytest.approx([4, 11 / 3, 4, 1])  # type: ignore[arg-type]
        for axes in (curve, shares):
            assert [trained, trained] in [list(one.get_xdata()) for one in axes.lines]  # type: ignore[arg-type]
        assert shares.get_xlabel() and shares.get_ylabel() and curve.get_ylabel()


def test_values_are_plain_json(tmp_path: Path) -> None:
    sweep = read_sweep(write(tmp_path / "sweep", FILES))
    values = sweep_values(summarize_sweep(sweep.tau, sweep.block_sizes, 4))
    assert json.loads(json.dumps(values, allow_nan=False)) == values
    assert values["fixed"][1]["gain"] is None and values["oracles"][0]["tau"]["value"] == pytest.approx(14 / 3)


def test_sizes_in_short() -> None:
    assert runs([4, 8, 13, 14, 15, 31, 32]) == "4, 8, 13..15, 31, 32"


def test_many_radii_are_counted_in_few_columns() -> None:
    summary = summarize_sweep(torch.rand(4, 31, dtype=torch.float64) + 1, range(2, 33), 16)
    assert len(summary.oracles) == 15
    headings = [str(column.header) for column in sizes_table(summary).columns]
    assert headings[4:] == ["15..17", "14..18", "13..19", "all"]
    assert choice_lines(summary, "1.json") == []
