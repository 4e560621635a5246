"""What a tracker reports about the Relight run: from its events, and from the run's account and log."""

from __future__ import annotations

from time import monotonic
from typing import NamedTuple

from relight.api import Store
from relight.errors import RelightError
from relight.integrations.trackers.rows import CheckpointLink, RelightNumbers
from relight.observe import Event
from relight.supervise.goodput import merged
from relight.supervise.incidents import once_each, read_accounts, read_incidents

READ_S = 30.0
"""Seconds between two reads of the run's log, at least."""
FRESH_JOB = "fresh=True"
"""Field ``reason`` of ``restore.fresh`` for a job that begins from scratch although the run has checkpoints."""


class RecordedFacts(NamedTuple):
    """What the store has: numbers from account and incidents, and the newest checkpoint."""

    numbers: RelightNumbers | None
    link: CheckpointLink


class ReportedFacts:
    """Facts about the run of this process. The first event that names a run decides which one."""

    def __init__(self) -> None:
        self.store = self.run = ""
        self.restored: int | None = None
        self.is_new_job = False
        """Whether the job begins from scratch in a run that has checkpoints."""
        self._saved: tuple[int, str] | None = None
        self._read: tuple[int, str] | None = None
        self._next_s = 0.0
        self._failed_saves = 0

    def take(self, event: Event, restarts: int) -> RelightNumbers | None:
        """Take one event. Return the numbers in it, if it has some."""
        fields = event.fields
        if event.name in ("restore.done", "restore.fresh", "attempt.started") and not self.run:
            self.store, self.run = str(fields.get("store", "")), str(fields.get("run", ""))
        if event.name == "restore.fresh":
            self.is_new_job = fields.get("reason") == FRESH_JOB
        elif event.name == "restore.done":
            self.restored = int(fields["step"])
            return RelightNumbers(
                self.restored, {"relight/restarts": float(restarts), "relight/restore_s": float(fields["seconds"])}
            )
        elif event.name == "save.durable":
            self._saved = int(fields["step"]), str(fields["id"])
            return RelightNumbers(
                self._saved[0],
                {
                    "relight/stall_s": float(fields["blocked_s"]),
                    "relight/durable_s": float(fields["seconds"]),
                    "relight/bytes": float(fields["bytes"]),
                },
            )
        elif event.name == "save.failed":
            self._failed_saves += 1
            return RelightNumbers(int(fields["step"]), {"relight/failed_saves": float(self._failed_saves)})
        return None

    def read(self, at_once: bool) -> RecordedFacts | None:
        """Read the account, the incidents and the newest checkpoint's digest. None: too early, or nothing is new.

        A store that cannot be read here (a key is missing) gives the link without its digest.
        """
        if self._saved is None or self._saved == self._read or (not at_once and monotonic() < self._next_s):
            return None
        (step, id_), self._read, self._next_s = self._saved, self._saved, monotonic() + READ_S
        link = CheckpointLink(f"{self.store.rstrip('/')}/{self.run}@{id_}", id_, step, "")
        try:
            opened = Store(self.store).run(self.run)
            body = next((each.body for each in opened.history().live if each.id == id_), None)
            accounts = read_accounts(opened.store, opened.name)
            incidents = once_each(read_incidents(opened.store, opened.name)) if accounts else []
        except RelightError:
            return RecordedFacts(None, link)
        link = link._replace(digest=body.root if body is not None else "")
        if not accounts:
            return RecordedFacts(None, link)
        lost = sum(incident.after.steps_lost for incident in incidents if incident.after is not None)
        numbers = {
            "relight/goodput": merged(accounts).goodput,
            "relight/incidents": float(len(incidents)),
            "relight/steps_lost": float(lost),
        }
        return RecordedFacts(RelightNumbers(step, numbers), link)
