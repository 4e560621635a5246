"""16-bit weights and the float32 masters that they are rounded from: who may be whose, told by shapes and by how they begin."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import NamedTuple

from relight.commit.plan import PackPlan
from relight.format import Tensor
from relight.format.derived import KINDS, RUNS_MAX, SourceRange, encode_derived, is_rounded, rounded
from relight.format.manifest import tensors_in

HEAD = 32
"""Bytes of a 16-bit tensor by which its masters are known."""
TRIED_MAX = 8
"""Masters that begin alike which are tried for one run of a chunk."""
_Key = tuple[object, ...]


class _Part(NamedTuple):
    """A run of a chunk: its length, the tensor that it is of, and from where in that."""

    length: int
    tensor: Tensor
    begin: int


class _Wide(NamedTuple):
    offset: int
    length: int


class Masters:
    """Those of one pack, which lies in memory. Any thread; what is asked for a chunk looks only at what comes before it in the pack."""

    def __init__(self, plan: PackPlan, tensors: list[Tensor], index: int, exact: Callable[[Tensor], bool] = lambda tensor: True) -> None:
        """``exact``: whether what is stored of a tensor is what it was, to the bit: of others nothing is derived."""
        self._image = plan.image
        self._lock = threading.Lock()
        self._heads: dict[tuple[_Key, int], dict[bytes, list[_Wide]]] = {}
        self._wide: dict[_Key, list[_Wide]] = {}
        self._chunks: dict[int, tuple[int, list[_Part]]] = {}
        if plan.image is None:
            return
        held = [one for one in tensors if one.pack == index and one.length]
        for tensor in sorted(held, key=lambda one: one.offset):
            if tensor.dtype == "float32" and exact(tensor):
                self._wide.setdefault(_key(tensor), []).append(_Wide(tensor.offset, tensor.length))
        if any(one.dtype in KINDS for one in held):
            self._chunks = self._found(plan.chunks, held, index)

    def _found(self, lengths: list[int], held: list[Tensor], index: int) -> dict[int, tuple[int, list[_Part]]]:
        """Chunks of 16-bit tensors of one dtype that all have float32 of their shape and box before them: the kind, and the runs."""
        found: dict[int, tuple[int, list[_Part]]] = {}
        for number, (at, inside) in enumerate(tensors_in(lengths, held, index)):
            kinds = {KINDS.get(tensor.dtype, 0) if self._before(tensor, at) else 0 for tensor, _, _ in inside}
            if len(kinds) == 1 and kinds != {0}:
                found[number] = kinds.pop(), [_Part(end - begin, tensor, begin - tensor.offset) for tensor, begin, end in inside]
        return found

    def derive(self, number: int, data: memoryview) -> bytes | None:
        """What stands for chunk ``number``, if it is what float32 before it come to; None if it is not. Cost: rounding as much."""
        kind, parts = self._chunks.get(number, (0, ()))
        if not parts or len(parts) > RUNS_MAX or self._image is None:
            return None
        runs, at = list[SourceRange](), 0
        for length, tensor, begin in parts:
            piece = data[at : at + length]
            offset = self._master(kind, tensor, begin, piece)
            if offset is None:
                return None
            runs.append(SourceRange(offset, length))
            at += length
        found = encode_derived(kind, runs)
        return found if len(found) < len(data) else None

    def _master(self, kind: int, tensor: Tensor, begin: int, piece: memoryview) -> int | None:
        assert self._image is not None
        head = bytes(self._image[tensor.offset : tensor.offset + min(HEAD, tensor.length)])
        for wide in self._by_head(kind, tensor).get(head, ())[:TRIED_MAX]:
            offset = wide.offset + 2 * begin
            if is_rounded(kind, self._image[offset : offset + 2 * len(piece)], piece):
                return offset
        return None

    def _by_head(self, kind: int, tensor: Tensor) -> dict[bytes, list[_Wide]]:
        """Float32 tensors of its shape and box that come before it, by how they begin, rounded."""
        assert self._image is not None
        key = _key(tensor)
        with self._lock:
            found = self._heads.get((key, kind))
            if found is None:
                found = self._heads[key, kind] = {}
                for wide in self._before(tensor, tensor.offset):
                    length = min(HEAD, tensor.length)
                    held = bytearray(length)
                    rounded(kind, self._image[wide.offset : wide.offset + 2 * length], memoryview(held))
                    found.setdefault(bytes(held), []).append(wide)
            return found

    def _before(self, tensor: Tensor, at: int) -> list[_Wide]:
        return [wide for wide in self._wide.get(_key(tensor), ()) if wide.offset + wide.length <= at and wide.length == 2 * tensor.length]


def _key(tensor: Tensor) -> _Key:
    return (tensor.shape, tensor.box)
