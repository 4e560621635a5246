"""A slice of ``make readers``, by a seed: counts of connections, jobs, tasks and bytes under hostile readers, not seconds."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import random
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from tests.serve.made_server import FREE, Server, serving
from tests.serve.made_stores import make_store

from relight.errors import StoreUnavailable
from relight.serve import gate as serve_gate
from relight.serve import jobs as serve_jobs
from relight.serve.app import ServerSettings, create_app
from relight.serve.gate import ConnectionLimits, Gate, Listening, bounds_of
from relight.serve.jobs import OF_ONE_MAX, Jobs, PooledJob, Progress
from relight.serve.live import Hub, Stream
from relight.serve.pages_actions import ActionOutcome
from relight.serve.pieces import LISTED_MAX, bounded_run, checkpoint_piece, diff_piece, lineage_piece
from relight.serve.scope import asking
from relight.serve.slots import MOST, OF_ANONYMOUS, WAITING_OF_ONE_MAX, StreamSlots
from relight.serve.tasks import OF_ONE_MAX as TASKS_OF_ONE
from relight.serve.values import (
    CheckpointDetail,
    CheckpointRow,
    DiffDetail,
    DiffRow,
    IncidentRow,
    LineageRow,
    RunDetail,
    RunRow,
    TensorRow,
)

BOUNDS = ConnectionLimits(connections=24, of_one=16, streams=8)


class Running:
    """A real server on loopback with a small gate."""

    def __init__(self, root: Path, idle_s: float = 30.0) -> None:
        app = create_app(ServerSettings([str(make_store(root / "runs", 1, 1))], root / "serve.sqlite", rules=FREE))
        self.gate = Gate(BOUNDS, idle_s=idle_s)
        self.port = 0
        self.listening = self.gate.listen(("127.0.0.1", 0))
        self.port = self.listening[0].getsockname()[1]
        config = uvicorn.Config(
            app, loop="asyncio", http=self.gate.protocol(), log_level="critical", ws="none", timeout_graceful_shutdown=1
        )
        self.server = uvicorn.Server(config)
        self.thread = threading.Thread(target=self.server.run, kwargs={"sockets": list(self.listening)})
        self.thread.start()
        ends = time.monotonic() + 30
        while not self.server.started and time.monotonic() < ends:
            time.sleep(0.02)

    def connect(self, data: bytes = b"", host: str = "127.0.0.1") -> socket.socket:
        """Open a connection from an address of this machine, and send ``data``."""
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=10, source_address=(host, 0))
        with contextlib.suppress(OSError):
            connection.sendall(data)
        return connection

    def health(self, host: str = "127.0.0.1") -> bytes:
        """Return the first line of the answer to ``/healthz``."""
        with self.connect(b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n", host) as connection:
            return connection.recv(100).partition(b"\r\n")[0]

    def close(self) -> None:
        """End the server."""
        self.server.should_exit = True
        self.thread.join(30)


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Running]:
    """Yield a running server."""
    made = Running(tmp_path)
    yield made
    made.close()


def test_idle_connections_keep_no_client_out(running: Running) -> None:
    """With many unfinished requests, health answers, and the number of open connections stays limited."""
    rng, connections = random.Random(7), []
    starts = [
        b"",
        b"GET / HT",
        b"GET / HTTP/1.1\r\nhost: localhost\r\nx: ",
        b"POST /login HTTP/1.1\r\nhost: localhost\r\ncontent-length: 60000\r\n\r\ntoken=",
    ]
    for number in range(120):
        connections.append(running.connect(rng.choice(starts), f"127.0.0.{rng.randrange(1, 9)}"))
        if number % 20 == 19:
            assert running.health() == running.health("127.0.0.9") == b"HTTP/1.1 200 OK"
    assert running.gate.most <= BOUNDS.connections + 1 and running.gate.evicted > 60
    for connection in connections:
        connection.close()


@pytest.mark.skipif(not hasattr(socket, "TCP_DEFER_ACCEPT"), reason="only Linux defers silent connections")
def test_silent_connections_are_not_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients that send nothing cost the loop no callback and close no other connection; a late request is answered."""
    monkeypatch.setattr(serve_gate, "SILENT_S", 600)  # also on a slow machine
    running = Running(tmp_path)
    try:
        silent = [running.connect(host=f"127.0.0.{2 + number % 7}") for number in range(4 * BOUNDS.connections)]
        for _ in range(5):
            assert running.health() == b"HTTP/1.1 200 OK"
        assert (running.gate.accepted, running.gate.evicted) == (5, 0)
        silent[0].sendall(b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert silent[0].recv(100).startswith(b"HTTP/1.1 200 OK")
        assert running.gate.accepted == 6
        for client in silent:
            client.close()
    finally:
        running.close()


def test_a_silent_connection_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel hands over a connection that stays silent, and the gate ends it."""
    monkeypatch.setattr(serve_gate, "SILENT_S", 1)
    running = Running(tmp_path, idle_s=0.3)
    try:
        with running.connect() as client:
            client.settimeout(30)
            assert client.recv(1) == b""
        assert running.gate.accepted == 1, "the kernel itself has ended it"
    finally:
        running.close()


def test_one_address_cannot_have_all_connections(running: Running) -> None:
    """One client has no more open connections than its share."""
    connections = [running.connect(b"G", host="127.0.0.5") for _ in range(60)]
    assert running.health("127.0.0.6") == b"HTTP/1.1 200 OK"
    assert running.gate.accepted > BOUNDS.of_one
    assert sum(connection.asker == "127.0.0.5" for connection in running.gate._open.values()) <= BOUNDS.of_one  # noqa: SLF001
    for connection in connections:
        connection.close()


def test_a_slow_sender_is_ended(tmp_path: Path) -> None:
    """A connection ends if its request is not complete in time, even if single bytes keep arriving."""
    running = Running(tmp_path, idle_s=0.3)
    try:
        with running.connect(b"GET / HTTP/1.1\r\nhost: localhost\r\nx: ") as connection:
            ended, ends = False, time.monotonic() + 10
            while not ended and time.monotonic() < ends:
                try:
                    connection.sendall(b"a")
                    connection.settimeout(0.1)
                    ended = connection.recv(1) == b""
                except TimeoutError:
                    continue
                except OSError:
                    ended = True
            assert ended
    finally:
        running.close()


def test_without_descriptors_connections_are_refused_not_left_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """At EMFILE the spare descriptor accepts and closes the connection, and the server keeps answering."""

    monkeypatch.setattr(serve_gate, "SILENT_S", 0)  # silent clients are accepted at once

    async def play() -> None:
        gate = Gate(BOUNDS)
        (listening,) = gate.listen(("127.0.0.1", 0))
        clients = [socket.create_connection(listening.getsockname()) for _ in range(2)]
        await asyncio.sleep(0.05)
        real, left = Listening.take, [True]

        def take(self: Listening) -> Any:
            if left.pop() if left else False:
                raise OSError(errno.EMFILE, "too many open files")
            return real(self)

        monkeypatch.setattr(Listening, "take", take)
        admitted, _ = listening.accept()
        assert (gate.refused, gate.accepted) == (1, 1), "the first was closed, the second admitted"
        clients[0].settimeout(5)
        assert clients[0].recv(1) == b""
        for each in (admitted, listening, *clients):
            each.close()
        assert len(gate) == 0

    asyncio.run(play())


def test_bounds_follow_from_the_limit_of_descriptors() -> None:
    """With 256 files some remain for stores: connections cannot use all descriptors."""
    small = bounds_of(256, 25)
    assert small.connections == 167 and small.of_one == 83 and small.streams == 55
    large = bounds_of(65536, 25)
    assert large.connections == 4096 and large.streams == 2000


def test_jobs_are_shared_out_among_askers(monkeypatch: pytest.MonkeyPatch) -> None:
    """One client's jobs do not fill the queue, anonymous clients never take the last worker, and abandoned jobs end."""
    jobs, go = Jobs(), threading.Event()

    def work(advance: Progress) -> int:
        while not go.wait(0.01):
            advance(1)
        return 1

    begun: list[PooledJob[int]] = []
    for address in ("anonymous 1", "anonymous 2"):
        with asking("", address):
            begun += [jobs.ask(f"diff {address} {n}", 1, work) for n in range(OF_ONE_MAX)]
            with pytest.raises(StoreUnavailable):
                jobs.ask(f"diff {address} more", 1, work)
    with asking("", "anonymous 3"), pytest.raises(StoreUnavailable, match="without a token"):
        jobs.ask("diff third", 1, work)
    with asking("", "token anna"):
        mine = jobs.ask("diff mine", 1, work)
        opened = jobs.ask("open mine", 0, lambda _: 2, quick=True)
    assert opened.result_within(10) == 2, "metadata does not wait for long reads"
    assert mine in jobs._running and sum(job.is_anonymous for job in jobs._running) == 1  # noqa: SLF001
    monkeypatch.setattr(serve_jobs, "ABANDONED_S", 0.05)
    for job in begun[:1]:
        with pytest.raises(StoreUnavailable, match="no client asked"):
            job.result_within(10)
    go.set()
    jobs.close()


def test_verifications_are_tasks_with_a_quota(tmp_path: Path) -> None:
    """84 requests begin only as many tasks as one client may have, and no request waits for a task."""
    with serving([make_store(tmp_path / "runs", 1, 1)], tmp_path) as server:
        tasks, go = server.app.state.tasks, threading.Event()
        with asking("", "token anna"):
            for number in range(TASKS_OF_ONE):
                tasks.begin(
                    "verify", "runs", "run-000", "anna", lambda task: ActionOutcome(go.wait(20), ""), str(number)
                )
            for _ in range(84):
                with pytest.raises(StoreUnavailable, match="that you started"):
                    tasks.begin("verify", "runs", "run-000", "anna", lambda task: ActionOutcome(True, ""))
        assert confirmed(server, "verify")["task"], "another client has its own quota"
        go.set()


def confirmed(server: Server, verb: str) -> dict[str, Any]:
    """Plan and execute an action, and return the answer."""
    fields = {"store": "runs", "run": "run-000", "which": "latest"}
    digest = server.post(f"/api/v1/actions/{verb}", "operator", json={"fields": fields}).json()["digest"]
    done: dict[str, Any] = server.post(
        f"/api/v1/actions/{verb}", "operator", json={"fields": fields, "confirm": digest}
    ).json()
    return done


def test_slots_are_shared_out() -> None:
    """Anonymous requests leave slots for tokens. A request beyond the queue is refused, and no slot is lost."""

    async def play() -> None:
        slots = StreamSlots()
        assert [await slots.take(f"anonymous {n}") for n in range(OF_ANONYMOUS)] == [True] * OF_ANONYMOUS
        waiting = [asyncio.create_task(slots.take("anonymous x")) for _ in range(WAITING_OF_ONE_MAX)]
        await asyncio.sleep(0)
        assert not await slots.take("anonymous x"), "too many wait"
        assert await slots.take("token anna")
        slots.give("anonymous 0")
        await asyncio.sleep(0.01)
        assert sum(request.done() for request in waiting) == 1 and slots.taken == OF_ANONYMOUS + 1 <= MOST
        for request in waiting:
            request.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        for name in ("anonymous 1", "anonymous 2", "token anna", "anonymous x"):
            slots.give(name)
        assert slots.taken == 0

    asyncio.run(play())


def test_streams_of_strangers_leave_room() -> None:
    """Event streams without a token take at most half of all places, and few for one address."""
    hub = Hub()
    hub.most = 10
    hub._streams = {Stream("", "", f"anonymous {n}") for n in range(5)}  # noqa: SLF001
    assert hub.full("anonymous 9") and not hub.full("token anna")


def test_answers_have_pieces() -> None:
    """20,000 tensors are answered piece by piece, each tensor once. Differences, runs and their lists have pieces too."""
    tensors = [TensorRow(f"layer.{n}", (4,), "float32", 16) for n in range(20_000)]
    whole = CheckpointDetail(CheckpointRow("a", 1), tensors)
    first = checkpoint_piece(whole, None, 500)
    assert (len(first.tensors), first.next, first.total) == (500, "500", 20_000)
    assert checkpoint_piece(whole, "19500", 500).next is None
    assert [tensor.path for tensor in checkpoint_piece(whole, None, 500, "19999").tensors] == ["layer.19999"]
    differs = DiffDetail(
        "a",
        "b",
        [DiffRow(tensor.path, "same" if n % 2 else "changed") for n, tensor in enumerate(tensors)],
        [("x", 1, 2)] * 1200,
    )
    piece = diff_piece(differs, "500", 500, changed=True)
    assert (len(piece.tensors), len(piece.values), piece.next, piece.total, piece.values_total) == (
        500,
        500,
        "1000",
        10_000,
        1200,
    )
    runs = lineage_piece([LineageRow(f"run-{n}", list(range(5000))) for n in range(600)], None, 100)
    assert (
        len(runs.rows) == 100
        and runs.next == "100"
        and runs.total == 600
        and runs.rows[0].steps[-1] == 4999
        and len(runs.rows[0].steps) == 500
    )
    incidents = [IncidentRow(str(n), "s", "r", stacks={"rank 0": "x" * 100_000}) for n in range(1000)]
    run = bounded_run(
        RunDetail(
            RunRow("s", "r"), {f"m{n}": [(step, 1.0) for step in range(2000)] for n in range(100)}, incidents=incidents
        )
    )
    assert (
        sum(map(len, run.series.values())) <= 24_000
        and len(run.series) == 100
        and len(run.incidents) == 100
        and not run.incidents[0].stacks
    )
    assert LISTED_MAX == 500


def test_links_of_every_page_lead_somewhere(tmp_path: Path) -> None:
    """Every link of a page works, also those to the API."""
    with serving([make_store(tmp_path / "runs", 1, 1)], tmp_path) as server:
        page = server.get("/", "admin", headers={"accept": "text/html"}).text
        page += server.get("/api", "admin", headers={"accept": "text/html"}).text
        links = {part.partition('"')[0] for part in page.split('href="')[1:]}
        assert {"/api", "/api/v1/openapi.json", "/api/v1/alerts"} <= links
        for link in links:
            assert server.get(link.partition("#")[0], "admin").status_code == 200, link
