"""The jobs of a multirun as one table: a row for each setting that was swept, figures over its seeds.

Knows what is grouped, shown and written, and how it is rounded; reads no file and draws nothing.
"""

from __future__ import annotations

import csv
import io
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table
from rich.text import Text

from blockpilot.errors import UserError
from blockpilot.metrics.replicates import Replicated, over_repetitions
from blockpilot.report.ablation_files import Job
from blockpilot.report.table import NO_VALUE

SEED = "seed"
"""The key whose values repeat a setting."""
TAU, REGRET, HEADROOM = "test/tau", "test/regret", "test/headroom_captured"
GAIN = "test/tau_gain"
"""tau less that of always-B on the same prompts, job by job."""
_ALWAYS = "_always"
"""Ends the name of always-B's figure."""
COLUMNS = (
    REGRET, REGRET + _ALWAYS, TAU, TAU + _ALWAYS, GAIN, HEADROOM, "test/accuracy",
)  # fmt: skip
"""Figures shown of every setting."""
_SHARES = ("regret", "accuracy", "headroom_captured")
"""Figures whose names hold one of these are shown in per cent."""
INTERVAL = "95 % Student t interval over seeds"


@dataclass(frozen=True)
class Setting:
    """One combination of what was swept, and its figures."""

    values: Mapping[str, str]
    """Value by key, as typed; empty where nothing but the seed differs between jobs."""
    jobs: tuple[int, ...]
    seeds: tuple[int | None, ...]
    """Of each job."""
    by_job: Mapping[str, tuple[float | None, ...]]
    """Figures by name, of each job; None where a job has none."""
    figures: Mapping[str, Replicated]
    """The same over the jobs that have one."""

    @property
    def label(self) -> str:
        """Short name, such as ``k=1, depth=2``; the value alone where there is one key."""
        if len(self.values) == 1:
            return next(iter(self.values.values()))
        return ", ".join(f"{short_name(key)}={value}" for key, value in self.values.items()) or "all jobs"


@dataclass(frozen=True)
class Ablation:
    """What a multirun says."""

    keys: tuple[str, ...]
    """Keys that differ between jobs, the seed left out."""
    settings: tuple[Setting, ...]
    """By rising value of numeric keys, others in the order they were swept."""
    left_out: tuple[str, ...]
    """Jobs without figures, each with its state and overrides."""
    seeds_vary: str
    """What differs between seeds, as a sentence."""

    def numbers(self, key: str) -> list[float] | None:
        """The values of ``key`` as numbers, in the order of the settings; None if one is none."""
        return _numbers([one.values[key] for one in self.settings])

    def require(self, figure: str) -> None:
        """Raises ``UserError``, which lists the figures there are, unless some job has a value of ``figure``."""
        known = {name: None for one in self.settings for name, value in one.figures.items() if value.count}
        if figure not in known:
            raise UserError(f"--metric {figure} is no figure of these jobs; expected one of {', '.join(known)}")


def gather(jobs: Sequence[Job]) -> Ablation:
    """Groups jobs by what was swept.

    A job that repeats the setting and the seed of another is no second repetition: only the first counts.

    Raises:
        UserError: no job is finished.
    """
    keys = _varied_keys(jobs)
    left_out = [_described(job, keys, job.state) for job in jobs if job.state != "finished"]
    groups: dict[tuple[str, ...], dict[int | None, Job]] = {}
    for job in (job for job in jobs if job.state == "finished"):
        group = groups.setdefault(tuple(job.overrides.get(key, "") for key in keys), {})
        if group.setdefault(job.seed, job) is not job:
            left_out.append(_described(job, keys, f"repeats job {group[job.seed].number}"))
    if not groups:
        raise UserError(f"none of the {len(jobs)} jobs is finished: {', '.join(left_out)}")
    settings = [_setting(dict(zip(keys, group, strict=True)), list(own.values())) for group, own in groups.items()]
    used = [job for group in groups.values() for job in group.values()]
    return Ablation(keys, tuple(_sorted(settings, keys)), tuple(left_out), _seeds_vary(used))


