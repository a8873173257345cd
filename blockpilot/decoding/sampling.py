"""How the target draws a token: filters, and noise that depends on the position alone.

Knows logits and counters; nothing of models, drafts or blocks. A draw at output position ``t`` is a function of
(seed, prompt key, t) and of the target's filtered distribution there, so it is the same for every block size,
batch, device and drafter.

Shapes: N rows, V vocabulary.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real

import torch
from torch import Tensor

from blockpilot.errors import UserError, brief, integer

GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy everywhere."""

_MASK32 = 0xFFFFFFFF
# Philox4x32-10: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011, section 4.3
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10


@dataclass(frozen=True)
class Sampling:
    """Temperature and filters, and the seed of the noise.

    Raises:
        UserError: a value outside its range, by name.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        # plain numbers from here on: those of NumPy wrap around or overflow where Python's do not
        for name in ("temperature", "top_p"):
            object.__setattr__(self, name, _real(name, getattr(self, name)))
        for name in ("top_k", "seed"):
            object.__setattr__(self, name, integer(name, getattr(self, name)))
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise UserError(f"temperature={self.temperature!r} is not allowed; expected a finite number of at least 0")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p={self.top_p!r} is not allowed; expected a number in (0, 1]")
        if self.top_k < 0:
            raise UserError(f"top_k={self.top_k!r} is not allowed; expected 0 (off) or more")
        if not 0 <= self.seed < 2**64:
            raise UserError(f"seed={self.seed!r} is not allowed; expected a number in [0, 2**64)")

    @property
    def greedy(self) -> bool:
        """Whether the draw is the argmax."""
        return self.temperature < GREEDY_BELOW


def _real(key: str, value: object) -> float:
    try:
        if isinstance(value, Real):
            return float(value)
    except OverflowError:  # a whole number beyond all floats
        pass
    raise UserError(f"{key}={brief(value)} is not allowed; expected a number")


def prompt_key(prompt_ids: Sequence[int]) -> int:
    """The 64-bit name of a prompt for the noise: a digest of its token ids, so that order and batch do not matter."""
    data = ",".join(str(int(token)) for token in prompt_ids).encode()
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


def signed_prompt_key(prompt_ids: Sequence[int]) -> int:
    """:func:`prompt_key` as a signed number, which tensors and files can hold."""
    return signed(prompt_key(prompt_ids))


def signed(number: int) -> int:
    """The signed number of the same 64 bits."""
    return number - 2**64 if number >= 2**63 else number


Numbers = Sequence[int] | Tensor
"""Plain numbers, or an int64 tensor where they are known on the device only."""


def draw_tokens(
    logits_NV: Tensor, sampling: Sampling, keys: Numbers, positions: Numbers, seed: int | Tensor | None = None
) -> Tensor:
    """The target's own token for each row, int64 ``[N]``.

    Greedy: the argmax (lowest id on exact ties). Otherwise Gumbel-max over the filtered distribution.

    Args:
        logits_NV: raw logits in any float type; filters are applied in fp32.
        sampling: temperature, filters, seed.
        keys: prompt key of each row (in a tensor as :func:`signed_prompt_key` gives it).
        positions: output position of each row (0 is the prefill token).
        seed: stands in for ``sampling.seed`` where it is known on the device only (as a signed number).
    """
    if sampling.greedy:
        return most_likely(logits_NV)
    scores = filtered_log_probs(logits_NV, sampling)
    return most_likely(
        scores + gumbel_noise(sampling.seed if seed is None else seed, keys, positions, scores.shape[-1], scores.device)
    )


def most_likely(scores: Tensor) -> Tensor:
    """The token with the highest score (lowest id on exact ties), int64, over the last dimension."""
    # the same token either way; on a CPU argmax takes longer
    return scores.max(dim=-1).indices if scores.device.type == "cpu" else scores.argmax(dim=-1)


def filtered_log_probs(logits_NV: Tensor, sampling: Sampling) -> Tensor:
    """Log-probabilities after temperature, top-k, then top-p; excluded tokens are ``-inf``. fp32 ``[N, V]``.

    Top-p keeps the smallest set of most likely tokens whose mass reaches ``top_p`` (the token that crosses it
    included), within what top-k left. Not normalised again: Gumbel-max does not need it.
    """
    logits = logits_NV.float() / sampling.temperature
    if 0 < sampling.top_k < logits.shape[-1]:
        smallest = logits.topk(sampling.top_k, dim=-1).values[..., -1:]
        logits = logits.masked_fill(logits < smallest, -torch.inf)
    log_probs = logits.log_softmax(dim=-1)
    if sampling.top_p < 1:
        ordered, order = log_probs.sort(dim=-1, descending=True, stable=True)
        probs = ordered.exp()
        before = probs.cumsum(dim=-1) - probs
        drop = torch.zeros_like(log_probs, dtype=torch.bool).scatter(-1, order, before >= sampling.top_p)
        log_probs = log_probs.masked_fill(drop, -torch.inf)
    return log_probs


def gumbel_noise(seed: int | Tensor, keys: Numbers, positions: Numbers, size: int, device: torch.device) -> Tensor:
    """Standard Gumbel noise, fp32 ``[N, size]``: entry ``v`` of a row is a function of (seed, key, position, v).

    Computed in float64 from 32-bit integers and rounded once, so devices agree.
    """
    bits = counter_bits(seed, keys, positions, size, device)
    uniform = (bits.double() + 0.5) / 2.0**32
    return (-torch.log(-torch.log(uniform))).float()


def counter_bits(seed: int | Tensor, keys: Numbers, positions: Numbers, size: int, device: torch.device) -> Tensor:
    """Uniform 32-bit integers, int64 ``[N, size]``, from Philox4x32-10.

    Counter words: ``v // 4``, position, and the two halves of the prompt key; key words: the two halves of the seed.
    Lane ``v % 4`` of the result belongs to entry ``v``.
    """
    lanes = torch.arange(-(-size // 4), device=device, dtype=torch.int64)
    key, place = _words(keys, device), _words(positions, device)
    words = (place & _MASK32, key & _MASK32, (key >> 32) & _MASK32)
    counter = [lanes.expand(len(place), -1), *(word[:, None].expand(-1, len(lanes)) for word in words)]
    words = philox(counter, (seed & _MASK32, (seed >> 32) & _MASK32))
    return torch.stack(words, dim=-1).flatten(1)[:, :size]


def _words(numbers: Numbers, device: torch.device) -> Tensor:
    if isinstance(numbers, Tensor):
        return numbers.to(device)
    return torch.tensor([signed(n) for n in numbers], dtype=torch.int64, device=device)


def philox(counter: Sequence[Tensor], key: tuple[int | Tensor, int | Tensor]) -> list[Tensor]:
    """Philox4x32-10 on four int64 tensors of 32-bit words; returns four more.

    Source: Salmon et al. 2011. Products wrap at 64 bits; the upper half survives the sign because it is masked.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    # as a signed 64-bit number the product of two 32-bit words has the right bits, whatever its sign
    for _ in range(_ROUNDS):
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        high0, low0 = (p0 >> 32) & _MASK32, p0 & _MASK32
        high1, low1 = (p1 >> 32) & _MASK32, p1 & _MASK32
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _WEYL[0]) & _MASK32, (k1 + _WEYL[1]) & _MASK32
    return [c0, c1, c2, c3]
