"""Loaders that the script uses in unusual ways: several passes at once, batches that fail, several Checkpointers."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter
from torchdata.stateful_dataloader import StatefulDataLoader

import relight
from relight.capture import watch_loaders
from relight.capture.loaders import loader_doubts

BATCHES, BATCH = 12, 4
BROKEN = (7, 30)


class Samples(Dataset):
    """Indices with random numbers. Some samples cannot be read."""

    def __init__(self, broken: tuple[int, ...] = ()) -> None:
        self.broken = broken

    def __len__(self) -> int:
        return BATCHES * BATCH

    def __getitem__(self, index: int) -> tuple[int, float]:
        if index in self.broken:
            raise ValueError(f"sample {index} is broken")
        return index, float(torch.rand(()))


def build(kind: type[DataLoader] = DataLoader, size: int = BATCH, broken: tuple[int, ...] = (), **options: Any) -> Any:
    """Return a shuffling loader, after seeding."""
    torch.manual_seed(0)
    return kind(Samples(broken), batch_size=size, shuffle=True, **options)


def batches_of(loader: DataLoader) -> Iterator[list[list[float]]]:
    """Yield the batches of one pass. A batch that cannot be read is left out, as robust scripts do."""
    batches = iter(loader)
    while True:
        try:
            batch = next(batches)
        except StopIteration:
            return
        except ValueError:
            continue
        yield [part.tolist() for part in batch]


def train(
    run: Path,
    loader: Any,
    stop: int,
    within: Callable[[Any], object] = lambda loader: None,
    at: tuple[int, ...] = (3, 16),
) -> list[Any]:
    """Train from the newest checkpoint to step ``stop``, and save each step. Return the batches.

    ``within``: called with the loader in the steps ``at``, before the step is reported.
    """
    seen = []
    ckpt = relight.Checkpointer(run, loader=loader, save=relight.every(steps=1), background=False)
    step = ckpt.restore()
    while step < stop:
        for batch in batches_of(loader):
            seen.append(batch)
            if step in at:
                within(loader)
            ckpt.step(step)
            step += 1
            if step == stop:
                break
    ckpt.close()
    return seen


def peek(loader: Any) -> Any:
    """Take one batch, as a script that logs samples does."""
    return next(iter(loader))


WITHIN = {"a whole pass": list, "one batch": peek}


@pytest.mark.parametrize("stop", [4, 6, 18])
@pytest.mark.parametrize("within", WITHIN)
@pytest.mark.parametrize("kind", [DataLoader, StatefulDataLoader])
def test_a_pass_within_a_training_epoch_leaves_the_position(kind, within, stop, tmp_path) -> None:
    """After an evaluation on the training data, a resume delivers the batches that a run without a stop delivers."""
    straight = train(tmp_path / "straight", build(kind), 20, WITHIN[within])
    first = train(tmp_path / "stopped", build(kind), stop, WITHIN[within])
    torch.manual_seed(1)
    assert first + train(tmp_path / "stopped", build(kind), 20, WITHIN[within]) == straight


@pytest.mark.parametrize("stop", [1, 4, 13, 18])
@pytest.mark.parametrize("within", WITHIN)
@pytest.mark.parametrize("kind", [DataLoader, StatefulDataLoader])
def test_a_pass_within_the_first_step_of_a_training_epoch(kind, within, stop, tmp_path) -> None:
    """The same before the loop has reported a step of the outer pass: an evaluation at step 0, and at an epoch's start."""
    straight = train(tmp_path / "straight", build(kind), 20, WITHIN[within], at=(0, BATCHES))
    first = train(tmp_path / "stopped", build(kind), stop, WITHIN[within], at=(0, BATCHES))
    torch.manual_seed(1)
    assert first + train(tmp_path / "stopped", build(kind), 20, WITHIN[within], at=(0, BATCHES)) == straight


@pytest.mark.parametrize("stop", [4, 18])
def test_a_pass_with_workers_within_a_training_epoch(stop, tmp_path) -> None:
    """The same holds for workers that are not persistent."""
    straight = train(tmp_path / "straight", build(num_workers=1), 20, list)
    first = train(tmp_path / "stopped", build(num_workers=1), stop, list)
    assert first + train(tmp_path / "stopped", build(num_workers=1), 20, list) == straight


def test_an_iterator_that_is_held_and_not_used_is_not_the_training_epoch(tmp_path) -> None:
    """A batch that was taken once before the training, by an iterator that stays alive, has no effect on the position."""
    loader = build()
    watch_loaders({"data": loader})
    unused = iter(loader)
    next(unused)
    first = train(tmp_path / "run", loader, BATCHES)
    assert sorted(index for indices, _ in first for index in indices) == list(range(BATCHES * BATCH))
    loader = build()
    rest = train(tmp_path / "run", loader, 2 * BATCHES)
    assert sorted(index for indices, _ in rest for index in indices) == list(range(BATCHES * BATCH))
    del unused


@pytest.mark.parametrize("report", ["step", "save"])
@pytest.mark.parametrize("kind", [DataLoader, StatefulDataLoader])
def test_a_held_iterator_is_not_the_position_of_reports_once_an_epoch(kind, report, tmp_path) -> None:
    """A script that reports or saves once a training epoch resumes at the next epoch, also with an unused iterator alive.

    The first report is ambiguous, since an evaluation within the first step has the same order of calls.
    """
    loader = build(kind)
    ckpt = relight.Checkpointer(tmp_path / "run", loader=loader, save=relight.every(steps=1), background=False)
    epoch = ckpt.restore()
    unused = iter(loader)
    next(unused)
    for number in range(3):
        list(loader)
        if report == "step":
            ckpt.step(epoch + number)
        else:
            ckpt.save(epoch + number, block=True)
        assert any("older iterator" in doubt for doubt in loader_doubts("loader", loader)) == (number == 0)
    ckpt.close()
    expected = [batch[0].tolist() for batch in loader]
    del unused
    loader = build(kind)
    ckpt = relight.Checkpointer(tmp_path / "run", loader=loader, save=None, background=False)
    ckpt.restore()
    assert [batch[0].tolist() for batch in loader] == expected
    ckpt.close(save=False)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("stop", [3, 9, 13, 20])
