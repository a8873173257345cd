"""What a run leaves for people: tables, figures, an HTML page, decisions, W&B. Computes no figures of its own."""

from __future__ import annotations

from blockpilot.report.decisions import read_decisions, write_decisions
from blockpilot.report.html import write_report
from blockpilot.report.latency import latency_table
from blockpilot.report.plots import (
    ablation_figure,
    choice_figure,
    latency_figure,
    locality_figure,
    save_png,
    tau_bar_figure,
    tau_curve_figure,
)
from blockpilot.report.progress import progress_bar
from blockpilot.report.sweep import bound_line, oracle_table, print_tables, sweep_values
from blockpilot.report.table import dataset_table, summary_rows, summary_table
from blockpilot.report.tracking import log_summary

__all__ = [
    "ablation_figure",
    "bound_line",
    "choice_figure",
    "dataset_table",
    "latency_figure",
    "latency_table",
    "locality_figure",
    "log_summary",
    "oracle_table",
    "print_tables",
    "progress_bar",
    "read_decisions",
    "save_png",
    "summary_rows",
    "summary_table",
    "sweep_values",
    "tau_bar_figure",
    "tau_curve_figure",
    "write_decisions",
    "write_report",
]
