"""The record of a watched loader, its generators, and the iterator of its next pass."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from threading import RLock
from typing import Any
from weakref import WeakSet, ref

from torch.utils.data import DataLoader, IterableDataset, IterDataPipe

from relight.capture import rng as generators
from relight.capture.delivered import IndexLists, Position
from relight.capture.pace import LoaderPace
from relight.capture.sampler_shards import RemainderSampler
from relight.capture.units import core_of
from relight.capture.workers import Reseed, init_worker, seed_of
from relight.torch_private.loaders import (
    base_seed,
    has_persistent_workers,
    set_shared_seed,
    with_index_sampler,
    worker_iterator,
)

Observe = Callable[[Any], None]
ATTRIBUTE, CORE, WRAPPER = "_relight_watch", "_relight_core_class", "_relight_wrapper"
END = object()
CLASS: Any = vars(object)["__class__"]
"""The real ``__class__`` attribute, also of objects that report another class (Accelerate's loaders)."""


class NotShared:
    """Base class of what a copy of its owner gets new and empty."""

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ()


class Lock(NotShared):
    """A lock."""

    def __init__(self) -> None:
        self._lock = RLock()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *ignored: object) -> None:
        self._lock.release()


class Users(NotShared):
    """The Checkpointers that need a loader watched. Does not keep them alive."""

    def __init__(self) -> None:
        self._users: WeakSet[object] = WeakSet()

    def add(self, user: object) -> None:
        """Add a user."""
        self._users.add(user)

    def remove(self, user: object | None) -> bool:
        """Remove a user; None: no user. Return whether none is left."""
        if user is not None:
            self._users.discard(user)
        return not self._users


@dataclass(eq=False)
class LoaderPass:
    """One iteration over a loader. It lives as long as the script has its iterator."""

    epoch: Epoch
    pace: LoaderPace
    number: int
    """``WatchedLoader.epochs`` during it."""
    selects_iterator: Callable[[], None]
    """Makes the loader's own ``state_dict`` describe this pass."""
    delivered_at: int = -1
    """``WatchedLoader.reports`` at its last batch."""
    assumed: bool = False
    """Whether it was taken for the loop's pass before it had steps, and has delivered no batch since."""


class OpenPasses(NotShared):
    """The passes of a loader that have not ended. The newest is last.

    A script may begin a pass within another one, for example to compute the accuracy on the training data.
    """

    def __init__(self) -> None:
        self._passes: list[ref[LoaderPass]] = []

    def add(self, new: LoaderPass) -> None:
        """Add a pass that begins."""
        self._passes = [*map(ref, self._open()), ref(new)]

    def outer_of(self, epoch: Epoch, reports: int) -> LoaderPass | None:
        """Return the pass that continues if the pass of ``epoch`` has ended; else None.

        It is the last one in which steps were reported, or else the last one that has delivered a batch since the last
        report or save, number ``reports``. An iterator that is only kept alive delivers none.
        """
        if self.has(epoch):
            return None
        passes = self._open()
        reported = (each for each in reversed(passes) if each.pace.has_steps and not each.assumed)
        delivered = (each for each in reversed(passes) if each.delivered_at == reports)
        return next(reported, None) or next(delivered, None)

    def is_assumed(self, epoch: Epoch | None) -> bool:
        """Return whether the pass of ``epoch`` was only taken for the loop's pass."""
        return any(each.assumed for each in self._open() if each.epoch is epoch)

    def has(self, epoch: Epoch | None) -> bool:
        """Return whether the pass of ``epoch`` has not ended."""
        return any(each.epoch is epoch for each in self._open())

    def __contains__(self, wanted: LoaderPass) -> bool:
        return any(each is wanted for each in self._open())

    def _open(self) -> list[LoaderPass]:
        alive = (each() for each in self._passes)
        return [each for each in alive if each is not None and not each.epoch.over]


