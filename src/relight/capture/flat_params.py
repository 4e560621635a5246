"""Flat tensors of other libraries' optimizers, declared by the caller: ``relight.flattened``.

An optimizer may shard its work, like ZeRO stages 1 and 2 and Megatron's distributed optimizer. It concatenates
parameters, cuts the result into one range for each rank, and steps its range as one tensor. That tensor has the
parameters' dtype or a more precise one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from relight.capture.flattened import Original
from relight.errors import ConfigError
from relight.layout.rank_tables import Mesh

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class FlatParamLine(NamedTuple):
    """The declaration of a flat tensor: the concatenated parameters, their offsets, and the ranks that share them."""

    parameters: tuple[torch.Tensor, ...]
    begins: tuple[int, ...]
    mesh: Mesh
    place: int
    """This rank's index among those of the mesh."""


class FlatParams(NamedTuple):
    """One flat tensor of an optimizer: its parameters by name, and the live parameter of each."""

    originals: list[Original]
    lives: list[torch.Tensor]


_lines: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
declarations = 0
"""Number of declarations so far: results that were computed before the last one may be stale."""


def flattened(
    flat: torch.Tensor,
    parameters: Iterable[torch.Tensor],
    *,
    begins: Sequence[int] | None = None,
    group: ProcessGroup | None = None,
) -> None:
    """Declare that ``flat``, which an optimizer steps, is this rank's range of ``parameters`` laid end to end.

    The concatenation is cut into ranges of ``flat.numel()`` elements, one for each rank, in their order. The last
    ranges may end in padding. Declare every flat tensor, on every rank, before a Checkpointer is given the optimizer:
    the ``torch.optim.Optimizer`` that has ``flat`` among its parameters.

    State is then saved by parameter, in the parameter's shape, whatever the number of ranks, and restored to any other
    layout. If the dtype of ``flat`` differs from the parameter's, its values are saved, too; otherwise it is filled
    from the restored parameter. A second declaration of the same ``flat`` replaces the first. The parameters live as
    long as ``flat``. Raise ``ConfigError`` for an impossible declaration.

    Args:
        flat: The tensor of one dimension that the optimizer steps.
        parameters: Live parameters of a module that the Checkpointer is given, whole on every rank, in the order in
            which they are concatenated.
        begins: Where each parameter begins, in elements, if there are gaps. None: one follows the other.
        group: The ranks that share the concatenation. None: all ranks.
    """
    if not isinstance(flat, torch.Tensor) or flat.ndim != 1 or not flat.numel() or not flat.is_contiguous():
        raise ConfigError("relight.flattened: flat is a tensor of one dimension, contiguous, and not empty")
    parameters = tuple(parameters)
    if (
        any(not isinstance(parameter, torch.Tensor) or hasattr(parameter, "placements") for parameter in parameters)
        or not parameters
    ):
        raise ConfigError("relight.flattened: parameters are tensors that each rank holds whole")
    sizes = [parameter.numel() for parameter in parameters]
    starts = list(begins) if begins is not None else [0, *accumulate(sizes)][: len(sizes)]
    ranks, place = _ranks_of(group)
    ends = [start + size for start, size in zip(starts, sizes)]
    if len(starts) != len(sizes) or any(
        after < end for end, after in zip([0, *ends], [*starts, len(ranks) * flat.numel()])
    ):
        raise ConfigError(
            f"relight.flattened: {len(sizes)} parameters of {sum(sizes)} elements overlap, or exceed {len(ranks)} × {flat.numel()}",
            hint="pass begins= with the start of each parameter, and group= with the ranks over which they are cut",
        )
    global declarations
    declarations += 1
    _lines[flat] = FlatParamLine(parameters, tuple(starts), Mesh((len(ranks),), tuple(ranks)), place)


def _ranks_of(group: ProcessGroup | None) -> tuple[list[int], int]:
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        return [0], 0
    ranks = dist.get_process_group_ranks(group or dist.group.WORLD)  # type: ignore[arg-type]
    if dist.get_rank() not in ranks:
        raise ConfigError(f"relight.flattened: rank {dist.get_rank()} is not in the group: {ranks}")
    return ranks, ranks.index(dist.get_rank())


class ElementRange(Original):
    """A range of a parameter in a declared tensor; in the parameter's shape if it is whole there."""

    def of(self, memory: torch.Tensor, owner: torch.Tensor) -> Any:
        """See ``Original``."""
        if len(self.mesh.ranks) == 1:
            return memory.detach()[self.at : self.at + self.here].view(self.shape)
        return super().of(memory, owner)


def declared_among(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the tensors that were declared. Costs nothing without declarations."""
    return [tensor for tensor in tensors if tensor in _lines] if len(_lines) else []


def _line_of(tensor: torch.Tensor) -> FlatParamLine | None:
    line: FlatParamLine | None = _lines.get(tensor)  # type: ignore[no-untyped-call]
    return line


def contains_storage(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the parameters of the tensor's declaration; the tensor itself if it was not declared."""
    line = _line_of(tensor)
    return [tensor] if line is None else list(line.parameters)


def declared_of(tensor: torch.Tensor, names: Mapping[int, str]) -> FlatParams | None:
    """Return the tensor's declared content; None if it was not declared.

    ``names``: of parameters, by ``id``; an unknown parameter gets the name "?".
    """
    line = _line_of(tensor)
    if line is None:
        return None
    each, originals, lives = tensor.numel(), list[Original](), list[torch.Tensor]()
    first = line.place * each
    for live, begin in zip(line.parameters, line.begins):
        low, high = max(begin, first), min(begin + live.numel(), first + each)
        offset, length = (low - first, high - low) if low < high else (0, 0)
        name = names.get(id(live), "?")
        originals.append(ElementRange(name, name, tuple(live.shape), begin, offset, length, each, line.mesh))
        lives.append(live)
    return FlatParams(originals, lives)


def own_values(flat: torch.Tensor, declared: FlatParams) -> dict[str, Any]:
    """Return this rank's ranges of ``flat`` by name, for parameters with another dtype: their values differ, too."""
    return {
        original.name: original.of(flat, flat)
        for original, live in zip(declared.originals, declared.lives)
        if original.here and live.dtype != flat.dtype
    }


def fill(flat: torch.Tensor, original: Original, live: torch.Tensor) -> None:
    """Copy a parameter's values into ``flat``, which had no stored values."""
    start = max(0, _lines[flat].place * original.each - original.begin)
    run = live.detach().reshape(-1)[start : start + original.here]
    flat.detach()[original.at : original.at + original.here].copy_(run)
