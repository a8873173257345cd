"""The main story: collect what is missing, train the predictor, decode for real, report."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, RichProgressBar
from lightning.pytorch.loggers import Logger

from blockpilot.config import TrainConfig, to_plain
from blockpilot.decoding import BlockSizePolicy, LatencyProfile
from blockpilot.errors import UserError
from blockpilot.learning import FeatureExtractor
from blockpilot.learning.callbacks import DecodingEvaluation, early_stopping_and_checkpoint, evaluating
from blockpilot.learning.datamodule import LabelDataModule
from blockpilot.learning.module import BlockSizeModule
from blockpilot.metrics import best_fixed, regret_per_prompt
from blockpilot.models import Pair, assemble_pair, locate_pair
from blockpilot.oracle import candidate_block_sizes
from blockpilot.policies import FixedPolicy
from blockpilot.policies.predictor import PredictorPolicy
from blockpilot.runs import compare
from blockpilot.runs.job import start_job
from blockpilot.runs.labels import Labels, read_sources
from blockpilot.runs.latency import find_profile, speed_figures
from blockpilot.runs.loggers import job_logger
from blockpilot.runs.results import write_results

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
    locate_pair(config.model, config.drafter)
    sources = read_sources(config)
    pair = assemble_pair(config.model, config.drafter, device=config.device)
    labels = Labels(config, pair, sources)
    block_sizes = candidate_block_sizes(pair.block_size, config.predictor.k)
    labels.require(block_sizes, f"predictor.k={config.predictor.k}")
    latency = find_profile(config.evaluation, pair, block_sizes)
    data = label_data(config, labels, block_sizes)
    module = predictor_module(config, pair, block_sizes)
    with job_logger(config.logger, folder, to_plain(config), group) as logger:
        best = fit(config, folder, pair, module, data, logger, latency)
        policy = policy_of(best, pair, data)
        policy.save(folder / "policy")
        policy.to(pair.device)
        policies = compare.compared_policies(pair, data.test_table, policy.best_fixed, config.seed, predictor=policy)
        shown = compare.spread(data.test_table, config.evaluation.num_prompts)
        decoded = compare.decode_policies(pair, shown, policies, config.generation, "decoding test prompts")
        summaries = compare.summarize_against(decoded, shown, pair.block_size, config.evaluation, config.seed, latency)
        final = {
            **compare.figures(summaries, "predictor", pair.block_size),
            **speed_figures(shown, latency, pair.block_size),
        }
        metrics = {
            **offline_figures(best, policy, data, logger),
            **final,
            "eval/label_agreement": compare.label_agreement(decoded, shown),
        }
        if logger is not None:
            logger.log_metrics(final)
        write_results(folder, config, pair, data.test_table, decoded, summaries, metrics, logger, latency)
    log.info("results in %s", folder)
    return metrics


def label_data(config: TrainConfig, labels: Labels, block_sizes: tuple[int, ...]) -> LabelDataModule:
    """The data module: collects through ``labels``, keeps the predictor's candidates."""
    return LabelDataModule(
        collect=labels.collect,
        load=lambda: labels.train_and_test(config.trainer.test_share, config.seed),
        extractor=FeatureExtractor(config.preprocess.kind, config.preprocess.top_k, config.oracle.tail_mass),
        block_sizes=block_sizes,
        batch_size=config.trainer.batch_size,
        validation_share=config.trainer.validation_share,
        seed=config.seed,
    )


def predictor_module(config: TrainConfig, pair: Pair, block_sizes: tuple[int, ...]) -> BlockSizeModule:
    """The untrained predictor."""
    return BlockSizeModule(
        block_sizes=list(block_sizes),
        always_block_size=pair.block_size,
        vocab_size=pair.vocab_size,
        hidden_size=pair.hidden_size,
        preprocess={
            "kind": config.preprocess.kind,
            "top_k": config.preprocess.top_k,
            "tail_mass": config.oracle.tail_mass,
        },
        predictor=to_plain(config.predictor),
        trainer=to_plain(config.trainer),
    )


