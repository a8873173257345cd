"""Texts for a drafter: the target answers prompts, and writes prompts of its own.

Knows pairs, prompts and how the target decodes; files are in ``texts.py``. What is made is kept, so an interrupted run
goes on where it was.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import torch

from blockpilot.decoding.trajectory import Trajectory, generate_batch
from blockpilot.drafter_training.texts import Text, TextStore
from blockpilot.errors import UserError, brief
from blockpilot.models import Pair
from blockpilot.oracle.files import write_whole
from blockpilot.oracle.manifest import content_digest, prompts_digest
from blockpilot.oracle.memory import give_back
from blockpilot.oracle.turns import sample_id, turn_by_turn
from blockpilot.prompts import PromptRow

log = logging.getLogger(__name__)

SOFT_LABELS = 16
"""Most likely tokens kept per answer token."""
_LOGITS_AT_ONCE = 1 << 26
_SHORTEST_PROMPT, _LONGEST_PROMPT = 8, 64
"""Tokens of a self-written prompt, its end included; others are left out."""
_SELF_TOP_P = 0.9
_MARK = "\u2402"


@dataclass(frozen=True)
class Sampling:
    """How answers are drawn."""

    max_new_tokens: int
    temperature: float
    seed: int


def answers_of(
    root: Path,
    name: str,
    pair: Pair,
    rows: Sequence[PromptRow],
    sampling: Sampling,
    shard_size: int,
    on_rows: Callable[[int], None] = lambda done: None,
) -> TextStore:
    """The texts of ``rows``, with every shard made that was missing.

    Args:
        root: folder of all texts.
        name: of the source, for people.
        pair: the target that answers; of the drafter only the tapped layers count.
        rows: prompts.
        sampling: of the answers.
        shard_size: prompt rows that are answered at once, and that a killed run loses at most.
        on_rows: told the number of rows after each shard.

    Raises:
        UserError: the folder holds something else, or cannot be written.
    """
    key = {
        **target_identity(pair),
        "target_layer_ids": list(pair.drafter.target_layer_ids),
        "prompts": prompts_digest(rows),
        **asdict(sampling),
        "soft_labels": min(SOFT_LABELS, pair.vocab_size),
    }
    folder = root / f"{pair.name}-{name}-t{sampling.temperature:g}-{content_digest(key)[:12]}"
    store = TextStore(folder, key, len(rows), shard_size)
    missing = store.missing()
    on_rows(len(rows) - sum(len(store.rows_of(shard)) for shard in missing))
    for shard in missing:
        members = [rows[i] for i in store.rows_of(shard)]
        store.write(shard, answer(pair, members, sampling))
        give_back()
        on_rows(len(members))
    return store


def target_identity(pair: Pair) -> dict[str, Any]:
    """What decides the target's answers, and nothing of the drafter."""
    parts = {name: value for name, value in pair.identity.items() if name != "drafter"}
    return {**parts, "stop_token_ids": list(pair.stop_token_ids)}


def answer(pair: Pair, rows: Sequence[PromptRow], sampling: Sampling) -> list[Text]:
    """One text per user turn, in row and turn order; its prompt holds the target's own answers to earlier turns.

    A prompt that leaves no room for an answer of two tokens is left out, and with it the later turns of its row.
    """

    def respond(prompts: list[list[int]]) -> list[Trajectory]:
        return generate_batch(
            pair, prompts, max_new_tokens=sampling.max_new_tokens, temperature=sampling.temperature,
            seed=sampling.seed, features=True, states=True,
        )  # fmt: skip

    outputs, cut = turn_by_turn(pair, rows, pair.max_positions - 2, respond)
    for row in cut:
        log.warning("prompt %r is left out: it is longer than the target allows", rows[row].id)
    return [_text(pair, sample_id(rows[row], turn), output) for (row, turn), output in outputs.items()]


