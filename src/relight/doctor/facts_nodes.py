"""Compare nodes: each sends its facts, and receives those of the others. The caller provides the exchange."""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Protocol, TypeVar
from uuid import uuid4

import msgspec

from relight.decode import from_msgpack
from relight.doctor.facts import DoctorFacts, Mount, NodeFacts
from relight.errors import RelightError
from relight.settings.file import FILE, PLACE
from relight.store import ByteStore, open_bytes
from relight.version import VERSION

STEP_S = 10.0
"""Seconds for each exchange after the first."""
_OWN = frozenset(f"RELIGHT_{name}" for name in ("NODE", "RACK", "PEERS_HOST", "PULSE", "STACKS", "EVENTS"))
"""Settings that may differ between nodes."""
_FILE_BYTES_MAX = 1 << 20


T = TypeVar("T")


class Exchange(Protocol):
    """See ``supervise.meeting.Meeting``."""

    def send(self, what: str, data: bytes) -> None:
        """Send to the other nodes."""

    def receive(self, what: str, of: Collection[int], within_s: float) -> dict[int, bytes]:
        """Return what the nodes that answered in time have sent."""


class NodeReport(msgspec.Struct, frozen=True):
    """Facts that a node sends about itself."""

    host: str
    versions: dict[str, str] = {}
    settings: dict[str, str] = {}
    """Names and digests: no value leaves the node."""
    mount: tuple[str, str, list[str]] | None = None
    memory_bytes: int | None = None
    accelerators: int = 0
    limits: dict[str, int] = {}


class Clock(msgspec.Struct, frozen=True):
    """What its clock showed when all were asked, and whether it saw what the first node had put into the store."""

    at: float
    sees: bool | None = None


def report_of(facts: DoctorFacts) -> NodeReport:
    """Of this node."""
    machine, mount = facts.machine, facts.store.mount
    versions = {one.name: one.installed for one in machine.packages} | {"python": platform.python_version(), "relight": VERSION}
    return NodeReport(
        machine.host, versions, _settings(), (mount.type, mount.point, sorted(mount.options)) if mount is not None else None,
        machine.memory_bytes, machine.accelerators, dict(machine.limits),
    )  # fmt: skip


def collect_nodes(
    facts: DoctorFacts, rank: int, count: int, exchange: Exchange, within_s: float, say: Callable[[str], None] = lambda what: None
) -> tuple[NodeFacts, ...]:
    """Return the facts of all nodes, also of those that did not answer. Takes at most ``within_s`` and some tens of seconds.

    Node 0 writes a small file to the store, to see whether the others find it, and removes it.
    """
    say("waiting for the other nodes")
    everyone = range(count)
    exchange.send("facts", msgspec.msgpack.encode(report_of(facts)))
    told = _all_of(exchange.receive("facts", everyone, within_s), NodeReport)
    say("comparing")
    store = open_bytes(facts.store.url) if facts.store.there and facts.store.error is None else None
    mark = _put_mark(store) if rank == 0 else ""
    try:
        if rank == 0:
            exchange.send("go", mark.encode())
        go = exchange.receive("go", [0], within_s + STEP_S if rank else STEP_S).get(0)  # node 0 may still wait for other nodes
        if go is not None:
            now = time.time()
            exchange.send("clock", msgspec.msgpack.encode(Clock(now, _sees(store, go.decode(errors="replace")))))
        heard = exchange.receive("clock", sorted(told), STEP_S) if go is not None else {}
        clocks = _all_of(heard, Clock)
        with contextlib.suppress(RelightError):
            exchange.send("done", b"")
        if rank == 0:
            exchange.receive("done", sorted(told), STEP_S)
    finally:
        if mark and store is not None:
            with contextlib.suppress(RelightError):
                store.delete(mark)
    return tuple(_node(who, told.get(who), clocks.get(who), clocks.get(0)) for who in everyone)


def _node(rank: int, told: NodeReport | None, clock: Clock | None, first: Clock | None) -> NodeFacts:
    if told is None:
        return NodeFacts(rank, there=False)
    mount = Mount(told.mount[0], "", told.mount[1], frozenset(told.mount[2])) if told.mount is not None else None
    ahead_s = clock.at - first.at if clock is not None and first is not None else None
    return NodeFacts(
        rank, True, told.host, told.versions, told.settings, mount, clock.sees if clock is not None else None, ahead_s,
        told.memory_bytes, told.accelerators, told.limits,
    )  # fmt: skip


def _all_of(heard: Mapping[int, bytes], kind: type[T]) -> dict[int, T]:
    """Validate another node's message. Invalid fields are treated as not sent."""
    found = {}
    for rank, data in heard.items():
        with contextlib.suppress(msgspec.MsgspecError):
            found[rank] = from_msgpack(data, kind)
    return found


def _settings() -> dict[str, str]:
    given = {name: value for name, value in os.environ.items() if name.startswith("RELIGHT_") and value}
    found = {name: _digest(value.encode(errors="replace")) for name, value in given.items() if name not in _OWN}
    with contextlib.suppress(OSError), open(os.environ.get(PLACE, "") or Path(FILE), "rb") as file:
        found[FILE] = _digest(file.read(_FILE_BYTES_MAX))
    return found


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def _put_mark(store: ByteStore | None) -> str:
    """The name of a file that is in the store from now on; empty if there is none to be had."""
    name = f".relight-doctor-{uuid4().hex[:12]}"
    if store is not None:
        with contextlib.suppress(RelightError):
            store.put_once(name, b"relight doctor --nodes: may be removed\n")
            return name
    return ""


def _sees(store: ByteStore | None, mark: str) -> bool | None:
    """None if nothing was put there. A store that is not there on this node has not got it."""
    if not mark.startswith(".relight-doctor-"):
        return None
    if store is None:
        return False
    try:
        return bool(store.get(mark, 4096))
    except RelightError:
        return False
