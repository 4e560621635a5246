"""The rendezvous for torch's agent. Requests run in a thread with a limit. A node rejoins after a lost connection."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from torch.distributed import DistError
from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStateError,
)

from relight.comm import new_threads
from relight.observe import emit
from relight.supervise.departing import ASKING, leave
from relight.units import duration_text

LOST = (RendezvousConnectionError, RendezvousStateError, DistError)
"""Errors that mean that the rendezvous cannot be reached.

A lost connection stays lost, because torch's store opens no second one.
"""


class EndedElsewhere(Exception):
    """The rendezvous has ended with the job: another node has stopped the job, and recorded why."""


T = TypeVar("T")
_ASK_S = 0.25
_ANSWER_S = 2.0
_AGAIN_S = 1.0
_UNREACHABLE = "this node waits until the rendezvous can be reached again"


class Joining(RendezvousHandler):
    """torchrun's rendezvous handler, with reconnection.

    ``make`` returns a handler with a new connection. ``patience_s``: seconds to try for. ``seen`` converts the
    rendezvous' result for the ranks.
    """

    def __init__(
        self,
        make: Callable[[], RendezvousHandler],
        patience_s: float,
        seen: Callable[[RendezvousInfo], RendezvousInfo] = lambda info: info,
    ) -> None:
        self._make, self._patience_s, self._seen = make, patience_s, seen
        self._inner = make()
        self._asked: _Ask[int] | None = None
        self.over: Callable[[], str] = str
        """Returns why another node has ended the job for all nodes; empty if none has."""
        self._lost_at: float | None = None

    def next_rendezvous(self) -> RendezvousInfo:
        """Join, with a new connection if the old one is lost or does not answer.

        A cut connection may not answer for minutes. Raise ``EndedElsewhere`` if the job is over, because the other
        nodes will not come. Otherwise a node on the rendezvous' own machine would serve a new rendezvous, and wait
        there.
        """
        request, self._asked = self._asked, None
        if request is not None:
            request.join(_ANSWER_S)
            if request.is_alive() or isinstance(request.error, LOST):
                self._is_lost(_UNREACHABLE, request.error)
        if self._lost_at is not None:
            self._inner = self._make()
        meets = _Ask(lambda: self._seen(self._inner.next_rendezvous()))
        if not meets.is_started:
            meets.run()
        while meets.is_alive():
            meets.join(_ASK_S)
            if meets.is_alive() and (why := self.over()):
                raise EndedElsewhere(why)
        if meets.error is not None:
            raise meets.error
        return meets.result

    def joined(self) -> None:
        """Record that the rendezvous was reached."""
        if self._lost_at is not None:
            emit(
                "rendezvous.restored",
                f"the rendezvous can be reached again, after {duration_text(time.monotonic() - self._lost_at)}",
            )
        self._lost_at = None

    def lost(self, error: Exception) -> None:
        """Record that the rendezvous could not be reached, and wait a second.

        Raise ``error`` if that has lasted longer than ``patience_s``, and ``EndedElsewhere`` if the job is over.
        """
        self._is_lost(_UNREACHABLE, error)
        assert self._lost_at is not None
        if time.monotonic() - self._lost_at > self._patience_s:
            raise error
        time.sleep(_AGAIN_S)
        if why := self.over():
            raise EndedElsewhere(why) from error

    def num_nodes_waiting(self) -> int:
        """Return how many nodes wait to join; 0 if the rendezvous cannot be reached.

        Ranks that train do not need the rendezvous. Its loss must not end them, nor block the supervisor that watches
        them.
        """
        if self._lost_at is not None:
            return 0
        self._asked = self._asked or _Ask(self._inner.num_nodes_waiting)
        if not self._asked.is_started:  # the ranks train on; the next poll asks again
            self._asked = None
            return 0
        self._asked.join(_ASK_S)
        if self._asked.is_alive():
            return 0
        request, self._asked = self._asked, None
        if isinstance(request.error, LOST):
            self._is_lost("training continues, but no node can join it", request.error)
            return 0
        if request.error is not None:
            raise request.error
        return request.result

    def _is_lost(self, so: str, error: Exception | None = None) -> None:
        if self._lost_at is None:
            self._lost_at = time.monotonic()
            cause = str(error) if isinstance(error, RendezvousStateError) else "the rendezvous cannot be reached"
            emit("rendezvous.lost", f"{cause}: {so}")

    def leave(self, endpoint: str, others_continue: bool, grace_s: float) -> None:
        """Remove this node from the rendezvous, if it can be reached.

        ``grace_s``: seconds that this may take at most.
        """
        if self._lost_at is None:
            leave(self._inner, endpoint, others_continue, grace_s)

    # -- calls of torch's handler, unchanged

    def get_backend(self) -> str:
        """See torch's."""
        return self._inner.get_backend()

    @property
    def use_agent_store(self) -> bool:
        """See torch's."""
        return self._inner.use_agent_store

    def is_closed(self) -> bool:
        """See torch's."""
        return self._inner.is_closed()

    def set_closed(self) -> None:
        """See torch's."""
        self._inner.set_closed()  # type: ignore[no-untyped-call]

    def get_run_id(self) -> str:
        """See torch's."""
        return self._inner.get_run_id()

    def shutdown(self) -> bool:
        """See torch's.

        Does nothing if the connection is lost: only a later rendezvous could receive the call.
        """
        return self._lost_at is None and self._inner.shutdown()


class _Ask(threading.Thread, Generic[T]):
    """A request in a thread of its own, because it may block until its connection times out.

    The process does not wait for it at its end.
    """

    result: T

    def __init__(self, question: Callable[[], T]) -> None:
        super().__init__(name=ASKING[0], daemon=True)
        self._question = question
        self.error: Any = None
        self.is_started = new_threads.start(self)
        """False if the system refused the thread: the caller may call ``run`` itself."""

    def run(self) -> None:
        """Run the request."""
        try:
            self.result = self._question()
        except Exception as error:  # noqa: BLE001 the caller raises it
            self.error = error
