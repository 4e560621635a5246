"""The crash engine: kill a run, or cut the power, at every call to its disk. Every acknowledgement must still hold.

``python -m relight.testing.crash --points 100000 --seed 0``. Two engines:

- *simulated*: one run on a ``SimulatedDisk``. At each call the disk is copied as a death or a power cut would leave
  it, and the copy is checked. Cheap, and the only engine that knows which bytes were not durable.
- *fork*: real processes on a real file system. Each process kills itself with SIGKILL at one call.

A point is named ``seed:engine:mode:at``; ``--replay`` runs it again. ``scenario.check`` checks what is left.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import ParamSpec, TypeVar

from relight.errors import RelightError
from relight.store import Disk, LocalStore
from relight.testing.disks import (
    CHANGING,
    CUTS,
    CountingDisk,
    CrashDisk,
    DiskCall,
    HookedDisk,
    InterruptNth,
    SimulatedDisk,
    torn_length,
)
from relight.testing.scenario import (
    ROOT,
    Fact,
    Names,
    check,
    check_lost_log,
    fresh_disk,
    life,
    perform,
    prepared,
    resume,
    short_folders,
)
from relight.units import duration_text

P = ParamSpec("P")
R = TypeVar("R")

TORN = ("half", "byte", "page")
ENGINES = ("simulated", "fork")
MIXED_SEEDS = 3
"""Power cuts of kind ``mixed`` at each call."""
INTERRUPTS, TAKEOVERS = 2, 8
"""One call in this number is interrupted, or sees another attempt take over.

