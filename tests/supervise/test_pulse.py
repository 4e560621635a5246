"""The page that a trainer writes and a supervisor reads."""

from __future__ import annotations

import math
import multiprocessing
import os
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import relight
from relight.checkpointer import heartbeat_observer
from relight.heartbeat import ENDED, PAGE_BYTES, SETTING, Heartbeat, HeartbeatPage, HeartbeatWriter, read_beat
from relight.heartbeat.heartbeat_page import make_page


def page_at(tmp_path: Path) -> Path:
    """Make a heartbeat page and return its path."""
    path = tmp_path / "pulse-0"
    make_page(path)
    return path


def test_what_is_written_is_read(tmp_path: Path) -> None:
    """Every field, names that are too long cut."""
    path = page_at(tmp_path)
    assert read_beat(path) is None
    beat = Heartbeat(
        7, "evaluating", 1.5, 2.5, 10, 3.5, 11, 3.25, 0.25, 9, 8, 4.5, 5, 5.5, 6.5, 7.5, 3, 99, 1, 1 << 30, 1, 8.5,
        "s3://store/with/ünïcode", "run",
    )  # fmt: skip
    HeartbeatPage(path).write(beat)
    assert read_beat(path) == beat
    HeartbeatPage(path).write(beat._replace(phase="x" * 100, url="u" * 5000))
    read = read_beat(path)
    assert read is not None and read.phase == "x" * 32 and read.url == "u" * 1023
    assert path.stat().st_size == PAGE_BYTES


@pytest.mark.parametrize("data", [b"", b"x" * 100, b"\0" * PAGE_BYTES, b"rlpulse1" + b"\1" + b"\0" * (PAGE_BYTES - 9)])
def test_an_invalid_page_has_no_heartbeat(tmp_path: Path, data: bytes) -> None:
    """The page is short, empty, or left during a write."""
    path = tmp_path / "pulse"
    path.write_bytes(data)
    assert read_beat(path) is None
    assert read_beat(tmp_path / "nothing") is None


def _write_on(path: Path, seconds: float) -> None:
    page, ends, number = HeartbeatPage(path), time.monotonic() + seconds, 0
    while time.monotonic() < ends:
        number += 1
        page.write(
            Heartbeat(pid=number, step=number, steps=number, sealed=number, durable=number, saves=number, agent=number)
        )


def test_a_reader_gets_a_whole_page_or_none(tmp_path: Path) -> None:
    """However fast the writer is."""
    path = page_at(tmp_path)
    writer = multiprocessing.get_context("spawn").Process(target=_write_on, args=(path, 1.0))
    writer.start()
    whole = 0
    while writer.is_alive():
        beat = read_beat(path)
        if beat is not None:
            whole += 1
            assert {beat.pid, beat.step, beat.steps, beat.sealed, beat.durable, beat.saves, beat.agent} == {beat.pid}
    writer.join()
    assert whole > 100


def test_what_a_trainer_publishes(tmp_path: Path) -> None:
    """A heartbeat has phases, steps and saves."""
    path = page_at(tmp_path)
    writer = HeartbeatWriter(str(path))
    beat = read_beat(path)
    assert beat is not None and (beat.phase, beat.pid, beat.restored) == ("starting", os.getpid(), -2)
    writer.phase("restoring")
    time.sleep(0.01)
    writer.restored(4)
    beat = read_beat(path)
    assert beat is not None and beat.restored == 4 and beat.restore_s >= 0.01 and beat.phase == "training"
    writer.stepped(5, 0.5)
    writer.save_requested(5)
    beat = read_beat(path)
    assert (
        beat is not None
        and (beat.step, beat.steps, beat.loss, beat.phase) == (5, 1, 0.5, "training")
        and beat.save_since > 0
    )
    writer.stepped(6)
    writer.sealed(5)
    writer.over(5, durable=True)
    beat = read_beat(path)
    assert (
        beat is not None
        and (beat.sealed, beat.durable, beat.save_since, beat.saves) == (5, 5, 0.0, 1)
        and math.isnan(beat.loss)
    )
    writer.save_requested(6)
    beat = read_beat(path)
    assert beat is not None and beat.save_since > 0
    writer.over(6, durable=False)
    beat = read_beat(path)
    assert beat is not None and (beat.phase, beat.durable, beat.saves) == ("training", 5, 1)
    with writer.during("evaluating", 60.0):
        beat = read_beat(path)
        assert beat is not None and (beat.phase, beat.expected_s) == ("evaluating", 60.0)
    beat = read_beat(path)
    assert beat is not None and beat.phase == "training"


def test_without_a_page_nothing_is_published(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the setting, or with a path that does not exist, calls have no effect and raise nothing."""
    for path in ("", "/nonexistent/pulse"):
        writer = HeartbeatWriter(path)
        assert not writer.has_reader
        writer.stepped(1, 0.1)
        writer.over(1, durable=True)
    with relight.phase("evaluating"):
        pass


def test_a_child_has_no_page_of_its_parents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A loader's process that is forked, or started, is not the one that is watched over."""
    home = import_module("relight.heartbeat.writer")  # the name in the package is the function's
    monkeypatch.setattr(home, "_teller", None)
    monkeypatch.setenv(SETTING, str(page_at(tmp_path)))
    assert home.heartbeat().has_reader
    assert SETTING not in os.environ
    child = os.fork()
    if not child:
        os._exit(int(home.heartbeat().has_reader))
    assert os.waitpid(child, 0)[1] == 0


def test_the_phase_after_the_last_checkpointer_has_no_limit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Closing one of two changes nothing. After both, the script may do what it likes, until it opens another one."""

    class Opened:
        replica_mismatch = ""

    monkeypatch.setattr(heartbeat_observer, "subscribe", lambda listener: None)
    monkeypatch.setattr(heartbeat_observer, "last_words", [])
    page = page_at(tmp_path)
    observer: Any = heartbeat_observer.HeartbeatObserver(HeartbeatWriter(str(page)))
    first, second = Opened(), Opened()
    phases = []
    for act in (
        lambda: [observer.on_start(first), observer.on_start(second), observer.on_restore(first, 0, None)],
        lambda: observer.on_end(first),
        lambda: observer.on_end(second),
        lambda: observer.on_start(first),
    ):
        act()
        beat = read_beat(page)
        assert beat is not None
        phases.append(beat.phase)
    assert phases == ["training", "training", ENDED, "starting"]


def test_a_checkpointer_that_never_trains_does_not_delay_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A script may leave that of a teacher's weights open: work after the end of the training is no hang. Two that train both count."""

    class Opened:
        replica_mismatch = ""
        _signals = None

    monkeypatch.setattr(heartbeat_observer, "subscribe", lambda listener: None)
    monkeypatch.setattr(heartbeat_observer, "last_words", [])
    page = page_at(tmp_path)
    observer: Any = heartbeat_observer.HeartbeatObserver(HeartbeatWriter(str(page)))
    teacher, first, second = Opened(), Opened(), Opened()
    for ckpt in (teacher, first, second):
        observer.on_start(ckpt)
        observer.on_restore(ckpt, 0, None)
    phases = []
    for act in (
        lambda: [observer.on_step(first, 0, {}, None), observer.on_step(second, 0, {}, None)],
        lambda: observer.on_end(second),
        lambda: observer.on_step(first, 1, {}, None),
        lambda: observer.on_end(first),
        lambda: observer.on_step(teacher, 0, {}, None),
        lambda: observer.on_end(teacher),
    ):
        act()
        beat = read_beat(page)
        assert beat is not None
        phases.append(beat.phase)
    assert phases == ["training", "training", "training", ENDED, "training", ENDED]
