"""A state of another class of optimizer or scheduler is refused by name; an optimizer that was not given is reported."""

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
from relight.format.class_names import CLASSES, recorded_classes
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
    """The class after it, with the same entries."""


@pytest.fixture(name="events")
def events_fixture() -> Iterator[list[Event]]:
    """The events of one test."""
    found: list[Event] = []
    undo = subscribe(found.append)
    yield found
    undo()


def step(model: nn.Module, *optimizers: torch.optim.Optimizer) -> None:
    """One step of each on a fixed batch."""
    for optimizer in optimizers:
        optimizer.zero_grad()
        model(torch.ones(2, 3)).pow(2).mean().backward()
        optimizer.step()


def saved(path: Path, **more: Any) -> None:
    """One checkpoint with these components."""
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
    """Nothing is changed, and the error names the class that stored the state and the live one."""
    model, other = nn.Linear(3, 1), nn.Linear(3, 1)
    optimizer, live = OPTIMIZERS[before](model.parameters()), OPTIMIZERS[after](other.parameters())
    step(model, optimizer)
    if warm:
        step(other, live)
    saved(tmp_path / "run", model=model, optimizer=optimizer)
    weights = [one.detach().clone() for one in other.parameters()]
    with pytest.raises(IncompatibleState) as caught:
        restored(tmp_path / "run", model=other, optimizer=live)
    assert f"stored by {before.split()[0]}" in str(caught.value) and f"the live optimizer is {after.split()[0]}" in str(caught.value)
    assert all(map(torch.equal, weights, other.parameters()))


