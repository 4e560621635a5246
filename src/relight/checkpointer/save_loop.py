"""The saves of one Checkpointer: decide, capture, write here or pass to the writer process, and process the outcomes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from time import monotonic, perf_counter
from typing import Any

from relight.agent import Request
from relight.capture import Captured
from relight.checkpointer.begun_again import NewLog
from relight.checkpointer.failure_policy import ends_a_save, may_retry
from relight.checkpointer.frozen_params import FrozenParams
from relight.checkpointer.grace_period import never_in_time
from relight.checkpointer.hook_list import Hooks
from relight.checkpointer.hooks import CommittedSave
from relight.checkpointer.inflight import InflightSave
from relight.checkpointer.metric_values import numbers_of
from relight.checkpointer.options import RunOptions, numbers_for
from relight.checkpointer.rank_0 import abort_save, background_of
from relight.checkpointer.run_progress import RunProgress
from relight.checkpointer.save_handle import Save
from relight.checkpointer.save_writer import SaveWriter
from relight.checkpointer.session import RunSession
from relight.checkpointer.signals import SignalHandlers
from relight.checkpointer.state_capture import StateCapture
from relight.commit import Attempt, SaveInfo, SaveReport, SaveRequest
from relight.commit.pack_writer import WriteLimits
from relight.errors import ConfigError, Fenced, IncompatibleState, RelightError
from relight.format import encode_tree
from relight.format.root_keys import FIRST_STEP
from relight.heartbeat import LATE_AFTER, heartbeat
from relight.log import FRESH
from relight.observe import emit
from relight.observe.progress_bar import progress_bar
from relight.policy import TriggerInput
from relight.ranks.postponed import postpone
from relight.restore.result import begun_history
from relight.save_reason import SaveReason


class SaveLoop:
    """Makes the saves of one Checkpointer. Only the training thread uses it."""

    def __init__(
        self, options: RunOptions, session: RunSession, capture: StateCapture, hooks: Hooks, progress: RunProgress
    ) -> None:
        self.options, self.session, self.capture, self.hooks, self.progress = options, session, capture, hooks, progress
        self._ranks, self._in_flight = session.ranks, progress.in_flight
        self._trusted, self._new_log = FrozenParams(options.compact), NewLog()
        self.writer: SaveWriter | None = None
        """Makes background saves; None before the attempt began, and for saves in this process."""
        self.warmed = False
        """Whether the writer was prepared, or no save will need it."""

    # -- deciding

    def begin_attempt(self) -> Attempt:
        """Take charge of the run, at the first call."""
        session, progress = self.session, self.progress
        if session.attempt is None:
            refuse = session.fresh.guard(progress.resumed.searched, session.location, session.further)
            if self.progress.calls.begins_again:  # another history: retention keeps the earlier one
                progress.parent = None
            attempt = session.attempt = session.takeover.begin(
                "restored" if progress.parent else FRESH, self.hooks.best, refuse
            )
            attempt.make_smaller(self.options.compact)
            history = begun_history(attempt, progress.parent, session.world.rank)
            aside = session.fresh.begun(attempt, history, progress.parent, session.world.rank)
            text = f"attempt {attempt.epoch} of run {session.run!r}{aside}"
            emit("attempt.started", text, run=session.run, epoch=attempt.epoch, store=session.store.url)
            progress.resumed.notice_newer(history)
            for hook in self.hooks.in_order:
                hook.on_attempt(attempt, history)
        return session.attempt

    def saving(self) -> AbstractContextManager[None]:
        """Publish the phase ``saving`` in the heartbeat: until the deadline, a save may wait for an agent, memory or other ranks."""
        return heartbeat().during("saving", self.options.limits.deadline_s / LATE_AFTER)

    def reason(
        self, step: int, metrics: Mapping[str, Any], micro_step: int | None, signals: SignalHandlers | None
    ) -> SaveReason | None:
        """Return the reason to save ``step`` now, the same on all ranks, or None."""

        def free_slots() -> int | None:
            return None if self.writer is None or self.options.limits.when_busy == "queue" else self.writer.free_slots

        def facts() -> TriggerInput:
            hooks, trigger, last = self.hooks, self.options.trigger, (self.progress.saved_step, self.progress.saved_s)
            values = hooks.best.note(numbers_for(trigger, metrics))
            pace_s = hooks.schedule.interval(step, values, bool(self._in_flight))
            epochs = hooks.watch.epochs.count(trigger, metrics)
            first = self.options.first_step
            saved, previous = (
                None if step_number is None else step_number - first
                for step_number in (last[0], self.progress.calls.previous)
            )
            return TriggerInput(
                step - first, monotonic(), saved, last[1], values, hooks.best.values, pace_s, previous, epochs
            )

        return self._ranks.save_reason(
            facts, self.options.trigger, signals, self.progress.due, free_slots, within_step=micro_step is not None
        )

    # -- saving

    def save(
        self,
        step: int,
        reason: SaveReason,
        metrics: Mapping[str, Any],
        tag: str | None,
        micro_step: int | None,
        *,
        may_wait: bool,
    ) -> Save | None:
        """Save, and return the handle. Return None if the save was postponed because no slot is free; only if ``may_wait`` is False."""
        writer, failed = None, None
        try:
            writer = self.open_writer()
            if writer is not None and self._is_postponed(writer, step, reason, metrics, may_wait):
                return None
        except Exception as error:  # the ranks have decided to save: the capture raises it, on all of them
            failed = error
        self.progress.due, started = None, perf_counter()
        try:
            state = self.capture.part(micro_step, failed)
        except Exception as error:
            self._abort(step, error)
            if not ends_a_save(error):
                raise
            return self._count_failure(
                Save(step, reason, self._report(error, step, reason, self.options.policy.retries))
            )
        try:
            if writer is not None:
                if (save := self._begin(writer, state, step, reason, metrics, tag, micro_step, started)) is not None:
                    return save
                self.drain()  # this process makes this save, which must not be committed before the agent's earlier ones
                if self.hooks.grace.over:
                    save = never_in_time(step, reason)
                    assert save.error is not None
                    self._abort(step, save.error)
                    return self._count_failure(save)
            return self.write(state, step, reason, metrics, tag, micro_step)
        except Exception as error:
            self._abort(step, error)
            raise

    def warm_up(self) -> None:
        """Start the agent and allocate its memory in the background, after the first step that saved nothing."""
        self.warmed = True
        writer, failed = None, None
        try:
            writer = self.open_writer()
        except Exception as error:  # the other ranks begin the capture, which raises it on all of them
            if not self._ranks.several:
                raise
            failed = error
        if (writer is not None or failed is not None) and self.options.trigger is not None:
            try:
                state = self.capture.part(failed=failed)
                if writer is not None:
                    writer.warm_up(state)
            except Exception as error:
                if not (ends_a_save(error) or isinstance(error, OSError)):  # the first save reports these
                    raise
            finally:
                self._ranks.owes_part = False  # no save follows

    def open_writer(self) -> SaveWriter | None:
        """Return the writer of background saves, made at the first call in an attempt; None if saves are made in this process."""
        if self.session.wants_background and self.writer is None and self.session.attempt is not None:
            self.writer = background_of(
                self._ranks, self.session.attempt, self.capture.components, self.options.keep, self.options.limits,
                self._in_flight.on_done, self._in_flight.on_sealed, self._trusted,
            )  # fmt: skip
            self.writer.bound = self.hooks.grace.bound
        return self.writer

    def write(
        self,
        state: Captured,
        step: int,
        reason: SaveReason,
        metrics: Mapping[str, Any],
        tag: str | None,
        micro_step: int | None,
    ) -> Save:
        """Make the save in this process, with the policy's retries. Raise a store's error only if the policy requires it.

        ``Fenced``, ``IncompatibleState`` and ``ConfigError`` are raised at once. A fault in code (``TypeError`` and similar) is reported
        as ``InternalError`` and not retried: see ``FailurePolicy.report``.
        """
        save, started = self._new_save(step, reason), perf_counter()
        save.mark_requested(started)
        numbers = numbers_of(metrics)
        # several ranks retry together, at a later step
        retries = 0 if self._ranks.several else self.options.policy.retries
        report: SaveReport | None = None
        for turn in range(1 + retries):
            try:
                report, save.error = self._commit(state, step, reason, numbers, micro_step), None
                break
            except (Fenced, IncompatibleState, ConfigError) as error:
                save.error = error
                raise
            except Exception as error:  # outermost level: reported and counted; the policy decides what follows
                self._abort(step, error)
                save.error = self._report(error, save.step, reason, turn)
                if not may_retry(save.error):
                    break
        if report is None:
            if self._ranks.several:
                self.progress.due = self.options.policy.again(reason, save.error, self.progress.failed_in_a_row)
            return self._count_failure(save)
        self._trusted.committed(report.id)
        save.mark_written(report, perf_counter() - started)
        before = self.progress.saved_step
        self.progress.save_started(step, micro_step)
        for hook in self.hooks.in_order:
            hook.on_start(save, numbers)
        timings = {"blocked": save.timings["blocked"]}
        self._is_durable(
            CommittedSave(save, report, numbers, timings, before, bool(self._in_flight), made_here=True, tag=tag)
        )
        return save

    def request(
        self,
        state: Captured,
        step: int,
        reason: SaveReason,
        metrics: Mapping[str, float],
        micro_step: int | None,
        written: Callable[[int], None] | None = None,
    ) -> SaveRequest:
        """Return the request for a save that this process makes itself. ``written`` is called with numbers of written bytes."""
        pace = WriteLimits(self.options.limits.threads, self.options.limits.bytes_per_second, written)
        info = self._info(state, step, reason, metrics, micro_step, self.progress.parent, None)
        return SaveRequest(info, tree=encode_tree(state.tree), items=state.items, urgent=reason.is_urgent, pace=pace)

    # -- outcomes

    def poll(self, *, quiet: bool = False) -> None:
        """Process the saves that ended since the last call. Unless ``quiet``, raise ``Fenced``, or the error that the policy raises."""
        for begun, done in self._in_flight.over():
            if done.error is None:
                before, waits = begun.before[0] if begun.before else None, bool(self._in_flight)
                self._is_durable(
                    CommittedSave(begun.save, done.report, begun.metrics, begun.save.timings, before, waits)
                )
                continue
            if self.progress.saved == begun.at:
                self.progress.saved = begun.before
            if isinstance(done.error, Fenced) and not quiet:
                raise done.error
            self._report(done.error, begun.save.step, begun.save.why, self.options.policy.retries)
            self.progress.due = (
                self.options.policy.again(begun.save.why, done.error, self.progress.failed_in_a_row)
                or self.progress.due
            )
            self._count_failure(begun.save, quiet=quiet)

    def drain(self, *, quiet: bool = False) -> None:
        """Wait until the agent has written every save, no longer than the deadline or the rest of the grace period."""
        if self.writer is not None:
            self.writer.barrier()
            self.writer.hurry()
        words = self.writer.agent_words if self.writer is not None else ""
        self._in_flight.wait(self.hooks.grace.bound(self.options.limits.deadline_s), words)
        self.poll(quiet=quiet)

    def close(self, polite: bool) -> None:
        """Wait for the started saves, and release the writer. ``polite``: no process restores from its memory."""
        if self.writer is not None:
            self.drain(quiet=True)
            self.writer.close(polite=polite and not self.hooks.grace.over)
            self.writer = None

    # -- inside

    def _is_postponed(
        self, writer: SaveWriter, step: int, reason: SaveReason, metrics: Mapping[str, Any], may_wait: bool
    ) -> bool:
        """Wait for a free slot. Return whether the save was postponed because there is none."""
        may_wait = may_wait or self._ranks.several  # the ranks have agreed that a slot is free
        wait_s = self.options.limits.deadline_s if may_wait or self.options.limits.when_busy == "queue" else 0.0
        if not wait_s and not writer.warmed:
            self.warm_up()  # allocating memory for a large state takes seconds; until then this save is postponed
        yields = None if self._ranks.several else self._in_flight.yields_to(step, reason)
        if writer.free_slot(wait_s, may_wait, yields) or may_wait:
            return False
        not_ready = writer.free_slots is None  # the first save: its memory is not allocated yet
        why = "the agent is not ready yet" if not_ready else "no snapshot slot is free"
        self.progress.due = postpone(reason, step, why)
        self.hooks.best.postponed(numbers_for(self.options.trigger, metrics), why)
        return True

    def _abort(self, step: int, error: Exception) -> None:
        """Abort a save that this rank cannot start, so that no other rank waits for its part."""
        if self.session.attempt is not None:
            abort_save(self._ranks, self.session.attempt.place, step, error)

    def _report(self, error: Exception, step: int, reason: SaveReason, turn: int) -> RelightError:
        return self.options.policy.report(error, step, turn, final=reason.is_final)

    def _begin(
        self,
        writer: SaveWriter,
        state: Captured,
        step: int,
        reason: SaveReason,
        metrics: Mapping[str, Any],
        tag: str | None,
        micro_step: int | None,
        started: float,
    ) -> Save | None:
        """Pass the save to the writer and return its handle. Return None if the writer cannot make it."""
        save, numbers = self._new_save(step, reason), numbers_of(metrics)

        def request(number: int, checkpoint_id: str, tree: bytes) -> Request:
            save.id = checkpoint_id
            self._in_flight.add(number, InflightSave(save, numbers, (step, micro_step), self.progress.saved, tag))
            return Request(number, checkpoint_id, info, tree, self._ranks.seat, self._in_flight.patient(reason))

        number: int | None = None
        try:
            parent = self._in_flight.newest_id or self.progress.parent
            info = self._info(state, step, reason, numbers, micro_step, parent, tag)
            number = writer.save(state, request, self._ranks.id_of(writer.place))
        except (Fenced, IncompatibleState, ConfigError):
            raise
        except Exception as error:  # the trainer's edge, as in write()
            self._abort(step, error)
            save.error = self._report(error, step, reason, self.options.policy.retries)
        finally:
            if number is None:
                self._in_flight.drop(save)
        if number is None:
            return None if save.error is None else self._count_failure(save)
        self._ranks.owes_part = False
        save._read_progress, save.bytes = (lambda: writer.progress_of(number)), writer.pack_bytes
        save.mark_requested(started, perf_counter())
        writer.began(save.timings["blocked"])
        self.progress.save_started(step, micro_step)
        for hook in self.hooks.in_order:
            hook.on_start(save, numbers)
        return save

    def _new_save(self, step: int, reason: SaveReason) -> Save:
        save = Save(step, reason)
        for hook in self.hooks.in_order:
            hook.on_request(save)
        return save

    def _is_durable(self, done: CommittedSave) -> None:
        """Do what follows every save that became a checkpoint, whichever process wrote it."""
        self.progress.failed_in_a_row, self.progress.parent, self.progress.durable = 0, done.report.id, done.save
        for hook in self.hooks.in_order:
            hook.on_durable(done)

    def _count_failure(self, save: Save, *, quiet: bool = False) -> Save:
        self.progress.save_failed()
        for hook in self.hooks.in_order:
            hook.on_failure(save)
        if not quiet:
            self._new_log.begin_if_removed(self, save)
            self.options.policy.stop_after(self.progress.failed_in_a_row, save.error, save.step)
        return save

    def _commit(
        self, state: Captured, step: int, reason: SaveReason, metrics: Mapping[str, float], micro_step: int | None
    ) -> SaveReport:
        attempt = self.begin_attempt()
        with progress_bar(f"saving step {step}", state.logical_bytes, leads=self.session.leads) as meter:
            request = self.request(state, step, reason, metrics, micro_step, meter)
            seat, id_ = self._ranks.seat, self._ranks.id_of(attempt.place)
            request = replace(request, id=id_, seat=seat, vouched=self._trusted.vouched(state))
            self._ranks.owes_part = False  # save() reports its error to the other ranks
            return attempt.save(request)

    def _info(
        self,
        state: Captured,
        step: int,
        reason: SaveReason,
        metrics: Mapping[str, float],
        micro_step: int | None,
        parent: str | None,
        tag: str | None,
    ) -> SaveInfo:
        """Return what the checkpoint records, as a child of the checkpoint ``parent``."""
        first = FIRST_STEP.field(self.options.first_step) if self.options.first_step else {}
        user = {**self.capture.user_fields(self.options.metadata, micro_step), **first}
        environment = self.session.environment(self.writer is not None)
        return SaveInfo(
            step, reason, metrics, user, environment, state.kinds, state.notes, [parent] if parent else [], tag
        )
