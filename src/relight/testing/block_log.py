"""Log every write that reaches a disk, and build from the log the disks that a power cut could leave.

``python -m relight.testing.block_log --count 5000``. A victim process (``child_processes``) runs saves on ext4 on a
loop device. The device's file logs each write and each flush (``fuse_file``). Each acknowledgement is recorded with
the number of log entries at that time. Then disks are built for each place in the log. A disk has everything that was
written before the last flush. Of later writes it has what a drive's cache may have brought to the medium, which is
any subset: each kind of ``LEFT``. Each disk is mounted, which replays the journal. ``acknowledged.check`` then
expects what was acknowledged at that place.

A point is named ``seed:session:place:kind``. A session that is recorded again has another log, so ``--keep`` keeps
the disk.

Limits of the model:

- A flush covers every write that was requested before it, because one server answers requests in order.
- Loop devices do not support FUA: the kernel sends a flush after such a write instead.
- A sector of 512 bytes is either new or old. So is what a file system assumes to be atomic: ext4's superblock, XFS's
  blocks.
"""

from __future__ import annotations

import argparse
import bisect
import gc
import itertools
import json
import mmap
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from relight.store import LocalStore
from relight.testing.acknowledged import check, count_acknowledged, progress_of
from relight.testing.child_processes import COUNTER_BYTES, MUTATIONS, AcknowledgedFact, Victims, store_in, victims
from relight.testing.fuse_file import DiskEntry, logged_file, read_log
from relight.testing.images import (
    FileSystem,
    MountUnavailable,
    attached,
    copy_image,
    find_damage,
    kinds_called,
    make_image,
    mount,
    mount_any,
    private_mounts,
    scratch,
    unmount,
)
from relight.testing.scenario import prepared
from relight.units import duration_text

SUPERBLOCK = range(1024, 2048)
"""Byte range of the superblock in ext4."""
ENTRIES = 250
"""Writes and flushes of one session, approximately."""
DISKS_PER_SESSION = 300
WAIT_S = 60.0
FSCK_EVERY = 50
VIOLATIONS_MAX = 20
LEFT = ("all", "none", "half", "one is missing", "one alone", "torn", "torn at random")
"""What a disk keeps of the writes since the last flush."""


@dataclass
class BlockReport:
    """Disks by kind and by file system, sizes of the logs, and violations."""

    seed: int
    disks: Counter[str] = field(default_factory=Counter)
    file_systems: Counter[str] = field(default_factory=Counter)
    sessions: int = 0
    writes: int = 0
    flushes: int = 0
    facts: Counter[str] = field(default_factory=Counter)
    checked: int = 0
    """Acknowledgements checked, on all disks together."""
    places: int = 0
    fscks: int = 0
    violations: list[dict[str, object]] = field(default_factory=list)
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    """CPU time of this process and its children."""

    @property
    def total(self) -> int:
        """All disks."""
        return sum(self.disks.values())

    @property
    def ok(self) -> bool:
        """Return whether every disk had all that was acknowledged, and something was acknowledged at all."""
        return not self.violations and self.checked > 0

    def to_dict(self) -> dict[str, object]:
        """Return the report for ``--json``."""
        return {
            "ok": self.ok,
            "seed": self.seed,
            "disks": self.total,
            "by_what_was_left": dict(sorted(self.disks.items())),
            "by_file_system": dict(sorted(self.file_systems.items())),
            "sessions": self.sessions,
            "writes": self.writes,
            "flushes": self.flushes,
            "places": self.places,
            "checked_by_fsck": self.fscks,
            "acknowledged": dict(sorted(self.facts.items())),
            "looked_for": self.checked,
            "seconds": round(self.seconds, 1),
            "cpu_seconds": round(self.cpu_seconds, 1),
            "disks_a_second": round(self.total / self.seconds, 1) if self.seconds else 0.0,
            "violations": len(self.violations),
            "first": self.violations[:20],
        }


@dataclass
class DiskSession:
    """Writes that reached a disk, and what was acknowledged to its writer."""

    name: str
    kind: FileSystem
    empty: str
    """Path of the image that the session started from."""
    log: list[DiskEntry]
    facts: list[AcknowledgedFact]


