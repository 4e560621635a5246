"""One of two drives fails at any point of a run: no save may be lost, and no save may wait for longer than stated.

``python -m proofs.mirrors --count 300``. A victim process saves to a store with each file on two ext4 file systems in image files. At one of
its changing calls to the disks, a drive is *removed* (unmounted), its directory *moved*, all of its files filled with *zeros*, its file
system made *read-only*, shut down (*dead*: what was not flushed is gone), or *slowed* to 1 MB/s. The victim must complete all saves. Then
every byte is restored, first without the drive. The drive comes back with what it had, or an empty one in its place, and ``relight verify --repair``
must make both equal to the byte. At the end the other drive is removed, and every byte is restored from the rebuilt one.

Needs root, Linux and loop devices. A seed repeats lives, kinds and numbers of calls; which thread makes a call depends on the scheduler.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import random
import shutil
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ParamSpec, TypeVar

from click.testing import CliRunner

from proofs.engine_process import scratch_directory
from proofs.images import PLAIN, attached, copy_image, cut_power, make_image, mount, mount_any, private_mounts
from proofs.report import EngineUnavailable, Report, engine_parser, run_engine
from relight.cli import cli
from relight.commit import Attempt
from relight.log import Log
from relight.store.disk import Disk
from relight.store.durable import rewritten_of, temporary_of
from relight.store.mirrored import MirroredStore
from relight.testing.disks import CHANGING, DiskCall, HookedDisk
from relight.testing.scenario import RUN, Fact, check_history, examine, prepared, prune, resume, save

P = ParamSpec("P")
R = TypeVar("R")
KINDS = ("removed", "moved", "zeros", "read-only", "dead", "slowed")
SLOW_BPS = 1e6
WAIT_S = 2.0
"""``mirror_wait_s`` of the victim. The setting's default is ten times as long."""
SLACK_S = 6.0
"""Seconds that a save may take for other reasons: two drives on one disk, other programs."""
SAVES = 7
LEAST_CALL = 60
"""Calls before it create the store. A drive that is missing then is an error, as Relight cannot know that it should be there."""
_MNT_DETACH, _MS_RDONLY, _MS_REMOUNT = 2, 1, 32
_libc = ctypes.CDLL(None, use_errno=True)


class PacedDisk(HookedDisk):
    """Reads and writes at most ``bytes_per_second`` below ``root``, once ``is_slow`` returns True."""

    def __init__(
        self,
        root: str,
        bytes_per_second: float,
        is_slow: Callable[[], bool] = lambda: True,
        *,
        inner: Disk | None = None,
    ) -> None:
        super().__init__(inner)
        self.root, self.bytes_per_second, self.is_slow = root, bytes_per_second, is_slow
        self._lock = threading.Lock()

    def pwrite(self, fd: int, data: memoryview, offset: int) -> int:
        """Write, after the time that it takes."""
        self._wait(fd, len(data))
        return super().pwrite(fd, data, offset)

    def preadv(self, fd: int, into: memoryview, offset: int) -> int:
        """Read, after the time that it takes."""
        self._wait(fd, len(into))
        return super().preadv(fd, into, offset)

    def _wait(self, fd: int, length: int) -> None:
        if self._on_fd("", fd).path.startswith(self.root) and self.is_slow():
            with self._lock:  # one drive does one thing at a time
                time.sleep(length / self.bytes_per_second)


