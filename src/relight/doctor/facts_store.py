"""Collect facts about a store: mount, free space, and a test of its operations with a file that is removed again."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import stat
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import NamedTuple

from relight.bench.floors import direct_works, random_bytes, timed, write
from relight.bench.place import PREFIX, make_place
from relight.catalog.run import list_runs
from relight.doctor.bounded import BoundedProbe
from relight.doctor.facts import DriveFacts, Mount, StoreFacts, StoreKey, Trouble
from relight.errors import CheckpointNotFound, RelightError
from relight.format.names import STORE_FILE
from relight.format.strict import SEALED_BYTES_MAX
from relight.log import read_store
from relight.log.write_probe import probe
from relight.store import ByteStore, LocalStore, MemoryStore
from relight.store.disk import Disk
from relight.store.mirrored import MirroredStore
from relight.store.probe import forget
from relight.store.striped import StripedStore
from relight.store.web import WebStore
from relight.store.wrapper import guard_of, unwrap
from relight.transfer.keys import age_days, status

TRIED = "relight-doctor"
"""Name of the test directory in a store without a run."""
_FSYNCS = 7
_ASKS = 3
_RATE_BYTES = 32 << 20
_SPARE = 16
"""The test of the write rate uses at most one part in this many of the free space."""
_OCTAL = re.compile(r"\\([0-7]{3})")


class _Tries(NamedTuple):
    """Result of testing a directory on a disk."""

    fsync_s: float
    direct: bool
    skew_s: float
    exclusive: bool
    write_bps: float | None


def collect_store(store: ByteStore, *, quick: bool = False) -> StoreFacts:
    """Collect facts about the store. ``quick`` skips its speed. Cost: some small files, and up to 32 MiB written and removed."""
    probes = BoundedProbe()
    if quick:
        probes.leave_out("rate")
    seen, inner = probes.at, unwrap(store)
    kind, root = _kind(inner), inner.url if isinstance(inner, LocalStore) else ""
    if root and os.path.lexists(root) and not os.path.isdir(root):
        return StoreFacts(url=store.url, kind=kind, is_directory=False)
    silent: Trouble | None = Trouble("store", "no answer to a listing", store.url)
    error = seen("listing", lambda: _trouble(lambda: next(iter(store.list("")), None)), silent)
    exists = error is None and (not root or os.path.isdir(root))
    nothing: tuple[str, ...] = ()
    # an anchor may name runs that the listing lacks
    runs = seen("runs", lambda: tuple(list_runs(store)), nothing) if error is None else nothing
    room = seen("room", lambda: os.statvfs(_nearest(root)), None) if root else None
    record = seen("relight.json", lambda: _trouble(lambda: read_store(store)), None) if exists else None
    wrong_key = record is not None and record.kind == "wrong_key"
    # A test write would create a striped store, so one without runs is not tested.
    tried = exists and not wrong_key and (kind in ("disk", "object", "memory") or (kind == "stripe" and bool(runs)))
    failure = seen("writing", lambda: _trouble(lambda: _probe(store, runs)), None, 30.0) if tried else None
    measured: _Tries | None = None
    if tried and failure is None and root:
        measured = seen("disk", lambda: _try_disk(root, quick), None, 30.0)
    exclusive = _exclusive(inner, probes) if tried and not root and failure is None else None
    return StoreFacts(
        url=store.url, kind=kind, there=exists, error=error, record=record, runs=runs,
        mount=seen("mount", lambda: mount_of(root), None) if root else None,
        free_bytes=seen("free bytes", inner.free_bytes, None) if error is None else None,
        size_bytes=room.f_blocks * room.f_frsize if room is not None else None,
        free_inodes=room.f_favail if room is not None and room.f_files else None,
        mode=seen("mode", lambda: stat.S_IMODE(os.stat(root).st_mode), None) if exists and root else None,
        probe=failure if tried else _unmade(root), probed=tried and "writing" not in probes.unseen,
        exclusive=measured.exclusive if measured is not None else exclusive,
        direct=measured.direct if measured is not None else None,
        fsync_s=measured.fsync_s if measured is not None else None,
        write_bps=measured.write_bps if measured is not None else None,
        skew_s=measured.skew_s if measured is not None else None,
        answer_s=seen("time of an answer", lambda: _answer(inner), None, 30.0) if exists else None,
        drives=seen("drives", lambda: _drives(inner), ()) if exists else (),
        encrypted=store.properties().encrypted if exists and not wrong_key else None,
        keys=seen("keys", lambda: _keys(store, inner), ()) if exists and store.properties().encrypted else (),
        leftovers=tuple(sorted(entry.name for entry in Path(root).glob(f"{PREFIX}*"))) if exists and root else (),
        unseen=probes.unseen,
    )  # fmt: skip


def mount_of(path: str) -> Mount | None:
    """Return the mount of ``path``, or of its nearest existing parent; None if it is not in ``/proc/self/mountinfo``."""
    where = os.path.realpath(_nearest(os.path.abspath(os.path.expanduser(path))))
    best: Mount | None = None
    for line in Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace").splitlines():
        head, _, tail = line.partition(" - ")
        fields, rest = head.split(" "), tail.split(" ")
        if len(fields) < 6 or len(rest) < 3:
            continue
        point = _OCTAL.sub(lambda match: chr(int(match[1], 8)), fields[4])
        covers = where == point or where.startswith(point.rstrip("/") + "/")
        # of several mounts at one point, the last is on top
        if covers and (best is None or len(point) >= len(best.point)):
            best = Mount(rest[0], rest[1], point, frozenset(fields[5].split(",")) | frozenset(rest[2].split(",")))
    return best


def _kind(inner: ByteStore) -> str:
    if isinstance(inner, LocalStore):
        return "disk"
    kinds = ((StripedStore, "stripe"), (WebStore, "web"), (MemoryStore, "memory"))
    return next((name for kind, name in kinds if isinstance(inner, kind)), "object")


def _drives(inner: ByteStore) -> tuple[DriveFacts, ...]:
    if not isinstance(inner, MirroredStore):
        return ()
    return tuple(DriveFacts(*drive) for drive in inner.statuses())


def _trouble(call: Callable[[], object]) -> Trouble | None:
    try:
        call()
    except RelightError as error:
        return Trouble.from_error(error)
    return None


def _nearest(path: str) -> str:
    while not os.path.lexists(path) and os.path.dirname(path) != path:
        path = os.path.dirname(path)
    return path


def _unmade(root: str) -> Trouble | None:
    """Return why a store that does not exist yet could not be created; None if permissions allow it."""
    if not root or os.path.isdir(root):
        return None
    above = _nearest(root)
    if os.path.isdir(above) and os.access(above, os.W_OK | os.X_OK):
        return None
    return Trouble("store", "it does not exist, and cannot be created: no write permission", above)


def _probe(store: ByteStore, runs: tuple[str, ...]) -> None:
    try:
        probe(store, runs[0] if runs else TRIED)
    finally:
        if not runs:
            with contextlib.suppress(RelightError):
                store.delete_dir(TRIED)


def _try_disk(root: str, quick: bool) -> _Tries:
    disk = Disk()
    with make_place(LocalStore(root)) as place:
        path = place.folder / "fsync"
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            took = []
            for number in range(_FSYNCS):
                os.pwrite(fd, secrets.token_bytes(4096), 4096 * number)
                took.append(timed(lambda: disk.fsync(fd)))
            skew = os.fstat(fd).st_mtime - time.time()
        finally:
            os.close(fd)
        size = min(_RATE_BYTES, disk.free_bytes(root) // _SPARE)
        rate: float | None = None
        if not quick and size >= 1 << 20:
            block = random_bytes(min(size, 4 << 20))
            rate = size / max(1e-9, timed(lambda: write(place.folder / "rate", block, size, direct=False)))
        inside = LocalStore(place.folder)
        exclusive = inside.put_once("once", b"1") and not inside.put_once("once", b"2")
        return _Tries(median(took), direct_works(place.folder), skew, exclusive, rate)


def _exclusive(inner: ByteStore, probes: BoundedProbe) -> bool | None:
    """Return whether a store that is not a directory honours exclusive creation. Tests it again, because servers are upgraded."""
    forget()
    return probes.at("exclusive creation", inner.verify_exclusive_create, None, 30.0)


def _answer(inner: ByteStore) -> float:
    """Return the median time of reading a small file, in seconds. The file need not exist."""

    def ask() -> None:
        with contextlib.suppress(CheckpointNotFound):
            inner.get(STORE_FILE, SEALED_BYTES_MAX)

    return median(timed(ask) for _ in range(_ASKS))


def _keys(store: ByteStore, inner: ByteStore) -> tuple[StoreKey, ...]:
    rows = status(inner, guard_of(store).keys)
    newest = max((row.generation for row in rows), default=0)
    return tuple(
        StoreKey(row.label or row.kek[:8], age_days(row.created), row.opens)
        for row in rows
        if not row.revoked and row.generation == newest
    )
