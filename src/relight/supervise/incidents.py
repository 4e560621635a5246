"""Records a job's failures and the decisions about them, in the run's store if possible, else in a local directory.

An incident has two files: one from the time of the decision, one from the time that training continues. No checkpoint
depends on them.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from relight.decode import from_json_bytes
from relight.errors import RelightError
from relight.log.identity import now_text
from relight.policy.rollback_env import once_back, sane
from relight.run_records.incident_sync import ACCOUNT, DIRECTORY, FILE_BYTES_MAX, newest_accounts
from relight.store import ByteStore
from relight.supervise.facts import Clue, Decision, Failure, FailureEvidence, Worker
from relight.supervise.fencing_check import taken_over
from relight.supervise.goodput import Account
from relight.supervise.goodput import once_each as once_each_job

CLOCKS_S = 3600.0
"""Seconds by which nodes' clocks may differ."""
_STACKS_MAX = 64 << 10
_TAIL = 40
_LOST = "network"


class RecoveryRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """Record of how the job continued after an incident."""

    id: str
    restored: int
    """The step that was restored; −1: none."""
    steps_lost: int
    seconds: dict[str, float]
    """Seconds of each stage of the recovery, and ``all``, from the failure to the first step.

    The stages: ``noticed``, ``decided``, ``waited``, processes ``started``, the script ``began`` to restore,
    ``restored``, ``stepped``.
    """


class Incident(msgspec.Struct, frozen=True, omit_defaults=True):
    """The record of one failure and of the decision about it."""

    id: str
    at: str
    host: str
    job: str
    life: int
    """Number of the incarnation that it ended, from 1."""
    kind: str
    why: str
    rank: int | None
    step: int
    durable: int
    words: str
    action: str
    reason: str
    delay_s: float
    settings: dict[str, str]
    clues: list[dict[str, Any]]
    workers: list[dict[str, Any]]
    stacks: dict[str, str] = {}
    after: RecoveryRecord | None = None
    group: str = ""
    """Address and id of the rendezvous: equal for all supervisors of a job, different if it is started elsewhere."""
    meeting: str = ""
    """Name of the incarnation, the same on all nodes; their clocks may differ.

    Empty for one node, or if the nodes agreed on none.
    """

    @property
    def time_s(self) -> float:
        """Return when it was written, in seconds since 1970; 0 if its id does not contain a time."""
        head = self.id.partition("-")[0]
        return int(head) / 1000 if head.isascii() and head.isdigit() and len(head) < 16 else 0.0

    def past(self, host: str) -> tuple[Failure, Decision]:
        """Return the failure and the decision, as later decisions on the machine named ``host`` use them."""
        ended = [worker.get("steps", 0) for worker in self.workers]
        restored = max((worker.get("restored", -2) for worker in self.workers), default=-2)
        failure = Failure(
            self.kind, self.why, self.rank, self.step, min(ended, default=0), self.words, restored=restored, durable=self.durable,
            here=self.host == host and self.rank in (None, *(worker.get("rank") for worker in self.workers)),
        )  # fmt: skip
        settings = sane(self.settings)
        return failure, Decision(
            self.action, self.reason, self.delay_s, settings if self.after is None else once_back(settings)
        )


def incident_of(
    facts: FailureEvidence,
    failure: Failure,
    decision: Decision,
    *,
    job: str,
    host: str,
    life: int,
    group: str = "",
    meeting: str = "",
) -> Incident:
    """Return the record of a failure and of the decision about it."""
    return Incident(
        id=f"{int(time.time() * 1000):013d}-{secrets.token_hex(3)}",
        at=now_text(), host=host, job=job, life=life, kind=failure.kind, why=failure.why, rank=failure.rank, step=failure.step,
        durable=failure.durable, words=failure.words, action=decision.action, reason=decision.reason, delay_s=decision.delay_s,
        settings=dict(decision.settings), clues=[_clue(clue) for clue in failure.clues[:20]],
        workers=[_worker(worker) for worker in facts.workers],
        stacks={str(worker.rank): worker.stacks[-_STACKS_MAX:] for worker in facts.workers if worker.stacks}, group=group, meeting=meeting,
    )  # fmt: skip


def _clue(clue: Clue) -> dict[str, Any]:
    return clue._asdict()


