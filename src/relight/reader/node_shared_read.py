"""Read shared chunks once per node: one rank reads and verifies each chunk that several ranks of the node need, and lends it to the others.

1. The ranks exchange which chunks each needs. Each computes the same assignment of chunks to readers (``read_assignment``).
2. The lender of a run of chunks reads it, verifies it, copies it into its own shared memory, and sends the borrowers its offset. They copy
   what they need from there and return the place, which is then used again. The memory is bounded.
3. A rank that finds damage sends the error to its borrowers, so that all raise the same error. If a lender is gone or late, a borrower
   reads the chunks itself: lending can never make a restore fail.

A socket for each pair carries a few bytes for each run. Its end shows a rank that the other rank is gone. The device reads into the
lender's private memory, because reading into the small pages of shared memory takes 1.5 times as long. The copy overlaps the next read.
"""

from __future__ import annotations

import contextlib
import os
import queue
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

import msgspec

from relight.arena import PAGE, SharedMapping, adopt, allocate, freeze, reading
from relight.comm.local_sockets import Listener, LocalDirectory, name_of, peer_of
from relight.comm.new_threads import ThreadTasks
from relight.comm.proof import prove_as_caller, prove_as_listener
from relight.errors import NoSpace, RelightError, error_of, known
from relight.layout.sources import copy_bytes
from relight.reader.chunk_reader import (
    INLINE_BYTES,
    ChunkRange,
    Progress,
    WantedChunk,
    Wants,
    deliver_chunk,
    read_runs,
    runs_of,
)
from relight.reader.opened import Opened
from relight.reader.read_assignment import LentRun, PackKey, assign_reads, decode_needs, encode_needs

LENT_BYTES = 16 << 20
"""Bytes of shared memory of all ranks of a node together, or two places per rank if that is more. Every restore allocates its
pages, so more memory costs time."""
STALL_S = 60.0
"""Seconds that a rank waits for a silent peer before it reads the chunks itself."""
_FRAME = struct.Struct("<BxxxIQ")
_LENT, _BACK, _FAILED = 1, 2, 3
_HELLO = struct.Struct("<I")
_FAILED_BYTES_MAX = 1 << 16

Gather = Callable[[bytes, str], list[bytes]]


def read_together(
    gather: Gather,
    rank: int,
    node: bytes,
    opened: Opened,
    wanted: Mapping[int, Wants],
    *,
    stall_s: float = STALL_S,
    progress: Progress | None = None,
) -> int:
    """Read ``wanted``, keyed by part. Return the number of bytes that this rank read from the store.

    All ranks call it (collective), each with the chunks that it wants of the same checkpoint. ``gather`` is an all-gather of bytes, ordered
    by rank. ``node`` is equal for ranks of one node. If a lender finds damage, its borrowers raise the same error. ``progress``: called in
    other threads with the bytes of each chunk that arrived.
    """
    packs = {(part, pack): wants for part, by_pack in wanted.items() for pack, wants in by_pack.items()}
    with contextlib.closing(_Listener()) as door:
        needs = [
            [*key, encode_needs((want.chunk for want in wants), len(opened.parts[key[0]].packs[key[1]].chunks))]
            for key, wants in packs.items()
        ]
        word = msgspec.msgpack.encode([node, door.address, door.token, needs])
        words = [msgspec.msgpack.decode(message) for message in gather(word, "exchanging what each rank reads")]
        mates = {number: message for number, message in enumerate(words) if message[0] == node}
        table = _ReadTable(
            rank, opened, packs, _assigned(opened, {number: message[3] for number, message in mates.items()}), progress
        )
        if not table.mine:
            return table.read(table.rest)
        doors = {number: (str(message[1]), bytes(message[2])) for number, message in mates.items()}
        with contextlib.closing(_SharedRead(rank, table, door, doors, stall_s)) as lending:
            return lending.read()


