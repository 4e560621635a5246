"""Data loaders: where they are, and how they get there again.

A loader that can tell its position (torchdata's ``StatefulDataLoader``) is asked. A plain ``DataLoader`` is watched: what it delivered
in this epoch is counted, and the generators as they were when the epoch began are kept. Repositioning then makes the epoch's iterator
from the same generators (same permutation, same worker seeds), takes as many batches as were delivered, and throws them away.

When another number of ranks goes on, a loader may go on with its share of what is left of the epoch: see ``dealt``.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
from torch.utils.data import DataLoader, IterDataPipe

from relight.capture import rng as generators
from relight.capture.dealt import Dealt, Rest, dealer_of, dealt, rest_in
from relight.capture.workers import Reseed, born, persistent, seed_of
from relight.errors import IncompatibleState

Observe = Callable[[Any], None]
_ATTRIBUTE = "_relight_watch"
_END = object()
_CLASS: Any = vars(object)["__class__"]
"""An object's class, also where the class itself says that it is another's (Accelerate's loaders)."""
_warned = False


@dataclass
class _Epoch:
    """One pass over the loader: where all generators were before its iterator was made, and before its first batch was asked for."""

    start: dict[str, Any]
    first: dict[str, Any] | None = None
    delivered: int = 0
    begins: int = 0
    """Where in the sampler's order it began, if it is the rest of one."""
    over: bool = False
    left: bool = False
    """Whether the caller has said that it is over, not the loader."""


@dataclass
class _Watch:
    """What is known of one watched loader."""

    original: type
    epochs: int = 0
    epoch: _Epoch | None = None
    base: int | None = None
    """The seed persistent workers were born with, and the epochs since."""
    age: int = 0
    pending: dict[str, Any] | None = None
    resume_rng: dict[str, Any] | None = None
    rest: Rest | None = None
    """In the sampler's place, during an epoch that another number of ranks began."""
    waits: bool = False
    """Whether that epoch's next iterator is the first for these ranks."""
    unknown: bool = False
    observe: list[Observe] = field(default_factory=list)


class _Batches:
    """An epoch's iterator that counts what it delivers. Everything else is the loader's own iterator's."""

    def __init__(self, inner: Iterator[Any], watch: _Watch, epoch: _Epoch) -> None:
        self._inner, self._watch, self._epoch = inner, watch, epoch

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
                _leave_rest(self._watch)
            raise
        self._epoch.delivered += 1
        for observe in self._watch.observe:
            observe(batch)
        return batch

    def __len__(self) -> int:
        return len(self._inner)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def tells_position(loader: DataLoader[Any]) -> bool:
    """Whether the loader has a state of its own. Accelerate's has the methods, whether what it stands around can tell or not."""
    inner = loader.__dict__.get("base_dataloader", loader)
    return callable(getattr(inner, "state_dict", None)) and callable(getattr(inner, "load_state_dict", None))


def watch_loaders(components: Mapping[str, object]) -> None:
    """Begin to watch the loaders among the components."""
    for value in components.values():
        if isinstance(value, DataLoader):
            _watch(value)


def observe_batches(components: Mapping[str, object], observe: Observe) -> None:
    """Have ``observe(batch)`` called for every batch that any loader among the components delivers."""
    for value in components.values():
        if isinstance(value, DataLoader):
            _watch(value).observe.append(observe)


def unwatch_loaders(components: Mapping[str, object]) -> None:
    """Give the loaders their own class back."""
    for value in components.values():
        watch = value.__dict__.get(_ATTRIBUTE) if isinstance(value, DataLoader) else None
        if watch is not None:
            _leave_rest(watch)
            _CLASS.__set__(value, watch.original)
            del value.__dict__[_ATTRIBUTE]


def _watch(loader: DataLoader[Any]) -> _Watch:
    known = loader.__dict__.get(_ATTRIBUTE)
    if known is not None:
        return known  # type: ignore[no-any-return]
    original = type(loader)
    watch = _Watch(original)

    def __iter__(self: DataLoader[Any]) -> Any:
        inner, epoch = _begin(self, watch)
        return _Batches(inner, watch, epoch)

    loader.__dict__[_ATTRIBUTE] = watch
    _CLASS.__set__(loader, type(original.__name__, (original,), {"__iter__": __iter__, "__module__": original.__module__}))
    return watch


def _begin(loader: DataLoader[Any], watch: _Watch) -> tuple[Iterator[Any], _Epoch]:
    """The next iterator. An interrupted epoch of which nothing is left counts as ended if the caller is at another one already."""
    pending, number = watch.pending, _epoch_number(loader)
    inner, epoch = _next(loader, watch)
    if pending is None or number == epoch.start["epoch"] or pending["delivered"] < _batches(loader) or next(inner, _END) is not _END:
        return inner, epoch
    _set_epoch_number(loader, number)
    return _next(loader, watch)


def _batches(loader: DataLoader[Any]) -> float:
    try:
        return len(loader)
    except TypeError:  # a sampler that does not know
        return float("inf")


def _next(loader: DataLoader[Any], watch: _Watch) -> tuple[Iterator[Any], _Epoch]:
    """The next iterator: a new epoch's, or the interrupted one's, repositioned, or that of these ranks' share of what was left of it."""
    watch.unknown = False
    pending, watch.pending = watch.pending, None
    if pending is None:
        begins = _begin_rest(loader, watch)
        epoch = _Epoch(_epoch_start(loader), begins=begins)
        watch.epoch, watch.epochs = epoch, watch.epochs + 1
        return (watch.original.__iter__(loader) if tells_position(loader) else _make(loader, watch)), epoch  # type: ignore[attr-defined]
    if tells_position(loader):
        watch.epoch = _resumed(pending, watch)
        return watch.original.__iter__(loader), watch.epoch  # type: ignore[attr-defined]
    return _reposition(loader, watch, pending)


def _begin_rest(loader: DataLoader[Any], watch: _Watch) -> int:
    """Where the epoch begins that is not a repositioned one: where the rest does that waits, else at 0."""
    rest, waits, watch.waits = watch.rest, watch.waits, False
    if rest is None:
        return 0
    if not waits or (len(loader) == 0 and _epoch_number(loader) != rest.epoch):  # nothing left, and the caller is at another epoch
        _leave_rest(watch)
        return 0
    _set_epoch_number(loader, rest.epoch)
    return rest.begins


def _leave_rest(watch: _Watch) -> None:
    if watch.rest is not None:
        watch.rest.leave()
    watch.rest, watch.waits = None, False


def _make(loader: DataLoader[Any], watch: _Watch) -> Iterator[Any]:
    """The loader's own iterator, for the epoch that ``watch.age`` is one before."""
    own: Callable[[DataLoader[Any]], Iterator[Any]] = watch.original.__iter__  # type: ignore[attr-defined]
    if not persistent(loader):
        return own(loader)
    if watch.base is not None:
        watch.age += 1
    if loader._iterator is None:
        with born(loader, watch.base, watch.age):
            inner = own(loader)
        if watch.base is None:
            watch.base = int(inner._base_seed)  # type: ignore[attr-defined]
        return inner
    if watch.base is None:  # made before it was watched
        watch.base, watch.age = int(loader._iterator._base_seed), 1
    if not isinstance(loader.dataset, IterDataPipe):
        loader._iterator._shared_seed = Reseed(seed_of(watch.base, watch.age))
    try:
        return own(loader)
    finally:
        loader._iterator._shared_seed = None


def _reposition(loader: DataLoader[Any], watch: _Watch, pending: dict[str, Any]) -> tuple[Iterator[Any], _Epoch]:
    after = watch.resume_rng or generators.host_states()
    devices, own_after = generators.device_states(), _own_states(loader)
    watch.resume_rng = None
    epoch = _resumed(pending, watch)
    _restore_epoch_start(loader, epoch.start)
    if watch.base is not None:
        watch.age -= 1  # _make counts it again
        if watch.age < 0:
            watch.base, watch.age = None, 0  # the first epoch draws its seed as it did
    inner = _make(loader, watch)
    if pending["delivered"]:
        if epoch.first is not None:
            generators.restore_host(epoch.first)
        _warn(pending["delivered"])
    for done in range(pending["delivered"]):
        try:
            next(inner)
        except StopIteration:
            raise IncompatibleState(
                f"the loader gives {done} batches where {pending['delivered']} had been delivered", hint="the data is not what it was"
            ) from None
    _set_own_states(loader, own_after)
    generators.restore_devices(devices)
    generators.restore_host(after)
    watch.epoch, watch.epochs = epoch, pending["epochs"]
    return inner, epoch


def _resumed(pending: Mapping[str, Any], watch: _Watch) -> _Epoch:
    return _Epoch(pending["start"], pending["first"], pending["delivered"], 0 if watch.rest is None else watch.rest.begins)


def leave_epoch(loader: DataLoader[Any]) -> None:
    """The caller takes no more batches of this epoch, though some may be left: what is restored goes on with the next one."""
    watch = loader.__dict__.get(_ATTRIBUTE)
    if watch is not None and watch.epoch is not None:
        watch.epoch.over = watch.epoch.left = True
        _leave_rest(watch)


def loader_state(loader: DataLoader[Any]) -> dict[str, Any]:
    """Where the loader is, as a tree. Draws no random number."""
    known = loader.__dict__.get(_ATTRIBUTE)
    watch = known or _watch(loader)
    if known is None:
        watch.unknown = True
    state: dict[str, Any] = {"own" if tells_position(loader) else "counted": _counted(loader, watch)}
    if "own" in state:
        # Asked before its first iterator exists it would make one, and draw numbers for it: there is nothing to tell yet.
        fresh = _makes_ahead(loader) and loader._iterator is None and loader.next_iter_state is None  # type: ignore[attr-defined]
        left = watch.epoch is not None and watch.epoch.left
        state["told"] = None if fresh or left else _told(loader)
    return state


def _makes_ahead(loader: DataLoader[Any]) -> bool:
    """Whether it is torchdata's, which makes an iterator to tell its state."""
    return hasattr(loader, "next_iter_state") and hasattr(loader, "_iterator")


def _told(loader: Any) -> Any:
    before = generators.host_states()
    told = loader.state_dict()
    generators.restore_host(before)
    return told


def _counted(loader: DataLoader[Any], watch: _Watch) -> dict[str, Any]:
    if watch.pending is not None:
        return watch.pending
    epoch = watch.epoch
    active = epoch is not None and not epoch.over
    return {
        "active": active,
        "delivered": epoch.delivered if active and epoch else 0,
        "epochs": watch.epochs,
        "start": epoch.start if active and epoch else None,
        "first": epoch.first if active and epoch else None,
        "generators": _own_states(loader),
        "epoch": _epoch_number(loader),
        "workers": [watch.base, watch.age],
        "dealt": _dealt(loader, watch, active),
    }


def _dealt(loader: DataLoader[Any], watch: _Watch, active: bool) -> dict[str, Any] | str:
    """What another number of ranks needs to go on."""
    epoch = watch.epoch
    if watch.unknown:
        return "batches it delivered before it was watched were not counted"
    if watch.rest is not None and watch.waits:
        return dealt(loader, begins=watch.rest.begins, epoch=watch.rest.epoch, delivered=0)
    if epoch is None:
        return dealt(loader, begins=0, epoch=None, delivered=None)
    return dealt(loader, begins=epoch.begins, epoch=epoch.start["epoch"], delivered=epoch.delivered if active else None)


def restore_loader(loader: DataLoader[Any], state: Mapping[str, Any]) -> None:
    """Reposition; takes effect at the next ``iter(loader)``. To be called before the generators are restored."""
    reason = loader_unfit(loader, state)
    if reason is not None:
        raise IncompatibleState(reason, hint="use the kind of loader the run was saved with, or restore with only= and leave it out")
    watch = _watch(loader)
    counted = dict(state["own"] if "own" in state else state["counted"])
    watch.epoch, watch.epochs, watch.resume_rng, watch.unknown = None, counted["epochs"], None, False
    watch.pending = counted if counted["active"] else None
    watch.base, watch.age = counted["workers"]
    _leave_rest(watch)
    watch.rest = rest_in(loader, counted.get("dealt"))
    watch.waits = watch.rest is not None and watch.pending is None and counted["dealt"]["at"] is not None
    if "own" in state:
        _load_told(loader, state["told"], counted)
    elif persistent(loader):
        loader._iterator = None  # its workers are elsewhere
    if watch.pending is None and not watch.waits:
        _leave_rest(watch)
    _set_epoch_number(loader, counted["epoch"])
    _set_own_states(loader, counted["generators"])


def rest_state(loader: DataLoader[Any], found: Dealt, before: Mapping[str, Any] | None) -> dict[str, Any]:
    """A state as ``loader_state`` gives one: of a loader that is to go on where ``found`` tells.

    ``before``: the state of a loader whose generators this one is to have.
    """
    counted = _inner(before) if before is not None else {}
    epochs = counted.get("epochs")
    epochs = epochs if isinstance(epochs, int) else 0
    own = {
        "active": False,
        "delivered": 0,
        "epochs": epochs - 1 if counted.get("active") is True else epochs,  # it is counted again when its rest begins
        "start": None,
        "first": None,
        "generators": counted.get("generators", {}),
        "epoch": found.epoch,
        "workers": counted.get("workers", [None, 0]),
        "dealt": msgspec.to_builtins(found),
    }
    return {"own": own, "told": None} if tells_position(loader) else {"counted": own}


def dealt_in(state: object) -> object:
    """What a loader's stored state tells of how its samples were dealt out."""
    return _inner(state).get("dealt")


def _inner(state: Any) -> Mapping[str, Any]:
    inner = state.get("own", state.get("counted")) if isinstance(state, Mapping) else None
    return inner if isinstance(inner, Mapping) else {}


def _load_told(loader: Any, told: Any, counted: Mapping[str, Any]) -> None:
    """Have the iterator made now: made at the next ``iter`` it would draw from generators that are restored by then.

    It is made from the epoch's own generators, as its sampler may be one that draws its permutation from them.
    """
    if told is None:
        loader.load_state_dict({})
        return
    if counted["start"] is not None:
        _restore_epoch_start(loader, counted["start"])
    loader.load_state_dict(told)
    if not _makes_ahead(loader):
        return
    loader.state_dict()
    # Skipping data that has no state of its own, torchdata counts the skipped batches twice; the next save would be too far on.
    iterator, inner = loader._iterator, told.get("_snapshot", told)
    counts = {"_num_yielded": "_num_yielded", "_snapshot_step": "_num_yielded", "_sampler_iter_yielded": "_sampler_iter_yielded"}
    for key, name in counts.items():
        if key in inner and getattr(iterator, name, None) == 2 * inner[key]:
            setattr(iterator, name, inner[key])


def loader_unfit(loader: DataLoader[Any], state: Any) -> str | None:
    """Why ``state`` is not one of this kind of loader; None if it is."""
    if not isinstance(state, Mapping) or not ({"own", "counted"} & state.keys()):
        return "stored by something that was no loader"
    if tells_position(loader) == ("own" in state):
        found, dealer = dealt_in(state), dealer_of(loader)
        if isinstance(found, Mapping) and found.get("begins") and isinstance(dealer, str):
            return f"it is in the rest of a training epoch that other ranks began, and cannot go on with it: {dealer}"
        return None
    could, can = ("could", "cannot") if "own" in state else ("could not", "can")
    return f"the checkpoint's loader {could} tell its position, this one {can}"


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
            f"{name}: random numbers drawn inside the workers are not captured; "
            "derive them from the sample's index, or use a plain DataLoader"
        )
    return notes


