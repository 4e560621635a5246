"""A storm of readers on ``relight serve``: a real process that may open 256 files. ``make readers``; a slice is in the suite.

Clients hold idle connections, send requests byte by byte, do not read answers, guess tokens, start verifications and
comparisons and leave, listen to events, and request the largest pages. They use many addresses of the loopback network,
chosen by a seed. Meanwhile:

- ``/healthz`` answers within 1 s, each time;
- a client with a token is never refused for its token, its address or its rate;
- no answer of the API is over 1 MB, although a checkpoint has 100,000 tensors;
- the process has descriptors left, and frees those of the storm when it is over.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.format.forge import values

from relight.commit import Attempt, SaveInfo, SaveRequest
from relight.format import Leaf, encode_tree
from relight.layout import Bytes, Item
from relight.serve.state import TokenFile
from relight.store import open_bytes

DESCRIPTORS, HEALTH_S, ANSWER_BYTES = 256, 1.0, 1_000_000
KINDS = {"idle": 400, "headers": 60, "bodies": 40, "deaf": 30, "guesses": 20, "pages": 12, "diffs": 8, "streams": 80}
"""Clients of each kind at a time."""
_HEALTH = """
import json, sys, threading
from tests.serve.storm import Seen, watch_health
seen, stop = Seen(), threading.Event()
threading.Timer(float(sys.argv[2]), stop.set).start()
watch_health(int(sys.argv[1]), seen, stop, int(sys.argv[3]))
print(json.dumps([seen.health, seen.unanswered, seen.descriptors]))
"""


def make_store(root: Path, tensors: int = 100_000, wide_bytes: int = 64 << 20) -> Path:
    """Make two runs, ``many`` of very many tensors and ``wide`` of few large ones, each with two checkpoints."""
    for name, rows in (
        (
            "many",
            [(f"model/block.{n // 100}/layer.{n}.weight", "float32", (4,), "param", True) for n in range(tensors)],
        ),
        ("wide", [(f"model/w{n}", "float32", (wide_bytes // 16,), "param", True) for n in range(4)]),
    ):
        attempt = Attempt.begin(open_bytes(str(root)), name)
        for step in (100, 200):
            contents = values(step, rows)
            items = [
                Item(path, dtype, shape, role, Bytes(contents[path]), trainable=t)
                for path, dtype, shape, role, t in rows
            ]
            tree = {"model": {str(n): Leaf("tensor", (n,)) for n in range(len(rows))}}
            attempt.save(
                SaveRequest(SaveInfo(step=step, metrics={"loss": 1.0 / step}), tree=encode_tree(tree), items=items)
            )
    return root


@dataclass
class Seen:
    """The clients' observations."""

    health: list[float] = field(default_factory=list)
    unanswered: list[str] = field(default_factory=list)
    token_answers: Counter[int] = field(default_factory=Counter)
    status: Counter[str] = field(default_factory=Counter)
    rounds: Counter[str] = field(default_factory=Counter)
    """Connections or requests that clients of each kind began, so how often the server let them begin again."""
    largest: tuple[int, str] = (0, "")
    descriptors: int = 0


