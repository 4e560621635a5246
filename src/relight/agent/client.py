"""The trainer's end of the connection to the agent: slots, layouts, saves and their results."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

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
    PeerAddress,
    SaveResult,
    SlotFilling,
    SlotsAllocated,
    SlotSealed,
    TensorLayout,
    ToTrainer,
)
from relight.agent.wire import AgentConnection, ConnectionLost, close_all
from relight.arena import SharedMapping, Slot, adopt
from relight.comm import new_threads
from relight.comm.process_state import has_ended
from relight.comm.standstill import CHECK_S, Standstill
from relight.commit.plugin_codecs import ended_with
from relight.errors import RelightError, StoreUnavailable, error_of
from relight.observe import emit
from relight.units import duration_text

A = TypeVar("A", SlotsAllocated, HeldList, PeerAddress)


EXIT_S = 1.0
"""Seconds to wait for the end of an agent after that of its connection: the kernel closes the connection first."""
SEND_S = 60.0
"""Seconds that the agent may leave a message unread once its socket is full, at most."""


class AgentDied(StoreUnavailable):
    """The agent died during a save. Whether the save became a checkpoint is recorded in the log."""

    kind = "agent_died"


@dataclass(frozen=True, slots=True)
class SaveOutcome:
    """The result of a save. ``error`` is None if the checkpoint is committed."""

    report: SaveResult
    error: RelightError | None


@dataclass(frozen=True, slots=True)
class HeldPart:
    """One rank's part of a checkpoint, with its packs in this node's memory. Each pack begins at its offset in
    ``starts``. Close ``memory`` when done."""

    id: str
    rank: int
    memory: SharedMapping
    starts: tuple[int, ...]


class Agent:
    """A connection to the agent. ``on_done`` is called in a background thread, once for each save that was sent.

    The connection ends with this object.
    """

    def __init__(self, connection: socket.socket, pid: int = 0, codec_notes: str = "") -> None:
        """``pid``: the process at the other end; 0 if unknown. ``codec_notes``: its file of running codecs."""
        self.pid, self._codec_notes = pid, codec_notes
        self.standstill = Standstill(pid)
        self._waits = 0
        """Calls of this process that wait for the agent now."""
        self._wire: AgentConnection[ToTrainer] = AgentConnection(connection, ToTrainer, (SlotsAllocated, HeldList))
        self._wire.bound(SEND_S, CHECK_S, _if_alive(self._check))
        self._answers: list[tuple[SlotsAllocated | HeldList | PeerAddress, list[int]]] = []
        self._late = 0
        """Number of answers that are still expected after their callers have timed out."""
        self._changed = threading.Condition()
        self._lost: str | None = None
        self._running: dict[int, str] = {}
        self.on_done: Callable[[SaveOutcome], None] = lambda done: None
        self.on_writing: Callable[[], None] = lambda: None
        """Called each ``CHECK_S`` seconds in the background thread while the agent writes saves."""
        # The thread does not keep this object alive: an interrupt may lose it before its owner has it.
        weakref.finalize(self, self._wire.hang_up).atexit = False
        self._reader = threading.Thread(
            target=_read, args=(weakref.ref(self), self._wire), name="relight-agent-reader", daemon=True
        )
        if not new_threads.start(self._reader):
            self._wire.close()
            raise StoreUnavailable(
                "no thread could be started to listen to the agent", hint="raise ulimit -u or the cgroup's pids.max"
            )
        _agents.add(self)

    @property
    def alive(self) -> bool:
        """Return whether the connection is open, as far as is known."""
        return self._lost is None

    def place(self, place: OpenRun) -> None:
        """Open the run to which the following saves belong."""
        self._send(place)

    def slots(self, size: int, count: int, memory: int | None, timeout: float, *, more: bool = False) -> list[Slot]:
        """Return up to ``count`` mapped slots of at least ``size`` bytes. Earlier slots become invalid, unless ``more``.

        If there is no memory for a slot, return an empty list and emit ``agent.memory``.
        """
        self._send(AllocateSlots(size, count, memory, more))
        answer, fds = self._answer(SlotsAllocated, timeout)
        if answer.why:
            emit("agent.memory", f"snapshots in memory: {answer.why}", slots=len(fds), wanted=count, bytes=size)
        return [Slot(memory) for memory in _mapped(fds, len(answer.sizes), writable=True, limited=self._wire.cut_off)]

    def layout(self, layout: TensorLayout) -> None:
        """Send the tensors' layout for the following saves."""
        self._send(layout)

    def begin(self, slot: int, number: int) -> None:
        """Announce that slot ``slot`` is being filled, so that the agent may write it meanwhile. The save counts only
        once ``save`` is called."""
        try:
            self._wire.send(SlotFilling(slot, number))
        except ConnectionLost as error:
            self._loose(str(error))

    def hurry(self, number: int) -> None:
        """Ask the agent to finish save ``number`` and those before it without delay, because a caller waits for them."""
        with contextlib.suppress(ConnectionLost):
            self._wire.send(Flush(number))

    def save(self, slot: int, number: int, checkpoint_id: str) -> None:
        """Have the agent write slot ``slot``, which is sealed. ``on_done`` receives the result."""
        with self._changed:
            self._running[number] = checkpoint_id
        try:
            self._wire.send(SlotSealed(slot, number))
        except ConnectionLost as error:
            self._loose(str(error))
        if self._lost is not None:
            self._give_up()  # lost before this save was registered, so no other call reports its failure

    def forget(self, number: int) -> None:
        """Expect no answer for a save. Its slot was cleared before the agent began to write it."""
        with self._changed:
            self._running.pop(number, None)

    def held(self, timeout: float, *, waits: bool = True) -> list[HeldPart]:
        """Return the parts of this run's checkpoints that are in the agent's memory, newest last. ``place`` chose the run.

        ``waits``: first until the previous trainer's saves are written. Next to a living trainer, there is always one more.
        """
        self._send(ListHeld(waits))
        answer, fds = self._answer(HeldList, timeout)
        parts = zip(
            answer.held, _mapped(fds, len(answer.held), writable=False, limited=self._wire.cut_off), strict=True
        )
        return [HeldPart(checkpoint_id, rank, memory, tuple(starts)) for (checkpoint_id, rank, starts), memory in parts]

    def meet(self, request: ListenForPeers, timeout: float) -> PeerAddress:
        """Have the agent listen for agents of other nodes. Return its address."""
        self._send(request)
        answer, _ = self._answer(PeerAddress, timeout)
        return answer

    def find_peers(self, timeout: float) -> PeerAddress:
        """Return the addresses of the agents on other nodes that hold parts of this run, and the token that they take."""
        self._send(FindPeers())
        answer, _ = self._answer(PeerAddress, timeout)
        return answer

    def join(self, request: JoinPeers) -> None:
        """Send the agent the list of its peers."""
        self._send(request)

    def leave(self) -> None:
        """Report that the run ends: agents of other nodes need not protect it any more."""
        self._send(LeavePeers())

    def bye(self, wait_s: float = 0.0) -> None:
        """End the run: the agent then keeps nothing for it.

        Waits until its saves are written and old checkpoints removed, ``wait_s`` seconds at most.
        """
        try:
            self._wire.send(EndRun())
        except ConnectionLost:
            return
        if wait_s:
            with self._waiting(), self._changed:
                self._changed.wait_for(lambda: self._lost is not None, wait_s)

    def close(self) -> None:
        """Close the connection. Running saves continue, but this process gets no result.

        Their results are in the log.
        """
        self._give_up()
        self.on_done = lambda done: None
        self._wire.hang_up()
        if threading.current_thread() is not self._reader:
            self._reader.join(5)
        self._drop_answers()

    def _drop_answers(self) -> None:
        """Close the descriptors of answers that no call took."""
        left, self._answers = self._answers, []
        for _, fds in left:
            close_all(fds)

    def _in_child(self) -> None:
        """Drop the connection in a forked child: it belongs to the parent, and stays open there."""
        self._wire.abandon()
        self._drop_answers()
        self._changed = threading.Condition()  # another thread may have held the old one at the fork
        self._lost, self._running, self.on_done = (
            "it belongs to the process that this one was forked from",
            {},
            lambda done: None,
        )

    @contextlib.contextmanager
    def _waiting(self) -> Iterator[None]:
        """Count a call that waits for the agent. Meanwhile a stopped agent is continued, or ended."""
        self._waits += 1
        try:
            yield
        finally:
            self._waits -= 1

    def _check(self) -> None:
        """Check for a stopped agent, in the reader's thread, while no message arrives. See ``Standstill``."""
        if not self.standstill.check(bool(self._running) or self._waits > 0):
            self._wire.hang_up()
        elif self._running:
            self.on_writing()

    def _send(self, message: object) -> None:
        try:
            with self._waiting():
                self._wire.send(message)
        except ConnectionLost as error:
            self._loose(str(error))
            raise StoreUnavailable(f"the agent is gone: {error}") from error

    def _answer(self, kind: type[A], timeout: float) -> tuple[A, list[int]]:
        with self._waiting(), self._changed:
            try:
                in_time = self._changed.wait_for(lambda: self._answers or self._lost is not None, timeout)
            except BaseException:  # an interrupt: the answer still comes, and is not that to the next request
                self._late += 1
                raise
            if not in_time:
                self._late += 1
                raise StoreUnavailable(
                    f"the agent did not answer within {duration_text(timeout)}; {self.standstill.words}"
                )
            if not self._answers:
                raise StoreUnavailable(f"the agent is gone: {self._lost}")
            answer, fds = self._answers.pop(0)
        if not isinstance(answer, kind):
            close_all(fds)
            raise StoreUnavailable(f"the agent answered {type(answer).__name__} instead of {kind.__name__}")
        return answer, fds

    def _take(self, message: ToTrainer, fds: list[int]) -> None:
        """Take a message, in the reader's thread."""
        if isinstance(message, SaveResult):
            self._finished(message)
        elif isinstance(message, ForwardedEvent):
            emit(message.name, message.message, **message.fields)
        else:
            with self._changed:
                # answers arrive in order, so this one belongs to a request that timed out or was interrupted
                if self._late:
                    self._late -= 1
                    close_all(fds)
                    return
                self._answers.append((message, fds))
                self._changed.notify_all()

    def _finished(self, report: SaveResult) -> None:
        with self._changed:
            self._running.pop(report.number, None)
        error = None
        if report.error is not None:
            kind, what, where, hint, retryable, details = report.error
            error = error_of(kind)(what, where=where, hint=hint, retryable=retryable, details=details)
        self.on_done(SaveOutcome(report, error))

    def _loose(self, why: str) -> None:
        with self._changed:
            if self._lost is not None:
                return
            self._lost = why
            self._changed.notify_all()
        self._give_up()

    def _give_up(self) -> None:
        """Report every running save as failed, once."""
        with self._changed:
            left, self._running = self._running, {}
            report = self.on_done  # read it now: close() replaces it
        is_dead = bool(left) and self._lost is not None and has_ended(self.pid, EXIT_S)  # not if close() was called
        codecs = ended_with(self._codec_notes) if is_dead else []
        why = f"; codec {' or '.join(codecs)} was running, and is not used any more" if codecs else ""
        hint = "leave it out of Compact(plugin_codecs=…), and report it to its authors" if codecs else ""
        for number, checkpoint_id in left.items():
            error = AgentDied(f"the agent died while it wrote this save{why}", hint=hint)
            report(SaveOutcome(SaveResult(number, checkpoint_id), error))


