"""The interface of all communicators, the communicator of a single process, and the error for late ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from relight.errors import SaveFailed
from relight.units import duration_text


class RankTimeout(SaveFailed):
    """Some ranks did not reach a collective in time, while others waited there."""

    kind = "late_ranks"
    ranks: tuple[int, ...] = ()


def late(ranks: Sequence[int], doing: str, seconds: float) -> RankTimeout:
    """Return the error that names the late ranks."""
    shown = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    who = f"rank {shown} was" if len(ranks) == 1 else f"ranks {shown} were" if ranks else "some ranks were"
    error = RankTimeout(
        f"{who} not there when the others were {doing} ({duration_text(seconds)})",
        hint="check that these ranks still run: every rank must make the same calls of the Checkpointer, in the same order",
    )
    error.ranks = tuple(ranks)
    return error


def out_of_step(calls: Sequence[str]) -> RankTimeout:
    """Return the error for ranks that met in different calls. ``calls``: what each rank was doing, by rank."""
    by_call = {call: [rank for rank, other in enumerate(calls) if other == call] for call in dict.fromkeys(calls)}
    names = [
        f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks[:8]))}{' and others' if len(ranks) > 8 else ''}: {call}"
        for call, ranks in by_call.items()
    ]
    error = RankTimeout(
        f"the ranks are out of step: {'; '.join(names[:4])}",
        hint="every rank must make the same calls of the Checkpointer, in the same order",
    )
    most = max(by_call.values(), key=len)
    error.ranks = tuple(rank for rank in range(len(calls)) if rank not in most)
    return error


class Communicator(Protocol):
    """The ranks that save together. All of them make the same calls in the same order, and never from two threads at
    once. Ranks that meet in calls with a different ``doing`` raise ``RankTimeout``, all of them."""

    rank: int
    size: int

    def gather(self, data: bytes, doing: str) -> list[bytes]:
        """Return every rank's ``data``, by rank, on all ranks. Raise ``RankTimeout``, with ``doing`` in its message,
        if ranks are late."""

    def broadcast(self, data: bytes | None, source: int, doing: str) -> bytes:
        """Return ``data`` of rank ``source`` on all ranks; the other ranks pass None."""

    def propose(self, words: Sequence[int]) -> None:
        """Begin an all-reduce of the maximum of each word. Does not wait."""

    def agreed(self) -> list[int] | None:
        """Return the result of the last ``propose``, the same on all ranks; None if there was none. Waits for ranks
        that have not proposed."""

    def send(self, data: memoryview, to: Sequence[int], doing: str) -> None:
        """Send ``data``, writable memory and not empty, to ranks that ``receive`` that many bytes. Returns once the
        memory may be reused."""

    def receive(self, into: memoryview, source: int, doing: str) -> None:
        """Fill ``into`` with the bytes that rank ``source`` sends. Between two ranks, messages keep their order."""

    def publish(self, name: str, data: bytes) -> None:
        """Publish ``data`` under a name, for other ranks to read. Does not wait. Thread-safe."""

    def lookup(self, name: str) -> bytes | None:
        """Return what was published under the name, or None. Thread-safe."""

    def unpublish(self, name: str) -> None:
        """Remove what was published under the name."""

    def close(self) -> None:
        """Send nothing more."""


class SingleProcess:
    """The communicator of a single process."""

    rank, size = 0, 1

    def __init__(self) -> None:
        self._words: list[int] | None = None
        self._board: dict[str, bytes] = {}

    def gather(self, data: bytes, doing: str) -> list[bytes]:
        """Return the own data."""
        return [data]

    def broadcast(self, data: bytes | None, source: int, doing: str) -> bytes:
        """Return the own data."""
        assert data is not None
        return data

    def propose(self, words: Sequence[int]) -> None:
        """Keep the words for ``agreed``."""
        self._words = list(words)

    def agreed(self) -> list[int] | None:
        """Return the proposed words."""
        words, self._words = self._words, None
        return words

    def send(self, data: memoryview, to: Sequence[int], doing: str) -> None:
        """Do nothing: there is no other rank."""
        assert not to

    def receive(self, into: memoryview, source: int, doing: str) -> None:
        """Raise ``AssertionError``: there is no other rank."""
        raise AssertionError("a single process has no rank to receive from")

    def publish(self, name: str, data: bytes) -> None:
        """Keep the data in this process."""
        self._board[name] = data

    def lookup(self, name: str) -> bytes | None:
        """Return the kept data, or None."""
        return self._board.get(name)

    def unpublish(self, name: str) -> None:
        """Drop the kept data."""
        self._board.pop(name, None)

    def close(self) -> None:
        """Do nothing."""
