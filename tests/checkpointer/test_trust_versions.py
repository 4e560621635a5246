"""Frozen parameters are not copied and hashed again, unless they were written to in any way."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import relight
from relight.checkpointer.slot_copy_plan import SlotCopyPlan
from relight.commit import incremental_writer
from relight.observe import Event

SIDE = 1024
BASE = 4 * SIDE * SIDE * 4
RULES = relight.Compact(trust_versions=True, codecs="never")
WAYS = pytest.mark.parametrize("in_background", [False, True], ids=["here", "background"])


class Adapted(nn.Module):
    """Four frozen layers of 4 MiB, and a small trained layer."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.ModuleList(nn.Linear(SIDE, SIDE, bias=False).requires_grad_(False) for _ in range(4))
        self.adapter = nn.Linear(SIDE, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.base:
            x = layer(x)
        result: torch.Tensor = self.adapter(x)
        return result


class Run:
    """A training that is saved into ``path`` at each step, with the state at each save."""

    def __init__(self, path: Path, in_background: bool, rules: relight.Compact = RULES) -> None:
        torch.manual_seed(0)
        self.model, self.path = Adapted(), path / "s" / "run"
        self.optimizer = torch.optim.SGD(self.model.adapter.parameters(), 0.1)
        limits = relight.Limits(when_busy="queue")
        self.ckpt = relight.Checkpointer(
            self.path,
            compact=rules,
            model=self.model,
            optimizer=self.optimizer,
            background=in_background,
            limits=limits,
        )
        self.ckpt.restore()
        self.saved: dict[str, dict[str, torch.Tensor]] = {}
        self.steps = 0

    def step(self) -> None:
        """Train one step, and save it."""
        self.optimizer.zero_grad()
        self.model(torch.randn(2, SIDE)).square().mean().backward()
        self.optimizer.step()
        save = self.ckpt.save(self.steps)
        then = {name: value.detach().clone() for name, value in self.model.state_dict().items()}
        save.wait()
        self.saved[save.id] = then
        self.steps += 1

    def check(self, without: tuple[str, ...] = ()) -> None:
        """Check that every save restores to the state at that save."""
        for id_, then in self.saved.items():
            loaded = relight.load(self.path, id_)["model"]
            assert id_ in without or all(
                torch.equal(torch.as_tensor(loaded[name]), value) for name, value in then.items()
            ), id_


def of(events: list[Event], name: str) -> list[Event]:
    """Return the events with a name."""
    return [event for event in events if event.name == name]


@WAYS
def test_each_save_restores(tmp_path: Path, in_background: bool, events: list[Event]) -> None:
    """Restore every save, without a warning or a failure."""
    run = Run(tmp_path, in_background)
    with run.ckpt:
        for _ in range(8):
            run.step()
    run.check()
    assert not of(events, "frozen_param.modified") and not of(events, "save.failed")


def test_frozen_tensors_are_hashed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hash only what is trained, and a small sample, from the third save on. By then two saves were compared."""
    hashed = [0]
    make = incremental_writer._Coder.make

    def counted(coder: incremental_writer._Coder, number: int, offset: int, data: memoryview) -> Any:
        hashed[0] += len(data)
        return make(coder, number, offset, data)

    monkeypatch.setattr(incremental_writer._Coder, "make", counted)
    run, each = Run(tmp_path, False), []
    with run.ckpt:
        for _ in range(6):
            hashed[0] = 0
            run.step()
            each.append(hashed[0])
    assert each[2] > 0 and max(each[2:]) < 0.02 * BASE, each
    run.check()


def test_frozen_tensors_are_copied_once_into_each_slot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copy frozen parameters once into each slot in background saves: two slots, two copies."""
    copied: list[int] = []
    made = SlotCopyPlan.__init__

    def counted(self: SlotCopyPlan, items: Any, *rest: Any) -> None:
        made(self, items, *rest)
        copied.append(sum(item.source.length for item in items))

    monkeypatch.setattr(SlotCopyPlan, "__init__", counted)
    run, each = Run(tmp_path, True), []
    with run.ckpt:
        for _ in range(6):
            copied.clear()
            run.step()
            each.append(sum(copied))
    assert each[0] >= BASE and max(each[2:]) < 0.02 * BASE, each
    run.check()


@WAYS
@pytest.mark.parametrize("how", ["in place", "data", "replaced", "loaded", "restored", "rows"])
def test_modified_tensors_are_stored(tmp_path: Path, in_background: bool, how: str, events: list[Event]) -> None:
    """Store a changed weight in the next save, however it was written to."""
    run = Run(tmp_path, in_background)
    weight = run.model.base[2].weight
    with run.ckpt:
        for _ in range(4):
            run.step()
        first = next(iter(run.saved))
        for turn in range(3):
            with torch.no_grad():
                if how == "in place":
                    weight[7, 9] += 0.01
                elif how == "data":
                    weight.data.mul_(0.999)
                elif how == "replaced":
                    weight.data = weight.data * 1.001
                elif how == "loaded":
                    run.model.load_state_dict({name: value * 1.001 for name, value in run.model.state_dict().items()})
                elif how == "restored":
                    weight.zero_()
                    run.ckpt.restore(first)
                else:
                    weight.data[:, turn] = 0.03
            run.step()
    run.check()
    assert not of(events, "frozen_param.modified") and not of(events, "save.failed")


@WAYS
def test_a_write_without_a_trace_is_found(tmp_path: Path, in_background: bool, events: list[Event]) -> None:
    """Detect a write without a version change some saves later, by the sample that each save compares. That save and
    all later ones are right again, and versions are no longer trusted."""
    run = Run(tmp_path, in_background)
    with run.ckpt:
        for _ in range(4):
            run.step()
        run.model.base[1].weight.data[SIDE // 2 + 1, 5] += 0.01
        while not of(events, "frozen_param.modified"):
            run.step()
            assert run.steps < 12
        detected = list(run.saved)[-1]
        for _ in range(2):
            run.model.base[3].weight.data[SIDE // 2 + 1, 5] += 0.01
            run.step()
    ids = list(run.saved)
    run.check(without=tuple(ids[4 : ids.index(detected)]))
    assert (
        len(of(events, "frozen_param.modified")) == 1
        and "model/base.1.weight" in of(events, "frozen_param.modified")[0].fields["message"]
    )


@WAYS
def test_what_writes_without_a_trace_is_off_by_default(tmp_path: Path, in_background: bool) -> None:
    """Compare every byte by default."""
    run = Run(tmp_path, in_background, relight.Compact())
    with run.ckpt:
        for _ in range(5):
            run.model.base[1].weight.data[SIDE // 2 + 1, 5] += 0.01
            run.step()
    run.check()


@WAYS
@pytest.mark.parametrize("seed", range(4))
def test_any_order_of_writes_and_failures(
    tmp_path: Path, in_background: bool, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Restore every save's state after any order of writes, frozen and thawed parameters, and failed saves."""
    rng = random.Random(seed)
    run = Run(tmp_path, in_background)
    layers = list(run.model.base)
    with run.ckpt:
        for _ in range(14):
            weight = rng.choice(layers).weight
            with torch.no_grad():
                match rng.randrange(7):
                    case 0:
                        weight[rng.randrange(SIDE)] += 0.01
                    case 1:
                        weight.data.mul_(0.999)
                    case 2:
                        weight.data = weight.data.clone()
                    case 3:
                        weight.requires_grad_(not weight.requires_grad)
                    case 4:
                        weight.copy_(rng.choice(layers).weight)
                    case _:
                        pass
            if not in_background and rng.random() < 0.25:
                with monkeypatch.context() as patch:
                    patch.setattr("relight.commit.save.encode_part", full)
                    assert run.ckpt.save(run.steps).error is not None
                run.steps += 1
            run.step()
    run.check()


def full(part: object) -> bytes:
    """Raise NoSpace."""
    raise relight.NoSpace("the disk is full")


def test_it_is_asked_for_with_a_word() -> None:
    """Refuse a number for ``trust_versions``."""
    with pytest.raises(relight.ConfigError, match="trust_versions"):
        relight.Compact(trust_versions=1)  # type: ignore[arg-type]
