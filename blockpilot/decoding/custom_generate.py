"""The door for users of ``transformers``: ``model.generate(**inputs, custom_generate=custom_generate(pair, policy))``.

Knows how ``transformers`` calls a decoding method and what its generation config means; decodes with
:func:`~blockpilot.decoding.engine.generate`. What would change the output and is not honoured is refused by name.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from transformers import (
    EosTokenCriteria,
    GenerationConfig,
    LogitNormalization,
    LogitsProcessorList,
    MaxLengthCriteria,
    PreTrainedModel,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.generation.streamers import BaseStreamer
from transformers.generation.utils import GenerateDecoderOnlyOutput

from blockpilot.decoding.engine import BlockSizePolicy, Generation, generate
from blockpilot.decoding.sampling import Sampling
from blockpilot.errors import UserError
from blockpilot.models.pair import Pair

log = logging.getLogger(__name__)

# Fields of a GenerationConfig. One that is in none of these tables must be unset, so a new one is refused, not ignored.
_HONOURED = frozenset(
    "do_sample temperature top_k top_p max_length max_new_tokens eos_token_id return_dict_in_generate".split()
)
_WITHOUT_INFLUENCE = frozenset(
    (
        "pad_token_id bos_token_id decoder_start_token_id renormalize_logits transformers_version _from_model_config "
        # how transformers would run its own loop
        "use_cache cache_config max_cache_len compile_config disable_compile prefill_chunk_size "
        "continuous_batching_config "
        # only with several beams, or with an assistant: both are refused
        "early_stopping length_penalty num_beam_groups diversity_penalty low_memory num_assistant_tokens "
        "num_assistant_tokens_schedule assistant_confidence_threshold assistant_lookbehind target_lookbehind "
        "assistant_ensemble_weight max_matching_ngram_size speculation_type"
    ).split()
)
_SAMPLING_ONLY = frozenset("min_p top_h typical_p epsilon_cutoff eta_cutoff".split())
"""Read by ``transformers`` with ``do_sample=True`` only."""
_NEUTRAL: dict[str, float] = {
    "num_beams": 1,
    "num_return_sequences": 1,
    "repetition_penalty": 1.0,
    "encoder_repetition_penalty": 1.0,
    "guidance_scale": 1.0,
    "typical_p": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "penalty_alpha": 0.0,
    "min_length": 0,
    "min_new_tokens": 0,
    "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0,
}
"""Values of refused fields that do nothing; of all others only None and False do nothing."""

_FILTERS: dict[str, tuple[type, float]] = {
    "temperature": (TemperatureLogitsWarper, 1.0),
    "top_k": (TopKLogitsWarper, 0),
    "top_p": (TopPLogitsWarper, 1.0),
}
"""The honoured filters in the order in which ``transformers`` applies them: its processor, the value without one."""

# Arguments of ``generate`` itself. Of its further keywords these are understood, next to the config's fields.
_REFUSED_ARGUMENTS = (
    "assistant_model",
    "prefix_allowed_tokens_fn",
    "negative_prompt_ids",
    "negative_prompt_attention_mask",
)
_INPUTS = frozenset("input_ids attention_mask position_ids logits_to_keep".split())


def custom_generate(pair: Pair, policy: BlockSizePolicy, *, seed: int = 0) -> CustomGenerate:
    """A decoding method for ``pair.target.generate(..., custom_generate=...)``; see :class:`CustomGenerate`.

    Args:
        pair: target and drafter; only its own target object may call the method.
        policy: picks block sizes.
        seed: seed of the draws with ``do_sample=True``.

    Raises:
        UserError: a seed out of range.
    """
    return CustomGenerate(pair, policy, seed)


class CustomGenerate:
    """Speculative decoding behind ``generate`` of ``transformers``: same arguments, same result, fewer target passes.

    - Greedy output is that of ``generate`` without ``custom_generate``: token for token in fp32; in bf16 a block and a
      single step round differently, so near-ties may part.
    - With ``do_sample=True`` temperature, top_k and top_p are those of the generation config (``transformers`` itself
      defaults to top_k=50). The distribution is the same; the draws are not torch's: they depend on seed, prompt and
      position, so a prompt gives the same sample each time. ``generate(..., custom_generate=..., seed=1)`` gives
      another one.
    - Stop tokens are the generation config's ``eos_token_id``, as ``transformers`` resolves it: the call's own replaces
      the model's. The tokenizer's end token does not join them, as it does in :attr:`Pair.stop_token_ids`.
    - One prompt per call; it may be padded on the left.
    - ``use_cache`` is ignored: the engine keeps its own cache, and returns none.
    - The output ends at the target's position limit, where ``transformers`` would go on with a warning.
    - Anything else that would change the output raises ``UserError`` naming it.
    """

    def __init__(self, pair: Pair, policy: BlockSizePolicy, seed: int = 0) -> None:
        Sampling(seed=seed)  # refuses a wrong seed here, not at the first call
        self.pair, self.policy, self.seed = pair, policy, seed
        self.last: Generation | None = None
        """Result of the latest finished call: acceptance lengths, block sizes, ``tau``, seconds."""

    def __call__(
        self,
        model: PreTrainedModel,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        seed: int | None = None,
        **model_kwargs: Any,
    ) -> Tensor | GenerateDecoderOnlyOutput:
        """Called by ``generate``, with what it prepared.

        Args:
            model: whose ``generate`` was called.
            input_ids: int64 ``[1, prompt]``.
            logits_processor: what it built from the config and was given.
            stopping_criteria: likewise.
            generation_config: with every default filled in.
            seed: of this call alone.
            model_kwargs: what it would hand to the model.

        Returns:
            int64 ``[1, prompt + new]``, in a ``GenerateDecoderOnlyOutput`` if the config asks for one.

        Raises:
            UserError: something that is not honoured, by name.
        """
        arguments = _arguments_of_generate(model, sys._getframe(1))
        streamer: BaseStreamer | None = arguments.get("streamer")
        try:
            self._check_model(model)
            _check_arguments(arguments)
            _check_config(generation_config)
            sampling = _filters(generation_config, logits_processor)
            max_length, stops = _limits(stopping_criteria)
            budget = max(max_length - input_ids.shape[-1], 1)
            self.last = generate(
                self.pair,
                _prompt(input_ids, model_kwargs.get("attention_mask"), model_kwargs.get("position_ids")),
                self.policy,
                max_new_tokens=budget,
                seed=self.seed if seed is None else seed,
                stop_token_ids=stops,
                on_tokens=None if streamer is None else _feed(streamer),
                **sampling,
            )
        finally:
            # after an error too: a reader in another thread waits for the end
            if streamer is not None:
                streamer.end()
        new = self.last.output_ids
        if len(new) < budget and new[-1] not in stops:
            log.warning("the output ends after %d of %d tokens, at the target's last position", len(new), budget)
        sequences = torch.cat([input_ids, input_ids.new_tensor([new])], dim=-1)
        if generation_config.return_dict_in_generate:
            return GenerateDecoderOnlyOutput(sequences=sequences)  # type: ignore[arg-type]
        return sequences

    def _check_model(self, model: PreTrainedModel) -> None:
        if model is not self.pair.target:
            made, got = (f"{type(m).__name__} {m.name_or_path!r}" for m in (self.pair.target, model))
            raise UserError(
                f"custom_generate was made for the target of the pair {self.pair.name!r} ({made}), "
                f"but generate was called on another model ({got}); expected pair.target.generate(...)"
            )


def _arguments_of_generate(model: PreTrainedModel, frame: FrameType | None) -> dict[str, Any]:
    """The arguments of the running ``model.generate``, by name.

    ``transformers`` hands a callable neither ``streamer`` nor ``assistant_model``, and its keywords only after they
    were mixed with its own defaults. A stream would stay silent and its reader would wait for ever, so they are read
    where they are: in the call on the stack.

    Raises:
        UserError: there is no such call.
    """
    while frame is not None:
        if frame.f_code.co_name == "generate" and frame.f_locals.get("self") is model:
            return dict(frame.f_locals)
        frame = frame.f_back
    raise UserError("custom_generate was called on its own; expected model.generate(..., custom_generate=...)")


def _check_arguments(arguments: dict[str, Any]) -> None:
    """Refuses arguments of ``generate`` that are not fields of a generation config."""
    fields = vars(GenerationConfig())
    given = {name: arguments.get(name) for name in _REFUSED_ARGUMENTS}
    given |= {k: v for k, v in arguments.get("kwargs", {}).items() if k not in _INPUTS and k not in fields}
    foreign = [name for name, value in given.items() if value is not None]
    if foreign:
        raise UserError(f"custom_generate does not support {', '.join(foreign)}; expected generate without it")


def _check_config(config: GenerationConfig) -> None:
    """Refuses fields that would change the output, wherever they come from: the call or the model's own defaults."""
    free = _HONOURED | _WITHOUT_INFLUENCE | (frozenset() if config.do_sample else _SAMPLING_ONLY)
    foreign = []
    for name in vars(GenerationConfig()):
        value, neutral = getattr(config, name, None), _NEUTRAL.get(name)
        if name not in free and value is not None and value is not False and value != neutral:
            foreign.append(f"{name}={' '.join(repr(value).split())} (expected {neutral})")
    if foreign:
        raise UserError(f"custom_generate does not support {', '.join(foreign)}")


