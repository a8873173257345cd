"""The list of prompts: order, states, curves, and what is cut."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from blockpilot.report import prompts_list as listed
from blockpilot.report import read_run


def test_entries_say_what_every_policy_did(run_folder: Path) -> None:
    entries = listed.prompt_entries(read_run(run_folder))
    assert [one.prompt_id for one in entries] == ["p2", "p0", "p1", "p3", "p4", "p5"]
    first, last = entries[0], entries[-1]
    assert (first.best, first.chosen, first.regret, first.state, first.below_always) == ("3", 4, "11.1%", "lost", False)
    assert [(p.block_size, p.tau, p.is_best) for p in first.points] == [(3, "3.000", True), (4, "2.667", False)]
    assert [(p.x, p.y) for p in first.points] == [(0, 0), (listed.CURVE_WIDTH, listed.CURVE_HEIGHT)]
    assert [(c.policy, c.block_size, c.tau, c.regret) for c in first.choices] == [
        ("always-4", 4, "2.667", "11.1%"), ("pilot <b>", 4, "2.667", "11.1%"), ("oracle", 3, "3.000", "0.0%"),
    ]  # fmt: skip
    assert (last.state, last.best, last.regret, last.points) == ("none", "-", "-", ())


def test_many_prompts_and_long_texts_are_cut(run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listed, "MOST_PROMPTS", 3)
    monkeypatch.setattr(listed, "MOST_LETTERS", 6)
    entries = listed.prompt_entries(read_run(run_folder))
    assert [one.prompt_id for one in entries] == ["p2", "p1", "p4"]  # evenly spread
    assert {one.text for one in entries} == {"prompt…"}


def test_worse_than_always_b_is_marked(run_folder: Path) -> None:
    run = read_run(run_folder)
    turned = dataclasses.replace(run, about=dataclasses.replace(run.about, policy="always-4", always="oracle"))
    assert {one.prompt_id for one in listed.prompt_entries(turned) if one.below_always} == {"p0", "p2", "p4"}
