"""Rebuild values from leaves: tensors, arrays, sparse and quantised ones, sizes and dtypes."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn

import torch

from relight.capture.standard_values import KIND as STANDARD
from relight.capture.standard_values import standard_value
from relight.capture.tensors import TORCH_DTYPES, TensorSink, sink_for
from relight.errors import REFUSALS, IncompatibleState, UnsafeContent, is_no_memory, no_memory
from relight.format import Leaf, Tensor
from relight.layout import Sink
from relight.layout.sources import HostMemorySink
from relight.torch_private.tensors import quantized_channels, quantized_tensor, sparse_tensor
from relight.units import size_text

Thunk = Callable[[], Any]
Check = Callable[[int], None]
Mapped = Callable[[int], memoryview | None]
_DTYPES = {name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
_SPARSE_LAYOUTS = {
    "sparse_csr": torch.sparse_csr,
    "sparse_csc": torch.sparse_csc,
    "sparse_bsr": torch.sparse_bsr,
    "sparse_bsc": torch.sparse_bsc,
}


class FreshTensors:
    """New tensors for stored ones, allocated on demand, one each: leaves that share a tensor share its memory.

    ``check(pack)`` raises if the store does not hold the bytes that the part declares. It is called before memory for
    that pack is first allocated, as a malicious file can declare a large shape. ``mapped(tensor)`` returns memory that
    has the tensor's bytes already, or gets them on first access; None: the tensor must be read. The tensors are on
    ``device``, but those in ``on_host`` on the CPU. Those in ``casts`` get another dtype than the stored one.
    """

    def __init__(
        self,
        tensors: Sequence[Tensor],
        check: Check | None = None,
        mapped: Mapped | None = None,
        device: torch.device | str = "cpu",
        on_host: Collection[int] = (),
        casts: Mapping[int, torch.dtype] | None = None,
    ) -> None:
        self._tensors, self._check, self._mapped = tensors, check, mapped
        self._casts = casts or {}
        self._device, self._on_host = device, on_host
        self._filled: set[int] = set()
        self._checked: set[int] = set()
        self._made: dict[int, torch.Tensor] = {}

    def get(self, index: int) -> torch.Tensor:
        """Return the tensor that will receive stored tensor ``index``."""
        tensor = self._made.get(index)
        if tensor is None:
            stored = self._tensors[index]
            dtype = self._casts.get(index) or TORCH_DTYPES.get(stored.dtype) or torch_dtype(stored)
            if stored.length and stored.pack in self._checked and self._mapped is None:
                try:
                    device = "cpu" if index in self._on_host else self._device
                    tensor = torch.empty(stored.shape, dtype=dtype, device=device)
                except REFUSALS as error:
                    raise_refusal(stored, error)
            else:
                tensor = self.make(stored, partial(self._empty, index, stored, dtype))
            self._made[index] = tensor
        return tensor

    def make(self, stored: Tensor, empty: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Return ``empty()``, a tensor as large as ``stored``, after checking that the store holds as many bytes."""
        if not stored.length:  # torch multiplies sizes even if one of them is 0
            try:
                return empty()
            except (RuntimeError, OverflowError) as error:
                raise UnsafeContent(f"a shape no tensor can have: {str(error)[:80]}", where=stored.name[:80]) from None
        if stored.pack not in self._checked:
            if self._check is not None:
                self._check(stored.pack)
            self._checked.add(stored.pack)
        try:
            return empty()
        except REFUSALS as error:
            raise_refusal(stored, error)

    def _empty(self, index: int, stored: Tensor, dtype: torch.dtype) -> torch.Tensor:
        data = self._mapped(index) if self._mapped is not None else None
        if data is None:
            device = "cpu" if index in self._on_host else self._device
            return torch.empty(stored.shape, dtype=dtype, device=device)
        self._filled.add(index)
        return torch.frombuffer(data, dtype=torch.uint8).view(dtype).reshape(stored.shape)

    @property
    def indices(self) -> frozenset[int]:
        """The tensors that were requested: their memory is new, and has nothing of what it had before."""
        return frozenset(self._made)

    @property
    def sinks(self) -> dict[int, Sink]:
        """Sinks for all tensors that were requested and must be read."""
        made = ((index, tensor) for index, tensor in self._made.items() if index not in self._filled)
        return {
            index: sink_for(tensor, torch_dtype(self._tensors[index]))
            if index in self._casts
            else HostMemorySink(tensor.data_ptr(), tensor.nbytes, tensor)
            if tensor.is_cpu
            else TensorSink(tensor)
            for index, tensor in made
        }


