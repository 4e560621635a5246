"""A rank has failed, and its replica lives: nothing since the last step is lost.

Where all ranks of a job are on one node and hold the same model, any of them has all of the state but what is each rank's own: generators,
where its loader is. That little every rank leaves at the end of each step in a file of memory (``relight.pulse.will``), which outlives it.
The first survivor whose state is still that of the step's end saves the checkpoint, everybody's parts of it.
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

from relight.capture import Captured, Frozen, capture_generators, is_large
from relight.checkpointer.boundary import Boundary, Leave, selected, shifted
from relight.checkpointer.part_items import owned
from relight.checkpointer.ranks import Ranks
from relight.checkpointer.save_handle import Save
from relight.commit import Place, SaveRequest
from relight.commit.together import call_off, save_together
from relight.format import encode_tree, hexdigest
from relight.format.tree import decode_tree
from relight.layout import Bytes, Item
from relight.layout.sources import copy_from
from relight.log import Log
from relight.observe import emit
from relight.pulse import HANDING_OVER, Will, read_beat, read_will, teller, will_of

WAIT_S = 0.3
"""How long a survivor waits for what other ranks leave at the end of the same step."""
SLACK_S = 0.5
"""A save that takes that long is made, however little it saves."""


Ask = Callable[[Captured, int, str, Mapping[str, float], int | None], SaveRequest]


class Heirs:
    """This rank's side of it."""

    def __init__(self, ranks: Ranks | None, components: Mapping[str, object], run: str) -> None:
        """``run``: which one, and where, as all its ranks have it. A process may have several at once."""
        self._ranks, self._page = ranks, teller().path
        self._run = hexdigest(run.encode())[:16]
        self._own: frozenset[str] = frozenset()
        self._will: Will | None = None
        self._seldom: tuple[Frozen, list[Any]] | None = None
        """Generators as they were, and packed."""
        if not self._page or type(ranks) is not Ranks or os.environ.get("LOCAL_WORLD_SIZE") != str(ranks.world.size):
            return
        own = ranks.split(components)[1]
        if any(is_large(value) for value in own.values()):
            return
        self._own = frozenset(own)
        with contextlib.suppress(OSError):
            self._will = Will(will_of(self._page, ranks.world.rank))

    @property
    def told(self) -> Leave | None:
        """What a boundary is to tell of itself, if anybody could ever make use of it."""
        return None if self._will is None else self.leave

    def leave(self, step: int, small: Captured, generators: Frozen) -> None:
        """At the end of ``step``: what is this rank's own. 100 µs."""
        if self._will is None or self._ranks is None or not self._ranks.whole or not self._own <= small.tree.keys():
            return  # the last: one of them was set to what is large since
        if self._seldom is None or not generators.seldom_as(self._seldom[0]):
            self._seldom = generators, _packed(capture_generators(generators.seldom()))
        parts = [self._key(), _packed(selected(small, self._own)), self._seldom[1], _packed(capture_generators(generators.often()))]
        if self._will.write(step, msgspec.msgpack.encode(parts)):
            teller().is_heir()

    def hand_over(self, error: Exception, boundary: Boundary, place: Place, request: Ask, begun: Iterable[Save]) -> bool:
        """Save the end of the last step as all ranks of the job held it. False if it is not to be had, needed, or worth it.

        ``begun`` are called off before it is committed: they are older, and must not come behind it.
        """
        step = boundary.step
        if self._will is None or step is None or self._ranks is None or not self._ranks.whole:
            return False
        save_s = teller().saves_s
        try:
            with teller().during(HANDING_OVER, 2 * save_s + 5.0):
                sealed = self._sealed()
                if sealed >= step or not pays(step - sealed, boundary.step_s, save_s):
                    return False
                state = boundary.consistent()
                if state is None or state.spreads:
                    return False
                common = selected(state, frozenset(state.tree) - self._own - {"rng"})
                wills = self._wills(step) if self._ranks.still_whole(common) else None
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
            teller().is_heir(False)  # nobody need wait for it any more

    # -- inside

    def _sealed(self) -> int:
        """The last step that all ranks have sealed: its save comes to its end without them. −1: none."""
        beats = [read_beat(Path(self._page).with_name(f"pulse-{rank}")) for rank in range(self._size)]
        return min((max(beat.sealed, beat.restored) if beat is not None else -1 for beat in beats), default=-1)

    def _wills(self, step: int) -> list[list[Any]] | None:
        ends = time.monotonic() + WAIT_S
        while True:
            found = [read_will(will_of(self._page, rank)) for rank in range(self._size)]
            left = [msgspec.msgpack.decode(one.data) for one in found if one is not None and one.step == step]
            whole = [parts for key, *parts in left if key == self._key()]
            if len(whole) == len(found):
                return whole
            if time.monotonic() > ends:
                return None
            time.sleep(0.005)

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
        self, whole: SaveRequest, common: Captured, wills: Sequence[list[Any]], place: Place, under_way: Sequence[tuple[int, str]]
    ) -> None:
        assert self._ranks is not None and self._ranks.seat is not None
        seat = self._ranks.seat
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
                packs_written=None if rank else lambda: _call_off(place, under_way),
            )  # fmt: skip
            save_together(place._replace(log=Log(place.store, place.log.run)), mine)

        with ThreadPoolExecutor(self._size, thread_name_prefix="relight-heir") as pool:
            list(pool.map(of_rank, range(self._size)))
        emit("rank.inherited", f"step {whole.step} is saved for all {self._size} ranks, as one has failed", step=whole.step, id=id_)

    @property
    def _size(self) -> int:
        return self._ranks.world.size if self._ranks is not None else 0


def pays(steps: int, step_s: float, save_s: float) -> bool:
    """Whether a save takes no longer than doing again what it keeps, about. ``save_s``: of one in the background, which takes twice as long
    as one that nothing goes on beside."""
    return save_s <= 2 * steps * step_s + SLACK_S


def _call_off(place: Place, under_way: Sequence[tuple[int, str]]) -> None:
    for step, id_ in under_way:
        call_off(place, step, id_, "a later step is saved in its place, as a rank has failed")


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
