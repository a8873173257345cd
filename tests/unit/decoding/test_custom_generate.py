"""``model.generate(custom_generate=...)``: the result of ``transformers`` itself, its streams, and what is refused."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Thread
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    DynamicCache,
    EosTokenCriteria,
    GenerationConfig,
    LogitsProcessorList,
    MaxLengthCriteria,
    MaxTimeCriteria,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
    TextIteratorStreamer,
    TextStreamer,
    TopKLogitsWarper,
    WatermarkingConfig,
)
from transformers.generation.streamers import BaseStreamer
from transformers.generation.utils import GenerateDecoderOnlyOutput

import blockpilot as bp
from blockpilot.decoding import Prefill, Round
from blockpilot.decoding.custom_generate import (
    _HONOURED,
    _NEUTRAL,
    _SAMPLING_ONLY,
    _WITHOUT_INFLUENCE,
    custom_generate,
)
from tests.toy import EOS, make_pair, make_prompts, make_scripted_pair, make_target

PROMPT = [9, 30, 11, 52]
PAIR = make_pair(target=make_target(layers=3, seed=5))


def plain(pair: bp.Pair, **options: Any) -> Any:
    """What ``transformers`` gives by itself."""
    target: Any = pair.target
    return target.generate(**options)


def ours(pair: bp.Pair, policy: Any = None, **options: Any) -> Any:
    return plain(pair, custom_generate=bp.custom_generate(pair, policy or bp.FixedPolicy(4)), **options)


def ids(*rows: list[int]) -> Tensor:
    return torch.tensor(rows or [PROMPT])


def along(pair: bp.Pair, depth: int, prompt: list[int]) -> bp.Pair:
    """The same target with a drafter that is right ``depth`` times per block."""
    script = plain(pair, inputs=ids(prompt), max_new_tokens=60, do_sample=False)[0].tolist()
    return make_scripted_pair(depth, target=pair.target, script=script)


@contextmanager
def defaults(pair: bp.Pair, **fields: Any) -> Iterator[None]:
    """Sets fields of the model's own generation config."""
    before = pair.target.generation_config
    pair.target.generation_config = GenerationConfig(**fields)
    try:
        yield
    finally:
        pair.target.generation_config = before


class Recorder(BaseStreamer):
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def put(self, value: Tensor) -> None:
        assert value.device.type == "cpu" and not value.is_inference() and not torch.is_grad_enabled()
        self.calls.append(("put", value.dtype, value.tolist()))

    def end(self) -> None:
        self.calls.append(("end",))


# ---- the same tokens as transformers


LENGTHS: dict[str, dict[str, Any]] = {
    "default": {},
    "one-new-token": {"max_new_tokens": 1},
    "max_new_tokens": {"max_new_tokens": 23},
    "max_length": {"max_length": len(PROMPT) + 6},
    "one-by-max_length": {"max_length": len(PROMPT) + 1},
    "both": {"max_length": 7, "max_new_tokens": 12},
    "config-object": {"generation_config": GenerationConfig(max_new_tokens=9, do_sample=False)},
    "criterion-of-transformers": {"stopping_criteria": StoppingCriteriaList([MaxLengthCriteria(11)])},
}


@pytest.mark.parametrize("depth", [0, 2, 99])
@pytest.mark.parametrize("length", LENGTHS)
def test_greedy_output_and_length(length: str, depth: int) -> None:
    options = LENGTHS[length]
    expected = plain(PAIR, inputs=ids(), **options)
    got = ours(along(PAIR, depth, PROMPT), inputs=ids(), **options)
    assert got.dtype == expected.dtype and got.device == expected.device
    assert got.tolist() == expected.tolist()


