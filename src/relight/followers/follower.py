"""A follower: live tensors that are switched to the newest checkpoint of a run."""

from __future__ import annotations

import atexit
import os
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from relight.capture.restore_plan import RestorePlan
from relight.capture.tensor_views import TensorViews
from relight.catalog.find import choose_all
from relight.catalog.tiers import open_further
from relight.comm import new_threads
from relight.errors import (
    CheckpointNotFound,
    ConfigError,
    CorruptCheckpoint,
    IncompatibleState,
    RelightError,
    UnsafeContent,
    known,
    shown,
)
from relight.followers.agreement import TEXT_CHARACTERS, FollowingRanks, RankReport, error_in
from relight.followers.chunk_map import ChunkMap
from relight.followers.followed_log import FollowedLog
from relight.followers.live_memory import tensors_by_name
from relight.followers.staging import StagedSwitch
from relight.format.collector import collector_paused
from relight.keys import StoreSecurity
from relight.log import Checkpoint, History, LogView, fold
from relight.log.identity import seconds_since_epoch
from relight.observe import emit, write_events
from relight.observe.object_view import Facts, ObjectView
from relight.policy import Tiers
from relight.ranks.collective_errors import raise_on_all_ranks
from relight.restore.find import Places, all_places
from relight.restore.request import Rename, RestoreRequest
from relight.settings.amounts import bytes_of, seconds_of
from relight.settings.file import take_environment
from relight.settings.short_traceback import short_traceback
from relight.store import open_bytes
from relight.store.urls import split_run
from relight.units import Duration, Size

REMOTE_PAUSE_S = 1.0
"""Seconds between two checks of ``wait`` where each is a request that may cost money."""
_LASTING = (CorruptCheckpoint, UnsafeContent, IncompatibleState)
"""Errors of a checkpoint that another attempt would have, too."""
_ALL: weakref.WeakSet[Follower] = weakref.WeakSet()
"""Followers of this process, to end their threads at its end: one within torch would abort the process."""
EXIT_S = 5.0
"""The longest wait for each of them then."""
_LASTING_KINDS = frozenset(error.kind for error in _LASTING)


class Switched(NamedTuple):
    """A switch to another checkpoint.

    ``bytes``: read and verified for it. ``source``: where they came from. ``seconds``: of ``poll()``, without what was read ahead or by
    its check. ``lag_s``: seconds from the commit to the switch, by the clocks of the two hosts; the log's times have whole seconds.
    ``changed``: the stored names of the tensors that got new bytes; the others have the values of the checkpoint ``before``. None: no
    checkpoint was known, and all were read.
    """

    step: int
    id: str
    bytes: int
    source: str
    lag_s: float
    seconds: float
    changed: tuple[str, ...]
    before: str | None


