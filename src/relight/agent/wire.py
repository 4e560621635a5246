"""Messages over a Unix stream socket: four bytes of length, MessagePack, and sometimes file descriptors."""

from __future__ import annotations

import array
import os
import select
import socket
import struct
import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import msgspec

from relight.agent.messages import MESSAGE_BYTES_MAX
from relight.decode import msgpack_decoder

FDS_MAX = 253
"""Descriptors that the kernel accepts with one message (``SCM_MAX_FD``)."""
T = TypeVar("T")


RECEIVE_BYTES = 64 << 10
"""Bytes that one call receives at most, and allocates each time."""


class ConnectionLost(ConnectionError):
    """The other end has closed the connection, or has ended."""


class AgentConnection(Generic[T]):
    """One connection. Call ``send`` from any thread, ``receive`` from one."""

    def __init__(self, connection: socket.socket, kind: Any, carriers: tuple[type, ...] = ()) -> None:
        """``carriers``: message types that carry descriptors. Descriptors with any other message are closed: the other
        end may send them unasked."""
        self._socket = connection
        self._carriers = carriers
        self._decoder: msgspec.msgpack.Decoder[T] = msgpack_decoder(kind)
        self._encoder = msgspec.msgpack.Encoder()
        self._sending = threading.Lock()
        self._buffer = bytearray()
        self._fds: dict[int, list[int]] = {}
        """Received descriptors, by the position in the buffer at which their message begins."""
        self.cut_off = False
        """Whether the kernel has dropped descriptors, because this process is at its limit."""
        self._tick_ms: int | None = None
        self._idle: Callable[[], None] = lambda: None

    def bound(self, send_s: float, tick_s: float, idle: Callable[[], None]) -> None:
        """Limit this end's waits.

        A ``send`` ends the connection after ``send_s`` seconds without buffer space. ``receive`` calls ``idle`` every
        ``tick_s`` seconds while nothing arrives.
        """
        self._tick_ms, self._idle = int(1000 * tick_s), idle
        whole = int(send_s)
        self._socket.setsockopt(
            socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("@ll", whole, int((send_s - whole) * 1e6))
        )

    def send(self, message: Any, fds: list[int] | None = None) -> None:
        """Send a whole message. Raise ``ConnectionLost`` if the other end has gone."""
        body = self._encoder.encode(message)
        data = len(body).to_bytes(4, "little") + body
        try:
            with self._sending:
                if fds:
                    sent = socket.send_fds(self._socket, [data], fds)
                    data = data[sent:]
                if data:  # sending nothing would raise, too, if the other end has gone meanwhile
                    self._socket.sendall(data)
        except BlockingIOError as error:  # part of the message may have been sent, so no other message may follow
            self.hang_up()
            raise ConnectionLost("the other end does not read its messages") from error
        except OSError as error:
            raise ConnectionLost(str(error)) from error

    def receive(self) -> tuple[T, list[int]]:
        """Return the next message and its descriptors, which the caller must close.

        Raise ``ConnectionLost`` at the end of the stream.
        """
        while True:
            if len(self._buffer) >= 4:
                length = int.from_bytes(self._buffer[:4], "little")
                if length > MESSAGE_BYTES_MAX:
                    raise ConnectionLost(f"a message of {length} bytes")
                if len(self._buffer) >= 4 + length:
                    body = bytes(self._buffer[4 : 4 + length])
                    del self._buffer[: 4 + length]
                    fds = self._fds.pop(0, [])
                    self._fds = {begin - 4 - length: later for begin, later in self._fds.items()}
                    try:
                        message = self._decoder.decode(body)
                    except (msgspec.MsgspecError, UnicodeError) as error:
                        close_all(fds)
                        raise ConnectionLost(f"not a message: {error}") from error
                    if fds and not isinstance(message, self._carriers):
                        close_all(fds)
                        fds = []
                    return message, fds
            self._more()

    def hang_up(self) -> None:
        """Shut down both directions. A thread that waits in ``receive`` wakes up and closes the socket."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass

    def abandon(self) -> None:
        """Close only this process's descriptors: another process keeps the connection. For a forked child."""
        self._sending = threading.Lock()  # another thread may have held the old one at the fork
        self._close_socket()

    def close(self) -> None:
        """Shut down, and close the socket and all descriptors."""
        self.hang_up()
        self._close_socket()

    def _close_socket(self) -> None:
        self._socket.close()
        for fds in self._fds.values():
            close_all(fds)
        self._fds = {}

    def _more(self) -> None:
        # without room for them the kernel closes descriptors
        room = socket.CMSG_SPACE(FDS_MAX * array.array("i").itemsize) if self._carriers else 0
        try:
            self._await()
            data, extra, flags, _ = self._socket.recvmsg(RECEIVE_BYTES, room, socket.MSG_CMSG_CLOEXEC)
        except OSError as error:
            raise ConnectionLost(str(error)) from error
        self._buffer += data
        self.cut_off = self.cut_off or bool(flags & socket.MSG_CTRUNC)
        for level, kind, payload in extra:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                descriptors = array.array("i")
                descriptors.frombytes(payload[: len(payload) - len(payload) % descriptors.itemsize])
                # the kernel may join earlier messages with the one that has descriptors, and returns at its first bytes
                fds = self._fds.setdefault(self._last_begin(), [])
                fds += descriptors
                if len(fds) > FDS_MAX:
                    raise ConnectionLost(f"{len(fds)} descriptors for one message")
        if not data:
            raise ConnectionLost("closed")

    def _last_begin(self) -> int:
        """Return the position in the buffer at which its last message begins."""
        begin = end = 0
        while end < len(self._buffer):
            begin = end
            end += 4 + int.from_bytes(self._buffer[begin : begin + 4], "little")
        return begin

    def _await(self) -> None:
        """Return once data has arrived or the connection has ended."""
        if self._tick_ms is None:
            return
        waiting = select.poll()
        waiting.register(self._socket, select.POLLIN)
        while not waiting.poll(self._tick_ms):
            self._idle()


def close_all(fds: list[int]) -> None:
    """Close descriptors; ignore those that are closed."""
    for fd in fds:
        try:
            os.close(fd)
        except OSError:
            pass
