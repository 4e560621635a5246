"""A run's directory that ordinary tools moved, renamed or copied: training continues, and every reader takes it for sound."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.scripts import run_script

import relight
from relight.cli import cli
from relight.format import Record, encode_record
from relight.format.names import record_file
from relight.format.records import NoteBody
from relight.log import Log
from relight.log.identity import now_text, read_store
from relight.store import open_bytes


def train(path: Path, steps: int, *, background: bool = False) -> int:
    """Train up to ``steps`` from the newest checkpoint. The weight counts the steps. Return the first step."""
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    with relight.Checkpointer(
        path, model=model, save=relight.every(steps=2), background=background, on_failure="raise"
    ) as ckpt:
        start = ckpt.restore()
        assert float(model.weight.detach()) == start
        for step in range(start, steps):
            with torch.no_grad():
                model.weight.add_(1)
            ckpt.step(step)
    return start


def move(top: Path) -> Path:
    shutil.move(top / "a" / "mine", top / "b" / "mine")
    return top / "b" / "mine"


def rename(top: Path) -> Path:
    return (top / "a" / "mine").rename(top / "a" / "other")


def copy_next_to_it(top: Path) -> Path:
    return Path(shutil.copytree(top / "a" / "mine", top / "a" / "copy"))


def copy_elsewhere(top: Path) -> Path:
    return Path(shutil.copytree(top / "a" / "mine", top / "b" / "copy"))


def into_a_new_place(top: Path) -> Path:
    (top / "c" / "d").mkdir(parents=True)
    return Path(shutil.copytree(top / "a" / "mine", top / "c" / "d" / "mine"))


def without_the_stores_record(top: Path) -> Path:
    (top / "a" / "relight.json").unlink()
    train(top / "a" / "new", 2)  # this creates another store record
    return top / "a" / "mine"


@pytest.mark.parametrize(
    "how", [move, rename, copy_next_to_it, copy_elsewhere, into_a_new_place, without_the_stores_record]
)
@pytest.mark.parametrize("background", [False, True])
def test_training_continues_and_verify_finds_nothing(
    tmp_path: Path, how: Callable[[Path], Path], background: bool
) -> None:
    """Keep the ids that the run's records and checkpoints name, whatever store it is in."""
    train(tmp_path / "a" / "mine", 4)
    train(tmp_path / "b" / "other", 4)
    path = how(tmp_path)
    assert train(path, 8, background=background) == 4
    assert train(path, 10) == 8
    assert float(relight.load(path)["model"]["weight"]) == 10
    assert cli.main(["verify", str(path.parent)], standalone_mode=False) == 0
    assert cli.main(["cp", str(path), str(tmp_path / "copies" / "run")], standalone_mode=False) == 0
    assert train(tmp_path / "copies" / "run", 12) == 10
    if how in (copy_next_to_it, copy_elsewhere, into_a_new_place):
        assert train(tmp_path / "a" / "mine", 6) == 4


def test_a_copy_trains_at_the_same_time_as_its_original(tmp_path: Path) -> None:
    """Treat the two copies as two runs, though they have the same ids and the same attempt: neither takes over or ends
    the other."""
    model = torch.nn.Linear(1, 1, bias=False)
    with relight.Checkpointer(
        tmp_path / "a" / "mine", model=model, save=relight.every(steps=1), background=False
    ) as ckpt:
        ckpt.restore()
        ckpt.step(0)
        shutil.copytree(tmp_path / "a" / "mine", tmp_path / "a" / "copy")
        train = (
            "import sys, torch, relight\n"
            "c = relight.Checkpointer(sys.argv[1], model=torch.nn.Linear(1, 1, bias=False), save=relight.every(steps=1), background=False)\n"
            "for step in range(c.restore(), 4): c.step(step)\n"
            "c.close(); print('trained', step)"
        )
        done = run_script(train, str(tmp_path / "a" / "copy"), timeout_s=120)
        assert done.stdout == "trained 3\n", done.stderr
        for step in range(1, 3):
            ckpt.step(step)
    assert [checkpoint.step for checkpoint in relight.open(tmp_path / "a" / "mine").checkpoints()] == [0, 1, 2]
    assert [checkpoint.step for checkpoint in relight.open(tmp_path / "a" / "copy").checkpoints()] == [0, 1, 2, 3]


def test_one_record_that_names_another_store_hides_no_copied_run(tmp_path: Path) -> None:
    """Read the store's id from the first two records. A later record that names the copy's store is a fault by
    itself."""
    train(tmp_path / "a" / "mine", 4)
    train(tmp_path / "b" / "other", 4)
    path = copy_elsewhere(tmp_path)
    before = Log(open_bytes(tmp_path / "b"), "copy").read()
    forged = Record(
        seq=before.head + 1, prev=before.head_hash, store=read_store(open_bytes(tmp_path / "b")).id, run=before.run_id, epoch=1, time=now_text(),
        writer="x:1:1", body=NoteBody(topic="x", data={}),
    )  # fmt: skip
    (path / "log" / record_file(forged.seq)).write_bytes(encode_record(forged))
    view = Log(open_bytes(tmp_path / "b"), "copy").read()
    assert view.records == before.records
    assert [(fault.seq, fault.reason) for fault in view.faults] == [(forged.seq, "the record belongs to another store")]
    assert train(path, 8) == 4


def test_records_of_two_runs_in_one_log_are_still_refused(tmp_path: Path) -> None:
    """A log that was copied over another one's is damage: where the records name two stores, only the store's own count."""
    train(tmp_path / "a" / "mine", 8)
    train(tmp_path / "b" / "other", 4)
    for path in sorted((tmp_path / "b" / "other" / "log").iterdir())[:3]:
        shutil.copy(path, tmp_path / "a" / "mine" / "log" / path.name)
    view = Log(open_bytes(tmp_path / "a"), "mine").read()
    assert len(view.faults) >= 3