def record(
    directory: str, name: str, victim: Victims, kinds: Sequence[FileSystem], entries: int = ENTRIES
) -> DiskSession:
    """Run victims on a logged disk until the log has about ``entries`` entries.

    Each victim is killed; the next one continues.
    """
    rng = random.Random(f"session {name}")
    kind = rng.choice(kinds[: 1 if rng.random() < 0.3 else None])
    empty, disk, log, counter = (f"{directory}/{file_name}" for file_name in ("empty", "disk", "log", "counter"))
    make_image(empty, kind)
    copy_image(empty, disk)
    where, served = f"{directory}/mounted", f"{directory}/served"
    facts: list[AcknowledgedFact] = []
    with logged_file(disk, served, log, counter):
        with attached(served) as device:
            mount_any(device, where, kind.type, kind.options)
        with open(counter, "rb") as file:
            counted = mmap.mmap(file.fileno(), COUNTER_BYTES, prot=mmap.PROT_READ)
        until = time.monotonic() + WAIT_S
        while _count(counted) < entries and time.monotonic() < until:
            victim.start(where, rng.randrange(1 << 32))
            enough = _count(counted) + rng.randrange(entries)
            while _count(counted) < min(enough, entries) and time.monotonic() < until:
                facts += victim.receive(time.monotonic() + 0.01)
            facts += victim.end()
        unmount(where)
    died = [acknowledged.fact[1] for acknowledged in facts if acknowledged.fact[0] == "died"]
    if died:
        raise RuntimeError(f"a victim stopped by itself: {died}")
    return DiskSession(name, kind, empty, read_log(log), facts)


def _count(counted: mmap.mmap) -> int:
    return int.from_bytes(counted[:COUNTER_BYTES], "little")


class Point(NamedTuple):
    """One disk: a place in the log, and the writes since the last flush that the disk keeps."""

    place: int
    kind: str
    left: list[DiskEntry]


def leave(kind: str, pending: Sequence[DiskEntry], rng: random.Random, whole: int = 512) -> list[DiskEntry]:
    """Return the writes of ``pending`` that reach the medium. ``pending``: all writes since the last flush.

    The order is kept: of two writes to one place the later one wins. Reordering amounts to dropping some of the writes.
    """
    chosen = rng.randrange(len(pending))
    if kind == "all":
        return list(pending)
    if kind == "half":
        return [entry for entry in pending if rng.random() < 0.5]
    if kind in ("one is missing", "one alone"):
        return [entry for index, entry in enumerate(pending) if (index == chosen) == (kind == "one alone")]
    if kind == "torn":
        units = list(cut_in_units(pending[chosen], whole))
        return [*pending[:chosen], *units[: rng.randrange(1, max(2, len(units)))]]
    if kind == "torn at random":
        share = rng.random()
        return [unit for entry in pending for unit in cut_in_units(entry, whole) if rng.random() < share]
    return []


