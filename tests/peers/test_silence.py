"""Agents that do not answer: callers wait for them no longer than their limit, and other agents are not delayed."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time

import pytest
from in_process import MB, TOKEN, Events, join, part_of, read_back, several
from neighbours import Nursery, expected
from tests.descriptors import new_descriptors, open_descriptors

from relight.agent.messages import ListenForPeers
from relight.agent.peer_service import AgentPeers
from relight.peers import Remote, sender


def test_a_stopped_agent_is_left_out_in_time(nursery: Nursery, tls: bool) -> None:
    """If an agent is stopped before a reader asks all agents, or between asking and reading, its parts are rebuilt in
    bounded time."""
    with contextlib.closing(nursery.town([[MB]] * 4, 2, 1, tls=tls)) as town:
        town.protect("c1", 1)
        addresses = [agent.address for agent in town.agents]
        with contextlib.closing(Remote(addresses, TOKEN, 2.0)) as early:
            assert len(early.answered) == 4
            os.kill(town.agents[0].pid, signal.SIGSTOP)
            try:
                began = time.monotonic()
                with contextlib.closing(Remote(addresses, TOKEN, 2.0)) as late:
                    assert late.answered == tuple(addresses[1:])
                    assert late.has("c1", 0) == "rebuilt from 2 of 3"
                assert time.monotonic() - began < 2.0 + 10
                for pack, right in enumerate(expected("c1", 0, MB)):
                    reader = early.reader("c1", 0, pack)
                    assert reader is not None
                    room = bytearray(reader.size)
                    reader.read_into(0, memoryview(room))
                    assert room == right
                assert time.monotonic() - began < 3 * 2.0 + 20
                assert early.has("c1", 0) == "rebuilt from 2 of 3"
            finally:
                os.kill(town.agents[0].pid, signal.SIGCONT)


def test_a_holder_that_hangs_is_given_up_and_the_others_are_not_kept(
    monkeypatch: pytest.MonkeyPatch, tls: bool
) -> None:
    """If one of two holders accepts connections but sends nothing, the other gets its copy, and the failure names the
    first, in time."""
    monkeypatch.setattr(sender, "CALL_S", 0.5)
    monkeypatch.setattr(sender, "PATIENCE_S", 1.0)
    events: Events = []
    with several(2, events, tls) as peers, socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}" + ("#" + 64 * "0" if tls else "")
        join(peers, 1, 2, [*(peer.address for peer in peers), address])
        part, data = part_of("c1", 1, 0, 5 * MB)
        peers[0].offer(part)
        assert peers[0].wait(30)
        failed = [fields for name, fields in events if name == "peers.failed"]
        assert [(item["peer"], item["checkpoint"]) for item in failed] == [("a2", "c1")]
        peers[0].close()
        with contextlib.closing(Remote([peers[1].address], TOKEN, 20.0)) as remote:
            read_back(remote, part, data)


def test_something_newer_does_not_wait_for_an_agent_that_is_gone() -> None:
    """Without an agent at a holder's address, the next checkpoint or a new roster ends the retries for this one at
    once."""
    events: Events = []
    with several(2, events) as peers:
        join(peers, 1, 1, [peers[0].address, "127.0.0.1:1"])
        part, data = part_of("c1", 1, 0, MB)
        newer, newer_data = part_of("c2", 2, 0, MB)
        peers[0].offer(part)
        assert not peers[0].wait(0.3)
        began = time.monotonic()
        peers[0].offer(newer)
        while not any(fields["checkpoint"] == "c1" for name, fields in events if name == "peers.failed"):
            assert time.monotonic() - began < 15
            time.sleep(0.01)
        assert not peers[0].wait(0.1)
        join(peers, 1, 1)
        assert peers[0].wait(15)
        assert [fields["checkpoint"] for name, fields in events if name == "peers.sent"] == ["c2"]
        peers[0].close()
        with contextlib.closing(Remote([peers[1].address], TOKEN, 20.0)) as remote:
            assert remote.has("c1", 0) is None
            read_back(remote, newer, newer_data)


def test_agents_that_join_late_are_waited_for() -> None:
    """A holder that has not joined yet, or joined another ring, is tried again until it has: the order of joining does
    not matter."""
    with several(2) as peers:
        parts = [part_of("c1", 1, rank, MB) for rank in range(2)]
        for peer, (part, _) in zip(peers, parts):
            peer.offer(part)
        join(peers[:1], 1, 1, [peer.address for peer in peers])
        assert not peers[0].wait(0.3)
        join(peers, 1, 1)
        assert all(peer.wait(30) for peer in peers)
        peers[0].close()
        with contextlib.closing(Remote([peers[1].address], TOKEN, 20.0)) as remote:
            read_back(remote, *parts[0])


def test_a_part_that_the_roster_does_not_have_is_reported_at_once() -> None:
    """A part that the roster does not have is not sent and delays no other part."""
    events: Events = []
    with several(2, events) as peers:
        join(peers, 1, 1)
        part, _ = part_of("c1", 1, 7, MB)
        peers[0].offer(part)
        assert peers[0].wait(10)
        assert [(name, fields["rank"]) for name, fields in events] == [("peers.failed", 7)]


def refuse_threads(monkeypatch: pytest.MonkeyPatch, prefix: str) -> None:
    """Let the system refuse threads with names that begin so, as at a limit of processes."""
    start = threading.Thread.start

    def refused(self: threading.Thread) -> None:
        if self.name.startswith(prefix):
            raise RuntimeError("can't start new thread")
        start(self)

    monkeypatch.setattr(threading.Thread, "start", refused)


def test_a_part_is_sent_though_no_more_threads_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent at its limit of threads sends its parts one after the other.

    Symptom: the sending thread ended, and the agent accepted parts that it never sent, without an event.
    """
    events: Events = []
    with several(3, events) as peers:
        join(peers, 1, 2)
        refuse_threads(monkeypatch, "relight-peers-send_")
        for number in (1, 2):
            part, data = part_of(f"c{number}", number, 0, MB)
            peers[0].offer(part)
            assert peers[0].wait(30)
        assert [fields["checkpoint"] for name, fields in events if name == "peers.sent"] == ["c1", "c2"]
        peers[0].close()
        with contextlib.closing(Remote([peer.address for peer in peers[1:]], TOKEN, 20.0)) as remote:
            read_back(remote, part, data)


