"""The target's own outputs for many prompts at once, with the tapped hidden states a replay needs.

Knows the target and the sampling rule; nothing of drafts. Plain autoregressive decoding of a ragged batch:
by the position-keyed noise its tokens are those of :func:`~blockpilot.decoding.engine.generate`.

Shapes: B prompts, V vocabulary, D hidden size, F tapped features.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from blockpilot.decoding.engine import check_prompts
from blockpilot.decoding.rounds import stop_ids_of
from blockpilot.decoding.sampling import Sampling, draw_tokens, prompt_key
from blockpilot.decoding.verify import output_budget
from blockpilot.errors import UserError, integer
from blockpilot.models.kv_cache import RaggedKVCache
from blockpilot.models.pair import Pair


@dataclass(frozen=True)
class Trajectory:
    """One prompt's output and what the target computed on the way."""

    prompt_ids: list[int]
    output_ids: list[int]
    """Up to the first stop token or the budget."""
    beyond_ids: list[int]
    """What the target would have drawn next, as many as were asked for (and fit)."""
    logits: Tensor
    """fp32 ``[V]``, raw, at the last prompt position."""
    hidden: Tensor
    """fp32 ``[D]``, input of the head at the last prompt position."""
    features: Tensor
    """``[len(prompt_ids) + len(output_ids) - 1, F]``: all that can precede an anchor; no rows if not asked."""
    states: Tensor | None = None
    """``[len(output_ids), D]``: input of the head that each output token was drawn from; None if not asked."""


@torch.inference_mode()
def generate_batch(
    pair: Pair,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    top_p: float = 1.0,
    top_k: int = 0,
    seed: int = 0,
    stop_token_ids: Collection[int] | None = None,
    features: bool = False,
    states: bool = False,
    beyond: int = 0,
    keys: Sequence[int] | None = None,
) -> list[Trajectory]:
    """Decodes all ``prompts`` side by side without a drafter, one token per row and step.

    Rows keep their own length: nothing is padded. Outputs are those of :func:`~blockpilot.decoding.engine.generate`.

    Args:
        pair: the target, and the drafter whose tapped layers are kept.
        prompts: token ids of each.
        max_new_tokens: output budget of each.
        temperature, top_p, top_k, seed, stop_token_ids: as in ``generate``.
        features: whether the tapped hidden states are returned (in memory: positions of all prompts x F).
        states: whether the head's inputs are (in memory: output tokens of all prompts x D).
        beyond: tokens to draw past each output's end.
        keys: of the noise, one per prompt, so that equal prompts get different outputs; None derives them from the
            prompts, as ``generate`` does.

    Raises:
        UserError: a prompt that cannot be decoded, or a value out of range.
    """
    sampling = Sampling(temperature, top_p, top_k, seed)
    max_new_tokens, beyond = integer("max_new_tokens", max_new_tokens), integer("beyond", beyond)
    if beyond < 0:
        raise UserError(f"beyond={beyond} is not allowed; expected a number of at least 0")
    checked = check_prompts(pair, prompts, max_new_tokens)
    if not checked:
        return []
    stops = stop_ids_of(pair, stop_token_ids)
    if keys is not None and len(keys) != len(checked):
        raise UserError(f"{len(checked)} prompts with {len(keys)} keys; expected one key for each")
    return _Batch(pair, checked, sampling, max_new_tokens, stops, features, states, beyond, keys).run()


