"""Event streams: a thousand at once over real sockets get each change, and end with their token."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from sse_starlette.sse import AppStatus
from tests.serve.made_server import FREE
from tests.serve.made_stores import make_store

from relight.catalog.run import Run
from relight.serve.app import ServerSettings, create_app
from relight.store import open_bytes

CLIENTS_MAX = 1000


@contextlib.contextmanager
def listening(tmp_path: Path) -> Iterator[tuple[Any, int]]:
    """Yield the server over one run, and its port on loopback."""
    root = make_store(tmp_path / "runs", 1, 2)
    app = create_app(ServerSettings([str(root)], tmp_path / "serve.sqlite", rules=FREE, poll_s=0.2))
    door = socket.create_server(("127.0.0.1", 0), backlog=2048)
    AppStatus.should_exit = False  # it is global, and the server of an earlier test has set it
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", ws="none", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [door]}, daemon=True)
    thread.start()
    ends = time.monotonic() + 10
    while not app.state.readers[0].now.runs and time.monotonic() < ends:
        time.sleep(0.02)
    try:
        yield app, door.getsockname()[1]
    finally:
        server.should_exit = True
        thread.join(10)


async def stream(port: int, token: str, question: str = "") -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Open a stream, and read its first event."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(
        f"GET /events{question} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nAuthorization: Bearer {token}\r\n\r\n".encode()
    )
    await asyncio.wait_for(reader.readuntil(b"hello"), 30)
    return reader, writer


@pytest.fixture
def many_files() -> Iterator[None]:
    """Raise the limit of open files, for both ends of each stream."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    if before[1] != resource.RLIM_INFINITY and before[1] < 3 * CLIENTS_MAX:
        pytest.skip(f"only {before[1]} open files are allowed here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(before[0], 3 * CLIENTS_MAX), before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.usefixtures("many_files")
@pytest.mark.parametrize("clients", [100, pytest.param(CLIENTS_MAX, marks=pytest.mark.slow)])
def test_many_streams_all_get_a_change_and_pages_are_answered_meanwhile(tmp_path: Path, clients: int) -> None:
    """Each stream gets the event of a new tag, and a page is answered meanwhile."""
    with listening(tmp_path) as (app, port):
        token = app.state.store.new_token("wall", "viewer")[1]

        async def hold() -> float:
            streams = []
            for _ in range(0, clients, 100):
                streams += await asyncio.gather(*(stream(port, token) for _ in range(100)))
            assert app.state.hub.count == clients
            run = Run(open_bytes(str(tmp_path / "runs")), "run-000")
            run.tag("news", run.history().live[0].id)
            await asyncio.wait_for(asyncio.gather(*(reader.readuntil(b"changed") for reader, _ in streams)), 30)
            begun = time.perf_counter()
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            asked = f"GET /api/v1/runs HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {token}\r\nConnection: close\r\n\r\n"
            writer.write(asked.encode())
            assert b"200 OK" in await asyncio.wait_for(reader.read(), 30)
            took = time.perf_counter() - begun
            for _, connection in [*streams, (reader, writer)]:
                connection.close()
            return took

        assert asyncio.run(hold()) < 5.0


def test_more_streams_than_there_is_room_for_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream beyond the maximum is refused with a time to retry, and not queued."""
    monkeypatch.setattr("relight.serve.live.STREAMS_MAX", 3)
    with listening(tmp_path) as (app, port):
        token = app.state.store.new_token("wall", "viewer")[1]

        async def crowd() -> None:
            streams = [await stream(port, token) for _ in range(3)]
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            request = (
                f"GET /events HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {token}\r\nConnection: close\r\n\r\n"
            )
            writer.write(request.encode())
            answered = await asyncio.wait_for(reader.read(), 10)
            assert b" 503 " in answered and b"retry-after" in answered
            for _, connection in [*streams, (reader, writer)]:
                connection.close()

        asyncio.run(crowd())


def test_a_stream_ends_within_a_second_of_its_tokens_end(tmp_path: Path) -> None:
    """After a token was revoked its stream ends, and a stream with another token continues."""
    with listening(tmp_path) as (app, port):
        token_id, token = app.state.store.new_token("leaver", "viewer")
        other = app.state.store.new_token("stayer", "viewer")[1]

        async def leave() -> float:
            leaving, staying = await stream(port, token), await stream(port, other)
            begun = time.perf_counter()
            app.state.store.revoke(token_id)
            await asyncio.wait_for(leaving[0].readuntil(b"\r\n0\r\n\r\n"), 10)
            took = time.perf_counter() - begun
            app.state.hub.changed()
            await asyncio.wait_for(staying[0].readuntil(b"changed"), 10)
            for _, writer in (leaving, staying):
                writer.close()
            return took

        assert asyncio.run(leave()) < 1.5


def test_a_stream_of_one_run_gets_no_other(tmp_path: Path) -> None:
    """A stream gets no event of another run. A stream of an unknown or hidden run is refused."""
    with listening(tmp_path) as (app, port):
        token = app.state.store.new_token("a", "viewer", "runs/run-000")[1]

        async def listen() -> None:
            reader, writer = await stream(port, token, "?store=runs&run=run-000")
            app.state.hub.changed("runs", {"run-001"})
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(reader.readuntil(b"changed"), 1)
            app.state.hub.changed("runs", {"run-000"})
            await asyncio.wait_for(reader.readuntil(b"changed"), 5)
            writer.close()
            for question in ("?store=runs&run=run-001", "?store=elsewhere"):
                with pytest.raises(asyncio.IncompleteReadError) as ended:
                    asked, door = await asyncio.open_connection("127.0.0.1", port)
                    request = f"GET /events{question} HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {token}\r\nConnection: close\r\n\r\n"
                    door.write(request.encode())
                    await asyncio.wait_for(asked.readuntil(b"hello"), 5)
                assert b"404" in ended.value.partial
                door.close()

        asyncio.run(listen())
