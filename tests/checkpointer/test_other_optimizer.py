"""Refuse a state of another optimizer or scheduler class by name, and report an optimizer that was not given."""

from __future__ import annotations

import timeit
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as lrs

import relight
from relight.capture import plan_restore
from relight.checkpointer.ungiven import UngivenOptimizers
from relight.errors import IncompatibleState
from relight.format.class_names import recorded_classes
from relight.format.root_keys import CLASSES
from relight.observe import Event, subscribe

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda ps: torch.optim.AdamW(ps, lr=0.01),
    "Adam": lambda ps: torch.optim.Adam(ps, lr=0.02),
    "SGD": lambda ps: torch.optim.SGD(ps, lr=0.1),
    "SGD with momentum": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9),
    "RMSprop": lambda ps: torch.optim.RMSprop(ps, momentum=0.5),
    "NAdam": lambda ps: torch.optim.NAdam(ps),
    "Adamax": lambda ps: torch.optim.Adamax(ps),
    "Adagrad": lambda ps: torch.optim.Adagrad(ps),
}


class MyAdamW(torch.optim.AdamW):
    """A script's own subclass."""


class Net(nn.Sequential):
    """A module's class before a rename."""


class Network(nn.Sequential):
    """The class after the rename, with the same entries."""


@pytest.fixture(name="events")
def events_fixture() -> Iterator[list[Event]]:
    """Return the events of one test."""
    received: list[Event] = []
    undo = subscribe(received.append)
    yield received
    undo()


def step(model: nn.Module, *optimizers: torch.optim.Optimizer) -> None:
    """Take one step of each optimizer on a fixed batch."""
    for optimizer in optimizers:
        optimizer.zero_grad()
        model(torch.ones(2, 3)).pow(2).mean().backward()
        optimizer.step()


def saved(path: Path, **more: Any) -> None:
    """Write one checkpoint of these components."""
    with relight.Checkpointer(path, background=False, signals=False, save=None, **more) as ckpt:
        ckpt.save(0)


def restored(path: Path, *, strict: bool = True, **more: Any) -> None:
    """Restore into these components."""
    ckpt = relight.Checkpointer(path, background=False, signals=False, save=None, **more)
    try:
        assert ckpt.restore(strict=strict) == 1
    finally:
        ckpt.close(save=False)


