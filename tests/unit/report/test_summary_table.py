"""The terminal table and the plain rows say what the summaries say."""

from __future__ import annotations

import dataclasses
import io
import json
import math

from rich.console import Console

from blockpilot.metrics import PolicySummary
from blockpilot.report import summary_rows, summary_table

KEYS = [
    "policy",
    "mean_block_size",
    "tau",
    "tau_low",
    "tau_high",
    "tau_pooled",
    "speedup",
    "speedup_low",
    "speedup_high",
    "regret",
    "regret_low",
    "regret_high",
    "headroom_captured",
    "headroom_captured_low",
    "headroom_captured_high",
    "num_prompts",
    "num_prompts_without_rounds",
]


def rendered(summaries: list[PolicySummary]) -> str:
    console = Console(width=140, file=io.StringIO())
    console.print(summary_table(summaries))
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_rows_have_one_key_per_figure_and_unrounded_values(summaries: list[PolicySummary]) -> None:
    rows = summary_rows(summaries)
    assert all(list(row) == KEYS for row in rows)
    pilot, summary = rows[2], summaries[2]
    assert pilot["tau"] == summary.tau
    assert (pilot["tau_low"], pilot["tau_high"]) == summary.tau_interval
    assert (pilot["headroom_captured_low"], pilot["headroom_captured_high"]) == summary.headroom_captured_interval
    assert (pilot["num_prompts"], pilot["num_prompts_without_rounds"]) == (6, 1)


def test_rows_are_strict_json_even_with_undefined_figures(summaries: list[PolicySummary]) -> None:
    nan = math.nan
    odd = dataclasses.replace(summaries[1], tau=nan, tau_interval=(nan, nan), speedup=math.inf, regret=None)
    row = json.loads(json.dumps(summary_rows([odd]), allow_nan=False))[0]
    assert [row[key] for key in ("tau", "tau_low", "tau_high", "speedup", "regret")] == [None] * 5
    assert "nan" not in rendered([odd])


def test_table_shows_figures_intervals_and_counts(summaries: list[PolicySummary]) -> None:
    text = rendered(summaries)
    pilot = next(line for line in text.splitlines() if "pilot <b>" in line)
    cells = [cell.strip() for cell in pilot.split("│")[1:-1]]
    tau = (3 * 4 + 24 / 9) / 5
    assert cells[1:4] == ["3.60", f"{tau:.3f}", f"{5 * 24 / 41:.3f}"]
    assert cells[4] == f"{120 / 41:.2f}x"
    assert cells[5] == f"{(3 - 24 / 9) / 3 / 5:.1%}"
    assert cells[6:] == ["67%", "5 of 6"]
    low, high = summaries[2].tau_interval
    assert f"[{low:.3f}, {high:.3f}]" in text
    baseline = next(line for line in text.splitlines() if "autoregressive" in line)
    assert [cell.strip() for cell in baseline.split("│")[6:8]] == ["-", "-"]


def test_regret_in_speed_is_shown_only_where_rounds_have_costs(summaries: list[PolicySummary]) -> None:
    assert "(speed)" not in rendered(summaries)
    costed = [
        one if index == 0 else dataclasses.replace(one, regret_speed=0.0625, regret_speed_interval=(0.0, 0.125))
        for index, one in enumerate(summaries)
    ]
    rows = summary_rows(costed)
    assert all(set(row) - set(KEYS) == {"regret_speed", "regret_speed_low", "regret_speed_high"} for row in rows)
    assert [row["regret_speed"] for row in rows] == [None, 0.0625, 0.0625, 0.0625]
    assert len({tuple(row) for row in rows}) == 1
    text = rendered(costed)
    assert "regret" in text and "(speed)" in text
    pilot = next(line for line in text.splitlines() if "pilot <b>" in line)
    assert [cell.strip() for cell in pilot.split("│")[1:-1]][6] == "6.2%"


def test_names_are_not_read_as_markup(summaries: list[PolicySummary]) -> None:
    assert "[red]x[/red]" in rendered([dataclasses.replace(summaries[1], policy="[red]x[/red]")])
