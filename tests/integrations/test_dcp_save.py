"""Checkpoints saved through torch.distributed.checkpoint by one process. They are ordinary checkpoints, and load
unchanged."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import OrderedDict
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from click.testing import CliRunner
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import relight
from relight.cli import cli
from relight.errors import CheckpointNotFound, ConfigError, CorruptCheckpoint, Fenced, IncompatibleState, RelightError
from relight.integrations.dcp import StorageReader, StorageWriter

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")


def a_state() -> dict[str, Any]:
    return {
        "w": torch.randn(5, 3),
        "half": torch.randn(4).bfloat16(),
        "columns": torch.randn(3, 4).t(),
        "none": torch.empty(0, 2),
        "number": torch.tensor(3.5),
        "step": 7,
        "nested": {
            "list": [torch.arange(3), {"pair": (1, "two"), "set": {1, 2}}],
            "text": "é",
            "big": 2**70,
            "nothing": None,
        },
        "array": np.arange(6, dtype=np.int16).reshape(2, 3),
        "ordered": OrderedDict(a=1.5),
        "rank": {"a": 1},
        "dcp": True,
        "rng": torch.arange(2),
    }


def zeroed(state: Any) -> Any:
    if isinstance(state, torch.Tensor):
        return torch.zeros_like(state)
    if isinstance(state, dict):
        return {key: zeroed(value) for key, value in state.items()}
    if isinstance(state, list):
        return [zeroed(value) for value in state]
    return None


def same(first: Any, second: Any) -> bool:
    if isinstance(first, torch.Tensor):
        return bool(first.dtype == second.dtype and torch.equal(first, second))
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(same(value, second[key]) for key, value in first.items())
    if isinstance(first, list):
        return len(first) == len(second) and all(map(same, first, second))
    if isinstance(first, np.ndarray):
        return bool(first.dtype == second.dtype and (first == second).all())
    return bool(first == second)


def caught(action: Any) -> RelightError:
    """Return the error that DCP wrapped."""
    with pytest.raises(CheckpointException) as failure:
        action()
    error = failure.value.failures[0][0]
    assert isinstance(error, RelightError), failure.value
    return error


def flip(path: Path, at: int = -9) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def pack_of(run: Path, step: int) -> Path:
    return next(run.glob(f"{step:010d}-*/pack-*"))


def test_a_saved_state_is_loaded(tmp_path: Path) -> None:
    """Restore tensors of any layout, nested values, and names that Relight itself uses, all unchanged."""
    state = a_state()
    dcp.save(state, storage_writer=StorageWriter(tmp_path / "store" / "run", step=7))
    loaded = zeroed(state)
    dcp.load(loaded, storage_reader=StorageReader(tmp_path / "store" / "run"))
    assert same({**state, "ordered": {"a": 1.5}}, loaded)


def test_a_dcp_save_is_a_checkpoint_like_any_other(tmp_path: Path) -> None:
    """Verify, load, list and show the checkpoint. Names of the state dict select its tensors."""
    run, state = tmp_path / "run", a_state()
    writer = StorageWriter(run, step=7, metrics={"loss": 0.5})
    dcp.save(state, storage_writer=writer)
    assert writer.report is not None and writer.report.step == 7
    assert [findings for _, findings in relight.open(run).verify()] == [[]]
    tree = relight.load(run)
    assert same(state["nested"], tree["nested"]) and same(state["w"], tree["w"]) and tree["step"] == 7
    assert torch.equal(relight.load(run, only=["nested/list"])["nested"]["list"][0], torch.arange(3))
    listed = json.loads(CliRunner().invoke(cli, ["ls", str(run), "--json"]).stdout)
    assert [(row["step"], row["metrics"]) for row in listed] == [(7, {"loss": 0.5})]
    shown = CliRunner().invoke(cli, ["show", str(run)])
    assert shown.exit_code == 0 and "8 tensors" in shown.stdout
    names = {path.name.split("-")[0] for path in next(run.glob("00*")).iterdir()}
    assert names == {"root.json", "part", "pack"}


def test_a_model_and_its_optimizer(tmp_path: Path) -> None:
    """Load by DCP's ``get_state_dict`` and ``set_state_dict``, flattened or not, and the module by Relight's
    Checkpointer."""
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5))
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.125)
    net(torch.randn(3, 4)).sum().backward()
    optimizer.step()
    model, optim = get_state_dict(net, optimizer)
    dcp.save({"model": model, "optim": optim}, storage_writer=StorageWriter(tmp_path / "run", step=1))
    other = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5))
    others = torch.optim.AdamW(other.parameters(), lr=1.0)
    model, optim = get_state_dict(other, others)
    state = {"model": model, "optim": optim}
    dcp.load(state, storage_reader=StorageReader(tmp_path / "run"))
    set_state_dict(other, others, model_state_dict=state["model"], optim_state_dict=state["optim"])
    assert all(
        torch.equal(saved, loaded)
        for saved, loaded in zip(net.state_dict().values(), other.state_dict().values(), strict=True)
    )
    assert others.param_groups[0]["lr"] == 0.125
    for saved, loaded in zip(net.parameters(), other.parameters(), strict=True):
        assert same(dict(optimizer.state[saved]), dict(others.state[loaded]))
    third = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5))
    checkpointer = relight.Checkpointer(tmp_path / "run", model=third, signals=False)
    assert checkpointer.restore(only=["model/*"]) == 2
    checkpointer.close(save=False)
    assert all(torch.equal(saved, loaded) for saved, loaded in zip(net.parameters(), third.parameters(), strict=True))


def test_states_that_the_planner_leaves_nested(tmp_path: Path) -> None:
    """Store tensors inside unflattened values as tensors, and load them into the values."""
    state = {"w": torch.arange(4.0), "inner": {"t": torch.ones(2), "n": [1, 2]}}
    dcp.save(
        state,
        storage_writer=StorageWriter(tmp_path / "run", step=1),
        planner=DefaultSavePlanner(flatten_state_dict=False),
    )
    loaded: dict[str, Any] = {"w": torch.zeros(4), "inner": None}
    dcp.load(loaded, storage_reader=StorageReader(tmp_path / "run"), planner=DefaultLoadPlanner(False, False))
    assert same(state, loaded)


def test_an_unsupported_value_is_named_and_nothing_is_written(tmp_path: Path) -> None:
    """Name all values that cannot be saved in one error. The run has no checkpoint."""
    state = {"w": torch.ones(2), "a": {"f": lambda: 1}, "s": torch.eye(2).to_sparse(), "o": object()}
    error = caught(lambda: dcp.save(state, storage_writer=StorageWriter(tmp_path / "run", step=1)))
    assert isinstance(error, IncompatibleState)
    assert [line.split(":")[0] for line in error.details] == ["s", "a/f", "o"]
    assert relight.open(tmp_path / "run").checkpoints() == []


def test_one_flipped_byte_is_refused(tmp_path: Path) -> None:
    """Raise an error for a damaged checkpoint that is selected by its step. ``latest`` selects the previous one, also
    if the part file is damaged."""
    run = tmp_path / "run"
    writer = StorageWriter(run)
    for step in (1, 2, 3):
        writer.step = step
        dcp.save({"w": torch.full((9,), float(step)), "step": step}, storage_writer=writer)
    flip(pack_of(run, 3))
    state: dict[str, Any] = {"w": torch.zeros(9), "step": 0}
    assert isinstance(caught(lambda: dcp.load(state, storage_reader=StorageReader(run, which=3))), CorruptCheckpoint)
    reader = StorageReader(run)
    dcp.load(state, storage_reader=reader)
    assert state["step"] == 2 and torch.equal(state["w"], torch.full((9,), 2.0))
    assert reader.loaded == relight.open(run).checkpoints()[1].id
    flip(next(run.glob("0000000002-*/part-*")))
    dcp.load(state, storage_reader=StorageReader(run))
    assert state["step"] == 1
    flip(pack_of(run, 1))
    assert isinstance(caught(lambda: dcp.load(state, storage_reader=StorageReader(run))), CorruptCheckpoint)


def test_only_what_is_asked_for_is_read(tmp_path: Path) -> None:
    """Ignore damage in bytes that the plan does not read."""
    run = tmp_path / "run"
    state = {"a": torch.zeros(1 << 19), "b": torch.ones(1 << 19)}
    dcp.save(state, storage_writer=StorageWriter(run, step=1))
    flip(pack_of(run, 1))
    loaded = {"a": torch.ones(1 << 19)}
    dcp.load(loaded, storage_reader=StorageReader(run, which=1))
    assert torch.equal(loaded["a"], state["a"])
    assert isinstance(
        caught(lambda: dcp.load({"b": torch.ones(1 << 19)}, storage_reader=StorageReader(run, which=1))),
        CorruptCheckpoint,
    )


def test_a_step_is_named_in_either_way(tmp_path: Path) -> None:
    """Take the step from ``step`` or from the last number of ``checkpoint_id``, in saves and loads. Without a step, no
    save begins."""
    writer = StorageWriter(tmp_path / "run")
    assert isinstance(caught(lambda: dcp.save({"n": 1}, storage_writer=writer)), ConfigError)
    for step in (5, 10):
        dcp.save({"n": step}, storage_writer=writer, checkpoint_id=f"out/step-{step}")
    assert [checkpoint.step for checkpoint in relight.open(tmp_path / "run").checkpoints()] == [5, 10]
    state = {"n": 0}
    dcp.load(state, storage_reader=StorageReader(tmp_path / "run"), checkpoint_id="out/step-5")
    assert state["n"] == 5
    with pytest.raises(ConfigError):
        dcp.save({"n": 1}, storage_writer=writer, checkpoint_id="latest")
    assert isinstance(
        caught(lambda: dcp.load(state, storage_reader=StorageReader(tmp_path / "run", 6))), CheckpointNotFound
    )


def test_one_attempt_a_writer_and_the_newest_is_in_charge(tmp_path: Path) -> None:
    """Begin one attempt for each writer. A superseded writer is refused."""
    first, second = StorageWriter(tmp_path / "run", 1), StorageWriter(tmp_path / "run", 2)
    for _ in range(3):
        dcp.save({"n": 1}, storage_writer=first)
    dcp.save({"n": 2}, storage_writer=second)
    assert {checkpoint.epoch for checkpoint in relight.open(tmp_path / "run").checkpoints()} == {1, 2}
    assert isinstance(caught(lambda: dcp.save({"n": 1}, storage_writer=first)), Fenced)


@pytest.mark.skipif(
    "enable_plan_caching" not in signature(DefaultSavePlanner).parameters, reason="torch 2.6 has no cache of plans"
)
def test_plans_that_are_cached(tmp_path: Path) -> None:
    """Save empty plans of a caching planner, which mean unchanged plans, with the same writer. Another writer refuses
    them."""
    writer = StorageWriter(tmp_path / "run")

    class Planner(DefaultSavePlanner):
        """A planner with its own cache."""

    for step in (1, 2, 3):
        writer.step = step
        dcp.save({"w": torch.full((3,), float(step))}, storage_writer=writer, planner=Planner(enable_plan_caching=True))
    assert [float(relight.load(tmp_path / "run", step)["w"][0]) for step in (1, 2, 3)] == [1, 2, 3]
    other = StorageWriter(tmp_path / "run", 4)
    assert isinstance(
        caught(lambda: dcp.save({"w": torch.ones(3)}, storage_writer=other, planner=Planner(enable_plan_caching=True))),
        ConfigError,
    )


@pytest.mark.skipif("use_collectives" not in signature(dcp.save).parameters, reason="torch 2.6 always uses collectives")
def test_ranks_that_save_each_for_itself_are_refused(tmp_path: Path) -> None:
    """``use_collectives=False`` would make a checkpoint of each rank."""
    with pytest.raises(ConfigError):
        dcp.save({"n": 1}, storage_writer=StorageWriter(tmp_path / "run", 1), use_collectives=False)
    assert not (tmp_path / "run").exists()


def test_what_relight_saved_by_itself_is_not_for_dcp(tmp_path: Path) -> None:
    """State so in the error, and how to read it."""
    relight.save(tmp_path / "run", {"w": torch.ones(2)}, step=1)
    error = caught(lambda: dcp.load({"w": torch.zeros(2)}, storage_reader=StorageReader(tmp_path / "run")))
    assert isinstance(error, IncompatibleState) and "relight.load" in error.hint


def test_relight_starts_without_torch() -> None:
    """The room is imported by those who ask for it."""
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys, relight; assert not {'torch', 'relight.integrations'} & sys.modules.keys()",
        ],
        check=False,
    )
    assert done.returncode == 0
