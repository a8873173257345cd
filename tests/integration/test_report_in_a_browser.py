"""The report of a real run in a real browser: a phone, a desk, the dark, and a prompt that tries to run a script."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from blockpilot.report.table import columns
from tests.chromium import NAMES, Browser, chromium, find_chromium

from .conftest import ROOT, Finished

INJECTED = """Count up. <script>document.title = "broken"</script><img src=x onerror="document.title = 'broken'">"""
VISIBLE = "[...document.querySelectorAll('.prompt')].filter(one => one.offsetHeight > 0).map(one => one.className)"

pytestmark = pytest.mark.skipif(
    find_chromium() is None, reason=f"no browser: none of {', '.join(NAMES)} is installed; make test-all installs one"
)


@pytest.fixture
def browser() -> Iterator[Browser]:
    path = find_chromium()
    assert path is not None
    with chromium(path) as opened:
        yield opened


@pytest.fixture
def folder(run: Callable[..., Finished], tmp_path: Path) -> Path:
    """A run on prompts of a file, each of which ends in markup."""
    lines = (ROOT / "data/prompts/tiny_train.jsonl").read_text(encoding="utf-8").splitlines()[:20]
    prompts = tmp_path / "prompts.jsonl"
    texts = [f"{json.loads(line)['turns'][0]} {INJECTED}" for line in lines]
    rows = [{"id": f"<b>{index}", "turns": [text]} for index, text in enumerate(texts)]
    prompts.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    done = run(
        "train.py", "dataset=jsonl", f"dataset.jsonl.train.path={prompts}", "generation.max_new_tokens=40",
        "trainer.max_epochs=2", "trainer.test_share=0.4", "evaluation.policies=[oracle]",
        "evaluation.num_prompts=3", "evaluation.bootstrap_samples=50", "logger=none",
        f"hydra.run.dir={tmp_path / 'run'}", quick=False,
    )  # fmt: skip
    assert done.code == 0, done.output
    assert f"to be read in {tmp_path / 'run/report.html'}" in done.output.replace("\n", "")
    return tmp_path / "run"


def test_the_page_on_every_screen(folder: Path, browser: Browser) -> None:
    page, shots = folder / "report.html", {}
    for name, width, dark in (("phone", 390, False), ("desk", 1280, False), ("dark", 1280, True)):
        browser.open(page, width, dark=dark)
        assert browser.complaints == []
        assert browser.requests == [page.as_uri()]
        # all that can be unfolded is
        browser.ask("document.querySelectorAll('details').forEach(one => { one.open = true })")
        assert browser.ask("document.scrollingElement.scrollWidth <= innerWidth") is True
        assert browser.ask("innerWidth") == width
        shots[name] = Image.open(io.BytesIO(browser.photograph())).convert("L")
        assert shots[name].width == width and len(set(shots[name].tobytes())) > 20
        _check_no_script(browser)
    assert _mean(shots["dark"]) < 80 < 200 < _mean(shots["desk"])
    ink = "getComputedStyle(document.querySelector('#charts svg')).color"
    assert browser.ask(ink) == "rgb(230, 237, 243)"  # drawings follow
    _check_table(browser, json.loads((folder / "metrics.json").read_text())["policies"])
    browser.open(page, 390)
    _check_prompts(browser)
    assert browser.complaints == []


def _check_no_script(browser: Browser) -> None:
    assert browser.ask("document.title") == "BlockPilot on tiny"
    assert browser.ask("document.scripts.length + document.images.length") == 0
    assert INJECTED in browser.ask("document.querySelector('.prompt .text').textContent")


def _check_table(browser: Browser, rows: list[dict[str, Any]]) -> None:
    cells = browser.ask(
        "[...document.querySelectorAll('#policies tbody tr')].map(row => [...row.cells].map(cell => "
        "[cell.innerText.split('\\n'), cell.querySelector('data')?.value ?? null]))"
    )
    assert len(cells) == len(rows)
    for row, (name, *figures) in zip(rows, cells, strict=True):
        assert name == [[row["policy"]], None]
        for column, (lines, value) in zip(columns(rows), figures, strict=True):
            assert lines == list(column.cell(row))
            assert (None if value is None else float(value)) == row[column.key]


def _check_prompts(browser: Browser) -> None:
    """They unfold at a tap, and the choice above them leaves those that fit."""
    everything = browser.ask(VISIBLE)
    assert len(everything) == 3
    drawing = "document.querySelector('.prompt svg').checkVisibility()"
    assert browser.ask(drawing) is False
    browser.ask("document.querySelector('.prompt summary').click()")
    assert browser.ask(drawing) is True
    for state in ("best", "lost", "below"):
        browser.ask(f"document.querySelector('#only-{state}').click()")
        assert browser.ask(VISIBLE) == [one for one in everything if state in one.split()]


def _mean(shot: Image.Image) -> float:
    pixels = shot.tobytes()
    return sum(pixels) / len(pixels)
