"""Rules of other engines that adapt without learning: by a moving average, and by the drafter's own confidence.

Know what a round or a draft tells; nothing of models, labels or distributions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from blockpilot.config import require
from blockpilot.decoding.engine import Draft, Prefill, Round
from blockpilot.errors import integer, integers


class EmaPolicy:
    """A moving average of the acceptance length picks a tier, as SGLang's adaptive speculative decoding does.

    SGLang counts draft steps, here it is block sizes, one more: a block of ``b`` can have ``b - 1`` right drafts. Its
    rule in these terms, with ``ema`` the average of acceptance lengths (one more than the right drafts):

    - ``ema`` starts at ``b - 1``, where no tier is better; each round moves it by ``alpha`` towards its own length.
    - Every ``update_interval`` rounds after ``warmup_rounds``: as long as ``ema <= lower - 0.5 + down_hysteresis``, one
      tier down to ``lower``; then, as long as ``ema > b - 0.5 + up_hysteresis``, one tier up from ``b``. Without
      hysteresis this is the smallest tier of at least ``round(ema) + 1``: one place more than is accepted.

    Source: https://docs.sglang.io/docs/advanced_features/adaptive_speculative_decoding and the defaults of its
    ``AdaptiveSpeculativeParams``. They are the defaults here, but for the warm-up: SGLang waits 10 batches once in a
    server's life; here the average begins anew with every prompt, so that the order of prompts changes nothing.

    Args:
        block_sizes: the tiers.
        start: block size a prompt starts with; the nearest tier, the larger of two.
        alpha: weight of the latest round, in (0, 1].
        warmup_rounds: first rounds of a prompt that move the average only.
        update_interval: rounds between decisions.
        down_hysteresis: added to the average at which a tier is left downwards; below 0, later.
        up_hysteresis: added to that at which it is left upwards; above 0, later.

    Raises:
        UserError: a value is out of range.
    """

    def __init__(
        self,
        block_sizes: Sequence[int],
        start: int,
        alpha: float = 0.2,
        *,
        warmup_rounds: int = 0,
        update_interval: int = 5,
        down_hysteresis: float = -0.25,
        up_hysteresis: float = 0.0,
    ) -> None:
        tiers = sorted(set(integers("block_sizes", block_sizes)))
        require(len(tiers) > 0 and tiers[0] >= 1, "block_sizes", tiers, "at least one block size, each 1 or more")
        require(integer("start", start) >= 1, "start", start, "a number of at least 1")
        require(0 < alpha <= 1, "alpha", alpha, "a number in (0, 1]")
        require(integer("warmup_rounds", warmup_rounds) >= 0, "warmup_rounds", warmup_rounds, "a number of at least 0")
        fine = integer("update_interval", update_interval) >= 1
        require(fine, "update_interval", update_interval, "a number of at least 1")
        self.block_sizes, self.alpha = tuple(tiers), alpha
        self.start = min(range(len(tiers)), key=lambda tier: (abs(tiers[tier] - start), -tier))
        self.warmup_rounds, self.update_interval = warmup_rounds, update_interval
        self.down_hysteresis, self.up_hysteresis = down_hysteresis, up_hysteresis
        self._begin()

    def _begin(self) -> None:
        self.tier, self.rounds = self.start, 0
        self.ema = float(self.block_sizes[self.start] - 1)

    def choose(self, prefill: Prefill) -> int:
        """The tier every prompt starts with; forgets the prompt before."""
        self._begin()
        return self.block_sizes[self.tier]

    def update(self, round: Round) -> int:
        """The tier of the next round."""
        self.ema += self.alpha * (round.acceptance_length - self.ema)
        self.rounds += 1
        counted = self.rounds - self.warmup_rounds
        if counted > 0 and counted % self.update_interval == 0:
            sizes, last = self.block_sizes, len(self.block_sizes) - 1
            while self.tier > 0 and self.ema <= sizes[self.tier - 1] - 0.5 + self.down_hysteresis:
                self.tier -= 1
            while self.tier < last and self.ema > sizes[self.tier] - 0.5 + self.up_hysteresis:
                self.tier += 1
        return self.block_sizes[self.tier]


@dataclass(frozen=True)
class ConfidencePolicy:
    """Drafts a whole block and verifies it up to the first token the drafter itself finds unlikely.

    As ``assistant_confidence_threshold`` of ``transformers`` (0.4 there) and ``--draft-p-min`` of llama.cpp: those stop
    drafting, which a drafter that fills a block at once cannot, so what is spared is verification.

    Raises:
        UserError: a value is out of range.
    """

    block_size: int
    """Positions drafted."""
    threshold: float = 0.4
    """Smallest probability of a drafted token that is verified."""

    def __post_init__(self) -> None:
        require(integer("block_size", self.block_size) >= 1, "block_size", self.block_size, "a number of at least 1")
        require(0 <= self.threshold <= 1, "threshold", self.threshold, "a number in [0, 1]")

    def choose(self, prefill: Prefill) -> int:
        """The block size to draft."""
        return self.block_size

    def trim(self, draft: Draft) -> int:
        """The anchor and the drafts before the first one below the threshold."""
        return 1 + int((draft.probs >= self.threshold).int().cumprod(dim=0).sum())
