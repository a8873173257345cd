"""The main story: collect what is missing, train the predictor, decode for real, report."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import Logger

from blockpilot.config import PolicyConfig, TrainConfig, to_plain
from blockpilot.decoding import BlockSizePolicy, LatencyProfile
from blockpilot.errors import UserError
from blockpilot.learning import FeatureExtractor
from blockpilot.learning.callbacks import (
    LAST,
    DecodingEvaluation,
    early_stopping_and_checkpoints,
    evaluating,
    monitored,
)
from blockpilot.learning.checkpoint_files import WholeCheckpoints
from blockpilot.learning.datamodule import LabelDataModule
from blockpilot.learning.history import History
from blockpilot.learning.module import BlockSizeModule
from blockpilot.metrics import best_fixed, regret_per_prompt
from blockpilot.models import Pair, assemble_pair, locate_pair
from blockpilot.models.pair import resolve_device
from blockpilot.oracle import candidate_block_sizes
from blockpilot.oracle.manifest import MANIFEST
from blockpilot.policies import FixedPolicy
from blockpilot.policies.predictor import PredictorPolicy
from blockpilot.report import TrainingProgress, log_artifacts
from blockpilot.runs import compare
from blockpilot.runs.job import start_job
from blockpilot.runs.labels import Labels, read_sources
from blockpilot.runs.latency import find_profile, round_seconds, speed_figures
from blockpilot.runs.loggers import job_logger, require_logger
from blockpilot.runs.policies import AUTOREGRESSIVE, PREDICTOR, Known, always, block_sizes_of, compared_policies
from blockpilot.runs.processes import is_first, side_by_side
from blockpilot.runs.results import write_results
from blockpilot.runs.resume import checkpoint_to_resume

log = logging.getLogger(__name__)


def train(config: TrainConfig, folder: Path, group: str | None = None) -> dict[str, Any]:
    """Collects, trains, evaluates; returns what ``metrics.json`` holds.

    Args:
        config: the run's configuration.
        folder: output folder, already there.
        group: W&B group of a sweep.

    Raises:
        UserError: something in the configuration or the data cannot be used.
    """
    start_job(config.seed)
    require_logger(config.logger)
    locate_pair(config.model, config.drafter)
    sources = read_sources(config)
    pair = assemble_pair(config.model, config.drafter, device=config.device if is_first() else "cpu")
    labels = Labels(config, pair, sources)
    block_sizes = candidate_block_sizes(pair.block_size, config.predictor.k)
    labels.require(block_sizes, f"predictor.k={config.predictor.k}")
    priced = block_sizes_of(config.evaluation.policies, PolicyConfig(), pair.block_size)
    latency = find_profile(config.evaluation, pair, sorted({*block_sizes, *priced}))
    data = label_data(config, labels, block_sizes, latency)
    learned_from = [cache.folder.name for cache in labels.caches]
    if config.objective.name == "speed" and latency is not None:
        learned_from.append(f"latency profile {latency.digest}")
    module = predictor_module(config, pair, block_sizes, learned_from)
    tags = [config.model.name, *config.dataset]
    with job_logger(config.logger, folder, to_plain(config), group, "train", tags, config.trainer.resume) as logger:
        best, validated, steps = fit(config, folder, pair, module, data, logger, latency)
        if not is_first():
            return {}
        policy = policy_of(best, pair, data)
        policy.save(folder / "policy")
        policy.to(pair.device)
        known = Known(pair, data.test_table, config.seed, policy.best_fixed, policy)
        shown, decoded = compare.run_policies(
            pair, data.test_table, compared_policies(config.evaluation.policies, known), labels.caches,
            config.evaluation, config.generation, config.collect,
        )  # fmt: skip
        summaries = compare.summarize_against(decoded, shown, pair.block_size, config.evaluation, config.seed, latency)
        metrics = {
            **validated,
            **offline_figures(best, policy, data),
            **compare.figures(summaries, PREDICTOR, pair.block_size),
            **speed_figures(shown, latency, pair.block_size),
            "eval/label_agreement": compare.label_agreement(decoded, shown),
        }
        report = write_results(
            folder, config, pair, data.test_table, decoded, summaries, PREDICTOR, metrics, logger, latency, steps
        )
        log_artifacts(logger, [cache.folder / MANIFEST for cache in labels.caches], folder / "policy")
    log.info("results in %s, to be read in %s", folder, report)
    return metrics


def label_data(
    config: TrainConfig, labels: Labels, block_sizes: tuple[int, ...], latency: LatencyProfile | None = None
) -> LabelDataModule:
    """The data module: collects through ``labels``, keeps the predictor's candidates, knows what rounds cost.

    Raises:
        UserError: ``objective=speed`` without a latency profile.
    """
    if config.objective.name == "speed" and latency is None:
        raise UserError(
            "objective=speed needs a latency profile of this device and model; measure it with "
            f"python -m blockpilot.profile model={config.model.name}, or set evaluation.latency_profile=FILE"
        )
    return LabelDataModule(
        collect=labels.collect,
        load=lambda: labels.train_and_test(config.trainer.test_share, config.seed),
        extractor=FeatureExtractor(config.preprocess.kind, config.preprocess.top_k, config.oracle.tail_mass),
        block_sizes=block_sizes,
        batch_size=config.trainer.batch_size,
        validation_share=config.trainer.validation_share,
        seed=config.seed,
        round_seconds=None if latency is None else lambda table: round_seconds(table, latency),
    )


def predictor_module(
    config: TrainConfig, pair: Pair, block_sizes: tuple[int, ...], labels: list[str]
) -> BlockSizeModule:
    """The untrained predictor; ``labels`` names what it learns from."""
    return BlockSizeModule(
        block_sizes=list(block_sizes),
        always_block_size=pair.block_size,
        vocab_size=pair.vocab_size,
        hidden_size=pair.hidden_size,
        objective=config.objective.name,
        preprocess={
            "kind": config.preprocess.kind,
            "top_k": config.preprocess.top_k,
            "tail_mass": config.oracle.tail_mass,
        },
        predictor=to_plain(config.predictor),
        trainer=to_plain(config.trainer),
        seed=config.seed,
        labels=labels,
    )


def fit(
    config: TrainConfig,
    folder: Path,
    pair: Pair,
    module: BlockSizeModule,
    data: LabelDataModule,
    logger: Logger | None,
    latency: LatencyProfile | None = None,
) -> tuple[BlockSizeModule, dict[str, float], int]:
    """Trains with early stopping on validation regret.

    Returns:
        The best checkpoint's module, calibrated; its score; optimizer steps taken in all.

    Raises:
        UserError: training diverged, or the checkpoint to go on from is of another configuration.
    """
    checkpoints = folder / "checkpoints"
    figure = monitored(config.objective.name)
    callbacks = early_stopping_and_checkpoints(config.trainer.patience, checkpoints, figure)
    callbacks += [
        History(folder),
        TrainingProgress("training", config.trainer.max_epochs, "epochs", ("train/loss", figure)),
    ]
    if config.evaluation.every_n_epochs > 0:
        callbacks.append(
            DecodingEvaluation(
                lambda current: _decode_now(config, pair, current, data, latency),
                config.evaluation.every_n_epochs,
                at_end=False,
            )
        )
    on_gpu = resolve_device(config.device).type == "cuda"
    several = config.trainer.devices > 1
    trainer = lightning.Trainer(
        max_epochs=config.trainer.max_epochs,
        accelerator="gpu" if on_gpu else "cpu",
        devices=[pair.device.index or 0] if on_gpu and not several else config.trainer.devices,
        strategy="ddp" if several else "auto",
        use_distributed_sampler=False,
        callbacks=callbacks,
        plugins=[WholeCheckpoints()],
        logger=logger or False,
        default_root_dir=folder,
        log_every_n_steps=1,
        enable_model_summary=False,
    )
    # whatever is wrong with the data is told before other processes are started
    data.prepare_data()
    data.setup()
    last = checkpoint_to_resume(checkpoints, module.hparams, "trainer.resume") if config.trainer.resume else None
    with side_by_side(config.trainer.devices):
        trainer.fit(module, datamodule=data, ckpt_path=last)
    checkpoint = next(c for c in callbacks if isinstance(c, ModelCheckpoint))
    log.info("lowest %s %.4f, in %s", figure, checkpoint.best_model_score or 0.0, checkpoint.best_model_path)
    if not Path(checkpoint.best_model_path).is_file():
        raise UserError(
            f"trainer.resume: there is no {checkpoint.best_model_path}, which {checkpoints / LAST} has as its best "
            "epoch; train from the start in another hydra.run.dir"
        )
    best = BlockSizeModule.load_from_checkpoint(checkpoint.best_model_path, map_location=pair.device, weights_only=True)
    if not all(bool(torch.isfinite(p).all()) for p in best.parameters()):
        raise UserError(f"training diverged; trainer.learning_rate={config.trainer.learning_rate} may be too large")
    best.calibrate(data.batch("validation"))
    assert checkpoint.best_model_score is not None
    return best, {figure: float(checkpoint.best_model_score)}, trainer.global_step


def policy_of(module: BlockSizeModule, pair: Pair, data: LabelDataModule) -> PredictorPolicy:
    """The module's predictor as a policy that remembers its pair and its training prompts."""
    return PredictorPolicy(
        predictor=module.predictor.eval(),
        extractor=module.extractor,
        settings=module.predictor_config,
        pair_identity=pair.identity,
        vocab_size=pair.vocab_size,
        hidden_size=pair.hidden_size,
        trained_block_size=pair.block_size,
        best_fixed=data.train_table.block_sizes[best_fixed(data.batch("train").utility(module.objective))],
        training_prompt_keys=torch.cat([data.train_table.prompt_keys, data.validation_table.prompt_keys]),
        objective=module.objective,
    )


