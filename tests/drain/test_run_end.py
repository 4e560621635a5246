"""A tier's capacity while copies are slower than saves, and what the end of a run does about copies that are not made yet."""

from __future__ import annotations

import contextlib
import os
import subprocess
import threading
import time
from pathlib import Path

import psutil
import pytest
import torch

import relight
from relight.catalog import Run
from relight.comm import standstill
from relight.drain import process
from relight.log import fold
from relight.observe import Event, subscribe
from relight.policy.keep import Candidate, Keep, decide_keep
from relight.store import LocalStore

MB = 1_000_000


def stored(path: Path) -> int:
    """Bytes in the files below `path`, while a saving process may delete some of them."""
    total = 0
    for folder, _, names in os.walk(path):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                total += (Path(folder) / name).stat().st_size
    return total


@pytest.mark.parametrize("background", [False, True])
def test_capacity_bounds_a_tier_if_copies_are_slower_than_saves(
    tmp_path: Path, background: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twenty saves of 0.4 MB never take more than 2 MB near, and the last one is copied outwards in the end."""
    monkeypatch.setenv("RELIGHT_BACKGROUND", "1")
    tiers = relight.Tiers(
        near=relight.tier(tmp_path / "near" / "run", capacity=2 * MB),
        far=relight.tier(tmp_path / "far" / "run", bytes_per_second=MB),
    )
    state, most = {"t": torch.zeros(100_000)}, 0
    limits = relight.Limits(when_busy="queue", deadline_s=30)
    with relight.Checkpointer(
        tiers, save=relight.every(steps=1), background=background, signals=False, limits=limits, **state
    ) as ckpt:
        for step in range(ckpt.restore(), 20):
            state["t"].add_(1)
            ckpt.step(step)
            most = max(most, stored(tmp_path / "near"))
    assert most < 2.6 * MB, "the save that is being written comes on top"
    assert ckpt.ended.missing == {} and ckpt.ended.exit_code == 0
    assert Run(LocalStore(tmp_path / "far"), "run").history().live[-1].step == 19


def candidate(number: int, **more: object) -> Candidate:
    return Candidate(f"c{number}", number, number, verified=True, bytes=10, passed=True, **more)  # type: ignore[arg-type]


def test_which_checkpoints_are_deleted_above_the_capacity() -> None:
    """Checkpoints with a copy elsewhere go first, then those without a tier. Named, held and newest ones stay."""
    rules = Keep(capacity=30, every=2)
    candidates = [
        candidate(0, tags=("best",)), candidate(1), candidate(2, elsewhere="far"), candidate(3, held="not on far yet"), candidate(4),
        candidate(5), candidate(6),
    ]  # fmt: skip
    assert [verdict.id for verdict in decide_keep(rules, candidates) if not verdict.keep] == ["c2", "c4"]
    alone = [Candidate(f"c{number}", number, number, verified=True, bytes=10) for number in range(6)]
    assert all(verdict.keep for verdict in decide_keep(Keep(capacity=30), alone))


def test_a_checkpoint_that_is_being_copied_stays_near(tmp_path: Path) -> None:
    """keep(last=1) near leaves a checkpoint there until the copy that has begun is complete, though newer saves take its place."""
    tiers = relight.Tiers(
        near=relight.tier(tmp_path / "near" / "run", keep=relight.keep(last=1)),
        far=relight.tier(tmp_path / "far" / "run", bytes_per_second=0.4 * MB),
    )
    state = {"t": torch.zeros(100_000)}
    with relight.Checkpointer(tiers, save=None, background=False, signals=False, **state) as ckpt:
        ckpt.restore()
        ckpt.save(0)
        log = ckpt._session.attempt.place.log  # type: ignore[union-attr]
        ends = time.monotonic() + 20
        while (
            not any(getattr(note.body, "topic", "") == "copying outwards" for note in fold(log.read()).notes)
            and time.monotonic() < ends
        ):
            time.sleep(0.02)
        for step in range(1, 4):
            ckpt.save(step)
        assert [checkpoint.step for checkpoint in fold(log.read()).live] == [0, 3]
    assert [checkpoint.step for checkpoint in Run(LocalStore(tmp_path / "far"), "run").history().live] == [0, 3]


def test_the_end_waits_for_a_tier_that_answers_late(tmp_path: Path) -> None:
    """A tier that failed once and answers again before the deadline has the last save when close() returns."""
    state = {"t": torch.zeros(10)}
    (tmp_path / "far").write_text("a file where a directory should be")
    tiers = relight.Tiers(near=tmp_path / "near" / "run", far=tmp_path / "far" / "run")
    ckpt = relight.Checkpointer(
        tiers, save=None, background=False, signals=False, limits=relight.Limits(deadline_s=40), **state
    )
    ckpt.restore()
    ckpt.save(0)
    threading.Timer(1.5, (tmp_path / "far").unlink).start()
    ended = ckpt.close()
    assert ended.missing == {} and ended.exit_code == 0
    assert [checkpoint.step for checkpoint in Run(LocalStore(tmp_path / "far"), "run").history().live] == [0]


def test_the_end_names_what_is_not_copied(tmp_path: Path) -> None:
    """If the deadline passes, the result, its exit code and one event name the checkpoint and the tier."""
    events: list[Event] = []
    undo = subscribe(events.append)
    state = {"t": torch.zeros(10)}
    (tmp_path / "far").write_text("a file where a directory should be")
    tiers = relight.Tiers(near=tmp_path / "near" / "run", far=tmp_path / "far" / "run")
    ckpt = relight.Checkpointer(
        tiers, save=None, background=False, signals=False, limits=relight.Limits(deadline_s=2), **state
    )
    ckpt.restore()
    save, began = ckpt.save(0), time.monotonic()
    ended = ckpt.close()
    undo()
    assert 1.8 < time.monotonic() - began < 6
    assert ended.missing == {"far": [save.id]} and ended.exit_code == 1 and ckpt.close() == ended
    assert [event.fields["missing"] for event in events if event.name == "drain.unfinished"] == [{"far": [save.id]}]


@pytest.mark.parametrize("wakes", [True, False])
def test_a_stopped_copier_holds_no_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wakes: bool) -> None:
    """The process that copies is stopped: it is continued, or replaced, so close() does not wait for its whole deadline."""
    monkeypatch.setattr(standstill, "CONTINUE_AFTER_S", 0.2)
    monkeypatch.setattr(standstill, "END_AFTER_S", 0.2)
    monkeypatch.setattr(process, "CHECK_S", 0.1)
    monkeypatch.setattr(process, "PAUSE_S", 0.1)
    if not wakes:
        monkeypatch.setattr(standstill, "wake", lambda *words: False)
    started: list[psutil.Process] = []
    popen = subprocess.Popen

    def stopped(*words: object, **named: object) -> subprocess.Popen[bytes]:
        child = popen(*words, **named)  # type: ignore[call-overload]
        if "relight.drain" not in words[0]:  # type: ignore[operator]
            return child  # type: ignore[no-any-return]
        started.append(psutil.Process(child.pid))
        if len(started) == 1:
            started[0].suspend()
        return child  # type: ignore[no-any-return]

    monkeypatch.setattr(process.subprocess, "Popen", stopped)
    seen: list[Event] = []
    undo = subscribe(seen.append)
    tiers = relight.Tiers(near=relight.tier(tmp_path / "near" / "run"), far=relight.tier(tmp_path / "far" / "run"))
    limits = relight.Limits(deadline_s=300)
    ckpt = relight.Checkpointer(tiers, save=None, background=False, signals=False, limits=limits, t=torch.zeros(10))
    ckpt.restore()
    ckpt.step(0)
    before = time.monotonic()
    try:
        assert ckpt.close().missing == {}
    finally:
        undo()
        for copier in started:
            if copier.is_running():
                copier.kill()
    assert time.monotonic() - before < 150
    assert [event.fields["action"] for event in seen if event.name == "agent.stopped"] == [
        "continued" if wakes else "ended"
    ]
    assert len(started) >= (1 if wakes else 2)
