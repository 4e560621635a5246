"""Restore from peers: reads a checkpoint's parts from agents' memory over the network, and rebuilds lost parts from
parity."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TypeVar

from relight.comm.new_threads import ThreadPool
from relight.errors import CorruptCheckpoint, StoreUnavailable
from relight.observe import emit
from relight.peers.decoding import CodedSource, KnownPart, Shelves
from relight.peers.direct import DirectReads, NotThere
from relight.peers.galois import BLOCK, accumulate
from relight.peers.messages import PIECE_BYTES, Data, Inventory, PeerRefusal, ReadRequest, StatusRequest
from relight.peers.rdma import RDMA, TCP, DirectRead
from relight.peers.wire import Caller, Disconnected, PeerLost, call_with_retries, check_token, without_fingerprint
from relight.store.base import Reader
from relight.store.buffers import page_buffer
from relight.units import size_text

ASK_AT_ONCE = 64
IDLE_CALLS_MAX = 8
"""Connections to one agent that are kept for the next read."""
WINDOW_BYTES = PIECE_BYTES
"""Bytes that are decoded at a time. Each thread that reads has two buffers of this size."""
BREAKS_MAX = 2
"""Broken connections after which an agent is not used any more."""
AHEAD = 4
"""Requests that are sent on a connection before the first answer is read."""
T = TypeVar("T")


class Remote:
    """The parts that the agents at ``addresses`` have in memory. Agents that do not answer are left out, with an event.
    Any thread.

    ``timeout_s`` bounds every operation on a connection: connecting, and each answer plus its bytes at 1 MiB/s. ``tls``:
    leave out agents without a certificate. ``plane``: as in ``Peers``. Cost of construction: one round trip to each
    agent, all at the same time. Close it when done.
    """

    def __init__(
        self, addresses: Sequence[str], token: bytes, timeout_s: float, *, tls: bool = False, plane: str = TCP
    ) -> None:
        self._token, self._timeout_s, self._tls = check_token(token), timeout_s, tls
        self._lock = threading.Lock()
        self._idle: dict[str, list[Caller]] = {}
        self._rooms: list[tuple[memoryview, memoryview]] = []
        self._bad: frozenset[object] = frozenset()
        """Names of sources, and addresses of agents, that are not used again."""
        self._breaks: Counter[str] = Counter()
        self._closed = False
        inventories: dict[str, Inventory] = {}
        wanted = list(dict.fromkeys(addresses))
        if wanted:
            with ThreadPool(min(ASK_AT_ONCE, len(wanted)), "relight-peers-ask") as pool:
                for address, inventory in zip(wanted, pool.map(self._ask, wanted)):
                    if inventory is not None:
                        inventories[address] = inventory
        self.answered: tuple[str, ...] = tuple(inventories)
        """Addresses of the agents that answered."""
        self._shelves = Shelves(inventories)
        self._direct, self._tcp_bytes = DirectReads(plane, tls, timeout_s, inventories), 0

    def has(self, id: str, rank: int) -> str | None:
        """Return, as text, where the part of ``rank`` of checkpoint ``id`` can be read from; None if no agents can
        provide it."""
        for known in self._shelves.known(id, rank):
            source = self._how(id, rank, known)
            if source is not None:
                return source
        return None

    def reader(self, id: str, rank: int, pack: int) -> Reader | None:
        """Return a reader of pack number ``pack`` of that part; None if no agents can provide it.

        Its bytes are unverified.
        """
        for known in self._shelves.known(id, rank):
            if pack < len(known.starts) and self._how(id, rank, known) is not None:
                return _PeerPackReader(self, id, rank, known, pack)
        return None

    def wait_for_plane(self, timeout: float) -> bool:
        """Wait until this process's plane is made, if it makes one. Until then TCP is used. Return False if that takes longer."""
        return self._direct.wait(timeout)

    def leave_rdma(self, why: str) -> bool:
        """Read over TCP from now on. Return False if no byte was read by RDMA, so that another try would read the same."""
        return self._direct.leave(why)

    def close(self) -> None:
        """Close all connections. Readers cannot be used afterwards."""
        with self._lock:
            closed, self._closed = self._closed, True
            idle = [wire for wires in self._idle.values() for wire in wires]
            self._idle, self._rooms = {}, []
        for wire in idle:
            wire.close()
        self._direct.close()
        for plane, count in ((RDMA, self._direct.read_bytes), (TCP, self._tcp_bytes)):
            if count and not closed:
                text = f"{size_text(count)} read from peers by {plane.upper()}"
                emit("peers.moved", text, action="read", plane=plane, bytes=count)

    # -- what readers need

    def read(self, id: str, rank: int, known: KnownPart, offset: int, into: memoryview) -> None:
        """Fill ``into`` from ``offset`` of the blob: from an agent that has the part, else from parity.

        ``StoreUnavailable`` if both fail.
        """
        while into:
            try:
                whole = self._shelves.whole(id, rank, known, self._bad)
                if whole is not None:
                    self._copy(whole, offset, into)
                    return
                step = self._rebuild_some(id, rank, known, offset, into)
                offset, into = offset + step, into[step:]
            except _Failed as failed:
                self._exclude(failed)

    def _rebuild_some(self, id: str, rank: int, known: KnownPart, offset: int, into: memoryview) -> int:
        """Rebuild the first bytes of that range, up to a window or the end of their segment. Return how many."""
        for segment in self._shelves.segments(id, rank, known):
            if segment.offset <= offset < segment.offset + segment.length:
                begin = offset - segment.offset
                step = min(len(into), segment.length - begin, WINDOW_BYTES)
                for sources, _ in self._shelves.sums(id, rank, known, segment.number, self._bad):
                    self._sum(sources, begin, into[:step])
                    return step
        raise StoreUnavailable(
            f"the peers do not have the part of rank {rank} of checkpoint {id} any more",
            where=f"{len(self.answered)} peers",
            retryable=False,
        )

    def _exclude(self, failed: _Failed) -> None:
        """Exclude a source that was refused, or an agent after ``BREAKS_MAX`` broken connections, so that retries end."""
        address, bad = failed.source.address, failed.source.name if failed.refused else failed.source.address
        with self._lock:
            if self._closed:
                raise StoreUnavailable("the connections to the peers are closed") from failed
            self._breaks[address] += not failed.refused
            new = bad not in self._bad and (failed.refused or self._breaks[address] >= BREAKS_MAX)
            if new:
                self._bad = self._bad | {bad}
        if new:
            shown = without_fingerprint(address)
            text = f"the peer at {shown} failed while it was read from: {failed.why}"
            emit("peers.unreachable", text, address=shown, why=failed.why)

    def _copy(self, source: CodedSource, offset: int, into: memoryview) -> None:
        """Read a range of one source into ``into``, without another copy."""
        if offset + len(into) > source.length:
            raise CorruptCheckpoint(
                f"the part ends at byte {source.length}, and is truncated",
                where=without_fingerprint(source.address),
            )
        with self._calling([source]) as (wire,):
            if _of(source, lambda: self._direct.read(wire, source, offset, into)):
                _check_unchanged(wire, source)
            else:
                _pull(wire, source, offset, into)
                self._count(len(into))

    def _sum(self, sources: list[CodedSource], begin: int, into: memoryview) -> None:
        """Compute the sum of each source's range times its factor.

        All requests are sent before the first answer is read.
        """
        plain = all(source.factor == 1 for source in sources)
        first = begin if plain else begin // BLOCK * BLOCK
        size = begin + len(into) - first if plain else -(-(begin + len(into) - first) // BLOCK) * BLOCK
        with (
            self._two_rooms() as (total, room),
            self._calling(sources) as wires,
            contextlib.ExitStack() as releases,
        ):
            total, empty = total[:size], True
            lengths = [max(0, min(size, source.length - first)) for source in sources]
            reads: list[DirectRead | None] = []
            for wire, source, length in zip(wires, sources, lengths):
                read = _of(source, partial(self._direct.begin, wire, source, first, length))
                reads.append(read)
                if read is None:
                    _request_all(wire, source, first, length)
                else:
                    releases.callback(read.release)
            for wire, source, length, read in zip(wires, sources, lengths, reads):
                data = None
                if read is not None:
                    data = _of(source, partial(self._direct.finish, wire, source, read, length))
                    if data is None:
                        _request_all(wire, source, first, length)
                    else:
                        _check_unchanged(wire, source)
                        data = data[:size]
                if data is None:
                    data = total if empty and source.factor == 1 else room[:size]
                    for start in range(0, length, PIECE_BYTES):
                        _receive(wire, source, data[start : min(start + PIECE_BYTES, length)])
                    self._count(length)
                data[length:] = bytes(size - length)
                if empty and source.factor == 1:
                    if data is not total:
                        total[:] = data
                else:
                    if empty:
                        total[:] = bytes(size)
                    accumulate(total, data, source.factor)
                empty = False
            into[:] = bytes(len(into)) if empty else total[begin - first : begin - first + len(into)]

    def _count(self, count: int) -> None:
        with self._lock:
            self._tcp_bytes += count

    @contextlib.contextmanager
    def _two_rooms(self) -> Iterator[tuple[memoryview, memoryview]]:
        with self._lock:
            rooms = self._rooms.pop() if self._rooms else None
        rooms = rooms or (page_buffer(WINDOW_BYTES + 2 * BLOCK), page_buffer(WINDOW_BYTES + 2 * BLOCK))
        try:
            yield rooms
        finally:
            with self._lock:
                self._rooms.append(rooms)

    @contextlib.contextmanager
    def _calling(self, sources: list[CodedSource]) -> Iterator[list[Caller]]:
        """Yield a connection for each source.

        After an error they are closed, because answers may still arrive; else they are kept.
        """
        wires: list[Caller] = []
        try:
            for source in sources:
                wires.append(_of(source, lambda source=source: self._call(source.address)))  # type: ignore[misc]
            yield wires
        except BaseException:
            for wire in wires:
                wire.close()
            raise
        for source, wire in zip(sources, wires):
            self._keep(source.address, wire)

    def _call(self, address: str) -> Caller:
        while True:
            with self._lock:
                idle = self._idle.get(address)
                wire = idle.pop() if idle else None
            if wire is None:
                return call_with_retries(address, self._token, self._timeout_s, tls=self._tls)
            if not wire.ends():
                return wire
            wire.close()

    def _keep(self, address: str, wire: Caller) -> None:
        with self._lock:
            idle = self._idle.setdefault(address, [])
            if not self._closed and len(idle) < IDLE_CALLS_MAX:
                idle.append(wire)
                return
        wire.close()

    def _ask(self, address: str) -> Inventory | None:
        why, ends = "", time.monotonic() + self._timeout_s
        for _ in range(BREAKS_MAX):
            try:
                try:
                    wire = call_with_retries(address, self._token, self._timeout_s, tls=self._tls)
                except Disconnected as error:
                    why = str(error)
                    break
                try:
                    wire.send(StatusRequest())
                    answer = wire.receive()
                    if not isinstance(answer, Inventory):
                        raise PeerLost(f"it answered {type(answer).__name__}")
                except PeerLost:
                    wire.close()
                    raise
            except PeerLost as error:
                why = str(error)
                if time.monotonic() > ends:
                    break
                continue
            self._keep(address, wire)
            return answer
        shown = without_fingerprint(address)
        emit("peers.unreachable", f"the peer at {shown} is left out: {why}", address=shown, why=why)
        return None

    def _how(self, id: str, rank: int, known: KnownPart) -> str | None:
        bad = self._bad
        whole = self._shelves.whole(id, rank, known, bad)
        if whole is not None:
            return f"agent at {without_fingerprint(whole.address)}"
        length = max((start + size for start, size in zip(known.starts, known.sizes)), default=0) - min(
            known.starts, default=0
        )
        reached, source = 0, None
        for segment in self._shelves.segments(id, rank, known):
            plan = next(self._shelves.sums(id, rank, known, segment.number, bad), None)
            if plan is not None and segment.offset <= reached:
                reached = max(reached, segment.offset + segment.length)
                source = source or f"rebuilt from {len(plan[0])} of {plan[1]}"
        return source if source is not None and reached >= length else None


class _PeerPackReader:
    """Reader of one pack. See ``store.Reader``; any thread."""

    def __init__(self, remote: Remote, id: str, rank: int, known: KnownPart, pack: int) -> None:
        self._remote, self._id, self._rank, self._known = remote, id, rank, known
        self._start, self.size = known.starts[pack] - min(known.starts), known.sizes[pack]

    def fetch(self, offset: int, length: int, room: memoryview) -> memoryview | None:
        """Read into ``room``. There is no page cache to bypass, but one thread can hash while another one reads."""
        self.read_into(offset, room[:length])
        return room[:length]

    def read_into(self, offset: int, into: memoryview) -> None:
        if offset + len(into) > self.size:
            where = f"{self._id}, rank {self._rank}, at peers"
            raise CorruptCheckpoint(f"the pack ends at byte {self.size}, and is truncated", where=where)
        self._remote.read(self._id, self._rank, self._known, self._start + offset, into)

    def close(self) -> None:
        pass


class _Failed(Exception):  # caught above: another source is used
    def __init__(self, source: CodedSource, why: str, refused: bool) -> None:
        super().__init__(why)
        self.source, self.why, self.refused = source, why, refused


def _of(source: CodedSource, call: Callable[[], T]) -> T:
    """Return the result of ``call``. A ``PeerLost`` becomes that source's failure."""
    try:
        return call()
    except PeerLost as error:
        raise _Failed(source, str(error), isinstance(error, NotThere)) from error


def _pull(wire: Caller, source: CodedSource, offset: int, into: memoryview) -> None:
    """Read a range in pieces over one connection. ``AHEAD`` requests are sent before the first answer is read."""
    pieces = [(start, min(PIECE_BYTES, len(into) - start)) for start in range(0, len(into), PIECE_BYTES)]
    for start, length in pieces[:AHEAD]:
        _request(wire, source, offset + start, length)
    for number, (start, length) in enumerate(pieces):
        if number + AHEAD < len(pieces):
            ahead, size = pieces[number + AHEAD]
            _request(wire, source, offset + ahead, size)
        _receive(wire, source, into[start : start + length])


def _request_all(wire: Caller, source: CodedSource, offset: int, length: int) -> None:
    """Request a range in pieces."""
    for start in range(0, length, PIECE_BYTES):
        _request(wire, source, offset + start, min(PIECE_BYTES, length - start))


def _check_unchanged(wire: Caller, source: CodedSource) -> None:
    """Accept bytes that were read directly only if the agent's memory was unchanged after that."""
    _request(wire, source, 0, 0)
    _receive(wire, source, memoryview(b""))


def _request(wire: Caller, source: CodedSource, offset: int, length: int) -> None:
    asked = source.asked
    read = ReadRequest(
        asked.id, asked.rank, asked.offset + offset, length, asked.ring, asked.lane, asked.stripe, asked.row
    )
    _of(source, lambda: wire.send(read))


def _receive(wire: Caller, source: CodedSource, into: memoryview) -> None:
    """Receive the next answer. Accept it only if the sender's memory was unchanged after all bytes were sent."""

    def take() -> None:
        answer = wire.receive()
        if isinstance(answer, PeerRefusal):
            raise NotThere(answer.why)
        if not isinstance(answer, Data) or answer.length != len(into):
            raise PeerLost(f"it answered {type(answer).__name__}")
        wire.receive_into(into)
        verdict = memoryview(bytearray(1))
        wire.receive_into(verdict)
        if verdict[0] != 1:
            raise NotThere("the next save came while it was read")

    _of(source, take)
