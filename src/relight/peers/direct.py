"""A restore's direct reads: which agents' memory is read by RDMA, and which are read over TCP, with the reason."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from functools import partial
from typing import Any

import msgspec

from relight.comm.new_threads import start
from relight.observe import emit
from relight.peers.decoding import CodedSource
from relight.peers.messages import PLANE, Inventory, Locate, Located, PeerRefusal
from relight.peers.rdma import ASK_S, RDMA, DirectRead, PlaneChoice, PlaneFailed, RdmaPlane, without_plane
from relight.peers.wire import BYTES_PER_SECOND_MIN, Caller, PeerLost, without_fingerprint


class NotThere(PeerLost):
    """The agent answered that it does not have the requested bytes, or not any more."""


class DirectReads:
    """Direct reads of one ``Remote``. An agent that a transfer has failed with is read over TCP from then on. Any thread.

    A thread makes the plane, if an agent has one. Until then all agents are read over TCP: a small restore does not wait.
    What is read is unverified, as over TCP.
    """

    def __init__(self, wanted: str, tls: bool, timeout_s: float, inventories: Mapping[str, Inventory]) -> None:
        self._choice = PlaneChoice(wanted, tls, lambda reason, why: report_fallback("", reason, why))
        self._timeout_s, self._lock = timeout_s, threading.Lock()
        self._places: dict[object, tuple[Located, float]] = {}
        """Where each source is, and when the agent was asked last."""
        self._off: set[str] = set()
        self._agents = frozenset(inventories)
        self._decided, self._closed = threading.Event(), False
        self.read_bytes = 0
        excluded = without_plane(wanted, tls)
        if excluded is None and any(inventory.plane for inventory in inventories.values()):
            start(threading.Thread(target=self._decide, args=(inventories,), name="relight-peers-plane", daemon=True))
            return
        if wanted == RDMA and inventories:
            other = next(iter(inventories.values())).without
            why = (excluded.reason, excluded.why) if excluded else ("peer", f"no peer has an RDMA plane: {other}")
            report_fallback("", *why)
        self._off.update(inventories)
        self._decided.set()

    def wait(self, timeout: float) -> bool:
        """Wait until it is decided which agents are read directly. Return False if that takes longer."""
        return self._decided.wait(timeout)

    def _decide(self, inventories: Mapping[str, Inventory]) -> None:
        plane = self._choice.get()
        for address, inventory in inventories.items():
            if plane is None:
                self._off.add(address)
            elif not inventory.plane:
                self._leave(address, "peer", f"it has no RDMA plane: {inventory.without}")
            elif inventory.plane != plane.name:
                self._leave(address, "version", f"it has {inventory.plane}, and this process {plane.name}")
        with self._lock:
            self._decided.set()
            closed = self._closed
        if closed:
            self._choice.close()

    def read(self, wire: Caller, source: CodedSource, offset: int, into: memoryview) -> bool:
        """Fill ``into`` from a range of the source. Return False if it must be read over TCP.

        Afterwards the caller must check that the source is still there. ``PeerLost`` if the agent is gone.
        """
        plane = self._plane_for(source)
        if plane is None or not len(into):
            return False
        filled = 0
        try:
            place = self._place(wire, source)
            pieces = plane.pieces(
                place.description,
                place.address + source.asked.offset + offset,
                len(into),
                self._ends(len(into)),
                lambda: not wire.ends(),
            )
            for data in pieces:
                into[filled : filled + len(data)] = data
                filled += len(data)
        except PlaneFailed as error:
            self._leave(source.address, "failed", str(error))
            return False
        self.count(filled)
        return True

    def begin(self, wire: Caller, source: CodedSource, offset: int, length: int) -> DirectRead | None:
        """Start to read a range of at most a window. None if it must be read over TCP."""
        plane = self._plane_for(source)
        if plane is None or not length:
            return None
        try:
            place = self._place(wire, source)
            return plane.begin(place.description, place.address + source.asked.offset + offset, length)
        except PlaneFailed as error:
            self._leave(source.address, "failed", str(error))
            return None

    def finish(self, wire: Caller, source: CodedSource, read: DirectRead, length: int) -> memoryview | None:
        """Return the window with the bytes. None if they must be read over TCP. Errors: see ``read``."""
        try:
            window = read.wait(self._ends(length), partial(self._alive, wire, source))
        except PlaneFailed as error:
            self._leave(source.address, "failed", str(error))
            return None
        self.count(length)
        return window

    def count(self, count: int) -> None:
        """Count bytes that were read directly."""
        with self._lock:
            self.read_bytes += count

    def leave(self, why: str) -> bool:
        """Use TCP for all agents from now on. Return False if no byte has been read directly."""
        if not self.read_bytes or self._choice.made is None:
            return False
        self._off.update(self._agents)
        report_fallback("", "failed", why)
        self._choice.close()
        return True

    def close(self) -> None:
        """End all transfers."""
        with self._lock:
            self._closed = True
            decided = self._decided.is_set()
        if decided:  # else the thread that makes the plane closes it
            self._choice.close()

    def _plane_for(self, source: CodedSource) -> RdmaPlane | None:
        if not self._decided.is_set() or source.address in self._off:
            return None
        return self._choice.get()

    def _place(self, wire: Caller, source: CodedSource) -> Located:
        """Return where the blob or piece that the source is a range of begins.

        The agent is asked again after ``ASK_S``, because the process of its plane sleeps when it is not asked.
        """
        place, asked_at = self._places.get(source.name, (None, 0.0))
        now = time.monotonic()
        if place is None or now - asked_at >= ASK_S:
            wire.send(Locate(msgspec.structs.replace(source.asked, offset=0)))
            answer = wire.receive()
            if isinstance(answer, PeerRefusal):
                raise PlaneFailed(answer.why) if answer.code == PLANE else NotThere(answer.why)
            if not isinstance(answer, Located):
                raise PeerLost(f"it answered {type(answer).__name__}")
            self._places[source.name] = (answer, now)
            place = answer
        return place

    def _alive(self, wire: Caller, source: CodedSource) -> bool:
        """Return whether the agent is connected, during a transfer."""
        if wire.ends():
            return False
        self._place(wire, source)
        return True

    def _ends(self, length: int) -> float:
        return time.monotonic() + self._timeout_s + length / BYTES_PER_SECOND_MIN

    def _leave(self, address: str, reason: str, why: str) -> None:
        with self._lock:
            new = address not in self._off
            self._off.add(address)
        if new:
            report_fallback(address, reason, why)


def report_fallback(address: str, reason: str, why: str) -> None:
    """Emit that a peer, or with an empty address all peers of this process, use TCP instead of RDMA."""
    text, fields = fallback_event(address, reason, why)
    emit("peers.fallback", text, **fields)


def fallback_event(address: str, reason: str, why: str) -> tuple[str, dict[str, Any]]:
    """Return the sentence and the fields of ``peers.fallback``."""
    shown = without_fingerprint(address)
    whom = f"the peer at {shown} uses" if shown else "the peers of this process use"
    return f"{whom} TCP instead of RDMA: {why}", {"address": shown, "reason": reason, "why": why}
