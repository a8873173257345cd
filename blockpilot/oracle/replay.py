"""Labels by replay: draft along the target's known output, for every candidate block size at once.

The target's output does not depend on the block size, so it is decoded once; after that no target pass is needed. A
*chain* is (prompt, block size); its state is a position. Every step drafts the next block of all chains of all prompts
and moves each chain on by its acceptance length.

Knows the engine's rules of what is committed and follows them. Drafting is in ``wavefront.py``; ``enumeration.py`` is
the check.

Shapes: C chains, N output tokens, K candidates.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from blockpilot.decoding.engine import check_prompts
from blockpilot.decoding.sampling import Sampling
from blockpilot.decoding.trajectory import Trajectory, generate_batch
from blockpilot.errors import UserError, integer, integers
from blockpilot.models.pair import Pair
from blockpilot.oracle.memory import BatchMemory
from blockpilot.oracle.per_round import acceptance_tables, walk
from blockpilot.oracle.record import OracleRecord
from blockpilot.oracle.wavefront import Ints, KnownText, Wavefront


def replay(
    pair: Pair,
    prompts: Sequence[Sequence[int]],
    block_sizes: Sequence[int],
    *,
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    top_p: float = 1.0,
    top_k: int = 0,
    seed: int = 0,
    stop_token_ids: Collection[int] | None = None,
    tau_convention: str = "committed",
    batch_size: int = 64,
    max_batch_tokens: int | None = None,
    per_round: bool = False,
    keep_features: bool = False,
) -> list[OracleRecord]:
    """Acceptance lengths of every candidate for every prompt, without decoding once per candidate.

    In fp32 the result equals :func:`blockpilot.oracle.enumerate` round for round.

    Args:
        pair: target and drafter.
        prompts: token ids of each prompt.
        block_sizes: candidates, each at least 1.
        max_new_tokens, temperature, top_p, top_k, seed, stop_token_ids: as in :func:`blockpilot.generate`.
        tau_convention: ``committed``, or ``reference`` (the last round is not cut).
        batch_size: most prompts worked on at once; like the next one, it changes nothing but speed and memory.
        max_batch_tokens: most positions held, and tokens drafted, at once; None starts high. Halved where memory runs
            out.
        per_round: whether ``acceptance_table`` is wanted.
        keep_features: whether ``features`` and ``states`` are wanted (in memory), for
            :func:`blockpilot.oracle.simulate`.

    Raises:
        UserError: a prompt that cannot be decoded, a value out of range, or too little memory for a single prompt.
    """
    candidates = check_block_sizes(block_sizes)
    uncut = check_convention(tau_convention)
    if integer("batch_size", batch_size) < 1:
        raise UserError(f"batch_size={batch_size!r} is not allowed; expected a number of at least 1")
    checked = check_prompts(pair, prompts, max_new_tokens)
    Sampling(temperature, top_p, top_k, seed)  # refuses what is out of range, even where there is no prompt
    memory = BatchMemory(max_batch_tokens, pair.device, min(max(candidates), pair.max_positions))
    records: dict[int, OracleRecord] = {}

    def label(members: list[int]) -> None:
        trajectories = generate_batch(
            pair, [checked[i] for i in members], max_new_tokens=max_new_tokens, temperature=temperature, top_p=top_p,
            top_k=top_k, seed=seed, stop_token_ids=stop_token_ids, features=True, states=keep_features,
            beyond=min(max(candidates), pair.max_positions) if uncut else 0,
        )  # fmt: skip
        front = wavefront_of(pair, trajectories, max(candidates), memory.tokens)
        tables = [None] * len(members)
        if per_round:
            tables = acceptance_tables(front, trajectories, candidates, uncut)
            lengths = [walk(table, candidates) for table in tables]
        else:
            lengths = follow_chains(front, trajectories, candidates, uncut)
        for index, t, accepted, table in zip(members, trajectories, lengths, tables, strict=True):
            records[index] = OracleRecord(
                t.prompt_ids, t.output_ids, accepted, t.logits, t.hidden,
                None if table is None else torch.from_numpy(table), t.features.clone() if keep_features else None,
                None if t.states is None else t.states.clone(),
            )  # fmt: skip

    # a longer output has no positions
    costs = [min(len(prompt) + max_new_tokens, pair.max_positions + 1) for prompt in checked]
    memory.work_off(costs, batch_size, label)
    return [records[index] for index in range(len(checked))]


def check_block_sizes(block_sizes: Sequence[int]) -> tuple[int, ...]:
    """Rising candidates without repeats.

    Raises:
        UserError: none given, or one below 1.
    """
    candidates = tuple(sorted(set(integers("block_sizes", block_sizes))))
    if not candidates or candidates[0] < 1 or candidates[-1] >= 2**31:
        raise UserError(f"block_sizes={list(block_sizes)} is not allowed; expected at least one, each 1 to 2**31 - 1")
    return candidates


def check_convention(tau_convention: str) -> bool:
    """Whether the last round is left uncut."""
    if tau_convention not in ("committed", "reference"):
        raise UserError(f"tau_convention={tau_convention!r} is not allowed; expected one of committed, reference")
    return tau_convention == "reference"


def wavefront_of(pair: Pair, trajectories: Sequence[Trajectory], widest: int, max_tokens: int) -> Wavefront:
    """Ready to draft along these trajectories."""
    texts = [KnownText(t.prompt_ids + t.output_ids + t.beyond_ids, t.features) for t in trajectories]
    return Wavefront(pair, texts, widest, max_tokens)


def follow_chains(
    front: Wavefront, trajectories: Sequence[Trajectory], candidates: Sequence[int], uncut: bool
) -> list[dict[int, list[int]]]:
    """Acceptance lengths per trajectory and candidate, by drafting each chain's blocks one after the other."""
    lengths: list[dict[int, list[int]]] = [{b: [] for b in candidates} for _ in trajectories]
    rows_C = np.repeat(np.arange(len(trajectories)), len(candidates))
    # a block never reaches past the models' positions, however large its size
    sizes_C = np.tile(np.minimum(candidates, front.limit), len(trajectories))
    starts_C = np.array([len(t.prompt_ids) for t in trajectories], dtype=np.int64)[rows_C]
    ends_C = starts_C + np.array([len(t.output_ids) - 1 for t in trajectories], dtype=np.int64)[rows_C]
    anchors_C, rounds_C = starts_C.copy(), np.zeros_like(starts_C)
    while True:
        alive = np.flatnonzero(anchors_C < ends_C)
        if len(alive) == 0:
            return lengths
        # one more round and token: before the first round nothing is known
        tau = (anchors_C - starts_C + 1) / (rounds_C + 1)
        step = alive[_longest_first((ends_C - anchors_C)[alive] / tau[alive], sizes_C[alive], front.pass_tokens)]
        whole = front.right(rows_C[step], anchors_C[step], sizes_C[step]) + 1
        committed = np.minimum(whole, ends_C[step] - anchors_C[step])
        counted = whole if uncut else committed
        for chain, length in zip(step.tolist(), counted.tolist(), strict=True):
            lengths[chain // len(candidates)][candidates[chain % len(candidates)]].append(length)
        anchors_C[step] += committed
        rounds_C[step] += 1


def _longest_first(rounds_left_C: NDArray[np.float64], sizes_C: Ints, pass_tokens: int) -> Ints:
    """Which chains to advance, so that all end together and the last passes are as full as the first.

    Those with the most rounds before them, as many as keep the step at the mean of the steps that remain.
    """
    mean_step = (rounds_left_C * sizes_C).sum() / rounds_left_C.max()
    order = np.argsort(-rounds_left_C, kind="stable")
    count = np.searchsorted(np.cumsum(sizes_C[order]), max(mean_step, pass_tokens), side="right")
    return order[: max(1, count)]
