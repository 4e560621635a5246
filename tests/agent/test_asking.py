"""Who asks what there is waits for what may be a checkpoint soon, and not for what never will be."""

from __future__ import annotations

import socket
import time
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from relight.agent.serve import NEAR_S, PATIENT_S, Job, Server, Session
from relight.arena import SEALED


@pytest.fixture
def server() -> Any:
    """One that writes for ranks 0 and 1."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        made = Server(listener, 1.0)
        made._ranks = {0, 1}
        yield made


def at_work(server: Server) -> Job:
    """A save that is being written, of a trainer that is gone."""
    job = Job(Session(wire=None, open=False), 0, 1, slot=None, prepared=None)  # type: ignore[arg-type]
    server._active.add(job)
    server._pending += 1
    return job


def ago(job: Job, seconds: float) -> None:
    job.waits_since = time.monotonic() - seconds


def test_a_commit_that_takes_long_is_waited_for(server: Server) -> None:
    """Nobody's part is missing: the store is slow, or the processor busy, and both ranks' saves are as good as there."""
    jobs = [at_work(server), at_work(server)]
    for job in jobs:
        assert server._waits(job, "a", [])
        ago(job, 20 * PATIENT_S)
    assert server._writes()


def test_a_part_that_is_being_written_here_is_waited_for(server: Server) -> None:
    """However long the other rank has waited for it."""
    waiting, _ = at_work(server), at_work(server)
    server._waits(waiting, "a", [1])
    ago(waiting, 20 * PATIENT_S)
    assert server._writes()


@pytest.mark.parametrize(("missing", "patience_s"), [([1], NEAR_S), ([2], PATIENT_S), ([1, 2], PATIENT_S)])
def test_a_part_that_nobody_makes_is_not(server: Server, missing: list[int], patience_s: float) -> None:
    """One that would be made here soon shows that it is not; another node's gets longer."""
    job = at_work(server)
    server._waits(job, "a", missing)
    ago(job, 0.8 * patience_s)
    assert server._writes()
    ago(job, 1.1 * patience_s)
    assert not server._writes()


def test_when_one_is_through_the_other_is_waited_for(server: Server) -> None:
    """It waited for the one that has just committed, and has not seen that yet; a save of something else says nothing of it."""
    job = at_work(server)
    server._waits(job, "a", [1])
    ago(job, 20 * PATIENT_S)
    server._is_made("b")
    assert not server._writes()
    server._is_made("a")
    assert server._writes()


def test_commits_say_whose_parts_are_missing(tmp_path: Any) -> None:
    """None is, once all are there: a commit that takes its time is not a wait for others."""
    from relight.commit import together

    told: list[list[int]] = []
    names = iter([[], ["1"], ["1"]])
    place = SimpleNamespace(store=None, log=SimpleNamespace(run="run", read=lambda: None), epoch=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(together, "_complete", lambda *_: ([1], None) if not next(names) else ([], None))
        patch.setattr(together, "_is_made", lambda *_: len(told) > 4)
        patch.setattr(together, "_committed", lambda *_: ("root", 7))
        patch.setattr(together, "refuse_if_fenced", lambda *_: None)
        clock = iter(range(100))
        seat = together.Seat(0, 2, "0" * 16, 60.0)

        def waits(missing: Any) -> bool:
            told.append(list(missing))
            return True

        wait = partial(together._await, place, SimpleNamespace(id="a", step=1), "run/a", seat, lambda: float(next(clock)), lambda _: None)
        assert wait(waits) == ("root", 7)  # type: ignore[arg-type]
    assert told == [[], [1], [], [], []]


def test_a_trainer_that_is_gone_is_gone_whatever_its_slots_say(server: Server) -> None:
    """Sealed before its layout was told, or not to be read at all: nothing of the session stays, or the process would never end."""
    closed: list[bool] = []

    class Broken:
        def state(self) -> tuple[int, int]:
            raise ValueError("not a slot")

    class Early:
        def state(self) -> tuple[int, int]:
            return SEALED, 1

    wire = SimpleNamespace(close=lambda: closed.append(True))
    session = Session(wire=wire, slots=[Broken(), Early()])  # type: ignore[arg-type, list-item]
    server._sessions.add(session)
    server._part(session)
    assert not server._sessions and not session.open and closed
