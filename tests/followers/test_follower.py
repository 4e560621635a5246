"""A follower's live tensors: switched to each new checkpoint, by the chunks that changed, never a mixture."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import relight
from relight.followers import followed_log, staging
from relight.followers.staged import StagedSink
from relight.keys import write_key_file
from relight.observe import Event
from relight.store import LocalStore

LAYERS, WIDTH = 4, 1 << 18
BYTES = LAYERS * WIDTH * 4


def make() -> nn.ModuleDict:
    return nn.ModuleDict({f"layer{number}": nn.Linear(1, WIDTH, bias=False) for number in range(LAYERS)})


def fill(model: nn.Module, value: float, *names: str) -> None:
    """Set all weights of those layers; of all of them, if none is named."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not names or name.partition(".")[0] in names:
                parameter.fill_(value)


def values(model: nn.Module) -> list[float]:
    """Return the value of each layer. All weights of a layer must be equal."""
    weights = [parameter.detach() for parameter in model.parameters()]
    assert all(float(weight.min()) == float(weight.max()) for weight in weights), "a layer is a mixture"
    return [float(weight.flatten()[0]) for weight in weights]


def saved(path: Path, steps: range, **options: Any) -> nn.ModuleDict:
    """Save steps: layer 0 has the step's number, the others that of the first one."""
    model = make()
    fill(model, steps.start)
    with relight.Checkpointer(path, model=model, background=False, save=relight.every(steps=1), **options) as ckpt:
        ckpt.restore()
        for step in steps:
            fill(model, step, "layer0")
            ckpt.step(step)
    return model


def test_only_what_changed_is_read(tmp_path: Path) -> None:
    """The first checkpoint is read whole, and of the next one the changed layer, to the byte."""
    saved(tmp_path / "s/run", range(1))
    live = make()
    with relight.follow(tmp_path / "s/run", live) as follower:
        first = follower.poll()
        assert first is not None and (first.step, first.bytes) == (0, BYTES)
        assert follower.poll() is None
        for step in (1, 2):
            before = values(live)
            model = saved_on(tmp_path / "s/run", step)
            assert values(live) == before, "it changed before the switch"
            switched = follower.poll()
            assert switched is not None and (switched.step, switched.bytes) == (step, WIDTH * 4)
            assert values(live) == values(model) == [step, 0, 0, 0]
        assert follower.bytes_read == BYTES + 2 * WIDTH * 4 and follower.lag_steps == 0


def saved_on(path: Path, step: int, **options: Any) -> nn.ModuleDict:
    """Continue the run with one step that changes layer 0."""
    model = make()
    with relight.Checkpointer(path, model=model, background=False, save=relight.every(steps=1), **options) as ckpt:
        ckpt.restore()
        fill(model, step, "layer0")
        ckpt.step(step)
    return model


@pytest.mark.parametrize(
    "options",
    [{}, {"compact": True}, {"keep": relight.keep(last=1)}],
    ids=["plain", "incremental", "one kept"],
)
def test_every_form_of_a_checkpoint_is_followed(options: dict[str, Any], tmp_path: Path) -> None:
    """Incremental checkpoints, and a run that keeps the newest one only."""
    live = make()
    saved(tmp_path / "s/run", range(1), **options)
    with relight.follow(tmp_path / "s/run", live) as follower:
        assert follower.poll() is not None
        for step in range(1, 4):
            model = saved_on(tmp_path / "s/run", step, **options)
            switched = follower.poll()
            assert switched is not None and (switched.step, switched.bytes) == (step, WIDTH * 4)
            assert values(live) == values(model)


def test_an_encrypted_run_is_followed(tmp_path: Path) -> None:
    """With its key."""
    write_key_file(str(tmp_path / "key"))
    encrypt = f"file:{tmp_path / 'key'}"
    saved(tmp_path / "s/run", range(2), encrypt=encrypt)
    live = make()
    with relight.follow(tmp_path / "s/run", live, encrypt=encrypt) as follower:
        assert follower.poll() is not None
        assert values(live) == [1, 0, 0, 0]


def test_what_is_not_given_is_not_touched(tmp_path: Path) -> None:
    """Optimizers and other components of the run are left alone, and ``only`` selects among the given one's tensors."""
    saved(tmp_path / "s/run", range(1, 2))
    live = make()
    fill(live, 9)
    with relight.follow(tmp_path / "s/run", live, only="model/layer1.*") as follower:
        switched = follower.poll()
        assert switched is not None and switched.bytes == WIDTH * 4
        assert values(live) == [9, 1, 9, 9]


