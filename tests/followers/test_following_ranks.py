"""Several ranks that follow one run switch to the same checkpoint, or none of them does."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.followers.test_follower import BYTES, TRAIN, WIDTH, make, saved, saved_on, values
from tests.scripts import run_ranks
from torch import nn

import relight
from relight.comm.threads import ThreadGroup
from relight.errors import IncompatibleState, RelightError, StoreUnavailable
from relight.followers import agreement
from relight.followers.follower import Follower
from relight.followers.staged import StagedState
from relight.followers.staging import StagedSwitch

RANKS = 3
THREADS = [None, 0.01]
"""Values of ``every``: without and with a thread that reads ahead."""


@pytest.fixture
def on_ranks(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[int, Callable[..., Follower]], Any]], list[Any]]:
    """Runs a function on three ranks, which are threads of this process. It gets the rank and ``relight.follow``."""
    local, making = threading.local(), threading.Lock()
    monkeypatch.setattr(agreement, "find_world", lambda timeout_s: local.world)

    def run(work: Callable[[int, Callable[..., Follower]], Any]) -> list[Any]:
        def rank(world: ThreadGroup) -> Any:
            local.world = world

            def follow(*words: Any, **options: Any) -> Follower:
                with making:
                    return relight.follow(*words, **options)

            return work(world.rank, follow)

        return ThreadGroup.run(RANKS, rank, 20.0)

    return run


@pytest.mark.parametrize("every", THREADS, ids=["inline", "thread"])
def test_ranks_switch_together(on_ranks: Any, every: float | None, tmp_path: Path) -> None:
    """While a trainer saves, each rank has the same checkpoint after each poll, though they are late by turns."""
    path = tmp_path / "s/run"
    trainer = subprocess.Popen([sys.executable, "-c", TRAIN, str(path)])

    def rank(number: int, follow: Callable[..., Follower]) -> list[int]:
        live, seen, late = make(), list[int](), random.Random(number)
        with follow(path, live, every=every) as follower:
            while len(seen) < 6:
                time.sleep(late.random() / 50)
                switched = follower.poll()
                if switched is not None:
                    assert values(live) == [switched.step] * len(values(live))
                    assert switched.id == follower.checkpoint.id  # type: ignore[union-attr]
                    seen.append(switched.step)
        return seen

    try:
        seen = on_ranks(rank)
    finally:
        trainer.kill()
        trainer.wait()
    assert seen[0] == sorted(seen[0]) and seen[1:] == seen[:-1]


@pytest.mark.parametrize("every", THREADS, ids=["inline", "thread"])
def test_a_rank_that_cannot_read_holds_all(
    on_ranks: Any, every: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If its store fails, no rank switches, and all know why. Once it can read, all switch."""
    path, broken = tmp_path / "s/run", threading.Event()
    model = saved(path, range(1))
    prepare = StagedSwitch.prepare

    def failing(staging: StagedSwitch) -> None:
        if broken.is_set() and staging._ranks.world.rank == 1:
            raise StoreUnavailable("the cable is out", where="here")
        prepare(staging)

    monkeypatch.setattr(StagedSwitch, "prepare", failing)
    model_on: list[nn.ModuleDict] = [model]

    def rank(number: int, follow: Callable[..., Follower]) -> None:
        live = make()
        with follow(path, live, every=every) as follower:
            assert follower.wait(20) is not None
            if number == 0:
                broken.set()
                model_on[0] = saved_on(path, 1)
            ends = time.monotonic() + 20
            while not follower._ranks.agree(follower.error is not None) and time.monotonic() < ends:
                assert follower.poll() is None and values(live) == [0] * len(values(live))
            assert "the cable is out" in str(follower.error)
            follower._ranks.world.gather(b"", "the end of the first half")
            broken.clear()
            assert follower.wait(20) is not None
            assert values(live) == values(model_on[0])

    on_ranks(rank)


