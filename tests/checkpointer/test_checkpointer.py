"""The Checkpointer in a loop: triggers, restore, failures, signals, exceptions."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.scripts import run_script
from torch import nn

import relight
import relight.store.local as local
from relight.agent import Agent, SaveOutcome
from relight.agent.messages import SaveResult
from relight.checkpointer import background, boundary
from relight.checkpointer.inflight import InflightSave
from relight.checkpointer.save_handle import Save
from relight.checkpointer.signals import SignalHandlers
from relight.errors import StoreUnavailable
from relight.observe import counters, subscribe
from relight.restore import memory_sources
from relight.save_reason import ASKED
from relight.store.disk import Disk


@pytest.fixture(autouse=True)
def _boundaries_at_any_price(monkeypatch: pytest.MonkeyPatch) -> None:
    """Allow boundaries at any cost. These steps take a millisecond on busy machines, and the cost of snapshots is not
    what these tests check."""
    monkeypatch.setattr(boundary, "FREE_S", 1.0)


def make(seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 1))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def one_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> torch.Tensor:
    loss = model(torch.randn(3, 4)).pow(2).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def state_of(model: nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in model.parameters()]


@pytest.fixture
def run(tmp_path: Path) -> str:
    return str(tmp_path / "store" / "run")


def test_a_resume_reports_generators_without_a_device(run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Report which generators could not be restored in a run that was saved with more accelerators."""
    from relight.capture import rng

    with monkeypatch.context() as patch:
        patch.setattr(rng, "device_states", lambda: {"xpu": [torch.get_rng_state(), torch.get_rng_state()]})
        with relight.Checkpointer(run, save=None, model=make()[0]) as ckpt:
            ckpt.restore()
            ckpt.save(0)
    events: list[Any] = []
    undo = subscribe(events.append)
    try:
        with relight.Checkpointer(run, save=None, model=make()[0]) as ckpt:
            assert ckpt.restore() == 1
    finally:
        undo()
    assert any(
        "xpu" in difference
        for event in events
        if event.name == "environment.differs"
        for difference in event.fields["differences"]
    )


def test_a_fresh_run_starts_at_zero_and_a_resumed_one_after_its_last_save(run: str) -> None:
    """Return the first step still to do from ``restore``."""
    model, optimizer = make()
    with relight.Checkpointer(run, model=model, optimizer=optimizer, save=relight.every(steps=2)) as ckpt:
        assert ckpt.restore() == 0
        for step in range(5):
            ckpt.step(step, loss=one_step(model, optimizer))
    saved = state_of(model)
    model, optimizer = make(seed=9)
    with relight.Checkpointer(run, save=None, model=model, optimizer=optimizer) as ckpt:
        assert ckpt.restore() == 5
    assert all(torch.equal(a, b) for a, b in zip(saved, state_of(model)))
    assert [checkpoint.step for checkpoint in relight.open(run).checkpoints()] == [1, 3, 4]


def test_immutable_values_come_back_through_the_checkpointer(run: str) -> None:
    """Return restored immutable values through ``ckpt[name]``, and change mutable values in place."""
    meters = {"seen": 1, 5: [1.5, float("inf")]}
    ckpt = relight.Checkpointer(run, save=None, meters=meters, state={"epoch": 3, "name": "x"})
    ckpt["epoch"] = 4
    ckpt.save(0)
    ckpt.close()
    live_meters = {"seen": 7}
    again = relight.Checkpointer(run, save=None, meters=live_meters, state={"epoch": 0, "name": ""})
    again.restore()
    assert (again["epoch"], again["name"]) == (4, "x")
    assert live_meters == {"seen": 1, 5: [1.5, float("inf")]}
    again.close()


def test_a_missing_an_unexpected_and_a_wrongly_shaped_entry_stand_in_one_error(run: str) -> None:
    """List all mismatches in one error before anything is changed."""
    relight.Checkpointer(run, save=None, model=nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})).save(0)
    live = nn.ModuleDict({"a": nn.Linear(2, 3), "c": nn.Linear(2, 2)})
    before = state_of(live)
    with pytest.raises(relight.IncompatibleState) as caught:
        relight.Checkpointer(run, save=None, model=live).restore()
    text = "\n".join(caught.value.details)
    assert "model/a.weight: stored float32 [2, 2], live float32 [3, 2]" in text
    assert "model/c.weight: missing in the checkpoint" in text
    assert "model/b.weight: in the checkpoint" in text
    assert all(torch.equal(a, b) for a, b in zip(before, state_of(live)))
    relaxed = relight.Checkpointer(run, model=live)
    assert relaxed.restore(strict=False) == 1


