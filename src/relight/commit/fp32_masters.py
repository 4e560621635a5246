"""Match 16-bit weights with the float32 masters that they are rounded from, by shape and first bytes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import NamedTuple

from relight.commit.plan import PackPlan
from relight.format import Tensor
from relight.format.derived import KINDS, RUNS_MAX, SourceRange, encode_derived, is_rounded, rounded
from relight.format.manifest import tensors_in

HEAD = 32
"""First bytes of a 16-bit tensor by which its master is found."""
TRIED_MAX = 8
"""Most masters with equal first bytes that are tried for one range of a chunk."""
_Key = tuple[object, ...]


class _Part(NamedTuple):
    """A range of a chunk: its length, its tensor, and the offset in the tensor."""

    length: int
    tensor: Tensor
    begin: int


class _Wide(NamedTuple):
    offset: int
    length: int


class Masters:
    """Masters in one pack in memory. Any thread. A chunk is derived only from tensors before it in the pack."""

    def __init__(
        self, plan: PackPlan, tensors: list[Tensor], index: int, exact: Callable[[Tensor], bool] = lambda tensor: True
    ) -> None:
        """``exact``: returns whether a tensor is stored exactly. Nothing is derived from other tensors."""
        self._image = plan.image
        self._lock = threading.Lock()
        self._heads: dict[tuple[_Key, int], dict[bytes, list[_Wide]]] = {}
        self._wide: dict[_Key, list[_Wide]] = {}
        self._chunks: dict[int, tuple[int, list[_Part]]] = {}
        if plan.image is None:
            return
        tensors_here = [tensor_here for tensor_here in tensors if tensor_here.pack == index and tensor_here.length]
        for tensor in sorted(tensors_here, key=lambda tensor_here: tensor_here.offset):
            if tensor.dtype == "float32" and exact(tensor):
                self._wide.setdefault(_key(tensor), []).append(_Wide(tensor.offset, tensor.length))
        if any(tensor_here.dtype in KINDS for tensor_here in tensors_here):
            self._chunks = self._found(plan.chunks, tensors_here, index)

    def _found(self, lengths: list[int], tensors: list[Tensor], index: int) -> dict[int, tuple[int, list[_Part]]]:
        """Return kind and ranges of chunks of 16-bit tensors of one dtype, all with possible masters before them."""
        derivable: dict[int, tuple[int, list[_Part]]] = {}
        for number, (offset, inside) in enumerate(tensors_in(lengths, tensors, index)):
            kinds = {KINDS.get(tensor.dtype, 0) if self._before(tensor, offset) else 0 for tensor, _, _ in inside}
            if len(kinds) == 1 and kinds != {0}:
                derivable[number] = (
                    kinds.pop(),
                    [_Part(end - begin, tensor, begin - tensor.offset) for tensor, begin, end in inside],
                )
        return derivable

    def derive(self, number: int, data: memoryview) -> bytes | None:
        """Return the encoding of chunk ``number`` if it equals rounded float32 tensors before it; else None. Cost: rounding its length."""
        kind, parts = self._chunks.get(number, (0, ()))
        if not parts or len(parts) > RUNS_MAX or self._image is None:
            return None
        runs, filled = list[SourceRange](), 0
        for length, tensor, begin in parts:
            piece = data[filled : filled + length]
            offset = self._master(kind, tensor, begin, piece)
            if offset is None:
                return None
            runs.append(SourceRange(offset, length))
            filled += length
        encoded = encode_derived(kind, runs)
        return encoded if len(encoded) < len(data) else None

    def _master(self, kind: int, tensor: Tensor, begin: int, piece: memoryview) -> int | None:
        assert self._image is not None
        head = bytes(self._image[tensor.offset : tensor.offset + min(HEAD, tensor.length)])
        for wide in self._by_head(kind, tensor).get(head, ())[:TRIED_MAX]:
            offset = wide.offset + 2 * begin
            if is_rounded(kind, self._image[offset : offset + 2 * len(piece)], piece):
                return offset
        return None

    def _by_head(self, kind: int, tensor: Tensor) -> dict[bytes, list[_Wide]]:
        """Return the float32 tensors of equal shape and box before ``tensor``, by their first bytes, rounded."""
        assert self._image is not None
        key = _key(tensor)
        with self._lock:
            by_head = self._heads.get((key, kind))
            if by_head is None:
                by_head = self._heads[key, kind] = {}
                for wide in self._before(tensor, tensor.offset):
                    length = min(HEAD, tensor.length)
                    head = bytearray(length)
                    rounded(kind, self._image[wide.offset : wide.offset + 2 * length], memoryview(head))
                    by_head.setdefault(bytes(head), []).append(wide)
            return by_head

    def _before(self, tensor: Tensor, offset: int) -> list[_Wide]:
        return [
            wide
            for wide in self._wide.get(_key(tensor), ())
            if wide.offset + wide.length <= offset and wide.length == 2 * tensor.length
        ]


def _key(tensor: Tensor) -> _Key:
    return (tensor.shape, tensor.box)
