"""A trained policy, or a fixed block size, beside the standard rows on a data set of choice."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from blockpilot.config import EvaluateConfig, project_path, to_plain
from blockpilot.errors import UserError
from blockpilot.models import assemble_pair, locate_pair
from blockpilot.oracle import LabelTable, candidates_of, concatenate
from blockpilot.policies import FixedPolicy
from blockpilot.policies.predictor import PredictorPolicy, load_policy
from blockpilot.runs import compare
from blockpilot.runs.job import start_job
from blockpilot.runs.labels import Labels, read_sources, unseen
from blockpilot.runs.latency import find_profile, speed_figures
from blockpilot.runs.loggers import job_logger
from blockpilot.runs.results import write_results

log = logging.getLogger(__name__)


def evaluate(config: EvaluateConfig, folder: Path, group: str | None = None) -> dict[str, Any]:
    """Decodes test prompts under the policy and the standard rows; returns what ``metrics.json`` holds.

    A data set with test prompts of its own is tested on those, and a policy trained on any of them is refused. From
    one without, the prompts the policy was not trained on are taken. ``best-fixed`` is a trained policy's own record of
    the best size on its training prompts; beside a fixed block size there is no such row.

    Args:
        config: the run's configuration.
        folder: output folder, already there.
        group: W&B group of a sweep.

    Raises:
        UserError: something in the configuration, the policy or the data cannot be used.
    """
    start_job(config.seed)
    locate_pair(config.model, config.drafter)
    sources = read_sources(config, splits=("test",))
    trained = _trained_policy(config)
    pair = assemble_pair(config.model, config.drafter, device=config.device)
    policy = trained or FixedPolicy(config.policy.block_size or pair.block_size)
    labels = Labels(config, pair, sources)
    if isinstance(policy, PredictorPolicy):
        policy.check_pair(pair)
        labels.require(policy.block_sizes, "the policy")
        name, best_fixed = "predictor", policy.best_fixed
        latency = find_profile(config.evaluation, pair, policy.block_sizes)
        labels.collect()
        table = _test_table(labels, policy).restrict(policy.block_sizes)
        policy.to(pair.device)
    else:
        name, best_fixed = f"fixed-{policy.block_size}", None
        candidates = candidates_of(pair, config.oracle)
        labels.require([pair.block_size], "always-B")
        latency = find_profile(config.evaluation, pair, (policy.block_size, *candidates))
        labels.collect()
        table = concatenate(labels.tables("test") + labels.tables("train"))
    policies = compare.compared_policies(pair, table, best_fixed, config.seed, **{name: policy})
    shown = compare.spread(table, config.evaluation.num_prompts)
    with job_logger(config.logger, folder, to_plain(config), group) as logger:
        decoded = compare.decode_policies(pair, shown, policies, config.generation, "decoding test prompts")
        summaries = compare.summarize_against(decoded, shown, pair.block_size, config.evaluation, config.seed, latency)
        metrics = {
            **compare.figures(summaries, name, pair.block_size),
            **speed_figures(shown, latency, pair.block_size),
            "eval/label_agreement": compare.label_agreement(decoded, shown),
        }
        if logger is not None:
            logger.log_metrics(metrics)
        write_results(folder, config, pair, table, decoded, summaries, metrics, logger, latency)
    log.info("results in %s", folder)
    return metrics


def _test_table(labels: Labels, policy: PredictorPolicy) -> LabelTable:
    """Test prompts as they are, provided none was learned from; of other data sets those not learned from."""
    held_out = labels.tables("test")
    for table in held_out:
        policy.check_unseen(table.prompt_keys)
    return concatenate(held_out + [unseen(table, policy.training_prompt_keys) for table in labels.tables("train")])


def _trained_policy(config: EvaluateConfig) -> PredictorPolicy | None:
    """The predictor of ``policy.path``, read before any model is; None for a fixed block size."""
    if config.policy.name == "fixed":
        return None
    if config.policy.path is None:
        raise UserError("policy=predictor needs policy.path, got null; expected the policy folder of a training run")
    return load_policy(project_path(config.policy.path))
