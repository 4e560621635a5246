"""Data loaders: capture their positions, and restore them.

If a loader has ``state_dict`` (torchdata's ``StatefulDataLoader``), that is its position. A plain ``DataLoader`` is
watched: the batches that it delivered in this epoch are counted, and the generators' states at the start of the epoch
are kept. A restore creates the epoch's iterator from the same generators (same permutation, same worker seeds), takes
the batches that were delivered, and drops them.

If another number of ranks resumes, a loader may continue with its shard of the rest of the epoch: see
``sampler_shards``.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import chain
from math import isfinite
from time import perf_counter
from typing import Any

import msgspec
from torch.utils.data import DataLoader

from relight.capture import rng as generators
from relight.capture.delivered import Position
from relight.capture.loader_watch import (
    ATTRIBUTE,
    CLASS,
    END,
    Epoch,
    LoaderPass,
    Observe,
    OpenPasses,
    WatchedLoader,
    batches_in,
    epoch_number,
    epoch_start,
    is_stateful,
    leave_indices,
    leave_rest,
    loader_of,
    make_iterator,
    note_indices,
    own_generators,
    own_states,
    place_of,
    restore_epoch_start,
    set_epoch_number,
    set_own_states,
    set_wrapper_epoch,
)
from relight.capture.pace import LoaderPace
from relight.capture.reposition import WAYS, attempts_of, by_samples, drop, reposition, resumed
from relight.capture.sampler_shards import SamplerPosition, position_tree, rest_in, sharded_sampler_of
from relight.capture.units import changed, core_of, has_shuffle_buffer, reordered, units_of
from relight.errors import ConfigError, IncompatibleState
from relight.observe import emit
from relight.torch_private.loaders import forget_iterator, has_persistent_workers
from relight.torch_private.torchdata import (
    correct_counts,
    has_no_data_state,
    is_fresh,
    is_in_pass,
    makes_ahead,
    select_iterator,
)

__all__ = [
    "leave_epoch", "loader_doubts", "loader_notes", "loader_of", "loader_state", "loader_unfit", "observe_batches",
    "own_generators", "position_in", "remember_rng", "report_steps", "reset_position", "rest_state", "restore_loader",
    "unwatch_loaders", "used", "watch_loaders"]  # fmt: skip
_TIMED_OUT = re.compile("DataLoader timed out")
KEPT, KEPT_S, KEPT_TRIES = 16, 1e-3, 3
"""Positions of a stateful loader that are kept until the loop's pace is known; seconds that one ``state_dict`` may take, best of 3."""


