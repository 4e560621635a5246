"""Saves that training does not wait for: the state goes into a slot of the agent's memory, and the agent does the rest."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from relight.agent import Agent, AgentDied, Done, Layout, Request, connect
from relight.agent import Item as AgentItem
from relight.agent import Place as AgentPlace
from relight.agent.writing import plan_layout
from relight.arena import Slot, SlotLayout, lay_out
from relight.capture import Captured, Fixed
from relight.commit import Attempt, SavePlan
from relight.commit.save import new_id
from relight.errors import RelightError, StoreUnavailable
from relight.format import Tensor, encode_tree
from relight.layout import Item, Source
from relight.layout.sources import copy_from
from relight.log import Log, fold
from relight.observe import emit
from relight.policy import Keep, Limits
from relight.snapshot import Copier, Gathered, Snapshot, StepHook, Watched, can_overlap

OVERLAP_FROM = 16 << 10
"""Smaller tensors are copied at once: guarding them costs more than copying them."""
REQUEST_ROOM = 1 << 20
"""Beyond twice the first tree: what later trees, metrics and settings may need."""


class _Copies:
    """How some of a state's items get into a slot: one by one, all at once, or while training goes on."""

    def __init__(self, items: Sequence[Item], places: Sequence[Tensor], packs: Sequence[int], overlap: bool) -> None:
        """``places`` are the items' in the packs, which begin at ``packs`` in a slot."""
        later: list[tuple[str, Any, int]] = []
        small: list[tuple[int, int, int]] = []
        self.now: list[tuple[Source, int]] = []
        for item, place in zip(items, places, strict=True):
            if not place.length:
                continue
            at = packs[place.pack] + place.offset
            tensor = getattr(item.source, "host_tensor", None)
            if overlap and tensor is not None and place.length >= OVERLAP_FROM and (item.trainable or item.role == "optim"):
                later.append((item.name, tensor, at))
            elif tensor is not None and place.length < OVERLAP_FROM:
                small.append((tensor.data_ptr(), place.length, at))
            else:
                self.now.append((item.source, at))
        self.later, self.small = Watched(later), Gathered(small)

    def copy_now(self, slot: Slot, base: int) -> None:
        """Everything but what may be copied later."""
        self.small.copy(base)
        for source, at in self.now:
            copy_from(source, 0, slot.view[at : at + source.length])


@dataclass(slots=True)
class _Shape:
    """One layout of the state, the slots that were made for it, and how the part that is always the same gets there."""

    key: tuple[Any, ...]
    plan: SavePlan
    layout: SlotLayout
    slots: list[Slot]
    busy: dict[int, int]
    fixed: Fixed | None = None
    rest: tuple[Any, ...] = ()
    copies: _Copies | None = None
    overlapped: bool = True

    def is_of(self, state: Captured) -> bool:
        """Whether the state is laid out so. At a glance, if what is fixed is the same."""
        if state.fixed is not None and state.fixed is self.fixed:
            return _key(state.items[len(state.fixed.items) :]) == self.rest
        return _key(state.items) == self.key

    def copies_of(self, state: Captured, overlap: bool) -> list[_Copies]:
        """How the state gets into a slot; for the fixed part, worked out once."""
        places, packs = self.plan.tensors, self.layout.packs
        if state.fixed is None:
            return [_Copies(state.items, places, packs, overlap)]
        count = len(state.fixed.items)
        if self.copies is None or self.fixed is not state.fixed or self.overlapped != overlap:
            self.fixed, self.overlapped, self.rest = state.fixed, overlap, _key(state.items[count:])
            self.copies = _Copies(state.items[:count], places[:count], packs, overlap)
        return [self.copies, _Copies(state.items[count:], places[count:], packs, overlap)]


