"""Which value of a logged figure stands for a whole run, where a logger keeps one: W&B's table of runs.

Knows keys, which ``docs/metrics.md`` describes; computes no figures.
"""

from __future__ import annotations

from typing import Any

STEP = "trainer/global_step"
"""Optimizer steps taken, under the name that Lightning's logger gives them."""

SUMMARIES = {
    "val/loss": "min",
    "val/regret": "min",
    "val/regret_speed": "min",
    "val/tau": "max",
    "val/tau_pooled": "max",
    "val/accuracy": "max",
    "val/accuracy_speed": "max",
    "val/headroom_captured": "max",
    "val/headroom_captured_speed": "max",
}
"""Of figures that a run has once an epoch, the best. Of every other key the last value stands."""


def summary_key(key: str) -> str:
    """The name of a figure in W&B's table of runs, such as ``val/regret.min``."""
    return f"{key}.{SUMMARIES[key]}" if key in SUMMARIES else key


def define_summaries(run: Any) -> None:
    """Tells a W&B run that its figures are drawn over steps, and which value of each is its summary."""
    run.define_metric(STEP)
    run.define_metric("*", step_metric=STEP, step_sync=True)
    for key, summary in SUMMARIES.items():
        run.define_metric(key, step_metric=STEP, step_sync=True, summary=summary)