class _Batches:
    """An epoch's iterator that counts delivered batches, and forwards everything else to the loader's iterator."""

    def __init__(self, inner: Iterator[Any], watch: WatchedLoader, epoch: Epoch, own: DataLoader[Any] | None) -> None:
        """``own``: the loader, if it has a ``state_dict``."""
        self._inner, self._watch, self._epoch = inner, watch, epoch
        self._queue, self._own = watch.queue, own
        selects = (lambda: None) if own is None else partial(select_iterator, own, inner)
        self.loader_pass = LoaderPass(epoch, watch.pace, watch.epochs, selects)

    def __iter__(self) -> _Batches:
        return self

    def __next__(self) -> Any:
        if self._epoch.first is None:
            self._epoch.first = generators.host_states()
        try:
            batch = next(self._inner)
        except StopIteration:
            self._epoch.over = True
            if self._watch.epoch is self._epoch:
                self._watch.pace.over = True
                leave_rest(self._watch)
                _notice_short(self._watch, self._epoch)
            raise
        except Exception as error:  # the loop may leave this batch out, and take the next one
            if not _TIMED_OUT.match(str(error)):  # then the next one is the same batch
                with self._watch.lock:
                    self._count_failed()
            raise
        with self._watch.lock:  # a prefetcher may take batches in another thread than the one that saves
            self._count(batch)
        for observe in self._watch.observe:
            observe(batch)
        return batch

    def _count_failed(self) -> None:
        if self._epoch.position is not None and self._own is None:
            self._queue = self._watch.queue if self._queue is None else self._queue
            self._epoch.position.add_failed(self._queue.popleft() if self._queue else None)

    def _count(self, batch: Any) -> None:
        epoch, watch = self._epoch, self._watch
        if watch.epoch is not epoch and watch.pending is None and self.loader_pass in watch.passes:
            watch.interleaved = watch.interleaved or watch.passes.has(watch.epoch)
            watch.resume_pass(self.loader_pass)
        epoch.delivered += 1
        self.loader_pass.delivered_at, self.loader_pass.assumed = watch.reports, False
        position = epoch.position
        if position is not None and self._own is None:
            if self._queue is None:  # a generator creates the iterator at its first batch
                self._queue = watch.queue
            if self._queue:
                position.add_indices(*self._queue.popleft())
            elif epoch.units is not None and epoch.units["stream"]:
                position.add_batch(batch)
            else:
                epoch.position = None  # its indices cannot be seen
        elif position is not None and epoch.units is not None and epoch.units["stream"]:
            position.add_batch(batch)
        if watch.epoch is epoch:
            watch.pace.take(batch)
        if self._own is not None and watch.kept is not None:
            _keep_own_state(self._own, watch)

    def __len__(self) -> int:
        return len(self._inner)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def watch_loaders(components: Mapping[str, object], user: object = None) -> None:
    """Begin to watch the loaders among the components, until ``unwatch_loaders`` was called for each ``user``."""
    for name, value in components.items():
        if isinstance(value, DataLoader):
            watch = _watch(value)
            watch.name = name
            if user is not None:
                watch.users.add(user)


def observe_batches(components: Mapping[str, object], observe: Observe) -> None:
    """Have ``observe(batch)`` called for every batch that any loader among the components delivers."""
    for value in components.values():
        if isinstance(value, DataLoader):
            _watch(value).observe.append(observe)


def unwatch_loaders(components: Mapping[str, object], user: object = None) -> None:
    """Restore the classes of the loaders that no other user needs watched."""
    for value in components.values():
        watch = value.__dict__.get(ATTRIBUTE) if isinstance(value, DataLoader) else None
        if watch is not None and watch.users.remove(user):
            leave_rest(watch)
            leave_indices(value)  # type: ignore[arg-type]
            CLASS.__set__(value, watch.original)
            del value.__dict__[ATTRIBUTE]


def _watch(loader: DataLoader[Any]) -> WatchedLoader:
    known = loader.__dict__.get(ATTRIBUTE)
    if known is not None:
        return known  # type: ignore[no-any-return]
    original = type(loader)
    watch = WatchedLoader(original)
    watch.kept = deque(maxlen=KEPT) if is_stateful(loader) else None

    def __iter__(self: DataLoader[Any]) -> Any:
        inner, epoch = _begin(self, watch)
        batches = _Batches(inner, watch, epoch, self if is_stateful(self) else None)
        if not has_persistent_workers(self):  # with them, a new pass ends the one before
            watch.passes.add(batches.loader_pass)
        return batches

    loader.__dict__[ATTRIBUTE] = watch
    note_indices(loader, watch)
    CLASS.__set__(
        loader, type(original.__name__, (type(loader),), {"__iter__": __iter__, "__module__": original.__module__})
    )
    return watch


def _begin(loader: DataLoader[Any], watch: WatchedLoader) -> tuple[Iterator[Any], Epoch]:
    """Return the next iterator.

    If nothing is left of an interrupted epoch and the caller is at another epoch, the interrupted one counts as ended.
    """
    pending, number = watch.pending, epoch_number(loader)
    inner, epoch = _next(loader, watch)
    total = batches_in(loader)
    if pending is None or number == epoch.start["epoch"] or (isfinite(total) and attempts_of(pending) < total):
        return inner, epoch
    first = next(inner, END)
    if first is not END:
        return chain((first,), inner), epoch
    set_epoch_number(loader, number)
    return _next(loader, watch)


