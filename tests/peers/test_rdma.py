"""The RDMA plane by NIXL, over UCX's shared memory and TCP: what moves which bytes, and every fall-back by its reason.

Tests that need NIXL are skipped without it. ``make peers`` runs them in an environment of their own.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from in_process import MB, TOKEN, Bytes, Events, committed, join, part_of, read_back, restore, several, until
from neighbours import Nursery, lost_is_read_back
from tests.descriptors import new_descriptors, new_threads, open_descriptors

from relight.errors import CorruptCheckpoint, StoreUnavailable
from relight.observe import subscribe
from relight.peers import Remote, rdma
from relight.peers.messages import Data, Inventory, ReadRequest, StatusRequest
from relight.peers.wire import call
from relight.ranks.group import SINGLE_RANK
from relight.restore.memory_sources import PEERS, MemorySources
from relight.restore.reader import RestoreReader

needs_nixl = pytest.mark.skipif(rdma.installed() is None, reason=f"NIXL is not installed: {rdma.INSTALL}")


@pytest.fixture
def emitted() -> Iterator[list[tuple[str, dict[str, Any]]]]:
    """Return the peers' events of this process."""
    events: list[tuple[str, dict[str, Any]]] = []
    undo = subscribe(lambda event: events.append((event.name, dict(event.fields))))
    yield events
    undo()


def moved(events: Any, action: str) -> dict[str, int]:
    """Return the bytes by plane."""
    result: dict[str, int] = {}
    for name, fields in events:
        if name == "peers.moved" and fields["action"] == action:
            result[fields["plane"]] = result.get(fields["plane"], 0) + fields["bytes"]
    return result


def reasons(events: Any) -> list[str]:
    """Return why TCP was used."""
    return [str(fields["reason"]) for name, fields in events if name == "peers.fallback"]


def remote_of(peers: Any, plane: str = "rdma", timeout_s: float = 20.0) -> Any:
    """Return a reader with its plane. It is closed at the end."""
    remote = Remote([peer.address for peer in peers], TOKEN, timeout_s, plane=plane)
    assert remote.wait_for_plane(60)
    return contextlib.closing(remote)


def fake_nixl(monkeypatch: pytest.MonkeyPatch, folder: Path, version: str, api: str) -> None:
    """Install a package in place of NIXL, for this process and those that it starts."""
    info = folder / f"nixl_cu13-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: nixl-cu13\nVersion: {version}\n")
    (folder / "nixl_cu13").mkdir()
    (folder / "nixl_cu13" / "__init__.py").write_text("")
    (folder / "nixl_cu13" / "_api.py").write_text(api)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]))


def falls_back(
    emitted: Any, reason: str, text: str, plane: str = "rdma", tls: bool = False, reader: str | None = None
) -> None:
    """Check that agents and a reader use TCP, and report the reason. ``reader``: the reader's, empty for none."""
    events: Events = []
    with several(2, events, tls, plane) as peers:
        join(peers, 1, 1)
        part, data = part_of("c1", 1, 0, MB)
        peers[0].offer(part)
        assert peers[0].wait(30)
        with contextlib.closing(Remote([peer.address for peer in peers], TOKEN, 20.0, tls=tls, plane=plane)) as remote:
            read_back(remote, part, data)
    assert reasons(events) in ([reason], 2 * [reason])
    assert reasons(emitted) == ([reason] if reader is None else [reader] if reader else [])
    assert all(text in str(fields["why"]) for name, fields in events + emitted if name == "peers.fallback")
    assert list(moved(events, "sent")) == list(moved(emitted, "read")) == ["tcp"]


