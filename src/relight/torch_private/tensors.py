"""Tensors: version counters, parts of sharded and sparse ones, quantized ones made from their parts."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from itertools import count
from operator import attrgetter
from typing import Any

import torch
from blake3 import blake3

from relight.torch_private.names import TorchName, report

_VERSION = TorchName(
    "torch:Tensor",
    "_version",
    "detects writes to a tensor between two moments",
    "all bytes of the tensors are hashed in its place",
)
_LOCAL = TorchName(
    "torch.distributed.tensor:DTensor", "_local_tensor", "a DTensor's part on this rank", "to_local() returns it"
)
_SPEC = TorchName(
    "torch.distributed.tensor:DTensor",
    "_spec",
    "the order in which a dimension was sharded over several mesh dimensions",
    "a DTensor with a dimension that is sharded over several mesh dimensions is refused",
)
_STRIDED = TorchName(
    "torch.distributed.tensor.placement_types",
    "_StridedShard",
    "the placement of a dimension that FSDP2 and tensor parallelism both shard",
    "a DTensor with another placement is refused",
)
_WAIT = TorchName(
    "torch.distributed._functional_collectives:AsyncCollectiveTensor",
    "wait",
    "the end of the collective that fills a DTensor's local tensor",
    "such a tensor is copied, which waits too",
)
_INDICES, _VALUES = (
    TorchName(
        "torch:Tensor",
        name,
        "parts of a sparse tensor that is not coalesced",
        "sparse tensors are coalesced before they are saved",
    )
    for name in ("_indices", "_values")
)
_COALESCED = TorchName(
    "torch:Tensor",
    "_coalesced_",
    "restores whether a sparse tensor counts as coalesced",
    "torch.sparse_coo_tensor() is called again, and checks it",
)
_QUANTIZED = tuple(
    TorchName(
        "torch",
        name,
        "makes a quantized tensor from stored integers",
        "zeros are quantized, and the integers are written into their memory",
    )
    for name in ("_make_per_tensor_quantized_tensor", "_make_per_channel_quantized_tensor")
)
_PLAIN = TorchName(
    "torch._C",
    "DisableTorchFunctionSubclass",
    "the memory of a parameter of a class that only adds attributes",
    "such parameters are refused, bitsandbytes' packed weights for example",
)

_unlike_any = count(1)
"""Numbers in place of the versions of tensors without bytes to hash: each call counts as a write."""


def _hash_of_contents(tensor: torch.Tensor) -> int:
    report(_VERSION)
    tensor = tensor.detach()
    if hasattr(tensor, "to_local"):
        tensor = tensor.to_local()
    if tensor.layout != torch.strided or tensor.is_quantized:
        return next(_unlike_any)
    if tensor.is_meta or tensor.untyped_storage().nbytes() < tensor.nbytes:
        return 0  # no memory of its own
    host = tensor.resolve_conj().resolve_neg().contiguous().cpu()
    memory = memoryview((ctypes.c_ubyte * host.nbytes).from_address(host.data_ptr())).cast("B") if host.nbytes else b""
    return int.from_bytes(blake3(memory).digest(8), "little")


read_version: Callable[[torch.Tensor], int] = attrgetter("_version") if _VERSION.exists else _hash_of_contents
"""Returns a number that changes when the tensor is written. Not for inference tensors."""


def version_counter(tensor: torch.Tensor) -> int:
    """Return a number that changes when the tensor is written; 0 for inference tensors, which have no counter."""
    return 0 if tensor.is_inference() else read_version(tensor)


def local_shard(dtensor: Any) -> torch.Tensor:
    """Return a DTensor's part on this rank."""
    try:
        return dtensor._local_tensor  # type: ignore[no-any-return]
    except AttributeError:
        report(_LOCAL)
        with torch.no_grad():
            return dtensor.to_local()  # type: ignore[no-any-return]


def settled_shard(dtensor: Any) -> torch.Tensor:
    """Return a DTensor's part on this rank, after the collective that fills it."""
    local: Any = local_shard(dtensor)
    if not type(local).__module__.startswith("torch.distributed."):
        return local  # type: ignore[no-any-return]
    if hasattr(local, "wait"):
        return local.wait()  # type: ignore[no-any-return]
    report(_WAIT)
    return local.clone()  # type: ignore[no-any-return]


