"""Who asks what there is waits for what may be a checkpoint soon, and not for what never will be."""

from __future__ import annotations

import errno
import os
import shutil
import socket
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.descriptors import new_descriptors, open_descriptors

import relight
from relight.agent import client, launch
from relight.agent.client import Agent
from relight.agent.messages import (
    AllocateSlots,
    HeldList,
    ListenForPeers,
    PeerAddress,
    SlotsAllocated,
    SlotSealed,
    TensorLayout,
    ToAgent,
    ToTrainer,
)
from relight.agent.server import NEAR_S, PATIENT_S, AgentServer, CommittedSlot, SlotJob, TrainerSession
from relight.agent.wire import FDS_MAX, AgentConnection
from relight.arena import PAGE, SEALED, SharedMapping, adopt
from relight.errors import StoreUnavailable


@pytest.fixture
def server() -> Any:
    """One that writes for ranks 0 and 1."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        made = AgentServer(listener, 1.0)
        made._ranks = {0, 1}
        yield made


def at_work(server: AgentServer) -> SlotJob:
    """A save that is being written, of a trainer that is gone."""
    job = SlotJob(TrainerSession(wire=None, open=False), 0, 1, slot=None, prepared=None)  # type: ignore[arg-type]
    server._active.add(job)
    server._pending += 1
    return job


def ago(job: SlotJob, seconds: float) -> None:
    job.waits_since = time.monotonic() - seconds


def test_a_commit_that_takes_long_is_waited_for(server: AgentServer) -> None:
    """Nobody's part is missing: the store is slow, or the processor busy, and both ranks' saves are as good as there."""
    jobs = [at_work(server), at_work(server)]
    for job in jobs:
        assert server._waits(job, "a", [])
        ago(job, 20 * PATIENT_S)
    assert server._writes()


def test_a_part_that_is_being_written_here_is_waited_for(server: AgentServer) -> None:
    """However long the other rank has waited for it."""
    waiting, _ = at_work(server), at_work(server)
    server._waits(waiting, "a", [1])
    ago(waiting, 20 * PATIENT_S)
    assert server._writes()


@pytest.mark.parametrize(("missing", "patience_s"), [([1], NEAR_S), ([2], PATIENT_S), ([1, 2], PATIENT_S)])
def test_a_part_that_nobody_makes_is_not(server: AgentServer, missing: list[int], patience_s: float) -> None:
    """One that would be made here soon shows that it is not; another node's gets longer."""
    job = at_work(server)
    server._waits(job, "a", missing)
    ago(job, 0.8 * patience_s)
    assert server._writes()
    ago(job, 1.1 * patience_s)
    assert not server._writes()


def test_when_one_is_through_the_other_is_waited_for(server: AgentServer) -> None:
    """It waited for the one that has just committed, and has not seen that yet; a save of something else says nothing of it."""
    job = at_work(server)
    server._waits(job, "a", [1])
    ago(job, 20 * PATIENT_S)
    server._is_made("b")
    assert not server._writes()
    server._is_made("a")
    assert server._writes()


def test_making_room_for_others_is_not_waited_for(server: AgentServer) -> None:
    """The save is committed and told; to remove older ones a checkpoint is read back, which takes as long as it is large. Whoever takes the
    place of a trainer that died behind its save is told at once what there is."""
    job = at_work(server)
    assert server._writes()
    job.told = True
    assert not server._writes()