def test_without_the_package_tcp_is_used(emitted: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """``plane="rdma"`` without NIXL: all bytes go over TCP, and both ends name the package to install."""
    monkeypatch.setattr(rdma, "PACKAGES", ())
    falls_back(emitted, "package", rdma.INSTALL)


def test_an_older_version_is_not_used(emitted: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A NIXL older than the oldest supported one is not even imported."""
    fake_nixl(monkeypatch, tmp_path, "0.9.1", "raise AssertionError")
    falls_back(emitted, "version", "nixl 0.9.1 is older than 1.5", reader="peer")


def test_a_library_that_cannot_be_loaded_is_reported(
    emitted: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """If NIXL's library lacks another one, the event has the loader's sentence. ``auto`` reports it, too."""
    text = "libcuda.so.1: cannot open shared object file"
    fake_nixl(monkeypatch, tmp_path, "1.5.1", f"raise ImportError({text!r})")
    falls_back(emitted, "load", text, reader="peer")
    emitted.clear()
    monkeypatch.setattr(rdma, "devices", lambda: ["mlx5_0"])
    falls_back(emitted, "load", text, "auto", reader="")


def test_tls_turns_rdma_off(emitted: Any) -> None:
    """With TLS, RDMA is off, because it is not encrypted: the event has the reason, and no agent describes its memory."""
    falls_back(emitted, "tls", "TLS", tls=True)
    with several(1, tls=True, plane="rdma") as (peer,):
        wire = call(peer.address, TOKEN, 10.0, tls=True)
        wire.send(StatusRequest())
        answer = wire.receive()
        wire.close()
    assert isinstance(answer, Inventory) and answer.plane == "" and "TLS" in answer.without


def test_auto_without_a_device_is_silent(emitted: Any, tmp_path: Path) -> None:
    """``auto`` uses TCP on a machine without an RDMA device, and no event is emitted. The devices are the kernel's."""
    for device, state in (("mlx5_1", "4: ACTIVE"), ("mlx5_0", "4: ACTIVE"), ("mlx5_2", "1: DOWN")):
        port = tmp_path / device / "ports" / "1"
        port.mkdir(parents=True)
        (port / "state").write_text(state + "\n")
    assert rdma.devices(tmp_path) == ["mlx5_0", "mlx5_1"] and rdma.devices(tmp_path / "none") == []
    without = rdma.without_plane("auto", False)
    if without is None:
        pytest.skip("this machine has an RDMA device and NIXL")
    assert without.reason == ("package" if rdma.devices() else "device")
    events: Events = []
    with several(2, events, plane="auto") as peers:
        join(peers, 1, 1)
        part, data = part_of("c1", 1, 0, MB)
        peers[0].offer(part)
        assert peers[0].wait(30)
        with remote_of(peers, "auto") as remote:
            read_back(remote, part, data)
    assert reasons(events) == reasons(emitted) == []


@needs_nixl
def test_pushes_reads_and_rebuilds_use_rdma(emitted: Any) -> None:
    """Every byte that is sent, read and rebuilt is read from memory, and is right. Memory is registered once, over several saves."""
    events: Events = []
    with several(4, events, plane="rdma") as peers:
        join(peers, 2, 2)
        kept = [part_of("c0", 0, rank, 9 * MB + 777 * rank)[0] for rank in range(4)]
        for seq in (1, 2, 3):
            for peer, part in zip(peers, kept):
                peer.offer(part._replace(id=f"c{seq}", seq=seq))
            assert all(peer.wait(60) for peer in peers)
        parts = [part._replace(id="c3", seq=3) for part in kept]
        size = sum(part.length for part in parts)
        assert moved(events, "sent") == {"rdma": 3 * 2 * size}
        assert [peer._plane.made.registrations for peer in peers if peer._plane.made] == [1] * 4
        with remote_of(peers) as remote:
            for part in parts:
                read_back(remote, part, bytes(part.memory.view))
        for peer in peers[:2]:
            peer.close()
        with remote_of(peers) as remote:
            for part in parts:
                read_back(remote, part, bytes(part.memory.view))
        assert set(moved(emitted, "read")) == {"rdma"} and moved(emitted, "read")["rdma"] > 2 * size
        assert reasons(events) == reasons(emitted) == []


@needs_nixl
@pytest.mark.parametrize("transports", ["tcp", "tcp,sm,self"])
def test_agents_of_other_processes(transports: str, emitted: Any) -> None:
    """Agents in processes of their own, with each of UCX's transports that need no device: any two of five may be killed."""
    with Nursery({"UCX_TLS": transports}) as nursery:
        sizes = [[3 * MB + 1000 * rank] for rank in range(4)] + [[0, 2 * MB]]
        with contextlib.closing(nursery.town(sizes, 3, 2, plane="rdma")) as town:
            town.protect("c1", 1)
            sent = [text for events in town.all("events") for name, text in events if name == "peers.moved"]
            assert len(sent) == 5 and all("by RDMA" in text for text in sent)
            lost_is_read_back(town, "c1", (0, 4))
    assert set(moved(emitted, "read")) == {"rdma"} and reasons(emitted) == []


@needs_nixl
def test_agents_of_different_versions_use_tcp(emitted: Any) -> None:
    """An agent with another NIXL, and one without, get their bytes over TCP, each with its reason; others by RDMA."""
    events: Events = []
    with several(3, events, plane="rdma") as peers, several(1, events) as (plain,):
        other = peers[1]._plane.get()
        assert other is not None
        other.name = "nixl 9.0"
        everyone = [*peers, plain]
        join(everyone, 1, 3)
        part, data = part_of("c1", 1, 0, 3 * MB)
        peers[0].offer(part)
        assert peers[0].wait(30)
        assert sorted(reasons(events)) == ["peer", "version"]
        assert moved(events, "sent") == {"rdma": part.length, "tcp": 2 * part.length}
        offered = [(peer, *part_of("c2", 2, rank, MB)) for rank, peer in enumerate(everyone)]
        for peer, mine, _ in offered:
            peer._parts.add(mine)
        with remote_of(everyone) as remote:
            for _, mine, content in offered:
                read_back(remote, mine, content)
    assert sorted(reasons(emitted)) == ["peer", "version"]
    assert moved(emitted, "read") == {"rdma": sum(2 * [sum(offered[0][1].sizes)]), "tcp": 2 * sum(offered[0][1].sizes)}


def shift_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plant a fault: each transfer reads 64 bytes after the right ones, as with memory that was mapped again."""
    begin = rdma.RdmaPlane.begin
    monkeypatch.setattr(rdma.RdmaPlane, "begin", lambda self, how, where, size: begin(self, how, where + 64, size))


@needs_nixl
def test_wrong_bytes_are_not_added_to_parity(emitted: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """If direct reads return wrong bytes, the holder's checksums detect it, and the segment is sent over TCP."""
    events: Events = []
    with several(3, events, plane="rdma") as peers:
        join(peers, 2, 1)
        parts = [part_of("c1", 1, rank, 5 * MB) for rank in range(3)]
        shift_reads(monkeypatch)
        for peer, (part, _) in zip(peers, parts):
            peer.offer(part)
        assert all(peer.wait(60) for peer in peers)
        monkeypatch.undo()
        assert set(reasons(events)) == {"failed"} and set(moved(events, "sent")) == {"tcp"}
        assert any("wrong" in str(fields.get("why")) for _, fields in events)
        peers[0].close()
        with remote_of(peers) as remote:
            read_back(remote, *parts[0])
    assert set(moved(emitted, "read")) == {"rdma"}


@needs_nixl
@pytest.mark.parametrize("lost", [False, True], ids=["read", "rebuilt"])
def test_a_restore_detects_wrong_bytes_and_uses_tcp(
    emitted: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, lost: bool
) -> None:
    """If direct reads return wrong bytes, no tensor gets them: the restore reads the same part from peers over TCP."""
    opened, contents, part = committed(tmp_path)
    with several(3, plane="rdma") as peers:
        join(peers, 2, 1)
        others = [part_of(part.id, 1, rank, 3 * MB)[0] for rank in (1, 2)]
        for peer, offered in zip(peers, [part, *others]):
            peer.offer(offered)
        assert all(peer.wait(30) for peer in peers)
        if lost:
            peers[0].close()
        shift_reads(monkeypatch)
        rooms = [bytearray(tensor.length) for tensor in opened.parts[0].tensors]
        with remote_of(peers) as remote:
            near = MemorySources(opened.store, "run", lambda: remote)
            sinks = {index: Bytes(room) for index, room in enumerate(rooms)}
            reading = RestoreReader(opened, [sinks], near, SINGLE_RANK)
            reading.from_memory()
            near.close()
    assert reading.source == PEERS and not reading._sinks
    assert {tensor.name: bytes(room) for tensor, room in zip(opened.parts[0].tensors, rooms)} == contents
    assert set(reasons(emitted)) == {"failed"} and set(moved(emitted, "read")) == {"rdma", "tcp"}
    assert [fields["kind"] for name, fields in emitted if name == "restore.skipped"] == ["corrupt"]


@needs_nixl
def test_wrong_bytes_in_the_memory_itself_stay_an_error(tmp_path: Path) -> None:
    """If a peer's memory is damaged, neither plane returns a wrong tensor."""
    opened, _, part = committed(tmp_path)
    part.memory.view[part.starts[0] + part.sizes[0] // 2] ^= 1
    with several(1, plane="rdma") as (peer,):
        peer.offer(part)
        with remote_of([peer]) as remote:
            for _ in range(2):
                with pytest.raises(CorruptCheckpoint):
                    restore(opened, part, remote)
                remote.leave_rdma("a test")


@needs_nixl
def test_a_slot_that_is_filled_again_is_not_read() -> None:
    """If the next save comes while bytes are read directly, the read fails, as over TCP."""
    present = [True]
    with several(1, plane="rdma") as (peer,):
        part, data = part_of("c1", 1, 0, 2 * MB, lambda: present[0])
        peer.offer(part)
        with remote_of([peer]) as remote:
            reader = remote.reader("c1", 0, 0)
            room = memoryview(bytearray(reader.size))
            reader.read_into(0, room)
            assert room == data[part.starts[0] :][: reader.size]
            present[0] = False
            with pytest.raises(StoreUnavailable):
                reader.read_into(0, room)


@needs_nixl
def test_a_slot_that_is_filled_again_is_void_at_its_holders(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the next save comes while holders read a segment directly, they drop it, without a fall-back."""
    events: Events = []
    begin, begun, present = rdma.RdmaPlane.begin, [0], [True]

    def counted(self: rdma.RdmaPlane, description: bytes, address: int, length: int) -> rdma.DirectRead:
        begun[0] += 1
        if begun[0] == 20:
            present[0] = False
            part.memory.view[:] = bytes(part.memory.size)
        return begin(self, description, address, length)

    monkeypatch.setattr(rdma.RdmaPlane, "begin", counted)
    with several(2, events, plane="rdma") as peers:
        part, _ = part_of("c1", 1, 0, 100 * MB, lambda: present[0])
        join(peers, 1, 1)
        peers[0].offer(part)
        assert peers[0].wait(30)
        assert peers[1]._holder.inventory() == [] and peers[1].held_bytes == 0
    assert begun[0] >= 20 and list(moved(events, "sent")) == ["rdma"]
    assert [name for name, _ in events if name != "peers.moved"] == ["peers.failed"]


@needs_nixl
def test_memory_that_was_released_is_read_elsewhere(emitted: Any) -> None:
    """If an agent releases memory that a reader has located, the reader gets an error or a refusal, and no wrong byte."""
    with several(2, plane="rdma") as peers:
        for peer in peers:
            part, data = part_of("c1", 1, 0, 2 * MB)
            peer.offer(part)
        with remote_of(peers) as remote:
            read_back(remote, part, data)
            first = peers[0]._parts.remove("c1", 0)
            assert first is not None
            first.memory.close()
            del first
            peers[0]._sender.withdraw("c1", 0)
            read_back(remote, part, data)


@needs_nixl
@pytest.mark.parametrize("transports", ["tcp", "tcp,sm,self"])
def test_a_stopped_agent_costs_bounded_time(transports: str) -> None:
    """An agent that is stopped during reads is left within the limits of both planes, and another one has the bytes."""
    with Nursery({"UCX_TLS": transports}) as nursery:
        with contextlib.closing(nursery.town([[24 * MB]] * 3, 2, 1, plane="rdma")) as town:
            town.protect("c1", 1)
            town.timeout_s = 2.0
            with contextlib.closing(town.remote()) as remote:
                reader = remote.reader("c1", 0, 0)
                assert reader is not None
                first, second = bytearray(reader.size), bytearray(reader.size)
                reader.read_into(0, memoryview(first))
                os.kill(town.agents[0].pid, signal.SIGSTOP)
                began = time.monotonic()
                reader.read_into(0, memoryview(second))
                assert time.monotonic() - began < 60
                assert first == second
            os.kill(town.agents[0].pid, signal.SIGCONT)


@needs_nixl
def test_a_restore_does_not_wait_for_its_plane(emitted: Any) -> None:
    """Until the plane is made, TCP is used. A reader that is closed before leaves no process."""
    with several(1, plane="rdma") as (peer,):
        part, data = part_of("c1", 1, 0, MB)
        peer.offer(part)
        peer._plane.get()
        before = set(threading.enumerate())
        began = time.monotonic()
        with contextlib.closing(Remote([peer.address], TOKEN, 20.0, plane="rdma")) as remote:
            if remote.wait_for_plane(0):
                pytest.skip("the plane was made at once")
            read_back(remote, part, data)
        spent = time.monotonic() - began
        assert remote.wait_for_plane(60) and spent < 30
        assert not new_threads(before, "relight-peers-", 10) and remote._direct._choice.made is None
    assert reasons(emitted) == [] and list(moved(emitted, "read")) == ["tcp"]


@needs_nixl
def test_a_reader_may_pause(emitted: Any) -> None:
    """The plane of an agent sleeps after some seconds. A reader that continues later wakes it, also over a transport that needs it."""
    with Nursery({"UCX_TLS": "tcp"}) as nursery:
        with contextlib.closing(nursery.town([[3 * MB]] * 2, 1, 1, plane="rdma")) as town:
            town.protect("c1", 1)
            with contextlib.closing(town.remote()) as remote:
                reader = remote.reader("c1", 0, 0)
                for _ in range(2):
                    began = time.monotonic()
                    reader.read_into(0, memoryview(bytearray(reader.size)))
                    assert time.monotonic() - began < 10
                    time.sleep(rdma.ATTEND_S + 1)
    assert reasons(emitted) == [] and list(moved(emitted, "read")) == ["rdma"]


@needs_nixl
def test_a_long_read_of_a_holder_is_attended(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plane makes progress as long as its process waits for others that read its memory."""
    monkeypatch.setenv("UCX_TLS", "tcp")
    plane, reader = rdma.RdmaPlane(), rdma.RdmaPlane()
    part, data = part_of("c1", 1, 0, MB)
    address, description = plane.share(part.memory)

    def read() -> bytes:
        ends = time.monotonic() + 3
        return b"".join(map(bytes, reader.pieces(description, address, part.memory.size, ends, lambda: True)))

    with plane.attending():
        plane.attend()
        time.sleep(rdma.ATTEND_S + 1)
        assert read() == data
    time.sleep(rdma.ATTEND_S + 1)
    with pytest.raises(rdma.PlaneFailed, match="in time"):
        read()
    plane.close()
    reader.close()


@needs_nixl
def test_many_threads_read_at_once() -> None:
    """Eight threads read different ranges of parts and of parity through one plane."""
    with several(3, plane="rdma") as peers:
        join(peers, 2, 1)
        parts = [part_of("c1", 1, rank, 20 * MB) for rank in range(3)]
        for peer, (part, _) in zip(peers, parts):
            peer.offer(part)
        assert all(peer.wait(60) for peer in peers)
        peers[0].close()
        failures: list[BaseException] = []

        def read(number: int) -> None:
            try:
                for _ in range(3):
                    read_back(remote, *parts[number % 3])
            except BaseException as error:
                failures.append(error)

        with remote_of(peers) as remote:
            threads = [threading.Thread(target=read, args=(number,)) for number in range(8)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(120)
    assert not failures


def cpu_s(pid: int) -> float:
    """Return the processor seconds of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@needs_nixl
def test_an_idle_plane_takes_no_processor_time() -> None:
    """NIXL's own progress thread takes a whole processor. A plane that no process reads from takes none."""
    with several(1, plane="rdma") as (peer,):
        part, data = part_of("c1", 1, 0, MB)
        peer.offer(part)
        with remote_of([peer]) as remote:
            read_back(remote, part, data)
        pid = peer._plane.made._process.pid
        before = cpu_s(pid)
        time.sleep(2.0)
        assert cpu_s(pid) - before < 1.0
        time.sleep(rdma.ATTEND_S - 1.5)
        before = cpu_s(pid)
        time.sleep(2.0)
        assert cpu_s(pid) - before < 0.05


@needs_nixl
def test_nothing_is_left_of_a_closed_plane() -> None:
    """Planes that were used leave no process, thread or descriptor."""
    part, data = part_of("c1", 1, 0, MB)
    rdma.RdmaPlane().close()
    descriptors, threads = open_descriptors(), set(threading.enumerate())
    for _ in range(3):
        plane, reader = rdma.RdmaPlane(), rdma.RdmaPlane()
        address, description = plane.share(part.memory)
        pieces = reader.pieces(description, address, part.memory.size, time.monotonic() + 10, lambda: True)
        assert b"".join(map(bytes, pieces)) == data
        plane.close()
        reader.close()
        assert plane._process.returncode is not None and reader._process.returncode is not None
        del plane, reader, pieces
    gc.collect()
    assert not new_descriptors(descriptors) and not new_threads(threads, "relight-peers", 10)


@needs_nixl
def test_memory_is_given_back_when_it_is_released() -> None:
    """Shared memory that its owner releases is unmapped in the plane's process, too."""
    plane = rdma.RdmaPlane()
    part, _ = part_of("c1", 1, 0, MB)
    plane.share(part.memory)

    def mapped() -> int:
        return Path(f"/proc/{plane._process.pid}/maps").read_text().count("memfd:relight (")

    assert mapped() == 1
    part.memory.close()
    del part
    assert until(lambda: mapped() == 0)
    plane.close()


@needs_nixl
def test_a_plane_that_ends_is_started_again(emitted: Any) -> None:
    """If UCX ends the plane's process, agent and reader live: the bytes come over TCP, with the reason, and the next ones by RDMA."""
    events: Events = []
    with several(2, events, plane="rdma") as peers:
        join(peers, 1, 1)
        for seq in (1, 2, 3):
            part, data = part_of(f"c{seq}", seq, 0, 3 * MB)
            if seq == 2:
                for peer in peers:
                    os.kill(peer._plane.made._process.pid, signal.SIGABRT)
                    peer._plane.made._process.wait(30)
            peers[0].offer(part)
            assert peers[0].wait(60)
            with remote_of(peers) as remote:
                read_back(remote, part, data)
                if seq == 3:
                    os.kill(remote._direct._choice.made._process.pid, signal.SIGKILL)
                    read_back(remote, part, data)
        assert moved(events, "sent")["rdma"] >= 2 * part.length
    assert "failed" in reasons(events) and set(reasons(events) + reasons(emitted)) <= {"failed", "peer"}
    assert any("has ended" in str(fields.get("why")) for _, fields in events)


@needs_nixl
def test_a_plane_that_ends_again_and_again_is_not_used() -> None:
    """After some ends of its process the plane stays off, with the reason."""
    reported: list[tuple[str, str]] = []
    choice = rdma.PlaneChoice("rdma", False, lambda reason, why: reported.append((reason, why)))
    for _ in range(rdma.STARTS_MAX):
        plane = choice.get()
        assert plane is not None and plane.ended == ""
        plane._process.kill()
        assert until(lambda plane=plane: plane.ended)
    assert choice.get() is None and f"{rdma.STARTS_MAX} times" in choice.why
    assert [reason for reason, _ in reported] == ["failed"] * rdma.STARTS_MAX
    choice.close()


@needs_nixl
def test_an_agent_changes_its_plane() -> None:
    """An agent that stays for the next attempt uses the plane that this one wants, and turns it off for TLS."""
    with several(1, plane="tcp") as (peer,):
        part, data = part_of("c1", 1, 0, MB)
        peer.offer(part)
        for tls, plane, made in (
            (False, "rdma", True),
            (True, "rdma", False),
            (False, "rdma", True),
            (False, "tcp", False),
        ):
            peer.use(tls, plane)
            with contextlib.closing(Remote([peer.address], TOKEN, 20.0, tls=tls, plane=plane)) as remote:
                read_back(remote, part, data)
            assert (peer._plane.made is not None) == made


@needs_nixl
def test_a_caller_that_sends_invalid_descriptions_is_answered() -> None:
    """Invalid addresses and descriptions fail as transfers, and the plane continues to work."""
    plane, reader, other = rdma.RdmaPlane(), rdma.RdmaPlane(), rdma.RdmaPlane()
    part, data = part_of("c1", 1, 0, MB)
    address, description = plane.share(part.memory)
    size = part.memory.size

    def read(by: rdma.RdmaPlane, description: bytes, where: int, length: int) -> bytes:
        return b"".join(map(bytes, by.pieces(description, where, length, time.monotonic() + 10, lambda: True)))

    for bad, where in ((b"", address), (b"x" * 300, address), (description, 4096), (description, address + size)):
        with pytest.raises(rdma.PlaneFailed):
            read(reader, bad, where, 4096)
    assert read(reader, description, address, size) == data
    with pytest.raises(rdma.PlaneFailed):
        read(other, description[:-5], address, 4096)
    for each in (reader, plane, other):
        each.close()
    with pytest.raises(rdma.PlaneFailed):
        read(reader, description, address, 4096)


@needs_nixl
def test_a_plane_with_too_many_stuck_transfers_is_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Transfers that do not end keep their windows. After some of them the plane is made again, with the reason."""
    monkeypatch.setattr(rdma, "STUCK_MAX", 2)
    reported: list[tuple[str, str]] = []
    choice = rdma.PlaneChoice("rdma", False, lambda reason, why: reported.append((reason, why)))
    plane, other = choice.get(), rdma.RdmaPlane()
    assert plane is not None
    part, _ = part_of("c1", 1, 0, MB)
    address, description = other.share(part.memory)
    for _ in range(2):
        read = plane.begin(description, address, 4096)
        plane.end(read._number, read._window, stuck=True)
    again = choice.get()
    assert again is not None and again is not plane and plane.ended
    assert reported == [("failed", "2 transfers did not end")]
    other.close()
    choice.close()


SCRIPT = """
import os, sys
from relight.peers import rdma
def caught():
    return next(line for line in open("/proc/self/status") if line.startswith("SigCgt"))
env, signals = dict(os.environ), caught()
plane = rdma.RdmaPlane()
assert dict(os.environ) == env and caught() == signals
maps = open("/proc/self/maps").read()
assert "libucp" not in maps and "nixl" not in maps and "nixl_cu12" not in sys.modules and "torch" not in sys.modules
assert "libucp" in open(f"/proc/{plane._process.pid}/maps").read()
assert "torch" not in open(f"/proc/{plane._process.pid}/maps").read()
plane.close()
"""


@needs_nixl
def test_loading_leaves_the_process_unchanged() -> None:
    """NIXL and UCX are loaded in another process, without torch. Nothing is printed."""
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@needs_nixl
def test_a_read_of_no_bytes_checks_that_they_are_there() -> None:
    """The check after a direct read is a read of no bytes, which both kinds of sources answer."""
    present = [True]
    with several(2, plane="rdma") as peers:
        join(peers, 1, 1)
        part, _ = part_of("c1", 1, 0, MB, lambda: present[0])
        peers[0].offer(part)
        assert peers[0].wait(30) and until(lambda: peers[1]._holder.inventory())
        (piece,) = peers[1]._holder.inventory()
        wire = call(peers[1].address, TOKEN, 10.0)
        wire.send(ReadRequest("c1", -1, 0, 0, piece.ring, piece.lane, piece.stripe, piece.row))
        assert wire.receive() == Data(0)
        wire.close()
