"""Real SIGKILLs without the code's cooperation: strace kills a saving process at its n-th openat, pwrite64, fsync,
link, close …

``python -m relight.testing.kills --count 5000``. A small server process imports the product once, and strace attaches
to it. Each process that it forks runs ``scenario.life``. The kernel kills the process when it enters its n-th system
call of one kind (strace counts in each process from 1). Death before call n+1 is death after call n. Acknowledgements
are kept in shared memory. ``scenario.check`` then checks what is left on the disk.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import mmap
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from relight.comm.children import child_command
from relight.store import LocalStore
from relight.testing.scenario import Fact, Names, check, life, prepared, save_large
from relight.units import duration_text

SYSCALLS = {
    "fsync": 157,
    "pwrite64": 52,
    "openat": 359,
    "close": 258,
    "link,linkat": 11,
    "unlink,unlinkat": 21,
    "mkdir,mkdirat": 9,
    "rmdir": 3,
    "fallocate": 29,
    "ftruncate": 1,
}
"""System calls, with the approximate number of each in a life.

Each gets an equal share of the kills; rare ones need more lives.
"""
LIVES_MAX = 60
JOURNAL_BYTES = 1 << 20
WAIT_S = 60.0


class KillsUnavailable(RuntimeError):
    """Processes cannot be killed this way here: no strace, or no permission to trace."""


@dataclass
class KillReport:
    """Kills by system call, and violations."""

    seed: int
    kills: Counter[str] = field(default_factory=Counter)
    survived: int = 0
    violations: list[dict[str, object]] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def total(self) -> int:
        """Return the number of kills."""
        return sum(self.kills.values())

    @property
    def ok(self) -> bool:
        """Return whether every invariant held after every kill, and at least one process was killed."""
        return not self.violations and self.total > 0

    def to_dict(self) -> dict[str, object]:
        """Return the report for ``--json``."""
        return {
            "ok": self.ok,
            "seed": self.seed,
            "kills": self.total,
            "by_syscall": dict(self.kills),
            "seconds": round(self.seconds, 1),
            "violations": len(self.violations),
            "first": self.violations[:20],
        }


def run(count: int, seed: int = 0, *, progress: Callable[[KillReport, int], None] | None = None) -> KillReport:
    """Kill about ``count`` processes, and check after each. Raise ``KillsUnavailable`` if that is impossible here."""
    if shutil.which("strace") is None:
        raise KillsUnavailable("strace is not installed")
    report = KillReport(seed)
    began = time.perf_counter()
    share = max(1.0, count / len(SYSCALLS))
    with prepared() as names, _server() as server:
        while report.total < count:
            for syscall, calls in SYSCALLS.items():
                lives = min(LIVES_MAX, max(1, round(share / calls)))
                step = max(1, round(calls / share))
                _kill_at_each(
                    server, syscall, 1 + seed % step, step, range(seed, seed + lives), report, names, count, progress
                )
            seed += LIVES_MAX
    report.seconds = time.perf_counter() - began
    return report


def _kill_at_each(
    server: _ForkServer,
    syscall: str,
    first: int,
    step: int,
    seeds: Sequence[int],
    report: KillReport,
    names: Names,
    count: int,
    progress: Callable[[KillReport, int], None] | None,
) -> None:
    """Kill a life of each seed at call ``first``, ``first + step``, … of that kind, until no life makes that many calls."""
    n, alive = first, list(seeds)
    while alive and report.total < count:
        with server.traced(syscall, n):
            ended = [(seed, *server.live(seed)) for seed in alive]
        for seed, directory, code, facts in ended:
            if code == -signal.SIGKILL:
                report.kills[syscall.split(",")[0]] += 1
                names.seed(f"after {seed}")
                problems = check(LocalStore(f"{directory}/above/store"), facts, seed)
                if problems:
                    report.violations.append({"syscall": syscall, "n": n, "seed": seed, "wrong": problems[:5]})
            elif code == 0:
                report.survived += 1
                alive.remove(seed)
            else:
                raise RuntimeError(f"the life of seed {seed} ended with {code}")
            shutil.rmtree(directory)
        if progress:
            progress(report, count)
        n += step


class _ForkServer:
    """Client of the process that forks the lives."""

    def __init__(self, process: subprocess.Popen[bytes], directory: str, journal: mmap.mmap) -> None:
        self._process, self._directory, self._journal = process, directory, journal
        self._count = 0

    @contextlib.contextmanager
    def traced(self, syscall: str, n: int) -> Iterator[None]:
        """Within the block, kill each of its children at its ``n``-th ``syscall``."""
        command = [
            "strace",
            "-f",
            "-qq",
            "-o",
            "/dev/null",
            f"-etrace={syscall}",
            f"-einject={syscall}:signal=KILL:when={n}",
        ]
        strace = subprocess.Popen([*command, "-p", str(self._process.pid)], stderr=subprocess.PIPE)
        try:
            self._wait_traced(strace, True)
            yield
        finally:
            strace.terminate()
            strace.communicate()
            self._wait_traced(None, False)

    def _wait_traced(self, strace: subprocess.Popen[bytes] | None, traced: bool) -> None:
        status = Path(f"/proc/{self._process.pid}/status")
        until = time.monotonic() + WAIT_S
        while time.monotonic() < until:
            if (b"TracerPid:\t0\n" not in status.read_bytes()) == traced:
                return
            if strace is not None and strace.poll() is not None:
                message = strace.stderr.read().decode(errors="replace").strip() if strace.stderr else ""
                raise KillsUnavailable(f"strace cannot trace here: {message}")
            time.sleep(0.001)
        raise KillsUnavailable("strace did not attach in time")

    def live(self, seed: int) -> tuple[str, int, list[Fact]]:
        """Run one life in a new directory. Return ``(directory, exit code, facts)``."""
        directory = f"{self._directory}/{self._count}"
        self._count += 1
        os.mkdir(directory)
        self._journal[:8] = bytes(8)
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(f"{seed} {directory}\n".encode())
        self._process.stdin.flush()
        code = int(self._process.stdout.readline())
        length = int.from_bytes(self._journal[:8], "little")
        facts = [tuple(json.loads(line)) for line in self._journal[8 : 8 + length].splitlines()]
        return directory, code, facts


@contextlib.contextmanager
def _server() -> Iterator[_ForkServer]:
    base = "/dev/shm" if os.path.isdir("/dev/shm") and os.access("/dev/shm", os.W_OK) else None
    directory = tempfile.mkdtemp(prefix="relight-kills-", dir=base)
    path = f"{directory}/journal"
    Path(path).write_bytes(bytes(JOURNAL_BYTES))
    with open(path, "r+b") as file:
        journal = mmap.mmap(file.fileno(), JOURNAL_BYTES)
    command = child_command("relight.testing.kills", "--serve", path)
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert process.stdout
        if process.stdout.readline() != b"ready\n":
            raise RuntimeError("the server did not start")
        yield _ForkServer(process, directory, journal)
    finally:
        process.kill()
        process.communicate()
        shutil.rmtree(directory, ignore_errors=True)


def serve(path: str) -> None:
    """Fork a life for each line of standard input.

    After "ready" this process makes none of the calls at which strace kills.
    """
    with open(path, "r+b") as file:
        journal = mmap.mmap(file.fileno(), JOURNAL_BYTES)
    with prepared() as names:
        with tempfile.TemporaryDirectory(dir=os.path.dirname(path)) as directory:  # one life imports every module
            _live(names, 0, directory, journal)
        os.write(1, b"ready\n")
        pending = b""
        while True:
            while b"\n" not in pending:
                data = os.read(0, 4096)
                if not data:
                    return
                pending += data
            line, _, pending = pending.partition(b"\n")
            seed, _, where = line.decode().partition(" ")
            child = os.fork()
            if child == 0:
                try:
                    _live(names, int(seed), where, journal)
                except BaseException as error:
                    os.write(2, f"{error!r}\n".encode())
                    os._exit(1)
                os._exit(0)
            _, status = os.waitpid(child, 0)
            os.write(1, b"%d\n" % os.waitstatus_to_exitcode(status))


def _live(names: Names, seed: int, directory: str, journal: mmap.mmap) -> None:
    names.seed(f"killed {seed}")
    store = LocalStore(f"{directory}/above/store")
    length = 0
    for fact in _facts(store, seed):
        line = json.dumps(fact).encode() + b"\n"
        journal[8 + length : 8 + length + len(line)] = line
        length += len(line)
        journal[:8] = length.to_bytes(8, "little")


def _facts(store: LocalStore, seed: int) -> Iterator[Fact]:
    if seed % 3 == 0:
        yield from save_large(store, seed)
    yield from life(store, seed)


def show(report: KillReport) -> str:
    """Return the report as text."""
    seconds_each = report.seconds / max(report.total, 1)
    lines = [
        f"{report.total:,} processes killed, {len(report.violations)} violations, {duration_text(report.seconds)}, {duration_text(seconds_each)} a kill"
    ]
    lines += [f"  {name:12} {count:>7,}" for name, count in report.kills.items()]
    lines += [
        f"  {violation['syscall']} {violation['n']} of seed {violation['seed']}: {violation['wrong']}"
        for violation in report.violations[:10]
    ]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Return 0 if every invariant held, 1 if not, 2 if processes cannot be killed this way here."""
    parser = argparse.ArgumentParser(
        prog="python -m relight.testing.kills", description=(__doc__ or "").split("\n\n")[0]
    )
    parser.add_argument("--count", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--serve", metavar="JOURNAL", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.serve:
        serve(options.serve)
        return 0

    def progress(report: KillReport, count: int) -> None:
        if sys.stderr.isatty():
            text = f"\r{report.total:,} of {count:,} killed, {len(report.violations)} violations "
            print(text, end="", file=sys.stderr, flush=True)

    try:
        report = run(options.count, options.seed, progress=progress)
    except KillsUnavailable as error:
        print(f"no process was killed: {error}", file=sys.stderr)
        return 2
    if sys.stderr.isatty():
        print(file=sys.stderr)
    print(json.dumps(report.to_dict(), indent=1) if options.json else show(report))
    return 0 if report.ok else 1


if __name__ == "__main__":
    sys.exit(main())
