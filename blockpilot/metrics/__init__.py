"""Formulas, torchmetrics wrappers that hold sums and counts, and per-policy summaries. Knows no model and no file.

The wrappers stay in ``metrics.modules``, so that who only decodes does not load torchmetrics.
"""

from __future__ import annotations

from blockpilot.metrics.estimate import FEWEST_PROMPTS, Estimate, PairedBootstrap
from blockpilot.metrics.formulas import (
    best_choice,
    best_fixed,
    best_share,
    bootstrap_interval,
    headroom_captured,
    is_best,
    mean_tau,
    pooled_tau,
    regret_per_prompt,
    speed_utility,
    speedup,
    tau_per_prompt,
)
from blockpilot.metrics.summary import DecodedPrompt, PolicySummary, RoundCosts, summarize
from blockpilot.metrics.sweep import (
    FixedSize,
    OracleGain,
    SequenceBound,
    SweepSummary,
    summarize_bound,
    summarize_sweep,
)

__all__ = [
    "FEWEST_PROMPTS",
    "DecodedPrompt",
    "Estimate",
    "FixedSize",
    "OracleGain",
    "PairedBootstrap",
    "PolicySummary",
    "RoundCosts",
    "SequenceBound",
    "SweepSummary",
    "best_choice",
    "best_fixed",
    "best_share",
    "bootstrap_interval",
    "headroom_captured",
    "is_best",
    "mean_tau",
    "pooled_tau",
    "regret_per_prompt",
    "speed_utility",
    "speedup",
    "summarize",
    "summarize_bound",
    "summarize_sweep",
    "tau_per_prompt",
]
