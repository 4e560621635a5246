"""Relight keeps a training run alive: it saves all of its state safely, and puts it back to work to the bit.

>>> import relight
>>> relight.every(steps=500) | relight.every(minutes=10)
every(steps=500) | every(seconds=600.0)
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from relight.version import VERSION

if TYPE_CHECKING:
    from relight.api import Store, load, open, save
    from relight.capture.flat_params import flattened
    from relight.checkpointer import Checkpointer, Save
    from relight.checkpointer.failure_policy import failure_policy
    from relight.errors import (
        CheckpointNotFound,
        ConfigError,
        CorruptCheckpoint,
        Diverged,
        Fenced,
        IncompatibleState,
        InternalError,
        LeaseHeld,
        NewerFormat,
        NoMemory,
        NoSpace,
        RelightError,
        ReplicasDiffer,
        RunRemoved,
        RunReplaced,
        SaveFailed,
        StoreUnavailable,
        UnsafeContent,
        WrongKey,
    )
    from relight.followers.follower import Follower, follow
    from relight.heartbeat import phase
    from relight.heartbeat.standby import standby
    from relight.log import Checkpoint
    from relight.policy import Compact, Limits, Peers, Tiers, Trigger, TriggerInput, best, every, tier
    from relight.policy.adaptive import (
        adaptive,  # not from the package: for tools that read the source, that is its module
    )
    from relight.policy.keep import keep
    from relight.restore.lazy_checkpoint import LazyCheckpoint
    from relight.units import Duration, Rate, Size

__version__ = VERSION

_HOMES = {
    "relight.api": ("Store", "load", "open", "save"),
    "relight.capture": ("flattened",),
    "relight.checkpointer": ("Checkpointer", "Save", "failure_policy"),
    "relight.errors": (
        "CheckpointNotFound",
        "ConfigError",
        "CorruptCheckpoint",
        "Diverged",
        "Fenced",
        "IncompatibleState",
        "InternalError",
        "LeaseHeld",
        "NewerFormat",
        "NoMemory",
        "NoSpace",
        "RelightError",
        "ReplicasDiffer",
        "RunRemoved",
        "RunReplaced",
        "SaveFailed",
        "StoreUnavailable",
        "UnsafeContent",
        "WrongKey",
    ),
    "relight.policy": (
        "Compact",
        "Limits",
        "Peers",
        "Tiers",
        "Trigger",
        "TriggerInput",
        "adaptive",
        "best",
        "every",
        "keep",
        "tier",
    ),
    "relight.followers.follower": ("Follower", "follow"),
    "relight.heartbeat": ("phase",),
    "relight.log": ("Checkpoint",),
    "relight.units": ("Duration", "Rate", "Size"),
    "relight.heartbeat.standby": ("standby",),
    "relight.restore.lazy_checkpoint": ("LazyCheckpoint",),
}
_ROOMS = ("capture", "importers", "observe", "policy")
"""Packages whose functions the documentation calls by their whole path, as ``relight.observe.subscribe``."""
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "Checkpoint",
    "CheckpointNotFound",
    "Checkpointer",
    "Compact",
    "ConfigError",
    "CorruptCheckpoint",
    "Diverged",
    "Duration",
    "Fenced",
    "Follower",
    "IncompatibleState",
    "InternalError",
    "LazyCheckpoint",
    "LeaseHeld",
    "Limits",
    "NewerFormat",
    "NoMemory",
    "NoSpace",
    "Peers",
    "Rate",
    "RelightError",
    "ReplicasDiffer",
    "RunRemoved",
    "RunReplaced",
    "Save",
    "SaveFailed",
    "Size",
    "Store",
    "StoreUnavailable",
    "Tiers",
    "Trigger",
    "TriggerInput",
    "UnsafeContent",
    "WrongKey",
    "adaptive",
    "best",
    "every",
    "failure_policy",
    "flattened",
    "follow",
    "keep",
    "load",
    "open",
    "phase",
    "save",
    "standby",
    "tier",
]


if not TYPE_CHECKING:  # or type checkers would believe every name

    def __getattr__(name: str) -> Any:
        """Names are imported when first used: ``import relight`` stays quick and does not bring torch."""
        if name in _ROOMS:
            return import_module(f"relight.{name}")
        home = _HOME_OF.get(name)
        if home is None:
            raise AttributeError(f"module 'relight' has no attribute {name!r}")
        value = getattr(import_module(home), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
