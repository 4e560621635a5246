"""Writing a plan's packs: one after the other, or as many at once as the store has drives to take them."""

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
from relight.store.base import lanes_of


def lanes_of_rank(store: ByteStore, world: int) -> int:
    """How many of the store's lanes are one rank's, of ``world`` that write at the same time."""
    return -(-lanes_of(store) // world)


def write_packs(store: ByteStore, prefix: str, plan: SavePlan, pace: WriteLimits | None) -> tuple[list[Pack], float]:
    """Write all packs below ``prefix``, durable but for their names; what the part says of them, and how long finishing took, in seconds.

    At once, where there are lanes: threads, bytes a second and memory (two slabs each, unless they lie in memory already) are those of
    one pack times their number, but for the pace, which is for all of them together. On an error the others stop, too; files may be left.
    """
    lanes = min(lanes_of(store), len(plan.packs))
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
        except BaseException:  # an interrupt of whoever waits stops them as well
            failed.set()
            raise
    if errors:
        raise errors[0]  # the others only say that they stopped for it
    written = [job.result() for job in jobs]
    return [pack for pack, _ in written], sum(fsync_s for _, fsync_s in written) / lanes


def _write(
    store: ByteStore, prefix: str, pack: PackPlan, pace: WriteLimits | None, failed: threading.Event | None = None
) -> tuple[Pack, float]:
    _go_on(failed, pack.file)
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
    """A writer that stops when another one has failed: what it writes would be for nothing."""

    def __init__(self, inner: Writer, failed: threading.Event, name: str) -> None:
        self._inner, self._failed, self._name, self.align = inner, failed, name, inner.align

    def write_at(self, offset: int, data: memoryview) -> None:
        _go_on(self._failed, self._name)
        self._inner.write_at(offset, data)

    def finish(self, size: int | None = None) -> None:
        self._inner.finish(size)

    def abort(self) -> None:
        self._inner.abort()


def _go_on(failed: threading.Event | None, name: str) -> None:
    if failed is not None and failed.is_set():
        raise SaveFailed("another pack of this checkpoint could not be written", where=name)


def _shared_by(lanes: int, pace: WriteLimits | None) -> WriteLimits:
    """The pace of each of several packs that are written at once."""
    pace = pace or WriteLimits()
    progress = pace.progress
    return replace(
        pace,
        threads=max(1, pace.threads // lanes),
        progress=None if progress is None else _in_turn(progress),
    )


def _in_turn(progress: Callable[[int], None]) -> Callable[[int], None]:
    lock = threading.Lock()

    def tell(length: int) -> None:
        with lock:
            progress(length)

    return tell
