"""A TCP connection between two processes that know the same token. Every operation has a deadline.

An address is ``host:port``, or ``host:port#FINGERPRINT`` of an agent that uses TLS (``comm.tls``). The caller first
compares the certificate with that fingerprint.

The proof has a fixed length. Each side sends 32 random bytes, and proves by HMAC-SHA256 over both, and over the
fingerprint, that it knows the token; the caller proves first. The token proves the caller, and not a certificate: a
restoring trainer and an agent of a later attempt have none that the called agent knows. A caller without the token
learns only that the port requires one.

Without TLS the messages after the proof are neither encrypted nor signed: bytes that are read are checked against the
checkpoint's hashes. Do not use it in a network where others can read or change packets.
"""

from __future__ import annotations

import contextlib
import hmac
import re
import secrets
import socket
import time
from collections.abc import Callable
from typing import Generic, TypeVar

import msgspec

from relight.comm.tls import TlsConnection, TlsIdentity, answer_tls, call_tls
from relight.decode import msgpack_decoder
from relight.errors import ConfigError
from relight.peers.messages import ANSWER_BYTES_MAX, HEADER_BYTES_MAX, Answer, Request

TOKEN_BYTES = 32
BUSY_S = 3.0
"""Seconds for which an agent that disconnects its callers is called again.

An agent that has another token disconnects its callers, too. Longer retries would delay each restore by that time.
"""
BYTES_PER_SECOND_MIN = 1 << 20
"""A peer that is slower than this counts as hung."""
_MAGIC = b"relight-peers-1\n"
_NONCE_BYTES = _PROOF_BYTES = 32
_FINGERPRINT = re.compile("[0-9a-f]{64}")
_PAUSE_S, _PAUSE_MAX_S = 0.05, 0.8
_CHANCE = secrets.SystemRandom()
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 30), (socket.TCP_KEEPINTVL, 10), (socket.TCP_KEEPCNT, 3))
Stream = socket.socket | TlsConnection
S = TypeVar("S")
T = TypeVar("T")


class PeerLost(ConnectionError):
    """The other end is gone, is too slow, or sent an invalid message. The connection cannot be used any more."""


class Disconnected(PeerLost):
    """The other end closed the connection."""


class PeerConnection(Generic[S, T]):
    """One connection, used by one thread: sends ``S``, receives ``T``. ``timeout_s`` is for each message; its bytes may take more."""

    def __init__(self, connection: Stream, decoder: msgspec.msgpack.Decoder[T], limit: int, timeout_s: float) -> None:
        self._socket, self._decoder, self._limit, self._timeout_s = connection, decoder, limit, timeout_s
        self._encoder = msgspec.msgpack.Encoder()
        self._length = bytearray(4)

    def send(self, message: S, data: memoryview | None = None, trailer: bytes = b"") -> None:
        """Send the message, then ``data``, which may change again when this returns.

        ``PeerLost`` if it cannot be sent in time.
        """
        body = self._encoder.encode(message)
        parts = [memoryview(len(body).to_bytes(4, "little") + body)]
        if data is not None and len(data):
            parts.append(data)
        if trailer:
            parts.append(memoryview(trailer))
        self._send(parts)

    def receive(self, wait_s: float | None = None) -> T:
        """Return the next message.

        ``wait_s``: seconds until it must begin, instead of ``timeout_s``. ``PeerLost`` if none comes in time.
        """
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
        """Fill ``room`` with the next bytes. ``PeerLost`` if they do not come in time."""
        self._fill(room, time.monotonic() + self._timeout_s + len(room) / BYTES_PER_SECOND_MIN)

    def send_trailer(self, trailer: bytes) -> None:
        """Send a few bytes without a header."""
        self._send([memoryview(trailer)])

    def ends(self) -> bool:
        """Return whether the connection cannot take another request: the other end has closed it, or sent bytes that
        were not requested."""
        raw = self._socket
        if isinstance(raw, TlsConnection):
            if raw.has_input:
                return True
            raw = raw.raw
        try:
            raw.settimeout(0.0)
            return raw.recv(1, socket.MSG_PEEK) is not None
        except BlockingIOError:
            return False
        except OSError:
            return True

    def close(self) -> None:
        """Close the connection. A thread that waits in here is woken. Any thread may call it."""
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


