"""Put values into the live containers, tensors and arrays, so that other references to these stay valid."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from relight.capture.rebuild import Thunk
from relight.capture.typed_values import is_named_tuple, like


def set_group(group: dict[str, Any], make: Thunk) -> None:
    """Put stored settings into a parameter group; tensors of the same shape keep their memory."""
    for key, value in make().items():
        current = group.get(key)
        if isinstance(current, torch.Tensor) and isinstance(value, torch.Tensor) and current.shape == value.shape:
            current.copy_(value)
        else:
            group[key] = like(current, value, str(key))


def refill_dict(live: dict[Any, Any], parts: Mapping[Any, Thunk | None], whole: bool) -> dict[Any, Any]:
    """Return the live dict with the restored values.

    ``parts`` has None for values that stay. ``whole``: remove all other keys.
    """
    values = {
        key: live.get(key) if make is None else make() for key, make in parts.items() if make is not None or key in live
    }
    if whole:
        live.clear()
    for key, value in values.items():  # ``Counter.update`` adds
        live[key] = value
    return live


def _values(live: Sequence[Any], items: Sequence[Thunk | None]) -> list[Any]:
    return [
        live[i] if make is None and i < len(live) else make() if make is not None else None
        for i, make in enumerate(items)
    ]


def refill_sequence(live: list[Any] | tuple[Any, ...], items: Sequence[Thunk | None], kind: type) -> Any:
    """Return the live list with the restored values, or a new sequence of ``kind``; None stands for values that stay."""
    values = _values(live, items)
    if is_named_tuple(live) and len(live) == len(values):
        return type(live)._make(values)  # type: ignore[attr-defined,union-attr]
    if not isinstance(live, list) or kind is not list:
        return kind(values)
    live[:] = values
    return live


def refill_deque(live: deque[Any], items: Sequence[Thunk | None]) -> deque[Any]:
    """Put the restored values into the live deque, which keeps its ``maxlen``; None stands for values that stay."""
    values = _values(live, items)
    live.clear()
    live.extend(values)
    return live


def refill_tensor(live: torch.Tensor, make: Thunk) -> torch.Tensor:
    """Return the live tensor with the restored elements; if torch cannot copy them, the restored tensor."""
    value: torch.Tensor = make()
    if live.layout != value.layout or live.shape != value.shape or live.dtype != value.dtype:
        return value
    try:
        if live.layout in (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc):
            live.resize_as_sparse_(value)
        live.copy_(value)  # not detached: a detached sparse tensor has other parts
    except RuntimeError:
        return value
    return live


def refill_set(live: set[Any], values: set[Any]) -> set[Any]:
    """Return the live set with the restored members."""
    live.clear()
    live.update(values)
    return live


def refill_bytes(live: bytearray, value: bytes | bytearray) -> bytearray:
    """Return the live bytearray with the restored bytes."""
    live[:] = value
    return live


def refill_array(live: Any, value: Any) -> Any:
    """Return the live array with the restored elements; the restored array itself if shape or dtype differ."""
    if live.shape == value.shape and live.dtype == value.dtype and live.flags.writeable:
        live[...] = value
        return live
    return value