Each such point needs a life of its own.
"""
KILL_CUTS = 2
"""Power cuts after each death, while the next process runs."""


@dataclass
class Violation:
    """A point at which an invariant did not hold."""

    point: str
    call: str
    wrong: list[str]


@dataclass
class CrashReport:
    """Points done, by engine and mode, and violations."""

    seed: int
    points: Counter[str] = field(default_factory=Counter)
    violations: list[Violation] = field(default_factory=list)
    lives: Counter[str] = field(default_factory=Counter)
    seconds: Counter[str] = field(default_factory=Counter)
    cpu_seconds: Counter[str] = field(default_factory=Counter)
    """CPU time of this process and its children."""

    @property
    def total(self) -> int:
        """Return the number of points."""
        return sum(self.points.values())

    @property
    def ok(self) -> bool:
        """Return whether every invariant held at every point, and at least one point was done."""
        return not self.violations and self.total > 0

    def to_dict(self) -> dict[str, object]:
        """Return the report for ``--json``."""
        return {
            "ok": self.ok,
            "seed": self.seed,
            "points": self.total,
            "by_mode": dict(sorted(self.points.items())),
            "lives": dict(self.lives),
            "seconds": {name: round(value, 1) for name, value in self.seconds.items()},
            "cpu_seconds": {name: round(value, 1) for name, value in self.cpu_seconds.items()},
            "violations": len(self.violations),
            "first": [vars(violation) for violation in self.violations[:20]],
        }


class CrashSampler:
    """Chooses points and collects their results. Does a random ``share`` of the points for which ``choose`` is true.

    The choice depends on the seed only. Ends after ``limit`` points or ``stop`` violations.
    """

    def __init__(
        self,
        report: CrashReport,
        *,
        share: float = 1.0,
        limit: int | None = None,
        stop: int | None = None,
        choose: Callable[[str], bool] | None = None,
        tick: Callable[[], None] | None = None,
    ) -> None:
        self.report, self.share, self.stop = report, share, stop
        self.left = limit
        self._choose = choose
        self._rng = random.Random(f"points {report.seed}")
        self._tick = tick

    @property
    def done(self) -> bool:
        """Return whether the limit of points or of violations is reached."""
        return (self.left is not None and self.left <= 0) or (
            self.stop is not None and len(self.report.violations) >= self.stop
        )

    def wants(self, point: str) -> bool:
        """Return whether to do that point."""
        if self.done or (self._choose is not None and not self._choose(point)):
            return False
        return self.share >= 1.0 or self._rng.random() < self.share

    def put(self, point: str, call: DiskCall, wrong: list[str]) -> None:
        """Record that a point was done, and what was wrong."""
        _, engine, mode, *_ = point.split(":")
        self.report.points[f"{engine} {mode}"] += 1
        if self.left is not None:
            self.left -= 1
        if wrong:
            self.report.violations.append(Violation(point, f"{call.name} {call.path}", wrong))
        if self._tick:
            self._tick()


class Observed(HookedDisk):
    """Calls ``see(number, when, call, disk)`` before and after each changing call, or each call if ``every``.

    If ``torn``, also calls it with a copy of the disk in the middle of each write.
    """

    def __init__(
        self,
        inner: SimulatedDisk,
        see: Callable[[int, str, DiskCall, SimulatedDisk], None],
        *,
        torn: bool = False,
        every: bool = False,
    ) -> None:
        super().__init__(inner)
        self.simulated = inner
        self.see = see
        self.torn, self.every = torn, every
        self.n = 0

    def around(self, call: DiskCall, go: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """See ``HookedDisk``."""
        if call.name not in CHANGING and not self.every:
            return go(*args, **kwargs)
        self.n += 1
        number = self.n
        self.see(number, "before", call, self.simulated)
        result = go(*args, **kwargs)
        self.see(number, "after", call, self.simulated)
        return result

    def pwrite(self, fd: int, data: memoryview, offset: int) -> int:
        """See ``Disk``."""
        if self.torn:
            call = self._on_fd("pwrite", fd)
            for mode in TORN:
                length = torn_length(mode, len(data))
                if length:
                    torn = self.simulated.clone()
                    self.simulated.write_part(fd, data[:length], offset, torn)
                    self.see(self.n + 1, mode, call, torn)
        return super().pwrite(fd, data, offset)


def simulate(seed: int, watch: CrashSampler, names: Names) -> None:
    """Do all simulated points of one life."""
    with short_folders(seed):
        _simulate(seed, watch, names)


def _simulate(seed: int, watch: CrashSampler, names: Names) -> None:
    facts: list[Fact] = []
    prefix = f"{seed}:simulated"
    changing = 0

    def done(point: str, call: DiskCall, disk: SimulatedDisk) -> None:
        with names.apart(point):
            watch.put(point, call, check(LocalStore(ROOT, disk=disk), facts, seed))

    def see(n: int, when: str, call: DiskCall, disk: SimulatedDisk) -> None:
        if watch.wants(point := f"{prefix}:{when}:{n}"):
            done(point, call, disk.clone())
        if when == "before":
            return
        for kind in CUTS if when == "after" else ("mixed",):
            for draw in range(MIXED_SEEDS if kind == "mixed" else 1):
                if watch.wants(point := f"{prefix}:cut-{kind}:{n}.{when}.{draw}"):
                    done(point, call, disk.power_cut(_number(point), kind))
        if when == "after" and watch.wants(point := f"{prefix}:lost-log:{n}"):
            with names.apart(point):
                watch.put(point, call, check_lost_log(LocalStore(ROOT, disk=disk.clone()), facts))
        for draw in range(KILL_CUTS):
            if watch.wants(point := f"{prefix}:kill-then-cut:{n}.{when}.{draw}"):
                with names.apart(point):
                    watch.put(point, call, _kill_then_cut(disk.clone(), facts, seed, point))

    names.seed(seed)
    counted = CountingDisk(Observed(fresh_disk(), see, torn=True))
    perform(life(LocalStore(ROOT, disk=counted), seed), facts)
    for n, call in enumerate(counted.calls, start=1):
        _taken_over(seed, n, watch, names, prefix)
        if call.name in CHANGING:
            changing += 1
            _interrupted(seed, changing, watch, names, prefix)
    watch.report.lives["simulated"] += 1


def _number(point: str) -> int:
    """Return a seed computed from a point's name. It is equal in every process."""
    return zlib.crc32(point.encode())


def _kill_then_cut(disk: SimulatedDisk, acknowledged: Sequence[Fact], seed: int, point: str) -> list[str]:
    """Resume the run of a killed process, and cut the power during that. Return what is wrong."""
    rng = random.Random(point)
    facts = list(acknowledged)
    cuts: list[tuple[SimulatedDisk, list[Fact]]] = []
    cut_at = rng.randrange(1, 90)  # a resume makes about 90 calls

    def see(n: int, when: str, call: DiskCall, then: SimulatedDisk) -> None:
        if when == "after" and n == cut_at:
            cuts.append((then.power_cut(rng.randrange(1 << 32), rng.choice(CUTS)), list(facts)))

    perform(resume(LocalStore(ROOT, disk=Observed(disk, see)), seed), facts)
    if not cuts:  # the resume ended earlier: cut the power after it
        cuts.append((disk.power_cut(rng.randrange(1 << 32), rng.choice(CUTS)), facts))
    ((after, facts_then),) = cuts
    return check(LocalStore(ROOT, disk=after), facts_then, seed)


