"""Real SIGKILLs without the code's cooperation: strace kills a saving process at its n-th openat, pwrite64, fsync,
link, close …

``python -m proofs.kills --count 5000``. A small server process imports the product once, and strace attaches
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
from collections.abc import Iterator, Sequence
from pathlib import Path

from proofs.disk_scenario import save_large
from proofs.engine_process import scratch_directory, start_engine
from proofs.report import EngineUnavailable, Report, engine_parser, run_engine
from relight.store import LocalStore
from relight.testing.scenario import Fact, Names, check, life, prepared

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


def run(count: int, seed: int = 0, *, progress: bool = False) -> Report:
    """Kill about ``count`` processes, and check after each. Raise ``EngineUnavailable`` if that is impossible here."""
    if shutil.which("strace") is None:
        raise EngineUnavailable("strace is not installed")
    report = Report("processes killed", seed, expected=count if progress else 0)
    share = max(1.0, count / len(SYSCALLS))
    with prepared() as names, _server() as server, report.timed():
        while report.total < count:
            for syscall, calls in SYSCALLS.items():
                lives = min(LIVES_MAX, max(1, round(share / calls)))
                step = max(1, round(calls / share))
                _kill_at_each(server, syscall, 1 + seed % step, step, range(seed, seed + lives), report, names, count)
            seed += LIVES_MAX
    return report


def _kill_at_each(
    server: _ForkServer,
    syscall: str,
    first: int,
    step: int,
    seeds: Sequence[int],
    report: Report,
    names: Names,
    count: int,
) -> None:
    """Kill a life of each seed at call ``first``, ``first + step``, … of that kind, until no life makes that many calls."""
    n, alive = first, list(seeds)
    while alive and report.total < count:
        with server.traced(syscall, n):
            ended = [(seed, *server.live(seed)) for seed in alive]
        for seed, directory, code, facts in ended:
            if code == -signal.SIGKILL:
                kind = syscall.split(",")[0]
                names.seed(f"after {seed}")
                problems = check(LocalStore(f"{directory}/above/store"), facts, seed)
                report.add(f"seed {seed}", kind, problems, f"{kind} {n}")
            elif code == 0:
                report.counts["survived"] += 1
                alive.remove(seed)
            else:
                raise RuntimeError(f"the life of seed {seed} ended with {code}")
            shutil.rmtree(directory)
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
                raise EngineUnavailable(f"strace cannot trace here: {message}")
            time.sleep(0.001)
        raise EngineUnavailable("strace did not attach in time")

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
    with scratch_directory("relight-kills-") as directory:
        path = f"{directory}/journal"
        Path(path).write_bytes(bytes(JOURNAL_BYTES))
        with open(path, "r+b") as file:
            journal = mmap.mmap(file.fileno(), JOURNAL_BYTES)
        process = start_engine("kills", "--serve", path, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        try:
            assert process.stdout
            if process.stdout.readline() != b"ready\n":
                raise RuntimeError("the server did not start")
            yield _ForkServer(process, directory, journal)
        finally:
            process.kill()
            process.communicate()


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


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Return 0 if every invariant held, 1 if not, 2 if processes cannot be killed this way here."""
    parser = engine_parser("proofs.kills", __doc__, 5000)
    parser.add_argument("--serve", metavar="JOURNAL", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.serve:
        serve(options.serve)
        return 0
    return run_engine(parser, lambda options: run(options.count, options.seed, progress=True), arguments)


if __name__ == "__main__":
    sys.exit(main())
