"""The hooks of a Checkpointer, in the order of their calls."""

from __future__ import annotations

from relight.checkpointer.adaptive_schedule import AdaptiveSchedule
from relight.checkpointer.best_so_far import BestSoFar
from relight.checkpointer.component_watch import ComponentWatch
from relight.checkpointer.grace_period import GracePeriod
from relight.checkpointer.hooks import Hook, ObserverHook
from relight.checkpointer.metric_feed import MetricFeed
from relight.checkpointer.options import RunOptions
from relight.checkpointer.peer_discovery import PeerDiscovery
from relight.checkpointer.retention_hook import Retention
from relight.checkpointer.run_progress import RunProgress
from relight.checkpointer.session import RunSession
from relight.checkpointer.stale_model_check import StaleModelCheck
from relight.checkpointer.tier_replication import TierReplicator
from relight.policy import adaptive_part


class Hooks:
    """All hooks of one Checkpointer. Those with a name are also called directly."""

    def __init__(
        self,
        owner: object,
        options: RunOptions,
        session: RunSession,
        components: dict[str, object],
        progress: RunProgress,
    ) -> None:
        rank, trigger, tiers = session.world.rank, options.trigger, options.tiers
        self.tiers = TierReplicator(
            tiers, session.leads, keep=options.keep, is_paced=adaptive_part(trigger) is not None
        )
        self.peers = PeerDiscovery(
            options.peers,
            options.writer,
            session.wants_background,
            session.ranks,
            session.store,
            session.run,
            options.limits,
        )
        self.grace = GracePeriod()
        self.watch = ComponentWatch(components, session.leads)
        self.best = BestSoFar(trigger, options.keep, tiers, rank, progress.in_flight.metrics)
        self.schedule = AdaptiveSchedule(trigger, rank, session.world.size, tiers=tiers)
        self.in_order: list[Hook] = [
            ObserverHook(owner),  # a drill may end the process here, before anything of the step is recorded
            MetricFeed(session.leads),
            self.watch,
            self.peers,  # collective, so before hooks that some ranks do not have
            self.best,
            self.grace,
            self.schedule,
            StaleModelCheck(components, self.watch),
            Retention(options.keep, session.leads, session.further),  # tags a checkpoint, then deletes old ones
            self.tiers,  # a further tier gets the tag together with its checkpoint
        ]
        """A hook comes after those that it needs results of."""