def test_only_restores_a_part_and_map_renames(run: str) -> None:
    """Leave the rest of the live state unchanged in a partial restore, random state included. Renaming reaches module
    and optimizer."""
    model, optimizer = make()
    one_step(model, optimizer)
    relight.Checkpointer(run, save=None, model=model, optimizer=optimizer).save(0)
    stored = state_of(model)
    other, other_optimizer = make(seed=3)
    torch.manual_seed(77)
    expected = torch.get_rng_state()
    relight.Checkpointer(run, save=None, model=other, optimizer=other_optimizer).restore(only=["model/0.*"])
    assert torch.equal(torch.get_rng_state(), expected)
    assert torch.equal(other[0].weight, stored[0])
    assert not torch.equal(other[2].weight, stored[2])
    assert not other_optimizer.state
    wrapped = nn.ModuleDict({"body": make(seed=4)[0]})
    renamed = torch.optim.AdamW(wrapped.parameters(), lr=1e-2)
    relight.Checkpointer(run, save=None, model=wrapped, optimizer=renamed).restore(map={"model/*": "model/body.*"})
    assert torch.equal(wrapped["body"][2].weight, stored[2])
    assert renamed.state[wrapped["body"][2].weight]["step"] == 1


@pytest.mark.parametrize("prunes", [False, True])
def test_a_damaged_newest_checkpoint_is_skipped_with_a_warning(
    run: str, caplog: pytest.LogCaptureFixture, prunes: bool
) -> None:
    """Restore the newest good checkpoint. The warning names file, chunk and tensor of the skipped one, which is deleted
    only on request."""
    model, optimizer = make()
    ckpt = relight.Checkpointer(run, model=model, optimizer=optimizer, save=relight.every(steps=1))
    kept = []
    for step in range(3):
        one_step(model, optimizer)
        ckpt.step(step)
        kept.append(state_of(model))
    ckpt.close()
    newest = sorted(Path(run).glob("0*"))[-1]
    pack = next(newest.glob("pack*"))
    data = bytearray(pack.read_bytes())
    data[-5] ^= 4
    pack.write_bytes(data)
    model, optimizer = make(seed=9)
    again = relight.Checkpointer(
        run,
        model=model,
        optimizer=optimizer,
        keep=relight.keep(last=1, prune_abandoned=prunes),
        save=relight.every(steps=1),
    )
    assert again.restore() == 2
    assert all(torch.equal(a, b) for a, b in zip(kept[1], state_of(model)))
    assert "chunk" in caplog.text
    assert pack.name in caplog.text
    for step in (2, 3):  # one retention pass deletes at most half of the checkpoints, the oldest first
        one_step(model, optimizer)
        again.step(step)
    again.close()
    assert [checkpoint.step for checkpoint in relight.open(run).checkpoints()] == [2, 3]
    assert newest.exists() is not prunes, "no ancestor of later checkpoints: kept unless pruning was requested"


class Broken(Disk):
    """Disk with an fsync that fails while ``failing`` is true."""

    failing = False

    def fsync(self, fd: int) -> None:
        if Broken.failing:
            raise OSError(5, "planted")
        super().fsync(fd)


