"""Reports on data that is already there: python -m blockpilot.report build DIR, or sweep, or ablation."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from blockpilot.errors import UserError, full_errors, tell
from blockpilot.metrics import summarize_sweep
from blockpilot.report.ablation import (
    INTERVAL,
    REGRET,
    ablation_csv,
    ablation_lines,
    ablation_markdown,
    ablation_table,
    ablation_values,
    gather,
)
from blockpilot.report.ablation_files import read_multirun
from blockpilot.report.build import build_report
from blockpilot.report.drawing import save_png
from blockpilot.report.plots import ablation_figure, locality_figure
from blockpilot.report.sweep import choice_lines, oracle_table, print_tables, prompts_line, runs, sizes_table
from blockpilot.report.sweep_files import CHOICES, read_sweep


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one subcommand; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m blockpilot.report", description=__doc__)
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    _add_build(commands)
    _add_sweep(commands)
    _add_ablation(commands)
    options = parser.parse_args(arguments)
    try:
        options.run(options)
    except UserError as error:
        if full_errors():
            raise
        tell(error)
        return 2
    return 0


def _add_build(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    about = "The page of a finished run, or of a multirun, from the files in its folder: report.html, plots/NAME.png."
    parser = commands.add_parser("build", help=about, description=about)
    parser.add_argument("folder", type=Path, metavar="DIR", help="output folder of a run or a multirun")
    parser.set_defaults(run=_build)


def _build(options: argparse.Namespace) -> None:
    with _writing("DIR", options.folder):
        print(f"report in {build_report(options.folder)}")


def _add_sweep(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    about = "Figures of a published sweep: mean acceptance length by prompt in {block size}.json, choices in 1.json."
    parser = commands.add_parser("sweep", help=about, description=about)
    parser.add_argument("folder", type=Path, help="folder of {block size}.json")
    parser.add_argument("--trained", type=int, default=16, metavar="B", help="trained block size (default: 16)")
    parser.add_argument("--png", type=Path, metavar="FILE", help="also draw which sizes are best, and the mean tau")
    parser.set_defaults(run=_sweep)


def _sweep(options: argparse.Namespace) -> None:
    sweep = read_sweep(options.folder)
    if options.trained not in sweep.block_sizes:
        raise UserError(
            f"--trained {options.trained}: {options.folder} has no {options.trained}.json; expected one of its sizes, "
            f"{runs(sweep.block_sizes)}"
        )
    summary = summarize_sweep(sweep.tau, sweep.block_sizes, options.trained, sweep.chosen)
    sizes = runs(summary.block_sizes)
    print(f"{options.folder}: {prompts_line(summary)}, block sizes {sizes}, trained block size B = {summary.trained}")
    print_tables(sizes_table(summary), oracle_table(summary))
    for line in choice_lines(summary, CHOICES):
        print(line)
    if options.png is not None:
        with _writing("--png", options.png):
            save_png(locality_figure(summary), options.png)
        print(f"figure in {options.png}")


def _add_ablation(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    about = f"One table and one figure of a finished multirun: {INTERVAL} for every setting, beside always-B."
    # argparse takes a per cent sign for a format
    parser = commands.add_parser("ablation", help=about.replace("%", "%%"), description=about.replace("%", "%%"))
    parser.add_argument("folder", type=Path, metavar="DIR", help="folder of the multirun; gets ablation.json")
    parser.add_argument("--metric", default=REGRET, help=f"the figure to draw (default: {REGRET})")
    parser.add_argument("--png", type=Path, metavar="FILE", help="where to draw it (default: DIR/ablation.png)")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="also write every figure, a row per setting")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="also write the table as Markdown")
    parser.set_defaults(run=_ablation)


def _ablation(options: argparse.Namespace) -> None:
    ablation = gather(read_multirun(options.folder))
    ablation.require(options.metric)
    print_tables(ablation_table(ablation, options.metric))
    for line in ablation_lines(ablation):
        print(line)
    numbers, png = options.folder / "ablation.json", options.png or options.folder / "ablation.png"
    with _writing("DIR", numbers):
        numbers.write_text(json.dumps(ablation_values(ablation), indent=2, allow_nan=False) + "\n", encoding="utf-8")
    with _writing("--png", png):
        save_png(ablation_figure(ablation, options.metric), png)
    if options.csv is not None:
        with _writing("--csv", options.csv):
            options.csv.write_text(ablation_csv(ablation), encoding="utf-8")
    if options.markdown is not None:
        with _writing("--markdown", options.markdown):
            options.markdown.write_text(ablation_markdown(ablation), encoding="utf-8")
    print(f"numbers in {numbers}, figure of {options.metric} in {png}")


@contextmanager
def _writing(option: str, path: Path) -> Iterator[None]:
    """A file that cannot be written is one line that names the option."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{option} {path} cannot be written: {error.strerror}") from None


if __name__ == "__main__":
    sys.exit(main())
