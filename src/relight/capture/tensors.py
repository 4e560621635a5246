"""Tensors as bytes: sources that read live memory, sinks that write it, for every dtype, stride and device."""

from __future__ import annotations

import contextlib
import ctypes
import math
import threading
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import torch

from relight.capture.accelerator import copies_are_queued, finish_kernels
from relight.errors import IncompatibleState
from relight.format import DTYPES
from relight.layout import Sink
from relight.layout.sources import HostMemorySink, address_of, copy_bytes

USUAL = frozenset((torch.Tensor, torch.nn.Parameter))
"""Classes of tensors without behaviour of their own."""
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
TORCH_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in DTYPES if hasattr(torch, name)}
_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}
SUBCLASS = "give its values by a _save_to_state_dict of the module's class, or convert it to a plain tensor"
_SLAB_BYTES = 16 << 20
"""Bytes that are gathered or scattered at once, at most."""
_QUEUED_BYTES = 8 << 20
"""Bytes that one thread has queued to an accelerator, at most, beyond one slab: as much page-locked memory is in use."""


class _QueuedCopies(threading.local):
    """Copies to an accelerator that the calling thread has queued, or is about to queue."""

    bytes = 0
    """Bytes queued since it last waited for them."""
    landing: torch.Tensor | None = None
    """Page-locked memory that ``TensorSink.landing`` returned last."""


_queued = _QueuedCopies()


def dtype_name(dtype: torch.dtype) -> str | None:
    """Return the format's name of a dtype; None if it has none."""
    return _NAMES.get(dtype)


@cache
def casts_between(stored: torch.dtype, live: torch.dtype, device: torch.device) -> bool:
    """Return whether elements of one floating-point dtype can be copied into tensors of the other on ``device``."""
    if not (stored.is_floating_point and live.is_floating_point):
        return False
    try:
        torch.zeros(1, dtype=live, device=device).copy_(torch.zeros(1, dtype=stored, device="cpu"))
    except (RuntimeError, NotImplementedError):  # packed dtypes, such as float4_e2m1fn_x2
        return False
    return True


def why_not(tensor: torch.Tensor) -> str | None:
    """Return why ``tensor`` cannot be saved, or None. Layouts other than strided are not checked here."""
    if torch.nn.parameter.is_lazy(tensor):
        return "not initialised yet: run a forward pass before the first save"
    # Not isinstance: a subclass wrapped as a parameter (fake, DTensor, quantised) passes as an nn.Parameter.
    if type(tensor) not in USUAL:
        return f"a {type(tensor).__module__}.{type(tensor).__qualname__}, a subclass without __tensor_flatten__: {SUBCLASS}"
    if tensor.is_meta:
        return "a meta tensor: it has no values"
    if tensor.is_nested:
        return "a nested tensor; save its values() and offsets()"
    if tensor.layout == torch.strided and not tensor.is_quantized:
        if dtype_name(tensor.dtype) is None:
            return f"dtype {tensor.dtype}, which the format has no name for"
        contiguous = tensor.is_contiguous()
        last = (
            tensor.numel() - 1
            if contiguous
            else sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
        )
        if (
            tensor.numel()
            and (tensor.storage_offset() + last + 1) * tensor.element_size() > tensor.untyped_storage().nbytes()
        ):
            return "its storage is smaller than the tensor: its memory was taken away (sharded or offloaded?)"
    return None


