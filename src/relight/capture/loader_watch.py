"""What is known of a watched loader, its generators, and the iterator of its next pass."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from threading import RLock
from typing import Any
from weakref import ref

from torch.utils.data import DataLoader, IterableDataset, IterDataPipe

from relight.capture import rng as generators
from relight.capture.delivered import IndexLists, Position
from relight.capture.pace import LoaderPace
from relight.capture.sampler_shards import RemainderSampler
from relight.capture.units import core_of
from relight.capture.workers import Reseed, init_worker, persistent, seed_of

Observe = Callable[[Any], None]
ATTRIBUTE, CORE, WRAPPER = "_relight_watch", "_relight_core_class", "_relight_wrapper"
END = object()
CLASS: Any = vars(object)["__class__"]
"""An object's class, also where the class itself says that it is another's (Accelerate's loaders)."""


class Lock:
    """A lock that a copy of its owner does not share."""

    def __init__(self) -> None:
        self._lock = RLock()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *ignored: object) -> None:
        self._lock.release()

    def __reduce__(self) -> tuple[Any, ...]:
        return Lock, ()


class RemainingSamples:
    """Samples that are left of an order: in the sampler's place for one pass, for loaders whose index sampler must stay what it is."""

    def __init__(self, home: dict[str, Any], entries: Iterable[Any]) -> None:
        self.sampler, self._home, self._entries = home["sampler"], home, entries
        home["sampler"] = self

    def __iter__(self) -> Iterator[Any]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self.sampler)

    def set_epoch(self, epoch: int) -> None:
        """Hand the number of the training epoch to the sampler."""
        if hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(epoch)

    def leave(self) -> None:
        """Put the sampler back in its place."""
        if self._home.get("sampler") is self:
            self._home["sampler"] = self.sampler


@dataclass
class Epoch:
    """One pass over the loader: where all generators were before its iterator was made, and before its first batch was asked for."""

    start: dict[str, Any]
    first: dict[str, Any] | None = None
    delivered: int = 0
    begins: int = 0
    """Where in the sampler's order it began, if it is the rest of one."""
    over: bool = False
    left: bool = False
    """Whether the caller has said that it is over, not the loader."""
    units: dict[str, Any] | None = None
    position: Position | None = None
    """None: not known, as in an epoch that an older version began to save."""
    mixed: bool = False
    """Whether its batches had different sizes or workers, so that only the count of samples tells where it is."""
    resumed: int = 0
    """Batches that an earlier process was delivered."""
    stated: int | None = None
    """Batches that the script states it has used."""


@dataclass
class WatchedLoader:
    """What is known of one watched loader."""

    original: type
    name: str = "the loader"
    epochs: int = 0
    epoch: Epoch | None = None
    base: int | None = None
    """The seed persistent workers were born with, and the epochs since."""
    age: int = 0
    pending: dict[str, Any] | None = None
    resume_rng: dict[str, Any] | None = None
    rest: RemainderSampler | None = None
    """In the sampler's place, during an epoch that another number of ranks began."""
    waits: bool = False
    """Whether that epoch's next iterator is the first for these ranks."""
    unknown: bool = False
    observe: list[Observe] = field(default_factory=list)
    queue: deque[tuple[int, bytes]] | None = None
    """Indices that the sampler gave for batches that are not delivered yet, of the newest pass."""
    instead: Iterable[Any] | None = None
    """Index entries of the next pass, in place of the sampler's."""
    pace: LoaderPace = field(default_factory=LoaderPace)
    earlier: Epoch | None = None
    """The pass before, while batches of it are not used yet."""
    whole: int = 0
    """Batches of the last complete pass."""
    resumed_at: int = 0
    """Batches that were delivered when this process resumed; 0: it did not, or between passes."""
    reported: set[str] = field(default_factory=set)
    """Events that were emitted once."""
    strict: bool = True
    """Whether a position that cannot be found again is an error; else the training epoch begins from its start."""
    reset: bool = False
    """Whether the script wants the position of the next restore ignored."""
    standing: RemainingSamples | None = None
    """The rest of an order, in the sampler's place during the pass that continues it."""
    reread: bool = False
    """Whether the position of a loader with a state of its own is found by reading again, as its data has no state."""
    uncounted: bool = False
    """Whether the next pass continues an epoch whose first batches were not counted."""
    told: Any = None
    """What the loader itself stored as its position, until the interrupted epoch is continued."""
    lock: Lock = field(default_factory=Lock)
    kept_s: float = float("inf")
    """Seconds that asking for it took at least."""
    kept: deque[Any] | None = None
    """What the loader itself gave as its position after each of its last batches, while it may be ahead of the loop."""


def loader_of(value: Any) -> Any:
    """The loader in Fabric's wrapper, which has the loader's attributes and not its class; any other value as given."""
    inner = vars(value).get("_dataloader") if type(value).__name__ == "_FabricDataLoader" else None
    if not isinstance(inner, DataLoader):
        return value
    inner.__dict__[WRAPPER] = ref(value)
    return inner


def set_wrapper_epoch(loader: DataLoader[Any], number: int | None) -> None:
    """Give Fabric's wrapper the number of the next training epoch: it counts its passes, and sets the sampler's number from that."""
    known = loader.__dict__.get(WRAPPER)
    wrapper = known() if known is not None else None
    if wrapper is not None and number is not None:
        wrapper._num_iter_calls = number