def test_a_model_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    """The error names both shapes. Nothing has changed, and later checks do not repeat it."""
    saved(tmp_path / "s/run", range(1))
    live = nn.ModuleDict({f"layer{number}": nn.Linear(1, 8, bias=False) for number in range(LAYERS)})
    fill(live, 9)
    with relight.follow(tmp_path / "s/run", live) as follower:
        with pytest.raises(relight.IncompatibleState):
            follower.poll()
        assert values(live) == [9] * LAYERS
        assert follower.poll() is None


def test_a_damaged_checkpoint_is_not_followed(tmp_path: Path, events: list[Event]) -> None:
    """The live tensors keep the one before, and take the next one."""
    live = make()
    saved(tmp_path / "s/run", range(1))
    with relight.follow(tmp_path / "s/run", live) as follower:
        assert follower.poll() is not None
        saved_on(tmp_path / "s/run", 1)
        newest = relight.open(tmp_path / "s/run").checkpoints()[-1]
        (pack,) = (tmp_path / "s/run").glob(f"*{newest.id}*/pack-*")
        data = bytearray(pack.read_bytes())
        data[len(data) // 8] ^= 1
        data[len(data) // 2] ^= 1
        pack.write_bytes(data)
        assert follower.poll() is None
        assert isinstance(follower.error, relight.CorruptCheckpoint)
        assert values(live) == [0] * LAYERS and follower.lag_steps == 1
        assert [event.name for event in events if event.name.startswith("follow.")] == [
            "follow.switched",
            "follow.skipped",
        ]
        model = saved_on(tmp_path / "s/run", 2)
        assert follower.poll() is not None and follower.error is None
        assert values(live) == values(model)


def test_a_tag_and_the_best_are_followed(tmp_path: Path) -> None:
    """A follower of a tag switches when the tag moves, also back. One of ``best`` switches to a better checkpoint only."""
    model, live, winner = make(), make(), make()
    path = tmp_path / "s/run"
    with (
        relight.Checkpointer(path, model=model, background=False, save=None) as ckpt,
        relight.follow(path, live, which="served") as follower,
        relight.follow(path, winner, which="best:loss:min") as best,
    ):
        assert follower.poll() is None and best.poll() is None
        ckpt.restore()
        for step, loss in enumerate((3.0, 1.0, 2.0)):
            fill(model, step)
            ckpt.save(step, metrics={"loss": loss})
            best.poll()
        assert values(winner) == [1] * LAYERS
        store = relight.open(path)
        for step in (1, 2, 1):
            store.tag("served", step)
            switched = follower.poll()
            assert switched is not None and switched.step == step
            assert values(live) == [step] * LAYERS
        assert follower.poll() is None


TRAIN = """
import sys, torch, relight
model = torch.nn.ModuleDict({f"layer{n}": torch.nn.Linear(1, 1 << 18, bias=False) for n in range(4)})
torch.set_num_threads(1)
ckpt = relight.Checkpointer(sys.argv[1], model=model, save=relight.every(steps=1), keep=relight.keep(last=2), signals=False)
step = ckpt.restore()
while True:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(step)
    ckpt.step(step)
    step += 1
"""


def test_a_killed_trainer_leaves_no_mixture(tmp_path: Path) -> None:
    """While a trainer saves, is killed and starts again, a follower with a thread of its own has one checkpoint's weights after each switch."""
    path, live = tmp_path / "s/run", make()
    seen = list[int]()
    with relight.follow(path, live, every=0.01) as follower:
        for _ in range(3):
            trainer = subprocess.Popen(
                [sys.executable, "-c", TRAIN, str(path)], env={**os.environ, "RELIGHT_BACKGROUND": "1"}
            )
            ends = time.monotonic() + 40
            wanted = len(seen) + 5
            while len(seen) < wanted and time.monotonic() < ends:
                switched = follower.wait(0.1)
                if switched is not None:
                    assert values(live) == [switched.step] * LAYERS
                    seen.append(switched.step)
            trainer.send_signal(signal.SIGKILL)
            trainer.wait()
    assert len(seen) == 15 and seen == sorted(seen)


def test_a_forgotten_follower_ends_its_thread(tmp_path: Path) -> None:
    """Neither the thread nor the live tensors outlive it."""
    saved(tmp_path / "s/run", range(1))
    follower = relight.follow(tmp_path / "s/run", make(), every=0.01)
    assert follower.wait(20) is not None
    thread = follower._thread
    assert thread is not None and thread in threading.enumerate()
    del follower
    gc.collect()
    thread.join(10)
    assert not thread.is_alive()


@pytest.mark.parametrize(
    "words", [{"model": 3}, {"model": {}}, {"every": 0}, {"every": True}, {"every": "soon"}], ids=str
)
def test_a_wrong_argument_is_refused(words: dict[str, Any], tmp_path: Path) -> None:
    """The error names the argument and shows a right one."""
    given = {"model": make(), **words}
    with pytest.raises(relight.ConfigError, match="follow"):
        relight.follow(tmp_path / "s/run", **given)


class Extra(nn.Module):
    """A module with tensors that its own code loads."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4))
        self.counts, self.fixed = torch.zeros(1 << 18), torch.zeros(1 << 18)

    def get_extra_state(self) -> dict[str, torch.Tensor]:
        return {"counts": self.counts, "fixed": self.fixed}

    def set_extra_state(self, state: dict[str, torch.Tensor]) -> None:
        self.counts, self.fixed = state["counts"], state["fixed"]


@pytest.fixture
def dirty(monkeypatch: pytest.MonkeyPatch) -> None:
    """New memory is never zero by chance."""
    empty = torch.empty

    def filled(*shape: Any, **options: Any) -> torch.Tensor:
        tensor = empty(*shape, **options)
        return tensor.fill_(-7) if tensor.dtype.is_floating_point else tensor

    monkeypatch.setattr(torch, "empty", filled)


@pytest.mark.usefixtures("dirty")
def test_what_an_objects_own_code_loads_is_read_whole(tmp_path: Path) -> None:
    """Such tensors get new memory at each switch. What has not changed is read, too."""
    saved_module, live = Extra(), Extra()
    optimizer = torch.optim.AdamW(saved_module.parameters(), lr=torch.tensor(1e-3))
    live_optimizer = torch.optim.AdamW(live.parameters(), lr=torch.tensor(5.0))
    components = {"model": live, "optimizer": live_optimizer}
    path = tmp_path / "s/run"
    saved_module.fixed.fill_(3)
    with (
        relight.Checkpointer(path, model=saved_module, optimizer=optimizer, background=False, save=None) as ckpt,
        relight.follow(path, components) as follower,
    ):
        ckpt.restore()
        for step in range(3):
            saved_module.counts.fill_(step)
            saved_module.weight.sum().backward()
            optimizer.step()
            ckpt.save(step)
            assert follower.poll() is not None
            assert float(live.counts.min()) == float(live.counts.max()) == step
            assert float(live.fixed.min()) == float(live.fixed.max()) == 3
            assert torch.equal(live.weight, saved_module.weight)
            assert float(live_optimizer.param_groups[0]["lr"]) == pytest.approx(1e-3)


@pytest.mark.parametrize("thread", [False, True], ids=["inline", "thread"])
def test_a_failed_switch_leaves_nothing_that_counts(
    thread: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After an interrupted switch the tensors may be a mixture: the next checkpoint, also the same one, is read whole."""
    path, live = tmp_path / "s/run", make()
    saved(path, range(1))
    with relight.follow(path, live, every=0.02 if thread else None) as follower:
        assert follower.wait(20) is not None
        saved_on(path, 1)
        deliver = StagedSink.deliver

        def interrupted(sink: StagedSink) -> None:
            deliver(sink)
            monkeypatch.undo()
            raise KeyboardInterrupt

        monkeypatch.setattr(StagedSink, "deliver", interrupted)
        with pytest.raises(KeyboardInterrupt):
            follower.wait(20)
        assert follower.checkpoint is None
        switched = follower.wait(20)
        assert switched is not None and switched.bytes == BYTES
        assert values(live) == [1, 0, 0, 0]


def test_a_run_that_was_begun_again_is_followed(tmp_path: Path) -> None:
    """The run is removed, which is an error meanwhile, and another one gets its name."""
    path, live = tmp_path / "s/run", make()
    saved(path, range(3))
    with relight.follow(path, live) as follower:
        assert follower.poll() is not None
        shutil.rmtree(path)
        assert follower.poll() is None and isinstance(follower.error, relight.CheckpointNotFound)
        model = saved(path, range(7, 8))
        switched = follower.poll()
        assert switched is not None and switched.step == 7
        assert values(live) == values(model) == [7] * LAYERS


def test_a_damaged_checkpoint_does_not_lead_to_an_older_one(tmp_path: Path) -> None:
    """The live checkpoint was removed by retention, and an older one is kept by its tag."""
    path, live = tmp_path / "s/run", make()
    saved(path, range(1))
    relight.open(path).tag("kept", 0)
    with relight.follow(path, live) as follower:
        saved_on(path, 1, keep=relight.keep(last=1))
        assert follower.poll() is not None
        saved_on(path, 2, keep=relight.keep(last=1))
        newest = relight.open(path).checkpoints()[-1]
        (pack,) = path.glob(f"*{newest.id}*/pack-*")
        pack.write_bytes(pack.read_bytes()[:-1] + b"?")
        pack.write_bytes(b"?" * pack.stat().st_size)
        for _ in range(3):
            assert follower.poll() is None
        assert values(live) == [1, 0, 0, 0]


def test_tensors_that_moved_are_read_whole(tmp_path: Path) -> None:
    """The module was converted after a checkpoint was staged, and its old memory is not the module's any more."""
    path, live = tmp_path / "s/run", make()
    saved(path, range(1))
    with relight.follow(path, live, every=0.01) as follower:
        assert follower.wait(20) is not None
        for step in (1, 2):
            model = saved_on(path, step)
            ends = time.monotonic() + 20
            while follower._ready is None and time.monotonic() < ends:
                time.sleep(0.01)
            live.double().float()
            assert follower.wait(20) is not None
            assert values(live) == values(model) == [step, 0, 0, 0]


def test_an_error_of_the_callers_code_does_not_end_the_thread(tmp_path: Path) -> None:
    """It is in ``error``, and the next check is made."""
    path, live, calls = tmp_path / "s/run", make(), [0]

    def rename(name: str) -> str:
        calls[0] += 1
        if calls[0] == 1:
            raise KeyError(name)
        return name

    saved(path, range(1))
    with relight.follow(path, live, every=0.01, map=rename) as follower:
        assert follower.wait(20) is not None
        assert follower.error is None and calls[0] > 1


def test_a_closed_follower_refuses(tmp_path: Path) -> None:
    """And names the way out."""
    follower = relight.follow(tmp_path / "s/run", make())
    follower.close()
    with pytest.raises(relight.ConfigError, match="closed"):
        follower.poll()


def test_where_memory_is_short_batches_are_read_in_the_switch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At most the given bytes wait at a time, and only what changed is read."""
    path, live = tmp_path / "s/run", make()
    most = [0]
    absorb, deliver, waiting = StagedSink.absorb, StagedSink.deliver, [0]

    def counted(sink: StagedSink, offset: int, data: memoryview) -> None:
        absorb(sink, offset, data)
        waiting[0] += len(data)
        most[0] = max(most[0], waiting[0])

    def delivered(sink: StagedSink) -> None:
        waiting[0] -= sum(len(data) for _, data in sink._pieces)
        deliver(sink)

    monkeypatch.setattr(StagedSink, "absorb", counted)
    monkeypatch.setattr(StagedSink, "deliver", delivered)
    saved(path, range(1))
    with relight.follow(path, live, memory="1MB") as follower:
        first = follower.poll()
        assert first is not None and first.bytes == BYTES and most[0] <= 2 * WIDTH * 4 and values(live) == [0] * LAYERS
        assert first.changed == tuple(f"model/layer{number}.weight" for number in range(LAYERS))
        saved_on(path, 1)
        second = follower.poll()
        assert second is not None and second.bytes == WIDTH * 4 and second.changed == ("model/layer0.weight",)
        assert values(live) == [1, 0, 0, 0] and follower.bytes_read == BYTES + WIDTH * 4


@pytest.mark.parametrize("every", [None, 0.01], ids=["inline", "thread"])
def test_a_batch_that_cannot_be_read_is_raised(every: float | None, tmp_path: Path) -> None:
    """The tensors may be a mixture: no checkpoint counts as theirs, and the next switch reads everything."""
    path, live = tmp_path / "s/run", make()
    saved(path, range(1))
    with relight.follow(path, live, memory=1, every=every) as follower:
        assert follower.wait(20) is not None
        saved_on(path, 1)
        pack = sorted(path.glob("0000000001-*/pack-*"))[-1]
        data = bytearray(pack.read_bytes())
        for place in range(100_000, len(data), 100_000):  # in each tensor
            data[place] ^= 1
        pack.write_bytes(data)
        with pytest.raises(relight.CorruptCheckpoint):
            follower.wait(20)
        assert follower.checkpoint is None
        switched = follower.wait(20)
        assert switched is not None and switched.step == 0 and switched.bytes == BYTES
        assert values(live) == [0] * LAYERS


def test_tiers_are_read_nearest_first(tmp_path: Path) -> None:
    """What the first one has lost comes from the next one; a checkpoint that only the second one has is followed."""
    near, far, live = tmp_path / "near/run", tmp_path / "far/run", make()
    tiers = relight.Tiers(hot=near, cold=far)
    saved(tiers, range(1))  # type: ignore[arg-type]
    with relight.follow(tiers, live) as follower:
        first = follower.poll()
        assert first is not None and first.source == "store" and first.bytes == BYTES
        model = saved_on(tiers, 1)  # type: ignore[arg-type]
        for pack in near.glob("0000000001-*/pack-*"):
            pack.unlink()
        second = follower.poll()
        assert second is not None and second.step == 1 and second.bytes == WIDTH * 4
        assert values(live) == values(model)
        shutil.rmtree(near)
    with relight.follow(tiers, make()) as follower:
        only = follower.poll()
        assert only is not None and (only.step, only.source) == (1, "cold")


@pytest.mark.parametrize("records", [1, 3])
def test_a_run_begun_again_with_as_many_records_is_followed(
    records: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The follower did not check while the run was missing, and the log has the same length as before."""
    monkeypatch.setattr(followed_log, "COMPARE_S", 0.0)
    path, live = tmp_path / "s/run", make()
    saved(path, range(records))
    with relight.follow(path, live) as follower:
        assert follower.poll() is not None
        shutil.rmtree(path)
        model = saved(path, range(5, 5 + records))
        assert follower.wait(5) is not None and values(live) == values(model)


def test_the_reason_stays_as_long_as_the_newest_is_damaged(tmp_path: Path) -> None:
    """Also after further checks, and after a switch to the one before."""
    path, live = tmp_path / "s/run", make()
    saved(path, range(2))
    for pack in path.glob("0000000001-*/pack-*"):
        pack.unlink()
    with relight.follow(path, live) as follower:
        switched = follower.wait(5)
        assert switched is not None and switched.step == 0
        for _ in range(3):
            assert follower.poll() is None and isinstance(follower.error, relight.CorruptCheckpoint)
        saved_on(path, 2)
        assert follower.wait(5) is not None and follower.error is None


def test_a_live_state_that_nothing_fits_is_refused(tmp_path: Path, events: list[Event]) -> None:
    """Also with ``strict=False``. What is left out of one that fits in part is reported once."""
    path, part = tmp_path / "s/run", make()
    saved(path, range(1))
    for wrong in ({"modle": make()}, nn.ModuleDict({"other": nn.Linear(3, 3)})):
        with (
            relight.follow(path, wrong, strict=False) as follower,
            pytest.raises(relight.IncompatibleState, match="no tensor"),
        ):
            follower.poll()
    part["more"] = nn.Linear(3, 3)
    with relight.follow(path, part, strict=False) as follower:
        assert follower.poll() is not None
        saved_on(path, 1)
        assert follower.poll() is not None
    (event,) = [event for event in events if event.name == "follow.partial"]
    assert "more" in str(event)


@pytest.mark.parametrize("tiers", [False, True])
def test_waiting_at_an_object_store_costs_a_request_a_second(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiers: bool
) -> None:
    """Each check is one LIST. With a bucket as the further tier, wait() listed it 20 times a second."""
    path, counts = tmp_path / "s/run", [0]
    saved(path, range(1))
    with relight.follow(relight.Tiers(near=path, far=tmp_path / "far/run") if tiers else path, make()) as follower:
        assert follower.poll() is not None
        properties, listed = LocalStore.properties, LocalStore.list

        def counted(store: LocalStore, key: str) -> Any:
            counts[0] += 1
            return listed(store, key)

        monkeypatch.setattr(
            LocalStore,
            "properties",
            lambda store: replace(properties(store), remote=not tiers or "far" in store.url),
        )
        monkeypatch.setattr(LocalStore, "list", counted)
        assert follower.wait(1.5) is None
    assert 1 <= counts[0] <= (24 if tiers else 6)  # further tiers are read from their beginning


def test_a_switch_of_what_was_read_ahead_plans_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller's thread compares the memory of the module's tensors, and copies."""
    path, planners = tmp_path / "s/run", list[str]()
    plan = staging.planned

    def counted(*words: Any) -> Any:
        planners.append(threading.current_thread().name)
        return plan(*words)

    monkeypatch.setattr(staging, "planned", counted)
    saved(path, range(1))
    with relight.follow(path, make(), every=0.01) as follower:
        assert follower.wait(20) is not None
        saved_on(path, 1)
        assert follower.wait(20) is not None
    assert set(planners) == {"relight-follow"}
