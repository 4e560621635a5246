"""Directories of old checkpoints, and whether all of one arrived."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import relight
from relight.catalog import Run, list_runs
from relight.format.names import parse_dir
from relight.format.root_keys import MIGRATED
from relight.reader import verify_checkpoint
from relight.store import open_bytes


def state(seed: int) -> dict[str, Any]:
    """Return a state as an old script saved it."""
    torch.manual_seed(seed)
    model = {"w": torch.randn(60, 500), "b": torch.randn(9).bfloat16(), "n": torch.tensor(seed)}
    return {"model": model, "step": seed}


def make(old: Path, count: int) -> dict[str, tuple[str, int]]:
    """``count`` checkpoints in three folders, one of them nested: by their names, the run each belongs to and its step."""
    folders = {"first": "first", "second": "second", "deep/third": "deep-third"}
    made = {}
    for number in range(count):
        folder = list(folders)[number % 3]
        step = 10 * number
        name = f"{folder}/ckpt_{step}.pt"
        (old / folder).mkdir(parents=True, exist_ok=True)
        torch.save(state(step), old / name)
        made[name] = (folders[folder], step)
    return made


def check_arrived(new: Path, made: dict[str, tuple[str, int]]) -> None:
    """Check that each checkpoint is there once, in the order of steps, verified, with its bytes, and that no other
    is."""
    store = open_bytes(new)
    assert set(list_runs(store)) == {run for run, _ in made.values()}
    arrived = []
    for name in list_runs(store):
        run = Run(store, name)
        view, history = run.view(), run.history()
        assert history.retired == {}, "something came twice, or was taken back"
        assert [checkpoint.step for checkpoint in history.live] == sorted(
            step for where, step in made.values() if where == name
        )
        for checkpoint in history.live:
            assert verify_checkpoint(store, view, checkpoint) == []
            opened = run.open(checkpoint)
            arrived.append(opened.root.user[MIGRATED.name]["source"])
            result = relight.load(new / name, checkpoint.id)
            wanted = state(checkpoint.step)
            assert all(torch.equal(result["model"][key], value) for key, value in wanted["model"].items())
        left = {entry.name for entry in store.list(name) if entry.is_dir and parse_dir(entry.name)} - {
            checkpoint.body.dir for checkpoint in history.live
        }
        assert left == set(), "what was interrupted was not swept"
    assert sorted(arrived) == sorted(made), "not each once"