def _interrupted(seed: int, n: int, watch: CrashSampler, names: Names, prefix: str) -> None:
    """Interrupt a life by an exception at its ``n``-th changing call, so that its own cleanup runs."""
    for mode in ("interrupt-before", "interrupt-after"):
        point = f"{prefix}:{mode}:{n}"
        if _number(point) % INTERRUPTS == 0 and watch.wants(point):
            facts: list[Fact] = []
            broken = InterruptNth(n, after=mode == "interrupt-after", inner=fresh_disk())
            names.seed(seed)
            with contextlib.suppress(KeyboardInterrupt):
                perform(life(LocalStore(ROOT, disk=broken), seed), facts)
            with names.apart(point):
                watch.put(point, broken.calls[-1], check(LocalStore(ROOT, disk=broken.inner), facts, seed))


def _taken_over(seed: int, n: int, watch: CrashSampler, names: Names, prefix: str) -> None:
    """Let another attempt take over at the ``n``-th call of a life. Reads count, too."""
    for mode in ("takeover", "takeover-then-cut"):
        point = f"{prefix}:{mode}:{n}"
        if _number(point) % TAKEOVERS == 0 and watch.wants(point):
            names.seed(seed)
            call, problems = _takeover(seed, n, names, point, cut=mode == "takeover-then-cut")
            watch.put(point, call, problems)


def _takeover(seed: int, n: int, names: Names, point: str, *, cut: bool) -> tuple[DiskCall, list[str]]:
    """Let another process take over the run at call ``n``, and die or finish.

    The first process continues until an error stops it.
    """
    rng = random.Random(point)
    disk = fresh_disk()
    facts: list[Fact] = []
    calls: list[DiskCall] = []
    dies_at = rng.randrange(1, 90) if rng.random() < 0.5 else 0
    cut_at = n + rng.randrange(1, 200) if cut else 0
    cuts: list[tuple[SimulatedDisk, list[Fact]]] = []

    def die() -> None:
        raise _Dead

    def see(number: int, when: str, call: DiskCall, now: SimulatedDisk) -> None:
        if when == "before" and number == n:
            calls.append(call)
            with names.apart(f"{point} other"), contextlib.suppress(_Dead):
                other_disk = CrashDisk(dies_at, "before", die, inner=disk)
                perform(resume(LocalStore(ROOT, disk=other_disk), seed + 1), facts)
        elif when == "after" and number == cut_at:
            cuts.append((now.power_cut(rng.randrange(1 << 32), rng.choice(CUTS)), list(facts)))

    with contextlib.suppress(RelightError):  # the error that stops it depends on the call
        perform(life(LocalStore(ROOT, disk=Observed(disk, see, every=True)), seed), facts)
    if cut:
        disk_left, facts_then = cuts[0] if cuts else (disk.power_cut(rng.randrange(1 << 32), rng.choice(CUTS)), facts)
    else:
        disk_left, facts_then = disk, facts
    with names.apart(point):
        return calls[0], check(LocalStore(ROOT, disk=disk_left), facts_then, seed)


class _Dead(BaseException):
    """Death of a process that is simulated within this one."""