def _filters(config: GenerationConfig, processors: LogitsProcessorList) -> dict[str, Any]:
    """Temperature, top_k and top_p as the engine takes them, checked against what ``transformers`` built from them.

    Raises:
        UserError: a processor that does not come from these fields.
    """
    values: dict[str, Any] = {"temperature": 0.0}
    expected: list[type] = []
    if config.do_sample:
        for name, (_, off) in _FILTERS.items():
            told = getattr(config, name)
            values[name] = off if told is None else told
        values["top_p"] = min(values["top_p"], 1.0)  # transformers takes more than 1 for 1
        expected = [kind for name, (kind, off) in _FILTERS.items() if values[name] != off]
    for processor in processors:
        if expected and type(processor) is expected[0]:
            expected.pop(0)
        elif type(processor) is not LogitNormalization:
            raise UserError(
                f"custom_generate does not support the logits_processor {type(processor).__name__}; "
                "expected none but temperature, top_k and top_p of the generation config"
            )
    return values


def _limits(criteria: StoppingCriteriaList) -> tuple[int, list[int]]:
    """Longest sequence (prompt included) and stop tokens.

    Raises:
        UserError: a criterion that is neither.
    """
    max_length, stops = sys.maxsize, []
    for criterion in criteria:
        if type(criterion) is MaxLengthCriteria:
            max_length = criterion.max_length
        elif type(criterion) is EosTokenCriteria:
            stops = criterion.eos_token_id.tolist()
        else:
            raise UserError(
                f"custom_generate does not support the stopping_criteria {type(criterion).__name__}; "
                "expected none but max_length, max_new_tokens and eos_token_id"
            )
    return max_length, stops


