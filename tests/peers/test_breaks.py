"""Broken connections, killed senders and refilled slots: no byte is stored twice, partly, or mixed with another
save's."""

from __future__ import annotations

import contextlib
import gc
import random
import socket
import threading
import time
from collections.abc import Callable

import pytest
from in_process import MB, TOKEN, Events, join, part_of, read_back, several
from neighbours import Nursery, Town, expected, lost_is_read_back
from tests.descriptors import new_descriptors, new_threads, open_descriptors

from relight.arena import SharedMapping
from relight.errors import CorruptCheckpoint, StoreUnavailable
from relight.observe import subscribe
from relight.peers import Remote
from relight.peers.wire import split_address, without_fingerprint


class Cutter:
    """A proxy that cuts each connection after a number of bytes, which ``draw`` returns. None: never."""

    def __init__(self, to: str, draw: Callable[[], int | None]) -> None:
        self._to, self._draw = split_address(to), draw
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.shown = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.address = self.shown + to[len(without_fingerprint(to)) :]
        self.cuts = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                caller, _ = self._listener.accept()
                try:
                    called = socket.create_connection(self._to, 10)
                except OSError:
                    caller.close()
                    continue
                budget = [self._draw()]
                for source, target in ((caller, called), (called, caller)):
                    threading.Thread(target=self._pass_on, args=(source, target, budget), daemon=True).start()

    def _pass_on(self, source: socket.socket, target: socket.socket, budget: list[int | None]) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(50_000):
                if budget[0] is not None:
                    data, left = data[: budget[0]], budget[0] - len(data)
                    budget[0] = left
                    target.sendall(data)
                    if left <= 0:
                        self.cuts += 1
                        break
                else:
                    target.sendall(data)
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        source.close()


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 60))])
def test_connections_cut_anywhere_are_resumed(seed: int, tls: bool) -> None:
    """Connections between agents end after random numbers of bytes.

    All parts are protected in the end, and read back bit-exactly.
    """
    rng = random.Random(seed)
    kinds = [
        lambda: rng.randrange(1, 400),
        lambda: rng.randrange(1, 300_000),
        lambda: rng.randrange(200_000, 6_000_000),
        lambda: None,
    ]

    def draw() -> int | None:
        return rng.choices(kinds, [2, 3, 4, 3])[0]()

    with several(4, tls=tls) as peers:
        cutters = [Cutter(peer.address, draw) for peer in peers]
        join(peers, 2, 2, [cutter.address for cutter in cutters])
        parts = [part_of("c1", 1, rank, 9 * MB + 1000 * rank) for rank in range(4)]
        for peer, (part, _) in zip(peers, parts):
            peer.offer(part)
        assert all(peer.wait(60) for peer in peers)
        assert sum(cutter.cuts for cutter in cutters) > 3
        lost = rng.sample(range(4), 2)
        with contextlib.closing(
            Remote([peer.address for rank, peer in enumerate(peers) if rank not in lost], TOKEN, 20.0)
        ) as remote:
            for part, data in parts:
                read_back(remote, part, data)
        for cutter in cutters:
            cutter.close()


def test_readers_change_to_another_way_when_one_breaks(tls: bool) -> None:
    """A reader skips and reports agents with broken connections.

    It gets the right bytes from other agents while enough are left, then an error.
    """
    silent: list[str] = []
    undo = subscribe(
        lambda event: silent.append(str(event.fields["address"])) if event.name == "peers.unreachable" else None
    )
    with several(6, tls=tls) as peers:
        join(peers, 4, 2)
        parts = [part_of("c1", 1, rank, 20 * MB) for rank in range(6)]
        for peer, (part, _) in zip(peers, parts):
            peer.offer(part)
        assert all(peer.wait(60) for peer in peers)
        part, data = parts[0]
        cutters = [Cutter(peer.address, lambda: None) for peer in peers]
        cutters[0] = Cutter(peers[0].address, lambda: 3 * MB)  # the owner first, then an agent that rebuilds its part
        cutters[3] = Cutter(peers[3].address, lambda: 2 * MB)
        with contextlib.closing(Remote([cutter.address for cutter in cutters], TOKEN, 20.0)) as remote:
            assert remote.has("c1", 0) == f"agent at {cutters[0].shown}"
            read_back(remote, part, data)
            assert {cutters[0].shown, cutters[3].shown} == set(silent)
            assert remote.has("c1", 0) == "rebuilt from 4 of 6"
            for peer in peers[1:3]:
                peer.close()
            reader = remote.reader("c1", 0, 0)
            if reader is not None:
                with pytest.raises(StoreUnavailable):
                    reader.read_into(0, memoryview(bytearray(reader.size)))
            assert remote.has("c1", 0) is None or reader is None
        for cutter in cutters:
            cutter.close()
    undo()


