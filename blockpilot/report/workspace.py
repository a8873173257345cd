"""The W&B workspace of the project's runs: which panels, over which of the documented keys.

Knows keys and configuration names; the panels are those of ``wandb-workspaces``, which comes with the extra
``dashboard``. Nothing here talks to W&B but :func:`save`.
"""

from __future__ import annotations

import urllib.error
import urllib.request
from typing import TYPE_CHECKING, Any

from blockpilot.errors import UserError
from blockpilot.report.metric_keys import STEP, summary_key

if TYPE_CHECKING:
    from wandb_workspaces.workspaces import Section, Workspace

HEADLINE = {
    "tau: the policy, and always-B": ("eval/tau", "eval/tau_always"),
    "gain in tau over always-B, and the ends of its 95 % interval": (
        "eval/tau_gain", "eval/tau_gain_low", "eval/tau_gain_high",
    ),
    "headroom captured": ("eval/headroom_captured",),
    "speedup over autoregressive: the policy, and always-B": ("eval/speedup", "eval/speedup_always"),
    "gain in tokens per second over always-B, and the ends of its 95 % interval": (
        "eval/speed_gain", "eval/speed_gain_low", "eval/speed_gain_high",
    ),
    "regret: the policy, and always-B": ("eval/regret", "eval/regret_always"),
}  # fmt: skip
"""Bars, a run each."""
TRAINING = {
    "loss": ("train/loss", "val/loss"),
    "regret": ("val/regret",),
    "headroom captured": ("val/headroom_captured",),
    "tau: the policy, and always-B": ("val/tau", "val/tau_always"),
    "accuracy": ("val/accuracy",),
    "regret in speed": ("val/regret_speed",),
}
"""Lines over steps."""
TEST = {
    "regret on all test prompts": ("test/regret", "test/regret_always", "test/regret_best_fixed"),
    "tau on all test prompts": ("test/tau", "test/tau_always", "test/tau_best_fixed"),
    "headroom captured, accuracy on all test prompts": ("test/headroom_captured", "test/accuracy"),
}
"""Bars, a run each."""
FIGURES = (
    "tau-by-policy", "tau-by-size", "best-and-chosen-sizes", "choices", "regret", "confusion", "prompt-curves",
    "acceptance-lengths", "training",
)  # fmt: skip
"""Charts of a run, in the report's order."""
TABLES = ("policies", "decisions")
SWEPT = ("predictor.k", "predictor.depth", "predictor.width", "predictor.loss", "preprocess.kind")
"""Configuration keys of the ablations."""
OUTCOMES = ("val/regret", "test/regret", "eval/regret", "eval/tau_gain")
"""What becomes of them."""
COLUMNS = ("eval/tau", "eval/tau_always", "eval/tau_gain", "eval/speedup", "test/regret", "val/regret")
"""Of the table of runs."""
DRAFTER_ACCURACY = "^train/accuracy_[0-9]+$"
_PATIENCE_SECONDS = 10


def workspace(entity: str, project: str, name: str) -> Workspace:
    """The workspace, not saved yet.

    Args:
        entity: user or team.
        project: where the runs are.
        name: that it will be found by.

    Raises:
        UserError: ``wandb-workspaces`` is not installed.
    """
    try:
        from wandb_workspaces import workspaces
    except ImportError:
        raise UserError(
            "the dashboard needs the package wandb-workspaces, which is not installed: it comes with the extra "
            "dashboard, pip install -c constraints.txt -e '.[dashboard]'"
        ) from None
    return workspaces.Workspace(
        entity=entity,
        project=project,
        name=name,
        sections=_sections(),
        settings=workspaces.WorkspaceSettings(x_axis=STEP),
        runset_settings=workspaces.RunsetSettings(pinned_columns=[f"summary:{summary_key(key)}" for key in COLUMNS]),
    )


def _sections() -> list[Section]:
    from wandb_workspaces.reports.v2 import interface as reports
    from wandb_workspaces.workspaces import Section

    def bars(charts: dict[str, tuple[str, ...]]) -> list[Any]:
        return [
            reports.BarPlot(title=title, metrics=[summary_key(key) for key in keys]) for title, keys in charts.items()
        ]

    lines: list[Any] = [reports.LinePlot(title=title, x=STEP, y=list(keys)) for title, keys in TRAINING.items()]
    figures: list[Any] = [
        reports.MediaBrowser(title=name, media_keys=[f"figures/{name}"], num_columns=1) for name in FIGURES
    ]
    tables: list[Any] = [reports.WeavePanelSummaryTable(table_name=name) for name in TABLES]
    drafter: list[Any] = [
        reports.LinePlot(title="loss of a drafter", x=STEP, y=["train/loss"]),
        reports.LinePlot(title="accuracy by place in the block", x=STEP, metric_regex=DRAFTER_ACCURACY),
        reports.LinePlot(title="simulated tau at B", x=STEP, y=["val/tau"]),
    ]
    return [
        Section("Policy against always-B", panels=bars(HEADLINE), is_open=True, pinned=True),
        Section("Training", panels=lines, is_open=True),
        Section("All test prompts", panels=bars(TEST), is_open=True),
        Section("Figures", panels=figures, is_open=True),
        Section("Tables", panels=tables, is_open=True),
        Section("Sweeps", panels=_sweeps(), is_open=True),
        Section("Drafter training", panels=drafter),
    ]


def _sweeps() -> list[Any]:
    """All settings against what became of them, and each by itself: means over runs, with standard errors."""
    from wandb_workspaces.reports.v2 import interface as reports

    columns = [
        *(reports.ParallelCoordinatesPlotColumn(reports.Config(key), display_name=key) for key in SWEPT),
        *(reports.ParallelCoordinatesPlotColumn(reports.SummaryMetric(summary_key(key)), key) for key in OUTCOMES),
    ]
    grouped = [
        reports.BarPlot(
            title=f"regret by {key}", metrics=["eval/regret", "eval/regret_always"], groupby=reports.Config(key),
            groupby_aggfunc="mean", groupby_rangefunc="stderr",
        )
        for key in SWEPT
    ]  # fmt: skip
    return [reports.ParallelCoordinatesPlot(columns=columns, title="settings and regret"), *grouped]


def spec(view: Workspace) -> dict[str, Any]:
    """What W&B would be sent: plain values, as JSON has them."""
    return view._to_model().model_dump(mode="json", by_alias=True, exclude_none=True)


def save(view: Workspace) -> str:
    """Saves a workspace as a new view; returns its address.

    Raises:
        UserError: W&B cannot be reached, or refuses.
    """
    import wandb

    try:
        _require_answer(wandb.setup().settings.base_url)
        view.entity = view.entity or wandb.Api().default_entity or ""
        return view.save().url
    except (wandb.Error, ValueError, OSError) as error:
        reason = " ".join(str(error).split())
        raise UserError(
            f"the workspace of {view.project!r} cannot be saved: {reason}; --dry-run prints it without network or key"
        ) from error


def _require_answer(address: str) -> None:
    """Whether W&B can be reached: its client goes on trying for many minutes after it has told of a failure.

    Raises:
        OSError: it cannot.
    """
    try:
        urllib.request.urlopen(address, timeout=_PATIENCE_SECONDS).close()
    except urllib.error.HTTPError:
        return  # an answer, too
    except OSError as error:
        raise OSError(f"{address} does not answer ({getattr(error, 'reason', error)})") from error