def raise_refusal(stored: Tensor, error: BaseException) -> NoReturn:
    """Raise ``NoMemory``, with the name and bytes of ``stored``, if ``error`` is a refusal of memory, else ``error``."""
    if not is_no_memory(error):
        raise error
    raise no_memory(error, f"a tensor of {size_text(stored.length)}", stored.name[:200]) from error


def torch_dtype(stored: Tensor) -> torch.dtype:
    """Return the torch dtype of a stored tensor."""
    dtype = TORCH_DTYPES.get(stored.dtype)
    if dtype is None:
        raise IncompatibleState(f"this torch has no dtype {stored.dtype}", where=stored.name, hint="upgrade torch")
    return dtype


def build(leaf: Leaf, memory: FreshTensors, path: str) -> Thunk:
    """Return a function that makes ``leaf``'s value once its bytes are read. It raises ``UnsafeContent`` for bad ``meta``."""
    parts = [memory.get(index) for index in leaf.tensors]
    meta = leaf.meta

    def checked(make: Thunk) -> Thunk:
        def run() -> Any:
            try:
                return make()
            except (
                MemoryError,
                RuntimeError,
                ValueError,
                TypeError,
                LookupError,
                AttributeError,
                ArithmeticError,
            ) as error:
                if is_no_memory(error):  # an intact checkpoint must not be taken for a damaged one
                    raise no_memory(error, f"a value of kind {leaf.kind}", path) from error
                raise UnsafeContent(f"a {leaf.kind} that cannot be rebuilt: {str(error)[:200]}", where=path) from error

        return run

    return checked(lambda: _value(leaf.kind, parts, meta))


def _value(kind: str, parts: list[torch.Tensor], meta: Any) -> Any:
    if kind == "tensor":
        return parts[0]
    if kind == "expanded":
        if parts[0].dim() != len(meta) or any(
            b < 0 or a not in (1, b) for a, b in zip(parts[0].shape, meta, strict=True)
        ):
            raise ValueError("shape")
        return parts[0].expand(meta)
    if kind == "numpy":
        return _array(parts[0], meta)
    if kind == "numpy_scalar":
        import numpy as np

        return np.frombuffer(meta[1], dtype=numpy_dtype(meta[0]), count=1)[0]
    if kind == "sparse_coo":
        return sparse_tensor(parts[0], parts[1], meta[0], bool(meta[1]))
    if kind in _SPARSE_LAYOUTS:
        return torch.sparse_compressed_tensor(
            parts[0],
            parts[1],
            parts[2],
            meta,
            layout=_SPARSE_LAYOUTS[kind],
            device=parts[2].device,
            check_invariants=True,
        )
    if kind == "quantized_tensor":
        return quantized_tensor(parts[0], float(meta[1]), int(meta[2]))
    if kind == "quantized_channel":
        return quantized_channels(parts[0], parts[1], parts[2], int(meta[1]))
    if kind == STANDARD:
        return standard_value(meta)
    if kind == "torch_dtype":
        return _DTYPES[meta]
    if kind == "torch_device":
        return torch.device(str(meta))
    if kind == "torch_size":
        return torch.Size(meta)
    raise ValueError(kind)


def _array(data: torch.Tensor, meta: Any) -> Any:
    import numpy as np

    dtype, shape = numpy_dtype(meta[0]), tuple(meta[1])
    if not isinstance(meta[1], tuple) or min(shape, default=0) < 0:
        raise ValueError("shape")
    # before anything of that size is allocated
    if math.prod(shape) * dtype.itemsize != data.numel() * data.element_size():
        raise ValueError("its bytes do not fit its shape")
    raw = data.reshape(-1).view(torch.uint8).numpy() if data.numel() else np.empty(0, np.uint8)
    return raw.view(dtype).reshape(shape) if dtype.itemsize and raw.size else np.zeros(shape, dtype)


def numpy_dtype(text: Any) -> Any:
    """Return the dtype that a leaf names. Raise ``ValueError`` if its elements are objects."""
    import numpy as np

    dtype = np.dtype(str(text)[:64])
    if dtype.hasobject or dtype.kind not in "biufcSUMm":
        raise ValueError(f"dtype {text!r}")
    return dtype
