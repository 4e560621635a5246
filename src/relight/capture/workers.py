"""Random numbers inside persistent workers: seeded again for each epoch, with a seed that a resume can compute.

Persistent workers keep their generators from epoch to epoch, where no other process can read them. A watched loader
therefore seeds them again whenever an epoch after their first begins, from the seed with which they started and the
number of epochs since. The seed is sent in a message that workers get anyway. Its seed field,
unused for map-style data, carries an object that seeds when unpickled.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader, get_worker_info

from relight.torch_private.loaders import numpy_seed

_init: Callable[[int], Any] | None = None
"""In a worker: its loader's ``worker_init_fn``."""


def seed_of(base: int, age: int) -> int:
    """Return the seed of the epoch ``age`` epochs after the one in which the workers started with ``base``."""
    if age == 0:
        return base
    generator = torch.Generator().manual_seed((base + age * 0x9E3779B97F4A7C15) % 2**63)
    return int(torch.empty((), dtype=torch.int64, device="cpu").random_(generator=generator).item())


class Reseed:
    """Replaces a shared seed: seeds the worker that unpickles it, and is None there."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def __reduce__(self) -> tuple[Any, ...]:
        return (_reseed, (self._seed,))


def _reseed(base: int) -> None:
    """Seed like torch's worker does with its base seed at its start. Does nothing outside a worker."""
    info = get_worker_info()
    if info is None:
        return
    seed = base + info.id
    random.seed(seed)
    torch.manual_seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(numpy_seed(base, info.id))
    object.__setattr__(info, "seed", seed)
    if _init is not None:
        _init(info.id)


def _remember_init(init: Callable[[int], Any], worker: int) -> None:
    global _init
    _init = init
    init(worker)


@contextmanager
def init_worker(loader: DataLoader[Any], base: int | None, age: int) -> Iterator[None]:
    """Prepare the loader while its iterator is created: workers know their ``worker_init_fn`` and are seeded for ``age``.

    After their first epoch the seed is not drawn from the loader's generator: in the uninterrupted run the workers were
    alive, and no seed was drawn.
    """
    init, generator = loader.worker_init_fn, loader.generator
    if init is not None:
        loader.worker_init_fn = partial(_remember_init, init)
    if base is not None and age:
        loader.generator = torch.Generator().manual_seed((base + age * 0x9E3779B97F4A7C15) % 2**63)
    try:
        yield
    finally:
        loader.worker_init_fn, loader.generator = init, generator
