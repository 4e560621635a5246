"""Departure of one node while others can continue: it announces this in the rendezvous, saves with them, and leaves."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from torch.distributed.elastic.rendezvous import RendezvousHandler
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from relight.comm import new_threads
from relight.supervise.facts import Departure
from relight.torch_private.torchrun import Membership

ASKING = ("relight-rendezvous", "relight-departing")
"""Names of threads that call torch's store. One that still does so when Python exits ends the process by SIGABRT: torch's C++ cannot
be left by the exception with which Python ends a thread."""
_KEY = "relight/leaving"
_ANSWER_S = 2.0
"""Seconds to wait for the rendezvous' store. The rest of the node's grace period is for its ranks."""
SERVE_S = 10.0
"""Seconds that the rendezvous' server waits for the other nodes to meet again, if no grace period is known."""
_WORDS_MAX = 300


class Departing:
    """Departures from one node's view. ``least``: how many nodes the job needs."""

    def __init__(self, least: int) -> None:
        self._least = least
        self._announced: Any = None
        """The store in which this node announced its departure."""
        self._nodes = 0
        self._asked_at: float | None = None

    def announce(self, store: Any, rank: int, nodes: int, why: str) -> None:
        """Announce to the other nodes that this node leaves. Done once for each incarnation.

        Call it before a rank is signalled, because the other nodes' ranks end with this node's ranks.
        """
        if nodes < 2 or store is None or store is self._announced:
            return
        self._announced = store
        self._asked_at, self._nodes = time.monotonic(), nodes
        _within(_ANSWER_S, lambda: store.set(f"{_KEY}/{rank}", why[:_WORDS_MAX]))

    def others_continue(self) -> bool:
        """Return whether enough nodes remain without those that have announced their departure.

        Return False if the store does not answer.
        """
        departure = self.others(self._announced, self._nodes)
        return departure is not None and departure.left >= self._least

    @property
    def since_s(self) -> float:
        """Return the seconds since this node announced its departure."""
        return 0.0 if self._asked_at is None else time.monotonic() - self._asked_at

    def others(self, store: Any, nodes: int) -> Departure | None:
        """Return the nodes that were asked to leave in the ended incarnation; None if no node was."""
        if nodes < 2 or store is None:
            return None
        leaving: list[str] = []
        _within(_ANSWER_S, lambda: leaving.extend(_leaving(store, nodes)))
        return Departure(", ".join(leaving), nodes - len(leaving), self._least) if leaving else None


def leave(handler: RendezvousHandler, endpoint: str, others_continue: bool, grace_s: float) -> None:
    """Remove this node from a dynamic rendezvous, so that the others need not wait until it counts as dead.

    The rendezvous ends with the process that serves it. If this process does, wait at most ``grace_s`` until the others
    have met again. Other handlers have no such state.
    """
    membership = Membership.of(handler)
    if membership is None:
        return
    _within(_ANSWER_S, lambda: membership.leave(_ANSWER_S))
    if others_continue and is_own_address(parse_rendezvous_endpoint(endpoint, 0)[0]):
        until = time.monotonic() + grace_s
        while time.monotonic() < until and not membership.have_others_met:
            time.sleep(0.25)
            _within(_ANSWER_S, membership.sync)


def is_own_address(host: str) -> bool:
    """Return whether an address or name is this machine's: a socket can be bound to it."""
    if host == socket.gethostname():
        return True
    with contextlib.suppress(OSError):
        for family, kind, protocol, _, address in socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM):
            with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
                probe.bind(address)
                return True
    return False


def _leaving(store: Any, nodes: int) -> list[str]:
    keys = [f"{_KEY}/{rank}" for rank in range(nodes)]
    return [store.get(key).decode(errors="replace") for key in keys if store.check([key])]


def _within(seconds: float, act: Callable[[], object]) -> None:
    """Call ``act`` in a thread, and wait for it at most ``seconds``.

    An error counts as no answer, because the node ends in any case.
    """

    def run() -> None:
        with contextlib.suppress(Exception):
            act()

    thread = threading.Thread(target=run, name=ASKING[1], daemon=True)
    if new_threads.start(thread):
        thread.join(seconds)