def _assigned(opened: Opened, needs: Mapping[int, Sequence[tuple[int, int, bytes]]]) -> list[LentRun]:
    """Return the runs of chunks that are lent on this node. Every rank of the node computes the same list."""
    lengths: dict[PackKey, list[int]] = {}
    by_pack: dict[PackKey, dict[int, bytes]] = {}
    if len(needs) > 1:
        for number, rank_needs in needs.items():
            for part, pack, bits in rank_needs:
                key = (part, pack)
                if key not in lengths:
                    lengths[key] = [length for length, _ in opened.parts[part].packs[pack].chunks]
                by_pack.setdefault(key, {})[number] = decode_needs(bits, len(lengths[key]))
    runs = assign_reads(by_pack, lengths)
    return runs if sum(run.length for run in runs) >= INLINE_BYTES else []


class _ReadTable:
    """Chunks that this rank wants: those in lent runs, and the rest, which no rank lends."""

    def __init__(
        self,
        rank: int,
        opened: Opened,
        packs: Mapping[PackKey, Sequence[WantedChunk]],
        runs: Sequence[LentRun],
        progress: Progress | None,
    ) -> None:
        self._opened, self._progress = opened, progress
        self.runs = runs
        """All runs that are lent on this node. The ranks name a run by its index here."""
        self.mine = [number for number, run in enumerate(runs) if rank in run.takers]
        """Indices of the runs that this rank needs."""
        lent = {
            (*runs[number].pack, chunk): number
            for number in self.mine
            for chunk in range(runs[number].first, runs[number].last)
        }
        self._wants: dict[int, list[WantedChunk]] = {number: [] for number in self.mine}
        rest: dict[PackKey, list[WantedChunk]] = {}
        for key, wants in packs.items():
            for want in wants:
                number = lent.get((*key, want.chunk))
                (self._wants[number] if number is not None else rest.setdefault(key, [])).append(want)
        self.rest = {key: runs_of(wants) for key, wants in rest.items()}

    def runs_of(self, numbers: Iterable[int]) -> dict[PackKey, list[ChunkRange]]:
        """Return the runs of these numbers as ranges to read, by pack."""
        ranges: dict[PackKey, list[ChunkRange]] = {}
        for number in numbers:
            run = self.runs[number]
            ranges.setdefault(run.pack, []).append(ChunkRange(run.offset, run.length, self._wants[number]))
        return ranges

    def read(
        self,
        runs: Mapping[PackKey, list[ChunkRange]],
        lend: Callable[[PackKey, ChunkRange, memoryview], None] | None = None,
    ) -> int:
        """Read the ranges from the store. Return the number of bytes."""
        total = 0
        for key in sorted(runs):
            part, pack = key
            give = None if lend is None else lambda run, data, key=key: lend(key, run, data)
            stored, ranges = self._opened.parts[part], {pack: runs[key]}
            total += read_runs(self._opened, stored, ranges, lend=give, progress=self._progress)
        return total

    def take(self, number: int, data: memoryview) -> None:
        """Copy a run's bytes to this rank's sinks."""
        run = self.runs[number]
        for want in self._wants[number]:
            deliver_chunk(data[want.offset - run.offset :][: want.length], want)
            if self._progress is not None:
                self._progress(want.length)


class _NothingToLend(Exception):
    """A lender could not allocate shared memory."""


