"""An attempt: the training between two starts of a run. It takes over by a FENCE record, and saves until it is superseded."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace

from relight.commit.chunk_index import IncrementalState
from relight.commit.multi_rank import save_multi_rank
from relight.commit.save import CommitTarget, SaveReport, SaveRequest, save
from relight.errors import Fenced
from relight.format.records import Body, FenceBody, NoteBody
from relight.log import History, Log, LogView, fold
from relight.log.identity import now_text
from relight.log.truncated import refuse_truncated
from relight.policy.compact import Compact, Experience
from relight.store import ByteStore


def take_over(log: Log, attempt: str, earlier: Collection[str] | None = None) -> int:
    """Make ``attempt``, which owns the run's nearest tier, the owner of a further tier too. Return its epoch there.

    Raise ``Fenced`` if a later attempt owns that tier. ``earlier``: attempts that are known to precede this one; None: this attempt has
    just begun and supersedes every other. Cost: one record, the first time.
    """
    log.start()
    epochs: list[int] = []

    def decide(view: LogView) -> tuple[Body, int] | None:
        history = fold(view)
        names = history.attempts
        if names and names[-1] == attempt:
            epochs.append(history.epoch)
            return None
        if names and (attempt in names or (earlier is not None and names[-1] not in earlier)):
            raise Fenced(
                f"attempt {attempt} was superseded by attempt {names[-1]} there",
                where=view.run,
                hint=f"{history.fences[-1].writer!r} saves to another tier of this run: stop this process, or give it a run of its own",
            )
        epochs.append(_next_epoch(view))
        return FenceBody(attempt=attempt, reason="tier"), epochs[-1]

    log.append(decide)
    return epochs[-1]


def _next_epoch(view: LogView) -> int:
    # An unreadable record after the last FENCE may have been a FENCE: skip its epoch, or two attempts could share an epoch.
    history = fold(view)
    newest = history.fences[-1].seq if history.fences else -1
    later = sum(fault.seq > newest for fault in view.damaged)
    if view.summary is not None and view.summary.faults and view.summary.faults[0].seq > newest:
        later += view.summary.more_faults
    return history.epoch + 1 + later


class Attempt:
    """Owner of a run after ``begin``: later commits of earlier attempts are void, and their next save raises ``Fenced``."""

    def __init__(self, place: CommitTarget, compact: Compact | None = None) -> None:
        self._place = place
        self._smaller: IncrementalState | None = None
        self.make_smaller(compact)

    @classmethod
    def begin(
        cls,
        store: ByteStore,
        run: str,
        *,
        reason: str = "start",
        now: Callable[[], str] = now_text,
        check: Callable[[History], None] | None = None,
    ) -> Attempt:
        """Create the run if it does not exist, and take it over. Cost: one record.

        ``check`` is called with the history right before the FENCE is appended; if it raises, nothing is appended.
        """
        log = Log(store, run, now=now)
        refuse_truncated(store, log, log.start())

        def decide(view: LogView) -> tuple[Body, int]:
            if check is not None:
                check(fold(view))
            return FenceBody(attempt=secrets.token_hex(8), reason=reason), _next_epoch(view)

        record = log.append(decide)
        assert record is not None
        return cls(CommitTarget(store, log, record.store, record.run, record.epoch))

    def make_smaller(self, rules: Compact | None, seen: Experience | None = None) -> None:
        """Store later saves by these rules. ``seen``: measurements to start from."""
        self._smaller = IncrementalState(rules, seen or Experience()) if rules is not None else None

    def distrust(self, verified: Mapping[str, bool]) -> None:
        """Do not reuse chunks of damaged checkpoints in later saves. ``verified``: by id, whether a checkpoint verified."""
        if self._smaller is not None:
            self._smaller.distrust(verified)

    @property
    def smaller(self) -> IncrementalState | None:
        """State of incremental saves; None if saves are full."""
        return self._smaller

    @property
    def compact(self) -> Compact | None:
        """Rules of incremental saves; None if saves are full."""
        return self._smaller.rules if self._smaller is not None else None

    @property
    def epoch(self) -> int:
        """Return this attempt's number."""
        return self._place.epoch

    @property
    def place(self) -> CommitTarget:
        """Store, log, ids and epoch: what another process needs to save for this attempt."""
        return self._place

    @property
    def store(self) -> ByteStore:
        """The store that it saves to."""
        return self._place.store

    @property
    def run(self) -> str:
        """The run's name."""
        return self._place.log.run

    def view(self) -> LogView:
        """Return the current log."""
        return self._place.log.read()

    def history(self) -> History:
        """Return the run's current history."""
        return fold(self.view())

    def save(self, request: SaveRequest) -> SaveReport:
        """Save and commit. On an error, leave no checkpoint. Raise ``Fenced`` if superseded."""
        if self._smaller is not None and request.smaller is None:
            request = replace(request, smaller=self._smaller)
        return save(self._place, request) if request.seat is None else save_multi_rank(self._place, request)

    def note(self, note: NoteBody) -> None:
        """Append a NOTE to the log."""
        self._place.log.append(lambda view: (note, self.epoch))
