"""Options and places of the commands that handle each new checkpoint of a run: ``follow`` and ``export --follow``."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Collection, Iterator
from typing import Any, NamedTuple

import click

from relight.catalog.locate import locate
from relight.catalog.run import Run, list_runs
from relight.cli.output import escape, warn
from relight.errors import CheckpointNotFound, ConfigError
from relight.followers.each_checkpoint import Ending, Selection, each_checkpoint
from relight.log import Checkpoint, History
from relight.monitoring.overview import OVER_S, Watcher
from relight.settings.amounts import seconds_of
from relight.store import open_bytes
from relight.store.urls import split_run

END_POLL_S = 5.0
"""Seconds between two checks whether the run is over."""
_OPTIONS = (
    click.option(
        "--which",
        default="latest",
        show_default=True,
        metavar="WHICH",
        help="Which checkpoints: latest, or those that a tag, best or best:METRIC means.",
    ),
    click.option(
        "--every-nth", "nth", type=click.IntRange(min=1), default=1, metavar="K", help="Only each Kth new checkpoint."
    ),
    click.option(
        "--until", type=click.IntRange(min=0), metavar="STEP", help="End after the first checkpoint at or after STEP."
    ),
    click.option("--forever", is_flag=True, help="Do not end when the run is finished."),
    click.option("--idle", metavar="TIME", help="A run without a record for TIME is finished; 24h by default."),
    click.option(
        "--every",
        "every_s",
        type=click.FloatRange(0.05, 86400),
        default=2.0,
        show_default=True,
        metavar="S",
        help="Seconds between two reads of the log.",
    ),
)


def follow_options(command: Any) -> Any:
    """Add the options that select checkpoints and the end."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


class FollowedRun(NamedTuple):
    """A run to follow, which may not exist yet."""

    run: Run
    selection: Selection
    ending: Ending
    every_s: float

    def checkpoints(
        self, done: Callable[[History], Collection[str]], skipped: Collection[str] = ()
    ) -> Iterator[Checkpoint]:
        """Yield each checkpoint to handle. See ``each_checkpoint``.

        Until the end, SIGTERM interrupts this process as Ctrl-C does, with exit code 143.
        """
        former = signal.signal(signal.SIGTERM, _terminated)
        try:
            yield from each_checkpoint(
                self.run.store,
                self.run.name,
                self.selection,
                done,
                self.ending,
                every_s=self.every_s,
                skipped=skipped,
                report=lambda text: warn(escape(text)),
            )
        finally:
            signal.signal(signal.SIGTERM, former)


def followed(
    path: str, which: str, nth: int, until: int | None, forever: bool, idle: str | None, every_s: float, *, queue: int | None = 1,
    once: bool = False,
) -> FollowedRun:  # fmt: skip
    """Return the run at ``path`` and what to handle of it.

    Raise ``ConfigError`` for a path that names a checkpoint, or a store with several runs.
    """
    if which != "latest" and nth > 1:
        raise ConfigError(f"--every-nth counts new checkpoints, and --which is {which}", hint="leave one of them out")
    run = _run_at(path)
    idle_s = OVER_S if idle is None else seconds_of(idle, "--idle")
    is_over = _Over(f"{run.store.url.rstrip('/')}/{run.name}", idle_s)
    ending = Ending(threading.Event(), once, forever, is_over)
    return FollowedRun(run, Selection(which, nth, queue, until), ending, every_s)


def _run_at(path: str) -> Run:
    try:
        place = locate(path)
    except CheckpointNotFound:  # nothing was saved yet
        url, name = split_run(path)
        return Run(open_bytes(url), name)
    if place.which is not None:
        raise ConfigError("this is a checkpoint, not a run", where=path, hint="--which selects checkpoints")
    if place.run is not None:
        return Run(place.store, place.run)
    runs = list_runs(place.store)
    if len(runs) != 1:
        shown = ", ".join(f"{path.rstrip('/')}/{name}" for name in runs[:8])
        raise ConfigError(f"{path} is a store with {len(runs)} runs: which one?", hint=shown or "name the run")
    return Run(place.store, runs[0])


def _terminated(number: int, frame: object) -> None:
    raise SystemExit(128 + number)


class _Over:
    """Whether a run's processes on this machine have reported its end, or there was no checkpoint, attempt or event for a while."""

    def __init__(self, url: str, idle_s: float) -> None:
        self._watcher, self._idle_s = Watcher([url]), idle_s
        self._next_s = 0.0

    def __call__(self) -> bool:
        """Read new events and records, if the last time was not just now."""
        now = time.time()
        if time.monotonic() < self._next_s:
            return False
        self._next_s = time.monotonic() + END_POLL_S
        for seen in self._watcher.poll(now):
            if not seen.run or seen.error:
                continue
            began_at, event_at = seen.began_at or 0.0, seen.last_event_at or 0.0
            # an older event than the attempt: another machine has taken the run over
            ended = seen.has_ended and event_at >= began_at
            return ended or now - max(began_at, event_at, seen.committed_at or 0.0) >= self._idle_s
        return False
