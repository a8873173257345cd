"""The terminal table and the plain rows say what the summaries say."""

from __future__ import annotations

import dataclasses
import io
import json
import math

import pytest
from rich.console import Console

from blockpilot.metrics import DecodedPrompt, Estimate, PolicySummary, summarize
from blockpilot.report import dataset_table, print_tables, summary_rows, summary_table


def interval(name: str) -> list[str]:
    return [name, f"{name}_low", f"{name}_high"]


KEYS = [
    "policy", "mean_block_size", *interval("tau"), "tau_pooled", *interval("tau_gain"), "tau_gain_verdict",
    *interval("speedup"), *interval("speed_gain"), "speed_gain_verdict", "accuracy", *interval("regret"),
    *interval("headroom_captured"), "choices", "num_prompts", "num_prompts_without_rounds",
]  # fmt: skip


def rendered(summaries: list[PolicySummary], width: int = 170) -> str:
    console = Console(width=width, file=io.StringIO())
    console.print(summary_table(summaries))
    return console.file.getvalue()  # type: ignore[attr-defined]


def cells(text: str, policy: str) -> list[list[str]]:
    """The lines of each cell of a policy's row."""
    lines = [[cell.strip() for cell in line.split("│")[1:-1]] for line in text.splitlines() if line.startswith("│")]
    first = next(index for index, line in enumerate(lines) if line[0] == policy)
    rows = [lines[first]]
    while first + len(rows) < len(lines) and not lines[first + len(rows)][0]:
        rows.append(lines[first + len(rows)])
    return [[line for line in column if line] for column in zip(*rows, strict=True)]


def test_rows_have_one_key_per_figure_and_unrounded_values(summaries: list[PolicySummary]) -> None:
    rows = summary_rows(summaries)
    assert all(list(row) == KEYS for row in rows)
    pilot, summary = rows[2], summaries[2]
    for name in ("tau", "tau_gain", "speedup", "speed_gain", "regret", "headroom_captured"):
        one = getattr(summary, name)
        assert [pilot[key] for key in interval(name)] == [one.value, one.low, one.high]
    assert (pilot["tau_gain_verdict"], pilot["accuracy"]) == ("not distinguishable", 0.8)
    assert pilot["choices"] == {"3": 2, "4": 4}
    assert (pilot["num_prompts"], pilot["num_prompts_without_rounds"]) == (6, 1)
    always = rows[1]
    assert {always[key] for name in ("tau_gain", "speed_gain") for key in (*interval(name), f"{name}_verdict")} == {
        None
    }


def test_rows_are_strict_json_even_with_undefined_figures(summaries: list[PolicySummary]) -> None:
    undefined = Estimate(math.nan, math.nan, math.nan)
    odd = dataclasses.replace(
        summaries[2], tau=undefined, tau_gain=undefined, speedup=None, speed_gain=undefined, accuracy=math.nan,
        regret=None,
    )  # fmt: skip
    row = json.loads(json.dumps(summary_rows([odd]), allow_nan=False))[0]
    names = ("tau", "tau_gain", "speedup", "speed_gain", "regret")
    keys = [key for name in names for key in interval(name)] + ["tau_gain_verdict", "speed_gain_verdict", "accuracy"]
    assert {row[key] for key in keys} == {None}
    text = rendered([odd])
    assert "nan" not in text and "not distinguishable" not in text
    assert cells(text, "pilot <b>")[2:8] == [["-"]] * 6


def test_table_shows_figures_intervals_verdicts_and_counts(summaries: list[PolicySummary]) -> None:
    text = rendered(summaries)
    assert "Policies on 6 prompts (1 without rounds) [95% interval]" in text
    one = summaries[2]
    assert one.tau_gain is not None and one.speedup is not None and one.speed_gain is not None
    assert one.regret is not None
    tau, always = (3 * 4 + 24 / 9) / 5, (3 * 2 + 3 * 24 / 9) / 5
    seconds, always_seconds = 0.1 * 41, 0.1 * 43
    assert cells(text, "pilot <b>") == [
        ["pilot <b>"],
        ["3.60"],
        [f"{tau:.3f}", f"[{one.tau.low:.3f}, {one.tau.high:.3f}]"],
        [f"{tau / always - 1:+.2%}", f"[{one.tau_gain.low:+.2%}, {one.tau_gain.high:+.2%}]", "not distinguishable"],
        [f"{120 / 41:.2f}x", f"[{one.speedup.low:.2f}, {one.speedup.high:.2f}]"],
        [
            f"{always_seconds / seconds - 1:+.2%}",
            f"[{one.speed_gain.low:+.2%}, {one.speed_gain.high:+.2%}]",
            "not distinguishable",
        ],
        ["80%"],
        [f"{(3 - 24 / 9) / 3 / 5:.1%}", f"[{one.regret.low:.1%}, {one.regret.high:.1%}]"],
        ["67%", "[0%, 100%]"],
    ]
    assert cells(text, "always-4")[3] == cells(text, "always-4")[5] == ["-"]
    assert cells(text, "autoregressive")[6:] == [["-"]] * 3


