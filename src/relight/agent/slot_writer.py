"""From a slot to a checkpoint: the agent's side of a save."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

from relight.agent.messages import OpenRun, Request, SaveResult, TensorLayout, from_bits, words_of
from relight.agent.slot_follower import Abandoned, SlotFollower
from relight.arena import SEALED, Slot, lay_out
from relight.catalog.branches import tag_if_possible
from relight.catalog.tiers import tiers_of
from relight.comm import idle_priority
from relight.commit import Attempt, PackPlan, SavePlan, SaveReport, SaveRequest, plan_save
from relight.commit import CommitTarget as CommitPlace
from relight.commit.chunk_index import PreviousSave, UnchangedTensors
from relight.commit.pack_writer import WriteLimits
from relight.decode import from_msgpack
from relight.errors import CorruptCheckpoint, Fenced, RelightError
from relight.keys import StoreSecurity
from relight.layout import Item
from relight.log import Log, fold
from relight.observe import record_span
from relight.policy import Compact, Keep
from relight.policy.compact import Conditions
from relight.reclaim import PruneReport, SpaceGuard
from relight.store import open_bytes
from relight.store.paced import paced

PLACEHOLDER = "0" * 10
"""Stands for the checkpoint's id while packs are laid out: as long as any."""
BEHIND_FROM = 64 << 20
"""Smaller checkpoints are read back as everything else is done: it takes a few hundredths of a second."""
_NO_BYTES = memoryview(b"")


Waits = Callable[[str, Sequence[int]], bool]


class _Length:
    """A source of which only the length matters."""

    def __init__(self, length: int) -> None:
        self.length = length

    def view(self) -> memoryview | None:
        return None

    def fill(self, start: int, into: memoryview) -> None:
        raise AssertionError("these bytes lie in the slot")


def plan_layout(layout: TensorLayout) -> SavePlan:
    """Where each tensor goes. The trainer and the agent both work it out, and come to the same."""
    items = [Item(one.name, one.dtype, one.shape, one.role, _Length(one.length), one.box, one.trainable) for one in layout.items]
    return plan_save(items, id=PLACEHOLDER, rank=layout.rank, lanes=layout.lanes)


@dataclass(frozen=True, slots=True)
class PlannedLayout:
    """A layout, planned: the packs' headers but for the id."""

    plan: SavePlan
    headers: tuple[bytes, ...]
    rank: int

    @classmethod
    def from_layout(cls, layout: TensorLayout) -> PlannedLayout:
        """Plan it."""
        plan = plan_layout(layout)
        return cls(plan, tuple(bytes(pack.sources[0].view() or _NO_BYTES) for pack in plan.packs), layout.rank)

    @property
    def starts(self) -> tuple[int, ...]:
        """Where the packs begin in a slot."""
        return lay_out([pack.size for pack in self.plan.packs], 0).packs

    def filled(self, slot: Slot, checkpoint_id: str, follow: SlotFollower) -> SavePlan:
        """The plan with the slot's bytes for packs, as they come; their headers are written into the slot."""
        packs = []
        for pack, header, start in zip(self.plan.packs, self.headers, self.starts, strict=True):
            own = header.replace(f'"id":"{PLACEHOLDER}"'.encode(), f'"id":"{checkpoint_id}"'.encode(), 1)
            if len(own) != len(header) or start + pack.size > len(slot.view):
                raise CorruptCheckpoint("the slot is not laid out as it should be", where="shared memory")
            slot.view[start : start + len(own)] = own
            packs.append(PackPlan(pack.file, pack.size, [], pack.chunks, slot.view[start:], partial(_reach, follow, start)))
        return replace(self.plan, packs=packs)


class Backpressure(NamedTuple):
    """What holding a save back needs: since when it may have been, whether to go on with it, and whom to tell."""

    since: float
    still: Callable[[], bool]
    emit: Callable[[str, str, dict[str, Any]], None]


