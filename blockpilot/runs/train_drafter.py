"""The story of a drafter: the target answers prompts, the drafter learns from it, held-out prompts say how well."""

from __future__ import annotations

import copy
import json
import logging
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import lightning
import torch
from lightning.pytorch.loggers import Logger
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from blockpilot.config import FIRST_WEIGHTS, DrafterTrainingConfig, TrainDrafterConfig, project_path, require, to_plain
from blockpilot.drafter_training.answers import Sampling, answers_of, self_written
from blockpilot.drafter_training.card import Learned, Measured, card
from blockpilot.drafter_training.data import DrafterDataModule, Steps
from blockpilot.drafter_training.initial import copy_last_layers, new_drafter
from blockpilot.drafter_training.module import DrafterModule
from blockpilot.drafter_training.texts import Text, TextStore
from blockpilot.drafter_training.validation import SimulatedAcceptance, in_dtype_of_target, simulated_tau
from blockpilot.errors import UserError
from blockpilot.learning.callbacks import LAST, MovableCheckpoint
from blockpilot.learning.checkpoint_files import WholeCheckpoints
from blockpilot.learning.datamodule import hash_fraction
from blockpilot.models import DFlashDrafter, Pair, load_target_and_tokenizer
from blockpilot.models.drafter_config import spread_taps
from blockpilot.models.locate import locate
from blockpilot.models.pair import check_fit, guard, load_drafter
from blockpilot.models.target import decoder_layers
from blockpilot.oracle.memory import within_memory
from blockpilot.prompts import PromptRow
from blockpilot.report import TrainingProgress, progress_bar
from blockpilot.runs.job import start_job
from blockpilot.runs.labels import Source, read_sources
from blockpilot.runs.loggers import job_logger, require_logger
from blockpilot.runs.resume import checkpoint_to_resume

log = logging.getLogger(__name__)


def train_drafter(config: TrainDrafterConfig, folder: Path, group: str | None = None) -> dict[str, Any]:
    """Answers what is missing, trains, measures; returns what ``metrics.json`` holds.

    Args:
        config: the run's configuration. A data set's train prompts are learned from; its test prompts, where it has
            any, are measured in the end.
        folder: output folder, already there; gets ``drafter/`` (in the layout of z-lab checkpoints, with a model card)
            and ``metrics.json``.
        group: W&B group of a sweep.

    Raises:
        UserError: something in the configuration or the data cannot be used.
    """
    start_job(config.seed)
    require_logger(config.logger)
    sources = read_sources(config)
    pair = untrained_pair(config)
    texts = known_texts(config, pair, [source for source in sources if source.split == "train"])
    held_out, learned = split_texts([text for known in texts.values() for text in known], config)
    log.info("%d texts to learn from, %d held out", len(learned), len(held_out))
    tags = [config.model.name, *config.dataset]
    with job_logger(
        config.logger, folder, to_plain(config), group, "train-drafter", tags, config.drafter_training.resume
    ) as logger:
        module = DrafterModule(
            pair.drafter, pair.runner.embedding, pair.runner.head, to_plain(config.drafter_training), config.seed,
            list(texts),
        )  # fmt: skip
        validation = SimulatedAcceptance(pair, held_out)
        steps = fit(config, folder, module, validation, learned, logger)
        _save(pair, folder / "drafter")
        measured = measure(config, pair, [source for source in sources if source.split == "test"])
        metrics = {**validation.figures(module), **tau_figures(measured)}
        text = card(
            config.model.name, to_plain(config.drafter_training), sum(p.numel() for p in pair.drafter.parameters()),
            pair.drafter.target_layer_ids, [_learned(name, known) for name, known in texts.items()], steps,
            module.seconds,
            measured,
        )  # fmt: skip
        (folder / "drafter" / "README.md").write_text(text, encoding="utf-8")
        (folder / "metrics.json").write_text(json.dumps(metrics, indent=2) + "\n", encoding="utf-8")
        if logger is not None:
            logger.log_metrics(metrics, steps)
    log.info("val/tau %.3f at B = %d; drafter in %s", metrics["val/tau"], pair.block_size, folder / "drafter")
    return metrics


@torch.no_grad()
def _save(pair: Pair, folder: Path) -> None:
    """Stores the drafter in bf16, and gives it the weights that are stored: what is measured is what is shipped.

    The folder is there when it is whole; until then an earlier one stays.
    """
    stored = copy.deepcopy(pair.drafter)
    torch.nn.Module.to(stored, torch.bfloat16)
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        stored.save_pretrained(partial)
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    for parameter, rounded in zip(pair.drafter.parameters(), stored.parameters(), strict=True):
        parameter.copy_(rounded)


def _learned(name: str, texts: Sequence[Text]) -> Learned:
    return Learned(name, len(texts), sum(len(text.soft_ids) for text in texts))


