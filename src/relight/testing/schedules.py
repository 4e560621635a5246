"""Schedules by the thousand: ``python -m relight.testing.schedules --count 1000000 --seed 0 --jobs 2``.

Each is a run's life among many processes, see ``simulate``; a seed repeats it exactly. ``--mutation`` plants a bug first, and
``--mutation all`` one after the other, each until it is found; ``--count 1`` prints what happened, line by line.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.sharedctypes import Synchronized

from relight.comm.children import safe_spawn
from relight.testing.schedule_explorer import Action
from relight.testing.seeded_bugs import PLANTED, planted
from relight.testing.simulate import KINDS, ScheduleOutcome, simulate
from relight.testing.staged import staged

OPEN: frozenset[str] = frozenset()
"""What the product does not stand yet. Left out unless asked for by ``--with``; what is mended leaves this list."""
BLOCK = 100
SHOWN = 20
"""Seeds with violations that are kept."""
TRACED = 3
"""Of how many of them all is told that happened."""
WRONG = "WRONG"


@dataclass
class ScheduleReport:
    """What many schedules came to."""

    schedules: int = 0
    actions: int = 0
    seconds: float = 0.0
    counts: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    violated: int = 0
    violations: list[tuple[int, list[str]]] = field(default_factory=list)
    """``(seed, what was wrong)`` of the first ones."""

    def add(self, outcome: ScheduleOutcome) -> None:
        """One more."""
        self.schedules += 1
        self.actions += outcome.actions
        self.faults.update(outcome.faults)
        for name in ("actors", "commits", "acknowledged", "given_up", "retired"):
            self.counts[name] += getattr(outcome, name)
        if outcome.violations:
            self.violated += 1
            self.violations = [*self.violations, (outcome.seed, outcome.violations)][:SHOWN]

    def join(self, other: ScheduleReport) -> None:
        """And what another has."""
        self.schedules += other.schedules
        self.actions += other.actions
        self.counts.update(other.counts)
        self.faults.update(other.faults)
        self.violated += other.violated
        self.violations = sorted([*self.violations, *other.violations])[:SHOWN]

    def to_dict(self) -> dict[str, object]:
        """For ``--json``."""
        return {
            "ok": not self.violated and self.schedules > 0,
            "schedules": self.schedules,
            "actions": self.actions,
            "seconds": round(self.seconds, 1),
            "a_second": round(self.schedules / max(self.seconds, 0.001), 1),
            **dict(sorted(self.counts.items())),
            "faults": dict(sorted(self.faults.items())),
            "violated": self.violated,
            "first": [{"seed": seed, "wrong": wrong} for seed, wrong in self.violations],
        }


def play(
    first: int, count: int, *, kinds: frozenset[str] = KINDS - OPEN, mutation: str | None = None, stop: bool = False
) -> ScheduleReport:
    """Schedules ``first`` to ``first + count - 1`` in this process; with ``stop`` none after the first violation."""
    report = ScheduleReport()
    started = time.perf_counter()
    with planted(mutation), staged() as (crew, names):
        for seed in range(first, first + count):
            report.add(simulate(seed, crew, names, kinds))
            if stop and report.violated:
                break
            if seed % 500 == 499:
                gc.collect()
    report.seconds = time.perf_counter() - started
    return report


def find(mutation: str, first: int, count: int, *, kinds: frozenset[str] = KINDS - OPEN) -> ScheduleReport:
    """Schedules with that bug, until one finds it."""
    bug = PLANTED[mutation]
    return play(first, count, kinds=(kinds | bug.besides) - bug.without, mutation=mutation, stop=True)


def trace(seed: int, *, kinds: frozenset[str] = KINDS - OPEN, mutation: str | None = None) -> ScheduleOutcome:
    """One schedule, with all that happened in it."""
    with planted(mutation), staged() as (crew, names):
        return simulate(seed, crew, names, kinds)


def _run_schedule(seed: int, kinds: frozenset[str], mutation: str | None) -> list[str]:
    """All that happened, and what is wrong with it."""
    found = trace(seed, kinds=kinds, mutation=mutation)
    return [*(str(Action(*one)) for one in found.trace), *(f"{WRONG} {text}" for text in found.violations)]


def _take_core(turns: Synchronized[int]) -> None:
    """Stay on one core, each process on another: threads that hand a baton on cost a fifth less there. And what is loaded stays loaded."""
    gc.freeze()
    if hasattr(os, "sched_setaffinity"):
        with turns.get_lock():
            turn = turns.value
            turns.value += 1
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[turn % len(cores)]})


def _block(work: tuple[int, int, frozenset[str], str | None]) -> ScheduleReport:
    first, count, kinds, mutation = work
    return play(first, count, kinds=kinds, mutation=mutation)


def _blocks(first: int, count: int, kinds: frozenset[str], mutation: str | None) -> Iterator[tuple[int, int, frozenset[str], str | None]]:
    for at in range(first, first + count, BLOCK):
        yield at, min(BLOCK, first + count - at), kinds, mutation


def many(first: int, count: int, *, jobs: int, kinds: frozenset[str], mutation: str | None = None, quiet: bool = False) -> ScheduleReport:
    """Schedules in several processes, with progress on stderr."""
    report = ScheduleReport()
    started = told = time.perf_counter()
    spawn = multiprocessing.get_context("spawn")
    with safe_spawn():
        made = spawn.Pool(jobs, _take_core, (spawn.Value("i", 0),))
    with made as pool:
        for one in pool.imap_unordered(_block, _blocks(first, count, kinds, mutation)):
            report.join(one)
            report.seconds = time.perf_counter() - started
            for seed, wrong in one.violations if not quiet else ():
                print(f"seed {seed}: {wrong}", file=sys.stderr, flush=True)
            if not quiet and time.perf_counter() - told > 10:
                told = time.perf_counter()
                rate = report.schedules / report.seconds
                left = (count - report.schedules) / rate / 60
                print(
                    f"{report.schedules:>9,} schedules, {rate:.0f}/s, {report.violated} violations, {left:.0f} min left",
                    file=sys.stderr,
                    flush=True,
                )
    return report


def _every_mutation(first: int, count: int, kinds: frozenset[str], as_json: bool) -> int:
    survivors = []
    table = []
    for name in PLANTED:
        report = find(name, first, count, kinds=kinds)
        seed, wrong = report.violations[0] if report.violations else (-1, ["SURVIVED"])
        table.append({"mutation": name, "seeds": report.schedules, "seed": seed, "said": wrong[0]})
        if not report.violated:
            survivors.append(name)
        if not as_json:
            print(f"{name:60} {report.schedules:6} schedules  {wrong[0][:120]}", flush=True)
    if as_json:
        print(json.dumps({"ok": not survivors, "mutations": table}, indent=1))
    else:
        print(f"{len(PLANTED)} bugs planted, {len(survivors)} not found")
    return 1 if survivors else 0


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m relight.testing.schedules", description=__doc__)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0, help="the first one's; the others follow it")
    parser.add_argument("--mutation", help="plant this bug, or each (all) until it is found", choices=[*PLANTED, "all"], metavar="NAME")
    parser.add_argument("--without", default="", help=f"faults that do not happen: {' '.join(sorted(KINDS))}")
    parser.add_argument("--with", dest="besides", default="", help=f"faults that happen as well: {' '.join(sorted(OPEN))}")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    kinds = (KINDS - OPEN - set(options.without.split(","))) | (OPEN & set(options.besides.split(",")))
    if options.mutation == "all":
        return _every_mutation(options.seed, options.count, kinds, options.json)
    if options.count == 1:
        lines = _run_schedule(options.seed, kinds, options.mutation)
        print(json.dumps({"trace": lines}, indent=1) if options.json else "\n".join(lines))
        return 1 if lines[-1].startswith(WRONG) else 0
    if options.jobs > 1 or options.count > 10 * BLOCK:
        report = many(options.seed, options.count, jobs=options.jobs, kinds=kinds, mutation=options.mutation)
    else:
        report = play(options.seed, options.count, kinds=kinds, mutation=options.mutation)
    traces = {seed: _run_schedule(seed, kinds, options.mutation) for seed, _ in report.violations[:TRACED]}
    if options.json:
        print(json.dumps({**report.to_dict(), "traces": traces}, indent=1))
        return 1 if report.violated else 0
    for seed, lines in traces.items():
        print("\n".join([f"\nseed {seed}", *(f"  {line}" for line in lines[-80:])]))
    for name, value in report.to_dict().items():
        if name != "first":
            print(f"{name:14} {value}")
    for seed, wrong in report.violations:
        print(f"seed {seed}: {wrong[0]}")
    return 1 if report.violated else 0


if __name__ == "__main__":
    sys.exit(main())
