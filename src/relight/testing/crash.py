"""The crash engine: a run dies at every call it makes to its disk, or the power goes, and everything that was promised must still hold.

``python -m relight.testing.crash --points 100000 --seed 0``. Two engines:

- *simulated*: the run lives once on a ``SimulatedDisk``; at each of its calls the disk is copied as a death or a power cut would leave
  it, and the copy is checked. Cheap, and the only one that knows what was not durable.
- *fork*: real processes on a real file system, each of which kills itself with SIGKILL at one call.

A point is named ``seed:engine:mode:at``; ``--replay`` runs one again. What is checked: ``scenario.check``.
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
from relight.testing.disks import CHANGING, CUTS, CountingDisk, CrashDisk, DiskCall, HookedDisk, InterruptNth, SimulatedDisk, torn_length
from relight.testing.scenario import ROOT, Fact, Names, check, check_lost_log, fresh_disk, life, perform, prepared, resume, short_folders

P = ParamSpec("P")
R = TypeVar("R")

TORN = ("half", "byte", "page")
ENGINES = ("simulated", "fork")
MIXED_SEEDS = 3
"""Power cuts of kind ``mixed`` at each call."""
INTERRUPTS, TAKEOVERS = 2, 8
"""One in so many calls is interrupted, or sees another attempt take over: these need a life each."""
KILL_CUTS = 2
"""Power cuts after each death, while the next process is at work."""


@dataclass
class Violation:
    """A point at which a promise was broken."""

    point: str
    call: str
    wrong: list[str]


@dataclass
class CrashReport:
    """Points done, by engine and mode, and what was violated."""

    seed: int
    points: Counter[str] = field(default_factory=Counter)
    violations: list[Violation] = field(default_factory=list)
    lives: Counter[str] = field(default_factory=Counter)
    seconds: Counter[str] = field(default_factory=Counter)
    cpu_seconds: Counter[str] = field(default_factory=Counter)
    """Of this process and its children: what it takes on a machine that has nothing else to do."""

    @property
    def total(self) -> int:
        """All points."""
        return sum(self.points.values())

    @property
    def ok(self) -> bool:
        """Whether every invariant held at every point, and there were points at all."""
        return not self.violations and self.total > 0

    def to_dict(self) -> dict[str, object]:
        """For ``--json``."""
        return {
            "ok": self.ok,
            "seed": self.seed,
            "points": self.total,
            "by_mode": dict(sorted(self.points.items())),
            "lives": dict(self.lives),
            "seconds": {name: round(value, 1) for name, value in self.seconds.items()},
            "cpu_seconds": {name: round(value, 1) for name, value in self.cpu_seconds.items()},
            "violations": len(self.violations),
            "first": [vars(one) for one in self.violations[:20]],
        }


class CrashSampler:
    """Which points are wanted, and what came of them. ``share`` of those that ``choose`` likes are done, drawn from the seed.

    Done is it after ``limit`` points, or ``stop`` violations.
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
        """Whether there is nothing left to do."""
        return (self.left is not None and self.left <= 0) or (self.stop is not None and len(self.report.violations) >= self.stop)

    def wants(self, point: str) -> bool:
        """Whether to do that point."""
        if self.done or (self._choose is not None and not self._choose(point)):
            return False
        return self.share >= 1.0 or self._rng.random() < self.share

    def put(self, point: str, call: DiskCall, wrong: list[str]) -> None:
        """That point is done."""
        _, engine, mode, *_ = point.split(":")
        self.report.points[f"{engine} {mode}"] += 1
        if self.left is not None:
            self.left -= 1
        if wrong:
            self.report.violations.append(Violation(point, f"{call.name} {call.path}", wrong))
        if self._tick:
            self._tick()