def ablation_table(ablation: Ablation, extra: str | None = None) -> Table:
    """A row per setting; half the width of its interval stands under each figure.

    Args:
        ablation: what to show.
        extra: a figure to show behind the usual ones, if it is none of them.
    """
    columns = [*COLUMNS, *([extra] if extra is not None and extra not in COLUMNS else [])]
    table = Table(
        title=Text(f"{', '.join(ablation.keys) or 'one setting'} on all test prompts: mean ± half of the {INTERVAL}")
    )
    for key in ablation.keys or ("setting",):
        table.add_column(short_name(key), no_wrap=True)
    for name in columns:
        table.add_column(figure_heading(name), justify="right")
        if name == GAIN:
            table.add_column("at 95%", justify="right")
    table.add_column("seeds", justify="right")
    for one in ablation.settings:
        cells: list[str] = []
        for name in columns:
            figure = one.figures.get(name, over_repetitions([]))
            cells.append(figure_cell(name, figure, len(one.jobs)))
            if name == GAIN:
                cells.append((figure.verdict or NO_VALUE).replace(" ", "\n"))
        named = list(one.values.values()) or [one.label]
        table.add_row(*(Text(cell) for cell in (*named, *cells, str(len(one.jobs)))))
    return table


def ablation_markdown(ablation: Ablation) -> str:
    """The usual columns as a Markdown table, for a page of results."""
    keys = [short_name(key) for key in ablation.keys] or ["setting"]
    headings = [*keys, *(" ".join(figure_heading(name).split()) for name in COLUMNS), "at 95%", "seeds"]
    lines = [headings, ["---"] * len(headings)]
    for one in ablation.settings:
        cells = [figure_cell(name, one.figures.get(name, over_repetitions([])), len(one.jobs)) for name in COLUMNS]
        verdict = (one.figures[GAIN].verdict if GAIN in one.figures else None) or NO_VALUE
        lines.append([*(list(one.values.values()) or [one.label]), *cells, verdict, str(len(one.jobs))])
    # a bar in a value is no border
    rows = [[" ".join(cell.split()).replace("|", r"\|") for cell in row] for row in lines]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def ablation_lines(ablation: Ablation) -> list[str]:
    """What the table's numbers are over, and which jobs are not in it."""
    lines = [f"{ablation.seeds_vary} Intervals are over seeds, not over prompts; a setting with one seed has none."]
    if ablation.left_out:
        lines.append(f"left out: {', '.join(ablation.left_out)}")
    return lines


def ablation_values(ablation: Ablation) -> dict[str, Any]:
    """Every number as plain JSON values; an undefined one is null."""
    return {
        "keys": list(ablation.keys),
        "interval": INTERVAL,
        "seeds_vary": ablation.seeds_vary,
        "left_out": list(ablation.left_out),
        "settings": [
            {
                "values": dict(one.values),
                "jobs": list(one.jobs),
                "seeds": list(one.seeds),
                "verdict": one.figures[GAIN].verdict if GAIN in one.figures else None,
                "figures": {
                    name: {
                        "mean": None if math.isnan(figure.mean) else figure.mean,
                        "low": figure.low,
                        "high": figure.high,
                        "count": figure.count,
                        "by_job": list(one.by_job[name]),
                    }
                    for name, figure in one.figures.items()
                },
            }
            for one in ablation.settings
        ],
    }


def ablation_csv(ablation: Ablation) -> str:
    """A row per setting: the keys, the number of seeds, the verdict, then mean, ends and count of every figure."""
    names = list(dict.fromkeys(name for one in ablation.settings for name in one.figures))
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    parts = [[name, f"{name}_low", f"{name}_high", f"{name}_count"] for name in names]
    writer.writerow([*ablation.keys, "seeds", "verdict", *itertools.chain(*parts)])
    for one in ablation.settings:
        cells: list[object] = []
        for name in names:
            figure = one.figures.get(name, over_repetitions([]))
            mean = "" if math.isnan(figure.mean) else figure.mean
            cells += [mean, figure.low, figure.high, figure.count]  # None is an empty cell
        verdict = one.figures[GAIN].verdict if GAIN in one.figures else None
        writer.writerow([*one.values.values(), len(one.jobs), verdict, *cells])
    return text.getvalue()


