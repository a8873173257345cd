"""The pair a run works with: target, drafter and tokenizer, checked to belong together.

Knows how to load and check them; nothing of decoding.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from blockpilot.config import DTYPES, DrafterConfig, ModelConfig, check_device, load_preset, require
from blockpilot.errors import UserError, integer
from blockpilot.models.checkpoints import check_finite, one_line, weight_files
from blockpilot.models.convert_gguf import ORIGIN
from blockpilot.models.drafter import DFlashDrafter
from blockpilot.models.lean import Linear
from blockpilot.models.locate import hub_commit, locate
from blockpilot.models.target import TargetRunner, decoder_layers, refuse_without_rollback


@dataclass(frozen=True)
class Pair:
    """A target, its drafter and their tokenizer, on one device, in evaluation mode."""

    target: PreTrainedModel
    drafter: DFlashDrafter
    tokenizer: PreTrainedTokenizerBase
    name: str = "custom"
    thinking: bool = False
    """Value of ``enable_thinking`` given to chat templates."""
    commits: tuple[str | None, str | None] = (None, None)
    """Hub commits of target and drafter, where they came from the Hub."""

    @property
    def block_size(self) -> int:
        """B: the block size the drafter was trained with."""
        return self.drafter.block_size

    @property
    def mask_token_id(self) -> int:
        """Token that stands for a position to be drafted."""
        return self.drafter.mask_token_id

    @cached_property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Union of the tokenizer's and the generation config's end tokens, rising."""
        configured = getattr(self.target.generation_config, "eos_token_id", None)
        listed = list(configured) if isinstance(configured, (list, tuple)) else [configured]
        stops = (self.tokenizer.eos_token_id, *listed)
        return tuple(sorted({integer("model.target: eos_token_id", i) for i in stops if i is not None}))

    @property
    def vocab_size(self) -> int:
        """Width of the target's logits."""
        return cast(nn.Linear, self.target.get_output_embeddings()).weight.shape[0]

    @property
    def hidden_size(self) -> int:
        """Width of the target's hidden states."""
        return self.target.config.get_text_config().hidden_size

    @property
    def max_positions(self) -> int:
        """Positions the target can hold."""
        return self.target.config.get_text_config().max_position_embeddings

    @property
    def max_drafter_positions(self) -> int:
        """Positions the drafter can hold."""
        return self.drafter.config.max_position_embeddings

    @cached_property
    def runner(self) -> TargetRunner:
        """The target with this drafter's layers tapped."""
        return TargetRunner(self.target, self.drafter.target_layer_ids)

    @property
    def device(self) -> torch.device:
        """Where both models are."""
        return self.runner.device

    def draft_embeddings(self, ids: Tensor) -> Tensor:
        """Embeddings of target tokens, as the drafter takes them: ``[...]`` to ``[..., D]``."""
        own = self.drafter.embed_tokens
        return self.runner.embed(ids) if own is None else own(ids)

    def draft_logits(self, states: Tensor) -> Tensor:
        """The drafter's logits for its states, ``[..., D]`` to ``[..., W]``: by its own head, or the target's.

        W is the drafter's own vocabulary; :meth:`DFlashDrafter.target_ids` leads from it to the target's.
        """
        own = self.drafter.lm_head
        return self.runner.logits(states) if own is None else Linear.of(own)(states)

    def encode(self, turns: Sequence[str], answers: Sequence[str] = ()) -> list[int]:
        """User turns (and the target's answers to all but the last) as token ids, ready to be answered.

        The chat template renders and tokenises in one step. A tokenizer without one gets the texts joined by newlines.

        Raises:
            UserError: ``answers`` does not leave exactly one turn open.
        """
        if len(answers) != len(turns) - 1:
            raise UserError(f"{len(turns)} turns with {len(answers)} answers; expected one answer fewer than turns")
        if self.tokenizer.chat_template is None:
            texts = [text for pair in zip(turns, [*answers, ""], strict=True) for text in pair if text]
            return list(self.tokenizer.encode("\n".join(texts)))
        messages = []
        for index, turn in enumerate(turns):
            messages.append({"role": "user", "content": turn})
            if index < len(answers):
                messages.append({"role": "assistant", "content": answers[index]})
        encoded = self.tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=True, return_dict=False, enable_thinking=self.thinking
        )
        return [int(i) for i in cast(list[int], encoded)]

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of output tokens, without special tokens."""
        return cast(str, self.tokenizer.decode(list(token_ids), skip_special_tokens=True))

    @property
    def origin(self) -> str | None:
        """The file the target was made from, where it was converted."""
        made_from = getattr(self.target.config, ORIGIN, None)
        return None if made_from is None else f"{made_from['file']} sha256:{made_from['sha256']}"

    @cached_property
    def identity(self) -> dict[str, str]:
        """Plain strings that change when the pair's behaviour may: weights or commits, dtype, tokenizer, template."""
        target_commit, drafter_commit = self.commits
        template = self.tokenizer.chat_template or ""
        return {
            "target": target_commit or _with_quantization(self.target),
            "drafter": drafter_commit or model_digest(self.drafter),
            "dtype": str(self.target.dtype).removeprefix("torch."),
            "tokenizer": tokenizer_digest(self.tokenizer),
            "chat_template": _digest(str(template).encode()),
            "thinking": str(self.thinking).lower(),
        }


