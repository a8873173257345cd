"""Tests that need a CUDA device; elsewhere they are skipped."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from blockpilot.models import Pair
from tests.toy import make_pair


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips everything in this folder where there is no device."""
    if not torch.cuda.is_available():
        for item in items:
            if Path(__file__).parent in item.path.parents:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(scope="module")
def pair() -> Pair:
    made = make_pair(seed=5, layers=3, eos=None)
    for model in (made.target, made.drafter):
        torch.nn.Module.to(model, "cuda")
    return made
