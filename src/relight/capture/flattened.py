"""Parameters that were flattened, concatenated, and cut into one range for each rank: ``FullyShardedDataParallel``.

Its modules and optimizers hold one-dimensional pieces, or, with ``use_orig_params=False``, one flat parameter for a
whole module. Here both are treated as the parameters of the user's own module, each with the range of its elements
that is on this rank. Nothing is gathered; the modules' own ``state_dict`` would gather.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import accumulate, repeat
from typing import Any, NamedTuple

import torch
from torch import nn

from relight.capture.kinds import own_name, wrapped, wraps
from relight.capture.module_state import has_own_ways
from relight.capture.sharded import Flat, ShardingOf
from relight.errors import IncompatibleState
from relight.layout.rank_tables import Mesh

FLAT = "_flat_param"
"""Suffix of the name of a live parameter that stands for several."""
_KIND = "FullyShardedDataParallel"
_INSIDE = "_fsdp_wrapped_module"
_EXTRA = "_extra_state"
OUTERMOST = "give the Checkpointer the outermost wrapper"


class Original(NamedTuple):
    """A parameter that was flattened.

    ``begin``: its position in the concatenation. ``here``: its elements on this rank, which begin at ``at`` in the
    live parameter. ``each``: elements of the concatenation that a rank holds, padding included.
    """

    name: str
    """The wrapped module's name for it; ``full_name`` includes the elements of inner wrappers."""
    full_name: str
    shape: tuple[int, ...]
    begin: int
    at: int
    here: int
    each: int
    mesh: Mesh

    def of(self, memory: torch.Tensor, owner: torch.Tensor) -> Any:
        """Return its range of ``memory``: the live parameter's memory, or an optimizer state of the same length."""
        run = memory.detach()[self.at : self.at + self.here]
        if not math.prod(self.shape):
            return run.view(self.shape)
        return Flat(self.shape, ShardingOf(self.mesh, (), run, (self.begin, self.each)), owner)

    def named(self, live: str) -> str:
        """Return its name, given the live parameter's."""
        return live.removesuffix(FLAT) + self.name if live.endswith(FLAT) else live


def is_flattened(module: nn.Module) -> bool:
    """Return whether some of the module's parameters are flat.

    Called for every model, so it avoids a call for each submodule.
    """
    seen, pending = {id(module)}, [module]
    while pending:
        current = pending.pop()
        if type(current).__name__ == _KIND:
            return True
        for child in current._modules.values():
            if child is not None and id(child) not in seen:
                seen.add(id(child))
                pending.append(child)
    return False


def originals_of(module: nn.Module) -> dict[int, list[Original]]:
    """Return the originals in each live parameter that holds flattened ones, by ``id``."""
    return {id(live): originals for _, wrapper in _wrappers(module) for live, _, originals in _held(wrapper)}


def flattened_state(module: nn.Module) -> dict[str, Any]:
    """Return what ``module.state_dict(keep_vars=True)`` would return without flattening.

    Names include the wrappers' elements. Values are tensors, ``Flat`` for parameters that were flattened and cut, and
    results of ``get_extra_state``.
    ``module``: the outermost wrapper. Raise ``IncompatibleState`` if a module has its own ``state_dict`` code.
    """
    state: dict[str, Any] = {}
    wrappers = list(_wrappers(module))
    whole, cut = _live_parameters(wrappers)
    for path, submodule in module.named_modules(remove_duplicate=False):
        if wraps(submodule) is not None and not submodule._parameters:
            continue
        if wraps(submodule) is None and has_own_ways(submodule):
            raise IncompatibleState(
                f"a {type(submodule).__qualname__} has its own state_dict code, which {_KIND} changes",
                where=path,
                hint="use fully_shard(), which keeps each parameter and any module's own state_dict",
            )
        prefix = f"{path}." if path else ""
        for key, value in (*submodule._parameters.items(), *submodule._buffers.items()):
            if value is None or id(value) in cut or key in submodule._non_persistent_buffers_set:
                continue
            if without_wrapper(value) and id(value) not in whole:
                raise IncompatibleState(
                    f"flattened by a {_KIND} around the module that was given", where=prefix + key, hint=OUTERMOST
                )
            state[prefix + key] = value
        if wraps(submodule) is None and type(submodule).get_extra_state is not nn.Module.get_extra_state:
            state[prefix + _EXTRA] = submodule.get_extra_state()
    for path, wrapper in wrappers:
        prefix = f"{path}.{_INSIDE}." if path else f"{_INSIDE}."
        for live, memory, originals in _held(wrapper):
            state.update((prefix + original.full_name, original.of(memory, live)) for original in originals)
        for shared in wrapper._handle.flat_param._shared_param_infos:
            first = f"{prefix}{_joined(shared.prim_module_name, shared.prim_param_name)}"
            if first in state:
                state[f"{prefix}{_joined(shared.module_name, shared.param_name)}"] = state[first]
    return state