def _next(loader: DataLoader[Any], watch: WatchedLoader) -> tuple[Iterator[Any], Epoch]:
    """Return the next iterator: of a new epoch, of the interrupted epoch, or of these ranks' shard of its rest."""
    watch.unknown = watch.interleaved = False
    earlier, watch.earlier = watch.epoch, None
    watch.pace = LoaderPace(watch.pace)
    if watch.pace.owed:
        watch.earlier = earlier
    pending, watch.pending = watch.pending, None
    if pending is not None:
        if is_stateful(loader) and not watch.reread and not by_samples(loader, pending):
            watch.epoch = resumed(pending, watch, loader)
            watch.resumed_at, watch.own_state = watch.epoch.delivered, None
            return watch.original.__iter__(loader), watch.epoch  # type: ignore[attr-defined]
        resumed_pass = reposition(loader, watch, pending)
        watch.reread, watch.own_state = False, None
        if resumed_pass is not None:
            return resumed_pass
    begins = _begin_rest(loader, watch)
    uncounted, watch.uncounted = watch.uncounted, False
    epoch = Epoch(epoch_start(loader), begins=begins, units=None if uncounted else units_of(loader))
    watch.epoch, watch.epochs, watch.queue = epoch, watch.epochs + 1, None
    if not uncounted and (not is_stateful(loader) or epoch.units["stream"]):  # type: ignore[index]
        epoch.position = Position()
    return (watch.original.__iter__(loader) if is_stateful(loader) else make_iterator(loader, watch)), epoch  # type: ignore[attr-defined]


def _begin_rest(loader: DataLoader[Any], watch: WatchedLoader) -> int:
    """Return where in the sampler's order the epoch begins: at a waiting remainder's start, otherwise 0."""
    rest, waits, watch.waits = watch.rest, watch.waits, False
    if rest is None:
        return 0
    # nothing is left, and the caller is at another epoch
    if not waits or (len(loader) == 0 and epoch_number(loader) != rest.epoch):
        leave_rest(watch)
        return 0
    set_epoch_number(loader, rest.epoch)
    return rest.begins


def leave_epoch(loader: DataLoader[Any]) -> None:
    """End this epoch for the loader, though batches may be left: a restore then continues with the next epoch.

    Args:
        loader: A loader among the components.
    """
    watch = loader.__dict__.get(ATTRIBUTE)
    if watch is not None and watch.epoch is not None:
        watch.epoch.over = watch.epoch.left = True
        watch.earlier = None
        leave_rest(watch)


def reset_position(loader: DataLoader[Any]) -> None:
    """Ignore the loader's stored position at the next restore: its training epoch begins from its start. Call it before
    ``restore()``.

    After a restore, before the next ``iter(loader)``, it drops the position that was restored. Other components are not
    affected.

    Args:
        loader: A loader among the components.
    """
    watch = _watch(_checked(loader, "reset_position"))
    if watch.pending is None:
        watch.reset = True
        return
    drop(loader, watch, watch.pending, "reset_position() was called")
    watch.reread = False
    if is_stateful(loader):
        loader.load_state_dict({})  # type: ignore[attr-defined]


def used(loader: DataLoader[Any], batches: int) -> None:
    """State that the training loop has used ``batches`` batches of this training epoch: saves hold that position, until
    the next call.

    For prefetchers that take batches from the loader before the loop uses them. Batches of the epoch that an earlier
    process used count.

    Args:
        loader: A loader among the components.
        batches: The number of batches, from the epoch's begin.
    """
    watch = _watch(_checked(loader, "used"))
    if not isinstance(batches, int) or isinstance(batches, bool) or batches < 0:
        raise ConfigError(
            f"used() failed: {batches!r} is not a number of batches",
            where=watch.name,
            hint="pass a whole number, 0 or more",
        )
    if watch.epoch is None:
        if batches:
            raise ConfigError(
                f"used() failed: {watch.name} has delivered no batch", where=watch.name, hint="call it after a batch"
            )
        return
    if batches > watch.epoch.delivered:
        raise ConfigError(
            f"used() failed: {watch.name} has delivered {watch.epoch.delivered} batches of this training epoch, not {batches}",
            where=watch.name,
            hint="count the batches of this training epoch that the loop has used",
        )
    watch.epoch.stated = batches
    watch.earlier = None


