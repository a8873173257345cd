"""Collect, train, evaluate: each the story of one command, top to bottom."""

from blockpilot.runs.collect import collect
from blockpilot.runs.evaluate import evaluate
from blockpilot.runs.train import train

__all__ = ["collect", "evaluate", "train"]
