"""One Checkpointer's store, ranks and attempt: where its saves go, and with whom they are made."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from relight.agent import dismiss
from relight.capture import environment_soon
from relight.checkpointer.fresh_start import FreshStart
from relight.checkpointer.options import RunOptions, full_bytes
from relight.checkpointer.preflight import try_store
from relight.checkpointer.rank_0 import open_for, ranks_of
from relight.checkpointer.signals import SignalHandlers
from relight.checkpointer.state_capture import StateCapture
from relight.checkpointer.takeover import RunHolder, Takeover
from relight.comm import find_world
from relight.commit import Attempt
from relight.errors import RelightError
from relight.format.collector import collector_paused
from relight.heartbeat import LATE_AFTER, heartbeat
from relight.observe import demote_info_logs, emit, write_events
from relight.policy.triggers import text_to_compare
from relight.ranks.collective_errors import raise_on_all_ranks
from relight.run_records.run_end import record_end
from relight.store.wrapper import guard_of


class RunSession:
    """The store, the ranks and the attempt of one Checkpointer. Making it is collective."""

    def __init__(self, owner: RunHolder, options: RunOptions) -> None:
        self.run, self._options = options.run, options
        self.world = find_world(options.limits.deadline_s)
        settings = {
            "background": options.background,
            "save": text_to_compare(options.trigger),
            "signals": options.signals,
            "fresh": options.fresh,
        }
        self.leads = self.world.rank == 0
        if not self.leads:
            demote_info_logs()
        self.ranks = ranks_of(self.world, options.per_rank, options.limits.deadline_s, options.writer, settings)
        self.store, self.further, self.wants_background = open_for(
            self.ranks, options.url, options.tiers, options.background, options.security, options.limits, options.run
        )
        self.fresh, self.takeover = FreshStart(options.fresh), Takeover(options.takeover, owner)
        self.attempt: Attempt | None = None
        self._environment: Callable[[], dict[str, Any]] | None = None
        self._checked = False

    @property
    def location(self) -> str:
        """Store and run, as a URL."""
        return f"{self.store.url.rstrip('/')}/{self.run}"

    @property
    def store_urls(self) -> list[str]:
        """The URLs of the stores that this rank writes to, nearest first; last the anchor."""
        anchor = guard_of(self.store).anchor
        return [self.store.url, *(store.url for _, store, _ in self.further), *([anchor] if anchor else [])]

    def start(self, signals: SignalHandlers | None) -> None:
        """Start event logging, environment capture and signal handlers, once."""
        if self._environment is not None:
            return
        write_events(self.store.url, self.run, rank=self.world.rank)
        self._environment = environment_soon()
        if signals is not None:
            signals.install()

    def environment(self, background: bool) -> dict[str, Any]:
        """Return what a checkpoint records of this process. ``background``: whether saves are made in the background."""
        return {**self._environment(), "background": background} if self._environment is not None else {}

    def check(self, capture: StateCapture, signals: SignalHandlers | None) -> None:
        """Check once, before the first write, everything that would otherwise fail hours later. A resumed run is checked at the end of its
        first step: its state was saved before, and the check takes as long as a restore of many small tensors."""
        if self._checked:
            return
        try:
            with collector_paused():  # what the first capture makes stays alive
                with raise_on_all_ranks(self.ranks, "planning a restore of what is saved"):
                    state = capture.whole()
                state_bytes = full_bytes(state)
            try_store(self.store, self.run, self.ranks, self.world.rank, state_bytes, self._options.keep.last or 2)
        except BaseException:
            if signals is not None:
                signals.restore()  # no save will follow these signals
            raise
        if signals is not None:
            signals.install()
        self._checked = True

    def applies_fresh(self) -> bool:
        """Return whether ``restore()`` must restore nothing, because of ``fresh=``."""
        return self.fresh.applies(self.store, self.run, self.further, self.ranks)

    def dismiss_former_agent(self, timeout_s: float) -> None:
        """End the agent that a killed trainer of this run left on this node, once it has written what it has."""
        dismiss(self.store.url, self.run, timeout_s)

    def ending(self, timeout_s: float) -> None:
        """Publish in the heartbeat that the run ends, within ``timeout_s`` seconds."""
        heartbeat().phase("ending", timeout_s / LATE_AFTER)

    def ended(self, step: int | None) -> None:
        """Report the normal end of the attempt. ``step``: its last one, if it is saved; None writes nothing into the log."""
        if step is not None and self.attempt is not None and self.world.rank == 0:
            # every checkpoint is safe; readers elsewhere learn of the end later, by the age of the newest checkpoint
            with contextlib.suppress(RelightError, OSError):
                record_end(self.attempt.place.log, self.attempt.place.epoch, step)
        emit("attempt.ended", f"run {self.run!r} ended", run=self.run)
