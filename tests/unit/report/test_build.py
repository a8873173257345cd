"""The page of a run is well formed, whole in itself, escaped, says what the files say, and is the same each time."""

from __future__ import annotations

import dataclasses
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from PIL import Image

from blockpilot.errors import UserError
from blockpilot.metrics import summarize
from blockpilot.report import (
    build_report,
    read_curves,
    read_decisions,
    summary_rows,
    write_curves,
    write_decisions,
)
from blockpilot.report.__main__ import main
from blockpilot.report.table import COLUMNS

VOID = {"meta", "br", "link", "img", "input"}
CHARTS = {
    "tau-by-policy", "tau-by-size", "best-and-chosen-sizes", "choices", "regret", "confusion", "prompt-curves",
    "acceptance-lengths", "training",
}  # fmt: skip


class Page(HTMLParser):
    """Collects elements, ids, links, text and tables, and checks that tags nest."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.text: list[str] = []
        self.values: list[float] = []
        self.labels: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag not in VOID:
            self.open.append(tag)
        for name, value in attrs:
            if name == "id":
                self.ids.append(value or "")
            if name in ("href", "xlink:href", "src", "srcset", "data", "action"):
                self.links.append(value or "")
            if tag == "data" and name == "value":
                self.values.append(float(value or "nan"))
            if tag == "svg" and name == "aria-label":
                self.labels.append(value or "")
            self.links += re.findall(r"url\((.*?)\)", value or "")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if data.strip():
            self.text.append(" ".join(data.split()))


@pytest.fixture
def page_text(built: Path) -> str:
    return (built / "report.html").read_text(encoding="utf-8")


def test_nothing_is_fetched_and_every_reference_resolves(page_text: str) -> None:
    page = Page(page_text)
    assert len(page.ids) == len(set(page.ids)) > 20
    assert page.links and all(link.startswith("#") and link[1:] in page.ids for link in page.links)
    assert not {"script", "link", "img", "iframe", "metadata"} & set(page.tags)
    assert "@import" not in page_text and "default-src 'none'" in page_text


def test_text_is_escaped_and_complete(page_text: str) -> None:
    page = Page(page_text)
    assert page.text.count("BlockPilot on tiny <x>") == 2  # title and heading
    for index in range(6):
        assert f"prompt {index} <script>document.title = 'broken'</script>" in page.text
    assert any("name=<script>" in text for text in page.text)  # what was typed
    assert any("<script>document.title" in text and "temperature" in text for text in page.text)  # the configuration
    assert page.text.count("pilot <b>") >= 3  # in the tables and, as text, in the charts
    assert {"Policies on math", "Policies on code & <b>", "git_commit", "abc"} <= set(page.text)


def test_cells_hold_what_the_metrics_say(page_text: str, built: Path) -> None:
    rows = json.loads((built / "metrics.json").read_text())["policies"]
    expected = [row[column.key] for row in rows for column in COLUMNS if row.get(column.key) is not None]
    assert Page(page_text).values == expected * 3  # all prompts, then each of two data sets


def test_the_headline_says_the_gain_and_its_verdict(page_text: str, built: Path) -> None:
    page = Page(page_text)
    pilot = json.loads((built / "metrics.json").read_text())["policies"][2]
    gain = f"{pilot['tau_gain']:+.2%} [{pilot['tau_gain_low']:+.2%}, {pilot['tau_gain_high']:+.2%}] tau"
    assert page.text.count(gain) == 1
    assert "pilot <b> against always-4, 6 prompts (1 without rounds)" in page.text
    assert page_text.count('<p class="verdict not distinguishable">') == 2


def test_a_simulated_evaluation_says_what_it_has_not(run_folder: Path) -> None:
    (run_folder / "history.jsonl").unlink()
    figures = json.loads((run_folder / "metrics.json").read_text())
    for row in figures["policies"]:
        row |= {name: None for name in row if name.startswith("speed")}
    del figures["datasets"]
    (run_folder / "metrics.json").write_text(json.dumps(figures))
    text = build_report(run_folder).read_text()
    assert "chart-training" not in text
    assert text.count('<p class="verdict not measured">not measured</p>') == 1
    assert "All prompts of the table are of one data set, math, code" in " ".join(Page(text).text)


def test_regret_in_speed_is_a_column_only_where_rounds_have_costs(page_text: str, run_folder: Path) -> None:
    assert "regret (speed)" not in page_text
    figures = json.loads((run_folder / "metrics.json").read_text())
    del figures["datasets"]
    for row in figures["policies"]:
        row |= {"regret_speed": 0.125, "regret_speed_low": 0.0, "regret_speed_high": 0.25}
    (run_folder / "metrics.json").write_text(json.dumps(figures))
    page = Page(build_report(run_folder).read_text())
    assert page.text.count("regret (speed)") == 2  # heading and meaning
    assert page.text.count("12.5%") == 4


def test_every_chart_is_drawn_described_tabulated_and_saved(page_text: str, built: Path) -> None:
    page = Page(page_text)
    assert {one.removeprefix("chart-") for one in page.ids if one.startswith("chart-")} == CHARTS
    assert len(page.labels) == len(CHARTS) and all(len(label) > 60 for label in page.labels)
    assert page.text.count("Numbers of this chart") == len(CHARTS)
    assert {png.stem for png in (built / "plots").glob("*.png")} == CHARTS
    assert all(Image.open(png).width > 700 for png in (built / "plots").glob("*.png"))


def test_charts_follow_the_theme(page_text: str) -> None:
    drawings = "".join(re.findall(r"<svg role.*?</svg>", page_text, flags=re.DOTALL))
    assert "currentColor" in drawings and "var(--rule)" in drawings and "var(--series-0)" in drawings
    assert re.findall(r"#[0-9a-f]{6}\b", drawings) == []
    assert "prefers-color-scheme: dark" in page_text


def test_prompts_can_be_told_apart_without_a_script(page_text: str) -> None:
    states = re.findall(r'<details class="prompt (\w+)( below)?">\n<summary><b>(\w+)</b>', page_text)
    # p2 is the one that pilot got wrong; p5 has no rounds
    assert states == [("lost", "", "p2"), *(("best", "", f"p{i}") for i in (0, 1, 3, 4)), ("none", "", "p5")]


def test_same_files_same_bytes(page_text: str, built: Path, run_folder: Path) -> None:
    first = {png.name: png.read_bytes() for png in (built / "plots").iterdir()}
    assert main(["build", str(run_folder)]) == 0
    assert (run_folder / "report.html").read_text(encoding="utf-8") == page_text
    assert {png.name: png.read_bytes() for png in (run_folder / "plots").iterdir()} == first


def test_a_run_without_any_round_has_a_page(run_folder: Path) -> None:
    names = {"block_sizes": (), "acceptance_lengths": (), "drafted_sizes": (), "output_tokens": 1}
    decoded = [dataclasses.replace(one, **names) for one in read_decisions(run_folder / "decisions.parquet")]  # type: ignore[arg-type]
    write_decisions(run_folder / "decisions.parquet", decoded)
    curves = read_curves(run_folder / "prompts.parquet")
    none = dataclasses.replace(curves, rounds=curves.rounds * 0, committed_tokens=curves.rounds * 0)
    write_curves(run_folder / "prompts.parquet", none)
    rows = summary_rows(summarize(decoded, baseline="autoregressive", always="always-4", samples=10))
    (run_folder / "metrics.json").write_text(json.dumps({"policies": rows}))
    page = Page(build_report(run_folder).read_text())
    assert "nan" not in " ".join(page.text).lower().split()
    assert page.text.count("not measured") == 2


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("metrics.json", "{}", "has policies=None; expected a row per policy"),
        ("run.json", "[1]", "run.json holds [1]; expected names and values"),
        ("run.json", '{"model": "tiny"}', "run.json has model; expected always, device"),
        ("prompts.parquet", None, "prompts.parquet cannot be read"),
        ("decisions.parquet", None, "decisions.parquet' cannot be read"),
        ("config.yaml", None, "config.yaml cannot be read: No such file or directory"),
        ("history.jsonl", "{", "history.jsonl cannot be read"),
    ],
)
def test_a_file_that_is_wrong_is_named_in_one_line(
    run_folder: Path, capsys: pytest.CaptureFixture[str], name: str, content: str | None, words: str
) -> None:
    (run_folder / name).unlink()
    if content is not None:
        (run_folder / name).write_text(content)
    assert main(["build", str(run_folder)]) == 2
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 2


def test_files_of_two_runs_are_no_report(run_folder: Path, tmp_path: Path) -> None:
    about = json.loads((run_folder / "run.json").read_text())
    (run_folder / "run.json").write_text(json.dumps(about | {"policy": "ema"}))
    with pytest.raises(UserError, match=r"run\.json names ema and always-4; expected the files of one run"):
        build_report(run_folder)
    with pytest.raises(UserError, match="is not the folder of a finished run"):
        build_report(tmp_path)
    with pytest.raises(UserError, match="nowhere is not the folder of a finished run"):
        build_report(tmp_path / "nowhere")
