"""State that changes in training and is in no ``state_dict()``. It is reported once after a save, and listed by
``describe_state()``."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import relight
from relight.observe import Event, subscribe


@pytest.fixture(name="events")
def events_fixture() -> Iterator[list[Event]]:
    """Return the events of one test."""
    received: list[Event] = []
    undo = subscribe(received.append)
    yield received
    undo()


class Net(nn.Module):
    """A linear layer that calls ``change`` in each forward pass."""

    def __init__(self, change: Callable[[Any, torch.Tensor], None], **attributes: object) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 1)
        self.change = change
        self.width, self.note = 3, "constant"
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.change(self, x)
        return torch.as_tensor(self.inner(x))


class WithExtraState(Net):
    """A module that saves its counter as extra state."""

    def get_extra_state(self) -> int:
        return int(self.updates)

    def set_extra_state(self, state: int) -> None:
        self.updates = state


class Curriculum:
    """A stateful object with a ``state_dict`` that omits ``stage``."""

    def __init__(self) -> None:
        self.seen, self.stage, self._best = 0, "easy", 0.0

    def update(self) -> None:
        self.seen, self.stage, self._best = self.seen + 1, f"stage {self.seen}", self.seen / 2

    def state_dict(self) -> dict[str, Any]:
        return {"samples_seen": self.seen, "best": self._best}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen, self._best = state["samples_seen"], state["best"]


class Counting(torch.optim.SGD):
    """An optimizer with its own counter."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1)
        self.rounds = 0

    def step(self, closure: Any = None) -> Any:
        self.rounds += 1
        return super().step(closure)


def counter(net: Any, x: torch.Tensor) -> None:
    net.updates += 1


def replaced_tensor(net: Any, x: torch.Tensor) -> None:
    net.mean = net.mean * 0.9 + x.mean(0) * 0.1


def tensor_in_place(net: Any, x: torch.Tensor) -> None:
    net.mean.lerp_(x.mean(0), 0.1)


def window(net: Any, x: torch.Tensor) -> None:
    net.losses.append(float(x.sum()))


def table(net: Any, x: torch.Tensor) -> None:
    net.counts["seen"] = net.counts.get("seen", 0) + 1


def activation(net: Any, x: torch.Tensor) -> None:
    net.last = net.inner(x)


def nothing(net: Any, x: torch.Tensor) -> None:
    pass


def train(
    path: Path, events: list[Event], steps: int = 4, after: Callable[[], None] = lambda: None, **components: Any
) -> list[list[str]]:
    """Train ``components["model"]`` with saves in each step. Return the attributes that events name, and check ``describe_state()`` against them."""
    model = components["model"]
    optimizer = components.setdefault("optimizer", torch.optim.SGD(model.parameters(), lr=0.1))
    with relight.Checkpointer(
        path, **components, save=relight.every(steps=1), background=False, on_failure="raise"
    ) as ckpt:
        for step in range(steps):
            optimizer.zero_grad()
            model(torch.randn(4, 3)).square().mean().backward()
            optimizer.step()
            after()
            ckpt.step(step)
        reported = [event.fields for event in events if event.name == "state.missed"]
        missed = ckpt.describe_state()["missed"]
        assert all(any(fields["message"] == sentence for sentence in missed) for fields in reported), (reported, missed)
    return [fields["attributes"] for fields in reported]


@pytest.mark.parametrize(
    ("change", "attributes", "expected"),
    [
        (counter, {"updates": 0}, ["updates"]), (replaced_tensor, {"mean": torch.zeros(3)}, ["mean"]),
        (tensor_in_place, {"mean": torch.zeros(3)}, ["mean"]), (window, {"losses": deque(maxlen=8)}, ["losses"]),
        (window, {"losses": []}, ["losses"]), (table, {"counts": {}}, ["counts"]),
    ],
    ids=["counter", "replaced tensor", "tensor", "deque", "list", "dict"],
)  # fmt: skip
def test_an_attribute_of_a_module_is_reported_once(
    tmp_path: Path, events: list[Event], change: Callable[..., None], attributes: dict[str, Any], expected: list[str]
) -> None:
    """Make one report in four saves. It names the component, the attribute and the ways to save it."""
    assert train(tmp_path / "run", events, model=Net(change, **attributes)) == [expected]
    [message] = [event.fields["message"] for event in events if event.name == "state.missed"]
    assert (
        message.startswith(f"model: the attribute {expected[0]} changed in training and is in no checkpoint")
        and "register_buffer()" in message
    )


