"""Several ranks, one state: who writes what of it, agreed on once and remembered as long as nobody's tensors change."""

from __future__ import annotations

import string
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from relight.capture import CaptureCache, Captured, capture, kind_of
from relight.capture.kinds import LOADER, RNG
from relight.capture.sharded import table_of
from relight.checkpointer.part_items import owned, part_items
from relight.checkpointer.postponed import postpone
from relight.checkpointer.remote_errors import decode_error, encode_error
from relight.checkpointer.replicas import Replicas, combined, differences, differing, sums
from relight.checkpointer.restorable import Restorable
from relight.checkpointer.signals import SignalHandlers
from relight.comm import Communicator, RankTimeout
from relight.commit.save import SUSPECT, CommitTarget, Participant
from relight.decode import from_msgpack
from relight.errors import ConfigError, IncompatibleState
from relight.format import Digest, encode_tree
from relight.layout import Item
from relight.layout.rank_tables import Table, TensorOwnership, Work
from relight.layout.shards import LocalBox
from relight.observe import emit
from relight.policy import Trigger, TriggerInput

_DIGITS = string.digits + string.ascii_lowercase
_NOTHING = b"\0" * 8
_ASKED = ("", "", "SIGUSR1", "SIGHUP", "SIGINT", "SIGTERM")
"""What ranks may ask for, the weightier the later: nothing, what a trigger says, what signals say."""


class TablePlan(NamedTuple):
    """What follows from tables as they were, for this rank."""

    digests: tuple[bytes, ...]
    roster: TensorOwnership
    pieces: list[list[LocalBox]]
    works: list[Work]
    leads: bool
    replicas: Replicas
    whole: bool
    """Whether every rank has all that ranks have in common."""


class Written(NamedTuple):
    """The items of a part that are the same in every save, if ``fixed`` still is."""

    items: tuple[Item, ...]
    fixed: object


