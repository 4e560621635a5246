"""The agent's process: ``python -m relight.agent.server NAME NICE LINGER [WORDS DIRECTORY]``.

``NAME`` and ``DIRECTORY``: of its socket, see ``world.local_sockets``. The trainer chose the directory.

One thread accepts; for each connection one listens to a trainer and one writes its saves, so that ranks which wait for each other's parts
do not wait for each other's turn. The process ends by itself: at once when the last trainer has said
goodbye and nothing is left to write; ``LINGER`` seconds after the last one vanished without a word, since the one that takes its place
can restore from what is still in memory.
"""

from __future__ import annotations

import contextlib
import errno
import faulthandler
import os
import queue
import select
import signal
import socket
import sys
import threading
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from types import FrameType
from typing import Any

from relight.agent.messages import (
    AllocateSlots,
    EndRun,
    Flush,
    ForwardedEvent,
    HeldList,
    JoinPeers,
    LeavePeers,
    ListenForPeers,
    ListHeld,
    OpenRun,
    SaveResult,
    SlotFilling,
    SlotsAllocated,
    SlotSealed,
    TensorLayout,
    ToAgent,
    words_of,
)  # fmt: skip
from relight.agent.peer_service import AgentPeers, Offered
from relight.agent.slot_follower import PATIENCE_S, Abandoned, SlotFollower
from relight.agent.slot_writer import Backpressure, PlannedLayout, SlotWriter
from relight.agent.wire import FDS_MAX, AgentConnection, ConnectionLost, close_all
from relight.arena import FILLING, SEALED, SharedMapping, Slot, allocate, freeze, is_frozen, reading
from relight.comm import lower_priority, new_threads
from relight.comm.local_sockets import LocalDirectory, peer_of
from relight.comm.proof import prove_as_listener
from relight.drain import Drainer
from relight.errors import NoSpace, RelightError
from relight.keys.dumps import keep_out_of_core_dumps
from relight.observe import flush_events, write_events

_TICK_S = 0.25
PROOF_S = 20.0
"""Seconds that a process which connects has to prove that it knows the secret."""
ORPHAN_S = 30.0
"""How long the save of a trainer that is gone waits for other ranks' parts."""
PATIENT_S = 1.0
"""How long one who asks what there is waits for a save that waits for parts from other nodes."""
NEAR_S = 0.25
"""And for one that waits for parts which would be made here, and are not."""
DRAIN_S = 120.0
"""How long one who asks what there is waits for what is being written."""


@dataclass(eq=False)
class TrainerSession:
    """One trainer."""

    wire: AgentConnection[ToAgent]
    pid: int = 0
    """0: not to be known."""
    writer: SlotWriter | None = None
    prepared: PlannedLayout | None = None
    slots: list[Slot] = field(default_factory=list)
    written: dict[int, SlotJob] = field(default_factory=dict)
    """Slot → what was last given to be written of it."""
    pending: int = 0
    polite: bool = False
    open: bool = True
    hurried: int = 0
    """The last save that somebody waits for."""
    jobs: queue.Queue[SlotJob] = field(default_factory=queue.Queue)
    writing: threading.Thread | None = None


@dataclass(frozen=True, eq=False)
class CommittedSlot:
    """A slot whose bytes are a committed checkpoint's, as long as it is sealed with that number."""

    id: str
    number: int
    slot: Slot
    rank: int
    starts: tuple[int, ...]
    session: TrainerSession


@dataclass(eq=False)
class SlotJob:
    """One slot to be written: sealed, or being filled."""

    session: TrainerSession
    index: int
    number: int
    slot: Slot
    prepared: PlannedLayout
    said: threading.Event = field(default_factory=threading.Event)
    """Set when the trainer has said that it is sealed: it then waits to hear what became of it."""
    since: float = field(default_factory=time.monotonic)
    waits_since: float | None = None
    """When its own part was there, and nothing left to do but to see the checkpoint committed."""
    waits_for: tuple[int, ...] = ()
    """Ranks whose parts were not there when it looked last."""
    checkpoint: str = ""
    """What it is of; known since it waits."""
    told: bool = False
    """Whether what became of it has been told: what is left to do is to remove older ones."""