def _checked(loader: Any, call: str) -> DataLoader[Any]:
    loader = loader_of(loader)
    if not isinstance(loader, DataLoader):
        raise ConfigError(
            f"{call}() failed: {type(loader).__name__} is not a DataLoader",
            hint="pass the loader that the Checkpointer has",
        )
    return loader


def report_steps(components: Mapping[str, object], steps: int) -> list[str]:
    """Record ``steps`` further steps of the loop. Return the names of loaders that are ahead of it.

    Costs some microseconds a loader. Each loader is returned once.
    """
    ahead = []
    for value in components.values():
        watch = value.__dict__.get(ATTRIBUTE) if isinstance(value, DataLoader) else None
        if watch is None:
            continue
        with watch.lock:
            watch.resume_outer()
            watch.reports += 1
            watch.pace.report(steps)
        if not watch.pace.owed:
            watch.earlier = None
        if watch.pace.ahead and "ahead" not in watch.reported and (watch.epoch is None or watch.epoch.stated is None):
            watch.reported.add("ahead")
            ahead.append(watch.name)
        elif watch.kept is not None and not (watch.pace.ahead or watch.pace.unsure or watch.pace.threaded):
            watch.kept = None  # the loop uses each batch before it requests the next
    return ahead


def _keep_own_state(loader: DataLoader[Any], watch: WatchedLoader) -> None:
    started = perf_counter()
    watch.kept.append(_loader_state(loader))  # type: ignore[union-attr]
    watch.kept_s = min(watch.kept_s, perf_counter() - started)
    if watch.kept_s > KEPT_S and len(watch.kept) >= KEPT_TRIES and not watch.pace.ahead:  # type: ignore[arg-type]
        watch.kept = None


def _notice_short(watch: WatchedLoader, epoch: Epoch) -> None:
    """Report a training epoch that lacks as many batches as were delivered before this process resumed."""
    whole, watch.whole = watch.whole, epoch.delivered
    if epoch.resumed or epoch.mixed or epoch.left or epoch.begins or not watch.resumed_at:
        return
    lacks = whole - epoch.delivered
    slack = 1 + (epoch.units or {}).get("workers", 0)
    if lacks > 0 and abs(lacks - watch.resumed_at) <= slack:
        watch.whole = whole
        if "short" not in watch.reported:
            watch.reported.add("short")
            emit(
                "loader.short",
                f"loader {watch.name} delivered {epoch.delivered} batches in this training epoch, {whole} in the one before: it begins "
                f"where this process resumed, after {watch.resumed_at} batches; make data set and loader again for each training epoch",
                loader=watch.name,
                batches=epoch.delivered,
                expected=whole,
            )


def loader_state(loader: DataLoader[Any]) -> dict[str, Any]:
    """Return the loader's position as a tree. Draws no random number."""
    known = loader.__dict__.get(ATTRIBUTE)
    watch = known or _watch(loader)
    if known is None:
        watch.unknown = True
    with watch.lock:
        return _state(loader, watch)


def _state(loader: DataLoader[Any], watch: WatchedLoader) -> dict[str, Any]:
    watch.resume_outer()
    watch.reports += 1
    counted = _counted(loader, watch)
    if not is_stateful(loader):
        return {"counted": counted}
    # Before its first iterator exists, state_dict would create one and draw random numbers: there is no position yet.
    fresh = is_fresh(loader)
    is_left = watch.epoch is not None and watch.epoch.left
    if watch.pending is not None and watch.own_state is not None:
        return {"own": counted, "told": watch.own_state}
    if fresh or is_left:
        return {"own": counted, "told": None}
    _, ahead = place_of(watch)
    # another thread may be moving the loader now
    if (ahead or watch.pace.threaded) and watch.kept and ahead < len(watch.kept):
        return {"own": counted, "told": watch.kept[-1 - ahead]}
    return {"own": counted, "told": _loader_state(loader)}