class _Listener:
    """Listens for other ranks of the node: a socket in the user's private directory, and a token that both ends prove to know."""

    def __init__(self) -> None:
        self.token = secrets.token_bytes(16)
        self.address = name_of("lending", secrets.token_hex(16))
        self._listener: Listener | None = None
        self.socket: socket.socket | None = None
        with contextlib.suppress(OSError), LocalDirectory() as directory:
            # without one no rank connects, and each reads by itself
            self._listener = directory.listen(self.address, 1024)
            self.socket = self._listener.socket

    def accept(self, stall_s: float) -> tuple[socket.socket, int, SharedMapping]:
        """Return the next lender's connection, rank and memory.

        Raise ``OSError`` if this listener was closed or no lender connects in time, ``_NothingToLend`` if the lender has no memory.
        """
        ends = time.monotonic() + stall_s
        while True:
            if self.socket is None or (seconds_left := ends - time.monotonic()) <= 0:
                raise TimeoutError
            self.socket.settimeout(seconds_left)
            connection, _ = self.socket.accept()
            fds: list[int] = []
            try:
                _own_user(connection)
                prove_as_listener(connection, self.token, self.address, seconds_left)
                connection.settimeout(seconds_left)
                data, fds, _, _ = socket.recv_fds(connection, _HELLO.size, 1, socket.MSG_CMSG_CLOEXEC)
                if len(data) == _HELLO.size:
                    if not fds:
                        raise _NothingToLend
                    return connection, _HELLO.unpack(data)[0], adopt(fds.pop(0), writable=False)
            except _NothingToLend:
                connection.close()
                raise
            except (OSError, RelightError):  # not a rank of this job
                pass
            finally:
                for fd in fds:  # the kernel's alignment leaves room for one more than asked for
                    os.close(fd)
            connection.close()

    def close(self) -> None:
        """Accept no more connections."""
        if self.socket is not None and self._listener is not None:
            with contextlib.suppress(OSError):
                self.socket.shutdown(socket.SHUT_RDWR)
            self._listener.close()


def _own_user(connection: socket.socket) -> None:
    """Raise ``ConnectionError`` if the process at the other end belongs to another user."""
    if peer_of(connection)[1] != os.geteuid():
        raise ConnectionError("the peer belongs to another user")


class _Borrower:
    """Connection to a rank that borrows from this one."""

    def __init__(self, address: str, token: bytes, rank: int, memory: SharedMapping | None, stall_s: float) -> None:
        self.held: set[int] = set()
        """Places that were lent to it and that it has not returned."""
        self.gone = False
        self._sending = threading.Lock()
        self._proved = threading.Event()
        self._token, self._address, self._stall_s = token, address, stall_s
        self._beginning = threading.Lock()
        self._hello = _HELLO.pack(rank), memory
        with LocalDirectory() as directory:
            try:
                self.socket = directory.connect(address, stall_s)
            except ValueError as error:  # the other rank sent an invalid name
                raise ConnectionError(str(error)) from error

    def begin(self) -> None:
        """Prove to each other that both ends know the token, then send the memory, read-only. Once. Raise ``OSError``."""
        with self._beginning:
            if not self._proved.is_set():
                self._begin()

    def refuse(self) -> None:
        """Send that nothing is lent, unless the memory was sent. A borrower that only gets no proof waits for another."""
        with self._beginning, contextlib.suppress(OSError):
            if not self._proved.is_set():
                self._hello = (self._hello[0], None)
                self._begin()
        self.shut()

    def _begin(self) -> None:
        try:
            prove_as_caller(self.socket, self._token, self._address, self._stall_s)
        except OSError:  # the other end must not wait for a proof that does not come
            self.shut()
            raise
        hello, memory = self._hello
        fds = [] if memory is None else [reading(memory.fd)]
        try:
            self.socket.settimeout(self._stall_s)
            socket.send_fds(self.socket, [hello], fds)
        finally:
            for fd in fds:
                os.close(fd)
        self._proved.set()

    def send(self, kind: int, number: int, value: int, more: bytes = b"") -> None:
        """Send one frame, after waiting until the memory was sent."""
        if not self._proved.wait(self._stall_s) or self.gone:
            raise TimeoutError("the other rank did not prove itself")
        with self._sending:
            self.socket.sendall(_FRAME.pack(kind, number, value) + more)

    def shut(self) -> None:
        """Shut the socket down: no later message of the borrower is received."""
        self.gone = True
        self._proved.set()
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)


