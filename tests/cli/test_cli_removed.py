"""Retention removes checkpoints while a command or a function reads them: no reader reports damage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from at_hand import ids

import relight as package
from relight.catalog import open_run
from relight.doctor import facts_run
from relight.doctor.bounded import BoundedProbe
from relight.errors import CheckpointNotFound
from relight.policy import keep
from relight.reclaim import execute, plan_prune
from relight.serve import verify_process
from relight.store import open_bytes
from relight.transfer.pushing import execute_push, plan_push


def prune(path: Path, run: str = "demo", last: int = 1) -> None:
    """Remove all checkpoints but the newest ones and the tagged ones."""
    store = open_bytes(path)
    execute(plan_prune(store, run, keep(last=last)), store)


def first(monkeypatch: pytest.MonkeyPatch, module: Any, name: str, act: Any) -> None:
    """Call ``act`` before the first call of a module's function."""
    plain, calls = getattr(module, name), list[int]()

    def wrapped(*args: Any, **more: Any) -> Any:
        if not calls:
            calls.append(1)
            act()
        return plain(*args, **more)

    monkeypatch.setattr(module, name, wrapped)


def test_verify_leaves_out_what_was_removed(relight, runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint that was removed after the log was read is listed as removed; the run is as committed."""
    import relight.cli.verify as module

    before = ids(runs)
    first(monkeypatch, module, "verify_checkpoints", lambda: prune(runs))
    answer = relight("verify", "runs/demo")
    assert (answer.code, answer.out.count("DAMAGED"), answer.out.count("removed meanwhile")) == (0, 0, 2)
    assert answer.out.splitlines()[-1].startswith("2 checkpoints, ")
    assert relight("verify", "runs/demo", "--json").json["removed"] == [] and len(before) == 4


def test_verify_of_a_named_checkpoint_that_was_removed_fails(
    relight, runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the checkpoint that the command names is removed meanwhile, the error states that."""
    import relight.cli.verify as module

    first(monkeypatch, module, "verify_checkpoints", lambda: prune(runs))
    answer = relight("verify", "runs/demo", "99")
    assert answer.code != 0 and "was removed while it was verified" in answer.err and "DAMAGED" not in answer.out


def test_the_api_and_the_server_do_not_report_removal_as_damage(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``verify()`` skips removed checkpoints; with a name, it raises ``CheckpointNotFound``, as the server does."""
    run, oldest = open_run(open_bytes(runs), "demo"), ids(runs)[0]
    results = package.open(runs / "demo").verify()
    assert next(results)[1] == []
    first(monkeypatch, verify_process, "verify_checkpoint", lambda: prune(runs))
    with pytest.raises(CheckpointNotFound, match="was removed while it was verified"):
        verify_process.verify(run, oldest, lambda tenths: None)
    assert [findings for _, findings in results] == [[], []]


def test_the_doctor_does_not_report_removal_as_damage(runs: Path) -> None:
    """Metadata of a checkpoint that was removed after the log was read is not missing."""
    store = open_bytes(runs)
    view = open_run(store, "demo").view()
    prune(runs)
    damage = facts_run._damage(store, view, facts_run.fold(view), BoundedProbe(), 8)  # noqa: SLF001
    assert set(damage) == set(ids(runs)) and not any(damage.values())


def test_cp_leaves_out_what_was_removed(relight, runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy of a whole run lists removed checkpoints, and copies the others. A named one is an error."""
    import relight.cli.cp as module

    plan = plan_push(open_run(open_bytes(runs), "demo"), open_bytes(runs.parent / "backup"), "demo")
    removed = [ids(runs)[0], ids(runs)[2]]
    prune(runs)
    report = execute_push(plan)
    assert report.copy.damaged == [] and report.copy.removed == removed
    assert ids(runs.parent / "backup") == ids(runs)
    first(monkeypatch, module, "execute_push", lambda: prune(runs))
    open_run(open_bytes(runs), "demo").tag("good", None)
    answer = relight("cp", "runs/demo@199", "other/demo")
    assert answer.code == 1 and "was removed from the source meanwhile" in answer.err


@pytest.mark.parametrize("which", ["latest", "best:loss"])
def test_load_takes_the_checkpoint_that_is_there_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, which: str
) -> None:
    """If the checkpoint is removed while it is loaded, the log is read again: newer ones exist."""
    import relight.api as module

    url = tmp_path / "s" / "r"
    package.save(url, {"x": torch.tensor(0.0)}, step=0, metrics={"loss": 2.0})

    def save_and_prune() -> None:
        package.save(url, {"x": torch.tensor(1.0)}, step=1, metrics={"loss": 1.0})
        prune(tmp_path / "s", "r")

    first(monkeypatch, module, "open_checkpoint", save_and_prune)
    assert package.load(url, which)["x"] == 1


def test_a_load_of_a_checkpoint_that_was_removed_names_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An id that retention has removed meanwhile is not found; it is not damaged."""
    import relight.api as module

    url = tmp_path / "s" / "r"
    old = package.save(url, {"x": torch.tensor(0.0)}, step=0)
    package.save(url, {"x": torch.tensor(1.0)}, step=1)
    first(monkeypatch, module, "open_checkpoint", lambda: prune(tmp_path / "s", "r"))
    with pytest.raises(CheckpointNotFound, match="was retired"):
        package.load(url, old.id)


def test_a_restore_takes_a_newer_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the newest checkpoint is removed while it is restored, the newer one is restored, and not a kept older one."""
    import relight.restore.find as module

    url, x = tmp_path / "s" / "r", torch.tensor(-1.0)
    for step in range(2):
        package.save(url, {"x": torch.tensor(float(step))}, step=step)
    open_run(open_bytes(tmp_path / "s"), "r").tag("kept", ids(tmp_path / "s", "r")[0])

    def save_and_prune() -> None:
        package.save(url, {"x": torch.tensor(2.0)}, step=2)
        prune(tmp_path / "s", "r")

    first(monkeypatch, module, "open_checkpoint", save_and_prune)
    assert package.Checkpointer(url, x=x).restore(only=["x"]) == 3 and x == 2
