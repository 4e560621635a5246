"""Reading once on each node: one rank reads what several ranks need.

Every rank gets identical bytes, also if a rank dies, lags or finds damage.
"""

from __future__ import annotations

import contextlib
import os
import random
import secrets
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from tests.descriptors import new_descriptors, new_threads, open_descriptors

from relight.catalog import Run, candidates
from relight.comm import ThreadGroup, local_sockets, this_node
from relight.comm.local_sockets import LocalDirectory, name_of
from relight.comm.new_threads import ThreadTasks
from relight.comm.proof import ProofFailed, prove_as_caller
from relight.commit import Attempt, SaveInfo, SaveRequest
from relight.errors import CorruptCheckpoint, RelightError
from relight.format import encode_tree
from relight.layout import Bytes, Item, RangeSink, cut_chunks
from relight.observe import thread_start
from relight.reader import node_shared_read, read_assignment
from relight.reader.chunk_reader import Wants, plan_wants
from relight.reader.node_shared_read import read_together
from relight.reader.opened import Opened
from relight.reader.read_assignment import assign_reads, decode_needs, encode_needs
from relight.store import LocalStore, Reader
from relight.testing.counting import CountingStore, but_packs

NODE = this_node()


class Some(RangeSink):
    """A sink for ``length`` bytes of a tensor, from ``skip`` on."""

    def __init__(self, skip: int, length: int) -> None:
        self.skip, self.length, self.held = skip, length, bytearray(length)

    def view(self) -> memoryview | None:
        return None

    def absorb(self, start: int, data: memoryview) -> None:
        self.held[start : start + len(data)] = data


