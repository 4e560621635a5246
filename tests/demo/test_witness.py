"""The demo's own reading of the disk."""

from __future__ import annotations

import json
from pathlib import Path

from relight.demo import witness


def record(run: Path, seq: int, kind: str, body: dict[str, str]) -> None:
    """Write a record as ``docs/format.md`` has it."""
    (run / "log").mkdir(parents=True, exist_ok=True)
    (run / "log" / f"{seq:012d}.json").write_text(json.dumps({"seal": "0" * 64, "body": {"kind": kind, "body": body}}))


def test_unfinished_is_what_no_commit_names(tmp_path: Path) -> None:
    """A save's directory counts as unfinished until a COMMIT names it. Other directories and records are ignored."""
    assert witness.unfinished(tmp_path / "none") == set()
    first, second = "0000000004-aaaaaaaaaa-e1", "0000000009-bbbbbbbbbb-e1"
    for name in (first, second, "log", "other"):
        (tmp_path / name).mkdir()
    record(tmp_path, 0, "RUN", {"name": "r"})
    record(tmp_path, 1, "COMMIT", {"dir": first})
    (tmp_path / "log" / ".tmp-x").write_text("half a record")
    assert witness.unfinished(tmp_path) == {second}
    record(tmp_path, 2, "COMMIT", {"dir": second})
    assert witness.unfinished(tmp_path) == set()


def test_agrees_with_relight(tmp_path: Path) -> None:
    """The witness counts the same checkpoints as committed as Relight does."""
    import pytest

    torch = pytest.importorskip("torch")
    import relight

    with relight.Checkpointer(tmp_path / "run", model=torch.nn.Linear(2, 2), save=relight.every(steps=1)) as ckpt:
        assert ckpt.restore() == 0
        for step in range(3):
            ckpt.step(step)
    assert len(witness.committed(tmp_path / "run")) == 3
    assert witness.committed(tmp_path / "run") == witness.saves(tmp_path / "run")