def _worker(worker: Worker) -> dict[str, Any]:
    beat = worker.beat
    published = {} if beat is None else {
        "phase": beat.phase, "step": beat.step, "steps": beat.steps, "loss": beat.loss if beat.loss == beat.loss else None,
        "sealed": beat.sealed, "durable": beat.durable, "restored": beat.restored,
    }  # fmt: skip
    return {
        "rank": worker.rank, "exit": worker.exit, "stopped": worker.stopped, "state": worker.state, "error": worker.error[:2000],
        "tail": list(worker.tail[-_TAIL:]), **published,
    }  # fmt: skip


class IncidentLog:
    """Writes incidents to the run's store, or to a directory while the store is unknown or does not answer."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._store: ByteStore | None = None
        self._run = ""
        self._number = f"{int(time.time() * 1000):013d}-{secrets.token_hex(3)}"
        self._accounts, self._kept = 0, ""
        """How many accounts were written, and the name of the one that is in the store."""
        self._left: list[str] = []
        """Names of files in the directory that must still be copied to the store."""
        self._carrying = threading.Lock()

    def at(self, store: ByteStore, run: str) -> None:
        """Set the run's store. Copy to it what was written to the directory before."""
        self._store, self._run = store, run
        self._carry()

    @property
    def where(self) -> str:
        """Return where incidents are written, as text for the user."""
        return f"{self._store.url.rstrip('/')}/{self._run}" if self._store is not None else str(self._directory)

    def since(self, time_s: float) -> list[Incident] | None:
        """Return the incidents since ``time_s`` (seconds since 1970), oldest first; None if the store does not answer.

        If the run's store is known, they are those of all machines.
        """
        with contextlib.suppress(RelightError, OSError):
            if self._store is not None:
                return read_incidents(self._store, self._run, time_s)
            return [incident for incident in incidents_in(self._directory) if incident.time_s >= time_s]
        return None

    def taken_over(self, own: Collection[str]) -> bool:
        """Return whether another job has fenced the run since one of ``own`` (``HOST:PID``) did."""
        return bool(own) and self._store is not None and taken_over(self._store, self._run, own)

    def write(self, record: Incident | RecoveryRecord) -> None:
        """Write a record. Errors of the store and the directory are ignored: a job continues without its records."""
        self._put(f"{record.id}.json" if isinstance(record, Incident) else f"{record.id}.after.json", record)

    def keep(self, account: Account) -> None:
        """Write the job's account, and delete the one before."""
        self._accounts += 1
        name, before = self._account(self._accounts), self._kept
        if self._put(name, account):
            self._kept = name
            if before and self._store is not None:
                with contextlib.suppress(RelightError):
                    self._store.delete(f"{self._run}/{DIRECTORY}/{before}")
        with contextlib.suppress(OSError):
            (self._directory / self._account(self._accounts - 1)).unlink(missing_ok=True)

    def _account(self, count: int) -> str:
        return f"{self._number}.{count:06d}{ACCOUNT}"

    def _put(self, name: str, record: msgspec.Struct) -> bool:
        """Write a file to the store, or to the directory. Return whether it is in the store."""
        data = msgspec.json.format(msgspec.json.encode(record), indent=1)
        if self._store is not None:
            with contextlib.suppress(RelightError):
                done = self._store.put_once(f"{self._run}/{DIRECTORY}/{name}", data)
                self._carry()
                return done
        with contextlib.suppress(OSError):
            self._directory.mkdir(parents=True, exist_ok=True)
            (self._directory / name).write_bytes(data)
            if not name.endswith(ACCOUNT):  # the next account replaces it
                self._left.append(name)
        return False

    def _carry(self) -> None:
        """Copy to the store the files that could not be written there before. Return at once if another thread does.

        Files that still cannot be written stay in the directory.
        """
        if not self._carrying.acquire(blocking=False):
            return
        with contextlib.ExitStack() as cleanup:
            cleanup.callback(self._carrying.release)
            cleanup.enter_context(contextlib.suppress(RelightError, OSError))
            while self._left and self._store is not None:
                path = self._directory / self._left[0]
                self._store.put_once(f"{self._run}/{DIRECTORY}/{self._left[0]}", path.read_bytes())
                path.unlink()
                self._left.pop(0)


