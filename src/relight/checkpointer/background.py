"""Background saves: the state is copied to a slot in the agent's shared memory, and the agent writes and commits it."""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait

import msgspec
import torch

from relight.agent import Agent, AgentDied, Request, SaveOutcome, TensorLayout, connect
from relight.agent import OpenRun as AgentPlace
from relight.agent import TensorSpec as AgentItem
from relight.agent.launch import START_S
from relight.agent.messages import SaveResult, to_bits
from relight.agent.slot_writer import plan_layout
from relight.arena import SEALED, Slot, lay_out
from relight.capture import Captured
from relight.capture.tensors import TensorSource
from relight.checkpointer.frozen_params import FrozenParams
from relight.checkpointer.page_locks import RUNTIMES, pin_memory
from relight.checkpointer.slot_copy_plan import SlotCopyPlan, in_order
from relight.checkpointer.slot_fill import FillState, SlotFill
from relight.checkpointer.state_shape import StateShape, layout_key
from relight.comm import new_threads
from relight.comm.new_threads import ThreadPool
from relight.commit import Attempt, CommitTarget
from relight.commit.multi_rank import abort_part
from relight.commit.parallel_packs import lanes_of_rank
from relight.commit.save import Participant, new_id
from relight.errors import RelightError, known
from relight.format import encode_tree
from relight.heartbeat import heartbeat
from relight.layout import Item
from relight.log import Log, fold
from relight.observe import emit
from relight.policy import Keep, Limits
from relight.policy.overlap import Overlap
from relight.snapshot import (
    Copier,
    DeviceSnapshot,
    GuardedTensors,
    Snapshot,
    StepHook,
    can_overlap,
)
from relight.store.wrapper import guard_of

FOLLOWED_FROM = 16
"""Number of slices (mostly 1 MiB) from which the agent starts to write while the rest is still being copied."""
_UNHURRIED_S = 16.0
"""Seconds left for a wait from which a stopped agent gets its full time to continue by itself; with less it gets that fraction."""
ONE_SLOT_FROM = 64 << 20
"""Bytes of a slot from which a single rank begins with one. A smaller state has two at once, so that two saves in a row need no wait."""
REQUEST_ROOM = 1 << 20
"""Bytes for a request beyond twice the first tree: room for larger later trees, metrics and settings."""