def call(address: str, token: bytes, timeout_s: float, *, tls: bool = False) -> Caller:
    """Connect and authenticate both sides. ``PeerLost`` if no agent answers there, or if it does not know the token.

    An address with a fingerprint is called with TLS. ``tls``: refuse an address without one. ``Disconnected`` if the
    agent closes the connection: it may have too many callers.
    """
    ends, shown = time.monotonic() + timeout_s, without_fingerprint(address)
    fingerprint = address[len(shown) :].removeprefix("#")
    if (fingerprint or tls) and _FINGERPRINT.fullmatch(fingerprint) is None:
        raise PeerLost(f"{shown}: it announced no certificate, and this run's peers use TLS")
    try:
        raw = socket.create_connection(split_address(address), timeout_s)
    except OSError as error:
        raise PeerLost(f"{shown}: {error}") from error
    try:
        _prepare(raw)
        connection: Stream = call_tls(raw, fingerprint, ends) if fingerprint else raw
        theirs = _take(connection, len(_MAGIC) + _NONCE_BYTES, ends)
        if not theirs.startswith(_MAGIC):
            raise PeerLost(f"{shown}: not an agent of this version")
        theirs, own = theirs[len(_MAGIC) :], secrets.token_bytes(_NONCE_BYTES)
        _give(connection, own + _proof(token, b"caller", theirs, own, fingerprint), ends)
        proof = _take(connection, _PROOF_BYTES, ends)
        if not hmac.compare_digest(proof, _proof(token, b"called", theirs, own, fingerprint)):
            raise PeerLost(f"{shown}: it does not know the token")
    except BaseException as error:
        raw.close()
        if isinstance(error, (ConnectionResetError, BrokenPipeError)):
            raise Disconnected(f"{shown}: {error}") from error
        if isinstance(error, OSError) and not isinstance(error, PeerLost):
            raise PeerLost(f"{shown}: {error}") from error
        raise
    return PeerConnection(connection, _answers, ANSWER_BYTES_MAX, timeout_s)


def call_with_retries(address: str, token: bytes, timeout_s: float, *, tls: bool = False) -> Caller:
    """Call an agent that may have too many callers at the moment.

    An agent that disconnects this caller is called again for ``BUSY_S`` seconds. The pauses grow, and are random, so
    that callers which were disconnected at once do not return at once. An agent that is gone is called once.
    """
    ends, pause = time.monotonic() + min(timeout_s, BUSY_S), _PAUSE_S
    while True:
        try:
            return call(address, token, timeout_s, tls=tls)
        except Disconnected:
            seconds = pause * _CHANCE.uniform(0.5, 1.5)
            if time.monotonic() + seconds > ends:
                raise
        time.sleep(seconds)
        pause = min(2 * pause, _PAUSE_MAX_S)


