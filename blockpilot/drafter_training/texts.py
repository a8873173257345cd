"""Texts a drafter learns from, on disk: prompts, the target's answers, and what the target computed over them.

Knows files and tensors; nothing of models. A folder holds one source of prompts under one way of sampling; a shard
(safetensors) appears whole or not at all, so a killed run loses at most the shard in progress.

Shapes: T tokens of a text, N of them its answer, F tapped features, K soft labels per answer token.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from blockpilot.errors import UserError, brief
from blockpilot.oracle.files import remove_leftovers, write_whole
from blockpilot.oracle.manifest import MANIFEST, content_digest, differing_field

log = logging.getLogger(__name__)

FORMAT_VERSION = 1
_TENSORS = ("tokens", "prompt_lengths", "output_lengths", "features", "soft_ids", "soft_probs")


@dataclass(frozen=True)
class Text:
    """A prompt with its answer."""

    id: str
    """Of the sample: the prompt's id, with ``#turn`` behind it where a conversation has several."""
    tokens: Tensor
    """int32 ``[T]``: prompt, then answer."""
    prompt_length: int
    features: Tensor
    """bf16 ``[T - 1, F]``: tapped hidden states of all positions but the last, which precedes nothing."""
    soft_ids: Tensor
    """int32 ``[N, K]``: the target's most likely tokens where each answer token was drawn."""
    soft_probs: Tensor
    """fp16 ``[N, K]``: their probabilities at T = 1, unfiltered."""


class TextStore:
    """One folder of shards.

    Args:
        folder: where it is or will be; its name is for people.
        key: everything that decides the content, as plain values.
        num_rows: prompt rows behind it.
        shard_size: prompt rows per shard.

    Raises:
        UserError: the folder holds something else (names the first field that differs, and both values).
    """

    def __init__(self, folder: Path, key: Mapping[str, Any], num_rows: int, shard_size: int) -> None:
        self.folder, self.num_rows, self.shard_size = folder, num_rows, shard_size
        wanted = {**key, "num_rows": num_rows, "shard_size": shard_size, "format_version": FORMAT_VERSION}
        self._digest = content_digest(wanted)
        self.num_shards = -(-num_rows // shard_size)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"answers_dir: {folder} cannot be made: {error.strerror}") from None
        path = folder / MANIFEST
        if not path.exists():
            text = json.dumps(wanted, indent=2).encode()
            write_whole(path, lambda file: file.write(text), keep_existing=True, key="answers_dir")
        self._require_same(path, json.loads(json.dumps(wanted)))

    @staticmethod
    def _require_same(path: Path, wanted: Mapping[str, Any]) -> None:
        try:
            there = json.loads(path.read_text(encoding="utf-8"))
            if not isinstance(there, dict):
                raise ValueError(f"it holds {brief(there)}")
        except (OSError, ValueError) as error:
            raise UserError(
                f"answers_dir: {path} cannot be read: {error}; remove this file alone and run again"
            ) from None
        name = differing_field(there, wanted)
        if name is not None:
            raise UserError(
                f"answers_dir: {path.parent} was made with {name}={there.get(name)!r}, this run asks for "
                f"{name}={wanted.get(name)!r}; use another answers_dir or remove that folder"
            )

    def rows_of(self, shard: int) -> range:
        """Indices of the prompt rows of a shard."""
        return range(shard * self.shard_size, min((shard + 1) * self.shard_size, self.num_rows))

    def path(self, shard: int) -> Path:
        """File of a shard."""
        return self.folder / f"shard-{shard:05d}-of-{self.num_shards:05d}.safetensors"

    def missing(self) -> list[int]:
        """Shards that are not there, or cannot be read (named in the log; they will be made anew)."""
        return [shard for shard in range(self.num_shards) if not self._readable(shard)]

    def _readable(self, shard: int) -> bool:
        path = self.path(shard)
        if not path.exists():
            return False
        try:
            with safe_open(path, framework="pt") as file:
                if set(file.keys()) == set(_TENSORS) and (file.metadata() or {}).get("key") == self._digest:
                    return True
            reason = "it is not a shard of this folder"
        except (SafetensorError, OSError) as error:
            reason = str(error)
        log.warning("shard %s is damaged (%s) and will be made anew", path.name, reason)
        return False

    def write(self, shard: int, texts: Sequence[Text]) -> None:
        """Stores a shard whole: flushed to disk, then renamed into place.

        Raises:
            UserError: the disk is full, or the folder takes no file.
        """
        columns = {
            "tokens": [text.tokens.int() for text in texts],
            "features": [text.features.bfloat16() for text in texts],
            "soft_ids": [text.soft_ids.int() for text in texts],
            "soft_probs": [text.soft_probs.half() for text in texts],
        }
        # no text is left where all prompts of a shard are too long
        tensors = {name: torch.cat(parts) if parts else torch.empty(0) for name, parts in columns.items()}
        tensors["prompt_lengths"] = torch.tensor([text.prompt_length for text in texts], dtype=torch.int32)
        tensors["output_lengths"] = torch.tensor([len(text.soft_ids) for text in texts], dtype=torch.int32)
        metadata = {"key": self._digest, "ids": json.dumps([text.id for text in texts])}
        content = save(tensors, metadata)
        write_whole(self.path(shard), lambda file: file.write(content), key="answers_dir")

    def load(self) -> list[Text]:
        """All texts in the order of their prompts; memory-mapped, so nothing wide is read before it is used.

        Raises:
            UserError: shards are missing.
        """
        remove_leftovers(self.folder)
        missing = self.missing()
        if missing:
            raise UserError(f"answers_dir: {self.folder} lacks {len(missing)} of {self.num_shards} shards")
        return [text for shard in range(self.num_shards) for text in self._texts(shard)]

    def _texts(self, shard: int) -> list[Text]:
        with safe_open(self.path(shard), framework="pt") as file:
            columns = {name: file.get_tensor(name) for name in _TENSORS}
            ids = json.loads(file.metadata()["ids"])
        prompts, outputs = columns["prompt_lengths"].tolist(), columns["output_lengths"].tolist()
        totals = [p + n for p, n in zip(prompts, outputs, strict=True)]
        tokens = columns["tokens"].split(totals)
        features = columns["features"].split([total - 1 for total in totals])
        soft_ids, soft_probs = columns["soft_ids"].split(outputs), columns["soft_probs"].split(outputs)
        return [Text(*row) for row in zip(ids, tokens, prompts, features, soft_ids, soft_probs, strict=True)]