def loader_doubts(name: str, loader: Any) -> list[str]:
    """Why resuming this loader may not be exact."""
    watch = loader.__dict__.get(_ATTRIBUTE)
    doubts = []
    if watch is not None and watch.unknown and not tells_position(loader):
        doubts.append(f"{name}: batches it delivered before it was watched were not counted, so its position is unknown")
    if loader.num_workers and not getattr(loader, "in_order", True):
        doubts.append(f"{name}: in_order=False delivers batches in the order workers happen to finish them")
    return doubts


def _samplers(loader: DataLoader[Any]) -> dict[str, Any]:
    """The loader, and every sampler it stands on, by place; in the main process also the data, whose generators are there too."""
    found: dict[str, Any] = {"loader": loader}
    for place in ("batch_sampler", "sampler"):
        at, value = place, _behind(getattr(loader, place, None))
        while value is not None and not any(value is other for other in found.values()):
            found[at] = value
            at, value = f"{at}.sampler", _behind(getattr(value, "sampler", None))
    if loader.num_workers == 0:
        at, value = "dataset", loader.dataset
        while value is not None and not any(value is other for other in found.values()):
            found[at] = value
            at, value = f"{at}.dataset", getattr(value, "dataset", None)
    return found


def _behind(sampler: Any) -> Any:
    return sampler.sampler if isinstance(sampler, Rest) else sampler


