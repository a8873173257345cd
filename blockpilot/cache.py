"""Look through, show and merge label caches: python -m blockpilot.cache verify|show|merge.

DIR is the folder of one cache (with manifest.json) or one above, such as data/cache; then all caches below are taken.
Exit codes: 0; 1 where verify finds a cache that is not complete and whole; 2 where something given cannot be used.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from blockpilot.errors import UserError, full_errors, tell

TABLE_WIDTH = 112


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one subcommand; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m blockpilot.cache", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, run, about in (
        ("verify", _verify, "read every shard, compare it with its digest and its rows with what must hold"),
        ("show", _show, "what a cache holds and what made it"),
    ):
        command = commands.add_parser(name, help=about, description=about)
        command.add_argument("folders", type=Path, nargs="+", metavar="DIR")
        command.set_defaults(run=run)
    about = "copy to TARGET the shards it lacks; the sources are left as they are"
    command = commands.add_parser("merge", help=about, description=about)
    command.add_argument("target", type=Path, metavar="TARGET", help="new or existing")
    command.add_argument("sources", type=Path, nargs="+", metavar="SOURCE", help="filled by other writers")
    command.set_defaults(run=_merge)
    options = parser.parse_args(arguments)
    try:
        return options.run(options)
    except (UserError, OSError) as error:
        if full_errors():
            raise
        tell(error)
        return 2


def _verify(options: argparse.Namespace) -> int:
    from blockpilot.oracle.audit import inspect_cache
    from blockpilot.report.caches import verify_lines

    whole = True
    for folder in _caches(options.folders):
        try:
            state = inspect_cache(folder)
            whole = whole and state.is_whole
            lines = [*verify_lines(state)]
        except UserError as error:
            whole, lines = False, [f"{folder}: NOT whole; {error}"]
        print(*lines, sep="\n", flush=True)
    return 0 if whole else 1


def _show(options: argparse.Namespace) -> int:
    from rich.console import Console

    from blockpilot.oracle.audit import inspect_cache
    from blockpilot.report.caches import cache_table

    # a narrow terminal may wrap the table, but nothing in it is cut
    console, failed = Console(width=max(Console().width, TABLE_WIDTH)), False
    for folder in _caches(options.folders):
        try:
            table = cache_table(inspect_cache(folder))
            print(folder)
            console.print(table)
        except UserError as error:
            failed = True
            print(f"error: {error}", file=sys.stderr)
    return 2 if failed else 0


def _merge(options: argparse.Namespace) -> int:
    from blockpilot.oracle.merge import merge
    from blockpilot.report.caches import merge_lines

    for merged in merge(options.target, options.sources):
        print(*merge_lines(merged), sep="\n")
    return 0


def _caches(folders: Sequence[Path]) -> list[Path]:
    """Those of all folders, each once."""
    from blockpilot.oracle.audit import find_caches

    return list(dict.fromkeys(cache for folder in folders for cache in find_caches(folder)))


if __name__ == "__main__":
    sys.exit(main())