class Background:
    """Background saves through the agent, for one attempt. ``on_done`` is called in another thread, once for each started save."""

    begins_with_one = True
    """Whether a large state begins with one slot, if nothing else needs two."""

    def __init__(
        self,
        attempt: Attempt,
        components: Mapping[str, object],
        keep: Keep,
        limits: Limits,
        on_done: Callable[[SaveOutcome], None],
        on_sealed: Callable[[int, float], None],
        rank: int = 0,
        world: int = 1,
        trusted: FrozenParams | None = None,
    ) -> None:
        self._trusted = trusted or FrozenParams(None)
        self._attempt, self._components, self._limits = attempt, components, limits
        self._keep = msgspec.msgpack.encode(keep)
        self._rank, self._world, self._lanes = rank, world, lanes_of_rank(attempt.place.store, world)
        self._on_done, self._on_sealed = on_done, on_sealed
        self._agent: Agent | None = None
        self._shape: StateShape | None = None
        self._fill: SlotFill | None = None
        self._snapshot: Snapshot | None = None
        self._queued: list[DeviceSnapshot] = []
        self._finisher = ThreadPool(1, "relight-finish")
        self._finishing: Future[None] | None = None
        self._copier = Copier(1)
        self._hook = StepHook(self.barrier)
        self._number = 0
        self._seats: dict[int, tuple[int, Participant]] = {}
        """Step and seat of each save in progress, if several ranks make it."""
        self._changed = threading.Condition()
        self.bound: Callable[[float], float] = lambda seconds: seconds
        """Returns the seconds that a wait may take: fewer than the deadline if the trainer must end sooner."""
        self._refused: str = ""
        self._lost_reason = ""
        """The last reported reason why there is no agent."""
        self._joining_since = self._join_again = 0.0
        self._warming: threading.Thread | None = None
        self._growing: threading.Thread | None = None
        _all.add(self)
        self._untouched = True
        """False after training has written to a tensor while it was copied: later saves copy before ``step()`` returns."""
        self._way = Overlap()
        self._overlaps = self._was_busy = True

    def barrier(self) -> None:
        """Wait until the running snapshot no longer reads live tensors. Called before every ``optimizer.step``."""
        if self._snapshot is not None:
            self._snapshot.wait()
            self._snapshot = None
        for snapshot in self._queued:
            snapshot.before_step()
        self._queued = []

    def interval(self, seconds: float) -> None:
        """Record the seconds between two calls of ``step()``, from which the cost of a save outside its own call is measured."""
        shape, before = self._shape, self._was_busy
        self._was_busy = shape is None or bool(shape.busy)
        self._way.interval(seconds, quiet=not (before or self._was_busy))

    def began(self, blocked_s: float) -> None:
        """Record that a save was started, and took ``blocked_s`` seconds in the training thread."""
        self._way.began(self._overlaps, blocked_s)

    def warm_up(self, state: Captured) -> None:
        """Start the agent, allocate memory for such a state and plan its copies, in a thread, so that the first save waits for none of it.

        Idempotent.
        """
        if self._warming is not None:
            return
        tree_bytes = len(encode_tree(state.tree))

        def prepare() -> None:
            with contextlib.suppress(RelightError):
                shape = self._prepare(state, tree_bytes)
                if shape is not None and state.fixed is not None:
                    shape.plan_fixed(state, can_overlap(self._components.values()))

        warming = threading.Thread(target=prepare, name="relight-warm-up", daemon=True)
        if new_threads.start(warming):  # else the first save waits for agent and memory itself
            self._warming = warming

    @property
    def warmed(self) -> bool:
        """Whether agent and memory were requested."""
        return self._warming is not None or self._shape is not None

    @property
    def _deadline_s(self) -> float:
        return self.bound(self._limits.deadline_s)

    @property
    def agent_words(self) -> str:
        """The state of the last copy, if it is under way, and the agent's, for the message of a wait that timed out."""
        state = self._fill.state if self._fill is not None else None
        copy = f"its copy is {state.value}; " if state in (FillState.COPYING, FillState.ARRIVING) else ""
        return copy + (f"the agent: {self._agent.standstill.words}" if self._agent is not None else "there is no agent")

    def _warm(self, wait_s: float) -> bool:
        if self._warming is not None and self._warming.is_alive():
            self._warming.join(wait_s)
            return not self._warming.is_alive()
        return True

    def free_slot(self, wait_s: float = 0.0, hurry: bool = False, yields: Callable[[int], bool] | None = None) -> bool:
        """Wait up to ``wait_s`` seconds for a free slot. Return whether there is one. ``hurry``: the save must start, so no earlier save
        may be held back. ``yields`` is called with the number of each save that only waits, newest first; if True, its slot is taken."""
        self.barrier()
        if not self._warm(self.bound(wait_s)):
            return False
        with self._changed:
            shape = self._shape
            if shape is None or not self._alive():
                return True
            if len(shape.busy) == len(shape.slots):
                if hurry:
                    self.hurry()
                self._grow(shape)
            if yields is not None and len(shape.busy) == len(shape.slots):
                self._take_slot(shape, yields)
            return self._changed.wait_for(lambda: len(shape.busy) < len(shape.slots), self.bound(wait_s))

    def _grow(self, shape: StateShape) -> None:
        """Allocate a second slot in a thread: the interval between saves is shorter than the time to write one."""
        if not shape.may_grow:
            return
        shape.may_grow = False
        agent, size = self._agent, shape.slots[0].memory.size

        def grow() -> None:
            assert agent is not None
            with contextlib.suppress(
                RelightError, OSError
            ):  # one slot is enough to continue; the agent reports what it lacks
                slots = agent.slots(size, 1, None, self._limits.deadline_s, more=True)
                for slot in slots:
                    slot.memory.populate()
                # not under the lock, for which the trainer waits: it takes seconds
                usable = not shape.pinned or _pin(slots, shape.device)
                with self._changed:
                    if self._shape is shape and usable:
                        shape.slots += slots
                        self._changed.notify_all()
                        return
                for slot in slots:
                    slot.memory.close()

        growing = threading.Thread(target=grow, name="relight-grow", daemon=True)
        if new_threads.start(growing):
            self._growing = growing

    def _has_grown(self) -> None:
        """Wait until a second slot that was requested is there."""
        if self._growing is not None:
            self._growing.join(self._deadline_s)
            self._growing = None

    def _take_slot(self, shape: StateShape, yields: Callable[[int], bool]) -> None:
        """Clear the slot of a sealed save that waits for the one before it, if it ``yields``.

        The agent finds another number in the slot, or none, and drops that save: it compares the number again after the packs are written,
        before the commit.
        """
        first = min(shape.busy.values())
        for index, number in sorted(shape.busy.items(), key=lambda item: -item[1]):
            slot = shape.slots[index]
            waits = (
                number != first and number not in self._seats and slot.state() == (SEALED, number) and not slot.written
            )
            if waits and yields(number):
                slot.clear()
                if self._agent is not None:
                    self._agent.forget(number)
                self._free(number)
                return

    def hurry(self) -> None:
        """Make the agent write all started saves without holding any back, because a caller waits for them."""
        if self._agent is not None:
            self._agent.hurry(self._number)

    @property
    def place(self) -> CommitTarget:
        """Store, run and attempt that these saves commit to."""
        return self._attempt.place

    @property
    def free_slots(self) -> int | None:
        """Number of free slots; None if none were allocated yet."""
        shape = self._shape
        return None if shape is None else len(shape.slots) - len(shape.busy)

    def save(
        self, state: Captured, request: Callable[[int, str, bytes], Request], checkpoint_id: str = ""
    ) -> int | None:
        """Start a save, and return the number that ``on_done`` will report. Return None if it is impossible now (no memory, no agent)."""
        tree = encode_tree(state.tree)
        if not self._warm(self._deadline_s):
            return None
        shape = self._prepare(state, len(tree))
        if shape is None:
            return None
        free = [i for i in range(len(shape.slots)) if i not in shape.busy]
        # keep the newest save: a restore reads it, a save compares with it
        index = min(free, key=lambda i: shape.slots[i].state()[1])
        slot, agent = shape.slots[index], self._agent
        assert agent is not None
        number = self._number = self._number + 1
        checkpoint_id = checkpoint_id or new_id()
        frozen, same, message = self._trusted.frozen(state), frozenset[int](), request(number, checkpoint_id, tree)
        marks = frozen.fingerprint() if frozen is not None else None
        if frozen is not None and marks is not None:
            same = shape.same_there(index, frozen, marks, self._trusted.wrong)
            message = msgspec.structs.replace(message, same=to_bits(same), since=shape.filled.pop(index, (0,))[0])
        if not message.patient:
            agent.hurry(number)
        body = msgspec.msgpack.encode(message)
        if shape.layout.request + len(body) > shape.layout.size:
            self._shape = None  # the request does not fit: the next save allocates larger slots
            return None
        self._fill = fill = SlotFill(number, checkpoint_id, index, slot, shape.layout.request, agent, self)
        fill.frozen = (frozen, marks) if frozen is not None and marks is not None else None
        with self._changed:
            shape.busy[index] = number
        if message.seat is not None:
            self._seats[number] = message.info.step, message.seat
        try:
            fill.begin(body)
            if self._finishing is not None:
                self._finishing.result(self._deadline_s)  # copies from devices use the same buffers at each save
            base = shape.address(index)
            self._overlaps = self._untouched and can_overlap(self._components.values()) and self._way.choose()
            copies = shape.copies_of(state, self._overlaps, same)
            for plan in copies:
                fill.devices += [
                    device.begin(torch.frombuffer(slot.view, dtype=torch.uint8)) for device in plan.devices
                ]
            for plan in copies:
                plan.copy_now(slot.view, base)
            self._copy_later(fill, copies, base)
        except BaseException as error:
            self._snapshot = None  # otherwise the trainer would copy the rest of it into a slot of another save
            is_open = fill.state in (FillState.COPYING, FillState.ARRIVING)  # else its end was reported already
            if is_open:
                fill.abandon()
                self._release(fill, error)
            if not isinstance(error, RelightError):
                raise
            if is_open:
                self._on_done(SaveOutcome(_report(number, checkpoint_id), error))  # another rank's bytes did not arrive
        return number

    def _copy_later(self, fill: SlotFill, copies: Sequence[SlotCopyPlan], base: int) -> None:
        """Begin to copy what training may use meanwhile."""
        later = [plan.later for plan in copies if plan.later.slices]
        watched = (
            later[0]
            if len(later) == 1
            else GuardedTensors(in_order(placed for tensors in later for placed in tensors.placed))
        )
        fill.started = time.perf_counter()
        self._queued = fill.devices
        self._snapshot = Snapshot(watched.begin(), base, fill.copied, fill.slot.set_copied)
        if len(watched.slices) >= FOLLOWED_FROM and not fill.devices:
            fill.slot.set_copied(watched.slices[0].target)
            fill.announce()
        self._copier.start(self._snapshot)
        if not watched.slices:
            self._snapshot = None

    def finish_later(self, action: Callable[[list[str]], None], touched: list[str]) -> None:
        """See ``FillOwner``."""
        self._finishing = self._finisher.submit(action, touched)

    def on_slot_sealed(self, fill: SlotFill) -> None:
        """See ``FillOwner``."""
        shape = self._shape
        if fill.frozen is not None and shape is not None and shape.slots[fill.index] is fill.slot:
            shape.filled[fill.index] = (fill.number, *fill.frozen)
        self._on_sealed(fill.number, time.perf_counter() - fill.started)

    def on_fill_failed(self, fill: SlotFill, error: RelightError) -> None:
        """See ``FillOwner``."""
        if fill.touched:
            self._untouched = False
        self._release(fill, error)
        self._on_done(SaveOutcome(_report(fill.number, fill.checkpoint_id), error))

    def _release(self, fill: SlotFill, error: BaseException) -> None:
        """Free the slot of a save that failed, and this rank's part of it."""
        fill.slot.clear()
        self._free(fill.number)
        self._give_up_part(fill.number, fill.checkpoint_id, error)

    @property
    def pack_bytes(self) -> int:
        """Bytes of the packs of the last state's layout."""
        return self._shape.plan.stored_bytes if self._shape is not None else 0

    def progress_of(self, number: int) -> tuple[float, float]:
        """Return the shares of that save's bytes that are copied and written, each from 0 to 1."""
        shape, snapshot = self._shape, self._snapshot
        for index, busy_number in [*shape.busy.items()] if shape is not None else ():
            if busy_number == number and shape is not None:
                with contextlib.suppress(ValueError):  # its memory was unmapped in the meantime
                    written = shape.slots[index].written / shape.plan.stored_bytes
                    return (snapshot.copied if snapshot is not None else 1.0), min(1.0, written)
        return 0.0, 0.0

    def close(self, polite: bool = True) -> None:
        """Finish copying, and disconnect from the agent, which still writes sealed saves. ``polite``: no snapshot need stay in memory."""
        self.barrier()
        self._warm(self._deadline_s)
        self._has_grown()
        self._hook.close()
        self._copier.close(self.bound(5.0))
        if self._finishing is not None:
            wait([self._finishing], self._deadline_s)
        self._finisher.shutdown(wait=False)
        agent, self._agent = self._agent, None
        if agent is not None:
            if polite:
                agent.bye(self._deadline_s)
            agent.close()
        shape, self._shape = self._shape, None
        if shape is not None:
            _give_back(shape)

    def become_inert(self) -> None:
        """Disable this object in a forked child: agent, threads and memory belong to the parent.

        The child unmaps the slots: a loader's worker may live longer than this object, and would keep their memory.
        """
        self._hook.close()
        shape, self._shape = self._shape, None
        if shape is not None:
            _give_back(shape)
        self._snapshot, self._queued, self._agent, self._warming, self._growing = None, [], None, None, None
        self._changed = threading.Condition()  # another thread may have held the old one at the fork

    # -- inside

    def number_from(self, former: Background) -> None:
        """Continue the numbers of ``former``, because the end of some of its saves may be unknown."""
        self._number = former._number

    def _alive(self) -> bool:
        return self._agent is not None and self._agent.alive

    def _prepare(self, state: Captured, tree_bytes: int) -> StateShape | None:
        """Return the layout of such a state, with a free slot; None if there is no agent or slot. A new layout is sent to the agent."""
        if not self._alive() and (time.monotonic() < self._join_again or not self._join()):
            return None
        shape, agent = self._shape, self._agent
        assert agent is not None
        if shape is not None and shape.is_of(state):
            return shape if len(shape.busy) < len(shape.slots) else None
        if shape is not None and shape.busy:
            self.hurry()
            if not self._changed_wait(lambda: not shape.busy):
                return None
        self._has_grown()
        key = layout_key(state.items)
        layout = TensorLayout([AgentItem(*fields) for fields in key], self._rank, self._lanes)
        plan = plan_layout(layout)
        laid_out = lay_out([pack.size for pack in plan.packs], 2 * tree_bytes + REQUEST_ROOM)
        if self._refused == f"{laid_out.size}":
            return None
        try:
            if shape is not None:
                _give_back(shape)
            self._shape = None
            count = self._first_slots(laid_out.size)
            slots = agent.slots(laid_out.size, count, self._limits.memory, self._deadline_s)
            if not slots:
                self._refused = f"{laid_out.size}"  # the agent has reported the refusal: request each size once
                return None
            agent.layout(layout)
        except (RelightError, OSError) as error:
            self._lost(error)
            return None
        for slot in slots:
            slot.memory.populate()
        device = _device_of(state.items)
        pinned = _pin(slots, device)
        self._shape = StateShape(key, plan, laid_out, slots, {}, pinned=pinned, device=device, may_grow=count == 1)
        return self._shape

    def _first_slots(self, size: int) -> int:
        """Return the number of slots to begin with. Two: where the previous save is compared with the next; where several ranks
        must agree on free slots; where the caller's limit allows no second one later."""
        memory = self._limits.memory
        alone = self._world == 1 and self._attempt.compact is None and (memory is None or memory >= 2 * size)
        return 1 if self.begins_with_one and alone and size >= ONE_SLOT_FROM else 2

    def _join(self) -> bool:
        """Find or start the agent. If that fails, report it and return False: the trainer then makes the saves."""
        target, self._joining_since = self._attempt.place, time.monotonic()
        old, self._agent, self._shape = self._agent, None, None
        if old is not None:
            old.close()
        try:
            deadline_s = max(1.0, self.bound(START_S))
            agent = connect(
                target.store.url, target.log.run, nice=self._limits.nice, deadline_s=deadline_s, seen=heartbeat().writes
            )
            bound = self.bound  # not self: the agent's thread would keep this object alive
            agent.standstill.patience = lambda: bound(_UNHURRIED_S) / _UNHURRIED_S
            finished, still_writes = weakref.WeakMethod(self._finished), weakref.WeakMethod(self._still_writes)

            def on_done(done: SaveOutcome) -> None:
                callback = finished()
                if callback is not None:
                    callback(done)

            def on_writing() -> None:
                callback = still_writes()
                if callback is not None:
                    callback()

            agent.on_done = on_done
            agent.on_writing = on_writing
            agent.place(
                AgentPlace(
                    target.store.url,
                    target.log.run,
                    target.store_id,
                    target.run_id,
                    target.epoch,
                    self._limits.threads,
                    self._limits.nice,
                    self._limits.bytes_per_second,
                    self._keep,
                    self._rank == 0,
                    self._limits.deadline_s / 2,
                    msgspec.msgpack.encode(rules) if (rules := self._attempt.compact) is not None else b"",
                    guard.to_wire() if (guard := guard_of(target.store)) else None,
                    self._limits.read_bytes_per_second,
                )
            )
        except (RelightError, OSError) as error:  # such as no descriptor, memory or process left
            self._lost(error)
            return False
        self._agent, self._lost_reason = agent, ""
        weakref.finalize(self, _let_go, os.getpid(), agent, self._copier)
        return True

    def _lost(self, error: Exception) -> None:
        """Report, once for each reason, that the trainer writes saves itself. Retry the agent after ten times the seconds of this try."""
        took_s = time.monotonic() - self._joining_since
        self._join_again = time.monotonic() + (10 * took_s if took_s > 1 else 0.0)
        failure = known(error)
        if f"{failure.kind}: {failure.what}" != self._lost_reason:
            self._lost_reason = f"{failure.kind}: {failure.what}"
            emit(
                "agent.lost",
                f"the agent cannot be used: {error}; until it can, the trainer writes saves itself and waits for them",
                kind=failure.kind,
            )

    def _finished(self, done: SaveOutcome) -> None:
        self._free(done.report.number)
        step, seat = self._seats.pop(done.report.number, (0, None))
        error = done.error
        if isinstance(error, AgentDied):
            dead = self._agent is not None and not self._agent.alive  # else it is only this end that was closed
            if self._committed(done.report.id):
                done = SaveOutcome(done.report, None)
            elif seat is not None and dead:
                # another rank may wait for this part, and this rank's training for that rank
                abort_part(self._attempt.place, step, done.report.id, seat, error)
        self._on_done(done)

    def _still_writes(self) -> None:
        """Take a sign that the agent still writes saves. Called in another thread."""

    def _give_up_part(self, number: int, checkpoint_id: str, error: BaseException) -> None:
        """Abort this rank's part of the save, so that no other rank waits for it."""
        step, seat = self._seats.pop(number, (0, None))
        if seat is not None:
            # the save's own error matters; without a store the other ranks wait for the deadline
            with contextlib.suppress(Exception):
                abort_part(self._attempt.place, step, checkpoint_id, seat, known(error))

    def _committed(self, checkpoint_id: str) -> bool:
        """Return whether the log has a save that the agent could not report before it died."""
        target = self._attempt.place
        try:
            return fold(Log(target.store, target.log.run).read()).find(checkpoint_id) is not None
        except RelightError:
            return False

    def _free(self, number: int) -> None:
        with self._changed:
            shape = self._shape
            for index, busy_number in list(shape.busy.items()) if shape is not None else ():
                if busy_number == number:
                    del shape.busy[index]  # type: ignore[union-attr]
            self._changed.notify_all()

    def _changed_wait(self, condition: Callable[[], bool]) -> bool:
        with self._changed:
            return self._changed.wait_for(condition, self._deadline_s)


