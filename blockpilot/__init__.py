"""BlockPilot: learn, per prompt, how many tokens a block-diffusion drafter should propose per round.

Names are imported on first use, so that ``import blockpilot.config`` stays light.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from blockpilot import oracle
    from blockpilot.decoding import BlockSizePolicy, Draft, Generation, Prefill, Round, generate, generate_batch
    from blockpilot.decoding.custom_generate import custom_generate
    from blockpilot.errors import UserError
    from blockpilot.models import Pair, load_pair
    from blockpilot.policies import ConfidencePolicy, EmaPolicy, FixedPolicy, OraclePolicy, RandomPolicy
    from blockpilot.policies.per_round import PerRoundPolicy
    from blockpilot.policies.predictor import PredictorPolicy, load_policy

__version__ = "0.1.0"

_HOMES = {
    "BlockSizePolicy": "decoding",
    "ConfidencePolicy": "policies",
    "Draft": "decoding",
    "EmaPolicy": "policies",
    "FixedPolicy": "policies",
    "Generation": "decoding",
    "OraclePolicy": "policies",
    "Pair": "models",
    "PerRoundPolicy": "policies.per_round",
    "PredictorPolicy": "policies.predictor",
    "Prefill": "decoding",
    "RandomPolicy": "policies",
    "Round": "decoding",
    "UserError": "errors",
    "custom_generate": "decoding.custom_generate",
    "generate": "decoding",
    "generate_batch": "decoding",
    "load_pair": "models",
    "load_policy": "policies.predictor",
    "oracle": "",
}

__all__ = [
    "BlockSizePolicy",
    "ConfidencePolicy",
    "Draft",
    "EmaPolicy",
    "FixedPolicy",
    "Generation",
    "OraclePolicy",
    "Pair",
    "PerRoundPolicy",
    "PredictorPolicy",
    "Prefill",
    "RandomPolicy",
    "Round",
    "UserError",
    "custom_generate",
    "generate",
    "generate_batch",
    "load_pair",
    "load_policy",
    "oracle",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'blockpilot' has no attribute {name!r}")
    if name == "oracle":
        return import_module("blockpilot.oracle")
    return getattr(import_module(f"blockpilot.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
