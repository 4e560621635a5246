"""Units of a loader's position: the meaning of a count of batches, and which settings changed since it was stored."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, IterableDataset

SHUFFLED = ("RandomSampler", "DistributedSampler", "StatefulDistributedSampler", "SeedableRandomSampler")
"""Samplers with an order that depends on the length of the data."""
_NAMES = {
    "batch_size": "batch size",
    "drop_last": "drop_last",
    "length": "samples",
    "workers": "workers",
    "sampler": "sampler",
    "batch_sampler": "batch sampler",
    "seed": "seed",
    "stream": "data set is a stream",
}


def core_of(loader: DataLoader[Any]) -> DataLoader[Any]:
    """Return the loader that creates the iterator: Accelerate's loaders iterate over one that they hold."""
    inner = loader.__dict__.get("base_dataloader", loader)
    return inner if isinstance(inner, DataLoader) else loader


def own_sampler(sampler: Any) -> Any:
    """Return the original sampler, if a rest of its order has replaced it."""
    return (
        sampler.sampler
        if type(sampler).__name__ in ("RemainderSampler", "RemainingSamples") and hasattr(sampler, "leave")
        else sampler
    )


def units_of(loader: DataLoader[Any]) -> dict[str, Any]:
    """Return batch size, length, number of workers, samplers and seed, as plain values. About 5 µs; reads no sample."""
    core = core_of(loader)
    stream = isinstance(core.dataset, IterableDataset)
    batches = core.batch_sampler
    sampler = own_sampler(getattr(batches, "sampler", None) if batches is not None else core.sampler)
    size = core.batch_size if core.batch_size is not None or batches is None else getattr(batches, "batch_size", None)
    seed = getattr(sampler, "seed", getattr(sampler, "initial_seed", None))
    return {
        "stream": stream,
        "batch_size": size if isinstance(size, int) else None,
        "drop_last": bool(getattr(batches, "drop_last", core.drop_last)),
        "length": None if stream else _length(sampler, core.dataset),
        "workers": int(core.num_workers),
        "sampler": None if stream or sampler is None else type(sampler).__name__,
        "batch_sampler": type(batches).__name__ if batches is not None and not stream else None,
        "seed": seed if isinstance(seed, int) else None,
        "shuffle": getattr(sampler, "shuffle", None) if isinstance(getattr(sampler, "shuffle", None), bool) else None,
    }


def has_shuffle_buffer(dataset: object) -> bool:
    """Return whether a stream of Hugging Face's ``datasets`` shuffles in a buffer.

    Its ``state_dict`` leaves the buffer out: a restore loses the samples in it, and continues in another order.
    """
    parts = [getattr(dataset, "_ex_iterable", None)]
    while parts:
        part = parts.pop()
        if type(part).__name__ == "BufferShuffledExamplesIterable":
            return True
        if part is not None:
            parts += [getattr(part, "ex_iterable", None), *getattr(part, "ex_iterables", ())]
    return False


def cuts_plainly(batches: object) -> bool:
    """Return whether a batch sampler only cuts its sampler's order into batches."""
    return isinstance(batches, BatchSampler) and type(batches).__iter__.__module__ in (
        "torch.utils.data.sampler",
        "torchdata.stateful_dataloader.sampler",
    )


def changed(stored: Mapping[str, Any], live: Mapping[str, Any]) -> list[str]:
    """Return each setting that changed, as ``batch size 4 → 8``."""
    return [
        f"{_NAMES[name]} {_shown(stored[name])} → {_shown(live[name])}"
        for name in _NAMES
        if name in stored and stored[name] != live[name]
    ]


def reordered(stored: Mapping[str, Any], live: Mapping[str, Any]) -> bool:
    """Return whether the order of samples certainly differs: a shuffle of another length, or with another seed."""
    if stored.get("sampler") not in SHUFFLED or live["sampler"] not in SHUFFLED or stored.get("shuffle") is False:
        return False
    return stored.get("length") != live["length"] or (live["shuffle"] is True and stored.get("seed") != live["seed"])


def _length(sampler: Any, dataset: Any) -> int | None:
    for source in (getattr(sampler, "data_source", None), getattr(sampler, "dataset", None), dataset):
        try:
            return len(source)  # type: ignore[arg-type]
        except TypeError:  # None, or an object without a length
            continue
    return None


def _shown(value: object) -> str:
    return "none" if value is None else str(value)
