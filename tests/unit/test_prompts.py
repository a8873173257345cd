from __future__ import annotations

import json
import shutil
import time
from dataclasses import replace
from pathlib import Path

import datasets
import huggingface_hub.constants
import pytest
from datasets import config as datasets_config
from hypothesis import given
from hypothesis import strategies as st

from blockpilot.config import PromptSource
from blockpilot.errors import UserError
from blockpilot.prompts import PromptRow, load_prompts

GOOD = '{"id": "a", "dataset": "d", "turns": ["one", "two"]}'
GSM8K = PromptSource(kind="hub", repo="openai/gsm8k", subset="main", split="train", field="question")


def write(folder: Path, content: str | bytes, name: str = "prompts.jsonl") -> PromptSource:
    path = folder / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return PromptSource(kind=path.suffix.removeprefix("."), path=str(path))


# --- jsonl


def test_jsonl_rows(tmp_path: Path) -> None:
    lines = [
        GOOD,
        '{"id": 7, "turns": [" kept as it is\\n"], "category": "ignored"}',
        "",
        '{"prompt": "same as one turn"}',
        '{"id": "b", "prompt": "not this", "turns": ["this"]}',
    ]
    assert load_prompts("mine", write(tmp_path, "\n".join(lines))) == [
        PromptRow("a", "d", ("one", "two")),
        PromptRow("7", "mine", (" kept as it is\n",)),
        PromptRow("mine-prompts-4", "mine", ("same as one turn",)),
        PromptRow("b", "mine", ("this",)),
    ]


def test_only_keeps_the_rows_whose_columns_have_the_values(tmp_path: Path) -> None:
    lines = [{"id": str(i), "turns": ["x"], "category": c, "level": i % 2} for i, c in enumerate("abcab")]
    source = write(tmp_path, "\n".join(map(json.dumps, lines)))
    found = load_prompts("mine", replace(source, only={"category": ["a", "b"], "level": ["1"]}))
    assert [row.id for row in found] == ["1", "3"]
    with pytest.raises(UserError, match=r"the file holds no prompts with only=\{'category': \['z'\]\}"):
        load_prompts("mine", replace(source, only={"category": ["z"]}))
    with pytest.raises(UserError, match="line 1: only names 'size'; the row has id, turns, category, level"):
        load_prompts("mine", replace(source, only={"size": ["1"]}))
    with pytest.raises(UserError, match="only="):
        PromptSource("txt", path="a.txt", only={"category": ["a"]})


@pytest.mark.parametrize("ending", ["\n", "\r\n"])
def test_jsonl_tolerates_byte_order_mark_and_line_endings(tmp_path: Path, ending: str) -> None:
    content = "\ufeff" + ending.join([GOOD, "", '{"turns": ["x"]}', ""])
    assert [row.turns for row in load_prompts("mine", write(tmp_path, content))] == [("one", "two"), ("x",)]


