"""The report of a proof engine: trials by kind, violations with what repeats them, progress, and the end of its command."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

KEPT = 50
"""Violations kept in full. Later ones are only counted."""
JSON_VIOLATIONS, SHOWN_VIOLATIONS = 20, 10
PROBLEMS_KEPT = 5
"""Problems of one violation. The others mostly follow from the first."""
TRACE_SHOWN = 80
TERMINAL_S, LOG_S = 0.2, 10.0
"""Seconds between two lines of progress, on a terminal and elsewhere."""


class EngineUnavailable(RuntimeError):
    """An engine cannot run here. The message names what is missing, such as root, strace or FUSE."""


@dataclass
class Violation:
    """A trial after which an invariant did not hold."""

    trial: str
    """Name of the trial, for ``Report.replay``."""
    wrong: list[str]
    where: str = ""
    """The call, the file system or the kind of fault."""
    trace: list[str] = field(default_factory=list)
    """Events before the violation."""


@dataclass
class Report:
    """Trials of an engine, by kind, and violations."""

    what: str
    """The trials' noun, in the plural."""
    seed: int = 0
    replay: str = ""
    """Options of the command that repeat a trial, with ``{}`` for its name; empty if a trial cannot be repeated exactly."""
    needs: str = ""
    """Name of a count. If it is 0, nothing was checked, and the report is not ok."""
    expected: int = 0
    """Trials to do. Above 0, violations and progress are printed to stderr."""
    trials: Counter[str] = field(default_factory=Counter)
    counts: Counter[str] = field(default_factory=Counter)
    """Other counts, by name."""
    tables: defaultdict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    """Groups of counts, by name."""
    violations: list[Violation] = field(default_factory=list)
    violated: int = 0
    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Seconds of each part that ``timed`` measured."""
    cpu_seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    """CPU time of this process and its ended children, by part."""
    began: float = field(default_factory=time.perf_counter)
    _printed: float = 0.0

    @property
    def total(self) -> int:
        """Return the number of trials."""
        return self.trials.total()

    @property
    def ok(self) -> bool:
        """Return whether every invariant held after every trial, and something was checked."""
        return not self.violated and self.total > 0 and (not self.needs or self.counts[self.needs] > 0)

    def add(self, trial: str, kind: str, wrong: Sequence[str], where: str = "") -> None:
        """Add a trial, and what was wrong after it."""
        self.trials[kind] += 1
        if wrong:
            self._keep(Violation(trial, list(wrong[:PROBLEMS_KEPT]), where))
            self.violated += 1
        if self.expected:
            self.print_progress()

    def join(self, other: Report) -> None:
        """Add the trials of another process. Its time is part of this process's."""
        self.trials.update(other.trials)
        self.counts.update(other.counts)
        for name, table in other.tables.items():
            self.tables[name].update(table)
        self.violated += other.violated
        for violation in other.violations:
            self._keep(violation)
        if self.expected:
            self.print_progress()

    def _keep(self, violation: Violation) -> None:
        if self.expected:
            print(f"\n{violation.trial}: {violation.where} {violation.wrong}", file=sys.stderr, flush=True)
        if len(self.violations) < KEPT:
            self.violations.append(violation)

    @contextlib.contextmanager
    def timed(self, part: str = "all") -> Iterator[None]:
        """Measure the time of the block."""
        began, began_cpu = time.perf_counter(), _cpu()
        try:
            yield
        finally:
            self.seconds[part] += time.perf_counter() - began
            self.cpu_seconds[part] += _cpu() - began_cpu

    def print_progress(self) -> None:
        """Print how far the engine is, unless it was printed a moment ago."""
        is_terminal, now = sys.stderr.isatty(), time.perf_counter()
        if now - max(self._printed, self.began) < (TERMINAL_S if is_terminal else LOG_S):
            return
        self._printed = now
        rate = self.total / (now - self.began)
        minutes_left = (self.expected - self.total) / max(rate, 1e-9) / 60
        text = f"{self._head()}, {rate:.1f} a second, {minutes_left:.0f} min left"
        print(f"\r{text} " if is_terminal else text, end="" if is_terminal else "\n", file=sys.stderr, flush=True)

    def _head(self) -> str:
        among = f" of {self.expected:,}" if self.total < self.expected else ""
        return f"{self.total:,}{among} {self.what}, {self.violated:,} violations"

    def to_dict(self) -> dict[str, object]:
        """Return the report for ``--json``."""
        seconds = sum(self.seconds.values())
        return {
            "ok": self.ok,
            "seed": self.seed,
            "what": self.what,
            "total": self.total,
            "by_kind": dict(sorted(self.trials.items())),
            "counts": dict(sorted(self.counts.items())),
            **{name: dict(sorted(table.items())) for name, table in sorted(self.tables.items())},
            "seconds": round(seconds, 1),
            "cpu_seconds": round(sum(self.cpu_seconds.values()), 1),
            "a_second": round(self.total / seconds, 1) if seconds else 0.0,
            "violations": self.violated,
            "first": [vars(violation) for violation in self.violations[:JSON_VIOLATIONS]],
        }

    def show(self) -> str:
        """Return the report as text."""
        seconds, cpu_seconds = sum(self.seconds.values()), sum(self.cpu_seconds.values())
        rate = self.total / max(seconds, 1e-9)
        lines = [f"{self._head()}, {seconds:.0f} s ({cpu_seconds:.0f} s of CPU), {rate:.1f} a second"]
        if len(self.seconds) > 1:
            lines += [
                f"  {part}: {self.seconds[part]:.0f} s ({self.cpu_seconds[part]:.0f} s of CPU)" for part in self.seconds
            ]
        if self.counts:
            lines.append("  " + ", ".join(f"{count:,} {name}" for name, count in sorted(self.counts.items())))
        for name, table in sorted(self.tables.items()):
            lines.append(f"  {name}: " + ", ".join(f"{count:,} {kind}" for kind, count in sorted(table.items())))
        lines += [f"    {kind:48} {count:>8,}" for kind, count in sorted(self.trials.items())]
        for violation in self.violations[:SHOWN_VIOLATIONS]:
            lines += [f"  {line}" for line in violation.trace[-TRACE_SHOWN:]]
            replay = f"   replay: {self.replay.format(violation.trial)}" if self.replay else f"   {violation.trial}"
            lines += [
                f"  at {violation.where or violation.trial}{replay}",
                *(f"    {text}" for text in violation.wrong),
            ]
        return "\n".join(lines)


def _cpu() -> float:
    return sum(os.times()[:4])


def engine_parser(module: str, doc: str | None, count: int, *, option: str = "--count") -> argparse.ArgumentParser:
    """Return the parser of an engine's command, with the options that all engines have. ``option``: number of trials."""
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description=(doc or "").split("\n\n")[0])
    parser.add_argument(option, dest="count", type=int, default=count, help=f"{count:,} by default")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    return parser


def run_engine(
    parser: argparse.ArgumentParser, run: Callable[[argparse.Namespace], Report], arguments: Sequence[str] | None = None
) -> int:
    """Run an engine's command and print its report. Return 0 if every invariant held, 1 if not, 2 if it cannot run here."""
    options = parser.parse_args(arguments)
    try:
        report = run(options)
    except EngineUnavailable as error:
        print(f"nothing was tried: {error}", file=sys.stderr)
        return 2
    if sys.stderr.isatty():
        print(file=sys.stderr)
    print(json.dumps(report.to_dict(), indent=1) if options.json else report.show())
    return 0 if report.ok else 1
