"""The configuration reference has every key that a command reads, each with a meaning."""

from __future__ import annotations

import pytest

from blockpilot.config import names_of
from blockpilot.config.reference import COMMANDS, keys, markdown

FILES = ("train", "evaluate", "collect", "profile", "train_drafter")
ENTRIES: dict[str, str] = dict(zip(FILES, COMMANDS, strict=True))


@pytest.mark.parametrize("command", ENTRIES)
def test_every_key_of_a_command_is_on_the_page(command: str) -> None:
    documented = {key.name for key in keys() if ENTRIES[command] in key.commands}
    presets = {"policy": "ema"} if command == "evaluate" else {}
    names, _ = names_of(command, presets)
    leaves = [name for name in names if not any(other.startswith(f"{name}.") for other in names)]
    composed = {name.replace("dataset.tiny.", "dataset.NAME.") for name in leaves if not name.startswith("hydra.")}
    assert composed and composed <= documented
    assert ENTRIES[command].split()[-1].removesuffix(".py").rpartition(".")[2] == command


def test_every_key_has_a_meaning_of_its_own_words() -> None:
    assert len(keys()) > 100
    assert [key.name for key in keys() if len(key.meaning.split()) < 2] == []
    page = markdown()
    for key in keys():
        assert f"| `{key.name}` | `{key.type}` |" in page
    assert "| `predictor.k` | `int` | `2` | Radius of its candidates" in page
    assert "| `profile.contexts` | `list[int]` | `[64, 256, 1024]` |" in page
    assert "| `model.revision` | `str or null` | `null` |" in page
    assert "Seed of the prompts' tokens. Of `python -m blockpilot.profile`." in page
