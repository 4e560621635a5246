"""Limits on the server's connections: how many may be open, of all clients and of one client, and how long one may be idle.

asyncio has no limit on connections, so the gate's listening socket accepts for it. When the gate is full, the connection
that has been idle for longest is closed to admit a new one, so idle connections never keep clients out. Used by the
event loop's thread only.

A connection is idle while the server waits for the client: for a TLS handshake, for a request or the rest of it, or
until the client reads an answer.

A client that has sent nothing waits in the kernel (``TCP_DEFER_ACCEPT``) and costs the loop nothing. Otherwise a few
hundred silent clients that reconnect when they are closed keep the loop accepting, and requests queue after them.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import resource
import socket
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, NamedTuple

from uvicorn.protocols.http.h11_impl import H11Protocol

from relight.serve.proxies import asker_of

IDLE_S = 10.0
"""Seconds that the server waits for a client to send a whole request, or to read an answer."""
SILENT_S = 10
"""Seconds that the kernel keeps a silent connection, rounded up to its next SYN-ACK (15 s). Then it is accepted."""
SWEEP_S = 1.0
EVICTION_CANDIDATES_MAX = 16
"""Idle connections that are checked for one to close, at most."""
CLOSING_MAX = 32
"""Closed connections with a descriptor that the loop has not freed yet. At this number, accepting pauses."""
PROBES_MAX = 64
"""Health probes that are answered in one turn of the loop; further ones wait for the next turn."""
CONNECTIONS_MAX, STREAMS_MAX, DESCRIPTORS_MAX = 4096, 2000, 16384
REQUEST_CONNECTIONS = 112
"""Connections that event streams leave to requests."""
_NO_DESCRIPTOR = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class ConnectionLimits(NamedTuple):
    """Maximum numbers of open connections: of all clients, of one client, and event streams."""

    connections: int
    of_one: int
    streams: int


def bounds_of(descriptors: int, used: int) -> ConnectionLimits:
    """Return the limits on connections that follow from a limit on descriptors.

    An eighth of the descriptors, at least 64 and at most 512, is reserved for stores and files.
    """
    available = descriptors - used - max(64, min(512, descriptors // 8))
    connections = max(16, min(CONNECTIONS_MAX, available))
    streams = (
        min(STREAMS_MAX, connections - REQUEST_CONNECTIONS)
        if connections > 4 * REQUEST_CONNECTIONS
        else connections // 3
    )
    return ConnectionLimits(connections, max(8, connections // 2), streams)


def raise_descriptors() -> ConnectionLimits:
    """Raise this process's limit on open files as far as allowed, and return the limits on connections that follow."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = DESCRIPTORS_MAX if hard == resource.RLIM_INFINITY else min(hard, DESCRIPTORS_MAX)
    if soft != resource.RLIM_INFINITY and soft < most:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
            soft = most
    with contextlib.suppress(OSError):
        return bounds_of(min(soft, most) if soft != resource.RLIM_INFINITY else most, len(os.listdir("/proc/self/fd")))
    return bounds_of(min(soft, most), 64)


