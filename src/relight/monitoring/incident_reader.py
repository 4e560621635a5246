"""Incidents and accounts of a run, read as they come: each file once."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any, TypeVar

import msgspec

from relight.catalog.incident_sync import ACCOUNT, DIRECTORY, FILE_BYTES_MAX, newest_accounts
from relight.decode import from_json_bytes
from relight.errors import CheckpointNotFound, RelightError
from relight.store import ByteStore
from relight.supervise.goodput import Account
from relight.supervise.goodput import once_each as once_each_job
from relight.supervise.incidents import Incident, RecoveryRecord, once_each

FILES_MAX = 2000
"""Of what a run's directory of incidents holds, the newest."""
_AFTER, _JSON = ".after.json", ".json"
CRASHES_S = 3600.0
NO_CRASH = ("preemption",)
T = TypeVar("T")


def recent_failures(incidents: Iterable[Incident], now: float) -> int:
    """How many within the last hour; being asked to end is none."""
    return sum(now - one.time_s < CRASHES_S and one.kind not in NO_CRASH for one in incidents)


class Diary:
    """One run's."""

    def __init__(self, store: ByteStore, run: str) -> None:
        self._store, self._prefix = store, f"{run}/{DIRECTORY}"
        self._incidents: dict[str, Incident | None] = {}
        self._afters: dict[str, RecoveryRecord | None] = {}
        self._accounts: dict[str, Account | None] = {}
        self.names: tuple[str, ...] = ()
        """Of the files that were there at the last look: as long as they are the same, so is all else."""

    def read(self, *, every: bool = False) -> tuple[list[Incident], list[Account]]:
        """All of both, oldest first; what cannot be read is left out, and not tried again.

        Of what several machines wrote down of one failure, what the first did; with ``every``, all of it.
        """
        self.names = ()
        try:
            names = sorted(entry.name for entry in self._store.list(self._prefix) if not entry.is_dir and entry.name.endswith(_JSON))
        except CheckpointNotFound:
            return [], []
        names = names[-FILES_MAX:]
        self.names = tuple(names)
        self._accounts = {name: self._get(self._accounts, name, Account) for name in newest_accounts(names).values()}
        afters = [name for name in names if name.endswith(_AFTER)]
        self._afters = {name: self._get(self._afters, name, RecoveryRecord) for name in afters}
        incidents = [name for name in names if not name.endswith((ACCOUNT, _AFTER))]
        self._incidents = {name: self._get(self._incidents, name, Incident) for name in incidents}
        found = [self._joined(name, one) for name, one in self._incidents.items() if one is not None]
        accounts = once_each_job([one for one in self._accounts.values() if one is not None])
        return found if every else once_each(found), accounts

    def _joined(self, name: str, one: Incident) -> Incident:
        after = self._afters.get(name.removesuffix(_JSON) + _AFTER)
        return one if after is None else msgspec.structs.replace(one, after=after)

    def _get(self, known: dict[str, Any], name: str, kind: type[T]) -> T | None:
        if name in known:
            found: T | None = known[name]
            return found
        with contextlib.suppress(RelightError, msgspec.MsgspecError):
            return from_json_bytes(self._store.get(f"{self._prefix}/{name}", FILE_BYTES_MAX), kind)
        return None
