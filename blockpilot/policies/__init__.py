"""From prefill features to a block size. A policy is an object with ``choose(prefill) -> int``."""

from blockpilot.policies.predictor import PredictorPolicy, load_policy
from blockpilot.policies.simple import FixedPolicy, OraclePolicy, RandomPolicy

__all__ = ["FixedPolicy", "OraclePolicy", "PredictorPolicy", "RandomPolicy", "load_policy"]