class SlotWriter:
    """Writes one attempt's saves, one at a time."""

    def __init__(self, place: OpenRun) -> None:
        self.place = place
        self.guard = StoreSecurity.from_wire(place.guard) if place.guard is not None else StoreSecurity()
        store = open_bytes(place.url, guard=self.guard)
        self._store = paced(store, f"{store.url}/{place.run}", place.bytes_per_second, place.read_bytes_per_second)
        self._log = Log(self._store, place.run)
        rules = from_msgpack(place.compact, Compact) if place.compact else None
        self._attempt = Attempt(CommitPlace(self._store, self._log, place.store_id, place.run_id, place.epoch), rules)
        self._last: str | None = None
        self._failed: dict[str, str | None] = {}
        """The parent of each save that failed since the last one that was committed, by the failed save's id."""
        self._last_in: tuple[Slot, int, PlannedLayout] | None = None
        self._hasty, self._hastened = 0, 0
        """How many read-backs are to take their share of the processor, and how many saves came upon one that did not."""
        self._keep = from_msgpack(place.keep, Keep) if place.keep else Keep()
        self._room = SpaceGuard(self._store, place.run, self._keep, self._log, place.epoch)

    def save(
        self,
        slot: Slot,
        prepared: PlannedLayout,
        number: int,
        follow: SlotFollower,
        waits: Waits,
        hold: Backpressure,
        slots: Sequence[Slot] = (),
    ) -> SaveResult:
        """Write what is filled as it is filled, and commit it once it is sealed. ``Abandoned`` if it is not to be.

        Never raises for the store's sake: the report says what went wrong. ``waits``: see ``SaveRequest``; it is told the
        checkpoint's id as well. ``slots``: all that the trainer fills; the save before this one may still lie in another.
        """
        request = from_msgpack(slot.request(), Request)
        if request.number != number:
            raise CorruptCheckpoint(f"save {request.number} where save {number} should be", where="shared memory")
        if request.patient:
            began = time.perf_counter()
            self._hold_back(prepared.plan.stored_bytes, request, hold)
            record_span("held", request.id, request.step, began, time.perf_counter(), rank=prepared.rank)
        try:
            report = self._attempt.save(
                SaveRequest(
                    step=request.step,
                    tree=request.tree,
                    items=(),
                    reason=request.reason,
                    metrics=request.metrics,
                    user=request.user,
                    environment=request.environment,
                    components=request.components,
                    exact=request.exact,
                    parents=[parent] if (parent := self._parent_of(request)) else [],
                    id=request.id,
                    plan=prepared.filled(slot, request.id, follow),
                    pace=WriteLimits(self.place.threads, self.place.bytes_per_second, _Counter(slot)),
                    packs_written=follow.sealed,
                    seat=request.seat,
                    waits=partial(waits, request.id),
                    urgent=not request.patient,
                    before=self._before(slot, slots, prepared),
                    vouched=self._vouched(request, prepared),
                )
            )
            self._last, self._last_in = request.id, (slot, number, prepared)
            self._failed.clear()
            if request.tag and (request.seat is None or request.seat.rank == 0):
                tag_if_possible(self._log, request.tag, request.id)
        except Abandoned:
            self._failed[request.id] = self._parent_of(request)
            raise
        except Exception as error:
            self._failed[request.id] = self._parent_of(request)
            follow.sealed()  # one that was given up meanwhile has failed for another reason, which the trainer knows
            return _failed(number, request.id, error)
        return _done(number, report)

    def _parent_of(self, request: Request) -> str | None:
        """Return the newest committed ancestor of a save. The trainer names the save before it, which may have failed since."""
        parent = request.parent
        while parent in self._failed:
            parent = self._failed[parent]
        return parent

    def _before(self, slot: Slot, slots: Sequence[Slot], prepared: PlannedLayout) -> PreviousSave | None:
        """The save before, if it was laid out alike and lies in another slot. That one may be filled anew at any moment."""
        if self._last is None or self._last_in is None or self._attempt.compact is None:
            return None
        other, number, laid_out = self._last_in
        if other is slot or laid_out is not prepared or not any(other is one for one in slots):
            return None
        packs = [other.view[start : start + pack.size] for start, pack in zip(prepared.starts, prepared.plan.packs, strict=True)]
        return PreviousSave(self._last, packs, lambda: other.state() == (SEALED, number))

    def _vouched(self, request: Request, prepared: PlannedLayout) -> UnchangedTensors | None:
        """What the trainer says is as it was, if the last save was made since then: it has the same."""
        if not request.same or self._last is None or self._last_in is None:
            return None
        _, number, laid_out = self._last_in
        return UnchangedTensors(self._last, from_bits(request.same), None) if laid_out is prepared and number >= request.since else None

    def has_tiers(self) -> bool:
        """Whether what is saved is to go further."""
        return bool(tiers_of(fold(self._log.read())))

    def prune(
        self, still: Callable[[], bool], ends: Callable[[], bool], others: Callable[[], bool]
    ) -> tuple[str, str, dict[str, Any]] | None:
        """Retire what the rules no longer keep; the event to tell, None for none. Given up where ``still`` says False while a checkpoint is
        read for that: whoever takes the trainer's place needs the disk and the processor, and does it behind its own next save.

        Reading takes what processor time training leaves, if it is of more than a moment, and as long as nobody waits for it. Where the
        trainer ``ends`` it is begun anew, and takes its share. Where ``others`` are to be written they are first: this is left for the
        next time, takes its share then, and twice as often each time that this is seen again.
        """
        if self._keep.is_everything or not self.place.leads:
            return None
        try:
            report = self._prune_behind(still, ends, others) if self._may_take_long() else self._room.prune(still=still)
        except Fenced:
            return None  # the next save will say so
        except RelightError as error:
            return "prune.failed", f"old checkpoints could not be removed this time: {error}", {"kind": error.kind}
        finally:
            self._attempt.distrust(self._room.verified)
        if report is None or not report.retired:
            return None
        return "prune.done", f"removed {len(report.retired)} checkpoints", {"retired": report.retired, "left": report.left}

    def _may_take_long(self) -> bool:
        """Whether the next reading back may wait for everybody else. Not from far away: what is begun for it there stays as slow."""
        if self._last_in is None or self._last_in[2].plan.stored_bytes < BEHIND_FROM or "://" in self.place.url:
            return False
        if self._hasty:
            self._hasty -= 1
            return False
        return True

    def _prune_behind(self, still: Callable[[], bool], ends: Callable[[], bool], others: Callable[[], bool]) -> PruneReport | None:
        report = idle_priority(lambda: self._room.prune(still=lambda: still() and not ends() and not others()), self.place.nice)
        if report is not None:
            self._hastened = 0
            return report
        if others():
            self._hasty, self._hastened = 1 << min(self._hastened, 10), self._hastened + 1
            return None
        return self._room.prune(still=still) if still() else None

    def _hold_back(self, own: int, request: Request, hold: Backpressure) -> None:
        """Until there is room, or no longer than the trainer said. What goes wrong at that is for the save itself to find out."""
        if self._keep.capacity is None:
            return

        def tell(why: str, at_most_s: float) -> None:
            say = f"the save of step {request.step} is held back, at most {at_most_s:.0f} s: {why}"
            hold.emit("save.backpressured", say, {"id": request.id, "step": request.step, "seconds": at_most_s})

        with contextlib.suppress(RelightError):
            history = fold(self._log.read())
            if not tiers_of(history):
                return
            need = own
            smaller, last = self._attempt.smaller, [one.body.new_bytes for one in history.live[-8:]]
            if request.seat is not None:  # all ranks reckon with the same, though their shares differ: what one of the last took
                need = max(last) if last else own * request.seat.world
            elif last and smaller is not None and smaller.choice(Conditions(self.place.threads)).reuse:
                need = min(own, last[-1])
            self._room.wait(need, self.place.leads, hold.since + self.place.held_s, hold.still, tell)


def _reach(follow: SlotFollower, start: int, end: int) -> int:
    return follow.until(start + end) - start


class _Counter:
    """Counts what is written, where the trainer sees it."""

    def __init__(self, slot: Slot) -> None:
        self._slot, self._written = slot, 0

    def __call__(self, length: int) -> None:
        self._written += length
        self._slot.set_written(self._written)


def _done(number: int, report: SaveReport) -> SaveResult:
    return SaveResult(number, report.id, report.stored_bytes, report.logical_bytes, report.timings_s, report.trainable_digest, report.seq)


def _failed(number: int, checkpoint_id: str, error: Exception) -> SaveResult:
    return SaveResult(number, checkpoint_id, error=words_of(error))