def test_unicode_line_separator_does_not_cut_a_line(tmp_path: Path) -> None:
    content = json.dumps({"turns": ["a\u2028b\u0085c"]}, ensure_ascii=False)
    assert load_prompts("mine", write(tmp_path, content))[0].turns == ("a\u2028b\u0085c",)
    assert load_prompts("mine", write(tmp_path, "a\u2028b", "p.txt"))[0].turns == ("a\u2028b",)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "not valid JSON"),
        ("not json", "column 1"),
        ("[" * 100_000, "not valid JSON"),
        ('["one"]', 'expected a JSON object with turns, got ["one"]'),
        ("3", "expected a JSON object with turns, got 3"),
        ('{"id": "b"}', "has neither turns nor prompt; keys are id"),
        ("{}", "keys are none"),
        ('{"turns": []}', "turns must be a non-empty list of strings, got []"),
        ('{"turns": "one"}', 'turns must be a non-empty list of strings, got "one"'),
        ('{"turns": null}', "turns must be a non-empty list of strings, got null"),
        ('{"turns": ["one", 2]}', "turns[1] must be a non-empty string, got 2"),
        ('{"turns": ["one", ""]}', 'turns[1] must be a non-empty string, got ""'),
        ('{"turns": ["  "]}', 'turns[0] must be a non-empty string, got "  "'),
        ('{"prompt": ["one"]}', 'prompt must be a non-empty string, got ["one"]'),
        ('{"turns": ["\\ud800"]}', "surrogate"),
        ('{"id": null, "turns": ["one"]}', "id=None is not allowed"),
        ('{"id": "", "turns": ["one"]}', "id='' is not allowed"),
        ('{"id": true, "turns": ["one"]}', "id=True is not allowed"),
        ('{"dataset": 1, "turns": ["one"]}', "dataset=1 is not allowed"),
        ('{"id": "a", "turns": ["one"]}', "id='a' is already used on line 1"),
    ],
)
def test_malformed_line_names_file_line_and_reason(tmp_path: Path, line: str, reason: str) -> None:
    source = write(tmp_path, f"{GOOD}\n\n{line}\n")
    with pytest.raises(UserError) as caught:
        load_prompts("mine", source)
    message = str(caught.value)
    assert message.startswith(f"{source.path}, line 3: ")
    assert reason in message
    assert "\n" not in message


@pytest.mark.parametrize("name", ["p.jsonl", "p.txt"])
def test_invalid_utf8_names_line_and_byte(tmp_path: Path, name: str) -> None:
    source = write(tmp_path, GOOD.encode() + b'\n{"turns": ["\xff"]}\n', name)
    with pytest.raises(UserError, match=r"line 2: not valid UTF-8 \(byte 13 of the line\)"):
        load_prompts("mine", source)


@pytest.mark.parametrize("name", ["p.jsonl", "p.txt"])
@pytest.mark.parametrize("content", ["", "\n \n", "\ufeff"])
def test_empty_file(tmp_path: Path, name: str, content: str) -> None:
    source = write(tmp_path, content, name)
    with pytest.raises(UserError, match="the file holds no prompts") as caught:
        load_prompts("mine", source)
    assert str(source.path) in str(caught.value)


def test_missing_file_names_both_places_looked_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"dataset\.mine: there is no file 'no/such\.jsonl'") as caught:
        load_prompts("mine", PromptSource(kind="jsonl", path="no/such.jsonl"))
    assert str(tmp_path / "no/such.jsonl") in str(caught.value)
    assert str(Path(__file__).parents[2] / "no/such.jsonl") in str(caught.value)


def test_relative_path_starts_at_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, GOOD)
    monkeypatch.chdir(tmp_path)
    assert len(load_prompts("mine", PromptSource(kind="jsonl", path="prompts.jsonl"))) == 1


@pytest.mark.parametrize("kind", ["jsonl", "txt"])
def test_path_is_needed(kind: str) -> None:
    with pytest.raises(UserError, match=rf"dataset\.{kind}\.train\.path"):
        load_prompts(kind, PromptSource(kind=kind))


@given(
    st.lists(
        st.lists(st.text(st.characters(exclude_categories=["Cs"])).filter(str.strip), min_size=1, max_size=3),
        min_size=1,
        max_size=8,
    ),
    st.booleans(),
)
def test_any_text_survives_a_jsonl_file(
    tmp_path_factory: pytest.TempPathFactory, conversations: list[list[str]], ascii_only: bool
) -> None:
    content = "\n".join(json.dumps({"turns": turns}, ensure_ascii=ascii_only) for turns in conversations)
    rows = load_prompts("mine", write(tmp_path_factory.mktemp("any"), content))
    assert [list(row.turns) for row in rows] == conversations
    assert len({row.id for row in rows}) == len(rows)


# --- txt, limit, template