@short_traceback
def follow(
    path: str | os.PathLike[str] | Tiers,
    model: torch.nn.Module | Mapping[str, object],
    *,
    only: str | Sequence[str] | None = None,
    which: str = "latest",
    every: Duration | None = None,
    memory: Size | None = None,
    together: bool = True,
    strict: bool = True,
    map: Rename = None,
    encrypt: str | Sequence[str] | None = None,
) -> Follower:
    """Keep live tensors at the newest committed checkpoint of a run, which another process trains. Return the follower.

    The follower changes the live tensors in ``poll()`` only. It reads the chunks that differ from those it has, verifies
    every byte, and keeps them in memory until the switch: the bytes of what changed. It writes nothing, and the trainer
    does not wait for it. Between two switches, nothing else may change these tensors: what is unchanged between two
    checkpoints is not read.

    Where ``torch.distributed`` has several ranks, they all follow together: each calls this function and its methods alike,
    and every switch is to the same checkpoint on all ranks.

    Raise ``ConfigError`` for an argument that does not fit. A run that does not exist yet is waited for.

    Args:
        path: The store and the run, such as ``runs/demo``, or several stores, near to far (``relight.Tiers(…)``).
        model: A module, which is the run's component ``model``, or a dict of components by name.
        only: Patterns of names, such as ``"model/head.*"``. None: all of the given components.
        which: The checkpoint to follow: ``latest``, a tag, ``best`` or ``best:METRIC``.
        every: The time between two checks, in a thread that reads ahead: seconds, or ``"10s"``. None: ``poll()`` checks
            and reads itself.
        memory: The bytes that may wait for a switch, such as ``"1GB"``. Then ``poll()`` reads the changed bytes itself, in
            batches of that size, or of one tensor if that is larger. If a batch cannot be read, ``poll()`` raises, and
            the live tensors are a mixture until the next switch: ``follower.checkpoint`` is None. None: all changed bytes
            wait in memory, and a failed read changes nothing.
        together: False: this rank follows without the others.
        strict: Whether stored and live state must fit, as for ``Checkpointer.restore``. Live tensors may have another
            floating-point dtype: the elements are cast.
        map: New names for stored ones: a dict of patterns, or a function of the name.
        encrypt: Where the key of an encrypted store is, as for ``relight.load``.
    """
    components: Mapping[str, object] = {"model": model} if isinstance(model, (torch.nn.Module, TensorViews)) else model
    if not isinstance(components, Mapping) or not components:
        raise ConfigError(
            f"model is a module, or a dict of components by name, not {shown(model)}",
            where="follow(…)",
            hint='relight.follow("runs/demo", model)',
        )
    every_s = None if every is None else seconds_of(every, "follow(every=…)")
    patterns = (
        [only]
        if isinstance(only, str)
        else [*only]
        if only is not None
        else [each for name in components for each in (name, f"{name}/*")]
    )
    limit = None if memory is None else bytes_of(memory, "follow(memory=…)")
    take_environment()
    url, run = split_run(path.nearest.url if isinstance(path, Tiers) else path)
    security = StoreSecurity.from_settings(encrypt)
    store = open_bytes(url, guard=security)
    further = open_further(path if isinstance(path, Tiers) else None, security)
    ranks = FollowingRanks(together)
    request = RestoreRequest(store, run, components, which, patterns, strict, map, ranks=ranks.alone, further=further)
    write_events(store.url, run, rank=ranks.world.rank, role="follower", yields=True)
    return Follower(request, every_s, limit, ranks)


