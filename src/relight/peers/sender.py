"""Sends this agent's parts to the agents that hold its parity: in its own threads, newest first, resumed after a broken
connection."""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

from relight.comm import new_threads
from relight.comm.new_threads import ThreadPool
from relight.errors import StoreUnavailable
from relight.format.crc import crc32
from relight.peers.direct import fallback_event
from relight.peers.galois import BLOCK
from relight.peers.messages import (
    FETCH_BYTES,
    OLD,
    PIECE_BYTES,
    PLANE,
    ROSTER,
    VOID,
    Acknowledged,
    Contribute,
    Going,
    PeerRefusal,
    Segment,
    SegmentEnd,
    SegmentFetch,
    SegmentPiece,
    Void,
)
from relight.peers.parts import HeldPartFile, cut
from relight.peers.rdma import RDMA, TCP, PlaneChoice, PlaneFailed, RdmaPlane
from relight.peers.rings import Peer, PeerRing
from relight.peers.server import Notify
from relight.peers.wire import BYTES_PER_SECOND_MIN, Caller, PeerLost, call, without_fingerprint
from relight.units import duration_text, size_text

AT_ONCE = 4
"""Holders that parts are sent to at the same time."""
CALL_S = 10.0
PATIENCE_S = 30.0
"""Seconds without progress after which one holder is skipped for this part."""
_PAUSE_S, _PAUSE_MAX_S = 0.05, 2.0


class _SegmentTask(NamedTuple):
    """One segment of a part that one holder must get, for one row of its stripe."""

    part: HeldPartFile
    holder: Peer
    stripe: int
    row: int
    segment: Segment


class _Stopped(Exception):  # caught below: another ring was joined, or the sender was closed
    pass