def own_generators(loader: DataLoader[Any]) -> dict[str, Any]:
    """Generators that the loader, its samplers and, in the main process, its data hold, by place."""
    found: dict[str, Any] = {}
    for place, owner in _samplers(loader).items():
        for name, value in sorted(getattr(owner, "__dict__", {}).items()):
            if generators.is_generator(value) and not any(value is other for other in found.values()):
                found[f"{place}.{name}"] = value
    return found


def _own_states(loader: DataLoader[Any]) -> dict[str, Any]:
    return {place: generators.generator_state(generator) for place, generator in own_generators(loader).items()}


def _set_own_states(loader: DataLoader[Any], states: Mapping[str, Any]) -> None:
    for place, generator in own_generators(loader).items():
        if place in states:
            generators.restore_generator(generator, states[place])


def _epoch_number(loader: DataLoader[Any]) -> int | None:
    numbers = [getattr(sampler, "epoch", None) for sampler in _samplers(loader).values() if hasattr(sampler, "set_epoch")]
    return next((number for number in numbers if isinstance(number, int)), None)


def _set_epoch_number(loader: DataLoader[Any], number: int | None) -> None:
    for sampler in _samplers(loader).values():
        if number is not None and hasattr(sampler, "set_epoch"):
            sampler.set_epoch(number)


def _epoch_start(loader: DataLoader[Any]) -> dict[str, Any]:
    return {"rng": generators.host_states(), "own": _own_states(loader), "epoch": _epoch_number(loader)}


def _restore_epoch_start(loader: DataLoader[Any], start: Mapping[str, Any]) -> None:
    _set_own_states(loader, start["own"])
    _set_epoch_number(loader, start["epoch"])
    generators.restore_host(start["rng"])


def _warn(delivered: int) -> None:
    global _warned
    if not _warned:
        _warned = True
        warnings.warn(
            f"a plain DataLoader cannot tell its position: repositioning by a counted, seeded skip of {delivered} batches; "
            "torchdata's StatefulDataLoader would not need to read them again",
            stacklevel=6,
        )
