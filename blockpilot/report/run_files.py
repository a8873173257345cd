"""The files of a finished run that its report is made of.

Knows their names and content, and what of every prompt came of every policy; draws nothing.

Shapes: N prompts of the table, K candidate block sizes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from blockpilot.errors import UserError, brief
from blockpilot.learning.history import HISTORY, read_history
from blockpilot.metrics import DecodedPrompt, tau_per_prompt
from blockpilot.metrics.formulas import relative_loss
from blockpilot.report.curves import Curves, read_curves
from blockpilot.report.decisions import read_decisions
from blockpilot.report.table import Row, plain

METRICS, DECISIONS, PROMPTS = "metrics.json", "decisions.parquet", "prompts.parquet"
ABOUT, CONFIG, OVERRIDES = "run.json", "config.yaml", ".hydra/overrides.yaml"


@dataclass(frozen=True)
class About:
    """What made a run, as ``run.json`` holds it."""

    model: str
    device: str
    policy: str
    """Name of the row in question."""
    always: str
    """Name of always-B's row."""
    trained_block_size: int
    """B."""
    latency_profile: str | None
    """Device of the profile behind the regret in speed, if there is one."""
    provenance: Mapping[str, str]
    """Versions, commit, time, and what the pair's weights were."""


@dataclass(frozen=True)
class Run:
    """A finished run, from its files."""

    about: About
    figures: Mapping[str, Any]
    """All that ``metrics.json`` holds."""
    labels: Curves
    """Of all test prompts."""
    decoded: tuple[DecodedPrompt, ...]
    history: tuple[Mapping[str, Any], ...]
    """A row per epoch; empty where nothing was trained."""
    config_yaml: str
    overrides: tuple[str, ...]
    """What was typed, where Hydra ran it."""

    @property
    def rows(self) -> Sequence[Row]:
        """A row of figures per policy."""
        return self.figures["policies"]

    @property
    def datasets(self) -> Mapping[str, Sequence[Row]]:
        """The same for each data set by itself; none where there is only one."""
        return self.figures.get("datasets", {})

    @property
    def config(self) -> Mapping[str, Any]:
        """The resolved configuration."""
        return yaml.safe_load(self.config_yaml)

    @cached_property
    def by_policy(self) -> Mapping[str, Sequence[DecodedPrompt]]:
        """Every policy's decodes, the prompts in one order."""
        found: dict[str, dict[str, DecodedPrompt]] = {}
        for one in self.decoded:
            found.setdefault(one.policy, {})[one.prompt_id] = one
        order = list(next(iter(found.values())))
        return {policy: [own[prompt_id] for prompt_id in order] for policy, own in found.items()}

    @cached_property
    def curves(self) -> Curves:
        """Labels of the table's prompts, in the same order."""
        return self.labels.select([one.prompt_id for one in next(iter(self.by_policy.values()))])

    @property
    def choosing(self) -> list[str]:
        """Every policy but plain autoregressive decoding."""
        return [row["policy"] for row in self.rows if not plain(row)]

    @cached_property
    def has_rounds(self) -> Tensor:
        """Bool ``[N]``."""
        return (self.curves.rounds > 0).all(1)

    def tau(self, policy: str) -> Tensor:
        """float64 ``[N]``; NaN without rounds."""
        own = self.by_policy[policy]
        tokens_N = torch.tensor([sum(one.acceptance_lengths) for one in own])
        return tau_per_prompt(tokens_N, torch.tensor([len(one.acceptance_lengths) for one in own]))

    def loss(self, policy: str) -> Tensor:
        """float64 ``[N]``: share of the best candidate's tau given away; its mean is the row's ``regret``."""
        return relative_loss(self.curves.tau.amax(1), self.tau(policy))

    def chosen(self, policy: str) -> list[int]:
        """The size each prompt's first round was given."""
        return [one.first_block_size for one in self.by_policy[policy]]


def write_about(folder: Path, about: About) -> None:
    """Writes ``run.json``."""
    (folder / ABOUT).write_text(json.dumps(asdict(about), indent=2) + "\n", encoding="utf-8")


def read_run(folder: Path) -> Run:
    """A run from the files in its folder.

    Raises:
        UserError: a file is missing or is not what a run wrote; the message names it.
    """
    figures, about = _object(folder / METRICS), _object(folder / ABOUT)
    if not isinstance(figures.get("policies"), list) or not figures["policies"]:
        raise UserError(f"{folder / METRICS} has policies={brief(figures.get('policies'))}; expected a row per policy")
    names = {field.name for field in fields(About)}
    if about.keys() != names:
        raise UserError(f"{folder / ABOUT} has {', '.join(about)}; expected {', '.join(sorted(names))}")
    run = Run(
        about=About(**about),
        figures=figures,
        labels=read_curves(folder / PROMPTS),
        decoded=tuple(read_decisions(folder / DECISIONS)),
        history=tuple(read_history(folder / HISTORY)),
        config_yaml=_text(folder / CONFIG),
        overrides=tuple(yaml.safe_load(_text(folder / OVERRIDES))) if (folder / OVERRIDES).is_file() else (),
    )
    _check_together(folder, run)
    return run


def _check_together(folder: Path, run: Run) -> None:
    """Files of two runs in one folder are told apart here rather than by a page that is wrong."""
    policies = [row["policy"] for row in run.rows]
    decoded = list(dict.fromkeys(one.policy for one in run.decoded))
    if policies != decoded or not {run.about.policy, run.about.always} <= set(policies):
        raise UserError(
            f"{folder}: {METRICS} has the policies {', '.join(policies)}, {DECISIONS} has {', '.join(decoded)}, "
            f"{ABOUT} names {run.about.policy} and {run.about.always}; expected the files of one run"
        )
    unknown = {one.prompt_id for one in run.decoded} - set(run.labels.prompt_ids)
    if unknown:
        raise UserError(
            f"{folder}: {PROMPTS} lacks prompt {min(unknown)!r} of {DECISIONS}; expected the files of one run"
        )


def _object(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(_text(path))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read as JSON: {error}") from None
    if not isinstance(content, dict):
        raise UserError(f"{path} holds {brief(content)}; expected names and values")
    return content


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from None