def test_commits_say_whose_parts_are_missing(tmp_path: Any) -> None:
    """None is, once all are there: a commit that takes its time is not a wait for others."""
    from relight.commit import multi_rank

    told: list[list[int]] = []
    names = iter([[], ["1"], ["1"]])
    place = SimpleNamespace(store=None, log=SimpleNamespace(run="run", read=lambda: None), epoch=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(multi_rank, "_complete", lambda *_: ([1], None) if not next(names) else ([], None))
        patch.setattr(multi_rank, "_is_made", lambda *_: len(told) > 4)
        patch.setattr(multi_rank, "_committed", lambda *_: ("root", 7))
        patch.setattr(multi_rank, "refuse_if_fenced", lambda *_: None)
        clock = iter(range(100))
        seat = multi_rank.Participant(0, 2, "0" * 16, 60.0)

        def waits(missing: Any) -> bool:
            told.append(list(missing))
            return True

        wait = partial(multi_rank._await, place, SimpleNamespace(id="a", step=1), "run/a", seat, lambda: float(next(clock)), lambda _: None)
        assert wait(waits) == ("root", 7)  # type: ignore[arg-type]
    assert told == [[], [1], [], [], []]


def test_a_trainer_that_is_gone_is_gone_whatever_its_slots_say(server: AgentServer) -> None:
    """Sealed before its layout was told, or not to be read at all: nothing of the session stays, or the process would never end."""
    closed: list[bool] = []

    class Broken:
        def state(self) -> tuple[int, int]:
            raise ValueError("not a slot")

    class Early:
        def state(self) -> tuple[int, int]:
            return SEALED, 1

    wire = SimpleNamespace(close=lambda: closed.append(True))
    session = TrainerSession(wire=wire, slots=[Broken(), Early()])  # type: ignore[arg-type, list-item]
    server._sessions.add(session)
    server._part(session)
    assert not server._sessions and not session.open and closed


def test_whoever_dies_as_it_is_answered_is_heard_to_its_end(server: AgentServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """It got its slots, sealed one and was killed before the agent's thread came back from sending them: what it said meanwhile counts."""
    ours, theirs = socket.socketpair()
    heard: list[str] = []
    send_fds = socket.send_fds

    def send_and_lose(sock: socket.socket, data: list[bytes], fds: list[int]) -> int:
        sent = send_fds(sock, data, fds)
        wire = AgentConnection(theirs, ToTrainer)
        wire.send(TensorLayout([], 0, 1))
        wire.send(SlotSealed(0, 1))
        wire.close()
        return sent

    monkeypatch.setattr(socket, "send_fds", send_and_lose)
    hear = server._receive

    def listen(session: TrainerSession, message: Any) -> None:
        heard.append(type(message).__name__)
        if not isinstance(message, TensorLayout):
            hear(session, message)

    monkeypatch.setattr(server, "_receive", listen)
    session = TrainerSession(AgentConnection(ours, ToAgent))
    server._sessions.add(session)
    AgentConnection(theirs, ToTrainer).send(AllocateSlots(1 << 16, 1, None))
    server._listen(session)
    assert heard == ["AllocateSlots", "TensorLayout", "SlotSealed"]


def test_who_has_ended_and_was_not_heard_yet_is_waited_for(server: AgentServer) -> None:
    """Its last words may be that a save is sealed."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    session = TrainerSession(wire=None, pid=process.pid)  # type: ignore[arg-type]
    server._sessions.add(session)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # nobody has asked for its end yet
    assert server._has_unheard()
    session.polite = True  # it waits here for a part that may never come
    assert not server._has_unheard()
    session.polite = session.open = False
    assert not server._has_unheard()
    session.open, session.pid = True, os.getpid()
    assert not server._has_unheard()
    process.wait()


@pytest.mark.parametrize("before", [True, False])
def test_what_was_sealed_by_whoever_dies_at_once_is_there(tmp_path: Path, before: bool) -> None:
    """Killed before, or behind, the word that it is sealed, in its first save; whoever asks next finds the checkpoint."""
    source = f"""
import os, signal, relight, torch
from relight.agent.client import Agent
said = Agent.save
def save(self, *words):
    if {not before}:
        said(self, *words)
    os.kill(os.getpid(), signal.SIGKILL)
Agent.save = save
ckpt = relight.Checkpointer({str(tmp_path / "run")!r}, weights=torch.zeros(100_000), background=True)
ckpt.restore()
ckpt.save(1, block=False)
"""
    for number in range(4):
        process = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=120, check=False)
        assert process.returncode == -9, process.stderr
        weights = torch.ones(100_000)
        with relight.Checkpointer(tmp_path / "run", weights=weights, background=True) as ckpt:
            assert ckpt.restore() == 2, number
        shutil.rmtree(tmp_path / "run")


def test_an_answer_that_came_too_late_is_to_no_other_question() -> None:
    """The agent was slow once: what it says then of the first is not taken for the second's, whose slots it would not be."""
    ours, theirs = socket.socketpair()
    agent, wire = Agent(ours), AgentConnection(theirs, ToAgent)
    try:
        with pytest.raises(StoreUnavailable, match="did not answer within"):
            agent.meet(ListenForPeers(b"token"), 0.05)
        wire.send(PeerAddress("first", ""))
        wire.send(PeerAddress("second", ""))
        assert agent.meet(ListenForPeers(b"token"), 5.0).id == "second"
        wire.send(PeerAddress("third", ""))
        assert agent.meet(ListenForPeers(b"token"), 5.0).id == "third"
    finally:
        agent.close()
        wire.close()


def test_of_very_many_slots_the_newest_are_given(server: AgentServer) -> None:
    """Nine ranks on a node, two saves of each, are more than sixteen; no message takes more descriptors than the kernel lets go with it."""
    ours, theirs = socket.socketpair()
    fd = os.memfd_create("slot", os.MFD_CLOEXEC)
    os.ftruncate(fd, PAGE)
    agent, session = Agent(ours), TrainerSession(AgentConnection(theirs, ToAgent))
    slot = SimpleNamespace(state=lambda: (SEALED, 1), memory=SimpleNamespace(fd=fd))
    try:
        for count in (18, FDS_MAX + 7):
            server._kept = [CommittedSlot(f"{number}", 1, slot, 0, (0,), session) for number in range(count)]  # type: ignore[arg-type]
            server._commit_kept(session)
            held = agent.held(5.0)
            assert [one.id for one in held] == [f"{number}" for number in range(count)][-FDS_MAX:]
            for one in held:
                one.memory.close()
    finally:
        agent.close()
        session.wire.close()
        os.close(fd)


def test_descriptors_that_did_not_come_are_an_error_of_the_agents(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process without room for more of them gets fewer, or cannot map what they are of. Those that came are closed."""
    ours, theirs = socket.socketpair()
    fd = os.memfd_create("slot", os.MFD_CLOEXEC)
    os.ftruncate(fd, PAGE)
    agent, wire = Agent(ours), AgentConnection(theirs, ToAgent)
    before, mapped = open_descriptors(), []

    def once(fd: int, *, writable: bool) -> SharedMapping:
        if mapped:
            os.close(fd)
            raise OSError(errno.ENOMEM, "no memory")
        mapped.append(adopt(fd, writable=writable))
        return mapped[0]

    try:
        wire.send(HeldList([("a", 0, [0]), ("b", 0, [0]), ("c", 0, [0])]), [fd, fd])
        with pytest.raises(StoreUnavailable, match="2 of 3 descriptors"):
            agent.held(5.0)
        wire.send(SlotsAllocated([PAGE, PAGE]), [fd])
        with pytest.raises(StoreUnavailable, match="1 of 2 descriptors"):
            agent.slots(PAGE, 2, None, 5.0)
        monkeypatch.setattr(client, "adopt", once)
        wire.send(SlotsAllocated([PAGE, PAGE]), [fd, fd])
        with pytest.raises(StoreUnavailable, match="no memory"):
            agent.slots(PAGE, 2, None, 5.0)
        assert not new_descriptors(before)
    finally:
        agent.close()
        wire.close()
        os.close(fd)


def test_who_has_no_descriptor_left_ends_without_a_word_to_the_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that comes to its end then is no error: the agent ends by itself."""

    def none_left(*_: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(launch, "_connect", none_left)
    launch.dismiss("store", "run", 1.0)
