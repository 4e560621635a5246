"""The agent's side of a save: from a slot to a committed checkpoint."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import msgspec

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
from relight.format.collector import collector_paused
from relight.keys import StoreSecurity
from relight.layout import Item
from relight.log import Log, fold
from relight.observe import record_span
from relight.policy import Compact, Keep
from relight.policy.compact import Conditions
from relight.reclaim import PruneReport, SpaceGuard
from relight.store import open_bytes
from relight.store.paced import paced
from relight.units import duration_text

PLACEHOLDER = "0" * 10
"""Stands for the checkpoint's id while packs are planned; it has the length of an id."""
IDLE_VERIFY_FROM = 64 << 20
"""Smaller checkpoints are verified at normal priority: it takes a few hundredths of a second."""
_NO_BYTES = memoryview(b"")


Waits = Callable[[str, Sequence[int]], bool]


class _Length:
    """A source that has only a length."""

    def __init__(self, length: int) -> None:
        self.length = length

    def view(self) -> memoryview | None:
        return None

    def fill(self, start: int, into: memoryview) -> None:
        raise AssertionError("these bytes are in the slot")


def plan_layout(layout: TensorLayout) -> SavePlan:
    """Return where each tensor goes. Trainer and agent both compute it, and get the same plan."""
    with collector_paused():
        items = [
            Item(spec.name, spec.dtype, spec.shape, spec.role, _Length(spec.length), spec.box, spec.trainable)
            for spec in layout.items
        ]
        return plan_save(items, id=PLACEHOLDER, rank=layout.rank, lanes=layout.lanes)


@dataclass(frozen=True, slots=True)
class PlannedLayout:
    """A planned layout: the packs' headers, with a placeholder for the id."""

    plan: SavePlan
    headers: tuple[bytes, ...]
    rank: int

    @classmethod
    def from_layout(cls, layout: TensorLayout) -> PlannedLayout:
        """Plan a layout."""
        plan = plan_layout(layout)
        return cls(plan, tuple(bytes(pack.sources[0].view() or _NO_BYTES) for pack in plan.packs), layout.rank)

    @property
    def starts(self) -> tuple[int, ...]:
        """Offsets of the packs in a slot."""
        return lay_out([pack.size for pack in self.plan.packs], 0).packs

    def filled(self, slot: Slot, checkpoint_id: str, follow: SlotFollower) -> SavePlan:
        """Return the plan with the slot's bytes as packs, read as they are filled. Writes the packs' headers into the
        slot."""
        packs = []
        for pack, header, start in zip(self.plan.packs, self.headers, self.starts, strict=True):
            own = header.replace(f'"id":"{PLACEHOLDER}"'.encode(), f'"id":"{checkpoint_id}"'.encode(), 1)
            if len(own) != len(header) or start + pack.size > len(slot.view):
                raise CorruptCheckpoint(
                    "writing the snapshot failed: its layout in shared memory is not the one that the trainer announced",
                    where="shared memory",
                )
            slot.view[start : start + len(own)] = own
            packs.append(
                PackPlan(pack.file, pack.size, [], pack.chunks, slot.view[start:], partial(_reach, follow, start))
            )
        return replace(self.plan, packs=packs)


