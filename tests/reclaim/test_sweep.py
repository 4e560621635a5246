"""What a sweep removes from committed checkpoints."""

from __future__ import annotations

from pathlib import Path

import torch

import relight
from relight.catalog.run import Run
from relight.commit import Attempt
from relight.format.names import copied_file, taken_file
from relight.reclaim import execute_sweep, plan_sweep
from relight.store import LocalStore


def test_announcements_of_killed_writers_are_removed_once_their_attempt_is_superseded(tmp_path: Path) -> None:
    """Remove the announcements that a rank or node left when it was killed after the commit. Leave unknown files, and
    the announcements of the current attempt: a node may still read them."""
    store = LocalStore(tmp_path)
    for step in range(3):
        relight.save(tmp_path / "run", {"x": torch.ones(3)}, step=step)
    folders = [tmp_path / "run" / checkpoint.body.dir for checkpoint in Run(store, "run").history().live]
    with_files, empty, with_unknown = folders
    for folder in folders:
        (folder / "ready").mkdir()
    for name in (taken_file(0, 0), copied_file(0)):
        (with_files / "ready" / name).write_bytes(b"node")
    (with_unknown / "ready" / "mine.txt").write_text("a user's")
    before = plan_sweep(store, "run")
    epochs = {int(folder.name.rpartition("-e")[2]) for folder in folders}
    assert len([key for key in before.temporaries if key.endswith("/ready")]) == len(epochs) - 1
    Attempt.begin(store, "run")
    report = execute_sweep(plan_sweep(store, "run"), store)
    assert not report.left
    assert not (with_files / "ready").exists() and not (empty / "ready").exists()
    assert [path.name for path in (with_unknown / "ready").iterdir()] == ["mine.txt"]
    assert relight.load(tmp_path / "run")["x"].tolist() == [1, 1, 1]
    assert len(Run(store, "run").history().live) == 3