@pytest.mark.parametrize("place", [0, 1, 5, 19])
@pytest.mark.parametrize("as_list", [False, True])
@pytest.mark.parametrize("of_model", [False, True])
def test_end_tokens(place: int, as_list: bool, of_model: bool) -> None:
    free = plain(PAIR, inputs=ids(), max_new_tokens=30, do_sample=False)[0, len(PROMPT) :].tolist()
    eos = [free[place], 1] if as_list else free[place]
    pair = along(PAIR, 99, PROMPT)
    given = {} if of_model else {"eos_token_id": eos}
    with defaults(pair, **({"eos_token_id": eos} if of_model else {"eos_token_id": free[0]})):
        expected = plain(pair, inputs=ids(), max_new_tokens=30, pad_token_id=0, **given)
        got = ours(pair, bp.FixedPolicy(8), inputs=ids(), max_new_tokens=30, pad_token_id=0, **given)
    assert got.tolist() == expected.tolist()
    assert got[0, len(PROMPT) :].tolist() == free[: free.index(free[place]) + 1]


def test_the_tokenizers_end_token_does_not_join() -> None:
    pair = make_scripted_pair(99, eos="<eos>")
    assert pair.stop_token_ids == (EOS,)
    expected = plain(pair, inputs=ids([62]), max_new_tokens=9)
    assert EOS in expected[0, 1:-1].tolist()
    assert ours(pair, inputs=ids([62]), max_new_tokens=9).tolist() == expected.tolist()


@pytest.mark.parametrize("explicit", [True, False])
def test_left_padding_stays_in_place(explicit: bool) -> None:
    for prompt in make_prompts([1, 5, 12], seed=4):
        padded = ids([1, 1, 1, *prompt])
        options: dict[str, Any] = {"max_length": len(prompt) + 20, "do_sample": False, "pad_token_id": 1}
        if explicit:
            options["attention_mask"] = torch.tensor([[0] * 3 + [1] * len(prompt)])
        expected = plain(PAIR, inputs=padded, **options)
        assert ours(PAIR, inputs=padded, **options).tolist() == expected.tolist()
        alone = bp.generate(PAIR, prompt, bp.FixedPolicy(4), max_new_tokens=17, stop_token_ids=[])
        assert expected[0, 3 + len(prompt) :].tolist() == alone.output_ids


@pytest.mark.parametrize(
    "options",
    [
        {"use_cache": False},
        {"pad_token_id": 5, "bos_token_id": 2},
        {"length_penalty": 0.5, "early_stopping": True, "num_assistant_tokens": 3},
        {"renormalize_logits": True},
        {"min_length": 0, "repetition_penalty": 1.0, "no_repeat_ngram_size": 0, "guidance_scale": 1},
        {"temperature": 0.3, "top_k": 2, "top_p": 0.4},
        {"min_p": 0.5, "typical_p": 0.3, "epsilon_cutoff": 0.1, "eta_cutoff": 0.1, "top_h": 0.2},
        {"logits_to_keep": 1, "position_ids": torch.arange(4)[None], "attention_mask": torch.ones(1, 4).long()},
        {"output_scores": False, "output_attentions": False, "generation_config": None},
    ],
)
def test_what_does_not_change_the_output_is_allowed(options: dict[str, Any]) -> None:
    expected = plain(PAIR, inputs=ids(), max_new_tokens=12, do_sample=False, **options)
    assert ours(PAIR, inputs=ids(), max_new_tokens=12, do_sample=False, **options).tolist() == expected.tolist()


@pytest.mark.parametrize("size", [1, 16, 18])
def test_greedy_output_of_the_embedded_pair(size: int) -> None:
    pair = bp.load_pair("tiny", device="cpu")
    for text in ("Count from 3 to 12.", "Tell a story about a fox."):
        inputs = {"input_ids": ids(pair.encode([text])), "max_new_tokens": 60, "do_sample": False}
        assert ours(pair, bp.FixedPolicy(size), **inputs).tolist() == plain(pair, **inputs).tolist()


# ---- sampling