def _loader_state(loader: Any) -> Any:
    before = generators.host_states()
    state = loader.state_dict()
    generators.restore_host(before)
    return state


def _counted(loader: DataLoader[Any], watch: WatchedLoader) -> dict[str, Any]:
    if watch.pending is not None:
        return watch.pending
    epoch, ahead = place_of(watch)
    has_position = is_stateful(loader)
    if has_position and ahead and (watch.kept is None or ahead >= len(watch.kept)):
        ahead = 0  # the loader's own position is saved; loader_doubts reports it
    active = epoch is not None and not epoch.left and (not epoch.over or ahead > 0)
    state: dict[str, Any] = {
        "active": active,
        "delivered": epoch.delivered - ahead if active and epoch else 0,
        "epochs": watch.epochs - (epoch is not watch.epoch),
        "start": epoch.start if active and epoch else None,
        "first": epoch.first if active and epoch else None,
        "generators": own_states(loader),
        "epoch": epoch_number(loader),
        "workers": [watch.base, watch.age - (epoch is not watch.epoch)],
        "rate": watch.pace.rate,
    }
    if active and epoch is not None:
        samples, checksum, failed = _samples(loader, epoch, ahead)
        state |= {"units": epoch.units, "samples": samples, "checksum": checksum, "mixed": epoch.mixed}
        state |= {"failed": failed} if failed else {}
        state["epoch"] = epoch.start["epoch"] if epoch is not watch.epoch else state["epoch"]
    state["dealt"] = _position_tree(loader, watch, active, state)
    return state


def _samples(loader: DataLoader[Any], epoch: Epoch, ahead: int) -> tuple[int | None, int | None, int]:
    """Return the number of samples that were delivered and used, their checksum, and the number of failed batches among them.

    None: unknown.
    """
    position, units = epoch.position, epoch.units
    if is_stateful(loader) and units is not None and not units["stream"]:
        if units["batch_size"] is None:
            return None, None, 0
        count = (epoch.delivered - epoch.resumed - ahead) * units["batch_size"]
        count += position.samples or 0 if epoch.mixed and position is not None else epoch.resumed * units["batch_size"]
        sampler = getattr(core_of(loader).batch_sampler, "sampler", None)
        return (count if sampler is None else min(count, len(sampler))), None, 0
    place = position.before(ahead) if position is not None else None
    return place if place is not None else (None, None, 0)


def _position_tree(
    loader: DataLoader[Any], watch: WatchedLoader, active: bool, state: Mapping[str, Any]
) -> dict[str, Any] | str:
    """Return the sampler's position, which another number of ranks needs to continue."""
    epoch = watch.epoch
    if watch.unknown:
        return "batches it delivered before it was watched were not counted"
    if watch.rest is not None and watch.waits:
        return position_tree(loader, begins=watch.rest.begins, epoch=watch.rest.epoch, delivered=0)
    if epoch is None:
        return position_tree(loader, begins=0, epoch=None, delivered=None)
    return position_tree(
        loader,
        begins=epoch.begins,
        epoch=epoch.start["epoch"],
        delivered=state["delivered"] if active else None,
        samples=state.get("samples") if epoch.mixed or state.get("failed") else None,
    )


