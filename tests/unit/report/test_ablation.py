"""``python -m blockpilot.report ablation``: a multirun's files as a table, a figure and numbers."""

from __future__ import annotations

import csv
import json
import math
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml
from matplotlib.axes import Axes

from blockpilot.report.__main__ import main
from blockpilot.report.ablation import (
    ablation_csv,
    ablation_lines,
    ablation_markdown,
    ablation_table,
    ablation_values,
    gather,
)
from blockpilot.report.ablation_files import Job, read_multirun
from blockpilot.report.plots import ablation_figure

T2 = 4.302653  # t for three seeds
ALWAYS = {"test/tau_always": 6.0, "test/regret_always": 0.03}


def write_job(
    folder: Path, number: int, overrides: Sequence[str], figures: object | None, seed: int = 0, test: object = "file"
) -> None:
    job = folder / str(number)
    (job / ".hydra").mkdir(parents=True)
    (job / ".hydra/overrides.yaml").write_text(yaml.safe_dump(list(overrides)))
    (job / "config.yaml").write_text(
        yaml.safe_dump({"seed": seed, "dataset": {"toy": {"train": {"kind": "txt"}, "test": test}}})
    )
    if figures is not None:
        text = figures if isinstance(figures, str) else json.dumps(figures)
        (job / "metrics.json").write_text(text)


@pytest.fixture
def multirun(tmp_path: Path) -> Path:
    """Three widths; 16 and 64 with three seeds each, 8 with one that is finished."""
    folder = tmp_path / "sweep"
    tau = {"64": (6.1, 6.2, 6.3), "16": (5.9, 6.0, 6.1)}
    for width_index, (width, values) in enumerate(tau.items()):
        for seed, value in enumerate(values):
            figures = {
                **ALWAYS,
                "test/tau": value,
                "test/regret": 0.01 * (seed + 1),
                "test/accuracy": 0.5,
                # undefined for one seed
                "test/headroom_captured": None if seed == 2 else 0.2 + 0.2 * seed,
                "eval/tau": value + 1,
                "policies": [{"policy": "always-16"}],
            }
            overrides = ["+sweep=width", f"predictor.width={width}", f"seed={seed}", "trainer.max_epochs=2"]
            write_job(folder, 3 * width_index + seed, overrides, figures, seed)
    last = ["+sweep=width", "predictor.width=8", "trainer.max_epochs=2"]
    write_job(folder, 6, [*last, "seed=0"], {**ALWAYS, "test/tau": 5.0, "test/regret": 0.2})
    write_job(folder, 10, [*last, "seed=1"], None, 1)
    write_job(folder, 11, [*last, "seed=2"], '{"test/tau": 5', 2)
    write_job(folder, 12, [*last, "seed=3"], {**ALWAYS, "test/tau": 9.0}, 3)
    (folder / "failed-12.txt").write_text("job 12: too large (predictor.width=8 seed=3)\n")
    (folder / "multirun.yaml").write_text("hydra: {}\n")
    (folder / "notes").mkdir()
    (folder / "20").mkdir()  # not a job
    return folder


def test_jobs_are_grouped_by_what_was_swept_with_seeds_as_repetitions(multirun: Path) -> None:
    ablation = gather(read_multirun(multirun))
    assert ablation.keys == ("predictor.width",)
    assert [one.label for one in ablation.settings] == ["8", "16", "64"]  # as numbers
    assert [one.jobs for one in ablation.settings] == [(6,), (3, 4, 5), (0, 1, 2)]
    assert ablation.settings[2].seeds == (0, 1, 2)
    tau = ablation.settings[2].figures["test/tau"]
    assert (tau.mean, tau.count) == (pytest.approx(6.2), 3)
    assert tau.interval == pytest.approx((6.2 - T2 * 0.1 / math.sqrt(3), 6.2 + T2 * 0.1 / math.sqrt(3)), rel=1e-6)
    regret = ablation.settings[1].figures["test/regret"]
    assert regret.mean == pytest.approx(0.02)
    assert regret.interval == pytest.approx((0.02 - T2 * 0.01 / math.sqrt(3), 0.02 + T2 * 0.01 / math.sqrt(3)))
    assert "policies" not in ablation.settings[0].figures


def test_the_gain_over_always_b_is_taken_job_by_job(multirun: Path) -> None:
    for number, (tau, always) in enumerate([(7.1, 7.0), (8.15, 8.0), (9.2, 9.0)]):
        path = multirun / f"{number}/metrics.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"test/tau": tau, "test/tau_always": always}))
    by_width = {one.label: one.figures["test/tau_gain"] for one in gather(read_multirun(multirun)).settings}
    gain = by_width["64"]  # 0.1, 0.15, 0.2 although tau itself is all over the place
    assert gain.mean == pytest.approx(0.15)
    assert gain.interval == pytest.approx((0.15 - T2 * 0.05 / math.sqrt(3), 0.15 + T2 * 0.05 / math.sqrt(3)), rel=1e-5)
    assert gain.verdict == "better"
    assert by_width["16"].verdict == "not distinguishable"
    assert (by_width["8"].mean, by_width["8"].verdict) == (-1.0, None)


