"""From prefill features to a block size. A policy is an object with ``choose(prefill) -> int``.

The trained one stays in ``policies.predictor`` (and ``policies.per_round``), so that who only decodes does not load
what reads label caches.
"""

from blockpilot.policies.adaptive import ConfidencePolicy, EmaPolicy
from blockpilot.policies.simple import FixedPolicy, OraclePolicy, RandomPolicy

__all__ = ["ConfidencePolicy", "EmaPolicy", "FixedPolicy", "OraclePolicy", "RandomPolicy"]
