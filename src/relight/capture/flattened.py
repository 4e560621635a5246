"""Parameters that were flattened, concatenated, and cut into one range for each rank: ``FullyShardedDataParallel``.

Its modules and optimizers hold one-dimensional pieces, or, with ``use_orig_params=False``, one flat parameter for a
whole module. Here both are treated as the parameters of the user's own module, each with the range of its elements
that is on this rank. Nothing is gathered; the modules' own ``state_dict`` would gather.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from relight.capture.kinds import own_name, wrapped, wraps
from relight.capture.module_state import has_own_ways
from relight.capture.sharded import Flat, ShardingOf
from relight.errors import IncompatibleState
from relight.layout.rank_tables import Mesh
from relight.torch_private.flat_parameters import FlatHandle, flat_handle, is_flattened_elsewhere
from relight.torch_private.modules import buffers_of, children_of, parameters_of, unsaved_buffers

FLAT = "_flat_param"
"""Suffix of the name of a live parameter that stands for several."""
_KIND = "FullyShardedDataParallel"
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
        for child in children_of(current).values():
            if child is not None and id(child) not in seen:
                seen.add(id(child))
                pending.append(child)
    return False


def originals_of(module: nn.Module) -> dict[int, list[Original]]:
    """Return the originals in each live parameter that holds flattened ones, by ``id``."""
    return {id(live): originals for _, _, handle in _wrappers(module) for live, _, originals in _held(handle)}


def flattened_state(module: nn.Module) -> dict[str, Any]:
    """Return what ``module.state_dict(keep_vars=True)`` would return without flattening.

    Names include the wrappers' elements. Values are tensors, ``Flat`` for parameters that were flattened and cut, and
    results of ``get_extra_state``.
    ``module``: the outermost wrapper. Raise ``IncompatibleState`` if a module has its own ``state_dict`` code.
    """
    state: dict[str, Any] = {}
    wrappers = list(_wrappers(module))
    whole, cut = _live_parameters(handle for _, _, handle in wrappers)
    for path, submodule in module.named_modules(remove_duplicate=False):
        parameters, unsaved = parameters_of(submodule), unsaved_buffers(submodule)
        if wraps(submodule) is not None and not parameters:
            continue
        if wraps(submodule) is None and has_own_ways(submodule):
            raise IncompatibleState(
                f"a {type(submodule).__qualname__} has its own state_dict code, which {_KIND} changes",
                where=path,
                hint="use fully_shard(), which keeps each parameter and any module's own state_dict",
            )
        prefix = f"{path}." if path else ""
        for key, value in (*parameters.items(), *buffers_of(submodule).items()):
            if value is None or id(value) in cut or key in unsaved:
                continue
            if is_flattened_elsewhere(value) and id(value) not in whole:
                raise IncompatibleState(
                    f"flattened by a {_KIND} around the module that was given", where=prefix + key, hint=OUTERMOST
                )
            state[prefix + key] = value
        if wraps(submodule) is None and type(submodule).get_extra_state is not nn.Module.get_extra_state:
            state[prefix + _EXTRA] = submodule.get_extra_state()
    for _, prefix, handle in wrappers:
        for live, memory, originals in _held(handle):
            state.update((prefix + original.full_name, original.of(memory, live)) for original in originals)
        for alias, first in handle.aliases:
            if prefix + first in state:
                state[prefix + alias] = state[prefix + first]
    return state


def drop_gathered(module: nn.Module) -> None:
    """Free gathered copies of parameters that were written after the gathering. The next forward pass gathers again."""
    for _, _, handle in _wrappers(module):
        handle.free_gathered()


def _live_parameters(handles: Iterable[FlatHandle]) -> tuple[set[int], set[int]]:
    """Return, by ``id``, the live parameters in flat ones: those that are complete on this rank, and those that are cut."""
    whole: set[int] = set()
    cut: set[int] = set()
    for handle in handles:
        cut.add(id(handle.flat))
        into = cut if handle.is_cut else whole
        into.update(map(id, (*(handle.live or ()), *handle.shared)))
    return whole, cut


def _wrappers(module: nn.Module) -> Iterator[tuple[str, str, FlatHandle]]:
    """Yield all wrappers that have a flat parameter, outermost first, in their state between steps.

    Of each: its path, the prefix of names inside it, and its flat parameter.
    """
    for path, wrapper in module.named_modules():
        if type(wrapper).__name__ == _KIND and (handle := flat_handle(wrapper)) is not None:
            inside = f"{wraps(wrapper)}."
            yield path, f"{path}.{inside}" if path else inside, handle


def _held(handle: FlatHandle) -> Iterator[tuple[torch.Tensor, torch.Tensor, list[Original]]]:
    """Yield each live parameter of a wrapper, its memory, and the original parameters in it."""
    if handle.has_dtensors:
        raise IncompatibleState(
            f"parameters that are DTensors, flattened by {_KIND}", hint="use fully_shard(), which can shard DTensors"
        )
    names, mesh, originals = wrapped(handle.module), _mesh_of(handle), []
    for piece in handle.pieces:
        if not piece.is_in_order:
            raise IncompatibleState(
                "FSDP flattened this parameter in its memory order, which is not row by row",
                where=piece.name,
                hint="call contiguous() on it before FSDP wraps the module",
            )
        place = piece.shape, piece.begin, piece.offset, piece.length
        originals.append(Original(own_name(piece.name, names), piece.name, *place, handle.each, mesh))
    if handle.live is None:
        yield handle.flat, handle.flat, originals
    elif handle.is_cut:  # each has memory for its own range only
        for live, original in zip(handle.live, originals, strict=True):
            yield live, live, [original._replace(at=0)]


def _mesh_of(handle: FlatHandle) -> Mesh:
    """Return the ranks over which the parameters are cut; several rows of them if each row holds everything (HSDP)."""
    import torch.distributed as dist

    ranks = dist.get_process_group_ranks(handle.group)
    if not handle.is_cut:
        return Mesh((len(ranks), 1), tuple(ranks))
    if handle.between is None:
        return Mesh((len(ranks),), tuple(ranks))
    own = dist.get_rank()
    rows = [[first - own + rank for rank in ranks] for first in dist.get_process_group_ranks(handle.between)]
    return Mesh((len(rows), len(ranks)), tuple(rank for row in rows for rank in row))