class AgentServer:
    """All there is in this process."""

    def __init__(self, listener: socket.socket, linger_s: float, name: str = "", path: str | None = None) -> None:
        self._path = path
        self._listener, self._linger_s, self._name = listener, linger_s, name
        self._lock = threading.RLock()
        self._sessions: set[TrainerSession] = set()
        self._pending = 0
        self._active: set[SlotJob] = set()
        self._kept: list[CommittedSlot] = []
        self._ranks: set[int] = set()
        """Those that this process writes for, or has."""
        self._idle_since = time.monotonic()
        self._seen = False
        self._proving = 0
        """Connections whose other end has not proved itself yet."""
        self._parted = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        """Readable when a connection has ended: this process may have nothing left to do."""
        weakref.finalize(self, os.close, self._parted)
        self._ending = False
        self._drainer: Drainer | None = None
        self._neighbours = AgentPeers(self._send_all)

    def end(self, signum: int, frame: FrameType | None) -> None:
        """Take nobody new; write what is sealed; end."""
        self._ending = True

    def run(self) -> None:
        """Until nobody needs this process any more."""
        self._listener.setblocking(False)
        while not self._over():
            select.select([self._listener.fileno(), self._parted], [], [], _TICK_S)
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._parted)
            try:
                connection, _ = self._listener.accept()
            except BlockingIOError:
                continue
            except OSError:
                break
            with self._lock:
                self._proving += 1
            if not new_threads.start(threading.Thread(target=self._admit, args=(connection,), daemon=True, name="relight-agent-admit")):
                connection.close()  # its trainer writes by itself
                with self._lock:
                    self._proving -= 1
        if self._drainer is not None:
            self._drainer.stop()
        self._neighbours.close()

    def _over(self) -> bool:
        with self._lock:
            if self._pending or (self._drainer is not None and self._drainer.busy and not self._ending):
                self._idle_since = time.monotonic()
                return False
            if self._ending:
                return True
            if self._sessions or self._proving:
                self._idle_since = time.monotonic()
                return False
            idle = time.monotonic() - self._idle_since
            self._kept = [one for one in self._kept if _is_there(one)]
            if self._seen and not self._kept and not self._neighbours.holds:
                return True
            return idle > self._linger_s

    # -- trainers

    def _admit(self, connection: socket.socket) -> None:
        """Listen to a process of this user that proves that it knows the secret. Any other gets nothing, and is not counted."""
        try:
            pid, user = peer_of(connection)
            if user != os.geteuid():
                raise PermissionError("another user's")
            with LocalDirectory(self._path) as directory:  # read at each connection: it may have been tidied away, and made again
                secret = directory.secret()
            prove_as_listener(connection, secret, self._name, PROOF_S)
            connection.settimeout(None)
        except OSError:
            connection.close()
            with self._lock:
                self._proving -= 1
            os.eventfd_write(self._parted, 1)
            return
        session = TrainerSession(AgentConnection(connection, ToAgent), pid)
        with self._lock:
            self._proving -= 1
            self._sessions.add(session)
            self._seen = True
        new_threads.start(threading.Thread(target=_watch, args=(session, pid), daemon=True, name="relight-agent-watch"))
        self._listen(session)

    def _listen(self, session: TrainerSession) -> None:
        try:
            while True:
                message, _ = session.wire.receive()
                with contextlib.suppress(
                    ConnectionLost
                ):  # it cannot be answered any more: what it has said all the same is heard to its end
                    self._receive(session, message)
                if session.polite:
                    break
        except ConnectionLost:
            pass
        except Exception as error:  # a message that makes no sense: this trainer is no use any more, others are
            print(f"relight agent: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        self._part(session)

    def _receive(self, session: TrainerSession, message: ToAgent) -> None:
        if isinstance(message, OpenRun):
            lower_priority(message.nice)
            if message.guard is not None:
                keep_out_of_core_dumps(whole=True)
            write_events(message.url, message.run, role="agent")
            session.writer = SlotWriter(message)
        elif isinstance(message, AllocateSlots):
            self._give_slots(session, message)
        elif isinstance(message, TensorLayout):
            session.prepared = PlannedLayout.from_layout(message)
            with self._lock:
                self._ranks.add(session.prepared.rank)
        elif isinstance(message, SlotFilling):
            self._enqueue(session, message.slot, message.number)
        elif isinstance(message, SlotSealed):
            self._enqueue(session, message.slot, message.number, said=True)
        elif isinstance(message, Flush):
            session.hurried = max(session.hurried, message.number)
        elif isinstance(message, ListHeld):
            self._commit_kept(session)
        elif isinstance(message, ListenForPeers):
            session.wire.send(self._neighbours.meet(message))
        elif isinstance(message, JoinPeers):
            self._neighbours.join(message)
        elif isinstance(message, LeavePeers):
            self._neighbours.leave()
        elif isinstance(message, EndRun):
            session.polite = True

    def _give_slots(self, session: TrainerSession, want: AllocateSlots) -> None:
        with self._lock:
            session.slots, session.written = [], {}
            self._kept = [one for one in self._kept if one.session is not session]
            left = [one.slot for one in self._kept if not one.session.open and one.slot.memory.size == want.size]
            spare = [slot for slot in left if not is_frozen(slot.memory.fd)]
            del left
            self._kept = [one for one in self._kept if one.session.open]
        count, why = want.count, ""
        if want.memory is not None and want.memory < want.count * want.size:
            count = want.memory // want.size
            why = f"the limit of {want.memory >> 20} MiB has room for {count} of {want.count} slots of {want.size >> 20} MiB"
        while len(session.slots) < count:
            if spare:
                slot = spare.pop()
            else:
                try:
                    slot = Slot(SharedMapping(allocate(want.size), want.size, writable=True))
                except (NoSpace, OSError) as error:
                    why = error.what if isinstance(error, NoSpace) else str(error)
                    break
                slot.memory.populate()
            slot.clear()
            session.slots.append(slot)
        sizes = [slot.memory.size for slot in session.slots]
        session.wire.send(SlotsAllocated(sizes, why), [slot.memory.fd for slot in session.slots])

    def _commit_kept(self, session: TrainerSession) -> None:
        """What the trainer before this one sealed is written first: it is the newest there is."""
        ends = time.monotonic() + DRAIN_S
        while (self._writes() or self._has_unheard()) and time.monotonic() < ends:
            time.sleep(0.005)
        with self._lock:
            there = [one for one in self._kept if _is_there(one)][-FDS_MAX:]  # the newest, if a message has no room for all
        fds: list[int] = []
        try:
            with contextlib.suppress(OSError):  # no descriptor is left: those that there are, the newest
                for one in reversed(there):
                    freeze(one.slot.memory.fd)  # who asks only reads, and must not open it again for writing
                    fds.insert(0, reading(one.slot.memory.fd))
            there = there[len(there) - len(fds) :]
            session.wire.send(HeldList([(one.id, one.rank, list(one.starts)) for one in there]), fds)
        finally:
            close_all(fds)

    def _writes(self) -> bool:
        """Whether something is being written that may be a checkpoint soon. Not: what waits for parts that nobody makes any more; nor what
        is one already, though a sound one is being sought so that older ones may go, which takes as long as reading it."""
        now = time.monotonic()
        with self._lock:
            return self._pending > sum(job.told or self._is_stuck(job, now) for job in self._active)

    def _has_unheard(self) -> bool:
        """Whether a trainer has ended of which not all was heard yet: it may have sealed a save that nobody here knows of. Who has said
        goodbye has said all."""
        with self._lock:
            there = [session.pid for session in self._sessions if session.open and not session.polite]
        return any(map(_has_ended, there))

    def _is_stuck(self, job: SlotJob, now: float) -> bool:
        if job.waits_since is None or not job.waits_for:
            return False
        patience_s = NEAR_S if self._ranks.issuperset(job.waits_for) else PATIENT_S
        return now - job.waits_since > patience_s

    def _part(self, session: TrainerSession) -> None:
        """The trainer is gone. What it sealed and could not say any more is written all the same; what it did not seal is nothing.

        One that said goodbye may be waiting for the end of the stream, which says that its saves are written, and old ones removed.
        """
        while session.polite and session.pending:
            time.sleep(0.002)
        with self._lock:
            for index in range(len(session.slots)):
                try:
                    self._take_over(session, index)
                except Exception as error:  # whatever it is: a trainer that is gone is gone, or this process would never end
                    print(f"relight agent: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
            session.open = False
            if session.polite:  # who saved nothing has nothing to do any more in a run whose trainers before it are gone
                saved = session.prepared is not None
                self._kept = [one for one in self._kept if (one.session is not session if saved else one.session.open)]
            self._sessions.discard(session)
            self._idle_since = time.monotonic()
            if session.polite and not self._sessions:  # the run is over here: nobody restores from what is left
                self._neighbours.close()
        session.wire.close()
        os.eventfd_write(self._parted, 1)

    def _take_over(self, session: TrainerSession, index: int) -> None:
        state, number = session.slots[index].state()
        if state == SEALED:
            self._enqueue(session, index, number, said=True)
        elif state == FILLING:
            session.slots[index].clear()

    # -- writing

    def _enqueue(self, session: TrainerSession, index: int, number: int, *, said: bool = False) -> None:
        """Have a save written, once."""
        with self._lock:
            if session.prepared is None or session.writer is None or not 0 <= index < len(session.slots):
                raise ConnectionLost("a save before its layout")
            job = session.written.get(index)
            if job is None or job.number < number:
                job = session.written[index] = SlotJob(session, index, number, session.slots[index], session.prepared)
                self._pending += 1
                session.pending += 1
                self._kept = [one for one in self._kept if one.slot is not job.slot]
                session.jobs.put(job)
                if session.writing is None:
                    session.writing = threading.Thread(target=self._work, args=(session,), name="relight-agent-writer", daemon=True)
                    session.writing.start()
            if said and job.number == number:
                job.said.set()

    def _work(self, session: TrainerSession) -> None:
        while session.open or session.pending:
            try:
                job = session.jobs.get(timeout=_TICK_S)
            except queue.Empty:
                continue
            with self._lock:
                self._active.add(job)
            try:
                self._write(job)
            except Abandoned:
                self._abandon(job)
            except Exception as error:  # told to nobody, but the next save must find this thread alive
                print(f"relight agent: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
            finally:
                with self._lock:
                    self._active.discard(job)
                    job.session.pending -= 1
                    self._pending -= 1
                    self._idle_since = time.monotonic()

    def _abandon(self, job: SlotJob) -> None:
        """What was written of it is gone. If it comes to be sealed after all, it is written from the beginning."""
        with self._lock:
            if job.session.written.get(job.index) is job:
                del job.session.written[job.index]
                if job.slot.state() == (SEALED, job.number):
                    self._enqueue(job.session, job.index, job.number, said=job.said.is_set())

    def _waits(self, job: SlotJob, checkpoint: str, missing: Sequence[int]) -> bool:
        now = time.monotonic()
        with self._lock:
            if job.waits_since is None:
                job.waits_since = now
            job.checkpoint, job.waits_for = checkpoint, tuple(missing)
        return job.session.open or job.session.polite or now - job.waits_since < ORPHAN_S

    def _is_made(self, checkpoint: str) -> None:
        """One rank's save is through: the others of it that wait here will be in a moment."""
        with self._lock:
            for job in self._active:
                if job.checkpoint == checkpoint:
                    job.waits_since = time.monotonic()

    def _may_hold(self, job: SlotJob) -> bool:
        """Whether the save may wait for room: nobody waits for it, and it is still wanted."""
        session = job.session
        goes_on = session.open and not session.polite and not self._ending
        return goes_on and job.number > session.hurried and job.slot.state()[1] == job.number

    def _held(self, job: SlotJob, told: ForwardedEvent) -> None:
        """It does wait: tell so, and have room made."""
        self._send(job.session, told)
        if job.session.writer is not None:
            self._drain(job.session.writer)

    def _write(self, job: SlotJob) -> None:
        writer = job.session.writer
        assert writer is not None
        follow = SlotFollower(job.slot, job.number, lambda: job.session.open)
        try:
            follow.until(0)
            hold = Backpressure(job.since, lambda: self._may_hold(job), lambda *said: self._held(job, ForwardedEvent(*said)))
            report = writer.save(job.slot, job.prepared, job.number, follow, partial(self._waits, job), hold, job.session.slots)
        except Abandoned:
            raise
        except Exception as error:
            report = SaveResult(job.number, "", error=words_of(error, "agent"))
        if report.error is None and not job.session.polite:
            prepared = job.prepared
            kept = CommittedSlot(report.id, job.number, job.slot, prepared.rank, prepared.starts, job.session)
            with self._lock:  # before the trainer hears of it: it may die the moment it does
                self._kept.append(kept)
                self._is_made(report.id)
            sizes = tuple(pack.size for pack in prepared.plan.packs)
            there = partial(_is_there, kept)
            self._neighbours.offer(Offered(report.id, report.seq, prepared.rank, job.slot.memory, prepared.starts, sizes, there))
        if job.session.open:
            job.said.wait(PATIENCE_S)  # who has not said so does not listen yet
        self._send(job.session, report)
        with self._lock:
            job.told = True
        if report.error is None:
            session = job.session
            found = writer.prune(lambda: session.open and not self._ending, lambda: session.polite, lambda: self._pending > 1)
            if found is not None:
                self._send(job.session, ForwardedEvent(*found))
            self._drain(writer)

    def _drain(self, writer: SlotWriter) -> None:
        """Have what was saved copied to the run's further tiers, if there are any."""
        with contextlib.suppress(RelightError):
            if not writer.has_tiers():
                return
            with self._lock:
                if self._drainer is None:
                    place = writer.place
                    self._drainer = Drainer(
                        place.url, place.run, self._send_all, lambda: bool(self._sessions), nice=place.nice + 5, guard=writer.guard
                    )  # fmt: skip
            self._drainer.wake()

    def _send_all(self, name: str, say: str, fields: dict[str, Any]) -> None:
        with self._lock:
            sessions = list(self._sessions)
        for session in sessions:
            self._send(session, ForwardedEvent(name, say, fields))

    def _send(self, session: TrainerSession, message: SaveResult | ForwardedEvent) -> None:
        if session.open or session.polite:
            try:
                session.wire.send(message)
            except (ConnectionLost, OSError):
                pass


def _watch(session: TrainerSession, pid: int) -> None:
    """Hang up when the trainer dies: its forked children may hold the other end of the socket open for a while longer."""
    try:
        fd = os.pidfd_open(pid)
    except OSError:  # dead already, or of another process namespace: the end of the stream must do
        return
    try:
        while session.open and not select.select([fd], [], [], 1.0)[0]:
            pass
    finally:
        os.close(fd)
    if session.open:
        session.wire.hang_up()


def _has_ended(pid: int) -> bool:
    """Whether that process does nothing any more; False if that cannot be told."""
    if not pid:  # of another process namespace
        return False
    try:
        fd = os.pidfd_open(pid)
    except OSError as error:
        return error.errno == errno.ESRCH
    try:
        return bool(select.select([fd], [], [], 0)[0])
    finally:
        os.close(fd)


def _is_there(one: CommittedSlot) -> bool:
    return one.slot.state() == (SEALED, one.number)


def main() -> int:
    """Serve. Exit status 3: another agent has the name; 4: there is no place to listen."""
    address, nice, linger = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
    if len(sys.argv) > 4:
        faulthandler.enable(int(sys.argv[4]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    path = sys.argv[5] if len(sys.argv) > 5 else None
    try:
        with LocalDirectory(path) as directory:
            listener = directory.listen(address, 128)
    except OSError as error:
        print(f"relight agent: {error}", file=sys.stderr)
        return 3 if error.errno in (errno.EADDRINUSE, errno.ETIMEDOUT) else 4
    lower_priority(nice)
    server = AgentServer(listener.socket, linger, address, path)
    signal.signal(signal.SIGTERM, server.end)
    server.run()
    listener.close()
    return 0


if __name__ == "__main__":
    try:
        status = main()
    except RelightError as error:
        print(f"relight agent: {error}", file=sys.stderr)
        status = 2
    sys.stdout.flush()
    flush_events()
    os._exit(status)  # threads that still listen must not hold the process
