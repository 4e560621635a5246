"""Power cuts and failing drives at any call of a run on a mirrored store, on simulated disks: nothing that was acknowledged is lost."""

from __future__ import annotations

import errno
import os
import random
import sys
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import pytest

from relight.drain import mirror_scrub
from relight.drain.scrub import scrub
from relight.errors import RelightError
from relight.log import Log
from relight.store.disk import Disk
from relight.store.durable import temporary_of
from relight.store.mirror_drives import DriveStates
from relight.store.mirrored import MirroredStore
from relight.testing.disks import CHANGING, CUTS, DiskCall, HookedDisk, SimulatedDisk
from relight.testing.scenario import RUN, Fact, check_history, examine, leftovers, life, resume

P = ParamSpec("P")
R = TypeVar("R")
ROOTS = ("/a/ck", "/b/ck")
FAULTS = {"removed": errno.ENOENT, "dead": errno.EIO, "read-only": errno.EROFS}


class PowerCut(BaseException):
    """The machine has no power."""


class DrivesDisk(HookedDisk):
    """Two drives, ``/a`` and ``/b``, of one machine. Counts changing calls.

    ``cut_at``: the call at which power fails. ``fault``: the drive that fails at a call, and how.
    """

    def __init__(
        self, inner: Disk, *, cut_at: int = 0, fault: tuple[str, str, int] | None = None, counted: str = "/"
    ) -> None:
        super().__init__(inner)
        self.cut_at, self.fault, self.counted = cut_at, fault, counted
        self.seen = 0

    def replace(self, source: str, target: str) -> None:
        """See ``Disk``."""
        self.around(DiskCall("replace", target, 0), self.inner.replace, source, target)

    def around(self, call: DiskCall, go: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Count the call, cut the power, or let it fail."""
        if call.name in CHANGING or call.name == "replace":
            self.seen += call.path.startswith(self.counted)
            if self.cut_at and self.seen >= self.cut_at:
                raise PowerCut
        if self.fault is not None and self.seen >= self.fault[2] and call.path.startswith(self.fault[0] + "/"):
            kind = self.fault[1]
            if kind == "read-only" and call.name not in CHANGING and call.name != "replace":
                return go(*args, **kwargs)
            if kind == "dead" and call.name in ("lstat", "close"):
                return go(*args, **kwargs)
            by_name = call.name in ("lstat", "scan", "open_read", "open_new", "open_dir", "mkdir", "link", "unlink")
            code = FAULTS[kind] if kind != "removed" or by_name else errno.EIO
            raise OSError(code, os.strerror(code), call.path)
        return go(*args, **kwargs)


def mounted(*, without: str = "", of: SimulatedDisk | None = None) -> SimulatedDisk:
    """Return a disk with the two drives, or ``of`` without one of them."""
    disk = of if of is not None else SimulatedDisk()
    for root in ("/a", "/b") if of is None else ():
        disk.mkdir(root)
    disk.sync()
    return Without(disk, without) if without else disk  # type: ignore[return-value]


class Without(HookedDisk):
    """A disk on which one drive is not there."""

    def __init__(self, inner: Disk, root: str) -> None:
        super().__init__(inner)
        self.root = root

    def replace(self, source: str, target: str) -> None:
        """See ``Disk``."""
        self.around(DiskCall("replace", target, 0), self.inner.replace, source, target)

    def around(self, call: DiskCall, go: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Fail for the drive."""
        if call.path.startswith(self.root + "/"):
            raise OSError(errno.ENOENT, os.strerror(errno.ENOENT), call.path)
        return go(*args, **kwargs)


def store_on(disk: Disk) -> MirroredStore:
    """Return the store on a disk, without threads, so that each run is the same."""
    return MirroredStore(ROOTS, disk=disk, threads=False)


def live(disk: Disk, seed: int) -> list[Fact]:
    """Run a life until it ends or the power is cut. Return what was acknowledged."""
    facts: list[Fact] = []
    try:
        for fact in life(store_on(disk), seed):
            facts.append(fact)
    except PowerCut:
        pass
    return facts


def checked(store: MirroredStore, facts: list[Fact], seed: int) -> list[str]:
    """Check the history, resume the run, and restore every byte. Add what the resumed run did to ``facts``. Return what is wrong."""
    log = Log(store, RUN)
    problems = check_history(log, facts)
    try:
        facts += resume(store, seed)
    except RelightError as error:
        problems.append(f"the run does not resume: {error}")
    return problems + examine(store, log, facts) + leftovers(store, log)


def files_of(disk: Disk, root: str) -> dict[str, bytes]:
    """Return the files below a drive's directory, without temporary ones and those that name the drive or its state."""
    todo, files = [root], dict[str, bytes]()
    while todo:
        here = todo.pop()
        for name, is_dir in disk.scan(here):
            path = f"{here}/{name}"
            if is_dir:
                todo.append(path)
            elif not temporary_of(name) and (here != root or not name.startswith(("stripe.json", "mirrors-"))):
                fd = disk.open_read(path)
                data = bytearray(disk.fstat(fd).st_size)
                assert disk.preadv(fd, memoryview(data), 0) == len(data)
                disk.close(fd)
                files[path.removeprefix(root)] = bytes(data)
    return files


def rebuilt(disk: Disk) -> list[str]:
    """Scrub the store. Return what differs between the drives afterwards."""
    store = store_on(disk)
    try:
        report = scrub(store, RUN)
    except RelightError as error:
        return [f"the scrub failed: {error}"]
    problems = [f"left damaged: {damage}" for damage in report.damage if not damage.repaired_from]
    problems += [f"not whole: {row}" for row in store.statuses() if row.status != "good"]
    first, second = (files_of(disk, root) for root in ROOTS)
    problems += [f"only on one drive: {name}" for name in sorted(first.keys() ^ second.keys())]
    return problems + [f"differs: {name}" for name in sorted(first) if second.get(name, first[name]) != first[name]]


def length_of(seed: int, root: str = "/") -> int:
    """Return the number of changing calls of a life, or of those to one drive."""
    disk = DrivesDisk(mounted(), counted=root)
    assert live(disk, seed)[-1][0] == "retired"
    return disk.seen


def cut_case(seed: int) -> list[str]:
    """Cut the power at a call drawn from ``seed``; then both drives are there, or only one. Return what is wrong."""
    rng = random.Random(seed)
    simulated = mounted()
    disk = DrivesDisk(simulated, cut_at=rng.randrange(60, length_of(seed % 7)))
    facts = live(disk, seed % 7)
    after = simulated.power_cut(seed, rng.choice(CUTS))
    problems = []
    for without in ("/a", "/b", ""):
        left = after.clone()
        known = list(facts)
        wrong = checked(store_on(mounted(without=without, of=left) if without else left), known, seed)
        if without:
            wrong += checked(store_on(left), known, seed + 1)  # the other is back, with what it had
        problems += [f"without {without or 'nothing'}: {each}" for each in wrong + rebuilt(left)]
    return problems


def fault_case(seed: int) -> list[str]:
    """Let a drive fail at a call drawn from ``seed``, and the run continue. Then the other drive is lost. Return what is wrong."""
    rng = random.Random(seed)
    root, kind = rng.choice(("/a", "/b")), rng.choice(list(FAULTS))
    simulated = mounted()
    call = rng.randrange(40, length_of(seed % 7, root))
    disk = DrivesDisk(simulated, fault=(root, kind, call), counted=root)
    facts = live(disk, seed % 7)
    what = f"{root} {kind} from call {call}: "
    if not facts or facts[-1][0] != "retired":
        return [f"{what}the run ended at {facts[-1:]}"]
    problems = checked(store_on(disk), facts, seed)
    problems += checked(store_on(simulated), facts, seed + 1)  # it is back, with what it had
    problems += rebuilt(simulated)
    other = "/b" if root == "/a" else "/a"
    problems += checked(store_on(mounted(without=other, of=simulated)), facts, seed + 2)
    return [what + each for each in problems]


def cut_after_fault_case(seed: int) -> list[str]:
    """Let a drive fail, cut the power later, and bring the drive back with old contents. Return what is wrong."""
    rng = random.Random(seed)
    root, kind = rng.choice(("/a", "/b")), rng.choice(list(FAULTS))
    simulated = mounted()
    length = length_of(seed % 7)
    call = rng.randrange(80, length - 1)
    disk = DrivesDisk(simulated, fault=(root, kind, call), cut_at=rng.randrange(call + 1, length))
    facts = live(disk, seed % 7)
    after = simulated.power_cut(seed, rng.choice(CUTS))
    problems = checked(store_on(after), facts, seed)
    problems += rebuilt(after)
    other = "/b" if root == "/a" else "/a"
    problems += checked(store_on(mounted(without=other, of=after)), facts, seed + 1)
    return [f"{root} {kind} from call {call}: {each}" for each in problems]


CASES = {"cut": (cut_case, 5), "fault": (fault_case, 10), "cut after a fault": (cut_after_fault_case, 12)}
"""Each kind of case, and its number of points here; ``make mirrors`` runs 1,000 of each."""


@pytest.mark.parametrize("name", CASES)
def test_nothing_acknowledged_is_lost(name: str) -> None:
    """At points drawn from seeds, no save is lost, the run continues, and a scrub makes the drives equal to the byte."""
    case, points = CASES[name]
    for seed in range(points):
        assert case(seed) == [], f"{name} {seed}"


TEETH: dict[str, tuple[Any, str, Any]] = {
    "a rebuild copies nothing": (mirror_scrub, "equalize", lambda *words, **named: None),
    "a writer forgets a failed copy": (DriveStates, "failed", lambda self, number, error: None),
}


@pytest.mark.parametrize("planted", TEETH)
def test_the_cases_have_teeth(planted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of these faults in Relight's own code is wrong."""
    monkeypatch.setattr(*TEETH[planted])
    for seed in range(40):
        for case in (fault_case, cut_after_fault_case):
            try:
                if case(seed):
                    return
            except (RelightError, AssertionError):
                return
    pytest.fail("not wrong")


def main(count: int) -> int:
    """Run ``count`` points of each kind. Print what is wrong. Return 0 if nothing is."""
    wrong = 0
    for name, (case, _) in CASES.items():
        for seed in range(count):
            problems = case(seed)
            wrong += bool(problems)
            if problems:
                print(f"{name} {seed}: {problems}", flush=True)
        print(f"{name}: {count} points, {wrong} violations", flush=True)
    return min(wrong, 1)


if __name__ == "__main__":
    os.environ["RELIGHT_LOG"] = "quiet"
    sys.exit(main(int(sys.argv[1])))
