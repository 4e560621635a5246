"""Base class of trackers: each step once, whatever was killed. Subclasses define how their tracker opens and writes."""

from __future__ import annotations

import atexit
import contextlib
import secrets
import threading
import weakref
from collections.abc import Mapping, Sequence
from time import monotonic, sleep
from types import TracebackType
from typing import Any, ClassVar

import torch.distributed as dist

from relight.capture.kinds import RankZeroComponent
from relight.checkpointer.metric_values import check_metrics, numbers_of
from relight.format.digest import Digest
from relight.format.step_number import step_of
from relight.integrations.trackers.reported_facts import ReportedFacts
from relight.integrations.trackers.row_queue import RowQueue, WaitingRow
from relight.integrations.trackers.rows import CheckpointLink, RelightNumbers, StepRow, decode_rows
from relight.observe import Event, emit, subscribe
from relight.observe.masking import mask_users

INTERVAL_S, PAUSE_S_MAX = 1.0, 60.0
"""Seconds between two hand-overs to the tracker, and the longest pause after failures."""
CLOSE_S = 30.0
"""Seconds that ``close`` waits for a tracker that takes no rows."""


class Tracker(RankZeroComponent):
    """A component that logs to an experiment tracker: ``Checkpointer(…, tracker=TensorBoard("logs/demo"))``.

    ``log`` hands rows to a thread, which writes them about once a second. A checkpoint has the tracker's run id, its
    URL and the rows that the tracker has not confirmed. A restore continues the same tracker run: confirmed rows stay,
    the others are written again, and rows of repeated steps that the tracker has already are left out.

    Relight's own numbers come from its events: ``relight/stall_s``, ``relight/durable_s``, ``relight/bytes``,
    ``relight/restarts``, ``relight/goodput``, ``relight/incidents`` and so on. Of several ranks, only rank 0 logs.
    An unreachable tracker never stops training: rows wait, and the event ``tracker.failed`` reports it.

    A subclass defines ``name``, ``open`` and ``write``. The other methods below *backend* have defaults. They are called
    in the thread, one at a time.
    """

    name: ClassVar[str] = ""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._rows = RowQueue()
        self._opened: RowQueue | None = None
        """The rows for which the tracker was opened."""
        self._run = self._url = self._nonce = ""
        self._restarts = 0
        self._facts = ReportedFacts()
        self._link: CheckpointLink | None = None
        self._thread: threading.Thread | None = None
        self._wake, self._ending = threading.Event(), threading.Event()
        self._unsubscribe = subscribe(self._on_event)
        atexit.register(_close_at_exit, weakref.ref(self))

    # -- for the script

    def log(self, step: int, metrics: Mapping[str, Any] | None = None, **more: Any) -> None:
        """Log numbers of ``step``. Several calls for one step are one row. Steps never decrease.

        Reading a tensor on an accelerator waits for the device. Costs some microseconds; never waits for the tracker.
        """
        step, values = step_of(step), {**(metrics or {}), **more}
        check_metrics(values)
        if not self._leads:
            return
        numbers = numbers_of(values)
        with self._lock:
            self._rows.add(step, numbers)
            self._start()

    def state_dict(self) -> dict[str, Any]:
        """Return the tracker's run, its URL, and the rows that it has not confirmed."""
        with self._lock:
            return {
                "tracker": self.name,
                "run": self._run,
                "url": self._url,
                "nonce": self._nonce,
                "step": self._rows.step,
                "restarts": self._restarts,
                "rows": self._rows.encoded(),
            }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue the tracker run of a checkpoint. If another kind of tracker wrote it, begin a new run."""
        rows, step = decode_rows(state["rows"]), int(state["step"])
        is_same = state["tracker"] == self.name
        with self._lock:
            self._run, self._url, self._nonce = (str(state[key]) if is_same else "" for key in ("run", "url", "nonce"))
            self._restarts = int(state["restarts"]) + 1
            first = (rows[0].step if rows else step + 1) if is_same else 0
            self._rows = RowQueue(step, rows, first)
            if rows and self._leads:
                self._start()

    @property
    def url(self) -> str:
        """The address of the tracker's run; empty until it is known."""
        return self._url

    @property
    def run_id(self) -> str:
        """The id of the tracker's run; empty until it is known."""
        return self._run

    def flush(self, timeout_s: float = CLOSE_S) -> bool:
        """Wait until every finished row is written. Return whether that was so in time."""
        deadline = monotonic() + timeout_s
        while True:
            with self._lock:
                if not self._rows.unwritten():
                    return True
            if monotonic() > deadline:
                return False
            self._wake.set()
            sleep(0.02)

    def close(self) -> None:
        """Write all rows, and end the tracker's run as finished. Waits 30 seconds at most."""
        with self._lock:
            self._unsubscribe()
            self._rows.finish_row()
        self._ending.set()
        self._wake.set()
        if self._thread is not None:
            self._thread.join(CLOSE_S)

    def __enter__(self) -> Tracker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- backend

    def open(self, run: str, key: str, first: int) -> tuple[str, str]:
        """Open the tracker's run, and return its id and URL.

        ``run``: the id that the checkpoint recorded; empty: none did. ``key`` names this training: an earlier start
        that was killed before its first save had the same. The tracker has all rows before step ``first``.
        """
        raise NotImplementedError

    def write(self, rows: Sequence[StepRow]) -> None:
        """Write rows, in order. If this raises, they are written again later."""
        raise NotImplementedError

    def has(self, name: str, step: int) -> bool:
        """Return whether the tracker had this value when it was opened. Default: it has nothing from ``first`` on."""
        return False

    def confirmed_step(self) -> int:
        """Return the newest step that survives a kill of this process. Default: that of the newest written row."""
        with self._lock:
            return self._rows.written_step

    def link(self, checkpoint: CheckpointLink) -> None:
        """Record the newest checkpoint by its address. Called at most twice a minute, and at the end."""

    def finish(self) -> None:
        """End the tracker's run."""

    @property
    def restored_step(self) -> int | None:
        """The step of the checkpoint that was restored; None: none was."""
        return self._facts.restored

    # -- inside

    @property
    def _leads(self) -> bool:
        return not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0

    def _on_event(self, event: Event) -> None:
        with self._lock:
            note = self._facts.take(event, self._restarts)
            if note is not None and self._leads:
                self._rows.notes.append(note)
            if self._facts.is_new_job and not self._run and not self._nonce:
                self._nonce = secrets.token_hex(4)

    def _start(self) -> None:
        if self._thread is None and not self._ending.is_set():
            self._thread = threading.Thread(target=self._work, name="relight-tracker", daemon=True)
            self._thread.start()

    def _work(self) -> None:
        pause_s, deadline = INTERVAL_S, float("inf")
        while True:
            self._wake.wait(pause_s)
            self._wake.clear()
            if (ending := self._ending.is_set()) and deadline == float("inf"):
                deadline = monotonic() + CLOSE_S
            try:
                self._hand_over(ending)
                pause_s = INTERVAL_S
                if ending:
                    break
            except Exception as error:  # noqa: BLE001 # a tracker may raise anything, and must not stop training
                pause_s = 1.0 if ending else min(2 * pause_s, PAUSE_S_MAX)
                self._report(error)
                if monotonic() > deadline:
                    break
        with contextlib.suppress(Exception):
            if self._opened is not None:
                self.finish()

    def _hand_over(self, ending: bool) -> None:
        with self._lock:
            queue = self._rows
            rows = queue.unwritten()
        if not rows and self._opened is not queue:
            return
        if self._opened is not queue:
            self._open(queue)
        self._read_store(ending)
        if rows:
            self.write(self._lacking(rows))
        if ending and queue.notes:
            self.write([StepRow.at(queue.step)._replace(notes=queue.notes)])
        with self._lock:
            queue.mark_written(rows)
        confirmed = self.confirmed_step()
        with self._lock:
            queue.confirm(confirmed)
            queue.failures = 0

    def _open(self, queue: RowQueue) -> None:
        if self._opened is not None:
            self._opened = None
            self.finish()
        with self._lock:
            run = self._run
            place = f"{self._facts.store}\n{self._facts.run}\n{self._nonce}"
        key = Digest(place.encode()).digest()[:5].hex()
        opened, url = self.open(run, f"{self._facts.run or 'run'}-{key}", queue.first)
        with self._lock:
            if queue is self._rows:
                self._run, self._url = opened, url
        self._opened = queue
        emit("tracker.opened", f"{self.name} {'continues' if run else 'begins'} {url or opened}", tracker=self.name)

    def _lacking(self, rows: Sequence[WaitingRow]) -> list[StepRow]:
        """Return what the tracker lacks of these rows.

        Relight's numbers of a repeated row move to the next row: repeated steps have new ones.
        """
        lacking: list[StepRow] = []
        carried: list[RelightNumbers] = []
        for row, _, is_old in rows:
            values = {name: value for name, value in row.values.items() if not self.has(name, row.step)}
            if values:
                lacking.append(row._replace(values=values, notes=[*carried, *row.notes]))
                carried = []
            elif not is_old:
                carried += row.notes
        with self._lock:
            self._rows.notes[:0] = carried
        return lacking

    def _read_store(self, ending: bool) -> None:
        """Read the run's account, its incidents and the newest checkpoint's digest, at most twice a minute."""
        facts = self._facts.read(ending)
        if facts is None:
            return
        if facts.link != self._link:
            self.link(facts.link)
            self._link = facts.link
        if facts.numbers is not None:
            with self._lock:
                self._rows.notes.append(facts.numbers)

    def _report(self, error: Exception) -> None:
        self._rows.failures += 1
        if self._rows.failures in (1, 10, 100):
            dropped = f"; {self._rows.dropped} rows were dropped, as too many wait" if self._rows.dropped else ""
            text = f"{type(error).__name__}: {mask_users(str(error))[:200]}"
            sentence = f"{self.name} does not accept rows ({text}); they are kept and written later{dropped}"
            emit("tracker.failed", sentence, tracker=self.name, error=text)


def _close_at_exit(ref: weakref.ref[Tracker]) -> None:
    tracker = ref()
    if tracker is not None:
        tracker.close()
