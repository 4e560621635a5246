"""Parameters that ``FullyShardedDataParallel`` has flattened."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import cache
from itertools import accumulate, repeat
from typing import Any, NamedTuple

import torch
from torch import nn

from relight.torch_private.names import TorchName, all_exist, check_torch, report

_FSDP = "torch.distributed.fsdp"
_FLAT_PARAM = f"{_FSDP}._flat_param"
FLAT = tuple(
    TorchName(owner, name, "flat parameters, and this rank's part of them", "FullyShardedDataParallel is refused")
    for owner, names in (
        (f"{_FSDP}._common_utils:_FSDPState", "_handle _is_root"),
        (f"{_FSDP}._runtime_utils", "_lazy_init _reshard"),
        (f"{_FSDP}._init_utils:_init_process_group_state_for_hybrid_shard", "_inter_node_pg"),
        (
            f"{_FLAT_PARAM}:FlatParamHandle",
            "flat_param uses_sharded_strategy is_sharded process_group _fully_sharded_module _skipped_use_sharded_views",
        ),
        (f"{_FLAT_PARAM}:FlatParameter", "_contiguities _fqns _full_param_padded _full_prec_full_param_padded"),
        (f"{_FLAT_PARAM}:FlatParameter", "_is_padding_mask _numels_with_padding _param_extensions _params _shapes"),
        (f"{_FLAT_PARAM}:FlatParameter", "_shard_param_infos _sharded_size _shared_param_infos _shared_params"),
    )
    for name in names.split()
)
_FLATTENED = tuple(
    TorchName(
        owner,
        name,
        "parameters that a wrapper outside the given module has flattened",
        "flat parameters and one-dimensional views of larger memory count as such, and are refused",
    )
    for owner, name in (
        (f"{_FSDP}._common_utils", "_fsdp_flattened"),
        (f"{_FLAT_PARAM}:FlatParameter", "_is_flat_param"),
    )
)


class FlatPiece(NamedTuple):
    """One of the parameters in a flat one. ``begin``: in the flat parameter of all ranks. ``offset`` and ``length``: on this rank."""

    name: str
    shape: tuple[int, ...]
    begin: int
    offset: int
    length: int
    is_in_order: bool
    """Whether its elements stand row by row."""


class FlatHandle:
    """The flat parameter of one ``FullyShardedDataParallel``, in its state between two steps."""

    def __init__(self, wrapper: Any) -> None:
        self._wrapper, self._handle = wrapper, wrapper._handle
        self.flat: Any = self._handle.flat_param
        self.is_cut: bool = self._handle.uses_sharded_strategy
        """Whether each rank has a part only."""
        self.module: nn.Module = self._handle._fully_sharded_module
        self.live: Sequence[torch.Tensor] | None = self.flat._params
        """The live parameters, if they exist next to the flat one."""
        self.shared: Sequence[torch.Tensor] = self.flat._shared_params or ()
        self.has_dtensors = any(extension is not None for extension in self.flat._param_extensions)
        self.each: int = self.flat._sharded_size.numel()
        """Elements that a rank has, padding included."""
        self.group = self._handle.process_group
        self.between = getattr(wrapper, "_inter_node_pg", None)
        """The group of the ranks with the same part, if there are several (HSDP)."""

    @property
    def pieces(self) -> list[FlatPiece]:
        """The parameters that were flattened, in their order."""
        flat = self.flat
        starts = accumulate(flat._numels_with_padding, initial=0)
        begins = [begin for begin, padding in zip(starts, flat._is_padding_mask) if not padding]
        places = flat._shard_param_infos if self.is_cut else repeat(None)
        pieces = []
        for name, shape, begin, place, is_in_order in zip(flat._fqns, flat._shapes, begins, places, flat._contiguities):
            offset, length = (
                (begin, shape.numel()) if place is None else (place.offset_in_shard or 0, place.numel_in_shard or 0)
            )
            pieces.append(FlatPiece(name, tuple(shape), begin, offset, length, is_in_order))
        return pieces

    @property
    def aliases(self) -> list[tuple[str, str]]:
        """Names of parameters that are other ones too: the further name, and the first."""
        return [
            (_joined(info.module_name, info.param_name), _joined(info.prim_module_name, info.prim_param_name))
            for info in self.flat._shared_param_infos
        ]

    def free_gathered(self) -> None:
        """Free gathered copies of the parameters. The next forward pass gathers again."""
        from torch.distributed.fsdp._runtime_utils import _reshard

        if self.is_cut and hasattr(self.flat, "_full_param_padded"):
            _reshard(self._wrapper, self._handle, True)
            for name in ("_full_param_padded", "_full_prec_full_param_padded"):
                gathered = getattr(self.flat, name, None)
                if gathered is not None and gathered.untyped_storage().nbytes():
                    gathered.untyped_storage().resize_(0)


def flat_handle(wrapper: Any) -> FlatHandle | None:
    """Bring a ``FullyShardedDataParallel`` into its state between steps, and return its flat parameter, if it has one.

    Buffers get the dtype that the first forward pass would give them. If a forward pass gathered parameters and no
    backward pass followed, they are freed, as the wrapper does at the next forward pass.
    """
    check_flat_names()
    from torch.distributed.fsdp._runtime_utils import _lazy_init, _reshard

    # otherwise left to the outermost wrapper
    if wrapper._is_root is None and wrapper.mixed_precision.buffer_dtype is not None:
        _lazy_init(wrapper, wrapper)
    handle = wrapper._handle
    if handle is None:
        return None
    if handle.uses_sharded_strategy and (not handle.is_sharded(handle.flat_param) or handle._skipped_use_sharded_views):
        _reshard(wrapper, handle, True)
    return FlatHandle(wrapper)


@cache
def check_flat_names() -> None:
    """Raise ``ConfigError`` if the installed torch lacks a name of flat parameters."""
    check_torch(FLAT, "FullyShardedDataParallel in a checkpoint", "; or use fully_shard()")


@cache
def _has_flat_marks() -> bool:
    return all_exist(_FLATTENED)


def is_flattened_elsewhere(tensor: torch.Tensor) -> bool:
    """Return whether a wrapper has flattened this tensor, seen from the tensor alone."""
    if getattr(tensor, "_fsdp_flattened", False) or getattr(tensor, "_is_flat_param", False):
        return True
    if _FLAT_PARAM not in sys.modules or _has_flat_marks():
        return False
    report(*_FLATTENED)
    is_plain = tensor.dim() != 1 or tensor.layout != torch.strided
    return hasattr(tensor, "_fqns") or not (is_plain or tensor.untyped_storage().nbytes() <= tensor.nbytes)


def _joined(module: str, name: str) -> str:
    return f"{module}.{name}" if module else name


NAMES = (*FLAT, *_FLATTENED)