def test_a_sender_killed_in_the_middle_completes_nothing(nursery: Nursery, tls: bool) -> None:
    """After SIGKILL during sending no stripe of that sender is complete; the other stripes are."""
    with contextlib.closing(nursery.town([[8 * MB]] * 4, 2, 1, tls=tls)) as town:
        slow = nursery.agent(town.token, rate=1e6, tls=tls)
        slow.sizes = town.agents[3].sizes
        town.agents[3].close()
        town.agents[3] = slow
        town.join()
        for agent in town.agents:
            agent.send("fill", "c1", 1, agent.sizes)
            agent.receive()
            agent.call("offer")
        assert all(agent.call("wait", 60) for agent in town.agents[:3])
        while not (held_bytes := sum(agent.call("memory")["held"] for agent in town.agents[:3])):
            time.sleep(0.01)
        assert not slow.call("wait", 0.0), "it must be killed during sending"
        slow.kill()
        with contextlib.closing(town.remote()) as remote:
            assert remote.has("c1", 3) is None and held_bytes
            assert all(remote.has("c1", rank) == f"agent at {town.agents[rank].shown}" for rank in range(3))
        events = [fields for agent in town.agents[:3] for fields in agent.call("events")]
        # of the four pieces the killed agent is a member of two, and holds one
        assert sum(name == "peers.complete" for name, _ in events) == 4 - 2 - 1


def test_a_slot_filled_again_while_it_is_sent_is_never_complete(nursery: Nursery) -> None:
    """If the next save begins before this one is protected, ``peers.failed`` is emitted, this one is not available, and
    the next one is protected."""
    with contextlib.closing(nursery.town([[4 * MB]] * 4, 2, 1)) as town:
        slow = nursery.agent(town.token, rate=1e6)
        slow.sizes = town.agents[3].sizes
        town.agents[3].close()
        town.agents[3] = slow
        town.join()
        for agent in town.agents:
            agent.call("fill", "c1", 1, agent.sizes)
            agent.call("offer")
        time.sleep(0.2)
        assert not slow.call("wait", 0.0)
        slow.call("fill", "c2", 2, slow.sizes)
        assert slow.call("wait", 60)
        assert any(name == "peers.failed" and "next save" in message for name, message in slow.call("events"))
        shown = [message for agent in town.agents for name, message in agent.call("events") if name == "peers.complete"]
        assert len(shown) < 4  # its first segment may have been whole, its second was not
        with contextlib.closing(town.remote()) as remote:
            assert remote.has("c1", 3) is None
        town.protect("c2", 2)
        lost_is_read_back(town, "c2", (3,))


def test_a_slot_filled_again_while_it_is_read_is_never_believed(nursery: Nursery) -> None:
    """Reads during the next save's filling return the right bytes or raise; in the end they always raise."""
    agent = nursery.agent(TOKEN)
    agent.sizes = [(0, 12 * MB)]
    agent.call("fill", "c1", 1, agent.sizes)
    agent.call("offer")
    right = expected("c1", 0, 12 * MB)[0]
    with contextlib.closing(Remote([agent.address], TOKEN, 20.0)) as remote:
        reader = remote.reader("c1", 0, 0)
        assert reader is not None
        good, failed, ends = 0, 0, time.monotonic() + 60
        while not failed:
            room = bytearray(reader.size)
            try:
                reader.read_into(0, memoryview(room))
            except StoreUnavailable:
                failed += 1
                continue
            assert room == right
            good += 1
            if good == 3:
                agent.send("fill", "c2", 2, agent.sizes)
            assert time.monotonic() < ends
        assert remote.has("c1", 0) is None
    agent.close()


class Changing:
    """Memory that is refilled at its n-th use, after every check that preceded the bytes."""

    def __init__(self, memory: SharedMapping, last: int) -> None:
        self._memory, self._left = memory, last
        self.size = memory.size

    def is_there(self) -> bool:
        return self._left > 0

    @property
    def view(self) -> memoryview:
        self._left -= 1
        return self._memory.view


