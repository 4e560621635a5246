"""Write a plan's packs: one after the other, or in parallel on a store with several drives."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import wait
from dataclasses import replace

from relight.comm.new_threads import ThreadPool
from relight.commit.pack_writer import WriteLimits, write_pack
from relight.commit.plan import PackPlan, SavePlan
from relight.errors import SaveFailed
from relight.format.manifest import Pack
from relight.store import ByteStore, Writer


def lanes_of_rank(store: ByteStore, world: int) -> int:
    """Return how many of the store's lanes each of ``world`` ranks uses."""
    return -(-store.properties().lanes // world)


def write_packs(store: ByteStore, prefix: str, plan: SavePlan, pace: WriteLimits | None) -> tuple[list[Pack], float]:
    """Write all packs below ``prefix``, durably except for the names. Return the packs and the seconds that finishing took.

    With several lanes, packs are written in parallel: memory is two slabs per pack, unless the packs are in memory already. The limits of
    ``pace`` apply to all packs together. If one pack fails, the others stop. Files may be left.
    """
    lanes = min(store.properties().lanes, len(plan.packs))
    if lanes < 2:
        written = [_write(store, prefix, pack, pace) for pack in plan.packs]
        return [pack for pack, _ in written], sum(fsync_s for _, fsync_s in written)
    pace, failed, errors = _shared_by(lanes, pace), threading.Event(), list[BaseException]()

    def write(pack: PackPlan) -> tuple[Pack, float]:
        try:
            return _write(store, prefix, pack, pace, failed)
        except BaseException as error:
            errors.append(error)
            failed.set()
            raise

    with ThreadPool(lanes, "relight-lane") as pool:
        jobs = [pool.submit(write, pack) for pack in plan.packs]
        try:
            wait(jobs)
        except BaseException:  # an interrupt of the waiting thread stops the writers too
            failed.set()
            raise
    if errors:
        raise errors[0]  # the later errors only report that the other packs were stopped
    written = [job.result() for job in jobs]
    return [pack for pack, _ in written], sum(fsync_s for _, fsync_s in written) / lanes


def _write(
    store: ByteStore, prefix: str, pack: PackPlan, pace: WriteLimits | None, failed: threading.Event | None = None
) -> tuple[Pack, float]:
    _raise_if_failed(failed, pack.file)
    writer = store.write(f"{prefix}/{pack.file}", pack.size)
    if pace is not None:
        writer = pace.spent.timed(writer)
    try:
        hashes = write_pack(writer if failed is None else _Stopping(writer, failed, pack.file), pack, pace=pace)
        before = time.perf_counter()
        writer.finish()
        fsync_s = time.perf_counter() - before
    except BaseException:
        writer.abort()
        raise
    return Pack(pack.file, pack.size, list(zip(pack.chunks, hashes, strict=True))), fsync_s


class _Stopping:
    """A writer that stops after another pack has failed."""

    def __init__(self, inner: Writer, failed: threading.Event, name: str) -> None:
        self._inner, self._failed, self._name, self.align = inner, failed, name, inner.align

    def write_at(self, offset: int, data: memoryview) -> None:
        _raise_if_failed(self._failed, self._name)
        self._inner.write_at(offset, data)

    def finish(self, size: int | None = None) -> None:
        self._inner.finish(size)

    def abort(self) -> None:
        self._inner.abort()


def _raise_if_failed(failed: threading.Event | None, name: str) -> None:
    if failed is not None and failed.is_set():
        raise SaveFailed("another pack of this checkpoint could not be written", where=name)


def _shared_by(lanes: int, pace: WriteLimits | None) -> WriteLimits:
    """Return the limits of each of several packs that are written in parallel."""
    pace = pace or WriteLimits()
    progress = pace.progress
    return replace(
        pace,
        threads=max(1, pace.threads // lanes),
        progress=None if progress is None else _in_turn(progress),
    )


def _in_turn(progress: Callable[[int], None]) -> Callable[[int], None]:
    lock = threading.Lock()

    def report(length: int) -> None:
        with lock:
            progress(length)

    return report