def strided_factor(placement: Any) -> int | None:
    """Return the factor of a placement that was sharded before a lower mesh dimension; None for other placements."""
    if type(placement).__name__ == "_StridedShard":
        return int(placement.split_factor)
    report(_STRIDED)
    return None


def unusual_order(dtensor: Any) -> str:
    """Return the order in which a DTensor was sharded; empty if it is the mesh's, as placements are read."""
    try:
        order = getattr(dtensor._spec, "shard_order", None)
    except AttributeError:
        report(_SPEC)
        dims = [placement.dim for placement in dtensor.placements if hasattr(placement, "dim")]
        return "" if len(dims) == len(set(dims)) else f"unknown in torch {torch.__version__}, which lacks {_SPEC}"
    usual = not order or all(list(entry.mesh_dims) == sorted(entry.mesh_dims) for entry in order)
    return "" if usual else str(order)


def sparse_parts(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, bool]:
    """Return indices and values of a sparse tensor, and whether it is coalesced."""
    if hasattr(tensor, "_indices") and hasattr(tensor, "_values"):
        return tensor._indices(), tensor._values(), tensor.is_coalesced()
    report(_INDICES, _VALUES)
    coalesced = tensor.coalesce()
    return coalesced.indices(), coalesced.values(), True


def sparse_tensor(indices: torch.Tensor, values: torch.Tensor, shape: Any, is_coalesced: bool) -> torch.Tensor:
    """Return a sparse tensor of these parts. Raise ``RuntimeError`` if they do not fit each other."""
    tensor = torch.sparse_coo_tensor(indices, values, shape, device=values.device, check_invariants=True)
    if hasattr(tensor, "_coalesced_"):
        return tensor._coalesced_(is_coalesced)  # type: ignore[no-any-return]
    report(_COALESCED)
    return torch.sparse_coo_tensor(
        indices, values, shape, device=values.device, check_invariants=True, is_coalesced=is_coalesced
    )


def quantized_tensor(integers: torch.Tensor, scale: float, zero_point: int) -> torch.Tensor:
    """Return a quantized tensor that holds these integers."""
    if hasattr(torch, "_make_per_tensor_quantized_tensor"):
        return torch._make_per_tensor_quantized_tensor(integers, scale, zero_point)
    zeros = torch.zeros(integers.shape, device=integers.device)
    return _filled(torch.quantize_per_tensor(zeros, scale, zero_point, _quantized_dtype(integers)), integers)


def quantized_channels(
    integers: torch.Tensor, scales: torch.Tensor, zero_points: torch.Tensor, axis: int
) -> torch.Tensor:
    """Return a tensor that is quantized for each channel, and holds these integers."""
    if hasattr(torch, "_make_per_channel_quantized_tensor"):
        return torch._make_per_channel_quantized_tensor(integers, scales, zero_points, axis)
    zeros = torch.zeros(integers.shape, device=integers.device)
    quantized = torch.quantize_per_channel(zeros, scales, zero_points, axis, _quantized_dtype(integers))
    return _filled(quantized, integers)


def _quantized_dtype(integers: torch.Tensor) -> torch.dtype:
    report(*_QUANTIZED)
    return {torch.int8: torch.qint8, torch.uint8: torch.quint8, torch.int32: torch.qint32}[integers.dtype]


def _filled(quantized: torch.Tensor, integers: torch.Tensor) -> torch.Tensor:
    memory = torch.empty(0, dtype=integers.dtype, device=integers.device)
    memory.set_(quantized.untyped_storage(), 0, quantized.size(), quantized.stride())  # type: ignore[call-overload]
    memory.copy_(integers)
    return quantized


_plain_access = getattr(torch._C, "DisableTorchFunctionSubclass", None)


def without_subclass(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the memory of a tensor of a subclass as a plain tensor; None if this torch cannot."""
    if _plain_access is None:
        report(_PLAIN)
        return None
    with _plain_access():
        return tensor.detach()


NAMES = (_VERSION, _LOCAL, _SPEC, _STRIDED, _WAIT, _INDICES, _VALUES, _COALESCED, *_QUANTIZED, _PLAIN)