def test_few_prompts_are_said_to_give_no_verdict(summaries: list[PolicySummary]) -> None:
    words = "with fewer than 10 prompts no gain counts as distinguishable"
    assert words in rendered(summaries)
    assert words not in rendered([dataclasses.replace(one, num_prompts=10) for one in summaries])


@pytest.mark.parametrize("verdict", ["better", "worse", "not distinguishable"])
def test_verdicts_are_in_words(summaries: list[PolicySummary], verdict: str) -> None:
    ends = {"better": (0.003, 0.02), "worse": (-0.02, -0.003), "not distinguishable": (-0.01, 0.02)}[verdict]
    one = dataclasses.replace(summaries[2], tau_gain=Estimate(0.012, *ends, 64), speed_gain=Estimate(0.5, 0.4, 0.6, 64))
    text = rendered([one])
    assert cells(text, "pilot <b>")[3][::2] == ["+1.20%", verdict]
    assert cells(text, "pilot <b>")[5] == ["+50.00%", "[+40.00%, +60.00%]", "better"]
    assert [summary_rows([one])[0][f"{name}_gain_verdict"] for name in ("tau", "speed")] == [verdict, "better"]


def test_a_narrow_terminal_wraps_but_nothing_is_cut(
    summaries: list[PolicySummary], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    costed = [dataclasses.replace(one, regret_speed=Estimate(0.0625, 0, 0.125)) for one in summaries]
    datasets = {f"{name}-of-a-long-name": summaries for name in ("a", "b", "c", "d", "e", "f", "g", "h", "i")}
    for table, own in ((summary_table(costed), costed), (dataset_table(datasets), summaries)):
        print_tables(table)
        shown = capsys.readouterr().out
        assert "…" not in shown
        words = " ".join(" ".join(cell) for cell in cells(shown, "pilot <b>")).split()
        assert {"not", "distinguishable", f"{own[2].tau_gain.value:+.2%}"} <= set(words)  # type: ignore[union-attr]
    assert all(name in shown for name in ("a-of-a-long-name", "i-of-a-long-name"))


def test_data_sets_stand_side_by_side(decoded: list[DecodedPrompt]) -> None:
    datasets = {
        name: summarize([one for one in decoded if one.dataset == name], baseline="autoregressive", always="always-4")
        for name in ("math", "code")
    }
    console = Console(width=120, file=io.StringIO())
    console.print(dataset_table(datasets))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "3 prompts" in text and "3 prompts (1 without rounds)" in text
    # of the prompts of math always-4 is best on none, of those of code on all
    gain = (3 + 24 / 9 + 3) / 3 / (24 / 9) - 1
    assert [column[0] for column in cells(text, "pilot <b>")] == ["pilot <b>", f"{gain:+.2%}", "+0.00%"]
    assert [column[0] for column in cells(text, "oracle")] == ["oracle", "+12.50%", "+0.00%"]
    assert "always-4" not in text and "autoregressive" not in text


def test_regret_in_speed_is_shown_only_where_rounds_have_costs(summaries: list[PolicySummary]) -> None:
    assert "(speed)" not in rendered(summaries)
    costed = [
        one if index == 0 else dataclasses.replace(one, regret_speed=Estimate(0.0625, 0.0, 0.125))
        for index, one in enumerate(summaries)
    ]
    rows = summary_rows(costed)
    assert all(set(row) - set(KEYS) == set(interval("regret_speed")) for row in rows)
    assert [row["regret_speed"] for row in rows] == [None, 0.0625, 0.0625, 0.0625]
    assert len({tuple(row) for row in rows}) == 1
    assert cells(rendered(costed), "pilot <b>")[8] == ["6.2%", "[0.0%, 12.5%]"]


def test_names_are_not_read_as_markup(summaries: list[PolicySummary]) -> None:
    assert "[red]x[/red]" in rendered([dataclasses.replace(summaries[1], policy="[red]x[/red]")])
