"""Reads a run's incidents and accounts repeatedly, each file once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeVar

import msgspec

from relight.decode import from_json_bytes
from relight.errors import CheckpointNotFound, RelightError, StoreUnavailable
from relight.run_records.incident_sync import ACCOUNT, DIRECTORY, FILE_BYTES_MAX, newest_accounts
from relight.store import ByteStore
from relight.supervise.goodput import Account
from relight.supervise.goodput import once_each as once_each_job
from relight.supervise.incidents import Incident, RecoveryRecord, once_each

FILES_MAX = 2000
"""Newest files of a run's incident directory that are read."""
_AFTER, _JSON = ".after.json", ".json"
CRASHES_S = 3600.0
NO_CRASH = ("preemption",)
T = TypeVar("T")


def recent_failures(incidents: Iterable[Incident], now: float) -> int:
    """Return the number of failures within the last hour. A request to end is not a failure."""
    return sum(now - incident.time_s < CRASHES_S and incident.kind not in NO_CRASH for incident in incidents)


class Diary:
    """Reader of one run's incidents and accounts."""

    def __init__(self, store: ByteStore, run: str) -> None:
        self._store, self._prefix = store, f"{run}/{DIRECTORY}"
        self._incidents: dict[str, Incident | None] = {}
        self._afters: dict[str, RecoveryRecord | None] = {}
        self._accounts: dict[str, Account | None] = {}
        self.names: tuple[str, ...] = ()
        """Names of the files that were read last. While they are unchanged, the result is unchanged."""

    def read(self, *, every: bool = False) -> tuple[list[Incident], list[Account]]:
        """Return the incidents and the accounts, oldest first, without those that cannot be decoded, which are not tried again.

        A file that the store did not answer for is missing once, and read again at the next call.

        If several machines recorded one failure, return only the first machine's incidents; with ``every``, all.
        """
        self.names = ()
        try:
            names = sorted(
                entry.name
                for entry in self._store.list(self._prefix)
                if not entry.is_dir and entry.name.endswith(_JSON)
            )
        except CheckpointNotFound:
            return [], []
        names = names[-FILES_MAX:]
        self.names = tuple(names)
        self._accounts = self._read_all(self._accounts, newest_accounts(names).values(), Account)
        afters = [name for name in names if name.endswith(_AFTER)]
        self._afters = self._read_all(self._afters, afters, RecoveryRecord)
        incidents = [name for name in names if not name.endswith((ACCOUNT, _AFTER))]
        self._incidents = self._read_all(self._incidents, incidents, Incident)
        read = [self._joined(name, incident) for name, incident in self._incidents.items() if incident is not None]
        accounts = once_each_job([account for account in self._accounts.values() if account is not None])
        return read if every else once_each(read), accounts

    def _joined(self, name: str, incident: Incident) -> Incident:
        after = self._afters.get(name.removesuffix(_JSON) + _AFTER)
        return incident if after is None else msgspec.structs.replace(incident, after=after)

    def _read_all(self, known: Mapping[str, T | None], names: Iterable[str], kind: type[T]) -> dict[str, T | None]:
        """Return the files' contents; None for those that cannot be decoded. Files that the store did not answer for are absent."""
        contents: dict[str, T | None] = {}
        for name in names:
            if name in known:
                contents[name] = known[name]
                continue
            try:
                contents[name] = from_json_bytes(self._store.get(f"{self._prefix}/{name}", FILE_BYTES_MAX), kind)
            except StoreUnavailable:
                self.names = tuple(other for other in self.names if other != name)  # the next read tries again
            except (RelightError, msgspec.MsgspecError):
                contents[name] = None
        return contents