def fit(
    config: TrainConfig,
    folder: Path,
    pair: Pair,
    module: BlockSizeModule,
    data: LabelDataModule,
    logger: Logger | None,
    latency: LatencyProfile | None = None,
) -> BlockSizeModule:
    """Trains with early stopping on validation regret; returns the best checkpoint's module."""
    callbacks: list[Callback] = early_stopping_and_checkpoint(config.trainer.patience, folder / "checkpoints")
    callbacks.append(RichProgressBar())
    if config.evaluation.every_n_epochs > 0:
        callbacks.append(
            DecodingEvaluation(
                lambda current: _decode_now(config, pair, current, data, latency),
                config.evaluation.every_n_epochs,
                at_end=False,
            )
        )
    trainer = lightning.Trainer(
        max_epochs=config.trainer.max_epochs,
        accelerator="gpu" if pair.device.type == "cuda" else "cpu",
        devices=[pair.device.index or 0] if pair.device.type == "cuda" else 1,
        callbacks=callbacks,
        logger=logger or False,
        default_root_dir=folder,
        log_every_n_steps=1,
        enable_model_summary=False,
    )
    trainer.fit(module, datamodule=data)
    checkpoint = next(c for c in callbacks if isinstance(c, ModelCheckpoint))
    log.info("best validation regret %.4f in epoch %s", checkpoint.best_model_score or 0.0, checkpoint.best_model_path)
    best = BlockSizeModule.load_from_checkpoint(checkpoint.best_model_path, map_location=pair.device, weights_only=True)
    if not all(bool(torch.isfinite(p).all()) for p in best.parameters()):
        raise UserError(f"training diverged; trainer.learning_rate={config.trainer.learning_rate} may be too large")
    return best


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
        best_fixed=data.train_table.block_sizes[best_fixed(data.train_table.tau)],
        training_prompt_keys=torch.cat([data.train_table.prompt_keys, data.validation_table.prompt_keys]),
    )


def offline_figures(
    module: BlockSizeModule, policy: PredictorPolicy, data: LabelDataModule, logger: Logger | None
) -> dict[str, float]:
    """The ``test/`` figures: choices on all test prompts, scored by their labels, beside single block sizes."""
    tester = lightning.Trainer(
        accelerator="cpu", devices=1, logger=logger or False, enable_progress_bar=False, enable_model_summary=False,
        enable_checkpointing=False,
    )  # fmt: skip
    (tested,) = tester.test(module, datamodule=data, verbose=False)
    figures = {name: float(value) for name, value in tested.items()}
    tau = data.test_table.tau
    fixed = {"always": policy.trained_block_size, "best_fixed": policy.best_fixed}
    columns = {name: data.test_table.block_sizes.index(size) for name, size in fixed.items()}
    for name, column in columns.items():
        choice = torch.full((len(tau),), column)
        figures[f"test/regret_{name}"] = float(regret_per_prompt(tau, choice).nanmean())
        figures[f"test/tau_{name}"] = float(tau[:, column].nanmean())
    return figures


def _decode_now(
    config: TrainConfig, pair: Pair, module: BlockSizeModule, data: LabelDataModule, latency: LatencyProfile | None
) -> Mapping[str, float]:
    """Figures of the predictor as it stands, beside always-B and the baseline."""
    shown = compare.spread(data.test_table, config.evaluation.num_prompts)
    with evaluating(module):
        policies: dict[str, BlockSizePolicy] = {
            compare.AUTOREGRESSIVE: FixedPolicy(1),
            compare.always(pair.block_size): FixedPolicy(pair.block_size),
            "predictor": policy_of(module, pair, data),
        }
        decoded = compare.decode_policies(pair, shown, policies, config.generation, "decoding test prompts")
    summaries = compare.summarize_against(decoded, shown, pair.block_size, config.evaluation, config.seed, latency)
    return compare.figures(summaries, "predictor", pair.block_size)
