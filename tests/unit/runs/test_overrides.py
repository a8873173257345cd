"""What is answered to a command line that Hydra cannot compose, and what ``--help`` shows."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import hydra
import pytest
from omegaconf import DictConfig

from blockpilot.config import CONF_DIR, TrainConfig, names_of, preset_names
from blockpilot.runs.launch import launch, run_job

COMMANDS = ("train", "evaluate", "collect", "profile", "train_drafter")
Answer = Callable[..., tuple[int, str, str]]


@pytest.fixture
def answer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Iterator[Answer]:
    """Runs a command in this process as far as its job would begin; exit code, standard output and errors."""
    monkeypatch.chdir(tmp_path)
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level

    def call(command: str, *arguments: str) -> tuple[int, str, str]:
        def job(config: DictConfig) -> None:
            run_job(config, TrainConfig, lambda typed, folder, group: None)

        monkeypatch.setattr("sys.argv", [f"{command}.py", *arguments])
        main = hydra.main(version_base="1.3", config_path=str(CONF_DIR), config_name=command)(job)
        code = 0
        try:
            launch(main, command)
        except SystemExit as end:
            assert isinstance(end.code, int)
            code = end.code
        shown = capfd.readouterr()
        return code, shown.out, shown.err

    yield call
    root.handlers[:], root.level = handlers, level


@pytest.mark.parametrize(
    ("command", "arguments", "line"),
    [
        ("train", ["predictor.widht=3"], "predictor.widht is not a key; did you mean predictor.width?"),
        ("train", ["width=3"], "width is not a key; did you mean predictor.width?"),
        ("train", ["predictor.zzz=3"], "predictor.zzz is not a key; predictor has k, depth, ..."),
        ("train", ["~predictor.wdith"], "predictor.wdith is not a key; did you mean predictor.width?"),
        ("train", ["modle=tiny"], "modle is not a key; did you mean model?"),
        ("train", ["model=qwen3-8"], "model=qwen3-8 is not a preset (..., qwen3-4b, ..., tiny); did you mean "
                                     "model=qwen3-8b?"),
        ("train", ["model=nothing"], "model=nothing is not a preset (there are llama3..., tiny)"),
        ("train", ["dataset=[gsm8,mbpp]"], "dataset=gsm8 is not a preset (...); did you mean dataset=gsm8k?"),
        ("train", ["+sweep=radus"], "sweep=radus is not a preset (...); did you mean sweep=radius?"),
        ("train", ["sweep=radius"], "sweep is not a group yet; write +sweep=PRESET to add it"),
        ("train", ["policy=fixed"], "policy is not a group of this command (there are ...predictor...)"),
        ("train", ["predictor"], "'predictor' cannot be read; expected KEY=VALUE ..."),
        ("train", ["predictor.k=[1"], "'predictor.k=[1' cannot be read; expected KEY=VALUE ..."),
        ("train", ["predictor.k=1,2"], "predictor.k=1,2 is several values; add -m ... predictor.k=[1,2] for a list"),
        ("train", ["predictor=3"], "Config group override must be a string or a list. Got int"),
        ("train", ["-m", "predictor.widht=3,4"], "predictor.widht is not a key; did you mean predictor.width?"),
        ("train", ["-m", "preprocess=probs,stat"], "preprocess=stat is not a preset (...); did you mean "
                                                   "preprocess=stats?"),
        ("train", ["dataset=mbpp", "dataset.mbp.train.limit=3"],
         "dataset.mbp.train.limit is not a key; did you mean dataset.mbpp.train.limit?"),
        ("train", ["hydra.run.dirr=x"], "hydra.run.dirr is not a key; did you mean hydra.run.dir?"),
        ("evaluate", ["policy=emma"], "policy=emma is not a preset (...); did you mean policy=ema?"),
        ("evaluate", ["policy=ema", "policy.alhpa=1"], "policy.alhpa is not a key; did you mean policy.alpha?"),
        ("evaluate", ["policy=fixed", "policy.alpha=1"], "policy.alpha is not a key; policy has name, block_size"),
        ("evaluate", ["trainer.max_epochs=3"], "trainer.max_epochs is a key of train.py, not of this command"),
        ("collect", ["oracle.radus=3"], "oracle.radus is not a key; did you mean oracle.radius?"),
        ("profile", ["profile.repeat=3"], "profile.repeat is not a key; did you mean profile.repeats?"),
        ("train_drafter", ["drafter_training.max_step=3"],
         "drafter_training.max_step is not a key; did you mean drafter_training.max_steps?"),
    ],
)  # fmt: skip
def test_a_typo_is_answered_with_what_is_right(answer: Answer, command: str, arguments: list[str], line: str) -> None:
    code, _, errors = answer(command, *arguments)
    assert code == 2
    first, hint = errors.splitlines()
    assert re.fullmatch(re.escape(f"error: {line}").replace(re.escape("..."), ".*"), first), first
    assert hint.startswith("(--help ")


def test_a_key_that_is_added_but_not_there_is_answered_by_the_types(answer: Answer) -> None:
    code, shown, errors = answer("train", "+predictor.widht=3")
    assert code == 2 and "Traceback" not in shown + errors
    error, hint = shown.splitlines()
    assert error == "error: predictor.widht is not a key; did you mean predictor.width?"
    assert hint == "(HYDRA_FULL_ERROR=1 shows where this comes from)"


@pytest.mark.parametrize("argument", ["predictor.widht=3", "+predictor.widht=3"])
def test_a_traceback_is_shown_where_it_is_asked_for(
    answer: Answer, monkeypatch: pytest.MonkeyPatch, argument: str
) -> None:
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    code, shown, errors = answer("train", argument)
    assert code == 2
    assert "Traceback" in shown + errors and "predictor.widht" in shown + errors


@pytest.mark.parametrize("command", COMMANDS)
def test_help_shows_every_group_its_presets_and_keys_that_there_are(answer: Answer, command: str) -> None:
    code, shown, _ = answer(command, "--help")
    assert code == 0 and "$" not in shown
    words = shown.replace(",", " ").split()
    keys, groups = names_of(command)
    for group in groups:
        if group != "drafter_training":  # its one preset is the default
            assert f"\n  {group:<14}" in shown
            assert set(preset_names(group)) <= set(words), group
    _, _, rest = shown.partition("Most used keys")
    named = [line.split()[0].rstrip(",") for line in rest.partition("\n\n")[0].splitlines()[1:]]
    assert len(named) >= 4 and set(named) <= set(keys), named
    assert all(len(line) <= 120 for line in shown.splitlines())
    assert len(shown.splitlines()) <= 50
