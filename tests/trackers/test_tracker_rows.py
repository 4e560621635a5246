"""Trackers in one process: rows wait for a tracker that fails, and are bounded."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import relight
import relight.integrations.trackers.row_queue as row_queue
import relight.integrations.trackers.tracker as base
from relight.errors import ConfigError
from relight.integrations.trackers import RelightNumbers, StepRow, Tracker
from relight.integrations.trackers.mlflow import MLflow
from relight.integrations.trackers.row_queue import RowQueue
from relight.integrations.trackers.rows import decode_rows
from relight.observe import Event, subscribe


class Kept(Tracker):
    """Keeps rows in memory. ``broken``: it raises as long as that is set."""

    name = "kept"

    def __init__(self) -> None:
        self.rows: list[StepRow] = []
        self.links: list[object] = []
        self.opened: list[tuple[str, int]] = []
        self.broken = threading.Event()
        super().__init__()

    def open(self, run: str, key: str, first: int) -> tuple[str, str]:
        self.opened.append((run, first))
        return run or key, f"memory:{key}"

    def write(self, rows: Sequence[StepRow]) -> None:
        if self.broken.is_set():
            raise OSError("the tracker cannot be reached")
        self.rows += rows

    def link(self, checkpoint: object) -> None:
        self.links.append(checkpoint)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hand rows over at once."""
    monkeypatch.setattr(base, "INTERVAL_S", 0.02)


@pytest.fixture
def events() -> Iterator[list[Event]]:
    """Yield the events of the test."""
    seen: list[Event] = []
    undo = subscribe(seen.append)
    yield seen
    undo()


def test_values_of_one_step_are_one_row_with_what_relight_reported(tmp_path: Path) -> None:
    """Saves and restores are in the rows as notes, by the save's step; the newest checkpoint is linked with its digest."""
    with Kept() as tracker:
        with relight.Checkpointer(
            tmp_path / "demo", w=torch.ones(3), tracker=tracker, save=relight.every(steps=2), background=False
        ) as ckpt:
            for step in range(ckpt.restore(), 5):
                tracker.log(step, loss=torch.tensor(0.5))
                tracker.log(step, {"rate": 1})
                ckpt.step(step)
    rows = [row for row in tracker.rows if row.values]
    assert [row.step for row in rows] == [0, 1, 2, 3, 4]
    assert all(row.values == {"loss": 0.5, "rate": 1.0} for row in rows)
    notes = [note for row in tracker.rows for note in row.notes]
    assert [note.step for note in notes] == [1, 3, 4]
    assert notes[0].values.keys() == {"relight/stall_s", "relight/durable_s", "relight/bytes"}
    newest = relight.open(tmp_path / "demo").latest()
    assert tracker.links[-1] == (f"{tmp_path}/demo@{newest.id}", newest.id, 4, newest.body.root)


def test_a_tracker_that_fails_gets_the_rows_later(tmp_path: Path, events: list[Event]) -> None:
    """Training does not wait; ``tracker.failed`` is reported, at the 1st, 10th and 100th failure; the rows are in the checkpoint, and written later."""
    tracker = Kept()
    tracker.broken.set()
    with tracker, relight.Checkpointer(tmp_path / "demo", w=torch.ones(3), tracker=tracker, save=None) as ckpt:
        for step in range(ckpt.restore(), 20):
            tracker.log(step, loss=step)
            ckpt.step(step)
        assert not tracker.flush(0.3)
        ckpt.save(19)
        tracker.broken.clear()
    assert [row.step for row in tracker.rows if row.values] == list(range(20))
    names = [event.name for event in events if event.name.startswith("tracker.")]
    assert names[:2] == ["tracker.opened", "tracker.failed"] and len(names) <= 3
    stored = relight.load(tmp_path / "demo", only=["tracker"])["tracker"]
    assert [row.step for row in decode_rows(stored["rows"])] == list(range(20))


