"""Random numbers inside persistent workers: begun anew each epoch from a number that a resume can find again.

Persistent workers keep their generators from epoch to epoch, where nobody outside can read them. A watched loader therefore seeds them
again whenever an epoch behind their first begins, from the seed they were born with and the count of epochs since. The order is a
message they get anyway (``_ResumeIteration``): its seed field, unused for map-style data, carries an object that seeds when unpickled.
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
from torch.utils.data._utils import worker as torch_worker

_init: Callable[[int], Any] | None = None
"""In a worker: its loader's ``worker_init_fn``."""


def persistent(loader: DataLoader[Any]) -> bool:
    """Whether the loader keeps its workers between epochs."""
    return bool(loader.persistent_workers and loader.num_workers and hasattr(loader, "_iterator"))


def seed_of(base: int, age: int) -> int:
    """The seed of the epoch that is ``age`` behind the one the workers were born in with ``base``."""
    if age == 0:
        return base
    generator = torch.Generator().manual_seed((base + age * 0x9E3779B97F4A7C15) % 2**63)
    return int(torch.empty((), dtype=torch.int64, device="cpu").random_(generator=generator).item())


class Reseed:
    """In place of a shared seed: seeds the worker that unpickles it, and is None from then on."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def __reduce__(self) -> tuple[Any, ...]:
        return (_reseed, (self._seed,))


def _reseed(base: int) -> None:
    """What torch's worker does with its base seed when it starts; in any process but a worker, nothing."""
    info = get_worker_info()
    if info is None:
        return
    seed = base + info.id
    random.seed(seed)
    torch.manual_seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(torch_worker._generate_state(base, info.id))  # type: ignore[no-untyped-call]
    object.__setattr__(info, "seed", seed)
    if _init is not None:
        _init(info.id)


def _remember_init(init: Callable[[int], Any], worker: int) -> None:
    global _init
    _init = init
    init(worker)


@contextmanager
def init_worker(loader: DataLoader[Any], base: int | None, age: int) -> Iterator[None]:
    """While the iterator is made: workers that know their ``worker_init_fn``, seeded for ``age``. Behind their first epoch the seed is not
    drawn from the loader's generator, as the uninterrupted run, whose workers were alive, did not draw one."""
    init, generator = loader.worker_init_fn, loader.generator
    if init is not None:
        loader.worker_init_fn = partial(_remember_init, init)
    if base is not None and age:
        loader.generator = torch.Generator().manual_seed((base + age * 0x9E3779B97F4A7C15) % 2**63)
    try:
        yield
    finally:
        loader.worker_init_fn, loader.generator = init, generator