@pytest.mark.parametrize(
    ("options", "meant"),
    [
        ({}, {"temperature": 1.0, "top_k": 50}),
        ({"temperature": 0.7}, {"temperature": 0.7, "top_k": 50}),
        ({"top_k": 0}, {"temperature": 1.0}),
        ({"top_k": 5, "top_p": 0.8, "temperature": 1.3}, {"temperature": 1.3, "top_k": 5, "top_p": 0.8}),
        ({"renormalize_logits": True, "top_p": 0.5}, {"temperature": 1.0, "top_k": 50, "top_p": 0.5}),
        ({"top_k": 1}, {"temperature": 0.0}),
        ({"top_p": 1.5}, {"temperature": 1.0, "top_k": 50}),
    ],
)
def test_samples_are_those_of_the_engine(options: dict[str, Any], meant: dict[str, Any]) -> None:
    door = bp.custom_generate(PAIR, bp.FixedPolicy(4), seed=11)
    common: dict[str, Any] = {"do_sample": True, "max_new_tokens": 25, "custom_generate": door}
    got = plain(PAIR, inputs=ids(), **common, **options)[0, len(PROMPT) :].tolist()
    expected = bp.generate(PAIR, PROMPT, bp.FixedPolicy(2), max_new_tokens=25, seed=11, stop_token_ids=[], **meant)
    assert got == expected.output_ids
    with defaults(PAIR, do_sample=True, **options):
        del common["do_sample"]
        assert plain(PAIR, inputs=ids(), **common)[0, len(PROMPT) :].tolist() == got


def test_top_k_of_transformers_makes_a_difference() -> None:
    pair = make_pair(target=make_target(vocab_size=512, layers=3))
    got = ours(pair, inputs=ids(), do_sample=True, max_new_tokens=60)[0, len(PROMPT) :].tolist()
    for top_k, same in ((50, True), (0, False)):
        out = bp.generate(
            pair, PROMPT, bp.FixedPolicy(4), max_new_tokens=60, temperature=1.0, top_k=top_k, stop_token_ids=[]
        )
        assert (out.output_ids == got) == same


def test_the_seed_of_a_call_goes_before_that_of_the_method() -> None:
    def sample(of_method: int, **options: Any) -> list[int]:
        door = bp.custom_generate(PAIR, bp.FixedPolicy(4), seed=of_method)
        return plain(PAIR, inputs=ids(), do_sample=True, custom_generate=door, **options).tolist()

    torch.manual_seed(0)
    first = sample(3)
    assert sample(3) == first == sample(4, seed=3)
    assert sample(4) != first
    assert sample(4, seed=0) == sample(0) != sample(4)


# ---- results


def test_a_dictionary_on_request() -> None:
    expected = plain(PAIR, inputs=ids(), max_new_tokens=8, do_sample=False)
    got = ours(PAIR, inputs=ids(), max_new_tokens=8, do_sample=False, return_dict_in_generate=True)
    assert type(got) is GenerateDecoderOnlyOutput
    assert got.sequences.tolist() == expected.tolist()
    assert list(got) == ["sequences"]


def test_the_last_generation_can_be_read() -> None:
    pair = make_scripted_pair(99)
    door = bp.custom_generate(pair, bp.FixedPolicy(4))
    assert door.last is None
    plain(pair, inputs=ids([9]), max_new_tokens=10, custom_generate=door)
    assert door.last is not None and door.last.acceptance_lengths == [4, 4, 1] and door.last.tau == 3
    plain(pair, inputs=ids([9]), max_new_tokens=5, custom_generate=door)
    assert door.last.acceptance_lengths == [4]


def test_the_output_ends_at_the_position_limit(caplog: pytest.LogCaptureFixture) -> None:
    pair = make_pair(target=make_target(max_positions=24, layers=3))
    expected = plain(pair, inputs=ids(), max_new_tokens=21, do_sample=False)
    caplog.clear()
    assert ours(pair, inputs=ids(), max_new_tokens=21, do_sample=False).tolist() == expected.tolist()
    assert "last position" not in caplog.text
    got = ours(pair, inputs=ids(), max_new_tokens=40, do_sample=False)
    assert got.tolist() == expected.tolist()
    assert "21 of 40 tokens, at the target's last position" in caplog.text


# ---- streams


