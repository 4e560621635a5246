"""Saves that training does not wait for: the state goes into a slot of the agent's memory, and the agent does the rest."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch

from relight.agent import Agent, AgentDied, Request, SaveOutcome, TensorLayout, connect
from relight.agent import OpenRun as AgentPlace
from relight.agent import TensorSpec as AgentItem
from relight.agent.launch import START_S
from relight.agent.messages import to_bits
from relight.agent.slot_writer import plan_layout
from relight.arena import SEALED, Slot, SlotLayout, lay_out
from relight.capture import Captured
from relight.capture.capture import TemplateItems
from relight.checkpointer.frozen_params import FrozenParams
from relight.checkpointer.slot_copy_plan import SlotCopyPlan, in_order, register, unregister
from relight.comm import new_threads
from relight.comm.new_threads import ThreadPool
from relight.commit import Attempt, CommitTarget, SavePlan
from relight.commit.multi_rank import abort_part
from relight.commit.parallel_packs import lanes_of_rank
from relight.commit.save import Participant, new_id
from relight.errors import RelightError, StoreUnavailable, known
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
    FrozenTensors,
    GuardedTensors,
    Snapshot,
    StepHook,
    Streams,
    TensorMarks,
    can_overlap,
    pin_slot,
)
from relight.store.wrapper import guard_of

FOLLOWED_FROM = 16
"""Slices, of a MiB mostly, from which the agent writes what is copied while the rest is being copied."""
_WAYS_MAX = 4
_UNHURRIED_S = 16.0
"""Seconds left for a wait from which a stopped agent gets its full time to continue by itself; with less it gets that share."""
REQUEST_ROOM = 1 << 20
"""Beyond twice the first tree: what later trees, metrics and settings may need."""


@dataclass(slots=True)
class _Shape:
    """One layout of the state, the slots that were made for it, and how the part that is always the same gets there."""

    key: tuple[Any, ...]
    plan: SavePlan
    layout: SlotLayout
    slots: list[Slot]
    busy: dict[int, int]
    fixed: TemplateItems | None = None
    rest: tuple[Any, ...] = ()
    copies: dict[tuple[bool, frozenset[int]], SlotCopyPlan] = field(default_factory=dict)
    """Of what is fixed, by whether some of it is copied while training goes on, and what is left out."""
    filled: dict[int, tuple[int, FrozenTensors, TensorMarks]] = field(default_factory=dict)
    """By slot: the save that it was filled with, and how what is frozen looked then."""
    pinned: frozenset[str] = frozenset()
    """Kinds of accelerators that write to the slots by themselves."""

    def is_of(self, state: Captured) -> bool:
        """Whether the state is laid out so. At a glance, if what is fixed is the same."""
        if state.fixed is not None and state.fixed is self.fixed:
            return _key(state.items[len(state.fixed.items) :]) == self.rest
        return _key(state.items) == self.key

    def streams_of(self, device: torch.device) -> Streams | None:
        """How that accelerator copies while training goes on; None if it cannot."""
        return torch.cuda if device.type in self.pinned else None  # type: ignore[return-value]

    def copies_of(self, state: Captured, overlap: bool, same: frozenset[int]) -> list[SlotCopyPlan]:
        """How the state gets into a slot; for the fixed part, worked out once. ``same``: what is there already."""
        places, packs, streams_of = self.plan.tensors, self.layout.packs, self.streams_of
        if state.fixed is None:
            return [SlotCopyPlan(state.items, places, packs, overlap, streams_of)]
        count = len(state.fixed.items)
        if self.fixed is not state.fixed:
            self.fixed, self.rest, self.copies = state.fixed, _key(state.items[count:]), {}
        if (overlap, same) not in self.copies:
            if len(self.copies) >= _WAYS_MAX:
                self.copies.clear()
            kept = [number for number in range(count) if number not in same]
            items, there = [state.items[number] for number in kept], [places[number] for number in kept]
            self.copies[overlap, same] = SlotCopyPlan(items, there, packs, overlap, streams_of)
        return [self.copies[overlap, same], SlotCopyPlan(state.items[count:], places[count:], packs, overlap, streams_of)]

    def address(self, index: int) -> int:
        """Where a slot begins."""
        return ctypes.addressof(ctypes.c_char.from_buffer(self.slots[index].view))

    def same_there(self, index: int, frozen: FrozenTensors, now: TensorMarks, wrong: Callable[[str], None]) -> frozenset[int]:
        """What is frozen and lies in a slot as it is, of the save that it was filled with last. ``wrong`` is told of what only seems so."""
        number, before, then = self.filled.get(index, (0, None, None))
        if before is not frozen or then is None or self.slots[index].state() != (SEALED, number):
            return frozenset()
        same, base, places = frozen.same(then, now), self.address(index), self.plan.tensors
        one = frozen.wrong(same, lambda i: base + self.layout.packs[places[i].pack] + places[i].offset)
        if one is None:
            return same
        wrong(places[one].name)
        return frozenset()


class Background:
    """The way through the agent, for one attempt. ``on_done`` is called in another thread, once for each save that was begun."""

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
        self._rank, self._lanes = rank, lanes_of_rank(attempt.place.store, world)
        self._on_done, self._on_sealed = on_done, on_sealed
        self._agent: Agent | None = None
        self._shape: _Shape | None = None
        self._snapshot: Snapshot | None = None
        self._queued: list[DeviceSnapshot] = []
        self._finisher = ThreadPool(1, "relight-finish")
        self._finishing: Future[None] | None = None
        self._copier = Copier(1)
        self._hook = StepHook(self.barrier)
        self._number = 0
        self._seats: dict[int, tuple[int, Participant]] = {}
        """Of the saves that are under way, where several ranks make them: step and seat."""
        self._changed = threading.Condition()
        self.bound: Callable[[float], float] = lambda seconds: seconds
        """The seconds that a wait may take instead of the deadline: fewer, if the trainer must end sooner."""
        self._refused: str = ""
        self._lost_reason = ""
        """The last reason that was reported for there being no agent."""
        self._joining_since = self._join_again = 0.0
        self._warming: threading.Thread | None = None
        _all.add(self)
        self._untouched = True
        """Cleared after a snapshot was touched by training: copying at once from then on."""
        self._way = Overlap()
        self._overlaps = self._was_busy = True

    def barrier(self) -> None:
        """Return when nothing of the running snapshot is read from live tensors any more. Called before every ``optimizer.step``."""
        if self._snapshot is not None:
            self._snapshot.wait()
            self._snapshot = None
        for one in self._queued:
            one.before_step()
        self._queued = []

    def interval(self, seconds: float) -> None:
        """The time between two calls of ``step()``, which tells what a save costs beyond its own call."""
        shape, before = self._shape, self._was_busy
        self._was_busy = shape is None or bool(shape.busy)
        self._way.interval(seconds, quiet=not (before or self._was_busy))

    def began(self, blocked_s: float) -> None:
        """A save was begun, which took so long in the training's thread."""
        self._way.began(self._overlaps, blocked_s)

    def warm_up(self, state: Captured) -> None:
        """Have agent and memory made ready in a thread, for a state like this one: the first save then waits for neither. Once."""
        if self._warming is not None:
            return
        tree_bytes = len(encode_tree(state.tree))

        def prepare() -> None:
            with contextlib.suppress(RelightError):
                self._prepare(state, tree_bytes)

        warming = threading.Thread(target=prepare, name="relight-warm-up", daemon=True)
        if new_threads.start(warming):  # else the first save waits for agent and memory itself
            self._warming = warming

    @property
    def warmed(self) -> bool:
        """Whether agent and memory were asked for."""
        return self._warming is not None or self._shape is not None

    @property
    def _deadline_s(self) -> float:
        return self.bound(self._limits.deadline_s)

    @property
    def agent_words(self) -> str:
        """The agent and its state, for messages of waits that were in vain."""
        return f"the agent: {self._agent.standstill.words}" if self._agent is not None else "there is no agent"

    def _warm(self, wait_s: float) -> bool:
        if self._warming is not None and self._warming.is_alive():
            self._warming.join(wait_s)
            return not self._warming.is_alive()
        return True

    def free_slot(self, wait_s: float = 0.0, hurry: bool = False, yields: Callable[[int], bool] | None = None) -> bool:
        """Whether a save could begin now, without waiting for another to be written. ``hurry``: it must, so none may be held back.
        ``yields``: asked for the number of each save that only waits, the newest first; True: its slot is taken."""
        self.barrier()
        if not self._warm(self.bound(wait_s)):
            return False
        with self._changed:
            shape = self._shape
            if shape is None or not self._alive():
                return True
            if hurry and len(shape.busy) == len(shape.slots):
                self.hurry()
            if yields is not None and len(shape.busy) == len(shape.slots):
                self._take_slot(shape, yields)
            return self._changed.wait_for(lambda: len(shape.busy) < len(shape.slots), self.bound(wait_s))

    def _take_slot(self, shape: _Shape, yields: Callable[[int], bool]) -> None:
        """Clear the slot of a sealed save that waits for the one before it, if it ``yields``.

        The agent finds another number in the slot, or none, and drops that save: it compares the number again after the packs are written,
        before the commit.
        """
        first = min(shape.busy.values())
        for index, number in sorted(shape.busy.items(), key=lambda one: -one[1]):
            slot = shape.slots[index]
            waits = number != first and number not in self._seats and slot.state() == (SEALED, number) and not slot.written
            if waits and yields(number):
                slot.clear()
                if self._agent is not None:
                    self._agent.forget(number)
                self._free(number)
                return

    def hurry(self) -> None:
        """Somebody waits for all saves that were begun."""
        if self._agent is not None:
            self._agent.hurry(self._number)

    @property
    def place(self) -> CommitTarget:
        """Where it saves."""
        return self._attempt.place

    @property
    def free_slots(self) -> int | None:
        """Number of saves that could begin now, as far as memory goes; None if no memory was made ready yet."""
        shape = self._shape
        return None if shape is None else len(shape.slots) - len(shape.busy)

    def save(self, state: Captured, request: Callable[[int, str, bytes], Request], checkpoint_id: str = "") -> int | None:
        """Begin to save: the number that ``on_done`` will tell. None if it cannot be done this way now (no memory, no agent)."""
        tree = encode_tree(state.tree)
        if not self._warm(self._deadline_s):
            return None
        shape = self._prepare(state, len(tree))
        if shape is None:
            return None
        free = [i for i in range(len(shape.slots)) if i not in shape.busy]
        index = min(free, key=lambda i: shape.slots[i].state()[1])  # the last save stays: to restore from, and to compare with
        slot, agent = shape.slots[index], self._agent
        assert agent is not None
        number = self._number = self._number + 1
        checkpoint_id = checkpoint_id or new_id()
        frozen, same, asked = self._trusted.frozen(state), frozenset[int](), request(number, checkpoint_id, tree)
        look = frozen.fingerprint() if frozen is not None else None
        if frozen is not None and look is not None:
            same = shape.same_there(index, frozen, look, self._trusted.wrong)
            asked = msgspec.structs.replace(asked, same=to_bits(same), since=shape.filled.pop(index, (0,))[0])
        if not asked.patient:
            agent.hurry(number)
        body = msgspec.msgpack.encode(asked)
        if shape.layout.request + len(body) > shape.layout.size:
            self._shape = None  # it has outgrown its room: larger slots, the next time
            return None
        with self._changed:
            shape.busy[index] = number
        if asked.seat is not None:
            self._seats[number] = asked.step, asked.seat
        devices: list[DeviceSnapshot] = []
        try:
            slot.begin(number)
            slot.view[shape.layout.request : shape.layout.request + len(body)] = body
            if self._finishing is not None:
                self._finishing.result(self._deadline_s)  # what arrives from devices arrives in the same memory each time
            base = shape.address(index)
            self._overlaps = self._untouched and can_overlap(self._components.values()) and self._way.choose()
            copies = shape.copies_of(state, self._overlaps, same)
            for one in copies:
                devices += [device.begin(torch.frombuffer(slot.view, dtype=torch.uint8)) for device in one.devices]
            for one in copies:
                one.copy_now(slot.view, base)
        except BaseException as error:
            with contextlib.suppress(RuntimeError):
                for device in devices:
                    device.finish()
            slot.clear()
            self._free(number)
            self._give_up_part(number, checkpoint_id, error)
            if not isinstance(error, RelightError):
                raise
            self._on_done(SaveOutcome(_report(number, checkpoint_id), error))  # what is elsewhere did not come
            return number
        later = [one.later for one in copies if one.later.slices]
        watched = later[0] if len(later) == 1 else GuardedTensors(in_order(placed for one in later for placed in one.placed))
        started = time.perf_counter()

        def complete(touched: list[str]) -> None:
            if devices:
                self._finishing = self._finisher.submit(arrived, touched)
            else:
                copied(touched)

        def arrived(touched: list[str]) -> None:
            copied(sorted({*touched, *(name for one in devices for name in one.finish())}))

        def copied(touched: list[str]) -> None:
            if touched:
                slot.clear()
                self._untouched = False
                self._free(number)
                shown = ", ".join(touched[:3]) + (f" and {len(touched) - 3} more" if len(touched) > 3 else "")
                error = StoreUnavailable(
                    f"training wrote to what was being copied: {shown}",
                    hint="the next saves copy before step() returns; call ckpt.barrier() before changing weights outside an optimizer",
                )
                self._give_up_part(number, checkpoint_id, error)
                self._on_done(SaveOutcome(_report(number, checkpoint_id), error))
                return
            slot.seal(number, shape.layout.request, len(body))
            if frozen is not None and look is not None:
                shape.filled[index] = (number, frozen, look)
            self._on_sealed(number, time.perf_counter() - started)
            agent.save(index, number, checkpoint_id)

        self._queued = devices
        self._snapshot = Snapshot(watched.begin(), base, complete, slot.set_copied)
        if len(watched.slices) >= FOLLOWED_FROM and not devices:
            slot.set_copied(watched.slices[0].target)
            slot.announce(number, shape.layout.request, len(body))
            agent.begin(index, number)
        self._copier.start(self._snapshot)
        if not watched.slices:
            self._snapshot = None
        return number

    @property
    def pack_bytes(self) -> int:
        """Bytes of the packs of a state as the last one was."""
        return self._shape.plan.stored_bytes if self._shape is not None else 0

    def progress_of(self, number: int) -> tuple[float, float]:
        """The shares of that save's bytes that are copied, and written."""
        shape, snapshot = self._shape, self._snapshot
        for index, held in [*shape.busy.items()] if shape is not None else ():
            if held == number and shape is not None:
                with contextlib.suppress(ValueError):  # its memory was given back this very moment
                    written = shape.slots[index].written / shape.plan.stored_bytes
                    return (snapshot.copied if snapshot is not None else 1.0), min(1.0, written)
        return 0.0, 0.0

    def close(self, polite: bool = True) -> None:
        """Finish copying, and part from the agent, which goes on writing what is sealed. ``polite``: nothing need be kept in memory."""
        self.barrier()
        self._warm(self._deadline_s)
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
        """Do nothing from now on, in a forked child: agent, threads and memory belong to its parent."""
        self._hook.close()
        self._snapshot, self._queued, self._agent, self._warming = None, [], None, None
        self._changed = threading.Condition()  # another thread may have held the old one at the fork

    # -- inside

    def number_from(self, former: Background) -> None:
        """Count saves on from those of ``former``, of which some may not be known to have ended."""
        self._number = former._number

    def _alive(self) -> bool:
        return self._agent is not None and self._agent.alive

    def _prepare(self, state: Captured, tree_bytes: int) -> _Shape | None:
        """The layout of such a state with a free slot, laid out and told to the agent if that was not done yet."""
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
        key = _key(state.items)
        layout = TensorLayout([AgentItem(*one) for one in key], self._rank, self._lanes)
        plan = plan_layout(layout)
        laid_out = lay_out([pack.size for pack in plan.packs], 2 * tree_bytes + REQUEST_ROOM)
        if self._refused == f"{laid_out.size}":
            return None
        try:
            if shape is not None:
                _give_back(shape)
            self._shape = None
            slots = agent.slots(laid_out.size, 2, self._limits.memory, self._deadline_s)
            if not slots:
                self._refused = f"{laid_out.size}"  # asked once for each size: the answer was told
                return None
            agent.layout(layout)
        except (RelightError, OSError) as error:
            self._lost(error)
            return None
        for slot in slots:
            slot.memory.populate()
        self._shape = _Shape(key, plan, laid_out, slots, {}, pinned=_pin(slots, state.items))
        return self._shape

    def _join(self) -> bool:
        """Find or start the agent. False, and told, if there is none to be had: saves are then made by the trainer."""
        place, self._joining_since = self._attempt.place, time.monotonic()
        old, self._agent, self._shape = self._agent, None, None
        if old is not None:
            old.close()
        try:
            deadline_s = max(1.0, self.bound(START_S))
            agent = connect(place.store.url, place.log.run, nice=self._limits.nice, deadline_s=deadline_s, seen=heartbeat().writes)
            bound = self.bound  # not self: the agent's thread would keep this object alive
            agent.standstill.patience = lambda: bound(_UNHURRIED_S) / _UNHURRIED_S
            finished = weakref.WeakMethod(self._finished)

            def on_done(done: SaveOutcome) -> None:
                tell = finished()
                if tell is not None:
                    tell(done)

            agent.on_done = on_done
            agent.place(
                AgentPlace(
                    place.store.url, place.log.run, place.store_id, place.run_id, place.epoch,
                    self._limits.threads, self._limits.nice, self._limits.bytes_per_second, self._keep,
                    self._rank == 0, self._limits.deadline_s / 2,
                    msgspec.msgpack.encode(rules) if (rules := self._attempt.compact) is not None else b"",
                    guard.to_wire() if (guard := guard_of(place.store)) else None, self._limits.read_bytes_per_second,
                )
            )  # fmt: skip
        except (RelightError, OSError) as error:  # no descriptor, memory or process may be left for it
            self._lost(error)
            return False
        self._agent, self._lost_reason = agent, ""
        weakref.finalize(self, _let_go, os.getpid(), agent, self._copier)
        return True

    def _lost(self, error: Exception) -> None:
        """Report, once for each reason, that the trainer writes saves itself. Ask for an agent again after ten times what this try took."""
        took_s = time.monotonic() - self._joining_since
        self._join_again = time.monotonic() + (10 * took_s if took_s > 1 else 0.0)
        found = known(error)
        if f"{found.kind}: {found.what}" != self._lost_reason:
            self._lost_reason = f"{found.kind}: {found.what}"
            emit("agent.lost", f"saves are made by the trainer, which waits for them, until there is an agent: {error}", kind=found.kind)

    def _finished(self, done: SaveOutcome) -> None:
        self._free(done.report.number)
        step, seat = self._seats.pop(done.report.number, (0, None))
        error = done.error
        if isinstance(error, AgentDied):
            dead = self._agent is not None and not self._agent.alive  # else it is only this end that was closed
            if self._committed(done.report.id):
                done = SaveOutcome(done.report, None)
            elif seat is not None and dead:  # another rank may wait for this part, and this rank's training for that one
                abort_part(self._attempt.place, step, done.report.id, seat, error)
        self._on_done(done)

    def _give_up_part(self, number: int, checkpoint_id: str, error: BaseException) -> None:
        """This rank's part of that save comes from nobody: if there are other ranks, none of them need wait for it."""
        step, seat = self._seats.pop(number, (0, None))
        if seat is not None:
            with contextlib.suppress(Exception):  # the save's own error is what counts; without a store the others wait for the deadline
                abort_part(self._attempt.place, step, checkpoint_id, seat, known(error))

    def _committed(self, checkpoint_id: str) -> bool:
        """Whether the log has a save of which the agent could not tell any more."""
        place = self._attempt.place
        try:
            return fold(Log(place.store, place.log.run).read()).find(checkpoint_id) is not None
        except RelightError:
            return False

    def _free(self, number: int) -> None:
        with self._changed:
            shape = self._shape
            for index, held in list(shape.busy.items()) if shape is not None else ():
                if held == number:
                    del shape.busy[index]  # type: ignore[union-attr]
            self._changed.notify_all()

    def _changed_wait(self, condition: Callable[[], bool]) -> bool:
        with self._changed:
            return self._changed.wait_for(condition, self._deadline_s)


