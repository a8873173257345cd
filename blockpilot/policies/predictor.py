"""The trained classifier as a policy, and its folder: ``config.json`` and ``model.safetensors``, no pickle.

The folder can be a repository of the Hub: ``policy.push_to_hub(id)``, ``PredictorPolicy.from_pretrained(id)``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import ModelHubMixin
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from blockpilot.config import PredictorConfig, require
from blockpilot.decoding.engine import Prefill
from blockpilot.errors import UserError
from blockpilot.learning import BlockSizePredictor, FeatureExtractor
from blockpilot.models.locate import locate
from blockpilot.models.pair import Pair

FORMAT_VERSION = 2
_KEYS = "training_prompt_keys"
_CARD = """---
{{ card_data }}
---

A block-size policy of BlockPilot: after prefill it picks how many positions a DFlash drafter's blocks have.
`config.json` names the target and the drafter it belongs to; it refuses others.

```python
import blockpilot as bp

policy = bp.PredictorPolicy.from_pretrained("{{ repo_id | default('ID', true) }}", pair=pair)
out = bp.generate(pair, prompt_ids, policy)
```

Method: [arXiv 2606.31315]({{ paper_url }})
"""


@dataclass(eq=False)
class PredictorPolicy(
    ModelHubMixin,
    library_name="blockpilot",
    tags=["speculative-decoding", "block-diffusion"],
    paper_url="https://arxiv.org/abs/2606.31315",
    model_card_template=_CARD,
):
    """Reads the prefill distribution, picks a block size, once per prompt."""

    predictor: BlockSizePredictor
    extractor: FeatureExtractor
    settings: PredictorConfig
    pair_identity: Mapping[str, str]
    """Identity of the pair it was trained with."""
    vocab_size: int
    hidden_size: int
    trained_block_size: int
    """B of that pair's drafter."""
    best_fixed: int
    """The best single block size of its training prompts: what learning has to beat."""
    training_prompt_keys: Tensor
    """int64: keys of the prompts it learned from (training and validation)."""
    objective: str = "tau"
    """What it was trained for: ``tau`` or ``speed``."""

    @property
    def block_sizes(self) -> tuple[int, ...]:
        """The candidates."""
        return self.predictor.block_sizes

    def to(self, device: torch.device) -> PredictorPolicy:
        """Moves the predictor, in place, and returns the policy."""
        self.predictor.to(device)
        return self

    @torch.no_grad()
    def choose(self, prefill: Prefill) -> int:
        """The candidate with the highest score, or what ``predictor.min_gain`` makes of the scores.

        Raises:
            UserError: the logits are of another vocabulary.
        """
        if prefill.logits.shape[-1] != self.vocab_size:
            raise UserError(
                f"the policy was trained on a vocabulary of {self.vocab_size} tokens, "
                f"this target has {prefill.logits.shape[-1]}"
            )
        features = self.extractor.from_logits(prefill.logits, prefill.hidden)
        return int(self.predictor.choose(features)[0])

    def check_pair(self, pair: Pair) -> None:
        """Whether it was trained with this pair.

        Raises:
            UserError: target, drafter or another part differs; the message names the part and both.
        """
        for part in [*pair.identity, *(self.pair_identity.keys() - pair.identity.keys())]:
            trained, given = self.pair_identity.get(part), pair.identity.get(part)
            if trained != given:
                raise UserError(f"the policy was trained with {part} {trained}, this pair has {part} {given}")

    def check_unseen(self, prompt_keys: Tensor) -> None:
        """Whether none of these prompts was learned from.

        Raises:
            UserError: some were; the message counts them.
        """
        shared = int(torch.isin(prompt_keys, self.training_prompt_keys).sum())
        if shared:
            raise UserError(
                f"{shared} of {len(prompt_keys)} test prompts are among the {len(self.training_prompt_keys)} "
                "the policy was trained on; test it on other prompts"
            )

    def save(self, folder: str | Path) -> None:
        """Writes the folder :func:`load_policy` reads."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        config = {
            "format_version": FORMAT_VERSION,
            "block_sizes": list(self.block_sizes),
            "trained_block_size": self.trained_block_size,
            "best_fixed": self.best_fixed,
            "objective": self.objective,
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "preprocess": asdict(self.extractor),
            "predictor": asdict(self.settings),
            "pair": dict(self.pair_identity),
            "versions": {name: version(name) for name in ("torch", "transformers", "lightning")},
        }
        weights = {
            f"predictor.{name}": t.detach().cpu().contiguous() for name, t in self.predictor.state_dict().items()
        }
        save_file({**weights, _KEYS: self.training_prompt_keys.contiguous()}, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")

    def _save_pretrained(self, save_directory: Path) -> None:
        self.save(save_directory)

    def push_to_hub(self, repo_id: str, **arguments: Any) -> str:
        """Uploads the policy's folder with a model card; arguments as of ``huggingface_hub.ModelHubMixin``.

        Raises:
            UserError: the Hub cannot be reached or refuses.
        """
        card = {"repo_id": repo_id, **(arguments.pop("model_card_kwargs", None) or {})}
        try:
            return super().push_to_hub(repo_id, model_card_kwargs=card, **arguments)
        except Exception as error:  # the client raises the errors of its HTTP library when there is no network
            reason = " ".join(str(error).split())[:200]
            raise UserError(f"{repo_id!r} could not be pushed: {type(error).__name__}: {reason}") from error

    @classmethod
    def from_pretrained(  # type: ignore[override]  # what else the mixin takes is the Hub client's own business
        cls, pretrained_model_name_or_path: str | Path, *, pair: Pair | None = None, revision: str | None = None
    ) -> PredictorPolicy:
        """:func:`load_policy` from a folder or a Hub repository."""
        return load_policy(pretrained_model_name_or_path, pair, revision=revision)


def load_policy(folder: str | Path, pair: Pair | None = None, *, revision: str | None = None) -> PredictorPolicy:
    """A trained policy from its folder.

    Args:
        folder: holds ``config.json`` and ``model.safetensors``; a text may also be the id of a Hub repository.
        pair: if given, the policy must have been trained with it, and is moved to its device.
        revision: of the Hub repository.

    Raises:
        UserError: the folder is missing or damaged, or the policy belongs to another pair.
    """
    if isinstance(folder, str) and folder.count("/") == 1 and not Path(folder).exists():
        folder = locate(folder, key="policy.path", revision=revision)
    folder = Path(folder)
    config, weights = _read(folder)
    try:
        _check(folder, config, weights)
        extractor = FeatureExtractor(**config["preprocess"])
        settings = PredictorConfig(**config["predictor"])
        predictor = BlockSizePredictor(
            extractor.input_size(config["vocab_size"], config["hidden_size"]),
            config["block_sizes"],
            sparse_input=extractor.is_sparse,
            depth=settings.depth,
            width=settings.width,
            dropout=settings.dropout,
            residual=settings.residual,
            always_block_size=config["trained_block_size"],
            min_gain=settings.min_gain,
        )
        keys = weights.pop(_KEYS)
        predictor.load_state_dict({name.removeprefix("predictor."): t for name, t in weights.items()})
        policy = PredictorPolicy(
            predictor.eval(), extractor, settings, config["pair"], config["vocab_size"], config["hidden_size"],
            config["trained_block_size"], config["best_fixed"], keys, config["objective"],
        )  # fmt: skip
    except UserError:
        raise
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"policy folder {folder} does not fit together: {type(error).__name__}: {reason}") from error
    if pair is not None:
        policy.check_pair(pair)
        policy.to(pair.device)
    return policy


def _check(folder: Path, config: Mapping[str, Any], weights: Mapping[str, Tensor]) -> None:
    """Raises ``UserError``, ``KeyError`` or ``TypeError`` where a value would load and be wrong only later."""

    def need(fits: Callable[[Any], bool], allowed: str, *keys: str) -> None:
        for key in keys:
            require(fits(config[key]), f"policy folder {folder}: {key}", config[key], allowed)

    def size(value: object) -> bool:
        return type(value) is int and value >= 1

    def rising(value: Any) -> bool:
        return isinstance(value, list) and all(map(size, value)) and len(value) > 0 and value == sorted(set(value))

    need(rising, "rising block sizes of at least 1", "block_sizes")
    need(size, "a whole number of at least 1", "best_fixed", "trained_block_size", "vocab_size", "hidden_size")
    need(lambda value: isinstance(value, dict), "a part's identity by its name", "pair")
    need(lambda value: value in ("tau", "speed"), "tau or speed", "objective")
    keys = weights[_KEYS]
    if keys.dtype != torch.int64 or keys.dim() != 1:
        raise TypeError(f"{_KEYS} is {keys.dtype} of {keys.dim()} dimensions; expected torch.int64 of one")
    if not all(bool(torch.isfinite(tensor).all()) for tensor in weights.values()):
        raise ValueError("a weight is not finite")


def _read(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    for name in ("config.json", "model.safetensors"):
        if not (folder / name).is_file():
            raise UserError(
                f"policy.path={str(folder)!r}: there is no {name}; expected the policy folder of a training run"
            )
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        weights = load_file(folder / "model.safetensors")
    except (ValueError, RecursionError, SafetensorError, OSError) as error:
        raise UserError(f"policy folder {folder} cannot be read: {str(error).splitlines()[0]}") from error
    if not isinstance(config, dict):
        raise UserError(f"policy folder {folder} has a config.json that is no JSON object")
    if config.get("format_version") != FORMAT_VERSION:
        got = config.get("format_version")
        raise UserError(f"policy folder {folder} has format_version {got}; expected {FORMAT_VERSION}")
    return config, weights