@pytest.mark.parametrize("warm", [False, True], ids=["fresh", "stepped"])
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("AdamW", "SGD"),
        ("SGD", "AdamW"),
        ("SGD with momentum", "AdamW"),
        ("AdamW", "Adam"),
        ("Adam", "AdamW"),
        ("RMSprop", "SGD with momentum"),
        ("AdamW", "NAdam"),
        ("AdamW", "Adamax"),
        ("SGD", "Adagrad"),
    ],
)
def test_another_class_is_refused_with_both_names(tmp_path: Path, before: str, after: str, warm: bool) -> None:
    """Name the class that stored the state and the live class in the error. Nothing is changed."""
    model, live_model = nn.Linear(3, 1), nn.Linear(3, 1)
    optimizer, live = OPTIMIZERS[before](model.parameters()), OPTIMIZERS[after](live_model.parameters())
    step(model, optimizer)
    if warm:
        step(live_model, live)
    saved(tmp_path / "run", model=model, optimizer=optimizer)
    weights = [parameter.detach().clone() for parameter in live_model.parameters()]
    with pytest.raises(IncompatibleState) as caught:
        restored(tmp_path / "run", model=live_model, optimizer=live)
    assert f"stored by {before.split()[0]}" in str(caught.value) and f"the live optimizer is {after.split()[0]}" in str(
        caught.value
    )
    assert all(map(torch.equal, weights, live_model.parameters()))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("AdamW", "SGD"),
        ("SGD", "AdamW"),
        ("SGD with momentum", "AdamW"),
        ("AdamW", "Adamax"),
        ("RMSprop", "AdamW"),
        ("Adagrad", "SGD"),
    ],
)
def test_an_older_checkpoint_is_judged_by_its_entries(
    tmp_path: Path, before: str, after: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refuse a checkpoint without class names too. The error names the class that its entries point to."""
    monkeypatch.setattr("relight.checkpointer.state_capture.class_paths", lambda components: {})
    model, live_model = nn.Linear(3, 1), nn.Linear(3, 1)
    optimizer = OPTIMIZERS[before](model.parameters())
    step(model, optimizer)
    saved(tmp_path / "run", model=model, optimizer=optimizer)
    name = "Adam or AdamW" if before == "AdamW" else before.split()[0]
    with pytest.raises(IncompatibleState, match=f"stored by {name}.*the live optimizer is {after}"):
        restored(tmp_path / "run", model=live_model, optimizer=OPTIMIZERS[after](live_model.parameters()))


def test_state_that_does_not_fit_is_left_alone_and_listed(tmp_path: Path, events: list[Event]) -> None:
    """Restore the weights with ``strict=False``. The SGD keeps its own settings and state, and the note names what was
    left out."""
    model, live_model = nn.Linear(3, 1), nn.Linear(3, 1)
    optimizer, live = OPTIMIZERS["AdamW"](model.parameters()), OPTIMIZERS["SGD with momentum"](live_model.parameters())
    step(model, optimizer)
    step(live_model, live)
    momentum = [live.state[parameter]["momentum_buffer"].clone() for parameter in live_model.parameters()]
    settings = {key: value for key, value in live.param_groups[0].items() if key != "params"}
    saved(tmp_path / "run", model=model, optimizer=optimizer)
    restored(tmp_path / "run", strict=False, model=live_model, optimizer=live)
    assert all(map(torch.equal, model.parameters(), live_model.parameters()))
    assert {key: value for key, value in live.param_groups[0].items() if key != "params"} == settings
    assert all(
        torch.equal(was, live.state[parameter]["momentum_buffer"])
        for was, parameter in zip(momentum, live_model.parameters(), strict=True)
    )
    messages = [event.fields["message"] for event in events if event.name == "environment.differs"]
    assert any(
        "optimizer: stored by AdamW (exp_avg, exp_avg_sq), the live optimizer is SGD: neither state nor settings fit"
        in message
        for message in messages
    )
    step(live_model, live)


def test_entries_that_fit_are_restored_without_the_class(tmp_path: Path) -> None:
    """Restore AdamW's moments and learning rate into Adam with ``strict=False``. The live optimizer stays an Adam."""
    model, live_model = nn.Linear(3, 1), nn.Linear(3, 1)
    optimizer, live = OPTIMIZERS["AdamW"](model.parameters()), OPTIMIZERS["Adam"](live_model.parameters())
    step(model, optimizer)
    saved(tmp_path / "run", model=model, optimizer=optimizer)
    restored(tmp_path / "run", strict=False, model=live_model, optimizer=live)
    for parameter, mine in zip(model.parameters(), live_model.parameters(), strict=True):
        assert torch.equal(optimizer.state[parameter]["exp_avg"], live.state[mine]["exp_avg"])
    assert live.param_groups[0]["lr"] == 0.01 and not live.param_groups[0].get("decoupled_weight_decay")
    step(live_model, live)


def test_a_subclass_and_a_renamed_class_resume(tmp_path: Path, events: list[Event]) -> None:
    """Resume an AdamW run with a script's subclass of AdamW, and the reverse. A module's new class name is a note."""
    model, renamed = Net(nn.Linear(3, 1)), Network(nn.Linear(3, 1))
    plain, own = torch.optim.AdamW(model.parameters()), MyAdamW(renamed.parameters())
    step(model, plain)
    saved(tmp_path / "run", model=model, optimizer=plain)
    restored(tmp_path / "run", model=renamed, optimizer=own)
    messages = [event.fields["message"] for event in events if event.name == "environment.differs"]
    assert (
        len(messages) == 1
        and "model: stored by Net, the live object is Network" in messages[0]
        and "optimizer" not in messages[0]
    )
    saved(tmp_path / "back", model=renamed, optimizer=own)
    restored(tmp_path / "back", model=model, optimizer=plain)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (lambda o: lrs.StepLR(o, 3), lambda o: lrs.ExponentialLR(o, 0.9)),
        (lambda o: lrs.ExponentialLR(o, 0.9), lambda o: lrs.StepLR(o, 3)),
        (lambda o: lrs.LambdaLR(o, lambda step: 1.0), lambda o: lrs.MultiplicativeLR(o, lambda step: 1.0)),
        (lambda o: lrs.StepLR(o, 3), lambda o: lrs.CosineAnnealingLR(o, 9)),
    ],
)
def test_another_scheduler_is_refused_with_both_names(tmp_path: Path, before: Any, after: Any) -> None:
    """Refuse another scheduler, also if its entries are a subset of the live one's."""
    model, live_model = nn.Linear(3, 1), nn.Linear(3, 1)
    optimizer, live = OPTIMIZERS["SGD"](model.parameters()), OPTIMIZERS["SGD"](live_model.parameters())
    scheduler, mine = before(optimizer), after(live)
    saved(tmp_path / "run", model=model, optimizer=optimizer, scheduler=scheduler)
    names = f"stored by {type(scheduler).__name__}, the live scheduler is {type(mine).__name__}"
    with pytest.raises(IncompatibleState, match=names):
        restored(tmp_path / "run", model=live_model, optimizer=live, scheduler=mine)
    restored(tmp_path / "run", strict=False, model=live_model, optimizer=live, scheduler=mine)