def _prompt(input_ids: Tensor, mask: Tensor | None, position_ids: Tensor | None) -> list[int]:
    """The one prompt without its padding.

    Raises:
        UserError: several prompts, a mask that is not left padding, or positions that do not count from 0.
    """
    if len(input_ids) != 1:
        raise UserError(f"custom_generate does not support a batch of {len(input_ids)} prompts; expected 1")
    tokens = input_ids[0].tolist()
    seen = [1] * len(tokens) if mask is None else mask[0].tolist()
    padding = next((i for i, value in enumerate(seen) if value), 0)
    if len(seen) != len(tokens) or not all(seen[padding:]):
        raise UserError(
            "custom_generate does not support an attention_mask with zeros within or after the prompt "
            "(without a mask, each pad_token_id is one); expected zeros only before it"
        )
    tokens = tokens[padding:]
    if position_ids is not None and position_ids.flatten()[-len(tokens) :].tolist() != list(range(len(tokens))):
        raise UserError("custom_generate does not support these position_ids; expected 0, 1, 2, ... from the prompt on")
    return tokens


def _feed(streamer: BaseStreamer) -> Callable[[list[int]], None]:
    """Hands tokens to a streamer as ``transformers`` does: one at a time, each a tensor ``[1]`` on the CPU."""

    def put(tokens: list[int]) -> None:
        # the engine works in inference mode, which a streamer need not know of
        with torch.inference_mode(False), torch.no_grad():
            for token in tokens:
                streamer.put(torch.tensor([token]))

    return put
