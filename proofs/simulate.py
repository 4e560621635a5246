"""One schedule: a run's life among many processes, drawn from a seed, and the check of all invariants.

The processes are ranks of successive attempts, where an older attempt may continue late; tools that prune, sweep,
recall, or delete what is recallable; readers; and one that sets tags. They run the product's own code on a
``SimulatedStore``, one at a time. The invariants:

1. Every byte of a live checkpoint verifies, from its COMMIT to its RETIRE, and again from its RECALL on. The files
that a durable COMMIT names are durable. 2. An acknowledged save is live, or was retired by a process that had the
right to. 3. Records of a superseded attempt are void, and none of its saves is acknowledged after that. 4. At most
one COMMIT of an id counts. All ranks with an acknowledgement received the same record number. 5. A checkpoint has the
bytes of one save: of one attempt, one step and its ranks. 6. A save that failed is not a checkpoint. ``late_ranks``
and ``others_failed`` on any rank are final. (The exception is a rank so late that the checkpoint was already retired
and swept.) For other errors: if *all* ranks failed, and no rank died or got ``Uncertain`` or ``Fenced``, there is no
checkpoint. If only some ranks failed, another rank may have completed the save. 7. No file is deleted that a live or
recallable checkpoint needs. Tagged checkpoints and the newest one are not retired. After a last attempt has fenced
and swept, only the files of those checkpoints are left. 8. No process waits forever. 9. While the log, or its newest
records, are lost, no attempt begins, and nothing is appended or deleted. After the log is rebuilt, what was live is
live or recallable, and the run resumes.
"""

from __future__ import annotations

import contextlib
import random
from collections import Counter
from typing import NamedTuple

from proofs.durability_oracle import LOG, RUN
from proofs.promises import FROZEN, ROW, AcknowledgedSave, Promises
from proofs.schedule_explorer import Actor, Crew, ScheduleStage, Weather
from proofs.shelf import DurableNames, create
from proofs.simulated_store import SimulatedStore
from relight.catalog import candidates
from relight.catalog.run import Run
from relight.commit import Attempt, SaveInfo, SaveReport, SaveRequest, plan_save
from relight.commit.multi_rank import save_multi_rank
from relight.commit.save import CommitTarget, Participant
from relight.errors import RelightError, SaveFailed
from relight.format import Leaf, encode_tree
from relight.format.records import NoteBody
from relight.layout import Box, Bytes, Item
from relight.log import Log, fold
from relight.policy import Compact, Keep, keep
from relight.policy.compact import Experience
from relight.reader import verify_checkpoint
from relight.reclaim import execute, execute_sweep, plan_prune, plan_sweep, recall, sweep_recallable
from relight.testing.scenario import Names

KINDS = frozenset(
    {
        "refused",
        "full",
        "left",
        "done",
        "unsure",
        "unsure_done",
        "answered_twice",
        "late",
        "stale",
        "pause",
        "death",
        "cut",
    }
    | {"torn", "torn_log", "undurable", "temporary", "unsaid", "unread", "lost_log"}
)
"""All kinds of faults: the store's faults by their names, pauses, deaths, power cuts, and

- *torn*: listings take time (*torn_log*: those of the log)
- *unread*: a record of the log cannot be read for a moment
- *undurable*: names are visible to other processes before they are durable
- *temporary*: the check reports the temporary of a dead ``put_once`` in a live checkpoint's directory
- *lost_log*: the log vanishes, or all of its records from some number on, and is rebuilt
- *unsaid*: if a rank's append failed with ``Uncertain``, its save must end with ``Uncertain``, whatever happens then
"""


RULES = (keep(last=1), keep(last=2), keep(best=1), keep(last=1, undo_window="1h"), keep(last=1, undo_window="1h"))

LOST_LOGS = 0.1
"""The share of schedules that lose their log at the end."""


class ScheduleOutcome(NamedTuple):
    """Outcome of a schedule."""

    seed: int
    actions: int
    actors: int
    faults: Counter[str]
    commits: int
    acknowledged: int
    given_up: int
    retired: int
    violations: list[str]
    trace: list[tuple[float, str, str, str, str]]
    """Each an ``Action``."""


