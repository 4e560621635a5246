"""Ranks that are threads of one process: for tests, and for planning a job that does not run."""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from relight.comm.base import late, out_of_step

LETTERS = 4
"""Messages that may be in transit from one rank to another."""


class _Round:
    def __init__(self) -> None:
        self.given: dict[int, Any] = {}


class _Room:
    """The state that the ranks share. Every exchange has a number, which all ranks count alike."""

    def __init__(self, size: int, timeout_s: float) -> None:
        self.size, self.timeout_s = size, timeout_s
        self.changed = threading.Condition()
        self.rounds: dict[tuple[str, int], _Round] = {}
        self.letters: defaultdict[tuple[int, int], deque[bytes]] = defaultdict(deque)
        """Messages in transit by (sender, receiver)."""
        self.board: dict[str, bytes] = {}

    def give(self, key: tuple[str, int], rank: int, data: Any) -> _Round:
        with self.changed:
            exchange = self.rounds.setdefault(key, _Round())
            exchange.given[rank] = data
            self.changed.notify_all()
            return exchange

    def wait(self, exchange: _Round, doing: str) -> None:
        ends = time.monotonic() + self.timeout_s
        with self.changed:
            if not self.changed.wait_for(lambda: len(exchange.given) == self.size, max(0.0, ends - time.monotonic())):
                raise late(sorted(set(range(self.size)) - exchange.given.keys()), doing, self.timeout_s)


class ThreadGroup:
    """One of ``size`` ranks that are threads. ``ThreadGroup.create(n)`` creates all; ``ThreadGroup.run`` runs a
    function on each."""

    def __init__(self, room: _Room, rank: int) -> None:
        self._room, self.rank, self.size = room, rank, room.size
        self._count = self._proposed = 0
        self._running: _Round | None = None

    @classmethod
    def create(cls, size: int, timeout_s: float = 60.0) -> list[ThreadGroup]:
        """Return all ranks of a group."""
        room = _Room(size, timeout_s)
        return [cls(room, rank) for rank in range(size)]

    @classmethod
    def run(cls, size: int, action: Callable[[ThreadGroup], Any], timeout_s: float = 60.0) -> list[Any]:
        """Run ``action`` on every rank at once. Return the results by rank, or raise the first rank's error."""
        with ThreadPoolExecutor(size, thread_name_prefix="relight-rank") as pool:
            jobs = [pool.submit(action, world) for world in cls.create(size, timeout_s)]
        return [job.result() for job in jobs]

    def gather(self, data: bytes, doing: str) -> list[bytes]:
        """See ``Communicator``."""
        given = self._exchange(data, doing)
        return [given[rank] for rank in range(self.size)]

    def broadcast(self, data: bytes | None, source: int, doing: str) -> bytes:
        """See ``Communicator``."""
        message: bytes = self._exchange(data, doing)[source]
        return message

    def propose(self, words: Sequence[int]) -> None:
        """See ``Communicator``."""
        self._proposed += 1
        self._running = self._room.give(("propose", self._proposed), self.rank, list(words))

    def agreed(self) -> list[int] | None:
        """See ``Communicator``."""
        exchange, self._running = self._running, None
        if exchange is None:
            return None
        self._room.wait(exchange, "agreeing on when to save")
        return [max(words) for words in zip(*exchange.given.values(), strict=True)]

    def send(self, data: memoryview, to: Sequence[int], doing: str) -> None:
        """See ``Communicator``. Waits while ``LETTERS`` messages are unread, like a connection with a small buffer."""
        for rank in to:
            box = self._room.letters[self.rank, rank]
            with self._room.changed:
                if not self._room.changed.wait_for(lambda box=box: len(box) < LETTERS, self._room.timeout_s):  # type: ignore[misc]
                    raise late([rank], doing, self._room.timeout_s)
                box.append(bytes(data))
                self._room.changed.notify_all()

    def receive(self, into: memoryview, source: int, doing: str) -> None:
        """See ``Communicator``."""
        box = self._room.letters[source, self.rank]
        with self._room.changed:
            if not self._room.changed.wait_for(lambda: len(box) > 0, self._room.timeout_s):
                raise late([source], doing, self._room.timeout_s)
            message = box.popleft()
            self._room.changed.notify_all()
        assert len(message) == len(into), (len(message), len(into), doing)
        into[:] = message

    def publish(self, name: str, data: bytes) -> None:
        """See ``Communicator``."""
        self._room.board[name] = data

    def lookup(self, name: str) -> bytes | None:
        """See ``Communicator``."""
        return self._room.board.get(name)

    def unpublish(self, name: str) -> None:
        """See ``Communicator``."""
        self._room.board.pop(name, None)

    def close(self) -> None:
        """Do nothing."""

    def _exchange(self, data: Any, doing: str) -> dict[int, Any]:
        self._count += 1
        exchange = self._room.give(("gather", self._count), self.rank, (doing, data))
        self._room.wait(exchange, doing)
        calls = [exchange.given[rank][0] for rank in range(self.size)]
        if len(set(calls)) > 1:
            raise out_of_step(calls)
        return {rank: given for rank, (_, given) in exchange.given.items()}
