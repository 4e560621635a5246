"""Schedules of copies to a further tier: ``python -m proofs.outward --count 100000 --jobs 2``.

Nodes of one or two attempts copy a checkpoint together (``transfer.shared_copy``), on a store that fails in every way of ``simulated_store``.
They die, and other processes continue. A later attempt takes the tier over; commands copy to the same run; a tool sweeps; the power is cut;
one node reads damaged bytes from the nearest tier. The invariants:

1. A copy that a node has reported is a checkpoint in the end, also after a power cut. 2. The tier has the checkpoint at most once (and
once more for each command that copied it), and every byte verifies. 3. No process waits forever. 4. Without faults, one more process
completes the copy, and a second finds nothing to do. 5. After a last attempt has swept, only files of checkpoints are left.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import multiprocessing
import random
import sys
import threading
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from proofs.report import Report, engine_parser, run_engine
from proofs.schedule_explorer import Action, Actor, Crew, ScheduleStage, Weather
from proofs.seeded_bugs import Bug, Edit, plant
from proofs.shelf import DurableNames, create
from proofs.simulate import KINDS
from proofs.simulated_store import FaultFreeProcess, SimulatedStore
from proofs.staged import staged
from relight.catalog import Run
from relight.comm.children import safe_spawn
from relight.commit import Attempt, SaveInfo, SaveRequest
from relight.commit.attempt import take_over
from relight.commit.multi_rank import save_multi_rank
from relight.commit.save import CommitTarget, Participant
from relight.errors import CorruptCheckpoint, Fenced, RelightError
from relight.format import Leaf, encode_tree
from relight.layout import Box, Bytes, Item
from relight.log import Log
from relight.reader import Opened, verify_checkpoint
from relight.reclaim import execute_sweep, plan_sweep
from relight.store import MemoryStore
from relight.testing.scenario import Names, patched
from relight.transfer import shared_copy
from relight.transfer.copying import copy_one
from relight.transfer.shared_copy import copy_together

RUN, ID, ROW = "run", "0123456789", 64
PARTS = (1, 2, 3, 5)
COPY = "relight.transfer.shared_copy:_Copy"
BLOCK = 200
GARBAGE_AFTER = 500
"""Schedules after which their garbage is collected, 0.1 MB of each: ``staged`` has switched the collector off."""

BUGS: dict[str, Bug] = {
    "a part counts as copied before it is written": Bug(
        Edit(
            f"{COPY}._write_part",
            "        started = ",
            "        self._announce(copied_file(number))\n        started = ",
        ),
        Edit("relight.commit.save:check_part_written", "    for pack in part.packs:\n", "    for pack in ():\n"),
    ),
    "a part counts as copied before its names are durable": Bug(
        Edit(f"{COPY}._complete", "        self._store.sync(self._prefix)\n", ""),
        Edit(f"{COPY}.commit", "            store.sync(self._prefix)\n", ""),
    ),
    "a node does not ask whether its attempt is superseded": Bug(
        Edit(f"{COPY}._check_charge", "if history.epoch == self._charge:", "if True:")
    ),
    "COMMIT is written without checking whether the tier has the checkpoint": Bug(
        Edit(
            f"{COPY}._copies",
            "if copy.original_id == self._origin]",
            "if durable and copy.original_id == self._origin]",
        )
    ),
    "a superseded node deletes a committed copy": Bug(
        Edit(f"{COPY}._check_charge", " and self._writer.directory.id not in copies:", ":")
    ),
    "a node that another was quicker than deletes the copy": Bug(
        Edit(f"{COPY}.commit", " and self._writer.directory.id not in [copy.id for copy in copies]:", ":")
    ),
    "a part is taken by one node only": Bug(
        Edit(
            f"{COPY}._is_free",
            "        since = self._first_seen",
            "        return False\n        since = self._first_seen",
        )
    ),
    "a second attempt at a part replaces no file": Bug(Edit(f"{COPY}._write_part", "again=attempt > 0", "again=False")),
    "a command does not claim its directory": Bug(
        Edit(
            "relight.transfer.copying:_claim",
            "        return store.put_once(",
            "        return True or store.put_once(",
        )
    ),
    "a node that finds damage clears a complete copy": Bug(
        Edit(
            f"{COPY}._give_up_part",
            "            return False",
            "            pass",
        )
    ),
    "a copy that another node committed is reported before its record is durable": Bug(
        Edit(f"{COPY}._copies", "for copy in copies if durable else ():", "for copy in ():")
    ),
}
"""Bugs of the protocol; the schedules must find each."""


class Seeded:
    """Replacement of ``secrets``: equal seeds give equal schedules."""

    def __init__(self, rng: random.Random) -> None:
        self.randbits, self.randbelow = rng.getrandbits, rng.randrange


class Outcome(NamedTuple):
    """Outcome of a schedule."""

    seed: int
    counts: Counter[str]
    faults: Counter[str]
    violations: list[str]
    trace: list[tuple[float, str, str, str, str]]


@functools.cache
def saved(parts: int) -> MemoryStore:
    """Return a store with a checkpoint of that many ranks, which are threads."""
    store = MemoryStore()
    begun = Attempt.begin(store, RUN)

    def save(rank: int) -> None:
        place = CommitTarget(store, Log(store, RUN), begun.place.store_id, begun.place.run_id, begun.epoch)
        row = Item("t", "uint8", (parts, ROW), "value", Bytes(bytes([rank + 1]) * ROW), Box((rank, 0), (1, ROW)))
        tree = encode_tree({"t": Leaf("tensor", (0,))} if rank == 0 else {"rank": {}})
        seat = Participant(rank, parts, "0" * 16, 60.0)
        save_multi_rank(place, SaveRequest(SaveInfo(step=1), tree=tree, items=[row], id=ID, seat=seat))

    threads = [threading.Thread(target=save, args=(rank,)) for rank in range(parts)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return store


@functools.cache
def original(parts: int, damaged: bool) -> Opened:
    """Return that checkpoint, opened; ``damaged``: with a bit of its last pack changed."""
    store = saved(parts)
    if damaged:
        copied = MemoryStore()
        for folder in _folders(store, RUN):
            for entry in store.list(folder):
                if not entry.is_dir:
                    key = f"{folder}/{entry.name}"
                    data = bytearray(store.get(key, 1 << 30))
                    if entry.name.startswith(f"pack-{parts - 1:05d}"):
                        data[-1] ^= 1
                    copied.put_once(key, bytes(data))
        store = copied
    run = Run(store, RUN)
    return run.open(run.history().live[-1])


def _folders(store: MemoryStore, prefix: str) -> list[str]:
    inner = [f"{prefix}/{entry.name}" for entry in store.list(prefix) if entry.is_dir]
    return [prefix, *(folder for each in inner for folder in _folders(store, each))]


def simulate(seed: int, crew: Crew, names: Names) -> Outcome:
    """Run the schedule of ``seed``. Call it within ``staged()`` only."""
    rng = random.Random(f"outward {seed}")
    names.seed(f"outward {seed}")
    with patched((shared_copy, "secrets", Seeded(random.Random(f"secrets {seed}")))):
        return OutwardPlay(seed, rng, crew).outcome()


class OutwardPlay:
    """One schedule."""

    def __init__(self, seed: int, rng: random.Random, crew: Crew) -> None:
        self.seed, self.rng = seed, rng
        self.shelf = DurableNames()
        self.parts = rng.choice(PARTS)
        self.fine = rng.random() < 0.5
        self.stage = self._new_stage(Weather.draw(rng, KINDS), crew)
        self.reported: list[str] = []
        """Nodes that have reported that the tier has the checkpoint."""
        self.by_commands: list[str] = []
        """Ids of the copies that commands have reported."""
        self.commands = 0
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.outside = SimulatedStore(self.shelf, FaultFreeProcess(), rng, fine=False)

    def _new_stage(self, weather: Weather, crew: Crew) -> ScheduleStage:
        stage = ScheduleStage(self.rng, weather, crew)
        stage.under_way, stage.after_step = self.shelf.under_way, self._late
        return stage

    def outcome(self) -> Outcome:
        """Run it, and check the invariants."""
        rng = self.rng
        log = Log(self.outside, RUN)
        log.start()
        self._nodes("a", take_over(log, "a", []), 0.0)
        if rng.random() < 0.3:
            self.stage.add("b", self._second, rng.choice((0.01, 0.3, 1.0, 4.0)))
        if rng.random() < 0.25:
            self.commands += 1
            self.stage.add("command", self._command, rng.choice((0.0, 0.05, 0.5)))
        if rng.random() < 0.3:
            self.stage.add("sweeper", self._sweeper, rng.uniform(0, 2))
        if rng.random() < 0.2:
            self.stage.ends_at = rng.randrange(20, 300)
        stage = self.stage
        stage.run()
        self.wrong += stage.problems
        if stage.over and not stage.problems:
            self.shelf.under_way.clear()
            dropped = self.shelf.cut(rng)
            stage.note(None, "power cut", "", ", ".join(dropped))
            self.counts["power cuts"] += 1
        self.shelf.under_way.clear()
        if not self.wrong:
            self._finale()
        self.counts["reported"] += len(self.reported)
        return Outcome(self.seed, self.counts, stage.faults, list(dict.fromkeys(self.wrong)), stage.trace)

    # -- programs

    def _nodes(self, name: str, charge: int, delay_s: float) -> None:
        rng = self.rng
        count = rng.choice((1, 2, 2, 3, 4))
        bad = rng.randrange(count) if rng.random() < 0.1 else -1
        for number in range(count):
            tries, late = rng.choice((1, 2, 4)), delay_s + rng.choice((0.0, 0.0, 0.1, 2.0))
            program = functools.partial(self._node, number=number, charge=charge, tries=tries, damaged=number == bad)
            self.stage.add(f"{name}{number}", program, late)

    def _node(self, actor: Actor, number: int, charge: int, tries: int, damaged: bool) -> None:
        for _ in range(tries):
            store = self._store(actor)
            try:
                done = copy_together(
                    original(self.parts, damaged), store, Log(store, RUN), charge,
                    own=frozenset({number}), pause=actor.sleep, clock=actor.clock,
                )  # fmt: skip
            except Fenced:
                self.counts["fenced"] += 1
                return
            except CorruptCheckpoint:
                self.counts["void"] += 1
            except RelightError as error:
                self.stage.note(actor, "failed", "", f"{error.kind}: {error.what}")
            else:
                self.reported.append(actor.name)
                self.counts["parts"] += done.parts
                self.counts["commits"] += done.committed
                self.stage.note(actor, "reported", "", str(done))
                return
            actor.sleep(0.3)

    def _second(self, actor: Actor) -> None:
        """Another attempt takes the tier over, and copies too."""
        for _ in range(4):
            with contextlib.suppress(RelightError):
                charge = take_over(Log(self._store(actor), RUN), "b", ["a"])
                self.counts["takeovers"] += 1
                self._nodes("b", charge, 0.0)
                return
            actor.sleep(0.2)

    def _command(self, actor: Actor) -> None:
        store = self._store(actor)
        with contextlib.suppress(RelightError):
            self.by_commands.append(copy_one(original(self.parts, False), store, Log(store, RUN), None))

    def _sweeper(self, actor: Actor) -> None:
        for _ in range(3):
            store = self._store(actor)
            with contextlib.suppress(RelightError):
                execute_sweep(plan_sweep(store, RUN), store)
            actor.sleep(0.5)

    def _store(self, actor: Actor) -> SimulatedStore:
        return SimulatedStore(self.shelf, actor, self.rng, fine=self.fine, torn=lambda prefix: True)

    def _late(self) -> None:
        """Let a request that is under way take effect, now and then."""
        if self.rng.random() < 0.05:
            key, data, who = self.shelf.under_way.pop(0)
            with contextlib.suppress(RelightError):
                if create(self.shelf, key, data, who):
                    self.shelf.sync(key.rpartition("/")[0])

    # -- the end

    def _finale(self) -> None:
        """Check what is there; then let processes without faults continue, and check again."""
        store, again = self.outside, []
        self._check("in the end")
        if self.reported and not self._there():
            self.wrong.append(f"(1) {self.reported} reported the copy, and the tier does not have it")
        log = Log(store, RUN)
        newest = Run(store, RUN).history().epoch
        now = [0.0]

        def pause(seconds: float) -> None:
            now[0] += seconds
            if now[0] > 1000:
                raise AssertionError("waits forever")

        charge = take_over(log, "last", ["a", "b"]) if self.rng.random() < 0.5 else newest
        for _ in range(2):
            try:
                again.append(
                    copy_together(original(self.parts, False), store, log, charge, pause=pause, clock=lambda: now[0])
                )
            except (AssertionError, RelightError) as error:
                self.wrong.append(f"(4) a process without faults fails: {type(error).__name__}: {error}")
                return
        if not self._there():
            self.wrong.append("(4) a process without faults does not complete the copy")
        if again[-1][:4] != (0, self.parts, 0, False):
            self.wrong.append(f"(4) the second process finds something to do: {again}")
        self.shelf.cut(self.rng)
        self._check("after a power cut at the end")
        names = ["a", "b", "last"]
        for number in range(3):  # a FENCE that was not durable may be lost: then its epoch comes again
            take_over(Log(store, RUN), f"last {number}", names)
            names.append(f"last {number}")
        execute_sweep(plan_sweep(store, RUN), store)
        kept = {checkpoint.directory_in(RUN) for checkpoint in Run(store, RUN).history().live}
        left = [key for key in self.shelf.files if f"{RUN}/0" in key and key.rsplit("/", 1)[0] not in kept]
        left = [key for key in left if not any(key.startswith(f"{folder}/ready/") for folder in kept)]
        if left:
            self.wrong.append(f"(5) files of no checkpoint are left: {left[:4]}")
        self._check("after the last sweep")

    def _there(self) -> int:
        return sum(checkpoint.original_id == ID for checkpoint in Run(self.outside, RUN).history().live)

    def _check(self, when: str) -> None:
        store = self.outside
        run = Run(store, RUN)
        live = run.history().live
        nodes = [checkpoint for checkpoint in live if checkpoint.id not in self.by_commands]
        if len(nodes) > 1 + self.commands:
            self.wrong.append(f"(2) {when} the tier has the checkpoint {len(nodes)} times")
        for checkpoint in live:
            if findings := verify_checkpoint(store, run.view(), checkpoint):
                self.wrong.append(f"(2) {when} {checkpoint.id}: {findings[0]}")
        missing = [name for name in self.by_commands if name not in {checkpoint.id for checkpoint in live}]
        if missing:
            self.wrong.append(f"(1) {when} the copies {missing} that a command reported are not there")


def play(first: int, count: int, *, bug: str | None = None, stop: bool = False) -> Report:
    """Run schedules ``first`` to ``first + count - 1`` in this process. ``stop``: end at the first violation."""
    report = Report("outward copies", 0, "--seed {} --count 1", expected=count)
    for parts in PARTS:
        original(parts, False), original(parts, True)  # before anything is simulated
    with report.timed(), plant(BUGS[bug] if bug else None), staged() as (crew, names):
        for seed in range(first, first + count):
            outcome = simulate(seed, crew, names)
            report.counts.update(outcome.counts)
            report.tables["faults"].update(outcome.faults)
            report.add(str(seed), "schedules", outcome.violations)
            if stop and report.violated:
                break
            if seed % GARBAGE_AFTER == 0:
                gc.collect()
    return report


def _block(work: tuple[int, int]) -> Report:
    return play(*work)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Return 0 if every invariant held, else 1."""
    parser = engine_parser("proofs.outward", __doc__, 1000)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--planted", action="store_true", help="plant each bug in turn, until it is found")
    parser.add_argument("--mutation", choices=list(BUGS), metavar="NAME", help="plant this bug")
    options = parser.parse_args(arguments)
    if options.count == 1:
        with plant(BUGS[options.mutation] if options.mutation else None):
            for parts in PARTS:
                original(parts, False), original(parts, True)
            with staged() as (crew, names):
                outcome = simulate(options.seed, crew, names)
        print(
            "\n".join(
                [*(str(Action(*line)) for line in outcome.trace), *(f"WRONG {text}" for text in outcome.violations)]
            )
        )
        return 1 if outcome.violations else 0

    def run(options: argparse.Namespace) -> Report:
        if options.planted:
            report = Report("planted bugs of outward copies", expected=len(BUGS))
            with report.timed():
                for name in BUGS:
                    trial = play(options.seed, options.count, bug=name, stop=True)
                    wrong = trial.violations[0].wrong[0] if trial.violated else "NOT FOUND"
                    report.add(name, "found" if trial.violated else "not found", [] if trial.violated else [wrong])
                    print(f"{name:78} {trial.total:6}  {wrong[:90]}", file=sys.stderr, flush=True)
            return report
        if options.jobs < 2:
            return play(options.seed, options.count, bug=options.mutation)
        report = Report("outward copies", options.seed, "--seed {} --count 1", expected=options.count)
        work = [
            (start, min(BLOCK, options.seed + options.count - start))
            for start in range(options.seed, options.seed + options.count, BLOCK)
        ]
        with safe_spawn():
            made = multiprocessing.get_context("spawn").Pool(options.jobs)
        with report.timed(), made as pool:
            for block in pool.imap_unordered(_block, work):
                report.join(block)
        return report

    return run_engine(parser, run, arguments)


if __name__ == "__main__":
    sys.exit(main())
