"""What a round costs here: seconds per draft pass, verify pass and round, for each block size and context length.

Knows rounds and clocks, and the file a profile is kept in; nothing of policies, prompts or tau.

What a measurement stands for: the prompt is random ordinary tokens and decoding is greedy, so the drafter is right less
often than on text. Of a round's parts only the extension of the drafter's context depends on that (by the tokens
committed, which the profile records as ``acceptance_length``); draft and verify pass do not.

Shapes: C contexts, K block sizes, N prompts.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import math
import os
import platform
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from blockpilot.decoding.engine import rounds_for
from blockpilot.decoding.rounds import Rounds, Task
from blockpilot.decoding.sampling import Sampling
from blockpilot.errors import UserError, integer
from blockpilot.models.pair import Pair

log = logging.getLogger(__name__)

FORMAT_VERSION = 1
ROUNDS_IN_A_ROW = 4
"""Rounds between two clock readings: on a GPU the host prepares the next round while the device still works."""

Table = tuple[tuple[float, ...], ...]
"""``[C][K]``: a row per context, a column per block size."""

_IDENTITY = ("target", "drafter", "dtype")
"""Parts of a pair's identity that decide what a round costs or means."""
_NUMBERS = ("threads", "warmup", "repeats")
_LISTS = ("block_sizes", "contexts")
_TABLES = ("draft_seconds", "verify_seconds", "round_seconds", "round_seconds_low", "round_seconds_high",
           "acceptance_length")  # fmt: skip


@dataclass(frozen=True)
class LatencyProfile:
    """Measured seconds of one pair on one device; medians over the repeats.

    A round is timed as a whole, as the engine runs it: draft, verify, settling, and the extension of the drafter's
    context. b = 1 drafts nothing and extends nothing: it is the autoregressive baseline.
    """

    device: str
    """:func:`device_name`."""
    model: str
    """Name of the model's preset."""
    pair: dict[str, str]
    """Identity of target and drafter, and their dtype."""
    threads: int
    """Of torch on the host."""
    torch: str
    """Its version."""
    warmup: int
    """Unmeasured turns of every block size before the first measured one."""
    repeats: int
    """Measured turns of every block size."""
    block_sizes: tuple[int, ...]
    """The K measured, rising."""
    contexts: tuple[int, ...]
    """The C prompt lengths measured, rising."""
    draft_seconds: Table
    verify_seconds: Table
    round_seconds: Table
    round_seconds_low: Table
    """First quartile over the repeats."""
    round_seconds_high: Table
    """Third quartile."""
    acceptance_length: Table
    """Mean tokens committed by the measured rounds: how much the drafter's context was extended."""

    def round_seconds_at(self, block_size: int, context: float) -> float:
        """Seconds of a round behind so many tokens: linear between the measured contexts, constant outside them.

        Raises:
            UserError: the block size was not measured.
        """
        return float(self.round_seconds_of([block_size], torch.tensor([float(context)]))[0, 0])

    def round_seconds_of(self, block_sizes: Sequence[int], contexts_N: Tensor) -> Tensor:
        """:meth:`round_seconds_at` of N contexts and several block sizes, float64 ``[N, K]``."""
        return self._of(self.round_seconds, block_sizes, contexts_N)

    def draft_seconds_of(self, block_sizes: Sequence[int], contexts_N: Tensor) -> Tensor:
        """Seconds of the draft pass alone, by the same rule as :meth:`round_seconds_of`."""
        return self._of(self.draft_seconds, block_sizes, contexts_N)

    def _of(self, table: Table, block_sizes: Sequence[int], contexts_N: Tensor) -> Tensor:
        self.require(block_sizes)
        columns = [
            np.interp(contexts_N.double().numpy(), self.contexts, [row[place] for row in table])
            for place in map(self.block_sizes.index, block_sizes)
        ]
        return torch.from_numpy(np.stack(columns, axis=1))

    def require(self, block_sizes: Sequence[int]) -> None:
        """Whether all of these were measured.

        Raises:
            UserError: one was not; the message says how to measure it.
        """
        missing = [b for b in block_sizes if b not in self.block_sizes]
        if missing:
            wanted = ",".join(map(str, sorted({*self.block_sizes, *block_sizes})))
            raise UserError(
                f"block size {missing[0]} is not in the latency profile of {self.model} on {self.device}, which has "
                f"{list(self.block_sizes)}; run python -m blockpilot.profile model={self.model} "
                f"profile.block_sizes=[{wanted}]"
            )

    @property
    def digest(self) -> str:
        """Of all it holds, 12 hexadecimal digits."""
        content = json.dumps(dataclasses.asdict(self), sort_keys=True)
        return hashlib.blake2b(content.encode(), digest_size=6).hexdigest()

    def difference(self, pair: Pair) -> str | None:
        """What tells the measured pair from this one, naming both; None if nothing does."""
        for part in _IDENTITY:
            if self.pair[part] != pair.identity[part]:
                given = pair.identity[part]
                return f"has {part} {self.pair[part]} ({self.model}), this run has {part} {given} ({pair.name})"
        return None

    def save(self, path: str | Path) -> None:
        """Writes the profile as JSON, whole or not at all; the folder is made where it is missing.

        Raises:
            UserError: it cannot be written there.
        """
        path = Path(path)
        content = {"format_version": FORMAT_VERSION, **dataclasses.asdict(self)}
        lines = [f"  {json.dumps(key)}: {_json(value)}" for key, value in content.items()]
        unfinished = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            unfinished.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
            unfinished.replace(path)
        except OSError as error:
            raise UserError(f"latency profile {path} cannot be written: {error.strerror}") from error
        finally:
            unfinished.unlink(missing_ok=True)

    @classmethod
    def load(cls, path: str | Path) -> LatencyProfile:
        """A profile from its file.

        Raises:
            UserError: it cannot be read or a key is missing or wrong; the message names file and key.
        """
        return cls(**_checked(Path(path)))