def simulate(seed: int, crew: Crew, names: Names, kinds: frozenset[str] = KINDS) -> ScheduleOutcome:
    """Run the schedule of ``seed``. Call it within ``staged()`` only."""
    return _Play(seed, crew, names, kinds).outcome()


class _Play:
    def __init__(self, seed: int, crew: Crew, names: Names, kinds: frozenset[str]) -> None:
        self.seed = seed
        self.rng = rng = random.Random(f"schedule {seed}")
        names.seed(f"schedule {seed}")
        self.shelf = DurableNames()
        self.listed: list[str] = []
        """Checkpoints that a tool has seen as recallable. Another tool may have deleted them since."""
        self.promises = Promises(self.shelf, kinds, seed)
        self.truth = self.promises.truth
        self.stage = ScheduleStage(rng, Weather.draw(rng, kinds), crew)
        self.stage.under_way, self.stage.after_step = self.shelf.under_way, self._late
        self.fine = rng.random() < 0.6
        self.kinds = kinds

    def outcome(self) -> ScheduleOutcome:
        rng, stage = self.rng, self.stage
        self._cast(rng)
        if "cut" in self.kinds and rng.random() < 0.15:
            stage.ends_at = rng.randrange(20, 400)
        stage.run()
        actors = stage.actors
        if stage.over and not stage.problems:
            self._cut()
            second = ScheduleStage(rng, stage.weather._replace(budget=2, death=0.0), stage.crew)
            second.trace, second.faults, second.now = stage.trace, stage.faults, stage.now
            self.stage = second
            self._job(9, delay_s=0.0)
            second.run()
            second.problems += stage.problems
            second.steps += stage.steps
        self.shelf.under_way.clear()
        stage = self.stage
        self.promises.judge()
        if not stage.problems:
            self.promises.finale()
            if "lost_log" in self.kinds and not self.truth.wrong:
                self._lose_log(random.Random(f"lost log {self.seed}"))
        saves = self.promises.saves.values()
        return ScheduleOutcome(
            self.seed,
            stage.steps,
            actors,
            stage.faults,
            len(self.truth.counted),
            sum(kind == "" for save in saves for kind, _ in save.outcomes.values()),
            sum(all(kind for kind, _ in save.outcomes.values()) for save in saves),
            len(self.truth.retired),
            list(dict.fromkeys([*stage.problems, *self.truth.wrong])),
            stage.trace,
        )

    def _cast(self, rng: random.Random) -> None:
        """Add the processes."""
        start = 0.0
        for number in range(rng.choice((1, 2, 2, 3))):
            self._job(number, start)
            start += rng.choice((0.0, 0.05, 0.3, 1.0, 4.0))
        for number in range(rng.choice((0, 0, 1, 2))):
            self.stage.add(f"tool{number}", self._tool, rng.uniform(0, 1 + start))
        if rng.random() < 0.4:
            self.stage.add("reader", self._reader, rng.uniform(0, 1 + start))
        if rng.random() < 0.3:
            self.stage.add("tagger", self._tagger, rng.uniform(0, 1 + start))

    # -- programs

    def _store(self, actor: Actor) -> SimulatedStore:
        return SimulatedStore(
            self.shelf, actor, self.rng, fine=self.fine, torn=self._torn, undurable="undurable" in self.kinds
        )

    def _torn(self, prefix: str) -> bool:
        return ("torn_log" if prefix == LOG else "torn") in self.kinds

    def _job(self, number: int, delay_s: float) -> None:
        """Add an attempt: rank 0 begins it and starts the other ranks, as the checkpointer does."""
        rng = self.rng
        world = rng.choice((1, 2, 2, 2, 3, 4))
        count = rng.choice((1, 1, 2, 3)) if world < 3 else 1
        alone = world == 1 and rng.random() < 0.7
        timeout_s = rng.choice((0.5, 1.5, 3.0, 8.0))
        plan_differs = world > 1 and rng.random() < 0.04
        rules = rng.choice((None, *RULES))
        notes = rng.random() < 0.2
        sweeps = rng.random() < 0.7
        smaller = rng.random() < 0.5

        def first(actor: Actor) -> None:
            store = self._store(actor)
            for _ in range(3):
                with contextlib.suppress(RelightError):
                    attempt = Attempt.begin(store, RUN)
                    break
                actor.sleep(0.1)
            else:
                return
            place = attempt.place
            if notes:
                with contextlib.suppress(RelightError):
                    attempt.note(NoteBody(topic="simulated", data={}))
            for rank in range(1, world):
                self.stage.add(f"job{number}.{rank}", lambda other, rank=rank: work(other, rank, place))
            if sweeps:
                with contextlib.suppress(RelightError):
                    execute_sweep(plan_sweep(store, RUN), store)
            work(actor, 0, place)

        def work(actor: Actor, rank: int, place: CommitTarget) -> None:
            self.truth.epochs_of[actor.name] = place.epoch
            store = self._store(actor)
            own_place = (
                place if rank == 0 else CommitTarget(store, Log(store, RUN), place.store_id, place.run_id, place.epoch)
            )
            attempt = Attempt(own_place)
            if smaller:  # as if two saves with equal chunks had been seen already
                attempt.make_smaller(Compact(codecs="never"), Experience(equal=1.0))
            for turn in range(count):
                step = number * 10 + turn
                saved = self.promises.saved(place.epoch, step, turn, world, not plan_differs)
                error = self._save(actor, attempt, saved, rank, alone, timeout_s, turn > 0)
                if error is not None and error.kind == "fenced":
                    return
                if rank == 0 and rules is not None:
                    self._prune(store, rules, own_place.log, place.epoch)

        self.stage.add(f"job{number}.0", first, delay_s)

    def _save(
        self,
        actor: Actor,
        attempt: Attempt,
        saved: AcknowledgedSave,
        rank: int,
        alone: bool,
        timeout_s: float,
        again: bool,
    ) -> RelightError | None:
        seen = Box((rank, 0), (1, ROW))
        is_odd_rank = not saved.agreed and rank == saved.world - 1
        box = None if alone else Box((0, 0), (1, ROW)) if is_odd_rank else seen
        shape = (1 if alone else saved.world, ROW)
        item = Item("t", "uint8", shape, "param", Bytes(saved.row(rank)), box, True)
        tree = encode_tree({"t": Leaf("tensor", (0,)), "u": Leaf("tensor", (1,))} if rank == 0 else {"rank": {}})
        items = [item, Item("u", "uint8", shape, "param", Bytes(FROZEN), box, False)]
        plan = plan_save(items, id=saved.id, rank=rank)
        if again:  # as for a layout that was saved before
            plan.proven.add("read")
        seat = None if alone else Participant(rank, saved.world, ("1" if is_odd_rank else "0") * 16, timeout_s)
        leaves = self.stage.now + self.rng.uniform(0, 3) if self.rng.random() < 0.06 else None

        def packs_written() -> None:
            if leaves is not None and self.rng.random() < 0.5:
                saved.aborted = True
                raise SaveFailed("aborted")

        request = SaveRequest(
            SaveInfo(step=saved.step, metrics={"loss": 1.0 / (saved.step + 1)}),
            tree=tree,
            items=items,
            id=saved.id,
            plan=plan,
            seat=seat,
            packs_written=packs_written,
            smaller=attempt.smaller,
            waits=None if leaves is None else lambda missing: self.stage.now < leaves,
        )
        saved.outcomes[rank] = ("died", -1)
        doubts = actor.doubts
        try:
            if alone:
                report: SaveReport = attempt.save(request)
            else:
                report = save_multi_rank(attempt.place, request, actor.clock, actor.sleep)
        except RelightError as error:
            saved.outcomes[rank] = (error.kind, -1)
            saved.doubted |= actor.doubts > doubts
            self.stage.note(actor, "save failed", saved.id, f"{error.kind}: {error.what}")
            return error
        saved.outcomes[rank] = ("", report.seq)
        self.stage.note(actor, "saved", saved.id, f"record {report.seq}")
        self.promises.acknowledged(actor.name, saved, report.seq)
        return None

    def _prune(self, store: SimulatedStore, rules: Keep, log: Log | None, epoch: int | None) -> None:
        with contextlib.suppress(RelightError):
            execute(plan_prune(store, RUN, rules, verified={}, log=log), store, epoch=epoch, log=log)

    def _tool(self, actor: Actor) -> None:
        rng, store = self.rng, self._store(actor)
        self.truth.epochs_of[actor.name] = None
        for _ in range(rng.randrange(1, 6)):
            chosen = rng.choice(("prune", "prune", "sweep", "sweep", "recall", "recall", "give up", "give up"))
            if chosen == "prune":
                self._prune(store, rng.choice(RULES), None, None)
            with contextlib.suppress(RelightError):
                if chosen == "sweep":
                    execute_sweep(plan_sweep(store, RUN), store)
                elif chosen != "prune":
                    ids = list(fold(Log(store, RUN).read()).recallable)
                    self.listed += [checkpoint_id for checkpoint_id in ids if checkpoint_id not in self.listed]
                    if self.listed and chosen == "recall":
                        recall(store, RUN, [rng.choice(self.listed)])
                    else:
                        sweep_recallable(store, RUN, ids[: rng.randrange(1, 3)])
            actor.sleep(rng.choice((0.01, 0.5, 2.0)))

    def _reader(self, actor: Actor) -> None:
        rng, store = self.rng, self._store(actor)
        for _ in range(rng.randrange(1, 4)):
            with contextlib.suppress(RelightError):
                log = Log(store, RUN)
                view = log.read()
                for checkpoint in candidates(fold(view)):
                    struck = actor.struck
                    findings = verify_checkpoint(store, view, checkpoint)
                    if not findings:
                        self.truth.wrong += self.promises.content(store, view, checkpoint)
                        break
                    if actor.struck == struck and checkpoint.id in self.truth.live:
                        self.truth.wrong.append(f"(1) {actor.name} finds {checkpoint.id} live, and {findings[0]}")
            actor.sleep(rng.choice((0.01, 0.5, 2.0)))

    def _tagger(self, actor: Actor) -> None:
        store = self._store(actor)
        log = Log(store, RUN)
        for number in range(12):
            with contextlib.suppress(RelightError):
                free = [
                    checkpoint
                    for checkpoint in fold(log.read()).live
                    if checkpoint.id not in self.promises.tags.values()
                ]
                if free and len(self.promises.tags) < 4:
                    chosen = free[0].id
                    Run(store, RUN).tag(f"tag{number}", chosen)
                    self.promises.tags[f"tag{number}"] = chosen
            actor.sleep(self.rng.choice((0.0, 0.1, 0.5)))

    # -- the world around them

    def _late(self) -> None:
        """Let a request that is under way take effect, now and then."""
        waiting = self.shelf.under_way
        if self.rng.random() < 0.05:
            key, data, who = waiting.pop(0)
            with contextlib.suppress(RelightError):
                if create(self.shelf, key, data, who):
                    self.stage.note(None, "arrives", key, f"of {who}")
                    self.shelf.sync(key.rpartition("/")[0])

    def _lose_log(self, rng: random.Random) -> None:
        """Lose the log, or all records since some FENCE or earlier. Jobs and tools run on it; then it is rebuilt."""
        if rng.random() >= LOST_LOGS:
            return
        fence = max(number for number, record in enumerate(self.truth.records) if record["kind"] == "FENCE")
        first = rng.choice((0, rng.randrange(fence) + 1))
        before = self.stage
        self.rng = rng
        self.stage = after = ScheduleStage(rng, before.weather._replace(budget=2), before.crew)
        after.trace, after.faults, after.now = before.trace, before.faults, before.now
        after.faults["lost_log"] += 1
        after.note(None, "log lost", LOG, f"from record {first} on")
        live = self.truth.lose_log(first)
        for number in range(20, 22):
            self._job(number, delay_s=rng.uniform(0, 1))
        for number in range(2):
            after.add(f"tool{number + 20}", self._tool, rng.uniform(0, 1))
        after.run()
        before.problems += after.problems
        self.promises.rebuild(live)
        self.promises.finale()

    def _cut(self) -> None:
        dropped = self.shelf.cut(self.rng)
        self.stage.faults["cut"] += 1
        self.stage.note(None, "power cut", "", ", ".join(dropped))
        self.promises.after_cut()
