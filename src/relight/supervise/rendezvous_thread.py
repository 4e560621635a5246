"""The rendezvous as an agent uses it: asked without waiting for it, and joined anew by whoever was cut off from it."""

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

from relight.observe import emit
from relight.supervise.departing import leave

LOST = (RendezvousConnectionError, RendezvousStateError, DistError)
"""What says that whoever holds the rendezvous cannot be reached. A connection lost once stays lost: torch's store makes no other."""


class EndedElsewhere(Exception):
    """Whoever holds the rendezvous is gone, as the job is over: another node has stopped it, and written down why."""


T = TypeVar("T")
_ASK_S = 0.25
_ANSWER_S = 2.0
_AGAIN_S = 1.0
_NOBODY = "nobody can be met until it is there again"


class Joining(RendezvousHandler):
    """torchrun's own handler, made anew by ``make`` where that helps. ``patience_s``: for how long it is tried; ``seen``: makes of what was
    agreed on what the ranks are told."""

    def __init__(
        self, make: Callable[[], RendezvousHandler], patience_s: float, seen: Callable[[RendezvousInfo], RendezvousInfo] = lambda info: info
    ) -> None:
        self._make, self._patience_s, self._seen = make, patience_s, seen
        self._inner = make()
        self._asked: _Ask[int] | None = None
        self.over: Callable[[], str] = str
        """Why the job is over for all, as somebody else has written down; empty if it is not."""
        self._lost_at: float | None = None

    def next_rendezvous(self) -> RendezvousInfo:
        """With a new connection, if the one there was is lost, or does not answer: it may be minutes until one that was cut does again.

        ``EndedElsewhere`` if the job is over: the others will not come. One that is on the machine where they meet holds the rendezvous
        itself once whoever held it is gone, and would wait for them there.
        """
        asked, self._asked = self._asked, None
        if asked is not None:
            asked.join(_ANSWER_S)
            if asked.is_alive() or isinstance(asked.error, LOST):
                self._is_lost(_NOBODY, asked.error)
        if self._lost_at is not None:
            self._inner = self._make()
        meets = _Ask(lambda: self._seen(self._inner.next_rendezvous()))
        while meets.is_alive():
            meets.join(_ASK_S)
            if meets.is_alive() and (why := self.over()):
                raise EndedElsewhere(why)
        if meets.error is not None:
            raise meets.error
        return meets.found

    def joined(self) -> None:
        """It is held by somebody."""
        if self._lost_at is not None:
            emit("rendezvous.restored", f"the rendezvous is there again, after {time.monotonic() - self._lost_at:.1f} s")
        self._lost_at = None

    def lost(self, error: Exception) -> None:
        """It could not be reached: wait a little, or raise ``error`` if that has lasted too long; ``EndedElsewhere`` if the job is over."""
        self._is_lost(_NOBODY, error)
        assert self._lost_at is not None
        if time.monotonic() - self._lost_at > self._patience_s:
            raise error
        time.sleep(_AGAIN_S)
        if why := self.over():
            raise EndedElsewhere(why) from error

    def num_nodes_waiting(self) -> int:
        """How many want to join, as far as is known. Ranks that train do not need the rendezvous, and are not to be ended, nor left without
        somebody who looks at them, because it cannot be reached."""
        if self._lost_at is not None:
            return 0
        self._asked = self._asked or _Ask(self._inner.num_nodes_waiting)
        self._asked.join(_ASK_S)
        if self._asked.is_alive():
            return 0
        asked, self._asked = self._asked, None
        if isinstance(asked.error, LOST):
            self._is_lost("training goes on, but nobody can join it", asked.error)
            return 0
        if asked.error is not None:
            raise asked.error
        return asked.found

    def _is_lost(self, so: str, error: Exception | None = None) -> None:
        if self._lost_at is None:
            self._lost_at = time.monotonic()
            what = str(error) if isinstance(error, RendezvousStateError) else "the rendezvous cannot be reached"
            emit("rendezvous.lost", f"{what}: {so}")

    def leave(self, endpoint: str, others_continue: bool, grace_s: float) -> None:
        """Take this node out of the rendezvous, if it can be reached. ``grace_s``: how long that may take at most."""
        if self._lost_at is None:
            leave(self._inner, endpoint, others_continue, grace_s)

    # -- as it is

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
        """See torch's; not what was lost, where nobody would hear of it, or others only now."""
        return self._lost_at is None and self._inner.shutdown()


class _Ask(threading.Thread, Generic[T]):
    """A question that may take as long as a connection takes to be given up; who asked need not wait for it, nor the process at its end."""

    found: T

    def __init__(self, question: Callable[[], T]) -> None:
        super().__init__(name="relight-rendezvous", daemon=True)
        self._question = question
        self.error: Any = None
        self.start()

    def run(self) -> None:
        """Ask it."""
        try:
            self.found = self._question()
        except Exception as error:  # noqa: BLE001 whatever it is, who asked is told
            self.error = error
