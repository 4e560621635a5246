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
    RelightError,
    StoreUnavailable,
    UnsafeContent,
    shown,
)
from relight.followers.chunk_map import ChunkMap
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
from relight.settings.amounts import seconds_of
from relight.settings.file import take_environment
from relight.settings.short_traceback import short_traceback
from relight.store import open_bytes
from relight.store.urls import split_run
from relight.units import Duration

_SKIPPED = (CorruptCheckpoint, CheckpointNotFound, StoreUnavailable, UnsafeContent)
"""Errors of one checkpoint: it is damaged, or retention has removed it. The next check tries a newer one."""


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
    base: Checkpoint | None
    """The checkpoint that the live tensors must have: the staged bytes are the differences from it."""
    checkpoint: Checkpoint
    staged: StagedState
    plan: RestorePlan
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
        [only] if isinstance(only, str) else [*only] if only is not None else [f"{name}/*" for name in components]
    )
    take_environment()
    url, run = split_run(path)
    store = open_bytes(url, guard=StoreSecurity.from_settings(encrypt))
    return Follower(RestoreRequest(store, run, components, which, patterns, strict, map), every_s)


class Follower(ObjectView):
    """Keeps live tensors at a run's newest checkpoint. ``relight.follow`` returns one. One thread of the caller uses it."""

    def __init__(self, request: RestoreRequest, every_s: float | None = None) -> None:
        self._request, self._every_s = request, every_s
        self._log = Log(request.store, request.run)
        self._held: ChunkMap = {}
        self._ready: _Ready | None = None
        self._failed: set[str] = set()
        """Checkpoints that could not be read. They are not tried again."""
        self._refused: RelightError | None = None
        self._lock = threading.Lock()
        """Held while the live tensors are changed, or ``_ready`` is."""
        self._stopping = threading.Event()
        self.checkpoint: Checkpoint | None = None
        """The checkpoint that the live tensors have; None before the first switch."""
        self.newest: Checkpoint | None = None
        """The newest checkpoint that the follower has seen."""
        self.error: RelightError | None = None
        """What the last check failed with; None if it succeeded."""
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
        if self._thread is None:
            self._check()
        with self._lock:
            if self._refused is not None:
                refused, self._refused = self._refused, None
                raise refused
            ready, self._ready = self._ready, None
            return self._switch(ready) if ready is not None else None

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
        began, self._held = time.perf_counter(), {}
        with torch.no_grad():
            ready.staged.deliver()
            ready.plan.finish()
        self._held, self.checkpoint = ready.staged.chunks, ready.checkpoint
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

    def _check(self) -> None:
        """Read the log, and stage the checkpoint to follow if the live tensors have another one."""
        try:
            chosen = self._choose()
            if chosen is None:
                return
            current = self._ready.checkpoint if self._ready is not None else self.checkpoint
            if current is None or current.id != chosen.id:
                self._stage(chosen)
            self.error = None
        except RelightError as error:
            self.error = error

    def _choose(self) -> Checkpoint | None:
        try:
            history = fold(self._log.read())
            tried = [chosen.checkpoint for chosen in choose_all(history, self._request.which)]
        except CheckpointNotFound:
            return None  # the run, its tag or its metric does not exist yet
        self.newest = tried[0] if tried else None
        return next((checkpoint for checkpoint in tried if checkpoint.id not in self._failed), None)

    def _stage(self, checkpoint: Checkpoint) -> None:
        """Read what differs from the live checkpoint. A switch may happen meanwhile: then the result is dropped."""
        request = _naming(self._request, checkpoint.id)
        with self._lock:
            base, chunks = self.checkpoint, self._held
        transport = _StagingTransport(request, chunks)
        try:
            with collector_paused():
                ready = transport.stage(base, checkpoint)
        except _SKIPPED as error:
            if not error.retryable:
                self._failed.add(checkpoint.id)
            emit(
                "follow.skipped",
                f"checkpoint {checkpoint.id} (step {checkpoint.step}) is not followed: {error}",
                id=checkpoint.id,
                step=checkpoint.step,
                kind=error.kind,
            )
            raise
        except RelightError as error:  # it does not fit: the caller must know
            self._failed.add(checkpoint.id)
            self._refused = error
            raise
        finally:
            transport.close(None)
        self.bytes_read += ready.bytes
        with self._lock:
            if self.checkpoint is base:
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


def _naming(request: RestoreRequest, checkpoint_id: str) -> RestoreRequest:
    """Return the request for that checkpoint alone."""
    return RestoreRequest(
        request.store, request.run, request.components, checkpoint_id, request.only, request.strict, request.rename
    )


class _StagingTransport(ReadByEveryRank):
    """Reads a checkpoint as a restore does, into memory of its own."""

    def __init__(self, request: RestoreRequest, held: ChunkMap) -> None:
        super().__init__(request, waits=False)
        self._held = held
        self._staged: StagedState | None = None

    def _targets(self, opened: Opened, by_part: list[Mapping[int, Sink]]) -> Sequence[Mapping[int, Sink]]:
        """See ``ReadByEveryRank``."""
        self._staged = StagedState(opened, by_part, self._held)
        return self._staged.sinks

    def stage(self, base: Checkpoint | None, checkpoint: Checkpoint) -> _Ready:
        """Read the changed bytes of a checkpoint."""
        result, request = Resumed(), self._request
        for copy in self.find(result).copies:
            stored = self.open(copy)
            plan = plan_restore(
                request.components, stored.tensors, stored.tree, only=request.only, strict=request.strict, rename=request.rename,
                where=stored.prefix, check=stored.check, classes=recorded_classes(stored.user),
            )  # fmt: skip
            count, source = self.read(plan.sinks)
            assert self._staged is not None
            return _Ready(base, checkpoint, self._staged, plan, count, source)
        raise CheckpointNotFound(f"no checkpoint {checkpoint.id}", where=request.where)


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
