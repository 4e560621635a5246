"""Loader positions with units. An ambiguous position is an error with remedies, and batches in a prefetcher do not
count as delivered."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from queue import Queue
from types import FrameType
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

import relight
from relight.capture import reset_position, used
from relight.capture.loaders import loader_state, restore_loader
from relight.capture.pace import LoaderPace
from relight.errors import ConfigError, IncompatibleState
from relight.observe import Event, subscribe

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
SAMPLES, BATCH = 48, 4


@pytest.fixture(autouse=True)
def _asking_may_take_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Allow slow answers of loaders. On a busy machine Relight stops asking a slow loader, which these tests do not
    check."""
    monkeypatch.setattr("relight.capture.loaders.KEPT_S", 60.0)


@pytest.fixture
def events() -> Iterator[list[Event]]:
    """Return emitted events about loaders."""
    received: list[Event] = []
    undo = subscribe(lambda event: received.append(event) if event.name.startswith("loader.") else None)
    yield received
    undo()


def checkpointer(path: Any, loader: DataLoader) -> relight.Checkpointer:
    """A Checkpointer that saves when asked, in this process."""
    return relight.Checkpointer(path / "run", loader=loader, background=False, save=None, signals=False)


def build(length: int = SAMPLES, size: int = BATCH, kind: type[DataLoader] = DataLoader, **options: Any) -> DataLoader:
    """A shuffled loader of numbers."""
    return kind(list(range(length)), batch_size=size, shuffle=True, **options)


def interrupted(path: Any, loader: DataLoader, batches: int) -> list[int]:
    """Train for some batches, save, end. The samples seen."""
    torch.manual_seed(0)
    with checkpointer(path, loader) as ckpt:
        seen: list[int] = []
        for step, batch in enumerate(loader):
            seen += batch.tolist()
            ckpt.step(step)
            if step + 1 == batches:
                break
        ckpt.save(batches - 1)
    torch.manual_seed(1)
    return seen


def rest_of(loader: DataLoader) -> list[int]:
    """The samples of one pass."""
    return [number for batch in loader for number in batch.tolist()]


@pytest.mark.parametrize("kind", [DataLoader, StatefulDataLoader])
@pytest.mark.parametrize("size", [3, 8, 48])
def test_another_batch_size_delivers_the_rest_once(size, kind, tmp_path) -> None:
    """Batches of another size begin with the first sample that was not used, and the next training epoch is whole."""
    seen = interrupted(tmp_path, build(kind=kind), 3)
    loader = build(size=size, kind=kind)
    with checkpointer(tmp_path, loader) as ckpt:
        ckpt.restore()
        assert sorted(seen + rest_of(loader)) == list(range(SAMPLES))
        assert sorted(rest_of(loader)) == list(range(SAMPLES))


@pytest.mark.parametrize("kind", [DataLoader, StatefulDataLoader])
def test_several_changes_in_one_training_epoch(kind, tmp_path) -> None:
    """A position that was found by samples is itself saved and found by samples."""
    seen = interrupted(tmp_path, build(kind=kind), 3)
    for number, (size, workers) in enumerate([(6, 0), (4, 2), (5, 0)]):
        loader = build(size=size, num_workers=workers, kind=kind)
        with checkpointer(tmp_path, loader) as ckpt:
            step = ckpt.restore()
            batches = iter(loader)
            seen += next(batches).tolist() + next(batches).tolist()
            ckpt.save(step + 1)
        torch.manual_seed(number)
    loader = build(size=7, kind=kind)
    with checkpointer(tmp_path, loader) as ckpt:
        ckpt.restore()
        assert sorted(seen + rest_of(loader)) == list(range(SAMPLES))


def test_a_grown_data_set_under_a_shuffle_is_refused_with_the_cause(tmp_path) -> None:
    """Name the change and both remedies in the error, before anything is restored."""
    interrupted(tmp_path, build(), 5)
    live = torch.zeros(1)
    loader = build(60)
    with checkpointer(tmp_path, loader) as ckpt:
        with pytest.raises(IncompatibleState) as caught:
            ckpt.restore()
        assert live.item() == 0
    for word in ("samples 48 → 60", "strict=False", "reset_position"):
        assert word in str(caught.value)


@pytest.mark.parametrize("way", ["strict", "reset"])
@pytest.mark.parametrize("kind", [DataLoader, StatefulDataLoader])
def test_the_ways_out_begin_the_training_epoch_from_its_start(way, kind, tmp_path, events) -> None:
    """``strict=False`` and ``reset_position`` restore the rest, and the loader delivers a whole epoch."""
    interrupted(tmp_path, build(kind=kind), 5)
    loader = build(60, kind=kind)
    with checkpointer(tmp_path, loader) as ckpt:
        if way == "reset":
            reset_position(loader)
        assert ckpt.restore(strict=way == "reset") == 5
        assert sorted(rest_of(loader)) == list(range(60))
    if way == "reset":
        assert [event.name for event in events] == ["loader.reset"]


