"""From leaves back to values: tensors, arrays, sparse and quantised ones, sizes and dtypes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from relight.capture.tensors import TORCH_DTYPES, TensorSink
from relight.errors import IncompatibleState, UnsafeContent
from relight.format import Leaf, Tensor
from relight.layout import Sink

Thunk = Callable[[], Any]
_SPARSE_LAYOUTS = {
    "sparse_csr": torch.sparse_csr,
    "sparse_csc": torch.sparse_csc,
    "sparse_bsr": torch.sparse_bsr,
    "sparse_bsc": torch.sparse_bsc,
}


class Memory:
    """Fresh CPU tensors for stored ones, made when asked for, one each: leaves that share a tensor share the memory."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = tensors
        self._made: dict[int, torch.Tensor] = {}

    def get(self, index: int) -> torch.Tensor:
        """The tensor that index ``index`` will be read into."""
        if index not in self._made:
            stored = self._tensors[index]
            self._made[index] = torch.empty(stored.shape, dtype=torch_dtype(stored))
        return self._made[index]

    @property
    def sinks(self) -> dict[int, Sink]:
        """Sinks for all that was asked for."""
        return {index: TensorSink(tensor) for index, tensor in self._made.items()}


def torch_dtype(stored: Tensor) -> torch.dtype:
    """The torch dtype of a stored tensor."""
    dtype = TORCH_DTYPES.get(stored.dtype)
    if dtype is None:
        raise IncompatibleState(f"this torch has no dtype {stored.dtype}", where=stored.name, hint="upgrade torch")
    return dtype


def build(leaf: Leaf, memory: Memory, path: str) -> Thunk:
    """What makes ``leaf``'s value once its bytes are read. Malformed ``meta`` is ``UnsafeContent``."""
    parts = [memory.get(index) for index in leaf.tensors]
    meta = leaf.meta

    def checked(make: Thunk) -> Thunk:
        def run() -> Any:
            try:
                return make()
            except (RuntimeError, ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
                raise UnsafeContent(f"a {leaf.kind} that cannot be rebuilt: {str(error)[:200]}", where=path) from error

        return run

    return checked(lambda: _value(leaf.kind, parts, meta))


def _value(kind: str, parts: list[torch.Tensor], meta: Any) -> Any:
    if kind == "tensor":
        return parts[0]
    if kind == "expanded":
        if parts[0].dim() != len(meta) or any(b < 0 or a not in (1, b) for a, b in zip(parts[0].shape, meta, strict=True)):
            raise ValueError("shape")
        return parts[0].expand(meta)
    if kind == "numpy":
        return _array(parts[0], meta)
    if kind == "numpy_scalar":
        import numpy as np

        return np.frombuffer(meta[1], dtype=_numpy_dtype(meta[0]), count=1)[0]
    if kind == "sparse_coo":
        made = torch.sparse_coo_tensor(parts[0], parts[1], meta[0], check_invariants=True)
        return made._coalesced_(bool(meta[1]))
    if kind in _SPARSE_LAYOUTS:
        return torch.sparse_compressed_tensor(parts[0], parts[1], parts[2], meta, layout=_SPARSE_LAYOUTS[kind], check_invariants=True)
    if kind == "quantized_tensor":
        return torch._make_per_tensor_quantized_tensor(parts[0], float(meta[1]), int(meta[2]))
    if kind == "quantized_channel":
        return torch._make_per_channel_quantized_tensor(parts[0], parts[1], parts[2], int(meta[1]))
    if kind == "torch_dtype":
        dtype = getattr(torch, str(meta))
        if not isinstance(dtype, torch.dtype):
            raise ValueError("dtype")
        return dtype
    if kind == "torch_device":
        return torch.device(str(meta))
    if kind == "torch_size":
        return torch.Size(meta)
    raise ValueError(kind)


def _array(data: torch.Tensor, meta: Any) -> Any:
    import numpy as np

    dtype, shape = _numpy_dtype(meta[0]), tuple(meta[1])
    if not isinstance(meta[1], tuple) or min(shape, default=0) < 0:
        raise ValueError("shape")
    if math.prod(shape) * dtype.itemsize != data.numel() * data.element_size():  # before anything of that size is made
        raise ValueError("shape and bytes")
    raw = data.reshape(-1).view(torch.uint8).numpy() if data.numel() else np.empty(0, np.uint8)
    return raw.view(dtype).reshape(shape) if dtype.itemsize and raw.size else np.zeros(shape, dtype)


def _numpy_dtype(text: Any) -> Any:
    import numpy as np

    dtype = np.dtype(str(text)[:64])
    if dtype.hasobject or dtype.kind not in "biufcSUMm":
        raise ValueError(f"dtype {text!r}")
    return dtype
