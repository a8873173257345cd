"""Loading and checking a pair: folders, broken folders, misfits, identity, prompts as token ids."""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from blockpilot.decoding import generate
from blockpilot.errors import UserError
from blockpilot.models import Pair, load_pair
from blockpilot.models.locate import hub_commit
from blockpilot.models.pair import check_fit, tokenizer_digest
from blockpilot.policies import FixedPolicy
from tests.toy import ASSISTANT, BOS, EOS, THINK, USER, make_drafter, make_pair, make_target, make_tokenizer


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pair's folders as ``save_pretrained`` writes them; not to be changed."""
    folder = tmp_path_factory.mktemp("pair")
    pair = make_pair()
    pair.target.save_pretrained(folder / "target")
    pair.tokenizer.save_pretrained(folder / "target")
    pair.drafter.save_pretrained(folder / "drafter")
    return folder


@pytest.fixture
def folders(saved: Path, tmp_path: Path) -> Path:
    """A copy that may be broken."""
    return Path(shutil.copytree(saved, tmp_path / "pair"))


def load(folder: Path, **options: Any) -> Pair:
    return load_pair(target=folder / "target", drafter=folder / "drafter", device="cpu", **options)


def error_of(call: Callable[[], object]) -> str:
    with pytest.raises(UserError) as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message
    return message


# ---- folders


def test_a_saved_pair_loads_back_the_same(saved: Path) -> None:
    pair, loaded = make_pair(), load(saved)
    for ours, theirs in ((pair.target, loaded.target), (pair.drafter, loaded.drafter)):
        before, after = ours.state_dict(), theirs.state_dict()
        assert before.keys() == after.keys()
        assert all(torch.equal(before[name], after[name]) for name in before)
        assert not theirs.training
    assert (loaded.block_size, loaded.mask_token_id) == (pair.block_size, pair.mask_token_id) == (4, 4)
    assert loaded.drafter.target_layer_ids == pair.drafter.target_layer_ids
    assert loaded.stop_token_ids == pair.stop_token_ids == (EOS,)
    assert loaded.encode(["w9 w10"]) == pair.encode(["w9 w10"])
    out, again = (generate(p, [9, 10, 11], FixedPolicy(4), max_new_tokens=12, temperature=1.0) for p in (pair, loaded))
    assert (out.output_ids, out.acceptance_lengths) == (again.output_ids, again.acceptance_lengths)
    assert loaded.identity == pair.identity


def test_dtype_applies_to_both_models(saved: Path) -> None:
    pair = load(saved, dtype="bfloat16")
    assert pair.target.dtype == pair.drafter.dtype == torch.bfloat16
    assert pair.identity["dtype"] == "bfloat16"


@pytest.mark.parametrize("dtype", ["float31", "nn", "int8"])
def test_a_dtype_that_is_none(saved: Path, dtype: str) -> None:
    assert dtype in error_of(lambda: load(saved, dtype=dtype))


@pytest.mark.parametrize("device", ["gpu", "cuda:x", None])
def test_a_device_that_is_none(saved: Path, device: Any) -> None:
    message = error_of(lambda: load_pair(target=saved / "target", drafter=saved / "drafter", device=device))
    assert f"device={device!r}" in message


def test_objects_and_folders_mix(saved: Path) -> None:
    pair = make_pair()
    mixed = load_pair(target=pair.target, drafter=saved / "drafter", tokenizer=pair.tokenizer, device="cpu")
    assert mixed.target is pair.target and mixed.tokenizer is pair.tokenizer
    assert mixed.identity == pair.identity
    message = error_of(lambda: load_pair(target=pair.target, drafter=saved / "drafter", device="cpu"))
    assert "tokenizer=" in message
    error_of(lambda: load_pair())
    error_of(lambda: load_pair(target=saved / "target"))


def change_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    file = folder / "model.safetensors"
    weights = load_file(file)
    change(weights)
    save_file(weights, file, metadata={"format": "pt"})


