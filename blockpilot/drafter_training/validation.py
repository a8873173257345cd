"""Validation of a drafter by what it is for: the acceptance length it would reach.

Knows known texts and how drafting along them is simulated; nothing of losses.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence

import lightning
import torch

from blockpilot.decoding.trajectory import Trajectory
from blockpilot.drafter_training.texts import Text
from blockpilot.learning.callbacks import evaluating
from blockpilot.models import Pair
from blockpilot.oracle.replay import follow_chains, wavefront_of

_TOKENS_AT_ONCE = 1 << 18


def simulated_tau(pair: Pair, texts: Sequence[Text], block_sizes: Sequence[int]) -> list[dict[int, float]]:
    """Mean acceptance length per text and block size, without a pass of the target.

    Args:
        pair: the drafter, and the head it drafts with.
        texts: known outputs of the target, of two tokens or more.
        block_sizes: rising.
    """
    trajectories = [_trajectory(pair, text) for text in texts]
    front = wavefront_of(pair, trajectories, max(block_sizes), _TOKENS_AT_ONCE)
    lengths = follow_chains(front, trajectories, block_sizes, uncut=False)
    return [{b: sum(accepted) / len(accepted) for b, accepted in one.items()} for one in lengths]


def _trajectory(pair: Pair, text: Text) -> Trajectory:
    tokens, nothing = text.tokens.tolist(), torch.empty(0)
    features = text.features.to(pair.device, pair.target.dtype)
    return Trajectory(tokens[: text.prompt_length], tokens[text.prompt_length :], [], nothing, nothing, features)


def in_dtype_of_target(pair: Pair) -> Pair:
    """The pair with a copy of the drafter as it will be loaded beside the target; the pair itself if it is so."""
    if pair.drafter.dtype == pair.target.dtype:
        return pair
    drafter = copy.deepcopy(pair.drafter)
    torch.nn.Module.to(drafter, pair.target.dtype)
    return Pair(pair.target, drafter, pair.tokenizer, pair.name, pair.thinking)


class SimulatedAcceptance(lightning.Callback):
    """Logs ``val/tau``: mean over held-out texts of the simulated acceptance length at B.

    Args:
        pair: with the drafter that is trained.
        texts: held out.
    """

    def __init__(self, pair: Pair, texts: Sequence[Text]) -> None:
        self.pair, self.texts = pair, texts

    def on_validation_epoch_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Simulates all held-out texts."""
        if not trainer.sanity_checking:
            pl_module.log("val/tau", self.figures(pl_module)["val/tau"], prog_bar=True)

    def figures(self, module: torch.nn.Module) -> Mapping[str, float]:
        """``val/tau`` of the drafter as it stands, in the target's dtype."""
        size = self.pair.block_size
        with evaluating(module), torch.no_grad():
            tau = [one[size] for one in simulated_tau(in_dtype_of_target(self.pair), self.texts, [size])]
        return {"val/tau": sum(tau) / len(tau)}