class Clocked(IterableDataset):
    """A stream in an order that no seed gives again."""

    passes = 0

    def __iter__(self) -> Iterator[int]:
        Clocked.passes += 1
        return iter(torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(Clocked.passes)).tolist())


@pytest.mark.parametrize("kind", [DataLoader, StatefulDataLoader])
def test_a_stream_with_a_seed_of_its_own_is_refused_until_a_way_out_is_taken(kind, tmp_path, events) -> None:
    """Refuse each attempt until one of the remedies is used. Each remedy works."""
    interrupted(tmp_path, kind(Clocked(), batch_size=BATCH), 5)
    loader = kind(Clocked(), batch_size=BATCH)
    with checkpointer(tmp_path, loader) as ckpt:
        ckpt.restore()
        for _ in range(2):
            with pytest.raises(IncompatibleState, match="not those that were delivered"):
                iter(loader)
        reset_position(loader)
        assert sorted(rest_of(loader)) == list(range(SAMPLES))
    loader = kind(Clocked(), batch_size=BATCH)
    with checkpointer(tmp_path, loader) as ckpt:
        ckpt.restore(strict=False)
        assert sorted(rest_of(loader)) == list(range(SAMPLES))
    assert [event.name for event in events].count("loader.reset") == 2


class Drawing(IterableDataset):
    """A stream with noise from the process's generator."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (number + torch.rand(()) / 2 for number in range(SAMPLES))


def test_a_stream_that_draws_from_the_process_is_reported(tmp_path, events) -> None:
    """Noise that the training loop's draws change is no reason to refuse a place that is right."""
    torch.manual_seed(0)
    loader = DataLoader(Drawing(), batch_size=BATCH)
    with checkpointer(tmp_path, loader) as ckpt:
        for step, _ in enumerate(loader):
            torch.rand(3)
            if step == 4:
                break
        ckpt.save(4)
    loader = DataLoader(Drawing(), batch_size=BATCH)
    with checkpointer(tmp_path, loader) as ckpt:
        ckpt.restore()
        assert [int(number) for batch in loader for number in batch] == list(range(20, SAMPLES))
    assert [event.name for event in events] == ["loader.reread", "loader.unverified"]


class Lingering(IterableDataset):
    """A stream with a state that begins each later epoch where a resume did."""

    def __init__(self) -> None:
        self.begin = self.at = 0

    def __iter__(self) -> Iterator[int]:
        for number in range(self.begin, SAMPLES):
            self.at = number + 1
            yield number

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.begin = state["at"]


def test_training_epochs_that_get_shorter_are_reported_once(tmp_path, events) -> None:
    """The event names the loader and both lengths."""
    interrupted(tmp_path, StatefulDataLoader(Lingering(), batch_size=BATCH), 5)
    loader = StatefulDataLoader(Lingering(), batch_size=BATCH)
    with checkpointer(tmp_path, loader) as ckpt:
        ckpt.restore()
        assert [len(list(loader)) for _ in range(3)] == [7, 7, 7]
    short = [event for event in events if event.name == "loader.short"]
    assert [(event.fields["loader"], event.fields["batches"], event.fields["expected"]) for event in short] == [
        ("loader", 7, 12)
    ]


@pytest.mark.parametrize("kind", [DataLoader, StatefulDataLoader])
def test_a_checkpoint_without_units_restores_as_before(kind) -> None:
    """A position of an older version is a count of batches."""
    torch.manual_seed(0)
    loader = build(kind=kind)
    loader_state(loader)
    batches = iter(loader)
    for _ in range(3):
        next(batches)
    state = loader_state(loader)
    inner = state["own" if "own" in state else "counted"]
    for name in ("units", "samples", "checksum", "mixed", "rate"):
        inner.pop(name)
    expected = [batch.tolist() for batch in batches]
    torch.manual_seed(1)
    resumed_loader = build(kind=kind)
    restore_loader(resumed_loader, state)
    assert [batch.tolist() for batch in resumed_loader] == expected


def one_ahead(loader: DataLoader) -> Iterator[Any]:
    """A generator that prefetches one batch."""
    batches = iter(loader)
    following = next(batches)
    while following is not None:
        now, following = following, next(batches, None)
        yield now


def copies_ahead(loader: DataLoader) -> Iterator[Any]:
    """A generator that prefetches a copy of the next batch, as on an accelerator."""
    following = None
    for batch in loader:
        copy = batch.clone()
        if following is not None:
            yield following
        following = copy
    yield following


