"""Settings of a drafter's training that cannot be used: one line each, before anything is answered."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir

from blockpilot.config import CONF_DIR, DrafterTrainingConfig, TrainDrafterConfig, to_dataclass
from blockpilot.drafter_training.texts import Text
from blockpilot.errors import UserError
from blockpilot.models import DFlashDrafter
from blockpilot.models.drafter_config import spread_taps
from blockpilot.runs.train_drafter import _check_depth, _save, split_texts, untrained_pair


def configured(*overrides: str) -> TrainDrafterConfig:
    with initialize_config_dir(str(CONF_DIR), version_base="1.3"):
        return to_dataclass(compose("train_drafter", list(overrides)), TrainDrafterConfig)


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("block_size=1", "drafter_training.block_size=1 is not allowed; expected a number of at least 2"),
        ("temperatures=[0.0,0.0]", "drafter_training.temperatures=[0.0, 0.0] is not allowed"),
        ("soft_weight=1.5", "drafter_training.soft_weight=1.5 is not allowed; expected a number in [0, 1]"),
        ("loss_decay=0", "drafter_training.loss_decay=0.0 is not allowed; expected a number of at least 0.01, or null"),
        ("block_size=40000", "drafter_training.block_size=40000 is not allowed; expected a number of at most 32767"),
        ("num_taps=1000000000", "drafter_training.num_taps=1000000000 is not allowed; expected 1 to 6"),
        ("initial=/", "drafter_training.initial='/': there is no config.json"),
        ("mask_token=nonsense", "drafter_training.mask_token='nonsense' is not allowed; expected a token"),
        ("num_layers=40", "drafter_training.num_layers=40 is not allowed; expected 1 to 6"),
        ("initial=/nowhere/at_all", "drafter_training.initial='/nowhere/at_all'"),
    ],
)
def test_a_wrong_setting_is_one_line_that_names_it(override: str, line: str) -> None:
    with pytest.raises(UserError) as caught:
        untrained_pair(configured(f"drafter_training.{override}"))
    assert line in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("block_size=8", "has block_size 16, this run asks for 8"),
        ("num_layers=2", "has num_layers 3, this run asks for 2"),
        ("num_taps=5", "has num_taps 3, this run asks for 5"),
    ],
)
def test_a_drafter_to_go_on_from_must_be_what_the_settings_describe(override: str, line: str) -> None:
    fits = ["block_size=16", "num_layers=3", "num_taps=3", "initial=pkg://tiny/drafter"]
    assert untrained_pair(configured(*(f"drafter_training.{one}" for one in fits))).drafter.dtype == torch.float32
    with pytest.raises(UserError, match=line):
        untrained_pair(configured(*(f"drafter_training.{one}" for one in (*fits, override))))


def _texts(*ids: str) -> list[Text]:
    nothing = torch.empty(0)
    return [Text(name, nothing, 0, nothing, nothing, nothing) for name in ids]


def test_all_answers_to_a_prompt_are_on_one_side() -> None:
    texts = _texts(*(f"p{i}#{turn}" for i in range(60) for turn in range(2)), *(f"p{i}" for i in range(60)))
    held_out, learned = split_texts(texts, configured("drafter_training.validation_share=0.3"))
    sides = [{text.id.split("#")[0] for text in side} for side in (held_out, learned)]
    assert sides[0].isdisjoint(sides[1]) and len(sides[0] | sides[1]) == 60
    assert 8 <= len(sides[0]) <= 30
    with pytest.raises(UserError, match=r"drafter_training\.validation_share=0\.03 is not allowed; .* both parts of 1"):
        split_texts(_texts("alone"), configured())


@pytest.mark.parametrize(("depth", "most"), [(1, 1), (2, 1), (3, 3), (6, 6)])
def test_taps_are_layers_of_the_target(depth: int, most: int) -> None:
    def checked(num_taps: int) -> None:
        _check_depth(DrafterTrainingConfig(num_layers=1, num_taps=num_taps), depth)

    for count in range(1, most + 1):
        checked(count)
        assert all(0 <= tap < depth for tap in spread_taps(depth, count))
    with pytest.raises(UserError, match=rf"drafter_training\.num_taps={most + 1} is not allowed; expected 1 to {most}"):
        checked(most + 1)


def test_a_drafter_that_cannot_be_stored_leaves_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.toy import make_pair

    pair, folder = make_pair(), tmp_path / "drafter"
    _save(pair, folder)
    (folder / "README.md").write_text("of the first")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}

    def breaks(drafter: DFlashDrafter, folder: Path) -> None:
        folder.mkdir()
        (folder / "config.json").write_text("half")
        raise OSError("no space")

    with monkeypatch.context() as patch:
        patch.setattr(DFlashDrafter, "save_pretrained", breaks)
        with pytest.raises(OSError, match="no space"):
            _save(pair, folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert list(tmp_path.iterdir()) == [folder]
    _save(pair, folder)
    assert not (folder / "README.md").exists(), "nothing of another drafter stays"


def test_answers_dir_that_is_a_file_is_one_line(tmp_path: Path) -> None:
    from blockpilot.drafter_training.answers import self_written
    from tests.toy import make_pair

    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="answers_dir"):
        self_written(tmp_path / "file", make_pair(), 4, 0, 4)
