"""Conversations turn by turn: every user turn is a sample, behind the target's own answers to the earlier ones.

Knows prompt rows and how a pair encodes them; nothing of how an answer is found.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from blockpilot.models.pair import Pair
from blockpilot.prompts import PromptRow


class Answered(Protocol):
    """What holds an answer."""

    @property
    def output_ids(self) -> list[int]:
        """Token ids of the answer."""
        ...


A = TypeVar("A", bound=Answered)


def sample_id(row: PromptRow, turn: int) -> str:
    """The row's id; with ``#turn`` behind it where the row has several turns."""
    return row.id if len(row.turns) == 1 else f"{row.id}#{turn}"


def turn_by_turn(
    pair: Pair, rows: Sequence[PromptRow], longest: int, respond: Callable[[list[list[int]]], Sequence[A]]
) -> tuple[dict[tuple[int, int], A], dict[int, int]]:
    """Answers to every turn of ``rows``; a prompt that is too long is left out, and with it the later turns of its row.

    Args:
        pair: whose tokenizer encodes prompts and decodes answers.
        rows: conversations.
        longest: most tokens of a prompt.
        respond: told the token ids of the prompts of one turn, gives one answer each.

    Returns:
        Answers by row index and turn, in that order; and of the rows that were cut short, the first turn left out.
    """
    said: dict[int, list[str]] = {index: [] for index in range(len(rows))}
    found: dict[tuple[int, int], A] = {}
    cut: dict[int, int] = {}
    for turn in range(max(len(row.turns) for row in rows)):
        open_rows = [i for i in said if len(rows[i].turns) > turn and i not in cut]
        prompts = {i: pair.encode(rows[i].turns[: turn + 1], said[i]) for i in open_rows}
        cut |= {i: turn for i, prompt in prompts.items() if len(prompt) > longest}
        asked = {i: prompt for i, prompt in prompts.items() if i not in cut}
        for index, answer in zip(asked, respond(list(asked.values())), strict=True):
            found[index, turn] = answer
            said[index].append(pair.decode(answer.output_ids))
    return {place: found[place] for place in sorted(found)}, cut
