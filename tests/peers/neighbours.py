"""Agents for tests, each in a process of its own with real slots, which tests can kill.

``python neighbours.py SOCKET`` is a nursery: it imports all modules once, and forks an agent for every connection to its socket. The agent
executes commands, one line of JSON each. An agent ends with its connection, the nursery with its standard input.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy

from relight.arena import SEALED, SharedMapping, Slot, allocate, lay_out
from relight.peers import HeldPartFile, Peer, PeerService, Remote
from relight.peers.wire import without_fingerprint

PACK_SHARES = (0.6, 0.3, 0.1)


def content(id: str, rank: int, size: int) -> bytes:
    """Return the bytes of that rank's slot for that checkpoint, with header page and padding."""
    return numpy.random.default_rng([rank, size, *id.encode()]).bytes(size)


class Held:
    """A slot with one rank's part, filled as by a trainer."""

    def __init__(self, id: str, rank: int, size: int, seq: int) -> None:
        self.sizes = tuple(max(1, int(size * share)) - 7 * (size > 100) for share in PACK_SHARES) if size else ()
        layout = lay_out(self.sizes, 0)
        size = max(layout.size, 2 * 4096)
        self.starts = layout.packs
        self.slot = Slot(SharedMapping(allocate(size), size, writable=True))
        self.id, self.rank = id, rank
        self.fill(id, seq)

    def fill(self, id: str, seq: int) -> None:
        """Fill the slot as a trainer does for its next save."""
        self.id, self.seq = id, seq
        self.slot.begin(seq)
        self.slot.view[4096:] = content(id, self.rank, len(self.slot.view))[4096:]
        self.slot.seal(seq, 4096, 0)

    def part(self, lane: int) -> HeldPartFile:
        """Return the part, to be offered to peers."""
        slot, seq = self.slot, self.seq
        return HeldPartFile(
            self.id, seq, self.rank, lane, slot.memory, self.starts, self.sizes, lambda: slot.state() == (SEALED, seq)
        )


def expected(id: str, rank: int, size: int) -> list[bytes]:
    """Return the packs of such a part."""
    sizes = tuple(max(1, int(size * share)) - 7 * (size > 100) for share in PACK_SHARES) if size else ()
    layout = lay_out(sizes, 0)
    data = content(id, rank, max(layout.size, 2 * 4096))
    return [data[start : start + length] for start, length in zip(layout.packs, sizes)]


def cpu_s() -> float:
    """Return the processor seconds of this process and of those that it has started and that run."""
    total = time.process_time()
    for children in Path("/proc/self/task").glob("*/children"):
        for child in children.read_text().split():
            with contextlib.suppress(OSError):
                fields = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()
                total += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return total


def live(control: socket.socket) -> None:
    """Run one agent that executes the commands from ``control``."""
    peers: PeerService | None = None
    slots: dict[int, Held] = {}
    events: list[tuple[str, str]] = []
    for line in control.makefile("rb"):
        word, *given = json.loads(line)
        answer: Any = None
        if word == "start":
            token, memory, rate, tls, plane = given
            peers = PeerService(
                "127.0.0.1",
                token=bytes.fromhex(token),
                memory=memory,
                notify=lambda *event: events.append(event[:2]),
                bytes_per_second=rate,
                tls=tls,
                plane=plane,
            )
            answer = [peers.address, os.getpid()]
        elif word == "fill":
            id, seq, sizes = given
            for rank, size in sizes:
                if rank in slots and slots[rank].sizes == Held(id, rank, size, seq).sizes:
                    slots[rank].fill(id, seq)
                else:
                    slots[rank] = Held(id, rank, size, seq)
        elif word == "offer":
            assert peers is not None
            for lane, rank in enumerate(sorted(slots)):
                peers.offer(slots[rank].part(lane))
        elif word == "join":
            assert peers is not None
            roster, me, data, parity = given
            peers.join([Peer(*peer[:4], tuple(peer[4])) for peer in roster], me, data, parity)
        elif word == "wait":
            assert peers is not None
            answer = peers.wait(given[0])
        elif word == "events":
            answer = events
        elif word == "memory":
            assert peers is not None
            status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
            answer = {name: int(status[name].split()[0]) << 10 for name in ("RssAnon", "RssShmem")} | {
                "held": peers.held_bytes
            }
        elif word == "cpu":
            answer = cpu_s()
        elif word == "close":
            assert peers is not None
            peers.close()
        control.sendall(json.dumps(answer).encode() + b"\n")


