"""Compare nodes: each sends its facts, and receives those of the others. The caller provides the exchange."""

from __future__ import annotations

import contextlib
import hashlib
import platform
import time
from collections.abc import Callable, Collection, Mapping
from typing import Protocol, TypeVar
from uuid import uuid4

import msgspec

from relight.decode import from_msgpack
from relight.doctor.facts import DoctorFacts, Mount, NodeFacts
from relight.errors import RelightError
from relight.settings.environment import given_variables
from relight.settings.file import FILE, which_file
from relight.store import ByteStore, open_bytes
from relight.version import VERSION

STEP_S = 10.0
"""Seconds for each exchange after the first."""
_OWN = frozenset(f"RELIGHT_{name}" for name in ("NODE", "RACK", "PEERS_HOST", "HEARTBEAT", "STACKS", "EVENTS"))
"""Settings that may differ between nodes."""
_FILE_BYTES_MAX = 1 << 20


T = TypeVar("T")


class Exchange(Protocol):
    """Exchange of messages between nodes, as ``supervise.node_exchange.Meeting`` implements it."""

    def send(self, what: str, data: bytes) -> None:
        """Send ``data`` under the name ``what`` to the other nodes."""

    def receive(self, what: str, of: Collection[int], within_s: float) -> dict[int, bytes]:
        """Return the messages ``what`` of the nodes ``of`` that arrive within ``within_s`` seconds."""


class NodeReport(msgspec.Struct, frozen=True):
    """Facts that a node sends about itself."""

    host: str
    versions: dict[str, str] = {}
    settings: dict[str, str] = {}
    """Name and digest of each setting's value. No value leaves the node."""
    mount: tuple[str, str, list[str]] | None = None
    memory_bytes: int | None = None
    accelerators: dict[str, int] = {}
    limits: dict[str, int] = {}


class Clock(msgspec.Struct, frozen=True):
    """A node's clock at node 0's request, and whether the node sees the file that node 0 wrote to the store."""

    at: float
    sees: bool | None = None


def report_of(facts: DoctorFacts) -> NodeReport:
    """Return the report of this node."""
    machine, mount = facts.machine, facts.store.mount
    versions = {package.name: package.installed for package in machine.packages}
    versions |= {"python": platform.python_version(), "relight": VERSION}
    return NodeReport(
        machine.host,
        versions,
        _settings(),
        (mount.type, mount.point, sorted(mount.options)) if mount is not None else None,
        machine.memory_bytes,
        dict(machine.accelerators),
        dict(machine.limits),
    )


def collect_nodes(
    facts: DoctorFacts,
    rank: int,
    count: int,
    exchange: Exchange,
    within_s: float,
    on_stage: Callable[[str], None] = lambda what: None,
) -> tuple[NodeFacts, ...]:
    """Return the facts of all nodes, also of those that did not answer. Takes at most ``within_s`` and some tens of seconds.

    Node 0 writes a small file to the store, to check whether the other nodes see it, and removes it.
    """
    on_stage("waiting for the other nodes")
    everyone = range(count)
    exchange.send("facts", msgspec.msgpack.encode(report_of(facts)))
    reports = _all_of(exchange.receive("facts", everyone, within_s), NodeReport)
    on_stage("comparing")
    store = open_bytes(facts.store.url) if facts.store.there and facts.store.error is None else None
    mark = _put_mark(store) if rank == 0 else ""
    try:
        if rank == 0:
            exchange.send("go", mark.encode())
        # node 0 may still wait for other nodes
        go = exchange.receive("go", [0], within_s + STEP_S if rank else STEP_S).get(0)
        if go is not None:
            now = time.time()
            exchange.send("clock", msgspec.msgpack.encode(Clock(now, _sees(store, go.decode(errors="replace")))))
        answers = exchange.receive("clock", sorted(reports), STEP_S) if go is not None else {}
        clocks = _all_of(answers, Clock)
        with contextlib.suppress(RelightError):
            exchange.send("done", b"")
        if rank == 0:
            exchange.receive("done", sorted(reports), STEP_S)
    finally:
        if mark and store is not None:
            with contextlib.suppress(RelightError):
                store.delete(mark)
    return tuple(_node(node, reports.get(node), clocks.get(node), clocks.get(0)) for node in everyone)


def _node(rank: int, report: NodeReport | None, clock: Clock | None, first: Clock | None) -> NodeFacts:
    if report is None:
        return NodeFacts(rank, there=False)
    mount = (
        Mount(report.mount[0], "", report.mount[1], frozenset(report.mount[2])) if report.mount is not None else None
    )
    ahead_s = clock.at - first.at if clock is not None and first is not None else None
    return NodeFacts(
        rank, True, report.host, report.versions, report.settings, mount, clock.sees if clock is not None else None, ahead_s,
        report.memory_bytes, report.accelerators, report.limits,
    )  # fmt: skip


def _all_of(messages: Mapping[int, bytes], kind: type[T]) -> dict[int, T]:
    """Decode and validate the messages of nodes. An invalid message is treated as not received."""
    decoded = {}
    for rank, data in messages.items():
        with contextlib.suppress(msgspec.MsgspecError):
            decoded[rank] = from_msgpack(data, kind)
    return decoded


def _settings() -> dict[str, str]:
    given = given_variables()
    digests = {name: _digest(value.encode(errors="replace")) for name, value in given.items() if name not in _OWN}
    with contextlib.suppress(OSError), open(which_file()[0], "rb") as file:
        digests[FILE] = _digest(file.read(_FILE_BYTES_MAX))
    return digests


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def _put_mark(store: ByteStore | None) -> str:
    """Write a small file to the store, and return its name; "" if it cannot be written."""
    name = f".relight-doctor-{uuid4().hex[:12]}"
    if store is not None:
        with contextlib.suppress(RelightError):
            store.put_once(name, b"relight doctor --nodes: may be removed\n")
            return name
    return ""


def _sees(store: ByteStore | None, mark: str) -> bool | None:
    """Return whether this node sees node 0's file; None if node 0 wrote none. False if this node has no such store."""
    if not mark.startswith(".relight-doctor-"):
        return None
    if store is None:
        return False
    try:
        return bool(store.get(mark, 4096))
    except RelightError:
        return False