_all: weakref.WeakSet[Background] = weakref.WeakSet()


@atexit.register
def _at_exit() -> None:
    """The process ends as it should: what was begun is sealed, and the agent need not wait for another trainer."""
    for one in list(_all):
        with contextlib.suppress(Exception):
            one.close()


def _in_child() -> None:
    """A forked child ends without the saves and the agent of its parent."""
    for one in list(_all):
        one.become_inert()
    _all.clear()


os.register_at_fork(after_in_child=_in_child)


def _let_go(owner: int, agent: Agent, copier: Copier) -> None:
    """Whoever forgot the Checkpointer needs its agent no more. In a forked child, the agent is the parent's: nothing is done."""
    if os.getpid() != owner:
        return
    copier.close(0)
    agent.bye()
    agent.close()


def _key(items: Sequence[Item]) -> tuple[Any, ...]:
    """Equal for items that are laid out alike."""
    return tuple((item.name, item.dtype, item.shape, item.role, item.source.length, item.trainable, item.box) for item in items)


def _pin(slots: Sequence[Slot], items: Sequence[Item]) -> frozenset[str]:
    """Have accelerators that hold some of ``items`` write to the slots by themselves. The kinds that do."""
    if not any(getattr(item.source, "device_tensor", None) is not None and item.source.device_tensor.is_cuda for item in items):  # type: ignore[attr-defined]
        return frozenset()
    return frozenset({"cuda"}) if all(pin_slot(slot.view, register) for slot in slots) else frozenset()


def _give_back(shape: _Shape) -> None:
    """Unmap its slots; the agent keeps them as long as it needs them."""
    for slot in shape.slots:
        if shape.pinned:
            unregister(slot.view)
        slot.memory.close()


def _report(number: int, checkpoint_id: str) -> Any:
    from relight.agent.messages import SaveResult

    return SaveResult(number, checkpoint_id)
