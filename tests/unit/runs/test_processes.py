"""Training in several processes: what is told when one of them is gone."""

from __future__ import annotations

import pytest

from blockpilot.errors import UserError
from blockpilot.runs.processes import side_by_side

GONE = "[gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:62174: Connection reset by peer."


def test_a_process_that_is_gone_is_told_in_one_line() -> None:
    with pytest.raises(UserError, match=r"trainer\.devices=2: another process ended") as caught, side_by_side(2):
        raise RuntimeError(GONE)
    assert "\n" not in str(caught.value) and "trainer.resume=true" in str(caught.value)


@pytest.mark.parametrize(("devices", "message"), [(1, GONE), (2, "shapes do not fit")])
def test_other_errors_are_left_as_they_are(devices: int, message: str) -> None:
    with pytest.raises(RuntimeError) as caught, side_by_side(devices):
        raise RuntimeError(message)
    assert not isinstance(caught.value, UserError)