class Background:
    """The way through the agent, for one attempt. ``on_done`` is called in another thread, once for each save that was begun."""

    def __init__(
        self,
        attempt: Attempt,
        components: Mapping[str, object],
        keep: Keep,
        limits: Limits,
        on_done: Callable[[Done], None],
        on_sealed: Callable[[int, float], None],
    ) -> None:
        self._attempt, self._components, self._limits = attempt, components, limits
        self._keep = msgspec.msgpack.encode(keep)
        self._on_done, self._on_sealed = on_done, on_sealed
        self._agent: Agent | None = None
        self._shape: _Shape | None = None
        self._snapshot: Snapshot | None = None
        self._copier = Copier(1)
        self._hook = StepHook(self.barrier)
        self._number = 0
        self._changed = threading.Condition()
        self._refused: str = ""
        self._warming: threading.Thread | None = None
        _all.add(self)
        self.overlap = True
        """Cleared after a snapshot was touched by training: copying at once from then on."""

    def barrier(self) -> None:
        """Return when nothing of the running snapshot is read from live tensors any more. Called before every ``optimizer.step``."""
        if self._snapshot is not None:
            self._snapshot.wait()
            self._snapshot = None

    def warm_up(self, state: Captured) -> None:
        """Have agent and memory made ready in a thread, for a state like this one: the first save then waits for neither. Once."""
        if self._warming is not None:
            return
        tree_bytes = len(encode_tree(state.tree))

        def prepare() -> None:
            with contextlib.suppress(RelightError):
                self._prepare(state, tree_bytes)

        self._warming = threading.Thread(target=prepare, name="relight-warm-up", daemon=True)
        self._warming.start()

    @property
    def warmed(self) -> bool:
        """Whether agent and memory were asked for."""
        return self._warming is not None or self._shape is not None

    def _warm(self, wait_s: float) -> bool:
        if self._warming is not None and self._warming.is_alive():
            self._warming.join(wait_s)
            return not self._warming.is_alive()
        return True

    def free_slot(self, wait_s: float = 0.0) -> bool:
        """Whether a save could begin now, without waiting for another to be written."""
        self.barrier()
        if not self._warm(wait_s):
            return False
        with self._changed:
            shape = self._shape
            if shape is None or not self._alive():
                return True
            return self._changed.wait_for(lambda: len(shape.busy) < len(shape.slots), wait_s)

    def save(self, state: Captured, request: Callable[[int, str, bytes], Request]) -> int | None:
        """Begin to save: the number that ``on_done`` will tell. None if it cannot be done this way now (no memory, no agent)."""
        tree = encode_tree(state.tree)
        if not self._warm(self._limits.deadline_s):
            return None
        shape = self._prepare(state, len(tree))
        if shape is None:
            return None
        index = next(i for i in range(len(shape.slots)) if i not in shape.busy)
        slot, agent = shape.slots[index], self._agent
        assert agent is not None
        number = self._number = self._number + 1
        checkpoint_id = new_id()
        body = msgspec.msgpack.encode(request(number, checkpoint_id, tree))
        if shape.layout.request + len(body) > shape.layout.size:
            self._shape = None  # it has outgrown its room: larger slots, the next time
            return None
        with self._changed:
            shape.busy[index] = number
        slot.begin(number)
        slot.view[shape.layout.request : shape.layout.request + len(body)] = body
        base = ctypes.addressof(ctypes.c_char.from_buffer(slot.view))
        overlapped = self._copy_now(state, shape, slot, base)
        started = time.perf_counter()

        def complete(touched: list[str]) -> None:
            if touched:
                slot.clear()
                self.overlap = False
                self._free(number)
                shown = ", ".join(touched[:3]) + (f" and {len(touched) - 3} more" if len(touched) > 3 else "")
                error = StoreUnavailable(
                    f"training wrote to what was being copied: {shown}",
                    hint="the next saves copy before step() returns; call ckpt.barrier() before changing weights outside an optimizer",
                )
                self._on_done(Done(_report(number, checkpoint_id), error))
                return
            slot.seal(number, shape.layout.request, len(body))
            self._on_sealed(number, time.perf_counter() - started)
            agent.save(index, number, checkpoint_id)

        self._snapshot = Snapshot(overlapped.begin(), base, complete)
        self._copier.start(self._snapshot)
        if not overlapped.slices:
            self._snapshot = None
        return number

    def close(self, polite: bool = True) -> None:
        """Finish copying, and part from the agent, which goes on writing what is sealed. ``polite``: nothing need be kept in memory."""
        self.barrier()
        self._warm(self._limits.deadline_s)
        self._hook.close()
        self._copier.close()
        agent, self._agent = self._agent, None
        if agent is not None:
            if polite:
                agent.bye(self._limits.deadline_s)
            agent.close()
        shape, self._shape = self._shape, None
        for slot in shape.slots if shape is not None else ():
            slot.memory.close()

    # -- inside

    def _alive(self) -> bool:
        return self._agent is not None and self._agent.alive

    def _copy_now(self, state: Captured, shape: _Shape, slot: Slot, base: int) -> Watched:
        """Copy what may change in the next forward; what is left for later."""
        copies = shape.copies_of(state, self.overlap and can_overlap(self._components.values()))
        for one in copies:
            one.copy_now(slot, base)
        later = [one.later for one in copies if one.later.slices]
        return later[0] if len(later) == 1 else Watched([placed for one in later for placed in one.placed])

    def _prepare(self, state: Captured, tree_bytes: int) -> _Shape | None:
        """The layout of such a state with a free slot, laid out and told to the agent if that was not done yet."""
        if not self._alive() and not self._join():
            return None
        shape, agent = self._shape, self._agent
        assert agent is not None
        if shape is not None and shape.is_of(state):
            return shape if len(shape.busy) < len(shape.slots) else None
        if shape is not None and shape.busy and not self._changed_wait(lambda: not shape.busy):
            return None
        key = _key(state.items)
        layout = Layout([AgentItem(*one) for one in key])
        plan = plan_layout(layout)
        laid_out = lay_out([pack.size for pack in plan.packs], 2 * tree_bytes + REQUEST_ROOM)
        if self._refused == f"{laid_out.size}":
            return None
        try:
            for old in shape.slots if shape is not None else ():
                old.memory.close()
            self._shape = None
            slots = agent.slots(laid_out.size, 2, self._limits.memory, self._limits.deadline_s)
            if not slots:
                self._refused = f"{laid_out.size}"  # asked once for each size: the answer was told
                return None
            agent.layout(layout)
        except RelightError as error:
            self._lost(error)
            return None
        for slot in slots:
            slot.memory.populate()
        self._shape = _Shape(key, plan, laid_out, slots, {})
        return self._shape

    def _join(self) -> bool:
        """Find or start the agent. False, and told, if there is none to be had: saves are then made by the trainer."""
        place = self._attempt.place
        old, self._agent, self._shape = self._agent, None, None
        if old is not None:
            old.close()
        try:
            agent = connect(place.store.url, place.log.run, nice=self._limits.nice)
            finished = weakref.WeakMethod(self._finished)

            def on_done(done: Done) -> None:
                tell = finished()
                if tell is not None:
                    tell(done)

            agent.on_done = on_done
            agent.place(
                AgentPlace(
                    place.store.url, place.log.run, place.store_id, place.run_id, place.epoch,
                    self._limits.threads, self._limits.nice, self._limits.bytes_per_second, self._keep,
                )
            )  # fmt: skip
        except RelightError as error:
            self._lost(error)
            return False
        self._agent = agent
        weakref.finalize(self, _let_go, agent, self._copier)
        return True

    def _lost(self, error: RelightError) -> None:
        emit("agent.lost", f"this save is made by the trainer, which waits for it: {error}", kind=error.kind)

    def _finished(self, done: Done) -> None:
        self._free(done.report.number)
        if isinstance(done.error, AgentDied) and self._committed(done.report.id):
            done = Done(done.report, None)
        self._on_done(done)

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
            return self._changed.wait_for(condition, self._limits.deadline_s)


_all: weakref.WeakSet[Background] = weakref.WeakSet()


@atexit.register
def _at_exit() -> None:
    """The process ends as it should: what was begun is sealed, and the agent need not wait for another trainer."""
    for one in list(_all):
        with contextlib.suppress(Exception):
            one.close()


def _let_go(agent: Agent, copier: Copier) -> None:
    """Whoever forgot the Checkpointer needs its agent no more."""
    copier.close(0)
    agent.bye()
    agent.close()


def _key(items: Sequence[Item]) -> tuple[Any, ...]:
    """Equal for items that are laid out alike."""
    return tuple((item.name, item.dtype, item.shape, item.role, item.source.length, item.trainable) for item in items)


def _report(number: int, checkpoint_id: str) -> Any:
    from relight.agent.messages import Report

    return Report(number, checkpoint_id)
