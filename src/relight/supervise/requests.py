"""A thread that polls the run's log for save requests. An unavailable store is not a failure of the job."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable

from relight.comm import new_threads
from relight.errors import RelightError, StoreUnavailable
from relight.format import Record, decode_record
from relight.format.strict import SEALED_BYTES_MAX
from relight.log.identity import seconds_since_epoch
from relight.log.listing import newest_records
from relight.run_records.save_requests import OLD_S, REQUEST_POLL_S, SaveAsked, acknowledge, request_of
from relight.store import ByteStore

NEW_MAX = 1024
"""Newest records among which requests are searched."""


class Requests:
    """Polls the log every few seconds: one listing, and a read for each new record. Ignores earlier requests.

    ``mine`` returns whether this supervisor is the one of the job that polls. ``cannot`` returns why the job cannot
    save now; empty if it can. ``obey`` requests the save. The polling thread calls all of them.
    """

    def __init__(
        self,
        store: ByteStore,
        run: str,
        *,
        mine: Callable[[], bool],
        cannot: Callable[[], str],
        obey: Callable[[str], None],
        poll_s: float = REQUEST_POLL_S,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._store, self._run, self._mine, self._cannot, self._obey = store, run, mine, cannot, obey
        self._poll_s, self._clock, self._now = poll_s, clock, now
        self._head = -1
        """The highest record number that was read; −1 before the first poll."""
        self._polled_at = 0.0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="relight-requests", daemon=True)

    def start(self) -> None:
        """Start the polling thread. If the system refuses it, no request is received in this incarnation of the supervisor."""
        new_threads.start(self._thread)

    def close(self) -> None:
        """Stop polling. Waits at most a second for a store that does not answer."""
        self._over.set()
        if self._thread.is_alive():
            self._thread.join(1.0)

    def _follow(self) -> None:
        while not self._over.is_set():
            if self._mine():
                with contextlib.suppress(RelightError, OSError):
                    self.poll()
            self._over.wait(self._poll_s)

    def poll(self) -> None:
        """Poll once. If an error is raised, the next poll reads the same records again."""
        began = self._clock()
        records, head = self._new()
        young = [
            asked for record in records if (asked := request_of(record)) is not None and self._is_young(asked, began)
        ]
        if young:
            refused = self._cannot()
            # one save answers all requests
            acknowledged = acknowledge(self._store, self._run, young[-1], socket.gethostname(), refused)
            if acknowledged and not refused:
                self._obey(", ".join(dict.fromkeys(request.words for request in young)))
        self._head, self._polled_at = head, began

    def _is_young(self, request: SaveAsked, began: float) -> bool:
        """Return whether a request is newer than the last poll. After a long time, compare the machines' clocks."""
        if began - self._polled_at <= OLD_S:
            return True
        asked_s = seconds_since_epoch(request.time)
        return asked_s is not None and 0 <= self._now() - asked_s <= OLD_S

    def _new(self) -> tuple[list[Record], int]:
        """Return the records since the last poll, none at the first poll, and the highest record number."""
        listed = newest_records(self._store, self._run, NEW_MAX)[::-1]
        records = []
        for seq, key in listed if self._head >= 0 else ():
            if seq <= self._head:
                continue
            try:
                records.append(decode_record(self._store.get(key, SEALED_BYTES_MAX), seq, key))
            except StoreUnavailable:
                raise
            except RelightError:  # damaged or deleted: the log's readers report it
                continue
        return records, max([self._head, *(seq for seq, _ in listed[-1:])])
