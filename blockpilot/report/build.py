"""The report of a run, or of a multirun, from the files in its folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from blockpilot.errors import UserError
from blockpilot.report.ablation import Ablation, gather
from blockpilot.report.ablation_files import Job, is_multirun, read_multirun
from blockpilot.report.charts import Chart, run_charts
from blockpilot.report.drawing import save_png
from blockpilot.report.multirun import job_rows, multirun_charts, multirun_verdicts, setting_table
from blockpilot.report.page import Cell, TableOf, facts_of, write_page
from blockpilot.report.prompts_list import CURVE_HEIGHT, CURVE_WIDTH, prompt_entries
from blockpilot.report.run_files import METRICS, Run, read_run
from blockpilot.report.table import COLUMNS, Row, columns, prompts_text

REPORT, PLOTS = "report.html", "plots"


def build_report(folder: Path) -> Path:
    """Makes ``report.html``, and every chart as ``plots/NAME.png``; returns the page.

    Raises:
        UserError: the folder is neither a finished run's nor a multirun's, or a file in it cannot be used.
    """
    if (folder / METRICS).is_file():
        run = read_run(folder)
        return build_run(folder, run, run_charts(run))
    if is_multirun(folder):
        return build_multirun(folder)
    raise UserError(
        f"{folder} is not the folder of a finished run, which has {METRICS}, nor of a multirun, which has 0/.hydra; "
        "expected one of them, such as outputs/DAY/TIME"
    )


def build_run(folder: Path, run: Run, charts: Sequence[Chart]) -> Path:
    """The page of one run and the PNG files of its charts (:func:`chart_file`)."""
    about, generation = run.about, run.config["generation"]
    by_policy = {row["policy"]: row for row in run.rows}
    facts = {
        "model": about.model,
        "device": about.device,
        "data sets": ", ".join(run.config["dataset"]),
        "trained block size B": about.trained_block_size,
        "candidates": ", ".join(map(str, run.labels.block_sizes)),
        "temperature": generation["temperature"],
        "output budget": f"{generation['max_new_tokens']} tokens",
        "test prompts": f"{len(run.labels)} labelled, {run.rows[0]['num_prompts']} in the table",
        "seed": run.config["seed"],
        "latency profile": about.latency_profile,
    }
    _save(folder, charts)
    write_page(
        folder / REPORT, "run.html", charts,
        title=f"BlockPilot on {about.model}",
        facts=facts_of(facts),
        headline=_headline(by_policy[about.policy], by_policy[about.always]),
        policies=_policy_table("Policies", run.rows),
        meanings=[(one.heading, one.meaning) for one in columns(run.rows)],
        datasets=[_policy_table(f"Policies on {name}", rows) for name, rows in run.datasets.items()],
        only_dataset=None if run.datasets else ", ".join(dict.fromkeys(run.curves.datasets)),
        policy=about.policy,
        always=about.always,
        prompts=prompt_entries(run),
        curve_width=CURVE_WIDTH,
        curve_height=CURVE_HEIGHT,
        num_prompts=len(run.curves),
        provenance=facts_of(about.provenance),
        overrides=run.overrides,
        config_yaml=run.config_yaml,
        figures=[(name, value) for name, value in run.figures.items() if isinstance(value, (int, float))],
    )  # fmt: skip
    return folder / REPORT


def build_multirun(folder: Path) -> Path:
    """One page over the jobs of a multirun: means over seeds, and a row per job with a link to its own page."""
    jobs = read_multirun(folder)
    ablation = gather(jobs)
    charts = multirun_charts(ablation)
    _save(folder, charts)
    write_page(
        folder / REPORT, "multirun.html", charts,
        title=f"BlockPilot multirun {folder.resolve().name}",
        facts=facts_of(_multirun_facts(jobs, ablation)),
        verdicts=multirun_verdicts(ablation),
        settings=setting_table(ablation),
        jobs=job_rows(folder, jobs, REPORT),
        seeds_vary=ablation.seeds_vary,
        left_out=ablation.left_out,
    )  # fmt: skip
    return folder / REPORT


def _headline(own: Row, always: Row) -> list[dict[str, Any]]:
    """The two questions of a run: more tokens per round, and more tokens per second, than always-B?"""
    cards = []
    for question, key, gain, style in (
        ("tokens per round (tau)", "tau", "tau_gain", "{:.3f}"),
        ("speedup over autoregressive decoding", "speedup", "speed_gain", "{:.2f}x"),
    ):
        column = next(one for one in COLUMNS if one.key == gain)
        known = own[key] is not None and always[key] is not None and own[gain] is not None
        value, interval, verdict = (*column.cell(own), "", "")[:3] if known else ("", "", "not measured")
        cards.append(
            {
                "question": question,
                "key": key,
                "own": style.format(own[key]) if known else "",
                "always": style.format(always[key]) if known else "",
                "gain": value,
                "interval": interval,
                "verdict": verdict,
            }
        )
    return cards


def _policy_table(title: str, rows: Sequence[Row]) -> TableOf:
    shown = columns(rows)
    cells = [
        (Cell((row["policy"],)), *(Cell(column.cell(row), row.get(column.key)) for column in shown)) for row in rows
    ]
    return TableOf(title, prompts_text(rows), ["policy", *(column.heading for column in shown)], cells)


def _multirun_facts(jobs: Sequence[Job], ablation: Ablation) -> dict[str, Any]:
    return {
        "swept": ", ".join(ablation.keys) or "nothing but the seed",
        "settings": len(ablation.settings),
        "jobs": f"{sum(job.state == 'finished' for job in jobs)} of {len(jobs)} finished",
    }


def chart_file(folder: Path, chart: Chart) -> Path:
    """Where the PNG of a chart is."""
    return folder / PLOTS / f"{chart.name}.png"


def _save(folder: Path, charts: Sequence[Chart]) -> None:
    (folder / PLOTS).mkdir(exist_ok=True)
    for chart in charts:
        save_png(chart.figure, chart_file(folder, chart))
