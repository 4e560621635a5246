"""Sending this agent's parts to those who hold parity for it: in threads of its own, newest first, gone on with where it broke off."""

from __future__ import annotations

import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from relight.peers.galois import BLOCK
from relight.peers.messages import (
    OLD,
    PIECE_BYTES,
    ROSTER,
    VOID,
    Acknowledged,
    Contribute,
    Going,
    PeerRefusal,
    Segment,
    SegmentEnd,
    SegmentPiece,
    Void,
)
from relight.peers.parts import HeldPartFile, cut
from relight.peers.rings import Peer, PeerRing
from relight.peers.wire import Caller, PeerLost, call

Tell = Callable[[str, str, dict[str, Any]], None]
AT_ONCE = 4
"""Holders that are sent to at the same time."""
CALL_S = 10.0
PATIENCE_S = 30.0
"""How long one holder may make no progress before the others must do."""
_PAUSE_S, _PAUSE_MAX_S = 0.05, 2.0


class _Given(NamedTuple):
    """What is to be sent to one holder: one segment of a part, for one row of its stripe."""

    part: HeldPartFile
    holder: Peer
    stripe: int
    row: int
    segment: Segment


class _Stopped(Exception):  # caught below: another ring is joined, or all is over
    pass


class Sender:
    """``offer`` and ``join`` return at once. ``tell`` hears, in other threads, of what was sent and what was not."""

    def __init__(self, token: Callable[[], bytes], tell: Tell, bytes_per_second: float | None = None) -> None:
        self._token, self._tell = token, tell
        self._pace = _ByteRate(bytes_per_second)
        self.step = PIECE_BYTES if bytes_per_second is None else max(BLOCK, min(PIECE_BYTES, int(bytes_per_second / 10) // BLOCK * BLOCK))
        """How much is sent at a time: a tenth of a second's, where there is a limit."""
        self.life = secrets.token_bytes(8)
        self._changed = threading.Condition()
        self._waiting: dict[int, HeldPartFile] = {}
        self._ring: PeerRing | None = None
        self._me = ""
        self._joined = 0
        self._busy = self._closed = False
        self._wires: set[Caller] = set()
        self._thread = threading.Thread(target=self._work, name="relight-peers-send", daemon=True)
        self._thread.start()

    def join(self, ring: PeerRing | None, me: str, again: list[HeldPartFile]) -> None:
        """Send to that ring from now on: what is under way to another is stopped, and those parts go to this one."""
        with self._changed:
            self._ring, self._me = ring, me
            self._joined += 1
            for part in again:
                self._waiting.setdefault(part.lane, part)
            self._changed.notify_all()

    def offer(self, part: HeldPartFile) -> None:
        """Send it, unless a newer one of its lane comes before its turn does."""
        with self._changed:
            waiting = self._waiting.get(part.lane)
            if waiting is None or waiting.seq <= part.seq:
                self._waiting[part.lane] = part
            self._changed.notify_all()

    def withdraw(self, id: str, rank: int) -> None:
        """Do not send it. If it is being sent, whoever offered it says that it is not there any more."""
        with self._changed:
            self._waiting = {lane: part for lane, part in self._waiting.items() if (part.id, part.rank) != (id, rank)}

    def wait(self, timeout: float) -> bool:
        """Until nothing is waiting or under way; False if that takes longer."""
        with self._changed:
            return self._changed.wait_for(lambda: self._closed or self._ring is None or not (self._waiting or self._busy), timeout)

    def close(self) -> None:
        """Send no more."""
        with self._changed:
            self._closed = True
            self._waiting = {}
            wires = list(self._wires)
            self._changed.notify_all()
        for wire in wires:
            wire.close()
        self._thread.join(5.0)

    def _work(self) -> None:
        with ThreadPoolExecutor(AT_ONCE, thread_name_prefix="relight-peers-send") as pool:
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
                self._send(pool, sorted(parts, key=lambda one: one.lane), ring, me, joined)

    def _send(self, pool: ThreadPoolExecutor, parts: list[HeldPartFile], ring: PeerRing, me: str, joined: int) -> None:
        """All of them, to all of their holders, some of these at a time: one that is not there keeps nobody else waiting."""
        started = time.monotonic()
        position = ring.position(me)
        assert position is not None
        ranks = dict(enumerate(ring.peers[position].ranks))
        for part in [one for one in parts if ranks.get(one.lane) != one.rank]:
            parts.remove(part)
            self._fail(part, f"the roster has no rank {part.rank} in lane {part.lane} of this agent")
        by_holder: dict[str, list[_Given]] = {}
        for given in _plan(parts, ring, position):
            by_holder.setdefault(given.holder.id, []).append(given)
        fingerprint = ring.fingerprint()
        errands = [_Errand(self, fingerprint, joined, gifts) for gifts in by_holder.values()]
        for running in [pool.submit(errand.run) for errand in errands]:
            running.result()
        if self.stopped(joined):
            return
        seconds = time.monotonic() - started
        for part in parts:
            self._report(part, errands, seconds)

    def _report(self, part: HeldPartFile, errands: list[_Errand], seconds: float) -> None:
        failed = [(errand.holder, why) for errand in errands if (why := errand.failed.get(part.lane)) is not None]
        if any(not why for _, why in failed):  # nobody's fault: others were quicker with the next one
            return
        if failed and not part.there():
            self._fail(part, "the next save came before it was sent")
            return
        for holder, why in failed:
            self._fail(part, why, holder)
        if not failed:
            total = sum(errand.sent[part.lane] for errand in errands)
            say = f"checkpoint {part.id}, rank {part.rank}: {total >> 20} MiB went to {len(errands)} peers in {seconds:.1f} s"
            fields = {"checkpoint": part.id, "rank": part.rank, "bytes": total, "seconds": seconds, "peers": len(errands)}
            self._tell("peers.sent", say, fields)

    def _fail(self, part: HeldPartFile, why: str, holder: Peer | None = None) -> None:
        by, peer, address = ("peers", "", "") if holder is None else (f"the peer at {holder.address}", holder.id, holder.address)
        say = f"checkpoint {part.id}, rank {part.rank}, is not protected by {by}: {why}"
        self._tell("peers.failed", say, {"checkpoint": part.id, "rank": part.rank, "why": why, "peer": peer, "address": address})

    # -- what errands need

    def stopped(self, joined: int) -> bool:
        """Whether that ring is not the one any more."""
        return self._closed or self._joined != joined

    def call(self, address: str) -> Caller:
        """A connection, closed when this is."""
        wire = call(address, self._token(), CALL_S)
        with self._changed:
            if self._closed:
                wire.close()
                raise PeerLost("closed")
            self._wires.add(wire)
        return wire

    def hang_up(self, wire: Caller) -> None:
        """Its end."""
        wire.close()
        with self._changed:
            self._wires.discard(wire)

    def rest(self, seconds: float, joined: int) -> None:
        """Wait that long, or until it is all over."""
        with self._changed:
            self._changed.wait_for(lambda: self.stopped(joined), seconds)

    def superseded(self, part: HeldPartFile) -> bool:
        """Whether a newer one of its lane is waiting."""
        with self._changed:
            waiting = self._waiting.get(part.lane)
            return waiting is not None and waiting.seq > part.seq

    def pace(self, count: int) -> None:
        """Wait until so many bytes more may be sent."""
        self._pace.take(count)


class _Errand:
    """All that goes to one holder."""

    def __init__(self, sender: Sender, ring: bytes, joined: int, gifts: list[_Given]) -> None:
        self._sender, self._ring, self._joined, self._gifts = sender, ring, joined, gifts
        self._wire: Caller | None = None
        self._moved = 0.0
        self.holder = gifts[0].holder
        self.sent: Counter[int] = Counter()
        """Bytes, by lane."""
        self.failed: dict[int, str] = {}
        """Why, by lane; "" if something newer was there already."""

    def run(self) -> None:
        """Send it all, or note why not."""
        try:
            for at, given in enumerate(self._gifts):
                if given.part.lane in self.failed:
                    continue
                if not self._insist(given):
                    for rest in self._gifts[at:]:
                        self.failed.setdefault(rest.part.lane, self.failed[given.part.lane])
                    return
        except _Stopped:
            pass
        finally:
            self._hang_up()

    def _insist(self, given: _Given) -> bool:
        """Try again, from where it was, until it is done, refused, or makes no progress for too long: then False."""
        lane, pause, self._moved = given.part.lane, _PAUSE_S, time.monotonic()
        while True:
            before = self.sent[lane]
            try:
                refused = self._give(given)
                if refused is None:
                    return True
                why = refused.why
                if refused.code != ROSTER:
                    self.failed[lane] = "" if refused.code == OLD else why
                    return True
            except PeerLost as error:
                self._hang_up()
                why = str(error)
            if self._sender.stopped(self._joined):
                raise _Stopped
            if self.sent[lane] > before:
                pause = _PAUSE_S
            if time.monotonic() - self._moved > PATIENCE_S or self._sender.superseded(given.part):
                self.failed[lane] = why
                return False
            self._sender.rest(pause, self._joined)
            pause = min(2 * pause, _PAUSE_MAX_S)

    def _give(self, given: _Given) -> PeerRefusal | None:
        """Once. None: it is done."""
        if self._wire is None:
            self._wire = self._sender.call(given.holder.address)
        wire, part, segment = self._wire, given.part, given.segment
        wire.send(Contribute(part.id, part.seq, part.lane, self._ring, given.stripe, given.row, self._sender.life, segment))
        answer = wire.receive()
        if isinstance(answer, PeerRefusal):
            return answer
        if not isinstance(answer, Going) or answer.got > segment.length:
            raise PeerLost(f"it answered {type(answer).__name__}")
        at = answer.got
        while at < segment.length:
            if self._sender.stopped(self._joined):
                raise _Stopped
            step = min(self._sender.step, segment.length - at)
            self._sender.pace(step)
            data = part.read(segment.offset + at, step)
            if data is None:
                break
            wire.send(SegmentPiece(at, step), data)
            self.sent[part.lane] += step
            self._moved = time.monotonic()
            at += step
        # All bytes have been copied to the system by now, so what is seen here holds for every one of them.
        whole = at == segment.length and part.there()
        wire.send(SegmentEnd() if whole else Void())
        answer = wire.receive()
        if isinstance(answer, PeerRefusal):
            return answer
        if not isinstance(answer, Acknowledged):
            raise PeerLost(f"it answered {type(answer).__name__}")
        return None if whole else PeerRefusal(VOID, "the next save came before it was sent")

    def _hang_up(self) -> None:
        if self._wire is not None:
            self._sender.hang_up(self._wire)
            self._wire = None


def _plan(parts: list[HeldPartFile], ring: PeerRing, position: int) -> list[_Given]:
    """Every segment, to every row of its stripe."""
    me, found = ring.peers[position].id, []
    for part in parts:
        for number, (offset, length) in enumerate(cut(part.length, ring.data)):
            segment = Segment(me, part.rank, number, offset, length, part.starts, part.sizes)
            stripe = ring.stripe_of(position, number)
            found += [_Given(part, ring.holder(stripe, row), stripe, row, segment) for row in range(ring.parity)]
    return found


class _ByteRate:
    """So many bytes a second, over all threads."""

    def __init__(self, bytes_per_second: float | None) -> None:
        self._rate = bytes_per_second
        self._free_at = 0.0
        self._lock = threading.Lock()

    def take(self, count: int) -> None:
        """Wait for the turn of so many bytes."""
        if self._rate is None:
            return
        with self._lock:
            begins = max(self._free_at, time.monotonic())
            self._free_at = begins + count / self._rate
        time.sleep(max(0.0, begins - time.monotonic()))
