"""Polls for preemption notices: addresses of the machine's cloud announce that the machine will be taken away.

Invariants: A source that does not answer properly is reported once for each reason, with what to do, and once more when
it answers again. A source that is slow or silent does not delay another one: each has its own thread.
"""

from __future__ import annotations

import contextlib
import http.client
import threading
import time
from collections.abc import Sequence

from relight.comm import new_threads
from relight.http_request import why_no_answer
from relight.observe import emit
from relight.supervise.metadata_server import LIMIT_S, BadStatus, MetadataServer, NoNotice
from relight.supervise.notice_sources import Notice, NoticeSource, sources_of
from relight.units import duration_text

EVERY_S = 1.0
"""Seconds between two polls. Azure asks for this rate; Google's notice precedes the end by 30 s."""
BEFORE_S = 120.0
"""Seconds before an event with a known time at which the job is asked to end; AWS's notices leave as much."""
_TRIES = 3
"""Failed polls in a row before a source is reported. The metadata server may have restarted during a single one."""
_FAILURES = (OSError, ValueError, http.client.HTTPException)
"""What a failed request raises: ``NoNotice`` is a ``ValueError``."""


class Notices:
    """Polls the sources. ``announcement`` is the announcement; empty until one is received."""

    def __init__(self, names: Sequence[str], every_s: float = EVERY_S) -> None:
        self.announcement = ""
        self._every_s, self._over = every_s, threading.Event()
        for source in sources_of(names):
            thread = threading.Thread(target=self._poll, args=(source,), name="relight-notices", daemon=True)
            new_threads.start(thread)

    def close(self) -> None:
        """Stop polling."""
        self._over.set()

    def _poll(self, source: NoticeSource) -> None:
        poller, wait_s = _Poller(source), 0.0
        while not self._over.wait(wait_s) and not self.announcement:
            began = time.monotonic()
            if announced := poller.poll():
                self.announcement = announced
            wait_s = max(0.0, began + self._every_s - time.monotonic())


class _Poller:
    """Polls one source, and reports what users must know about it."""

    def __init__(self, source: NoticeSource) -> None:
        self._source = source
        self._server = MetadataServer(source.url, source.headers, source.token_path)
        self._is_proven, self._own_name = not source.proof_path, ""
        self._failed, self._reported, self._later = 0, set[str](), ""

    def poll(self) -> str:
        """Return the announcement; empty if there is none, or if the job can continue for some time."""
        source = self._source
        try:
            notice = self._read()
        except _FAILURES as error:
            self._note_failed_poll(why_no_answer(error, LIMIT_S))
            return ""
        self._failed = 0
        if self._reported:
            emit("run.notices", f"{source.url} answers again: notices are received from it", url=source.url, why="")
            self._reported.clear()
        if notice is None:
            return ""
        announced = f"{source.url.split('/')[2]} announces: {notice.text}"
        if notice.ends_at is None or notice.ends_at - time.time() <= BEFORE_S:
            return announced
        if notice.text != self._later:
            self._later = notice.text
            text = f"{announced}; the job is asked to end {duration_text(BEFORE_S)} before"
            emit("run.notices", text, url=source.url, why=notice.text)
        return ""

    def _read(self) -> Notice | None:
        source, answer = self._source, self._server.get()
        if answer.status in source.absent:
            self._check_proof()
            return None
        if not answer.ok:
            raise BadStatus(answer)
        name, value = source.flavor
        if name and answer.headers.get(name) != value:
            raise NoNotice(f"its answer lacks the header {name}: {value}, so that it is another server")
        return source.parse(answer.body, self._name)

    def _check_proof(self) -> None:
        """Raise ``NoNotice`` if another cloud's server answers "not found", as it does for each address of AWS."""
        if not self._is_proven and not self._server.has_token and not self._server.get(self._source.proof_path).ok:
            raise NoNotice(f"it has no {self._source.proof_path}, so that it is another server")
        self._is_proven = True

    def _name(self) -> str:
        """Return the machine's name; empty if it is not known: then each machine's notice counts."""
        if not self._own_name and self._source.name_path:
            with contextlib.suppress(*_FAILURES):
                answer = self._server.get(self._source.name_path)
                self._own_name = answer.body.strip() if answer.ok else ""
        return self._own_name

    def _note_failed_poll(self, why: str) -> None:
        self._failed += 1
        if self._failed < _TRIES or why in self._reported:
            return
        self._reported.add(why)
        text = f"notices cannot be received from {self._source.url}: {why}; if the machine is taken away, this source does not warn the job"
        emit("run.notices", f"{text}; {self._source.hint}", url=self._source.url, why=why)
