"""torchdata's ``nodes.Loader``: what it keeps too long. Both would repeat batches after a resume (torchdata 0.11)."""

from __future__ import annotations


def drop_iterator(loader: object) -> None:
    """Drop the iterator that its ``state_dict()`` created: the next pass would take it, and ignore a state that was loaded since."""
    if getattr(loader, "_iter_for_state_dict", None) is True:
        loader._it, loader._iter_for_state_dict = None, False  # type: ignore[attr-defined]


def drop_stale_state(loader: object) -> None:
    """Drop the state of an earlier place.

    It keeps the state before a batch that it reads ahead. If there is no such batch, as after a resume at the end of a pass, that state
    would be returned by every later ``state_dict()``.
    """
    iterator = getattr(loader, "_it", None)
    if getattr(iterator, "_cached_state_dict", None) is not None and getattr(iterator, "_cached_item", None) is None:
        iterator._cached_state_dict = None  # type: ignore[union-attr]