def untrained_pair(config: TrainDrafterConfig) -> Pair:
    """The target with a new drafter.

    Raises:
        UserError: the target cannot be loaded, cannot lend first weights, or has no mask token.
    """
    wanted = config.drafter_training
    target, tokenizer = load_target_and_tokenizer(config.model, config.device)
    target.requires_grad_(False)
    torch.manual_seed(config.seed)
    mask_token_id = _mask_token_id(wanted.mask_token, tokenizer)
    if wanted.initial in FIRST_WEIGHTS:
        _check_depth(wanted, len(decoder_layers(target)))
        drafter = new_drafter(
            target,
            block_size=wanted.block_size,
            num_layers=wanted.num_layers,
            target_layer_ids=spread_taps(len(decoder_layers(target)), wanted.num_taps),
            mask_token_id=mask_token_id,
        )
        if wanted.initial == "target":
            copy_last_layers(drafter, target)
    else:
        drafter = _trained_before(config, target, mask_token_id)
    # trained in fp32 whatever the target's dtype
    torch.nn.Module.to(drafter, target.device, torch.float32)
    return Pair(target, drafter, tokenizer, config.model.name, config.model.thinking)


def _check_depth(wanted: DrafterTrainingConfig, depth: int) -> None:
    """Whether a target of ``depth`` layers has the layers that a new drafter reads and starts from.

    Raises:
        UserError: it has not.
    """
    most = depth if depth > 2 else 1  # of two layers, the third from last is none
    allowed = f"1 to {most}, as the target has {depth} layers"
    require(wanted.num_taps <= most, "drafter_training.num_taps", wanted.num_taps, allowed)
    lent = wanted.num_layers <= depth or wanted.initial != "target"
    allowed = f"1 to {depth}, the target's layers, or drafter_training.initial=random"
    require(lent, "drafter_training.num_layers", wanted.num_layers, allowed)


def _trained_before(config: TrainDrafterConfig, target: PreTrainedModel, mask_token_id: int) -> DFlashDrafter:
    """The drafter that ``drafter_training.initial`` names, to go on from.

    Raises:
        UserError: it cannot be loaded, is not for this target, or is not what the other settings describe.
    """
    wanted, key = config.drafter_training, "drafter_training.initial"
    folder = locate(wanted.initial, key=key)

    def load() -> DFlashDrafter:
        loaded = load_drafter(folder, target)
        check_fit(target, loaded)
        return loaded

    drafter = guard(key, folder, load)
    if drafter.lm_head is not None:
        raise UserError(
            f"drafter_training.initial={wanted.initial!r} has a head of its own; only the target's is trained with"
        )
    there = {
        "block_size": (drafter.block_size, wanted.block_size),
        "num_layers": (len(drafter.layers), wanted.num_layers),
        "num_taps": (len(drafter.target_layer_ids), wanted.num_taps),
        "mask_token": (drafter.mask_token_id, mask_token_id),
    }
    for name, (its, asked) in there.items():
        if its != asked:
            raise UserError(f"drafter_training.initial={wanted.initial!r} has {name} {its}, this run asks for {asked}")
    return drafter


def _mask_token_id(token: str | None, tokenizer: PreTrainedTokenizerBase) -> int:
    """The id of a token of one's own, or of the tokenizer's mask token.

    Raises:
        UserError: the tokenizer has none, or does not know ``token``.
    """
    if token is None:
        found = tokenizer.mask_token_id
        expected = "a token of the tokenizer's vocabulary that texts do not hold; the tokenizer has no mask token"
    else:
        found = tokenizer.get_vocab().get(token)
        expected = "a token of the tokenizer's vocabulary that texts do not hold"
    require(isinstance(found, int), "drafter_training.mask_token", token, expected)
    return cast(int, found)


def known_texts(config: TrainDrafterConfig, pair: Pair, sources: Sequence[Source]) -> dict[str, list[Text]]:
    """All texts to learn from and validate on, by the name of their folder; answered where they are not yet.

    Raises:
        UserError: no prompt has an answer that a block could be drafted in.
    """
    wanted, root = config.drafter_training, project_path(config.answers_dir)
    groups = [(source.name, source.rows) for source in sources]
    if wanted.self_written > 0:
        with progress_bar("prompts the target writes", wanted.self_written, where=root) as advance:
            own = self_written(root, pair, wanted.self_written, config.seed, wanted.shard_size, advance)
        groups.append(("self", tuple(own)))
    texts = {}
    for name, rows in groups:
        for number, temperature in enumerate(wanted.temperatures):
            sampling = Sampling(wanted.max_new_tokens, float(temperature), config.seed + number)
            store = _answered(config, pair, name, rows, sampling)
            texts[store.folder.name] = [text for text in store.load() if _can_be_drafted(text)]
    if not any(texts.values()):
        raise UserError("dataset: no prompt got an answer of two tokens or more; expected other prompts")
    return texts


