"""What the run's log asks of a job: a thread that looks whether somebody wants a save. A store that is away is no failure."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable

from relight.catalog.save_requests import LOOK_S, OLD_S, SaveAsked, acknowledge, request_of
from relight.errors import RelightError, StoreUnavailable
from relight.format import Record, decode_record
from relight.format.strict import SEALED_BYTES_MAX
from relight.log.identity import seconds_since_epoch
from relight.log.listing import newest_records
from relight.store import ByteStore

NEW_MAX = 1024
"""Newest records among which requests are searched."""


class Requests:
    """Looks every few seconds: a listing, and what is new in it. What was there before it looked first is not obeyed.

    ``mine`` says whether this is the one of the job's supervisors that is to look; ``cannot``, why the job cannot be asked now, or
    nothing; ``obey`` has it asked. All of them are called by the thread that looks.
    """

    def __init__(
        self, store: ByteStore, run: str, *, mine: Callable[[], bool], cannot: Callable[[], str], obey: Callable[[str], None],
        look_s: float = LOOK_S, clock: Callable[[], float] = time.monotonic, now: Callable[[], float] = time.time,
    ) -> None:  # fmt: skip
        self._store, self._run, self._mine, self._cannot, self._obey = store, run, mine, cannot, obey
        self._look_s, self._clock, self._now = look_s, clock, now
        self._head = -1
        """The highest number that was looked at; −1: it has not looked yet."""
        self._looked_at = 0.0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="relight-requests", daemon=True)

    def start(self) -> None:
        """Begin to look."""
        self._thread.start()

    def close(self) -> None:
        """Look no more; a store that hangs is left to itself."""
        self._over.set()
        if self._thread.is_alive():
            self._thread.join(1.0)

    def _follow(self) -> None:
        while not self._over.is_set():
            if self._mine():
                with contextlib.suppress(RelightError, OSError):
                    self.poll()
            self._over.wait(self._look_s)

    def poll(self) -> None:
        """Once. What raises is looked at again."""
        began = self._clock()
        records, head = self._new()
        young = [asked for record in records if (asked := request_of(record)) is not None and self._is_young(asked, began)]
        if young:
            refused = self._cannot()
            heard = acknowledge(self._store, self._run, young[-1], socket.gethostname(), refused)  # one save is for all of them
            if heard and not refused:
                self._obey(", ".join(dict.fromkeys(one.words for one in young)))
        self._head, self._looked_at = head, began

    def _is_young(self, asked: SaveAsked, began: float) -> bool:
        """It has come since the last look, which tells without any clock of another machine; if that is long ago, clocks must do."""
        if began - self._looked_at <= OLD_S:
            return True
        at = seconds_since_epoch(asked.time)
        return at is not None and 0 <= self._now() - at <= OLD_S

    def _new(self) -> tuple[list[Record], int]:
        """Records that came since the last look, none at the first; and the highest number there."""
        listed = newest_records(self._store, self._run, NEW_MAX)[::-1]
        found = []
        for seq, key in listed if self._head >= 0 else ():
            if seq <= self._head:
                continue
            try:
                found.append(decode_record(self._store.get(key, SEALED_BYTES_MAX), seq, key))
            except StoreUnavailable:
                raise
            except RelightError:  # damaged, or gone: the log's readers say so
                continue
        return found, max([self._head, *(seq for seq, _ in listed[-1:])])
