"""``fresh=True`` applies to a launcher's job: a restarted job continues from its own checkpoints, and another job does
not."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import relight
from relight.checkpointer import launcher_job
from relight.store.urls import absolute

NAMES = (
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_RESTART_COUNT",
    "TORCHELASTIC_ERROR_FILE",
    "SLURM_JOB_ID",
    "SLURM_RESTART_COUNT",
)
MOUNT = "512 498 8:1 /var/lib/kubelet/pods/{pod}/containers/train/{start} /dev/termination-log rw,relatime - ext4 /dev/root rw\n"


def start(
    path: Any, variables: Mapping[str, str], monkeypatch: pytest.MonkeyPatch, *, steps: int = 4, wait: bool = False
) -> int:
    """Start a job's script with ``fresh=True`` under a launcher with these variables, and train ``steps``. Return the
    first step."""
    for name in (*NAMES, "KUBERNETES_SERVICE_HOST"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    model = nn.Linear(2, 2)
    ckpt = relight.Checkpointer(
        path, model=model, fresh=True, save=relight.every(steps=1), background=False, signals=False
    )
    first = ckpt.restore()
    for step in range(first, first + steps):
        with torch.no_grad():
            model.weight += 1.0
        save = ckpt.step(step)
        assert not wait or (save is not None and save.wait(60, until="drained"))
    ckpt.close(save=False)
    return first


def slurm(restarts: int, job: str = "5") -> dict[str, str]:
    return {"SLURM_JOB_ID": job, "SLURM_RESTART_COUNT": str(restarts)}


def torchrun(agent: str, restarts: int = 0, run_id: str = "none") -> dict[str, str]:
    names = {"TORCHELASTIC_RUN_ID": run_id, "TORCHELASTIC_RESTART_COUNT": str(restarts)}
    return {**names, "TORCHELASTIC_ERROR_FILE": f"/tmp/torchelastic_x/{agent}/attempt_{restarts}/0/error.json"}


@pytest.mark.parametrize(
    ("first", "second", "continues"),
    [
        (slurm(0), slurm(1), True),
        (slurm(0), slurm(0), False),  # an interactive allocation runs many trainings
        (slurm(0), slurm(1, "6"), False),
        ({**slurm(0), **torchrun("a")}, {**slurm(1), **torchrun("b")}, True),
        ({**slurm(0), **torchrun("a", 0, "x")}, {**slurm(1), **torchrun("b", 0, "y")}, True),
        ({**slurm(0), **torchrun("a")}, {**slurm(0), **torchrun("a", 1)}, True),
        (torchrun("a"), torchrun("a", 1), True),
        (torchrun("a"), torchrun("a", 0), True),  # other nodes joined: torchrun does not count that
        (torchrun("a"), torchrun("b", 1), False),  # "none" is the run id of every job that was given none
        (torchrun("a", 0, "100"), torchrun("b", 1, "100"), False),
    ],
)
def test_only_a_restart_of_the_same_job_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: dict[str, str], second: dict[str, str], continues: bool
) -> None:
    """The launchers together decide: Slurm requeues what torchrun counts as its first start."""
    run = str(tmp_path / "store" / "run")
    assert start(run, first, monkeypatch) == 0
    assert start(run, second, monkeypatch) == (4 if continues else 0)


def test_a_job_that_died_before_its_first_step_does_not_continue_the_job_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fresh start is recorded at ``restore()``: the restart of the second job finds its own record, not that of the first."""
    run, same = str(tmp_path / "store" / "run"), {"TORCHELASTIC_RUN_ID": "100"}
    assert start(run, same, monkeypatch) == 0
    assert start(run, same, monkeypatch, steps=0) == 0
    assert start(run, {**same, "TORCHELASTIC_RESTART_COUNT": "1"}, monkeypatch) == 0


@pytest.mark.parametrize("lost", [True, False])
def test_a_job_requeued_onto_an_empty_node_continues_from_a_further_tier(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost: bool
) -> None:
    """The record of a fresh start is copied to further tiers, before the checkpoints that follow it."""
    hot, cold = tmp_path / "hot", tmp_path / "cold"
    tiers = relight.Tiers(hot=relight.tier(absolute(str(hot / "run"))), cold=relight.tier(absolute(str(cold / "run"))))
    # an older job, which this one does not continue
    assert start(tiers, slurm(0, "4"), monkeypatch, steps=2, wait=True) == 0
    assert start(tiers, slurm(0), monkeypatch, wait=True) == 0
    if lost:
        shutil.rmtree(hot)
    assert start(tiers, slurm(1), monkeypatch, wait=True) == 4
    if lost:
        shutil.rmtree(hot)
    assert start(tiers, slurm(1, "6"), monkeypatch, wait=True) == 0


def test_a_container_that_kubernetes_restarts_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kubernetes counts nothing for a process: another container of the same pod is a restart, the same container is not."""
    run, mounts = str(tmp_path / "store" / "run"), tmp_path / "mountinfo"
    monkeypatch.setattr(launcher_job, "_MOUNTS", mounts)
    pods = [f"{number}f0c2b1a-0000-4000-8000-0123456789ab" for number in range(2)]
    for pod, container, begins in [(0, "a1", 0), (0, "a1", 0), (0, "b2", 4), (1, "c3", 0), (1, "d4", 4)]:
        mounts.write_text(MOUNT.format(pod=pods[pod], start=container))
        assert start(run, {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, monkeypatch) == begins, (pod, container)
