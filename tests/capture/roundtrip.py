"""A checkpoint in memory: converts captured state to bytes by the sources, and back by the sinks, like a store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from relight.capture import Captured, LoadPlan, RestorePlan, build_tree, capture, plan_restore
from relight.format import Tensor, dtype_named, encode_tree


@dataclass(frozen=True)
class Stored:
    """Contents of a part and its packs."""

    tensors: list[Tensor]
    tree: bytes
    data: list[bytes]
    kinds: dict[str, str]


def store(captured: Captured, *, piece: int = 0) -> Stored:
    """Read every item, from its memory if it has a view, else by ``fill``. With ``piece``, fill that many elements."""
    tensors, data, offset = [], [], 0
    for item in captured.items:
        view = None if piece else item.source.view()
        raw = bytes(view) if view is not None else _fill(item.source, item.dtype, piece or 1 << 20)
        assert len(raw) == item.source.length
        tensors.append(Tensor(item.name, item.dtype, item.shape, item.role, 0, offset, len(raw), item.box))
        data.append(raw)
        offset += len(raw)
    assert len({tensor.name for tensor in tensors}) == len(tensors), "names are unique"
    return Stored(tensors, encode_tree(captured.tree), data, captured.kinds)


def _fill(source: Any, dtype: str, piece: int) -> bytes:
    out = bytearray(source.length)
    step = piece * dtype_named(dtype).itemsize
    for start in range(0, source.length, step):
        source.fill(start, memoryview(out)[start : start + step])
    return bytes(out)


def save(components: Mapping[str, object], *, piece: int = 0, **options: Any) -> Stored:
    """Capture components, and store them in memory."""
    return store(capture(components, **options), piece=piece)


def feed(stored: Stored, sinks: Mapping[int, Any], *, piece: int = 0) -> None:
    """Fill the sinks, last piece first, because the order must not matter."""
    for index, sink in sinks.items():
        raw = stored.data[index]
        assert sink.length == len(raw)
        view = None if piece else sink.view()
        if view is not None:
            assert len(view) == len(raw)
            view[:] = raw
            continue
        step = (piece or 1 << 20) * dtype_named(stored.tensors[index].dtype).itemsize
        for start in reversed(range(0, len(raw), step)):
            sink.absorb(start, memoryview(raw)[start : start + step])


def restore(stored: Stored, components: Mapping[str, object], *, piece: int = 0, **options: Any) -> RestorePlan:
    """Plan a restore, fill its sinks, and finish it."""
    options = {"only": None, "strict": True, "rename": None, "where": "test", **options}
    plan = plan_restore(components, stored.tensors, stored.tree, **options)
    feed(stored, plan.sinks, piece=piece)
    plan.finish()
    return plan


def load(stored: Stored, *, only: Sequence[str] | None = None, piece: int = 0) -> Any:
    """Return the stored tree as plain values."""
    plan: LoadPlan = build_tree(stored.tensors, stored.tree, only=only, where="test")
    feed(stored, plan.sinks, piece=piece)
    return plan.result()


def same(first: Any, second: Any) -> bool:
    """Return whether two values are equal in type, structure, dtypes, shapes and every bit, NaNs included."""
    import numpy as np
    import torch

    if isinstance(first, torch.Tensor):
        if not isinstance(second, torch.Tensor) or (first.dtype, first.shape, first.layout) != (
            second.dtype,
            second.shape,
            second.layout,
        ):
            return False
        if first.layout != torch.strided or first.is_quantized:
            return store(capture({"x": first}, rng=False)).data == store(capture({"x": second}, rng=False)).data
        return raw(first) == raw(second)
    if type(first) is not type(second):
        return False
    if isinstance(first, np.ndarray):
        return first.dtype == second.dtype and first.shape == second.shape and first.tobytes() == second.tobytes()
    if isinstance(first, np.generic):
        return first.dtype == second.dtype and first.tobytes() == second.tobytes()
    if isinstance(first, dict):
        return len(first) == len(second) and all(
            same(a, b) and same(first[a], second[b]) for a, b in zip(first, second, strict=True)
        )
    if isinstance(first, (list, tuple)):
        return len(first) == len(second) and all(same(a, b) for a, b in zip(first, second, strict=True))
    if isinstance(first, float):
        return first.hex() == second.hex()
    if isinstance(first, complex):
        return same(first.real, second.real) and same(first.imag, second.imag)
    return bool(first == second)


def raw(tensor: Any) -> bytes:
    """Return a strided tensor's elements in row-major order, independently of the code under test."""
    import torch

    tensor = tensor.detach().cpu().resolve_conj().resolve_neg()
    words = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    whole = (
        torch.view_as_real(tensor).view(torch.int64)
        if tensor.element_size() == 16
        else tensor.view(words[tensor.element_size()])
    )
    return whole.contiguous().numpy().tobytes()