@torch.inference_mode()
def _text(pair: Pair, name: str, output: Trajectory) -> Text:
    assert output.states is not None
    count, ids, probs = min(SOFT_LABELS, pair.vocab_size), [], []
    for states in output.states.split(max(1, _LOGITS_AT_ONCE // pair.vocab_size)):
        best = pair.runner.logits(states).float().softmax(dim=-1).topk(count, dim=-1)
        ids.append(best.indices.cpu())
        probs.append(best.values.cpu())
    tokens = torch.tensor(output.prompt_ids + output.output_ids)
    return Text(name, tokens, len(output.prompt_ids), output.features.cpu(), torch.cat(ids), torch.cat(probs))


def self_written(
    root: Path, pair: Pair, count: int, seed: int, batch: int, on_rows: Callable[[int], None] = lambda done: None
) -> list[PromptRow]:
    """Prompts that the target writes itself, given nothing but its chat template's opening of a user turn.

    A chat model has learned what users ask as well as what it answers (Magpie, arXiv 2406.08464). Drawn at T = 1 with
    top-p 0.9; what is shorter than 8 tokens or does not end within 64 is left out, so fewer than ``count`` come back.

    Args:
        root: folder of all texts; each batch is kept there.
        pair: the target.
        count: prompts to begin.
        seed: of the noise.
        batch: prompts written at once.
        on_rows: told the number of prompts after each batch.

    Raises:
        UserError: the tokenizer has no chat template that a user's text can be cut out of.
    """
    if count == 0:
        return []
    opening, closing = _around_user_text(pair)
    key = {**target_identity(pair), "opening": opening, "closing": closing, "seed": seed, "batch": batch}
    folder = root / f"{pair.name}-self-{content_digest(key)[:12]}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"answers_dir: {folder} cannot be made: {error.strerror}") from None
    rows: dict[str, PromptRow] = {}
    for start in range(0, count, batch):
        numbers = range(start, min(start + batch, count))
        path = folder / f"prompts-{numbers.start:06d}-{numbers.stop:06d}.json"
        written = _written_before(path)
        if written is None:
            written = _write_prompts(pair, opening, closing, numbers, seed)
            content = json.dumps(written).encode()
            write_whole(path, lambda file, content=content: file.write(content), key="answers_dir")
        for number, text in written:
            # the same words again would only be answered again
            rows.setdefault(text, PromptRow(f"self-{number}", "self", (text,)))
        on_rows(len(numbers))
    return list(rows.values())


def _written_before(path: Path) -> list[tuple[int, str]] | None:
    """Numbers and texts of a batch; None where it is not there, or damaged (told in the log; it is made anew)."""
    if not path.exists():
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(content, list):
            raise ValueError(f"it holds {brief(content)}")
        return [(int(number), str(text)) for number, text in content]
    except (OSError, ValueError, TypeError) as error:
        log.warning("%s is damaged (%s) and will be made anew", path, error)
        return None


def _write_prompts(pair: Pair, opening: list[int], closing: int, numbers: range, seed: int) -> list[tuple[int, str]]:
    # noise by number: the prompt, from which it is derived otherwise, is the same for all
    keys = [int.from_bytes(hashlib.sha256(f"self/{n}".encode()).digest()[:8], "big") for n in numbers]
    stops = {closing, *pair.stop_token_ids}
    outputs = generate_batch(
        pair, [opening] * len(numbers), max_new_tokens=_LONGEST_PROMPT, temperature=1.0, top_p=_SELF_TOP_P, seed=seed,
        stop_token_ids=stops, keys=keys,
    )  # fmt: skip
    texts = [
        (number, pair.decode(output.output_ids).strip())
        for number, output in zip(numbers, outputs, strict=True)
        if output.output_ids[-1] in stops and len(output.output_ids) >= _SHORTEST_PROMPT
    ]
    return [(number, text) for number, text in texts if text]


def _around_user_text(pair: Pair) -> tuple[list[int], int]:
    """Token ids that open a user's turn, and the first token behind it."""
    allowed = "a tokenizer whose chat template shows a user's text as it is, or drafter_training.self_written=0"
    if pair.tokenizer.chat_template is None:
        raise UserError(f"drafter_training.self_written: the tokenizer has no chat template; expected {allowed}")
    messages = [{"role": "user", "content": _MARK}]
    text = cast(
        str,
        pair.tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=False, enable_thinking=pair.thinking
        ),
    )
    before, found, after = text.partition(_MARK)
    ids = pair.tokenizer(after, add_special_tokens=False)["input_ids"] if found else []
    opening = pair.tokenizer(before, add_special_tokens=False)["input_ids"] if found else []
    if not ids or not opening:
        raise UserError(f"drafter_training.self_written: the chat template gives {text[:80]!r}; expected {allowed}")
    return [int(i) for i in cast(list[int], opening)], int(cast(list[int], ids)[0])