class Storm:
    """The clients of one server at ``port``.

    ``tokens``: an operator's, which requests verifications up to its limit, and one of a client with few requests.
    """

    def __init__(self, port: int, tokens: tuple[str, str], seed: int, kinds: dict[str, int]) -> None:
        self.port, self.kinds, (self.operator, self.reader) = port, kinds, tokens
        self.rng, self.seen, self.ends = random.Random(seed), Seen(), 0.0

    async def rage(self, seconds: float) -> None:
        """Run all clients for ``seconds``."""
        self.ends = time.monotonic() + seconds
        clients: dict[str, Callable[[], Awaitable[None]]] = {
            "idle": self._idle, "headers": self._headers, "bodies": self._bodies, "deaf": self._deaf, "guesses": self._guess,
            "pages": self._page, "diffs": self._diff, "streams": self._stream,
        }  # fmt: skip
        tasks = [
            asyncio.create_task(self._again(kind, clients[kind]))
            for kind, count in self.kinds.items()
            for _ in range(count)
        ]
        tasks += [asyncio.create_task(self._verify()), asyncio.create_task(self._client())]
        await asyncio.sleep(seconds)
        for task in tasks:
            task.cancel()
        for ended in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(ended, Exception):
                raise ended

    async def _again(self, kind: str, client: Callable[[], Awaitable[None]]) -> None:
        while time.monotonic() < self.ends:
            self.seen.rounds[kind] += 1
            with contextlib.suppress(OSError, asyncio.IncompleteReadError, TimeoutError):
                await client()
            await asyncio.sleep(0.05 + self.rng.random() / 4)

    @contextlib.asynccontextmanager
    async def _open(self, own: bool = False) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        """Open a connection from a random address, or with ``own`` from this host's."""
        place = None if own else (f"127.{self.rng.randrange(1, 4)}.0.{self.rng.randrange(1, 20)}", 0)
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, local_addr=place)
        try:
            yield reader, writer
        finally:
            writer.close()

    async def ask(
        self, path: str, *, token: str = "", body: Any = None, own: bool = False, wait_s: float = 20.0
    ) -> tuple[int, bytes]:
        """Send one request on a connection of its own. Return the status and the body."""
        async with asyncio.timeout(wait_s), self._open(own) as (reader, writer):
            data = json.dumps(body).encode() if body is not None else b""
            head = (
                f"{'POST' if data else 'GET'} {path} HTTP/1.1\r\nhost: localhost:{self.port}\r\nconnection: close\r\n"
            )
            head += f"authorization: Bearer {token}\r\n" if token else ""
            head += f"content-type: application/json\r\ncontent-length: {len(data)}\r\n" if data else ""
            writer.write(head.encode() + b"\r\n" + data)
            answer = await reader.read(-1)
        status = int(answer[9:12] or 0)
        self.seen.status[f"{path.partition('?')[0][:12]} {status}"] += 1
        if path.startswith("/api") and len(answer) > self.seen.largest[0]:
            self.seen.largest = len(answer), path
        return status, answer.partition(b"\r\n\r\n")[2]

    async def _idle(self) -> None:
        async with self._open() as (reader, _):
            await reader.read(1)

    async def _headers(self) -> None:
        async with self._open() as (_, writer):
            for byte in f"GET / HTTP/1.1\r\nhost: localhost\r\nx-slow: {'a' * 500}":
                writer.write(byte.encode())
                await writer.drain()
                await asyncio.sleep(0.3)

    async def _bodies(self) -> None:
        async with self._open() as (_, writer):
            head = f"POST /login HTTP/1.1\r\nhost: localhost:{self.port}\r\norigin: http://localhost:{self.port}\r\n"
            head += "content-type: application/x-www-form-urlencoded\r\ncontent-length: 60000\r\n\r\ntoken="
            for piece in [head, *("a" for _ in range(500))]:
                writer.write(piece.encode())
                await writer.drain()
                await asyncio.sleep(0.3)

    async def _deaf(self) -> None:
        async with self._open() as (_, writer):
            request = f"GET /api/v1/runs/runs/many/checkpoints/latest?limit=500 HTTP/1.1\r\nhost: localhost:{self.port}\r\n\r\n"
            writer.write(request.encode() * 50)
            await asyncio.sleep(self.ends - time.monotonic())

    async def _guess(self) -> None:
        await self.ask("/api/v1/runs", token=f"rl_{self.rng.randrange(10**9):010d}.{'A' * 43}")

    async def _page(self) -> None:
        await self.ask(
            self.rng.choice(
                [
                    "/runs/runs/many/checkpoints/latest",
                    "/api/v1/runs/runs/many/checkpoints/latest?limit=500",
                    "/",
                    "/lineage",
                ]
            )
        )

    async def _diff(self) -> None:
        run = self.rng.choice(["many", "wide"])
        await self.ask(f"/api/v1/diff?a=runs/{run}@100&b=runs/{run}@200&limit=500")

    async def _stream(self) -> None:
        async with self._open() as (reader, writer):
            writer.write(f"GET /events HTTP/1.1\r\nhost: localhost:{self.port}\r\n\r\n".encode())
            while await reader.read(4096):
                pass

    async def _verify(self) -> None:
        """Send 84 requests for a verification at once, again and again."""
        fields = {"store": "runs", "run": "wide", "which": "latest"}
        while time.monotonic() < self.ends:
            status, body = await self.ask(
                "/api/v1/actions/verify", token=self.operator, body={"fields": fields}, own=True
            )
            if status == 200:
                confirmed = {"fields": fields, "confirm": json.loads(body)["digest"]}
                asks = [
                    self.ask("/api/v1/actions/verify", token=self.operator, body=confirmed, own=True) for _ in range(84)
                ]
                await asyncio.gather(*asks, return_exceptions=True)
            await asyncio.sleep(0.5)

    async def _client(self) -> None:
        """A client with a token, from an address that other clients use to guess tokens."""
        while time.monotonic() < self.ends:
            status, _ = await self.ask("/api/v1/stores", token=self.reader, own=True)
            self.seen.token_answers[status] += 1
            await asyncio.sleep(0.5)


