"""The Checkpointer: the three lines in a training loop."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from inspect import signature
from time import monotonic, perf_counter
from types import TracebackType
from typing import Any

from relight.agent import Request, dismiss
from relight.capture import CaptureCache, Captured, capture, environment_soon, warm_up_vector_math
from relight.capture.restore_check import Restorable
from relight.checkpointer import options
from relight.checkpointer.adaptive_schedule import AdaptiveSchedule
from relight.checkpointer.begun_again import begin_again
from relight.checkpointer.best_so_far import BestSoFar
from relight.checkpointer.boundary import Boundary
from relight.checkpointer.calls import Calls
from relight.checkpointer.closed import Closed, RunEnd
from relight.checkpointer.component_watch import ComponentWatch
from relight.checkpointer.failure_policy import FailurePolicy, ends_a_save
from relight.checkpointer.file_defaults import NOT_GIVEN, CheckpointerOptions, NotGiven, with_file_defaults
from relight.checkpointer.fresh_start import FreshStart
from relight.checkpointer.frozen_params import FrozenParams
from relight.checkpointer.grace_period import GracePeriod, never_in_time
from relight.checkpointer.handover import Handover
from relight.checkpointer.holds import Holds
from relight.checkpointer.hook_list import HooksInUse, hooks_of
from relight.checkpointer.hooks import CommittedSave
from relight.checkpointer.inflight import InflightSave, InflightSaves
from relight.checkpointer.inline_writer import write_inline
from relight.checkpointer.leaving import leave
from relight.checkpointer.metric_values import as_they_are, numbers_of
from relight.checkpointer.peer_discovery import PeerDiscovery
from relight.checkpointer.preflight import try_store
from relight.checkpointer.rank_0 import background_of, open_for, ranks_of
from relight.checkpointer.run_progress import RunProgress
from relight.checkpointer.save_handle import Save
from relight.checkpointer.save_requests import info_of, request_of
from relight.checkpointer.save_writer import SaveWriter
from relight.checkpointer.signals import SignalHandlers, add_requester
from relight.checkpointer.takeover import Takeover
from relight.checkpointer.tier_replication import TierReplicator
from relight.comm import RankTimeout, find_world
from relight.commit import Attempt, SaveReport, SaveRequest
from relight.commit.pack_writer import WriteLimits
from relight.errors import ConfigError, Fenced, IncompatibleState
from relight.format.names import check_run_name
from relight.heartbeat import LATE_AFTER, assert_past_standby, heartbeat
from relight.keys import StoreSecurity
from relight.log import FRESH
from relight.observe import demote_info_logs, emit, write_events
from relight.policy import Compact, Keep, Limits, Peers, Tiers, Trigger, TriggerInput
from relight.ranks.collective_errors import raise_on_all_ranks
from relight.ranks.postponed import postpone
from relight.restore import RestoreRequest, restore_state
from relight.restore.result import Resumed, begun_history, report_restored
from relight.restore.rollback import scale_learning_rates
from relight.save_reason import END, SaveReason


class Checkpointer(Holds):
    """Saves and restores the whole state of one training run.

    ``path`` names the store and the run: ``runs/demo`` is run ``demo`` in store ``runs``; with ``run=`` the whole path is the store.
    ``relight.Tiers(…)`` names several stores, near to far. Every other argument that is not an option is a *component*: a module,
    optimizer, scheduler, scaler, loader, generator, tensor, array, container, or any object with ``state_dict`` and ``load_state_dict``.
    RNGs are always captured. Pass plain values, and components with the name of an option, in ``state={"name": object}``: a plain value
    under a keyword is an error, because it is usually a misspelt option.

    Options: ``save``: when to save (``relight.every(…) | relight.best(…)``; default ``relight.adaptive()``; None: only on ``save()``, on
    signals and at the end). ``keep``: which checkpoints to keep (``relight.keep(…)``; None: all). ``on_failure``: ``"warn"``, ``"retry"``,
    ``"raise"`` or ``relight.failure_policy(…)``. ``signals``: False installs no handlers. ``metadata``: JSON stored with each checkpoint.
    ``background``: False makes saves in this process, which waits for them. ``limits``: resources that saves may use
    (``relight.Limits(…)``). ``per_rank``: names of components that differ between ranks; loaders and generators always do. ``writer``: with
    ``"rank 0"``, rank 0 gathers, writes and reads for all ranks, and only it opens the store. ``peers``: nodes keep redundant data, from
    which another node's snapshots can be rebuilt (``relight.Peers(…)``). ``compact``: store data that a save shares with the previous one
    once, and compress where that pays (``relight.Compact(…)`` or True). ``encrypt``: encrypt all stored data (``"file:PATH"``,
    ``"kms:KEY"``…). ``sign``, ``trust``, ``anchor``: see docs/security.md. ``fresh``: True starts from scratch in a run that has
    checkpoints; all of them stay. ``takeover``: what to do if another process still trains this run (``"ask"``, ``"refuse"``, ``"take"``;
    None: refuse, unless a launcher restarts the job).

    If ``torch.distributed`` is initialised, all ranks save one checkpoint together, and every rank must make the same calls. A replicated
    tensor is written once, a sharded tensor (``DTensor``) in pieces. Any number of ranks can restore the checkpoint.

    Errors: ``ConfigError`` and ``IncompatibleState`` are always raised at once, ``Fenced`` always, as this process can never save again.
    ``on_failure`` handles a store's errors. ``InternalError``, a fault in Relight, is reported, never retried, and does not stop training.
    Not thread-safe: only the thread of the training loop may use it.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | Tiers,
        *,
        run: str | None = None,
        save: Trigger | NotGiven | None = NOT_GIVEN,
        keep: Keep | NotGiven | None = NOT_GIVEN,
        on_failure: str | FailurePolicy = "warn",
        signals: bool = True,
        metadata: Mapping[str, Any] | None = None,
        state: Mapping[str, object] | None = None,
        background: bool | None = None,
        limits: Limits | None = None,
        per_rank: Sequence[str] = (),
        writer: str = "every rank",
        peers: Peers | None = None,
        compact: Compact | bool | None = None,
        encrypt: str | Sequence[str] | None = None,
        sign: str | None = None,
        trust: str | Sequence[str] | None = None,
        anchor: str | os.PathLike[str] | None = None,
        fresh: bool = False,
        takeover: str | None = None,
        **components: object,
    ) -> None:
        assert_past_standby("a Checkpointer")
        warm_up_vector_math()
        url, name, tiers, own = options.where_to(path, run)
        given = CheckpointerOptions(save, keep, limits, compact, peers, options.check_background(background), takeover)
        completed = with_file_defaults(given, writer, tiers, (url, name) if own else None)
        tiers, self._run, self._fresh = completed.tiers, check_run_name(name), FreshStart(fresh)
        self._options = options.checked(completed, on_failure, metadata)
        limits = self._options.limits
        wanted, guard = options.wants_background(completed.background), StoreSecurity.from_settings(encrypt, sign, trust, anchor)
        settings = {"background": wanted, "save": completed.save is not None, "signals": options.check_signals(signals), "fresh": fresh}
        self._components = options.check_components(state, components, signature(Checkpointer).parameters)
        per_rank = options.check_per_rank(per_rank, self._components)
        self._world = find_world(limits.deadline_s)
        self._ranks = ranks_of(self._world, per_rank, limits.deadline_s, writer, settings)
        self._store, self._further, self._wants_background = open_for(self._ranks, url, tiers, wanted, guard, limits, self._run)
        self._outwards = TierReplicator(tiers, leads := self._world.rank == 0)
        self._neighbours = PeerDiscovery(completed.peers, writer, self._wants_background, self._ranks, self._store.url, self._run, limits)
        self._under_way = InflightSaves()
        self._looked_over, self._warmed, self._takeover, self._plans = False, False, Takeover(completed.takeover, self), Restorable()
        self._progress, self._recall = RunProgress(), CaptureCache()
        self._trusted, self._calls = FrozenParams(self._options.compact), Calls(self._run)
        self._ranks.check_split(self._components)
        if self._world.rank:
            demote_info_logs()
        self._heirs = Handover(self._ranks, self._components, f"{self._store.url}/{self._run}")
        self._recall_all = self._ranks.cache_of_all(self._recall)
        self._boundary = Boundary(self._components, self._recall_all, self._heirs.published_state)
        self._last_moments = GracePeriod()
        self._signals = SignalHandlers(self._last_moments.on_signal, self._ranks.several) if signals else None
        self._watch, self._resumed = ComponentWatch(self._components, leads), Resumed()
        self._best = BestSoFar(self._options.trigger, self._options.keep, tiers, self._world.rank, self._under_way.metrics)
        self._attempt = self._background = self._environment = self._closed = None
        self._schedule = AdaptiveSchedule(self._options.trigger, self._world.rank, self._world.size, tiers=tiers)
        side = HooksInUse(self._neighbours, self._best, self._last_moments, self._schedule, self._outwards)
        self._hooks = hooks_of(self, self._watch, self._options.keep, self._further, side, leads)

    # -- in the loop ---------------------------------------------------------------------------------------------------------

    def restore(
        self,
        which: str | int = "latest",
        *,
        only: list[str] | None = None,
        strict: bool = True,
        map: Mapping[str, str] | Callable[[str], str] | None = None,
    ) -> int:
        """Restore the state and return the first step that still has to run: 0 for a run without a checkpoint.

        ``latest`` restores the newest checkpoint that verifies, and warns about each checkpoint that it skipped. A tag, a step, an id,
        ``best`` or ``best:METRIC`` restores that checkpoint or raises. ``only=["model/*"]`` restores the matching part of the state and
        leaves the rest unchanged. ``strict=False`` restores the tensors that fit. ``map`` renames stored names to live names.

        After an error the live state may be a mixture of two states: do not train on it.
        """
        which = options.check_restore(which, only, strict, map)
        self._ensure_started()
        self._drain()  # the restored checkpoint is the parent of the next save: no earlier save may be committed between them
        self._takeover.before_restore(whole=which == "latest" and only is None)
        self._neighbours.meet()
        if which == "latest" and self._fresh.applies(self._store, self._run, self._further, self._ranks):
            resumed = Resumed()
        else:
            resumed = restore_state(
                RestoreRequest(
                    self._store, self._run, self._components, which, only, strict, map, self._ranks, self._further, self._neighbours.remote
                )
            )
        self._neighbours.forget()
        self._resumed = resumed
        if resumed.checkpoint is None:
            self._preflight()
            cause = f"{'fresh=True' if self._fresh.used else 'it has no checkpoint yet'} (store {self._store.url})"
            emit("restore.fresh", f"run {self._run!r} starts from scratch: {cause}", run=self._run, store=self._store.url)
            start = 0
        else:
            self._progress.parent = None if (apart := self._fresh.wanted and which != "latest") else resumed.checkpoint.id
            self._components.update({name: value for name, value in resumed.values.items() if name in self._components})
            start = resumed.checkpoint.step + (1 if resumed.micro_step is None else 0)
            self._progress.saved = self._calls.restored(resumed.checkpoint.step, resumed.micro_step, part=apart or only is not None)
            self._progress.step, self._progress.micro_step = self._progress.saved or (None, None)
            report_restored(resumed, start, self._environment_info())
        scale_learning_rates(self._components, resumed.cut, only if resumed.checkpoint is not None else None)
        self._boundary = Boundary(self._components, self._recall_all, self._heirs.published_state)
        self._progress.saved_s = monotonic()
        for hook in self._hooks:
            hook.on_restore(resumed, start, self._progress.parent)
        return start

    def step(self, step: int, *, samples: Any = None, micro_step: int | None = None, **metrics: Any) -> Save | None:
        """Report the end of ``step``; save if a trigger or a signal requests it. Return the save, or None.

        ``step`` is an int or an object that ``operator.index`` accepts. A tensor on an accelerator synchronises the device at every call.
        ``metrics`` are numbers or tensors of one element. They are read (which synchronises the device) only if a save or trigger needs
        them. ``micro_step=k`` reports the end of micro-batch ``k`` of an unfinished step; a save then includes the gradients. After SIGTERM
        or SIGINT, this call saves and then ends the process.
        """
        step, micro_step = options.check_step(step, micro_step, metrics)
        self._ensure_started(micro_step, step, reports=True)
        self._preflight()
        self._begin_attempt()
        self._takeover.notice()
        for hook in self._hooks:
            hook.on_step(step, metrics, samples)
        self._progress.report(step, micro_step, as_they_are(metrics))
        if self._background is not None:
            self._background.interval(perf_counter() - self._progress.returned_s)
        self._poll_completed()
        reason = self._save_reason(step, metrics, micro_step)
        ends = reason is not None and reason.is_ending_signal
        if ends and self._signals is not None and self._signals.ending:
            self._last_moments.closing(self._options.limits.deadline_s)
        save = None
        if reason is not None:
            with self._saving():
                if not ends or self._last_moments.allow(step, self._under_way.saves, self._ranks):
                    why, values, may_wait = add_requester(reason), self._best.due(metrics), reason.kind == "signal"
                    save = self._save(step, why, values, None, micro_step, may_wait=may_wait)
        if self._signals is not None:
            self._signals.saved()
            at_end = self._ranks.lost or (self._ranks.acts_alone and self._progress.saved == (step, micro_step))
            if self._signals.ending and (at_end or ends):  # a signal since _save_reason() is handled at the next step
                with self._saving():
                    self._drain()
                self._finish(Closed.now(f"{self._signals.pending} ended the run", step), ends=True)
                self._signals.end()
        if save is None and not self._warmed:
            self._warm_up()
        self._boundary.remember(step, over=micro_step is None)  # after the warm-up, in which ranks learn which state is replicated
        self._best.awaited.step(metrics, micro_step, lambda: self.save(step, metrics=metrics), self._ranks)
        self._progress.returned_s = perf_counter()
        if self._signals is not None:
            self._signals.hand_on(reason, self._ranks.acts_alone)
        return save

    def save(
        self,
        step: int,
        *,
        tag: str | None = None,
        block: bool = True,
        metrics: Mapping[str, Any] | None = None,
        reason: str = "asked",
        micro_step: int | None = None,
        priority: str = "normal",
    ) -> Save:
        """Save now, as the state at the end of ``step``, and return the handle. ``tag`` names the checkpoint, and retention keeps it.
        ``block=False`` does not wait until it is durable; ``Save.wait`` does. ``priority="high"``: replace a less urgent one.
        """
        step, micro_step = options.check_step(step, micro_step, metrics, tag, reason)
        self._ensure_started(micro_step, step)
        self._preflight()
        self._begin_attempt()
        self._progress.report(step, micro_step, {})
        self._poll_completed()
        with self._saving(), self._under_way.priority(options.check_priority(priority)):
            save = self._save(step, SaveReason("user", reason), metrics or {}, tag, micro_step, may_wait=True)
            assert save is not None
            if block:
                self._drain()
        return save

    def barrier(self) -> None:
        """Wait until a running snapshot no longer reads live tensors. Relight calls it before every ``optimizer.step``. Call it before any
        other change of weights or optimizer state, such as replaying a CUDA graph. Cheap when no snapshot is running."""
        if self._background is not None:
            self._background.barrier()

    def close(self, *, save: bool = True) -> RunEnd:
        """Save the last step if no save has it yet, and restore signal handlers and loaders. Idempotent.

        Waits up to ``Limits(deadline_s=)`` seconds for copies on further tiers. The result, later also in ``ended``, names missing ones."""
        self._close("close() was called", save)
        return self.ended

    def _close(self, why: str, save: bool = True) -> None:
        if self._closed is not None or self._calls.elsewhere:
            return
        heartbeat().phase("ending", self._options.limits.deadline_s / LATE_AFTER)
        self._last_moments.closing(self._options.limits.deadline_s)
        self._neighbours.ends()
        ends = False
        try:
            self._drain()
            if save and self._unsaved and self._progress.step is not None:
                self._save(self._progress.step, END, self._progress.metrics, None, self._progress.micro_step, may_wait=True)
                self._drain()
            self._outwards.finish(self._last_moments.bound(self._options.limits.deadline_s))
            if (
                self._wants_background
                and self._background is None
                and self._options.trigger is not None
                and self._resumed.checkpoint is not None
            ):
                # The previous trainer was killed after its last step, and its agent may still be running.
                dismiss(self._store.url, self._run, self._last_moments.bound(self._options.limits.deadline_s))
            emit("attempt.ended", f"run {self._run!r} ended", run=self._run)
            ends = True
        finally:
            self._finish(Closed.now(why, self._progress.step, saves=save), ends=ends)
        if self._signals is not None:
            self._signals.end()  # if a signal came after the last step

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None:
            self._close("its with block ended")
        elif self._closed is None and not self._calls.elsewhere:
            leave(self, error)

    # -- inside --------------------------------------------------------------------------------------------------------------

    def _ensure_started(self, micro_step: int | None = None, step: int | None = None, *, reports: bool = False) -> None:
        """Start event logging, environment capture and signal handlers at the first call. Check the call's step at every call."""
        if self._closed is not None:
            self._closed.refuse(self._run)
        self._calls.check(step, micro_step, self._progress.step, self._progress.micro_step, reports=reports)
        self._watch.report(step, micro_step, self._progress.at, reports)
        if micro_step is not None:
            self._ranks.check_micro_step()
        if self._environment is not None:
            return
        write_events(self._store.url, self._run, rank=self._world.rank)
        self._environment = environment_soon()
        if self._signals is not None:
            self._signals.install()

    def _preflight(self) -> None:
        """Check once, before the first write, everything that would otherwise fail hours later. A resumed run is checked at the end of its
        first step: its state was saved before, and the check takes as long as a restore of many small tensors."""
        if self._looked_over:
            return
        try:
            with raise_on_all_ranks(self._ranks, "planning a restore of what is saved"):
                state = self._plans.check(self._components, capture(self._components, recall=self._recall_all))
            try_store(self._store, self._run, self._ranks, self._world.rank, options.full_bytes(state), self._options.keep.last or 2)
        except BaseException:
            if self._signals is not None:
                self._signals.restore()  # no save will follow these signals
            raise
        if self._signals is not None:
            self._signals.install()
        self._looked_over = True

    def _begin_attempt(self) -> Attempt:
        if self._attempt is None:
            refuse = self._fresh.guard(self._resumed.searched, f"{self._store.url.rstrip('/')}/{self._run}", self._further)
            if self._calls.begins_again:  # another history: retention keeps the earlier one
                self._progress.parent = None
            self._attempt = self._takeover.begin("restored" if self._progress.parent else FRESH, self._best, refuse)
            self._attempt.make_smaller(self._options.compact)
            history = begun_history(self._attempt, self._progress.parent, self._world.rank)
            aside = self._fresh.begun(self._attempt, history, self._progress.parent, self._world.rank)
            text = f"attempt {self._attempt.epoch} of run {self._run!r}{aside}"
            emit("attempt.started", text, run=self._run, epoch=self._attempt.epoch, store=self._store.url)
            self._resumed.notice_newer(history)
            for hook in self._hooks:
                hook.on_attempt(self._attempt, history)
        return self._attempt

    def _saving(self) -> AbstractContextManager[None]:
        """Publish the phase ``saving`` in the heartbeat: until the deadline, a save may wait for an agent, memory or other ranks."""
        return heartbeat().during("saving", self._options.limits.deadline_s / LATE_AFTER)

    def _save_reason(self, step: int, metrics: Mapping[str, Any], micro_step: int | None) -> SaveReason | None:
        def free_slots() -> int | None:
            return None if self._background is None or self._options.limits.when_busy == "queue" else self._background.free_slots

        return self._ranks.save_reason(
            lambda: self._facts(step, metrics),
            self._options.trigger,
            self._signals,
            self._progress.due,
            free_slots,
            within_step=micro_step is not None,
        )

    def _facts(self, step: int, metrics: Mapping[str, Any]) -> TriggerInput:
        values = self._best.note(options.numbers_for(self._options.trigger, metrics))
        pace_s = self._schedule.interval(step, values, bool(self._under_way))
        done, last = self._watch.epochs.count(self._options.trigger, metrics), (self._progress.saved_step, self._progress.saved_s)
        return TriggerInput(step, monotonic(), *last, values, self._best.values, pace_s, self._calls.previous, done)

    def _save(
        self, step: int, reason: SaveReason, metrics: Mapping[str, Any], tag: str | None, micro_step: int | None, *, may_wait: bool
    ) -> Save | None:
        """Save, and return the handle. Return None if the save was postponed because no slot is free; only if ``may_wait`` is False."""
        background = self._in_background()
        if background is not None:
            may_wait = may_wait or self._ranks.several  # the ranks have agreed that a slot is free
            wait_s = self._options.limits.deadline_s if may_wait or self._options.limits.when_busy == "queue" else 0.0
            if not wait_s and not background.warmed:
                self._warm_up()  # allocating memory for a large state takes seconds; until then this save is postponed
            yields = None if self._ranks.several else self._under_way.yields_to(step, reason)
            if not background.free_slot(wait_s, may_wait, yields) and not may_wait:
                self._progress.due = postpone(reason, step, "no snapshot slot is free")
                return None
        self._progress.due, started = None, perf_counter()
        try:
            state = self._capture(micro_step)
            if micro_step is not None:
                self._boundary.forget()  # an older state must not be saved after this one
        except Exception as error:
            if not ends_a_save(error):
                raise
            return self._count_failure(Save(step, reason, self._options.policy.report(error, step, self._options.policy.retries)))
        if background is not None:
            if (save := self._begin(background, state, step, reason, metrics, tag, micro_step, started)) is not None:
                return save
            self._drain()  # this process makes this save, which must not be committed before the agent's earlier ones
            if self._last_moments.over:
                return self._count_failure(never_in_time(step, reason))
        return self._write(state, step, reason, metrics, tag, micro_step)

    def _capture(self, micro_step: int | None) -> Captured:
        return self._ranks.capture(self._components, self._plans, micro_step=micro_step, recall=self._recall)

    def _warm_up(self) -> None:
        """Start the agent and allocate its memory in the background, after the first step that saved nothing."""
        self._warmed = True
        background = self._in_background()
        if background is not None and self._options.trigger is not None:
            with contextlib.suppress(RankTimeout, MemoryError, OSError):  # the first save reports it
                background.warm_up(self._capture(None))

    def _in_background(self) -> SaveWriter | None:
        if self._wants_background and self._background is None and self._attempt is not None:
            self._background = background_of(
                self._ranks, self._attempt, self._components, self._options.keep, self._options.limits, self._under_way.on_done,
                self._under_way.on_sealed, self._trusted,
            )  # fmt: skip
            self._background.bound = self._last_moments.bound
        return self._background

    def _begin(
        self,
        background: SaveWriter,
        state: Captured,
        step: int,
        reason: SaveReason,
        metrics: Mapping[str, Any],
        tag: str | None,
        micro_step: int | None,
        started: float,
    ) -> Save | None:
        """Pass the save to the agent and return its handle. Return None if the agent cannot make it."""
        save, numbers = self._new_save(step, reason), numbers_of(metrics)
        parent = self._under_way.newest_id or self._progress.parent
        info = info_of(state, step, reason, numbers, self._user(micro_step), self._environment_info(), parent, tag)

        def request(number: int, checkpoint_id: str, tree: bytes) -> Request:
            save.id = checkpoint_id
            self._under_way.add(number, InflightSave(save, numbers, (step, micro_step), self._progress.saved, tag))
            return Request(number, checkpoint_id, info, tree, self._ranks.seat, self._under_way.patient(reason))

        number: int | None = None
        try:
            number = background.save(state, request, self._ranks.id_of(background.place))
        except (Fenced, IncompatibleState, ConfigError):
            raise
        except Exception as error:  # the trainer's edge, as in _write
            save.error = self._options.policy.report(error, step, self._options.policy.retries)
        finally:
            if number is None:
                self._under_way.drop(save)
        if number is None:
            return None if save.error is None else self._count_failure(save)
        save._look, save.bytes = (lambda: background.progress_of(number)), background.pack_bytes
        save.mark_requested(started, perf_counter())
        background.began(save.timings["blocked"])
        self._progress.save_started(step, micro_step)
        for hook in self._hooks:
            hook.on_start(save, numbers)
        return save

    def _new_save(self, step: int, reason: SaveReason) -> Save:
        save = Save(step, reason)
        for hook in self._hooks:
            hook.on_request(save)
        return save

    def _poll_completed(self, *, quiet: bool = False) -> None:
        """Process the saves that ended since the last call. Unless ``quiet``, raise ``Fenced``, or the error that the policy raises."""
        for begun, done in self._under_way.over():
            if done.error is None:
                before, waits = begun.before[0] if begun.before else None, bool(self._under_way)
                self._is_durable(CommittedSave(begun.save, done.report, begun.metrics, begun.save.timings, before, waits))
                continue
            if self._progress.saved == begun.at:
                self._progress.saved = begun.before
            if isinstance(done.error, Fenced) and not quiet:
                raise done.error
            self._options.policy.report(done.error, begun.save.step, self._options.policy.retries)
            self._progress.due = (
                self._options.policy.again(begun.save.why, done.error, self._progress.failed_in_a_row) or self._progress.due
            )
            self._count_failure(begun.save, quiet=quiet)

    def _drain(self, *, quiet: bool = False) -> None:
        """Wait until the agent has written every save, no longer than the deadline or the rest of the grace period."""
        if self._background is not None:
            self._background.barrier()
            self._background.hurry()
        writer = self._background.agent_words if self._background is not None else ""
        self._under_way.wait(self._last_moments.bound(self._options.limits.deadline_s), writer)
        self._poll_completed(quiet=quiet)

    def _is_durable(self, done: CommittedSave) -> None:
        """Do what follows every save that became a checkpoint, whichever process wrote it."""
        self._progress.failed_in_a_row, self._progress.parent = 0, done.report.id
        for hook in self._hooks:
            hook.on_durable(done)

    def _write(
        self, state: Captured, step: int, reason: SaveReason, metrics: Mapping[str, Any], tag: str | None, micro_step: int | None
    ) -> Save:
        """Make the save in this process, with the policy's retries. Raise a store's error only if the policy requires it."""
        save, started = self._new_save(step, reason), perf_counter()
        save.mark_requested(started)
        numbers = numbers_of(metrics)
        retries = 0 if self._ranks.several else self._options.policy.retries  # several ranks retry together, at a later step
        report = write_inline(save, lambda: self._commit(state, step, reason, numbers, micro_step), self._options.policy, retries)
        if report is None:
            if self._ranks.several:
                self._progress.due = self._options.policy.again(reason, save.error, self._progress.failed_in_a_row)
            return self._count_failure(save)
        self._trusted.committed(report.id)
        save.mark_written(report, perf_counter() - started)
        before = self._progress.saved_step
        self._progress.save_started(step, micro_step)
        for hook in self._hooks:
            hook.on_start(save, numbers)
        timings = {"blocked": save.timings["blocked"]}
        self._is_durable(CommittedSave(save, report, numbers, timings, before, bool(self._under_way), made_here=True, tag=tag))
        return save

    def _count_failure(self, save: Save, *, quiet: bool = False) -> Save:
        self._progress.save_failed()
        for hook in self._hooks:
            hook.on_failure(save)
        if not quiet:
            begin_again(self, save)
            self._options.policy.stop_after(self._progress.failed_in_a_row, save.error, save.step)
        return save

    def _commit(self, state: Captured, step: int, reason: SaveReason, metrics: Mapping[str, float], micro_step: int | None) -> SaveReport:
        attempt = self._begin_attempt()
        request = self._request(state, step, reason, metrics, micro_step)
        seat, id_ = self._ranks.seat, self._ranks.id_of(attempt.place)
        return attempt.save(replace(request, id=id_, seat=seat, vouched=self._trusted.vouched(state)))

    def _request(self, state: Captured, step: int, reason: SaveReason, metrics: Mapping[str, float], micro_step: int | None) -> SaveRequest:
        pace = WriteLimits(self._options.limits.threads, self._options.limits.bytes_per_second)
        return request_of(
            state, info_of(state, step, reason, metrics, self._user(micro_step), self._environment_info(), self._progress.parent), pace
        )

    def _finish(self, closed: Closed, *, over: bool = True, ends: bool = False) -> None:
        """Release all resources. ``over``: no process restores from this memory, so free it. ``ends``: ``SignalHandlers.end()`` follows."""
        if self._background is not None:
            self._drain(quiet=True)
            self._background.close(polite=over and not self._last_moments.over)
            self._background = None
        if self._signals is not None and not (ends and self._signals.ending):
            self._signals.restore()
        for hook in reversed(self._hooks):
            hook.on_close(over)
        self._takeover.release()
        self._closed = closed