def _if_alive(method: Callable[[], None]) -> Callable[[], None]:
    """Return a function that calls the method as long as its object exists."""
    reference = weakref.WeakMethod(method)

    def call() -> None:
        alive = reference()
        if alive is not None:
            alive()

    return call


def _read(reference: weakref.ref[Agent], wire: AgentConnection[ToTrainer]) -> None:
    """Read messages until the connection ends, or the ``Agent`` does."""
    why = "its messages are not read any more"  # for any other error: otherwise calls would wait until their deadline
    try:
        while True:
            message, fds = wire.receive()
            agent = reference()
            if agent is None:
                close_all(fds)
                return
            agent._take(message, fds)
            del agent, message, fds
    except ConnectionLost as error:
        why = str(error)
    except MemoryError:
        why = "there was no memory for its messages"
    finally:
        agent = reference()
        if agent is not None:
            agent._loose(why)
        wire.close()


def _mapped(fds: list[int], count: int, *, writable: bool, limited: bool) -> list[SharedMapping]:
    """Map the ``count`` pieces of memory that came with an answer.

    Raise ``StoreUnavailable`` if that fails; all descriptors are then closed. ``limited``: the kernel has dropped
    descriptors that exceed this process's limit.
    """
    mappings: list[SharedMapping] = []
    left = list(fds)
    try:
        if len(left) != count:
            raise StoreUnavailable(
                f"{len(left)} of {count} file descriptors of shared memory were received from the agent",
                hint="raise the limit of open files: ulimit -n" if limited else "start the job again, and report this",
            )
        while left:
            mappings.append(adopt(left.pop(0), writable=writable))
    except (RelightError, OSError) as error:
        close_all(left)
        for mapping in mappings:
            mapping.close()
        if isinstance(error, RelightError):
            raise
        raise StoreUnavailable(f"the agent's memory cannot be mapped: {error}") from error
    return mappings


_agents: weakref.WeakSet[Agent] = weakref.WeakSet()
"""For the fork handler: a child must not use the connections of its parent."""


def _in_child() -> None:
    for agent in list(_agents):
        agent._in_child()


os.register_at_fork(after_in_child=_in_child)
