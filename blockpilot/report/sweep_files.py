"""A published sweep as a folder: ``{block size}.json`` holds the mean acceptance length of each prompt.

The layout of the data that BlockPilot's authors released. Knows files only.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from blockpilot.errors import UserError, brief

CHOICES = "1.json"
"""Not a sweep of b = 1, where tau is 1 by definition: the block size that was chosen for each prompt."""


@dataclass(frozen=True)
class PublishedSweep:
    """What a folder holds; N prompts, K block sizes."""

    prompts: tuple[str, ...]
    block_sizes: tuple[int, ...]
    """Rising."""
    tau: Tensor
    """float64 ``[N, K]``; a row of NaN is a prompt without rounds."""
    chosen: Tensor | None
    """Block size chosen for each prompt, int64 ``[N]``, where the folder has a file of choices."""


def read_sweep(folder: Path) -> PublishedSweep:
    """Reads and checks all ``{block size}.json`` of a folder; other names are left alone.

    Raises:
        UserError: there is no such folder or no such file, a file is not JSON or not of numbers, prompts differ between
            files, or a chosen size has no file. The message names the file.
    """
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder; expected one with a file {{block size}}.json for each block size")
    paths = {int(path.stem): path for path in folder.glob("*.json") if re.fullmatch(r"[1-9]\d*", path.stem)}
    choices = paths.pop(1, None)
    if not paths:
        raise UserError(f"{folder} has no file {{block size}}.json, such as 16.json")
    sizes = sorted(paths)
    files = {size: _acceptance_lengths(paths[size]) for size in sizes}
    prompts = tuple(files[sizes[0]])
    for size in sizes[1:]:
        _same_prompts(paths[size], files[size], paths[sizes[0]], files[sizes[0]])
    for prompt in prompts:
        without = [size for size in sizes if math.isnan(files[size][prompt])]
        if 0 < len(without) < len(sizes):
            raise UserError(f"{paths[without[0]]}: prompt {prompt!r} is NaN, but a number for other block sizes")
    chosen = None
    if choices is not None:
        picked = _chosen_sizes(choices, sizes)
        _same_prompts(choices, picked, paths[sizes[0]], files[sizes[0]])
        chosen = torch.tensor([picked[prompt] for prompt in prompts])
    tau = torch.tensor([[files[size][prompt] for size in sizes] for prompt in prompts], dtype=torch.float64)
    return PublishedSweep(prompts, tuple(sizes), tau, chosen)


def _acceptance_lengths(path: Path) -> dict[str, float]:
    """Mean acceptance lengths by prompt; NaN, which Python writes for a mean of nothing, is a prompt without rounds."""
    content = _read(path)
    for prompt, value in content.items():
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        # compared before it becomes a float, which a long number cannot
        if not number or not (value != value or 1 <= value < 2**31):
            raise UserError(
                f"{path}: prompt {prompt!r} is {brief(value)}; expected a mean acceptance length, 1 or more"
            )
    return content


def _chosen_sizes(path: Path, sizes: list[int]) -> dict[str, int]:
    content = _read(path)
    for prompt, value in content.items():
        if isinstance(value, bool) or value not in sizes:
            raise UserError(
                f"{path}: prompt {prompt!r} has block size {brief(value)}, which has no file; expected one of {sizes} "
                f"({CHOICES} holds the size chosen for each prompt)"
            )
    return {prompt: int(value) for prompt, value in content.items()}


def _same_prompts(path: Path, own: dict[str, Any], other_path: Path, other: dict[str, Any]) -> None:
    for prompt in other:
        if prompt not in own:
            raise UserError(f"{path} lacks prompt {prompt!r}, which {other_path.name} has; expected the same prompts")
    for prompt in own:
        if prompt not in other:
            raise UserError(f"{path} has prompt {prompt!r}, which {other_path.name} lacks; expected the same prompts")


def _read(path: Path) -> dict[str, Any]:
    """A JSON object that is not empty."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read as JSON: {error}") from None
    if not isinstance(content, dict) or not content:
        raise UserError(f'{path} holds {brief(content)}; expected numbers by prompt, as in {{"0": 6.5}}')
    return content