class Observed(HookedDisk):
    """Calls ``see(number, when, call, disk)`` before and after each changing call (or ``every`` call), and, if ``torn``, with a copy of the
    disk in the middle of each write."""

    def __init__(
        self, inner: SimulatedDisk, see: Callable[[int, str, DiskCall, SimulatedDisk], None], *, torn: bool = False, every: bool = False
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
    """All simulated points of one life."""
    with short_folders(seed):
        _simulate(seed, watch, names)


def _simulate(seed: int, watch: CrashSampler, names: Names) -> None:
    told: list[Fact] = []
    prefix = f"{seed}:simulated"
    changing = 0

    def done(point: str, call: DiskCall, disk: SimulatedDisk) -> None:
        with names.apart(point):
            watch.put(point, call, check(LocalStore(ROOT, disk=disk), told, seed))

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
                watch.put(point, call, check_lost_log(LocalStore(ROOT, disk=disk.clone()), told))
        for draw in range(KILL_CUTS):
            if watch.wants(point := f"{prefix}:kill-then-cut:{n}.{when}.{draw}"):
                with names.apart(point):
                    watch.put(point, call, _kill_then_cut(disk.clone(), told, seed, point))

    names.seed(seed)
    counted = CountingDisk(Observed(fresh_disk(), see, torn=True))
    perform(life(LocalStore(ROOT, disk=counted), seed), told)
    for n, call in enumerate(counted.calls, start=1):
        _taken_over(seed, n, watch, names, prefix)
        if call.name in CHANGING:
            changing += 1
            _interrupted(seed, changing, watch, names, prefix)
    watch.report.lives["simulated"] += 1


def _number(point: str) -> int:
    """A seed from a point's name, the same in every process."""
    return zlib.crc32(point.encode())


def _kill_then_cut(disk: SimulatedDisk, told: Sequence[Fact], seed: int, point: str) -> list[str]:
    """One process was killed; the next goes on, and in its midst the power goes."""
    rng = random.Random(point)
    more = list(told)
    cuts: list[tuple[SimulatedDisk, list[Fact]]] = []
    at = rng.randrange(1, 90)  # a resume makes about that many calls

    def see(n: int, when: str, call: DiskCall, then: SimulatedDisk) -> None:
        if when == "after" and n == at:
            cuts.append((then.power_cut(rng.randrange(1 << 32), rng.choice(CUTS)), list(more)))

    perform(resume(LocalStore(ROOT, disk=Observed(disk, see)), seed), more)
    if not cuts:  # it was through before: the cut comes afterwards
        cuts.append((disk.power_cut(rng.randrange(1 << 32), rng.choice(CUTS)), more))
    ((after, then_told),) = cuts
    return check(LocalStore(ROOT, disk=after), then_told, seed)


def _interrupted(seed: int, n: int, watch: CrashSampler, names: Names, prefix: str) -> None:
    """A life interrupted by an exception at its ``n``-th changing call, so that its own cleaning up runs."""
    for mode in ("interrupt-before", "interrupt-after"):
        point = f"{prefix}:{mode}:{n}"
        if _number(point) % INTERRUPTS == 0 and watch.wants(point):
            told: list[Fact] = []
            broken = InterruptNth(n, after=mode == "interrupt-after", inner=fresh_disk())
            names.seed(seed)
            with contextlib.suppress(KeyboardInterrupt):
                perform(life(LocalStore(ROOT, disk=broken), seed), told)
            with names.apart(point):
                watch.put(point, broken.calls[-1], check(LocalStore(ROOT, disk=broken.inner), told, seed))


def _taken_over(seed: int, n: int, watch: CrashSampler, names: Names, prefix: str) -> None:
    """A life during whose ``n``-th call, reads too, another attempt takes over."""
    for mode in ("takeover", "takeover-then-cut"):
        point = f"{prefix}:{mode}:{n}"
        if _number(point) % TAKEOVERS == 0 and watch.wants(point):
            names.seed(seed)
            call, wrong = _takeover(seed, n, names, point, cut=mode == "takeover-then-cut")
            watch.put(point, call, wrong)


def _takeover(seed: int, n: int, names: Names, point: str, *, cut: bool) -> tuple[DiskCall, list[str]]:
    """At call ``n`` another process takes over the run, dies or finishes; the first one, unaware, goes on until it is told."""
    rng = random.Random(point)
    disk = fresh_disk()
    told: list[Fact] = []
    at: list[DiskCall] = []
    dies_at = rng.randrange(1, 90) if rng.random() < 0.5 else 0
    cut_at = n + rng.randrange(1, 200) if cut else 0
    cuts: list[tuple[SimulatedDisk, list[Fact]]] = []

    def die() -> None:
        raise _Dead

    def see(number: int, when: str, call: DiskCall, now: SimulatedDisk) -> None:
        if when == "before" and number == n:
            at.append(call)
            with names.apart(f"{point} other"), contextlib.suppress(_Dead):
                other = CrashDisk(dies_at, "before", die, inner=disk)
                perform(resume(LocalStore(ROOT, disk=other), seed + 1), told)
        elif when == "after" and number == cut_at:
            cuts.append((now.power_cut(rng.randrange(1 << 32), rng.choice(CUTS)), list(told)))

    with contextlib.suppress(RelightError):  # it is told by an error; which one depends on where it was
        perform(life(LocalStore(ROOT, disk=Observed(disk, see, every=True)), seed), told)
    if cut:
        left, then_told = cuts[0] if cuts else (disk.power_cut(rng.randrange(1 << 32), rng.choice(CUTS)), told)
    else:
        left, then_told = disk, told
    with names.apart(point):
        return at[0], check(LocalStore(ROOT, disk=left), then_told, seed)


class _Dead(BaseException):
    """A process that is no more, within this one."""


def fork(seed: int, watch: CrashSampler, names: Names, directory: str) -> None:
    """All points of one life at which a real process kills itself, on a real file system in ``directory``.

    The life goes on in this process; at each of its moments children are forked that live through the next stretch, on a copy of the
    files (hard links: the product never changes a file that has its final name), and die there.
    """
    here, there = f"{directory}/life", f"{directory}/point"
    os.mkdir(here)
    moved = _Elsewhere(here)
    crash = CrashDisk(0, "", lambda: None, inner=moved)
    facts = life(LocalStore(f"{here}/above/store", disk=crash), seed)
    told: list[Fact] = []
    names.seed(seed)
    stretch = 0
    while not watch.done:
        calls = _rehearse(crash, moved, here, there, facts)
        for k, (call, length) in enumerate(calls, start=1):
            for mode in CrashDisk.MODES:
                if mode in TORN and not (call.name == "pwrite" and torn_length(mode, length)):
                    continue
                if watch.wants(point := f"{seed}:fork:{mode}:{stretch}.{k}"):
                    _copy_links(here, there)
                    _die_at(crash, moved, there, k, mode, facts)
                    with names.apart(point):
                        watch.put(point, call, check(LocalStore(f"{there}/above/store"), told, seed))
                    shutil.rmtree(there)
        try:
            told.append(next(facts))
        except StopIteration:
            break
        stretch += 1
    facts.close()
    shutil.rmtree(here)
    watch.report.lives["fork"] += 1


class _Elsewhere(Disk):
    """Real calls, on ``now`` in place of ``root``."""

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


def _rehearse(crash: CrashDisk, moved: _Elsewhere, here: str, there: str, facts: Iterator[Fact]) -> list[tuple[DiskCall, int]]:
    """The changing calls of the next stretch, and how long each write is: a child lives through it and tells."""
    _copy_links(here, there)
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        calls: list[tuple[str, str, int]] = []

        def note(call: DiskCall, length: int) -> None:
            calls.append((call.name, call.path, length))

        try:
            moved.now, crash.note = there, note
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
        told = json.loads(pipe.read() or b"null")
    os.waitpid(child, 0)
    shutil.rmtree(there)
    if told is None:
        raise RuntimeError("the rehearsal died")
    return [(DiskCall(name, path, 0), length) for name, path, length in told]


def _die_at(crash: CrashDisk, moved: _Elsewhere, there: str, k: int, mode: str, facts: Iterator[Fact]) -> None:
    """Fork a child that lives through the next stretch in ``there`` until call ``k`` kills it."""
    child = os.fork()
    if child == 0:
        moved.now = there
        crash.seen, crash.n, crash.mode, crash.die = 0, k, mode, lambda: os.kill(os.getpid(), signal.SIGKILL)
        try:
            next(facts)
        finally:
            os._exit(3)  # only reached if it was not killed
    _, status = os.waitpid(child, 0)
    if os.waitstatus_to_exitcode(status) != -signal.SIGKILL:
        raise RuntimeError(f"the child was to be killed at call {k}, and ended with {status}")


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
    """Do ``points`` points, of as many lives as it takes; ``fork_share`` of them by forking if both engines run. Stops early at too many violations."""
    report = CrashReport(seed)
    shares = {"simulated": 1 - fork_share, "fork": fork_share} if len(engines) > 1 else dict.fromkeys(engines, 1.0)
    began = time.perf_counter()
    gc.freeze()
    with prepared() as names, _scratch() as directory:
        for engine in engines:
            started, started_cpu = time.perf_counter(), _cpu()
            limit = points - report.total if engine == engines[-1] else round(points * shares[engine])
            watch = CrashSampler(report, share=share, limit=limit, tick=(lambda: progress(report, points)) if progress else None)
            number = seed
            while not watch.done and len(report.violations) < violations_max and time.perf_counter() - began < seconds_max:
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
    """Do one point again."""
    seed, engine, *_ = point.split(":")
    report = CrashReport(int(seed))
    watch = CrashSampler(report, limit=1, choose=lambda one: one == point)
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
    """A directory in memory if there is one: what is tested is the order of calls, not the medium."""
    memory = "/dev/shm"
    base = memory if os.path.isdir(memory) and os.access(memory, os.W_OK) else None
    directory = tempfile.mkdtemp(prefix="relight-crash-", dir=base)
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def show(report: CrashReport) -> str:
    """The report, for people."""
    lines = [f"{report.total:,} points, {len(report.violations)} violations"]
    for engine in ENGINES:
        if report.lives[engine]:
            done = sum(count for name, count in report.points.items() if name.startswith(engine))
            lines.append(
                f"  {engine}: {done:,} points in {report.lives[engine]} lives, {report.seconds[engine]:.0f} s, "
                f"{report.seconds[engine] / max(done, 1) * 1000:.1f} ms a point ({report.cpu_seconds[engine]:.0f} s of CPU)"
            )
    for name, count in sorted(report.points.items()):
        lines.append(f"    {name:32} {count:>8,}")
    for one in report.violations[:10]:
        lines += [f"  at {one.call}   replay: --replay {one.point}", *(f"    {text}" for text in one.wrong[:5])]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command. 0 if every invariant held at every point, 1 if not."""
    parser = argparse.ArgumentParser(prog="python -m relight.testing.crash", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--points", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--engine", choices=(*ENGINES, "both"), default="both")
    parser.add_argument("--share", type=float, default=1.0, help="of all points of a life; less means more lives")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--replay", metavar="SEED:ENGINE:MODE:AT", help="one point again")
    options = parser.parse_args(arguments)
    if options.replay:
        report = replay(options.replay)
    else:
        began = time.perf_counter()

        def progress(report: CrashReport, points: int) -> None:
            if report.total % 500 == 0 and sys.stderr.isatty():
                rate = (time.perf_counter() - began) / report.total
                text = f"\r{report.total:,} of {points:,} points, {len(report.violations)} violations, {rate * 1000:.1f} ms each "
                print(text, end="", file=sys.stderr, flush=True)

        engines = ENGINES if options.engine == "both" else (options.engine,)
        report = run(options.points, options.seed, engines, share=options.share, progress=progress)
        if sys.stderr.isatty():
            print(file=sys.stderr)
    print(json.dumps(report.to_dict(), indent=1) if options.json else show(report))
    return 0 if report.ok else 1


if __name__ == "__main__":
    sys.exit(main())