def test_txt_lines(tmp_path: Path) -> None:
    rows = load_prompts("txt", write(tmp_path, "\ufefffirst \r\n\r\n  {second}\r\nlast", "p.txt"))
    assert rows == [
        PromptRow("txt-p-1", "txt", ("first",)),
        PromptRow("txt-p-3", "txt", ("{second}",)),
        PromptRow("txt-p-4", "txt", ("last",)),
    ]


def test_limit_keeps_the_first_rows(tmp_path: Path) -> None:
    source = write(tmp_path, "a\nb\nc", "p.txt")
    assert [row.turns[0] for row in load_prompts("txt", replace(source, limit=2))] == ["a", "b"]
    assert len(load_prompts("txt", replace(source, limit=9))) == 3


def test_template_goes_around_every_turn(tmp_path: Path) -> None:
    source = write(tmp_path, '{"turns": ["a {x}", "b"], "unit": "km"}')
    rows = load_prompts("mine", replace(source, template="In {unit}: {prompt} \\boxed{{}}"))
    assert rows[0].turns == ("In km: a {x} \\boxed{}", "In km: b \\boxed{}")


@pytest.mark.parametrize(
    ("template", "reason"),
    [("{nope}", "template names 'nope'; the row has prompt"), ("{", "cannot be filled"), ("{}", "cannot be filled")],
)
def test_template_that_does_not_fit(tmp_path: Path, template: str, reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        load_prompts("mine", replace(write(tmp_path, GOOD), template=template))


# --- hub: real data sets in local folders, and a Hub that is not there


@pytest.fixture
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A fresh cache of the ``datasets`` library."""
    cache = tmp_path / "hub-cache"
    monkeypatch.setattr(datasets_config, "HF_DATASETS_CACHE", cache)
    return cache


def save(folder: Path, rows: list[dict[str, object]], split: str = "train") -> PromptSource:
    folder.mkdir(exist_ok=True)
    datasets.Dataset.from_list(rows).to_parquet(folder / f"{split}-00000-of-00001.parquet")
    return PromptSource(kind="hub", repo=str(folder), split=split, field="question")


@pytest.mark.usefixtures("hub_cache")
def test_folder_of_parquet_files(tmp_path: Path) -> None:
    save(tmp_path / "set", [{"question": f"q{i}", "hint": ""} for i in range(3)], "train")
    source = save(tmp_path / "set", [{"question": "t0", "hint": "h"}, {"question": "t1", "hint": ""}], "test")
    assert load_prompts("mine", replace(source, template="{prompt}\n\n{hint}")) == [
        PromptRow("mine-test-0", "mine", ("t0\n\nh",)),
        PromptRow("mine-test-1", "mine", ("t1",)),
    ]
    assert [row.id for row in load_prompts("mine", replace(source, split="train", limit=2))] == [
        "mine-train-0",
        "mine-train-1",
    ]


@pytest.mark.usefixtures("hub_cache")
def test_folder_of_jsonl_files(tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "train.jsonl").write_text('{"question": "q0"}\n{"question": "q1"}\n')
    source = PromptSource(kind="hub", repo=str(tmp_path / "set"), split="train", field="question")
    assert [row.turns for row in load_prompts("mine", source)] == [("q0",), ("q1",)]


def test_folder_of_save_to_disk(tmp_path: Path) -> None:
    one = datasets.Dataset.from_list([{"question": "q0"}])
    one.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"train": one, "test": one}).save_to_disk(tmp_path / "two")
    source = PromptSource(kind="hub", repo=str(tmp_path / "one"), split="train", field="question")
    assert load_prompts("mine", source)[0].turns == ("q0",)
    assert load_prompts("mine", replace(source, repo=str(tmp_path / "two"), split="test"))[0].turns == ("q0",)
    with pytest.raises(UserError, match="splits train, test"):
        load_prompts("mine", replace(source, repo=str(tmp_path / "two"), split="dev"))


@pytest.mark.usefixtures("hub_cache")
@pytest.mark.parametrize(("role", "content", "user"), [("role", "content", "user"), ("from", "value", "human")])
def test_chat_messages_give_the_user_turns_in_order(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, role: str, content: str, user: str
) -> None:
    def chat(*messages: tuple[str, str | None]) -> dict[str, object]:
        return {"question": [{role: who, content: text} for who, text in messages]}

    source = save(
        tmp_path / "set",
        [
            chat(("system", "s"), (user, "one"), ("assistant", "x"), (user, "two")),
            chat(("assistant", "only an answer")),
            chat((user, None)),
            chat((user, "three")),
            chat((user, "four")),
        ],
    )
    rows = load_prompts("mine", replace(source, limit=2))
    assert [(row.id, row.turns) for row in rows] == [("mine-train-0", ("one", "two")), ("mine-train-3", ("three",))]
    assert "skipped 2 rows without user text" in caplog.text


@pytest.mark.usefixtures("hub_cache")
def test_only_keeps_rows_of_a_hub_data_set(tmp_path: Path) -> None:
    source = save(tmp_path / "set", [{"question": f"q{i}", "level": i % 2} for i in range(4)])
    rows = load_prompts("mine", replace(source, only={"level": ["1"]}))
    assert [row.turns for row in rows] == [("q1",), ("q3",)]


@pytest.mark.usefixtures("hub_cache")
def test_list_of_strings_column_gives_turns(tmp_path: Path) -> None:
    source = save(tmp_path / "set", [{"question": ["one", "two"]}])
    assert load_prompts("mine", source)[0].turns == ("one", "two")


@pytest.mark.usefixtures("hub_cache")
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"field": "nope"}, "has no column 'nope'; expected one of question, number"),
        ({"field": "number"}, "no user text in column 'number' of any of its 2 rows"),
        ({"template": "{prompt} {nope}"}, "has no column 'nope'"),
        ({"template": "{"}, "is malformed"),
        ({"split": "dev"}, "split 'dev' could not be loaded"),
        ({"subset": "main"}, "subset 'main', split 'train' could not be loaded"),
        ({"repo": None}, "kind=hub needs repo, got None"),
        ({"split": None}, "kind=hub needs split, got None"),
        ({"field": None}, "kind=hub needs field, got None"),
        ({"repo": "/no/such/folder"}, "neither a folder nor a Hub id; looked in /no/such/folder"),
    ],
)
def test_hub_source_that_does_not_fit(tmp_path: Path, change: dict[str, str | None], reason: str) -> None:
    source = save(tmp_path / "set", [{"question": "q", "number": 1}, {"question": "r", "number": 2}])
    with pytest.raises(UserError) as caught:
        load_prompts("mine", replace(source, **change))
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.fixture
def no_hub(hub_cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A Hub nobody answers for: a port of this machine that is closed."""
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    return hub_cache


@pytest.mark.usefixtures("no_hub")
def test_unreachable_hub_fails_in_seconds_and_says_what_to_do() -> None:
    started = time.monotonic()
    with pytest.raises(UserError) as caught:
        load_prompts("gsm8k", GSM8K)
    assert time.monotonic() - started < 10
    for part in ("openai/gsm8k", "'main'", "'train'", "Hub cannot be reached", "dataset=jsonl", "repo=FOLDER"):
        assert part in str(caught.value)
    assert not datasets_config.HF_HUB_OFFLINE


def test_unreachable_hub_is_not_needed_for_a_cached_data_set(tmp_path: Path, no_hub: Path) -> None:
    load_prompts("gsm8k", save(tmp_path / "gsm8k", [{"question": "cached"}]))
    made = next(no_hub.rglob("dataset_info.json"))
    made.write_text(json.dumps(json.loads(made.read_text()) | {"config_name": "main"}))
    # the place of a data set that came from the Hub: owner___name/subset/version/commit
    shutil.copytree(made.parent, no_hub / "openai___gsm8k" / "main" / "0.0.0" / ("a" * 40))
    assert [row.turns for row in load_prompts("gsm8k", GSM8K)] == [("cached",)]