class Made(NamedTuple):
    root: Path
    values: list[bytes]

    def opened(self) -> Opened:
        run = Run(CountingStore(LocalStore(self.root), apart=but_packs), "r")
        return run.open(candidates(run.history())[0])

    def damage(self) -> None:
        """Turn one bit, in the middle."""
        pack = next(self.root.glob("r/*/pack-*"))
        data = bytearray(pack.read_bytes())
        data[len(data) // 2] ^= 4
        pack.write_bytes(data)


def make(root: Path, values: list[bytes]) -> Made:
    items = [Item(f"t/{i}", "uint8", (len(value),), "param", Bytes(value)) for i, value in enumerate(values)]
    Attempt.begin(LocalStore(root), "r").save(SaveRequest(SaveInfo(step=1), items=items, tree=encode_tree({"t": []})))
    return Made(root, values)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of 4 kB, so that a little is much."""
    monkeypatch.setattr("relight.commit.plan.cut_chunks", partial(cut_chunks, chunk_bytes=4096, group_bytes=1024))
    monkeypatch.setattr(read_assignment, "LENT_RUN_BYTES", 8192)
    monkeypatch.setattr(node_shared_read, "LENT_BYTES", 1 << 16)
    monkeypatch.setattr(node_shared_read, "INLINE_BYTES", 0)


@pytest.fixture
def made(tmp_path: Path, small: None) -> Made:
    chance = random.Random(5)
    return make(tmp_path, [chance.randbytes(chance.randrange(1, 60_000)) for _ in range(30)])


def bytes_of(opened: Opened, wants: Sequence[Wants]) -> int:
    """Return the bytes of all chunks that any rank wants."""
    chunks = {
        (pack, want.chunk): want.length
        for wants_of_rank in wants
        for pack, wanted in wants_of_rank.items()
        for want in wanted
    }
    return sum(chunks.values())


def all_of(made: Made, opened: Opened) -> tuple[Wants, list[Some]]:
    sinks = [Some(0, len(value)) for value in made.values]
    return plan_wants(opened.parts[0], dict(enumerate(sinks))), sinks


def read_all(made: Made, world: ThreadGroup, node: bytes = NODE, **options: Any) -> tuple[int, list[bytes]]:
    """Read all tensors as one rank. Return the bytes that the rank read itself, and all contents."""
    opened = made.opened()
    wants, sinks = all_of(made, opened)
    report = read_together(world.gather, world.rank, node, opened, {0: wants}, **options)
    assert report == opened.store.bytes["read"]  # type: ignore[attr-defined]
    return report, [bytes(sink.held) for sink in sinks]


def outcomes(size: int, action: Callable[[ThreadGroup], Any]) -> list[Any]:
    """Return each rank's result, or the error that it raised."""

    def guarded(world: ThreadGroup) -> Any:
        try:
            return action(world)
        except RelightError as error:
            return error

    return ThreadGroup.run(size, guarded, timeout_s=20)


@pytest.mark.parametrize("seed", range(15))
def test_each_rank_gets_its_tensors_and_bytes_are_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Random tensors, chunks and runs, with ranks on one or two nodes that each need random ranges."""
    chance = random.Random(seed)
    chunk = 16 * chance.randrange(16, 1000)
    monkeypatch.setattr(
        "relight.commit.plan.cut_chunks", partial(cut_chunks, chunk_bytes=chunk, group_bytes=min(chunk, 700))
    )
    monkeypatch.setattr(read_assignment, "LENT_RUN_BYTES", chance.choice([1, 5000, 100_000]))
    monkeypatch.setattr(read_assignment, "LENT_CHUNK_BYTES_MAX", chance.choice([1 << 20, 1 << 20, 9000]))
    monkeypatch.setattr(node_shared_read, "LENT_BYTES", chance.choice([1, 100_000]))
    monkeypatch.setattr(node_shared_read, "INLINE_BYTES", 0)
    if chance.random() < 0.5:
        monkeypatch.setattr("relight.reader.chunk_reader.INLINE_BYTES", 0)
    made = make(
        tmp_path, [chance.randbytes(chance.choice([0, 3, 500, 20_000, 70_000])) for _ in range(chance.randrange(1, 40))]
    )
    size = chance.randrange(1, 6)
    nodes = [chance.choice([b"a", b"a", b"b"]) for _ in range(size)]
    spans = []
    for _ in range(size):
        share = chance.random()
        spans.append(
            {
                i: sorted(chance.choices(range(len(value) + 1), k=2))
                for i, value in enumerate(made.values)
                if chance.random() < share
            }
        )
        if chance.random() < 0.4:
            spans[-1] = {i: [0, len(value)] for i, value in enumerate(made.values)}

    def rank(world: ThreadGroup) -> tuple[int, Wants]:
        opened = made.opened()
        sinks = {i: Some(first, last - first) for i, (first, last) in spans[world.rank].items()}
        wants = plan_wants(opened.parts[0], sinks)
        report = read_together(world.gather, world.rank, nodes[world.rank], opened, {0: wants} if wants else {})
        for i, sink in sinks.items():
            assert sink.held == made.values[i][sink.skip : sink.skip + sink.length]
        assert report == opened.store.bytes["read"]  # type: ignore[attr-defined]
        return report, wants

    by_rank = ThreadGroup.run(size, rank, timeout_s=20)
    if read_assignment.LENT_CHUNK_BYTES_MAX > chunk:
        for node in (b"a", b"b"):
            reports = [result for result, name in zip(by_rank, nodes, strict=True) if name == node]
            assert sum(count for count, _ in reports) == bytes_of(made.opened(), [wants for _, wants in reports])


def test_common_chunks_are_read_in_equal_shares(made: Made) -> None:
    """Each of four ranks reads a quarter, to within a few runs of chunks."""
    results = outcomes(4, lambda world: read_all(made, world))
    total = sum(count for count, _ in results)
    assert all(contents == made.values for _, contents in results)
    assert all(abs(count - total / 4) <= 3 * read_assignment.LENT_RUN_BYTES for count, _ in results)


def test_other_nodes_share_nothing(made: Made) -> None:
    """On different nodes, each rank reads all bytes itself."""
    results = outcomes(2, lambda world: read_all(made, world, node=bytes([world.rank])))
    assert results[0][0] == results[1][0] == bytes_of(made.opened(), [all_of(made, made.opened())[0]])


def test_a_small_read_is_not_shared(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    """A small read is not shared, because reading it twice costs less than the exchange."""
    monkeypatch.setattr(node_shared_read, "INLINE_BYTES", 1 << 30)
    monkeypatch.setattr(node_shared_read, "_SharedRead", None)
    assert all(contents == made.values for _, contents in outcomes(2, lambda world: read_all(made, world)))


def test_damage_found_by_one_rank_is_an_error_on_all_ranks(made: Made) -> None:
    """The rank that reads the damage reports file and chunk. The other ranks report that rank."""
    made.damage()
    errors = outcomes(3, lambda world: read_all(made, world))
    assert all(isinstance(result, CorruptCheckpoint) for result in errors)
    messages = [str(result) for result in errors]
    assert all("is not what was committed" in message and "pack-" in message for message in messages)
    assert sum("rank " in message for message in messages) == 2


def test_a_rank_that_goes_silent_is_replaced(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a rank's socket closes during the exchange, the other ranks read its remaining chunks."""
    send, count = node_shared_read._Borrower.send, iter(range(1000))

    def fails(self: node_shared_read._Borrower, *frame: Any) -> None:
        if next(count) >= 8:
            self.shut()
            raise BrokenPipeError
        send(self, *frame)

    monkeypatch.setattr(node_shared_read._Borrower, "send", fails)
    assert all(contents == made.values for _, contents in outcomes(3, lambda world: read_all(made, world, stall_s=2.0)))


def test_a_second_descriptor_is_closed() -> None:
    """A rank lends one piece of memory: what comes with it is closed."""
    door = node_shared_read._Listener()
    mine = node_shared_read.SharedMapping(node_shared_read.allocate(4096), 4096, writable=True)
    link = node_shared_read._Borrower(door.address, door.token, 3, mine, 5.0)

    def begin() -> None:
        prove_as_caller(link.socket, door.token, door.address, 5.0)
        socket.send_fds(link.socket, [node_shared_read._HELLO.pack(3)], [mine.fd] * 2)

    before = open_descriptors()
    thread = threading.Thread(target=begin)
    thread.start()
    connection, _, memory = door.accept(5.0)
    thread.join(5)
    assert not new_descriptors(before, {connection.fileno(), memory.fd})
    for closable in (link.socket, connection, memory, mine, door):
        closable.close()


def test_a_fake_door_gets_no_memory() -> None:
    """A process that took the door's name without its token gets no descriptor: it has to prove the token first."""
    token, name = b"t" * 16, name_of("lending", secrets.token_hex(16))
    mine = node_shared_read.SharedMapping(node_shared_read.allocate(4096), 4096, writable=True)
    got: list[tuple[bytes, list[int]]] = []
    with LocalDirectory() as directory:
        listener = directory.listen(name, 1)

    def fake() -> None:
        connection, _ = listener.socket.accept()
        with connection, contextlib.suppress(OSError):
            got.append(socket.recv_fds(connection, 4096, 4)[:2])
            connection.sendall(bytes(64))
            got.append(socket.recv_fds(connection, 4096, 4)[:2])

    thread = threading.Thread(target=fake)
    thread.start()
    link = node_shared_read._Borrower(name, token, 1, mine, 5.0)
    with pytest.raises(ProofFailed):
        link.begin()
    link.socket.close()
    thread.join(5)
    listener.close()
    mine.close()
    assert all(not fds and token not in data for data, fds in got) and got


def test_a_rank_that_does_not_take_is_not_waited_for(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a rank is too slow to take chunks, their memory is used again, and the rank reads these chunks itself."""
    take, late = node_shared_read._ReadTable.take, threading.Event()

    def slow(self: node_shared_read._ReadTable, number: int, data: memoryview) -> None:
        if not late.is_set():
            late.set()
            time.sleep(0.6)
        take(self, number, data)

    monkeypatch.setattr(node_shared_read._ReadTable, "take", slow)
    started = time.monotonic()
    assert all(
        contents == made.values for _, contents in outcomes(2, lambda world: read_all(made, world, stall_s=0.15))
    )
    assert time.monotonic() - started < 10


def test_without_memory_nothing_is_lent(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank without memory reports it, and no rank waits for it."""
    monkeypatch.setattr(
        node_shared_read, "allocate", lambda *_: (_ for _ in ()).throw(node_shared_read.NoSpace("none left"))
    )
    started = time.monotonic()
    assert all(contents == made.values for _, contents in outcomes(2, lambda world: read_all(made, world)))
    assert time.monotonic() - started < 10


def test_a_stranger_at_the_door_is_sent_away(made: Made) -> None:
    """A process that does not know the token is sent away, and the memory is lent to none but a rank that proved itself, for reading."""
    door = node_shared_read._Listener()
    mine = node_shared_read.SharedMapping(node_shared_read.allocate(4096), 4096, writable=True)
    strangers = [node_shared_read._Borrower(door.address, token, 7, mine, 5.0) for token in (b"x" * 16, b"\0" * 16)]
    friend = node_shared_read._Borrower(door.address, door.token, 3, mine, 5.0)
    before = open_descriptors()

    def begin(link: node_shared_read._Borrower) -> None:
        with contextlib.suppress(OSError):
            link.begin()

    threads = [threading.Thread(target=begin, args=(link,)) for link in (*strangers, friend)]
    for thread in threads:
        thread.start()
    connection, rank, memory = door.accept(5.0)
    for thread in threads:
        thread.join(5)
    assert rank == 3 and memory.size == 4096
    assert not new_descriptors(before, {connection.fileno(), memory.fd})
    assert [link.gone for link in (*strangers, friend)] == [True, True, False]
    with pytest.raises(OSError):
        os.pwrite(memory.fd, b"x", 0)
    for link in (*strangers, friend):
        link.socket.close()
    connection.close()
    memory.close()
    mine.close()
    door.close()


class _Killed(LocalStore):
    """A store that kills its process at the fifth read."""

    def open(self, key: str) -> Reader:
        reader = super().open(key)
        if "pack-" in key:
            count, read = iter(range(1000)), reader.read_into

            def read_into(offset: int, into: memoryview) -> None:
                if next(count) == 4:
                    os.kill(os.getpid(), signal.SIGKILL)
                read(offset, into)

            reader.fetch, reader.read_into = lambda *_: None, read_into  # type: ignore[method-assign]
        return reader


def _exchange(connection: socket.socket, rank: int) -> Callable[[bytes, str], list[bytes]]:
    def gather(data: bytes, doing: str) -> list[bytes]:
        connection.sendall(struct.pack("<I", len(data)) + data)
        size = struct.unpack("<I", connection.recv(4, socket.MSG_WAITALL))[0]
        other = connection.recv(size, socket.MSG_WAITALL)
        return [data, other] if rank == 0 else [other, data]

    return gather


def test_a_killed_reader_is_replaced(made: Made) -> None:
    """If one of two processes is killed during the read, the other one still gets all bytes."""
    here, theirs = socket.socketpair()
    child = os.fork()
    if not child:
        try:
            run = Run(_Killed(made.root), "r")
            opened = run.open(candidates(run.history())[0])
            read_together(_exchange(theirs, 1), 1, NODE, opened, {0: all_of(made, opened)[0]})
        finally:
            os._exit(1)
    theirs.close()
    opened = made.opened()
    wants, sinks = all_of(made, opened)
    read_together(_exchange(here, 0), 0, NODE, opened, {0: wants})
    here.close()
    assert [bytes(sink.held) for sink in sinks] == made.values
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


def _node_with_sockets_in(folder: Path) -> bytes:
    """Return the node of a process that has its sockets in ``folder``, as a container with a separate ``/tmp`` has."""
    folder.mkdir()
    local_sockets._tops = lambda: [str(folder)]
    return this_node()


def test_containers_with_separate_tmp_do_not_wait_for_each_other(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two processes that share host name and network, but not the directory of their sockets, each read all bytes.

    Symptom: each waited for 60 s for a connection that the other could not make, at each restore.
    """
    monkeypatch.setattr(local_sockets, "_tops", lambda: [str(tmp_path)])
    here, theirs = socket.socketpair()
    began, child = time.monotonic(), os.fork()
    if not child:
        status = 1
        try:
            node, opened = _node_with_sockets_in(tmp_path / "b"), made.opened()
            wants, sinks = all_of(made, opened)
            read_together(_exchange(theirs, 1), 1, node, opened, {0: wants})
            status = int([bytes(sink.held) for sink in sinks] != made.values)
        finally:
            os._exit(status)
    theirs.close()
    node, opened = _node_with_sockets_in(tmp_path / "a"), made.opened()
    wants, sinks = all_of(made, opened)
    read_together(_exchange(here, 0), 0, node, opened, {0: wants})
    here.close()
    assert [bytes(sink.held) for sink in sinks] == made.values
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert time.monotonic() - began < 30


def test_a_process_without_a_directory_is_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes in one directory are on one node. A process that has none shares its node with no other process."""
    assert this_node() == NODE
    monkeypatch.setattr(local_sockets, "_tops", lambda: ["/proc"])
    assert len({this_node(), this_node(), NODE}) == 3


@pytest.mark.parametrize("first", [0, 1], ids=["no thread", "one thread"])
def test_threads_that_die_at_their_start_hold_no_read(made: Made, monkeypatch: pytest.MonkeyPatch, first: int) -> None:
    """If the threads for lending die before their first line, as for lack of memory, each rank still gets all bytes."""
    monkeypatch.setattr(thread_start, "START_S", 0.3)
    monkeypatch.setattr(thread_start, "_given_up", threading.Event())
    bootstrap, results = threading.Thread._bootstrap, list[Any]()  # type: ignore[attr-defined]

    def dies(self: threading.Thread) -> None:
        if not self.name.startswith("relight-lend_") or int(self.name.rpartition("_")[2]) < first:
            bootstrap(self)

    monkeypatch.setattr(threading.Thread, "_bootstrap", dies)
    read = threading.Thread(
        target=lambda: results.extend(outcomes(3, lambda world: read_all(made, world))), daemon=True
    )
    read.start()
    read.join(40)
    assert [contents for _, contents in results] == [made.values] * 3


@pytest.mark.parametrize("started", [0, 1, 3])
def test_a_rank_without_threads_is_not_waited_for(made: Made, monkeypatch: pytest.MonkeyPatch, started: int) -> None:
    """A rank that gets too few threads reads by itself, and the other ranks do not wait for what it would have lent."""
    start, refused = ThreadTasks.start, threading.local()

    def few(self: ThreadTasks, work: Callable[[], object]) -> bool:
        return not (getattr(refused, "is_here", False) and len(self._started) >= started) and start(self, work)

    def rank(world: ThreadGroup) -> tuple[int, list[bytes]]:
        refused.is_here = world.rank == 0
        return read_all(made, world)

    monkeypatch.setattr(ThreadTasks, "start", few)
    began = time.monotonic()
    assert [contents for _, contents in outcomes(3, rank)] == [made.values] * 3
    assert time.monotonic() - began < 20


def test_no_descriptor_and_no_thread_is_left(made: Made) -> None:
    """Three shared reads leave no new descriptor open and no new thread running."""
    outcomes(3, lambda world: read_all(made, world))
    threads, descriptors = threading.enumerate(), open_descriptors()
    for _ in range(3):
        outcomes(3, lambda world: read_all(made, world))
    assert not new_threads(threads, "relight-")
    assert not new_descriptors(descriptors)


@pytest.mark.parametrize("seed", range(50))
def test_runs_cover_each_chunk_that_several_ranks_need_once(seed: int) -> None:
    """Each chunk that two or more ranks need is in one run, owned by one of them. The ranks' loads are even."""
    chance = random.Random(seed)
    ranks = range(chance.randrange(2, 7))
    lengths = {(0, pack): [chance.randrange(1, 3 << 20) for _ in range(chance.randrange(1, 60))] for pack in range(3)}
    share = chance.choice([0.2, 0.7, 1.0])
    needs = {
        key: {rank: bytes(chance.random() < share for _ in size) for rank in ranks if chance.random() < 0.9}
        for key, size in lengths.items()
    }
    runs = assign_reads({key: needed for key, needed in needs.items() if needed}, lengths)
    seen: dict[tuple[Any, int], tuple[int, ...]] = {}
    loads = dict.fromkeys(ranks, 0)
    for run in runs:
        assert run.owner in run.takers and run.length == sum(lengths[run.pack][run.first : run.last])
        assert run.offset == sum(lengths[run.pack][: run.first])
        assert run.length <= read_assignment.LENT_RUN_BYTES or run.last - run.first == 1
        loads[run.owner] += run.length
        for chunk in range(run.first, run.last):
            assert seen.setdefault((run.pack, chunk), run.takers) is run.takers
    expected = {}
    for key, needed in needs.items():
        for chunk, length in enumerate(lengths[key]):
            takers = tuple(rank for rank in ranks if rank in needed and needed[rank][chunk])
            if len(takers) > 1:
                expected[key, chunk] = takers
            elif takers:
                loads[takers[0]] += length
    assert seen == expected
    if share == 1.0 and all(len(needed) == len(ranks) for needed in needs.values()):
        assert max(loads.values()) - min(loads.values()) <= read_assignment.LENT_RUN_BYTES


@pytest.mark.parametrize("count", [1, 7, 8, 9, 1000])
def test_encoded_needs_decode_to_the_same_chunks(count: int) -> None:
    """Any set of chunks survives encoding. Needs for too many chunks, and invalid bytes, are refused."""
    chance = random.Random(count)
    for chunks in ([], list(range(count)), sorted(chance.sample(range(count), count // 2))):
        encoded = encode_needs(chunks, count)
        assert list(decode_needs(encoded, count)) == [int(chunk in chunks) for chunk in range(count)]
        for wrong in (encode_needs([], count + 8), b"", b"no"):
            with pytest.raises(ValueError):
                decode_needs(wrong, count)