def tells_position(loader: DataLoader[Any]) -> bool:
    """Whether the loader has a state of its own. Accelerate's has the methods, whether what it stands around can tell or not."""
    inner = loader.__dict__.get("base_dataloader", loader)
    return callable(getattr(inner, "state_dict", None)) and callable(getattr(inner, "load_state_dict", None))


def note_indices(loader: DataLoader[Any], watch: WatchedLoader) -> None:
    """Have the loader's index sampler noted, by the class of the loader that makes the iterator. Not of loaders with a state of their own:
    torchdata looks at what its index sampler is."""
    core = core_of(loader)
    if tells_position(loader) or not isinstance(vars(DataLoader).get("_index_sampler"), property):
        return
    inherited, stream = type(core), isinstance(core.dataset, IterableDataset)

    def _index_sampler(self: DataLoader[Any]) -> Any:
        def noted(queue: deque[tuple[int, bytes]]) -> None:
            watch.queue = queue

        def instead() -> Iterable[Any] | None:
            return watch.instead  # until the iterator is made: one with workers asks twice

        inner = super(seen, self)._index_sampler  # type: ignore[misc,arg-type]
        return IndexLists(inner, None if stream else noted, instead)

    seen = type(inherited.__name__, (inherited,), {"_index_sampler": property(_index_sampler), "__module__": inherited.__module__})
    core.__dict__[CORE] = inherited
    CLASS.__set__(core, seen)


def leave_indices(loader: DataLoader[Any]) -> None:
    """Give the loader that makes the iterator its class back."""
    core = core_of(loader)
    inherited = core.__dict__.pop(CORE, None)
    if inherited is not None and core is not loader:
        CLASS.__set__(core, inherited)


def leave_rest(watch: WatchedLoader) -> None:
    """Put the sampler back, where a rest of its order stands in its place."""
    if watch.standing is not None:
        watch.standing.leave()
        watch.standing = None
    if watch.rest is not None:
        watch.rest.leave()
    watch.rest, watch.waits = None, False


def make_iterator(loader: DataLoader[Any], watch: WatchedLoader) -> Iterator[Any]:
    """The loader's own iterator, for the epoch that ``watch.age`` is one before."""
    own: Callable[[DataLoader[Any]], Iterator[Any]] = watch.original.__iter__  # type: ignore[attr-defined]
    if not persistent(loader):
        return own(loader)
    if watch.base is not None:
        watch.age += 1
    if loader._iterator is None:
        with init_worker(loader, watch.base, watch.age):
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


def samplers(loader: DataLoader[Any]) -> dict[str, Any]:
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
    return sampler.sampler if isinstance(sampler, (RemainderSampler, RemainingSamples)) else sampler


def own_generators(loader: DataLoader[Any]) -> dict[str, Any]:
    """Generators that the loader, its samplers and, in the main process, its data hold, by place."""
    found: dict[str, Any] = {}
    for place, owner in samplers(loader).items():
        for name, value in sorted(getattr(owner, "__dict__", {}).items()):
            if generators.is_generator(value) and not any(value is other for other in found.values()):
                found[f"{place}.{name}"] = value
    return found


def own_states(loader: DataLoader[Any]) -> dict[str, Any]:
    """Return the states of the generators that belong to the loader, by place."""
    return {place: generators.generator_state(generator) for place, generator in own_generators(loader).items()}


def set_own_states(loader: DataLoader[Any], states: Mapping[str, Any]) -> None:
    """Put ``own_states`` back."""
    for place, generator in own_generators(loader).items():
        if place in states:
            generators.restore_generator(generator, states[place])


def epoch_number(loader: DataLoader[Any]) -> int | None:
    """Return the number of the training epoch that the samplers were given."""
    numbers = [getattr(sampler, "epoch", None) for sampler in samplers(loader).values() if hasattr(sampler, "set_epoch")]
    return next((number for number in numbers if isinstance(number, int)), None)


def set_epoch_number(loader: DataLoader[Any], number: int | None) -> None:
    """Give the samplers the number of a training epoch."""
    for sampler in samplers(loader).values():
        if number is not None and hasattr(sampler, "set_epoch"):
            sampler.set_epoch(number)


def epoch_start(loader: DataLoader[Any]) -> dict[str, Any]:
    """Return the generators and the number of the training epoch, before its iterator is made."""
    return {"rng": generators.host_states(), "own": own_states(loader), "epoch": epoch_number(loader)}


def restore_epoch_start(loader: DataLoader[Any], start: Mapping[str, Any]) -> None:
    """Put ``epoch_start`` back."""
    set_own_states(loader, start["own"])
    set_epoch_number(loader, start["epoch"])
    generators.restore_host(start["rng"])


def batches_in(loader: DataLoader[Any]) -> float:
    """Return the batches of one training epoch; infinity if the loader does not know."""
    try:
        return len(loader)
    except TypeError:  # a sampler that does not know
        return float("inf")


def place_of(watch: WatchedLoader) -> tuple[Epoch | None, int]:
    """Return the pass in which the training loop is, and its batches that were delivered and not used."""
    epoch = watch.epoch
    if epoch is None:
        return None, 0
    if epoch.stated is not None:
        return epoch, epoch.delivered - epoch.stated
    if watch.earlier is not None and watch.pace.behind:
        return watch.earlier, watch.pace.behind
    return epoch, min(watch.pace.ahead, epoch.delivered - epoch.resumed)
