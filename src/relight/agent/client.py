"""The trainer's end: slots, layouts, saves, and what became of them."""

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
from relight.comm.standstill import CHECK_S, Standstill
from relight.errors import RelightError, StoreUnavailable, error_of
from relight.observe import emit

A = TypeVar("A", SlotsAllocated, HeldList, PeerAddress)


SEND_S = 60.0
"""Seconds that the agent may leave a message unread once its socket is full, at most."""


class AgentDied(StoreUnavailable):
    """Nobody is left to tell whether the save became a checkpoint: the log knows."""

    kind = "agent_died"


@dataclass(frozen=True, slots=True)
class SaveOutcome:
    """What became of a save: ``error`` is None if it is a checkpoint now."""

    report: SaveResult
    error: RelightError | None


@dataclass(frozen=True, slots=True)
class HeldPart:
    """A rank's part of a checkpoint whose packs are in this node's memory, each beginning at ``starts``. Close ``memory`` when done."""

    id: str
    rank: int
    memory: SharedMapping
    starts: tuple[int, ...]


class Agent:
    """A connection to the agent. ``on_done`` is called in a thread of its own, once for each save that was sent."""

    def __init__(self, connection: socket.socket, pid: int = 0) -> None:
        """``pid``: who is at the other end; 0: nobody knows."""
        self.pid = pid
        self.standstill = Standstill(pid)
        self._waits = 0
        """Calls of this process that wait for the agent now."""
        self._wire: AgentConnection[ToTrainer] = AgentConnection(connection, ToTrainer, (SlotsAllocated, HeldList))
        self._wire.bound(SEND_S, CHECK_S, self._check)
        self._answers: list[tuple[SlotsAllocated | HeldList | PeerAddress, list[int]]] = []
        self._late = 0
        """How many answers are still to come that nobody waits for any more."""
        self._changed = threading.Condition()
        self._lost: str | None = None
        self._running: dict[int, str] = {}
        self.on_done: Callable[[SaveOutcome], None] = lambda done: None
        self._reader = threading.Thread(target=self._read, name="relight-agent-reader", daemon=True)
        if not new_threads.start(self._reader):
            self._wire.close()
            raise StoreUnavailable("no thread could be started to listen to the agent", hint="raise ulimit -u or the cgroup's pids.max")
        _agents.add(self)

    @property
    def alive(self) -> bool:
        """Whether anybody is at the other end, as far as is known."""
        return self._lost is None

    def place(self, place: OpenRun) -> None:
        """Say whose saves these are."""
        self._send(place)

    def slots(self, size: int, count: int, memory: int | None, timeout: float) -> list[Slot]:
        """Up to ``count`` slots of at least ``size`` bytes, mapped. Empty, and told, if there is no room for one. Earlier ones are void."""
        self._send(AllocateSlots(size, count, memory))
        answer, fds = self._answer(SlotsAllocated, timeout)
        if answer.why:
            emit("agent.memory", f"snapshots in memory: {answer.why}", slots=len(fds), wanted=count, bytes=size)
        return [Slot(memory) for memory in _mapped(fds, len(answer.sizes), writable=True)]

    def layout(self, layout: TensorLayout) -> None:
        """Say what the tensors of the following saves are."""
        self._send(layout)

    def begin(self, slot: int, number: int) -> None:
        """Slot ``slot`` is being filled, and may be written meanwhile. Nothing is promised by it: ``save`` says when it counts."""
        try:
            self._wire.send(SlotFilling(slot, number))
        except ConnectionLost as error:
            self._loose(str(error))

    def hurry(self, number: int) -> None:
        """Somebody waits for save ``number``, and those before it."""
        with contextlib.suppress(ConnectionLost):
            self._wire.send(Flush(number))

    def save(self, slot: int, number: int, checkpoint_id: str) -> None:
        """Slot ``slot`` is sealed: have it written. What becomes of it is told to ``on_done``."""
        with self._changed:
            self._running[number] = checkpoint_id
        try:
            self._wire.send(SlotSealed(slot, number))
        except ConnectionLost as error:
            self._loose(str(error))
        if self._lost is not None:
            self._give_up()  # lost before this save was known to be running: nobody else tells of it

    def forget(self, number: int) -> None:
        """Expect no answer for a save if its slot was cleared before the agent began to write it."""
        with self._changed:
            self._running.pop(number, None)

    def held(self, timeout: float) -> list[HeldPart]:
        """What this run has in memory, newest last. The run is that of ``place``."""
        self._send(ListHeld())
        answer, fds = self._answer(HeldList, timeout)
        found = zip(answer.held, _mapped(fds, len(answer.held), writable=False), strict=True)
        return [HeldPart(one, rank, memory, tuple(starts)) for (one, rank, starts), memory in found]

    def meet(self, asked: ListenForPeers, timeout: float) -> PeerAddress:
        """Have it reached by agents of other nodes; where, it says."""
        self._send(asked)
        answer, _ = self._answer(PeerAddress, timeout)
        return answer

    def join(self, asked: JoinPeers) -> None:
        """Tell it who the others are."""
        self._send(asked)

    def leave(self) -> None:
        """The run comes to its end, and agents of other nodes need not hold any more of it."""
        self._send(LeavePeers())

    def bye(self, wait_s: float = 0.0) -> None:
        """The run is over: the agent keeps nothing for it. Waits until its saves are written and old ones removed, ``wait_s`` at most."""
        try:
            self._wire.send(EndRun())
        except ConnectionLost:
            return
        if wait_s:
            with self._waiting(), self._changed:
                self._changed.wait_for(lambda: self._lost is not None, wait_s)

    def close(self) -> None:
        """Let go. Saves that run go on; nobody hears of them here, so they are told to be lost: the log knows what became of them."""
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
        """Part from the connection in a forked child: it is the parent's, and stays open."""
        self._wire.abandon()
        self._drop_answers()
        self._changed = threading.Condition()  # another thread may have held the old one at the fork
        self._lost, self._running, self.on_done = "it belongs to the process that this one was forked from", {}, lambda done: None

    @contextlib.contextmanager
    def _waiting(self) -> Iterator[None]:
        """A call that waits for the agent: meanwhile an agent that is stopped is continued, or ended."""
        self._waits += 1
        try:
            yield
        finally:
            self._waits -= 1

    def _check(self) -> None:
        """In the reader's thread, while nothing comes: see ``Standstill``."""
        if not self.standstill.check(bool(self._running) or self._waits > 0):
            self._wire.hang_up()

    def _send(self, message: object) -> None:
        try:
            with self._waiting():
                self._wire.send(message)
        except ConnectionLost as error:
            self._loose(str(error))
            raise StoreUnavailable(f"the agent is gone: {error}") from error

    def _answer(self, kind: type[A], timeout: float) -> tuple[A, list[int]]:
        with self._waiting(), self._changed:
            if not self._changed.wait_for(lambda: self._answers or self._lost is not None, timeout):
                self._late += 1
                raise StoreUnavailable(f"the agent did not answer within {timeout:.0f} s; {self.standstill.words}")
            if not self._answers:
                raise StoreUnavailable(f"the agent is gone: {self._lost}")
            answer, fds = self._answers.pop(0)
        if not isinstance(answer, kind):
            close_all(fds)
            raise StoreUnavailable(f"the agent answered {type(answer).__name__} instead of {kind.__name__}")
        return answer, fds

    def _read(self) -> None:
        try:
            while True:
                message, fds = self._wire.receive()
                if isinstance(message, SaveResult):
                    self._finished(message)
                elif isinstance(message, ForwardedEvent):
                    emit(message.name, message.say, **message.fields)
                else:
                    with self._changed:
                        if self._late:  # they come in order: it is to a question that was given up
                            self._late -= 1
                            close_all(fds)
                            continue
                        self._answers.append((message, fds))
                        self._changed.notify_all()
        except ConnectionLost as error:
            self._loose(str(error))
        except MemoryError:
            self._loose("there was no memory for its messages")
        finally:
            self._loose("its messages are not read any more")  # by whatever error: no call may wait for an answer until its deadline
            self._wire.close()

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
        """What was running is told to have failed, each save once."""
        with self._changed:
            left, self._running = self._running, {}
            tell = self.on_done  # as it is now: whoever closes this end mutes it
        for number, checkpoint_id in left.items():
            tell(SaveOutcome(SaveResult(number, checkpoint_id), AgentDied("the agent died while it wrote this save")))


def _mapped(fds: list[int], count: int, *, writable: bool) -> list[SharedMapping]:
    """The memory that came with an answer: ``count`` pieces. ``StoreUnavailable``, and all of it is let go of, if it is not to be had."""
    found: list[SharedMapping] = []
    left = list(fds)
    try:
        if len(left) != count:  # the kernel drops those for which this process has no room
            raise StoreUnavailable(f"{len(left)} of {count} descriptors have come from the agent", hint="ulimit -n may be too low")
        while left:
            found.append(adopt(left.pop(0), writable=writable))
    except (RelightError, OSError) as error:
        close_all(left)
        for one in found:
            one.close()
        if isinstance(error, RelightError):
            raise
        raise StoreUnavailable(f"the agent's memory cannot be mapped: {error}") from error
    return found


_agents: weakref.WeakSet[Agent] = weakref.WeakSet()


def _in_child() -> None:
    for agent in list(_agents):
        agent._in_child()


os.register_at_fork(after_in_child=_in_child)