def answer(
    raw: socket.socket,
    token: bytes,
    timeout_s: float,
    patience_s: float,
    identity: TlsIdentity | None = None,
    admit: Callable[[], bool] = lambda: True,
) -> Called:
    """Authenticate a caller: the other side of ``call``. ``PeerLost`` if it does not prove the token within
    ``patience_s``.

    With ``identity`` the caller must use TLS. ``admit`` is called once the caller has proved the token. If it returns
    False, the caller gets no proof, and ``Disconnected`` is raised. After an error the caller of this function must
    close ``raw``.
    """
    ends, fingerprint = time.monotonic() + patience_s, "" if identity is None else identity.fingerprint
    _prepare(raw)
    try:
        connection: Stream = raw if identity is None else answer_tls(raw, identity, ends)
    except OSError as error:
        raise PeerLost(str(error)) from error
    own = secrets.token_bytes(_NONCE_BYTES)
    _give(connection, _MAGIC + own, ends)
    theirs = _take(connection, _NONCE_BYTES + _PROOF_BYTES, ends)
    theirs, proof = theirs[:_NONCE_BYTES], theirs[_NONCE_BYTES:]
    if not hmac.compare_digest(proof, _proof(token, b"caller", own, theirs, fingerprint)):
        raise PeerLost("the caller does not know the token")
    if not admit():
        raise Disconnected("there are too many callers")
    _give(connection, _proof(token, b"called", own, theirs, fingerprint), ends)
    return PeerConnection(connection, _requests, HEADER_BYTES_MAX, timeout_s)


def check_token(token: bytes) -> bytes:
    """Return ``token`` if it is valid; else raise ``ConfigError``."""
    if not isinstance(token, bytes) or len(token) != TOKEN_BYTES:
        raise ConfigError(
            f"a token is {TOKEN_BYTES} bytes", hint="secrets.token_bytes(32), the same for all agents of a job"
        )
    return token


def split_address(address: str) -> tuple[str, int]:
    """Split ``host:port`` or ``[v6]:port``, with or without a fingerprint. ``PeerLost`` for anything else: addresses
    come from other nodes."""
    host, colon, port = without_fingerprint(address).rpartition(":")
    if not colon or not port.isascii() or not port.isdigit() or not 0 < int(port) < 1 << 16:
        raise PeerLost(f"{address[:80]!r} is not an address")
    return host.removeprefix("[").removesuffix("]"), int(port)


def join_address(host: str, port: int, identity: TlsIdentity | None = None) -> str:
    """Return ``host:port``, or ``[v6]:port``, with the fingerprint of the certificate there."""
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    return address if identity is None else f"{address}#{identity.fingerprint}"


def without_fingerprint(address: str) -> str:
    """Return ``host:port`` of an address, for messages."""
    return address.partition("#")[0]


def fill(connection: Stream, room: memoryview, ends: float) -> None:
    """Fill ``room``.

    ``PeerLost`` if it is not full at ``ends`` (``time.monotonic``), even if bytes still arrive slowly.
    """
    try:
        while len(room):
            left = ends - time.monotonic()
            if left <= 0:
                raise PeerLost("too slow")
            connection.settimeout(left)
            got = connection.recv_into(room)
            if not got:
                raise Disconnected("closed")
            room = room[got:]
    except (TimeoutError, ValueError) as error:
        raise PeerLost(str(error) or "too slow") from error
    except ConnectionResetError as error:
        raise Disconnected(str(error)) from error
    except OSError as error:
        raise error if isinstance(error, PeerLost) else PeerLost(str(error)) from error


def _prepare(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEPALIVE:
            connection.setsockopt(socket.IPPROTO_TCP, option, value)


def _proof(token: bytes, role: bytes, of_called: bytes, of_caller: bytes, fingerprint: str) -> bytes:
    """Return the proof of one side. It counts only for the certificate that the caller saw: an attacker between both
    sides, with another certificate, cannot pass it on."""
    return hmac.digest(token, _MAGIC + role + of_called + of_caller + fingerprint.encode(), "sha256")


def _take(connection: Stream, count: int, ends: float) -> bytes:
    room = bytearray(count)
    fill(connection, memoryview(room), ends)
    return bytes(room)


def _give(connection: Stream, data: bytes, ends: float) -> None:
    try:
        connection.settimeout(max(0.001, ends - time.monotonic()))
        connection.sendall(data)
    except (ConnectionResetError, BrokenPipeError) as error:
        raise Disconnected(str(error)) from error
    except OSError as error:
        raise PeerLost(str(error)) from error
