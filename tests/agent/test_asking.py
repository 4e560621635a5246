"""A restoring trainer waits for saves that may become checkpoints soon, and not for those that never will."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import socket
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from tests.descriptors import new_descriptors, open_descriptors
from tests.scripts import run_script

import relight
from relight.agent import client, launch
from relight.agent.client import Agent
from relight.agent.messages import (
    AllocateSlots,
    HeldList,
    ListenForPeers,
    PeerAddress,
    SaveResult,
    SlotsAllocated,
    SlotSealed,
    TensorLayout,
    ToAgent,
    ToTrainer,
)
from relight.agent.server import (
    OTHER_PARTS_WAIT_S,
    OWN_PARTS_WAIT_S,
    AgentServer,
    CommittedSlot,
    SlotJob,
    TrainerSession,
)
from relight.agent.wire import FDS_MAX, AgentConnection, close_all
from relight.arena import PAGE, SEALED, SharedMapping, adopt
from relight.errors import StoreUnavailable


@pytest.fixture
def server() -> Any:
    """Make a server that writes for ranks 0 and 1."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        made = AgentServer(listener, 1.0)
        made._ranks = {0, 1}
        yield made


def at_work(server: AgentServer) -> SlotJob:
    """Add a save that is being written for a trainer that has ended."""
    job = SlotJob(TrainerSession(wire=None, open=False), 0, 1, slot=None, prepared=None)  # type: ignore[arg-type]
    server._active.add(job)
    server._pending += 1
    return job


def ago(job: SlotJob, seconds: float) -> None:
    job.waits_since = time.monotonic() - seconds


def test_a_commit_that_takes_long_is_waited_for(server: AgentServer) -> None:
    """If no part is missing, a slow commit is waited for without limit: only the store or the processor is slow."""
    jobs = [at_work(server), at_work(server)]
    for job in jobs:
        assert server._waits(job, "a", [])
        ago(job, 20 * OTHER_PARTS_WAIT_S)
    assert server._writes()


def test_a_part_that_is_being_written_here_is_waited_for(server: AgentServer) -> None:
    """A part that this agent is writing is waited for, however long the other rank has waited."""
    waiting, _ = at_work(server), at_work(server)
    server._waits(waiting, "a", [1])
    ago(waiting, 20 * OTHER_PARTS_WAIT_S)
    assert server._writes()


@pytest.mark.parametrize(
    ("missing", "patience_s"), [([1], OWN_PARTS_WAIT_S), ([2], OTHER_PARTS_WAIT_S), ([1, 2], OTHER_PARTS_WAIT_S)]
)
def test_a_part_that_no_rank_writes_is_waited_for_with_a_bound(
    server: AgentServer, missing: list[int], patience_s: float
) -> None:
    """A missing part of this node is waited for ``OWN_PARTS_WAIT_S`` seconds, another node's ``OTHER_PARTS_WAIT_S``."""
    job = at_work(server)
    server._waits(job, "a", missing)
    ago(job, 0.8 * patience_s)
    assert server._writes()
    ago(job, 1.1 * patience_s)
    assert not server._writes()


def test_when_one_is_through_the_other_is_waited_for(server: AgentServer) -> None:
    """If another rank has just committed the checkpoint, the save is waited for.

    A commit of another checkpoint does not count.
    """
    job = at_work(server)
    server._waits(job, "a", [1])
    ago(job, 20 * OTHER_PARTS_WAIT_S)
    server._is_made("b")
    assert not server._writes()
    server._is_made("a")
    assert server._writes()


def test_making_room_for_others_is_not_waited_for(server: AgentServer) -> None:
    """Once a save is committed and reported, the removal of older checkpoints is not waited for.

    It reads a checkpoint back, which takes long. A replaced trainer gets the list of checkpoints at once.
    """
    job = at_work(server)
    assert server._writes()
    job.result_sent = True
    assert not server._writes()


