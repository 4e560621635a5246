"""The agent's process: ``python -m relight.agent.server NAME NICE LINGER [WORDS DIRECTORY]``.

``NAME`` and ``DIRECTORY`` are those of its socket: see ``comm.local_sockets``. The trainer chose the directory.

One thread accepts connections. Each connection has one thread that reads the trainer's messages and one that writes
its saves, so ranks that wait for each other's parts do not block each other. The process ends by itself: at once when
the last trainer has sent ``EndRun`` and everything is written; ``LINGER`` seconds after the last trainer vanished
without it, since that trainer's successor can restore from the agent's memory.
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
    FindPeers,
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
)
from relight.agent.peer_service import AgentPeers, Offered
from relight.agent.slot_follower import PATIENCE_S, Abandoned, SlotFollower
from relight.agent.slot_writer import Backpressure, PlannedLayout, SlotWriter
from relight.agent.wire import FDS_MAX, AgentConnection, ConnectionLost, close_all
from relight.arena import FILLING, SEALED, SharedMapping, Slot, allocate, freeze, is_frozen, reading
from relight.comm import lower_priority, new_threads
from relight.comm.local_sockets import LocalDirectory, peer_of
from relight.comm.process_state import has_ended
from relight.comm.proof import prove_as_listener
from relight.commit.plugin_codecs import NOTES, SUFFIX
from relight.drain import Drainer
from relight.errors import NoSpace, RelightError
from relight.keys.dumps import keep_out_of_core_dumps
from relight.observe import Event, flush_events, subscribe, write_events
from relight.units import size_text

_TICK_S = 0.25
PROOF_S = 20.0
"""Seconds that a process which connects has to prove that it knows the secret."""
ORPHAN_S = 30.0
"""Seconds that the save of a trainer that has ended waits for other ranks' parts."""
OTHER_PARTS_WAIT_S = 1.0
"""Seconds that ``ListHeld`` waits for a save that waits for parts from other nodes."""
OWN_PARTS_WAIT_S = 0.25
"""Seconds that ``ListHeld`` waits for a save that waits for parts which only this agent could write."""
DRAIN_S = 120.0
"""Seconds that ``ListHeld`` waits for saves that are being written, at most."""


FORWARDED = ("codec.failed", "compact.unmatched")
"""Events that the agent also sends to its trainers."""


@dataclass(eq=False)
class TrainerSession:
    """The connection of one trainer."""

    wire: AgentConnection[ToAgent]
    pid: int = 0
    """0 if unknown."""
    writer: SlotWriter | None = None
    prepared: PlannedLayout | None = None
    slots: list[Slot] = field(default_factory=list)
    written: dict[int, SlotJob] = field(default_factory=dict)
    """Slot index → the last job that was queued for it."""
    pending: int = 0
    polite: bool = False
    open: bool = True
    hurried: int = 0
    """The last save that a caller waits for."""
    jobs: queue.Queue[SlotJob] = field(default_factory=queue.Queue)
    writing: threading.Thread | None = None


@dataclass(frozen=True, eq=False)
class CommittedSlot:
    """A slot that holds a committed checkpoint's bytes, as long as it is sealed with that number."""

    id: str
    number: int
    slot: Slot
    rank: int
    starts: tuple[int, ...]
    session: TrainerSession


@dataclass(eq=False)
class SlotJob:
    """One slot to write: sealed, or being filled."""

    session: TrainerSession
    index: int
    number: int
    slot: Slot
    prepared: PlannedLayout
    sealed: threading.Event = field(default_factory=threading.Event)
    """Set once the trainer has sent ``SlotSealed``: it then expects the result."""
    since: float = field(default_factory=time.monotonic)
    waits_since: float | None = None
    """Time at which its own part was written, so that it only waits for the commit."""
    waits_for: tuple[int, ...] = ()
    """Ranks with parts that were missing at the last check."""
    checkpoint: str = ""
    """The checkpoint's id; set once it waits."""
    result_sent: bool = False
    """Whether the result has been sent: only retention is left to do."""


def _new_slot(size: int) -> Slot:
    """Allocate a cleared slot of ``size`` bytes. Raise ``NoSpace`` or ``OSError`` if there is no memory."""
    slot = Slot(SharedMapping(allocate(size), size, writable=True))
    slot.memory.populate()
    slot.clear()
    return slot


