"""``every(epochs=…)`` and triggers of the user's own, in a training loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import relight
from relight.errors import ConfigError
from relight.policy.triggers import check_trigger


class Endless(IterableDataset[torch.Tensor]):
    """A stream that does not know its length."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.arange(10.0).reshape(10, 1))


def samples(count: int) -> Dataset[Any]:
    return TensorDataset(torch.arange(float(count)).reshape(count, 1))


def train(
    path: Path,
    save: relight.Trigger,
    epochs: int,
    *,
    data: Dataset[Any] | None = None,
    each: int = 1,
    stop: int | None = None,
    loaders: Callable[[DataLoader[Any]], dict[str, Any]] = lambda loader: {"data": loader},
    count: bool = False,
) -> list[tuple[int, str]]:
    """Train with batches of two, ``each`` of them a step. Return the steps of the saves of this process, with their reasons."""
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    loader = DataLoader(samples(10) if data is None else data, batch_size=2)
    components: dict[str, Any] = {"model": model, "optimizer": optimizer, **loaders(loader)}
    ckpt = relight.Checkpointer(path / "run", save=save, signals=False, background=False, **components)
    saves, step = list[tuple[int, str]](), ckpt.restore()
    epoch = -1
    while step < epochs * (5 // each):  # the rest of an epoch that is saved at its end has no batch
        epoch += 1
        for number, batch in enumerate(loader, 1):
            model(batch[0] if isinstance(batch, list) else batch).square().mean().backward()
            if number % each:
                continue
            optimizer.step()
            optimizer.zero_grad()
            done = ckpt.step(step, **({"epoch": epoch} if count else {}))
            if done is not None:
                assert done.error is None
                saves.append((step, done.reason))
            if step == stop:
                ckpt.close(save=False)
                return saves
            step += 1
    ckpt.close(save=False)
    return saves


def test_each_epoch_is_saved_at_its_last_step(tmp_path: Path) -> None:
    """Five batches an epoch: the saves are at steps 4, 9 and 14, and the position that each stores is the end of its epoch."""
    saves = train(tmp_path, relight.every(epochs=1), 3)
    assert saves == [(4, "every epoch: 1 done"), (9, "every epoch: 2 done"), (14, "every epoch: 3 done")]
    state = relight.load(tmp_path / "run", 9)
    assert state["data"]["counted"]["delivered"] in (0, 5)


def test_every_second_epoch(tmp_path: Path) -> None:
    """The count is of the run's epochs, not since the last save."""
    assert train(tmp_path, relight.every(epochs=2), 5) == [
        (9, "every 2 epochs: 2 done"),
        (19, "every 2 epochs: 4 done"),
    ]


@pytest.mark.parametrize("stop", [6, 7, 9, 10])
def test_a_resumed_run_saves_where_the_uninterrupted_one_would(tmp_path: Path, stop: int) -> None:
    """End epochs 2 and 4 at the same steps, wherever the process ended."""
    save = relight.every(epochs=2) | relight.every(steps=1)
    before = train(tmp_path, save, 4, stop=stop)
    after = train(tmp_path, save, 4)
    assert after[0][0] == stop + 1
    whole = [(step, reason) for step, reason in before + after if "epochs" in reason]
    assert whole == [(9, "every 2 epochs: 2 done, every 1 steps"), (19, "every 2 epochs: 4 done, every 1 steps")]


def test_batches_that_are_summed_up(tmp_path: Path) -> None:
    """With two batches a step, one of five batches remains. The epoch has ended when the next one begins."""
    assert [step for step, _ in train(tmp_path, relight.every(epochs=1), 3, each=2)] == [2, 4]


def test_a_stream_without_a_length(tmp_path: Path) -> None:
    """A stream's end is known when the next pass begins. The first step of that pass is saved."""
    assert [step for step, _ in train(tmp_path, relight.every(epochs=1), 3, data=Endless())] == [5, 10]


def test_a_batch_drawn_before_training_is_no_epoch(tmp_path: Path) -> None:
    """A script that draws one batch to find the model's shapes starts no epoch."""
    model, loader = nn.Linear(1, 1), DataLoader(samples(10), batch_size=2)
    with relight.Checkpointer(
        tmp_path / "run", model=model, data=loader, save=relight.every(epochs=1), signals=False, background=False
    ) as ckpt:
        ckpt.restore()
        next(iter(loader))
        step, saved = 0, []
        for _ in range(2):
            for _batch in loader:
                if ckpt.step(step) is not None:
                    saved.append(step)
                step += 1
    assert saved == [4, 9]


def test_without_a_loader_step_counts_epochs(tmp_path: Path) -> None:
    """Save the first step of the next epoch if only ``epoch=`` is given."""
    assert [step for step, _ in train(tmp_path, relight.every(epochs=1), 3, loaders=lambda loader: {}, count=True)] == [
        5,
        10,
    ]


def test_uncountable_epochs_are_refused_at_the_first_step(tmp_path: Path) -> None:
    """Refuse an epoch trigger without a loader or ``epoch=``, with two loaders and no name, and with an unknown
    name."""
    with pytest.raises(ConfigError, match=r"a loader, or epoch= of step"):
        train(tmp_path / "a", relight.every(epochs=1), 1, loaders=lambda loader: {})
    other = DataLoader(samples(4))
    two: Callable[[DataLoader[Any]], dict[str, Any]] = lambda loader: {"data": loader, "val": other}  # noqa: E731
    with pytest.raises(ConfigError, match="one of the loaders data, val"):
        train(tmp_path / "b", relight.every(epochs=1), 1, loaders=two)
    with pytest.raises(ConfigError, match="names no loader"):
        train(tmp_path / "c", relight.every(epochs=1, loader="train"), 1, loaders=two)
    assert [step for step, _ in train(tmp_path / "d", relight.every(epochs=1, loader="data"), 2, loaders=two)] == [4, 9]
    with pytest.raises(ConfigError, match="epochs must be a whole number"):
        relight.every(epochs=0)
    with pytest.raises(ConfigError, match="names the loader of epochs="):
        relight.every(steps=3, loader="data")


class Plateau(relight.Trigger):
    """Save when the loss has not fallen for ``patience`` steps."""

    def __init__(self, patience: int) -> None:
        self.patience, self.least, self.since = patience, float("inf"), 0

    @property
    def metrics(self) -> frozenset[tuple[str, str]]:
        return frozenset({("loss", "min")})

    def due(self, facts: relight.TriggerInput) -> str | None:
        loss = facts.metrics.get("loss", float("inf"))
        self.since = 0 if loss < self.least else self.since + 1
        self.least = min(self.least, loss)
        if self.since < self.patience:
            return None
        self.since = 0
        return f"loss {loss:g} has not fallen for {self.patience} steps"


def test_a_trigger_of_ones_own(tmp_path: Path) -> None:
    """Read the metric that the trigger names, alone or combined with others. Its reason is recorded in the
    checkpoint."""
    model, losses = nn.Linear(1, 1), [3.0, 2.0, 2.5, 2.5, 1.0, 1.0, 1.0, 1.0]
    for name, trigger in (("a", Plateau(2)), ("b", Plateau(2) | relight.every(steps=100))):
        with relight.Checkpointer(tmp_path / name, model=model, save=trigger, signals=False, background=False) as ckpt:
            saved = {
                step: done.reason
                for step, loss in enumerate(losses)
                if (done := ckpt.step(step, loss=loss)) is not None
            }
        assert saved == {3: "loss 2.5 has not fallen for 2 steps", 6: "loss 1 has not fallen for 2 steps"}


def test_the_hint_for_a_text_or_a_number_in_place_of_a_trigger_can_be_written() -> None:
    """``save="10m"`` names the call that saves so; any other text gets examples."""
    for value, hint in (("10m", "save=relight.every('10m')"), (500, "save=relight.every(500)")):
        with pytest.raises(ConfigError) as error:
            check_trigger(value)
        assert error.value.hint == hint
    for value in ("every epoch", "500", 0):
        with pytest.raises(ConfigError) as error:
            check_trigger(value)
        assert error.value.hint == "such as save=relight.every(steps=500), save=relight.every(epochs=1)"