@pytest.mark.parametrize("last", [1, 2, 3])
def test_a_change_after_the_last_check_is_detected(last: int, tls: bool) -> None:
    """If the slot changes while a piece of it is sent, also the last one, the holder stores nothing and
    ``peers.failed`` is emitted."""
    events: Events = []
    with several(2, events, tls) as peers:
        part, _ = part_of("c1", 1, 0, 9 * MB)  # three pieces
        memory = Changing(part.memory, last)
        join(peers, 1, 1)
        peers[0].offer(part._replace(memory=memory, is_there=memory.is_there))  # type: ignore[arg-type]
        assert peers[0].wait(30)
        assert peers[1]._holder.inventory() == [] and peers[1].held_bytes == 0
        assert [name for name, _ in events if name != "peers.moved"] == ["peers.failed"]


@pytest.mark.parametrize("last", [1, 2, 3, 4])
def test_a_change_after_a_read_is_detected(last: int, tls: bool) -> None:
    """If the slot changes while its bytes are sent to a reader, the read fails.

    Reads that end before the change return the right bytes.
    """
    with several(1, tls=tls) as peers:
        part, data = part_of("c1", 1, 0, 18 * MB)  # the second pack is three reads
        memory = Changing(part.memory, last)
        peers[0].offer(part._replace(memory=memory, is_there=memory.is_there))  # type: ignore[arg-type]
        with contextlib.closing(Remote([peers[0].address], TOKEN, 20.0)) as remote:
            reader = remote.reader("c1", 0, 1)
            assert reader is not None
            room = bytearray(reader.size)
            if last == 4:
                reader.read_into(0, memoryview(room))
                assert room == data[part.starts[1] :][: reader.size]
            else:
                with pytest.raises(StoreUnavailable):
                    reader.read_into(0, memoryview(room))


def test_the_end_of_a_pack_is_the_end(tls: bool) -> None:
    """A read beyond a pack's end raises instead of returning the next pack's bytes. A missing pack has no reader."""
    with several(1, tls=tls) as peers:
        part, data = part_of("c1", 1, 0, MB)
        peers[0].offer(part)
        with contextlib.closing(Remote([peers[0].address, "127.0.0.1:1", "nonsense"], TOKEN, 20.0)) as remote:
            assert remote.answered == (peers[0].address,)
            reader = remote.reader("c1", 0, 0)
            assert reader is not None and remote.reader("c1", 0, 2) is None and remote.reader("c1", 1, 0) is None
            with pytest.raises(CorruptCheckpoint):
                reader.read_into(reader.size - 10, memoryview(bytearray(11)))
            room = memoryview(bytearray(100))
            data_read = reader.fetch(5, 50, room)
            assert data_read == data[4096 + 5 :][:50]
            peers[0].withdraw("c1", 0)
            with pytest.raises(StoreUnavailable):
                reader.read_into(0, room)


def test_no_room_at_a_holder_is_reported_and_the_rest_works(nursery: Nursery) -> None:
    """Holders with too little memory refuse, the sender emits ``peers.failed``, and each agent still serves its own
    part."""
    with contextlib.closing(nursery.town([[4 * MB]] * 3, 1, 1, memory=MB)) as town:
        town.protect("c1", 1)
        for agent in town.agents:
            ((name, message),) = agent.call("events")
            assert name == "peers.failed" and "4.06 MB more" in message
            assert agent.call("memory")["held"] == 0
        with contextlib.closing(town.remote()) as remote:
            assert all(remote.has("c1", rank) == f"agent at {agent.shown}" for rank, agent in enumerate(town.agents))


def test_sending_keeps_to_its_rate(nursery: Nursery) -> None:
    """With a rate, sending takes at least bytes / rate."""
    agents = [nursery.agent(TOKEN, rate=16e6), nursery.agent(TOKEN)]
    for rank, agent in enumerate(agents):
        agent.sizes = [(rank, 24 * MB)]
    with contextlib.closing(Town(TOKEN, agents, 1, 1)) as town:
        town.join()
        began = time.monotonic()
        town.protect("c1", 1)
        assert time.monotonic() - began > 1.0


def test_nothing_is_left_when_it_is_closed(tls: bool) -> None:
    """After ``close`` no thread of Relight and no new descriptor is left."""
    gc.collect()
    threads, descriptors = threading.enumerate(), open_descriptors()
    with several(3, tls=tls) as peers:
        join(peers, 1, 1)
        for rank, peer in enumerate(peers):
            part, _ = part_of("c1", 1, rank, MB)
            peer.offer(part)
        assert all(peer.wait(30) for peer in peers)
        with contextlib.closing(Remote([peer.address for peer in peers], TOKEN, 20.0)) as remote:
            assert len(remote.answered) == 3
        del part, peer
    gc.collect()
    assert not new_threads(threads, "relight-", wait_s=10)
    gc.collect()
    assert not new_descriptors(descriptors, wait_s=10)