@pytest.mark.parametrize("depth", [0, 99])
@pytest.mark.parametrize("eos", [None, 5])
def test_a_streamer_is_called_as_by_transformers(depth: int, eos: int | None) -> None:
    pair = along(PAIR, depth, PROMPT)
    free = plain(pair, inputs=ids(), max_new_tokens=15, do_sample=False)[0, len(PROMPT) :].tolist()
    options: dict[str, Any] = {"inputs": ids(), "max_new_tokens": 15, "do_sample": False}
    options |= {} if eos is None else {"eos_token_id": free[eos], "pad_token_id": 0}
    expected, got = Recorder(), Recorder()
    plain(pair, streamer=expected, **options)
    output = ours(pair, streamer=got, **options)
    assert got.calls == expected.calls
    assert [call[2] for call in got.calls[1:-1]] == [[token] for token in output[0, len(PROMPT) :].tolist()]


class Watching:
    """A policy that notes how much was streamed before each round."""

    def __init__(self, streamer: Recorder) -> None:
        self.streamer, self.seen = streamer, []

    def choose(self, prefill: Prefill) -> int:
        self.seen.append(len(self.streamer.calls))
        return 4

    def update(self, round: Round) -> int:
        self.seen.append(len(self.streamer.calls))
        return 4


def test_tokens_are_streamed_as_they_are_committed() -> None:
    streamer = Recorder()
    policy = Watching(streamer)
    ours(make_scripted_pair(99), policy, inputs=ids([9]), max_new_tokens=10, streamer=streamer)
    assert policy.seen == [2, 6, 10]  # the prompt and the first token, then four per round


def lambdas(door: Any) -> Callable[..., Any]:
    return lambda *arguments, **options: door(*arguments, **options)


@pytest.mark.parametrize("wrap", [lambdas, functools.partial])
def test_a_wrapped_method_streams_too(wrap: Callable[[Any], Any]) -> None:
    expected, got = Recorder(), Recorder()
    options: dict[str, Any] = {"inputs": ids(), "max_new_tokens": 9, "do_sample": False}
    plain(PAIR, streamer=expected, **options)
    plain(PAIR, streamer=got, custom_generate=wrap(bp.custom_generate(PAIR, bp.FixedPolicy(4))), **options)
    assert got.calls == expected.calls


@pytest.mark.parametrize("skip_prompt", [False, True])
def test_streamed_text(skip_prompt: bool, capsys: pytest.CaptureFixture[str]) -> None:
    options: dict[str, Any] = {"inputs": ids(), "max_new_tokens": 14, "do_sample": False}
    output = plain(PAIR, streamer=TextStreamer(PAIR.tokenizer, skip_prompt), **options)
    expected = capsys.readouterr().out
    ours(PAIR, streamer=TextStreamer(PAIR.tokenizer, skip_prompt), **options)
    assert capsys.readouterr().out == expected
    text = PAIR.tokenizer.decode(output[0, len(PROMPT) if skip_prompt else 0 :])
    assert expected == f"{text}\n"


def test_text_from_another_thread() -> None:
    streamer = TextIteratorStreamer(PAIR.tokenizer, skip_prompt=True, timeout=60)
    options: dict[str, Any] = {"inputs": ids(), "max_new_tokens": 14, "do_sample": False}
    thread = Thread(target=ours, args=(PAIR,), kwargs={**options, "streamer": streamer})
    thread.start()
    pieces = list(streamer)
    thread.join()
    output = plain(PAIR, **options)
    assert "".join(pieces) == PAIR.tokenizer.decode(output[0, len(PROMPT) :])
    assert len(pieces) > 3


class Failing:
    def choose(self, prefill: Prefill) -> int:
        raise RuntimeError("no choice")