def _json(value: object) -> str:
    """JSON with a line for each row of a table."""
    if isinstance(value, tuple) and value and isinstance(value[0], tuple):
        return "[\n    " + ",\n    ".join(map(json.dumps, value)) + "\n  ]"
    return json.dumps(value)


def _checked(path: Path) -> dict[str, Any]:
    """The content of a profile's file as the fields of :class:`LatencyProfile`."""

    def need(condition: bool, key: str, expected: str) -> None:
        if not condition:
            raise UserError(f"latency profile {path}: {key} is {content.get(key)!r:.60}; expected {expected}")

    def numbers(row: object, allowed: Callable[[Any], bool]) -> bool:
        return isinstance(row, list) and all(type(x) in (int, float) and allowed(x) for x in row)

    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"latency profile {path} cannot be read: {str(error).splitlines()[0]}") from error
    if not isinstance(content, dict):
        raise UserError(f"latency profile {path} holds a {type(content).__name__}; expected a JSON object")
    need(content.get("format_version") == FORMAT_VERSION, "format_version", str(FORMAT_VERSION))
    fields = {field.name for field in dataclasses.fields(LatencyProfile)}
    for key in sorted(fields ^ (content.keys() - {"format_version"})):
        need(False, key, "a value" if key in fields else "no such key")
    for key in ("device", "model", "torch"):
        need(isinstance(content[key], str), key, "a text")
    pair = content["pair"]
    texts = isinstance(pair, dict) and all(isinstance(pair.get(part), str) for part in _IDENTITY)
    need(texts and len(pair) == len(_IDENTITY), "pair", f"a text for each of {', '.join(_IDENTITY)}")
    for key in _NUMBERS:
        need(type(content[key]) is int and content[key] >= 0, key, "a whole number")
    for key in _LISTS:
        row = content[key]
        rising = numbers(row, lambda x: type(x) is int and x >= 1) and row == sorted(set(row)) and len(row) > 0
        need(rising, key, "rising whole numbers of at least 1")
    shape = [len(content["block_sizes"])] * len(content["contexts"])
    for key in _TABLES:
        rows = content[key]
        # b = 1 has no draft pass
        zero = key == "draft_seconds"
        fits = isinstance(rows, list) and all(
            numbers(row, lambda x, zero=zero: 0 < x < math.inf or (zero and x == 0)) for row in rows
        )
        need(fits, key, "rows of finite numbers above 0")
        need([len(row) for row in rows] == shape, key, f"{len(shape)} rows (contexts) of {shape[0]} (block sizes)")
    tables = {key: tuple(map(tuple, content[key])) for key in _TABLES}
    lists = {key: tuple(content[key]) for key in _LISTS}
    return {key: content[key] for key in fields} | tables | lists