def read_incidents(store: ByteStore, run: str, since_s: float = 0.0) -> list[Incident]:
    """Return a run's incidents since ``since_s`` (seconds since 1970), oldest first, without unreadable ones.

    Older ones are not read.
    """
    least = f"{max(0, int(since_s * 1000)):013d}"
    entries = store.list(f"{run}/{DIRECTORY}")
    names = sorted(
        entry.name for entry in entries if not entry.is_dir and entry.name.endswith(".json") and entry.name >= least
    )
    return list(_joined(names, lambda name: store.get(f"{run}/{DIRECTORY}/{name}", FILE_BYTES_MAX)))


def recent_incidents(store: ByteStore, run: str, since_s: float, at_most: int) -> list[Incident]:
    """Return a run's newest incident, and those since ``since_s`` (seconds since 1970), oldest first.

    At most ``at_most`` are returned. Cost: one listing, and a read for each of them. Names begin with their time, so
    older incidents are not opened.
    """
    least = f"{max(0, int(since_s * 1000)):013d}"
    listed = sorted(
        entry.name for entry in store.list(f"{run}/{DIRECTORY}") if not entry.is_dir and entry.name.endswith(".json")
    )
    heads = [name for name in listed if not name.endswith((".after.json", ACCOUNT))][-at_most:]
    chosen = {name for name in heads if name >= least or name == heads[-1]}
    names = [name for name in listed if name in chosen or name.replace(".after.json", ".json") in chosen]
    return list(_joined(names, lambda name: store.get(f"{run}/{DIRECTORY}/{name}", FILE_BYTES_MAX)))


def once_each(incidents: list[Incident]) -> list[Incident]:
    """Return one machine's incidents of each failure: those of the machine that comes first.

    Each node of a job records the failure.
    """
    first: dict[tuple[str, ...], str] = {}
    return [
        incident for incident in incidents if first.setdefault(_failure_of(incident), incident.host) == incident.host
    ]


def _failure_of(incident: Incident) -> tuple[str, ...]:
    """Return a key that is equal in all incidents of one failure.

    A machine that joined later has counted fewer incarnations.
    """
    if incident.meeting:
        return incident.job, incident.meeting
    if not incident.group:  # one node: no other machine saw this failure
        return (incident.id,)
    return incident.job, str(incident.life), str(incident.step)


def is_cause(kind: str) -> bool:
    """Return whether a kind is a cause. A node that only lost another node's ranks records ``network``."""
    return kind != _LOST


def cause_of(incidents: Sequence[Incident]) -> str:
    """Return the kind of failure from several machines' incidents of one incarnation, oldest first; at least one.

    A node that only lost another node's ranks does not know the cause.
    """
    return next((incident.kind for incident in incidents if incident.kind != _LOST), incidents[0].kind)


def read_accounts(store: ByteStore, run: str) -> list[Account]:
    """Return the accounts of a run's jobs, one for each job, oldest first, without unreadable ones."""
    accounts = []
    for name in newest_accounts(entry.name for entry in store.list(f"{run}/{DIRECTORY}")).values():
        with contextlib.suppress(RelightError, msgspec.MsgspecError):
            accounts.append(from_json_bytes(store.get(f"{run}/{DIRECTORY}/{name}", FILE_BYTES_MAX), Account))
    return once_each_job(accounts)


def incidents_in(directory: Path) -> list[Incident]:
    """Return the incidents in a directory, oldest first."""
    names = sorted(path.name for path in directory.glob("*.json")) if directory.is_dir() else []
    return list(_joined(names, lambda name: (directory / name).read_bytes()))


def _joined(names: list[str], read: Any) -> Iterator[Incident]:
    for name in names:
        if name.endswith((".after.json", ACCOUNT)):
            continue
        with contextlib.suppress(RelightError, OSError, msgspec.MsgspecError):
            incident = from_json_bytes(read(name), Incident)
            after = name.removesuffix(".json") + ".after.json"
            if after in names:
                with contextlib.suppress(RelightError, OSError, msgspec.MsgspecError):
                    incident = msgspec.structs.replace(incident, after=from_json_bytes(read(after), RecoveryRecord))
            yield incident
