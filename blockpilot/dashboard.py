"""The project's workspace in Weights & Biases: python -m blockpilot.dashboard; --dry-run only prints it."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Builds and saves it; returns the exit code."""
    from blockpilot.config import LoggerConfig
    from blockpilot.errors import UserError, full_errors, tell
    from blockpilot.report.workspace import save, spec, workspace

    parser = argparse.ArgumentParser(prog="python -m blockpilot.dashboard", description=__doc__)
    entity, project = os.environ.get("WANDB_ENTITY", ""), LoggerConfig().project
    parser.add_argument("--entity", default=entity, metavar="E", help="user or team (default: WANDB_ENTITY, or yours)")
    parser.add_argument("--project", default=project, metavar="P", help=f"of the runs (default: {project})")
    parser.add_argument("--name", default="BlockPilot", metavar="N", help="of the workspace (default: BlockPilot)")
    parser.add_argument(
        "--dry-run", action="store_true", help="print its specification as JSON; needs no network, no key"
    )
    options = parser.parse_args(arguments)
    try:
        view = workspace(options.entity, options.project, options.name)
        if options.dry_run:
            print(json.dumps(spec(view), indent=2))
        else:
            print(f"workspace in {save(view)}")
    except UserError as error:
        if full_errors():
            raise
        tell(error)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