@pytest.mark.parametrize(
    ("policy", "options", "words"),
    [(Failing(), {}, 1), (bp.FixedPolicy(4), {"repetition_penalty": 1.1}, 0)],
    ids=["while-decoding", "refusal"],
)
def test_a_stream_ends_after_an_error(policy: Any, options: dict[str, Any], words: int) -> None:
    streamer = TextIteratorStreamer(PAIR.tokenizer, skip_prompt=True, timeout=60)
    with pytest.raises((RuntimeError, bp.UserError), match=r"no choice|repetition_penalty"):
        ours(PAIR, policy, inputs=ids(), streamer=streamer, **options)
    assert len("".join(streamer).split()) == words


# ---- refusals


REFUSED: dict[str, dict[str, Any]] = {
    "num_beams=2 (expected 1)": {"num_beams": 2},
    "num_return_sequences=2 (expected 1)": {"num_return_sequences": 2, "do_sample": True},
    "repetition_penalty=1.1 (expected 1.0)": {"repetition_penalty": 1.1},
    "encoder_repetition_penalty": {"encoder_repetition_penalty": 1.1},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 2},
    "encoder_no_repeat_ngram_size": {"encoder_no_repeat_ngram_size": 2},
    "min_p=0.1 (expected None)": {"min_p": 0.1, "do_sample": True},
    "top_h": {"top_h": 0.5, "do_sample": True},
    "typical_p": {"typical_p": 0.5, "do_sample": True},
    "epsilon_cutoff": {"epsilon_cutoff": 0.01, "do_sample": True},
    "eta_cutoff": {"eta_cutoff": 0.01, "do_sample": True},
    "bad_words_ids": {"bad_words_ids": [[9]]},
    "min_length": {"min_length": 9, "eos_token_id": 3},
    "min_new_tokens": {"min_new_tokens": 9, "eos_token_id": 3},
    "suppress_tokens": {"suppress_tokens": [9]},
    "begin_suppress_tokens": {"begin_suppress_tokens": [9]},
    "forced_bos_token_id=0": {"forced_bos_token_id": 0},
    "forced_eos_token_id=0": {"forced_eos_token_id": 0},
    "sequence_bias": {"sequence_bias": [[[9], 1.0]]},
    "guidance_scale": {"guidance_scale": 1.5},
    "exponential_decay_length_penalty": {"exponential_decay_length_penalty": (3, 1.1), "eos_token_id": 3},
    "remove_invalid_values": {"remove_invalid_values": True},
    "penalty_alpha": {"penalty_alpha": 0.6, "top_k": 4},
    "constraints": {"constraints": [1], "num_beams": 2},
    "force_words_ids": {"force_words_ids": [[9]], "num_beams": 2},
    "dola_layers": {"dola_layers": "low"},
    "prompt_lookup_num_tokens": {"prompt_lookup_num_tokens": 3},
    "assistant_early_exit": {"assistant_early_exit": 2},
    "use_mtp": {"use_mtp": True},
    "is_assistant": {"is_assistant": True},
    "max_time": {"max_time": 5.0},
    "watermarking_config": {"watermarking_config": WatermarkingConfig()},
    "cache_implementation='static'": {"cache_implementation": "static"},
    "output_scores": {"output_scores": True, "return_dict_in_generate": True},
    "output_logits": {"output_logits": True, "return_dict_in_generate": True},
    "output_attentions": {"output_attentions": True, "return_dict_in_generate": True},
    "output_hidden_states": {"output_hidden_states": True, "return_dict_in_generate": True},
    "support cache": {"past_key_values": DynamicCache()},
    "assistant_model": {"assistant_model": PAIR.target},
    "prefix_allowed_tokens_fn": {"prefix_allowed_tokens_fn": lambda batch, tokens: [9]},
    "negative_prompt_ids": {"negative_prompt_ids": ids()},
    "logits_processor TopKLogitsWarper": {"logits_processor": LogitsProcessorList([TopKLogitsWarper(3)])},
    "stopping_criteria MaxTimeCriteria": {"stopping_criteria": StoppingCriteriaList([MaxTimeCriteria(5.0)])},
    "inputs_embeds": {"inputs_embeds": torch.zeros(1, 4, 32)},
    "an attention_mask with zeros": {"attention_mask": torch.tensor([[1, 1, 1, 0]])},
    "each pad_token_id is one": {"pad_token_id": PROMPT[1]},
    "position_ids": {"position_ids": torch.tensor([[3, 4, 5, 6]])},
    "batch of 2": {"input_ids": ids(PROMPT, PROMPT)},
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_change_the_output_is_refused_by_name(name: str) -> None:
    options = {"input_ids": ids(), "max_new_tokens": 6} | REFUSED[name]
    with pytest.raises(bp.UserError) as error:
        ours(PAIR, **options)
    assert name in str(error.value) and "\n" not in str(error.value)


