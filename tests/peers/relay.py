"""A TCP relay between agents that records what passes, and can call a function after a number of bytes."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable

from relight.peers.wire import split_address, without_fingerprint


class Recording:
    """The bytes of one connection, in both directions."""

    def __init__(self) -> None:
        self.sent = bytearray()
        """From the caller."""
        self.received = bytearray()
        """From the called agent."""


class Relay:
    """Passes connections on to the agent at ``to``. ``address`` has the fingerprint of that agent's certificate.

    ``after`` bytes of a connection, both directions together, ``then`` is called once, before the next byte passes.
    """

    def __init__(self, to: str, after: int | None = None, then: Callable[[], None] = lambda: None) -> None:
        self._to, self._after, self._then = split_address(to), after, then
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}{to[len(without_fingerprint(to)) :]}"
        self.recordings: list[Recording] = []
        self._sockets: list[socket.socket] = []
        self._lock = threading.Lock()
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> Relay:
        return self

    def __exit__(self, *error: object) -> None:
        for end in [self._listener, *self._sockets]:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def streams(self) -> list[bytes]:
        """Return the recorded bytes of each connection and direction."""
        return [bytes(data) for recording in self.recordings for data in (recording.sent, recording.received)]

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                caller, _ = self._listener.accept()
                try:
                    called = socket.create_connection(self._to, 10)
                except OSError:
                    caller.close()
                    continue
                recording = Recording()
                self._sockets += [caller, called]
                self.recordings.append(recording)
                for source, target, data in ((caller, called, recording.sent), (called, caller, recording.received)):
                    threading.Thread(target=self._pass_on, args=(source, target, recording, data), daemon=True).start()

    def _pass_on(self, source: socket.socket, target: socket.socket, recording: Recording, data: bytearray) -> None:
        with contextlib.suppress(OSError):
            while more := source.recv(65536):
                with self._lock:
                    before = len(recording.sent) + len(recording.received)
                    data += more
                    if self._after is not None and before + len(more) > self._after:
                        head = max(0, self._after - before)
                        target.sendall(more[:head])
                        self._after, more = None, more[head:]
                        self._then()
                target.sendall(more)
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
