"""torchdata's ``StatefulDataLoader``: the keys of its state, and counts of its iterator.

The keys are a format rather than private names: states with them are in checkpoints, also in those of other tools.
A state without them is loaded as a whole, and not examined.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from relight.torch_private.loaders import worker_iterator
from relight.torch_private.names import SUPPORTED, TorchName, report

_TORCHDATA = "torchdata.stateful_dataloader.stateful_dataloader"
_COUNTS = tuple(
    TorchName(
        owner,
        name,
        "corrects the count of batches that torchdata doubles if the data has no state",
        "the count stays as torchdata has it",
        seen,
    )
    for owner, name, seen in (
        ("torch.utils.data.dataloader:_BaseDataLoaderIter", "_num_yielded", SUPPORTED),
        (f"{_TORCHDATA}:_StatefulBaseDataLoaderIter", "_sampler_iter_yielded", "torchdata 0.11"),
    )
)
NAMES = _COUNTS
_SNAPSHOT, _MAIN, _WORKERS = "_snapshot", "_main_snapshot", "_worker_snapshots"
"""The state of a loader with workers: at the last snapshot, of the main process and of each worker."""


def makes_ahead(loader: Any) -> bool:
    """Return whether this is torchdata's loader: its ``state_dict`` creates an iterator."""
    return hasattr(loader, "next_iter_state") and hasattr(loader, "_iterator")


def is_fresh(loader: Any) -> bool:
    """Return whether this is torchdata's loader without an iterator or a state for its next one."""
    return makes_ahead(loader) and worker_iterator(loader) is None and loader.next_iter_state is None


def select_iterator(loader: Any, iterator: Any) -> None:
    """Make torchdata's loader return the state of ``iterator``, which it made, in place of that of its newest one."""
    if makes_ahead(loader) and hasattr(iterator, "state_dict"):
        loader._iterator = iterator


def is_in_pass(state: Any) -> bool:
    """Return whether a loader stored the state between the first and the last batch of its data."""
    return isinstance(state, Mapping) and state.get("_iterator_finished") is not True


def has_no_data_state(state: Any) -> bool:
    """Return whether a loader stored no state of its data."""
    if not isinstance(state, Mapping):
        return False
    if _SNAPSHOT in state:
        snapshots = state[_SNAPSHOT].get(_WORKERS, {})
        return bool(snapshots) and all(has_no_data_state(snapshot) for snapshot in snapshots.values())
    fetcher = state.get("_fetcher_state", state.get("fetcher_state", state))
    if not isinstance(fetcher, Mapping):
        return False
    data = state.get("_dataset_state", state.get("dataset_state"))
    return (
        data is None
        and fetcher.get("_dataset_iter_state", fetcher.get("dataset_iter_state")) is None
        and fetcher is not state
    )


def sampler_state(state: Any) -> tuple[Any, int]:
    """Return the state of a loader's sampler at its last snapshot, and the number of batches since."""
    if not isinstance(state, Mapping):
        return None, 0
    return state.get(_SNAPSHOT, {}).get(_MAIN, state).get("_sampler_iter_state"), state.get("_steps_since_snapshot", 0)


def correct_counts(loader: Any, state: Any) -> None:
    """Correct the counts of a loader's new iterator, made from ``state``.

    If the data has no state, torchdata counts skipped batches twice, so the next save would be too far ahead.
    """
    report(*_COUNTS)
    iterator, inner = worker_iterator(loader), state.get(_SNAPSHOT, state)
    yielded, sampled = (each.name for each in _COUNTS)
    for key, name in ((yielded, yielded), ("_snapshot_step", yielded), (sampled, sampled)):
        if key in inner and getattr(iterator, name, None) == 2 * inner[key]:
            setattr(iterator, name, inner[key])