def test_a_failing_store_costs_a_warning_not_the_run(run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Continue training with one warning for each failed save. Nothing partial stays, and the next save works."""
    monkeypatch.setattr(local, "Disk", Broken)
    model, optimizer = make()
    ckpt = relight.Checkpointer(run, model=model, optimizer=optimizer, save=relight.every(steps=1))
    assert ckpt.step(0)
    before = counters["save.failed"]
    Broken.failing = True
    try:
        save = ckpt.step(1)
    finally:
        Broken.failing = False
    assert save is not None
    assert not save
    assert save.error is not None
    assert save.error.kind == "store"
    with pytest.raises(relight.StoreUnavailable):
        save.wait()
    assert counters["save.failed"] == before + 1
    assert len(list(Path(run).glob("0*"))) == 1
    assert ckpt.step(2)
    ckpt.close()


def test_the_policy_may_retry_and_may_raise(run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """``retries`` repeats a failed save at once in a new file. ``raise_after`` ends the run after that many consecutive
    failures."""
    calls = []

    class Once(Disk):
        def fsync(self, fd: int) -> None:
            calls.append(fd)
            if len(calls) in wrong:
                raise OSError(28, "planted")
            super().fsync(fd)

    wrong: set[int] = set()
    monkeypatch.setattr(local, "Disk", Once)
    model, optimizer = make()
    ckpt = relight.Checkpointer(
        run, save=None, model=model, optimizer=optimizer, on_failure=relight.failure_policy(retries=1, raise_after=2)
    )
    ckpt.save(0)
    wrong.update(range(len(calls) + 1, len(calls) + 2))
    assert ckpt.save(1)
    wrong.update(range(len(calls) + 1, len(calls) + 1000))
    assert ckpt.save(2).error.kind == "no_space"
    with pytest.raises(relight.SaveFailed):
        ckpt.save(3)


def test_a_model_that_does_not_change_is_reported(run: str) -> None:
    """Warn about a save in which every trainable tensor equals the previous save's."""
    model, optimizer = make()
    ckpt = relight.Checkpointer(run, save=None, model=model, optimizer=optimizer)
    before = counters["save.stale"]
    for step in range(3):
        one_step(model, optimizer)
        ckpt.save(step)
    assert counters["save.stale"] == before
    ckpt.save(3)
    assert counters["save.stale"] == before + 1
    ckpt.close()


def test_best_saves_when_a_metric_improves_also_after_a_resume(run: str) -> None:
    """Compare ``best`` with the values of earlier attempts too. Retention keeps the best and the newest."""

    def go(values: list[float], first: int) -> None:
        ckpt = relight.Checkpointer(
            run, state={"x": 1}, save=relight.best("loss"), keep=relight.keep(best=1), signals=False
        )
        ckpt.restore()
        for step, value in enumerate(values, first):
            ckpt.step(step, loss=torch.tensor(value))
        ckpt.close(save=False)

    go([3.0, 2.0, 2.5], 0)
    go([2.2, 1.9, float("nan")], 3)
    saved = [(checkpoint.step, checkpoint.body.metrics) for checkpoint in relight.open(run).checkpoints()]
    assert saved == [(4, {"loss": 1.899999976158142})]


def test_the_last_save_has_the_metrics_of_its_step(run: str) -> None:
    """Save the metrics of a step that no trigger saved with their values at that step's end."""
    total = torch.tensor(2.5)
    with relight.Checkpointer(run, state={"x": 1}, save=relight.every(steps=10), signals=False) as ckpt:
        ckpt.step(3, loss=total, rate=1)
        total.zero_()
    ckpt = relight.Checkpointer(run, save=None, state={"x": 1}, signals=False)
    ckpt.restore()
    with pytest.raises(ValueError, match="stop"), ckpt:
        ckpt.step(4, loss=0.5)
        raise ValueError("stop")
    saved = [
        (checkpoint.step, checkpoint.body.reason, checkpoint.body.metrics)
        for checkpoint in relight.open(run).checkpoints()
    ]
    assert saved == [(3, "end", {"loss": 2.5, "rate": 1.0}), (4, "exception: ValueError", {"loss": 0.5})]


def test_a_superseded_attempt_can_never_save_again(run: str) -> None:
    """Raise Fenced in the older of two processes on one run. Its save creates no checkpoint."""
    old = relight.Checkpointer(run, state={"x": 1})
    old.save(0)
    new = relight.Checkpointer(run, state={"x": 2})
    assert new.restore() == 1
    new.save(1)
    with pytest.raises(relight.Fenced):
        old.save(2)
    assert [checkpoint.step for checkpoint in relight.open(run).checkpoints()] == [0, 1]


def test_restoring_alone_does_not_supersede_a_running_job(run: str) -> None:
    """Restoring a run in another process does not stop the process that trains it."""
    job = relight.Checkpointer(run, state={"x": 1})
    job.save(0)
    relight.Checkpointer(run, save=None, state={"x": 0}).restore()
    assert job.save(1)


def test_an_unsupported_state_is_refused_before_a_file_is_written(run: str) -> None:
    """List every refusal with its path in one error at the first call."""
    before = signal.getsignal(signal.SIGTERM)
    ckpt = relight.Checkpointer(run, save=None, a={"f": print}, b=[object()])
    for _ in range(2):
        with pytest.raises(relight.IncompatibleState) as caught:
            ckpt.restore()
        assert [line.split(":")[0] for line in caught.value.details] == ["a/f", "b/0"]
        assert not Path(run).exists()
        assert signal.getsignal(signal.SIGTERM) == before


def test_a_state_that_becomes_unsupported_is_refused_at_the_first_step(run: str) -> None:
    """Check the state of a resumed run at the end of its first step, before anything is written."""
    model, optimizer = make()
    with relight.Checkpointer(run, save=None, model=model, optimizer=optimizer) as ckpt:
        ckpt.save(0)
    before = sorted(Path(run).parent.rglob("*"))
    ckpt = relight.Checkpointer(run, save=None, model=model, optimizer=optimizer, more={"f": print})
    assert ckpt.restore(strict=False) == 1
    with pytest.raises(relight.IncompatibleState, match="more/f"):
        ckpt.step(1)
    assert sorted(Path(run).parent.rglob("*")) == before


def test_gradients_and_micro_step_survive_in_the_middle_of_accumulation(run: str) -> None:
    """Save gradients in the middle of accumulation, and record which micro-batch is next."""
    model, optimizer = make()
    model(torch.ones(1, 4)).sum().backward()
    expected = [p.grad.clone() for p in model.parameters()]
    relight.Checkpointer(run, save=None, model=model, optimizer=optimizer).save(7, micro_step=2)
    model, optimizer = make(seed=2)
    ckpt = relight.Checkpointer(run, save=None, model=model, optimizer=optimizer)
    assert (ckpt.restore(), ckpt.micro_step) == (7, 3)
    assert all(torch.equal(a, p.grad) for a, p in zip(expected, model.parameters()))


def test_an_exception_before_the_update_saves_the_last_boundary(run: str) -> None:
    """Save the state of the last step's end, random state included, if forward or backward raises."""
    model, optimizer = make()
    with (
        pytest.raises(ZeroDivisionError),
        relight.Checkpointer(run, save=None, model=model, optimizer=optimizer) as ckpt,
    ):
        for step in range(6):
            loss = model(torch.randn(3, 4)).pow(2).mean()
            if step == 4:
                raise ZeroDivisionError
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            state, rng = state_of(model), torch.get_rng_state()
            ckpt.step(step)
    model, optimizer = make(seed=8)
    ckpt = relight.Checkpointer(run, save=None, model=model, optimizer=optimizer)
    assert ckpt.restore() == 4
    assert all(torch.equal(a, b) for a, b in zip(state, state_of(model)))
    assert torch.equal(rng, torch.get_rng_state())
    assert relight.open(run).latest().body.reason == "exception: ZeroDivisionError"


class Average:
    """Average of weights that is updated in place, replaced, or kept in an array."""

    def __init__(self, how: str) -> None:
        self.how = how
        self.held: Any = np.zeros(3) if how == "array" else torch.zeros(3)

    def update(self) -> None:
        """Update the average, as training does after a step."""
        if self.how == "replaced":
            self.held = self.held + 1
        else:
            self.held += 1

    def state_dict(self) -> dict[str, Any]:
        return {"held": self.held}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.held = state["held"]


@pytest.mark.parametrize("changes", [True, False])
@pytest.mark.parametrize("how", ["in place", "replaced", "array"])
def test_a_custom_component_is_saved_with_its_state_at_the_boundary(run: str, how: str, changes: bool) -> None:
    """Save nothing if an average was updated after the boundary: no consistent state exists any more."""
    model, optimizer = make()
    average = Average(how)
    with (
        pytest.raises(ZeroDivisionError),
        relight.Checkpointer(run, save=None, model=model, optimizer=optimizer, average=average) as ckpt,
    ):
        for step in range(4):
            if step == 3:
                if changes:
                    average.update()
                raise ZeroDivisionError
            one_step(model, optimizer)
            average.update()
            ckpt.step(step)
    saved = relight.open(run).run().history().live
    if changes or how == "replaced":  # a replaced object cannot be recognised
        assert saved == []
    else:
        assert [checkpoint.step for checkpoint in saved] == [2]
        model, optimizer = make()
        restored = Average(how)
        relight.Checkpointer(run, save=None, model=model, optimizer=optimizer, average=restored).restore()
        assert float(restored.held[0]) == 3


def test_an_exception_after_the_update_saves_nothing_inconsistent(run: str) -> None:
    """Save nothing and report it if parameters changed after the last step's end."""
    model, optimizer = make()
    before = counters["save.inconsistent"]
    with (
        pytest.raises(ZeroDivisionError),
        relight.Checkpointer(run, save=None, model=model, optimizer=optimizer) as ckpt,
    ):
        for step in range(3):
            one_step(model, optimizer)
            if step == 2:
                raise ZeroDivisionError
            ckpt.step(step)
    assert counters["save.inconsistent"] == before + 1
    assert relight.open(run).run().history().live == []


SIGNALLED = """
import os, signal, sys, time
import torch
from torch import nn
import relight

torch.set_num_threads(1)
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
ckpt = relight.Checkpointer(sys.argv[1], save=None, model=model, optimizer=optimizer)
start = ckpt.restore()
for step in range(start, 50):
    model(torch.randn(2, 4)).sum().backward()
    if step == 3:
        for number in sys.argv[2:]:
            os.kill(os.getpid(), getattr(signal, number))
    optimizer.step()
    optimizer.zero_grad()
    ckpt.step(step)
    if step == 5:
        break
print("continued to", step)
ckpt.close(save=False)
"""


@pytest.mark.parametrize(
    ("signals", "code", "steps"),
    [
        (["SIGTERM"], -signal.SIGTERM, [3]),
        (["SIGINT"], -signal.SIGINT, [3]),
        (["SIGINT", "SIGINT"], -signal.SIGINT, []),
        (["SIGUSR1"], 0, [3]),
    ],
)
def test_a_signal_finishes_the_step_saves_and_ends_as_it_asks(
    run: str, signals: list[str], code: int, steps: list[int]
) -> None:
    """SIGTERM and SIGINT save the current step and end the process by the signal. A second SIGINT ends it at once.
    SIGUSR1 only saves."""
    done = run_script(textwrap.dedent(SIGNALLED), run, *signals, timeout_s=120)
    assert done.returncode == code, done.stderr
    assert [checkpoint.step for checkpoint in relight.open(run).checkpoints()] == steps if steps else True
    if code == 0:
        assert "continued to 5" in done.stdout


def test_signal_handlers_are_given_back(run: str) -> None:
    """Restore the process's earlier signal handlers at ``close``."""
    before = signal.getsignal(signal.SIGTERM)
    ckpt = relight.Checkpointer(run, save=None, state={"x": 1})
    ckpt.save(0)
    assert signal.getsignal(signal.SIGTERM) != before
    ckpt.close()
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_forgotten_checkpointer_swallows_no_signal(run: str) -> None:
    """End normally on SIGTERM after the Checkpointer was garbage-collected without ``close``."""
    code = f"""
import gc, os, signal, time, relight
ckpt = relight.Checkpointer({run!r}, state=dict(x=1))
ckpt.save(0)
del ckpt
gc.collect()
signal.raise_signal(signal.SIGTERM)
time.sleep(5)
print("still here")
"""
    done = run_script(code, timeout_s=120)
    assert done.returncode == -signal.SIGTERM
    assert "still here" not in done.stdout


def test_functions_without_a_loop_round_trip(tmp_path: Path) -> None:
    """Save and load a plain tree with ``relight.save`` and ``relight.load``. ``only`` reads a part."""
    url = f"{tmp_path}/s/weights"
    state = {
        "w": torch.arange(6.0).view(2, 3).bfloat16(),
        "meta": {"lr": 0.1, 1: ("a", None)},
        "big": {"x": torch.ones(3)},
    }
    relight.save(url, state, step=12, metrics={"loss": float("nan")})
    loaded = relight.load(url)
    assert torch.equal(loaded["w"], state["w"])
    assert loaded["meta"] == state["meta"]
    assert list(relight.load(url, 12, only=["big/*"])) == ["big"]
    with pytest.raises(relight.CheckpointNotFound):
        relight.load(url, "nope")
    assert os.listdir(tmp_path / "s") != []


@pytest.mark.parametrize("saved", [False, True])
@pytest.mark.parametrize("fails", [False, True])
def test_a_step_that_is_not_over_is_not_taken_for_one_that_is(run: str, saved: bool, fails: bool) -> None:
    """Mark no step as ended if an exception or the end follows a micro-batch. The step's update is still missing."""
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def forward() -> None:
        model(torch.ones(1, 4)).sum().backward()

    with (
        contextlib.suppress(ValueError),
        relight.Checkpointer(run, save=None, model=model, optimizer=optimizer, background=False) as ckpt,
    ):
        for step in range(2):
            forward()
            optimizer.step()
            optimizer.zero_grad()
            ckpt.step(step)
        forward()
        ckpt.step(2, micro_step=0)
        if saved:
            ckpt.save(2, micro_step=0)
        if fails:
            raise ValueError("in the middle of step 2")
    with relight.Checkpointer(run, save=None, model=model, optimizer=optimizer, background=False) as ckpt:
        assert ckpt.restore() == 2
        assert ckpt.micro_step == (1 if saved or not fails else None)


def test_a_boundary_save_has_the_values_that_were_set_for_it(run: str) -> None:
    """Save values that the loop sets with the step's end, as weights are. This includes a value that was not a tensor
    before."""
    model, optimizer = make()
    with (
        pytest.raises(ZeroDivisionError),
        relight.Checkpointer(
            run, save=None, model=model, optimizer=optimizer, state={"seen": -1, "mean": None}
        ) as ckpt,
    ):
        for step in range(5):
            if step == 4:
                raise ZeroDivisionError
            one_step(model, optimizer)
            ckpt["seen"], ckpt["mean"] = 10 * step, torch.full((2,), float(step))
            ckpt.step(step)
    ckpt = relight.Checkpointer(
        run, save=None, model=model, optimizer=optimizer, mean=torch.zeros(2), state={"seen": -1}
    )
    assert (ckpt.restore(), ckpt["seen"]) == (4, 30)
    assert ckpt["mean"].tolist() == [3.0, 3.0]


def test_entries_that_do_not_fit_are_reported(tmp_path: Path) -> None:
    """Name five of the omitted entries and count the rest. Report nothing if everything fits."""
    layers = torch.nn.ModuleList(torch.nn.Linear(2, 2, bias=False) for _ in range(9))
    relight.Checkpointer(tmp_path / "run", save=None, model=layers).save(0)
    messages: list[str] = []
    undo = subscribe(lambda event: messages.append(str(event.fields.get("differences"))))
    for count, expected in (
        (2, "model/2.weight: in the checkpoint (float32 [2, 2]), but not in the module; model/3.weight"),
        (9, ""),
    ):
        messages.clear()
        fewer = torch.nn.ModuleList(torch.nn.Linear(2, 2, bias=False) for _ in range(count))
        relight.Checkpointer(tmp_path / "run", save=None, model=fewer).restore(strict=False)
        matching = [message for message in messages if "strict=False left out" in message]
        assert len(matching) == bool(expected) and all(
            expected in message and "; and 2 more" in message for message in matching
        ), matching
    undo()


@pytest.mark.parametrize("fails", [False, True])
def test_a_save_during_a_step_is_not_the_steps_end(run: str, fails: bool) -> None:
    """Save the end of a step after a save inside that step, at ``close`` or after an exception. A resume repeats no
    half step."""
    model, optimizer = make()
    with (
        contextlib.suppress(ValueError),
        relight.Checkpointer(run, save=None, model=model, optimizer=optimizer, background=False) as ckpt,
    ):
        model(torch.randn(3, 4)).sum().backward()
        ckpt.save(0, micro_step=0)
        one_step(model, optimizer)
        ckpt.step(0)
        if fails:
            raise ValueError("in the next step")
    with relight.Checkpointer(run, save=None, model=model, optimizer=optimizer, background=False) as ckpt:
        assert (ckpt.restore(), ckpt.micro_step) == (1, None)
    assert len(relight.open(run).checkpoints()) == 2, "the restored state is saved already"


def test_a_restored_state_of_a_step_in_progress_is_not_saved_again(run: str) -> None:
    """Save nothing in a process that restores a mid-step checkpoint and ends. A process that ends the step saves."""
    model, optimizer = make()
    relight.Checkpointer(run, save=None, model=model, optimizer=optimizer).save(0, micro_step=1)
    with relight.Checkpointer(run, save=None, model=model, optimizer=optimizer) as ckpt:
        assert (ckpt.restore(), ckpt.micro_step) == (0, 2)
        ckpt._saves.begin_attempt()
    assert len(relight.open(run).checkpoints()) == 1
    with relight.Checkpointer(run, save=None, model=model, optimizer=optimizer) as ckpt:
        ckpt.restore()
        one_step(model, optimizer)
        ckpt.step(0)
    assert len(relight.open(run).checkpoints()) == 2


def test_a_pending_save_that_fails_after_an_exception_is_reported_and_repeated(run: str) -> None:
    """Report a pending save that fails after the exception came, and save its step again."""
    model, optimizer = make()
    before = counters["save.failed"]
    with (
        pytest.raises(ValueError, match="the caller's"),
        relight.Checkpointer(run, save=None, model=model, optimizer=optimizer, background=False) as ckpt,
    ):
        for step in range(2):
            one_step(model, optimizer)
            ckpt.step(step)
        ckpt._progress.in_flight.add(7, InflightSave(Save(1, ASKED), {}, (1, None), None))
        ckpt._progress.saved = (1, None)
        ckpt._progress.in_flight.on_done(SaveOutcome(SaveResult(7, "lost"), StoreUnavailable("the disk has gone")))
        raise ValueError("the caller's")
    assert counters["save.failed"] == before + 1
    assert [checkpoint.step for checkpoint in relight.open(run).checkpoints()] == [1]


@pytest.mark.parametrize("how", ["closed", "closing", "failed"])
def test_a_signal_after_the_last_step_is_not_swallowed(run: str, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Call the script's own handler for a signal that arrives during ``close``, and restore the handler."""
    received: list[int] = []
    former = signal.signal(signal.SIGTERM, lambda number, frame: received.append(number))
    try:
        ours = signal.getsignal(signal.SIGTERM)
        with (
            contextlib.suppress(ValueError),
            relight.Checkpointer(run, save=None, state={"x": 1}, background=False) as ckpt,
        ):
            ckpt.step(0)
            if how == "closing":
                monkeypatch.setattr(ckpt._hooks.tiers, "finish", lambda seconds: signal.raise_signal(signal.SIGTERM))
            else:
                signal.raise_signal(signal.SIGTERM)
            if how == "failed":
                raise ValueError
        assert signal.getsignal(signal.SIGTERM) is ours
        assert received == [signal.SIGTERM]
        assert [checkpoint.step for checkpoint in relight.open(run).checkpoints()] == [0]
    finally:
        signal.signal(signal.SIGTERM, former)


def test_signals_are_counted_each_by_itself() -> None:
    """Count signals separately: the second SIGINT ends the process, whatever came in between. SIGTERM may repeat."""
    former = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        signals = SignalHandlers(lambda name: None)
        signals.install()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGTERM, signal.SIGTERM):
            os.kill(os.getpid(), number)
        assert signals.pending == "SIGTERM"
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    finally:
        signals.restore()
        signal.signal(signal.SIGTERM, former)


@pytest.mark.parametrize("what", ["connect", "slots", "reach"])
def test_a_machine_without_descriptors_has_its_saves_made_by_the_trainer(
    run: str, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Save in the trainer if no agent can be reached or started, or its memory cannot be mapped. Restoring works
    too."""

    def none_left(*_: object, **__: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    if what == "slots":
        monkeypatch.setattr(Agent, "slots", none_left)
    else:
        monkeypatch.setattr(background if what == "connect" else memory_sources, what, none_left)
    before = counters["agent.lost"]
    for step in range(2):
        with relight.Checkpointer(run, save=None, state={"x": 1}, w=torch.zeros(3), background=what != "reach") as ckpt:
            assert ckpt.restore() == step
            assert ckpt.save(step).done
    assert counters["agent.lost"] > before
