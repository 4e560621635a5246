"""Every block-level prefix: what reached a disk is logged, and disks are made of the log as a power cut could have left them.

``python -m relight.testing.block_log --count 5000``. A victim (``victims``) lives a run's life on an ext4 on a loop device on a file that
logs each write and each flush (``fuse_file``). Every acknowledgement is told with how many of them there had been. Then, for each place in
the log, disks are made: all that was written up to the last flush is on them, of what came behind it what a drive's cache may have
brought to the medium, which is anything: each of ``LEFT``. Each is mounted, which replays the journal, and looked at by
``acknowledged.check`` with what had been acknowledged at that place.

A point is named ``seed:session:place:kind``; the log of a session is not the same when it is recorded again, so ``--keep`` keeps the disk.

Where this ends: a flush is taken to cover what was *answered* before it was asked for and what was asked for before it, too, as one server
answers in order; loop devices know no FUA, so the kernel sends a flush behind such a write instead; a sector of 512 bytes is whole or old, and so is
what a file system takes for that: ext4's superblock, XFS's blocks.
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

SUPERBLOCK = range(1024, 2048)
"""Where ext4 has it."""
ENTRIES = 250
"""So many writes and flushes make a session, about."""
DISKS_PER_SESSION = 300
WAIT_S = 60.0
FSCK_EVERY = 50
VIOLATIONS_MAX = 20
LEFT = ("all", "none", "half", "one is missing", "one alone", "torn", "torn at random")
"""Of what was written since the last flush."""


@dataclass
class BlockReport:
    """Disks by what was left and on what, what was logged, and what was wrong."""

    seed: int
    disks: Counter[str] = field(default_factory=Counter)
    file_systems: Counter[str] = field(default_factory=Counter)
    sessions: int = 0
    writes: int = 0
    flushes: int = 0
    facts: Counter[str] = field(default_factory=Counter)
    checked: int = 0
    """Acknowledgements looked for, on all disks together."""
    places: int = 0
    fscks: int = 0
    violations: list[dict[str, object]] = field(default_factory=list)
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    """Of this process and its children: what it takes on a machine that has nothing else to do."""

    @property
    def total(self) -> int:
        """All disks."""
        return sum(self.disks.values())

    @property
    def ok(self) -> bool:
        """Whether all that was acknowledged was on every disk, and there was something to be lost."""
        return not self.violations and self.checked > 0

    def to_dict(self) -> dict[str, object]:
        """For ``--json``."""
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
    """What reached a disk, and what somebody was told meanwhile."""

    name: str
    kind: FileSystem
    empty: str
    """The image it began with."""
    log: list[DiskEntry]
    told: list[AcknowledgedFact]


def record(directory: str, name: str, victim: Victims, kinds: Sequence[FileSystem], entries: int = ENTRIES) -> DiskSession:
    """Let victims live on a logged disk until there are so many entries. Some are killed, and another goes on."""
    rng = random.Random(f"session {name}")
    kind = rng.choice(kinds[: 1 if rng.random() < 0.3 else None])
    empty, disk, log, counter = (f"{directory}/{one}" for one in ("empty", "disk", "log", "counter"))
    make_image(empty, kind)
    copy_image(empty, disk)
    where, served = f"{directory}/mounted", f"{directory}/served"
    told: list[AcknowledgedFact] = []
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
                told += victim.receive(time.monotonic() + 0.01)
            told += victim.end()
        unmount(where)
    died = [one.fact[1] for one in told if one.fact[0] == "died"]
    if died:
        raise RuntimeError(f"a victim stopped by itself: {died}")
    return DiskSession(name, kind, empty, read_log(log), told)


def _count(counted: mmap.mmap) -> int:
    return int.from_bytes(counted[:COUNTER_BYTES], "little")


class Point(NamedTuple):
    """One disk: what is left at a place in the log of what was written since the last flush."""

    place: int
    kind: str
    left: list[DiskEntry]


def leave(kind: str, pending: Sequence[DiskEntry], rng: random.Random, whole: int = 512) -> list[DiskEntry]:
    """What of ``pending``, all that was written since the last flush, the medium has. In order: of two writes to one place the later one
    stays if both are there, and which of them are there at all is what reordering amounts to."""
    chosen = rng.randrange(len(pending))
    if kind == "all":
        return list(pending)
    if kind == "half":
        return [entry for entry in pending if rng.random() < 0.5]
    if kind in ("one is missing", "one alone"):
        return [entry for at, entry in enumerate(pending) if (at == chosen) == (kind == "one alone")]
    if kind == "torn":
        units = list(cut_in_units(pending[chosen], whole))
        return [*pending[:chosen], *units[: rng.randrange(1, max(2, len(units)))]]
    if kind == "torn at random":
        share = rng.random()
        return [unit for entry in pending for unit in cut_in_units(entry, whole) if rng.random() < share]
    return []


def cut_in_units(entry: DiskEntry, whole: int) -> Iterator[DiskEntry]:
    """What is whole or old on the medium: sectors, and ext4's superblock, of two sectors and one sum. No ext4 survives a tear in that."""
    at, end = entry.offset, entry.offset + len(entry.data)
    while at < end:
        stop = SUPERBLOCK.stop if at == SUPERBLOCK.start else (at // whole + 1) * whole
        yield DiskEntry(at, entry.data[at - entry.offset : stop - entry.offset])
        at = stop


def without_flushes(session: DiskSession) -> DiskSession:
    """The same on a disk that lies: it answers flushes, and nothing need be on the medium for it. The negative control of reordering."""
    writes = list(itertools.accumulate((not entry.is_flush for entry in session.log), initial=0))
    told = [AcknowledgedFact(writes[one.at], one.fact) for one in session.told]
    return replace(session, log=[entry for entry in session.log if not entry.is_flush], told=told)


def find_points(session: DiskSession, rng: random.Random) -> list[Point]:
    """Disks that differ, or of which more was acknowledged, in the order of the log: every prefix as it was written, and what else ``LEFT``
    gives."""
    points: list[Point] = []
    pending: list[DiskEntry] = []
    seen: set[object] = set()
    told = [one.at for one in session.told]
    for place in range(len(session.log) + 1):
        known = bisect.bisect_right(told, place)
        if place and session.log[place - 1].is_flush:  # the disk of the place before
            pending, seen = [], {(known,)} if points and known == bisect.bisect_right(told, place - 1) else set()
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
    """``count`` of them in their order: every prefix, if there is room, and of the others what the dice say."""
    dealt = sorted(range(len(points)), key=lambda at: (points[at].kind != "all", rng.random()))
    return [points[at] for at in sorted(dealt[:count])]


def disks(session: DiskSession, points: Sequence[Point], directory: str) -> Iterator[tuple[Point, str]]:
    """Each point with its disk, which is the same file each time: look at one before asking for the next."""
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
    """Mount a disk and check it: what is wrong. Counted in ``report``."""
    told = [one.fact for one in session.told if one.at <= place]
    report.checked += count_acknowledged(told).total()
    fsck = report.total % FSCK_EVERY == 0
    try:
        mount(path, where, session.kind)
    except OSError as error:
        return [f"the file system does not mount: {error}"]
    try:
        wrong, _ = check(LocalStore(store_in(where)), told, place)
    finally:
        unmount(where)
    damage = find_damage(path, session.kind) if fsck else ""  # behind the journal's replay there is nothing to be repaired
    if damage:
        wrong.append(f"the file system is damaged: {damage}")
    report.fscks += fsck
    return wrong


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
    """Look at ``count`` disks of ``sessions`` recordings, or until ``stop`` were wrong. ``Unavailable`` if that cannot be done here.

    ``file_system``: what the names of those that are used begin with. ``mutation``: what the victims lack. ``lies``: flushes mean nothing.
    ``keep``: a directory for a copy of each disk of which something was missing. From here on, mounts that this process makes are its own.
    """
    private_mounts()
    kinds = [kind for kind in kinds_called(file_system) if kind.reorders]
    gc.freeze()
    report = BlockReport(seed)
    began, began_cpu = time.perf_counter(), sum(os.times()[:4])
    each = -(-count // (sessions or -(-count // DISKS_PER_SESSION)))
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
                points = choose(find_points(session, rng), min(each, count - report.total), rng)
                made = disks(session, points, directory)
                _check_all(session, made, directory, report, count=count, stop=stop, keep=keep, progress=progress)
    report.seconds, report.cpu_seconds = time.perf_counter() - began, sum(os.times()[:4]) - began_cpu
    return report


def _note(session: DiskSession, report: BlockReport) -> None:
    flushes = sum(entry.is_flush for entry in session.log)
    report.flushes += flushes
    report.writes += len(session.log) - flushes
    report.places += len(session.log) + 1
    report.facts += count_acknowledged(one.fact for one in session.told)


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
        wrong = check_disk(session, point.place, path, f"{directory}/mounted", report)
        if keep and not wrong:
            os.unlink(copy)
        report.disks[point.kind] += 1
        report.file_systems[session.kind.name] += 1
        if wrong:
            report.violations.append({"point": name, "file_system": session.kind.name, "wrong": wrong[:5]})
        if progress:
            progress(report, count)
        if len(report.violations) >= stop:
            return


def show(report: BlockReport) -> str:
    """The report, for people."""
    rate = report.total / max(report.seconds, 1e-9)
    told = ", ".join(f"{count:,} {kind}" for kind, count in sorted(report.facts.items()))
    head = (
        f"{report.total:,} disks, {len(report.violations)} violations, {report.seconds:.0f} s ({report.cpu_seconds:.0f} s of CPU), "
        f"{rate:.1f} a second"
    )
    writes = f"{report.places:,} places: {report.writes:,} writes, {report.flushes:,} flushes"
    lines = [
        head,
        f"  {report.sessions} sessions, {writes}; {report.fscks} checked by fsck",
        f"  acknowledged: {told}; looked for {report.checked:,} times",
    ]
    lines += [f"    {name:48} {count:>6,}" for table in (report.disks, report.file_systems) for name, count in sorted(table.items())]
    lines += [f"  {one['point']} ({one['file_system']}): {one['wrong']}" for one in report.violations[:10]]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command. 0 if nothing was lost, 1 if something was, 2 if nothing can be logged here."""
    parser = argparse.ArgumentParser(prog="python -m relight.testing.block_log", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--count", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sessions", type=int, help=f"recordings; one for each {DISKS_PER_SESSION} disks, if not said")
    parser.add_argument("--entries", type=int, default=ENTRIES, help="writes and flushes of each")
    parser.add_argument("--file-system", default="ext4", metavar="WORD", help="what the names of those that are used begin with: ext4, xfs")
    parser.add_argument("--stop", type=int, default=VIOLATIONS_MAX, help="behind so many violations")
    parser.add_argument("--mutation", choices=MUTATIONS, help="what the victims lack: something should be lost")
    parser.add_argument("--lies", action="store_true", help="the disk answers flushes and need not have written: something should be lost")
    parser.add_argument("--keep", metavar="DIRECTORY", help="for a copy of each disk of which something was lost")
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
        print(f"nothing was logged: {error}", file=sys.stderr)
        return 2
    if sys.stderr.isatty():
        print(file=sys.stderr)
    print(json.dumps(report.to_dict(), indent=1) if options.json else show(report))
    return 0 if report.ok else 1


if __name__ == "__main__":
    sys.exit(main())
