"""Data loaders: where they are, and how they get there again.

A loader that can tell its position (torchdata's ``StatefulDataLoader``) is asked. A plain ``DataLoader`` is watched: what it delivered
in this epoch is counted, and the generators as they were when the epoch began are kept. Repositioning then makes the epoch's iterator
from the same generators (same permutation, same worker seeds), takes as many batches as were delivered, and throws them away.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader

from relight.capture import rng as generators
from relight.errors import IncompatibleState

Observe = Callable[[Any], None]
_ATTRIBUTE = "_relight_watch"
_warned = False


class _Watch:
    """What is known of one watched loader."""

    def __init__(self, original: type) -> None:
        self.original = original
        self.active = False
        self.delivered = 0
        self.epochs = 0
        self.start: dict[str, Any] | None = None
        self.pending: dict[str, Any] | None = None
        self.resume_rng: dict[str, Any] | None = None
        self.observe: Observe | None = None


class _Batches:
    """An epoch's iterator that counts what it delivers. Everything else is the loader's own iterator's."""

    def __init__(self, inner: Iterator[Any], watch: _Watch) -> None:
        self._inner, self._watch, self._epoch = inner, watch, watch.epochs

    def __iter__(self) -> _Batches:
        return self

    def __next__(self) -> Any:
        watch = self._watch
        try:
            batch = next(self._inner)
        except StopIteration:
            if watch.epochs == self._epoch:
                watch.active = False
            raise
        if watch.epochs == self._epoch:
            watch.delivered += 1
        if watch.observe is not None:
            watch.observe(batch)
        return batch

    def __len__(self) -> int:
        return len(self._inner)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def tells_position(loader: DataLoader[Any]) -> bool:
    """Whether the loader has a state of its own."""
    return callable(getattr(loader, "state_dict", None)) and callable(getattr(loader, "load_state_dict", None))


def watch_loaders(components: Mapping[str, object]) -> None:
    """Begin to watch the plain loaders among the components."""
    for value in components.values():
        if isinstance(value, DataLoader) and not tells_position(value):
            _watch(value)


def observe_batches(components: Mapping[str, object], observe: Observe) -> None:
    """Have ``observe(batch)`` called for every batch that any loader among the components delivers."""
    for value in components.values():
        if isinstance(value, DataLoader):
            _watch(value).observe = observe


def unwatch_loaders(components: Mapping[str, object]) -> None:
    """Give the loaders their own class back."""
    for value in components.values():
        watch = value.__dict__.get(_ATTRIBUTE) if isinstance(value, DataLoader) else None
        if watch is not None:
            value.__class__ = watch.original
            del value.__dict__[_ATTRIBUTE]


def _watch(loader: DataLoader[Any]) -> _Watch:
    known = loader.__dict__.get(_ATTRIBUTE)
    if known is not None:
        return known  # type: ignore[no-any-return]
    original = type(loader)
    watch = _Watch(original)

    def __iter__(self: DataLoader[Any]) -> Any:
        return _Batches(_begin(self, watch), watch)

    loader.__dict__[_ATTRIBUTE] = watch
    loader.__class__ = type(original.__name__, (original,), {"__iter__": __iter__, "__module__": original.__module__})
    return watch


def _begin(loader: DataLoader[Any], watch: _Watch) -> Iterator[Any]:
    plain_iter: Callable[[DataLoader[Any]], Iterator[Any]] = watch.original.__iter__  # type: ignore[attr-defined]
    if tells_position(loader):
        return plain_iter(loader)
    pending, watch.pending = watch.pending, None
    if pending is None or not pending["active"]:
        watch.start = _epoch_start(loader)
        watch.active, watch.delivered, watch.epochs = True, 0, watch.epochs + 1
        return plain_iter(loader)
    after = watch.resume_rng or generators.host_states()
    watch.resume_rng = None
    start = pending["start"]
    if loader.persistent_workers and loader.num_workers and pending["epochs"] > 1 and getattr(loader, "_iterator", None) is None:
        plain_iter(loader)  # an epoch behind the first one resets the iterator that is there, and draws fewer numbers for it
    _restore_epoch_start(loader, start)
    inner = plain_iter(loader)
    _warn(pending["delivered"])
    for _ in range(pending["delivered"]):
        next(inner)
    generators.restore_host(after)
    watch.start, watch.active, watch.delivered, watch.epochs = start, True, pending["delivered"], pending["epochs"]
    return inner