def test_a_scaler_without_a_place_and_one_that_is_disabled(tmp_path: Path, events: list[Event]) -> None:
    """Refuse a stored scaler without a component for it. A disabled live scaler is a note."""
    model = nn.Linear(3, 1)
    saved(tmp_path / "run", model=model, scaler=torch.amp.GradScaler("cpu"))
    with pytest.raises(IncompatibleState, match="scaler: in the checkpoint, but not given"):
        restored(tmp_path / "run", model=model)
    restored(tmp_path / "run", model=model, scaler=torch.amp.GradScaler("cpu", enabled=False))
    assert any(
        "its scale is dropped" in event.fields["message"] for event in events if event.name == "environment.differs"
    )


def test_groups_that_differ_are_refused_and_order_is_not(tmp_path: Path) -> None:
    """Refuse more or fewer groups, and a parameter in another group. Another order within a group is accepted."""
    model = nn.Linear(3, 1)
    saved(
        tmp_path / "run",
        model=model,
        optimizer=torch.optim.AdamW([{"params": [model.weight], "lr": 0.1}, {"params": [model.bias]}]),
    )
    for groups in ([{"params": [model.weight, model.bias]}], [{"params": [model.bias]}, {"params": [model.weight]}]):
        with pytest.raises(IncompatibleState, match="group"):
            restored(tmp_path / "run", model=model, optimizer=torch.optim.AdamW(groups))
    saved(tmp_path / "one", model=model, optimizer=torch.optim.AdamW([model.weight, model.bias]))
    restored(tmp_path / "one", model=model, optimizer=torch.optim.AdamW([model.bias, model.weight]))


def test_class_names_of_an_unknown_form_are_ignored() -> None:
    """Ignore class names that are not a table of names: metadata may come from any writer."""
    assert (
        recorded_classes({}) == recorded_classes({CLASSES.name: 3}) == recorded_classes({CLASSES.name: {"a": 1}}) == {}
    )
    assert plan_restore({}, [], {}, where="test", classes={"a": "b"}).skipped == []


# -- optimizers that were not given


def missed(events: list[Event]) -> list[dict[str, Any]]:
    return [
        {key: event.fields[key] for key in ("optimizer", "parameters")}
        for event in events
        if event.name == "optimizer.missed"
    ]


