"""Processes that live a run's life on a disk whose power will go: started at once, each told apart from the one that cuts.

A server imports the product once, with or without a mutation, and forks a process for each life (``acknowledged.live_on``). What a life
is told it writes into a pipe, one line a fact, the moment it is told: that is outside of the disk, so it survives. With a *counter*, a
file in memory that holds a number, each line begins with what that number was then.
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

from relight.comm.children import child_command
from relight.testing.mutation_check import DURABLE, SAVE, Mutation, mutate

COUNTER_BYTES = 8
NEIGHBOURS = 0.4
"""So many of the lives have a neighbour on their disk."""
NEIGHBOUR_BYTES = 1 << 20
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
    "link": Mutation("fsync of a new name's directory", DURABLE, "            sync_dir(disk, directory)\n", "            pass\n"),
    "checkpoint": Mutation("fsync of the checkpoint's directory", SAVE, "    place.store.sync(prefix)\n", ""),
}
"""What can be taken out of the product in the victims, and only there, by a word: the negative controls."""


class AcknowledgedFact(NamedTuple):
    """A fact, and what the counter was when it was told: 0 without one."""

    at: int
    fact: tuple[str, ...]


class Victims:
    """The server, from the side of the one that cuts. One life at a time."""

    def __init__(self, process: subprocess.Popen[bytes], facts: int) -> None:
        self._process, self._facts = process, facts
        self._rest = b""

    def start(self, where: str, seed: int) -> None:
        """Let a process live on the disk that is mounted in ``where``, from now on until ``end``."""
        self._send(f"{seed} {where}")

    def receive(self, until: float) -> list[AcknowledgedFact]:
        """What has been told since, waiting until that time (``time.monotonic``) for the first of it."""
        ready, _, _ = select.select([self._facts], [], [], max(0.0, until - time.monotonic()))
        if not ready:
            return []
        *lines, self._rest = (self._rest + os.read(self._facts, 1 << 16)).split(b"\n")
        return [AcknowledgedFact(at, tuple(fact)) for at, *fact in map(json.loads, lines)]

    def end(self) -> list[AcknowledgedFact]:
        """Kill the process and wait for its end: what it told last."""
        self._send("end")
        told: list[AcknowledgedFact] = []
        while more := self.receive(0.0):
            told += more
        self._rest = b""  # half a line: it was killed while telling, so it has not told
        return told

    def _send(self, line: str) -> None:
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(line.encode() + b"\n")
        self._process.stdin.flush()
        if self._process.stdout.readline() != b"done\n":
            raise RuntimeError("the server of victims is no more")


@contextlib.contextmanager
def victims(*, mutation: str | None = None, counter: str | None = None) -> Iterator[Victims]:
    """A server, ready to start lives. ``mutation``: a word of ``MUTATIONS``. ``counter``: a path."""
    read_end, write_end = os.pipe()
    command = child_command("relight.testing.child_processes", "--facts", str(write_end))
    command += ["--mutation", mutation] if mutation else []
    command += ["--counter", counter] if counter else []
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=(write_end,))
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
    """Start a life for each line, end it for the next one."""
    with tempfile.TemporaryDirectory() as directory:  # everything is imported by living once
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
    """The store of the lives on a disk that is mounted there: neither it nor the directory above it is there from the beginning."""
    return f"{where}/above/store"


def _live(where: str, seed: int, facts: int, counter: mmap.mmap | None, facts_max: float = float("inf")) -> None:
    """Live, and tell. Without power it goes on being told errors until it is killed; ``died`` says so, in case the power was there."""
    from relight.store import LocalStore
    from relight.testing.acknowledged import live_on
    from relight.testing.scenario import prepared

    def tell(*fact: str) -> None:
        at = int.from_bytes(counter[:COUNTER_BYTES], "little") if counter is not None else 0
        if facts >= 0:
            os.write(facts, json.dumps([at, *fact]).encode() + b"\n")

    rng = random.Random(f"victim {seed}")
    if facts >= 0 and rng.random() < NEIGHBOURS:
        threading.Thread(target=_disturb, args=(f"{where}/neighbour", rng), daemon=True).start()
    try:
        with prepared() as names:
            names.seed(f"victim {seed}")
            for number, fact in enumerate(live_on(LocalStore(store_in(where)), seed)):
                tell(*fact)
                if number >= facts_max:
                    return
    except BaseException as error:
        tell("died", f"{type(error).__name__}: {error}")
    if facts >= 0:
        while True:
            signal.pause()


def _disturb(where: str, rng: random.Random) -> None:
    """Somebody else on the same disk, who fsyncs nothing: more is under way at any moment, and the journal has more to do."""
    page = mmap.mmap(-1, 1 << 16)
    page.write(rng.randbytes(len(page)))
    with contextlib.suppress(OSError):  # the power has gone
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


def main(arguments: Sequence[str] | None = None) -> int:
    """The server's own command."""
    parser = argparse.ArgumentParser(prog="python -m relight.testing.child_processes", description=(__doc__ or "").split("\n\n")[0])
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