def device_name(device: torch.device) -> str:
    """The GPU's name, or the processor's and the number of threads, without which its times mean nothing."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    model = models[0] if models else platform.processor() or platform.machine()
    threads = torch.get_num_threads()
    return f"{model}, {threads} thread{'s' * (threads > 1)}"


def profile_path(folder: str | Path, model: str, device: str) -> Path:
    """Where in ``folder`` the profile of a model on a device is kept: ``<model>-<device>.json``, both as slugs."""
    slug = re.sub(r"[^a-z0-9.]+", "-", f"{model}-{device}".lower()).strip("-.")
    return Path(folder) / f"{slug}.json"


@torch.inference_mode()
def measure_latency(
    pair: Pair,
    block_sizes: Sequence[int],
    contexts: Sequence[int],
    *,
    warmup: int = 3,
    repeats: int = 15,
    seed: int = 0,
    advance: Callable[[int], None] | None = None,
) -> LatencyProfile:
    """Times the engine's own rounds.

    At each context the block sizes take turns, in an order that rotates from repeat to repeat: what else the machine
    does hits them alike. A turn is a draft pass, a verify pass and :data:`ROUNDS_IN_A_ROW` whole rounds; each of the
    three starts at the end of the prompt.

    Args:
        pair: target and drafter, where they are to be measured.
        block_sizes: sizes to measure, 1 or more each.
        contexts: prompt lengths in tokens; one that leaves no room for the rounds is dropped with a log line.
        warmup: turns of every block size before the first that counts.
        repeats: turns that count.
        seed: of the prompts' tokens.
        advance: called with 1 after each turn.

    Raises:
        UserError: a value is out of range, or no context leaves room for the rounds.
    """
    sizes = _rising("block_sizes", block_sizes)
    if integer("warmup", warmup) < 0 or integer("repeats", repeats) < 1:
        raise UserError(f"warmup={warmup}, repeats={repeats} is not allowed; expected at least 0 and at least 1")
    fitting = contexts_that_fit(pair, sizes, contexts)
    rows = []
    for context in fitting:
        bench = _Bench(pair, context, sizes[-1], seed)
        turns: dict[int, list[_Turn]] = {size: [] for size in sizes}
        try:
            for turn in range(warmup + repeats):
                shift = turn % len(sizes)
                for size in sizes[shift:] + sizes[:shift]:
                    turns[size].append(bench.turn(size))
                    if advance is not None:
                        advance(1)
        finally:
            bench.rounds.close()
        rows.append([turns[size][warmup:] for size in sizes])
    return LatencyProfile(
        device=device_name(pair.device),
        model=pair.name,
        pair={part: pair.identity[part] for part in _IDENTITY},
        threads=torch.get_num_threads(),
        torch=torch.__version__,
        warmup=warmup,
        repeats=repeats,
        block_sizes=sizes,
        contexts=fitting,
        draft_seconds=_table(rows, lambda turn: turn.draft_seconds),
        verify_seconds=_table(rows, lambda turn: turn.verify_seconds),
        round_seconds=_table(rows, lambda turn: turn.round_seconds),
        round_seconds_low=_table(rows, lambda turn: turn.round_seconds, share=0.25),
        round_seconds_high=_table(rows, lambda turn: turn.round_seconds, share=0.75),
        acceptance_length=_table(rows, lambda turn: turn.acceptance_length),
    )


def contexts_that_fit(pair: Pair, block_sizes: Sequence[int], contexts: Sequence[int]) -> tuple[int, ...]:
    """The contexts behind which the rounds of a turn keep their block size.

    Raises:
        UserError: none does.
    """
    wanted = _rising("contexts", contexts)
    positions = min(pair.max_positions, pair.max_drafter_positions)
    most = positions - ROUNDS_IN_A_ROW * max(block_sizes)
    fitting = tuple(context for context in wanted if context <= most)
    if not fitting:
        raise UserError(
            f"contexts={list(wanted)} is not allowed; expected one of at most {most}: {pair.name} holds {positions} "
            f"positions, {ROUNDS_IN_A_ROW} rounds of {max(block_sizes)} may fill the rest"
        )
    if fitting != wanted:
        log.info("contexts above %d are left out: %s holds %d positions", most, pair.name, positions)
    return fitting


@dataclass(frozen=True)
class _Turn:
    """One turn of one block size."""

    draft_seconds: float
    verify_seconds: float
    round_seconds: float
    """Mean of the rounds in a row."""
    acceptance_length: float


class _Bench:
    """A prompt of one length, prefilled once; every turn starts at its end."""

    def __init__(self, pair: Pair, context: int, largest: int, seed: int) -> None:
        self.device = pair.device
        # no stop token and a budget no turn reaches: a round that ends the output would skip the extension
        task = Task(_ordinary_tokens(pair, context, seed), Sampling(), frozenset(), ROUNDS_IN_A_ROW * largest + 2)
        self.rounds: Rounds = rounds_for(pair, task)
        self.rounds.prefill()
        self.rounds.start(drafting=True)

    def turn(self, block_size: int) -> _Turn:
        rounds, drafting = self.rounds, block_size > 1
        rounds.rewind(drafting)
        draft_seconds, block = self._timed(lambda: rounds.draft(block_size)) if drafting else (0.0, rounds.anchor[None])
        verify_seconds, _ = self._timed(lambda: rounds.verify(block))
        rounds.rewind(drafting)
        seconds, settled = self._timed(lambda: [rounds.round(block_size) for _ in range(ROUNDS_IN_A_ROW)])
        committed = sum(len(one.tokens) for one in settled)
        return _Turn(draft_seconds, verify_seconds, seconds / ROUNDS_IN_A_ROW, committed / ROUNDS_IN_A_ROW)

    def _timed(self, work: Callable[[], Any]) -> tuple[float, Any]:
        self._synchronize()
        began = time.perf_counter()
        result = work()
        self._synchronize()
        return time.perf_counter() - began, result

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _ordinary_tokens(pair: Pair, count: int, seed: int) -> list[int]:
    """Random tokens of the tokenizer that are neither special nor the mask."""
    special = {*pair.tokenizer.all_special_ids, *pair.stop_token_ids, pair.mask_token_id}
    # one at a time: most are ordinary, and the vocabulary is large
    generator = torch.Generator().manual_seed(seed)
    tokens: list[int] = []
    size = min(len(pair.tokenizer), pair.vocab_size)
    if len(special) >= size:
        raise UserError(f"{pair.name}: all {size} tokens are special; expected a tokenizer with ordinary ones")
    while len(tokens) < count:
        drawn = torch.randint(size, (count,), generator=generator).tolist()
        tokens += [token for token in drawn if token not in special]
    return tokens[:count]


def _rising(key: str, values: Sequence[int]) -> tuple[int, ...]:
    rising = tuple(sorted({integer(key, value) for value in values}))
    if not rising or rising[0] < 1:
        raise UserError(f"{key}={list(values)} is not allowed; expected one or more numbers of at least 1")
    return rising


def _table(rows: list[list[list[_Turn]]], figure: Callable[[_Turn], float], share: float = 0.5) -> Table:
    """A quantile over the turns (linear between neighbours), for each context and block size."""
    return tuple(tuple(float(np.quantile([figure(turn) for turn in turns], share)) for turns in row) for row in rows)