def test_jobs_without_figures_are_named_and_left_out(multirun: Path) -> None:
    ablation = gather(read_multirun(multirun))
    assert ablation.left_out == (
        "job 10 (predictor.width=8, seed=1; unfinished)",
        "job 11 (predictor.width=8, seed=2; unfinished)",
        "job 12 (predictor.width=8, seed=3; failed)",  # although an earlier sweep left figures there
    )
    told = ablation_lines(ablation)
    assert len(told) == 2 and told[1] == "left out: " + ", ".join(ablation.left_out)


def test_an_undefined_figure_counts_fewer_seeds(multirun: Path) -> None:
    headroom = gather(read_multirun(multirun)).settings[1].figures["test/headroom_captured"]
    assert (headroom.mean, headroom.count) == (pytest.approx(0.3), 2)


def test_a_repeated_job_is_no_second_seed(multirun: Path) -> None:
    write_job(multirun, 13, ["predictor.width=64", "seed=1"], {**ALWAYS, "test/tau": 100.0}, 1)
    ablation = gather(read_multirun(multirun))
    row = ablation.settings[[one.label for one in ablation.settings].index("sweep=width, width=64, max_epochs=2")]
    assert row.jobs == (0, 1, 2)  # job 13 lacks the other overrides, so it is another setting
    write_job(multirun, 14, ["+sweep=width", "predictor.width=64", "seed=1", "trainer.max_epochs=2"],
              {**ALWAYS, "test/tau": 100.0}, 1)  # fmt: skip
    ablation = gather(read_multirun(multirun))
    assert any(one.startswith("job 14 (") and one.endswith("repeats job 1)") for one in ablation.left_out)
    assert max(value for one in ablation.settings if 1 in one.jobs for value in one.by_job["test/tau"] if value) < 7


def jobs(key_values: Sequence[dict[str, str]], seeds: int = 2) -> list[Job]:
    made = []
    for index, values in enumerate(key_values):
        for seed in range(seeds):
            figures = {**ALWAYS, "test/tau": 6 + index / 10 + seed / 100, "test/regret": (index + 1) / 100}
            made.append(Job(len(made), {**values, "seed": str(seed)}, "finished", seed, figures))
    return made


def test_two_keys_give_a_row_for_each_combination() -> None:
    swept = [{"predictor.k": k, "predictor.loss": loss} for k in ("3", "10") for loss in ("soft", "ce")]
    ablation = gather(jobs(swept))
    assert ablation.keys == ("predictor.k", "predictor.loss")
    assert [one.label for one in ablation.settings] == [
        "k=3, loss=soft", "k=3, loss=ce", "k=10, loss=soft", "k=10, loss=ce",
    ]  # fmt: skip
    assert [str(column.header) for column in ablation_table(ablation).columns][:2] == ["k", "loss"]


def test_seeds_alone_are_one_setting() -> None:
    ablation = gather(jobs([{"device": "cpu"}], seeds=3))
    assert ablation.keys == () and [one.label for one in ablation.settings] == ["all jobs"]
    assert ablation_figure(ablation, "test/tau").axes


def test_what_seeds_vary_depends_on_the_data(tmp_path: Path) -> None:
    write_job(tmp_path, 0, ["seed=0"], {"test/tau": 1})
    assert "the test prompts are the same" in gather(read_multirun(tmp_path)).seeds_vary
    write_job(tmp_path, 1, ["seed=1"], {"test/tau": 1}, 1, test=None)
    assert "which prompts of toy are tested" in gather(read_multirun(tmp_path)).seeds_vary


# --- what is shown and written