def test_commits_report_the_ranks_without_parts(tmp_path: Any) -> None:
    """A commit reports the ranks with missing parts, and none once all parts exist, even if it is slow."""
    from relight.commit import multi_rank

    missing_parts: list[list[int]] = []
    names = iter([[], ["1"], ["1"]])
    place = SimpleNamespace(store=None, log=SimpleNamespace(run="run", read=lambda: None), epoch=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(multi_rank, "_complete", lambda *_: ([1], None) if not next(names) else ([], None))
        patch.setattr(multi_rank, "is_root_there", lambda *_: len(missing_parts) > 4)
        patch.setattr(multi_rank, "_committed", lambda *_: ("root", 7))
        patch.setattr(multi_rank, "refuse_if_fenced", lambda *_: None)
        clock = iter(range(100))
        participant = multi_rank.Participant(0, 2, "0" * 16, 60.0)

        def waits(missing: Any) -> bool:
            missing_parts.append(list(missing))
            return True

        wait = partial(
            multi_rank._await,
            place,
            SimpleNamespace(id="a", step=1),
            "run/a",
            participant,
            lambda: float(next(clock)),
            lambda _: None,
        )
        assert wait(waits) == ("root", 7)  # type: ignore[arg-type]
    assert missing_parts == [[], [1], [], [], []]


def test_an_ended_trainer_loses_its_session_whatever_state_its_slots_have(server: AgentServer) -> None:
    """A trainer's session ends with it, even if a slot is unreadable or was sealed before its layout was sent.

    Otherwise the agent would never end.
    """
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


def test_all_messages_of_a_trainer_killed_during_an_answer_are_read(
    server: AgentServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trainer gets its slots, seals one and is killed before the agent's thread has returned from sending.

    Its messages count.
    """
    ours, theirs = socket.socketpair()
    received: list[str] = []
    send_fds = socket.send_fds

    def send_and_lose(sock: socket.socket, data: list[bytes], fds: list[int]) -> int:
        sent = send_fds(sock, data, fds)
        wire = AgentConnection(theirs, ToTrainer)
        wire.send(TensorLayout([], 0, 1))
        wire.send(SlotSealed(0, 1))
        wire.close()
        return sent

    monkeypatch.setattr(socket, "send_fds", send_and_lose)
    receive = server._receive

    def listen(session: TrainerSession, message: Any) -> None:
        received.append(type(message).__name__)
        if not isinstance(message, TensorLayout):
            receive(session, message)

    monkeypatch.setattr(server, "_receive", listen)
    session = TrainerSession(AgentConnection(ours, ToAgent))
    server._sessions.add(session)
    AgentConnection(theirs, ToTrainer).send(AllocateSlots(1 << 16, 1, None))
    server._listen(session)
    assert received == ["AllocateSlots", "TensorLayout", "SlotSealed"]


def test_unread_messages_of_an_ended_trainer_are_waited_for(server: AgentServer) -> None:
    """The agent waits for unread messages of an ended trainer: the last one may seal a save."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    session = TrainerSession(wire=None, pid=process.pid)  # type: ignore[arg-type]
    server._sessions.add(session)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # the process has ended, but was not waited for yet
    assert server._has_unread_messages()
    session.polite = True  # this session waits for a part that may never arrive
    assert not server._has_unread_messages()
    session.polite = session.open = False
    assert not server._has_unread_messages()
    session.open, session.pid = True, os.getpid()
    assert not server._has_unread_messages()
    process.wait()


@pytest.mark.parametrize("before", [True, False])
def test_a_save_sealed_just_before_or_after_a_kill_is_restored(tmp_path: Path, before: bool) -> None:
    """If a trainer is killed just before or after it reports its first save as sealed, the next trainer restores the
    checkpoint."""
    source = f"""
import os, signal, relight, torch
from relight.agent.client import Agent
report = Agent.save
def save(self, *words):
    if {not before}:
        report(self, *words)
    os.kill(os.getpid(), signal.SIGKILL)
Agent.save = save
ckpt = relight.Checkpointer({str(tmp_path / "run")!r}, weights=torch.zeros(100_000), background=True)
ckpt.restore()
ckpt.save(1, block=False)
"""
    for number in range(4):
        process = run_script(source, timeout_s=120)
        assert process.returncode == -9, process.stderr
        weights = torch.ones(100_000)
        with relight.Checkpointer(tmp_path / "run", weights=weights, background=True) as ckpt:
            assert ckpt.restore() == 2, number
        shutil.rmtree(tmp_path / "run")


def test_a_late_answer_is_not_used_for_another_request() -> None:
    """A late answer to a first request is not used for a second one, because its slots would be the wrong ones."""
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


def test_only_the_newest_of_many_slots_are_sent(server: AgentServer) -> None:
    """The newest slots are sent, at most ``FDS_MAX``: the kernel limits the descriptors of a message."""
    ours, theirs = socket.socketpair()
    fd = os.memfd_create("slot", os.MFD_CLOEXEC)
    os.ftruncate(fd, PAGE)
    agent, session = Agent(ours), TrainerSession(AgentConnection(theirs, ToAgent))
    slot = SimpleNamespace(state=lambda: (SEALED, 1), memory=SimpleNamespace(fd=fd))
    try:
        for count in (18, FDS_MAX + 7):
            server._kept = [CommittedSlot(f"{number}", 1, slot, 0, (0,), session) for number in range(count)]  # type: ignore[arg-type]
            server._commit_kept(session, True)
            slots = agent.held(5.0)
            assert [slot_held.id for slot_held in slots] == [f"{number}" for number in range(count)][-FDS_MAX:]
            for slot_held in slots:
                slot_held.memory.close()
    finally:
        agent.close()
        session.wire.close()
        os.close(fd)


def test_descriptors_that_did_not_come_are_an_error_of_the_agents(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process at its limit receives fewer descriptors, or cannot map them. Those that were received are closed."""
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
        with pytest.raises(StoreUnavailable, match="2 of 3 file descriptors"):
            agent.held(5.0)
        wire.send(SlotsAllocated([PAGE, PAGE]), [fd])
        with pytest.raises(StoreUnavailable, match="1 of 2 file descriptors"):
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


def test_descriptors_belong_to_their_message_also_when_messages_arrive_together() -> None:
    """A busy trainer reads an event and the answer after it in one call. The kernel joins them, and the answer keeps its
    descriptors; a message that arrives in two parts keeps its own, too."""
    ours, theirs = socket.socketpair()
    fd = os.memfd_create("slot", os.MFD_CLOEXEC)
    sender = AgentConnection[ToAgent](theirs, ToAgent)
    receiver = AgentConnection[ToTrainer](ours, ToTrainer, (SlotsAllocated, HeldList))
    before = open_descriptors()
    event, answer = SaveResult(1, "a"), SlotsAllocated([PAGE, PAGE])
    sender.send(event)
    sender.send(answer, [fd, fd])
    sender.send(event)
    sender.send(SlotsAllocated([PAGE]), [fd])
    counts = []
    for _ in range(4):
        message, fds = receiver.receive()
        counts.append((type(message), len(fds)))
        close_all(fds)
    assert counts == [(SaveResult, 0), (SlotsAllocated, 2), (SaveResult, 0), (SlotsAllocated, 1)]

    body = msgspec.msgpack.encode(answer)
    data = len(body).to_bytes(4, "little") + body
    socket.send_fds(theirs, [data[:6]], [fd, fd])
    reading = threading.Thread(target=lambda: counts.append(receiver.receive()))
    reading.start()
    time.sleep(0.05)  # the first part is read alone
    theirs.sendall(data[6:])
    sender.send(SlotsAllocated([PAGE]), [fd])
    reading.join(5.0)
    for message, fds in (counts[-1], receiver.receive()):
        assert len(fds) == len(message.sizes)
        close_all(fds)
    receiver.close()
    sender.close()
    assert not receiver.cut_off and not new_descriptors(before)
    os.close(fd)


def test_only_a_limit_of_open_files_is_named_as_one() -> None:
    """If the kernel drops descriptors, the hint names the limit; an answer that lacks them has another hint."""
    ours, theirs = socket.socketpair()
    fd = os.memfd_create("slot", os.MFD_CLOEXEC)
    agent, wire = Agent(ours), AgentConnection[ToAgent](theirs, ToAgent)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        wire.send(SlotsAllocated([PAGE, PAGE]), [])
        with pytest.raises(StoreUnavailable, match="0 of 2 file descriptors") as missing:
            agent.slots(PAGE, 2, None, 5.0)
        assert "ulimit" not in missing.value.hint
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
        wire.send(SlotsAllocated([PAGE, PAGE]), [fd, fd])
        with agent._changed:
            agent._changed.wait_for(lambda: agent._answers, 5.0)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        with pytest.raises(StoreUnavailable, match="0 of 2 file descriptors") as dropped:
            agent.slots(PAGE, 2, None, 5.0)
        assert "ulimit -n" in dropped.value.hint
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        agent.close()
        wire.close()
        os.close(fd)


def test_a_process_without_descriptors_sends_the_agent_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run may end without a free descriptor: the agent ends by itself."""

    def none_left(*_: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(launch, "_connect", none_left)
    launch.dismiss("store", "run", 1.0)
