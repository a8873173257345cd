"""Target and drafter: load, check, run, tap hidden states; the embedded pair and how it was made."""

from blockpilot.models.drafter import DFlashDrafter, DrafterContext
from blockpilot.models.pair import Pair, assemble_pair, load_pair, load_target_and_tokenizer, locate_pair
from blockpilot.models.target import TargetOutput, TargetRunner

__all__ = [
    "DFlashDrafter",
    "DrafterContext",
    "Pair",
    "TargetOutput",
    "TargetRunner",
    "assemble_pair",
    "load_pair",
    "load_target_and_tokenizer",
    "locate_pair",
]
