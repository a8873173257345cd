"""The trained policy: its choices, its folder, and whom it refuses to work with."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from blockpilot.config import PredictorConfig
from blockpilot.decoding import Prefill, generate, prompt_key
from blockpilot.decoding.sampling import signed_prompt_key
from blockpilot.errors import UserError
from blockpilot.learning import BlockSizePredictor, FeatureExtractor
from blockpilot.models import Pair
from blockpilot.policies.predictor import PredictorPolicy, load_policy
from tests.toy import make_drafter, make_pair, make_prompts, make_target

KINDS = ("probs", "log_probs", "logits", "topk", "stats", "hidden")
SIZES = (2, 3, 4, 5, 6)


def make_policy(pair: Pair, kind: str = "probs", seed: int = 0, **settings: Any) -> PredictorPolicy:
    """A policy of random weights, large enough to tell prompts apart."""
    extractor = FeatureExtractor(kind, top_k=9, tail_mass=1e-3)
    given = PredictorConfig(**{"k": 2, "depth": 2, "width": 24, **settings})
    predictor = BlockSizePredictor(
        extractor.input_size(pair.vocab_size, pair.hidden_size), SIZES, sparse_input=extractor.is_sparse,
        depth=given.depth, width=given.width, dropout=given.dropout, residual=given.residual,
        always_block_size=pair.block_size, min_gain=given.min_gain,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    for parameter in predictor.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * (parameter.dim() > 1))
    keys = torch.tensor([signed_prompt_key(prompt) for prompt in make_prompts([4] * 10)])
    return PredictorPolicy(
        predictor, extractor, given, pair.identity, pair.vocab_size, pair.hidden_size, pair.block_size, 5, keys
    )


def prefills(count: int = 40) -> list[Prefill]:
    """From nearly flat to nearly certain."""
    generator = torch.Generator().manual_seed(5)
    return [
        Prefill(i, 3, 0.2 * i * torch.randn(64, generator=generator), torch.randn(32, generator=generator))
        for i in range(count)
    ]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("settings", [{}, {"depth": 3, "residual": False, "width": 16}], ids=["paper", "deep"])
def test_a_saved_policy_chooses_the_same(tmp_path: Path, kind: str, settings: dict[str, Any]) -> None:
    pair = make_pair()
    made = (make_policy(pair, kind, seed, **settings) for seed in range(50))
    # random weights may choose the same for everyone: take the first that do not
    policy, before = next(
        (policy, choices)
        for policy in made
        if len(set(choices := [policy.choose(prefill) for prefill in prefills()])) > 2
    )
    assert set(before) <= set(SIZES)
    policy.save(tmp_path / "made" / "policy")
    loaded = load_policy(tmp_path / "made" / "policy", pair)
    assert [loaded.choose(prefill) for prefill in prefills()] == before
    for name in ("settings", "extractor", "block_sizes", "trained_block_size", "best_fixed", "vocab_size"):
        assert getattr(loaded, name) == getattr(policy, name)
    assert loaded.pair_identity == policy.pair_identity
    assert torch.equal(loaded.training_prompt_keys, policy.training_prompt_keys)
    assert {path.name for path in (tmp_path / "made" / "policy").iterdir()} == {"config.json", "model.safetensors"}


@pytest.mark.parametrize("kind", KINDS)
def test_choices_are_the_highest_scores_of_the_raw_prefill_with_dropout_off(kind: str) -> None:
    policy = make_policy(make_pair(), kind, dropout=0.9)
    policy.predictor.eval()
    # a bias beside the inputs, so that their scale matters
    policy.predictor.first.bias.data.normal_(generator=torch.Generator().manual_seed(1))
    expected = []
    for prefill in prefills():
        features = policy.extractor.from_logits(prefill.logits, prefill.hidden)
        with torch.no_grad():
            expected.append(SIZES[int(policy.predictor(features)[0].argmax())])
    policy.predictor.train()
    assert [policy.choose(prefill) for prefill in prefills()] == expected


def test_a_policy_drives_the_engine() -> None:
    pair = make_pair()
    policy = make_policy(pair, "hidden")
    chosen = set()
    for prompt in make_prompts([3, 5, 6, 9, 2, 8], seed=6):
        out = generate(pair, prompt, policy, max_new_tokens=4, stop_token_ids=[])
        assert set(out.block_sizes) == {out.first_block_size} <= set(SIZES)
        chosen.add(out.first_block_size)
    assert len(chosen) > 1


def test_logits_of_another_vocabulary(tmp_path: Path) -> None:
    policy = make_policy(make_pair())
    with pytest.raises(UserError, match=r"vocabulary of 64 tokens, this target has 65"):
        policy.choose(Prefill(0, 1, torch.zeros(65), torch.zeros(32)))


OTHERS: dict[str, Callable[[], Pair]] = {
    "target": lambda: make_pair(target=make_target(seed=7)),
    "drafter": lambda: make_pair(target=make_target(), drafter=make_drafter(make_target(), seed=7)),
    "chat_template": lambda: make_pair(template="{{ messages[0].content }}"),
    "thinking": lambda: make_pair(thinking=True),
    "target and vocabulary": lambda: make_pair(vocab_size=70),
}


@pytest.mark.parametrize("part", OTHERS)
def test_another_pair_is_refused_and_both_are_named(tmp_path: Path, part: str) -> None:
    pair, other = make_pair(), OTHERS[part]()
    make_policy(pair).save(tmp_path)
    load_policy(tmp_path)  # without a pair there is nothing to compare
    name = part.split()[0]
    with pytest.raises(UserError) as caught:
        load_policy(tmp_path, other)
    message = str(caught.value)
    assert f"{name} {pair.identity[name]}" in message and f"{name} {other.identity[name]}" in message
    assert "\n" not in message


def error_of(folder: Path) -> str:
    with pytest.raises(UserError) as caught:
        load_policy(folder)
    assert "\n" not in str(caught.value) and str(folder) in str(caught.value)
    return str(caught.value)


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    assert "there is no config.json" in error_of(tmp_path / "nowhere")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_missing_file_is_named(tmp_path: Path, name: str) -> None:
    make_policy(make_pair()).save(tmp_path)
    (tmp_path / name).unlink()
    assert f"there is no {name}" in error_of(tmp_path)


@pytest.mark.parametrize("share", [0.0, 0.001, 0.5, 0.999])
@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_truncated_files(tmp_path: Path, name: str, share: float) -> None:
    make_policy(make_pair()).save(tmp_path)
    content = (tmp_path / name).read_bytes().rstrip()
    (tmp_path / name).write_bytes(content[: int(share * len(content))])
    assert "cannot be read" in error_of(tmp_path)


@pytest.mark.parametrize("text", ["[]", "null", "3", '"text"'])
def test_a_config_that_is_no_object(tmp_path: Path, text: str) -> None:
    make_policy(make_pair()).save(tmp_path)
    (tmp_path / "config.json").write_text(text)
    error_of(tmp_path)


@pytest.mark.parametrize("version", [0, 1, None, "2"])
def test_another_format_version(tmp_path: Path, version: object) -> None:
    make_policy(make_pair()).save(tmp_path)
    change(tmp_path, lambda config: config.update(format_version=version))
    message = error_of(tmp_path)
    assert f"format_version {version}" in message and "expected 2" in message


def change(folder: Path, edit: Callable[[dict], object]) -> None:
    config = json.loads((folder / "config.json").read_text())
    edit(config)
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    "key", ["block_sizes", "preprocess", "predictor", "pair", "vocab_size", "trained_block_size", "best_fixed"]
)
def test_a_config_without_a_key(tmp_path: Path, key: str) -> None:
    make_policy(make_pair()).save(tmp_path)
    change(tmp_path, lambda config: config.pop(key))
    assert key in error_of(tmp_path)


@pytest.mark.parametrize(
    "edit",
    [
        lambda config: config.update(vocab_size=63),
        lambda config: config.update(block_sizes=[2, 3]),
        lambda config: config["predictor"].update(width=25),
        lambda config: config["predictor"].update(depth=1),
        lambda config: config["predictor"].update(wdith=24),
        lambda config: config["preprocess"].update(kind="logits"),
    ],
)
def test_config_and_weights_that_do_not_fit_each_other(tmp_path: Path, edit: Callable[[dict], object]) -> None:
    make_policy(make_pair()).save(tmp_path)
    change(tmp_path, edit)
    assert "does not fit together" in error_of(tmp_path)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("block_sizes", value) for value in (["2", "3", "4", "5", "6"], [0, 1, 2, 3, 4], [4] * 5, [6, 5, 4, 3, 2])),
        *(("best_fixed", value) for value in (True, 0, -1, "4")),
        *(("trained_block_size", value) for value in (None, "4", 0, 4.0)),
        ("hidden_size", "32"),
        ("objective", "fame"),
    ],
)
def test_a_value_that_would_be_wrong_only_later_is_named(tmp_path: Path, key: str, value: object) -> None:
    make_policy(make_pair()).save(tmp_path)
    change(tmp_path, lambda config: config.update({key: value}))
    message = error_of(tmp_path)
    assert key in message and f"={value!r} is not allowed; expected" in message


def test_keys_of_another_type_and_a_config_without_an_end(tmp_path: Path) -> None:
    policy = make_policy(make_pair())
    replace(policy, training_prompt_keys=policy.training_prompt_keys.double()).save(tmp_path)
    assert "training_prompt_keys is torch.float64" in error_of(tmp_path)
    (tmp_path / "config.json").write_text("[" * 100_000)
    assert "cannot be read" in error_of(tmp_path)


def test_values_out_of_range_are_named(tmp_path: Path) -> None:
    make_policy(make_pair()).save(tmp_path)
    change(tmp_path, lambda config: config["preprocess"].update(kind="vibes"))
    with pytest.raises(UserError, match=r"preprocess\.kind='vibes'"):
        load_policy(tmp_path)


@pytest.mark.parametrize("name", ["training_prompt_keys", "predictor.head.bias"])
def test_weights_without_a_tensor(tmp_path: Path, name: str) -> None:
    make_policy(make_pair()).save(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights[name]
    save_file(weights, tmp_path / "model.safetensors")
    error_of(tmp_path)


def test_prompts_it_was_trained_on_are_refused() -> None:
    policy = make_policy(make_pair())
    own = policy.training_prompt_keys
    unseen = torch.tensor([signed_prompt_key(prompt) for prompt in make_prompts([5] * 6, seed=9)])
    policy.check_unseen(unseen)
    policy.check_unseen(torch.empty(0, dtype=torch.int64))
    with pytest.raises(UserError, match=r"2 of 8 test prompts are among the 10 "):
        policy.check_unseen(torch.cat([unseen, own[3:5]]))
    replace(policy, training_prompt_keys=torch.empty(0, dtype=torch.int64)).check_unseen(own)


def test_a_policy_without_training_prompts_can_be_saved(tmp_path: Path) -> None:
    policy = replace(make_policy(make_pair()), training_prompt_keys=torch.empty(0, dtype=torch.int64))
    policy.save(tmp_path)
    assert len(load_policy(tmp_path).training_prompt_keys) == 0


def test_keys_are_those_the_engine_hands_over() -> None:
    pair = make_pair()
    prompt = make_prompts([4])[0]

    class Watching:
        def choose(self, prefill: Prefill) -> int:
            self.key = prefill.key
            return 2

    watching = Watching()
    generate(pair, prompt, watching, max_new_tokens=2)
    assert watching.key == prompt_key(prompt) == signed_prompt_key(prompt) % 2**64


@pytest.mark.parametrize("min_gain", [None, 0.0, 0.02])
def test_a_saved_policy_keeps_its_decision(tmp_path: Path, min_gain: float | None) -> None:
    pair = make_pair()
    policy = make_policy(pair, min_gain=min_gain)
    policy.predictor.decision.gains.copy_(torch.eye(5) * 0.04)
    policy.predictor.decision.temperature.fill_(3.0)
    policy.save(tmp_path)
    loaded = load_policy(tmp_path, pair)
    expected = []
    for prefill in prefills():
        scores = policy.predictor.scores(policy.extractor.from_logits(prefill.logits))[0]
        # gains of 0.04 on the diagonal: a candidate promises 0.04 times its probability
        best = int(scores.argmax())
        enough = min_gain is None or 0.04 * float((scores / 3).softmax(dim=0)[best]) > min_gain
        expected.append(SIZES[best] if enough else pair.block_size)
    assert [loaded.choose(prefill) for prefill in prefills()] == expected
    assert (expected.count(pair.block_size) > 10) == (min_gain == 0.02)


def test_save_pretrained_writes_a_card_and_from_pretrained_reads_the_folder(tmp_path: Path) -> None:
    pair = make_pair()
    policy = make_policy(pair)
    policy.save_pretrained(tmp_path / "mine")
    assert "speculative-decoding" in (tmp_path / "mine" / "README.md").read_text()
    loaded = PredictorPolicy.from_pretrained(tmp_path / "mine", pair=pair)
    assert [loaded.choose(p) for p in prefills()] == [policy.choose(p) for p in prefills()]
    with pytest.raises(UserError, match="was trained with target"):
        PredictorPolicy.from_pretrained(tmp_path / "mine", pair=make_pair(target=make_target(seed=7)))


def test_without_a_network_the_hub_fails_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match=r"'someone/policy' could not be pushed: \w+: [^\n]+$"):
        make_policy(make_pair()).push_to_hub("someone/policy")
    with pytest.raises(UserError, match=r"policy.path='someone/policy' could not be loaded"):
        load_policy("someone/policy")