class RemainingSamples:
    """The rest of an order. Replaces the sampler for one epoch, for loaders that must keep their index sampler."""

    def __init__(self, home: dict[str, Any], entries: Iterable[Any]) -> None:
        self.sampler, self._home, self._entries = home["sampler"], home, entries
        home["sampler"] = self

    def __iter__(self) -> Iterator[Any]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self.sampler)

    def set_epoch(self, epoch: int) -> None:
        """Pass the number of the training epoch to the sampler."""
        if hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(epoch)

    def leave(self) -> None:
        """Put the sampler back in its place."""
        if self._home.get("sampler") is self:
            self._home["sampler"] = self.sampler


@dataclass
class Epoch:
    """One iteration over the loader.

    ``start``: all generators before its iterator was created; ``first``: before its first batch was requested.
    """

    start: dict[str, Any]
    first: dict[str, Any] | None = None
    delivered: int = 0
    begins: int = 0
    """Position in the sampler's order at which it began, if it is the rest of an order."""
    over: bool = False
    left: bool = False
    """Whether the caller, not the loader, ended it."""
    units: dict[str, Any] | None = None
    position: Position | None = None
    """None: unknown, as in an epoch that an older version began to save."""
    mixed: bool = False
    """Whether its batches had different sizes or workers, so that only the number of samples gives the position."""
    resumed: int = 0
    """Batches that were delivered to an earlier process."""
    stated: int | None = None
    """Batches that the script states it has used."""


@dataclass
class WatchedLoader:
    """The state of one watched loader."""

    original: type
    name: str = "the loader"
    epochs: int = 0
    epoch: Epoch | None = None
    base: int | None = None
    """Seed with which persistent workers were started; ``age``: the number of epochs since."""
    age: int = 0
    pending: dict[str, Any] | None = None
    resume_rng: dict[str, Any] | None = None
    rest: RemainderSampler | None = None
    """Replaces the sampler during an epoch that another number of ranks began."""
    waits: bool = False
    """Whether that epoch's next iterator is the first for these ranks."""
    unknown: bool = False
    observe: list[Observe] = field(default_factory=list)
    queue: deque[tuple[int, bytes]] | None = None
    """Indices that the sampler gave in the newest pass for batches that are not delivered yet."""
    instead: Iterable[Any] | None = None
    """Index entries of the next pass, in place of the sampler's."""
    pace: LoaderPace = field(default_factory=LoaderPace)
    earlier: Epoch | None = None
    """The previous pass, while some of its batches are not used yet."""
    whole: int = 0
    """Batches of the last complete pass."""
    resumed_at: int = 0
    """Batches that were delivered when this process resumed; 0: it did not, or between passes."""
    reported: set[str] = field(default_factory=set)
    """Events that were emitted once."""
    strict: bool = True
    """Whether a position that cannot be found again is an error; otherwise the training epoch begins from its start."""
    reset: bool = False
    """Whether the script wants the position of the next restore ignored."""
    standing: RemainingSamples | None = None
    """The rest of an order. Replaces the sampler during the pass that continues it."""
    reread: bool = False
    """Whether a stateful loader's position is found by reading its data again, as the data has no state."""
    uncounted: bool = False
    """Whether the next pass continues an epoch in which the first batches were not counted."""
    own_state: Any = None
    """The loader's own ``state_dict`` from the checkpoint, until the interrupted epoch is continued."""
    lock: Lock = field(default_factory=Lock)
    users: Users = field(default_factory=Users)
    passes: OpenPasses = field(default_factory=OpenPasses)
    interleaved: bool = False
    """Whether two passes that have not ended have delivered batches by turns."""
    reports: int = 0
    """Reports of steps and saves so far."""
    kept_s: float = float("inf")
    """Shortest time in seconds that the loader's ``state_dict`` took."""
    kept: deque[Any] | None = None
    """The loader's own ``state_dict`` after each of its last batches, while it may be ahead of the loop."""

    def resume_outer(self) -> None:
        """If a pass within another one has ended, and the loop reported no step during it, count from the outer one again."""
        if self.epoch is None or self.pending is not None or self.pace.has_steps:
            return
        outer = self.passes.outer_of(self.epoch, self.reports)
        if outer is not None:
            outer.assumed = not outer.pace.has_steps
            self.resume_pass(outer)

    def resume_pass(self, begun: LoaderPass) -> None:
        """Count from a pass again that is not the newest."""
        self.epoch, self.pace, self.epochs, self.earlier = begun.epoch, begun.pace, begun.number, None
        if self.kept is not None:
            self.kept.clear()
        begun.selects_iterator()


