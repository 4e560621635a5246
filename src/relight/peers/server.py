"""The agent's server for other agents: takes contributions, lists what it has, serves bytes. A thread for each
connection.

A caller has ``HANDSHAKE_S`` seconds to prove that it knows the token, and costs a thread and some hundred bytes until
then. If too many callers have not proved it yet, the oldest connection is closed, once it has had ``PROOF_LEAST_S``;
new callers wait until then. The number of authenticated callers ("friends") is bounded too. Callers that are refused
are counted and reported.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from relight.comm import new_threads
from relight.comm.tls import TlsIdentity
from relight.errors import StoreUnavailable
from relight.format.crc import crc32
from relight.peers.holder import Holder, Refusal, Turn
from relight.peers.messages import (
    FETCH_BYTES,
    GONE,
    PIECE_BYTES,
    PLANE,
    Acknowledged,
    Answer,
    Contribute,
    Data,
    Going,
    Inventory,
    Locate,
    Located,
    ReadRequest,
    Request,
    SegmentEnd,
    SegmentFetch,
    SegmentPiece,
    StatusRequest,
    Void,
)
from relight.peers.parts import HeldPartFile, Parts
from relight.peers.rdma import PlaneChoice, PlaneFailed, RdmaPlane
from relight.peers.wire import BYTES_PER_SECOND_MIN, Called, PeerLost, answer, join_address
from relight.store.buffers import page_buffer

HANDSHAKE_S = 5.0
PROOF_LEAST_S = 0.25
"""Seconds that each caller has to prove itself, however many others wait. Many ranks restore at the same time, and a
proof takes some milliseconds of a processor that all callers share."""
UNPROVED_MAX = 64
MEMBERS_CONNECTED_MAX = 512
THREADS_MAX = MEMBERS_CONNECTED_MAX + 8 * UNPROVED_MAX
IDLE_S = 300.0
"""Seconds that a connection may be silent between requests. A closed caller connects again when it needs to."""
MESSAGE_S = 30.0
REPORT_S = 60.0
"""Seconds between two reports of refused callers: a stranger cannot flood the log."""
Notify = Callable[[str, str, dict[str, Any]], None]
_TICK_S = 0.25
_THERE, _NOT_THERE = b"\1", b"\0"


class PeerServer:
    """Listens from construction to ``close``. ``StoreUnavailable`` if the port cannot be bound.

    ``identity`` returns the certificate for new connections, or None if they are not encrypted.
    """

    def __init__(
        self,
        host: str,
        port: int,
        token: Callable[[], bytes],
        identity: Callable[[], TlsIdentity | None],
        me: Callable[[], str],
        parts: Parts,
        holder: Holder,
        plane: Callable[[], PlaneChoice],
        notify: Notify,
    ) -> None:
        self._plane = plane
        self._token, self._identity, self._notify = token, identity, notify
        self._me, self._parts, self._holder = me, parts, holder
        self.refused = 0
        """Callers that were refused."""
        self._report_from = 0.0
        self._lock = threading.Lock()
        self._proved = threading.Condition(self._lock)
        self._unproved: dict[socket.socket, float] = {}
        """Callers that have not proved themselves, oldest first, and when they were accepted."""
        self._members: set[socket.socket] = set()
        self._threads: set[threading.Thread] = set()
        self._closed = False
        try:
            self._listener = socket.create_server(
                (host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=256
            )
        except OSError as error:
            raise StoreUnavailable(
                f"no port for the peers: {error.strerror}", where=join_address(host, port)
            ) from error
        self._listener.settimeout(_TICK_S)
        self.port: int = self._listener.getsockname()[1]
        self._accepting = threading.Thread(target=self._accept, name="relight-peers-accept", daemon=True)
        if not new_threads.start(self._accepting):
            self._listener.close()
            raise StoreUnavailable(
                "no thread could be started to listen to the peers", hint="raise ulimit -u or the cgroup's pids.max"
            )

    def close(self) -> None:
        """Stop listening, and close all connections."""
        with self._lock:
            self._closed = True
            self._proved.notify_all()
            connections, threads = [*self._unproved, *self._members], list(self._threads)
        for connection in connections:
            _disconnect(connection)
        self._accepting.join(5.0)
        self._listener.close()
        for thread in threads:
            thread.join(5.0)

    def hang_up(self) -> None:
        """Close all connections. Agents with the new token connect again."""
        with self._lock:
            connections = [*self._unproved, *self._members]
        for connection in connections:
            _disconnect(connection)

    def _accept(self) -> None:
        while not self._closed:
            try:
                connection, caller = self._listener.accept()
            except TimeoutError:
                continue
            except OSError:  # probably no file descriptor is free: retry, some will be closed
                time.sleep(_TICK_S)
                continue
            thread = threading.Thread(
                target=self._serve, args=(connection, caller[0]), name="relight-peers-serve", daemon=True
            )
            with self._lock:
                self._wait_for_place()
                # threads of closed connections may not have ended yet
                if self._closed or len(self._threads) >= THREADS_MAX:
                    connection.close()
                    continue
                self._unproved[connection] = time.monotonic()
                self._threads.add(thread)
            if not new_threads.start(thread):  # the caller may connect again
                with self._lock:
                    self._unproved.pop(connection, None)
                    self._threads.discard(thread)
                connection.close()

    def _wait_for_place(self) -> None:
        """Wait until one more caller may prove itself. Meanwhile the kernel keeps further callers.

        Disconnect the oldest caller once it has had ``PROOF_LEAST_S``. The lock is held, but not while this waits.
        """
        while len(self._unproved) >= UNPROVED_MAX and not self._closed:
            oldest, since = next(iter(self._unproved.items()))
            left_s = since + PROOF_LEAST_S - time.monotonic()
            if left_s > 0:
                self._proved.wait(left_s)
            else:
                del self._unproved[oldest]
                _disconnect(oldest)

    def _serve(self, connection: socket.socket, caller: str) -> None:
        proved = threading.Event()

        def admit() -> bool:
            proved.set()
            return self._admit(connection)

        try:
            with contextlib.suppress(PeerLost):
                try:
                    wire = answer(connection, self._token(), MESSAGE_S, HANDSHAKE_S, self._identity(), admit)
                except PeerLost as error:
                    if not proved.is_set():
                        self._refuse(caller, str(error))
                    raise
                _Session(wire, self._me, self._parts, self._holder, self._plane()).run()
        finally:
            with self._lock:
                self._members.discard(connection)
                self._threads.discard(threading.current_thread())
                self._unproved.pop(connection, None)
                self._proved.notify()
            connection.close()

    def _admit(self, connection: socket.socket) -> bool:
        """Count a caller that has proved itself as a friend. Return False if it was disconnected, or there are too
        many."""
        with self._lock:
            if connection not in self._unproved or len(self._members) >= MEMBERS_CONNECTED_MAX or self._closed:
                return False
            del self._unproved[connection]
            self._members.add(connection)
            self._proved.notify()
            return True

    def _refuse(self, caller: str, why: str) -> None:
        """Count a refused caller. Report the first one at once, later ones every ``REPORT_S`` at most."""
        with self._lock:
            self.refused += 1
            count, now = self.refused, time.monotonic()
            if self._closed or now < self._report_from:
                return
            self._report_from = now + REPORT_S
        text = f"a connection from {caller} was refused: {why}; {count} refused since the agent listens"
        self._notify("peers.refused", text, {"address": caller, "why": why, "count": count})


class _Session:
    """The conversation with one authenticated caller."""

    def __init__(self, wire: Called, me: Callable[[], str], parts: Parts, holder: Holder, choice: PlaneChoice) -> None:
        self._wire, self._me, self._parts, self._holder, self._choice = wire, me, parts, holder, choice
        self._turn: Turn | None = None
        self._room: memoryview | None = None

    def run(self) -> None:
        """Answer requests until the caller closes, sends an invalid message, or is silent for too long: then
        ``PeerLost``."""
        while True:
            request = self._wire.receive(IDLE_S)
            try:
                reply = self._receive(request)
            except Refusal as refusal:
                reply = refusal.answer
            if reply is not None:
                self._wire.send(reply)

    def _receive(self, request: Request) -> Answer | None:
        if isinstance(request, SegmentPiece):
            self._take(request)
            return None
        if isinstance(request, ReadRequest):
            self._give(request)
            return None
        if isinstance(request, Locate):
            return self._locate(request.read)
        if isinstance(request, SegmentFetch):
            return self._fetch(request)
        if isinstance(request, StatusRequest):
            name, without = self._choice.shown()
            return Inventory(self._me(), self._parts.inventory(), self._holder.inventory(), name, without)
        if isinstance(request, Contribute):
            self._turn = None
            self._turn, got = self._holder.begin(request)
            return Going(got, *self._choice.shown())
        turn, self._turn = self._turn, None
        if turn is None:
            raise PeerLost("an end without a beginning")
        if isinstance(request, SegmentEnd):
            return Acknowledged(self._holder.end(turn))
        assert isinstance(request, Void)
        self._holder.void(turn)
        return Acknowledged(False)

    def _take(self, piece: SegmentPiece) -> None:
        """Receive a whole piece before adding it.

        If the connection breaks, the piece can be sent again from its beginning.
        """
        if self._turn is None or not 0 < piece.length <= PIECE_BYTES:
            raise PeerLost("bytes that were not requested")
        if self._room is None:
            self._room = page_buffer(PIECE_BYTES)
        data = self._room[: piece.length]
        self._wire.receive_into(data)
        self._holder.add(self._turn, piece.offset, data)

    def _fetch(self, fetch: SegmentFetch) -> Going:
        """Read the next bytes from the sender's memory. ``Refusal`` if the plane fails: the sender sends the rest."""
        turn, starts = self._turn, range(0, fetch.length, PIECE_BYTES)
        if turn is None or not 0 < fetch.length <= FETCH_BYTES or len(fetch.checksums) != len(starts):
            raise PeerLost("bytes that were not requested")
        plane = self._planes(fetch.plane)
        ends = time.monotonic() + MESSAGE_S + fetch.length / BYTES_PER_SECOND_MIN
        try:
            pieces = plane.pieces(fetch.description, fetch.address, fetch.length, ends, lambda: not self._wire.ends())
            with contextlib.closing(pieces):
                for start, checksum, data in zip(starts, fetch.checksums, pieces):
                    if crc32(data) != checksum:
                        raise PlaneFailed("bytes that were read directly are wrong")
                    self._holder.add(turn, fetch.offset + start, data)
        except PlaneFailed as error:
            raise Refusal(PLANE, str(error)) from error
        return Going(fetch.offset + fetch.length)

    def _locate(self, read: ReadRequest) -> Located:
        plane = self._planes()
        try:
            memory, begin = self._holder.locate(read) if read.row >= 0 else self._parts.locate(read)
            address, description = plane.share(memory)
        except PlaneFailed as error:
            raise Refusal(PLANE, str(error)) from error
        except ValueError as error:
            raise Refusal(GONE, "that memory was released") from error
        return Located(address + begin + read.offset, description)

    def _planes(self, name: str = "") -> RdmaPlane:
        plane = self._choice.get()
        if plane is None:
            raise Refusal(PLANE, self._choice.why)
        if name and plane.name != name:
            raise Refusal(PLANE, f"{plane.name} is in use here, and {name} there")
        return plane

    def _give(self, request: ReadRequest) -> None:
        if request.length > PIECE_BYTES:
            raise PeerLost(f"{request.length} bytes at once")
        if not request.length and (plane := self._choice.made) is not None:
            plane.attend()  # a direct reader checks, and continues
        part: HeldPartFile | None = None
        if request.row < 0:
            part = self._parts.find(request.id, request.rank)
            data = None if part is None else part.read(request.offset, request.length)
            if data is None:
                raise Refusal(GONE, "that part is not in memory any more")
        else:
            data = self._holder.read(request)
        # Not sendfile: it sends the pages themselves, and the next save may refill them after the check below and
        # before they are sent.
        self._wire.send(Data(request.length), data)
        self._wire.send_trailer(_THERE if part is None or part.there() else _NOT_THERE)


def _disconnect(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
