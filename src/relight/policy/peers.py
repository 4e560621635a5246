"""How a run's nodes protect each other's snapshots in memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from relight.errors import ConfigError
from relight.policy.argument_checks import checked_arguments
from relight.policy.call_text import ShownAsCall
from relight.settings.checkpoint_settings import PeersSettings
from relight.settings.short_traceback import short_traceback
from relight.units import Rate, Size


@dataclass(frozen=True, init=False, slots=True, repr=False)
class Peers(ShownAsCall):
    """Nodes protect each other's snapshots in memory: ``relight.Peers(copies=1)``, ``relight.Peers(data=4, parity=2)``.

    Groups are formed from nodes of different racks (``RELIGHT_RACK``) and hosts.

    Args:
        copies: How many other nodes have a copy of each node's snapshot: 1 to 4. Instead of ``data`` and ``parity``.
        data: The number of pieces of a snapshot: 1 to 32. Any ``parity`` of ``data + parity`` nodes may be lost with
            their memory.
        parity: The number of pieces of parity: 1 to 4. They take ``parity/data`` of a snapshot on each node.
        memory: The memory that a node uses for others: ``"64GB"``, or bytes. None: what is there.
        bytes_per_second: Limit for what a node sends: ``"1GB/s"``, or bytes a second. None: no limit.
        tls: Whether nodes encrypt what they exchange. None: if the run is encrypted.
        plane: What moves the bytes. ``"auto"``: RDMA where NIXL and an RDMA device are there and TLS is off, else TCP.
            ``"rdma"``: RDMA without such a device, too. ``"tcp"``: never RDMA.
    """

    data: int
    parity: int
    memory: int | None
    bytes_per_second: float | None
    tls: bool | None
    plane: Literal["auto", "tcp", "rdma"]

    @short_traceback
    def __init__(
        self,
        *,
        copies: int | None = None,
        data: int | None = None,
        parity: int | None = None,
        memory: Size | None = None,
        bytes_per_second: Rate | None = None,
        tls: bool | None = None,
        plane: Literal["auto", "tcp", "rdma"] = "auto",
    ) -> None:
        if (copies is None) == (data is None and parity is None):
            hint = "relight.Peers(copies=1), relight.Peers(data=4, parity=2)"
            raise ConfigError("Peers() takes copies=, or data= and parity=", hint=hint)
        checked = checked_arguments(PeersSettings, locals(), "Peers({}=…)", ("plane",))
        for name, value in (("data", checked["data"]), ("parity", checked["copies"] or checked["parity"])):
            object.__setattr__(self, name, value or 1)
        for name in ("memory", "bytes_per_second", "tls", "plane"):
            object.__setattr__(self, name, checked[name])