def fork(seed: int, watch: CrashSampler, names: Names, directory: str) -> None:
    """Do all points of one life at which a real process kills itself, on a real file system in ``directory``.

    The life runs in this process, one fact at a time. Before each fact, children are forked. Each child continues on
    a copy of the files and dies at one call before the fact. The copies are hard links: the product never changes a
    file that has its final name.
    """
    original, scratch = f"{directory}/life", f"{directory}/point"
    os.mkdir(original)
    moved = _Elsewhere(original)
    crash = CrashDisk(0, "", lambda: None, inner=moved)
    facts = life(LocalStore(f"{original}/above/store", disk=crash), seed)
    acknowledged: list[Fact] = []
    names.seed(seed)
    stretch = 0
    while not watch.done:
        calls = _rehearse(crash, moved, original, scratch, facts)
        for k, (call, length) in enumerate(calls, start=1):
            for mode in CrashDisk.MODES:
                if mode in TORN and not (call.name == "pwrite" and torn_length(mode, length)):
                    continue
                if watch.wants(point := f"{seed}:fork:{mode}:{stretch}.{k}"):
                    _copy_links(original, scratch)
                    _die_at(crash, moved, scratch, k, mode, facts)
                    with names.apart(point):
                        watch.put(point, call, check(LocalStore(f"{scratch}/above/store"), acknowledged, seed))
                    shutil.rmtree(scratch)
        try:
            acknowledged.append(next(facts))
        except StopIteration:
            break
        stretch += 1
    facts.close()
    shutil.rmtree(original)
    watch.report.lives["fork"] += 1


class _Elsewhere(Disk):
    """Real calls, with ``root`` replaced by ``now`` in their paths."""

    def __init__(self, root: str) -> None:
        self.root, self.now = root, root

    def _at(self, path: str) -> str:
        return self.now + path.removeprefix(self.root) if path.startswith(self.root) else path

    def open_new(self, path: str, *, direct: bool = False) -> int:
        return super().open_new(self._at(path), direct=direct)

    def open_read(self, path: str) -> int:
        return super().open_read(self._at(path))

    def open_dir(self, path: str) -> int:
        return super().open_dir(self._at(path))

    def link(self, source: str, target: str) -> None:
        super().link(self._at(source), self._at(target))

    def unlink(self, path: str) -> None:
        super().unlink(self._at(path))

    def mkdir(self, path: str) -> None:
        super().mkdir(self._at(path))

    def rmdir(self, path: str) -> None:
        super().rmdir(self._at(path))

    def lstat(self, path: str) -> os.stat_result:
        return super().lstat(self._at(path))

    def scan(self, path: str) -> Iterator[tuple[str, bool]]:
        return super().scan(self._at(path))


def _copy_links(source: str, target: str) -> None:
    os.mkdir(target)
    with os.scandir(source) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                _copy_links(entry.path, f"{target}/{entry.name}")
            else:
                os.link(entry.path, f"{target}/{entry.name}")


def _rehearse(
    crash: CrashDisk, moved: _Elsewhere, here: str, copy: str, facts: Iterator[Fact]
) -> list[tuple[DiskCall, int]]:
    """Return the changing calls up to the next fact, with the length of each write.

    A forked child makes them and reports.
    """
    _copy_links(here, copy)
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        calls: list[tuple[str, str, int]] = []

        def note(call: DiskCall, length: int) -> None:
            calls.append((call.name, call.path, length))

        try:
            moved.now, crash.note = copy, note
            next(facts, None)
            data = json.dumps(calls).encode()
            while data:
                data = data[os.write(write_end, data) :]
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end, "rb") as pipe:
        rehearsed = json.loads(pipe.read() or b"null")
    os.waitpid(child, 0)
    shutil.rmtree(copy)
    if rehearsed is None:
        raise RuntimeError("the rehearsal died")
    return [(DiskCall(name, path, 0), length) for name, path, length in rehearsed]


def _die_at(crash: CrashDisk, moved: _Elsewhere, copy: str, k: int, mode: str, facts: Iterator[Fact]) -> None:
    """Fork a child that continues to the next fact in ``copy``, until call ``k`` kills it."""
    child = os.fork()
    if child == 0:
        moved.now = copy
        crash.seen, crash.n, crash.mode, crash.die = 0, k, mode, lambda: os.kill(os.getpid(), signal.SIGKILL)
        try:
            next(facts)
        finally:
            os._exit(3)  # reached only if the child was not killed
    _, status = os.waitpid(child, 0)
    if os.waitstatus_to_exitcode(status) != -signal.SIGKILL:
        raise RuntimeError(f"the child should have been killed at call {k}, but ended with {status}")


