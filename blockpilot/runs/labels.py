"""From configured data sets to label tables: which prompts, which caches, which of them are held out."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property

import torch

from blockpilot.config import CollectRunConfig, TrainDrafterConfig, project_path
from blockpilot.errors import UserError
from blockpilot.learning.datamodule import split_table
from blockpilot.models import Pair
from blockpilot.oracle import LabelCache, LabelTable, candidates_of, concatenate, fill, open_cache, shards_to_fill
from blockpilot.prompts import PromptRow, load_prompts
from blockpilot.report import progress_bar

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Source:
    """The prompts of one split of one data set."""

    dataset: str
    split: str
    rows: tuple[PromptRow, ...]

    @property
    def name(self) -> str:
        """Readable name, such as ``gsm8k-train``."""
        return f"{self.dataset}-{self.split}"


class Labels:
    """The label tables of one configuration.

    Args:
        config: generation, oracle and collection settings.
        pair: the pair that makes the labels.
        sources: the prompts, from :func:`read_sources`.
    """

    def __init__(self, config: CollectRunConfig, pair: Pair, sources: Sequence[Source]) -> None:
        self.config, self.pair, self.sources = config, pair, sources
        self._told: set[str] = set()

    @cached_property
    def caches(self) -> list[LabelCache]:
        """One cache per source, in order; made where they are new."""
        root = project_path(self.config.cache_dir)
        c = self.config
        return [
            open_cache(root, source.name, self.pair, source.rows, c.generation, c.oracle, c.collect)
            for source in self.sources
        ]

    def require(self, block_sizes: Sequence[int], key: str) -> None:
        """Whether all of these will have labels, before any is collected.

        Raises:
            UserError: one will not; the message names ``key``, which asks for it.
        """
        labelled = candidates_of(self.pair, self.config.oracle)
        missing = [b for b in block_sizes if b not in labelled]
        if missing:
            raise UserError(
                f"{key} needs labels of block sizes {list(block_sizes)}; oracle.block_sizes lacks {missing}, it has "
                f"{list(labelled)}"
            )

    def collect(self) -> None:
        """Makes every missing shard that is this writer's; says once of each cache where it is."""
        for source, cache in zip(self.sources, self.caches, strict=True):
            missing = sum(len(cache.rows_of(shard)) for shard in shards_to_fill(cache, self.config.collect))
            if missing:
                with progress_bar(f"collecting {source.name}", missing, where=cache.folder) as advance:
                    fill(
                        cache,
                        self.pair,
                        source.rows,
                        self.config.generation,
                        self.config.oracle,
                        self.config.collect,
                        advance,
                    )
            else:
                self._find_whole(source, cache)
            self._told.add(source.name)

    def _find_whole(self, source: Source, cache: LabelCache) -> None:
        complete = not cache.missing()
        if complete:
            # the run that made the last shard may have been killed before it came to this; only totals are at
            # stake, so a cache that may be read and not written is fine as it is
            with suppress(UserError):
                cache.finish()
        if source.name not in self._told:
            state = "all there" if complete else "nothing left for this writer"
            log.info("labels of %s: %s, in %s", source.name, state, cache.folder)

    def tables(self, split: str) -> list[LabelTable]:
        """The tables of one split's sources."""
        return [cache.load() for source, cache in zip(self.sources, self.caches, strict=True) if source.split == split]

    def train_and_test(self, test_share: float, seed: int) -> tuple[LabelTable, LabelTable]:
        """Prompts to learn from and held-out prompts, over all data sets.

        Args:
            test_share: share held out, by a hash of the prompt id, of a data set without test prompts of its own.
            seed: seed of that hash.
        """
        train, test = [], self.tables("test")
        with_test = {source.dataset for source in self.sources if source.split == "test"}
        for source, table in zip([s for s in self.sources if s.split == "train"], self.tables("train"), strict=True):
            if source.dataset in with_test:
                train.append(table)
            else:
                held_out, rest = split_table(table, (test_share,), f"{seed}/test")
                train.append(rest)
                test.append(held_out)
        return concatenate(train), concatenate(test)


def read_sources(
    config: CollectRunConfig | TrainDrafterConfig, splits: Sequence[str] = ("train", "test")
) -> list[Source]:
    """Every data set's prompts, before any model is needed.

    Args:
        config: the data sets.
        splits: which splits are wanted; a data set without test prompts brings its train prompts either way.

    Raises:
        UserError: a source cannot be read, or a prompt is both in train and in test.
    """
    sources = []
    for name, dataset in config.dataset.items():
        for split in ("train", "test"):
            source = getattr(dataset, split)
            alone = split == "train" and dataset.test is None
            if source is not None and (split in splits or alone):
                sources.append(Source(name, split, _distinct(name, split, load_prompts(name, source))))
    _refuse_repeats(sources)
    return sources


def _distinct(name: str, split: str, rows: Sequence[PromptRow]) -> tuple[PromptRow, ...]:
    """The rows without later repeats of the same turns, which a split by id could put on both sides.

    Raises:
        UserError: an id holds "#", which marks the turns of a conversation.
    """
    for row in rows:
        if "#" in row.id:
            raise UserError(
                f"prompt id {row.id!r} of {name}-{split} holds '#', which marks turns; expected an id without"
            )
    first = {row.turns: row for row in reversed(rows)}
    kept = tuple(row for row in rows if first[row.turns] is row)
    if len(kept) < len(rows):
        log.warning("%s-%s: left out %d prompts that repeat an earlier one", name, split, len(rows) - len(kept))
    return kept


def _refuse_repeats(sources: Sequence[Source]) -> None:
    """No id twice anywhere, and no text both in train and in test."""
    where: dict[str, str] = {}
    for source in sources:
        for row in source.rows:
            if row.id in where:
                raise UserError(f"prompt id {row.id!r} is in {where[row.id]} and in {source.name}; ids must differ")
            where[row.id] = source.name
    texts = {
        split: {row.turns: row.id for s in sources if s.split == split for row in s.rows} for split in ("train", "test")
    }
    shared = [turns for turns in texts["train"] if turns in texts["test"]]
    if shared:
        first = shared[0]
        raise UserError(
            f"{len(shared)} prompts are both in train and in test, such as {texts['train'][first]!r} and "
            f"{texts['test'][first]!r}; a prompt may be in one of them only"
        )


def unseen(table: LabelTable, training_prompt_keys: torch.Tensor) -> LabelTable:
    """The prompts of ``table`` that were not learned from.

    Raises:
        UserError: none is left.
    """
    kept = (~torch.isin(table.prompt_keys, training_prompt_keys)).nonzero()[:, 0]
    if len(kept) == 0:
        raise UserError(
            f"the policy was trained on all {len(table)} prompts of this data set; test it on other prompts"
        )
    return table.select(kept)
