"""Several ranks save one state: they agree on which rank writes what. The agreement holds until a rank's tensors
change."""

from __future__ import annotations

import string
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from relight.capture import CaptureCache, Captured, capture, kind_of
from relight.capture.kinds import LOADER, MODULE, OPTIMIZER, RNG, RankZeroComponent
from relight.capture.optimizers import parameter_names
from relight.capture.restore_check import Restorable
from relight.capture.sharded import table_of
from relight.comm import Communicator, RankTimeout
from relight.commit.save import CommitTarget, Participant
from relight.decode import from_msgpack
from relight.errors import ConfigError
from relight.format import Digest, encode_tree
from relight.format.root_keys import SUSPECT
from relight.heartbeat import heartbeat, is_supervisor_gone
from relight.layout import Item
from relight.layout.rank_tables import Table, TensorOwnership, Work
from relight.layout.shards import LocalBox
from relight.observe import emit
from relight.policy import Trigger, TriggerInput
from relight.policy.triggers import reason_by_step, reason_now
from relight.ranks.collective_errors import gather_from_all_ranks
from relight.ranks.group import Signals
from relight.ranks.part_items import owned, part_items
from relight.ranks.postponed import postpone
from relight.ranks.remote_errors import decode_error, encode_error
from relight.ranks.replicas import (
    Comparison,
    ReplicaDifference,
    Replicas,
    combined,
    differences,
    differing,
    named_sums,
    sums,
)
from relight.save_reason import SaveReason, of_signal

_DIGITS = string.digits + string.ascii_lowercase
_NOTHING = b"\0" * 8
_WISHES = ("", "", "SIGUSR1", "SIGHUP", "SIGINT", "SIGTERM", "SIGTERM")
"""What a rank may request, in order of priority: nothing, a save by its trigger, a save for a signal."""
_UNSUPERVISED = 6
"""The last request: the kernel sent the signal because the rank's supervisor is gone. Other nodes then continue."""
_ANOTHER = SaveReason("trigger", "another rank requested it")
_COMPARING = "comparing replicas"
"""One name for two exchanges: a rank with an error does not know which of them comes next."""


class TablePlan(NamedTuple):
    """What this rank writes, computed from the tables of all ranks' tensors."""

    digests: tuple[bytes, ...]
    roster: TensorOwnership
    pieces: list[list[LocalBox]]
    works: list[Work]
    leads: bool
    replicas: Replicas
    whole: bool
    """Whether every rank has all of the common state."""


class Agreement(NamedTuple):
    """What the ranks agreed on for one save."""

    common: Captured
    mine: Mapping[str, object]
    """This rank's own components."""
    plan: TablePlan
    compared: Comparison
    error: Exception | None = None
    """An error of this rank after the last exchange. The other ranks write their parts, so it must abort its own part."""


class Written(NamedTuple):
    """The items of a part that are the same in every save while ``fixed`` is the same object."""

    items: tuple[Item, ...]
    fixed: object