def offline_figures(module: BlockSizeModule, policy: PredictorPolicy, data: LabelDataModule) -> dict[str, float]:
    """The ``test/`` figures: choices on all test prompts, scored by their labels, beside single block sizes."""
    tester = lightning.Trainer(
        accelerator="cpu", devices=1, logger=False, enable_progress_bar=False, enable_model_summary=False,
        enable_checkpointing=False,
    )  # fmt: skip
    (tested,) = tester.test(module, datamodule=data, verbose=False)
    figures = {name: float(value) for name, value in tested.items()}
    batch = data.batch("test")
    columns = {
        name: data.block_sizes.index(size)
        for name, size in {"always": policy.trained_block_size, "best_fixed": policy.best_fixed}.items()
    }
    for objective in ("tau", "speed"):
        if objective == "speed" and batch.seconds is None:
            continue
        utility = batch.utility(objective)
        suffix = "" if objective == "tau" else "_speed"
        for name, column in columns.items():
            choice = torch.full((len(batch),), column)
            figures[f"test/regret{suffix}_{name}"] = float(regret_per_prompt(utility, choice).nanmean())
    for name, column in columns.items():
        figures[f"test/tau_{name}"] = float(data.test_table.tau[:, column].nanmean())
    return figures


def _decode_now(
    config: TrainConfig, pair: Pair, module: BlockSizeModule, data: LabelDataModule, latency: LatencyProfile | None
) -> Mapping[str, float]:
    """Figures of the predictor as it stands, beside always-B and the baseline."""
    shown = compare.spread(data.test_table, config.evaluation.num_prompts)
    with evaluating(module):
        policies: dict[str, BlockSizePolicy] = {
            AUTOREGRESSIVE: FixedPolicy(1),
            always(pair.block_size): FixedPolicy(pair.block_size),
            PREDICTOR: policy_of(module, pair, data),
        }
        decoded = compare.decode_policies(pair, shown, policies, config.generation, "decoding test prompts")
    summaries = compare.summarize_against(decoded, shown, pair.block_size, config.evaluation, config.seed, latency)
    return compare.figures(summaries, PREDICTOR, pair.block_size)