def test_an_attribute_of_a_module_below_is_named_by_its_path(tmp_path: Path, events: list[Event]) -> None:
    """Name the attribute of a submodule by the path of ``named_modules``."""
    model = nn.Sequential(nn.Linear(3, 3), Net(counter, updates=0))
    assert train(tmp_path / "run", events, model=model) == [["1.updates"]]


@pytest.mark.parametrize(
    "model",
    [Net(activation), Net(nothing), WithExtraState(counter, updates=0), nn.BatchNorm1d(3)],
    ids=lambda module: type(module).__name__,
)
def test_state_without_effect_on_a_resume_is_not_reported(
    tmp_path: Path, events: list[Event], model: nn.Module
) -> None:
    """Ignore constants, activations of the last forward pass, extra state, and torch's own modules."""
    assert train(tmp_path / "run", events, model=model) == []


def test_objects_and_optimizers_with_their_own_state_are_checked(tmp_path: Path, events: list[Event]) -> None:
    """Check objects and optimizers with ``state_dict``. Values that are saved under another name, or without a leading
    underscore, count as saved."""
    model, curriculum = Net(nothing), Curriculum()
    optimizer = Counting(model.parameters())
    reported = train(
        tmp_path / "run", events, model=model, optimizer=optimizer, curriculum=curriculum, after=curriculum.update
    )
    assert reported == [["rounds"], ["stage"]]


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_a_given_optimizer_that_never_steps_is_reported(
    tmp_path: Path, events: list[Event], kind: type[torch.optim.Optimizer]
) -> None:
    """Report a given optimizer that never steps while a second optimizer trains the same parameters."""
    model = nn.Linear(3, 1)
    given, used = kind(model.parameters(), lr=0.1), kind(model.parameters(), lr=0.1)
    with relight.Checkpointer(
        tmp_path / "run", model=model, optimizer=given, save=relight.every(steps=1), background=False
    ) as ckpt:
        for step in range(4):
            model(torch.randn(4, 3)).square().mean().backward()
            used.step()
            ckpt.step(step)
    [message] = [event.fields["message"] for event in events if event.name == "optimizer.missed"]
    assert message.startswith(
        f"the given optimizer has not made one step, and another {kind.__name__} steps 2 of its parameters"
    )


def test_given_optimizers_that_take_turns_are_not_reported(tmp_path: Path, events: list[Event]) -> None:
    """Ignore a second given optimizer of the same parameters, and a first one that steps late."""
    model = nn.Linear(3, 1)
    first, second = torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.AdamW(model.parameters())
    with relight.Checkpointer(
        tmp_path / "run", model=model, first=first, second=second, save=relight.every(steps=1), background=False
    ) as ckpt:
        for step in range(4):
            model(torch.randn(4, 3)).square().mean().backward()
            (first if step > 2 else second).step()
            ckpt.step(step)
    assert not [event for event in events if event.name == "optimizer.missed"]


def test_an_optimizer_of_a_model_that_was_not_given_is_reported(tmp_path: Path, events: list[Event]) -> None:
    """Report the optimizer of a second network that trains next to the given one, unless another Checkpointer has
    it."""
    model, critic, elsewhere = nn.Linear(3, 1), nn.Linear(1, 1), nn.Linear(1, 1)
    optimizers = [torch.optim.SGD(network.parameters(), lr=0.1) for network in (model, critic, elsewhere)]
    second_ckpt = relight.Checkpointer(
        tmp_path / "other", other=elsewhere, optimizer=optimizers[2], save=None, background=False
    )
    with relight.Checkpointer(
        tmp_path / "run", model=model, optimizer=optimizers[0], save=relight.every(steps=1), background=False
    ) as ckpt:
        for step in range(4):
            (critic(model(torch.randn(4, 3))) + elsewhere(torch.ones(1))).square().mean().backward()
            for optimizer in optimizers:
                optimizer.step()
            ckpt.step(step)
    second_ckpt.close(save=False)
    messages = [event.fields["message"] for event in events if event.name == "optimizer.missed"]
    assert len(messages) == 1 and messages[0].startswith("optimizer SGD steps 2 parameters that no component has")