class Backpressure(NamedTuple):
    """State of a postponed save: since when it has waited, whether it may still wait, and a function that emits
    events."""

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
        """Number of verifications that must run at normal priority, and of consecutive verifications that a waiting save cut short."""
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
        """Write the slot while it is filled, and commit the save once it is sealed. Raise ``Abandoned`` if it will not
        be sealed.

        Never raises a store's error: the result has it. ``waits``: see ``SaveRequest``; it also receives the
        checkpoint's id. ``slots``: all slots that the trainer fills; the previous save may still be in another.
        """
        request = from_msgpack(slot.request(), Request)
        if request.number != number:
            raise CorruptCheckpoint(
                f"writing the snapshot failed: shared memory holds save {request.number} instead of save {number}",
                where="shared memory",
            )
        if request.patient:
            began = time.perf_counter()
            self._hold_back(prepared.plan.stored_bytes, request, hold)
            record_span("held", request.id, request.info.step, began, time.perf_counter(), rank=prepared.rank)
        try:
            parent = self._parent_of(request)
            report = self._attempt.save(
                SaveRequest(
                    msgspec.structs.replace(request.info, parents=[parent] if parent else []),
                    tree=request.tree,
                    items=(),
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
            if request.info.tag and (request.seat is None or request.seat.rank == 0):
                tag_if_possible(self._log, request.info.tag, request.id)
        except Abandoned:
            self._failed[request.id] = self._parent_of(request)
            raise
        except Exception as error:
            self._failed[request.id] = self._parent_of(request)
            follow.sealed()  # raises Abandoned if the trainer aborted the save meanwhile: the trainer then knows the reason
            return _failed(number, request.id, error)
        return _done(number, report)

    def _parent_of(self, request: Request) -> str | None:
        """Return the newest committed ancestor of a save. The trainer names the save before it, which may have failed since."""
        parent = next(iter(request.info.parents), None)
        while parent in self._failed:
            parent = self._failed[parent]
        return parent

    def _before(self, slot: Slot, slots: Sequence[Slot], prepared: PlannedLayout) -> PreviousSave | None:
        """Return the previous save if it has the same layout and is in another slot, or None.

        The trainer may refill that slot at any moment.
        """
        if self._last is None or self._last_in is None or self._attempt.compact is None:
            return None
        other, number, laid_out = self._last_in
        if other is slot or laid_out is not prepared or not any(other is candidate for candidate in slots):
            return None
        packs = [
            other.view[start : start + pack.size]
            for start, pack in zip(prepared.starts, prepared.plan.packs, strict=True)
        ]
        return PreviousSave(self._last, packs, lambda: other.state() == (SEALED, number))

    def _vouched(self, request: Request, prepared: PlannedLayout) -> UnchangedTensors | None:
        """Return the tensors that the trainer reports as unchanged, if the last committed save is new enough to have
        the same bytes."""
        if not request.same or self._last is None or self._last_in is None:
            return None
        _, number, laid_out = self._last_in
        return (
            UnchangedTensors(self._last, from_bits(request.same), None)
            if laid_out is prepared and number >= request.since
            else None
        )

    def has_tiers(self) -> bool:
        """Return whether checkpoints must be copied to further tiers."""
        return bool(tiers_of(fold(self._log.read())))

    def prune(
        self, still: Callable[[], bool], ends: Callable[[], bool], others: Callable[[], bool]
    ) -> tuple[str, str, dict[str, Any]] | None:
        """Retire checkpoints that the retention rules no longer keep. Return the event to emit, or None.

        Stops if ``still`` returns False while a checkpoint is being verified: the next trainer needs the disk and the
        processor, and retires them after its own next save.

        Verifying a large checkpoint uses only processor time that training leaves, as long as no caller waits. If the
        trainer ``ends``, verification starts again at normal priority. If ``others`` wait to be written, they come
        first: verification is left for the next call. It then runs at normal priority, and twice as often each time
        that this happens again.
        """
        if self._keep.is_everything or not self.place.leads:
            return None
        try:
            report = (
                self._prune_at_idle(still, ends, others) if self._may_take_long() else self._room.prune(still=still)
            )
        except Fenced:
            return None  # the next save reports it
        except RelightError as error:
            return "prune.failed", f"old checkpoints could not be removed this time: {error}", {"kind": error.kind}
        finally:
            self._attempt.distrust(self._room.verified)
        if report is None or not report.retired:
            return None
        return (
            "prune.done",
            f"removed {len(report.retired)} checkpoints",
            {"retired": report.retired, "left": report.left},
        )

    def _may_take_long(self) -> bool:
        """Return whether the next verification may run at idle priority.

        Not for remote stores: a read that began at idle priority would stay slow there.
        """
        if (
            self._last_in is None
            or self._last_in[2].plan.stored_bytes < IDLE_VERIFY_FROM
            or self._store.properties().remote
        ):
            return False
        if self._hasty:
            self._hasty -= 1
            return False
        return True

    def _prune_at_idle(
        self, still: Callable[[], bool], ends: Callable[[], bool], others: Callable[[], bool]
    ) -> PruneReport | None:
        report = idle_priority(
            lambda: self._room.prune(still=lambda: still() and not ends() and not others()), self.place.nice
        )
        if report is not None:
            self._hastened = 0
            return report
        if others():
            self._hasty, self._hastened = 1 << min(self._hastened, 10), self._hastened + 1
            return None
        return self._room.prune(still=still) if still() else None

    def _hold_back(self, own_bytes: int, request: Request, hold: Backpressure) -> None:
        """Wait until there is space, for at most the trainer's limit.

        Errors are ignored here: the save itself meets and reports them.
        """
        if self._keep.capacity is None:
            return

        def report(why: str, at_most_s: float) -> None:
            message = f"the save of step {request.info.step} waits for space, at most {duration_text(at_most_s)}: {why}"
            hold.emit(
                "save.backpressured", message, {"id": request.id, "step": request.info.step, "seconds": at_most_s}
            )

        with contextlib.suppress(RelightError):
            history = fold(self._log.read())
            if not tiers_of(history):
                return
            need = own_bytes
            smaller, last = self._attempt.smaller, [checkpoint.body.new_bytes for checkpoint in history.live[-8:]]
            # all ranks must use the same number though their shares differ: the largest of the last checkpoints
            if request.seat is not None:
                need = max(last) if last else own_bytes * request.seat.world
            elif last and smaller is not None and smaller.choice(Conditions(self.place.threads)).reuse:
                need = min(own_bytes, last[-1])
            self._room.wait(need, self.place.leads, hold.since + self.place.held_s, hold.still, report)


def _reach(follow: SlotFollower, start: int, end: int) -> int:
    return follow.until(start + end) - start


class _Counter:
    """Counts written bytes in the slot, where the trainer reads them."""

    def __init__(self, slot: Slot) -> None:
        self._slot, self._written = slot, 0

    def __call__(self, length: int) -> None:
        self._written += length
        self._slot.set_written(self._written)


def _done(number: int, report: SaveReport) -> SaveResult:
    return SaveResult(
        number,
        report.id,
        report.stored_bytes,
        report.logical_bytes,
        report.timings_s,
        report.trainable_digest,
        report.seq,
    )


def _failed(number: int, checkpoint_id: str, error: Exception) -> SaveResult:
    return SaveResult(number, checkpoint_id, error=words_of(error))