def restore_loader(loader: DataLoader[Any], state: Mapping[str, Any], *, strict: bool = True) -> None:
    """Set the loader's position; it takes effect at the next ``iter(loader)``.

    Call this before the generators are restored. ``strict``: whether a position that cannot be found again is an error
    at that time; otherwise the training epoch begins from its start.
    """
    reason = loader_unfit(loader, state)
    if reason is not None:
        raise IncompatibleState(
            reason, hint="use the kind of loader the run was saved with, or restore with only= and leave it out"
        )
    watch = _watch(loader)
    counted = dict(state["own"] if "own" in state else state["counted"])
    reset, watch.reset = watch.reset, False
    watch.epoch, watch.epochs, watch.resume_rng, watch.unknown = None, counted["epochs"], None, False
    watch.earlier, watch.pace, watch.resumed_at, watch.strict, watch.instead = None, LoaderPace(), 0, strict, None
    watch.passes, watch.interleaved = OpenPasses(), False
    watch.pace.rate = counted.get("rate")
    watch.pending = counted if counted["active"] else None
    watch.base, watch.age = counted["workers"]
    leave_rest(watch)
    watch.rest = None if reset else rest_in(loader, counted.get("dealt"))
    watch.waits = watch.rest is not None and watch.pending is None and counted["dealt"]["at"] is not None
    if reset and watch.pending is not None:
        drop(loader, watch, watch.pending, "reset_position() was called")
    pending = watch.pending
    own_state = state.get("told") if not reset else None
    watch.reread = pending is not None and own_state is not None and _reread(loader, pending, own_state)
    watch.own_state = own_state if pending is not None else None
    watch.uncounted = pending is None and is_in_pass(own_state)
    if is_stateful(loader):
        by_relight = pending is not None and (watch.reread or by_samples(loader, pending))
        _load_own_state(loader, None if by_relight else own_state, counted)
    elif has_persistent_workers(loader):
        forget_iterator(loader)  # its workers are at another position
    if watch.pending is None and not watch.waits:
        leave_rest(watch)
    set_epoch_number(loader, counted["epoch"])
    set_own_states(loader, counted["generators"])
    if counted["epochs"] and counted["epoch"] is not None:
        set_wrapper_epoch(loader, counted["epoch"] + (watch.pending is None and not reset))


def _reread(loader: DataLoader[Any], pending: Mapping[str, Any], own_state: Any) -> bool:
    """Return whether a stateful loader has a stream without a state, or with one that leaves out samples.

    torchdata would read the first again and check nothing, and would lose samples of the second.
    """
    units = pending.get("units")
    return (
        isinstance(units, Mapping)
        and bool(units["stream"])
        and isinstance(pending.get("checksum"), int)
        and (has_no_data_state(own_state) or has_shuffle_buffer(core_of(loader).dataset))
    )