def loader_of(value: Any) -> Any:
    """Return the loader inside Fabric's wrapper; any other value unchanged.

    The wrapper has the loader's attributes, but not its class.
    """
    inner = vars(value).get("_dataloader") if type(value).__name__ == "_FabricDataLoader" else None
    if not isinstance(inner, DataLoader):
        return value
    inner.__dict__[WRAPPER] = ref(value)
    return inner


def set_wrapper_epoch(loader: DataLoader[Any], number: int | None) -> None:
    """Set the number of the next training epoch in Fabric's wrapper, which counts epochs and sets the sampler's epoch."""
    known = loader.__dict__.get(WRAPPER)
    wrapper = known() if known is not None else None
    if wrapper is not None and number is not None:
        wrapper._num_iter_calls = number


def is_stateful(loader: DataLoader[Any]) -> bool:
    """Return whether the loader has a ``state_dict``.

    Accelerate's loader always has the methods, so the inner loader is checked.
    """
    inner = loader.__dict__.get("base_dataloader", loader)
    return callable(getattr(inner, "state_dict", None)) and callable(getattr(inner, "load_state_dict", None))


def note_indices(loader: DataLoader[Any], watch: WatchedLoader) -> None:
    """Record the entries of the loader's index sampler, by a subclass of the loader that creates the iterator.

    Not for stateful loaders: torchdata checks the type of its index sampler.
    """
    if is_stateful(loader):
        return
    core = core_of(loader)
    inherited, stream = type(core), isinstance(core.dataset, IterableDataset)

    def noted(queue: deque[tuple[int, bytes]]) -> None:
        watch.queue = queue

    def instead() -> Iterable[Any] | None:
        return watch.instead  # until the iterator is created: an iterator with workers reads it twice

    seen = with_index_sampler(inherited, lambda inner: IndexLists(inner, None if stream else noted, instead))
    if seen is not None:
        core.__dict__[CORE] = inherited
        CLASS.__set__(core, seen)


def leave_indices(loader: DataLoader[Any]) -> None:
    """Restore the class of the loader that creates the iterator."""
    core = core_of(loader)
    inherited = core.__dict__.pop(CORE, None)
    if inherited is not None and core is not loader:
        CLASS.__set__(core, inherited)


def leave_rest(watch: WatchedLoader) -> None:
    """Put the sampler back, if a rest of its order has replaced it."""
    if watch.standing is not None:
        watch.standing.leave()
        watch.standing = None
    if watch.rest is not None:
        watch.rest.leave()
    watch.rest, watch.waits = None, False


def make_iterator(loader: DataLoader[Any], watch: WatchedLoader) -> Iterator[Any]:
    """Return the loader's own iterator for the epoch after ``watch.age``."""
    own: Callable[[DataLoader[Any]], Iterator[Any]] = watch.original.__iter__  # type: ignore[attr-defined]
    if not has_persistent_workers(loader):
        return own(loader)
    if watch.base is not None:
        watch.age += 1
    live = worker_iterator(loader)
    if live is None:
        with init_worker(loader, watch.base, watch.age):
            inner = own(loader)
        if watch.base is None:
            watch.base = base_seed(inner)
        return inner
    if watch.base is None:  # created before the loader was watched
        watch.base, watch.age = base_seed(live), 1
    if not isinstance(loader.dataset, IterDataPipe):
        set_shared_seed(live, Reseed(seed_of(watch.base, watch.age)))
    try:
        return own(loader)
    finally:
        set_shared_seed(live, None)