def change_config(folder: Path, change: Callable[[dict], object]) -> None:
    file = folder / "config.json"
    config = json.loads(file.read_text())
    change(config)
    file.write_text(json.dumps(config))


def test_a_target_of_weights_that_are_no_numbers(folders: Path) -> None:
    change_weights(folders / "target", lambda weights: weights["lm_head.weight"][3].fill_(torch.nan))
    message = error_of(lambda: load(folders))
    assert "model.target=" in message and "NaN or infinite values: lm_head.weight" in message


def test_a_stop_token_that_is_no_number(folders: Path) -> None:
    (folders / "target/generation_config.json").write_text('{"eos_token_id": "<eos>"}')
    pair = load(folders)
    assert "eos_token_id='<eos>'" in error_of(lambda: pair.stop_token_ids)


@pytest.mark.parametrize("name", ["fc.weight", "layers.1.self_attn.q_norm.weight", "norm.weight"])
def test_a_drafter_that_lacks_a_weight(folders: Path, name: str) -> None:
    change_weights(folders / "drafter", lambda weights: weights.pop(name))
    message = error_of(lambda: load(folders))
    assert name in message and "missing" in message


def test_a_drafter_with_a_weight_too_many(folders: Path) -> None:
    change_weights(folders / "drafter", lambda weights: weights.update({"layers.7.extra.weight": torch.zeros(2)}))
    message = error_of(lambda: load(folders))
    assert "layers.7.extra.weight" in message and "unexpected" in message


def test_a_drafter_with_a_weight_of_another_shape(folders: Path) -> None:
    change_weights(folders / "drafter", lambda weights: weights.update({"fc.weight": torch.zeros(3, 3)}))
    assert "drafter" in error_of(lambda: load(folders))


@pytest.mark.parametrize("name", ["model.layers.1.self_attn.q_proj.weight", "lm_head.weight", "model.norm.weight"])
def test_a_target_that_lacks_a_weight_is_not_filled_with_noise(folders: Path, name: str) -> None:
    change_weights(folders / "target", lambda weights: weights.pop(name))
    message = error_of(lambda: load(folders))
    assert name in message and "model.target" in message


@pytest.mark.parametrize("key", ["block_size", "dflash_config"])
def test_a_drafter_config_without_a_key(folders: Path, key: str) -> None:
    change_config(folders / "drafter", lambda config: config.pop(key))
    assert {"block_size": "block_size", "dflash_config": "mask_token_id"}[key] in error_of(lambda: load(folders))


@pytest.mark.parametrize(("part", "key"), [("target", "model.target"), ("drafter", "drafter.path")])
@pytest.mark.parametrize("share", [0.0, 0.01, 0.6, 0.999])
def test_truncated_weights(folders: Path, part: str, key: str, share: float) -> None:
    file = folders / part / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[: int(share * len(content))])
    assert key in error_of(lambda: load(folders))


@pytest.mark.parametrize(("part", "key"), [("target", "model.target"), ("drafter", "drafter.path")])
@pytest.mark.parametrize("text", ["", "{", "[1, 2]", '{"model_type": "nonsense"}'])
def test_bad_configs(folders: Path, part: str, key: str, text: str) -> None:
    (folders / part / "config.json").write_text(text)
    # a target's folder is its tokenizer's too, and that is read first
    assert key.split(".")[0] in error_of(lambda: load(folders))


@pytest.mark.parametrize(
    ("file", "key"),
    [
        ("target/config.json", "model.t"),
        ("target/model.safetensors", "model.target"),
        ("target/tokenizer.json", "model.tokenizer"),
        ("drafter/config.json", "drafter"),
        ("drafter/model.safetensors", "drafter.path"),
    ],
)
def test_missing_files(folders: Path, file: str, key: str) -> None:
    (folders / file).unlink()
    assert key in error_of(lambda: load(folders))


def test_a_target_config_with_a_value_of_another_type(folders: Path) -> None:
    change_config(folders / "target", lambda config: config.update(hidden_size="wide"))
    message = error_of(lambda: load(folders, tokenizer=make_tokenizer()))
    assert message.startswith("model.target") and "hidden_size" in message and "'wide'" in message


