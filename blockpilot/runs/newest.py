"""The policy that is meant where none is named: that of the newest run of the same pair.

Knows what runs leave under ``outputs/``; nothing of what a policy is.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from blockpilot.config import OUTPUTS_DIR, EvaluateConfig, project_path
from blockpilot.errors import UserError

log = logging.getLogger(__name__)

_PAIR = {"model": ("name", "target", "revision"), "drafter": ("path", "revision")}
"""Keys that a run of the same pair has in common; whether the weights are still the same, the policy itself checks."""


def with_newest_policy(config: EvaluateConfig) -> EvaluateConfig:
    """The configuration with ``policy.path`` set to the newest policy of its pair under ``outputs/``; says which.

    Raises:
        UserError: there is none.
    """
    root = project_path(OUTPUTS_DIR)
    found = sorted(root.glob("**/policy/config.json"), key=lambda file: file.stat().st_mtime, reverse=True)
    newest = next((file.parent for file in found if _same_pair(file.parents[1], config)), None)
    if newest is None:
        others = f" ({len(found)} of other pairs {'is' if len(found) == 1 else 'are'})" if found else ""
        raise UserError(
            f"policy={config.policy.name} needs policy.path, the policy folder of a training run, and none of "
            f"{config.model.name} is under {root}{others}; train one with python train.py model={config.model.name}"
        )
    log.info("policy.path is not set: taking the newest run of %s, %s", config.model.name, newest)
    return replace(config, policy=replace(config.policy, path=str(newest)))


def _same_pair(run: Path, config: EvaluateConfig) -> bool:
    """Whether the run in this folder was of the configuration's target and drafter."""
    try:
        written = yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError):
        return False
    return all(
        _value(written, part, key) == getattr(getattr(config, part), key)
        for part, keys in _PAIR.items()
        for key in keys
    )


def _value(written: Any, part: str, key: str) -> object:
    section = written.get(part) if isinstance(written, dict) else None
    return section.get(key) if isinstance(section, dict) else None