class PointDisk(HookedDisk):
    """Calls ``at_point`` before the ``point``-th changing call."""

    def __init__(self, point: int, at_point: Callable[[], None], inner: Disk) -> None:
        super().__init__(inner)
        self.point, self.at_point, self.seen = point, at_point, 0
        self._counting = threading.Lock()

    def around(self, call: DiskCall, go: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Count the call."""
        if call.name in CHANGING:
            with self._counting:
                self.seen += 1
                if self.seen == self.point:
                    self.at_point()
        return go(*args, **kwargs)


def saving_life(store: MirroredStore, seed: int) -> Iterator[Fact]:
    """Save several times, about 1 MB each, with retention and a second attempt."""
    attempt = Attempt.begin(store, RUN, reason="first")
    yield ("begun", str(attempt.epoch))
    for step in range(SAVES):
        if step == SAVES // 2:
            attempt = Attempt.begin(store, RUN, reason="second")
            yield ("begun", str(attempt.epoch))
        yield from save(attempt, f"{seed}/{step}/large", step)
        yield from prune(store, {"last": 3}, attempt.epoch)


def in_child(work: Callable[[Callable[[Any], None]], None]) -> tuple[int, int]:
    """Run ``work`` in a forked process, which can send JSON values. Return its id and the end of the pipe to read them from."""
    reading, writing = os.pipe()
    child = os.fork()
    if child:
        os.close(writing)
        return child, reading
    status = 1
    try:
        os.close(reading)
        work(lambda value: _send(writing, value))
        status = 0
    except BaseException:
        _send(writing, ["failed", traceback.format_exc(limit=-6)])
    finally:
        os._exit(status)


def _send(fd: int, value: object) -> None:
    os.write(fd, json.dumps(value).encode() + b"\n")


def received(reading: int) -> Iterator[Any]:
    """Yield the values that a child sends, until it ends."""
    with os.fdopen(reading, encoding="utf-8") as lines:
        for line in lines:
            yield json.loads(line)


def asked(work: Callable[[], object]) -> Any:
    """Return the result of ``work``, done in a forked process: the engine itself never has threads."""
    child, reading = in_child(lambda send: send(["result", work()]))
    values = list(received(reading))
    os.waitpid(child, 0)
    if not values or values[-1][0] != "result":
        return [f"the process failed: {values}"]
    return values[-1][1]


class MirrorTrial:
    """Two drives, a victim, and one fault."""

    def __init__(self, directory: str, base: str, seed: int, number: int, kind: str) -> None:
        self.rng = random.Random(f"mirrors {seed} {number}")
        self.seed, self.kind, self.base = number, kind, base
        self.images = [f"{directory}/image-{name}" for name in "ab"]
        self.mounts = [f"{directory}/{name}" for name in "ab"]
        self.roots = [f"{where}/ck" for where in self.mounts]
        self.bad = self.rng.randrange(2)
        self.facts: list[Fact] = []
        self.longest_s = 0.0
        for image, where in zip(self.images, self.mounts, strict=True):
            os.makedirs(where, exist_ok=True)
            copy_image(base, image)
            mount(image, where, PLAIN)
            shutil.rmtree(f"{where}/lost+found")

    @property
    def url(self) -> str:
        """The run's URL."""
        return f"stripe:mirrors=2,{self.roots[0]},{self.roots[1]},/{RUN}"

    def run(self, point: int) -> list[str]:
        """Run the victim with the fault at ``point``, then check, rebuild and check. Return what is wrong."""
        problems = self._live(point)
        problems += [f"with one drive: {each}" for each in asked(self._examined)]
        replaced = self._bring_back()
        done = asked(lambda: self._scrubbed(replaced))
        if isinstance(done, list):
            return problems + done
        self.facts += [tuple(fact) for fact in done["facts"]]
        problems += done["problems"]
        self._detach(1 - self.bad)
        problems += [f"from the rebuilt drive: {each}" for each in asked(self._examined)]
        return problems

    def end(self) -> None:
        """Unmount what is mounted."""
        for number in range(2):
            self._detach(number)

    def _live(self, point: int) -> list[str]:
        to_victim, from_engine = os.pipe()
        child, reading = in_child(lambda send: self._victim(point, send, to_victim))
        problems, ended, injected, pending = [], False, False, 0.0
        for kind, *values in received(reading):
            if kind == "point":
                self._inject()
                injected = True
                os.write(from_engine, b"x")
            elif kind == "fact":
                fact, seconds = tuple(values[0]), values[1]
                self.facts.append(fact)
                self.longest_s = max(self.longest_s, seconds)
                bound_s = WAIT_S * 1.1 + SLACK_S
                if seconds > bound_s:
                    problems.append(f"{fact} took {seconds:.1f} s, {bound_s:.1f} s are allowed")
                pending = seconds
            elif kind == "ended":
                ended = True
            else:
                problems.append(f"the victim failed after {pending:.1f} s: {values}")
        os.waitpid(child, 0)
        if not injected:  # this life had fewer calls
            self._inject()
        os.close(from_engine)
        os.close(to_victim)
        return problems if ended else [*problems, "the victim did not complete its saves"]

    def _victim(self, point: int, send: Callable[[Any], None], go: int) -> None:
        slow = threading.Event()

        def at_point() -> None:
            send(["point"])
            os.read(go, 1)
            slow.set()

        paced = PacedDisk(self.roots[self.bad], SLOW_BPS, lambda: self.kind == "slowed" and slow.is_set())
        store = MirroredStore(self.roots, disk=PointDisk(point, at_point, paced), wait_s=WAIT_S)
        began = time.monotonic()
        for fact in saving_life(store, self.seed):
            send(["fact", fact, time.monotonic() - began])
            began = time.monotonic()
        send(["ended"])

    def _inject(self) -> None:
        where = self.mounts[self.bad]
        if self.kind == "removed":
            self._detach(self.bad)
        elif self.kind == "moved":
            os.rename(self.roots[self.bad], f"{where}/moved")
        elif self.kind == "zeros":
            for path, _, names in os.walk(where):
                for name in names:
                    fill_with_zeros(f"{path}/{name}")
        elif self.kind == "read-only":
            threading.Thread(target=remount_read_only, args=(where,)).start()
        elif self.kind == "dead":
            cut_power(where, "log not flushed")

    def _detach(self, number: int) -> None:
        if os.path.ismount(self.mounts[number]):
            _libc.umount2(self.mounts[number].encode(), _MNT_DETACH)

    def _bring_back(self) -> bool:
        """Bring the drive back with what it had, or an empty one. Return whether it is new to the store."""
        where, is_new = self.mounts[self.bad], self.rng.random() < 0.3 and self.kind in ("removed", "dead", "zeros")
        if self.kind == "moved":
            if os.path.exists(self.roots[self.bad]):
                raise RuntimeError("the victim has written where the drive was")
            os.rename(f"{where}/moved", self.roots[self.bad])
        elif self.kind == "removed" and os.listdir(where):
            raise RuntimeError(f"the victim has written to the mount point: {os.listdir(where)}")
        if self.kind in ("removed", "dead", "read-only") or is_new:
            self._detach(self.bad)
            if is_new:
                copy_image(self.base, self.images[self.bad])
            mount_again(self.images[self.bad], where)
            os.makedirs(self.roots[self.bad], exist_ok=True)
        return is_new or self.kind == "zeros"

    def _examined(self) -> list[str]:
        with prepared():
            store = MirroredStore(self.roots)
            log = Log(store, RUN)
            return check_history(log, self.facts) + examine(store, log, self.facts)

    def _scrubbed(self, replaced: bool) -> dict[str, Any]:
        more = ["--new-drive", self.roots[self.bad]] if replaced else []
        try:
            done = CliRunner().invoke(cli, ["verify", "--repair", self.url, "--json", *more])
            report = json.loads(done.output) if done.exit_code == 0 else None
        except ValueError:
            report = None
        if report is None:
            return {"problems": [f"the scrub failed: {done.output[-600:]} {done.exception!r}"], "facts": []}
        problems = [f"not repaired: {row}" for row in report["damage"] if not row["repaired_from"]]
        drives = report["mirrors"]["here"]["drives"]
        problems += [f"not whole: {drive}" for drive in drives if drive["status"] != "good"]
        facts: list[Fact] = []
        with prepared():
            store = MirroredStore(self.roots)
            facts += resume(store, self.seed)
            log = Log(store, RUN)
            known = [*self.facts, *facts]
            problems += check_history(log, known) + examine(store, log, known)
        first, second = (files_in(root) for root in self.roots)
        problems += [f"only on one drive: {name}" for name in sorted(first.keys() ^ second.keys())]
        problems += [f"differs: {name}" for name in first if second.get(name, first[name]) != first[name]]
        return {"problems": problems, "facts": facts}


def fill_with_zeros(path: str) -> None:
    """Replace all bytes of a file by zeros, on the disk too."""
    with open(path, "r+b") as file:
        file.write(bytes(os.fstat(file.fileno()).st_size))
        file.flush()
        os.fsync(file.fileno())


def remount_read_only(where: str) -> None:
    """Make a mounted file system read-only, as soon as no file on it is open for writing."""
    ends = time.monotonic() + 20
    while _libc.mount(b"none", where.encode(), None, _MS_REMOUNT | _MS_RDONLY, None):
        if ctypes.get_errno() != errno.EBUSY or time.monotonic() > ends:
            return
        time.sleep(0.0005)


def mount_again(image: str, where: str) -> None:
    """Mount an image that may still be attached for a moment."""
    for left in reversed(range(50)):
        try:
            with attached(image) as device:
                mount_any(device, where, PLAIN.type, PLAIN.options)
            return
        except OSError:
            if not left:
                raise
            time.sleep(0.1)


def files_in(root: str) -> dict[str, bytes]:
    """Return the files of a drive, without temporary ones and those that name the drive or its state."""
    files = {}
    for path, _, names in os.walk(root):
        for name in names:
            is_own = path == root and name.startswith(("stripe.json", "mirrors-"))
            if not (is_own or temporary_of(name) or rewritten_of(name)):
                with open(f"{path}/{name}", "rb") as file:
                    files[f"{path.removeprefix(root)}/{name}"] = file.read()
    return files


def calls_of(directory: str) -> int:
    """Return the number of changing calls of a life."""

    def count() -> int:
        disk = PointDisk(0, lambda: None, Disk())
        for _ in saving_life(MirroredStore([f"{directory}/n0", f"{directory}/n1"], disk=disk), 0):
            pass
        return disk.seen

    return int(asked(count))


def run(count: int, seed: int = 0, *, kinds: Sequence[str] = KINDS, progress: bool = False) -> Report:
    """Do ``count`` trials. From here on, mounts of this process are private to it."""
    if os.geteuid():
        raise EngineUnavailable("mounting needs root")
    private_mounts()
    os.environ["RELIGHT_LOG"] = "quiet"
    report = Report("points", seed, expected=count if progress else 0)
    with report.timed(), scratch_directory("relight-mirrors-") as directory:
        base = f"{directory}/base"
        make_image(base, PLAIN)
        calls = calls_of(directory)
        report.counts["changing calls of a run"] = calls
        for number in range(count):
            kind = kinds[number % len(kinds)]
            trial = MirrorTrial(directory, base, seed, number, kind)
            point = trial.rng.randrange(LEAST_CALL, calls)
            try:
                problems = trial.run(point)
            except (RuntimeError, OSError) as error:
                problems = [repr(error)]
            finally:
                trial.end()
            slowest = report.counts[f"ms of the longest wait, {kind}"]
            report.counts[f"ms of the longest wait, {kind}"] = max(slowest, int(trial.longest_s * 1000))
            report.counts["saves"] += sum(fact[0] == "saved" for fact in trial.facts)
            report.add(f"{seed}:{number}", kind, problems, f"drive {trial.bad + 1}, call {point} of {calls}")
    return report


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Return 0 if nothing was lost, 1 if something was, 2 if nothing can be mounted here."""
    parser = engine_parser("proofs.mirrors", __doc__, 300)
    parser.add_argument("--kind", choices=KINDS, action="append", help="only these")
    return run_engine(
        parser, lambda options: run(options.count, options.seed, kinds=options.kind or KINDS, progress=True), arguments
    )


if __name__ == "__main__":
    sys.exit(main())
