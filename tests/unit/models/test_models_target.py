"""The target's runner and its cache: tapped features, logits where asked for, rollback, what is refused."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from transformers import MistralConfig, MistralForCausalLM, PreTrainedModel

from blockpilot.decoding import generate
from blockpilot.errors import UserError
from blockpilot.models import TargetRunner
from blockpilot.models.kv_cache import KVCache
from blockpilot.policies import FixedPolicy
from tests.toy import greedy_by_transformers, hooks_of, make_drafter, make_pair, make_prompts, make_target

KINDS: dict[str, Any] = {
    "qwen3": {},
    "qwen3-tied": {"tied": True, "kv_heads": 4},
    "qwen3-eager": {"attention": "eager"},
    "llama": {"kind": "llama"},
    "llama-one-kv-head": {"kind": "llama", "kv_heads": 1, "tied": True},
}
CLOSE: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-5}


def plain(model: PreTrainedModel, tokens: list[int]) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    with torch.no_grad():
        output = model(torch.tensor([tokens]), output_hidden_states=True)
    assert output.hidden_states is not None
    return output.logits, output.hidden_states


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layer_ids", [(0, 2), (2, 0), (1,), (0, 1, 2)])
def test_features_are_the_outputs_of_the_tapped_layers_of_a_plain_forward(
    kind: str, layer_ids: tuple[int, ...]
) -> None:
    model, tokens = make_target(seed=3, **KINDS[kind]), make_prompts([9])[0]
    runner = TargetRunner(model, layer_ids)
    with torch.no_grad():
        out = runner.forward(torch.tensor([tokens]), runner.new_cache(9))
    logits, states = plain(model, tokens)
    assert out.features is not None
    torch.testing.assert_close(out.features, torch.cat([states[i + 1] for i in layer_ids], dim=-1), **CLOSE)
    torch.testing.assert_close(out.logits, logits, **CLOSE)
    torch.testing.assert_close(out.hidden, states[-1], **CLOSE)


@pytest.mark.parametrize("kind", KINDS)
def test_passes_behind_a_rollback_equal_one_pass_over_what_was_kept(kind: str) -> None:
    model, tokens = make_target(seed=3, **KINDS[kind]), make_prompts([12])[0]
    runner = TargetRunner(model, (0, 2))
    cache = runner.new_cache(8)
    with torch.no_grad():
        runner.forward(torch.tensor([tokens[:5]]), cache)
        cache.length = 5
        # rejected tokens: written, and forgotten by the length alone
        runner.forward(torch.tensor([[33, 34, 35]]), cache)
        cache.length = 5
        first = runner.forward(torch.tensor([tokens[5:7]]), cache)
        cache.length = 7
        cache.reserve(12)
        second = runner.forward(torch.tensor([tokens[7:]]), cache)
    logits, states = plain(model, tokens)
    expected = torch.cat([states[1], states[3]], dim=-1)
    for out, part in ((first, slice(5, 7)), (second, slice(7, 12))):
        torch.testing.assert_close(out.logits, logits[:, part], **CLOSE)
        torch.testing.assert_close(out.features, expected[:, part], **CLOSE)


def test_only_what_is_asked_for() -> None:
    model, tokens = make_target(), torch.tensor([make_prompts([6])[0]])
    runner = TargetRunner(model, (0, 2))
    with torch.no_grad():
        whole = runner.forward(tokens, runner.new_cache(6))
        some = runner.forward(tokens, runner.new_cache(6), keep=2, tap=False)
    assert some.features is None
    torch.testing.assert_close(some.logits, whole.logits[:, -2:], **CLOSE)
    torch.testing.assert_close(some.hidden, whole.hidden[:, -2:], **CLOSE)
    assert hooks_of(model) == []


def test_ragged_rows_equal_rows_alone() -> None:
    model = make_target(seed=3)
    runner = TargetRunner(model, (0, 2))
    prompts = make_prompts([4, 7, 4])
    cache = runner.new_ragged_cache(9, 3)
    with torch.no_grad():
        for rows in ([0, 2], [1]):
            tokens = torch.tensor([prompts[i] for i in rows])
            positions = torch.arange(tokens.shape[1]).expand(len(rows), -1)
            runner.forward_ragged(tokens, cache, torch.tensor(rows), positions)
        # one more token for every row, each at its own position, after the first row is gone
        cache.keep_rows(torch.tensor([1, 2]))
        out = runner.forward_ragged(
            torch.tensor([[20], [30]]), cache, torch.arange(2), torch.tensor([[7], [4]]), keep=1
        )
    for row, tokens in enumerate(([*prompts[1], 20], [*prompts[2], 30])):
        logits, states = plain(model, tokens)
        torch.testing.assert_close(out.logits[row, -1], logits[0, -1], **CLOSE)
        assert out.features is not None
        expected = torch.cat([states[1], states[3]], dim=-1)[0, -1]
        torch.testing.assert_close(out.features[row, -1], expected, **CLOSE)


def test_a_cache_grows_keeps_what_it_holds_and_refuses_more_than_fits() -> None:
    cache = KVCache(2, 4)
    layer: Any = cache.layers[1]
    first = torch.randn(1, 2, 3, 8)
    keys, _ = layer.update(first, first)
    assert torch.equal(keys, first)
    cache.length = 3
    with pytest.raises(AssertionError, match="5 positions in a cache of 4"):
        layer.update(first[:, :, :2], first[:, :, :2])
    cache.reserve(6)
    assert cache.capacity >= 6
    keys, values = layer.update(first[:, :, :2], -first[:, :, :2])
    assert torch.equal(keys, torch.cat([first, first[:, :, :2]], dim=2))
    assert torch.equal(values, torch.cat([first, -first[:, :, :2]], dim=2))
    assert layer.get_seq_length() == 3 and layer.get_mask_sizes(2)[0] == 5


def sliding_qwen3() -> PreTrainedModel:
    return make_target(use_sliding_window=True, sliding_window=8, max_window_layers=2)


def sliding_mistral() -> PreTrainedModel:
    config = MistralConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, sliding_window=8, max_position_embeddings=64,
        bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    return MistralForCausalLM(config).eval()


@pytest.mark.parametrize("make", [sliding_qwen3, sliding_mistral])
def test_a_sliding_window_target_is_refused(make) -> None:  # type: ignore[no-untyped-def]
    model = make()
    message = rf"{type(model).__name__} has sliding_attention layers.*expected full_attention"
    with pytest.raises(UserError, match=message) as caught:
        TargetRunner(model, (0, 2))
    assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match=message):
        generate(make_pair(target=model, drafter=make_drafter(model)), [9, 8], FixedPolicy(2))


def test_a_mistral_without_window_is_not() -> None:
    model = sliding_mistral()
    model.config.sliding_window = None
    pair = make_pair(target=model, drafter=make_drafter(model), eos=None)
    one, other = (generate(pair, [9, 8], FixedPolicy(size), max_new_tokens=8).output_ids for size in (1, 4))
    assert one == other


@pytest.mark.parametrize("layer_ids", [(0, 4), (-1, 2), (9,)])
def test_layers_that_do_not_exist(layer_ids: tuple[int, ...]) -> None:
    beyond = [i for i in layer_ids if not 0 <= i < 4]
    with pytest.raises(UserError, match=rf"taps target layers \[{beyond[0]}\].*has 4 layers \(0 to 3\)"):
        TargetRunner(make_target(), layer_ids)


def test_a_pair_in_half_precision_decodes() -> None:
    target = make_target(seed=2)
    drafter = make_drafter(target).bfloat16()
    pair = make_pair(target=target.bfloat16(), drafter=drafter)
    out = generate(pair, [9, 8, 7], FixedPolicy(3), max_new_tokens=6, stop_token_ids=[])
    assert len(out.output_ids) == 6


@pytest.mark.parametrize("lean", [True, False])
def test_two_threads_decode_with_one_pair_at_once(lean: bool) -> None:
    """From the first call on, which checks the lean forward; and by the model's own, whose hooks are shared."""
    pair = make_pair(seed=5, layers=3, eos=None, attention="sdpa" if lean else "eager")
    prompts = make_prompts([9, 14, 5, 20], seed=3)
    with ThreadPoolExecutor(4) as pool:
        outs = list(pool.map(lambda p: generate(pair, p, FixedPolicy(4), max_new_tokens=25), prompts * 3))
    for prompt, out in zip(prompts * 3, outs, strict=True):
        assert out.output_ids == greedy_by_transformers(pair.target, prompt, 25)


def test_an_interrupt_of_the_first_check_leaves_nothing_unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    pair, prompt = make_pair(seed=5, layers=3, eos=None), make_prompts([9], seed=3)[0]

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("blockpilot.models.target.LeanDecoder.__call__", interrupt)
        with pytest.raises(KeyboardInterrupt):
            generate(pair, prompt, FixedPolicy(4), max_new_tokens=5)
    assert pair.runner.decoder is None and hooks_of(pair.target) == []
    assert generate(pair, prompt, FixedPolicy(4), max_new_tokens=9).output_ids == greedy_by_transformers(
        pair.target, prompt, 9
    )


def test_a_target_that_was_given_another_dtype_alone() -> None:
    pair = make_pair()
    torch.nn.Module.to(pair.target, torch.bfloat16)
    for size in (1, 4):
        with pytest.raises(UserError, match=r"differ in dtype: torch\.bfloat16 and torch\.float32"):
            generate(pair, [9, 8], FixedPolicy(size))