class Follower(ObjectView):
    """Keeps live tensors at a run's newest checkpoint. ``relight.follow`` returns one. One thread of the caller uses it."""

    def __init__(
        self, request: RestoreRequest, every_s: float | None, memory_bytes: int | None, ranks: FollowingRanks
    ) -> None:
        self._request, self._memory_bytes, self._ranks = request, memory_bytes, ranks
        self._held: ChunkMap = {}
        """Chunks of the live checkpoint."""
        self._memory: Mapping[str, object] = {}
        """By the stored name: the live memory that has these chunks."""
        self._plan: RestorePlan | None = None
        """The plan of the last switch. It keeps that memory alive: another tensor cannot get its address."""
        self._switches = 0
        """Switches that were begun: what was staged before the last one does not count."""
        self._pid = os.getpid()
        self._log = FollowedLog(request.store, request.run)
        self._places: Places | None = None
        """The logs at the last check. Of several ranks, only rank 0 has them."""
        self._target = ""
        """With several ranks: the id of the checkpoint that all ranks read now."""
        self._ready: StagedSwitch | None = None
        self._failed: dict[str, RelightError] = {}
        """Checkpoints that are damaged or do not fit, and why. They are not tried again."""
        self._failure: tuple[str, RelightError] | None = None
        """A checkpoint that this rank could not read since the last poll, and why."""
        self._notes: list[str] = []
        """What was left out at the last switch."""
        self._reported = ("", "")
        """The last failure that was reported: a checkpoint and a kind of error."""
        self._lock = threading.Lock()
        """Held while the live tensors are changed, or what ``poll`` reads is."""
        self._closed = False
        self._stopping, self._wake = threading.Event(), threading.Event()
        self.checkpoint: Checkpoint | None = None
        """The checkpoint that the live tensors have; None before the first switch."""
        self.newest: Checkpoint | None = None
        """The newest checkpoint that the follower has seen. Of several ranks, rank 0 sees it."""
        self._error: RelightError | None = None
        """What the last check failed with; None if it succeeded. Of several ranks: on any of them, until the next switch."""
        self.tensors: dict[str, torch.Tensor] = {}
        """Live tensors by their stored names, since the last switch. Without those that are sharded, or that an object's own code takes."""
        self.values: dict[str, object] = {}
        """Values of the live checkpoint that cannot be changed in place, by component."""
        self.bytes_read = 0
        """Bytes read and verified so far."""
        _ALL.add(self)
        self._thread: threading.Thread | None = None
        if every_s is not None:
            self._thread = threading.Thread(target=_check_again, args=(weakref.ref(self), every_s), daemon=True)
            self._thread.name = "relight-follow"
            if not new_threads.start(self._thread):
                self._thread = None

    @property
    def error(self) -> RelightError | None:
        """Why the live tensors do not have the newest checkpoint: what the last check failed with, or what is wrong with that checkpoint.

        None if nothing is wrong. Of several ranks: an error of any of them, until the next switch.
        """
        if self._error is not None or self.newest is None:
            return self._error
        return self._failed.get(self.newest.id)

    @property
    def lag_steps(self) -> int | None:
        """Steps from the live checkpoint to the newest one that was seen; None before the first switch."""
        if self.checkpoint is None or self.newest is None:
            return None
        return self.newest.body.steps_done - self.checkpoint.body.steps_done

    def poll(self) -> Switched | None:
        """Switch to the newest checkpoint that is ready. Return the switch; None if there is nothing new.

        Without ``every``, this call reads the log and the changed chunks itself. Raise ``IncompatibleState`` if a checkpoint does not fit
        the live tensors, which are unchanged then. What cannot be read is in ``error``, and is tried again or replaced by a newer one.
        With several ranks, all call this, and switch together or not at all.
        """
        if self._stopping.is_set():
            raise ConfigError(
                "this follower was closed", where=self._request.where, hint="relight.follow(…) makes another"
            )
        if self._pid != os.getpid():  # a forked child has neither the thread nor what it held, and is no rank
            self._pid, self._lock, self._thread, self._ready = os.getpid(), threading.Lock(), None, None
            self._ranks = FollowingRanks(together=False)
        if self._thread is None or not self._thread.is_alive():
            self._thread = None
            self._check()
        began = time.perf_counter()
        ready, reports, error = self._compare()
        if any(report.kind == IncompatibleState.kind for report in reports):
            if self._thread is not None:  # the thread may have met the tensors while the caller was changing them
                failed_id = next(report.failed for report in reports if report.kind == IncompatibleState.kind)
                self._failed.pop(failed_id, None)
                self._stage(failed_id, self._switches)
                ready, reports, error = self._compare()
            refusal = error_in(reports)
            if isinstance(refusal, IncompatibleState):
                raise error if isinstance(error, IncompatibleState) else refusal
        if ready is None or any(report.ready != reports[0].target for report in reports):
            return None
        try:
            with raise_on_all_ranks(self._ranks, f"switching to checkpoint {ready.checkpoint.id}"), self._lock:
                switched = self._switch(ready, began)
        except BaseException as failed:  # the tensors of this rank, or of another, may be a mixture
            with self._lock:
                if isinstance(failed, _LASTING):
                    self._failed[ready.checkpoint.id] = failed
                self._forget()
            raise
        if ready.plan.notes != self._notes:
            self._notes = ready.plan.notes
            emit(
                "follow.partial",
                "; ".join([f"follows run {self._request.run!r} in part", *self._notes]),
                run=self._request.run,
            )
        emit(
            "follow.switched",
            f"follows run {self._request.run!r} at step {switched.step}",
            run=self._request.run,
            store=self._request.store.url,
            step=switched.step,
            id=switched.id,
            bytes=switched.bytes,
            source=switched.source,
            lag_s=round(switched.lag_s, 6),
            seconds=round(switched.seconds, 6),
        )
        return switched

    def _compare(self) -> tuple[StagedSwitch | None, list[RankReport], RelightError | None]:
        """Compare what the ranks have read. Return what this rank can switch to, all reports, and this rank's error."""
        ready = self._usable()
        with self._lock:
            failure, self._failure = self._failure, None
            ready_id = ready.checkpoint.id if ready is not None else ""
            report = RankReport(self._target if self._ranks.several else ready_id, ready_id)
        if failure is not None:
            report = RankReport(report.target, ready_id, failure[0], failure[1].kind, str(failure[1])[:TEXT_CHARACTERS])
        reports = self._ranks.exchange(report)
        failed = {report.failed for report in reports if report.failed}
        if self._ranks.several:
            with self._lock:
                self._target = "" if reports[0].target in failed else reports[0].target
                if self._ready is not None and self._ready.checkpoint.id in failed:
                    self._drop()
            reported = error_in(reports)
            for report in reports:
                if report.kind in _LASTING_KINDS and reported is not None:
                    self._failed.setdefault(report.failed, reported)
            if failure is None:
                self._error = reported or self._error
            if not self._ranks.leads:
                self._wake.set()
        return (None if ready_id in failed else ready), reports, failure[1] if failure is not None else None

    def _usable(self) -> StagedSwitch | None:
        """Return what is staged, if the live tensors still have the same memory."""
        with self._lock:
            ready = self._ready
            if ready is None:
                return None
            try:
                if not ready.has_moved():
                    return ready
            except RelightError as error:
                self._failure = ready.checkpoint.id, error
            self._forget()  # the live tensors have other memory now, with unknown values
        if self._thread is not None or self._ranks.several or self._failure is not None:
            return None
        self._stage(ready.checkpoint.id, self._switches)
        return self._ready

    def wait(self, timeout_s: float | None = None) -> Switched | None:
        """Wait until a newer checkpoint is ready, and switch to it. Return None if that takes too long.

        Without ``every``, it reads the log again every 50 ms, and each second if a tier is an object store: one LIST request.

        Args:
            timeout_s: The seconds to wait. None: without limit.
        """
        ends = None if timeout_s is None else time.monotonic() + timeout_s
        stores = (self._request.store, *(store for _, store, _ in self._request.further))
        asks = self._thread is None and any(store.properties().remote for store in stores)
        pause_s = REMOTE_PAUSE_S if asks else 0.05
        while True:
            switched = self.poll()
            over = ends is not None and time.monotonic() >= ends
            if switched is not None or (self._ranks.agree(over) if self._ranks.several else over):
                return switched
            time.sleep(pause_s)

    def close(self) -> None:
        """Stop checking. The live tensors keep their values. Idempotent."""
        self._stopping.set()
        self._wake.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
            self._thread = None
        self._drop()
        if not self._closed:
            self._closed = True
            emit(
                "follow.ended",
                f"no longer follows run {self._request.run!r}",
                run=self._request.run,
                store=self._request.store.url,
            )

    def __enter__(self) -> Follower:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _switch(self, ready: StagedSwitch, began: float) -> Switched:
        """Change the live tensors. After an error, the next check reads everything: the tensors may be a mixture."""
        before = self.checkpoint
        ready_bytes = ready.bytes_read
        self._ready = None
        self._forget()
        try:
            ready.deliver()
        finally:
            ready.close(None)
            self.bytes_read += ready.bytes_read - ready_bytes
        self._held, self._memory, self._plan = ready.staged.chunks, ready.memory, ready.plan
        self.checkpoint, self.values, self._error = ready.checkpoint, ready.plan.values, None
        self.tensors = tensors_by_name(ready.plan, ready.stored.tensors)
        committed_s = seconds_since_epoch(ready.checkpoint.time)
        lag_s = max(0.0, time.time() - committed_s) if committed_s is not None else 0.0
        return Switched(
            ready.checkpoint.step,
            ready.checkpoint.id,
            ready.bytes_read,
            ready.source,
            lag_s,
            time.perf_counter() - began,
            ready.staged.changed,
            before.id if before is not None else None,
        )

    def _forget(self) -> None:
        """Record that the live tensors have no known checkpoint: the next one is read whole."""
        self._switches += 1
        self._held, self._memory, self._target, self.checkpoint = {}, {}, "", None
        self._drop()

    def _drop(self) -> None:
        """Drop what is staged."""
        ready, self._ready = self._ready, None
        if ready is not None:
            ready.close(None)

    def _check(self) -> None:
        """Read the log, and stage the checkpoint to follow if the live tensors have another one. Collective without a thread."""
        several, base, target = self._ranks.several, self._switches, self._target
        try:
            if self._ranks.leads and not target:
                target = self._choose()
                if several and self.checkpoint is not None and target == self.checkpoint.id:
                    target = ""
            if not several:
                self._error = None
        except Exception as error:  # also of torch: the thread continues
            self._error = _without_frames(known(error))
        if several and self._thread is None:
            target = self._ranks.share_target(target)
        with self._lock:
            if several and self._switches == base and (self._ranks.leads or self._thread is None):
                self._target = target
            ready = self._ready
            current = ready.checkpoint if ready is not None else self.checkpoint
        if target and self._switches == base and (current is None or current.id != target):
            self._stage(target, base)

    def _read_logs(self) -> Places:
        """Read the logs of all tiers. Of the nearest, only records that are new since the last check are read."""
        view: LogView | None = None
        near = History()
        try:
            view = self._log.read()
            near = fold(view)
        except CheckpointNotFound:
            if not self._request.further:
                raise
        return all_places(self._request, view, near)

    def _choose(self) -> str:
        """Return the id of the checkpoint to have; empty for none."""
        try:
            self._places = self._read_logs()
            history = self._places.merged.history
            tried = [chosen.checkpoint for chosen in choose_all(history, self._request.which)]
        except CheckpointNotFound:
            if self.newest is not None:
                raise  # it was there
            return ""  # the run, its tag or its metric does not exist yet
        if self._request.which == "latest":
            tried = [each for each in tried if each.id not in history.rolled_back_ids and not each.body.suspect]
        self.newest = tried[0] if tried else None
        live = self.checkpoint
        keeps = live is not None and live.id not in history.rolled_back_ids
        if self.newest is not None and self.newest.id in self._failed and live is not None and keeps:
            tried = [each for each in tried if each.seq > live.seq]  # a damaged one does not lead to an older one
        return next((each.id for each in tried if each.id not in self._failed), "")

    def _stage(self, checkpoint_id: str, base: int) -> None:
        """Read what differs from the live checkpoint after ``base`` switches. If another switch has begun, drop the result."""
        with self._lock:
            if self._switches != base:
                return
            chunks, memory = self._held, self._memory
        staging: StagedSwitch | None = None
        try:
            with collector_paused():
                request = replace(self._request, which=checkpoint_id)
                staging = StagedSwitch(request, chunks, memory, base, self._memory_bytes, self._places)
                staging.prepare()
        except Exception as error:  # also of the caller's map=, or of torch: the thread continues
            if staging is not None:
                staging.close(None)
            self._note_failure(checkpoint_id, _without_frames(known(error)))
            return
        if not self._ranks.several:  # another rank may still fail
            self._error = None
        with self._lock:
            self.bytes_read += staging.bytes_read
            if self._switches == base and not self._stopping.is_set():
                self._drop()
                self._ready = staging
                return
        staging.close(None)

    def _note_failure(self, checkpoint_id: str, error: RelightError) -> None:
        """Record that a checkpoint could not be read."""
        if isinstance(error, _LASTING):
            if checkpoint_id in self._failed:  # both the thread and the caller have tried it
                return
            self._failed[checkpoint_id] = error
        reported, self._reported = self._reported, (checkpoint_id, error.kind)
        if not isinstance(error, IncompatibleState) and reported != self._reported:  # the caller gets that one
            emit(
                "follow.skipped",
                f"checkpoint {checkpoint_id} of run {self._request.run!r} is not followed: {error}",
                run=self._request.run,
                store=self._request.store.url,
                id=checkpoint_id,
                kind=error.kind,
                why=error.what,
            )
        with self._lock:
            self._error, self._failure = error, (checkpoint_id, error)

    def _facts(self) -> Facts:
        live = f"step {self.checkpoint.step} ({self.checkpoint.id})" if self.checkpoint is not None else "none yet"
        return Facts(
            self._request.where,
            [
                ("checkpoint", live),
                ("lag", f"{self.lag_steps} steps" if self.lag_steps else None),
                ("error", self.error),
            ],
        )


def _without_frames(error: RelightError) -> RelightError:
    """Return the error without tracebacks, also of its causes: their frames would hold the staged bytes as long as the error is kept."""
    seen = set[int]()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        cause.__traceback__ = None
        cause = cause.__cause__ or cause.__context__
    return error


@atexit.register
def _end_threads() -> None:
    for follower in list(_ALL):
        if follower._thread is not None and follower._pid == os.getpid():
            follower._stopping.set()
            follower._wake.set()
            follower._thread.join(EXIT_S)


def _check_again(follower: weakref.ref[Follower], every_s: float) -> None:
    """Check until the follower is closed, or is no longer referenced."""
    while True:
        current = follower()
        if current is None or current._stopping.is_set():
            return
        current._check()
        wake = current._wake
        del current
        wake.wait(every_s)
        wake.clear()
