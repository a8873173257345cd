"""The page is well formed, whole in itself, escaped, and the same for the same input."""

from __future__ import annotations

import dataclasses
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from blockpilot.metrics import DecodedPrompt, Estimate, PolicySummary
from blockpilot.report import choice_figure, tau_bar_figure, write_report

VOID = {"meta", "br", "link", "img"}


class Page(HTMLParser):
    """Collects elements, ids, links and text, and checks that tags nest."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.text: list[str] = []
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
            self.links += re.findall(r"url\((.*?)\)", value or "")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if data.strip():
            self.text.append(data.strip())


@pytest.fixture
def page_text(tmp_path: Path, decoded: list[DecodedPrompt], summaries: list[PolicySummary]) -> str:
    path = tmp_path / "report.html"
    for _ in range(2):
        write_report(
            path,
            title="Run <1> & more",
            summaries=summaries,
            figures={"Tau": tau_bar_figure(summaries), 'Picks "b"': choice_figure(decoded)},
            config_yaml="seed: 0\nname: <script>alert(1)</script>\n",
            facts={"device": "CPU <x>"},
            datasets={"code & <more>": summaries[1:]},
        )
    return path.read_text(encoding="utf-8")


def test_nothing_is_fetched_and_every_reference_resolves(page_text: str) -> None:
    page = Page(page_text)
    assert len(page.ids) == len(set(page.ids)) > 20
    assert page.links and all(link.startswith("#") and link[1:] in page.ids for link in page.links)
    assert not {"script", "link", "img", "iframe", "metadata"} & set(page.tags)
    assert "@import" not in page_text and "default-src 'none'" in page_text


def test_text_is_escaped_and_complete(page_text: str) -> None:
    page = Page(page_text)
    assert page.text.count("Run <1> & more") == 2  # title and heading
    assert "CPU <x>" in page.text
    assert any("<script>alert(1)</script>" in text for text in page.text)
    assert page.text.count("pilot <b>") >= 2  # in the table and, as text, in the figures
    assert page.text.count("6 prompts (1 without rounds)") == 2
    assert {"block size", "tau", "tau gain", "speedup", "speed gain", "accuracy", "regret", "headroom captured"} <= set(
        page.text
    )
    assert page.tags.count("svg") == 2 and page.tags.count("tr") == 5 + 4
    assert page.text.count("not distinguishable") == (3 + 2) * 2  # verdicts of all rows but always-4


def test_each_data_set_has_a_section(page_text: str, tmp_path: Path, summaries: list[PolicySummary]) -> None:
    page = Page(page_text)
    assert "Policies on code & <more>" in page.text and page.tags.count("table") == 2
    write_report(tmp_path / "one.html", title="", summaries=summaries, figures={}, config_yaml="", facts={})
    assert Page((tmp_path / "one.html").read_text()).tags.count("table") == 1


def test_regret_in_speed_is_a_column_only_where_rounds_have_costs(
    tmp_path: Path, page_text: str, summaries: list[PolicySummary]
) -> None:
    assert "regret (speed)" not in page_text
    first, *rest = (dataclasses.replace(one, regret_speed=Estimate(0.125, 0.0, 0.25)) for one in summaries)
    path = tmp_path / "speed.html"
    write_report(
        path,
        title="Run",
        summaries=[dataclasses.replace(first, regret_speed=None), *rest],
        figures={},
        config_yaml="",
        facts={},
    )
    page = Page(path.read_text(encoding="utf-8"))
    assert page.text.count("regret (speed)") == 2  # heading and meaning
    assert page.text.count("12.5%") == 3


def test_figures_follow_the_theme(page_text: str) -> None:
    drawings = "".join(re.findall(r"<svg.*?</svg>", page_text, flags=re.DOTALL))
    assert "currentColor" in drawings and "var(--rule)" in drawings and "var(--blue)" in drawings
    assert not re.search(r"#24292f|#d0d7de|#0072b2|#000000", drawings)
    assert "prefers-color-scheme: dark" in page_text


def test_same_input_same_bytes(
    tmp_path: Path, page_text: str, decoded: list[DecodedPrompt], summaries: list[PolicySummary]
) -> None:
    write_report(
        tmp_path / "again.html",
        title="Run <1> & more",
        summaries=summaries,
        figures={"Tau": tau_bar_figure(summaries), 'Picks "b"': choice_figure(decoded)},
        config_yaml="seed: 0\nname: <script>alert(1)</script>\n",
        facts={"device": "CPU <x>"},
        datasets={"code & <more>": summaries[1:]},
    )
    assert (tmp_path / "again.html").read_text(encoding="utf-8") == page_text
