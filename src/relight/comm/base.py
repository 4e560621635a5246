"""What all worlds can do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from relight.errors import SaveFailed


class RankTimeout(SaveFailed):
    """Some ranks did not come to where the others waited for them, in time."""

    kind = "late_ranks"
    ranks: tuple[int, ...] = ()


def late(ranks: Sequence[int], doing: str, seconds: float) -> RankTimeout:
    """The error that names them."""
    shown = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    who = f"rank {shown} was" if len(ranks) == 1 else f"ranks {shown} were" if ranks else "some ranks were"
    error = RankTimeout(
        f"{who} not there when the others were {doing} ({seconds:.1f} s)",
        hint="is it still training, or gone? every rank makes the same calls of the Checkpointer, in the same order",
    )
    error.ranks = tuple(ranks)
    return error


class Communicator(Protocol):
    """The ranks that save together. All of them make the same calls in the same order; none of them from two threads at once."""

    rank: int
    size: int

    def gather(self, data: bytes, doing: str) -> list[bytes]:
        """Everybody's ``data``, by rank, to everybody. ``LateRanks``, which says what was being done, if some do not come."""

    def broadcast(self, data: bytes | None, source: int, doing: str) -> bytes:
        """``data`` of rank ``source``, to everybody; the others give None."""

    def propose(self, words: Sequence[int]) -> None:
        """Begin to find the largest of each word over all ranks. Waits for nobody."""

    def agreed(self) -> list[int] | None:
        """What came of the last ``propose``, the same everywhere; None if there was none. Waits for those who have not proposed yet."""

    def send(self, data: memoryview, to: Sequence[int], doing: str) -> None:
        """``data``, writable memory and not empty, to those ranks, who ``receive`` as much. Returns when it may be written to again."""

    def receive(self, into: memoryview, source: int, doing: str) -> None:
        """Fill ``into`` with what rank ``source`` sends. Between two ranks, in the order in which it was sent."""

    def publish(self, name: str, data: bytes) -> None:
        """Leave word, in any thread, for whoever looks for that name. Waits for nobody."""

    def lookup(self, name: str) -> bytes | None:
        """What was put up under that name; None if nothing was yet. In any thread."""

    def unpublish(self, name: str) -> None:
        """Nobody looks for it any more."""

    def close(self) -> None:
        """Say nothing more."""


class SingleProcess:
    """A world of one."""

    rank, size = 0, 1

    def __init__(self) -> None:
        self._words: list[int] | None = None
        self._board: dict[str, bytes] = {}

    def gather(self, data: bytes, doing: str) -> list[bytes]:
        """Its own."""
        return [data]

    def broadcast(self, data: bytes | None, source: int, doing: str) -> bytes:
        """Its own."""
        assert data is not None
        return data

    def propose(self, words: Sequence[int]) -> None:
        """Kept until it is asked for."""
        self._words = list(words)

    def agreed(self) -> list[int] | None:
        """Its own words."""
        words, self._words = self._words, None
        return words

    def send(self, data: memoryview, to: Sequence[int], doing: str) -> None:
        """There is nobody."""
        assert not to

    def receive(self, into: memoryview, source: int, doing: str) -> None:
        """There is nobody."""
        raise AssertionError("a world of one has nobody to hear from")

    def publish(self, name: str, data: bytes) -> None:
        """Kept."""
        self._board[name] = data

    def lookup(self, name: str) -> bytes | None:
        """What was kept."""
        return self._board.get(name)

    def unpublish(self, name: str) -> None:
        """Kept no more."""
        self._board.pop(name, None)

    def close(self) -> None:
        """Nothing to do."""