def test_an_optimizer_that_was_not_given_is_reported_once(tmp_path: Path, events: list[Event]) -> None:
    """Report the optimizer once by class and number of parameters, with the remedy. ``describe_state()`` lists it; a
    given optimizer is not listed."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    optimizer, second = torch.optim.AdamW(model[0].parameters()), torch.optim.SGD(model[1].parameters(), lr=0.1)
    with relight.Checkpointer(
        tmp_path / "run", background=False, signals=False, save=None, model=model, optimizer=optimizer
    ) as ckpt:
        for number in range(3):
            step(model, optimizer, second)
            ckpt.step(number)
        assert missed(events) == [{"optimizer": "SGD", "parameters": 2}]
        sentence = "optimizer SGD steps 2 parameters of model, and no checkpoint has its state: give it to the Checkpointer, as in Checkpointer(..., optimizer2=opt)"
        assert sentence in ckpt.describe_state()["missed"]
        assert [event.fields["message"] for event in events if event.name == "optimizer.missed"] == [sentence]


class Holder:
    """A trainer's own object that returns the state of its optimizer."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.parts = {"all": [optimizer]}

    def state_dict(self) -> dict[str, Any]:
        return self.parts["all"][0].state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.parts["all"][0].load_state_dict(state)


def test_optimizers_that_need_no_report_get_none(tmp_path: Path, events: list[Event]) -> None:
    """Ignore optimizers inside a given wrapper or component, and those given by ``state=``. Those of other modules
    cause no event at once."""

    class Wrapper(torch.optim.Optimizer):
        def __init__(self, inner: torch.optim.Optimizer) -> None:
            self.inner = inner
            super().__init__(inner.param_groups, inner.defaults)

        def step(self, closure: Any = None) -> Any:
            return self.inner.step(closure)

    first, second, third, fourth = (nn.Linear(3, 1) for _ in range(4))
    wrapper = Wrapper(torch.optim.SGD(first.parameters(), lr=0.1))
    inside, by_state = torch.optim.AdamW(second.parameters()), torch.optim.AdamW(third.parameters())
    foreign = torch.optim.AdamW(fourth.parameters())
    components = {
        "first": first,
        "second": second,
        "third": third,
        "wrapper": wrapper,
        "holder": Holder(inside),
        "keep": by_state,
    }
    with relight.Checkpointer(tmp_path / "run", background=False, signals=False, save=None, state=components) as ckpt:
        for model, optimizer in ((first, wrapper), (second, inside), (third, by_state)):
            step(model, optimizer)
        assert ckpt.describe_state()["missed"] == []
        step(fourth, foreign)
        assert missed(events) == []


def test_a_closed_checkpointer_reports_nothing(tmp_path: Path, events: list[Event]) -> None:
    """Remove the hook on all of the process's optimizers at ``close``."""
    model = nn.Linear(3, 1)
    relight.Checkpointer(tmp_path / "run", background=False, signals=False, save=None, model=model).close()
    step(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert missed(events) == []


def test_many_small_optimizers_are_few_reports(events: list[Event]) -> None:
    """Report at most four events for one optimizer per parameter, and list all."""
    model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(5)))
    watch = UngivenOptimizers({"model": model}, reports=True)
    optimizers = [torch.optim.SGD([parameter], lr=0.1) for parameter in model.parameters()]
    step(model, *optimizers)
    assert len(missed(events)) == 4 and len(watch.sentences) == 10
    watch.close()


def test_a_known_optimizer_costs_a_lookup() -> None:
    """Add less than 20 µs to each step of an optimizer after its first."""
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watch = UngivenOptimizers({"model": model, "optimizer": optimizer}, reports=True)
    watch._before_step(optimizer)
    assert min(timeit.repeat(lambda: watch._before_step(optimizer), number=1000, repeat=10)) < 0.02
    watch.close()


warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
