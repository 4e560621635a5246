"""Let a save fail at each of its calls with each disk error, and check the store afterwards.

``fail_at`` does one trial on a simulated disk and returns what is wrong. ``positions`` yields all trials.
"""

from __future__ import annotations

import errno as codes
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from proofs.disk_scenario import ROOT, fresh_disk
from relight.commit import Attempt
from relight.errors import NoSpace, RelightError
from relight.format.names import LOG_DIR
from relight.log import Log, fold
from relight.store import Disk, LocalStore
from relight.store.base import Uncertain
from relight.store.durable import temporary_of
from relight.testing.disks import CHANGING, CountingDisk, DiskCall, FailNth, SimulatedDisk
from relight.testing.scenario import RUN, Fact, Names, check, examine, perform, prepared, save

ERRORS = (codes.EIO, codes.ENOSPC, codes.EDQUOT, codes.EROFS)
READS = frozenset({"open_read", "open_dir", "lstat", "fstat", "preadv", "scan"})


class Trial(NamedTuple):
    """The ``n``-th changing call (or read) of a save fails with ``errno``.

    ``forever``: all later changing calls fail, too.
    """

    n: int
    name: str | None
    errno: int
    forever: bool = False
    lost_reply: bool = False

    def __str__(self) -> str:
        how = "and all after it " if self.forever else "after doing its work " if self.lost_reply else ""
        return f"call {self.n} of {self.name or 'all'} fails {how}with {codes.errorcode[self.errno]}"


def positions(*, reads: bool = True) -> Iterator[Trial]:
    """Yield every changing call × every error (once and for ever), lost replies of links, and EIO at every read."""
    with prepared() as names:
        calls = _calls(names)
    changing = [call for call in calls if call.name in CHANGING]
    for n, call in enumerate(changing, start=1):
        for error in ERRORS:
            yield Trial(n, None, error)
        yield Trial(n, None, codes.EIO, forever=True)
        yield Trial(n, None, codes.EROFS, forever=True)
        if call.name == "link":
            yield Trial(n, None, codes.EIO, lost_reply=True)
            yield Trial(n, None, codes.EEXIST, lost_reply=True)
    if reads:
        counted: Counter[str] = Counter(call.name for call in calls if call.name in READS)
        for name, count in sorted(counted.items()):
            for n in range(1, count + 1):
                yield Trial(n, name, codes.EIO)


def _begin(disk: Disk, names: Names) -> tuple[Attempt, list[Fact]]:
    """Begin a run and save one checkpoint."""
    names.seed("faults")
    facts: list[Fact] = []
    attempt = Attempt.begin(LocalStore(ROOT, disk=disk), RUN)
    perform(save(attempt, "faults/before", 1), facts)
    return attempt, facts


def _calls(names: Names) -> list[DiskCall]:
    disk = CountingDisk(fresh_disk())
    attempt, facts = _begin(disk, names)
    before = len(disk.calls)
    perform(save(attempt, "faults/struck", 2), facts)
    return disk.calls[before:]


def fail_at(trial: Trial, names: Names) -> list[str]:
    """Do one trial and return what is wrong; empty if nothing is."""
    simulated = fresh_disk()
    disk = FailNth(
        trial.n, trial.errno, trial.name, inner=simulated, forever=trial.forever, lost_reply=trial.lost_reply
    )
    disk.armed = False
    attempt, facts = _begin(disk, names)
    files = _files(simulated)
    disk.calls.clear()
    disk.armed = True
    failure: BaseException | None = None
    try:
        perform(save(attempt, "faults/struck", 2), facts)
    except BaseException as error:
        failure = error
    disk.armed = False
    problems = _judge(trial, disk, simulated, failure, files)
    problems += _poisoned(disk.calls, disk.failed)
    log = Log(LocalStore(ROOT, disk=simulated.clone()), RUN)
    if isinstance(failure, RelightError) and not isinstance(failure, Uncertain) and len(fold(log.read()).live) != 1:
        problems.append("a save that failed is visible")
    with names.apart(str(trial)):
        problems += [f"at once: {text}" for text in check(LocalStore(ROOT, disk=simulated.clone()), facts, 0)]
        problems += [
            f"after a cut: {text}" for text in check(LocalStore(ROOT, disk=simulated.power_cut(1, "lost")), facts, 0)
        ]
    try:
        perform(save(attempt, "faults/next", 3), facts)
    except RelightError as error:
        problems.append(f"the next save fails: {error}")
    store = LocalStore(ROOT, disk=simulated)
    problems += [f"after the next save: {text}" for text in examine(store, Log(store, RUN), facts)]
    return list(dict.fromkeys(problems))


def _judge(
    trial: Trial, disk: FailNth, simulated: SimulatedDisk, failure: BaseException | None, before: set[str]
) -> list[str]:
    if disk.failed is None:
        return ["the fault was never reached"]
    if failure is None:
        written = {call.file for call in disk.calls if call.name in ("pwrite", "fallocate", "truncate")}
        harmless = disk.failed.name == "unlink" or (disk.failed.name == "close" and disk.failed.file not in written)
        return (
            []
            if harmless or trial.lost_reply
            else [f"{disk.failed.name} of {disk.failed.path} failed, and the save did not"]
        )
    if not isinstance(failure, RelightError):
        return [f"an untyped error: {failure!r} from {disk.failed.name} of {disk.failed.path}"]
    problems = []
    full = trial.errno in (codes.ENOSPC, codes.EDQUOT) and not isinstance(failure, Uncertain)
    if full and not isinstance(failure, NoSpace):
        problems.append(f"a full disk is reported as {type(failure).__name__}")
    leftover = _files(simulated) - before
    if (
        not trial.forever
        and not isinstance(failure, Uncertain)
        and disk.failed.name not in ("unlink", "rmdir")
        and leftover
    ):
        problems.append(f"not removed: {sorted(leftover)}")
    return problems


def _poisoned(calls: list[DiskCall], failed: DiskCall | None) -> list[str]:
    """Return each later write or fsync of a file after its fsync, close or write failed. There must be none."""
    if failed is None or failed.name not in ("fsync", "close", "pwrite") or not failed.file:
        return []
    later = calls[calls.index(failed) + 1 :]
    repeated = [
        call.name for call in later if call.file == failed.file and call.name in ("fsync", "pwrite", "truncate")
    ]
    return [f"{name} again of a file after its {failed.name} failed" for name in repeated]


def _files(disk: SimulatedDisk) -> set[str]:
    names: set[str] = set()
    todo = [ROOT]
    while todo:
        path = todo.pop()
        for name, is_dir in disk.scan(path):
            inside = f"{path}/{name}"
            if is_dir:
                todo.append(inside)
            if not (f"{path}/".find(f"/{LOG_DIR}/") >= 0 and temporary_of(name) is None):
                names.add(inside.removeprefix(ROOT))
    return names