class Preloading:
    """An object that prefetches a copy of the next batch."""

    def __init__(self, loader: DataLoader) -> None:
        self.batches = iter(loader)
        self.preload()

    def preload(self) -> None:
        """Take the following batch."""
        following = next(self.batches, None)
        self.following = None if following is None else following.clone()

    def __iter__(self) -> Preloading:
        return self

    def __next__(self) -> Any:
        batch = self.following
        if batch is None:
            raise StopIteration
        self.preload()
        return batch


def in_a_thread(loader: DataLoader) -> Iterator[Any]:
    """A thread that fills a queue."""
    queue: Queue[Any] = Queue(3)

    def fill() -> None:
        for batch in loader:
            queue.put(batch)
        queue.put(None)

    threading.Thread(target=fill, daemon=True).start()
    while (batch := queue.get()) is not None:
        yield batch


def several_ahead(loader: DataLoader) -> Iterator[Any]:
    """A generator that prefetches three batches."""
    batches: list[Any] = []
    for batch in loader:
        batches.append(batch)
        if len(batches) > 3:
            yield batches.pop(0)
    yield from batches


def passed_on(loader: DataLoader) -> Iterator[Any]:
    """A generator without a prefetch."""
    for batch in loader:
        yield batch.clone()


AHEAD = {
    "one": one_ahead,
    "copies": copies_ahead,
    "object": Preloading,
    "thread": in_a_thread,
    "several": several_ahead,
}


def trained(path: Any, loader: DataLoader, through: Callable[[DataLoader], Any], steps: int, each: bool) -> list[int]:
    """Train with a prefetcher, and save the last step."""
    torch.manual_seed(0)
    seen: list[int] = []
    ckpt = checkpointer(path, loader)
    for step, batch in enumerate(through(loader)):
        seen += batch.tolist()
        if each:
            ckpt.step(step)
        if step + 1 == steps:
            break
    ckpt.save(steps - 1)
    ckpt.close(save=False)
    torch.manual_seed(1)
    return seen


@pytest.mark.parametrize("each", [True, False], ids=["each step", "saves alone"])
@pytest.mark.parametrize("steps", [2, 5, 10, 11])
@pytest.mark.parametrize("name", AHEAD)
@pytest.mark.parametrize("kind", [DataLoader, StatefulDataLoader])
def test_prefetched_batches_are_delivered_again(kind, name, steps, each, tmp_path) -> None:
    """Lose no batch and use none twice, wherever the save is."""
    if name == "several" and steps < 5 and not each:
        pytest.skip("one save of two steps does not show how many batches a step uses")
    seen = trained(tmp_path, build(kind=kind), AHEAD[name], steps, each)
    loader = build(kind=kind)
    with checkpointer(tmp_path, loader) as ckpt:
        ckpt.restore()
        rest = [number for batch in AHEAD[name](loader) for number in batch.tolist()]
    assert sorted(seen + rest) == list(range(SAMPLES))


def accumulated(loader: DataLoader, path: Any, shares: int, direct: bool) -> tuple[list[int], int]:
    """A loop that uses several batches for a step, with an example taken first. The samples seen, and the batches delivered."""
    torch.manual_seed(0)
    ckpt = checkpointer(path, loader)
    batches = iter(loader) if direct else iter(passed_on(loader))
    seen = next(batches).tolist() if direct else []
    for step in range(3):
        for _ in range(shares):
            seen += next(batches).tolist()
        ckpt.step(step)
    ckpt.save(2)
    ckpt.close(save=False)
    return seen, len(seen) // BATCH


@pytest.mark.parametrize("direct", [True, False], ids=["direct", "passed on"])
@pytest.mark.parametrize("shares", [1, 2, 3])
def test_an_ordinary_loop_has_used_all_that_was_delivered(shares, direct, tmp_path, events) -> None:
    """Accumulation, a wrapper that holds nothing, and a batch taken as an example are no prefetchers."""
    loader = build()
    seen, count = accumulated(loader, tmp_path, shares, direct)
    loader = build()
    with checkpointer(tmp_path, loader) as ckpt:
        ckpt.restore()
        rest = rest_of(loader)
    assert len(rest) == SAMPLES - count * BATCH
    assert sorted(seen + rest) == list(range(SAMPLES))
    assert "loader.prefetched" not in [event.name for event in events]


def test_a_loader_that_is_ahead_is_reported_once(tmp_path, events) -> None:
    """One event names the loader and the call that corrects the count."""
    trained(tmp_path, build(), one_ahead, 6, True)
    assert [(event.name, event.fields["loader"]) for event in events] == [("loader.prefetched", "loader")]