def test_stop_strings_are_refused_by_transformers() -> None:
    with pytest.raises(ValueError, match="stop strings"):
        ours(PAIR, inputs=ids(), stop_strings="w9", tokenizer=PAIR.tokenizer)


def test_all_that_is_wrong_is_named_at_once_and_wherever_it_comes_from() -> None:
    with defaults(PAIR, repetition_penalty=1.1), pytest.raises(bp.UserError) as error:
        ours(PAIR, inputs=ids(), num_beams=2)
    assert "num_beams=2" in str(error.value) and "repetition_penalty=1.1" in str(error.value)


@pytest.mark.parametrize("temperature", [1.0, 0.5])
@pytest.mark.parametrize("do_sample", [True, False])
def test_a_foreign_processor_of_a_known_kind_is_refused(temperature: float, do_sample: bool) -> None:
    processors = LogitsProcessorList([TemperatureLogitsWarper(0.5)])
    with pytest.raises(bp.UserError, match="TemperatureLogitsWarper"):
        ours(PAIR, inputs=ids(), do_sample=do_sample, temperature=temperature, top_k=0, logits_processor=processors)


def test_criteria_of_known_kinds_mean_what_they_mean_to_transformers() -> None:
    free = plain(PAIR, inputs=ids(), max_new_tokens=12, do_sample=False)[0].tolist()
    criteria = StoppingCriteriaList([EosTokenCriteria(free[10])])
    options: dict[str, Any] = {"inputs": ids(), "max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    expected = plain(PAIR, stopping_criteria=criteria, **options)
    assert expected.shape[1] < 4 + 12
    assert ours(PAIR, stopping_criteria=criteria, **options).tolist() == expected.tolist()


def test_another_model_is_refused() -> None:
    other: Any = make_target("llama")
    with pytest.raises(bp.UserError, match=r"pair 'toy' \(Qwen3ForCausalLM .*another model \(LlamaForCausalLM"):
        other.generate(ids(), custom_generate=bp.custom_generate(PAIR, bp.FixedPolicy(4)))
    twin: Any = make_target(layers=3, seed=5)
    with pytest.raises(bp.UserError, match="another model"):
        twin.generate(ids(), custom_generate=bp.custom_generate(PAIR, bp.FixedPolicy(4)))


def test_a_call_from_elsewhere_and_a_wrong_seed_are_refused() -> None:
    door: Any = bp.custom_generate(PAIR, bp.FixedPolicy(4))
    with pytest.raises(bp.UserError, match="on its own"):
        door(PAIR.target, ids(), LogitsProcessorList(), StoppingCriteriaList(), GenerationConfig())
    with pytest.raises(bp.UserError, match="seed"):
        bp.custom_generate(PAIR, bp.FixedPolicy(4), seed=-1)
    with pytest.raises(bp.UserError, match="seed"):
        plain(PAIR, inputs=ids(), custom_generate=door, seed=-1)


def test_the_tables_name_fields_of_transformers_once() -> None:
    tables = [_HONOURED, _WITHOUT_INFLUENCE, _NEUTRAL.keys() - _SAMPLING_ONLY, _SAMPLING_ONLY]
    named = [name for table in tables for name in table]
    assert len(named) == len(set(named))
    assert set(named) <= vars(GenerationConfig()).keys()


def test_the_function_is_the_one_at_the_top() -> None:
    assert bp.custom_generate is custom_generate
