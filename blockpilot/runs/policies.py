"""Every policy of ``conf/policy`` by name, and the rows of the final table.

A new policy is a class in ``policies/``, a line in :data:`BUILDERS` and a YAML.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from blockpilot.config import PolicyConfig, load_preset
from blockpilot.decoding import BlockSizePolicy
from blockpilot.models import Pair
from blockpilot.oracle import LabelTable
from blockpilot.policies import ConfidencePolicy, EmaPolicy, FixedPolicy, OraclePolicy, RandomPolicy
from blockpilot.policies.per_round import PerRoundPolicy
from blockpilot.policies.predictor import PredictorPolicy

log = logging.getLogger(__name__)

AUTOREGRESSIVE = "autoregressive"
BEST_FIXED = "best_fixed"
ORACLE = "oracle"
PREDICTOR = "predictor"
LEARNED = (PREDICTOR, "per_round")
"""Made from a trained policy."""


@dataclass(frozen=True)
class Known:
    """What policies are made from."""

    pair: Pair
    """Gives B."""
    table: LabelTable
    """Labels of the test prompts, for the oracle; its candidates are random's and ema's too."""
    seed: int
    """Of random."""
    best_fixed: int | None = None
    """The best single block size of the training prompts, where it is known."""
    predictor: PredictorPolicy | None = None
    """The trained policy, where there is one."""


def _best_fixed(given: Known) -> FixedPolicy:
    assert given.best_fixed is not None, "who asks for best_fixed has labels of training prompts"
    return FixedPolicy(given.best_fixed)


def _predictor(given: Known) -> PredictorPolicy:
    assert given.predictor is not None, "who asks for a learned policy has one"
    return given.predictor


def _ema(settings: PolicyConfig, given: Known) -> EmaPolicy:
    return EmaPolicy(
        settings.tiers or given.table.block_sizes,
        settings.start or given.pair.block_size,
        settings.alpha,
        warmup_rounds=settings.warmup_rounds,
        update_interval=settings.update_interval,
        down_hysteresis=settings.down_hysteresis,
        up_hysteresis=settings.up_hysteresis,
    )


BUILDERS: Mapping[str, Callable[[PolicyConfig, Known], BlockSizePolicy]] = {
    "fixed": lambda settings, given: FixedPolicy(settings.block_size or given.pair.block_size),
    BEST_FIXED: lambda settings, given: _best_fixed(given),
    "random": lambda settings, given: RandomPolicy(given.table.block_sizes, given.seed),
    ORACLE: lambda settings, given: OraclePolicy.from_table(given.table),
    "ema": _ema,
    "confidence": lambda settings, given: ConfidencePolicy(
        settings.block_size or given.pair.block_size, settings.threshold
    ),
    PREDICTOR: lambda settings, given: _predictor(given),
    "per_round": lambda settings, given: PerRoundPolicy(_predictor(given)),
}
"""By the name in ``conf/policy``."""


def always(block_size: int) -> str:
    """Name of the policy that always uses B."""
    return f"always-{block_size}"


def row_name(settings: PolicyConfig, trained: int) -> str:
    """What the policy is called in tables: its name, and for a fixed one its size."""
    return f"fixed-{settings.block_size or trained}" if settings.name == "fixed" else settings.name


def compared_policies(
    names: Sequence[str], given: Known, question: PolicyConfig | None = None
) -> dict[str, BlockSizePolicy]:
    """The rows of the final table by name: what is given, what is in question, what is possible.

    Args:
        names: of the rows beside autoregressive and always-B (``evaluation.policies``).
        given: what they are made from.
        question: settings of the policy in question; None is the trained one. Its settings count for a row of its name.
    """
    question = question or PolicyConfig(PREDICTOR)
    trained = given.pair.block_size
    rows: dict[str, BlockSizePolicy] = {AUTOREGRESSIVE: FixedPolicy(1), always(trained): FixedPolicy(trained)}
    others = [name for name in names if name != question.name]
    if given.predictor is None and set(others) & set(LEARNED):
        log.warning("evaluation.policies: per_round is left out, for there is no trained policy")
        others = [name for name in others if name not in LEARNED]
    for name in others:
        if name != ORACLE:
            rows[name] = BUILDERS[name](settings_of(name), given)
    rows[row_name(question, trained)] = BUILDERS[question.name](question, given)
    if ORACLE in others:
        rows[ORACLE] = BUILDERS[ORACLE](settings_of(ORACLE), given)
    return rows


def settings_of(name: str) -> PolicyConfig:
    """A policy's settings as ``conf/policy`` has them."""
    return load_preset("policy", name, PolicyConfig)


def block_sizes_of(names: Sequence[str], question: PolicyConfig, trained: int) -> list[int]:
    """Sizes that the rounds of these rows may have besides the candidates and B, for what a round costs."""
    sizes: set[int] = set()
    for settings in [question, *(settings_of(name) for name in names if name != question.name)]:
        if settings.name == "fixed":
            sizes.add(settings.block_size or trained)
        if settings.name == "ema":
            sizes |= set(settings.tiers or ())  # it starts at one of them
        if settings.name == "confidence":
            sizes |= set(range(1, (settings.block_size or trained) + 1))
    return sorted(sizes)
