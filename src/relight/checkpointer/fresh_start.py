"""``fresh=``: start an attempt from scratch on purpose, and refuse to do so by mistake."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress

import msgspec

from relight.catalog.tiers import Further
from relight.checkpointer.launcher_job import LauncherJob, job_of, with_agents
from relight.commit import Attempt
from relight.errors import CheckpointNotFound, ConfigError, RelightError, StoreUnavailable
from relight.format.topics import FRESH_START, FreshStartNote
from relight.log import History, Log, fold, newest_good
from relight.ranks.group import RankGroup
from relight.run_records.fresh_starts import fresh_starts, record_fresh_start
from relight.store import ByteStore


class FreshStart:
    """The option ``fresh=``. A job that its launcher restarts does not start from scratch a second time."""

    def __init__(self, wanted: bool) -> None:
        if not isinstance(wanted, bool):
            raise ConfigError(
                f"fresh= must be True or False, not {wanted!r}",
                hint="fresh=True begins a new branch of the run from scratch",
            )
        self.wanted = wanted
        self.used = False
        """Whether this attempt starts from scratch because of the option."""
        self._job = job_of(os.environ) if wanted else LauncherJob(frozenset())
        self._recorded = False

    def applies(self, store: ByteStore, run: str, further: Sequence[Further], ranks: RankGroup) -> bool:
        """Return whether ``restore()`` must restore nothing. False once the same job has saved a checkpoint after its fresh start.

        Rank 0 decides by its own environment, as launchers count restarts for each node. Every rank joins the exchange, whatever its
        environment has. Cost without ``fresh=True``: none. Else, in a launcher's job: a reading of each tier's log, and one record.
        """
        if not self.wanted:
            return False
        if ranks.several:
            names = ranks.world.gather(msgspec.json.encode(sorted(self._job.names)), "comparing launchers")
            self._job = with_agents(self._job, {name for encoded in names for name in msgspec.json.decode(encoded)})

        def search() -> bytes:
            return b"1" if self._has_progress(store, run, further) else b""

        self.used = not ranks.run_on_rank0(search, "searching for this job's own checkpoints")
        return self.used

    def guard(self, searched: bool, where: str, further: Sequence[Further]) -> Callable[[History], None]:
        """Return a function that raises ``ConfigError`` if the run has checkpoints, here or in ``further`` tiers, and
        this process restored none.

        ``searched``: whether ``restore()`` has searched for a checkpoint.
        """

        def refuse(history: History) -> None:
            if not searched and not self.wanted:
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
        if self.wanted and parent is None and not self._recorded:
            attempt.note(FRESH_START.note(FreshStartNote(job=self._job.text)))
        newest = newest_good(history)
        if newest is None or newest.id == parent:
            return ""
        restored = history.find(parent) if parent is not None else None
        begins = f"continues from step {restored.step}" if restored is not None else "begins from scratch"
        later = [checkpoint for checkpoint in history.live if restored is None or checkpoint.seq > restored.seq]
        return f" {begins}; it keeps {len(later)} checkpoints that it does not continue from, the newest of step {newest.step}"

    def _has_progress(self, store: ByteStore, run: str, further: Sequence[Further]) -> bool:
        """Return whether this job has saved a checkpoint after its fresh start, in any tier. Record a fresh start if it has not.

        The record is made at once: a job that dies before its first step must not be taken for the job before it when it is restarted.
        """
        if not self._job.names:
            return False
        log = Log(store, run)
        try:
            history = fold(log.read())
        except CheckpointNotFound:
            history = None
        if history is not None and _continues(history, self._job):
            return True
        for _, other, name in further:
            with suppress(RelightError):  # the restore reports a tier that cannot be read
                if _continues(fold(Log(other, name).read()), self._job):
                    return True
        if history is not None:
            with suppress(StoreUnavailable):  # the attempt records it
                record_fresh_start(log, self._job.text)
                self._recorded = True
        return False


def _continues(history: History, job: LauncherJob) -> bool:
    begun = [seq for seq, text in fresh_starts(history) if job.began(text)]
    return bool(begun) and any(checkpoint.seq > begun[-1] for checkpoint in history.live)


def _refuse_unrestored(history: History, where: str) -> None:
    newest = newest_good(history)
    if newest is not None:
        raise ConfigError(
            f"this run has checkpoints, the newest of step {newest.step}, and this process restored none before its first step or save",
            where=where,
            hint="call ckpt.restore() before the loop, and begin at the step that it returns; to begin from scratch and keep them: "
            "Checkpointer(…, fresh=True), or another run name",
        )
