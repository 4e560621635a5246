"""Restoring: the newest good checkpoint, into live objects, saying what was passed over."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import Any

from relight.capture import differences, plan_restore
from relight.catalog import candidates, check_pack, open_checkpoint, read_tensors
from relight.catalog.opened import Opened
from relight.checkpointer.near import Near
from relight.errors import CheckpointNotFound, CorruptCheckpoint, RelightError, StoreUnavailable, UnsafeContent
from relight.format.collector import collector_paused
from relight.layout import Sink
from relight.log import Checkpoint, Log, View, fold
from relight.observe import emit
from relight.store import ByteStore


@dataclass(slots=True)
class Resumed:
    """What a restore did. ``checkpoint`` is None if there was nothing to restore."""

    checkpoint: Checkpoint | None = None
    values: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    damaged: list[str] = field(default_factory=list)
    micro_step: int | None = None
    newest_seen: str | None = None
    looked: bool = False
    bytes_read: int = 0
    source: str = "store"
    seconds: float = 0.0


def resume(
    store: ByteStore,
    run: str,
    components: Mapping[str, object],
    which: str | int,
    *,
    only: Sequence[str] | None,
    strict: bool,
    rename: Mapping[str, str] | Callable[[str], str] | None,
) -> Resumed:
    """Restore ``which`` into ``components``. ``latest`` walks from newest to oldest until one verifies; others are that one or an error."""
    near = Near(store, run)
    try:
        return _walk(store, run, components, which, near, only=only, strict=strict, rename=rename)
    finally:
        near.close()


def _walk(
    store: ByteStore,
    run: str,
    components: Mapping[str, object],
    which: str | int,
    near: Near,
    *,
    only: Sequence[str] | None,
    strict: bool,
    rename: Mapping[str, str] | Callable[[str], str] | None,
) -> Resumed:
    started = perf_counter()
    result = Resumed(looked=True)
    try:
        view = Log(store, run).read()
    except CheckpointNotFound:
        if which != "latest":
            raise
        return result
    for fault in view.faults:
        emit("log.damaged", f"{fault.file}: {fault.reason}; the record counts for nothing", file=fault.file, reason=fault.reason)
    history = fold(view)
    result.newest_seen = history.live[-1].id if history.live else None
    if which == "latest" and not history.live:
        return result
    failed: list[RelightError] = []
    for checkpoint in candidates(history, which):
        try:
            _restore(store, view, checkpoint, components, result, near, only=only, strict=strict, rename=rename)
        except (CorruptCheckpoint, UnsafeContent, StoreUnavailable) as error:
            if which != "latest":
                raise
            failed.append(error)
            if not isinstance(error, StoreUnavailable):
                result.damaged.append(checkpoint.id)
            emit(
                "restore.skipped",
                f"checkpoint {checkpoint.id} (step {checkpoint.step}) is passed over: {error}",
                id=checkpoint.id,
                step=checkpoint.step,
                kind=error.kind,
            )
            continue
        result.seconds = perf_counter() - started
        return result
    raise CorruptCheckpoint(
        f"none of the {len(failed)} checkpoints of run {run!r} can be restored",
        where=store.url,
        details=[str(error).splitlines()[0] for error in failed],
        hint="the live state may hold a mixture: do not train on it; relight verify shows all damage",
    )


def _restore(
    store: ByteStore,
    view: View,
    checkpoint: Checkpoint,
    components: Mapping[str, object],
    result: Resumed,
    near: Near,
    *,
    only: Sequence[str] | None,
    strict: bool,
    rename: Mapping[str, str] | Callable[[str], str] | None,
) -> None:
    with collector_paused():
        opened = open_checkpoint(store, view.run, checkpoint, store_id=view.store_id, run_id=view.run_id)
        part, nearer = opened.parts[0], near.view(opened)
        plan = plan_restore(
            components,
            part.tensors,
            part.tree,
            only=only,
            strict=strict,
            rename=rename,
            where=opened.prefix,
            check=partial(_check_pack, opened, nearer),
        )
    result.bytes_read = _read(opened, nearer, plan.sinks, result)
    plan.finish()
    result.checkpoint = checkpoint
    result.values = plan.values
    result.environment = opened.root.environment
    result.notes = list(opened.root.exact) if only is None else []
    micro = opened.root.user.get("relight.micro_step")
    result.micro_step = micro if isinstance(micro, int) else None


def _check_pack(opened: Opened, nearer: Opened | None, index: int) -> None:
    if nearer is not None:
        with suppress(CorruptCheckpoint):  # what is in the store may still be whole
            check_pack(nearer, nearer.parts[0], index)
            return
    check_pack(opened, opened.parts[0], index)


def _read(opened: Opened, nearer: Opened | None, sinks: Mapping[int, Sink], result: Resumed) -> int:
    """From memory if it is there and what was committed, else from the store."""
    if nearer is not None:
        try:
            count = read_tensors(nearer, nearer.parts[0], sinks)
            result.source = "memory"
            return count
        except CorruptCheckpoint as error:
            emit("restore.skipped", f"the copy in memory is not used: {error}", id=opened.checkpoint.id, kind=error.kind)
    result.source = "store"
    return read_tensors(opened, opened.parts[0], sinks)


def say_restored(found: Resumed, start: int, environment: dict[str, Any]) -> None:
    """Tell what was restored, from where, and why it may not go on to the bit."""
    assert found.checkpoint is not None
    emit(
        "restore.done",
        f"restored step {found.checkpoint.step} ({found.checkpoint.id}) in {found.seconds:.2f} s"
        f"{' from memory' if found.source == 'memory' else ''}: going on with step {start}",
        step=found.checkpoint.step,
        id=found.checkpoint.id,
        bytes=found.bytes_read,
        seconds=round(found.seconds, 6),
        source=found.source,
    )
    different = differences(found.environment, environment)
    if different:
        emit("environment.differs", "this resume may not be bit-exact: " + "; ".join(different), differences=different)
    if found.notes:
        emit("environment.differs", "this resume may not be bit-exact: " + "; ".join(found.notes), differences=found.notes)