def test_used_states_what_was_used(tmp_path) -> None:
    """The stated count is the saved position, until the next call."""
    torch.manual_seed(0)
    loader = build()
    with checkpointer(tmp_path, loader) as ckpt:
        seen = []
        for step, batch in enumerate(copies_ahead(loader)):
            seen += batch.tolist()
            used(loader, step + 1)
            if step == 0:
                break
        ckpt.save(0)
    loader = build()
    with checkpointer(tmp_path, loader) as ckpt:
        ckpt.restore()
        assert sorted(seen + rest_of(loader)) == list(range(SAMPLES))


@pytest.mark.parametrize("wrong", [-1, 99, True, "3"])
def test_used_refuses_an_invalid_count_of_batches(wrong, tmp_path) -> None:
    """Refuse more batches than were delivered, and a value that is not a count."""
    loader = build()
    with checkpointer(tmp_path, loader):
        next(iter(loader))
        with pytest.raises(ConfigError, match=r"used\(\) failed"):
            used(loader, wrong)


def test_a_first_step_that_leaves_it_open_is_noted_in_the_checkpoint(tmp_path) -> None:
    """Add a note to the checkpoint if, after one step, it is unknown whether two delivered batches were used."""
    loader = build()
    torch.manual_seed(0)
    with checkpointer(tmp_path, loader) as ckpt:
        next(copies_ahead(loader))
        ckpt.step(0)
        notes = loader_doubts_of(loader)
    assert any("unknown" in note for note in notes)


def loader_doubts_of(loader: DataLoader) -> list[str]:
    """Notes of a save made now."""
    from relight.capture.loaders import loader_doubts

    return loader_doubts("loader", loader)


def test_a_resume_is_no_python_warning(tmp_path) -> None:
    """A script under ``-W error`` is resumed."""
    code = (
        "import sys, torch, relight\n"
        "torch.set_num_threads(1)\n"
        "loader = torch.utils.data.DataLoader(list(range(8)), batch_size=2, shuffle=True)\n"
        "ckpt = relight.Checkpointer(sys.argv[1], loader=loader, background=False, signals=False)\n"
        "step = ckpt.restore()\n"
        "next(iter(loader))\n"
        "ckpt.save(step)\n"
        "ckpt.close(save=False)\n"
    )
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-W", "error", "-c", code, str(tmp_path / "run")],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("kind", [DataLoader, StatefulDataLoader])
def test_asking_a_loader_for_its_position_ends_with_the_first_report(kind, tmp_path, monkeypatch) -> None:
    """A loop without a prefetcher pays for one position of its loader's own, not one for each batch."""
    asked = []
    if kind is StatefulDataLoader:
        own = StatefulDataLoader.state_dict
        monkeypatch.setattr(StatefulDataLoader, "state_dict", lambda self: asked.append(1) or own(self))
    loader = build(kind=kind)
    ckpt = checkpointer(tmp_path, loader)
    for step, _ in enumerate(loader):
        ckpt.step(step)
        if not step:
            asked.clear()
            ckpt._capture.boundary.remember = lambda *args, **kwargs: None
    ckpt.close(save=False)
    assert not asked


def test_a_batch_of_any_size_costs_a_few_reads(monkeypatch) -> None:
    """At most eight positions of a tensor are read, and no tensor is copied."""
    from relight.capture import delivered

    read: list[int] = []
    real = delivered.ctypes.string_at
    monkeypatch.setattr(
        delivered.ctypes, "string_at", lambda address, length: read.append(length) or real(address, length)
    )
    delivered.checksum_of({"x": torch.zeros(1 << 20), "y": torch.zeros(8, dtype=torch.int64), "z": "text"})
    assert len(read) == 9 and sum(read) == 8 * 64 + 64


def test_no_frame_outlives_its_generator() -> None:
    """CPython 3.13 ends with a segmentation fault at the variables of such a frame. The next report counts as without it."""
    pace = LoaderPace()

    def record(batch: torch.Tensor) -> torch.Tensor:
        pace.take(batch)
        return batch

    def deliver(batch: torch.Tensor) -> torch.Tensor:
        return record(batch)

    def prefetched() -> Iterator[torch.Tensor]:
        ahead = deliver(torch.zeros(1))
        for number in range(1, 4):
            batch, ahead = ahead, deliver(torch.full((1,), number))
            yield batch

    batches = prefetched()
    next(batches)
    assert pace._frame_of_generator() is batches.gi_frame  # type: ignore[attr-defined]
    assert not any(isinstance(value, FrameType) for value in vars(pace).values())
    del batches
    gc.collect()
    assert pace._frame_of_generator() is None
    pace.report(1)
    assert pace.ahead == 0
