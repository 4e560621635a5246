"""Parameters that were flattened, laid end to end, and cut into one run for each rank: ``FullyShardedDataParallel``.

Its modules and optimizers hold one-dimensional pieces, or, with ``use_orig_params=False``, one flat parameter for a whole module. Here both
are seen as what they stand for: the parameters that the user's own module has, each with the run of its elements that is on this rank.
Nothing is gathered; the modules' own ``state_dict`` would.
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
from relight.capture.sharded import Flat, Spread
from relight.errors import IncompatibleState
from relight.layout.roster import Mesh

_FLAT = "_flat_param"
_KIND = "FullyShardedDataParallel"
_INSIDE = "_fsdp_wrapped_module"
_EXTRA = "_extra_state"


class Original(NamedTuple):
    """A parameter that was flattened. ``begin``: where in the line of all that were flattened with it; ``here``: elements of it on this
    rank, which begin at ``at`` of what the live parameter holds; ``each``: elements of the line that a rank holds, padding included.
    """

    name: str
    """As the wrapped module calls it; ``full_name`` has the elements of wrappers further in."""
    full_name: str
    shape: tuple[int, ...]
    begin: int
    at: int
    here: int
    each: int
    mesh: Mesh

    def of(self, held: torch.Tensor, owner: torch.Tensor) -> Any:
        """Its run of ``held``, one element for each of what the rank holds: a parameter's memory, or an optimizer's for it."""
        run = held.detach()[self.at : self.at + self.here]
        if not math.prod(self.shape):
            return run.view(self.shape)
        return Flat(self.shape, Spread(self.mesh, (), run, (self.begin, self.each)), owner)

    def named(self, live: str) -> str:
        """The name of it, given the live parameter's."""
        return live.removesuffix(_FLAT) + self.name if live.endswith(_FLAT) else live


def is_flattened(module: nn.Module) -> bool:
    """Whether some of its parameters are kept flat. Asked of every model: no call for each of its modules."""
    seen, left = {id(module)}, [module]
    while left:
        one = left.pop()
        if type(one).__name__ == _KIND:
            return True
        for child in one._modules.values():
            if child is not None and id(child) not in seen:
                seen.add(id(child))
                left.append(child)
    return False


def originals_of(module: nn.Module) -> dict[int, list[Original]]:
    """For each live parameter that holds elements of flattened ones, by ``id``: which."""
    return {id(live): originals for _, wrapper in _wrappers(module) for live, _, originals in _held(wrapper)}


def flattened_state(module: nn.Module) -> dict[str, Any]:
    """What ``module.state_dict(keep_vars=True)`` would give if nothing had been flattened, under names with the wrappers' elements:
    tensors, ``Flat`` where one was flattened and cut, values of ``get_extra_state``. ``module``: the outermost wrapper.

    ``IncompatibleState`` if a module gives its state in a way of its own.
    """
    found: dict[str, Any] = {}
    for path, one in module.named_modules(remove_duplicate=False):
        if wraps(one) is not None:
            continue
        if has_own_ways(one):
            raise IncompatibleState(
                f"a {type(one).__qualname__} has its own way of giving its state, which {_KIND} does not leave alone",
                where=path,
                hint="fully_shard() keeps each parameter, and any module's own way",
            )
        prefix = f"{path}." if path else ""
        for key, value in (*one._parameters.items(), *one._buffers.items()):
            if value is not None and key != _FLAT and key not in one._non_persistent_buffers_set:
                found[prefix + key] = value
        if type(one).get_extra_state is not nn.Module.get_extra_state:
            found[prefix + _EXTRA] = one.get_extra_state()
    for path, wrapper in _wrappers(module):
        prefix = f"{path}.{_INSIDE}." if path else f"{_INSIDE}."
        for live, held, originals in _held(wrapper):
            found.update((prefix + original.full_name, original.of(held, live)) for original in originals)
        for shared in wrapper._handle.flat_param._shared_param_infos:
            first = f"{prefix}{_joined(shared.prim_module_name, shared.prim_param_name)}"
            if first in found:
                found[f"{prefix}{_joined(shared.module_name, shared.param_name)}"] = found[first]
    return found


def _wrappers(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """All that keep a flat parameter, outermost first, in the state that they have between steps."""
    for path, one in module.named_modules():
        if type(one).__name__ == _KIND and getattr(one, "_handle", None) is not None:
            _settle(one)
            yield path, one


def _settle(wrapper: Any) -> None:
    """Give back what was gathered for a forward pass that no backward pass followed: the wrapper would, at the next one."""
    handle = wrapper._handle
    if handle.uses_sharded_strategy and not handle.is_sharded(handle.flat_param):
        from torch.distributed.fsdp._runtime_utils import _reshard

        _reshard(wrapper, handle, True)


def _held(wrapper: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor, list[Original]]]:
    """Each live parameter of a wrapper, its memory, and what it holds elements of."""
    flat, sharded = wrapper._handle.flat_param, wrapper._handle.uses_sharded_strategy
    if any(one is not None for one in flat._param_extensions):
        raise IncompatibleState(f"parameters that are DTensors, flattened by {_KIND}", hint="fully_shard() shards DTensors as they are")
    names = wrapped(wrapper._handle._fully_sharded_module)
    mesh = _mesh_of(wrapper)
    begins = [at for at, padding in zip(_starts(flat._numels_with_padding), flat._is_padding_mask, strict=True) if not padding]
    originals = []
    for name, shape, begin, where, in_order in zip(
        flat._fqns, flat._shapes, begins, flat._shard_param_infos if sharded else repeat(None), flat._contiguities
    ):
        if not in_order:
            raise IncompatibleState("flattened in the order in which it lay in memory, not row by row", where=name, hint="contiguous() it")
        size = math.prod(shape)
        at, here = (begin, size) if where is None else (where.offset_in_shard or 0, where.numel_in_shard or 0)
        originals.append(Original(own_name(name, names), name, tuple(shape), begin, at, here, flat._sharded_size.numel(), mesh))
    if flat._params is None:
        yield flat, flat, originals
    elif sharded:  # each has memory of its own run, and nothing besides
        for live, original in zip(flat._params, originals, strict=True):
            yield live, live, [original._replace(at=0)]


def _starts(lengths: Sequence[int]) -> list[int]:
    return [0, *accumulate(lengths)][: len(lengths)]


def _mesh_of(wrapper: Any) -> Mesh:
    """The ranks over which a line is cut; several rows of them if each row holds all of it."""
    import torch.distributed as dist

    ranks = dist.get_process_group_ranks(wrapper._handle.process_group)
    between = getattr(wrapper, "_inter_node_pg", None)
    if not wrapper._handle.uses_sharded_strategy:
        return Mesh((len(ranks), 1), tuple(ranks))
    if between is None:
        return Mesh((len(ranks),), tuple(ranks))
    own = dist.get_rank()
    rows = [[one - own + rank for rank in ranks] for one in dist.get_process_group_ranks(between)]
    return Mesh((len(rows), len(ranks)), tuple(rank for row in rows for rank in row))


def _joined(module: str, name: str) -> str:
    return f"{module}.{name}" if module else name
