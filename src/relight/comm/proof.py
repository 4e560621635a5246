"""Mutual proof of a secret over a connection, before anything else is sent on it.

::

    caller → listener    MAGIC, the caller's nonce
    listener → caller    the listener's nonce, HMAC(secret, "listener", name, both nonces)
    caller → listener    HMAC(secret, "caller", name, both nonces)
    listener → caller    one byte

The roles keep an end from reflecting a proof, the name keeps it from passing one on to another listener of the same secret.
"""

from __future__ import annotations

import hmac
import secrets
import select
import socket
import time
from collections.abc import Callable

_MAGIC = b"relight-proof-1\n"
_NONCE, _MAC = 32, 32
_YES = b"\1"
_TICK_S = 0.5


class ProofFailed(ConnectionError):
    """The process at the other end does not know the secret."""


def prove_as_caller(
    connection: socket.socket, secret: bytes, name: str, timeout_s: float, idle: Callable[[], None] = lambda: None
) -> None:
    """Prove the secret to a listener, which proves it first.

    Raise ``ProofFailed`` if the listener does not know the secret, another ``OSError`` if it is gone. ``idle`` is
    called every ``_TICK_S`` seconds while no answer comes: the listener may have been stopped.
    """
    ends, mine = time.monotonic() + timeout_s, secrets.token_bytes(_NONCE)
    _send(connection, _MAGIC + mine, ends)
    answer = _receive(connection, _NONCE + _MAC, ends, idle)
    theirs, proof = answer[:_NONCE], answer[_NONCE:]
    if not hmac.compare_digest(proof, _mac(secret, b"listener", name, mine, theirs)):
        raise ProofFailed("the process that listens does not know the secret")
    _send(connection, _mac(secret, b"caller", name, mine, theirs), ends)
    if _receive(connection, len(_YES), ends, idle) != _YES:
        raise ProofFailed("the process that listens refused the proof")


def prove_as_listener(connection: socket.socket, secret: bytes, name: str, timeout_s: float) -> None:
    """Prove the secret to a caller, then have it prove the secret.

    Raise ``ProofFailed`` if the caller does not know it, another ``OSError`` if it is gone.
    """
    ends, mine = time.monotonic() + timeout_s, secrets.token_bytes(_NONCE)
    greeting = _receive(connection, len(_MAGIC) + _NONCE, ends)
    if not greeting.startswith(_MAGIC):
        raise ProofFailed("the caller uses another protocol")
    theirs = greeting[len(_MAGIC) :]
    _send(connection, mine + _mac(secret, b"listener", name, theirs, mine), ends)
    if not hmac.compare_digest(_receive(connection, _MAC, ends), _mac(secret, b"caller", name, theirs, mine)):
        raise ProofFailed("the caller does not know the secret")
    _send(connection, _YES, ends)


def _mac(secret: bytes, role: bytes, name: str, caller: bytes, listener: bytes) -> bytes:
    return hmac.digest(secret, b"\0".join((_MAGIC, role, name.encode(), caller + listener)), "sha256")


def _send(connection: socket.socket, data: bytes, ends: float) -> None:
    _limit(connection, ends)
    connection.sendall(data)


def _receive(connection: socket.socket, length: int, ends: float, idle: Callable[[], None] | None = None) -> bytes:
    """Receive exactly ``length`` bytes. The kernel closes descriptors that come with them, as no room is given for
    them."""
    data = b""
    waiting = select.poll()
    waiting.register(connection, select.POLLIN)
    while len(data) < length:
        while idle is not None and time.monotonic() < ends and not waiting.poll(int(1000 * _TICK_S)):
            idle()
        _limit(connection, ends)
        more = connection.recv(length - len(data))
        if not more:
            raise ConnectionError("the other end closed the connection")
        data += more
    return data


def _limit(connection: socket.socket, ends: float) -> None:
    left = ends - time.monotonic()
    if left <= 0:
        raise TimeoutError("no proof came in time")
    connection.settimeout(left)
