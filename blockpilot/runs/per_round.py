"""What deciding again every round could add: the best sequences of block sizes along the stored outputs.

Shapes: N prompts, K candidate block sizes, T anchors of one output.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from blockpilot.decoding import LatencyProfile
from blockpilot.metrics import SequenceBound, summarize_bound
from blockpilot.oracle import OracleRecord, best_sequence, cost_of_one_size

TAU, SPEED = "tau", "tokens/s by the latency profile"


def per_round_bounds(
    records: Iterable[OracleRecord], block_sizes: Sequence[int], trained: int, profile: LatencyProfile | None, seed: int
) -> dict[str, SequenceBound]:
    """Bounds in tau and, with a profile, in tokens per second; none where no prompt has rounds.

    Args:
        records: with ``acceptance_table``.
        block_sizes: the K candidates.
        trained: B.
        profile: what rounds cost; every one of the candidates was measured.
        seed: of the bootstrap.
    """
    best: dict[str, list[float]] = {TAU: [], SPEED: []}
    single: dict[str, list[Tensor]] = {TAU: [], SPEED: []}
    for record in records:
        table = record.acceptance_table
        assert table is not None
        tokens = len(table)
        if tokens == 0:
            continue
        costs: dict[str, Tensor | None] = {TAU: None}
        if profile is not None:
            anchors_T = len(record.prompt_ids) + torch.arange(tokens)
            costs[SPEED] = profile.round_seconds_of(block_sizes, anchors_T)
        for name, cost in costs.items():
            best[name].append(tokens / best_sequence(table, block_sizes, cost).cost)
            single[name].append(tokens / cost_of_one_size(table, cost))
    return {
        name: summarize_bound(
            torch.tensor(values, dtype=torch.float64), torch.stack(single[name]), block_sizes, trained, seed=seed
        )
        for name, values in best.items()
        if values
    }