def loader_state(loader: DataLoader[Any]) -> dict[str, Any]:
    """Where the loader is, as a tree."""
    if tells_position(loader):
        return {"own": loader.state_dict()}  # type: ignore[attr-defined]
    watch = loader.__dict__.get(_ATTRIBUTE)
    if watch is None:
        watch = _watch(loader)
    if watch.pending is not None:
        return {"counted": watch.pending}
    start = watch.start if watch.active else None
    return {"counted": {"active": watch.active, "delivered": watch.delivered, "epochs": watch.epochs, "start": start}}


def restore_loader(loader: DataLoader[Any], state: Mapping[str, Any]) -> None:
    """Reposition; takes effect at the next ``iter(loader)``. To be called before the generators are restored."""
    if tells_position(loader) != ("own" in state):
        raise IncompatibleState(
            f"the checkpoint's loader {'could' if 'own' in state else 'could not'} tell its position, this one "
            f"{'can' if tells_position(loader) else 'cannot'}",
            hint="use the kind of loader the run was saved with, or restore with only= and leave it out",
        )
    if "own" in state:
        loader.load_state_dict(state["own"])  # type: ignore[attr-defined]
        # Make the iterator now: made at the next iter() it would draw its seed from generators that are restored by then.
        if state["own"]:
            loader.state_dict()  # type: ignore[attr-defined]
        return
    _watch(loader).pending = dict(state["counted"])


def remember_rng(loader: DataLoader[Any]) -> None:
    """After the generators were restored: what they are to be once the skipping has used them."""
    watch = loader.__dict__.get(_ATTRIBUTE)
    if watch is not None and watch.pending is not None:
        watch.resume_rng = generators.host_states()


def loader_notes(name: str, loader: Any) -> list[str]:
    """What cannot be carried over."""
    notes = []
    if loader.num_workers and tells_position(loader) and not hasattr(loader.dataset, "state_dict"):
        notes.append(
            f"{name}: random numbers drawn inside the workers are not captured; derive them from the sample's index, "
            "or use a plain DataLoader"
        )
    if loader.num_workers and loader.persistent_workers and not tells_position(loader):
        notes.append(f"{name}: random numbers drawn inside persistent workers start afresh on resume in a later epoch")
    return notes


def _epoch_start(loader: DataLoader[Any]) -> dict[str, Any]:
    own = {place: generator.get_state() for place, generator in _own_generators(loader).items()}
    epoch = getattr(loader.sampler, "epoch", None)
    return {"rng": generators.host_states(), "own": own, "epoch": epoch if isinstance(epoch, int) else None}


def _restore_epoch_start(loader: DataLoader[Any], start: Mapping[str, Any]) -> None:
    for place, generator in _own_generators(loader).items():
        if place in start["own"]:
            generator.set_state(start["own"][place])
    if start["epoch"] is not None and hasattr(loader.sampler, "set_epoch"):
        loader.sampler.set_epoch(start["epoch"])
    generators.restore_host(start["rng"])


def _own_generators(loader: DataLoader[Any]) -> dict[str, torch.Generator]:
    places = {"loader": loader, "sampler": loader.sampler, "batch_sampler": loader.batch_sampler}
    found = {place: getattr(value, "generator", None) for place, value in places.items()}
    return {place: generator for place, generator in found.items() if isinstance(generator, torch.Generator)}


def _warn(delivered: int) -> None:
    global _warned
    if not _warned and delivered:
        _warned = True
        warnings.warn(
            f"a plain DataLoader cannot tell its position: repositioning by a counted, seeded skip of {delivered} batches; "
            "torchdata's StatefulDataLoader would not need to read them again",
            stacklevel=4,
        )
