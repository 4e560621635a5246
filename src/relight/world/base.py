"""What all worlds can do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from relight.errors import SaveFailed


class LateRanks(SaveFailed):
    """Some ranks did not come to where the others waited for them, in time."""

    kind = "late_ranks"
    ranks: tuple[int, ...] = ()


def late(ranks: Sequence[int], doing: str, seconds: float) -> LateRanks:
    """The error that names them."""
    shown = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    who = f"rank {shown} was" if len(ranks) == 1 else f"ranks {shown} were" if ranks else "some ranks were"
    error = LateRanks(
        f"{who} not there when the others were {doing} ({seconds:.1f} s)",
        hint="is it still training, or gone? every rank makes the same calls of the Checkpointer, in the same order",
    )
    error.ranks = tuple(ranks)
    return error


class World(Protocol):
    """The ranks that save together. All of them make the same calls in the same order; none of them from two threads at once."""

    rank: int
    size: int

    def gather(self, data: bytes, doing: str) -> list[bytes]:
        """Everybody's ``data``, by rank, to everybody. ``LateRanks``, which says what was being done, if some do not come."""

    def tell(self, data: bytes | None, source: int, doing: str) -> bytes:
        """``data`` of rank ``source``, to everybody; the others give None."""

    def propose(self, words: Sequence[int]) -> None:
        """Begin to find the largest of each word over all ranks. Waits for nobody."""

    def agreed(self) -> list[int] | None:
        """What came of the last ``propose``, the same everywhere; None if there was none. Waits for those who have not proposed yet."""

    def close(self) -> None:
        """Say nothing more."""


class Alone:
    """A world of one."""

    rank, size = 0, 1

    def __init__(self) -> None:
        self._words: list[int] | None = None

    def gather(self, data: bytes, doing: str) -> list[bytes]:
        """Its own."""
        return [data]

    def tell(self, data: bytes | None, source: int, doing: str) -> bytes:
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

    def close(self) -> None:
        """Nothing to do."""
