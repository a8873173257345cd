"""What the page of a multirun shows: a row per setting with means over seeds, a row per job, charts.

Knows ablations; no markup.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from blockpilot.metrics.replicates import over_repetitions
from blockpilot.report.ablation import (
    COLUMNS,
    GAIN,
    HEADROOM,
    INTERVAL,
    REGRET,
    TAU,
    Ablation,
    figure_cell,
    figure_heading,
    short_name,
)
from blockpilot.report.ablation_files import Job
from blockpilot.report.charts import Chart
from blockpilot.report.page import Cell, TableOf
from blockpilot.report.plots import ablation_figure
from blockpilot.report.table import NO_VALUE

_DECODED = ("eval/tau", "eval/tau_always", "eval/speedup", "eval/speedup_always")
_DRAWN = (REGRET, GAIN, TAU, HEADROOM, "eval/speedup")
_PER_JOB = (REGRET, TAU, "eval/tau", "eval/speedup")


def setting_table(ablation: Ablation) -> TableOf:
    """A row per setting: mean and half of the interval over its seeds, as far as there are any."""
    known = _known(ablation, (*COLUMNS, *_DECODED))
    keys = [short_name(key) for key in ablation.keys] or ["setting"]
    headings = [*keys, *(" ".join(figure_heading(name).split()) for name in known), "against always-B", "seeds"]
    rows = []
    for one in ablation.settings:
        figures = [one.figures.get(name, over_repetitions([])) for name in known]
        cells = [
            Cell(tuple(figure_cell(name, figure, len(one.jobs)).split("\n")), figure.mean if figure.count else None)
            for name, figure in zip(known, figures, strict=True)
        ]
        verdict = (one.figures[GAIN].verdict if GAIN in one.figures else None) or NO_VALUE
        named = [Cell((value,)) for value in one.values.values()] or [Cell((one.label,))]
        rows.append((*named, *cells, Cell((verdict,)), Cell((str(len(one.jobs)),))))
    return TableOf("Settings", f"Mean and half of the {INTERVAL}.", headings, rows)


def multirun_verdicts(ablation: Ablation) -> list[tuple[str, int]]:
    """How many settings are better, worse or not distinguishable in tau from always-B, over their seeds."""
    counts = Counter((one.figures[GAIN].verdict if GAIN in one.figures else None) for one in ablation.settings)
    order = ("better", "worse", "not distinguishable", None)
    return [(verdict or "without an interval", counts[verdict]) for verdict in order if counts[verdict]]


def job_rows(folder: Path, jobs: Sequence[Job], page: str) -> dict[str, Any]:
    """A row per job: number, what it was started with, seed, state, figures, and a link to its page if it has one."""
    known = [name for name in _PER_JOB if any((job.figures or {}).get(name) is not None for job in jobs)]
    rows = []
    for job in jobs:
        values = [(job.figures or {}).get(name) for name in known]
        rows.append(
            {
                "number": job.number,
                "link": f"{job.number}/{page}" if (folder / str(job.number) / page).is_file() else None,
                "overrides": " ".join(f"{key}={value}" for key, value in job.overrides.items()),
                "seed": NO_VALUE if job.seed is None else str(job.seed),
                "state": job.state,
                "cells": [
                    Cell((NO_VALUE,)) if value is None else Cell((_number(name, value),), value)
                    for name, value in zip(known, values, strict=True)
                ],
            }
        )
    return {"headings": known, "rows": rows}


def multirun_charts(ablation: Ablation) -> list[Chart]:
    """A chart for each figure that the jobs have."""
    return [_chart(ablation, name) for name in _known(ablation, _DRAWN)]


def _chart(ablation: Ablation, name: str) -> Chart:
    rows = []
    for one in ablation.settings:
        figure = one.figures.get(name)
        if figure is not None and figure.count:
            ends = "" if figure.interval is None else "[{:.4f}, {:.4f}]".format(*figure.interval)
            rows.append((one.label, f"{figure.mean:.4f}", ends, str(figure.count)))
    title = " ".join(figure_heading(name).split())
    return Chart(
        name.replace("/", "-").replace("_", "-"), title,
        f"{name} of every setting: each seed as a small dot, their mean as a large one, the {INTERVAL} as a band.",
        ablation_figure(ablation, name), ("setting", "mean", "95% interval", "seeds"), tuple(rows),
    )  # fmt: skip


def _known(ablation: Ablation, names: Sequence[str]) -> list[str]:
    return [name for name in names if any(name in one.figures and one.figures[name].count for one in ablation.settings)]


def _number(name: str, value: float) -> str:
    return f"{value:.2%}" if "regret" in name else f"{value:.2f}x" if "speedup" in name else f"{value:.3f}"