class Ranks:
    """A rank among others. Every rank makes the same calls."""

    def __init__(self, world: Communicator, per_rank: Sequence[str], timeout_s: float) -> None:
        self.world, self._per_rank, self.timeout_s = world, tuple(per_rank), timeout_s
        self._shared: TablePlan | None = None
        self._written: Written | None = None
        self._tables: dict[bytes, Table] = {}
        self._table: tuple[object, bytes, Table] | None = None
        self._count = 0
        self._told: set[str] = set()
        self.suspect = ""
        """Why the last capture is suspect: replicas that are not equal. The same on every rank."""
        self.turned = ""
        """The same, if earlier ones were equal: what differs by design has differed from the first."""
        self._were_equal = False
        self._lost = False
        self._put_off: str | None = None
        self.seat: Participant | None = None
        """Of the last capture."""

    def split(self, components: Mapping[str, object]) -> tuple[dict[str, object], dict[str, object]]:
        """What is the same for all ranks, and what is this one's: loaders, generators, and what ``per_rank`` names."""
        unknown = set(self._per_rank) - components.keys()
        if unknown:
            raise ConfigError(f"per_rank= names {sorted(unknown)[0]!r}, which is no component", hint="components are keyword arguments")
        own = {name: value for name, value in components.items() if name in self._per_rank or kind_of(value) in (LOADER, RNG)}
        return {name: value for name, value in components.items() if name not in own}, own

    def capture(
        self, components: Mapping[str, object], plans: Restorable, *, micro_step: int | None, recall: CaptureCache | None
    ) -> Captured:
        """Read this rank's state, as its part of the checkpoint will have it, and agree with the others on who writes what. They exchange
        16 bytes and one for each component, unless somebody's tensors have changed. ``LateRanks`` if some do not come;
        ``IncompatibleState`` if they disagree about a tensor, or if a rank's state could not be restored, on all ranks."""
        if micro_step is not None:
            self.refuse_micro_step()
        if self._lost:
            raise RankTimeout("the ranks have lost each other", hint="nothing more can be saved by this job: start it again")
        self._count += 1
        shared, mine = self.split(components)
        common = capture(shared, rng=False, recall=recall)
        values = {name: Digest(encode_tree(node)).digest()[:8] for name, node in common.tree.items()}
        try:
            plan = self._agree(common, values, plans.error(shared, common))
        except RankTimeout:  # what is exchanged from now on would not be answered, or answered by what was meant for this
            self._lost = True
            raise
        return self._part(common, plan, mine)

    @property
    def lost(self) -> bool:
        """Whether they have lost each other: nothing more is saved by this job."""
        return self._lost

    def refuse_micro_step(self) -> None:
        """``ConfigError``: what each rank has summed up in the midst of a step is no part of a checkpoint of all of them."""
        raise ConfigError("micro_step= saves one process's gradients", hint="save at the end of a step when several ranks train")

    @property
    def is_fully_replicated(self) -> bool:
        """Whether each of the ranks could save all that they have in common, as the last capture has shown."""
        return self._shared is not None and self._shared.whole

    def is_still_fully_replicated(self, common: Captured) -> bool:
        """Whether that is so, and what ranks have in common is of the same tensors still: one that has come since then, as an optimizer's
        state does with its first step, may be on this rank alone."""
        if not self.is_fully_replicated or self._table is None:
            return False
        then, now = self._table[2].entries, table_of(common.items, {}).entries
        return len(then) == len(now) and set(then) == set(now)

    @property
    def root_user_fields(self) -> dict[str, Any]:
        """What the root's ``user`` says of the last capture."""
        return {SUSPECT: self.suspect} if self.suspect else {}

    def id_of(self, place: CommitTarget, more: str = "") -> str:
        """The id of what was captured last, as a checkpoint of that attempt: the same on every rank, and never again. ``more``: of
        something else that was saved behind that."""
        text = f"{place.store_id}/{place.run_id}/{place.epoch}/{self._count}{more}"
        number = int.from_bytes(Digest(text.encode()).digest()[:8], "big")
        digits = []
        for _ in range(10):
            number, digit = divmod(number, 36)
            digits.append(_DIGITS[digit])
        return "".join(digits)

    def agree_on_save(
        self,
        facts: TriggerInput,
        trigger: Trigger | None,
        signals: SignalHandlers | None,
        busy: bool,
        nearly_busy: bool = False,
        due: str | None = None,
    ) -> str | None:
        """The reason for all ranks to save now, or None: the step's number tells each of them, or one of them asked at the step before.

        What a clock, a metric or a signal says to one rank is asked of all of them, and done at the end of the next step. Nobody waits for
        it: the exchange that was begun at the last call has had a step's time, in which the ranks met in training's own exchanges.

        ``busy``: this rank has no memory for a save now. What is due while one of them has none is made once all have. ``nearly_busy``: a
        save at this step takes its last memory. Ranks learn of it one step later, when the next save may be due. ``due``: the reason of a
        save of this rank that failed and must be tried again.
        """
        if self._lost:
            return None
        reason = trigger.by_step(facts.step, facts.previous) if trigger is not None else None
        try:
            agreed = self.world.agreed()
            if agreed is not None and agreed[0]:
                asked = _ASKED[agreed[0]]
                reason = asked or reason or (trigger.due(facts) if trigger is not None else None) or due or "another rank asked"
                if asked and signals is not None:
                    signals.adopt(asked)
            if reason is not None and reason not in _ASKED and agreed is not None and agreed[1]:
                if self._put_off is None:
                    self._put_off = postpone(reason, facts.step, "a rank has no free snapshot slot")
                reason = None
            elif self._put_off is not None and agreed is not None and not agreed[1]:
                reason = reason or self._put_off
            if reason is not None:
                self._put_off = None
            wish = 0
            if signals is not None and signals.pending and signals.pending != reason:
                wish = _ASKED.index(signals.pending)
            elif reason is None and self._put_off is None and (due or (trigger is not None and trigger.due(facts))):
                wish = 1
            elif trigger is not None:
                wish = int(trigger.soon(facts))
            self.world.propose([wish, int(busy or (nearly_busy and reason is not None))])
        except RankTimeout as error:
            self._lost = True
            emit("ranks.late", f"no more saves are made: {error}", ranks=list(error.ranks))
            return None
        return reason

    def run_on_rank0(self, action: Callable[[], bytes], doing: str) -> bytes:
        """What rank 0's ``action`` gives, on every rank; its error, too."""
        told = b""
        error: Exception | None = None
        if self.world.rank == 0:
            try:
                told = b"+" + action()
            except Exception as found:  # whatever it is: the others wait to hear of it
                error = found
                told = b"-" + encode_error(found)
        told = self.world.broadcast(told if self.world.rank == 0 else None, 0, doing)
        if error is not None:
            raise error
        if told[:1] == b"-":
            raise decode_error(told[1:])
        return told[1:]

    def unused_on_all(self, unused: Sequence[str]) -> list[str]:
        """Of what is stored and has no place on this rank, what has none on any."""
        told = self.world.gather(msgspec.json.encode(list(unused)), "comparing what is not used")
        common = set(unused).intersection(*(msgspec.json.decode(one) for one in told))
        return [one for one in unused if one in common]

    # -- inside

    def _part(self, common: Captured, plan: TablePlan, mine: Mapping[str, object]) -> Captured:
        """What this rank writes: its share of what is common, and its own."""
        written = self._write(common, plan)
        own = capture(mine, behind=written.items)
        theirs = (owned(item, self.world.rank) for item in own.items[len(written.items) :])
        tree = {**(common.tree if plan.leads else {}), "rank": own.tree}
        state = Captured(
            tree, [*written.items, *theirs], {**common.kinds, **own.kinds}, [*common.notes, *own.notes], [*common.found, *own.found],
            [*common.missed, *own.missed], written,
        )  # fmt: skip
        digest = Digest(b"".join(plan.digests)).digest()[:8].hex()
        self.seat = Participant(self.world.rank, self.world.size, digest, self.timeout_s)
        return state

    def _agree(self, common: Captured, values: Mapping[str, bytes], error: IncompatibleState | None) -> TablePlan:
        digest, table = self._own_table(common)
        word = msgspec.msgpack.encode([digest, list(values.items()), "" if error is None else str(error)])
        words = [msgspec.msgpack.decode(one) for one in self.world.gather(word, "comparing what the ranks hold")]
        for rank, (_, _, refused) in enumerate(words):
            if refused:
                raise error or IncompatibleState(f"rank {rank}: {refused}")
        digests = tuple(one[0] for one in words)
        self._compare(digests, [dict(one[1]) for one in words])
        if self._shared is None or self._shared.digests != digests:
            self._learn(digests, digest, table)
            known = {one: number for number, one in enumerate(dict.fromkeys(digests))}
            roster = TensorOwnership([self._tables[one] for one in known], [known[one] for one in digests])
            rank = self.world.rank
            whole = len(known) == 1 and not common.spreads
            self._shared = TablePlan(
                digests, roster, roster.pieces(rank), roster.work(rank), roster.leads(rank), Replicas(roster, rank), whole
            )
            self._written = None
        self.suspect = self._compare_replicas(self._shared.replicas, common)
        self.turned, self._were_equal = self.suspect if self._were_equal else "", self._were_equal or not self.suspect
        return self._shared

    def _compare_replicas(self, replicas: Replicas, common: Captured) -> str:
        """What is not the same on ranks that should hold the same, in words; empty if nothing was found."""
        chosen = replicas.choose()
        found = {key: sums(stretches, common.items, common.spreads) for key, stretches in chosen.items()}
        word = msgspec.msgpack.encode([(key, combined(one)) for key, one in found.items()])
        words = [dict(msgspec.msgpack.decode(one)) for one in self.world.gather(word, "comparing replicas")]
        said: list[str] = []
        for key in differing(words):
            mine = [(common.items[one.copy.item].name, value) for one, value in zip(chosen.get(key, ()), found.get(key, ()), strict=True)]
            told = [msgspec.msgpack.decode(one) for one in self.world.gather(msgspec.msgpack.encode(mine), "comparing replicas")]
            said += map(str, differences({rank: told[rank] for rank, one in enumerate(words) if key in one}))
        if said:
            shown = "; ".join(said[:3]) + (f"; and {len(said) - 3} more" if len(said) > 3 else "")
            if self.world.rank == 0:
                why = "what differs by design goes into per_rank=…, else a rank computes wrongly"
                emit("replicas.differ", f"{shown}: the checkpoint is marked as suspect; {why}", tensors=len(said))
            return shown
        return ""

    def _write(self, common: Captured, plan: TablePlan) -> Written:
        fixed = _all_fixed(common)
        if fixed is None or self._written is None or self._written.fixed is not fixed:
            items = part_items(common.items, common.spreads, plan.pieces, plan.works, plan.leads)
            self._written = Written(tuple(items), fixed)
        return self._written

    def _own_table(self, common: Captured) -> tuple[bytes, Table]:
        key: object = _all_fixed(common) or tuple(
            (item.name, item.dtype, item.shape, item.role, None if (one := common.spreads.get(index)) is None else one.how)
            for index, item in enumerate(common.items)
        )
        if self._table is None or self._table[0] != key:
            table = table_of(common.items, common.spreads)
            self._table = key, Digest(msgspec.msgpack.encode(table)).digest()[:16], table
        return self._table[1:]

    def _learn(self, digests: Sequence[bytes], own: bytes, table: Table) -> None:
        """Tables that are new, from the lowest rank that has them."""
        new = [digest for digest in dict.fromkeys(digests) if digest not in self._tables]
        if not new:
            return
        tells = own in new and digests.index(own) == self.world.rank
        data = msgspec.msgpack.encode(table) if tells else b""
        for digest, one in zip(digests, self.world.gather(data, "telling which tensors there are"), strict=True):
            if one:
                self._tables[digest] = from_msgpack(one, Table)

    def _compare(self, digests: Sequence[bytes], values: Sequence[Mapping[str, bytes]]) -> None:
        """Tell, once, of values that should be the same on ranks with equal tensors, and are not. The lowest rank's are saved."""
        leaders: dict[bytes, int] = {}
        for rank, digest in enumerate(digests):
            leader = leaders.setdefault(digest, rank)
            for name, value in values[rank].items():
                if values[leader].get(name, _NOTHING) != value and name not in self._told:
                    self._told.add(name)
                    if self.world.rank == 0:
                        emit(
                            "ranks.differ",
                            f"{name}: rank {rank} holds other values than rank {leader}, whose are saved; "
                            f"per_rank=[{name!r}] keeps one for each rank",
                            component=name,
                            ranks=[leader, rank],
                        )


def _all_fixed(common: Captured) -> object | None:
    """What all of the state's items come from, the same object as long as they are the same; None if some are made anew each time."""
    return common.fixed if common.fixed is not None and len(common.fixed.items) == len(common.items) else None
