"""A follower: live tensors that are switched to the newest checkpoint of a run."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from relight.capture import plan_restore
from relight.capture.restore_plan import RestorePlan
from relight.catalog.find import choose_all
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
from relight.followers.chunk_map import ChunkMap
from relight.followers.live_memory import memory_by_name
from relight.followers.staged import StagedState
from relight.format.class_names import recorded_classes
from relight.format.collector import collector_paused
from relight.keys import StoreSecurity
from relight.layout import Sink
from relight.log import Checkpoint, Log, fold
from relight.log.identity import seconds_since_epoch
from relight.observe import emit
from relight.observe.object_view import Facts, ObjectView
from relight.reader.opened import Opened
from relight.restore.every_rank import ReadByEveryRank
from relight.restore.request import Rename, RestoreRequest
from relight.restore.result import Resumed
from relight.restore.transport import CheckpointView
from relight.settings.amounts import seconds_of
from relight.settings.file import take_environment
from relight.settings.short_traceback import short_traceback
from relight.store import open_bytes
from relight.store.urls import split_run
from relight.units import Duration


class Switched(NamedTuple):
    """A switch to another checkpoint. ``bytes``: read and verified for it. ``source``: where they came from. ``lag_s``: seconds from the
    commit to the switch, by the clocks of the two hosts. ``seconds``: the switch itself."""

    step: int
    id: str
    bytes: int
    source: str
    lag_s: float
    seconds: float


class _Ready(NamedTuple):
    base: int
    """The number of switches before which it was read: the staged bytes are the differences from the live checkpoint then."""
    checkpoint: Checkpoint
    staged: StagedState
    plan: RestorePlan
    stored: CheckpointView
    memory: dict[str, object]
    """By the stored name: the live memory that takes the tensor. Without those that are read into new memory."""
    bytes: int
    source: str


@short_traceback
def follow(
    path: str | os.PathLike[str],
    model: torch.nn.Module | Mapping[str, object],
    *,
    only: str | Sequence[str] | None = None,
    which: str = "latest",
    every: Duration | None = None,
    strict: bool = True,
    map: Rename = None,
    encrypt: str | Sequence[str] | None = None,
) -> Follower:
    """Keep live tensors at the newest committed checkpoint of a run, which another process trains. Return the follower.

    The follower changes the live tensors in ``poll()`` only. It reads the chunks that differ from those it has, verifies
    every byte, and keeps them in memory until the switch: the bytes of what changed. It writes nothing, and the trainer
    does not wait for it. Between two switches, nothing else may change these tensors: what is unchanged between two
    checkpoints is not read.

    Raise ``ConfigError`` for an argument that does not fit. A run that does not exist yet is waited for.

    Args:
        path: The store and the run, such as ``runs/demo``.
        model: A module, which is the run's component ``model``, or a dict of components by name.
        only: Patterns of names, such as ``"model/head.*"``. None: all of the given components.
        which: The checkpoint to follow: ``latest``, a tag, ``best`` or ``best:METRIC``.
        every: The time between two checks, in a thread that reads ahead: seconds, or ``"10s"``. None: ``poll()`` checks
            and reads itself.
        strict: Whether stored and live state must fit exactly, as for ``Checkpointer.restore``.
        map: New names for stored ones: a dict of patterns, or a function of the name.
        encrypt: Where the key of an encrypted store is, as for ``relight.load``.
    """
    components: Mapping[str, object] = {"model": model} if isinstance(model, torch.nn.Module) else model
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
    take_environment()
    url, run = split_run(path)
    store = open_bytes(url, guard=StoreSecurity.from_settings(encrypt))
    return Follower(RestoreRequest(store, run, components, which, patterns, strict, map), every_s)


class Follower(ObjectView):
    """Keeps live tensors at a run's newest checkpoint. ``relight.follow`` returns one. One thread of the caller uses it."""

    def __init__(self, request: RestoreRequest, every_s: float | None = None) -> None:
        self._request = request
        self._held: ChunkMap = {}
        """Chunks of the live checkpoint."""
        self._memory: dict[str, object] = {}
        """By the stored name: the live memory that has these chunks."""
        self._plan: RestorePlan | None = None
        """The plan of the last switch. It keeps that memory alive: another tensor cannot get its address."""
        self._switches = 0
        """Switches that were begun: what was staged before the last one does not count."""
        self._pid = os.getpid()
        self._ready: _Ready | None = None
        self._failed: set[str] = set()
        """Checkpoints that are damaged or do not fit. They are not tried again."""
        self._refused: tuple[str, RelightError] | None = None
        """A checkpoint that does not fit the live tensors, and why."""
        self._lock = threading.Lock()
        """Held while the live tensors are changed, or ``_ready`` is."""
        self._stopping = threading.Event()
        self.checkpoint: Checkpoint | None = None
        """The checkpoint that the live tensors have; None before the first switch."""
        self.newest: Checkpoint | None = None
        """The newest checkpoint that the follower has seen."""
        self.error: RelightError | None = None
        """What the last check failed with; None if it succeeded."""
        self.values: dict[str, object] = {}
        """Values of the live checkpoint that cannot be changed in place, by component."""
        self.bytes_read = 0
        """Bytes read and verified so far."""
        self._thread: threading.Thread | None = None
        if every_s is not None:
            self._thread = threading.Thread(target=_check_again, args=(weakref.ref(self), every_s), daemon=True)
            self._thread.name = "relight-follow"
            if not new_threads.start(self._thread):
                self._thread = None

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
        """
        if self._stopping.is_set():
            raise ConfigError(
                "this follower was closed", where=self._request.where, hint="relight.follow(…) makes another"
            )
        if self._pid != os.getpid():  # a forked child has neither the thread nor what it held
            self._pid, self._lock, self._thread, self._ready = os.getpid(), threading.Lock(), None, None
        if self._thread is None or not self._thread.is_alive():
            self._check()
        elif self._refused is not None:  # the thread may have met the tensors while the caller was changing them
            self._failed.discard(self._refused[0])
            self._refused = None
            self._check()
        with self._lock:
            if self._refused is not None:
                (_, error), self._refused = self._refused, None
                raise error
            ready, self._ready = self._ready, None
            if ready is None or ready.base != self._switches:
                return None
            places = memory_by_name(_planned(self._request, ready.stored), ready.stored.tensors)
            if all(places.get(name) == place for name, place in ready.memory.items()):
                return self._switch(ready)
            self._forget()  # the live tensors have other memory now, with unknown values
        return self.poll() if self._thread is None else None

    def wait(self, timeout_s: float | None = None) -> Switched | None:
        """Wait until a newer checkpoint is ready, and switch to it. Return None if that takes too long.

        Args:
            timeout_s: The seconds to wait. None: without limit.
        """
        ends = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            switched = self.poll()
            if switched is not None or (ends is not None and time.monotonic() >= ends):
                return switched
            time.sleep(0.05)

    def close(self) -> None:
        """Stop checking. The live tensors keep their values. Idempotent."""
        self._stopping.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
            self._thread = None

    def __enter__(self) -> Follower:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _switch(self, ready: _Ready) -> Switched:
        """Copy the staged bytes into the live tensors. After an error, the next check reads everything: the tensors may be a mixture."""
        began = time.perf_counter()
        self._forget()
        with torch.no_grad():
            ready.staged.deliver()
            ready.plan.finish()
        self._held, self._memory, self._plan = ready.staged.chunks, ready.memory, ready.plan
        self.checkpoint, self.values = ready.checkpoint, ready.plan.values
        committed_s = seconds_since_epoch(ready.checkpoint.time)
        lag_s = max(0.0, time.time() - committed_s) if committed_s is not None else 0.0
        switched = Switched(
            ready.checkpoint.step, ready.checkpoint.id, ready.bytes, ready.source, lag_s, time.perf_counter() - began
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
            lag_s=round(lag_s, 6),
            seconds=round(switched.seconds, 6),
        )
        return switched

    def _forget(self) -> None:
        """Record that the live tensors have no known checkpoint: the next one is read whole."""
        self._switches += 1
        self._held, self._memory, self.checkpoint = {}, {}, None

    def _check(self) -> None:
        """Read the log, and stage the checkpoint to follow if the live tensors have another one."""
        try:
            chosen = self._choose()
            if chosen is None:
                return
            ready = self._ready
            current = ready.checkpoint if ready is not None else self.checkpoint
            if current is None or current.id != chosen.id:
                self._stage(chosen)
            self.error = None
        except Exception as error:  # also of the caller's map=, or of torch: the thread continues
            self.error = _without_frames(known(error))

    def _choose(self) -> Checkpoint | None:
        """Return the checkpoint to have; None for none. The log is read whole: the run may have been removed and begun again."""
        try:
            history = fold(Log(self._request.store, self._request.run).read())
            tried = [chosen.checkpoint for chosen in choose_all(history, self._request.which)]
        except CheckpointNotFound:
            if self.newest is not None:
                raise  # it was there
            return None  # the run, its tag or its metric does not exist yet
        if self._request.which == "latest":
            tried = [each for each in tried if each.id not in history.rolled_back_ids and not each.body.suspect]
        self.newest = tried[0] if tried else None
        live = self.checkpoint
        keeps = live is not None and live.id not in history.rolled_back_ids
        if self.newest is not None and self.newest.id in self._failed and live is not None and keeps:
            tried = [each for each in tried if each.seq > live.seq]  # a damaged one does not lead to an older one
        return next((each for each in tried if each.id not in self._failed), None)

    def _stage(self, checkpoint: Checkpoint) -> None:
        """Read what differs from the live checkpoint. A switch may happen meanwhile: then the result is dropped."""
        with self._lock:
            base, chunks, memory = self._switches, self._held, self._memory
        transport = _StagingTransport(_naming(self._request, checkpoint.id), chunks, memory)
        try:
            with collector_paused():
                ready = transport.stage(base, checkpoint)
        except RelightError as error:
            if isinstance(error, (CorruptCheckpoint, UnsafeContent, IncompatibleState)):
                self._failed.add(checkpoint.id)
            if isinstance(error, IncompatibleState):
                self._refused = checkpoint.id, error  # the caller must know
            else:
                emit(
                    "follow.skipped",
                    f"checkpoint {checkpoint.id} (step {checkpoint.step}) is not followed: {error}",
                    id=checkpoint.id,
                    step=checkpoint.step,
                    kind=error.kind,
                )
            raise
        finally:
            transport.close(None)
        self.bytes_read += ready.bytes
        with self._lock:
            if self._switches == base:
                self._ready = ready

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


def _naming(request: RestoreRequest, checkpoint_id: str) -> RestoreRequest:
    """Return the request for that checkpoint alone."""
    return RestoreRequest(
        request.store, request.run, request.components, checkpoint_id, request.only, request.strict, request.rename
    )


def _planned(request: RestoreRequest, stored: CheckpointView) -> RestorePlan:
    """Return the plan of a restore into the live components."""
    return plan_restore(
        request.components, stored.tensors, stored.tree, only=request.only, strict=request.strict, rename=request.rename,
        where=stored.prefix, check=stored.check, classes=recorded_classes(stored.user),
    )  # fmt: skip


def _memory_of(plan: RestorePlan, request: RestoreRequest, stored: CheckpointView) -> dict[str, object]:
    """Return the live memory that ``plan`` changes, by the stored name. What a second plan has elsewhere is new memory of each plan."""
    again = memory_by_name(_planned(request, stored), stored.tensors)
    return {name: place for name, place in memory_by_name(plan, stored.tensors).items() if again.get(name) == place}


class _StagingTransport(ReadByEveryRank):
    """Reads a checkpoint as a restore does, into memory of its own."""

    def __init__(self, request: RestoreRequest, chunks: ChunkMap, memory: Mapping[str, object]) -> None:
        """``chunks``: what the live tensors have. ``memory``: where, by the stored name."""
        super().__init__(request, waits=False)
        self._chunks, self._memory = chunks, memory
        self._staged: StagedState | None = None

    def _targets(self, opened: Opened, by_part: list[Mapping[int, Sink]]) -> Sequence[Mapping[int, Sink]]:
        """See ``ReadByEveryRank``."""
        self._staged = StagedState(opened, by_part, self._chunks)
        return self._staged.sinks

    def stage(self, base: int, checkpoint: Checkpoint) -> _Ready:
        """Read the changed bytes of a checkpoint."""
        for copy in self.find(Resumed()).copies:
            stored = self.open(copy)
            plan = _planned(self._request, stored)
            memory = _memory_of(plan, self._request, stored)
            same = {name for name, place in memory.items() if self._memory.get(name) == place}
            self._chunks = {key: chunks for key, chunks in self._chunks.items() if key[0] in same}
            count, source = self.read(plan.sinks)
            assert self._staged is not None
            return _Ready(base, checkpoint, self._staged, plan, stored, memory, count, source)
        raise CheckpointNotFound(f"no checkpoint {checkpoint.id}", where=self._request.where)


def _check_again(follower: weakref.ref[Follower], every_s: float) -> None:
    """Check until the follower is closed, or is no longer referenced."""
    while True:
        current = follower()
        if current is None or current._stopping.is_set():
            return
        current._check()
        stopping = current._stopping
        del current
        if stopping.wait(every_s):
            return
