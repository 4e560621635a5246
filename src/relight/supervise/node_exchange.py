"""Exchanges short messages between one process on each node, through torch's ``TCPStore``, within a time limit."""

from __future__ import annotations

import os
import time
from collections.abc import Collection
from datetime import timedelta
from typing import NamedTuple

from relight.errors import ConfigError, StoreUnavailable
from relight.units import duration_text

MESSAGE_BYTES_MAX = 1 << 20
_POLL_S = 0.01
_AGENT = "TORCHELASTIC_USE_AGENT_STORE"


class NodeAddress(NamedTuple):
    """A node's number, the number of nodes, and the address of the server.

    ``holds``: whether this node is the server.
    """

    host: str
    port: int
    rank: int
    nodes: int
    holds: bool


def seat_of(meet: str, node: str) -> NodeAddress:
    """Return this node's address from ``HOST:PORT`` and ``I/N``.

    If both are empty, read the variables of torchrun and ``relight run``. Raise ``ConfigError`` without those too.
    """
    variables = os.environ
    if not meet and not node:
        try:
            rank, count, port = int(variables["RANK"]), int(variables["WORLD_SIZE"]), int(variables["MASTER_PORT"])
            return _checked(
                NodeAddress(variables["MASTER_ADDR"], port, rank, count, rank == 0 and variables.get(_AGENT) != "True")
            )
        except (KeyError, ValueError):
            hint = "run it on each node with --meet FIRST-NODE:29400 --node I/N (I from 0), or under torchrun or relight run"
            raise ConfigError("the address where the nodes meet is unknown", where="--nodes", hint=hint) from None
    host, _, port_text = meet.rpartition(":")
    rank_text, _, count_text = node.partition("/")
    if not host or not all(number.isdecimal() and len(number) < 7 for number in (port_text, rank_text, count_text)):
        message = f"--meet is HOST:PORT and --node is I/N, not {meet[:80]!r} and {node[:80]!r}"
        raise ConfigError(message, hint="--meet node-0:29400 --node 0/2")
    return _checked(NodeAddress(host.strip("[]"), int(port_text), int(rank_text), int(count_text), int(rank_text) == 0))


def _checked(seat: NodeAddress) -> NodeAddress:
    if not (0 <= seat.rank < seat.nodes <= 1 << 16 and 0 < seat.port < 1 << 16):
        raise ConfigError(
            f"node {seat.rank} of {seat.nodes} at port {seat.port} is impossible", hint="count nodes from 0: --node 0/2"
        )
    return seat


class Meeting:
    """The exchange on one node. No call takes much longer than ``within_s``."""

    def __init__(self, seat: NodeAddress, within_s: float) -> None:
        """Connect.

        Raise ``StoreUnavailable`` if the first node does not answer within ``within_s``, or if its port is taken.
        """
        from torch.distributed import DistError, PrefixStore, TCPStore  # type: ignore[attr-defined]

        self.seat = seat
        self._lost: tuple[type[Exception], ...] = (DistError, RuntimeError, ValueError, OSError)
        where = f"{seat.host}:{seat.port}"
        try:
            store = TCPStore(
                seat.host, seat.port, None, seat.holds, timeout=timedelta(seconds=within_s), wait_for_workers=False
            )
        except self._lost as error:
            message = (
                "the port cannot be bound"
                if seat.holds
                else f"the first node does not answer within {duration_text(within_s)}"
            )
            why = (str(error).splitlines() or [""])[0][:200]
            raise StoreUnavailable(f"{message}: {why}", where=where, hint="start it on all nodes at once") from None
        self._store = PrefixStore("relight-meeting", store)

    def send(self, what: str, data: bytes) -> None:
        """Send ``data`` to the other nodes under the name ``what``."""
        assert len(data) <= MESSAGE_BYTES_MAX
        try:
            self._store.set(f"{what}/{self.seat.rank}", data)  # type: ignore[arg-type] # it takes bytes; its stub is wrong
        except self._lost as error:
            raise StoreUnavailable("the first node is gone", where=f"{self.seat.host}:{self.seat.port}") from error

    def receive(self, what: str, of: Collection[int], within_s: float) -> dict[int, bytes]:
        """Return, by rank, the data that the ranks in ``of`` sent under the name ``what`` in time."""
        ends, messages = time.monotonic() + within_s, dict[int, bytes]()
        try:
            while True:
                for rank in of:
                    if rank not in messages and self._store.check([f"{what}/{rank}"]):
                        data = self._store.get(f"{what}/{rank}")
                        messages[rank] = data if len(data) <= MESSAGE_BYTES_MAX else b""
                if len(messages) == len(of) or time.monotonic() >= ends:
                    return messages
                time.sleep(_POLL_S)
        except self._lost:
            return messages  # the first node, which serves the store, is gone