def test_a_restore_in_the_same_process_opens_the_run_again(tmp_path: Path) -> None:
    """The same tracker run, from the first row that the checkpoint does not know to be written."""
    with (
        Kept() as tracker,
        relight.Checkpointer(tmp_path / "demo", w=torch.ones(3), tracker=tracker, save=None) as ckpt,
    ):
        for step in range(6):
            tracker.log(step, loss=step)
            if step == 3:
                assert tracker.flush()
                ckpt.save(step)
        assert tracker.flush()
        assert ckpt.restore(3) == 4
        tracker.log(4, loss=4)
        tracker.log(5, loss=5)
        assert tracker.flush()
        run = tracker.run_id
        assert tracker.opened == [("", 0), (run, 3)]


def test_a_step_that_is_over_is_refused() -> None:
    """A step below the newest is an error of the caller, and names both."""
    tracker = Kept()
    tracker.log(5, loss=1)
    with pytest.raises(ConfigError, match="step 4 is logged after step 5"):
        tracker.log(4, loss=1)
    with pytest.raises(ConfigError, match="loss"):
        tracker.log(6, loss="one")
    tracker.close()


def test_waiting_rows_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest are dropped beyond the limit, and counted."""
    monkeypatch.setattr(row_queue, "WAITING_BYTES_MAX", 2000)
    queue = RowQueue()
    for step in range(1000):
        queue.add(step, {"loss": 1.0})
    assert len(queue.encoded()) < 2200
    assert queue.dropped == 999 - len(queue.unwritten())


def test_decoded_rows_equal_the_encoded_ones() -> None:
    """NaN, infinities and notes included; confirmed rows are not encoded."""
    queue = RowQueue()
    for step, value in enumerate((1.5, math.nan, -math.inf, 2.0)):
        queue.add(step, {"loss": value})
    queue.notes.append(RelightNumbers(3, {"relight/bytes": 7.0}))
    queue.mark_written(queue.unwritten()[:2])
    queue.confirm(0)
    rows = decode_rows(queue.encoded())
    assert [row.step for row in rows] == [1, 2, 3]
    assert math.isnan(rows[0].values["loss"]) and rows[1].values["loss"] == -math.inf
    assert rows[2].notes == [RelightNumbers(3, {"relight/bytes": 7.0})]


def test_malformed_rows_in_a_checkpoint_are_refused() -> None:
    """A restore raises an error; nothing is executed, and the tracker keeps its rows."""
    tracker = Kept()
    state = tracker.state_dict()
    for rows in (b"", b"\x91\x01", b"\x91\x94\xa1x\x01\x80\x90", b"\xdd\xff\xff\xff\xff"):
        with pytest.raises(ValueError):
            tracker.load_state_dict({**state, "rows": rows})
    tracker.close()


def test_rows_that_came_during_a_write_are_not_taken_for_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """After an outage, old rows may be dropped while those before are being written."""
    monkeypatch.setattr(row_queue, "WAITING_BYTES_MAX", 1500)
    queue = RowQueue()
    for step in range(20):
        queue.add(step, {"loss": 1.0})
    rows = queue.unwritten()
    for step in range(20, 200):
        queue.add(step, {"loss": 1.0})
    queue.mark_written(rows)
    left = {row.row.step for row in queue.unwritten()}
    assert left and left.isdisjoint(row.row.step for row in rows) and max(left) == 198
    queue.confirm(10**6)
    assert {row.row.step for row in queue.unwritten()} == left


@pytest.mark.parametrize("uri", ["postgresql://mlflow:hunter2@db/mlflow", "https://anna:hunter2@host"])
def test_the_password_of_mlflows_address_is_in_no_checkpoint(uri: str) -> None:
    """The run's URL is logged and stored."""
    run = SimpleNamespace(
        info=SimpleNamespace(run_id="7", experiment_id="1"),
        data=SimpleNamespace(to_proto=lambda: SimpleNamespace(metrics=[])),
    )
    client = SimpleNamespace(
        get_experiment_by_name=lambda name: SimpleNamespace(experiment_id="1"),
        search_runs=lambda *_, **__: [run],
        update_run=lambda *_, **__: None,
    )
    tracker = object.__new__(MLflow)
    tracker._mlflow = SimpleNamespace(MlflowClient=lambda tracking_uri: client)
    tracker._experiment, tracker._uri, tracker._run_name, tracker._tags = "demo", uri, "", {}
    opened, url = tracker.open("", "key", 0)
    assert opened == "7" and "hunter2" not in url and "experiments/1/runs/7" in url
