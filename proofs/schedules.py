"""Run many schedules: ``python -m proofs.schedules --count 1000000 --seed 0 --jobs 2``.

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
from collections.abc import Iterator, Sequence
from multiprocessing.sharedctypes import Synchronized

from proofs.report import Report, engine_parser, run_engine
from proofs.schedule_explorer import Action
from proofs.seeded_bugs import PLANTED, planted
from proofs.simulate import KINDS, ScheduleOutcome, simulate
from proofs.staged import staged
from relight.comm.children import safe_spawn

OPEN: frozenset[str] = frozenset()
"""Faults that the product does not survive yet.

Left out unless ``--with`` names them. Remove a fault once it is fixed.
"""
BLOCK = 100
TRACED = 3
"""Number of violating seeds with a full trace."""
WRONG = "WRONG"


def schedule_report(expected: int = 0) -> Report:
    """Return an empty report of schedules."""
    return Report("schedules", 0, "--seed {} --count 1", expected=expected)


def add(report: Report, outcome: ScheduleOutcome) -> None:
    """Add the outcome of one schedule."""
    for name in ("actions", "actors", "commits", "acknowledged", "given_up", "retired"):
        report.counts[name] += getattr(outcome, name)
    report.tables["faults"].update(outcome.faults)
    report.add(str(outcome.seed), "schedules", outcome.violations)


def play(
    first: int, count: int, *, kinds: frozenset[str] = KINDS - OPEN, mutation: str | None = None, stop: bool = False
) -> Report:
    """Run schedules ``first`` to ``first + count - 1`` in this process. ``stop``: end at the first violation."""
    report = schedule_report()
    with report.timed(), planted(mutation), staged() as (crew, names):
        for seed in range(first, first + count):
            add(report, simulate(seed, crew, names, kinds))
            if stop and report.violated:
                break
            if seed % 500 == 499:
                gc.collect()
    return report


def find(mutation: str, first: int, count: int, *, kinds: frozenset[str] = KINDS - OPEN) -> Report:
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


def _block(work: tuple[int, int, frozenset[str], str | None]) -> Report:
    first, count, kinds, mutation = work
    return play(first, count, kinds=kinds, mutation=mutation)


def _blocks(
    first: int, count: int, kinds: frozenset[str], mutation: str | None
) -> Iterator[tuple[int, int, frozenset[str], str | None]]:
    for start in range(first, first + count, BLOCK):
        yield start, min(BLOCK, first + count - start), kinds, mutation


def many(first: int, count: int, *, jobs: int, kinds: frozenset[str], mutation: str | None = None) -> Report:
    """Run schedules in several processes, with progress on stderr."""
    report = schedule_report(count)
    spawn = multiprocessing.get_context("spawn")
    with safe_spawn():
        made = spawn.Pool(jobs, _take_core, (spawn.Value("i", 0),))
    with report.timed(), made as pool:
        for block in pool.imap_unordered(_block, _blocks(first, count, kinds, mutation)):
            report.join(block)
    return report


def _every_mutation(first: int, count: int, kinds: frozenset[str], as_json: bool) -> int:
    survivors = []
    table = []
    for name in PLANTED:
        report = find(name, first, count, kinds=kinds)
        seed, message = (
            (int(report.violations[0].trial), report.violations[0].wrong[0]) if report.violated else (-1, "SURVIVED")
        )
        table.append({"mutation": name, "seeds": report.total, "seed": seed, "said": message})
        if not report.violated:
            survivors.append(name)
        if not as_json:
            print(f"{name:60} {report.total:6} schedules  {message[:120]}", flush=True)
    if as_json:
        print(json.dumps({"ok": not survivors, "mutations": table}, indent=1))
    else:
        print(f"{len(PLANTED)} bugs planted, {len(survivors)} not found")
    return 1 if survivors else 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Return 0 if every invariant held, else 1."""
    parser = engine_parser("proofs.schedules", __doc__, 1000)
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
    options = parser.parse_args(arguments)
    kinds = (KINDS - OPEN - set(options.without.split(","))) | (OPEN & set(options.required.split(",")))
    if options.mutation == "all":
        return _every_mutation(options.seed, options.count, kinds, options.json)
    if options.count == 1:
        lines = _run_schedule(options.seed, kinds, options.mutation)
        print(json.dumps({"trace": lines}, indent=1) if options.json else "\n".join(lines))
        return 1 if lines[-1].startswith(WRONG) else 0

    def run(options: argparse.Namespace) -> Report:
        if options.jobs > 1 or options.count > 10 * BLOCK:
            report = many(options.seed, options.count, jobs=options.jobs, kinds=kinds, mutation=options.mutation)
        else:
            report = play(options.seed, options.count, kinds=kinds, mutation=options.mutation)
        report.seed = options.seed
        report.violations.sort(key=lambda violation: int(violation.trial))
        for violation in report.violations[:TRACED]:
            violation.trace = _run_schedule(int(violation.trial), kinds, options.mutation)
        return report

    return run_engine(parser, run, arguments)


if __name__ == "__main__":
    sys.exit(main())
