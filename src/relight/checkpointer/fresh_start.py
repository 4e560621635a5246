"""Where an attempt begins: from the run's checkpoints, or from scratch on purpose. Never from scratch by an oversight."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress

from relight.catalog.tiers import Further
from relight.checkpointer.ranks import Ranks
from relight.commit import Attempt
from relight.errors import CheckpointNotFound, ConfigError, StoreUnavailable
from relight.format.records import NoteBody
from relight.log import History, Log, fold, newest_good
from relight.store import ByteStore

FRESH_TOPIC = "fresh start"
"""Topic of the NOTE that an attempt with ``fresh=True`` has begun; ``job`` names the launcher's job, if there is one."""
_JOBS = (("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"), ("SLURM_JOB_ID", "SLURM_RESTART_COUNT"))
"""Variables by which a launcher names its job, and counts how often it has started that job again."""


def launcher_job() -> tuple[str, int]:
    """Return the launcher's name for this job, empty if there is no launcher, and how often it has started the job again."""
    for name, count in _JOBS:
        if os.environ.get(name):
            restarts = os.environ.get(count, "0")
            return f"{name}={os.environ[name][:200]}", int(restarts) if restarts.isdecimal() else 0
    return "", 0


class FreshStart:
    """The option ``fresh=``. A job that its launcher starts again does not begin from scratch a second time."""

    def __init__(self, wanted: bool) -> None:
        if not isinstance(wanted, bool):
            raise ConfigError(f"fresh= is True or False, not {wanted!r}", hint="fresh=True begins a new branch of the run from scratch")
        self.wanted = wanted
        self.used = False
        """Whether this attempt begins from scratch because of it."""

    def applies(self, store: ByteStore, run: str, ranks: Ranks | None) -> bool:
        """Return whether ``restore()`` must restore nothing. False once the same job has saved a checkpoint after its fresh start.

        Cost: none without ``fresh=True``; else, in a job that was started again, one reading of the log by rank 0.
        """
        if not self.wanted:
            return False
        job, restarts = launcher_job()

        def look() -> bytes:
            return b"1" if _has_progress(store, run, job) else b""

        progress = False
        if restarts:
            progress = bool(look() if ranks is None else ranks.first(look, "looking for this job's own checkpoints"))
        self.used = not progress
        return self.used

    def guard(self, looked: bool, where: str, further: Sequence[Further]) -> Callable[[History], None]:
        """Return what refuses to take charge of a run that has checkpoints, here or in ``further`` tiers, in a process that restored none.

        ``looked``: whether ``restore()`` has looked for a checkpoint. The result raises ``ConfigError``.
        """

        def refuse(history: History) -> None:
            if not looked and not self.wanted:
                _refuse_unrestored(history, where)
                for name, store, run in further:
                    with suppress(CheckpointNotFound, StoreUnavailable):  # copying to that tier checks again
                        _refuse_unrestored(fold(Log(store, run).read()), f"{store.url.rstrip('/')}/{run} (tier {name})")

        return refuse

    def begun(self, attempt: Attempt, history: History, parent: str | None, rank: int) -> str:
        """Record a fresh start in the log, by rank 0. Return what the attempt's first line adds: what it does not continue from.

        ``history``: the run's, as the attempt began. ``parent``: the id of the restored checkpoint, None if none was.
        """
        if rank:
            return ""
        if self.wanted and parent is None:
            attempt.note(FRESH_TOPIC, {"job": launcher_job()[0]})
        newest = newest_good(history)
        if newest is None or newest.id == parent:
            return ""
        restored = history.find(parent) if parent is not None else None
        begins = f"continues from step {restored.step}" if restored is not None else "begins from scratch"
        later = [one for one in history.live if restored is None or one.seq > restored.seq]
        return f" {begins}; it keeps {len(later)} checkpoints that it does not continue from, the newest of step {newest.step}"


def _has_progress(store: ByteStore, run: str, job: str) -> bool:
    try:
        history = fold(Log(store, run).read())
    except CheckpointNotFound:
        return False
    notes = [one for one in history.notes if isinstance(one.body, NoteBody) and one.body.topic == FRESH_TOPIC]
    begun = [one.seq for one in notes if isinstance(one.body, NoteBody) and one.body.data.get("job") == job]
    return bool(begun) and any(one.seq > begun[-1] for one in history.live)


def _refuse_unrestored(history: History, where: str) -> None:
    newest = newest_good(history)
    if newest is not None:
        raise ConfigError(
            f"this run has checkpoints, the newest of step {newest.step}, and this process restored none before its first step or save",
            where=where,
            hint="call ckpt.restore() before the loop, and begin at the step that it returns; to begin from scratch beside them: "
            "Checkpointer(…, fresh=True), or another run name",
        )
