"""Ranks agree: something is done by all of them or by none, and an error of one is raised on all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec

from relight.checkpointer.ranks import Ranks
from relight.comm import RankTimeout
from relight.commit import Attempt
from relight.commit.save import CommitTarget
from relight.errors import error_of, known
from relight.log import History, Log
from relight.store import ByteStore
from relight.store.retry import first_contact

_PASSED_OVER = ("corrupt", "unsafe", "store", "uncertain", "not_found")
"""Kinds of errors with which a restore goes on to the next checkpoint."""


@contextmanager
def raise_on_all_ranks(ranks: Ranks | None, doing: str) -> Iterator[None]:
    """What every rank does, or none: an error on one of them is an error on all, after all have tried.

    Errors that a caller may pass over give way to those that it may not.
    """
    error: Exception | None = None
    kind = ""
    try:
        yield
    except RankTimeout:  # they have lost each other
        raise
    except Exception as found:  # whatever it is, also of the user's own code: the others wait to hear of it
        if ranks is None:
            raise
        error, kind = found, known(found).kind
    if ranks is None:
        return
    told = b"" if error is None else msgspec.json.encode([kind, str(known(error)).splitlines()[0]])
    outcomes = [msgspec.json.decode(one) if one else None for one in ranks.world.gather(told, doing)]
    serious = next((rank for rank, one in enumerate(outcomes) if one is not None and one[0] not in _PASSED_OVER), None)
    rank = serious if serious is not None else next((rank for rank, one in enumerate(outcomes) if one is not None), None)
    if rank is None:
        return
    if error is not None and (kind not in _PASSED_OVER or serious is None):
        raise error
    kind, said = outcomes[rank] or ("", "")
    raise error_of(kind)(f"rank {rank}: {said}", hint="that rank's own log has all of it") from error


def begin_attempt_on_all(ranks: Ranks, store: ByteStore, run: str, reason: str, check: Callable[[History], None]) -> Attempt:
    """One attempt for all ranks: rank 0 takes charge of the run, unless ``check`` raises."""
    mine: list[Attempt] = []

    def begin() -> bytes:
        mine.append(first_contact(lambda: Attempt.begin(store, run, reason=reason, check=check)))
        place = mine[0].place
        return msgspec.json.encode([place.store_id, place.run_id, place.epoch])

    store_id, run_id, epoch = msgspec.json.decode(ranks.run_on_rank0(begin, "beginning an attempt"))
    return mine[0] if mine else Attempt(CommitTarget(store, Log(store, run), store_id, run_id, epoch))