@pytest.mark.parametrize(
    ("before", "after"),
    [("AdamW", "SGD"), ("SGD", "AdamW"), ("SGD with momentum", "AdamW"), ("AdamW", "Adamax"), ("RMSprop", "AdamW"), ("Adagrad", "SGD")],
)
def test_an_older_checkpoint_is_judged_by_its_entries(tmp_path: Path, before: str, after: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint without class names is refused all the same, with the class that its entries point to."""
    monkeypatch.setattr("relight.checkpointer.save_requests.class_paths", lambda components: {})
    model, other = nn.Linear(3, 1), nn.Linear(3, 1)
    optimizer = OPTIMIZERS[before](model.parameters())
    step(model, optimizer)
    saved(tmp_path / "run", model=model, optimizer=optimizer)
    name = "Adam or AdamW" if before == "AdamW" else before.split()[0]
    with pytest.raises(IncompatibleState, match=f"stored by {name}.*the live optimizer is {after}"):
        restored(tmp_path / "run", model=other, optimizer=OPTIMIZERS[after](other.parameters()))


def test_what_does_not_fit_is_left_alone_and_listed(tmp_path: Path, events: list[Event]) -> None:
    """strict=False restores the weights; the SGD keeps its own settings and state, and the note names what was left out."""
    model, other = nn.Linear(3, 1), nn.Linear(3, 1)
    optimizer, live = OPTIMIZERS["AdamW"](model.parameters()), OPTIMIZERS["SGD with momentum"](other.parameters())
    step(model, optimizer)
    step(other, live)
    momentum = [live.state[one]["momentum_buffer"].clone() for one in other.parameters()]
    settings = {key: value for key, value in live.param_groups[0].items() if key != "params"}
    saved(tmp_path / "run", model=model, optimizer=optimizer)
    restored(tmp_path / "run", strict=False, model=other, optimizer=live)
    assert all(map(torch.equal, model.parameters(), other.parameters()))
    assert {key: value for key, value in live.param_groups[0].items() if key != "params"} == settings
    assert all(torch.equal(was, live.state[one]["momentum_buffer"]) for was, one in zip(momentum, other.parameters(), strict=True))
    said = [one.fields["say"] for one in events if one.name == "environment.differs"]
    assert any(
        "optimizer: stored by AdamW (exp_avg, exp_avg_sq), the live optimizer is SGD: neither state nor settings fit" in one for one in said
    )
    step(other, live)


def test_entries_that_fit_are_restored_without_the_class(tmp_path: Path) -> None:
    """strict=False restores AdamW's moments and learning rate into Adam, which stays an Adam."""
    model, other = nn.Linear(3, 1), nn.Linear(3, 1)
    optimizer, live = OPTIMIZERS["AdamW"](model.parameters()), OPTIMIZERS["Adam"](other.parameters())
    step(model, optimizer)
    saved(tmp_path / "run", model=model, optimizer=optimizer)
    restored(tmp_path / "run", strict=False, model=other, optimizer=live)
    for one, mine in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(optimizer.state[one]["exp_avg"], live.state[mine]["exp_avg"])
    assert live.param_groups[0]["lr"] == 0.01 and not live.param_groups[0]["decoupled_weight_decay"]
    step(other, live)


def test_a_subclass_and_a_renamed_class_resume(tmp_path: Path, events: list[Event]) -> None:
    """A script's subclass of AdamW continues an AdamW's run, and the other way; a module's new class name is a note."""
    model, other = Net(nn.Linear(3, 1)), Network(nn.Linear(3, 1))
    plain, own = torch.optim.AdamW(model.parameters()), MyAdamW(other.parameters())
    step(model, plain)
    saved(tmp_path / "run", model=model, optimizer=plain)
    restored(tmp_path / "run", model=other, optimizer=own)
    said = [one.fields["say"] for one in events if one.name == "environment.differs"]
    assert len(said) == 1 and "model: stored by Net, the live object is Network" in said[0] and "optimizer" not in said[0]
    saved(tmp_path / "back", model=other, optimizer=own)
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
    """Also where the entries of one are a part of the other's."""
    model, other = nn.Linear(3, 1), nn.Linear(3, 1)
    optimizer, live = OPTIMIZERS["SGD"](model.parameters()), OPTIMIZERS["SGD"](other.parameters())
    scheduler, mine = before(optimizer), after(live)
    saved(tmp_path / "run", model=model, optimizer=optimizer, scheduler=scheduler)
    names = f"stored by {type(scheduler).__name__}, the live scheduler is {type(mine).__name__}"
    with pytest.raises(IncompatibleState, match=names):
        restored(tmp_path / "run", model=other, optimizer=live, scheduler=mine)
    restored(tmp_path / "run", strict=False, model=other, optimizer=live, scheduler=mine)


def test_a_scaler_without_a_place_and_one_that_is_disabled(tmp_path: Path, events: list[Event]) -> None:
    """A stored scaler that no component takes is refused; a live one that is disabled is a note."""
    model = nn.Linear(3, 1)
    saved(tmp_path / "run", model=model, scaler=torch.amp.GradScaler("cpu"))
    with pytest.raises(IncompatibleState, match="scaler: in the checkpoint, but not given"):
        restored(tmp_path / "run", model=model)
    restored(tmp_path / "run", model=model, scaler=torch.amp.GradScaler("cpu", enabled=False))
    assert any("its scale is dropped" in one.fields["say"] for one in events if one.name == "environment.differs")


def test_groups_that_differ_are_refused_and_order_is_not(tmp_path: Path) -> None:
    """More or fewer groups, or a parameter in another group, are mismatches; another order within a group is not."""
    model = nn.Linear(3, 1)
    saved(tmp_path / "run", model=model, optimizer=torch.optim.AdamW([{"params": [model.weight], "lr": 0.1}, {"params": [model.bias]}]))
    for groups in ([{"params": [model.weight, model.bias]}], [{"params": [model.bias]}, {"params": [model.weight]}]):
        with pytest.raises(IncompatibleState, match="group"):
            restored(tmp_path / "run", model=model, optimizer=torch.optim.AdamW(groups))
    saved(tmp_path / "one", model=model, optimizer=torch.optim.AdamW([model.weight, model.bias]))
    restored(tmp_path / "one", model=model, optimizer=torch.optim.AdamW([model.bias, model.weight]))


def test_class_names_of_an_unknown_form_are_ignored() -> None:
    """Metadata is anyone's: what is not a table of names counts for nothing."""
    assert recorded_classes({}) == recorded_classes({CLASSES: 3}) == recorded_classes({CLASSES: {"a": 1}}) == {}
    assert plan_restore({}, [], {}, where="test", classes={"a": "b"}).skipped == []


# -- optimizers that were not given


def missed(events: list[Event]) -> list[dict[str, Any]]:
    return [{key: one.fields[key] for key in ("optimizer", "parameters")} for one in events if one.name == "optimizer.missed"]


def test_an_optimizer_that_was_not_given_is_reported_once(tmp_path: Path, events: list[Event]) -> None:
    """By class and number of parameters, with the way out; describe_state() lists it; a given one is not listed."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    optimizer, second = torch.optim.AdamW(model[0].parameters()), torch.optim.SGD(model[1].parameters(), lr=0.1)
    with relight.Checkpointer(tmp_path / "run", background=False, signals=False, save=None, model=model, optimizer=optimizer) as ckpt:
        for number in range(3):
            step(model, optimizer, second)
            ckpt.step(number)
        assert missed(events) == [{"optimizer": "SGD", "parameters": 2}]
        sentence = "optimizer SGD steps 2 parameters of model, and no checkpoint has its state: give it to the Checkpointer, as in Checkpointer(..., optimizer2=opt)"
        assert sentence in ckpt.describe_state()["missed"]
        assert [one.fields["say"] for one in events if one.name == "optimizer.missed"] == [sentence]


class Holder:
    """A trainer's own object that gives the state of its optimizer."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.parts = {"all": [optimizer]}

    def state_dict(self) -> dict[str, Any]:
        return self.parts["all"][0].state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.parts["all"][0].load_state_dict(state)


def test_optimizers_that_need_no_report_get_none(tmp_path: Path, events: list[Event]) -> None:
    """Those inside a given wrapper or component, and those given by ``state=``. Those of other modules are no reason for an event at once."""

    class Wrapper(torch.optim.Optimizer):
        def __init__(self, inner: torch.optim.Optimizer) -> None:
            self.inner = inner
            super().__init__(inner.param_groups, inner.defaults)

        def step(self, closure: Any = None) -> Any:
            return self.inner.step(closure)

    first, second, third, other = (nn.Linear(3, 1) for _ in range(4))
    wrapper = Wrapper(torch.optim.SGD(first.parameters(), lr=0.1))
    inside, by_state = torch.optim.AdamW(second.parameters()), torch.optim.AdamW(third.parameters())
    foreign = torch.optim.AdamW(other.parameters())
    components = {"first": first, "second": second, "third": third, "wrapper": wrapper, "holder": Holder(inside), "keep": by_state}
    with relight.Checkpointer(tmp_path / "run", background=False, signals=False, save=None, state=components) as ckpt:
        for model, optimizer in ((first, wrapper), (second, inside), (third, by_state)):
            step(model, optimizer)
        assert ckpt.describe_state()["missed"] == []
        step(other, foreign)
        assert missed(events) == []


def test_a_closed_checkpointer_reports_nothing(tmp_path: Path, events: list[Event]) -> None:
    """The hook on all optimizers of the process goes with the Checkpointer."""
    model = nn.Linear(3, 1)
    relight.Checkpointer(tmp_path / "run", background=False, signals=False, save=None, model=model).close()
    step(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert missed(events) == []


def test_many_small_optimizers_are_few_reports(events: list[Event]) -> None:
    """One optimizer for each parameter makes at most four events, and all are listed."""
    model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(5)))
    watch = UngivenOptimizers({"model": model}, reports=True)
    optimizers = [torch.optim.SGD([one], lr=0.1) for one in model.parameters()]
    step(model, *optimizers)
    assert len(missed(events)) == 4 and len(watch.sentences) == 10
    watch.close()


def test_a_known_optimizer_costs_a_lookup() -> None:
    """After its first step an optimizer costs less than 20 µs more a step."""
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watch = UngivenOptimizers({"model": model, "optimizer": optimizer}, reports=True)
    watch._before_step(optimizer)
    assert min(timeit.repeat(lambda: watch._before_step(optimizer), number=1000, repeat=10)) < 0.02
    watch.close()


warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