def _answered(
    config: TrainDrafterConfig, pair: Pair, name: str, rows: Sequence[PromptRow], sampling: Sampling
) -> TextStore:
    root, size = project_path(config.answers_dir), config.drafter_training.shard_size
    smaller = "drafter_training.shard_size or drafter_training.max_new_tokens"
    with (
        progress_bar(f"answers to {name} at T = {sampling.temperature:g}", len(rows)) as advance,
        within_memory(pair.device, smaller),
    ):
        return answers_of(root, name, pair, rows, sampling, size, advance)


def _can_be_drafted(text: Text) -> bool:
    """Whether a token follows the answer's first, which the prefill gives."""
    return len(text.tokens) > text.prompt_length + 1


def split_texts(texts: Sequence[Text], config: TrainDrafterConfig) -> tuple[list[Text], list[Text]]:
    """Texts held out by a hash of their prompt's id (all answers to it, all turns), and the others.

    Raises:
        UserError: one of the parts is empty.
    """
    share = config.drafter_training.validation_share
    out = [hash_fraction(text.id.split("#")[0], f"{config.seed}/drafter") < share for text in texts]
    parts = [[text for text, inside in zip(texts, out, strict=True) if inside is wanted] for wanted in (True, False)]
    require(
        all(parts), "drafter_training.validation_share", share, f"a share that leaves both parts of {len(texts)} texts"
    )
    return parts[0], parts[1]


def fit(
    config: TrainDrafterConfig,
    folder: Path,
    module: DrafterModule,
    validation: SimulatedAcceptance,
    learned: Sequence[Text],
    logger: Logger | None,
) -> int:
    """Trains; the module's drafter then has the weights of the last step, whose number is returned.

    Raises:
        UserError: training diverged, or the checkpoint to go on from is of another configuration.
    """
    wanted, checkpoints = config.drafter_training, folder / "checkpoints"
    steps = Steps(learned, wanted.block_size, wanted.soft_weight > 0, wanted.batch_size, config.seed)
    on_gpu = module.drafter.device.type == "cuda"
    trainer = lightning.Trainer(
        max_steps=wanted.max_steps,
        max_epochs=-1,  # steps alone say when: a resumed run counts an epoch more
        accelerator="gpu" if on_gpu else "cpu",
        devices=[module.drafter.device.index or 0] if on_gpu else 1,
        precision="bf16-mixed" if on_gpu else "32-true",
        gradient_clip_val=1.0,
        reload_dataloaders_every_n_epochs=1,
        callbacks=[
            validation,
            MovableCheckpoint(dirpath=checkpoints, filename=LAST.removesuffix(".ckpt"), enable_version_counter=False),
            TrainingProgress("training the drafter", wanted.max_steps, "steps", ("train/loss", "val/tau")),
        ],
        plugins=[WholeCheckpoints()],
        logger=logger or False,
        default_root_dir=folder,
        log_every_n_steps=10,
        num_sanity_val_steps=0,
        enable_model_summary=False,
    )
    last = checkpoint_to_resume(checkpoints, module.hparams, "drafter_training.resume") if wanted.resume else None
    data = DrafterDataModule(steps, wanted.max_steps, wanted.steps_per_validation)
    keys = ("batch_size", "num_anchors", "block_size")
    with within_memory(module.drafter.device, " or ".join(f"drafter_training.{key}" for key in keys)):
        trainer.fit(module, datamodule=data, ckpt_path=last)
    if not all(bool(torch.isfinite(p).all()) for p in module.parameters()):
        raise UserError(f"training diverged; drafter_training.learning_rate={wanted.learning_rate} may be too large")
    return trainer.global_step


def measure(config: TrainDrafterConfig, pair: Pair, sources: Sequence[Source]) -> list[Measured]:
    """Acceptance lengths on test prompts at T = 0, by block sizes from 2 to 2 B, in the target's dtype."""
    found = []
    sampling = Sampling(config.drafter_training.max_new_tokens, 0.0, config.seed)
    sizes = range(2, 2 * pair.block_size + 1)
    for source in sources:
        texts = list(filter(_can_be_drafted, _answered(config, pair, source.name, source.rows, sampling).load()))
        if texts:
            tau = simulated_tau(in_dtype_of_target(pair), texts, sizes)
            means = {b: sum(one[b] for one in tau) / len(tau) for b in sizes}
            found.append(Measured(source.name, len(texts), sum(len(text.soft_ids) for text in texts), means))
    return found


def tau_figures(measured: Sequence[Measured]) -> dict[str, float]:
    """``test/tau_b<size>/<source>`` of everything measured."""
    return {f"test/tau_b{b}/{one.name}": value for one in measured for b, value in one.tau.items()}