def load_pair(
    name: str | None = None,
    *,
    target: str | Path | PreTrainedModel | None = None,
    drafter: str | Path | DFlashDrafter | None = None,
    tokenizer: str | Path | PreTrainedTokenizerBase | None = None,
    dtype: str | None = None,
    device: str = "auto",
) -> Pair:
    """Loads a pair by preset name, or from parts.

    Args:
        name: a preset in ``conf/model`` (its drafter is the preset of the same name in ``conf/drafter``).
        target, drafter, tokenizer: a local folder, a Hub id or an object each; with ``name`` they override its own.
        dtype: ``auto``, ``float32``, ``bfloat16`` or ``float16``; None takes the preset's (``auto`` without one).
        device: ``auto`` (a GPU when there is one), ``cpu``, ``cuda`` or ``cuda:N``. Objects are moved there too.

    Raises:
        UserError: something cannot be found or loaded, or the parts do not belong together.
    """
    if name is None and (target is None or drafter is None):
        raise UserError("load_pair needs a preset name, or both target= and drafter=")
    model = load_preset("model", name, ModelConfig) if name else ModelConfig(name="custom", target="")
    draft = load_preset("drafter", name, DrafterConfig) if name else DrafterConfig(name="custom", path="")
    return assemble_pair(
        model,
        draft,
        device=device,
        target=target,
        drafter=drafter,
        tokenizer=tokenizer,
        dtype=dtype,
    )


def locate_pair(model: ModelConfig, draft: DrafterConfig) -> None:
    """Whether everything the two configurations name can be found; loads nothing.

    Raises:
        UserError: something is neither local nor on a reachable Hub.
    """
    _locate(model.target, "model.target", model.revision)
    _locate(draft.path, "drafter.path", draft.revision)
    if model.tokenizer is not None:
        _locate(model.tokenizer, "model.tokenizer", None)


def assemble_pair(
    model: ModelConfig,
    draft: DrafterConfig,
    *,
    device: str = "auto",
    target: str | Path | PreTrainedModel | None = None,
    drafter: str | Path | DFlashDrafter | None = None,
    tokenizer: str | Path | PreTrainedTokenizerBase | None = None,
    dtype: str | None = None,
) -> Pair:
    """The pair of two configurations; arguments as in :func:`load_pair` override them."""
    target = target if target is not None else model.target
    drafter = drafter if drafter is not None else draft.path
    tokenizer = tokenizer if tokenizer is not None else model.tokenizer
    # everything is located before anything heavy is read
    target_folder = None if isinstance(target, PreTrainedModel) else _locate(target, "model.target", model.revision)
    drafter_folder = None if isinstance(drafter, nn.Module) else _locate(drafter, "drafter.path", draft.revision)
    tokenizer = _tokenizer(tokenizer, target_folder)
    place = resolve_device(device)
    if target_folder is not None:
        target = _target(target_folder, dtype or model.dtype, model.attention)
    assert isinstance(target, PreTrainedModel)
    if drafter_folder is not None:
        drafter = guard("drafter.path", drafter_folder, lambda: load_drafter(drafter_folder, target))
    assert isinstance(drafter, DFlashDrafter)
    check_fit(target, drafter)
    nn.Module.to(target, place)
    nn.Module.to(drafter, place)
    target_commit, drafter_commit = (None if f is None else hub_commit(f) for f in (target_folder, drafter_folder))
    commits = (target_commit, drafter_commit)
    pair = Pair(target.eval(), drafter.eval(), tokenizer, model.name, model.thinking, commits)
    _check_tokenizer(pair)
    return pair


