"""The Checkpointer: the three lines in a training loop."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from inspect import signature
from time import perf_counter
from types import TracebackType
from typing import Any, Literal

from relight.checkpointer import options
from relight.checkpointer.closed import Closed, RunEnd
from relight.checkpointer.failure_policy import FailurePolicy
from relight.checkpointer.file_defaults import NOT_GIVEN, CheckpointerOptions, NotGiven
from relight.checkpointer.hook_list import Hooks
from relight.checkpointer.leaving import leave
from relight.checkpointer.restorer import Restorer
from relight.checkpointer.run_progress import RunProgress
from relight.checkpointer.save_handle import Save
from relight.checkpointer.save_loop import SaveLoop
from relight.checkpointer.session import RunSession
from relight.checkpointer.signals import SignalHandlers, add_requester
from relight.checkpointer.state_capture import StateCapture
from relight.errors import ConfigError, RelightError
from relight.observe.object_view import Facts, ObjectView
from relight.policy import Compact, Keep, Limits, Peers, Tiers, Trigger
from relight.save_reason import END, SaveReason
from relight.settings.short_traceback import short_traceback, shortened


class Checkpointer(ObjectView):
    """Saves and restores the whole state of one training run.

    Keywords that are not options are *components*: modules, optimizers, schedulers, scalers, loaders, generators,
    tensors, arrays, containers, and all objects with ``state_dict`` and ``load_state_dict``. RNGs are always captured.
    A plain value under a keyword is a ``ConfigError``, because it is usually a misspelt option: it goes into
    ``state=``.

    If ``torch.distributed`` is initialised, all ranks save one checkpoint together, and every rank must make the same
    calls. A replicated tensor is written once, a sharded tensor (``DTensor``) in pieces. Any number of ranks can
    restore the checkpoint.

    ``ConfigError`` and ``IncompatibleState`` are always raised at once, ``Fenced`` always, as this process can never
    save again. ``on_failure`` handles a store's errors. ``InternalError``, a fault in Relight, is reported, never
    retried, and does not stop training. Not thread-safe: only the thread of the training loop may use it.

    Args:
        path: The store and the run: ``runs/demo`` is run ``demo`` in store ``runs``. A directory, a URL, or several
            stores, near to far (``relight.Tiers(…)``).
        run: The run's name, if ``path`` is the store alone.
        save: When to save: ``relight.every(…) | relight.best(…)``. Left out: ``relight.toml``'s rule, else
            ``relight.adaptive()``. None: only on ``save()``, on signals and at the end.
        keep: Which checkpoints to keep: ``relight.keep(…)``. Left out: ``relight.toml``'s rules, else all. None: all.
        on_failure: What to do when a save fails: ``"warn"`` continues training, ``"retry"`` tries it up to twice more,
            ``"raise"`` stops. Finer rules: ``relight.failure_policy(…)``.
        signals: Whether SIGTERM, SIGINT and similar signals save before they end the process. False installs no
            handlers.
        metadata: JSON values that are stored with each checkpoint: at most 1 MiB.
        state: Further components by name, also plain values, and components with the name of an option.
        background: Whether the agent, another process, writes while training continues. False: this process writes, and
            waits for it. None: ``relight.toml``'s value, else True.
        limits: Resources that saves may use: ``relight.Limits(…)``.
        per_rank: Names of components that differ between ranks. Loaders and generators always do.
        writer: ``"every rank"``: each rank writes its share. ``"rank 0"``: rank 0 gathers, writes and reads for all,
            and only it opens the store.
        peers: Redundancy in the memory of other nodes, from which a lost node's snapshot is rebuilt:
            ``relight.Peers(…)``.
        compact: Store data that saves share once, and compress where that pays: ``relight.Compact(…)``. True: with its
            defaults.
        encrypt: Where the key is with which all stored data are encrypted: ``"file:PATH"``, ``"kms:KEY"``. Several: the
            first encrypts, and each opens. None: ``RELIGHT_KEY``, else the data are not encrypted.
        sign: Where the key is that signs records: ``"ed25519:file:PATH"``. None: ``RELIGHT_SIGN``, else they are not
            signed.
        trust: Public keys that may sign; records of other signers are refused. None: ``RELIGHT_TRUST``, else all
            records count.
        anchor: Another store, which records the end of the log, so that a cut-off log is detected.
        fresh: Whether to start from scratch in a run that has checkpoints; all of them stay.
        takeover: What to do if another process still trains this run: ``"ask"``, ``"refuse"`` or ``"take"``. None:
            refuse, unless a launcher restarts the job.
        first_step: 0 if ``step()`` gets the number of the step that ended, as in ``range(N)``; 1 if it gets the count of
            finished steps, as frameworks have it: the checkpoint of step 500 is then the state after 500 steps.
        **components: The components by name: ``model=model, optimizer=optimizer``.
    """

    @short_traceback
    def __init__(
        self,
        path: str | os.PathLike[str] | Tiers,
        *,
        run: str | None = None,
        save: Trigger | NotGiven | None = NOT_GIVEN,
        keep: Keep | NotGiven | None = NOT_GIVEN,
        on_failure: Literal["warn", "retry", "raise"] | FailurePolicy = "warn",
        signals: bool = True,
        metadata: Mapping[str, Any] | None = None,
        state: Mapping[str, object] | None = None,
        background: bool | None = None,
        limits: Limits | None = None,
        per_rank: Sequence[str] = (),
        writer: Literal["every rank", "rank 0"] = "every rank",
        peers: Peers | None = None,
        compact: Compact | bool | None = None,
        encrypt: str | Sequence[str] | None = None,
        sign: str | None = None,
        trust: str | Sequence[str] | None = None,
        anchor: str | os.PathLike[str] | None = None,
        fresh: bool = False,
        takeover: Literal["ask", "refuse", "take"] | None = None,
        first_step: Literal[0, 1] = 0,
        **components: object,
    ) -> None:
        given = CheckpointerOptions(save, keep, limits, compact, peers, background, takeover)
        self._options = options.checked(
            path, run, given, on_failure=on_failure, metadata=metadata, signals=signals, fresh=fresh, writer=writer,
            first_step=first_step, security=(encrypt, sign, trust, anchor),
        )  # fmt: skip
        components = options.check_components(state, components, signature(Checkpointer).parameters)
        self._options = self._options._replace(per_rank=options.check_per_rank(per_rank, components))
        self._session = RunSession(self, self._options)
        self._capture = StateCapture(components, self._session.ranks, self._session.location)
        self._progress = RunProgress(self._session.run)
        self._closed: Closed | None = None
        self._hooks = Hooks(self, self._options, self._session, components, self._progress)
        self._signals = SignalHandlers(self._hooks.grace.on_signal, self._session.ranks.several) if signals else None
        self._saves = SaveLoop(self._options, self._session, self._capture, self._hooks, self._progress)
        self._restorer = Restorer(self._session, self._capture, self._hooks, self._progress, self._saves)

    # -- in the loop ---------------------------------------------------------------------------------------------------------

    @short_traceback
    def restore(
        self,
        which: str | int = "latest",
        *,
        only: list[str] | None = None,
        strict: bool = True,
        map: Mapping[str, str] | Callable[[str], str] | None = None,
    ) -> int:
        """Restore the state and return the first step that still has to run: ``first_step`` (0) for a run without a checkpoint.

        After an error the live state may be a mixture of two states: do not train on it.

        Args:
            which: The checkpoint. ``latest`` restores the newest one that verifies, and warns about each that it
                skipped. A step, an id or its first letters, a tag, ``best``, ``best:METRIC`` or ``best:METRIC:min``
                restores that checkpoint or raises.
            only: Patterns of what to restore, such as ``["model/*"]``; the rest of the state is unchanged. None:
                everything.
            strict: Whether stored and live state must fit exactly. False restores the tensors that fit, and reports the
                others.
            map: New names for stored ones: a dict of patterns, or a function of the name.
        """
        which = options.check_restore(which, only, strict, map)
        self._ensure_started()
        return self._restorer.restore(which, only, strict, map, self._signals)

    def step(
        self,
        step: int,
        *,
        metrics: Mapping[str, Any] | None = None,
        samples: Any = None,
        micro_step: int | None = None,
        **named_metrics: Any,
    ) -> Save | None:
        """Report the end of a step; save if a trigger or a signal requests it. Return the save, or None.

        Call it once for each optimizer step, on every rank. After SIGTERM or SIGINT, this call saves and then ends the
        process.

        Args:
            step: The number of the step that ended, from 0 on: an int, or an object that ``operator.index`` accepts. A
                tensor on an accelerator synchronises the device at every call.
            metrics: Metrics by name: numbers, or tensors of one element. Names of any form, such as ``{"val/loss":
                0.3}``. They are read (which synchronises the device) only if a save or a trigger needs them. Of
                several ranks, a checkpoint records those of rank 0.
            samples: The samples that the step trained on, which ``relight drill --prove`` compares. Not saved.
            micro_step: The number of the micro-batch that ended, within an unfinished step. A save then includes the
                gradients. None: the step is over.
            **named_metrics: The same as ``metrics``, for names that can be keywords: ``loss=loss``.
        """
        try:
            metrics = named_metrics if metrics is None else options.all_metrics(metrics, named_metrics)
            step, micro_step = options.check_step(step, micro_step, metrics)
            saves, signals, grace, ranks = self._saves, self._signals, self._hooks.grace, self._session.ranks
            self._ensure_started(micro_step, step, reports=True)
            self._session.check(self._capture, signals)
            saves.begin_attempt()
            self._session.takeover.notice()
            for hook in self._hooks.in_order:
                hook.on_step(step, metrics, samples)
            self._progress.report(step, micro_step, metrics)
            if saves.writer is not None:
                saves.writer.interval(perf_counter() - self._progress.returned_s)
            saves.poll()
            reason = saves.reason(step, metrics, micro_step, signals)
            ends = reason is not None and reason.is_ending_signal
            if ends and signals is not None and signals.ending:
                grace.closing(self._options.limits.deadline_s)
            save = None
            if reason is not None:
                with saves.saving():
                    if not ends or grace.allow(step, self._progress.in_flight.saves, ranks):
                        why, values, may_wait = (
                            add_requester(reason),
                            self._hooks.best.due(metrics),
                            reason.kind == "signal",
                        )
                        save = saves.save(step, why, values, None, micro_step, may_wait=may_wait)
            if signals is not None:
                signals.saved()
                at_end = ranks.lost or (ranks.acts_alone and self._progress.saved == (step, micro_step))
                if signals.ending and (at_end or ends):  # a signal since saves.reason() is handled at the next step
                    with saves.saving():
                        saves.drain()
                    self._finish(Closed.now(f"{signals.pending} ended the run", step), ends=True)
                    signals.end()
            if save is None and not saves.warmed:
                saves.warm_up()
            # after the warm-up, in which ranks learn which state is replicated
            self._capture.boundary.remember(step, over=micro_step is None)
            self._hooks.best.awaited.step(metrics, micro_step, lambda: self.save(step, metrics=metrics), ranks)
            self._progress.returned_s = perf_counter()
            if signals is not None:
                signals.hand_on(reason, ranks.acts_alone)
            return save
        except RelightError as error:  # not by the decorator: its call would cost time at every step
            raise shortened(error)  # noqa: B904 - RELIGHT_DEBUG=1 shows the lines of Relight

    @short_traceback
    def save(
        self,
        step: int,
        *,
        tag: str | None = None,
        block: bool = True,
        metrics: Mapping[str, Any] | None = None,
        reason: str = "asked",
        micro_step: int | None = None,
        priority: Literal["low", "normal", "high"] = "normal",
        **named_metrics: Any,
    ) -> Save:
        """Save now, as the state at the end of ``step``, and return the handle.

        Args:
            step: The number of the step that ended.
            tag: A name for the checkpoint. Retention keeps it as long as it has one.
            block: Whether to wait until the save is durable. False: ``Save.wait`` waits.
            metrics: Metrics by name, as for ``step()``.
            reason: Why it is saved, as the checkpoint records it.
            micro_step: The number of the micro-batch that ended, within an unfinished step.
            priority: ``"high"`` replaces a less urgent save that waits, and is not encoded. ``"low"`` gives way to the
                saves of triggers.
            **named_metrics: The same as ``metrics``, for names that can be keywords and resemble no option:
                ``loss=loss``.
        """
        options.refuse_save_slip(named_metrics)
        metrics = options.all_metrics(metrics, named_metrics)
        step, micro_step = options.check_step(step, micro_step, metrics, tag, reason)
        self._ensure_started(micro_step, step)
        self._session.check(self._capture, self._signals)
        self._saves.begin_attempt()
        self._progress.report(step, micro_step, {})
        self._saves.poll()
        with self._saves.saving(), self._progress.in_flight.priority(options.check_priority(priority)):
            save = self._saves.save(step, SaveReason("user", reason), metrics, tag, micro_step, may_wait=True)
            assert save is not None
            if block:
                self._saves.drain()
        return save

    @short_traceback
    def barrier(self) -> None:
        """Wait until a running snapshot no longer reads live tensors. Relight calls it before every ``optimizer.step``. Call it before any
        other change of weights or optimizer state, such as replaying a CUDA graph. Cheap when no snapshot is running."""
        if self._saves.writer is not None:
            self._saves.writer.barrier()

    @short_traceback
    def close(self, *, save: bool = True) -> RunEnd:
        """Save the last step if no save has it yet, and restore signal handlers and loaders. Idempotent.

        Waits up to ``Limits(deadline_s=)`` seconds for copies on further tiers. The result, later also in ``ended``,
        names missing ones.

        Args:
            save: Whether to save the last step. False leaves it unsaved.
        """
        self._close("close() was called", save)
        return self.ended

    def __enter__(self) -> Checkpointer:
        return self

    @short_traceback
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self._close("its with block ended")
        elif self._closed is None and not self._progress.calls.elsewhere:
            leave(self, error)

    # -- what it has ---------------------------------------------------------------------------------------------------------

    @property
    def ended(self) -> RunEnd:
        """How the run ended on this rank, after ``close()`` or the ``with`` block."""
        unsaved = self._unsaved or self._progress.in_flight.lacks(self._progress.at)
        return RunEnd(
            self._progress.step,
            dict(self._hooks.tiers.missing),
            self._closed is not None and self._closed.saves and unsaved,
        )

    @property
    def phase(self) -> str:
        """The current phase of training, one of ``relight.adaptive(phases=…)``; an empty name: none.

        Set it on all ranks.
        """
        return self._hooks.schedule.phase

    @phase.setter
    def phase(self, name: str) -> None:
        self._hooks.schedule.phase = name

    @short_traceback
    def describe_state(self) -> dict[str, Any]:
        """Return what a save would contain: ``found``, ``missed`` and ``plain`` (lists of sentences), ``bytes`` and ``tensors``.

        ``plain``: objects that are stored as plain values. Copies nothing.
        """
        state = self._capture.describe()
        missed = [*state.missed, *self._hooks.watch.sentences]
        facts = {"found": state.found, "missed": missed, "plain": state.plain}
        return {**facts, "bytes": state.logical_bytes, "tensors": len(state.items)}

    def __getitem__(self, name: str) -> Any:
        """Return a component; for a plain value, the value that was restored or last set."""
        return self._capture.components[name]

    @short_traceback
    def __setitem__(self, name: str, value: object) -> None:
        """Set a component that is a plain value."""
        if name not in self._capture.components:
            raise ConfigError(
                f"no component {name!r}", hint=f"give it to the Checkpointer first: state={{{name!r}: …}}"
            )
        self._capture.components[name] = value

    @property
    def store_urls(self) -> list[str]:
        """The URLs of the stores that this rank writes to, nearest first; last the anchor, which records the end of the
        log."""
        return self._session.store_urls

    @property
    def components(self) -> Mapping[str, object]:
        """The components by name."""
        return self._capture.components

    @property
    def run(self) -> str:
        """The run's name."""
        return self._session.run

    @property
    def micro_step(self) -> int | None:
        """The first micro-batch still to run of the step that ``restore`` returned, if the checkpoint was saved within
        a step."""
        return None if self._progress.resumed.micro_step is None else self._progress.resumed.micro_step + 1

    def should_skip(self, step: int) -> bool:
        """Return whether to skip the samples of ``step``, because the loss was not finite or jumped after them: draw the
        batch, and do not train on it.

        The answer is as of the last ``restore``.

        Args:
            step: The number of the step that comes next.
        """
        return self._progress.resumed.skips_step(step)

    @property
    def replica_mismatch(self) -> str:
        """Tensors with replicas that were equal at an earlier save and differed at the last one, as a sentence; empty if
        none."""
        return self._session.ranks.turned

    @property
    def micro_batch_split(self) -> int:
        """The number of parts into which to split each micro-batch: 1, or more after an accelerator ran out of memory
        under ``relight run`` with ``[supervise] split = true``."""
        return options.micro_batch_split()

    def _facts(self) -> Facts:
        ended = self._closed.why if self._closed is not None else ""
        return Facts(self._session.location, [*self._progress.facts, ("ended", ended)])

    # -- inside --------------------------------------------------------------------------------------------------------------

    def _ensure_started(self, micro_step: int | None = None, step: int | None = None, *, reports: bool = False) -> None:
        """Check the call's step at every call. Start event logging, environment capture and signal handlers at the first."""
        if self._closed is not None:
            self._closed.refuse(self._session.run)
        self._progress.calls.check(step, micro_step, self._progress.step, self._progress.micro_step, reports=reports)
        self._hooks.watch.report(step, micro_step, self._progress.at, reports)
        if micro_step is not None:
            self._session.ranks.check_micro_step()
        self._session.start(self._signals)

    @property
    def _unsaved(self) -> bool:
        """Whether no save has the last step of this attempt."""
        if self._session.attempt is None or self._progress.step is None:
            return False
        return self._progress.at != self._progress.saved

    def _close(self, why: str, save: bool = True) -> None:
        if self._closed is not None or self._progress.calls.elsewhere:
            return
        session, progress, grace, deadline_s = (
            self._session,
            self._progress,
            self._hooks.grace,
            self._options.limits.deadline_s,
        )
        grace.closing(deadline_s)
        session.ending(deadline_s)
        self._hooks.peers.ends()
        ends = False
        try:
            self._saves.drain()
            if save and self._unsaved and progress.step is not None:
                self._saves.save(progress.step, END, progress.metrics, None, progress.micro_step, may_wait=True)
                self._saves.drain()
            self._hooks.tiers.finish(grace.bound(deadline_s))
            is_idle = session.wants_background and self._saves.writer is None and self._options.trigger is not None
            if is_idle and progress.resumed.checkpoint is not None:
                # The previous trainer was killed after its last step, and its agent may still be running.
                session.dismiss_former_agent(grace.bound(deadline_s))
            is_saved = not self._unsaved and not progress.in_flight.lacks(progress.at)
            session.ended(progress.step if is_saved and not grace.over else None)
            ends = True
        finally:
            self._finish(Closed.now(why, progress.step, saves=save), ends=ends)
        if self._signals is not None:
            self._signals.end()  # if a signal came after the last step

    def _finish(self, closed: Closed, *, over: bool = True, ends: bool = False) -> None:
        """Release all resources. ``over``: no process restores from this memory, so free it. ``ends``: ``SignalHandlers.end()`` follows."""
        self._saves.close(polite=over)
        if self._signals is not None and not (ends and self._signals.ending):
            self._signals.restore()
        for hook in reversed(self._hooks.in_order):
            hook.on_close(over)
        self._session.takeover.release()
        self._closed = closed
