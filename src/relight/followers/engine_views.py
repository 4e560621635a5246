"""An inference engine's weights as views under the names of a run: fused weights, and slices of tensor parallelism."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import NamedTuple

import torch

from relight.capture.sharded import LiveSlice
from relight.capture.tensor_views import TensorViews
from relight.errors import ConfigError
from relight.layout import Box

FUSED: Mapping[str, Sequence[str]] = MappingProxyType(
    {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
)
"""Modules that vLLM and SGLang fuse, and the stored modules that each has the rows of, in this order."""
SHARDED: Mapping[str, int] = MappingProxyType(
    dict.fromkeys(("*.o_proj.weight", "*.down_proj.weight"), 1)
    | {f"*{name}.*": 0 for name in (*(part for parts in FUSED.values() for part in parts), "embed_tokens", "lm_head")}
)
"""Patterns of stored names, and the dimension along which tensor parallelism cuts these tensors. Others are whole on every rank."""


def engine_views(
    weights: torch.nn.Module | Mapping[str, torch.Tensor],
    *,
    fused: Mapping[str, Sequence[str]] = FUSED,
    heads: Mapping[str, int] | None = None,
    sharded: Mapping[str, int] = SHARDED,
    padded: Mapping[str, int] | None = None,
    tp_rank: int = 0,
    tp_size: int = 1,
) -> TensorViews:
    """Return views of an engine's weights under the names of the run, for ``relight.follow``.

    A rank of tensor parallelism gets its slices: a follower of these views reads only the chunks that the rank needs.
    Raise ``ConfigError`` for sizes that do not divide.

    Args:
        weights: The engine's module, or its tensors by name. Parameters, and buffers that are saved.
        fused: Elements of the engine's names, each with the stored elements that it consists of, along dimension 0.
        heads: The number of heads of stored elements in the whole model, such as
            ``{"q_proj": 32, "k_proj": 8, "v_proj": 8}``. Without it, fused parts are equally large. If there are fewer
            heads than ranks, ranks share a head.
        sharded: Patterns of stored names, and the dimension that tensor parallelism cuts. The first that matches counts.
        padded: Patterns of stored names, and the stored length of the cut dimension where the engine's is longer, such
            as ``{"*embed_tokens.weight": 32000}`` for a padded vocabulary.
        tp_rank: This engine's rank.
        tp_size: The number of ranks that share the weights.
    """
    if not 0 <= tp_rank < tp_size:
        raise _unfit(f"tp_rank={tp_rank} of tp_size={tp_size}", "", "0 ≤ tp_rank < tp_size")
    ranks = _Ranks(tp_rank, tp_size, heads or {})
    views: dict[str, torch.Tensor | LiveSlice] = {}
    for name, tensor in _named(weights):
        for stored, view in _parts(name, tensor, fused, ranks):
            dimension = _first_match(stored, sharded)
            if dimension is None or dimension >= view.ndim:
                views[stored] = view
                continue
            piece = _piece(stored, view, dimension, _first_match(stored, padded or {}), ranks)
            if piece is not None:
                views[stored] = piece
    return TensorViews(views)


class _Ranks(NamedTuple):
    rank: int
    size: int
    heads: Mapping[str, int]

    def share(self, name: str) -> tuple[int, int]:
        """Return the number of different slices of a stored tensor, and the one of this rank."""
        count = next((self.heads[element] for element in name.split(".") if element in self.heads), None)
        if count is None or count % self.size == 0:
            return self.size, self.rank
        if count < 1 or self.size % count:
            raise _unfit(f"{count} heads cannot be divided among {self.size} ranks", name, "check heads= and tp_size=")
        return count, self.rank * count // self.size


def _named(weights: torch.nn.Module | Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors with their names. Of tied ones, the first."""
    named = weights.state_dict(keep_vars=True) if isinstance(weights, torch.nn.Module) else weights
    seen: set[int] = set()
    for name, tensor in named.items():
        if isinstance(tensor, torch.Tensor) and id(tensor) not in seen:
            seen.add(id(tensor))
            yield name, tensor.detach()


def _parts(
    name: str, tensor: torch.Tensor, fused: Mapping[str, Sequence[str]], ranks: _Ranks
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield stored names and views of one of the engine's tensors."""
    elements = name.split(".")
    place = next((place for place, element in enumerate(elements) if element in fused), None)
    if place is None or not tensor.ndim:
        yield name, tensor
        return
    parts = [".".join([*elements[:place], part, *elements[place + 1 :]]) for part in fused[elements[place]]]
    counts = [ranks.heads.get(part) for part in fused[elements[place]]]
    units = [
        1 if count is None else max(1, count // ranks.share(part)[0]) for part, count in zip(parts, counts, strict=True)
    ]
    rows, remainder = divmod(len(tensor), sum(units))
    if remainder or (None in counts and any(counts)):
        sizes = " + ".join(map(str, units))
        raise _unfit(f"{len(tensor)} rows cannot be divided into {sizes} parts", name, "give heads= of all fused parts")
    yield from zip(parts, torch.split(tensor, [rows * unit for unit in units]), strict=True)


def _piece(
    name: str, view: torch.Tensor, dimension: int, stored: int | None, ranks: _Ranks
) -> torch.Tensor | LiveSlice | None:
    """Return the part of a stored tensor that ``view`` holds, without padding; None if all of it is padding."""
    shares, index = ranks.share(name)
    length = view.shape[dimension]
    extent, start = length * shares if stored is None else stored, length * index
    if extent > length * shares:
        raise _unfit(f"{extent} stored rows do not fit into {shares} × {length}", name, "check padded= and tp_size=")
    size = min(length, extent - start)
    if size <= 0:
        return None
    local = view.narrow(dimension, 0, size)
    if size == extent:
        return local
    shape, begin = list(view.shape), [0] * view.ndim
    shape[dimension], begin[dimension] = extent, start
    return LiveSlice(tuple(shape), Box(tuple(begin), tuple(local.shape)), local)


def _first_match(name: str, table: Mapping[str, int]) -> int | None:
    return next((value for pattern, value in table.items() if fnmatchcase(name, pattern)), None)


def _unfit(what: str, name: str, hint: str) -> ConfigError:
    return ConfigError(what, where=name or "engine_views(…)", hint=hint)
