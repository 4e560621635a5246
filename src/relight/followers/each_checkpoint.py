"""The next checkpoint of a run for a process that handles each new one. The choice is pure; ``each_checkpoint`` waits."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator
from typing import NamedTuple

from relight.catalog.find import choose
from relight.errors import CheckpointNotFound, StoreUnavailable
from relight.followers.followed_log import FollowedLog
from relight.log import Checkpoint, History, fold
from relight.run_records.fresh_starts import fresh_starts
from relight.run_records.run_end import has_ended
from relight.store import ByteStore
from relight.units import duration_text


class Selection(NamedTuple):
    """The checkpoints to handle."""

    which: str = "latest"
    """``latest``: each new one. Otherwise those that a tag or ``best:METRIC`` means at some time."""
    nth: int = 1
    """Only each Nth of the new ones."""
    queue: int | None = 1
    """Most checkpoints that wait; a newer one replaces the oldest of them. None: all that exist are handled, in order."""
    until: int | None = None
    """The step of the last one: the first checkpoint at or after it that is neither set aside nor suspect."""


class Ending(NamedTuple):
    """When ``each_checkpoint`` ends, in addition to its selection's ``until``."""

    stopping: threading.Event
    once: bool = False
    """After the checkpoints that exist now."""
    forever: bool = False
    """Not when the run is finished."""
    is_over: Callable[[], bool] = lambda: False
    """Whether the run's processes have reported the end, or none has reported anything for a long time."""


def waiting(
    history: History, selection: Selection, done: Collection[str], skipped: Collection[str] = ()
) -> list[Checkpoint]:
    """Return the checkpoints that wait to be handled, oldest first. ``done``: ids of those that were handled.

    ``skipped``: ids of those that cannot be handled. An older checkpoint may take their place. All follows from the log: a process that
    was killed continues where it was.
    """
    if selection.which != "latest":
        try:
            chosen = choose(history, selection.which).checkpoint
        except CheckpointNotFound:
            return []  # the tag or the metric does not exist yet
        return [] if chosen.id in done or chosen.id in skipped else [chosen]
    known = [*history.live, *history.retired.values()]
    last = max((checkpoint.seq for checkpoint in known if checkpoint.id in done), default=-1)
    good = _good(history)
    if selection.nth > 1:  # counted from the last one that was handled, or from the first that is known
        after = [checkpoint for checkpoint in good if checkpoint.seq > last]
        good = after[selection.nth - 1 if last >= 0 else 0 :: selection.nth]
    end = _end(history, selection)
    new = [
        checkpoint
        for checkpoint in good
        if checkpoint.id not in done
        and checkpoint.id not in skipped
        and (selection.queue is None or checkpoint.seq > last)
        and (end is None or checkpoint.seq <= end.seq)
        and history.find(checkpoint.id) is not None
    ]
    return new if selection.queue is None else new[-selection.queue :]


def is_finished(history: History) -> bool:
    """Return whether the newest checkpoint is the last one of the attempt in charge, which ended normally."""
    newest = history.live[-1] if history.live else None
    return newest is not None and newest.id not in history.rolled_back_ids and has_ended(history)


def _good(history: History) -> list[Checkpoint]:
    """Return the checkpoints that are neither set aside by a rollback nor suspect, oldest first. Retired ones are among them."""
    good = [
        checkpoint
        for checkpoint in (*history.live, *history.retired.values())
        if checkpoint.id not in history.rolled_back_ids and not checkpoint.body.suspect
    ]
    return sorted(good, key=lambda checkpoint: checkpoint.seq)


def _end(history: History, selection: Selection) -> Checkpoint | None:
    """Return the first checkpoint at or after ``until``, since the run last began from scratch. None if there is none yet."""
    if selection.until is None:
        return None
    began = max((seq for seq, _ in fresh_starts(history)), default=-1)
    reached = (checkpoint for checkpoint in _good(history) if checkpoint.step >= selection.until)
    return next((checkpoint for checkpoint in reached if checkpoint.seq > began), None)


def each_checkpoint(
    store: ByteStore,
    run: str,
    selection: Selection,
    done: Callable[[History], Collection[str]],
    ending: Ending,
    *,
    every_s: float,
    skipped: Collection[str] = (),
    report: Callable[[str], None] = lambda text: None,
) -> Iterator[Checkpoint]:
    """Yield each checkpoint to handle, as soon as it exists and the one before was handled.

    ``done(history)`` returns the ids of the handled ones; ``skipped`` is as for ``waiting``, and is read each time. A run that does not
    exist yet is waited for. While the store does not answer, ``report`` is called once, and the log is read again after ``every_s``.
    Raise ``CheckpointNotFound`` if there is no run and ``ending.once`` is set.
    """
    log, silent, existing = FollowedLog(store, run), False, set[str]()
    first = True
    while not ending.stopping.is_set():
        over = (
            not (ending.once or ending.forever) and ending.is_over()
        )  # before the log: its last checkpoint is handled, too
        try:
            history = fold(log.read())
            silent = False
        except CheckpointNotFound:
            if ending.once:
                raise
            history = None
        except StoreUnavailable as error:
            if not error.retryable or ending.once:
                raise
            if not silent:
                report(f"{error}; the log is read again every {duration_text(every_s)}")
            history, silent = None, True
        if history is not None:
            new = waiting(history, selection, done(history), skipped)
            if first:
                existing, first = {checkpoint.id for checkpoint in new}, False
            if ending.once:
                new = [checkpoint for checkpoint in new if checkpoint.id in existing]
            if new:
                yield new[0]
                continue
            if (
                ending.once
                or _end(history, selection) is not None
                or (not ending.forever and (over or is_finished(history)))
            ):
                return
        ending.stopping.wait(every_s)
