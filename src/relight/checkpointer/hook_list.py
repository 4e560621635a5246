"""The hooks of a Checkpointer, in the order of their calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from relight.catalog.tiers import Further
from relight.checkpointer.adaptive_schedule import AdaptiveSchedule
from relight.checkpointer.best_so_far import BestSoFar
from relight.checkpointer.component_watch import ComponentWatch
from relight.checkpointer.grace_period import GracePeriod
from relight.checkpointer.hooks import Hook, ObserverHook
from relight.checkpointer.metric_feed import MetricFeed
from relight.checkpointer.peer_discovery import PeerDiscovery
from relight.checkpointer.retention_hook import Retention
from relight.checkpointer.stale_model_check import StaleModelCheck
from relight.checkpointer.tier_replication import TierReplicator
from relight.policy import Keep

if TYPE_CHECKING:
    from relight.checkpointer.checkpointer import Checkpointer


class HooksInUse(NamedTuple):
    """Hooks that the Checkpointer also calls directly."""

    peers: PeerDiscovery
    best: BestSoFar
    grace: GracePeriod
    schedule: AdaptiveSchedule
    tiers: TierReplicator


def hooks_of(
    ckpt: Checkpointer, watch: ComponentWatch, keep: Keep, further: Sequence[Further], side: HooksInUse, leads: bool
) -> tuple[Hook, ...]:
    """Return all hooks. ``leads``: whether this is rank 0. A hook comes after those that it needs results of."""
    return (
        ObserverHook(ckpt),  # a drill may end the process here, before anything of the step is recorded
        MetricFeed(leads),
        watch,
        side.peers,  # collective, so before hooks that some ranks do not have
        side.best,
        side.grace,
        side.schedule,
        StaleModelCheck(ckpt.components, watch),
        Retention(keep, leads, further),  # tags a checkpoint, then deletes old ones
        side.tiers,  # a further tier gets the tag together with its checkpoint
    )
