"""Check that a live tensor has memory to which a restore may write."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping

import torch

_NO_BYTES = {"FakeTensor", "FunctionalTensor"}
"""Classes of tensors without memory, used while a program is traced."""
_MAPS = "/proc/self/maps"


def why_no_bytes(live: torch.Tensor) -> str | None:
    """Return why ``live`` has no memory, with a remedy; None if it has. Costs 0.2 µs."""
    if live.is_meta:
        return "the live tensor is on the meta device and has no memory: call to_empty(device=…) of its module before the restore"
    if type(live).__name__ in _NO_BYTES:
        return f"the live tensor is a {type(live).__name__} and has no memory: make it outside of FakeTensorMode"
    return None


def read_only(tensors: Mapping[int, tuple[torch.Tensor, int]]) -> list[torch.Tensor]:
    """Return the tensors in read-only memory, such as a file that is mapped for reading. ``tensors``: by address, each first in its entry.

    A write to them would kill the process. Costs about 1 ms, and 0.1 µs a tensor. Without ``/proc`` the list is empty.
    """
    try:
        with open(_MAPS) as lines:
            fields = [line.split(" ", 2)[:2] for line in lines]
            spans = [span.split("-") for span, mode in fields if "w" not in mode]
            closed = [(int(start, 16), int(end, 16)) for start, end in spans]
    except (OSError, ValueError):
        return []
    first, last = min(tensors, default=0), max(tensors, default=0)
    closed = [(start, end) for start, end in closed if start <= last and end > first]
    addresses = sorted(tensors) if closed else []
    inside = [
        tensors[address][0]
        for start, end in closed
        for address in addresses[bisect_left(addresses, start) : bisect_left(addresses, end)]
    ]
    return [
        tensor
        for tensor in inside
        if tensor.is_cpu
        and tensor.layout == torch.strided
        and tensor.numel()
        and type(tensor).__name__ not in _NO_BYTES
    ]
