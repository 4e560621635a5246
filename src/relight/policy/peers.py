"""How a run's nodes protect each other's snapshots in memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from relight.errors import ConfigError
from relight.policy.argument_checks import bytes_of, number_above_0, whole_of


@dataclass(frozen=True, init=False, slots=True)
class Peers:
    """Nodes protect each other's snapshots in memory: ``relight.Peers(copies=1)``, ``relight.Peers(data=4, parity=2)``.

    With ``copies``, that many other nodes have a copy of each node's snapshot. With ``data`` and ``parity``, any
    ``parity`` of ``data + parity`` nodes may be lost with their memory; this takes ``parity/data`` of a snapshot on
    each node. Groups are formed from nodes of different racks (``RELIGHT_RACK``) and hosts. ``memory`` (``"64GB"``)
    limits the memory that a node uses for others, ``bytes_per_second`` what it sends.
    """

    data: int
    parity: int
    memory: int | None
    bytes_per_second: float | None

    def __init__(
        self,
        *,
        copies: int | None = None,
        data: int | None = None,
        parity: int | None = None,
        memory: str | int | None = None,
        bytes_per_second: float | None = None,
    ) -> None:
        if (copies is None) == (data is None and parity is None):
            hint = "relight.Peers(copies=1), relight.Peers(data=4, parity=2)"
            raise ConfigError("Peers() takes copies=, or data= and parity=", hint=hint)
        chosen: dict[str, Any] = {"data": 1, "parity": copies}
        if copies is None:
            chosen = {"data": 1 if data is None else data, "parity": 1 if parity is None else parity}
        for name, most in (("data", 32), ("parity", 4)):
            value = chosen[name]
            chosen[name] = whole_of(value, f"Peers({'copies' if copies is not None else name}=…)", most=most)
        if bytes_per_second is not None:
            bytes_per_second = number_above_0(bytes_per_second, "Peers(bytes_per_second=…)")
        object.__setattr__(self, "data", chosen["data"])
        object.__setattr__(self, "parity", chosen["parity"])
        object.__setattr__(self, "memory", None if memory is None else bytes_of(memory, "memory"))
        object.__setattr__(self, "bytes_per_second", bytes_per_second)