class Connection(socket.socket):
    """An accepted connection, which the gate counts until it is closed."""

    gate: Gate | None = None
    asker = ""
    since = 0.0
    """Monotonic time at which the server began to wait for the client."""
    transport: asyncio.Transport | None = None
    """None until the TLS handshake, if any, is complete."""

    def has_unread(self) -> bool:
        """Return whether the client has sent bytes that the server has not read."""
        try:
            return bool(self.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
        except OSError:
            return False

    def close(self) -> None:
        """Close the connection. The gate no longer counts it."""
        if self.gate is not None and self.fileno() >= 0:
            self.gate.closed(self)
        super().close()


class Gate:
    """The open connections.

    ``exempt`` returns whether many clients share a peer, such as a proxy. Only the limit for all clients applies to it.
    """

    def __init__(
        self, bounds: ConnectionLimits, exempt: Callable[[str], bool] = lambda peer: False, idle_s: float = IDLE_S
    ) -> None:
        self.bounds, self._exempt, self._idle_s = bounds, exempt, idle_s
        self.answers_probe: Callable[[socket.socket], bool] = lambda connection: False
        """Answers the request of a new connection if it is a health probe, without blocking. Returns False for any other request.

        The gate closes an answered connection at once. It counts in no bound but ``PROBES_MAX``.
        """
        self._open: dict[int, Connection] = {}
        self._idle: OrderedDict[int, Connection] = OrderedDict()
        self._count: Counter[str] = Counter()
        self._closing: set[Connection] = set()
        self._batch = self._probes_in_turn = 0
        self._sweeping: asyncio.TimerHandle | None = None
        self._spare: int | None = _spare()
        self.accepted = self.refused = self.evicted = self.probes = self.most = 0
        """Connections since the server began: admitted, refused, closed to make room, answered as health probes.

        ``most`` is the maximum that were open at once.
        """

    def __len__(self) -> int:
        return len(self._open)

    def listen(self, address: tuple[str, int], backlog: int = 2048) -> list[Listening]:
        """Return bound sockets, one for each address of the name. Raise ``OSError`` if one cannot be bound."""
        addresses = socket.getaddrinfo(*address, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        sockets = []
        for family, kind, proto, _, address_of_socket in dict.fromkeys(addresses):
            listening = Listening(family, kind, proto)
            listening.gate = self
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            if (defer := getattr(socket, "TCP_DEFER_ACCEPT", None)) is not None:  # on Linux only
                with contextlib.suppress(OSError):
                    listening.setsockopt(socket.IPPROTO_TCP, defer, SILENT_S)
            sockets.append(listening)
            try:
                listening.bind(address_of_socket)
                listening.listen(backlog)
            except OSError:
                for opened in sockets:
                    opened.close()
                raise
            listening.setblocking(False)
        return sockets

    def may_accept(self) -> bool:
        """Return whether another connection may be accepted in this turn of the loop.

        The limit lets the loop read requests between accepting.
        """
        if len(self._closing) >= CLOSING_MAX or self._probes_in_turn >= PROBES_MAX:
            return False
        if self._batch == 0 and self._probes_in_turn == 0:
            asyncio.get_running_loop().call_soon(self._next_turn)
        self._batch += 1
        return self._batch <= max(2, self.bounds.of_one // 8)

    def _next_turn(self) -> None:
        self._batch = self._probes_in_turn = 0

    def answered_probe(self, connection: Connection) -> bool:
        """Answer and close ``connection`` if its request is a health probe, and return whether it was one."""
        if not self.answers_probe(connection):
            return False
        connection.close()
        self._batch -= 1  # ``may_accept`` has counted it
        self._probes_in_turn += 1
        self.probes += 1
        return True

    def admit(self, connection: Connection, peer: str) -> bool:
        """Count a new connection. If the gate is full, close the longest idle one for it; refuse it if none is idle."""
        asker = asker_of(peer)
        if not self._exempt(peer) and self._count[asker] >= self.bounds.of_one:
            if not self._evict(candidate for candidate in self._idle.values() if candidate.asker == asker):
                return False
        elif len(self._open) >= self.bounds.connections and not self._evict(iter(self._idle.values())):
            return False
        connection.asker, connection.since, connection.gate = asker, time.monotonic(), self
        self._open[connection.fileno()] = self._idle[connection.fileno()] = connection
        self._count[asker] += 1
        self.accepted += 1
        self.most = max(self.most, len(self._open))
        if self._sweeping is None:
            self._sweeping = asyncio.get_running_loop().call_later(SWEEP_S, self._sweep)
        return True

    def _evict(self, oldest_first: Iterator[Connection]) -> bool:
        """End the first connection without unread bytes, or else the first one. Return False if there is none.

        A client that has sent bytes is not idle: its request only waits for the loop to read it.
        """
        candidates = list(islice(oldest_first, EVICTION_CANDIDATES_MAX))
        if not candidates:
            self.refused += 1
            return False
        self.evicted += 1
        self._shut(next((candidate for candidate in candidates if not candidate.has_unread()), candidates[0]))
        return True

    def _shut(self, connection: Connection) -> None:
        """End the connection. A transport that has paused reading would not notice a shut socket, so it is aborted."""
        self._forget(connection)
        self._closing.add(connection)
        if connection.transport is not None:
            connection.transport.abort()
            return
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)

    def _forget(self, connection: Connection) -> None:
        number = connection.fileno()
        if self._open.pop(number, None) is not None:
            self._idle.pop(number, None)
            self._count[connection.asker] -= 1
            if not self._count[connection.asker]:
                del self._count[connection.asker]

    def closed(self, connection: Connection) -> None:
        """Stop counting a connection: its descriptor is about to be freed."""
        self._closing.discard(connection)
        self._forget(connection)

    def connection_of(self, number: int) -> Connection | None:
        """Return the open connection with this descriptor."""
        return self._open.get(number)

    def mark(self, connection: Connection, idle: bool, again: bool = False) -> None:
        """Record whether the server waits for this client (``idle``). ``again``: restart the time of its wait."""
        number = connection.fileno()
        if self._open.get(number) is not connection:
            return  # it was ended, and another connection may have its descriptor now
        if not idle:
            self._idle.pop(number, None)
        elif again or number not in self._idle:
            connection.since = time.monotonic()
            self._idle[number] = connection
            self._idle.move_to_end(number)

    def _sweep(self) -> None:
        """End the connections that have been idle for longer than the limit. The oldest come first."""
        ends = time.monotonic() - self._idle_s
        for connection in list(self._idle.values()):
            if connection.since > ends:
                break
            self._shut(connection)
        self._sweeping = asyncio.get_running_loop().call_later(SWEEP_S, self._sweep) if self._open else None

    def out_of_descriptors(self, listening: Listening) -> None:
        """Accept one connection with the spare descriptor and close it, so that it is refused instead of left waiting."""
        if self._spare is not None:
            os.close(self._spare)
            self._spare = None
        try:
            number, _ = listening.take()
            os.close(number)
            self.refused += 1
        finally:
            self._spare = _spare()
        if oldest := next(iter(self._idle.values()), None):
            self._shut(oldest)

    def protocol(self) -> type[H11Protocol]:
        """Return uvicorn's protocol, which reports to this gate whether it waits for its client."""

        class Guarded(Reporting):
            gate = self

        return Guarded


class Listening(socket.socket):
    """The listening socket. Its ``accept`` asks the gate."""

    gate: Gate

    def take(self) -> tuple[int, Any]:
        """Accept one connection and return its descriptor and peer."""
        return self._accept()  # type: ignore[attr-defined, no-any-return] # what ``accept`` of the library calls

    def accept(self) -> tuple[socket.socket, Any]:
        """Return the next admitted connection. Raise ``BlockingIOError`` if there is none in this turn of the loop."""
        while self.gate.may_accept():
            try:
                number, peer = self.take()
            except OSError as error:
                if error.errno not in _NO_DESCRIPTOR:
                    raise
                self.gate.out_of_descriptors(self)
                continue
            connection = Connection(self.family, self.type, self.proto, fileno=number)
            if self.gate.answered_probe(connection):
                continue
            if self.gate.admit(connection, str(peer[0])):
                return connection, peer
            connection.close()
        raise BlockingIOError(errno.EAGAIN, "no more connections in this turn")


class Reporting(H11Protocol):
    """uvicorn's HTTP/1.1, which reports when it waits for its client."""

    gate: Gate
    _connection: Connection | None = None
    _cycle: Any = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """See asyncio."""
        super().connection_made(transport)
        self._connection = self.gate.connection_of(transport.get_extra_info("socket").fileno())
        if self._connection is None:
            transport.abort()  # ended while its transport was made
        else:
            self._connection.transport = transport

    def data_received(self, data: bytes) -> None:
        """See asyncio."""
        super().data_received(data)
        self._report()

    def on_response_complete(self) -> None:
        """Report that the server waits for the next request."""
        super().on_response_complete()
        self._report()

    def pause_writing(self) -> None:
        """Report that the client does not read its answer."""
        super().pause_writing()
        if self._connection is not None:
            self.gate.mark(self._connection, idle=True)

    def resume_writing(self) -> None:
        """Report that the client reads again."""
        super().resume_writing()
        self._report()

    def _report(self) -> None:
        cycle = self.cycle
        is_new_request, self._cycle = cycle is not self._cycle, cycle
        if self._connection is not None:
            self.gate.mark(
                self._connection, idle=cycle is None or cycle.response_complete or cycle.more_body, again=is_new_request
            )


def _spare() -> int | None:
    try:
        return os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