def without_wrapper(tensor: torch.Tensor) -> bool:
    """Return whether an outer wrapper, which is not a component, has flattened this tensor: its meaning is then unknown."""
    return bool(getattr(tensor, "_fsdp_flattened", False) or getattr(tensor, "_is_flat_param", False))


def drop_gathered(module: nn.Module) -> None:
    """Free gathered copies of parameters that were written after the gathering. The next forward pass gathers again."""
    from torch.distributed.fsdp._runtime_utils import _reshard
    from torch.distributed.utils import _free_storage

    for _, wrapper in _wrappers(module):
        handle = wrapper._handle
        if handle.uses_sharded_strategy and hasattr(handle.flat_param, "_full_param_padded"):
            _reshard(wrapper, handle, True)
            for name in ("_full_param_padded", "_full_prec_full_param_padded"):
                gathered = getattr(handle.flat_param, name, None)
                if gathered is not None:
                    _free_storage(gathered)


def _live_parameters(wrappers: Sequence[tuple[str, Any]]) -> tuple[set[int], set[int]]:
    """Return, by ``id``, the live parameters in flat ones: those that are complete on this rank, and those that are cut."""
    whole: set[int] = set()
    cut: set[int] = set()
    for _, wrapper in wrappers:
        flat = wrapper._handle.flat_param
        cut.add(id(flat))
        into = cut if wrapper._handle.uses_sharded_strategy else whole
        into.update(map(id, (*(flat._params or ()), *(flat._shared_params or ()))))
    return whole, cut


def _wrappers(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield all wrappers that have a flat parameter, outermost first, in their state between steps."""
    for path, wrapper in module.named_modules():
        if type(wrapper).__name__ == _KIND:
            _apply_buffer_dtypes(wrapper)
            if getattr(wrapper, "_handle", None) is not None:
                yield path, wrapper


def _apply_buffer_dtypes(wrapper: Any) -> None:
    """Bring a wrapper into its state between steps.

    Buffers get the dtype that the first forward pass would give them. If a forward pass gathered parameters and no
    backward pass followed, they are freed, as the wrapper does at the next forward pass.
    """
    from torch.distributed.fsdp._runtime_utils import _lazy_init, _reshard

    # otherwise left to the outermost wrapper
    if wrapper._is_root is None and wrapper.mixed_precision.buffer_dtype is not None:
        _lazy_init(wrapper, wrapper)
    handle = wrapper._handle
    if handle is None or not handle.uses_sharded_strategy:
        return
    if not handle.is_sharded(handle.flat_param) or handle._skipped_use_sharded_views:
        _reshard(wrapper, handle, True)


def _held(wrapper: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor, list[Original]]]:
    """Yield each live parameter of a wrapper, its memory, and the original parameters in it."""
    flat, sharded = wrapper._handle.flat_param, wrapper._handle.uses_sharded_strategy
    if any(extension is not None for extension in flat._param_extensions):
        raise IncompatibleState(
            f"parameters that are DTensors, flattened by {_KIND}", hint="use fully_shard(), which can shard DTensors"
        )
    names = wrapped(wrapper._handle._fully_sharded_module)
    mesh = _mesh_of(wrapper)
    begins = [
        begin
        for begin, padding in zip(_starts(flat._numels_with_padding), flat._is_padding_mask, strict=True)
        if not padding
    ]
    originals = []
    for name, shape, begin, where, in_order in zip(
        flat._fqns, flat._shapes, begins, flat._shard_param_infos if sharded else repeat(None), flat._contiguities
    ):
        if not in_order:
            raise IncompatibleState(
                "flattened in its order in memory, not row by row", where=name, hint="contiguous() it"
            )
        size = math.prod(shape)
        offset, length = (begin, size) if where is None else (where.offset_in_shard or 0, where.numel_in_shard or 0)
        originals.append(
            Original(own_name(name, names), name, tuple(shape), begin, offset, length, flat._sharded_size.numel(), mesh)
        )
    if flat._params is None:
        yield flat, flat, originals
    elif sharded:  # each has memory for its own range only
        for live, original in zip(flat._params, originals, strict=True):
            yield live, live, [original._replace(at=0)]


def _starts(lengths: Sequence[int]) -> list[int]:
    return [0, *accumulate(lengths)][: len(lengths)]


def _mesh_of(wrapper: Any) -> Mesh:
    """Return the ranks over which the parameters are cut; several rows of them if each row holds everything (HSDP)."""
    import torch.distributed as dist

    ranks = dist.get_process_group_ranks(wrapper._handle.process_group)
    between = getattr(wrapper, "_inter_node_pg", None)
    if not wrapper._handle.uses_sharded_strategy:
        return Mesh((len(ranks), 1), tuple(ranks))
    if between is None:
        return Mesh((len(ranks),), tuple(ranks))
    own = dist.get_rank()
    rows = [[first - own + rank for rank in ranks] for first in dist.get_process_group_ranks(between)]
    return Mesh((len(rows), len(ranks)), tuple(rank for row in rows for rank in row))


def _joined(module: str, name: str) -> str:
    return f"{module}.{name}" if module else name
