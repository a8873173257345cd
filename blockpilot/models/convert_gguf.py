"""Turns a GGUF file into a folder of plain safetensors that loads like any other checkpoint, once.

Knows the GGUF reader of ``transformers`` and folders under ``data/models``; nothing of pairs or decoding. A folder
appears by rename when it is whole, and says in its configuration what it was made from.
"""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import os
import shutil
from collections import Counter
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from huggingface_hub.utils import WeakFileLock
from tokenizers import pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PretrainedConfig
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from blockpilot.config import MODELS_DIR, ROOT
from blockpilot.errors import UserError

log = logging.getLogger(__name__)

SUFFIX = ".gguf"
ORIGIN = "converted_from"
"""Key of a converted model's configuration: name, SHA-256 and quantisation of the file it was made from."""


def converted(file: Path, *, key: str) -> Path:
    """The folder of a GGUF file's model and tokenizer in fp32; made if it is new.

    Several processes may ask at once: one converts, the others wait for it.

    Args:
        file: a GGUF file.
        key: the configuration key to name in errors, such as ``model.target``.

    Raises:
        UserError: it cannot be read, holds what ``transformers`` does not read, or the folder cannot be written.
    """
    try:
        state = file.stat()
        sha256 = _sha256(file.resolve(), state.st_size, state.st_mtime_ns)
        folder = ROOT / MODELS_DIR / f"{file.stem}-{sha256[:12]}"
        if folder.is_dir():
            return folder
        folder.parent.mkdir(parents=True, exist_ok=True)
        # the lock of a killed process is gone with it, and what it left is then nobody's
        with WeakFileLock(folder.parent / f".{folder.name}.lock"):
            if not folder.is_dir():
                log.info("converting %s, once: %s", file.name, folder)
                partial = folder.with_name(f".{folder.name}.partial")
                shutil.rmtree(partial, ignore_errors=True)
                try:
                    _convert(file, sha256, partial)
                    _sync(partial)
                    partial.rename(folder)
                finally:
                    shutil.rmtree(partial, ignore_errors=True)
    except UserError as error:
        raise UserError(f"{key}={str(file)!r}: {error}") from None
    except OSError as error:
        raise UserError(f"{key}={str(file)!r} cannot be converted: {error}") from None
    return folder


def _convert(file: Path, sha256: str, folder: Path) -> None:
    """Writes model and tokenizer.

    ``from_pretrained(gguf_file=...)`` gives a model that refuses to be saved, since it counts as quantised; so the
    plain model is made from the configuration, and the tensors are put into it.
    """
    if importlib.util.find_spec("gguf") is None:
        raise UserError("reading it needs the package gguf; pip install gguf")
    try:
        quantization, splitting = _look_into(file)
        config = AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
        _tidy(config)
        setattr(config, ORIGIN, {"file": file.name, "sha256": sha256, "quantization": quantization})
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        tensors = load_gguf_checkpoint(str(file), return_tensors=True, model_to_load=model)["tensors"]
        report = model.load_state_dict({name: t.float() for name, t in tensors.items()}, strict=False, assign=True)
        tied = set(model.all_tied_weights_keys) if config.tie_word_embeddings else set()
        missing = sorted(set(report.missing_keys) - tied)
        if missing:
            raise UserError(f"it lacks weights of a {type(model).__name__}: {missing[:3]}")
        model.tie_weights()
        model.save_pretrained(folder)
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
        if splitting == "smollm":  # the reader knows what GPT-2 splits a text at, not that SmolLM splits numbers first
            backend = tokenizer.backend_tokenizer
            digits = pre_tokenizers.Digits(individual_digits=True)
            backend.pre_tokenizer = pre_tokenizers.Sequence([digits, backend.pre_tokenizer])
        tokenizer.save_pretrained(folder)
    except (UserError, OSError):
        raise
    except Exception as error:  # a damaged file fails in the reader, an unknown architecture in transformers
        first = (str(error).splitlines() or [""])[0]
        raise UserError(f"it cannot be converted: {type(error).__name__}: {first}") from error


def _look_into(file: Path) -> tuple[str, str | None]:
    """The quantisation that most of the weights have, such as Q4_1, and the name of how text is split before merges.

    Raises:
        UserError: the model scales its rotary embedding, which ``transformers`` leaves out without a word.
    """
    from gguf import GGUFReader  # pyright: ignore[reportMissingImports]

    try:
        reader = GGUFReader(file)
    except Exception as error:  # it checks little: what it reads behind the end fails somewhere in NumPy
        raise UserError(f"it is truncated or no GGUF file ({type(error).__name__}: {error})") from error
    kinds: Counter[str] = Counter()
    for tensor in reader.tensors:
        kinds[tensor.tensor_type.name] += int(tensor.n_elements)
    scaled = [tensor.name for tensor in reader.tensors if tensor.name.startswith("rope_")]
    scaled += [
        name
        for name, field in reader.fields.items()
        if name.endswith(".rope.scaling.type") and field.contents() != "none"
    ]
    if scaled:
        raise UserError(
            f"its rotary embedding is scaled ({scaled[0]}), which transformers does not read from GGUF; "
            "use the model's own safetensors"
        )
    splitting = reader.get_field("tokenizer.ggml.pre")
    return kinds.most_common(1)[0][0], None if splitting is None else str(splitting.contents())


def _tidy(config: PretrainedConfig) -> None:
    """GGUF holds numbers in 32 bits, and the reader takes the model's title for a path."""
    values: dict[str, Any] = vars(config)
    values.pop("_model_name_or_path", None)
    for name, value in list(values.items()):
        if isinstance(value, float):
            setattr(config, name, float(str(np.float32(value))))


def _sync(folder: Path) -> None:
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())


@lru_cache
def _sha256(file: Path, size: int, changed_ns: int) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()
