"""Requested saves: by a person in the run's log, by a signal to ``relight run``, or by the prediction of a failure.

One rank gets SIGUSR1 and has the other ranks save with it. An unavailable store is not a failure of the job.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping

from relight.comm import new_threads
from relight.errors import CheckpointNotFound, RelightError, StoreUnavailable
from relight.format import Record, decode_record
from relight.format.strict import SEALED_BYTES_MAX
from relight.log.identity import seconds_since_epoch
from relight.log.listing import newest_records, without_strays
from relight.observe import emit
from relight.run_records.save_requests import OLD_S, REQUEST_POLL_S, SaveAsked, acknowledge, request_of
from relight.save_reason import SaveReason, preventive, requested_by
from relight.store import ByteStore
from relight.supervise.procfs import has_handler
from relight.supervise.shared_pages import SharedPages

FREQUENT_INTERVAL_S = 60.0
"""Seconds between two saves while saves are made more often."""
FREQUENT_FOR_S = 600.0
NEW_MAX = 1024
"""Newest records among which requests are searched."""


class SaveRequests:
    """The saves that are requested of this node's ranks.

    The main thread calls ``poll``, ``follow_log`` and ``close``, and owns ``_log_thread``. Any thread, and a signal
    handler, may request a save: ``_why``, ``_reason`` and ``_often`` are replaced as a whole, and the last request wins.
    """

    def __init__(
        self, pages: SharedPages, pids: Callable[[], Mapping[int, int]], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """``pids`` returns the process ids of this node's present ranks, by rank."""
        self._pages, self._pids, self._clock = pages, pids, clock
        self._why = ""
        """Why a save is requested, for the user; empty if none is."""
        self._reason: SaveReason | None = None
        """The reason of the requested checkpoint; None if it is the signal."""
        self._often = (-math.inf, -math.inf)
        """While saves are made more often: the beginning of the last interval, and the end of this state."""
        self._log_thread: LogRequests | None = None

    def request(self, why: str = "", reason: SaveReason | None = None) -> None:
        """Have the ranks save at the end of their step, and continue. Takes effect at the next poll.

        ``reason``: that of the checkpoint. With None it is the signal, and ``why`` is only reported. A person's request
        has precedence over an alarm.
        """
        if reason is not None and (
            self._reason is None or reason.kind == "requested" or self._reason.kind != "requested"
        ):
            self._reason = reason
        self._why = why if reason is None else reason.text

    def request_for(self, requester: str) -> None:
        """Have the ranks save. The checkpoint's reason is the request of ``requester``."""
        self.request(reason=requested_by(requester))

    def save_often(self) -> None:
        """Have the ranks save more often for ``FREQUENT_FOR_S``."""
        self._often = (self._clock(), self._clock() + FREQUENT_FOR_S)

    def why_unreachable(self) -> str:
        """Return why no rank here can be asked to save now; empty if one can. Any thread."""
        pids = self._pids()
        if any(has_handler(pid, signal.SIGUSR1) for pid in list(pids.values())):
            return ""
        return (
            "no rank handles SIGUSR1: no Checkpointer was created yet, or it has signals=False"
            if pids
            else "the job is not running now"
        )

    def follow_log(self, store: ByteStore, run: str) -> None:
        """Follow the requests in the run's log, in a thread, from now on."""
        self._log_thread = LogRequests(
            store, run, mine=lambda: 0 in self._pids(), cannot=self.why_unreachable, obey=self.request_for
        )
        self._log_thread.start()

    def poll(self) -> None:
        """Send SIGUSR1 to one rank if a save is requested. A request is kept until a rank can receive it."""
        now, (began, until) = self._clock(), self._often
        if FREQUENT_INTERVAL_S <= now - began < until - began:
            self._often = (now, until)
            if not self._why:
                self.request(reason=preventive("saving more often because of an earlier warning"))
        if not self._why:
            return
        pids = self._pids()
        for rank, pid in sorted(pids.items()):
            if has_handler(pid, signal.SIGUSR1):
                why, self._why = self._why, ""
                reason, self._reason = self._reason, None
                self._pages.request_save(min(pids), reason)  # before the signal: the save reads it there
                emit("run.save", f"saving now: {why}", why=why, rank=rank)
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGUSR1)
                return

    def close(self, within_s: float = math.inf) -> None:
        """Stop following the log. Waits at most ``within_s``."""
        if self._log_thread is not None:
            self._log_thread.close(within_s)


