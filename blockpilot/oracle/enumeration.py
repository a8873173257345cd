"""Labels by enumeration: decode every prompt once per candidate. Slow, and the check of ``replay.py``."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from blockpilot.decoding.engine import Generation, Prefill, check_prompts, generate
from blockpilot.decoding.sampling import Sampling
from blockpilot.models.pair import Pair
from blockpilot.oracle.record import OracleRecord
from blockpilot.oracle.replay import check_block_sizes, check_convention


class _Fixed:
    """One block size, and the prefill it was chosen at."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.prefill: Prefill | None = None

    def choose(self, prefill: Prefill) -> int:
        self.prefill = prefill
        return self.block_size


def enumerate_block_sizes(
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
) -> list[OracleRecord]:
    """The same labels as :func:`blockpilot.oracle.replay`, by real decoding; same arguments (``batch_size`` is unused).

    Raises:
        UserError: as :func:`blockpilot.oracle.replay`.
    """
    del batch_size
    candidates = check_block_sizes(block_sizes)
    uncut = check_convention(tau_convention)
    records = []
    Sampling(temperature, top_p, top_k, seed)  # refuses what is out of range, even where there is no prompt
    for prompt in check_prompts(pair, prompts, max_new_tokens):
        lengths: dict[int, list[int]] = {}
        for block_size in candidates:
            policy = _Fixed(block_size)
            out = generate(
                pair, prompt, policy, max_new_tokens=max_new_tokens, temperature=temperature, top_p=top_p,
                top_k=top_k, seed=seed, stop_token_ids=stop_token_ids,
            )  # fmt: skip
            lengths[block_size] = _counted(out, uncut)
        assert policy.prefill is not None
        logits, hidden = policy.prefill.logits.float().cpu(), policy.prefill.hidden.float().cpu()
        records.append(OracleRecord(prompt, out.output_ids, lengths, logits, hidden))
    return records


def _counted(out: Generation, uncut: bool) -> list[int]:
    if uncut and out.acceptance_lengths:
        return [*out.acceptance_lengths[:-1], out.last_round_uncut]
    return out.acceptance_lengths