def rest_state(loader: DataLoader[Any], found: SamplerPosition, before: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the state, like ``loader_state``, of a loader that will continue at ``found``.

    ``before``: the state of a loader; the new one takes over its generators.
    """
    counted = _inner(before) if before is not None else {}
    epochs = counted.get("epochs")
    epochs = epochs if isinstance(epochs, int) else 0
    position = {
        "active": False,
        "delivered": 0,
        "epochs": epochs - 1 if counted.get("active") is True else epochs,  # counted again when the rest begins
        "start": None,
        "first": None,
        "generators": counted.get("generators", {}),
        "epoch": found.epoch,
        "workers": counted.get("workers", [None, 0]),
        "dealt": msgspec.to_builtins(found),
    }
    return {"own": position, "told": None} if is_stateful(loader) else {"counted": position}


def position_in(state: object) -> object:
    """Return the sampler's position from a loader's stored state."""
    return _inner(state).get("dealt")


def _inner(state: Any) -> Mapping[str, Any]:
    inner = state.get("own", state.get("counted")) if isinstance(state, Mapping) else None
    return inner if isinstance(inner, Mapping) else {}


def _load_own_state(loader: Any, own_state: Any, counted: Mapping[str, Any]) -> None:
    """Load a stateful loader's state, and create its iterator now.

    Later it would draw from generators that are restored by then. The iterator is created from the epoch's own
    generators, as its sampler may draw its permutation from them.
    """
    if own_state is None:
        loader.load_state_dict({})
        return
    if counted["start"] is not None:
        restore_epoch_start(loader, counted["start"])
    loader.load_state_dict(own_state)
    if not makes_ahead(loader):
        return
    loader.state_dict()
    correct_counts(loader, own_state)


def loader_unfit(loader: DataLoader[Any], state: Any) -> str | None:
    """Return why ``state`` does not fit this loader; None if it does."""
    if not isinstance(state, Mapping) or not ({"own", "counted"} & state.keys()):
        return "stored by an object that is not a loader"
    watch = loader.__dict__.get(ATTRIBUTE)
    if watch is not None and watch.reset and is_stateful(loader) == ("own" in state):
        return None
    if is_stateful(loader) == ("own" in state):
        position, sharded = position_in(state), sharded_sampler_of(loader)
        if isinstance(position, Mapping) and position.get("begins") and isinstance(sharded, str):
            return f"it is in the rest of a training epoch that other ranks began, and cannot continue it: {sharded}"
        return _moved(loader, state)
    could, can = ("could", "cannot") if "own" in state else ("could not", "can")
    return f"the checkpoint's loader {could} report its position, this one {can}"


def _moved(loader: DataLoader[Any], state: Mapping[str, Any]) -> str | None:
    """Return why the loader's present settings make the position another one; None if it may be the same."""
    counted = _inner(state)
    stored, live = counted.get("units"), units_of(loader)
    if not isinstance(stored, Mapping) or not counted.get("active") or not counted.get("delivered"):
        return None
    change = ""
    if stored.get("stream") != live["stream"]:
        change = "a position in a stream is not valid in a data set with indices"
    elif reordered(stored, live):
        change = "the shuffled order is another one now"
    elif (
        live["stream"]
        and "own" in state
        and not _reread(loader, counted, state.get("told"))
        and stored.get("workers") != live["workers"]
    ):
        change = "its workers have read parts of the stream, and other workers read other parts"
    elif (
        live["stream"]
        and "own" in state
        and _reread(loader, counted, state.get("told"))
        and stored.get("batch_size") != live["batch_size"]
    ):
        change = "a stream's batches cannot be counted in another size"
    if not change:
        return None
    return f"{counted['delivered']} batches of its training epoch were delivered, and {change} ({', '.join(changed(stored, live))}); {WAYS}"


def remember_rng(loader: DataLoader[Any]) -> None:
    """Record the restored generators: they are set again once skipping batches has drawn from them."""
    watch = loader.__dict__.get(ATTRIBUTE)
    if watch is not None and watch.pending is not None:
        watch.resume_rng = generators.host_states()


def loader_notes(name: str, loader: Any) -> list[str]:
    """Return what of this loader cannot be saved."""
    notes = []
    if loader.num_workers and is_stateful(loader) and not hasattr(loader.dataset, "state_dict"):
        notes.append(
            f"{name}: random numbers drawn inside the workers are not captured; "
            "derive them from the sample's index, or use a plain DataLoader"
        )
    return notes


def loader_doubts(name: str, loader: Any) -> list[str]:
    """Return why resuming this loader may not be exact."""
    watch = loader.__dict__.get(ATTRIBUTE)
    doubts = []
    if watch is not None and is_stateful(loader):
        ahead = place_of(watch)[1]
        if ahead and (watch.kept is None or ahead >= len(watch.kept)):
            doubts.append(
                f"{name}: it was {ahead} batches ahead of the training loop, and those are lost at a resume from this save"
            )
    if watch is not None and watch.pace.unsure and (watch.epoch is None or watch.epoch.stated is None):
        doubts.append(
            f"{name}: it delivered several batches before the first step; whether the loop had used them all is unknown"
        )
    if watch is not None and watch.interleaved:
        doubts.append(
            f"{name}: two of its iterators deliver batches by turns, and a save has the position of one of them"
        )
    if watch is not None and watch.passes.is_assumed(watch.epoch):
        doubts.append(
            f"{name}: a pass has ended while an older iterator of it is kept; the save has the older position"
        )
    if watch is not None and watch.unknown and not is_stateful(loader):
        doubts.append(
            f"{name}: batches it delivered before it was watched were not counted, so its position is unknown"
        )
    if loader.num_workers and not getattr(loader, "in_order", True):
        doubts.append(f"{name}: in_order=False delivers batches in the order workers happen to finish them")
    return doubts
