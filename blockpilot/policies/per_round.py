"""The trained classifier asked again after every round, about the distribution the newest token was drawn from.

Knows the classifier as a policy and what a round offers. It was trained on prefills: mid-text is new to it.
"""

from __future__ import annotations

from blockpilot.decoding.engine import Prefill, Round
from blockpilot.policies.predictor import PredictorPolicy


class PerRoundPolicy:
    """The same predictor at every round.

    After a round it sees what it would have seen had the prompt ended with the tokens committed so far.

    Args:
        predictor: the trained policy.
    """

    def __init__(self, predictor: PredictorPolicy) -> None:
        self.predictor = predictor
        self.key, self.prompt_tokens = 0, 0

    def choose(self, prefill: Prefill) -> int:
        """The predictor's choice after prefill."""
        self.key, self.prompt_tokens = prefill.key, prefill.prompt_tokens
        return self.predictor.choose(prefill)

    def update(self, round: Round) -> int:
        """Its choice for the next round."""
        return self.predictor.choose(Prefill(self.key, self.prompt_tokens, round.logits, round.hidden))