def short_name(key: str) -> str:
    """The last part of a key: ``predictor.k`` is ``k``."""
    return key.rsplit(".", 1)[-1]


def is_share(figure: str) -> bool:
    """Whether a figure is shown in per cent."""
    return any(word in figure for word in _SHARES)


def always_of(figure: str, setting: Setting) -> float | None:
    """always-B's mean of the same figure, if it is known: by definition no headroom captured and no gain."""
    if figure in (HEADROOM, GAIN):
        return 0.0
    known = setting.figures.get(figure + _ALWAYS)
    return known.mean if known is not None and known.count else None


def figure_heading(name: str) -> str:
    """A figure's name over its column, in lines."""
    if name == GAIN:
        return "tau -\nalways-B"
    own = name.removeprefix("test/")
    return f"{own.removesuffix(_ALWAYS)}\nalways-B" if own.endswith(_ALWAYS) else own.replace("_", "\n")


def figure_cell(name: str, figure: Replicated, jobs: int) -> str:
    """Mean and half of the interval, rounded for people, in lines; of how many jobs where not all have it."""
    if not figure.count:
        return NO_VALUE
    sign = "+" if name == GAIN else ""
    digits = "0%" if HEADROOM in name else "1%" if "accuracy" in name else "2%" if is_share(name) else "3f"
    style = f"{{:{sign}.{digits}}}"
    lines = [style.format(figure.mean)]
    # always-B on the same prompts is the same with every seed
    if figure.interval is not None and not (name.endswith(_ALWAYS) and figure.low == figure.high):
        half = (figure.interval[1] - figure.interval[0]) / 2
        lines.append(f"± {style.replace('+', '').format(half)}")
    if figure.count < jobs:
        lines.append(f"(of {figure.count})")
    return "\n".join(lines)


def _varied_keys(jobs: Sequence[Job]) -> tuple[str, ...]:
    keys = dict.fromkeys(key for job in jobs for key in job.overrides)
    return tuple(key for key in keys if key != SEED and len({job.overrides.get(key) for job in jobs}) > 1)


def _described(job: Job, keys: Sequence[str], why: str) -> str:
    own = [f"{key}={job.overrides[key]}" for key in (*keys, SEED) if key in job.overrides]
    return f"job {job.number} ({'; '.join([', '.join(own), why]) if own else why})"


def _setting(values: Mapping[str, str], jobs: Sequence[Job]) -> Setting:
    per_job = [_with_gain(job.figures or {}) for job in jobs]
    names = dict.fromkeys(name for figures in per_job for name in figures)
    by_job = {name: tuple(figures.get(name) for figures in per_job) for name in names}
    return Setting(
        values=values,
        jobs=tuple(job.number for job in jobs),
        seeds=tuple(job.seed for job in jobs),
        by_job=by_job,
        figures={name: over_repetitions([v for v in own if v is not None]) for name, own in by_job.items()},
    )


def _with_gain(figures: Mapping[str, float | None]) -> dict[str, float | None]:
    tau, always = figures.get(TAU), figures.get(TAU + _ALWAYS)
    return {**figures, **({} if tau is None or always is None else {GAIN: tau - always})}


def _sorted(settings: Sequence[Setting], keys: Sequence[str]) -> list[Setting]:
    places: list[list[float]] = []
    for key in keys:
        values = [one.values[key] for one in settings]
        first = list(dict.fromkeys(values))
        places.append(_numbers(values) or [float(first.index(value)) for value in values])
    order = sorted(range(len(settings)), key=lambda index: tuple(place[index] for place in places))
    return [settings[index] for index in order]


def _numbers(values: Sequence[str]) -> list[float] | None:
    try:
        numbers = [float(value) for value in values]
    except ValueError:
        return None
    return numbers if all(map(math.isfinite, numbers)) else None


def _seeds_vary(jobs: Sequence[Job]) -> str:
    split = list(dict.fromkeys(name for job in jobs for name in job.split_by_seed))
    test = f"which prompts of {', '.join(split)} are tested" if split else "the test prompts are the same"
    varied = "initial weights, the order of batches and which training prompts are kept for validation"
    return f"Seeds vary {varied}{', and ' if split else '; '}{test}."
