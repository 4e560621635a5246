"""Facts of many ordinary tensors, one pass in C for each fact: calling Python functions for each of 100,000 tensors takes seconds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import compress
from operator import attrgetter
from typing import NamedTuple

import torch

from relight.capture.tensors import USUAL, dtype_name

_Tensor = torch.Tensor
_shape, _dtype, _device, _layout, _itemsize = map(attrgetter, ("shape", "dtype", "device", "layout", "itemsize"))
_is_meta, _is_nested, _is_quantized = map(attrgetter, ("is_meta", "is_nested", "is_quantized"))
_address, _bytes = torch.UntypedStorage.data_ptr, torch.UntypedStorage.nbytes


class PlainTensor(NamedTuple):
    """A tensor that is contiguous: its memory, in order, is its value. ``key``: see ``tensors.identity``."""

    live: torch.Tensor
    """The tensor itself. It stays alive, so no other object gets its ``id``."""
    detached: torch.Tensor
    key: tuple[object, ...]
    dtype: str


def plain_tensors(values: Iterable[object]) -> dict[int, PlainTensor]:
    """Return the plain ones among ``values``, by ``id``: of torch's own classes, strided, contiguous, with elements, all in their storage.

    Other values are left out: each needs its own treatment. Cost: 2 to 3 µs a tensor.
    """
    usual = [value for value in values if isinstance(value, _Tensor) and type(value) in USUAL]
    ordinary = _where(
        usual,
        [
            layout is torch.strided and not (meta or nested or quantized)
            for layout, meta, nested, quantized in zip(
                map(_layout, usual), map(_is_meta, usual), map(_is_nested, usual), map(_is_quantized, usual)
            )
        ],
    )
    ordinary = _where(
        ordinary,
        [
            contiguous and elements > 0 and not (conj or neg)
            for contiguous, elements, conj, neg in zip(
                map(_Tensor.is_contiguous, ordinary),
                map(_Tensor.numel, ordinary),
                map(_Tensor.is_conj, ordinary),
                map(_Tensor.is_neg, ordinary),
            )
        ],
    )
    storages = list(map(_Tensor.untyped_storage, ordinary))
    offsets, names = list(map(_Tensor.storage_offset, ordinary)), list(map(dtype_name, map(_dtype, ordinary)))
    keys = zip(
        map(_address, storages),
        offsets,
        map(_shape, ordinary),
        map(_Tensor.stride, ordinary),
        map(_dtype, ordinary),
        map(_device, ordinary),
    )
    whole = [
        (offset + elements) * size <= length and name is not None
        for offset, elements, size, length, name in zip(
            offsets, map(_Tensor.numel, ordinary), map(_itemsize, ordinary), map(_bytes, storages), names
        )
    ]
    facts = map(PlainTensor, ordinary, map(_Tensor.detach, ordinary), keys, names)  # type: ignore[arg-type]
    return dict(compress(zip(map(id, ordinary), facts), whole))


def _where(tensors: Sequence[torch.Tensor], kept: Sequence[bool]) -> list[torch.Tensor]:
    return list(compress(tensors, kept))
