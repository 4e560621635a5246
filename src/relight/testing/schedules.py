"""Run many schedules: ``python -m relight.testing.schedules --count 1000000 --seed 0 --jobs 2``.

Each schedule is a run's life among many processes, see ``simulate``; a seed repeats it exactly. ``--mutation`` plants
a bug first. ``--mutation all`` plants one after the other, each until it is found. ``--count 1`` prints the trace.
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
from relight.units import duration_text

OPEN: frozenset[str] = frozenset()
"""Faults that the product does not survive yet.

Left out unless ``--with`` names them. Remove a fault once it is fixed.
"""
BLOCK = 100
SHOWN = 20
"""Number of violating seeds that are kept."""
TRACED = 3
"""Number of violating seeds with a full trace."""
WRONG = "WRONG"


@dataclass
class ScheduleReport:
    """Outcome of many schedules."""

    schedules: int = 0
    actions: int = 0
    seconds: float = 0.0
    counts: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    violated: int = 0
    violations: list[tuple[int, list[str]]] = field(default_factory=list)
    """``(seed, what was wrong)`` of the first ones."""

    def add(self, outcome: ScheduleOutcome) -> None:
        """Add the outcome of one schedule."""
        self.schedules += 1
        self.actions += outcome.actions
        self.faults.update(outcome.faults)
        for name in ("actors", "commits", "acknowledged", "given_up", "retired"):
            self.counts[name] += getattr(outcome, name)
        if outcome.violations:
            self.violated += 1
            self.violations = [*self.violations, (outcome.seed, outcome.violations)][:SHOWN]

    def join(self, other: ScheduleReport) -> None:
        """Add another report."""
        self.schedules += other.schedules
        self.actions += other.actions
        self.counts.update(other.counts)
        self.faults.update(other.faults)
        self.violated += other.violated
        self.violations = sorted([*self.violations, *other.violations])[:SHOWN]

    def to_dict(self) -> dict[str, object]:
        """Return the report for ``--json``."""
        return {
            "ok": not self.violated and self.schedules > 0,
            "schedules": self.schedules,
            "actions": self.actions,
            "seconds": round(self.seconds, 1),
            "a_second": round(self.schedules / max(self.seconds, 0.001), 1),
            **dict(sorted(self.counts.items())),
            "faults": dict(sorted(self.faults.items())),
            "violated": self.violated,
            "first": [{"seed": seed, "wrong": problems} for seed, problems in self.violations],
        }


def play(
    first: int, count: int, *, kinds: frozenset[str] = KINDS - OPEN, mutation: str | None = None, stop: bool = False
) -> ScheduleReport:
    """Run schedules ``first`` to ``first + count - 1`` in this process. ``stop``: end at the first violation."""
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
    """Run schedules with that bug until one finds it."""
    bug = PLANTED[mutation]
    return play(first, count, kinds=(kinds | bug.required) - bug.without, mutation=mutation, stop=True)


def trace(seed: int, *, kinds: frozenset[str] = KINDS - OPEN, mutation: str | None = None) -> ScheduleOutcome:
    """Run one schedule and return its outcome with its trace."""
    with planted(mutation), staged() as (crew, names):
        return simulate(seed, crew, names, kinds)


def _run_schedule(seed: int, kinds: frozenset[str], mutation: str | None) -> list[str]:
    """Run one schedule. Return its trace as lines, then its violations."""
    outcome = trace(seed, kinds=kinds, mutation=mutation)
    return [*(str(Action(*line)) for line in outcome.trace), *(f"{WRONG} {text}" for text in outcome.violations)]


def _take_core(turns: Synchronized[int]) -> None:
    """Bind this process to a core of its own: threads that pass a baton are a fifth cheaper there.

    Exempt loaded objects from collection.
    """
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


def _blocks(
    first: int, count: int, kinds: frozenset[str], mutation: str | None
) -> Iterator[tuple[int, int, frozenset[str], str | None]]:
    for start in range(first, first + count, BLOCK):
        yield start, min(BLOCK, first + count - start), kinds, mutation


def many(
    first: int, count: int, *, jobs: int, kinds: frozenset[str], mutation: str | None = None, quiet: bool = False
) -> ScheduleReport:
    """Run schedules in several processes, with progress on stderr."""
    report = ScheduleReport()
    started = reported = time.perf_counter()
    spawn = multiprocessing.get_context("spawn")
    with safe_spawn():
        made = spawn.Pool(jobs, _take_core, (spawn.Value("i", 0),))
    with made as pool:
        for block in pool.imap_unordered(_block, _blocks(first, count, kinds, mutation)):
            report.join(block)
            report.seconds = time.perf_counter() - started
            for seed, problems in block.violations if not quiet else ():
                print(f"seed {seed}: {problems}", file=sys.stderr, flush=True)
            if not quiet and time.perf_counter() - reported > 10:
                reported = time.perf_counter()
                rate = report.schedules / report.seconds
                left_s = (count - report.schedules) / rate
                print(
                    f"{report.schedules:>9,} schedules, {rate:.0f}/s, {report.violated} violations, {duration_text(left_s)} left",
                    file=sys.stderr,
                    flush=True,
                )
    return report


def _every_mutation(first: int, count: int, kinds: frozenset[str], as_json: bool) -> int:
    survivors = []
    table = []
    for name in PLANTED:
        report = find(name, first, count, kinds=kinds)
        seed, problems = report.violations[0] if report.violations else (-1, ["SURVIVED"])
        table.append({"mutation": name, "seeds": report.schedules, "seed": seed, "said": problems[0]})
        if not report.violated:
            survivors.append(name)
        if not as_json:
            print(f"{name:60} {report.schedules:6} schedules  {problems[0][:120]}", flush=True)
    if as_json:
        print(json.dumps({"ok": not survivors, "mutations": table}, indent=1))
    else:
        print(f"{len(PLANTED)} bugs planted, {len(survivors)} not found")
    return 1 if survivors else 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Return 0 if every invariant held, else 1."""
    parser = argparse.ArgumentParser(prog="python -m relight.testing.schedules", description=__doc__)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0, help="seed of the first schedule; the others follow it")
    parser.add_argument(
        "--mutation",
        help="plant this bug, or each in turn (all), until it is found",
        choices=[*PLANTED, "all"],
        metavar="NAME",
    )
    parser.add_argument("--without", default="", help=f"faults that do not happen: {' '.join(sorted(KINDS))}")
    parser.add_argument(
        "--with", dest="required", default="", help=f"faults that happen as well: {' '.join(sorted(OPEN))}"
    )
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    kinds = (KINDS - OPEN - set(options.without.split(","))) | (OPEN & set(options.required.split(",")))
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
    for seed, problems in report.violations:
        print(f"seed {seed}: {problems[0]}")
    return 1 if report.violated else 0


if __name__ == "__main__":
    sys.exit(main())