class SeveralRanks:
    """This rank's side of a group of several ranks. Every rank must make the same calls."""

    several = True

    def __init__(self, world: Communicator, per_rank: Sequence[str], timeout_s: float) -> None:
        self.world, self._per_rank, self.timeout_s = world, tuple(per_rank), timeout_s
        self._shared: TablePlan | None = None
        self._written: Written | None = None
        self._tables: dict[bytes, Table] = {}
        self._table: tuple[object, bytes, Table] | None = None
        self._count = 0
        self._reported: set[str] = set()
        self.suspect = ""
        """Why the last capture is suspect: replicas that are not equal. The same text on every rank."""
        self.turned = ""
        """As ``suspect``, but only the tensors that have never differed before: state that differs by design differs from
        the first complete comparison on."""
        self._compared: tuple[TablePlan | None, frozenset[str]] = (None, frozenset())
        """The last plan with a complete comparison, and the names of all tensors in such plans."""
        self._differed: frozenset[tuple[str, tuple[int, ...]]] = frozenset()
        """Names and ranks of the tensors that have differed."""
        self._lost = False
        self._put_off: SaveReason | None = None
        self.seat: Participant | None = None
        """This rank's place in the last capture."""
        self.owes_part = False
        """See ``RankGroup``."""

    def split(self, components: Mapping[str, object]) -> tuple[dict[str, object], dict[str, object]]:
        """Return the components that all ranks have in common, and this rank's own: loaders, generators, and those in
        ``per_rank``."""
        unknown = set(self._per_rank) - components.keys()
        if unknown:
            raise ConfigError(
                f"per_rank= names {sorted(unknown)[0]!r}, and no component has that name",
                hint="components are keyword arguments",
            )
        own = {
            name: value
            for name, value in components.items()
            if name in self._per_rank or kind_of(value) in (LOADER, RNG)
        }
        return {name: value for name, value in components.items() if name not in own}, own

    def check_split(self, components: Mapping[str, object]) -> None:
        """Raise ``ConfigError`` if ``per_rank=`` separates an optimizer from the module that it trains.

        Its state is stored by the names that the module gives. One rank would fail at its first save, and the others
        would wait for that rank until the deadline.
        """
        for part in self.split(components):
            for name, value in part.items():
                if kind_of(value) != OPTIMIZER:
                    continue
                lacking = parameter_names(value, components).keys() - parameter_names(value, part).keys()  # type: ignore[arg-type]
                apart = [
                    module
                    for module in components.keys() - part.keys()
                    if kind_of(components[module]) == MODULE
                    and any(id(parameter) in lacking for parameter in components[module].parameters())  # type: ignore[attr-defined]
                ]
                if apart:
                    what = f"per_rank= separates optimizer {name!r} from the module that it trains, {min(apart)!r}"
                    raise ConfigError(what, hint=f"name both or neither: per_rank={sorted([name, min(apart)])}")

    def capture(
        self,
        components: Mapping[str, object],
        plans: Restorable,
        *,
        micro_step: int | None,
        recall: CaptureCache | None,
        failed: Exception | None = None,
    ) -> Captured:
        """Capture this rank's part of the checkpoint, and agree with the other ranks on which rank writes what.

        Collective. Unless a rank's tensors have changed, each rank sends a 16-byte digest of its tensors and 8 bytes
        for each component. Raise ``RankTimeout`` if a rank is late, and ``IncompatibleState`` on all ranks if they
        disagree about a tensor, or if a rank's state could not be restored. Any other error of a rank is raised on all
        ranks, too, until they have agreed. After that, ``owes_part`` is True, and the caller must abort the save.
        """
        if micro_step is not None:
            self.check_micro_step()
        if self._lost:
            raise RankTimeout(
                "the ranks have lost their connection", hint="nothing more can be saved by this job: start it again"
            )
        self._count += 1
        self.owes_part = False
        try:
            agreement = self._agree(components, plans, recall, failed)
        except RankTimeout:  # a later exchange would get no answer, or an answer that was meant for this one
            self._lost = True
            raise
        except Exception:
            self._table = None  # the ranks have not agreed on it: see is_still_fully_replicated
            raise
        return self._part(agreement)

    @property
    def lost(self) -> bool:
        """Whether an exchange has failed: then this job saves nothing more."""
        return self._lost

    @property
    def acts_alone(self) -> bool:
        """Whether an exchange has failed, so that other ranks do not wait for this one."""
        return self._lost

    def check_micro_step(self) -> None:
        """Raise ``ConfigError``: a checkpoint of several ranks cannot contain the gradients that each has summed within
        a step."""
        raise ConfigError(
            "micro_step= saves one process's gradients", hint="save at the end of a step when several ranks train"
        )

    @property
    def is_fully_replicated(self) -> bool:
        """Whether, at the last capture, each rank had all of the common state, so that any rank could save it."""
        return self._shared is not None and self._shared.whole

    def is_still_fully_replicated(self, common: Captured) -> bool:
        """Return whether the state was fully replicated and still has the same tensors. A tensor that was added since
        the last capture, such as an optimizer's state at its first step, may be on this rank alone."""
        if not self.is_fully_replicated or self._table is None:
            return False
        then, now = self._table[2].entries, table_of(common.items, {}).entries
        return len(then) == len(now) and set(then) == set(now)

    @property
    def root_user_fields(self) -> dict[str, Any]:
        """Fields for the root's ``user`` about the last capture."""
        return SUSPECT.field(self.suspect) if self.suspect else {}

    def id_of(self, place: CommitTarget, more: str = "") -> str:
        """Return the checkpoint id of the last capture in that attempt: the same on every rank, and never used again.
        ``more`` distinguishes another save after that capture."""
        text = f"{place.store_id}/{place.run_id}/{place.epoch}/{self._count}{more}"
        number = int.from_bytes(Digest(text.encode()).digest()[:8], "big")
        digits = []
        for _ in range(10):
            number, digit = divmod(number, 36)
            digits.append(_DIGITS[digit])
        return "".join(digits)

    def cache_of_all(self, cache: CaptureCache) -> CaptureCache:
        """Return a new cache: captures by ``capture`` have the common components only."""
        return CaptureCache()

    def save_reason(
        self,
        facts: Callable[[], TriggerInput],
        trigger: Trigger | None,
        signals: Signals | None,
        due: SaveReason | None,
        free_slots: Callable[[], int | None],
        *,
        within_step: bool,
    ) -> SaveReason | None:
        """See ``RankGroup``, and ``agree_on_save``. Several ranks save at the end of a step only."""
        free = free_slots()
        return self.agree_on_save(facts(), trigger, signals, free == 0, free == 1, due)

    def agree_on_save(
        self,
        facts: TriggerInput,
        trigger: Trigger | None,
        signals: Signals | None,
        busy: bool,
        nearly_busy: bool = False,
        due: SaveReason | None = None,
    ) -> SaveReason | None:
        """Return the reason for all ranks to save now, or None. Collective; it does not wait for other ranks.

        A save is due because of the step's number, which is the same on all ranks, or because a rank requested it at
        the step before. If a clock, a metric or a signal makes a save due on one rank, that rank requests it from all,
        and they save at the end of the next step. The exchange that was started at the last call has had a step's time,
        in which training's own collectives ran.

        ``busy``: this rank has no free slot. A save that is due while a rank has none is postponed until all ranks have
        one. ``nearly_busy``: a save at this step takes this rank's last slot. Other ranks learn that one step later,
        when the next save may be due. ``due``: the reason of a failed save of this rank that must be tried again.
        """
        if self._lost:
            return None
        reason = reason_by_step(trigger, facts.step, facts.previous)
        try:
            agreed = self.world.agreed()
            if agreed is not None and agreed[0]:
                if name := _WISHES[agreed[0]]:
                    reason = of_signal(name)
                    if signals is not None:
                        signals.adopt(name)
                    if agreed[0] == _UNSUPERVISED:
                        heartbeat().ends_unsupervised()
                else:
                    reason = reason or reason_now(trigger, facts) or _retried(due) or _ANOTHER
            if reason is not None and reason.kind != "signal" and agreed is not None and agreed[1]:
                if self._put_off is None:
                    self._put_off = postpone(reason, facts.step, "a rank has no free snapshot slot")
                reason = None
            elif self._put_off is not None and agreed is not None and not agreed[1]:
                reason = reason or self._put_off
            if reason is not None:
                self._put_off = None
            wish = 0
            if signals is not None and signals.pending and (reason is None or reason.by != signals.pending):
                wish = _WISHES.index(signals.pending)
                if signals.pending == "SIGTERM" and is_supervisor_gone():
                    wish = _UNSUPERVISED
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
        """Run ``action`` on rank 0, and return its result on every rank. Its error is raised on every rank."""
        message = b""
        error: Exception | None = None
        if self.world.rank == 0:
            try:
                message = b"+" + action()
            except Exception as caught:  # any error: the other ranks wait for the outcome
                error = caught
                message = b"-" + encode_error(caught)
        message = self.world.broadcast(message if self.world.rank == 0 else None, 0, doing)
        if error is not None:
            raise error
        if message[:1] == b"-":
            raise decode_error(message[1:])
        return message[1:]

    def unused_on_all(self, unused: Sequence[str]) -> list[str]:
        """Return the stored names that no rank uses, of those in ``unused``, which this rank does not use.
        Collective."""
        gathered = self.world.gather(msgspec.json.encode(list(unused)), "comparing unused names")
        common = set(unused).intersection(*(msgspec.json.decode(names) for names in gathered))
        return [name for name in unused if name in common]

    # -- inside

    def _part(self, agreement: Agreement) -> Captured:
        """Return what this rank writes: its share of the common state, and its own state."""
        common, mine, plan, *_ = agreement
        digest = Digest(b"".join(plan.digests)).digest()[:8].hex()
        self.seat, self.owes_part = Participant(self.world.rank, self.world.size, digest, self.timeout_s), True
        if agreement.error is not None:
            raise agreement.error
        self._note_replicas(agreement)
        written = self._write(common, plan)
        own = capture(mine, preceding=written.items)
        theirs = (owned(item, self.world.rank) for item in own.items[len(written.items) :])
        tree = {**(common.tree if plan.leads else {}), "rank": own.tree}
        return Captured(
            tree,
            [*written.items, *theirs],
            {**common.kinds, **own.kinds},
            [*common.notes, *own.notes],
            [*common.found, *own.found],
            [*common.missed, *own.missed],
            [*common.plain, *own.plain],
            written,
        )

    def _agree(
        self,
        components: Mapping[str, object],
        plans: Restorable,
        recall: CaptureCache | None,
        failed: Exception | None,
    ) -> Agreement:
        """Capture the common state, and agree on which rank writes what. Collective.

        Work between two exchanges is done in the later one, so that an error of one rank is raised on all ranks. What
        later captures read is changed after the comparison of replicas: on all ranks, or on none.
        """
        with gather_from_all_ranks(self.world, "comparing the ranks' state") as exchange:
            if failed is not None:
                raise failed
            shared, mine = self.split(components)
            common = capture(shared, rng=False, recall=recall)
            values = [
                (name, Digest(encode_tree(node)).digest()[:8])
                for name, node in common.tree.items()
                if not isinstance(shared.get(name), RankZeroComponent)
            ]
            if (error := plans.error(shared, common)) is not None:
                raise error
            digest, table = self._own_table(common)
            exchange.message = msgspec.msgpack.encode([digest, values])
        try:
            states = [msgspec.msgpack.decode(answer) for answer in exchange.answers]
            digests, plan = tuple(state[0] for state in states), self._shared
            changed = plan is None or plan.digests != digests
            new = [each for each in dict.fromkeys(digests) if each not in self._tables] if changed else []
        except Exception:  # any error: the other ranks wait in the next exchange
            with gather_from_all_ranks(self.world, _COMPARING):
                raise
        encoded_tables = self._exchange_tables(new, digests, digest, table) if new else []
        with gather_from_all_ranks(self.world, _COMPARING) as exchange:
            self._compare(digests, [dict(state[1]) for state in states])
            tables = self._tables
            if plan is None or changed:
                received = {key: data for key, data in zip(digests, encoded_tables, strict=False) if data}
                tables = {**tables, **{key: from_msgpack(data, Table) for key, data in received.items()}}
                plan = self._plan(digests, tables, common)
            chosen = plan.replicas.choose()
            own_sums = {key: sums(stretches, common.items, common.spreads) for key, stretches in chosen.items()}
            exchange.message = msgspec.msgpack.encode([(key, combined(values)) for key, values in own_sums.items()])
        if changed:
            self._written = None
        self._shared, self._tables = plan, tables
        failure: Exception | None = None
        unequal: dict[bytes, dict[int, bytes]] = {}
        try:
            answers = [dict(msgspec.msgpack.decode(answer)) for answer in exchange.answers]
            keys = differing(answers)
        except Exception as caught:  # any error: raised by ``_part``, after which the caller aborts this rank's part
            failure, answers, keys = caught, [], []
        for key in keys:
            with gather_from_all_ranks(self.world, _COMPARING) as exchange:
                pairs = zip(chosen.get(key, ()), own_sums.get(key, ()), strict=True)
                named = [(common.items[stretch.copy.item].name, value) for stretch, value in pairs]
                exchange.message = msgspec.msgpack.encode(named)
            unequal[key] = {rank: exchange.answers[rank] for rank, answer in enumerate(answers) if key in answer}
        compared = Comparison(chosen, unequal)
        plan.replicas.advance(compared)  # only now: after a failed exchange, the next save compares the same ranges
        return Agreement(common, mine, plan, compared, failure)

    def _plan(self, digests: tuple[bytes, ...], tables: Mapping[bytes, Table], common: Captured) -> TablePlan:
        numbers = {each: number for number, each in enumerate(dict.fromkeys(digests))}
        roster = TensorOwnership([tables[each] for each in numbers], [numbers[each] for each in digests])
        rank = self.world.rank
        return TablePlan(
            digests,
            roster,
            roster.pieces(rank),
            roster.work(rank),
            roster.leads(rank),
            Replicas(roster, rank),
            len(numbers) == 1 and not common.spreads,
        )

    def _note_replicas(self, agreement: Agreement) -> None:
        """Set ``suspect`` to a sentence about tensors that differ between replicas, empty if all are equal, and report
        them."""
        plan, differ = agreement.plan, dict[ReplicaDifference, None]()
        for by_rank in agreement.compared.unequal.values():
            differ |= dict.fromkeys(differences({rank: named_sums(data) for rank, data in by_rank.items()}))
        suspect = _sentence(differ)
        if differ and self.world.rank == 0:
            why = "what differs by design goes into per_rank=…, else a rank computes wrongly"
            emit("replicas.differ", f"{suspect}: the checkpoint is marked as suspect; {why}", tensors=len(differ))
        last, names = self._compared
        odd = {each: (each.name, each.ranks) for each in differ}
        turned = [each for each, key in odd.items() if each.name in names and key not in self._differed]
        self.suspect, self.turned = suspect, _sentence(turned)
        self._differed |= frozenset(odd.values())
        if last is not plan:
            added = (entry.name for table in plan.roster.tables for entry in table.entries)
            self._compared = plan, names.union(added)

    def _write(self, common: Captured, plan: TablePlan) -> Written:
        fixed = _all_fixed(common)
        if fixed is None or self._written is None or self._written.fixed is not fixed:
            items = part_items(common.items, common.spreads, plan.pieces, plan.works, plan.leads)
            self._written = Written(tuple(items), fixed)
        return self._written

    def _own_table(self, common: Captured) -> tuple[bytes, Table]:
        key: object = _all_fixed(common) or tuple(
            (
                item.name,
                item.dtype,
                item.shape,
                item.role,
                None if (spread := common.spreads.get(index)) is None else spread.how,
            )
            for index, item in enumerate(common.items)
        )
        if self._table is None or self._table[0] != key:
            table = table_of(common.items, common.spreads)
            self._table = key, Digest(msgspec.msgpack.encode(table)).digest()[:16], table
        return self._table[1:]

    def _exchange_tables(
        self, new: Sequence[bytes], digests: Sequence[bytes], own: bytes, table: Table
    ) -> Sequence[bytes]:
        """Return the encoded tables that are ``new``, by rank: each from the lowest rank that has it. Collective."""
        with gather_from_all_ranks(self.world, _COMPARING) as exchange:
            if own in new and digests.index(own) == self.world.rank:
                exchange.message = msgspec.msgpack.encode(table)
        return exchange.answers

    def _compare(self, digests: Sequence[bytes], values: Sequence[Mapping[str, bytes]]) -> None:
        """Report, once for each name, values that differ between ranks with equal tensors. The lowest rank's value is
        saved."""
        leaders: dict[bytes, int] = {}
        for rank, digest in enumerate(digests):
            leader = leaders.setdefault(digest, rank)
            for name, value in values[rank].items():
                if values[leader].get(name, _NOTHING) != value and name not in self._reported:
                    self._reported.add(name)
                    if self.world.rank == 0:
                        emit(
                            "ranks.differ",
                            f"{name}: rank {rank} has other values than rank {leader}; those of rank {leader} are saved; "
                            f"per_rank=[{name!r}] keeps one for each rank",
                            component=name,
                            ranks=[leader, rank],
                        )


def _retried(due: SaveReason | None) -> SaveReason | None:
    """Return the reason for a save that this rank tries again. It is no signal: other ranks have none, and all must act
    alike."""
    return SaveReason("trigger", due.text) if due is not None and due.kind == "signal" else due


def _sentence(differ: Iterable[ReplicaDifference]) -> str:
    """Return a sentence about the first of the differences; empty if there are none."""
    texts = list(map(str, differ))
    return "; ".join(texts[:3]) + (f"; and {len(texts) - 3} more" if len(texts) > 3 else "")


def _all_fixed(common: Captured) -> object | None:
    """Return the object from which all items of the state come, the same one while they are unchanged; None if some are
    new each time."""
    return common.fixed if common.fixed is not None and len(common.fixed.items) == len(common.items) else None