def resolved(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor`` detached, with lazy conjugation and negation applied, in a layout that has strides."""
    tensor = tensor.detach()
    if tensor.is_mkldnn:
        tensor = tensor.to_dense()
    return tensor.resolve_conj().resolve_neg()


def without_repeats(tensor: torch.Tensor) -> torch.Tensor:
    """Return the part of an expanded tensor that has its own memory: repeated dimensions cut to one."""
    if 0 not in tensor.stride() or all(
        stride or size < 2 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)
    ):
        return tensor
    cut = tuple(slice(0, 1) if not stride else slice(None) for stride in tensor.stride())
    return tensor[cut]


def identity(tensor: torch.Tensor) -> tuple[object, ...]:
    """Return a key that is equal for two tensors that are the same elements of the same memory."""
    return (
        tensor.untyped_storage().data_ptr(),
        tensor.storage_offset(),
        tuple(tensor.shape),
        tensor.stride(),
        tensor.dtype,
        tensor.device,
    )


def memory_of(tensor: torch.Tensor) -> memoryview | None:
    """Return the tensor's bytes in place, writable, if they are in host memory in row-major order, else None.

    Does not keep the tensor alive.
    """
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        return None
    length = tensor.numel() * tensor.element_size()
    if not length:
        return memoryview(bytearray())
    return memoryview((ctypes.c_ubyte * length).from_address(tensor.data_ptr())).cast("B")


def as_integers(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same memory as elements of a dtype that every kernel can copy."""
    if tensor.element_size() == 16 or tensor.dtype == _INTEGERS[tensor.element_size()]:
        return tensor
    return tensor.view(_INTEGERS[tensor.element_size()])


class TensorSource:
    """A tensor's bytes, read in place when requested. Holds the tensor, not a copy."""

    __slots__ = ("_in_order", "_memory", "length", "tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self._in_order = tensor.is_cpu and tensor.is_contiguous()
        self._memory: memoryview | None = None  # created on demand: it costs more than everything else here
        self.length = tensor.nbytes

    def view(self) -> memoryview | None:
        """Return the memory itself for contiguous host tensors, otherwise None."""
        if self._memory is None and self._in_order:
            self._memory = memory_of(self.tensor)
        return self._memory

    @property
    def host_tensor(self) -> torch.Tensor | None:
        """The tensor, if its bytes are in host memory in order."""
        return self.tensor if self._in_order else None

    @property
    def device_tensor(self) -> torch.Tensor | None:
        """The tensor, if its bytes are in an accelerator's memory in order."""
        return self.tensor if self.tensor.device.type != "cpu" and self.tensor.is_contiguous() else None

    def fill(self, start: int, into: memoryview) -> None:
        """Gather a range of elements into ``into``. Uses temporary memory of one slab at most.

        Waits for an accelerator's streams first: the tensor may be written on another than the calling thread's.
        """
        finish_kernels(self.tensor.device)
        size = self.tensor.element_size()
        integers = as_integers(self.tensor)
        offset = 0
        for first, last in _slabs(start // size, (start + len(into)) // size, size):
            for piece in runs(integers, first, last):
                flat = piece.detach().reshape(-1).cpu().contiguous()
                memory = memory_of(flat)
                assert memory is not None
                into[offset : offset + len(memory)] = memory
                offset += len(memory)


def bounded(device: torch.device, length: int) -> None:
    """Count ``length`` bytes that the calling thread has queued to ``device``. Wait for them whenever they exceed ``_QUEUED_BYTES``."""
    _queued.bytes += length
    if _queued.bytes > _QUEUED_BYTES:
        torch.accelerator.current_stream(device).synchronize()
        _queued.bytes = 0


def sink_for(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> Sink:
    """Return the sink that writes bytes of ``dtype`` (None: its own) into ``tensor``.

    The caller must increment the version counter.
    """
    if tensor.device.type == "cpu" and tensor.is_contiguous() and (dtype is None or dtype == tensor.dtype):
        return HostMemorySink(tensor.data_ptr(), tensor.nbytes, tensor)
    return TensorSink(tensor, dtype)


class TensorSink:
    """A live tensor that cannot take the bytes directly: on a device, strided, or of another dtype.

    For another dtype the elements are cast. Copies to an accelerator are queued, from page-locked memory;
    ``finish_kernels`` waits for them.
    """

    def __init__(self, tensor: torch.Tensor, dtype: torch.dtype | None = None) -> None:
        self.tensor = tensor.detach()
        self._cast = dtype if dtype is not None and dtype != tensor.dtype else None
        self._size = (dtype or tensor.dtype).itemsize
        self.length = tensor.numel() * self._size
        self._queues = copies_are_queued(tensor.device)
        in_order = self._queues and self._cast is None and tensor.is_contiguous()
        self._bytes = self.tensor.reshape(-1).view(torch.uint8) if in_order else None
        """The tensor's memory, if bytes are copied there unchanged."""

    def view(self) -> memoryview | None:
        """Return None: there is no direct memory."""
        return None

    def landing(self, start: int, length: int) -> memoryview | None:
        """See ``LandingSink``: page-locked memory, from which the device takes the bytes."""
        if self._bytes is None or length > _SLAB_BYTES:
            return None
        _queued.landing = _page_locked(length, torch.uint8)
        return None if _queued.landing is None else memory_of(_queued.landing)

    def absorb(self, start: int, data: memoryview) -> None:
        """Scatter a range of elements, cast if the live dtype differs."""
        landed, _queued.landing = _queued.landing, None
        if self._bytes is not None and landed is not None and address_of(data) == landed.data_ptr():
            with _writing(self.tensor):
                self._bytes[start : start + len(data)].copy_(landed[: len(data)], non_blocking=True)
        else:
            self._scatter(start, data)
        if self._queues:
            bounded(self.tensor.device, len(data))

    def _scatter(self, start: int, data: memoryview) -> None:
        offset = 0
        target = self.tensor if self._cast is not None else as_integers(self.tensor)
        for first, last in _slabs(start // self._size, (start + len(data)) // self._size, self._size):
            for piece in runs(target, first, last):
                length = piece.numel() * self._size
                dtype = self._cast or self.tensor.dtype
                locked = _page_locked(piece.numel(), dtype) if self._queues else None
                flat = torch.empty(piece.numel(), dtype=dtype, device="cpu") if locked is None else locked
                memory = memory_of(flat)
                assert memory is not None
                copy_bytes(data[offset : offset + length], memory)
                source = flat if self._cast is not None else as_integers(flat)
                with _writing(piece):
                    piece.copy_(source.view(piece.shape), non_blocking=locked is not None)
                offset += length


def _page_locked(count: int, dtype: torch.dtype) -> torch.Tensor | None:
    """Return page-locked memory for ``count`` elements; None if there is no more. torch's allocator reuses it after the copies from it."""
    with contextlib.suppress(RuntimeError):
        return torch.empty(count, dtype=dtype, device="cpu", pin_memory=True)
    return None


def _writing(tensor: torch.Tensor) -> contextlib.AbstractContextManager[Any]:
    """Return the context in which values may be written to ``tensor``."""
    return torch.inference_mode() if tensor.is_inference() else torch.no_grad()


class FanOut:
    """Writes one stored tensor into several live ones."""

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self.sinks = sinks
        self.length = sinks[0].length

    def view(self) -> memoryview | None:
        """Return None: there are several memories."""
        return None

    def absorb(self, start: int, data: memoryview) -> None:
        """Write the bytes into each sink."""
        for sink in self.sinks:
            memory = sink.view()
            if memory is not None:
                memory[start : start + len(data)] = data
            else:
                sink.absorb(start, data)


def _slabs(start: int, end: int, size: int) -> Iterator[tuple[int, int]]:
    """Yield ``start``…``end`` in consecutive ranges of at most a slab."""
    step = max(1, _SLAB_BYTES // size)
    for first in range(start, end, step):
        yield first, min(end, first + step)


def runs(tensor: torch.Tensor, start: int, end: int) -> Iterator[torch.Tensor]:
    """Yield views that together are elements ``start`` to ``end`` in row-major order.

    At most two for each dimension, and one of whole rows.
    """
    if start >= end:
        return
    if tensor.ndim == 0 or (start == 0 and end == tensor.numel()):
        yield tensor
    elif tensor.ndim == 1:
        yield tensor[start:end]
    else:
        row = math.prod(tensor.shape[1:])
        first, last = start // row, (end - 1) // row
        if first == last:
            yield from runs(tensor[first], start - first * row, end - first * row)
            return
        if start % row:
            yield from runs(tensor[first], start % row, row)
            first += 1
        whole = end // row
        if whole > first:
            yield tensor[first:whole]
        if end % row:
            yield from runs(tensor[whole], 0, end % row)


def touched(tensor: torch.Tensor) -> torch.Tensor:
    """Increment the tensor's version counter, as its memory was written without autograd."""
    if not tensor.is_inference():
        torch.autograd.graph.increment_version(tensor)
    return tensor


def touch_all(tensors: Sequence[torch.Tensor]) -> None:
    """Call ``touched`` for many tensors, in one call if all have a version counter."""
    try:
        torch.autograd.graph.increment_version(tensors)
    except RuntimeError:  # some are inference tensors
        for tensor in tensors:
            touched(tensor)


def refuse(path: str, reason: str) -> IncompatibleState:
    """Return the error for one value that cannot be saved."""
    return IncompatibleState(reason, where=path)