def test_a_switch_that_fails_on_one_rank_fails_on_all(
    on_ranks: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its tensors may be a mixture, so all raise, and all read the checkpoint whole."""
    path = tmp_path / "s/run"
    saved(path, range(1))
    deliver, failing = StagedState.deliver, threading.local()

    def interrupted(staged: StagedState) -> None:
        if getattr(failing, "now", False):
            failing.now = False
            raise ValueError("no")
        deliver(staged)

    monkeypatch.setattr(StagedState, "deliver", interrupted)
    gate = threading.Barrier(RANKS)

    def rank(number: int, follow: Callable[..., Follower]) -> None:
        live = make()
        with follow(path, live) as follower:
            assert follower.wait(20) is not None
            if number == 0:
                saved_on(path, 1)
            gate.wait(60)
            failing.now = number == 2
            with pytest.raises((ValueError, RelightError), match="no"):
                follower.wait(20)
            assert follower.checkpoint is None
            switched = follower.wait(20)
            assert switched is not None and switched.bytes == BYTES and values(live)[0] == 1

    on_ranks(rank)


@pytest.mark.parametrize("every", THREADS, ids=["inline", "thread"])
def test_what_does_not_fit_one_rank_is_raised_on_all(on_ranks: Any, every: float | None, tmp_path: Path) -> None:
    """Once. Nothing has changed anywhere."""
    path = tmp_path / "s/run"
    saved(path, range(1))

    def rank(number: int, follow: Callable[..., Follower]) -> None:
        live = make()
        if number == 1:
            live["layer1"] = nn.Linear(2, WIDTH, bias=False)
        before = {name: value.clone() for name, value in live.state_dict().items()}
        with follow(path, live, every=every) as follower:
            with pytest.raises(IncompatibleState, match="shape|layer1"):
                follower.wait(20)
            for _ in range(3):
                assert follower.poll() is None
        assert all(value.equal(before[name]) for name, value in live.state_dict().items())

    on_ranks(rank)


SHARDED = """
import json, sys, time
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
import relight

torch.set_num_threads(1)
path, every = sys.argv[1], float(sys.argv[2]) or None
dist.init_process_group("gloo")
class Net(nn.ModuleDict):
    def forward(self, x):
        return x

net = Net({f"layer{number}": nn.Linear(1, 1 << 18, bias=False) for number in range(4)})
fully_shard(net, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
with relight.follow(path, net, every=every) as follower:
    for _ in range(2):
        switched = follower.wait(60)
        whole = [parameter.full_tensor() for parameter in net.parameters()]
        assert all(float(each.min()) == float(each.max()) for each in whole)
        print(json.dumps([switched.step, switched.bytes, [float(each.flatten()[0].detach()) for each in whole]]), flush=True)
        if dist.get_rank() == 0 and follower.checkpoint.step == 0:
            open(f"{path}.next", "w").close()
dist.destroy_process_group()
"""


@pytest.mark.parametrize("every", ["0", "0.05"], ids=["inline", "thread"])
def test_sharded_models_follow(every: str, tmp_path: Path) -> None:
    """Two ranks of FSDP2 follow a run of one process. They read the chunks with their halves of what changed, here whole layers."""
    path = tmp_path / "s/run"
    saved(path, range(1))

    def save_next() -> None:
        ends = time.monotonic() + 100
        while not Path(f"{path}.next").exists() and time.monotonic() < ends:
            time.sleep(0.05)
        saved_on(path, 1)

    saver = threading.Thread(target=save_next, daemon=True)
    saver.start()
    done = run_ranks(SHARDED, 2, str(path), every)
    for rank in done:
        assert rank.returncode == 0, rank.stderr
        assert [json.loads(line) for line in rank.stdout.splitlines()] == [
            [0, BYTES, [0, 0, 0, 0]],
            [1, WIDTH * 4, [1, 0, 0, 0]],
        ]
