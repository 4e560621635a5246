"""Processes that save runs on a disk until its power is cut.

A server imports the product once, with or without a mutation, and forks a process for each life
(``acknowledged.live_on``). The process writes each fact to a pipe at once, one line a fact. The pipe is not on the
disk, so the facts survive the cut. With a *counter* (a memory-mapped file with a number) each line begins with the
number at that time.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import mmap
import os
import random
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from proofs.engine_process import start_engine
from proofs.mutation_check import mutate
from proofs.mutations import DURABLE, SAVE, Mutation
from proofs.report import engine_parser

COUNTER_BYTES = 8
NEIGHBOURS = 0.4
"""Share of the lives that have a second writer on their disk."""
NEIGHBOUR_BYTES = 1 << 20
VIOLATIONS_MAX = 20
MUTATIONS = {
    "file": Mutation("fsync of every new file", DURABLE, "            self._disk.fsync(self._fd)\n", ""),
    "pack": Mutation(
        "fsync of packs",
        DURABLE,
        "            self._disk.fsync(self._fd)\n",
        "            if '/pack-' not in self._path:\n                self._disk.fsync(self._fd)\n",
    ),
    "record": Mutation(
        "fsync of the log's records",
        DURABLE,
        "            self._disk.fsync(self._fd)\n",
        "            if '/log/' not in self._path:\n                self._disk.fsync(self._fd)\n",
    ),
    "directory": Mutation("fsync of every directory", DURABLE, "            disk.fsync(fd)\n", "            pass\n"),
    "link": Mutation(
        "fsync of a new name's directory", DURABLE, "            sync_dir(disk, directory)\n", "            pass\n"
    ),
    "checkpoint": Mutation("fsync of the checkpoint's directory", SAVE, "    place.store.sync(prefix)\n", ""),
}
"""What can be removed from the product, only in the victims, by name: the negative controls."""


class AcknowledgedFact(NamedTuple):
    """A fact, and the counter at that time; 0 without a counter."""

    at: int
    fact: tuple[str, ...]


class Victims:
    """Client of the server, for the process that cuts the power. One life at a time."""

    def __init__(self, process: subprocess.Popen[bytes], facts: int) -> None:
        self._process, self._facts = process, facts
        self._rest = b""

    def start(self, where: str, seed: int) -> None:
        """Start a process on the disk that is mounted at ``where``. It runs until ``end``."""
        self._send(f"{seed} {where}")

    def receive(self, until: float) -> list[AcknowledgedFact]:
        """Return the new facts. Wait for the first one until ``until``, a time of ``time.monotonic``."""
        ready, _, _ = select.select([self._facts], [], [], max(0.0, until - time.monotonic()))
        if not ready:
            return []
        *lines, self._rest = (self._rest + os.read(self._facts, 1 << 16)).split(b"\n")
        return [AcknowledgedFact(moment, tuple(fact)) for moment, *fact in map(json.loads, lines)]

    def end(self) -> list[AcknowledgedFact]:
        """Kill the process, wait for its end, and return its last facts."""
        self._send("end")
        facts: list[AcknowledgedFact] = []
        while more := self.receive(0.0):
            facts += more
        self._rest = b""  # half a line: the process was killed while it wrote, so the fact does not count
        return facts

    def _send(self, line: str) -> None:
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(line.encode() + b"\n")
        self._process.stdin.flush()
        if self._process.stdout.readline() != b"done\n":
            raise RuntimeError("the server of victims has ended")


@contextlib.contextmanager
def victims(*, mutation: str | None = None, counter: str | None = None) -> Iterator[Victims]:
    """Start a server of lives. ``mutation``: a key of ``MUTATIONS``. ``counter``: a path."""
    read_end, write_end = os.pipe()
    options = ["--mutation", mutation] if mutation else []
    options += ["--counter", counter] if counter else []
    process = start_engine(
        "child_processes", "--facts", str(write_end), *options,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=(write_end,),
    )  # fmt: skip
    os.close(write_end)
    try:
        assert process.stdout
        if process.stdout.readline() != b"ready\n":
            raise RuntimeError("the server of victims did not start")
        yield Victims(process, read_end)
    finally:
        process.terminate()
        process.communicate()
        os.close(read_end)


def serve(facts: int, counter: mmap.mmap | None) -> None:
    """Serve requests from standard input: a line with a seed and a directory starts a life, ``end`` kills it."""
    with tempfile.TemporaryDirectory() as directory:  # one life imports every module
        _live(directory, 0, -1, None, facts_max=30)
    child = 0

    def leave(*_: object) -> None:
        if child:
            os.kill(child, signal.SIGKILL)
        os._exit(0)

    signal.signal(signal.SIGTERM, leave)
    os.write(1, b"ready\n")
    for line in sys.stdin:
        if line == "end\n":
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            child = 0
        else:
            seed, _, where = line.rstrip("\n").partition(" ")
            child = os.fork()
            if child == 0:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                _live(where, int(seed), facts, counter)
        os.write(1, b"done\n")
    leave()


def store_in(where: str) -> str:
    """Return the path of the store on a mounted disk. Neither the store nor its parent directory exists at first."""
    return f"{where}/above/store"


def _live(where: str, seed: int, facts: int, counter: mmap.mmap | None, facts_max: float = float("inf")) -> None:
    """Run a life and report its facts. An error ends it with the fact ``died``, which is expected only after the
    power cut.

    The process then waits until it is killed.
    """
    from proofs.acknowledged import live_on
    from relight.store import LocalStore
    from relight.testing.scenario import prepared

    def report(*fact: str) -> None:
        count = int.from_bytes(counter[:COUNTER_BYTES], "little") if counter is not None else 0
        if facts >= 0:
            os.write(facts, json.dumps([count, *fact]).encode() + b"\n")

    rng = random.Random(f"victim {seed}")
    if facts >= 0 and rng.random() < NEIGHBOURS:
        threading.Thread(target=_disturb, args=(f"{where}/neighbour", rng), daemon=True).start()
    try:
        with prepared() as names:
            names.seed(f"victim {seed}")
            for number, fact in enumerate(live_on(LocalStore(store_in(where)), seed)):
                report(*fact)
                if number >= facts_max:
                    return
    except BaseException as error:
        report("died", f"{type(error).__name__}: {error}")
    if facts >= 0:
        while True:
            signal.pause()


def _disturb(where: str, rng: random.Random) -> None:
    """Write to the same disk without any fsync, so that more writes are pending and the journal has more to do."""
    page = mmap.mmap(-1, 1 << 16)
    page.write(rng.randbytes(len(page)))
    with contextlib.suppress(OSError):  # the power was cut
        os.makedirs(where, exist_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        direct = os.open(f"{where}/direct", flags | os.O_DIRECT)
        os.ftruncate(direct, NEIGHBOUR_BYTES)
        while True:
            length = 4096 * rng.randrange(1, 17)
            os.pwrite(direct, memoryview(page)[:length], 4096 * rng.randrange((NEIGHBOUR_BYTES - length) // 4096))
            name = f"{where}/{rng.randrange(8)}"
            if rng.random() < 0.5:
                with open(f"{name}.new", "wb") as file:
                    file.write(page[: rng.randrange(9000)])
                os.rename(f"{name}.new", name)
            elif os.path.exists(name):
                os.unlink(name)
            time.sleep(rng.uniform(0, 0.004))


def victims_parser(module: str, doc: str | None, count: int) -> argparse.ArgumentParser:
    """Return the parser of an engine that saves in victims."""
    parser = engine_parser(module, doc, count)
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
    parser.add_argument("--keep", metavar="DIRECTORY", help="keep a copy of each disk that lost something")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command that starts the server."""
    parser = argparse.ArgumentParser(
        prog="python -m proofs.child_processes", description=(__doc__ or "").split("\n\n")[0]
    )
    parser.add_argument("--facts", type=int, required=True, metavar="FD")
    parser.add_argument("--mutation", choices=MUTATIONS)
    parser.add_argument("--counter", metavar="FILE")
    options = parser.parse_args(arguments)
    if options.mutation:
        mutate(MUTATIONS[options.mutation])
    counter = None
    if options.counter:
        with open(options.counter, "rb") as file:
            counter = mmap.mmap(file.fileno(), COUNTER_BYTES, prot=mmap.PROT_READ)
    serve(options.facts, counter)
    return 0


if __name__ == "__main__":
    sys.exit(main())