def _reason(error: NoSpace | OSError) -> str:
    """Return why there is no slot, in words."""
    return error.what if isinstance(error, NoSpace) else str(error)


class AgentServer:
    """The state of the agent's process."""

    def __init__(self, listener: socket.socket, linger_s: float, name: str = "", path: str | None = None) -> None:
        self._path = path
        self._listener, self._linger_s, self._name = listener, linger_s, name
        self._lock = threading.RLock()
        self._sessions: set[TrainerSession] = set()
        self._pending = 0
        self._active: set[SlotJob] = set()
        self._kept: list[CommittedSlot] = []
        self._ranks: set[int] = set()
        """Ranks that this process writes for."""
        self._idle_since = time.monotonic()
        self._seen = False
        self._proving = 0
        """Connections to processes that have not proved themselves yet."""
        self._session_ended = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        """Readable once a connection has ended: the process may then have nothing left to do."""
        weakref.finalize(self, os.close, self._session_ended)
        self._ending = False
        self._drainer: Drainer | None = None
        self._neighbours = AgentPeers(self._send_all)

    def end(self, signum: int, frame: FrameType | None) -> None:
        """Accept no new trainer, write the sealed saves, and end."""
        self._ending = True

    def run(self) -> None:
        """Serve until no process needs the agent."""
        self._listener.setblocking(False)
        while not self._over():
            select.select([self._listener.fileno(), self._session_ended], [], [], _TICK_S)
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._session_ended)
            try:
                connection, _ = self._listener.accept()
            except BlockingIOError:
                continue
            except OSError:
                break
            with self._lock:
                self._proving += 1
            if not new_threads.start(
                threading.Thread(target=self._admit, args=(connection,), daemon=True, name="relight-agent-admit")
            ):
                connection.close()  # the trainer then writes its saves itself
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
            self._kept = [kept for kept in self._kept if _is_there(kept)]
            if self._seen and not self._kept and not self._neighbours.holds:
                return True
            return idle > self._linger_s

    # -- trainers

    def _admit(self, connection: socket.socket) -> None:
        """Serve a process of this user that proves that it knows the secret. Any other gets no answer, and is not
        counted."""
        try:
            pid, user = peer_of(connection)
            if user != os.geteuid():
                raise PermissionError("another user's")
            # read for each connection: the directory may have been removed and created again
            with LocalDirectory(self._path) as directory:
                secret = directory.secret()
            prove_as_listener(connection, secret, self._name, PROOF_S)
            connection.settimeout(None)
        except OSError:
            connection.close()
            with self._lock:
                self._proving -= 1
            os.eventfd_write(self._session_ended, 1)
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
                # no answer is possible, but its remaining messages still count
                with contextlib.suppress(ConnectionLost):
                    self._receive(session, message)
                self._write_without_thread(session)
                if session.polite:
                    break
        except ConnectionLost:
            pass
        except Exception as error:  # an invalid message: drop this trainer, keep serving the others
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
            self._enqueue(session, message.slot, message.number, sealed=True)
        elif isinstance(message, Flush):
            session.hurried = max(session.hurried, message.number)
        elif isinstance(message, ListHeld):
            self._commit_kept(session, message.waits)
        elif isinstance(message, ListenForPeers):
            session.wire.send(self._neighbours.meet(message))
        elif isinstance(message, FindPeers):
            session.wire.send(self._neighbours.find())
        elif isinstance(message, JoinPeers):
            self._neighbours.join(message)
        elif isinstance(message, LeavePeers):
            self._neighbours.leave()
        elif isinstance(message, EndRun):
            session.polite = True

    def _give_slots(self, session: TrainerSession, want: AllocateSlots) -> None:
        if want.more:
            self._add_slots(session, want)
            return
        with self._lock:
            session.slots, session.written = [], {}
            self._kept = [kept for kept in self._kept if kept.session is not session]
            left = [kept.slot for kept in self._kept if not kept.session.open and kept.slot.memory.size == want.size]
            spare = [slot for slot in left if not is_frozen(slot.memory.fd)]
            del left
            self._kept = [kept for kept in self._kept if kept.session.open]
        count, why = want.count, ""
        if want.memory is not None and want.memory < want.count * want.size:
            count = want.memory // want.size
            why = f"the limit of {size_text(want.memory)} has room for {count} of {want.count} slots of {size_text(want.size)}"
        while len(session.slots) < count:
            if spare:
                slot = spare.pop()
                slot.clear()
            else:
                try:
                    slot = _new_slot(want.size)
                except (NoSpace, OSError) as error:
                    why = _reason(error)
                    break
            session.slots.append(slot)
        sizes = [slot.memory.size for slot in session.slots]
        session.wire.send(SlotsAllocated(sizes, why), [slot.memory.fd for slot in session.slots])

    def _add_slots(self, session: TrainerSession, want: AllocateSlots) -> None:
        """Add slots while saves in the others are being written, which wait for nothing here."""
        added, why = list[Slot](), ""
        try:
            for _ in range(want.count):
                added.append(_new_slot(want.size))
        except (NoSpace, OSError) as error:
            why = _reason(error)
        with self._lock:
            session.slots += added
        session.wire.send(SlotsAllocated([slot.memory.size for slot in added], why), [slot.memory.fd for slot in added])

    def _commit_kept(self, session: TrainerSession, waits: bool) -> None:
        """Send the checkpoints in memory. ``waits``: after the sealed saves of the previous trainer are written, the newest."""
        ends = time.monotonic() + (DRAIN_S if waits else 0.0)
        while (self._writes() or self._has_unread_messages()) and time.monotonic() < ends:
            time.sleep(0.005)
        with self._lock:
            # the newest, if one message cannot carry all
            kept = [committed for committed in self._kept if _is_there(committed)][-FDS_MAX:]
        fds: list[int] = []
        try:
            with contextlib.suppress(OSError):  # no descriptor is left: send only the newest
                for committed in reversed(kept):
                    freeze(committed.slot.memory.fd)  # the receiver only reads, and must not reopen it for writing
                    fds.insert(0, reading(committed.slot.memory.fd))
            kept = kept[len(kept) - len(fds) :]
            session.wire.send(
                HeldList([(committed.id, committed.rank, list(committed.starts)) for committed in kept]), fds
            )
        finally:
            close_all(fds)

    def _writes(self) -> bool:
        """Return whether a save is being written that may become a checkpoint soon.

        Excluded are saves that wait for parts which no rank writes, and saves that are committed but for which old
        checkpoints are still being retired: that takes as long as reading a checkpoint.
        """
        now = time.monotonic()
        with self._lock:
            return self._pending > sum(job.result_sent or self._is_stuck(job, now) for job in self._active)

    def _has_unread_messages(self) -> bool:
        """Return whether a trainer has ended before all of its messages were read. It may have sealed a save that is
        unknown here.

        A trainer that has sent ``EndRun`` sends nothing more.
        """
        with self._lock:
            pids = [session.pid for session in self._sessions if session.open and not session.polite]
        return any(map(has_ended, pids))

    def _is_stuck(self, job: SlotJob, now: float) -> bool:
        if job.waits_since is None or not job.waits_for:
            return False
        patience_s = OWN_PARTS_WAIT_S if self._ranks.issuperset(job.waits_for) else OTHER_PARTS_WAIT_S
        return now - job.waits_since > patience_s

    def _part(self, session: TrainerSession) -> None:
        """Handle the end of a trainer: write the saves it sealed but did not report, and discard unsealed slots.

        A trainer that sent ``EndRun`` may wait for the end of the stream, which means that its saves are written and
        old ones removed.
        """
        while session.polite and session.pending:
            time.sleep(0.002)
        with self._lock:
            for index in range(len(session.slots)):
                try:
                    self._take_over(session, index)
                # any error: the session must end all the same, or this process would never end
                except Exception as error:
                    print(f"relight agent: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
            session.open = False
            if session.polite:  # a trainer that saved nothing ends the run for earlier trainers that are gone
                saved = session.prepared is not None
                self._kept = [
                    kept for kept in self._kept if (kept.session is not session if saved else kept.session.open)
                ]
            self._sessions.discard(session)
            self._idle_since = time.monotonic()
            if session.polite and not self._sessions:  # the run is over here: no process will restore from memory
                self._neighbours.close()
        self._write_without_thread(session)
        session.wire.close()
        os.eventfd_write(self._session_ended, 1)

    def _take_over(self, session: TrainerSession, index: int) -> None:
        state, number = session.slots[index].state()
        if state == SEALED:
            self._enqueue(session, index, number, sealed=True)
        elif state == FILLING:
            session.slots[index].clear()

    # -- writing

    def _enqueue(self, session: TrainerSession, index: int, number: int, *, sealed: bool = False) -> None:
        """Queue a save to be written, once.

        If the system refuses a thread for that, a save that is still being filled is not queued: this thread receives
        the messages, and writes the save when it is sealed (``_write_without_thread``).
        """
        with self._lock:
            if session.prepared is None or session.writer is None or not 0 <= index < len(session.slots):
                raise ConnectionLost("a save before its layout")
            job = session.written.get(index)
            if job is None or job.number < number:
                if not self._has_writer(session) and not sealed:
                    return
                job = session.written[index] = SlotJob(session, index, number, session.slots[index], session.prepared)
                self._pending += 1
                session.pending += 1
                self._kept = [kept for kept in self._kept if kept.slot is not job.slot]
                session.jobs.put(job)
            if sealed and job.number == number:
                job.sealed.set()

    def _has_writer(self, session: TrainerSession) -> bool:
        """Start the session's writing thread at the first save. Return False if the system refuses it; the next save
        tries again."""
        if session.writing is None:
            thread = threading.Thread(target=self._work, args=(session,), name="relight-agent-writer", daemon=True)
            if new_threads.start(thread):
                session.writing = thread
        return session.writing is not None

    def _work(self, session: TrainerSession) -> None:
        while session.open or session.pending:
            try:
                job = session.jobs.get(timeout=_TICK_S)
            except queue.Empty:
                continue
            self._write_job(job)

    def _write_without_thread(self, session: TrainerSession) -> None:
        """Write the queued saves in the thread that receives the session's messages, if there is no other thread."""
        while session.writing is None:
            try:
                job = session.jobs.get_nowait()
            except queue.Empty:
                return
            session.hurried = max(session.hurried, job.number)  # no Flush can be received meanwhile
            self._write_job(job)

    def _write_job(self, job: SlotJob) -> None:
        with self._lock:
            self._active.add(job)
        try:
            self._write(job)
        except Abandoned:
            self._abandon(job)
        except Exception as error:  # no trainer gets this error, but the thread must survive for the next save
            print(f"relight agent: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        finally:
            with self._lock:
                self._active.discard(job)
                job.session.pending -= 1
                self._pending -= 1
                self._idle_since = time.monotonic()

    def _abandon(self, job: SlotJob) -> None:
        """Discard what was written of a save. If its slot is sealed after all, write it from the beginning."""
        with self._lock:
            if job.session.written.get(job.index) is job:
                del job.session.written[job.index]
                if job.slot.state() == (SEALED, job.number):
                    self._enqueue(job.session, job.index, job.number, sealed=job.sealed.is_set())

    def _waits(self, job: SlotJob, checkpoint: str, missing: Sequence[int]) -> bool:
        now = time.monotonic()
        with self._lock:
            if job.waits_since is None:
                job.waits_since = now
            job.checkpoint, job.waits_for = checkpoint, tuple(missing)
        return job.session.open or job.session.polite or now - job.waits_since < ORPHAN_S

    def _is_made(self, checkpoint: str) -> None:
        """Note that one rank's save is committed: other ranks' jobs for the same checkpoint will finish in a moment."""
        with self._lock:
            for job in self._active:
                if job.checkpoint == checkpoint:
                    job.waits_since = time.monotonic()

    def _may_hold(self, job: SlotJob) -> bool:
        """Return whether the save may wait for space: no caller waits for it, and it is still wanted."""
        session = job.session
        runs = session.open and not session.polite and not self._ending
        return runs and job.number > session.hurried and job.slot.state()[1] == job.number

    def _report_wait(self, job: SlotJob, event: ForwardedEvent) -> None:
        """Forward the event that the save waits, and have space made by draining."""
        self._send(job.session, event)
        if job.session.writer is not None:
            self._drain(job.session.writer)

    def _write(self, job: SlotJob) -> None:
        writer = job.session.writer
        assert writer is not None
        follow = SlotFollower(job.slot, job.number, lambda: job.session.open)
        try:
            follow.until(0)
            hold = Backpressure(
                job.since, lambda: self._may_hold(job), lambda *event: self._report_wait(job, ForwardedEvent(*event))
            )
            report = writer.save(
                job.slot, job.prepared, job.number, follow, partial(self._waits, job), hold, job.session.slots
            )
        except Abandoned:
            raise
        except Exception as error:
            report = SaveResult(job.number, "", error=words_of(error, "agent"))
        if report.error is None and not job.session.polite:
            prepared = job.prepared
            kept = CommittedSlot(report.id, job.number, job.slot, prepared.rank, prepared.starts, job.session)
            with self._lock:  # before the trainer gets the result: it may die right after
                self._kept.append(kept)
                self._is_made(report.id)
            sizes = tuple(pack.size for pack in prepared.plan.packs)
            is_there = partial(_is_there, kept)
            self._neighbours.offer(
                Offered(report.id, report.seq, prepared.rank, job.slot.memory, prepared.starts, sizes, is_there)
            )
        if job.session.open:
            job.sealed.wait(PATIENCE_S)  # a trainer that has not sent SlotSealed expects no result yet
        self._send(job.session, report)
        with self._lock:
            job.result_sent = True
        if report.error is None:
            session = job.session
            pruned = writer.prune(
                lambda: session.open and not self._ending, lambda: session.polite, lambda: self._pending > 1
            )
            if pruned is not None:
                self._send(job.session, ForwardedEvent(*pruned))
            self._drain(writer)

    def _drain(self, writer: SlotWriter) -> None:
        """Have committed checkpoints copied to the run's further tiers, if there are any."""
        with contextlib.suppress(RelightError):
            if not writer.has_tiers():
                return
            with self._lock:
                if self._drainer is None:
                    place = writer.place
                    self._drainer = Drainer(
                        place.url,
                        place.run,
                        self._send_all,
                        lambda: bool(self._sessions),
                        nice=place.nice + 5,
                        guard=writer.guard,
                        ranks=lambda: tuple(self._ranks),
                    )
            self._drainer.wake()

    def _send_all(self, name: str, message: str, fields: dict[str, Any]) -> None:
        with self._lock:
            sessions = list(self._sessions)
        for session in sessions:
            self._send(session, ForwardedEvent(name, message, fields))

    def forward(self, event: Event) -> None:
        """Send an event that the user of the trainer must see, and that code which also runs in trainers emits."""
        if event.name in FORWARDED:
            fields = dict(event.fields)
            self._send_all(event.name, str(fields.pop("message", "")), fields)

    def _send(self, session: TrainerSession, message: SaveResult | ForwardedEvent) -> None:
        if session.open or session.polite:
            try:
                session.wire.send(message)
            except (ConnectionLost, OSError):
                pass


def _watch(session: TrainerSession, pid: int) -> None:
    """Hang up when the trainer dies: its forked children may keep the other end of the socket open longer."""
    try:
        fd = os.pidfd_open(pid)
    except OSError:  # dead already, or in another process namespace: rely on the end of the stream
        return
    try:
        while session.open and not select.select([fd], [], [], 1.0)[0]:
            pass
    finally:
        os.close(fd)
    if session.open:
        session.wire.hang_up()


def _is_there(committed: CommittedSlot) -> bool:
    return committed.slot.state() == (SEALED, committed.number)


def main() -> int:
    """Serve. Exit status 3: another agent has the name; 4: the agent cannot listen."""
    address, nice, linger = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
    if len(sys.argv) > 4:
        faulthandler.enable(int(sys.argv[4]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    path = sys.argv[5] if len(sys.argv) > 5 else None
    try:
        with LocalDirectory(path) as directory:
            listener = directory.listen(address, 128)
            NOTES.keep_in(f"{directory.path}/{address}{SUFFIX}")
    except OSError as error:
        print(f"relight agent: {error}", file=sys.stderr)
        return 3 if error.errno in (errno.EADDRINUSE, errno.ETIMEDOUT) else 4
    lower_priority(nice)
    server = AgentServer(listener.socket, linger, address, path)
    signal.signal(signal.SIGTERM, server.end)
    subscribe(server.forward)
    server.run()
    NOTES.remove()
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
    os._exit(status)  # threads that still wait for messages must not keep the process alive