def test_a_batch_that_fails_and_is_left_out_is_left_out_again(stop, workers, tmp_path) -> None:
    """A resume does not end with the error of a batch that the script had left out, and delivers the same batches."""
    straight = train(tmp_path / "straight", build(broken=BROKEN, num_workers=workers), 22)
    first = train(tmp_path / "stopped", build(broken=BROKEN, num_workers=workers), stop)
    assert first + train(tmp_path / "stopped", build(broken=BROKEN, num_workers=workers), 22) == straight


def test_a_batch_that_came_too_late_is_delivered_by_the_next_try(tmp_path, monkeypatch) -> None:
    """After a timeout, the loader gives the same batch again: it does not count as left out."""
    straight = train(tmp_path / "straight", build(num_workers=1, timeout=60), 8)
    loader, late = build(num_workers=1, timeout=60), [2, 5]
    own = _MultiProcessingDataLoaderIter._try_get_data

    def try_get(self: Any, timeout: float = 5.0) -> Any:
        if late and self._rcvd_idx == late[0]:
            late.pop(0)
            return False, None
        return own(self, timeout)

    monkeypatch.setattr(_MultiProcessingDataLoaderIter, "_try_get_data", try_get)
    ckpt = relight.Checkpointer(tmp_path / "run", loader=loader, save=relight.every(steps=1), background=False)
    step, seen, batches, failed = ckpt.restore(), [], iter(loader), 0
    while step < 7:
        try:
            batch = next(batches)
        except RuntimeError as error:
            assert "timed out" in str(error)
            failed += 1
            continue
        seen.append([part.tolist() for part in batch])
        ckpt.step(step)
        step += 1
    ckpt.close()
    assert failed == 2
    assert seen + train(tmp_path / "run", build(num_workers=1, timeout=60), 8) == straight


def test_iterators_that_deliver_by_turns_are_reported(tmp_path) -> None:
    """A checkpoint has one position for a loader, so pairs of batches of two iterators would change silently."""
    loader = build()
    ckpt = relight.Checkpointer(tmp_path / "run", loader=loader, save=relight.every(steps=1), background=False)
    step = ckpt.restore()
    for _ in zip(loader, loader, strict=True):
        ckpt.step(step)
        step += 1
        if step == 3:
            break
    assert any("by turns" in doubt for doubt in loader_doubts("loader", loader))
    ckpt.close()


def test_the_samples_of_a_failed_batch_count_as_used(tmp_path) -> None:
    """With another batch size, each other sample of the training epoch is delivered once."""
    order = [batch[0].tolist() for batch in build()]
    used = train(tmp_path / "run", build(broken=BROKEN), 8)
    assert [indices for indices, _ in used] == [each for each in order if not set(BROKEN) & set(each)][:8]
    begins = order.index(used[-1][0]) + 1
    assert begins > 8, "a batch has failed"
    loader = build(size=1, broken=BROKEN)
    ckpt = relight.Checkpointer(tmp_path / "run", loader=loader, save=None, background=False)
    ckpt.restore()
    rest = [index for indices, _ in batches_of(loader) for index in indices]
    assert rest == [index for each in order[begins:] for index in each if index not in BROKEN]
    ckpt.close(save=False)


def test_an_error_that_is_new_at_the_resume_is_raised(tmp_path) -> None:
    """More failures than before the stop are not left out silently."""
    train(tmp_path / "run", build(), 9)
    loader = build(broken=BROKEN)
    ckpt = relight.Checkpointer(tmp_path / "run", loader=loader, save=None, background=False)
    ckpt.restore()
    with pytest.raises(ValueError, match="is broken"):
        iter(loader)
    ckpt.close(save=False)


def test_an_interrupt_while_batches_are_read_again_keeps_the_position(tmp_path, monkeypatch) -> None:
    """The next pass after an interrupted one continues at the checkpoint's position, and not at a new training epoch."""
    straight = train(tmp_path / "straight", build(), 8)
    train(tmp_path / "stopped", build(), 5)
    loader = build()
    ckpt = relight.Checkpointer(tmp_path / "stopped", loader=loader, save=None, background=False)
    ckpt.restore()
    with monkeypatch.context() as patched:
        patched.setattr(Samples, "__getitem__", lambda self, index: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            iter(loader)
    rest = batches_of(loader)
    assert [next(rest) for _ in range(3)] == straight[5:]
    ckpt.close(save=False)


def test_the_end_of_another_checkpointer_leaves_the_loader_watched(tmp_path) -> None:
    """A cell is run again while the first Checkpointer is still there: saves of the second have the loader's position."""
    straight = train(tmp_path / "straight", build(), 9)
    loader, seen, kept = build(), [], []
    for stop in (3, 6):
        ckpt = relight.Checkpointer(tmp_path / "run", loader=loader, save=relight.every(steps=1), background=False)
        kept.append(ckpt)
        step = ckpt.restore()
        for batch in batches_of(loader):
            seen.append(batch)
            ckpt.step(step)
            step += 1
            if step == stop:
                break
    kept[-1].close()
    seen += train(tmp_path / "run", build(), 9)
    assert [indices for indices, _ in seen] == [indices for indices, _ in straight]
    assert type(loader) is DataLoader
    kept.clear()
    gc.collect()
