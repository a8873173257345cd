"""Both kinds of rounds for every test that asks for them."""

from __future__ import annotations

import pytest

from blockpilot.decoding import engine
from blockpilot.decoding.rounds import Rounds, Task
from blockpilot.decoding.static import StaticRounds
from blockpilot.models import Pair


@pytest.fixture(params=["sliced", "static"])
def each_kind_of_rounds(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Where there is no CUDA, rounds of one shape run step by step."""
    if request.param == "static":

        def static_where_lean(pair: Pair, task: Task) -> Rounds:
            return StaticRounds(pair, task) if pair.runner.refresh() else Rounds(pair, task)

        monkeypatch.setattr(engine, "rounds_for", static_where_lean)
    return request.param
