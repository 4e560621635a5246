"""Collective error handling: if an operation fails on one rank, all ranks raise an error."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import msgspec

from relight.comm import Communicator, RankTimeout
from relight.commit import Attempt
from relight.commit.save import CommitTarget
from relight.errors import RelightError, SaveFailed, error_of, is_refusal, known, memory_refusals
from relight.log import History, Log
from relight.ranks.group import RankGroup
from relight.ranks.remote_errors import decode_failure, encode_failure, is_failure, is_fault_of_rank
from relight.store import ByteStore
from relight.store.retry import first_contact

_SKIPPABLE = ("corrupt", "unsafe", "newer", "store", "uncertain", "not_found")
"""Kinds of errors after which a restore tries the next checkpoint."""


@contextmanager
def raise_on_all_ranks(ranks: RankGroup, doing: str) -> Iterator[None]:
    """Run the block on every rank. If it fails on any rank, raise an error on all ranks, after all have tried.
    Collective.

    If ranks have different errors, an error that a caller must not skip takes precedence over one that it may skip.
    """
    if not ranks.several:
        yield
        return
    error: Exception | None = None
    try:
        yield
    except RankTimeout:  # no further exchange is possible
        raise
    except Exception as caught:  # any error, also of the user's code: the other ranks wait for this rank's outcome
        error = caught
    kind, message = ("", b"") if error is None else _kind_and_message(error)
    outcomes = [msgspec.json.decode(outcome) if outcome else None for outcome in ranks.world.gather(message, doing)]
    failed = {rank: outcome for rank, outcome in enumerate(outcomes) if outcome is not None}
    serious = next((rank for rank, outcome in failed.items() if outcome[0] not in _SKIPPABLE), None)
    rank = serious if serious is not None else next(iter(failed), None)
    if rank is None:
        return
    if error is not None and (kind not in _SKIPPABLE or serious is None):
        raise error
    kind, text = failed[rank]
    raise error_of(kind)(f"rank {rank}: {text}", hint="read that rank's own log for the whole error") from error


def _kind_and_message(error: Exception) -> tuple[str, bytes]:
    """Return the error's kind, and its message to other ranks: its type alone if its text cannot be encoded."""
    try:
        described = known(error)
        return described.kind, msgspec.json.encode([described.kind, str(described).splitlines()[0]])
    except Exception:  # the error's own __str__, or a file name that cannot be encoded: other ranks wait
        kind = error.kind if isinstance(error, RelightError) else SaveFailed.kind
        return kind, msgspec.json.encode([kind, type(error).__name__])


class RankMessages:
    """The messages of one exchange: this rank's ``message``, and after the exchange all ranks' ``answers``, by rank."""

    def __init__(self) -> None:
        self.message = b""
        self.answers: list[bytes] = []


@contextmanager
def gather_from_all_ranks(world: Communicator, doing: str) -> Iterator[RankMessages]:
    """Run the block, which sets ``message``, on every rank. Then gather the messages of all ranks.

    If the block fails on any rank, that rank sends its error as its message, and all ranks raise an error after the
    exchange. So no rank waits for an exchange that a failed rank does not reach. ``message`` is empty or an array in
    MessagePack. Collective.
    """
    exchange = RankMessages()
    error: Exception | None = None
    try:
        yield exchange
    except Exception as caught:  # any error, also of the user's code: the other ranks wait for this rank's message
        error = caught
    exchange.answers = world.gather(exchange.message if error is None else encode_failure(error), doing)
    raise_failures(exchange.answers, error)


def raise_failures(answers: Sequence[bytes], error: Exception | None = None) -> None:
    """Raise an error if one of the messages is a failure. ``error``: this rank's own.

    A fault takes precedence over a refusal, so that all ranks raise it.
    """
    failed = [rank for rank, answer in enumerate(answers) if is_failure(answer)]
    if not failed:
        return
    faults = [rank for rank in failed if is_fault_of_rank(answers[rank])]
    if error is not None and (not faults or not is_refusal(error)):
        raise error
    rank = (faults or failed)[0]
    raise decode_failure(answers[rank], rank) from error


@contextmanager
def read_on_all_ranks(ranks: RankGroup, doing: str) -> Iterator[None]:
    """Run a block that reads, as ``raise_on_all_ranks`` does. All ranks raise ``NoMemory`` if memory is refused to one."""
    with raise_on_all_ranks(ranks, doing), memory_refusals(doing):
        yield


def begin_attempt_on_all(
    ranks: RankGroup, store: ByteStore, run: str, reason: str, check: Callable[[History], None]
) -> Attempt:
    """Begin one attempt for all ranks: rank 0 takes over the run, unless ``check`` raises. Collective."""
    mine: list[Attempt] = []

    def begin() -> bytes:
        mine.append(first_contact(lambda: Attempt.begin(store, run, reason=reason, check=check)))
        place = mine[0].place
        return msgspec.json.encode([place.store_id, place.run_id, place.epoch])

    store_id, run_id, epoch = msgspec.json.decode(ranks.run_on_rank0(begin, "beginning an attempt"))
    return mine[0] if mine else Attempt(CommitTarget(store, Log(store, run), store_id, run_id, epoch))