# ---- names and the Hub


def test_an_unknown_name_lists_the_known() -> None:
    message = error_of(lambda: load_pair("qwen9-1t"))
    assert all(name in message for name in ("qwen9-1t", "tiny", "qwen3-4b", "qwen3-8b", "llama3.1-8b-instruct"))


@pytest.mark.parametrize(
    ("parts", "key"),
    [
        ({"target": "nobody-at-all/no-such-model"}, "model.target"),
        ({"drafter": "nobody-at-all/no-such-model"}, "drafter.path"),
    ],
)
def test_a_hub_id_without_network_fails_in_seconds(
    saved: Path, parts: dict[str, str], key: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    everything = {"target": str(saved / "target"), "drafter": str(saved / "drafter")} | parts
    began = time.monotonic()
    message = error_of(lambda: load_pair(**everything, device="cpu"))
    assert time.monotonic() - began < 20
    assert f"{key}='nobody-at-all/no-such-model'" in message
    assert f"{key}=/path/to/folder" in message and "cannot be reached" in message


def test_a_folder_that_is_not_there(saved: Path) -> None:
    message = error_of(lambda: load_pair(target="/no/such/folder", drafter=saved / "drafter", device="cpu"))
    assert "model.target='/no/such/folder'" in message and "no such local folder" in message


# ---- do they belong together?


@pytest.mark.parametrize(
    ("target", "drafter", "values"),
    [
        ({"hidden_size": 16}, {}, ("hidden_size", "32", "16")),
        ({"vocab_size": 80}, {}, ("vocab_size", "64", "80")),
        ({"layers": 5}, {}, ("layers", "4", "5")),
        ({}, {"layer_ids": (0, 4), "num_target_layers": None}, ("layer 4", "4 layers", "0 to 3")),
        ({}, {"layer_ids": (0, 7)}, ("layer 7", "4 layers", "0 to 3")),
        ({}, {"mask_token_id": 64}, ("mask_token_id", "64", "64 rows")),
        ({}, {"mask_token_id": -1}, ("mask_token_id", "-1", "64 rows")),
    ],
)
def test_misfits_name_both_values(target: dict[str, Any], drafter: dict[str, Any], values: tuple[str, ...]) -> None:
    made = make_drafter(make_target(), **drafter)
    message = error_of(
        lambda: load_pair(target=make_target(**target), drafter=made, tokenizer=make_tokenizer(), device="cpu")
    )
    assert all(re.search(rf"(?<!\w){value}(?!\w)", message) for value in values), message


@pytest.mark.parametrize(
    ("target", "drafter", "message"),
    [
        ({"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2}, {}, "sliding_attention"),
        ({}, {"layer_ids": (0, -1)}, "-1"),
    ],
)
def test_what_decoding_would_refuse_is_refused_at_load(
    target: dict[str, Any], drafter: dict[str, Any], message: str
) -> None:
    model = make_target(**target)
    parts = {"target": model, "drafter": make_drafter(model, **drafter), "tokenizer": make_tokenizer()}
    assert message in error_of(lambda: load_pair(**parts, device="cpu"))


def test_models_of_two_dtypes_are_refused() -> None:
    target = make_target()
    drafter = make_drafter(target)
    message = error_of(
        lambda: load_pair(target=target.bfloat16(), drafter=drafter, tokenizer=make_tokenizer(), device="cpu")
    )
    assert "bfloat16" in message and "float32" in message


def test_a_pair_that_fits_passes() -> None:
    target = make_target()
    check_fit(target, make_drafter(target))
    check_fit(target, make_drafter(target, layer_ids=(3,), mask_token_id=63))


# ---- identity


def test_identity_is_the_same_for_the_same_pair() -> None:
    pair = make_pair()
    assert pair.identity == make_pair().identity
    used = make_pair()
    generate(used, [9, 8], FixedPolicy(3), max_new_tokens=5, temperature=1.0)
    assert used.identity == pair.identity
    assert set(pair.identity) >= {"target", "drafter", "dtype", "tokenizer", "chat_template", "thinking"}
    assert all(isinstance(value, str) for value in pair.identity.values())
    # where it lives and what it is called does not matter
    renamed = Pair(pair.target, pair.drafter, pair.tokenizer, "other")
    assert renamed.identity == pair.identity


def changed_parts(other: Pair) -> set[str]:
    base = make_pair().identity
    return {name for name in base.keys() | other.identity.keys() if base.get(name) != other.identity.get(name)}


@pytest.mark.parametrize("part", ["target", "drafter"])
def test_one_changed_weight_changes_the_identity_of_its_model(part: str) -> None:
    pair = make_pair()
    weight = list(getattr(pair, part).parameters())[3].data
    weight.view(-1)[0] = torch.nextafter(weight.view(-1)[0], torch.tensor(9.0))
    assert changed_parts(pair) == {part}


def test_dtype_template_tokenizer_and_thinking_change_the_identity() -> None:
    pair = make_pair()
    assert changed_parts(Pair(pair.target, pair.drafter, pair.tokenizer, thinking=True)) == {"thinking"}
    assert changed_parts(make_pair(template="{{ messages[0].content }}")) == {"chat_template"}
    assert changed_parts(make_pair(template=None)) == {"chat_template"}
    assert changed_parts(Pair(pair.target, pair.drafter, make_tokenizer(65))) == {"tokenizer"}
    assert "dtype" in changed_parts(make_pair(target=make_target().bfloat16()))


def lower_case(core: dict[str, Any]) -> None:
    core["normalizer"] = {"type": "Lowercase"}


def other_spaces(core: dict[str, Any]) -> None:
    core["pre_tokenizer"] = {"type": "Split", "pattern": {"String": "  "}, "behavior": "Isolated", "invert": False}


def nothing_before(core: dict[str, Any]) -> None:
    core["post_processor"] = None


def another_merge(core: dict[str, Any]) -> None:
    core["model"]["merges"] = core["model"]["merges"][:-1]


def ordinary_end(core: dict[str, Any]) -> None:
    core["added_tokens"] = [token | {"special": False} for token in core["added_tokens"]]


def fused(core: dict[str, Any]) -> None:
    core["decoder"] = {"type": "Fuse"}


@pytest.mark.parametrize("change", [lower_case, other_spaces, nothing_before, ordinary_end, fused, another_merge])
def test_another_rule_of_the_tokenizer_changes_the_identity(tmp_path: Path, change: Callable[[dict], None]) -> None:
    """With the same vocabulary: its tokens are others, or its text, which the next turn of a conversation holds."""
    pair = load_pair("tiny") if change in (ordinary_end, another_merge) else make_pair()
    pair.tokenizer.save_pretrained(tmp_path)
    base = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer_digest(base) == pair.identity["tokenizer"]
    core = json.loads((tmp_path / "tokenizer.json").read_text())
    change(core)
    (tmp_path / "tokenizer.json").write_text(json.dumps(core))
    if change is ordinary_end:  # what it names is special in any case
        (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "TokenizersBackend"}')
    other = AutoTokenizer.from_pretrained(tmp_path)
    assert other.get_vocab() == base.get_vocab()
    assert tokenizer_digest(other) != tokenizer_digest(base)


def test_use_does_not_change_a_tokenizers_identity() -> None:
    pair = load_pair("tiny")
    pair.tokenizer(["one", "two three four five"], padding=True, truncation=True, max_length=3)
    pair.tokenizer.padding_side = "left"
    pair.tokenizer.pad_token = pair.tokenizer.eos_token
    assert pair.identity == load_pair("tiny").identity


def test_another_version_of_the_library_does_not_change_a_tokenizers_identity() -> None:
    """It may write merges otherwise, or a switch that is off."""

    class Written:
        bos_token, eos_token = None, "<eos>"

        def __init__(self, text: str) -> None:
            self.backend_tokenizer = self
            self.to_str = lambda: text

    texts = [
        '{"version": "1.0", "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": ["a b"]}}',
        '{"version": "1.0", "padding": null, "model": {"type": "BPE", "ignore_merges": false, "byte_fallback": null, '
        '"vocab": {"a": 0, "b": 1, "ab": 2}, "merges": [["a", "b"]]}, "truncation": {"max_length": 3}}',
    ]
    one, other = (tokenizer_digest(cast(PreTrainedTokenizerBase, Written(text))) for text in texts)
    assert one == other


def test_only_a_folder_of_the_hubs_cache_stands_for_a_commit(tmp_path: Path) -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    assert hub_commit(tmp_path / "models--z-lab--Qwen3/snapshots" / commit) == commit
    for mine in ("snapshots/step100", f"snapshots/{commit}", "models--mine/snapshots/last", f"models--mine/x/{commit}"):
        assert hub_commit(tmp_path / mine) is None


def test_a_hub_commit_stands_for_the_weights() -> None:
    pair = make_pair()
    told = Pair(pair.target, pair.drafter, pair.tokenizer, commits=("abc", None))
    assert (told.identity["target"], told.identity["drafter"]) == ("abc", pair.identity["drafter"])


@pytest.mark.parametrize("options", [{"layer_ids": (1, 2)}, {"mask_token_id": 5}, {"rms_norm_eps": 1e-2}], ids=str)
def test_what_a_drafters_config_changes_changes_the_identity(options: dict[str, Any]) -> None:
    """The same weights draft otherwise under another configuration: labels of one are not labels of the other."""
    target = make_target()
    other = make_pair(target=target, drafter=make_drafter(target, **options))
    assert changed_parts(other) == {"drafter"}


def test_another_rope_of_the_target_changes_the_identity() -> None:
    one = make_pair(target=make_target(rope_parameters={"rope_type": "default", "rope_theta": 10_000.0}))
    other = make_pair(target=make_target(rope_parameters={"rope_type": "default", "rope_theta": 500.0}))
    tokens = list(range(9, 40))
    with torch.no_grad():
        logits = [pair.target(torch.tensor([tokens])).logits for pair in (one, other)]
    assert (logits[0] - logits[1]).abs().max() > 0.01
    assert one.identity != other.identity


# ---- prompts


def test_a_turn_goes_through_the_template_in_one_step() -> None:
    # one <bos>, from the template; rendering and then encoding would put a second one before it
    assert make_tokenizer().encode("w9")[0] == BOS
    assert make_pair().encode(["w9 w10"]) == [BOS, USER, 9, 10, ASSISTANT]


def test_several_turns_with_their_answers() -> None:
    pair = make_pair()
    assert pair.encode(["w9", "w10", "w11"], ["w20 w21", "w22"]) == [
        BOS, USER, 9, ASSISTANT, 20, 21, EOS, USER, 10, ASSISTANT, 22, EOS, USER, 11, ASSISTANT,
    ]  # fmt: skip


def test_thinking_reaches_the_template() -> None:
    assert make_pair(thinking=True).encode(["w9"])[-2:] == [ASSISTANT, THINK]


def test_without_a_template_texts_are_joined() -> None:
    pair = make_pair(template=None)
    assert pair.encode(["w9 w10"]) == [BOS, 9, 10]
    assert pair.encode(["w9", "w10"], ["w20"]) == [BOS, 9, 20, 10]


@pytest.mark.parametrize(("turns", "answers"), [(["a", "b"], []), (["a"], ["b"]), ([], []), (["a"], ["b", "c"])])
def test_a_wrong_number_of_answers(turns: list[str], answers: list[str]) -> None:
    message = error_of(lambda: make_pair().encode(turns, answers))
    assert f"{len(turns)} turns with {len(answers)} answers" in message


def test_decoding_leaves_special_tokens_out() -> None:
    assert make_pair().decode([9, 10, EOS]) == "w9 w10"
