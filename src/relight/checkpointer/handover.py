"""Handover: after a rank has failed, a surviving replica saves the last step for all ranks.

If all ranks of a job are on one node and have the same model, each rank has the whole state except the other ranks' own
state: generators and the loader's position. Each rank publishes its own state at the end of each step in a file in
memory (``relight.heartbeat.rank_state``), which stays readable after the rank's death. The first survivor that
still has the state of the step's end saves all ranks' parts.

A rank may die during its update or after it, when the other ranks have all they need to end the step. So each rank
publishes its own state before its update, too. That state is used for the step's end if the two were equal at every
step so far on the dead rank, and at this step on the survivor.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from relight.capture import Captured, RngSnapshot, capture, capture_generators, frozen_generators, is_large
from relight.checkpointer.boundary import Boundary, Leave, selected, shifted
from relight.checkpointer.pre_update_state import ALIKE, PreUpdateState
from relight.checkpointer.save_handle import Save
from relight.comm import RankTimeout
from relight.comm.new_threads import ThreadTasks
from relight.commit import CommitTarget, SaveRequest
from relight.commit.multi_rank import save_multi_rank, void_checkpoint
from relight.errors import SaveFailed
from relight.format import encode_tree, hexdigest
from relight.format.tree import decode_tree
from relight.heartbeat import (
    HANDING_OVER,
    RankStateWriter,
    heartbeat,
    lost_of,
    rank_state_path,
    read_beat,
    read_rank_state,
)
from relight.layout import Bytes, Item
from relight.layout.sources import copy_from
from relight.log import Log
from relight.observe import emit
from relight.ranks.group import RankGroup
from relight.ranks.part_items import owned
from relight.ranks.several import SeveralRanks
from relight.save_reason import SaveReason, of_exception
from relight.snapshot.hooks import StepHook

WAIT_S = 0.3
"""Seconds that a survivor waits for the states that other ranks publish at the end of the same step."""
SLACK_S = 0.5
"""Seconds that a save may take even if the steps that it keeps took no time."""


Ask = Callable[[Captured, int, SaveReason, Mapping[str, float], int | None], SaveRequest]


class Handover:
    """This rank's side of the handover: publishes its own state, and saves for all ranks after a failure."""

    def __init__(self, ranks: RankGroup, components: Mapping[str, object], run: str) -> None:
        """``run``: store and run, the same text on all ranks. A process may train several runs at once."""
        self._ranks, self._page = ranks, heartbeat().path
        self._run = hexdigest(run.encode())[:16]
        self._own: frozenset[str] = frozenset()
        self._will: RankStateWriter | None = None
        self._seldom: tuple[RngSnapshot, list[Any]] | None = None
        """The host generators at the last change, and their encoded state."""
        self._components = components
        self._left: int | None = None
        """The last step, if this rank published its state at its end; else None."""
        self._before: int | None = None
        """The value of ``_left`` one step earlier."""
        self._ahead = PreUpdateState()
        if (
            not self._page
            or type(ranks) is not SeveralRanks
            or os.environ.get("LOCAL_WORLD_SIZE") != str(ranks.world.size)
        ):
            return
        own = ranks.split(components)[1]
        if any(is_large(value) for value in own.values()):
            return
        self._own = frozenset(own)
        with contextlib.suppress(OSError):
            self._will = RankStateWriter(rank_state_path(self._page, ranks.world.rank))
            self._ahead.will = RankStateWriter(rank_state_path(self._page, ranks.world.rank, ahead=True))
            StepHook(self._update_begins)

    @property
    def published_state(self) -> Leave | None:
        """The function that a boundary calls to publish itself; None if no handover is possible."""
        return None if self._will is None else self.leave

    def leave(self, step: int, small: Captured, generators: RngSnapshot) -> None:
        """Publish this rank's own state at the end of ``step``. Cost: 100 µs. Raise ``RankTimeout`` if another rank has
        failed."""
        self._before, self._left = self._left, None
        if self._will is None or not self._ranks.is_fully_replicated or not self._own <= small.tree.keys():
            self._ahead.parts = None
            return  # the last condition fails if a component has been replaced by a large one
        parts = self._parts(selected(small, self._own), generators)
        self._ahead.ends(parts)
        if self._will.write(step, msgspec.msgpack.encode(parts)):
            self._left = step
            heartbeat().is_heir()
        if lost_of(self._page).exists():
            raise RankTimeout("another rank has failed", hint="the error of the first rank that failed has the cause")

    def _update_begins(self) -> None:
        """Publish this rank's own state before the first optimizer step since the last step's end."""
        if self._left is None or self._ahead.parts is not None or self._ahead.will is None:
            return
        began = time.thread_time()
        try:
            small = capture({name: value for name, value in self._components.items() if name in self._own}, rng=False)
            self._ahead.begins(self._left, self._parts(selected(small, self._own), frozen_generators()))
        except Exception:  # training must not fail because of this
            self._ahead.will = None
            return
        heartbeat().updates()
        self._ahead.took(time.thread_time() - began)

    def _parts(self, own: Captured, generators: RngSnapshot) -> list[Any]:
        if self._seldom is None or not generators.same_host_only(self._seldom[0]):
            self._seldom = generators, _packed(capture_generators(generators.host_only()))
        return [self._key(), _packed(own), self._seldom[1], _packed(capture_generators(generators.device()))]

    def hand_over(
        self, error: Exception, boundary: Boundary, place: CommitTarget, request: Ask, begun: Iterable[Save]
    ) -> bool:
        """Save the last completed step for all ranks. Return False if that is impossible, unnecessary, or slower than
        redoing the steps.

        The saves ``begun`` are aborted before the commit: they are older, and must not be committed after it.
        """
        step = boundary.step
        if self._will is None or step is None or not self._ranks.is_fully_replicated:
            return False
        save_s = heartbeat().saves_s
        try:
            with heartbeat().during(HANDING_OVER, 2 * save_s + 5.0):
                sealed = self._sealed()
                if sealed >= step or not is_worth_it(step - sealed, boundary.step_s, save_s):
                    return False
                state = boundary.consistent()
                if state is None or state.spreads:
                    return False
                common = selected(state, frozenset(state.tree) - self._own - {"rng"})
                states = self._wills(step) if self._ranks.is_still_fully_replicated(common) else None
                if states is None or not self._is_first(step):
                    return False
                under_way = [(save.step, save.id) for save in begun if save.id and not save.done]
                whole = request(state, step, of_exception(error), {}, None)
                try:
                    self._save(whole, common, states, place, under_way)
                except BaseException:  # this rank's own device may be unreadable; another survivor may succeed
                    self._claim(step).unlink(missing_ok=True)
                    raise
                return True
        except Exception as second:  # the caller's exception must not be hidden by this one
            emit("save.failed", f"saving step {step} for all ranks failed: {second}", step=step, kind="exception")
            return False
        finally:
            heartbeat().is_heir(False)  # the supervisor need not wait for this rank any more

    # -- inside

    def _sealed(self) -> int:
        """Return the last step that all ranks have sealed or restored, or −1. The agents commit a sealed step without
        the ranks."""
        beats = [read_beat(Path(self._page).with_name(f"heartbeat-{rank}")) for rank in range(self._size)]
        return min((max(beat.sealed, beat.restored) if beat is not None else -1 for beat in beats), default=-1)

    def _wills(self, step: int) -> tuple[list[list[Any]], list[int]] | None:
        """Return each rank's own state, and the ranks with a state from before their update. Return None if a rank's
        state is missing."""
        ends = time.monotonic() + WAIT_S
        while True:
            states = [self._will_of(rank, step) for rank in range(self._size)]
            missing = [rank for rank, state in enumerate(states) if state is None]
            if not missing:
                break
            if all(self._is_gone(rank) for rank in missing) or time.monotonic() > ends:
                for rank in missing:
                    states[rank] = self._ahead_of(rank)
                break
            time.sleep(0.005)
        whole = [state for state in states if state is not None]
        return (whole, missing) if len(whole) == len(states) else None

    def _will_of(self, rank: int, step: int) -> list[Any] | None:
        rank_state = read_rank_state(rank_state_path(self._page, rank))
        return (
            self._mine(msgspec.msgpack.decode(rank_state.data))
            if rank_state is not None and rank_state.step == step
            else None
        )

    def _ahead_of(self, rank: int) -> list[Any] | None:
        """Return the state that ``rank`` published before its update of this rank's last step; None if it may have
        changed since."""
        rank_state = read_rank_state(rank_state_path(self._page, rank, ahead=True))
        if rank_state is None or rank_state.step != self._before or not self._ahead.was_alike:
            return None
        alike, *parts = msgspec.msgpack.decode(rank_state.data)
        return self._mine(parts) if alike >= ALIKE else None

    def _mine(self, parts: list[Any]) -> list[Any] | None:
        return parts[1:] if parts[0] == self._key() else None

    def _is_gone(self, rank: int) -> bool:
        beat = read_beat(Path(self._page).with_name(f"heartbeat-{rank}"))
        if beat is None:
            return False
        try:
            os.kill(beat.pid, 0)
        except ProcessLookupError:
            return True
        return False

    def _is_first(self, step: int) -> bool:
        """Claim the handover of ``step``. Return False if another survivor has claimed it."""
        try:
            os.close(os.open(self._claim(step), os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600))
            return True
        except FileExistsError:
            return False

    def _claim(self, step: int) -> Path:
        return Path(self._page).with_name(f"heir-{self._run}-{step}")

    def _key(self) -> list[Any]:
        """Return the key of a published state: run and component names. It distinguishes several Checkpointers of one
        process."""
        return [self._run, sorted(self._own)]

    def _save(
        self,
        whole: SaveRequest,
        common: Captured,
        states: tuple[Sequence[list[Any]], Sequence[int]],
        place: CommitTarget,
        under_way: Sequence[tuple[int, str]],
    ) -> None:
        assert self._ranks.seat is not None
        seat, (own_states, early) = self._ranks.seat, states
        id_ = self._ranks.id_of(place, f"/heir-{seat.rank}")  # if this save fails, another survivor's has another id

        def of_rank(rank: int) -> None:
            items = list(common.items) if not rank else []
            tree = dict(common.tree) if not rank else {}
            own: dict[str, Any] = {"rng": {}}
            for part in own_states[rank]:
                node, part_items = _unpacked(part, len(items))
                items += (owned(item, rank) for item in part_items)
                own = {**own, **node, "rng": {**own["rng"], **node.get("rng", {})}}
            own_request = replace(
                whole,
                tree=encode_tree({**tree, "rank": own}),
                items=items,
                id=id_,
                seat=seat._replace(rank=rank),
                urgent=True,
                packs_written=None if rank else lambda: _abort(place, under_way),
            )
            save_multi_rank(place._replace(log=Log(place.store, place.log.run)), own_request)

        _save_parts(of_rank, self._size)
        message = f"step {whole.step} is saved for all {self._size} ranks, as one has failed"
        if early:
            message += f"; rank {', '.join(map(str, early))} with its generators and loaders from before its update"
        emit("rank.state_recovered", message, step=whole.step, id=id_)

    @property
    def _size(self) -> int:
        return self._ranks.world.size