class Neighbour:
    """The test's end of an agent process."""

    def __init__(
        self,
        control: socket.socket,
        name: str,
        token: bytes,
        memory: int | None,
        rate: float | None,
        tls: bool,
        plane: str,
    ) -> None:
        self._control, self._lines, self.name = control, control.makefile("rb"), name
        self.sizes: list[tuple[int, int]] = []
        self.address, self.pid = self.call("start", token.hex(), memory, rate, tls, plane)
        self.shown = without_fingerprint(self.address)

    def send(self, *words: Any) -> None:
        """Send a command."""
        self._control.sendall(json.dumps(words).encode() + b"\n")

    def receive(self) -> Any:
        """Return the answer to a command."""
        line = self._lines.readline()
        assert line, f"{self.name} is gone"
        return json.loads(line)

    def call(self, *words: Any) -> Any:
        """Send a command and return its answer."""
        self.send(*words)
        return self.receive()

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone: its control socket is closed then."""
        os.kill(self.pid, signal.SIGKILL)
        with contextlib.suppress(ConnectionError):
            self._control.recv(1)

    def close(self) -> None:
        """Close the connection, which ends the agent."""
        self._lines.close()
        self._control.close()


class Town:
    """Some agents that have joined one roster."""

    def __init__(self, token: bytes, agents: Sequence[Neighbour], data: int, parity: int) -> None:
        self.token, self.agents, self.data, self.parity = token, list(agents), data, parity
        self.plane, self.timeout_s = "tcp", 20.0
        """How ``remote`` reads."""

    def all(self, *words: Any) -> list[Any]:
        """Send a command to all agents at once and return their answers."""
        for agent in self.agents:
            agent.send(*words)
        return [agent.receive() for agent in self.agents]

    def join(self) -> None:
        """Let all agents join one roster with three racks."""
        roster = [
            (agent.name, agent.name, f"rack{number % 3}", agent.address, sorted(rank for rank, _ in agent.sizes))
            for number, agent in enumerate(self.agents)
        ]
        for agent in self.agents:
            agent.send("join", roster, agent.name, self.data, self.parity)
        for agent in self.agents:
            agent.receive()

    def protect(self, id: str, seq: int, seconds: float = 60.0) -> None:
        """Fill and protect all agents' parts of a new checkpoint."""
        for agent in self.agents:
            agent.send("fill", id, seq, agent.sizes)
        for agent in self.agents:
            agent.receive()
        self.all("offer")
        assert all(self.all("wait", seconds))

    def remote(self) -> Remote:
        """Return a reader of all agents, as a restoring rank has, with its plane."""
        addresses = [agent.address for agent in self.agents]
        tls = all("#" in address for address in addresses)
        remote = Remote(addresses, self.token, self.timeout_s, tls=tls, plane=self.plane)
        assert remote.wait_for_plane(60)
        return remote

    def close(self) -> None:
        """Close all agents."""
        for agent in self.agents:
            agent.close()


class Nursery:
    """A process that forks agents on demand. ``env``: added to its environment."""

    def __init__(self, env: dict[str, str] | None = None) -> None:
        self._env = {**os.environ, **(env or {})}

    def __enter__(self) -> Nursery:
        self._folder = tempfile.TemporaryDirectory()
        self._path = os.path.join(self._folder.name, "s")
        self._process = subprocess.Popen([sys.executable, __file__, self._path], stdin=subprocess.PIPE, env=self._env)
        ends = time.monotonic() + 60
        while not os.path.exists(self._path):
            assert time.monotonic() < ends and self._process.poll() is None
            time.sleep(0.01)
        self._made = 0
        return self

    def __exit__(self, *error: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)
        self._folder.cleanup()

    def agent(
        self,
        token: bytes,
        memory: int | None = None,
        rate: float | None = None,
        *,
        tls: bool = False,
        plane: str = "tcp",
    ) -> Neighbour:
        """Fork an agent."""
        control = socket.socket(socket.AF_UNIX)
        ends = time.monotonic() + 30
        while True:
            try:
                control.connect(self._path)
                break
            except ConnectionRefusedError:
                assert time.monotonic() < ends
                time.sleep(0.01)
        control.settimeout(120)
        self._made += 1
        return Neighbour(control, f"agent{self._made}", token, memory, rate, tls, plane)

    def town(
        self,
        sizes: Sequence[Sequence[int]],
        data: int,
        parity: int,
        *,
        memory: int | None = None,
        token: bytes = b"t" * 32,
        tls: bool = False,
        plane: str = "tcp",
    ) -> Town:
        """Fork one agent for each list of sizes, and let them join. A list has a size for each rank of the agent."""
        agents, rank = [], 0
        for mine in sizes:
            agent = self.agent(token, memory, tls=tls, plane=plane)
            agent.sizes = [(rank + number, size) for number, size in enumerate(mine)]
            rank += len(mine)
            agents.append(agent)
        town = Town(token, agents, data, parity)
        town.plane = plane
        town.join()
        return town


def lost_is_read_back(town: Town, id: str, victims: Sequence[int], step: int = 4 << 20) -> None:
    """Kill the victims and check the parts of all agents: whole reads and reads at odd offsets."""
    for victim in victims:
        town.agents[victim].kill()
    with contextlib.closing(town.remote()) as remote:
        assert len(remote.answered) == len(town.agents) - len(victims)
        for number, agent in enumerate(town.agents):
            for rank, size in agent.sizes:
                where = remote.has(id, rank)
                if number in victims:
                    assert where is not None and where.startswith("rebuilt from "), where
                else:
                    assert where == f"agent at {agent.shown}"
                for pack, right in enumerate(expected(id, rank, size)):
                    reader = remote.reader(id, rank, pack)
                    assert reader is not None and reader.size == len(right)
                    room = bytearray(len(right))
                    for begin in range(0, len(right), step):
                        reader.read_into(begin, memoryview(room)[begin : begin + step])
                    assert room == right
                    for begin in (0, len(right) // 3, max(0, len(right) - 5)):
                        few = bytearray(min(1001, len(right) - begin))
                        reader.read_into(begin, memoryview(few))
                        assert few == right[begin : begin + len(few)]


def main() -> None:
    """Run the nursery."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(sys.argv[1])
    listener.listen(64)
    assert threading.active_count() == 1
    while True:
        ready, _, _ = select.select([listener, sys.stdin], [], [])
        if sys.stdin in ready:
            return
        control, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            with contextlib.suppress(BrokenPipeError, ConnectionError):
                live(control)
            os._exit(0)
        control.close()


if __name__ == "__main__":
    main()
