"""Texts on disk: what comes back, and what happens to shards that are not whole."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from blockpilot.drafter_training.texts import Text, TextStore
from blockpilot.errors import UserError

KEY = {"target": "sha256:1", "temperature": 0.0}


def _text(number: int) -> Text:
    generator = torch.Generator().manual_seed(number)
    prompt, answer = 3 + number % 4, 1 + number % 5
    return Text(
        f"p{number}",
        torch.randint(0, 50_000, (prompt + answer,), generator=generator, dtype=torch.int32),
        prompt,
        torch.randn(prompt + answer - 1, 6, generator=generator).bfloat16(),
        torch.randint(0, 50_000, (answer, 4), generator=generator, dtype=torch.int32),
        torch.rand(answer, 4, generator=generator).half(),
    )


@pytest.fixture
def store(tmp_path: Path) -> TextStore:
    """Five prompts in three shards, all written."""
    store = TextStore(tmp_path / "texts", KEY, 5, 2)
    for shard in store.missing():
        store.write(shard, [_text(i) for i in store.rows_of(shard)])
    return store


def _again(store: TextStore) -> TextStore:
    return TextStore(store.folder, KEY, 5, 2)


def test_texts_come_back_as_they_were(store):
    texts = _again(store).load()
    assert [text.id for text in texts] == ["p0", "p1", "p2", "p3", "p4"]
    for number, text in enumerate(texts):
        wanted = _text(number)
        assert text.prompt_length == wanted.prompt_length
        for name in ("tokens", "features", "soft_ids", "soft_probs"):
            there = getattr(text, name)
            assert there.dtype == getattr(wanted, name).dtype
            assert torch.equal(there, getattr(wanted, name)), name


def test_a_shard_without_a_text_is_a_shard(store):
    store.write(1, [_text(2)])
    assert [text.id for text in _again(store).load()] == ["p0", "p1", "p2", "p4"]
    store.write(1, [])
    assert _again(store).missing() == []
    assert [text.id for text in _again(store).load()] == ["p0", "p1", "p4"]


@pytest.mark.parametrize("damage", ["cut", "empty", "other"])
def test_a_damaged_shard_is_missing_and_named(store, damage, caplog):
    path = store.path(1)
    content = path.read_bytes()
    path.write_bytes({"cut": content[:-7], "empty": b"", "other": content.replace(b"p2", b"p9")}[damage])
    if damage == "other":  # a shard of another folder: same form, another key
        other = TextStore(store.folder.parent / "other", {**KEY, "temperature": 1.0}, 5, 2)
        other.write(1, [_text(2), _text(3)])
        path.write_bytes(other.path(1).read_bytes())
    assert _again(store).missing() == [1]
    assert path.name in caplog.text
    with pytest.raises(UserError, match=r"lacks 1 of 3 shards"):
        _again(store).load()


def test_a_folder_that_holds_something_else_is_refused_by_the_field(store):
    with pytest.raises(UserError, match=r"temperature=0\.0, this run asks for temperature=1\.0"):
        TextStore(store.folder, {**KEY, "temperature": 1.0}, 5, 2)
    with pytest.raises(UserError, match="num_rows=5, this run asks for num_rows=6"):
        TextStore(store.folder, KEY, 6, 2)


@pytest.mark.parametrize("content", ["{", "", "[]", "null"])
def test_a_manifest_that_cannot_be_read_is_one_line(store, content):
    (store.folder / "manifest.json").write_text(content)
    with pytest.raises(UserError, match=r"manifest\.json cannot be read"):
        _again(store)


def test_the_manifest_is_plain_text(store):
    content = json.loads((store.folder / "manifest.json").read_text())
    assert content == {**KEY, "num_rows": 5, "shard_size": 2, "format_version": 1}


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"answers_dir: .* cannot be made"):
        TextStore(tmp_path / "file" / "texts", KEY, 5, 2)