def load_target_and_tokenizer(
    model: ModelConfig, device: str = "auto"
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The target of a configuration, in evaluation mode, and its tokenizer: a pair that has no drafter yet.

    Raises:
        UserError: something cannot be found or loaded, or the target cannot roll back.
    """
    folder = _locate(model.target, "model.target", model.revision)
    tokenizer = _tokenizer(model.tokenizer, folder)
    place = resolve_device(device)
    target = _target(folder, model.dtype, model.attention)
    nn.Module.to(target, place)
    return target.eval(), tokenizer


def _tokenizer(
    source: str | Path | PreTrainedTokenizerBase | None, target_folder: Path | None
) -> PreTrainedTokenizerBase:
    if isinstance(source, PreTrainedTokenizerBase):
        return source
    if source is None and target_folder is None:
        raise UserError("load_pair with a target object needs tokenizer= as well")
    folder = cast(Path, target_folder) if source is None else _locate(source, "model.tokenizer", None)
    # no code that lies in the folder runs
    return guard("model.tokenizer", folder, lambda: AutoTokenizer.from_pretrained(folder, trust_remote_code=False))


def _target(folder: Path, dtype: str, attention: str) -> PreTrainedModel:
    return guard("model.target", folder, lambda: load_target(folder, _dtype(dtype), attention))


def _check_tokenizer(pair: Pair) -> None:
    """A folder without tokenizer files loads as a tokenizer that knows no token; a broken template loads too."""
    try:
        encoded = pair.encode(["hello"])
    except Exception as error:  # the template language has its own errors
        raise UserError(f"model.tokenizer: its chat template fails: {' '.join(str(error).split())}") from error
    if not encoded:
        raise UserError("model.tokenizer: it encodes text to no tokens; expected a folder or Hub id with a tokenizer")


def load_target(folder: Path, dtype: str | torch.dtype, attention: str) -> PreTrainedModel:
    """A causal language model from a folder.

    Raises:
        UserError: it cannot be a target at all (known before its weights are read), there are no safetensors, or a
            weight is missing (it would be filled with noise), has another shape or is not finite.
    """
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    kind = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if kind is not None:
        refuse_without_rollback(config, cast(type[PreTrainedModel], kind))
    weight_files(folder)  # a pickle would be taken where there are no safetensors
    loaded = AutoModelForCausalLM.from_pretrained(
        folder,
        config=config,
        dtype=dtype,
        attn_implementation=attention,
        output_loading_info=True,
        use_safetensors=True,
        trust_remote_code=False,
    )
    model, report = cast(tuple[PreTrainedModel, dict[str, list[str]]], loaded)
    for word in ("missing_keys", "mismatched_keys"):
        if report.get(word):
            wrong = sorted(map(str, report[word]))[:3]
            raise UserError(f"model.target: weights in {folder.name}: {word.replace('_', ' ')} {wrong}")
    check_finite(dict(model.named_parameters()))
    return model


def load_drafter(folder: Path, target: PreTrainedModel) -> DFlashDrafter:
    """A drafter from a folder, completed by what its checkpoint leaves to the target.

    A copy of the target's embedding or head, which some checkpoints carry, is dropped for the target's own.

    Raises:
        UserError: see :meth:`DFlashDrafter.from_pretrained`.
    """
    drafter = DFlashDrafter.from_pretrained(folder, dtype=target.dtype)
    config: Any = drafter.config
    head = target.get_output_embeddings()
    if getattr(config, "num_target_layers", None) is None:
        config.num_target_layers = len(decoder_layers(target))
    if drafter.embed_tokens is not None and _same_weights(drafter.embed_tokens, target.get_input_embeddings()):
        drafter.embed_tokens = None
        del config.own_embeddings
    if drafter.lm_head is not None and drafter.d2t is None and _same_weights(drafter.lm_head, head):
        drafter.lm_head = None
        del config.draft_vocab_size
    return drafter


def _same_weights(own: nn.Module, other: Any) -> bool:
    """Of two embeddings or heads; a head with a bias is not the same as one without."""
    there = own.weight.to(other.weight.device)
    return getattr(other, "bias", None) is None and torch.equal(cast(Tensor, there), other.weight)


def check_fit(target: PreTrainedModel, drafter: DFlashDrafter) -> None:
    """Whether the drafter was made for a target like this one.

    Raises:
        UserError: hidden size, vocabulary, depth or a tapped layer differ; the message names both values.
    """
    config = target.config.get_text_config()
    refuse_without_rollback(target.config, type(target))
    depth = len(decoder_layers(target))
    if target.dtype != drafter.dtype:
        raise UserError(f"target and drafter differ in dtype: {target.dtype} and {drafter.dtype}")
    pairs = [
        ("hidden_size", drafter.config.hidden_size, config.hidden_size),
        ("vocab_size", drafter.config.vocab_size, config.vocab_size),
    ]
    told = getattr(drafter.config, "num_target_layers", None)
    if told is not None:
        pairs.append(("number of target layers", told, depth))
    beyond = [i for i in drafter.target_layer_ids if not 0 <= i < depth]
    if beyond:
        raise UserError(
            f"the drafter taps target layer {beyond[0]}, the target has {depth} layers (0 to {depth - 1}): "
            "drafter and target do not belong together"
        )
    for what, expected, got in pairs:
        if expected != got:
            raise UserError(
                f"drafter and target do not belong together: the drafter has {what} {expected}, the target {got}"
            )
    embedding = drafter.embed_tokens or cast(nn.Embedding, target.get_input_embeddings())
    rows, owner = embedding.weight.shape[0], "target" if drafter.embed_tokens is None else "drafter"
    if not 0 <= drafter.mask_token_id < rows:
        raise UserError(
            f"the drafter's mask_token_id is {drafter.mask_token_id}, the {owner}'s embedding has {rows} rows"
        )


def resolve_device(device: str) -> torch.device:
    """``auto`` becomes the GPU when there is one.

    Raises:
        UserError: a GPU is asked for and there is none.
    """
    check_device(device)
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise UserError(f"device={device!r} is not available here; expected auto or cpu")
    return torch.device(device)


_NOT_BEHAVIOUR = ("architectures", "dtype", "torch_dtype", "transformers_version", ORIGIN)


def model_digest(model: PreTrainedModel) -> str:
    """Digest of configuration and weights, whatever device they are on and wherever they came from."""
    config = {k: v for k, v in model.config.to_dict().items() if k not in _NOT_BEHAVIOUR and not k.startswith("_")}
    digest = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode())
    for name, tensor in sorted(model.state_dict().items()):
        flat = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(memoryview(flat.numpy()))
    return "sha256:" + digest.hexdigest()[:32]


def _with_quantization(model: PreTrainedModel) -> str:
    """Digest of a model, and what its weights were rounded to before they came here, where that is known."""
    origin = getattr(model.config, ORIGIN, None)
    return model_digest(model) if origin is None else f"{model_digest(model)} {origin['quantization']}"


def tokenizer_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """Digest of how text becomes tokens and tokens become text, and of the tokens that templates name."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:  # written in Python: its rules are those of its class
        rules: Any = [type(tokenizer).__name__, sorted(tokenizer.get_vocab().items())]
    else:
        rules = json.loads(backend.to_str())
        for state_of_the_last_call in ("truncation", "padding"):
            rules.pop(state_of_the_last_call, None)
        merges = rules["model"].get("merges") or ()
        rules["model"]["merges"] = [merge.split(" ") if isinstance(merge, str) else merge for merge in merges]
    named = [tokenizer.bos_token, tokenizer.eos_token]
    return _digest(json.dumps([_without_defaults(rules), named], sort_keys=True).encode())


def _without_defaults(content: object) -> object:
    """Without null and false: a newer version of a library may write a switch that an older one did not know."""
    if isinstance(content, dict):
        return {k: _without_defaults(v) for k, v in content.items() if v is not None and v is not False}
    return [_without_defaults(item) for item in content] if isinstance(content, list) else content


def _digest(data: bytes) -> str:
    return "sha256:" + hashlib.sha256(data).hexdigest()[:32]


def _locate(source: str | Path | object, key: str, revision: str | None) -> Path:
    return locate(str(source), key=key, revision=revision)


def _dtype(name: str) -> str | torch.dtype:
    require(name in DTYPES, "dtype", name, "one of " + ", ".join(DTYPES))
    return name if name == "auto" else cast(torch.dtype, getattr(torch, name))


def guard(key: str, folder: Path, load):
    """Turns the many errors of loading broken files into one line that begins with ``key``."""
    try:
        return load()
    except UserError as error:
        raise error if str(error).startswith(key) else UserError(f"{key}={str(folder)!r}: {error}") from error
    except Exception as error:  # truncated safetensors, bad JSON, unknown architectures: each has its own class
        raise UserError(f"{key}: the files in {folder} cannot be loaded: {one_line(error)}") from error