def watch_health(port: int, seen: Seen, stop: threading.Event, pid: int = 0) -> None:
    """Request ``/healthz`` on a new connection ten times a second, until ``stop``. Count the descriptors of ``pid``."""
    while not stop.wait(0.1):
        begun = time.monotonic()
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=5) as connection:
                connection.sendall(b"GET /healthz HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
                answer = connection.recv(64)
            if not answer.startswith(b"HTTP/1.1 200"):
                seen.unanswered.append(answer[:40].decode("latin-1") or "closed")
        except OSError as error:
            seen.unanswered.append(f"{type(error).__name__}: {error}")
        seen.health.append(time.monotonic() - begun)
        if pid:
            seen.descriptors = max(seen.descriptors, len(os.listdir(f"/proc/{pid}/fd")))


def main() -> int:
    """Run the whole storm on a real process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--tensors", type=int, default=100_000)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="relight-storm-") as place:
        root = make_store(Path(place) / "runs", given.tensors)
        state = TokenFile(Path(place) / "serve.sqlite")
        tokens = state.new_token("operator", "operator")[1], state.new_token("reader", "viewer")[1]
        state.close()
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        command = [
            sys.executable,
            "-P",
            "-m",
            "relight",
            "serve",
            str(root),
            "--listen",
            f"127.0.0.1:{port}",
            "--anonymous-read",
        ]
        limited = [
            "sh",
            "-c",
            f'ulimit -n {DESCRIPTORS}; exec "$@"',
            "sh",
            *command,
            "--state",
            f"{place}/serve.sqlite",
        ]
        with subprocess.Popen(limited, cwd=place, env=os.environ | {"RELIGHT_EVENTS": f"{place}/events"}) as server:
            try:
                return _rage(server, port, tokens, given.seed, given.seconds)
            finally:
                server.terminate()
                server.wait(20)


def _rage(server: subprocess.Popen[bytes], port: int, tokens: tuple[str, str], seed: int, seconds: float) -> int:
    storm = Storm(port, tokens, seed, KINDS)
    ends = time.monotonic() + 60
    while time.monotonic() < ends:
        with contextlib.suppress(OSError):
            if asyncio.run(storm.ask("/readyz", own=True))[0] == 200:
                break
        time.sleep(0.2)
    time.sleep(2.0)
    before = len(os.listdir(f"/proc/{server.pid}/fd"))
    health = subprocess.Popen(  # a separate process, so that the clients do not slow it down
        [sys.executable, "-c", _HEALTH, str(port), str(seconds), str(server.pid)], stdout=subprocess.PIPE
    )
    asyncio.run(storm.rage(seconds))
    counts = json.loads(health.communicate(timeout=60)[0])
    storm.seen.health, storm.seen.unanswered, storm.seen.descriptors = counts
    time.sleep(15.0)
    after, seen = len(os.listdir(f"/proc/{server.pid}/fd")), storm.seen
    slow = sorted(seen.health)
    print(
        f"health: {len(slow)} asked, slowest {slow[-1] * 1000:.0f} ms, median {slow[len(slow) // 2] * 1000:.0f} ms; not answered: {seen.unanswered[:5]}"
    )
    print(
        f"with a token: {dict(seen.token_answers)}; descriptors {before} before, {seen.descriptors} at most, {after} after"
    )
    print(f"largest answer: {seen.largest[0]} bytes, {seen.largest[1]}")
    print("begun: " + ", ".join(f"{kind} {count}" for kind, count in seen.rounds.items()))
    print("answers: " + ", ".join(f"{name} {count}" for name, count in sorted(seen.status.items())))
    bad = [
        *(["/healthz was not answered"] if seen.unanswered else []),
        *([f"/healthz took {slow[-1]:.1f} s"] if slow[-1] > HEALTH_S else []),
        *(
            ["a right token was refused"]
            if {401, 403, 429} & seen.token_answers.keys() or not seen.token_answers[200]
            else []
        ),
        *([f"an answer of {seen.largest[0]} bytes"] if seen.largest[0] > ANSWER_BYTES else []),
        *(["no descriptors were left"] if seen.descriptors >= DESCRIPTORS else []),
        *(["descriptors were not freed"] if after > before + 16 else []),
        *(["the server ended"] if server.poll() is not None else []),
    ]
    print("\n".join(bad) or "all held")
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
