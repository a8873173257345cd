"""Reports on data that is already there: ``python -m blockpilot.report sweep FOLDER``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from blockpilot.errors import UserError
from blockpilot.metrics import summarize_sweep
from blockpilot.report.plots import locality_figure, save_png
from blockpilot.report.sweep import choice_lines, oracle_table, print_tables, prompts_line, runs, sizes_table
from blockpilot.report.sweep_files import CHOICES, read_sweep


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one subcommand; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m blockpilot.report", description=__doc__)
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    _add_sweep(commands)
    options = parser.parse_args(arguments)
    try:
        options.run(options)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


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
        try:
            save_png(locality_figure(summary), options.png)
        except OSError as error:
            raise UserError(f"--png {options.png} cannot be written: {error.strerror}") from None
        print(f"figure in {options.png}")


if __name__ == "__main__":
    sys.exit(main())
