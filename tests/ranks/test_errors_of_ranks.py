"""An error with a text that cannot be encoded is raised on all ranks all the same."""

from __future__ import annotations

import pytest

from relight.comm import ThreadGroup
from relight.errors import RelightError, StoreUnavailable
from relight.ranks.collective_errors import gather_from_all_ranks, raise_on_all_ranks
from relight.ranks.several import SeveralRanks


class Unprintable(Exception):
    """An error of a component."""

    def __str__(self) -> str:
        raise AttributeError("message")


class UnprintableRuntimeError(RuntimeError):
    """An error of a library: errors of this class are compared with refusals of memory by their texts."""

    def __str__(self) -> str:
        raise AttributeError("message")


@pytest.mark.parametrize(
    "error", [StoreUnavailable("\udcff is no file"), OSError(5, "\udcff"), Unprintable(), UnprintableRuntimeError()]
)
@pytest.mark.parametrize("exchange", ["gather", "raise", "rank 0"])
def test_an_error_without_a_text_is_raised_on_all_ranks(error: Exception, exchange: str) -> None:
    """The other rank gets the type's name at once, and no rank waits for the deadline."""

    def rank(world: ThreadGroup) -> str:
        ranks = SeveralRanks(world, (), 5.0)

        def fails() -> bytes:
            if world.rank == 0:
                raise error
            return b""

        try:
            if exchange == "gather":
                with gather_from_all_ranks(world, "testing"):
                    fails()
            elif exchange == "raise":
                with raise_on_all_ranks(ranks, "testing"):
                    fails()
            else:
                ranks.run_on_rank0(fails, "testing")
        except (RelightError, type(error)) as raised:
            return "own" if raised is error else f"{raised}"
        return ""

    first, second = ThreadGroup.run(2, rank, timeout_s=5.0)
    assert first == "own" and second.startswith(f"rank 0: {type(error).__name__}"), second