class LogRequests:
    """Polls the log every few seconds: one listing, and a read for each new record. Ignores earlier requests.

    ``mine`` returns whether this supervisor is the one of the job that polls. ``cannot`` returns why the job cannot
    save now; empty if it can. ``obey`` requests the save. The polling thread calls all of them, and owns ``_heads``,
    ``_floor`` and ``_known``.
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
        self._heads: list[tuple[float, int]] = []
        """Time and highest record number of each successful poll within ``OLD_S``, and of the last one."""
        self._has_listed = False
        self._floor = -1
        """Records up to this number are older than ``OLD_S``, or than the first poll."""
        self._known: set[int] = set()
        """Records above ``_floor`` that were read. A listing may lack a record and have the next one."""
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="relight-requests", daemon=True)

    def start(self) -> None:
        """Start the polling thread. If the system refuses it, no request is received in this incarnation of the supervisor."""
        new_threads.start(self._thread)

    def close(self, within_s: float = math.inf) -> None:
        """Stop polling. Waits at most a second, and ``within_s``, for a store that does not answer."""
        self._over.set()
        if self._thread.is_alive():
            self._thread.join(min(1.0, within_s))

    def _follow(self) -> None:
        while not self._over.is_set():
            if self._mine():
                with contextlib.suppress(RelightError, OSError):
                    self.poll()
            self._over.wait(self._poll_s)

    def poll(self) -> None:
        """Poll once. If an error is raised, the next poll reads the same records again."""
        began = self._clock()
        listed = dict(newest_records(self._store, self._run, NEW_MAX))
        records, absent = self._new(listed)
        young = [
            asked for record in records if (asked := request_of(record)) is not None and self._is_young(asked, began)
        ]
        if young:
            refused = self._cannot()
            # one save answers all requests
            acknowledged = acknowledge(self._store, self._run, young[-1], socket.gethostname(), refused)
            if acknowledged and not refused:
                self._obey(", ".join(dict.fromkeys(request.words for request in young)))
        self._note_read(listed.keys() - absent, began)

    def _is_young(self, request: SaveAsked, began: float) -> bool:
        """Return whether a request is newer than the last poll.

        Compare the machines' clocks after a long time, and if no poll has listed a record: a store that was not mounted yet lists none.
        """
        if self._has_listed and began - self._heads[-1][0] <= OLD_S:
            return True
        asked_s = seconds_since_epoch(request.time)
        return asked_s is not None and 0 <= self._now() - asked_s <= OLD_S

    def _new(self, listed: Mapping[int, str]) -> tuple[list[Record], set[int]]:
        """Return the records that no poll has read, none at the first poll, and the numbers of those that cannot be found yet."""
        records, absent = [], set[int]()
        for seq in sorted(listed) if self._heads else ():
            if seq <= self._floor or seq in self._known:
                continue
            try:
                records.append(decode_record(self._store.get(listed[seq], SEALED_BYTES_MAX), seq, listed[seq]))
            except StoreUnavailable:
                raise
            except CheckpointNotFound:  # deleted, or the store lists a file before it is found by name
                absent.add(seq)
            except RelightError:  # damaged: the log's readers report it
                continue
        return records, absent

    def _note_read(self, numbers: set[int], began: float) -> None:
        """Record which records a poll has read.

        A record that a listing lacked is read by a later poll, within ``OLD_S``. A stray file above a gap does not
        hide the log's later records.
        """
        own, _ = without_strays(numbers, min(numbers, default=0) - 1, lambda _: False)
        head = own[-1] if own else -1
        if not self._heads:
            self._floor = head
        self._heads.append((began, head))
        self._has_listed = self._has_listed or bool(numbers)
        while self._heads[0][0] < began - OLD_S:
            self._floor = max(self._floor, self._heads.pop(0)[1])
        self._known = {seq for seq in self._known | numbers if seq > self._floor}
