"""When to save and what to keep: pure decisions over facts and ``now``, each with its reason. May import: ``errors``."""

from relight.policy.adaptive import Adaptive, adaptive, adaptive_part
from relight.policy.compact import Compact
from relight.policy.keep import Candidate, Keep, KeepVerdict, decide_keep, keep
from relight.policy.limits import Limits
from relight.policy.peers import Peers
from relight.policy.tiers import Tier, Tiers, tier
from relight.policy.triggers import EpochsDone, Trigger, TriggerInput, best, every

__all__ = [
    "Adaptive",
    "Candidate",
    "Compact",
    "EpochsDone",
    "Keep",
    "KeepVerdict",
    "Limits",
    "Peers",
    "Tier",
    "Tiers",
    "Trigger",
    "TriggerInput",
    "adaptive",
    "adaptive_part",
    "best",
    "decide_keep",
    "every",
    "keep",
    "tier",
]  # fmt: skip
