"""Flat tensors of other libraries' optimizers, whose makers say what is in them: ``relight.flattened``.

An optimizer that shares its work out (ZeRO's first two stages, Megatron's distributed optimizer, one's own) lays parameters end to end,
cuts the line into one run for each rank, and steps its run as one tensor: in the parameters' dtype, or in more precision than theirs.
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
    """What was said of a flat tensor: which parameters lie in the line, where each begins, and over which ranks the line is cut."""

    parameters: tuple[torch.Tensor, ...]
    begins: tuple[int, ...]
    mesh: Mesh
    place: int
    """This rank's among those of the mesh."""


class FlatParams(NamedTuple):
    """One flat tensor of an optimizer: what it holds, by name, and the live parameter of each."""

    originals: list[Original]
    lives: list[torch.Tensor]


_lines: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
declarations = 0
"""How many were made: what was worked out before the last one may not hold any more."""


def flattened(
    flat: torch.Tensor,
    parameters: Iterable[torch.Tensor],
    *,
    begins: Sequence[int] | None = None,
    group: ProcessGroup | None = None,
) -> None:
    """Say that ``flat``, which an optimizer steps, is this rank's run of ``parameters`` laid end to end.

    ``parameters``: live ones of a module that the Checkpointer is given, whole on every rank, in the order of the line. ``begins``: where
    each begins in the line, for lines with gaps; else one follows the other. The line is cut into runs of ``flat.numel()`` elements, one
    for each rank of ``group`` (default: all ranks), in their order; the last ones may end in padding. Say it of every flat tensor, on
    every rank, before a Checkpointer is given the optimizer: the ``torch.optim.Optimizer`` that has ``flat`` among its parameters.

    State is then saved by parameter, of the parameter's shape, whatever the number of ranks, and restored to any other layout; values of
    ``flat`` itself too where its dtype is not the parameter's, else it is filled from the restored parameter. Said once more of the
    same ``flat``, the last word counts. The parameters live as long as ``flat``. ``ConfigError`` for what cannot be.
    """
    if not isinstance(flat, torch.Tensor) or flat.ndim != 1 or not flat.numel() or not flat.is_contiguous():
        raise ConfigError("relight.flattened: flat is a tensor of one dimension, contiguous, and not empty")
    parameters = tuple(parameters)
    if any(not isinstance(one, torch.Tensor) or hasattr(one, "placements") for one in parameters) or not parameters:
        raise ConfigError("relight.flattened: parameters are tensors that each rank holds whole")
    sizes = [one.numel() for one in parameters]
    starts = list(begins) if begins is not None else [0, *accumulate(sizes)][: len(sizes)]
    ranks, place = _ranks_of(group)
    ends = [start + size for start, size in zip(starts, sizes)]
    if len(starts) != len(sizes) or any(after < end for end, after in zip([0, *ends], [*starts, len(ranks) * flat.numel()])):
        raise ConfigError(
            f"relight.flattened: {len(sizes)} parameters of {sum(sizes)} elements overlap, or exceed {len(ranks)} × {flat.numel()}",
            hint="begins= tells where each begins, in the order of the line; group= over which ranks it is cut",
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
        raise ConfigError(f"relight.flattened: rank {dist.get_rank()} is none of its group's: {ranks}")
    return ranks, ranks.index(dist.get_rank())


class ElementRange(Original):
    """A run of a parameter in a declared tensor; of one that lies in it whole, the parameter's shape."""

    def of(self, held: torch.Tensor, owner: torch.Tensor) -> Any:
        """See ``Original``."""
        if len(self.mesh.ranks) == 1:
            return held.detach()[self.at : self.at + self.here].view(self.shape)
        return super().of(held, owner)


def declared_among(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Those of which somebody has said what is in them. Costs nothing where nobody has said anything."""
    return [one for one in tensors if one in _lines] if len(_lines) else []


def _line_of(tensor: torch.Tensor) -> FlatParamLine | None:
    found: FlatParamLine | None = _lines.get(tensor)  # type: ignore[no-untyped-call]
    return found


def contains_storage(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The parameters that it holds elements of, or others of its line; itself if nothing was said of it."""
    line = _line_of(tensor)
    return [tensor] if line is None else list(line.parameters)


def declared_of(tensor: torch.Tensor, names: Mapping[int, str]) -> FlatParams | None:
    """What it holds, if somebody has said so. ``names``: of parameters, by ``id``; one without a name is called "?"."""
    line = _line_of(tensor)
    if line is None:
        return None
    each, originals, lives = tensor.numel(), list[Original](), list[torch.Tensor]()
    first = line.place * each
    for live, begin in zip(line.parameters, line.begins):
        low, high = max(begin, first), min(begin + live.numel(), first + each)
        at, here = (low - first, high - low) if low < high else (0, 0)
        name = names.get(id(live), "?")
        originals.append(ElementRange(name, name, tuple(live.shape), begin, at, here, each, line.mesh))
        lives.append(live)
    return FlatParams(originals, lives)


def own_values(flat: torch.Tensor, declared: FlatParams) -> dict[str, Any]:
    """Of those whose values in ``flat`` are not the parameter's own, since its dtype is another: the run of each that is here, by name."""
    return {
        one.name: one.of(flat, flat)
        for one, live in zip(declared.originals, declared.lives)
        if one.here and live.dtype != flat.dtype
    }  # fmt: skip


def fill(flat: torch.Tensor, original: Original, live: torch.Tensor) -> None:
    """Values of a parameter that were not stored as ``flat`` has them: those of the parameter."""
    start = max(0, _lines[flat].place * original.each - original.begin)
    run = live.detach().reshape(-1)[start : start + original.here]
    flat.detach()[original.at : original.at + original.here].copy_(run)