_all: weakref.WeakSet[Background] = weakref.WeakSet()
"""For the handlers at exit and at a fork, which get no arguments."""


@atexit.register
def _at_exit() -> None:
    """Seal the started saves at a normal exit, and disconnect, so that the agent does not wait for another trainer."""
    for background in list(_all):
        with contextlib.suppress(Exception):
            background.close()


def _in_child() -> None:
    """Disable the parent's saves and agent in a forked child."""
    for background in list(_all):
        background.become_inert()
    _all.clear()


os.register_at_fork(after_in_child=_in_child)


def _let_go(owner: int, agent: Agent, copier: Copier) -> None:
    """Disconnect from the agent of a Checkpointer that was garbage-collected. Do nothing in a forked child: the agent is its parent's."""
    if os.getpid() != owner:
        return
    copier.close(0)
    agent.bye()
    agent.close()


def _device_of(items: Sequence[Item]) -> torch.device | None:
    """Return the accelerator that has some of ``items``; None if all are in this computer's memory."""
    tensors = (item.source.device_tensor for item in items if isinstance(item.source, TensorSource))
    return next((tensor.device for tensor in tensors if tensor is not None and tensor.device.type in RUNTIMES), None)


def _pin(slots: Sequence[Slot], device: torch.device | None) -> frozenset[str]:
    """Pin the slots, so that ``device`` copies to them by DMA. Return the kinds of accelerators that do."""
    if device is None or not pin_memory([slot.memory for slot in slots], device):
        return frozenset()
    return frozenset({device.type})


def _give_back(shape: StateShape) -> None:
    """Unmap the slots; the agent keeps its own mapping as long as it needs them."""
    for slot in shape.slots:
        slot.memory.close()


def _report(number: int, checkpoint_id: str) -> SaveResult:
    return SaveResult(number, checkpoint_id)