class Sender:
    """Sender of one agent.

    ``offer`` and ``join`` return at once. ``notify`` is called in other threads with events of sent and failed parts.
    ``StoreUnavailable`` if no thread can be started.
    """

    def __init__(
        self,
        token: Callable[[], bytes],
        tls: Callable[[], bool],
        plane: Callable[[], PlaneChoice],
        notify: Notify,
        bytes_per_second: float | None = None,
    ) -> None:
        self._token, self._tls, self._plane, self._notify = token, tls, plane, notify
        self._pace = _ByteRate(bytes_per_second)
        self.step = (
            PIECE_BYTES
            if bytes_per_second is None
            else max(BLOCK, min(PIECE_BYTES, int(bytes_per_second / 10) // BLOCK * BLOCK))
        )
        """Bytes of one message: those of a tenth of a second if the rate is limited."""
        self.direct_step = FETCH_BYTES if bytes_per_second is None else self.step
        self.life = secrets.token_bytes(8)
        self._changed = threading.Condition()
        self._waiting: dict[int, HeldPartFile] = {}
        self._ring: PeerRing | None = None
        self._me = ""
        self._joined = 0
        self._busy = self._closed = False
        self._wires: set[Caller] = set()
        self._thread = threading.Thread(target=self._work, name="relight-peers-send", daemon=True)
        if not new_threads.start(self._thread):
            raise StoreUnavailable(
                "no thread could be started to send to the peers", hint="raise ulimit -u or the cgroup's pids.max"
            )

    def join(self, ring: PeerRing | None, me: str, again: list[HeldPartFile]) -> None:
        """Send to that ring from now on.

        Stop sending to another ring, and send the parts in ``again`` to the new one.
        """
        with self._changed:
            self._ring, self._me = ring, me
            self._joined += 1
            for part in again:
                self._waiting.setdefault(part.lane, part)
            self._changed.notify_all()

    def offer(self, part: HeldPartFile) -> None:
        """Send a part, unless a newer one of its lane is offered before its turn."""
        with self._changed:
            waiting = self._waiting.get(part.lane)
            if waiting is None or waiting.seq <= part.seq:
                self._waiting[part.lane] = part
            self._changed.notify_all()

    def withdraw(self, id: str, rank: int) -> None:
        """Do not send a part that waits.

        If it is being sent, its ``is_there`` must become False, which ends the sending.
        """
        with self._changed:
            self._waiting = {lane: part for lane, part in self._waiting.items() if (part.id, part.rank) != (id, rank)}

    def wait(self, timeout: float) -> bool:
        """Wait until no part waits or is being sent. Return False if that takes longer than ``timeout`` seconds."""
        with self._changed:
            return self._changed.wait_for(
                lambda: self._closed or self._ring is None or not (self._waiting or self._busy), timeout
            )

    def close(self) -> None:
        """Stop sending, and close the connections."""
        with self._changed:
            self._closed = True
            self._waiting = {}
            wires = list(self._wires)
            self._changed.notify_all()
        for wire in wires:
            wire.close()
        self._thread.join(5.0)

    def _work(self) -> None:
        with ThreadPool(AT_ONCE, "relight-peers-send") as pool:
            while True:
                with self._changed:
                    self._busy = False
                    self._changed.notify_all()
                    self._changed.wait_for(lambda: self._closed or (self._ring is not None and self._waiting))
                    if self._closed:
                        return
                    ring, joined, me = self._ring, self._joined, self._me
                    parts, self._waiting = list(self._waiting.values()), {}
                    self._busy = True
                assert ring is not None
                try:
                    self._send(pool, sorted(parts, key=lambda part: part.lane), ring, me, joined)
                except Exception as error:  # noqa: BLE001 (the thread must survive for the next parts)
                    self._fail_all(parts, f"sending failed: {_words_of(error)}")

    def _fail_all(self, parts: list[HeldPartFile], why: str) -> None:
        """Report all parts of a round as failed. Never raises."""
        for part in parts:
            with contextlib.suppress(Exception):
                self._fail(part, why)

    def _send(self, pool: ThreadPool, parts: list[HeldPartFile], ring: PeerRing, me: str, joined: int) -> None:
        """Send all parts to all their holders, ``AT_ONCE`` holders at a time, so that a dead holder delays no other
        one."""
        started = time.monotonic()
        position = ring.position(me)
        assert position is not None
        ranks = dict(enumerate(ring.peers[position].ranks))
        for part in [part for part in parts if ranks.get(part.lane) != part.rank]:
            parts.remove(part)
            self._fail(part, f"the roster has no rank {part.rank} in lane {part.lane} of this agent")
        by_holder: dict[str, list[_SegmentTask]] = {}
        for task in _plan(parts, ring, position):
            by_holder.setdefault(task.holder.id, []).append(task)
        fingerprint = ring.fingerprint()
        transfers = [_HolderTransfer(self, fingerprint, joined, tasks) for tasks in by_holder.values()]
        for running in [pool.submit(transfer.run) for transfer in transfers]:
            running.result()
        if self.stopped(joined):
            return
        seconds = time.monotonic() - started
        for part in parts:
            self._report(part, transfers, seconds)
        direct = sum(transfer.direct_bytes for transfer in transfers)
        for plane, count in ((RDMA, direct), (TCP, sum(transfer.sent.total() for transfer in transfers) - direct)):
            if count:
                text = f"{size_text(count)} sent to peers by {plane.upper()} in {duration_text(seconds)}"
                self._notify("peers.moved", text, {"action": "sent", "plane": plane, "bytes": count})

    def _report(self, part: HeldPartFile, transfers: list[_HolderTransfer], seconds: float) -> None:
        failed = [
            (transfer.holder, why) for transfer in transfers if (why := transfer.failed.get(part.lane)) is not None
        ]
        if any(not why for _, why in failed):  # no failure: the holder already has a newer checkpoint of other agents
            return
        if failed and not part.there():
            self._fail(part, "the next save came before it was sent")
            return
        for holder, why in failed:
            self._fail(part, why, holder)
        if not failed:
            total = sum(transfer.sent[part.lane] for transfer in transfers)
            text = f"checkpoint {part.id}, rank {part.rank}: {size_text(total)} sent to {len(transfers)} peers in {duration_text(seconds)}"
            fields = {
                "checkpoint": part.id,
                "rank": part.rank,
                "bytes": total,
                "seconds": seconds,
                "peers": len(transfers),
            }
            self._notify("peers.sent", text, fields)

    def _fail(self, part: HeldPartFile, why: str, holder: Peer | None = None) -> None:
        address = "" if holder is None else without_fingerprint(holder.address)
        by, peer = ("peers", "") if holder is None else (f"the peer at {address}", holder.id)
        text = f"checkpoint {part.id}, rank {part.rank}, is not protected by {by}: {why}"
        self._notify(
            "peers.failed",
            text,
            {"checkpoint": part.id, "rank": part.rank, "why": why, "peer": peer, "address": address},
        )

    # -- what transfers need

    def stopped(self, joined: int) -> bool:
        """Return whether another ring was joined since, or the sender was closed."""
        return self._closed or self._joined != joined

    def call(self, address: str) -> Caller:
        """Return a connection that is closed with the sender."""
        wire = call(address, self._token(), CALL_S, tls=self._tls())
        with self._changed:
            if self._closed:
                wire.close()
                raise PeerLost("closed")
            self._wires.add(wire)
        return wire

    def hang_up(self, wire: Caller) -> None:
        """Close a connection."""
        wire.close()
        with self._changed:
            self._wires.discard(wire)

    def rest(self, seconds: float, joined: int) -> None:
        """Wait that long, or until the transfer is stopped."""
        with self._changed:
            self._changed.wait_for(lambda: self.stopped(joined), seconds)

    def superseded(self, part: HeldPartFile) -> bool:
        """Return whether a newer part of its lane is waiting."""
        with self._changed:
            waiting = self._waiting.get(part.lane)
            return waiting is not None and waiting.seq > part.seq

    def plane(self) -> RdmaPlane | None:
        """Return this process's RDMA plane, if it has one."""
        return self._plane().get()

    def fall_back(self, address: str, reason: str, why: str) -> None:
        """Report that a holder gets bytes over TCP instead of RDMA."""
        self._notify("peers.fallback", *fallback_event(address, reason, why))

    def pace(self, count: int) -> None:
        """Wait until ``count`` more bytes may be sent."""
        self._pace.take(count)


class _HolderTransfer:
    """All segments for one holder."""

    def __init__(self, sender: Sender, ring: bytes, joined: int, tasks: list[_SegmentTask]) -> None:
        self._sender, self._ring, self._joined, self._tasks = sender, ring, joined, tasks
        self._wire: Caller | None = None
        self._moved = 0.0
        self.holder = tasks[0].holder
        self.sent: Counter[int] = Counter()
        """Bytes sent, by lane."""
        self.direct_bytes = 0
        """Those that the holder has read by RDMA."""
        self._direct = True
        self.failed: dict[int, str] = {}
        """Why a lane's part failed; "" if the holder already had a newer one."""

    def run(self) -> None:
        """Send all segments, or record why not."""
        index = 0
        try:
            for index, task in enumerate(self._tasks):
                if task.part.lane in self.failed:
                    continue
                if not self._send_with_retries(task):
                    for rest in self._tasks[index:]:
                        self.failed.setdefault(rest.part.lane, self.failed[task.part.lane])
                    return
        except _Stopped:
            pass
        except Exception as error:  # noqa: BLE001 (the parts must be reported as failed, whatever the reason)
            for rest in self._tasks[index:]:
                self.failed.setdefault(rest.part.lane, f"sending failed: {_words_of(error)}")
        finally:
            self._disconnect()

    def _send_with_retries(self, task: _SegmentTask) -> bool:
        """Send one segment with retries, each from the last byte.

        Return False after ``PATIENCE_S`` without progress.
        """
        lane, pause, self._moved = task.part.lane, _PAUSE_S, time.monotonic()
        while True:
            before = self.sent[lane]
            try:
                refused = self._send_segment(task)
                if refused is None:
                    return True
                why = refused.why
                if refused.code != ROSTER:
                    self.failed[lane] = "" if refused.code == OLD else why
                    return True
            except PeerLost as error:
                self._disconnect()
                why = str(error)
            if self._sender.stopped(self._joined):
                raise _Stopped
            if self.sent[lane] > before:
                pause = _PAUSE_S
            if time.monotonic() - self._moved > PATIENCE_S or self._sender.superseded(task.part):
                self.failed[lane] = why
                return False
            self._sender.rest(pause, self._joined)
            pause = min(2 * pause, _PAUSE_MAX_S)

    def _send_segment(self, task: _SegmentTask) -> PeerRefusal | None:
        """Send one segment, without retries. Return None if it is done, else the refusal."""
        if self._wire is None:
            self._wire = self._sender.call(task.holder.address)
        wire, part, segment = self._wire, task.part, task.segment
        begun = self._begin(wire, task)
        if isinstance(begun, PeerRefusal):
            return begun
        offset, plane = begun.got, self._plane_with(begun)
        while offset < segment.length:
            if self._sender.stopped(self._joined):
                raise _Stopped
            step = min(self._sender.step if plane is None else self._sender.direct_step, segment.length - offset)
            self._sender.pace(step)
            data = part.read(segment.offset + offset, step)
            if data is None:
                break
            if plane is not None:
                try:
                    self._let_fetch(wire, plane, task, offset, data)
                except PlaneFailed as error:
                    if not part.there():  # the bytes were read while they changed
                        break
                    if self._sender.stopped(self._joined):
                        raise _Stopped from error
                    plane = None
                    self._leave_plane("failed", str(error))
                    begun = self._begin(wire, task)
                    if isinstance(begun, PeerRefusal):
                        return begun
                    offset = begun.got
                    continue
                self.direct_bytes += step
            else:
                wire.send(SegmentPiece(offset, step), data)
            self.sent[part.lane] += step
            self._moved = time.monotonic()
            offset += step
        # The kernel has copied all bytes by now, or the holder has read them: this check holds for every one of them.
        whole = offset == segment.length and part.there()
        wire.send(SegmentEnd() if whole else Void())
        answer = wire.receive()
        if isinstance(answer, PeerRefusal):
            return answer
        if not isinstance(answer, Acknowledged):
            raise PeerLost(f"it answered {type(answer).__name__}")
        return None if whole else PeerRefusal(VOID, "the next save came before it was sent")

    def _begin(self, wire: Caller, task: _SegmentTask) -> Going | PeerRefusal:
        """Ask the holder for the next byte of the segment."""
        part, segment = task.part, task.segment
        wire.send(
            Contribute(part.id, part.seq, part.lane, self._ring, task.stripe, task.row, self._sender.life, segment)
        )
        answer = wire.receive()
        if isinstance(answer, PeerRefusal):
            return answer
        if not isinstance(answer, Going) or answer.got > segment.length:
            raise PeerLost(f"it answered {type(answer).__name__}")
        return answer

    def _plane_with(self, begun: Going) -> RdmaPlane | None:
        """Return the plane that this agent and the holder have in common. Report why there is none, once."""
        plane = self._sender.plane() if self._direct else None
        if plane is None or plane.name == begun.plane:
            return plane
        if begun.plane:
            self._leave_plane("version", f"it has {begun.plane}, and this agent {plane.name}")
        else:
            self._leave_plane("peer", f"it has no RDMA plane: {begun.without}")
        return None

    def _leave_plane(self, reason: str, why: str) -> None:
        """Send over TCP from now on, until the next parts."""
        self._direct = False
        self._sender.fall_back(self.holder.address, reason, why)

    def _let_fetch(self, wire: Caller, plane: RdmaPlane, task: _SegmentTask, offset: int, data: memoryview) -> None:
        """Let the holder read ``data`` from this process's memory. ``PlaneFailed`` if it could not, or not all of it."""
        part = task.part
        try:
            base, description = plane.share(part.memory)
        except ValueError as error:
            raise PlaneFailed("the memory was released") from error
        address = base + min(part.starts, default=0) + task.segment.offset + offset
        checksums = tuple(crc32(data[start : start + PIECE_BYTES]) for start in range(0, len(data), PIECE_BYTES))
        with plane.attending():
            wire.send(SegmentFetch(offset, len(data), address, description, plane.name, checksums))
            answer = wire.receive(CALL_S + 30.0 + len(data) / BYTES_PER_SECOND_MIN)
        if isinstance(answer, PeerRefusal) and answer.code == PLANE:
            raise PlaneFailed(answer.why)
        if not isinstance(answer, Going) or answer.got != offset + len(data):
            raise PeerLost(f"it answered {type(answer).__name__}")

    def _disconnect(self) -> None:
        if self._wire is not None:
            self._sender.hang_up(self._wire)
            self._wire = None


def _words_of(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _plan(parts: list[HeldPartFile], ring: PeerRing, position: int) -> list[_SegmentTask]:
    """Return every segment of the parts, once for each row of its stripe."""
    me, tasks = ring.peers[position].id, []
    for part in parts:
        for number, (offset, length) in enumerate(cut(part.length, ring.data)):
            segment = Segment(me, part.rank, number, offset, length, part.starts, part.sizes)
            stripe = ring.stripe_of(position, number)
            tasks += [_SegmentTask(part, ring.holder(stripe, row), stripe, row, segment) for row in range(ring.parity)]
    return tasks


class _ByteRate:
    """Limits the bytes per second, over all threads."""

    def __init__(self, bytes_per_second: float | None) -> None:
        self._rate = bytes_per_second
        self._free_at = 0.0
        self._lock = threading.Lock()

    def take(self, count: int) -> None:
        """Wait until ``count`` bytes may be sent."""
        if self._rate is None:
            return
        with self._lock:
            begins = max(self._free_at, time.monotonic())
            self._free_at = begins + count / self._rate
        time.sleep(max(0.0, begins - time.monotonic()))