def test_the_command_tells_and_writes_all(multirun: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = ["--csv", str(tmp_path / "a.csv"), "--markdown", str(tmp_path / "a.md")]
    assert main(["ablation", str(multirun), *files, "--metric", "eval/tau"]) == 0
    shown = capsys.readouterr().out
    lines = [" ".join(line.replace("│", " ").split()) for line in shown.splitlines()]
    assert "64 2.00% 3.00% 6.200 6.000 +0.200 not 30% 50.0% 7.200 3" in lines
    # half of each interval: t * s / sqrt(3), with s = 0.01 and 0.1; two seeds for the headroom
    assert any(line.startswith("± 2.48% ± 0.248 ± 0.248 distinguishable ± 127%") for line in lines)
    assert "8 20.00% 3.00% 5.000 6.000 -1.000 - - - - 1" in lines
    assert "Student t interval over seeds" in shown and "left out: job 10 (" in shown
    assert (multirun / "ablation.png").read_bytes().startswith(b"\x89PNG")
    values = json.loads((multirun / "ablation.json").read_text())
    assert values == ablation_values(gather(read_multirun(multirun)))
    assert values["settings"][2]["figures"]["test/tau"]["by_job"] == [6.1, 6.2, 6.3]
    assert values["settings"][2]["figures"]["test/headroom_captured"]["by_job"] == [0.2, 0.4, None]
    assert values["settings"][0]["figures"]["test/tau"] == {
        "mean": 5.0, "low": None, "high": None, "count": 1, "by_job": [5.0],
    }  # fmt: skip
    with (tmp_path / "a.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["predictor.width"] for row in rows] == ["8", "16", "64"]
    assert [row["seeds"] for row in rows] == ["1", "3", "3"]
    assert [float(row["test/tau"]) for row in rows] == pytest.approx([5, 6, 6.2])
    assert (rows[0]["test/tau_low"], rows[0]["eval/tau"], rows[0]["eval/tau_count"]) == ("", "", "0")
    assert float(rows[2]["test/tau_high"]) == values["settings"][2]["figures"]["test/tau"]["high"]
    assert ablation_csv(gather(read_multirun(multirun))) == (tmp_path / "a.csv").read_text()
    table = (tmp_path / "a.md").read_text().splitlines()
    assert table[0].startswith("| width | regret | regret always-B | tau |") and len(table) == 2 + 3
    half = "2.00% ± 2.48% | 3.00% | 6.200 ± 0.248 | 6.000 | +0.200 ± 0.248"
    assert table[4].startswith(f"| 64 | {half}") and table[4].endswith("| not distinguishable | 3 |")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--metric", "test/tauu"], ["--metric test/tauu", "expected one of", "test/tau,"]),
        (["--png", "{tmp}/no/a.png"], ["--png", "no/a.png cannot be written: No such file"]),
        (["--csv", "{tmp}/no/a.csv"], ["--csv", "no/a.csv cannot be written: No such file"]),
    ],
)
def test_a_wrong_option_is_one_line(
    multirun: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], words: list[str]
) -> None:
    assert main(["ablation", str(multirun), *(one.format(tmp=tmp_path) for one in arguments)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 2
    for word in words:
        assert word in error


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1" + "0" * 400])
def test_a_figure_that_is_not_finite_is_undefined(tmp_path: Path, value: str) -> None:
    whole = {**ALWAYS, "test/tau": 6.5, "test/regret": 0.25}
    write_job(tmp_path, 0, ["seed=0"], json.dumps(whole).replace("0.25", value), seed=0)
    write_job(tmp_path, 1, ["seed=1"], whole, seed=1)
    write_job(tmp_path, 2, ["seed=2"], "[" * 100_000, seed=2)
    assert main(["ablation", str(tmp_path)]) == 0
    content = json.loads((tmp_path / "ablation.json").read_text())
    assert content["settings"][0]["figures"]["test/regret"]["by_job"] == [None, 0.25]
    assert len(content["left_out"]) == 1 and "job 2" in content["left_out"][0]


@pytest.mark.parametrize("text", ["seed: [1]", "seed: 2020-01-01", "dataset: [1]", "dataset: {a: null}"])
def test_a_config_of_another_shape_is_one_line(tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    write_job(tmp_path, 0, ["seed=0"], {**ALWAYS, "test/tau": 6.5})
    (tmp_path / "0/config.yaml").write_text(text)
    assert main(["ablation", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert f"{tmp_path / '0/config.yaml'}: {text.split(':')[0]}=" in error and error.count("\n") == 2


def test_a_bar_in_a_value_is_no_border_of_the_markdown_table(tmp_path: Path) -> None:
    for number, value in enumerate(("a|b", "c")):
        write_job(tmp_path, number, [f"model={value}"], {**ALWAYS, "test/tau": 6.5, "test/regret": 0.25})
    rows = ablation_markdown(gather(read_multirun(tmp_path))).splitlines()
    assert rows[2].startswith(r"| a\|b | 25.00% |")


def test_a_folder_without_jobs_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "sweep"
    assert main(["ablation", str(folder)]) == 2
    assert "is not a folder" in capsys.readouterr().err
    folder.mkdir()
    assert main(["ablation", str(folder)]) == 2
    assert "has no jobs" in capsys.readouterr().err
    write_job(folder, 0, ["predictor.k=1"], None)
    write_job(folder, 1, ["predictor.k=2"], None)
    assert main(["ablation", str(folder)]) == 2
    out, error = capsys.readouterr()
    assert out == "" and error.count("\n") == 2
    assert "none of the 2 jobs is finished: job 0 (predictor.k=1; unfinished), job 1" in error
    (folder / "0/.hydra/overrides.yaml").write_text("{a: [")
    assert main(["ablation", str(folder)]) == 2
    error = capsys.readouterr().err
    assert "0/.hydra/overrides.yaml cannot be read as YAML" in error and error.count("\n") == 2


def drawn(axes: Axes, label: str) -> tuple[list[float], list[float]]:
    found = next(one for one in axes.lines if one.get_label() == label)
    return list(found.get_xdata()), list(found.get_ydata())  # type: ignore[arg-type]


def intervals(axes: Axes) -> list[tuple[list[float], list[float]]]:
    found = [one for one in axes.lines if one.get_linewidth() == 6]
    return [(list(one.get_xdata()), list(one.get_ydata())) for one in found]  # type: ignore[arg-type]


def test_the_figure_of_a_number_has_its_points(multirun: Path) -> None:
    ablation = gather(read_multirun(multirun))
    [axes] = ablation_figure(ablation, "test/tau").axes
    assert axes.get_xscale() == "log" and axes.get_xlabel() == "width"
    assert drawn(axes, "mean over seeds") == ([8, 16, 64], pytest.approx([5, 6, 6.2]))
    assert drawn(axes, "always-B")[1] == [6, 6]
    ends = [one.figures["test/tau"].interval for one in ablation.settings[1:]]
    assert intervals(axes) == [([16, 16], list(ends[0] or ())), ([64, 64], list(ends[1] or ()))]
    assert [text.get_text() for text in axes.get_xticklabels()] == ["8", "16", "64"]
    dots = [list(one.get_ydata()) for one in axes.lines if one.get_marker() == "."]  # type: ignore[arg-type]
    assert dots == [[5.0], [5.9, 6.0, 6.1], [6.1, 6.2, 6.3]]


def test_the_figure_of_few_numbers_is_linear_and_always_b_may_differ_between_them() -> None:
    made = [
        Job(job.number, job.overrides, "finished", job.seed, {**(job.figures or {}), "test/regret_always": 0.01 * k})
        for job in jobs([{"predictor.k": k} for k in ("1", "2", "3")])
        for k in [int(job.overrides["predictor.k"])]
    ]
    figure = ablation_figure(gather(made), "test/regret")
    [axes] = figure.axes
    assert axes.get_xscale() == "linear"
    assert drawn(axes, "always-B") == ([1, 2, 3], pytest.approx([0.01, 0.02, 0.03]))
    figure.draw_without_rendering()
    assert axes.get_yticklabels()[0].get_text().endswith("%")


def test_the_figure_of_names_has_a_row_each() -> None:
    [axes] = ablation_figure(gather(jobs([{"preprocess": kind} for kind in ("probs", "hidden")])), "test/tau").axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["probs", "hidden"]
    assert drawn(axes, "mean over seeds") == (pytest.approx([6.005, 6.105]), [1, 0])  # the first on top
    assert drawn(axes, "always-B")[0] == [6, 6]
    [first, _] = intervals(axes)
    half = 12.706205 * 0.005  # s / sqrt(2) of two values 0.01 apart
    assert first == (pytest.approx([6.005 - half, 6.005 + half], rel=1e-6), [1, 1])


def test_what_has_no_always_b_is_drawn_without() -> None:
    made = [
        Job(job.number, job.overrides, "finished", job.seed, {"test/accuracy": 0.5})
        for job in jobs([{"predictor.k": k} for k in ("1", "2")])
    ]
    [axes] = ablation_figure(gather(made), "test/accuracy").axes
    assert "always-B" not in [one.get_label() for one in axes.lines]


def test_the_page_of_a_multirun(multirun: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (multirun / "0/report.html").write_text("")
    assert main(["build", str(multirun)]) == 0
    assert f"report in {multirun / 'report.html'}" in capsys.readouterr().out
    page = (multirun / "report.html").read_text(encoding="utf-8")
    assert re.findall(r'href="([^#]*?)"', page) == ["0/report.html"]  # of the one job that has a page
    assert '<th scope="row"><a href="0/report.html">0</a></th><td>0</td><td>finished</td>' in page
    assert page.count("<td>unfinished</td>") == 2 and page.count("<td>failed</td>") == 1
    means = {one.label: one.figures["test/tau"].mean for one in gather(read_multirun(multirun)).settings}
    for mean in means.values():
        assert f'<data value="{mean}">{mean:.3f}</data>' in page
    assert "2 settings are not distinguishable, 1 setting is without an interval" in page
    assert "job 12 (predictor.width=8, seed=3; failed)" in page and "predictor.width=64 seed=0" in page
    assert {png.stem for png in (multirun / "plots").glob("*.png")} == {
        "test-regret", "test-tau-gain", "test-tau", "test-headroom-captured",
    }  # fmt: skip
