"""A checkpoint that retention relies on is read back in idle CPU time, unless saves are too frequent."""

from __future__ import annotations

import dataclasses
import os
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

import relight
from relight.agent import slot_writer
from relight.agent.messages import OpenRun
from relight.agent.slot_writer import SlotWriter
from relight.log import Log, fold
from relight.reader import chunk_reader as read
from relight.reclaim import PruneReport
from relight.store import LocalStore


@pytest.fixture
def writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SlotWriter:
    """Writer of a run with three checkpoints and ``keep=last(1)``. The last save was large."""
    with relight.Checkpointer(tmp_path / "store" / "run", x=torch.arange(30_000.0), background=False) as ckpt:
        for step in range(3):
            ckpt.save(step)
    store = LocalStore(tmp_path / "store")
    view = Log(store, "run").read()
    keep = msgspec.msgpack.encode(relight.keep(last=1))
    made = SlotWriter(
        OpenRun(
            store.url,
            "run",
            view.store_id,
            view.run_id,
            fold(view).epoch,
            2,
            os.getpriority(os.PRIO_PROCESS, 0),
            keep=keep,
        )
    )
    made._last_in = (None, 2, SimpleNamespace(plan=SimpleNamespace(stored_bytes=slot_writer.IDLE_VERIFY_FROM)))  # type: ignore[assignment]
    return made


def live(writer: SlotWriter) -> int:
    """Return the number of checkpoints."""
    return len(fold(Log(writer._store, "run").read()).live)


@pytest.fixture
def niceness(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Priorities of the threads that hash bytes which are read back."""
    priorities: list[int] = []
    sound = read._is_sound

    def record_priority(*args: Any) -> bool:
        priorities.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        return sound(*args)

    monkeypatch.setattr(read, "_is_sound", record_priority)
    return priorities


def test_a_read_without_a_waiting_caller_has_the_lowest_priority(writer: SlotWriter, niceness: list[int]) -> None:
    """The read has the lowest CPU priority and finishes."""
    before = os.getpriority(os.PRIO_PROCESS, 0)
    result = writer.prune(lambda: True, lambda: False, lambda: False)
    assert result is not None and result[0] == "prune.done"
    assert live(writer) == 1
    assert set(niceness) == {19}
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == before


def test_a_small_one_is_read_as_everything_else(
    writer: SlotWriter, niceness: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A small checkpoint is read at normal priority."""
    monkeypatch.setattr(slot_writer, "IDLE_VERIFY_FROM", slot_writer.IDLE_VERIFY_FROM + 1)
    assert writer.prune(lambda: True, lambda: False, lambda: False) is not None
    assert set(niceness) == {os.getpriority(os.PRIO_PROCESS, 0)}


def test_another_save_is_first(writer: SlotWriter, niceness: list[int]) -> None:
    """If another save interrupts the read, it is aborted and nothing is removed. After that save it is read once at normal
    priority."""
    usual = os.getpriority(os.PRIO_PROCESS, 0)
    assert writer.prune(lambda: True, lambda: False, lambda: True) is None
    assert live(writer) == 3
    niceness.clear()
    assert writer.prune(lambda: True, lambda: False, lambda: True) is not None
    assert live(writer) == 1
    assert set(niceness) == {usual}
    assert writer._may_take_long()


def test_a_trainer_that_ends_is_not_kept_waiting(writer: SlotWriter, niceness: list[int]) -> None:
    """If an ending trainer waits for the removal, the read restarts at normal priority. This does not count as a frequent
    save."""
    assert writer.prune(lambda: True, lambda: True, lambda: False) is not None
    assert live(writer) == 1
    assert niceness[0] == 19
    assert niceness[-1] == os.getpriority(os.PRIO_PROCESS, 0)
    assert writer._may_take_long()


def test_ever_more_of_them(writer: SlotWriter, monkeypatch: pytest.MonkeyPatch) -> None:
    """If saves always interrupt the read, patient reads are tried ever more rarely."""
    monkeypatch.setattr(
        type(writer._room),
        "prune",
        lambda self, need=0, still=lambda: True: PruneReport([], [], []) if still() else None,
    )
    patient = []
    for _ in range(40):
        patient.append(writer._may_take_long())
        if patient[-1]:
            writer._prune_at_idle(lambda: True, lambda: False, lambda: True)
    assert [number for number, may_wait in enumerate(patient) if may_wait] == [0, 2, 5, 10, 19, 36]


def test_a_store_far_away_is_read_as_everything_else(
    writer: SlotWriter, niceness: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A remote store is read at normal priority, because its client's threads would keep the low one."""
    far = dataclasses.replace(writer._store.properties(), remote=True)
    monkeypatch.setattr(writer._store, "properties", lambda: far)
    assert writer.prune(lambda: True, lambda: False, lambda: False) is not None
    assert set(niceness) == {os.getpriority(os.PRIO_PROCESS, 0)}


def test_an_abort_for_an_ending_trainer_does_not_count_as_a_short_save_interval(
    writer: SlotWriter, niceness: list[int]
) -> None:
    """A read that was aborted for an ending trainer is tried at low priority the next time."""
    assert writer.prune(lambda: False, lambda: False, lambda: False) is None
    niceness.clear()
    assert writer.prune(lambda: True, lambda: False, lambda: False) is not None
    assert set(niceness) == {19}