class _SharedRead:
    """One rank's side of lending: its own memory and its borrowers, and what it borrows itself."""

    def __init__(
        self, rank: int, table: _ReadTable, door: _Listener, doors: Mapping[int, tuple[str, bytes]], stall_s: float
    ) -> None:
        self._rank, self._table, self._door, self._stall_s = rank, table, door, stall_s
        self._own = [number for number in table.mine if table.runs[number].owner == rank]
        self._numbers = {(table.runs[number].pack, table.runs[number].offset): number for number in self._own}
        self._owners = {table.runs[number].owner for number in table.mine} - {rank}
        self._came = set(self._own)
        self._error: BaseException | None = None
        self._lock = threading.Lock()
        self._open: list[socket.socket] = []
        self._links: dict[int, _Borrower] = {}
        self._memory: SharedMapping | None = None
        self._size = max((table.runs[number].length for number in self._own), default=0)
        self._places: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._lent: dict[int, int] = {}
        if self._own:
            self._prepare(doors, max(2, min(len(self._own), LENT_BYTES // len(doors) // self._size)))
        self._tasks = ThreadTasks("relight-lend")

    def read(self) -> int:
        """Read, lend and borrow all chunks. Return the number of bytes that this rank read from the store."""
        tasks: list[Callable[[], None]] = [self._borrow for _ in self._owners]
        tasks += [partial(self._taken_back, rank, link) for rank, link in self._links.items()]
        if not all(map(self._tasks.start, tasks)):
            return self._alone()
        try:
            total = self._table.read(self._table.runs_of(self._own), self._lend) + self._table.read(self._table.rest)
            self._tasks.results()
            return total + self._table.read(
                self._table.runs_of(number for number in self._table.mine if number not in self._came)
            )
        except BaseException as error:
            self._fail(error)
            raise

    def _alone(self) -> int:
        """Read all that this rank needs from the store, as a thread was refused. The ranks that wait for it do the same."""
        self._door.close()  # first: otherwise two such ranks would wait for each other below
        for link in self._links.values():
            link.refuse()
        self._tasks.wait()
        missing = [number for number in self._table.mine if number in self._own or number not in self._came]
        return self._table.read(self._table.runs_of(missing)) + self._table.read(self._table.rest)

    def close(self) -> None:
        """Close all connections. A rank that still waits for this one sees that it is gone."""
        for link in self._links.values():
            link.shut()
        self._door.close()
        with self._lock:
            for connection in self._open:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
        self._tasks.wait()
        for link in self._links.values():
            link.socket.close()
        if self._memory is not None:
            self._memory.close()

    def _prepare(self, doors: Mapping[int, tuple[str, bytes]], places: int) -> None:
        """Allocate the memory to lend and connect to the borrowers. Without memory nothing is lent, and the greeting shows them that."""
        size = -(-places * self._size // PAGE) * PAGE
        with contextlib.suppress(NoSpace, OSError):
            self._memory = SharedMapping(allocate(size, "relight-lent"), size, writable=True)
            self._memory.populate()
            freeze(self._memory.fd)
        for place in range(places):
            self._places.put(place)
        for taker in sorted(
            {taker for number in self._own for taker in self._table.runs[number].takers} - {self._rank}
        ):
            with contextlib.suppress(OSError):  # this borrower then reads by itself
                self._links[taker] = _Borrower(*doors[taker], self._rank, self._memory, self._stall_s)

    def _fail(self, error: BaseException) -> None:
        """Remember the first error, and send it to the ranks that wait for this one."""
        with self._lock:
            if self._error is not None:
                return
            self._error = error
        failure = known(error)
        data = msgspec.json.encode([failure.kind, failure.what[:4096], failure.where[:4096]])
        for link in self._links.values():
            with contextlib.suppress(OSError):
                link.send(_FAILED, 0, len(data), data)

    # -- lending

    def _lend(self, key: PackKey, run: ChunkRange, data: memoryview) -> None:
        """Copy a verified run into shared memory, and send its borrowers the offset."""
        if self._error is not None:
            raise self._error
        number = self._numbers[key, run.offset]
        links = [
            link
            for taker in self._table.runs[number].takers
            if (link := self._links.get(taker)) is not None and not link.gone
        ]
        if self._memory is None or not links:
            return
        place = self._place()
        begin = place * self._size
        copy_bytes(data, self._memory.view[begin : begin + run.length])
        with self._lock:
            self._lent[place] = 1 + len(links)
            for link in links:
                link.held.add(place)
        for link in links:
            try:
                link.send(_LENT, number, begin)
            except OSError:
                self._drop(link)
        self._give_back(place)

    def _place(self) -> int:
        while True:
            try:
                return self._places.get(timeout=self._stall_s)
            except queue.Empty:  # a borrower does not return its places
                for link in self._links.values():
                    if link.held:
                        self._drop(link)

    def _drop(self, link: _Borrower) -> None:
        """Stop waiting for a borrower. Its socket is shut first: otherwise it could report later that it copied from a reused place."""
        link.shut()
        with self._lock:
            places, link.held = link.held, set()
        for place in places:
            self._give_back(place)

    def _give_back(self, place: int) -> None:
        with self._lock:
            self._lent[place] -= 1
            free = not self._lent[place]
        if free:
            self._places.put(place)

    def _taken_back(self, rank: int, link: _Borrower) -> None:
        """Receive the places that a borrower returns, until it has everything or is gone."""
        places_left = sum(rank in self._table.runs[number].takers for number in self._own)
        with contextlib.suppress(OSError):
            link.begin()
            while places_left:
                _, _, begin = _frame(link.socket)
                place = begin // self._size
                with self._lock:
                    is_held = place in link.held
                    link.held.discard(place)
                if is_held:
                    self._give_back(place)
                places_left -= 1
        self._drop(link)

    # -- borrowing

    def _borrow(self) -> None:
        """Borrow from the next lender that connects, until everything of it has arrived or it is gone."""
        try:
            connection, owner, memory = self._door.accept(self._stall_s)
        except (OSError, _NothingToLend):
            return
        with self._lock:
            self._open.append(connection)
        try:
            self._take_from(connection, owner, memory)
        except OSError:  # the missing chunks are read from the store
            return
        except BaseException as error:
            self._fail(error)
            raise
        finally:
            with self._lock:
                self._open.remove(connection)
            connection.close()
            memory.close()

    def _take_from(self, connection: socket.socket, owner: int, memory: SharedMapping) -> None:
        runs_left = {number for number in self._table.mine if self._table.runs[number].owner == owner}
        acknowledging = True
        while runs_left and self._error is None:
            kind, number, begin = _frame(connection)
            if kind == _FAILED:
                raise _decode_error(owner, _bytes(connection, min(begin, _FAILED_BYTES_MAX)))
            length = self._table.runs[number].length
            assert kind == _LENT and number in runs_left and begin + length <= memory.size, (kind, number, begin)
            if not acknowledging:
                continue
            self._table.take(number, memory.source[begin : begin + length])
            try:
                connection.sendall(_FRAME.pack(_BACK, number, begin))
            # the lender has dropped this rank and may have reused the place: only its error still matters
            except OSError:
                acknowledging = False
                continue
            self._came.add(number)
            runs_left.remove(number)


def _frame(connection: socket.socket) -> tuple[int, int, int]:
    """Return the next frame. Raise ``OSError`` at the end of the connection."""
    kind, number, value = _FRAME.unpack(_bytes(connection, _FRAME.size))
    return kind, number, value


def _bytes(connection: socket.socket, length: int) -> bytes:
    data = bytearray()
    while len(data) < length:
        more = connection.recv(length - len(data))
        if not more:
            raise ConnectionError("the other end is gone")
        data += more
    return bytes(data)


def _decode_error(rank: int, data: bytes) -> RelightError:
    kind, message, where = msgspec.json.decode(data)
    return error_of(kind)(f"rank {rank}: {message}", where=where)
