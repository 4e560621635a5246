"""A rank has failed, and its replica lives: nothing since the last step is lost.

Where all ranks of a job are on one node and hold the same model, any of them has all of the state but what is each rank's own: generators,
where its loader is. That little every rank leaves at the end of each step in a file of memory (``relight.heartbeat.rank_state``), which
outlives it.
The first survivor whose state is still that of the step's end saves the checkpoint, everybody's parts of it.

A rank may die in the midst of its update, or behind it, when the others have all they need to end the step. So each leaves in front of its
update, too, what is its own by then. That counts as what it had at the step's end if it has been the same at each step so far, and if it
was the same at this one for the survivor.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from relight.capture import Captured, RngSnapshot, capture, capture_generators, frozen_generators, is_large
from relight.checkpointer.boundary import Boundary, Leave, selected, shifted
from relight.checkpointer.part_items import owned
from relight.checkpointer.pre_update_state import ALIKE, PreUpdateState
from relight.checkpointer.ranks import Ranks
from relight.checkpointer.save_handle import Save
from relight.comm import RankTimeout
from relight.commit import CommitTarget, SaveRequest
from relight.commit.multi_rank import save_multi_rank, void_checkpoint
from relight.format import encode_tree, hexdigest
from relight.format.tree import decode_tree
from relight.heartbeat import HANDING_OVER, RankStateWriter, heartbeat, lost_of, rank_state_path, read_beat, read_rank_state
from relight.layout import Bytes, Item
from relight.layout.sources import copy_from
from relight.log import Log
from relight.observe import emit
from relight.snapshot.hooks import StepHook

WAIT_S = 0.3
"""How long a survivor waits for what other ranks leave at the end of the same step."""
SLACK_S = 0.5
"""A save that takes that long is made, however little it saves."""


Ask = Callable[[Captured, int, str, Mapping[str, float], int | None], SaveRequest]


class Handover:
    """This rank's side of it."""

    def __init__(self, ranks: Ranks | None, components: Mapping[str, object], run: str) -> None:
        """``run``: which one, and where, as all its ranks have it. A process may have several at once."""
        self._ranks, self._page = ranks, heartbeat().path
        self._run = hexdigest(run.encode())[:16]
        self._own: frozenset[str] = frozenset()
        self._will: RankStateWriter | None = None
        self._seldom: tuple[RngSnapshot, list[Any]] | None = None
        """Generators as they were, and packed."""
        self._components = components
        self._left: int | None = None
        """The step at whose end this rank left its will; None: it did not."""
        self._before: int | None = None
        """The step of the will before that."""
        self._ahead = PreUpdateState()
        if not self._page or type(ranks) is not Ranks or os.environ.get("LOCAL_WORLD_SIZE") != str(ranks.world.size):
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
        """What a boundary is to tell of itself, if anybody could ever make use of it."""
        return None if self._will is None else self.leave

    def leave(self, step: int, small: Captured, generators: RngSnapshot) -> None:
        """At the end of ``step``: what is this rank's own. 100 µs. ``LateRanks`` if another rank has failed."""
        self._before, self._left = self._left, None
        if self._will is None or self._ranks is None or not self._ranks.is_fully_replicated or not self._own <= small.tree.keys():
            self._ahead.parts = None
            return  # the last: one of them was set to what is large since
        parts = self._parts(selected(small, self._own), generators)
        self._ahead.ends(parts)
        if self._will.write(step, msgspec.msgpack.encode(parts)):
            self._left = step
            heartbeat().is_heir()
        if lost_of(self._page).exists():
            raise RankTimeout("another rank has failed", hint="the first rank that failed says why")

    def _update_begins(self) -> None:
        """In front of an optimizer's step, for the first time since a step's end: what is this rank's own by now."""
        if self._left is None or self._ahead.parts is not None or self._ahead.will is None:
            return
        began = time.thread_time()
        try:
            small = capture({name: value for name, value in self._components.items() if name in self._own}, rng=False)
            self._ahead.begins(self._left, self._parts(selected(small, self._own), frozen_generators()))
        except Exception:  # training does not fail for that
            self._ahead.will = None
            return
        heartbeat().updates()
        self._ahead.took(time.thread_time() - began)

    def _parts(self, own: Captured, generators: RngSnapshot) -> list[Any]:
        if self._seldom is None or not generators.same_host_only(self._seldom[0]):
            self._seldom = generators, _packed(capture_generators(generators.host_only()))
        return [self._key(), _packed(own), self._seldom[1], _packed(capture_generators(generators.device()))]

    def hand_over(self, error: Exception, boundary: Boundary, place: CommitTarget, request: Ask, begun: Iterable[Save]) -> bool:
        """Save the end of the last step as all ranks of the job held it. False if it is not to be had, needed, or worth it.

        ``begun`` are called off before it is committed: they are older, and must not come behind it.
        """
        step = boundary.step
        if self._will is None or step is None or self._ranks is None or not self._ranks.is_fully_replicated:
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
                wills = self._wills(step) if self._ranks.is_still_fully_replicated(common) else None
                if wills is None or not self._is_first(step):
                    return False
                under_way = [(one.step, one.id) for one in begun if one.id and not one.done]
                whole = request(state, step, f"exception: {type(error).__name__}", {}, None)
                try:
                    self._save(whole, common, wills, place, under_way)
                except BaseException:  # it may be this rank's own device that cannot be read any more
                    self._claim(step).unlink(missing_ok=True)
                    raise
                return True
        except Exception as second:  # the caller's exception matters more than ours
            emit("save.failed", f"saving step {step} for all ranks failed: {second}", step=step, kind="exception")
            return False
        finally:
            heartbeat().is_heir(False)  # nobody need wait for it any more

    # -- inside

    def _sealed(self) -> int:
        """The last step that all ranks have sealed: its save comes to its end without them. −1: none."""
        beats = [read_beat(Path(self._page).with_name(f"pulse-{rank}")) for rank in range(self._size)]
        return min((max(beat.sealed, beat.restored) if beat is not None else -1 for beat in beats), default=-1)

    def _wills(self, step: int) -> tuple[list[list[Any]], list[int]] | None:
        """What each rank had as its own, and of which ranks that is as it was in front of their updates. None: not of all."""
        ends = time.monotonic() + WAIT_S
        while True:
            found = [self._will_of(rank, step) for rank in range(self._size)]
            missing = [rank for rank, one in enumerate(found) if one is None]
            if not missing:
                break
            if all(self._is_gone(rank) for rank in missing) or time.monotonic() > ends:
                for rank in missing:
                    found[rank] = self._ahead_of(rank)
                break
            time.sleep(0.005)
        whole = [one for one in found if one is not None]
        return (whole, missing) if len(whole) == len(found) else None

    def _will_of(self, rank: int, step: int) -> list[Any] | None:
        left = read_rank_state(rank_state_path(self._page, rank))
        return self._mine(msgspec.msgpack.decode(left.data)) if left is not None and left.step == step else None

    def _ahead_of(self, rank: int) -> list[Any] | None:
        """What it left in front of the update of the step that this rank has ended, if that is to be believed."""
        left = read_rank_state(rank_state_path(self._page, rank, ahead=True))
        if left is None or left.step != self._before or not self._ahead.was_alike:
            return None
        alike, *parts = msgspec.msgpack.decode(left.data)
        return self._mine(parts) if alike >= ALIKE else None

    def _mine(self, parts: list[Any]) -> list[Any] | None:
        return parts[1:] if parts[0] == self._key() else None

    def _is_gone(self, rank: int) -> bool:
        beat = read_beat(Path(self._page).with_name(f"pulse-{rank}"))
        if beat is None:
            return False
        try:
            os.kill(beat.pid, 0)
        except ProcessLookupError:
            return True
        return False

    def _is_first(self, step: int) -> bool:
        """Of the survivors. The others leave it to this one."""
        try:
            os.close(os.open(self._claim(step), os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600))
            return True
        except FileExistsError:
            return False

    def _claim(self, step: int) -> Path:
        return Path(self._page).with_name(f"heir-{self._run}-{step}")

    def _key(self) -> list[Any]:
        """What a will is of: what another Checkpointer of the same process leaves is no use to this one."""
        return [self._run, sorted(self._own)]

    def _save(
        self, whole: SaveRequest, common: Captured, found: tuple[Sequence[list[Any]], Sequence[int]], place: CommitTarget,
        under_way: Sequence[tuple[int, str]],
    ) -> None:  # fmt: skip
        assert self._ranks is not None and self._ranks.seat is not None
        seat, (wills, early) = self._ranks.seat, found
        id_ = self._ranks.id_of(place, f"/heir-{seat.rank}")  # if it comes to nothing, the next one's is another

        def of_rank(rank: int) -> None:
            items = list(common.items) if not rank else []
            tree = dict(common.tree) if not rank else {}
            own: dict[str, Any] = {"rng": {}}
            for part in wills[rank]:
                node, found = _unpacked(part, len(items))
                items += (owned(item, rank) for item in found)
                own = {**own, **node, "rng": {**own["rng"], **node.get("rng", {})}}
            mine = replace(
                whole, tree=encode_tree({**tree, "rank": own}), items=items, id=id_, seat=seat._replace(rank=rank), urgent=True,
                packs_written=None if rank else lambda: _abort(place, under_way),
            )  # fmt: skip
            save_multi_rank(place._replace(log=Log(place.store, place.log.run)), mine)

        with ThreadPoolExecutor(self._size, thread_name_prefix="relight-heir") as pool:
            list(pool.map(of_rank, range(self._size)))
        say = f"step {whole.step} is saved for all {self._size} ranks, as one has failed"
        if early:
            say += f"; of rank {', '.join(map(str, early))} with the generators and loaders it had in front of its update"
        emit("rank.state_recovered", say, step=whole.step, id=id_)

    @property
    def _size(self) -> int:
        return self._ranks.world.size if self._ranks is not None else 0


def is_worth_it(steps: int, step_s: float, save_s: float) -> bool:
    """Whether a save takes no longer than doing again what it keeps, about. ``save_s``: of one in the background, which takes twice as long
    as one that nothing goes on beside."""
    return save_s <= 2 * steps * step_s + SLACK_S


def _abort(place: CommitTarget, under_way: Sequence[tuple[int, str]]) -> None:
    for step, id_ in under_way:
        void_checkpoint(place, step, id_, "a later step is saved in its place, as a rank has failed")


def _packed(state: Captured) -> list[Any]:
    items = []
    for item in state.items:
        data = bytearray(item.source.length)
        copy_from(item.source, 0, memoryview(data))
        items.append((item.name, item.dtype, item.shape, item.role, bytes(data)))
    return [encode_tree(state.tree), items]


def _unpacked(part: Sequence[Any], behind: int) -> tuple[dict[str, Any], list[Item]]:
    """A tree whose leaves point behind so many items, and its items."""
    data, packed = part
    items = [Item(name, dtype, tuple(shape), role, Bytes(content)) for name, dtype, shape, role, content in packed]
    return shifted(decode_tree(data, len(items), "what a rank left"), behind), items
