"""Event streams over real saves: each stream gets the changes of its own run, and a closed stream frees its place."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import uvicorn
from tests.format.forge import request
from tests.serve.made_server import FREE
from tests.serve.many_runs import make_many_runs

from relight.commit import Attempt
from relight.serve.app import ServerSettings, create_app
from relight.serve.event_feed import POLL_S
from relight.serve.live import STREAMS_OF_ONE_MAX
from relight.store import open_bytes


class Running(NamedTuple):
    """A server on loopback."""

    app: Any
    port: int
    root: Path
    token: str


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Running]:
    """Yield a server over two runs in a thread of this process. It polls a few times a second."""
    root = make_many_runs(tmp_path / "runs", 2, 3)
    app = create_app(ServerSettings([str(root)], tmp_path / "serve.sqlite", rules=FREE, poll_s=0.2))
    token = app.state.store.new_token("me", "admin")[1]
    with socket.create_server(("127.0.0.1", 0), backlog=2048) as listening:
        server = uvicorn.Server(uvicorn.Config(app, log_level="critical", ws="none", timeout_graceful_shutdown=1))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        until = time.monotonic() + 60
        while not (server.started and app.state.readers[0].now.runs) and time.monotonic() < until:
            time.sleep(0.02)
        try:
            yield Running(app, listening.getsockname()[1], root, token)
        finally:
            server.should_exit = True
            thread.join(30)
    assert not thread.is_alive()


class Client:
    """One event stream."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @classmethod
    async def open(cls, at: Running, query: str = "") -> Client:
        """Request a stream, and read nothing yet."""
        reader, writer = await asyncio.open_connection("127.0.0.1", at.port)
        writer.write(
            f"GET /events{query} HTTP/1.1\r\nhost: 127.0.0.1:{at.port}\r\nauthorization: Bearer {at.token}\r\n\r\n".encode()
        )
        await writer.drain()
        return cls(reader, writer)

    async def until(self, word: bytes, seconds: float) -> None:
        """Read until ``word`` arrives."""
        async with asyncio.timeout(seconds):
            await self.reader.readuntil(word)

    async def quiet(self) -> None:
        """Read until nothing has arrived for a while."""
        with contextlib.suppress(TimeoutError):
            while True:
                async with asyncio.timeout(0.7):
                    assert await self.reader.read(65536)

    async def close(self) -> None:
        """Close the connection."""
        self.writer.close()
        with contextlib.suppress(OSError):
            await self.writer.wait_closed()


async def every(waiting: Iterable[Any]) -> None:
    """Wait for all of them."""
    await asyncio.gather(*waiting)


def save(at: Running, run: str, step: int) -> None:
    """Save one more checkpoint, as another writer."""
    Attempt.begin(open_bytes(str(at.root)), run).save(request(step))


def test_a_stream_gets_every_change_of_its_own_run_alone(running: Running) -> None:
    """A stream gets every change of its own run, also after the first one, and no change of another run."""

    async def play() -> None:
        own, other = (
            await Client.open(running, "?store=runs&run=run-001"),
            await Client.open(running, "?store=runs&run=run-000"),
        )
        await every(client.until(b"event: hello", 20) for client in (own, other))
        while len(running.app.state.index._around.firing()) < 2:  # noqa: SLF001 (alerts are on every page)
            await asyncio.sleep(0.1)
        await asyncio.sleep(POLL_S + 0.5)
        await every(client.quiet() for client in (own, other))  # the first stream gets the store's first read
        for number in range(3):
            await asyncio.to_thread(save, running, "run-001", 2000 + number)
            await own.until(b"event: changed", 20)
            await own.quiet()
        with pytest.raises(TimeoutError):
            await other.until(b"event: changed", 1.5)
        await asyncio.to_thread(save, running, "run-000", 3000)
        await other.until(b"event: changed", 20)
        await every(client.close() for client in (own, other))

    asyncio.run(play())


def test_listeners_that_go_make_room(running: Running) -> None:
    """A client with the maximum of streams is refused another, with a text. A closed stream frees its place."""

    async def play() -> None:
        hub = running.app.state.hub
        first = await Client.open(running)
        await first.until(b"event: hello", 20)
        taken = next(iter(hub._streams))  # noqa: SLF001 (the limit is reached without opening so many)
        many = {type(taken)("", "", taken.asker) for _ in range(STREAMS_OF_ONE_MAX)}
        hub._streams |= many  # noqa: SLF001
        refused = await Client.open(running)
        await refused.until(b"too many event streams", 20)
        hub._streams -= many  # noqa: SLF001
        again = await Client.open(running)
        await again.until(b"event: hello", 20)
        await every(client.close() for client in (first, refused, again))
        until = time.monotonic() + 10
        while hub.count and time.monotonic() < until:
            await asyncio.sleep(0.05)
        assert hub.count == 0

    asyncio.run(play())
