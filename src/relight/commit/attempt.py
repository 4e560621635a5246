"""An attempt: one life of a run. It takes charge by a FENCE, and saves until it is superseded."""

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
    """Have ``attempt``, which is in charge of a run's nearest tier, take charge of a further one's, and give its epoch there.

    ``Fenced`` if another attempt has done so since. ``earlier``: those that are known to have come before it, if it is late in coming;
    None: it has just begun, and whoever came before it is superseded. Cost: one record, the first time.
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
                hint=f"{history.fences[-1].writer!r} saves to another place of this run: stop this process, or give it a run of its own",
            )
        epochs.append(_next_epoch(view))
        return FenceBody(attempt=attempt, reason="tier"), epochs[-1]

    log.append(decide)
    return epochs[-1]


def _next_epoch(view: LogView) -> int:
    # A record behind the last FENCE that cannot be read may have been another: leave room, or two attempts could share an epoch.
    history = fold(view)
    newest = history.fences[-1].seq if history.fences else -1
    later = sum(fault.seq > newest for fault in view.damaged)
    if view.summary is not None and view.summary.faults and view.summary.faults[0].seq > newest:
        later += view.summary.more_faults
    return history.epoch + 1 + later


class Attempt:
    """In charge of ``run`` from ``begin`` on: every earlier attempt's later commits are void, and it is told so at its next save."""

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
        """Make the run if there is none, and take charge of it. Cost: one record.

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
        """Store later saves by these rules; as if it had been ``seen`` already what they go by."""
        self._smaller = IncrementalState(rules, seen or Experience()) if rules is not None else None

    def distrust(self, verified: Mapping[str, bool]) -> None:
        """``verified``: which checkpoints were found to verify, or not. Later saves make no use of what is damaged."""
        if self._smaller is not None:
            self._smaller.distrust(verified)

    @property
    def smaller(self) -> IncrementalState | None:
        """What earlier saves have shown, if later ones are to be smaller."""
        return self._smaller

    @property
    def compact(self) -> Compact | None:
        """The rules by which saves are made smaller."""
        return self._smaller.rules if self._smaller is not None else None

    @property
    def epoch(self) -> int:
        """This attempt's number."""
        return self._place.epoch

    @property
    def place(self) -> CommitTarget:
        """All that another process needs to save for this attempt."""
        return self._place

    @property
    def store(self) -> ByteStore:
        """Where it saves."""
        return self._place.store

    @property
    def run(self) -> str:
        """The run's name."""
        return self._place.log.run

    def view(self) -> LogView:
        """The log as it is now."""
        return self._place.log.read()

    def history(self) -> History:
        """The run as it is now."""
        return fold(self.view())

    def save(self, request: SaveRequest) -> SaveReport:
        """Save and commit, or raise and leave nothing behind. ``Fenced`` if superseded."""
        if self._smaller is not None and request.smaller is None:
            request = replace(request, smaller=self._smaller)
        return save(self._place, request) if request.seat is None else save_multi_rank(self._place, request)

    def note(self, topic: str, data: dict[str, str | int | float | bool | None]) -> None:
        """Put a NOTE into the log."""
        self._place.log.append(lambda view: (NoteBody(topic=topic, data=data), self.epoch))
