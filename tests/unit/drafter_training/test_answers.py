"""The target's answers are what it decodes, are made once, and come with what it computed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import blockpilot as bp
from blockpilot.drafter_training import answers as module
from blockpilot.drafter_training.answers import Sampling, answer, answers_of, self_written
from blockpilot.errors import UserError
from blockpilot.prompts import PromptRow
from tests.toy import make_pair, word

ROWS = [
    PromptRow("a", "toy", (f"{word(20)} {word(31)}",)),
    PromptRow("b", "toy", (word(40), f"{word(41)} {word(12)} {word(13)}")),
    PromptRow("c", "toy", (word(50),)),
]


@pytest.fixture(scope="module")
def pair():
    return make_pair()


@pytest.mark.parametrize("sampling", [Sampling(12, 0.0, 0), Sampling(12, 1.0, 5)])
def test_answers_are_what_the_engine_decodes_turn_by_turn(pair, sampling):
    texts = answer(pair, ROWS, sampling)
    assert [text.id for text in texts] == ["a", "b#0", "b#1", "c"]
    said: list[str] = []
    for text, (row, turn) in zip(texts, [(0, 0), (1, 0), (1, 1), (2, 0)], strict=True):
        said = said if turn else []
        prompt = pair.encode(ROWS[row].turns[: turn + 1], said)
        out = bp.generate(
            pair, prompt, policy=bp.FixedPolicy(1), max_new_tokens=12, temperature=sampling.temperature,
            seed=sampling.seed,
        )  # fmt: skip
        assert text.tokens.tolist() == prompt + out.output_ids
        assert text.prompt_length == len(prompt)
        said = [*said, pair.decode(out.output_ids)]


def test_features_and_soft_labels_are_the_targets(pair):
    for text in answer(pair, ROWS, Sampling(12, 0.0, 0)):
        with torch.no_grad():
            out = pair.target(text.tokens[None], output_hidden_states=True)
        taps = torch.cat([out.hidden_states[i + 1] for i in pair.drafter.target_layer_ids], dim=-1)
        torch.testing.assert_close(text.features.float(), taps[0, :-1], rtol=1e-4, atol=1e-4)
        probs = out.logits[0, text.prompt_length - 1 : -1].softmax(dim=-1)
        torch.testing.assert_close(text.soft_probs.float(), probs.gather(1, text.soft_ids.long()), rtol=1e-3, atol=1e-5)
        assert text.soft_ids[:, 0].tolist() == text.tokens[text.prompt_length :].tolist(), "greedy: the likeliest"


def test_only_what_is_missing_is_answered(pair, tmp_path, monkeypatch):
    def made() -> list[str]:
        asked: list[str] = []
        real = answer

        def watched(pair, rows, sampling):
            asked.extend(row.id for row in rows)
            return real(pair, rows, sampling)

        monkeypatch.setattr(module, "answer", watched)
        store = answers_of(tmp_path, "toy", pair, ROWS, Sampling(8, 0.0, 0), 2, done.append)
        monkeypatch.setattr(module, "answer", real)
        ids.append([text.id for text in store.load()])
        store.path(0).unlink()
        return asked

    done: list[int] = []
    ids: list[list[str]] = []
    assert made() == ["a", "b", "c"]
    assert made() == ["a", "b"]
    assert ids[0] == ids[1] == ["a", "b#0", "b#1", "c"]
    assert done == [0, 2, 1, 1, 2], "what is there counts at once"


def test_another_drafter_of_the_same_taps_reads_the_same_folder(pair, tmp_path):
    sampling = Sampling(4, 0.0, 0)
    first = answers_of(tmp_path, "toy", pair, ROWS[:1], sampling, 2).folder
    assert answers_of(tmp_path, "toy", make_pair(target=pair.target), ROWS[:1], sampling, 2).folder == first
    for other in (Sampling(5, 0.0, 0), Sampling(4, 1.0, 0), Sampling(4, 0.0, 1)):
        assert answers_of(tmp_path, "toy", pair, ROWS[:1], other, 2).folder != first


def test_a_prompt_without_room_is_left_out_and_told(tmp_path, caplog):
    pair = make_pair(max_positions=16)
    rows = [PromptRow("long", "toy", (" ".join([word(20)] * 14),)), ROWS[0]]
    assert [text.id for text in answer(pair, rows, Sampling(8, 0.0, 0))] == ["a"]
    assert "'long'" in caplog.text


def test_the_target_writes_prompts_that_differ_and_are_kept(pair, tmp_path, monkeypatch):
    rows = self_written(tmp_path, pair, 24, 3, 10)
    assert 0 < len(rows) <= 24
    assert len({row.turns for row in rows}) == len(rows)
    assert all(row.dataset == "self" for row in rows)
    with monkeypatch.context() as patch:
        patch.setattr(module, "generate_batch", None)  # nothing is decoded again
        assert self_written(tmp_path, pair, 24, 3, 10) == rows
        assert self_written(tmp_path, pair, 0, 3, 10) == []
    # a prefix stays what it was
    more = self_written(tmp_path, pair, 30, 3, 10)
    assert more[: len(rows)] == rows
    assert self_written(tmp_path / "again", pair, 24, 4, 10) != rows


@pytest.mark.parametrize("content", ["", "{}", '[["a"]]', "[[0, "])
def test_a_damaged_batch_of_prompts_is_written_again(pair, tmp_path, content, caplog):
    rows = self_written(tmp_path, pair, 8, 3, 8)
    [path] = tmp_path.rglob("prompts-*.json")
    whole = path.read_bytes()
    path.write_text(content)
    assert self_written(tmp_path, pair, 8, 3, 8) == rows
    assert path.read_bytes() == whole and f"{path} is damaged" in caplog.text


def test_without_a_chat_template_the_target_cannot_write_prompts(tmp_path):
    with pytest.raises(UserError, match=r"drafter_training\.self_written.* no chat template"):
        self_written(tmp_path, make_pair(template=None), 4, 0, 4)
    hidden = "<bos>{% for m in messages %} {{ m.content | length }}{% endfor %} <assistant>"
    with pytest.raises(UserError, match="shows a user's text as it is"):
        self_written(Path(tmp_path), make_pair(template=hidden), 4, 0, 4)
