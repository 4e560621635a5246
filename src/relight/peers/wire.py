"""A TCP connection between two that know the same token. Every operation has a deadline.

The handshake is of fixed length: each side sends 32 random bytes, and proves by HMAC-SHA256 over both that it knows the token, the one who
calls first. A stranger learns nothing but that this port speaks to friends. What follows is neither encrypted nor signed: what
is read is checked against the checkpoint's hashes, and a network on which packets of others can be changed is not one for this.
"""

from __future__ import annotations

import contextlib
import hmac
import secrets
import socket
import time
from typing import Generic, TypeVar

import msgspec

from relight.decode import msgpack_decoder
from relight.errors import ConfigError
from relight.peers.messages import ANSWER_BYTES_MAX, HEADER_BYTES_MAX, Answer, Request

TOKEN_BYTES = 32
BYTES_PER_SECOND_MIN = 1 << 20
"""Who is slower than this is taken to hang."""
_MAGIC = b"relight-peers-1\n"
_NONCE_BYTES = _PROOF_BYTES = 32
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 30), (socket.TCP_KEEPINTVL, 10), (socket.TCP_KEEPCNT, 3))
S = TypeVar("S")
T = TypeVar("T")


class PeerLost(ConnectionError):
    """The other end is not there any more, is too slow, or makes no sense. The connection is of no more use."""


class PeerConnection(Generic[S, T]):
    """One connection, used by one thread: sends ``S``, receives ``T``. ``timeout_s`` is for each message; its bytes may take more."""

    def __init__(self, connection: socket.socket, decoder: msgspec.msgpack.Decoder[T], limit: int, timeout_s: float) -> None:
        self._socket, self._decoder, self._limit, self._timeout_s = connection, decoder, limit, timeout_s
        self._encoder = msgspec.msgpack.Encoder()
        self._length = bytearray(4)

    def send(self, message: S, data: memoryview | None = None, trailer: bytes = b"") -> None:
        """The message, then ``data``, which may change again when this returns. ``Gone`` if that cannot be done in time."""
        body = self._encoder.encode(message)
        parts = [memoryview(len(body).to_bytes(4, "little") + body)]
        if data is not None and len(data):
            parts.append(data)
        if trailer:
            parts.append(memoryview(trailer))
        self._send(parts)

    def receive(self, wait_s: float | None = None) -> T:
        """The next message. ``wait_s``: how long it may take to begin, if that is not ``timeout_s``. ``Gone`` at the end or deadline."""
        room = memoryview(self._length)
        ends = time.monotonic() + (self._timeout_s if wait_s is None else wait_s)
        self._fill(room[:1], ends)
        ends = time.monotonic() + self._timeout_s
        self._fill(room[1:], ends)
        length = int.from_bytes(room, "little")
        if length > self._limit:
            raise PeerLost(f"a message of {length} bytes")
        body = bytearray(length)
        self._fill(memoryview(body), ends + length / BYTES_PER_SECOND_MIN)
        try:
            return self._decoder.decode(body)
        except (msgspec.MsgspecError, RecursionError, UnicodeError) as error:
            raise PeerLost(f"not a message: {error}") from error

    def receive_into(self, room: memoryview) -> None:
        """Fill ``room`` with what comes. ``Gone`` if it does not, in time."""
        self._fill(room, time.monotonic() + self._timeout_s + len(room) / BYTES_PER_SECOND_MIN)

    def send_trailer(self, trailer: bytes) -> None:
        """A few bytes without a header."""
        self._send([memoryview(trailer)])

    def ends(self) -> bool:
        """Whether the other end has hung up, or said something that nobody asked for: of no use for the next request."""
        try:
            self._socket.settimeout(0.0)
            return self._socket.recv(1, socket.MSG_PEEK) is not None
        except BlockingIOError:
            return False
        except OSError:
            return True

    def close(self) -> None:
        """Hang up. A thread that waits in here is woken; any thread may call it."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _fill(self, room: memoryview, ends: float) -> None:
        fill(self._socket, room, ends)

    def _send(self, parts: list[memoryview]) -> None:
        ends = time.monotonic() + self._timeout_s + sum(map(len, parts)) / BYTES_PER_SECOND_MIN
        try:
            while parts:
                self._socket.settimeout(max(0.001, ends - time.monotonic()))
                sent = self._socket.sendmsg(parts)
                while parts and sent >= len(parts[0]):
                    sent -= len(parts[0])
                    parts.pop(0)
                if parts:
                    parts[0] = parts[0][sent:]
        except (OSError, ValueError) as error:  # ValueError: closed by another thread
            raise PeerLost(f"{error}") from error


Caller = PeerConnection[Request, Answer]
Called = PeerConnection[Answer, Request]
_answers: msgspec.msgpack.Decoder[Answer] = msgpack_decoder(Answer)
_requests: msgspec.msgpack.Decoder[Request] = msgpack_decoder(Request)


def call(address: str, token: bytes, timeout_s: float) -> Caller:
    """Connect, and prove each other. ``Gone`` if nobody is there, or who is there does not know the token."""
    ends = time.monotonic() + timeout_s
    try:
        connection = socket.create_connection(split_address(address), timeout_s)
    except OSError as error:
        raise PeerLost(f"{address}: {error}") from error
    try:
        _prepare(connection)
        theirs = _take(connection, len(_MAGIC) + _NONCE_BYTES, ends)
        if not theirs.startswith(_MAGIC):
            raise PeerLost(f"{address}: this is no agent of this version")
        theirs, own = theirs[len(_MAGIC) :], secrets.token_bytes(_NONCE_BYTES)
        _give(connection, own + _proof(token, b"caller", theirs, own), ends)
        if not hmac.compare_digest(_take(connection, _PROOF_BYTES, ends), _proof(token, b"called", theirs, own)):
            raise PeerLost(f"{address}: it does not know the token")
    except BaseException:
        connection.close()
        raise
    return PeerConnection(connection, _answers, ANSWER_BYTES_MAX, timeout_s)


def answer(connection: socket.socket, token: bytes, timeout_s: float, patience_s: float) -> Called:
    """The other side of ``call``; ``Gone`` for a stranger, in ``patience_s`` at most. The connection is the caller's to close then."""
    ends = time.monotonic() + patience_s
    _prepare(connection)
    own = secrets.token_bytes(_NONCE_BYTES)
    _give(connection, _MAGIC + own, ends)
    theirs = _take(connection, _NONCE_BYTES + _PROOF_BYTES, ends)
    theirs, proof = theirs[:_NONCE_BYTES], theirs[_NONCE_BYTES:]
    if not hmac.compare_digest(proof, _proof(token, b"caller", own, theirs)):
        raise PeerLost("a stranger")
    _give(connection, _proof(token, b"called", own, theirs), ends)
    return PeerConnection(connection, _requests, HEADER_BYTES_MAX, timeout_s)