def samplers(loader: DataLoader[Any], *, data: bool) -> dict[str, Any]:
    """Return the loader and its nested samplers, by attribute path; with ``data`` also the nested data sets."""
    owners: dict[str, Any] = {"loader": loader}
    for place in ("batch_sampler", "sampler"):
        path, value = place, _original(getattr(loader, place, None))
        while value is not None and not any(value is other for other in owners.values()):
            owners[path] = value
            path, value = f"{path}.sampler", _original(getattr(value, "sampler", None))
    if data:
        path, value = "dataset", loader.dataset
        while value is not None and not any(value is other for other in owners.values()):
            owners[path] = value
            path, value = f"{path}.dataset", getattr(value, "dataset", None)
    return owners


def _original(sampler: Any) -> Any:
    return sampler.sampler if isinstance(sampler, (RemainderSampler, RemainingSamples)) else sampler


def own_generators(loader: DataLoader[Any]) -> dict[str, Any]:
    """Return the generators that the loader, its samplers and, in the main process, its data hold, by attribute path."""
    generators_by_path: dict[str, Any] = {}
    in_this_process = loader.num_workers == 0
    for place, owner in samplers(loader, data=in_this_process).items():
        for name, value in sorted(getattr(owner, "__dict__", {}).items()):
            if generators.is_generator(value) and not any(value is other for other in generators_by_path.values()):
                generators_by_path[f"{place}.{name}"] = value
    return generators_by_path


def own_states(loader: DataLoader[Any]) -> dict[str, Any]:
    """Return the states of the loader's own generators, by attribute path."""
    return {place: generators.generator_state(generator) for place, generator in own_generators(loader).items()}


def set_own_states(loader: DataLoader[Any], states: Mapping[str, Any]) -> None:
    """Restore ``own_states``."""
    for place, generator in own_generators(loader).items():
        if place in states:
            generators.restore_generator(generator, states[place])


def epoch_number(loader: DataLoader[Any]) -> int | None:
    """Return the number of the training epoch that the samplers or the data sets were given.

    Workers get a copy of the data set when the iterator is created, so its number in this process counts.
    """
    holders = samplers(loader, data=True).values()
    numbers = [getattr(holder, "epoch", None) for holder in holders if hasattr(holder, "set_epoch")]
    return next((number for number in numbers if isinstance(number, int)), None)


def set_epoch_number(loader: DataLoader[Any], number: int | None) -> None:
    """Give the samplers and the data sets the number of a training epoch."""
    for holder in samplers(loader, data=True).values():
        if number is not None and hasattr(holder, "set_epoch"):
            holder.set_epoch(number)


def epoch_start(loader: DataLoader[Any]) -> dict[str, Any]:
    """Return the generators' states and the number of the training epoch, before its iterator is created."""
    return {"rng": generators.host_states(), "own": own_states(loader), "epoch": epoch_number(loader)}


def restore_epoch_start(loader: DataLoader[Any], start: Mapping[str, Any]) -> None:
    """Restore ``epoch_start``."""
    set_own_states(loader, start["own"])
    set_epoch_number(loader, start["epoch"])
    generators.restore_host(start["rng"])


def batches_in(loader: DataLoader[Any]) -> float:
    """Return the number of batches of one training epoch; infinity if the loader has no length."""
    try:
        return len(loader)
    except TypeError:  # a sampler without a length
        return float("inf")


def place_of(watch: WatchedLoader) -> tuple[Epoch | None, int]:
    """Return the pass in which the training loop is, and the number of its batches that were delivered but not used."""
    epoch = watch.epoch
    if epoch is None:
        return None, 0
    if epoch.stated is not None:
        return epoch, epoch.delivered - epoch.stated
    if watch.earlier is not None and watch.pace.unused_before:
        return watch.earlier, watch.pace.unused_before
    return epoch, min(watch.pace.ahead, epoch.delivered - epoch.resumed)