def is_worth_it(steps: int, step_s: float, save_s: float) -> bool:
    """Return whether the save takes about no longer than redoing the steps that it keeps. ``save_s``: seconds of a
    background save, which takes twice as long as a save while training does not run."""
    return save_s <= 2 * steps * step_s + SLACK_S


def _save_parts(of_rank: Callable[[int], None], size: int) -> None:
    """Call ``of_rank`` for all ranks, at the same time: each part waits for the others.

    The first part begins once all threads are there. Otherwise it would wait until its deadline for a part without a
    thread. ``SaveFailed`` if a thread is refused: another survivor may succeed.
    """
    begins, refused = threading.Event(), True

    def part(rank: int) -> None:
        begins.wait()
        if not refused:
            of_rank(rank)

    tasks = ThreadTasks("relight-heir")
    try:
        refused = not all(tasks.start(partial(part, rank)) for rank in range(1, size))
    finally:
        begins.set()
    if refused:
        tasks.wait()
        raise SaveFailed(
            "the system started no thread for each rank's part", hint="raise ulimit -u or the cgroup's pids.max"
        )
    try:
        of_rank(0)
    finally:
        tasks.wait()
    tasks.results()


def _abort(place: CommitTarget, under_way: Sequence[tuple[int, str]]) -> None:
    for step, id_ in under_way:
        void_checkpoint(place, step, id_, "a later step is saved instead, as a rank has failed")


def _packed(state: Captured) -> list[Any]:
    items = []
    for item in state.items:
        data = bytearray(item.source.length)
        copy_from(item.source, 0, memoryview(data))
        items.append((item.name, item.dtype, item.shape, item.role, bytes(data)))
    return [encode_tree(state.tree), items]


def _unpacked(part: Sequence[Any], first_item: int) -> tuple[dict[str, Any], list[Item]]:
    """Decode a part: return its tree, with item numbers that start at ``first_item``, and its items."""
    data, packed = part
    items = [Item(name, dtype, tuple(shape), role, Bytes(content)) for name, dtype, shape, role, content in packed]
    return shifted(decode_tree(data, len(items), "a rank's published state"), first_item), items