def cut_in_units(entry: DiskEntry, whole: int) -> Iterator[DiskEntry]:
    """Cut a write into the units that are either new or old on the medium: sectors, and ext4's superblock.

    The superblock has two sectors and one checksum. No ext4 survives a superblock that is torn.
    """
    start, end = entry.offset, entry.offset + len(entry.data)
    while start < end:
        stop = SUPERBLOCK.stop if start == SUPERBLOCK.start else (start // whole + 1) * whole
        yield DiskEntry(start, entry.data[start - entry.offset : stop - entry.offset])
        start = stop


def without_flushes(session: DiskSession) -> DiskSession:
    """Return the session as a disk would have logged it that ignores flushes. The negative control of reordering."""
    writes = list(itertools.accumulate((not entry.is_flush for entry in session.log), initial=0))
    facts = [AcknowledgedFact(writes[acknowledged.at], acknowledged.fact) for acknowledged in session.facts]
    return replace(session, log=[entry for entry in session.log if not entry.is_flush], facts=facts)


def find_points(session: DiskSession, rng: random.Random) -> list[Point]:
    """Return the disks that differ in content or in what was acknowledged, in the order of the log.

    Every prefix of the log is one, and so is each other kind of ``LEFT``.
    """
    points: list[Point] = []
    pending: list[DiskEntry] = []
    seen: set[object] = set()
    counts = [acknowledged.at for acknowledged in session.facts]
    for place in range(len(session.log) + 1):
        known = bisect.bisect_right(counts, place)
        if place and session.log[place - 1].is_flush:  # the same disk as at the place before
            pending, seen = [], {(known,)} if points and known == bisect.bisect_right(counts, place - 1) else set()
        elif place:
            pending.append(session.log[place - 1])
        for kind in LEFT if pending else ("all",):
            left = leave(kind, pending, rng, session.kind.whole) if pending else []
            identity = (known, *((entry.offset, len(entry.data)) for entry in left))
            if identity not in seen:
                seen.add(identity)
                points.append(Point(place, kind, left))
    return points


def choose(points: Sequence[Point], count: int, rng: random.Random) -> list[Point]:
    """Return ``count`` of the points, in order. Prefixes come first, then a random selection of the others."""
    order = sorted(range(len(points)), key=lambda index: (points[index].kind != "all", rng.random()))
    return [points[index] for index in sorted(order[:count])]


def disks(session: DiskSession, points: Sequence[Point], directory: str) -> Iterator[tuple[Point, str]]:
    """Yield each point with the path of its disk. The path is reused: check one disk before taking the next."""
    durable, path = f"{directory}/durable", f"{directory}/image"
    copy_image(session.empty, durable)
    flushed = written = 0
    for point in points:
        for place in range(flushed, point.place):
            if session.log[place].is_flush:
                _put(durable, session.log[written:place])
                flushed, written = place + 1, place + 1
        copy_image(durable, path)
        _put(path, point.left)
        yield point, path


def _put(path: str, entries: Sequence[DiskEntry]) -> None:
    with open(path, "r+b") as file:
        for entry in entries:
            os.pwrite(file.fileno(), entry.data, entry.offset)


def check_disk(session: DiskSession, place: int, path: str, where: str, report: BlockReport) -> list[str]:
    """Mount a disk and check it. Return what is wrong. Adds to the counts of ``report``."""
    facts = [acknowledged.fact for acknowledged in session.facts if acknowledged.at <= place]
    report.checked += count_acknowledged(facts).total()
    fsck = report.total % FSCK_EVERY == 0
    try:
        mount(path, where, session.kind)
    except OSError as error:
        return [f"the file system does not mount: {error}"]
    try:
        problems, _ = check(LocalStore(store_in(where)), facts, place)
    finally:
        unmount(where)
    damage = find_damage(path, session.kind) if fsck else ""  # after the journal's replay there is nothing to repair
    if damage:
        problems.append(f"the file system is damaged: {damage}")
    report.fscks += fsck
    return problems


def run(
    count: int,
    seed: int = 0,
    *,
    file_system: str = "ext4",
    mutation: str | None = None,
    lies: bool = False,
    keep: str | None = None,
    stop: int = VIOLATIONS_MAX,
    sessions: int | None = None,
    entries: int = ENTRIES,
    progress: Callable[[BlockReport, int], None] | None = None,
) -> BlockReport:
    """Check ``count`` disks of ``sessions`` recordings. Stop at ``stop`` violations.

    ``file_system``: prefix of the names of the file systems to use. ``mutation``: what is removed from the victims'
    code. ``lies``: the disk ignores flushes. ``keep``: a directory for a copy of each disk that lost something. From
    here on, mounts of this process are private to it. Raise ``MountUnavailable`` if the process cannot mount.
    """
    private_mounts()
    kinds = [kind for kind in kinds_called(file_system) if kind.reorders]
    gc.freeze()
    report = BlockReport(seed)
    began, began_cpu = time.perf_counter(), sum(os.times()[:4])
    disks_each = -(-count // (sessions or -(-count // DISKS_PER_SESSION)))
    with prepared() as names, scratch("relight-blocks-") as directory:
        names.seed(f"checks {seed}")
        counter = f"{directory}/counter"
        with open(counter, "wb") as file:
            file.truncate(COUNTER_BYTES)
        with victims(mutation=mutation, counter=counter) as victim:
            while report.total < count and len(report.violations) < stop:
                session = record(directory, f"{seed}:{report.sessions}", victim, kinds, entries)
                report.sessions += 1
                _note(session, report)
                session = without_flushes(session) if lies else session
                rng = random.Random(f"disks {session.name}")
                points = choose(find_points(session, rng), min(disks_each, count - report.total), rng)
                built = disks(session, points, directory)
                _check_all(session, built, directory, report, count=count, stop=stop, keep=keep, progress=progress)
    report.seconds, report.cpu_seconds = time.perf_counter() - began, sum(os.times()[:4]) - began_cpu
    return report


def _note(session: DiskSession, report: BlockReport) -> None:
    flushes = sum(entry.is_flush for entry in session.log)
    report.flushes += flushes
    report.writes += len(session.log) - flushes
    report.places += len(session.log) + 1
    report.facts += count_acknowledged(acknowledged.fact for acknowledged in session.facts)


def _check_all(
    session: DiskSession,
    made: Iterable[tuple[Point, str]],
    directory: str,
    report: BlockReport,
    *,
    count: int,
    stop: int,
    keep: str | None,
    progress: Callable[[BlockReport, int], None] | None,
) -> None:
    for point, path in made:
        name = f"{session.name}:{point.place}:{point.kind}"
        copy = f"{keep}/{name}.img".replace(":", "-").replace(" ", "-")
        if keep:
            copy_image(path, copy)
        problems = check_disk(session, point.place, path, f"{directory}/mounted", report)
        if keep and not problems:
            os.unlink(copy)
        report.disks[point.kind] += 1
        report.file_systems[session.kind.name] += 1
        if problems:
            report.violations.append({"point": name, "file_system": session.kind.name, "wrong": problems[:5]})
        if progress:
            progress(report, count)
        if len(report.violations) >= stop:
            return


def show(report: BlockReport) -> str:
    """Return the report as text."""
    rate = report.total / max(report.seconds, 1e-9)
    acknowledged = ", ".join(f"{count:,} {kind}" for kind, count in sorted(report.facts.items()))
    head = (
        f"{report.total:,} disks, {len(report.violations)} violations, {duration_text(report.seconds)} ({duration_text(report.cpu_seconds)} of CPU), "
        f"{rate:.1f} a second"
    )
    writes = f"{report.places:,} places: {report.writes:,} writes, {report.flushes:,} flushes"
    lines = [
        head,
        f"  {report.sessions} sessions, {writes}; {report.fscks} checked by fsck",
        f"  acknowledged: {acknowledged}; checked {report.checked:,} times",
    ]
    lines += [
        f"    {name:48} {count:>6,}"
        for table in (report.disks, report.file_systems)
        for name, count in sorted(table.items())
    ]
    lines += [
        f"  {violation['point']} ({violation['file_system']}): {violation['wrong']}"
        for violation in report.violations[:10]
    ]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Return 0 if nothing was lost, 1 if something was, 2 if no disk can be logged here."""
    parser = argparse.ArgumentParser(
        prog="python -m relight.testing.block_log", description=(__doc__ or "").split("\n\n")[0]
    )
    parser.add_argument("--count", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sessions", type=int, help=f"recordings; one for each {DISKS_PER_SESSION} disks by default")
    parser.add_argument("--entries", type=int, default=ENTRIES, help="writes and flushes of each recording")
    parser.add_argument(
        "--file-system",
        default="ext4",
        metavar="WORD",
        help="use file systems with names that begin with this: ext4, xfs",
    )
    parser.add_argument("--stop", type=int, default=VIOLATIONS_MAX, help="stop after this many violations")
    parser.add_argument(
        "--mutation", choices=MUTATIONS, help="remove this from the victims' code: something should be lost"
    )
    parser.add_argument("--lies", action="store_true", help="the disk ignores flushes: something should be lost")
    parser.add_argument("--keep", metavar="DIRECTORY", help="keep a copy of each disk that lost something")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)

    try:
        report = run(
            options.count,
            options.seed,
            file_system=options.file_system,
            stop=options.stop,
            mutation=options.mutation,
            lies=options.lies,
            keep=options.keep,
            sessions=options.sessions,
            entries=options.entries,
            progress=progress_of("disks"),
        )
    except MountUnavailable as error:
        print(f"no disk was logged: {error}", file=sys.stderr)
        return 2
    if sys.stderr.isatty():
        print(file=sys.stderr)
    print(json.dumps(report.to_dict(), indent=1) if options.json else show(report))
    return 0 if report.ok else 1


if __name__ == "__main__":
    sys.exit(main())
