"""What a run leaves for people: tables, charts, an HTML page, decisions, W&B. Computes no figures of its own."""

from __future__ import annotations

from blockpilot.report.build import build_report, build_run, chart_file
from blockpilot.report.charts import Chart, run_charts
from blockpilot.report.curves import Curves, read_curves, write_curves
from blockpilot.report.decisions import read_decisions, write_decisions
from blockpilot.report.drawing import save_png
from blockpilot.report.latency import latency_table
from blockpilot.report.metric_keys import define_summaries
from blockpilot.report.plots import ablation_figure, latency_figure, locality_figure
from blockpilot.report.progress import TrainingProgress, progress_bar
from blockpilot.report.run_files import About, Run, read_run, write_about
from blockpilot.report.sweep import bound_line, oracle_table, print_tables, sweep_values
from blockpilot.report.table import dataset_table, summary_rows, summary_table
from blockpilot.report.tracking import log_artifacts, log_summary

__all__ = [
    "About",
    "Chart",
    "Curves",
    "Run",
    "TrainingProgress",
    "ablation_figure",
    "bound_line",
    "build_report",
    "build_run",
    "chart_file",
    "dataset_table",
    "define_summaries",
    "latency_figure",
    "latency_table",
    "locality_figure",
    "log_artifacts",
    "log_summary",
    "oracle_table",
    "print_tables",
    "progress_bar",
    "read_curves",
    "read_decisions",
    "read_run",
    "run_charts",
    "save_png",
    "summary_rows",
    "summary_table",
    "sweep_values",
    "write_about",
    "write_curves",
    "write_decisions",
]
