"""Labels: which block size would have been best for a prompt, and the prefill distribution it was seen with."""

from blockpilot.oracle.cache import CacheKey, LabelCache
from blockpilot.oracle.collect import candidate_block_sizes, candidates_of, fill, open_cache, shards_to_fill
from blockpilot.oracle.enumeration import enumerate_block_sizes as enumerate
from blockpilot.oracle.per_round import BestSequence, best_sequence, cost_of_one_size
from blockpilot.oracle.prefill import sparse_distributions
from blockpilot.oracle.record import OracleRecord
from blockpilot.oracle.replay import replay
from blockpilot.oracle.shards import CacheRow
from blockpilot.oracle.simulation import Simulation, simulate
from blockpilot.oracle.table import Distributions, LabelTable, TokenLists, concatenate

__all__ = [
    "BestSequence",
    "CacheKey",
    "CacheRow",
    "Distributions",
    "LabelCache",
    "LabelTable",
    "OracleRecord",
    "Simulation",
    "TokenLists",
    "best_sequence",
    "candidate_block_sizes",
    "candidates_of",
    "concatenate",
    "cost_of_one_size",
    "enumerate",
    "fill",
    "open_cache",
    "replay",
    "shards_to_fill",
    "simulate",
    "sparse_distributions",
]