class _Batch:
    def __init__(
        self,
        pair: Pair,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        max_new_tokens: int,
        stops: frozenset[int],
        tap: bool,
        keep: bool,
        beyond: int,
        keys: Sequence[int] | None,
    ) -> None:
        self.pair, self.sampling, self.stops, self.tap, self.keep = pair, sampling, stops, tap, keep
        self.prompts = [list(prompt) for prompt in prompts]
        self.keys = [prompt_key(prompt) for prompt in self.prompts] if keys is None else list(keys)
        limits = [output_budget(max_new_tokens, len(p), pair.max_positions) for p in self.prompts]
        self.budgets = limits
        # tokens past the end need positions too
        self.limits = [
            output_budget(limit + beyond, len(p), pair.max_positions)
            for limit, p in zip(limits, self.prompts, strict=True)
        ]
        self.beyond = beyond
        self.outputs: list[list[int]] = [[] for _ in prompts]
        self.ends: list[int | None] = [None] * len(prompts)

    def run(self) -> list[Trajectory]:
        pair = self.pair
        capacity = max(len(p) + n for p, n in zip(self.prompts, self.limits, strict=True))
        cache = pair.runner.new_ragged_cache(capacity, len(self.prompts))
        size = len(pair.runner.layer_ids) * pair.hidden_size
        shape = (len(self.prompts), capacity if self.tap else 0, size)
        self.features = torch.empty(shape, dtype=pair.target.dtype, device=pair.device)
        shape = (len(self.prompts), max(self.limits) if self.keep else 0, pair.hidden_size)
        self.states = torch.empty(shape, dtype=pair.target.dtype, device=pair.device)
        self._prefill(cache)
        active = [i for i in range(len(self.prompts)) if not self._finished(i)]
        held = list(range(len(self.prompts)))
        while active:
            if len(active) <= 0.8 * len(held):
                cache.keep_rows(torch.tensor([held.index(i) for i in active], device=pair.device))
                held = active
            self._step(cache, held)
            active = [i for i in active if not self._finished(i)]
        return [self._trajectory(i) for i in range(len(self.prompts))]

    def _prefill(self, cache: RaggedKVCache) -> None:
        """Prompts of equal length together: no padding, so the same numbers as a prompt alone."""
        device = self.pair.device
        by_length: dict[int, list[int]] = {}
        for index, prompt in enumerate(self.prompts):
            by_length.setdefault(len(prompt), []).append(index)
        self.prefill: dict[int, tuple[Tensor, Tensor]] = {}
        for length, members in sorted(by_length.items()):
            rows = torch.tensor(members, device=device)
            tokens = torch.tensor([self.prompts[i] for i in members], device=device)
            positions = torch.arange(length, device=device).expand(len(members), -1)
            out = self.pair.runner.forward_ragged(tokens, cache, rows, positions, keep=1, tap=self.tap)
            if out.features is not None:
                self.features[rows, :length] = out.features
            if self.keep:
                self.states[rows, 0] = out.hidden[:, -1]
            draws = draw_tokens(out.logits[:, 0], self.sampling, [self.keys[i] for i in members], [0] * len(members))
            for index, token, logits, hidden in zip(members, draws.tolist(), out.logits, out.hidden, strict=True):
                self.prefill[index] = (logits[0].float().cpu(), hidden[-1].float().cpu())
                self._append(index, token)

    def _step(self, cache: RaggedKVCache, held: Sequence[int]) -> None:
        device = self.pair.device
        # rows that have finished but are still held repeat their last position: harmless, and not recorded
        places = [len(self.prompts[i]) + len(self.outputs[i]) - 1 for i in held]
        tokens = torch.tensor([[self.outputs[i][-1]] for i in held], device=device)
        rows = torch.arange(len(held), device=device)
        last = min(cache.capacity, self.pair.max_positions) - 1
        spots = [min(place, last) for place in places]
        positions = torch.tensor(spots, device=device)[:, None]
        out = self.pair.runner.forward_ragged(tokens, cache, rows, positions, keep=1, tap=self.tap)
        live = [row for row, index in enumerate(held) if not self._finished(index)]
        at, to = torch.tensor(live, device=device), torch.tensor([held[row] for row in live], device=device)
        if out.features is not None:
            self.features[to, positions[at, 0]] = out.features[at, 0]
        if self.keep:
            drawn = torch.tensor([len(self.outputs[held[row]]) for row in live], device=device)
            self.states[to, drawn] = out.hidden[at, -1]
        draws = draw_tokens(
            out.logits[:, 0], self.sampling, [self.keys[i] for i in held], [len(self.outputs[i]) for i in held]
        )
        for index, token in zip(held, draws.tolist(), strict=True):
            if not self._finished(index):
                self._append(index, token)

    def _append(self, index: int, token: int) -> None:
        output = self.outputs[index]
        output.append(token)
        if self.ends[index] is None and (token in self.stops or len(output) >= self.budgets[index]):
            self.ends[index] = len(output)

    def _finished(self, index: int) -> bool:
        end = self.ends[index]
        return end is not None and len(self.outputs[index]) >= min(end + self.beyond, self.limits[index])

    def _trajectory(self, index: int) -> Trajectory:
        prompt, output, end = self.prompts[index], self.outputs[index], self.ends[index]
        assert end is not None
        logits, hidden = self.prefill[index]
        processed = self.features[index, : len(prompt) + end - 1]
        states = self.states[index, :end] if self.keep else None
        return Trajectory(prompt, output[:end], output[end:], logits, hidden, processed, states)