def run(
    points: int,
    seed: int,
    engines: Sequence[str] = ENGINES,
    *,
    share: float = 1.0,
    fork_share: float = 0.3,
    progress: Callable[[CrashReport, int], None] | None = None,
    violations_max: int = 50,
    seconds_max: float = float("inf"),
) -> CrashReport:
    """Do ``points`` points, of as many lives as needed. If both engines run, the fork engine does ``fork_share`` of
    them.

    Stops early after ``violations_max`` violations or ``seconds_max`` seconds.
    """
    report = CrashReport(seed)
    shares = {"simulated": 1 - fork_share, "fork": fork_share} if len(engines) > 1 else dict.fromkeys(engines, 1.0)
    began = time.perf_counter()
    gc.freeze()
    with prepared() as names, _scratch() as directory:
        for engine in engines:
            started, started_cpu = time.perf_counter(), _cpu()
            limit = points - report.total if engine == engines[-1] else round(points * shares[engine])
            watch = CrashSampler(
                report, share=share, limit=limit, tick=(lambda: progress(report, points)) if progress else None
            )
            number = seed
            while (
                not watch.done and len(report.violations) < violations_max and time.perf_counter() - began < seconds_max
            ):
                if engine == "fork":
                    fork(number, watch, names, directory)
                else:
                    simulate(number, watch, names)
                number += 1
            report.seconds[engine] += time.perf_counter() - started
            report.cpu_seconds[engine] += _cpu() - started_cpu
    gc.unfreeze()
    return report


def replay(point: str) -> CrashReport:
    """Run one point again."""
    seed, engine, *_ = point.split(":")
    report = CrashReport(int(seed))
    watch = CrashSampler(report, limit=1, choose=lambda name: name == point)
    with prepared() as names, _scratch() as directory:
        if engine == "fork":
            fork(int(seed), watch, names, directory)
        else:
            simulate(int(seed), watch, names)
    return report


def _cpu() -> float:
    times = os.times()
    return sum(times[:4])


@contextlib.contextmanager
def _scratch() -> Iterator[str]:
    """Make a scratch directory, in memory if possible: the test is about the order of calls, not about the medium."""
    memory = "/dev/shm"
    base = memory if os.path.isdir(memory) and os.access(memory, os.W_OK) else None
    directory = tempfile.mkdtemp(prefix="relight-crash-", dir=base)
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def show(report: CrashReport) -> str:
    """Return the report as text."""
    lines = [f"{report.total:,} points, {len(report.violations)} violations"]
    for engine in ENGINES:
        if report.lives[engine]:
            done = sum(count for name, count in report.points.items() if name.startswith(engine))
            lines.append(
                f"  {engine}: {done:,} points in {report.lives[engine]} lives, {duration_text(report.seconds[engine])}, "
                f"{duration_text(report.seconds[engine] / max(done, 1))} a point ({duration_text(report.cpu_seconds[engine])} of CPU)"
            )
    for name, count in sorted(report.points.items()):
        lines.append(f"    {name:32} {count:>8,}")
    for violation in report.violations[:10]:
        lines += [
            f"  at {violation.call}   replay: --replay {violation.point}",
            *(f"    {text}" for text in violation.wrong[:5]),
        ]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Return 0 if every invariant held at every point, else 1."""
    parser = argparse.ArgumentParser(
        prog="python -m relight.testing.crash", description=(__doc__ or "").split("\n\n")[0]
    )
    parser.add_argument("--points", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--engine", choices=(*ENGINES, "both"), default="both")
    parser.add_argument(
        "--share", type=float, default=1.0, help="share of the points of a life; a smaller share means more lives"
    )
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--replay", metavar="SEED:ENGINE:MODE:AT", help="run one point again")
    options = parser.parse_args(arguments)
    if options.replay:
        report = replay(options.replay)
    else:
        began = time.perf_counter()

        def progress(report: CrashReport, points: int) -> None:
            if report.total % 500 == 0 and sys.stderr.isatty():
                rate = (time.perf_counter() - began) / report.total
                text = f"\r{report.total:,} of {points:,} points, {len(report.violations)} violations, {duration_text(rate)} each "
                print(text, end="", file=sys.stderr, flush=True)

        engines = ENGINES if options.engine == "both" else (options.engine,)
        report = run(options.points, options.seed, engines, share=options.share, progress=progress)
        if sys.stderr.isatty():
            print(file=sys.stderr)
    print(json.dumps(report.to_dict(), indent=1) if options.json else show(report))
    return 0 if report.ok else 1


if __name__ == "__main__":
    sys.exit(main())