def check_token(token: bytes) -> bytes:
    """``token``, if it is one; else ``ConfigError``."""
    if not isinstance(token, bytes) or len(token) != TOKEN_BYTES:
        raise ConfigError(f"a token is {TOKEN_BYTES} bytes", hint="secrets.token_bytes(32), the same for all agents of a job")
    return token


def split_address(address: str) -> tuple[str, int]:
    """``host:port``, ``[v6]:port``. ``Gone`` for what is neither: addresses come from others."""
    host, colon, port = address.rpartition(":")
    if not colon or not port.isascii() or not port.isdigit() or not 0 < int(port) < 1 << 16:
        raise PeerLost(f"{address[:80]!r} is no address")
    return host.removeprefix("[").removesuffix("]"), int(port)


def join_address(host: str, port: int) -> str:
    """The other way round."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def fill(connection: socket.socket, room: memoryview, ends: float) -> None:
    """Fill ``room``; ``Gone`` if it is not full by then (``time.monotonic``), however many bytes trickle in."""
    try:
        while len(room):
            left = ends - time.monotonic()
            if left <= 0:
                raise PeerLost("too slow")
            connection.settimeout(left)
            got = connection.recv_into(room)
            if not got:
                raise PeerLost("closed")
            room = room[got:]
    except (TimeoutError, ValueError) as error:
        raise PeerLost(str(error) or "too slow") from error
    except OSError as error:
        raise error if isinstance(error, PeerLost) else PeerLost(str(error)) from error


def _prepare(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEPALIVE:
            connection.setsockopt(socket.IPPROTO_TCP, option, value)


def _proof(token: bytes, role: bytes, of_called: bytes, of_caller: bytes) -> bytes:
    return hmac.digest(token, _MAGIC + role + of_called + of_caller, "sha256")


def _take(connection: socket.socket, count: int, ends: float) -> bytes:
    room = bytearray(count)
    fill(connection, memoryview(room), ends)
    return bytes(room)


def _give(connection: socket.socket, data: bytes, ends: float) -> None:
    try:
        connection.settimeout(max(0.001, ends - time.monotonic()))
        connection.sendall(data)
    except OSError as error:
        raise PeerLost(str(error)) from error
