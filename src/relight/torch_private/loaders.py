"""Data loaders: persistent workers, the order of samples, handlers of signals in worker processes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import import_module
from typing import Any

from torch.utils.data import DataLoader

from relight.torch_private.names import TorchName, all_exist, report

_LOADER = "torch.utils.data"
_ITERATOR, _BASE_SEED, _SHARED_SEED = (
    TorchName(
        owner,
        name,
        use,
        "random numbers in persistent workers continue differently after a resume: use persistent_workers=False",
    )
    for owner, name, use in (
        (f"{_LOADER}:DataLoader", "_iterator", "the iterator with the persistent workers"),
        (f"{_LOADER}.dataloader:_BaseDataLoaderIter", "_base_seed", "the seed with which the workers started"),
        (f"{_LOADER}.dataloader:_BaseDataLoaderIter", "_shared_seed", "carries the seed of an epoch to the workers"),
    )
)
_INDEX_SAMPLER = TorchName(
    f"{_LOADER}:DataLoader",
    "_index_sampler",
    "records which samples a loader delivers",
    "a resume under other settings reads data again or begins the training epoch from its start",
)
_GENERATE = TorchName(
    f"{_LOADER}._utils.worker",
    "_generate_state",
    "the seed that a worker gives numpy",
    "numpy's SeedSequence computes the same numbers",
)
WORKER_LOOP = "_worker_loop"
WORKER_LOOPS = (
    (f"{_LOADER}._utils.worker", WORKER_LOOP),
    ("torchdata.stateful_dataloader.stateful_dataloader", WORKER_LOOP),
)
"""The functions that loaders give to their worker processes, as module and name."""
_SIGNALS = (
    TorchName(
        f"{_LOADER}._utils.worker",
        WORKER_LOOP,
        "the function of worker processes, which installs handlers of signals",
        "a signal to the process group ends workers before the last save",
    ),
    TorchName(
        f"{_LOADER}._utils.signal_handling",
        "_set_worker_signal_handlers",
        "handlers of signals are installed after torch's own",
        "a signal to the process group ends workers before the last save",
    ),
)
_PERSISTENT = (_ITERATOR, _BASE_SEED, _SHARED_SEED)
_has_persistent = all_exist(_PERSISTENT)
_has_index_sampler = isinstance(vars(DataLoader).get("_index_sampler"), property)


def has_persistent_workers(loader: DataLoader[Any]) -> bool:
    """Return whether the loader keeps its workers between epochs, so that they must be seeded again."""
    if not (loader.persistent_workers and loader.num_workers):
        return False
    if not _has_persistent:
        report(*_PERSISTENT)
    return _has_persistent and hasattr(loader, "_iterator")


def worker_iterator(loader: Any) -> Any:
    """Return the iterator that a loader keeps between epochs; None if it has none."""
    return getattr(loader, "_iterator", None)


def forget_iterator(loader: Any) -> None:
    """Have a loader make a new iterator, with new workers, for its next epoch."""
    loader._iterator = None


def base_seed(iterator: Any) -> int:
    """Return the seed with which an iterator's workers started."""
    return int(iterator._base_seed)


def set_shared_seed(iterator: Any, seed: object) -> None:
    """Set what an iterator sends to its workers when an epoch begins: unused for map-style data."""
    iterator._shared_seed = seed


def numpy_seed(base: int, worker: int) -> Sequence[int]:
    """Return the seed that torch gives numpy's legacy generator in a worker."""
    generate = getattr(sys.modules.get(f"{_LOADER}._utils.worker"), "_generate_state", None)
    if generate is not None:
        return generate(base, worker)  # type: ignore[no-any-return]
    report(_GENERATE)
    import numpy as np

    low, high = base & 0xFFFFFFFF, base >> 32
    return [int(number) for number in np.random.SeedSequence([worker, low, high, 0]).generate_state(4)]


def with_index_sampler(kind: type, replaced: Callable[[Any], Any]) -> type | None:
    """Return a subclass of a loader's class with indices from ``replaced(index sampler)``; None if unknown."""
    if not _has_index_sampler:
        report(_INDEX_SAMPLER)
        return None

    def _index_sampler(self: Any) -> Any:
        return replaced(super(changed, self)._index_sampler)  # type: ignore[misc,arg-type]

    namespace = {"_index_sampler": property(_index_sampler), "__module__": kind.__module__}
    changed = type(kind.__name__, (kind,), namespace)
    return changed


def report_unprotected_workers() -> None:
    """Emit a warning if handlers of signals cannot be installed in worker processes."""
    report(*_SIGNALS)


def after_worker_handlers(action: Callable[[], None]) -> None:
    """Have ``action`` called in this worker process each time torch has installed its handlers of signals."""
    with suppress(ImportError, AttributeError):  # another version of torch: the worker runs unprotected
        signal_handling: Any = import_module(f"{_LOADER}._utils.signal_handling")
        install = signal_handling._set_worker_signal_handlers

        def install_both(*given: Any) -> Any:
            result = install(*given)
            action()
            return result

        signal_handling._set_worker_signal_handlers = install_both


NAMES = (*_PERSISTENT, _INDEX_SAMPLER, _GENERATE, *_SIGNALS)
