"""A policy of choice beside the standard rows on a data set of choice."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from blockpilot.config import EvaluateConfig, TrainerConfig, project_path, to_plain
from blockpilot.models import assemble_pair, locate_pair
from blockpilot.oracle import LabelTable, candidates_of, concatenate
from blockpilot.oracle.manifest import MANIFEST
from blockpilot.policies import FixedPolicy
from blockpilot.policies.predictor import PredictorPolicy, load_policy
from blockpilot.report import log_artifacts
from blockpilot.runs import compare
from blockpilot.runs.job import start_job
from blockpilot.runs.labels import Labels, read_sources, unseen
from blockpilot.runs.latency import find_profile, speed_figures
from blockpilot.runs.loggers import job_logger, require_logger
from blockpilot.runs.newest import with_newest_policy
from blockpilot.runs.policies import BEST_FIXED, LEARNED, Known, block_sizes_of, compared_policies, row_name
from blockpilot.runs.results import write_results

log = logging.getLogger(__name__)


def evaluate(config: EvaluateConfig, folder: Path, group: str | None = None) -> dict[str, Any]:
    """Runs test prompts under the policy and the standard rows; returns what ``metrics.json`` holds.

    A data set with test prompts of its own is tested on those, and a policy trained on any of them is refused. From
    one without, the prompts the policy was not trained on are taken. ``best_fixed`` is a trained policy's own record of
    the best size on its training prompts; without one it is found on the training prompts of these data sets, which are
    labelled for that, and where a data set has no test prompts of its own, those that training would hold out are
    tested.

    A trained policy that is not named is that of the newest run of the same pair under ``outputs/``.

    Args:
        config: the run's configuration.
        folder: output folder, already there.
        group: W&B group of a sweep.

    Raises:
        UserError: something in the configuration, the policy or the data cannot be used.
    """
    start_job(config.seed)
    require_logger(config.logger)
    locate_pair(config.model, config.drafter)
    if config.policy.name in LEARNED and config.policy.path is None:
        config = with_newest_policy(config)
    trained = _trained_policy(config)
    rows = config.evaluation.policies
    learns = trained is None and BEST_FIXED in (config.policy.name, *rows)
    if learns:
        log.info("best_fixed is found on the training prompts, so these are labelled too where they are not yet")
    sources = read_sources(config, splits=("train", "test") if learns else ("test",))
    pair = assemble_pair(config.model, config.drafter, device=config.device)
    labels = Labels(config, pair, sources)
    candidates = _candidates(config, labels, trained)
    priced = block_sizes_of(rows, config.policy, pair.block_size)
    latency = find_profile(config.evaluation, pair, sorted({*candidates, *priced}))
    labels.collect()
    if trained is not None:
        best_fixed, table = trained.best_fixed, _unseen_table(labels, trained)
    elif learns:
        # the split that train.py makes
        train, table = labels.train_and_test(TrainerConfig().test_share, config.seed)
        best_fixed = FixedPolicy.best(train).block_size
    else:
        best_fixed, table = None, concatenate(labels.tables("test") + labels.tables("train"))
    table = table.restrict(candidates)
    known = Known(pair, table, config.seed, best_fixed, trained)
    policies = compared_policies(rows, known, config.policy)
    name = row_name(config.policy, pair.block_size)
    tags = [config.model.name, *config.dataset]
    with job_logger(config.logger, folder, to_plain(config), group, "evaluate", tags) as logger:
        shown, decoded = compare.run_policies(
            pair, table, policies, labels.caches, config.evaluation, config.generation, config.collect
        )
        summaries = compare.summarize_against(decoded, shown, pair.block_size, config.evaluation, config.seed, latency)
        metrics = {
            **compare.figures(summaries, name, pair.block_size),
            **speed_figures(shown, latency, pair.block_size),
            "eval/label_agreement": compare.label_agreement(decoded, shown),
        }
        report = write_results(folder, config, pair, table, decoded, summaries, name, metrics, logger, latency)
        log_artifacts(logger, [cache.folder / MANIFEST for cache in labels.caches])
    log.info("results in %s, to be read in %s", folder, report)
    return metrics


def _candidates(config: EvaluateConfig, labels: Labels, trained: PredictorPolicy | None) -> tuple[int, ...]:
    """The trained policy's block sizes, or else all that are labelled; B is among them."""
    if trained is None:
        labels.require([labels.pair.block_size], "always-B")
        return candidates_of(labels.pair, config.oracle)
    trained.check_pair(labels.pair)
    labels.require(trained.block_sizes, "the policy")
    trained.to(labels.pair.device)
    return trained.block_sizes


def _unseen_table(labels: Labels, policy: PredictorPolicy) -> LabelTable:
    """Test prompts as they are, provided none was learned from; of other data sets those not learned from."""
    held_out = labels.tables("test")
    for table in held_out:
        policy.check_unseen(table.prompt_keys)
    return concatenate(held_out + [unseen(table, policy.training_prompt_keys) for table in labels.tables("train")])


def _trained_policy(config: EvaluateConfig) -> PredictorPolicy | None:
    """The predictor of ``policy.path``, read before any model is; None for a policy that needs none."""
    if config.policy.name not in LEARNED:
        return None
    assert config.policy.path is not None
    return load_policy(project_path(config.policy.path))