@pytest.mark.parametrize("place", ["transfer", "round"])
def test_an_unexpected_error_costs_those_parts_alone(monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    """Parts that cannot be sent for any reason are reported with it, and the next ones are sent."""
    events: Events = []
    owner, name = (sender._HolderTransfer, "_send_segment") if place == "transfer" else (sender, "_plan")

    def fails(*words: object) -> None:
        raise MemoryError("none left")

    with several(2, events) as peers:
        join(peers, 1, 1)
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, fails)
            peers[0].offer(part_of("c1", 1, 0, MB)[0])
            assert peers[0].wait(30)
        peers[0].offer(part_of("c2", 2, 0, MB)[0])
        assert peers[0].wait(30)
        results = [(name, fields["checkpoint"]) for name, fields in events if name in ("peers.failed", "peers.sent")]
        assert results == [("peers.failed", "c1"), ("peers.sent", "c2")]
        assert "MemoryError: none left" in str(next(fields["why"] for name, fields in events if name == "peers.failed"))


@pytest.mark.parametrize("thread", ["relight-peers-accept", "relight-peers-send"])
def test_an_agent_without_threads_reports_that(monkeypatch: pytest.MonkeyPatch, thread: str) -> None:
    """The trainer gets the reason as an answer if its agent cannot start the threads for peers, and the agent stays.

    Symptom: the error counted as an invalid message, and the agent dropped its trainer.
    """
    peers = AgentPeers(lambda *_: None)
    with monkeypatch.context() as patch:
        refuse_threads(patch, thread)
        before = open_descriptors()
        answer = peers.meet(ListenForPeers(TOKEN, host="127.0.0.1"))
        assert not answer.address and "no thread could be started" in answer.why
        assert not new_descriptors(before)
    assert peers.meet(ListenForPeers(TOKEN, host="127.0.0.1")).address
    peers.close()


@pytest.mark.parametrize(
    "address",
    [
        "",
        "x",
        "host:",
        ":0",
        "host:70000",
        "[::1",
        "host:-1",
        "host:１",
        "127.0.0.1:1#",
        "127.0.0.1:1#aa",
        "127.0.0.1:1##" + 64 * "0",
    ],
)
def test_an_invalid_address_is_left_out(address: str) -> None:
    """An invalid address from another agent counts as an agent that does not answer."""
    with contextlib.closing(Remote([address], TOKEN, 1.0)) as remote:
        assert remote.answered == ()


def test_ipv6_addresses_work(tls: bool) -> None:
    """Addresses with brackets work if the machine has IPv6."""
    from relight.peers import PeerService

    try:
        peers = PeerService("::1", token=TOKEN, memory=None, notify=lambda *_: None, tls=tls)
    except Exception as error:
        pytest.skip(f"no IPv6 here: {error}")
    assert peers.address.startswith("[::1]:")
    with contextlib.closing(Remote([peers.address], TOKEN, 10.0)) as remote:
        assert remote.answered == (peers.address,)
    peers.close()
