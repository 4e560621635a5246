"""A thousand event streams on a real socket: all are told, within seconds, and the server answers others meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import uvicorn
from tests.format.forge import request
from tests.serve.made_server import FREE
from tests.serve.many_runs import make_many_runs

from relight.commit import Attempt
from relight.serve.app import Settings, create_app
from relight.serve.live import STREAMS_OF_ONE_MAX
from relight.store import open_bytes

CLIENTS = 1000
TOLD_S, REVOKED_S, ANSWER_S = 10.0, 3.0, 2.0
"""Bounds for a machine that has other things to do; what was measured is printed."""


class Running(NamedTuple):
    """A server on loopback."""

    app: Any
    port: int
    root: Path
    token: str


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Running]:
    """Two runs, followed a few times a second; in a thread of this process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2 * CLIENTS + 1000
    if hard != resource.RLIM_INFINITY and hard < wanted:
        pytest.skip(f"{wanted} open files are needed, and {hard} are allowed")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))
    root = make_many_runs(tmp_path / "runs", 2, 3)
    app = create_app(Settings([str(root)], tmp_path / "serve.sqlite", rules=FREE, poll_s=0.2))
    token = app.state.store.new_token("me", "admin")[1]
    with socket.create_server(("127.0.0.1", 0), backlog=2048) as listening:
        server = uvicorn.Server(uvicorn.Config(app, log_level="critical", ws="none", access_log=False, timeout_graceful_shutdown=3))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        until = time.monotonic() + 60
        while not server.started and time.monotonic() < until:
            time.sleep(0.02)
        try:
            yield Running(app, listening.getsockname()[1], root, token)
        finally:
            server.should_exit = True
            thread.join(30)
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert not thread.is_alive()


class Client:
    """One event stream."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @classmethod
    async def open(cls, at: Running, query: str = "") -> Client:
        """Asked for; nothing is read yet."""
        reader, writer = await asyncio.open_connection("127.0.0.1", at.port)
        writer.write(f"GET /events{query} HTTP/1.1\r\nhost: 127.0.0.1:{at.port}\r\nauthorization: Bearer {at.token}\r\n\r\n".encode())
        await writer.drain()
        return cls(reader, writer)

    async def until(self, word: bytes, seconds: float) -> float:
        """When that came."""
        async with asyncio.timeout(seconds):
            await self.reader.readuntil(word)
        return time.monotonic()

    async def ended(self, seconds: float) -> float:
        """When the server let go of it."""
        async with asyncio.timeout(seconds):
            while await self.reader.read(65536):
                pass
        return time.monotonic()

    async def close(self) -> None:
        """Go."""
        self.writer.close()
        with contextlib.suppress(OSError):
            await self.writer.wait_closed()


async def overview(at: Running) -> float:
    """How long the overview takes somebody who just looks."""
    begun = time.monotonic()
    reader, writer = await asyncio.open_connection("127.0.0.1", at.port)
    writer.write(f"GET / HTTP/1.1\r\nhost: 127.0.0.1:{at.port}\r\nauthorization: Bearer {at.token}\r\nconnection: close\r\n\r\n".encode())
    answer = await reader.read()
    writer.close()
    assert answer.startswith(b"HTTP/1.1 200 "), answer[:200]
    return time.monotonic() - begun


async def every(waiting: Any) -> list[float]:
    """All of them, in the order in which they were given."""
    return list(await asyncio.gather(*waiting))


def save(at: Running, run: str, step: int) -> None:
    """A checkpoint more, by another writer."""
    Attempt.begin(open_bytes(str(at.root)), run).save(request(step))


def test_a_thousand_streams_are_held_told_and_ended(running: Running, capsys: pytest.CaptureFixture[str]) -> None:
    """A checkpoint that is saved is told to each of a thousand; others are served meanwhile; a token that is revoked ends them all."""

    async def play() -> dict[str, float]:
        took: dict[str, float] = {}
        begun = time.monotonic()
        clients: list[Client] = []
        for start in range(0, CLIENTS, 100):
            some = [await Client.open(running) for _ in range(start, start + 100)]
            await every(one.until(b"event: hello", 60) for one in some)
            clients += some
        took["opened"] = time.monotonic() - begun
        assert running.app.state.hub.count == CLIENTS
        begun = time.monotonic()
        await asyncio.to_thread(save, running, "run-001", 1000)
        answer = await overview(running)
        took["told"] = max(await every(one.until(b"event: changed", 60) for one in clients)) - begun
        took["page meanwhile"] = max(answer, await overview(running))
        begun = time.monotonic()
        await asyncio.to_thread(running.app.state.store.revoke, running.token.partition("_")[2].partition(".")[0])
        took["ended"] = max(await every(one.ended(60) for one in clients)) - begun
        await every(one.close() for one in clients)
        return took

    took = asyncio.run(play())
    with capsys.disabled():
        print("\n  " + ", ".join(f"{name} {seconds:.2f} s" for name, seconds in took.items()), end=" ")
    assert took["told"] < TOLD_S and took["page meanwhile"] < ANSWER_S and took["ended"] < REVOKED_S
    until = time.monotonic() + 10
    while running.app.state.hub.count and time.monotonic() < until:
        time.sleep(0.05)
    assert running.app.state.hub.count == 0, "a stream that has ended is still counted"


def test_a_stream_hears_of_its_own_run_alone_and_again_and_again(running: Running) -> None:
    """Also of what comes after it has heard for the first time; what another run does is none of its business."""

    async def play() -> None:
        own, other = await Client.open(running, "?store=runs&run=run-001"), await Client.open(running, "?store=runs&run=run-000")
        await every(one.until(b"event: hello", 20) for one in (own, other))
        for number in range(3):
            await asyncio.to_thread(save, running, "run-001", 2000 + number)
            await own.until(b"event: changed", 20)
        with pytest.raises(TimeoutError):
            await other.until(b"event: changed", 1.5)
        await asyncio.to_thread(save, running, "run-000", 3000)
        await other.until(b"event: changed", 20)
        await every(one.close() for one in (own, other))

    asyncio.run(play())


def test_listeners_that_go_make_room(running: Running) -> None:
    """Whoever has as many streams as one may is refused another, in words; those that hang up are forgotten."""

    async def play() -> None:
        hub = running.app.state.hub
        first = await Client.open(running)
        await first.until(b"event: hello", 20)
        taken = next(iter(hub._streams))  # noqa: SLF001 (the bound is reached without opening so many)
        many = {type(taken)("", "", taken.asker) for _ in range(STREAMS_OF_ONE_MAX)}
        hub._streams |= many  # noqa: SLF001
        refused = await Client.open(running)
        await refused.until(b"too many event streams", 20)
        hub._streams -= many  # noqa: SLF001
        again = await Client.open(running)
        await again.until(b"event: hello", 20)
        await every(one.close() for one in (first, refused, again))
        until = time.monotonic() + 10
        while hub.count and time.monotonic() < until:
            await asyncio.sleep(0.05)
        assert hub.count == 0

    asyncio.run(play())
