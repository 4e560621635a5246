"""Run the rehearsals one after the other, in the drill's own stores."""

from __future__ import annotations

import contextlib
import secrets
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from relight.catalog.run import Run
from relight.drill.copies import CopyRehearsal
from relight.drill.live import LiveJob, rehearsals_of
from relight.drill.made_of import MadeOf, made_of
from relight.drill.pace import Limit, Pace
from relight.drill.programme import REHEARSALS
from relight.drill.rehearsals import Rehearsal, RehearsalResult, RehearsalStage
from relight.drill.report import FAILED, PASSED, SKIPPED, DrillReport, RehearsalOutcome
from relight.drill.stage import CannotTry, DrillJob, Wrong, own_store
from relight.drill.target import DrillTarget
from relight.errors import CheckpointNotFound, ConfigError, RelightError
from relight.log.identity import now_text
from relight.run_records.incident_sync import DIRECTORY
from relight.settings.kept_directory import make_kept_directory
from relight.transfer import execute_copy, plan_copy
from relight.units import duration_text

R = TypeVar("R", Rehearsal, CopyRehearsal)
BROUGHT = 2
"""Number of copied checkpoints: the newest, and one to fall back to."""
COPIED = "the newest checkpoints were copied, every byte verified"


@dataclass(frozen=True, slots=True, kw_only=True)
class DrillOptions:
    """Options of a drill. Times in seconds."""

    target: DrillTarget = field(default_factory=DrillTarget)
    only: Sequence[str] = ()
    """Names of rehearsals; empty: all."""
    max_lost_steps: int | None = None
    max_seconds: float | None = None
    """Largest number of seconds until training resumes."""
    timeout_s: float | None = None
    """Limit of one rehearsal; None: derived from the job's own times on this machine (``Pace``)."""
    deadline_s: float = 3600.0
    """Limit of all rehearsals. Those that have not begun by then are skipped."""
    source: Run | None = None
    """Run with the newest checkpoints that a script's drill starts from, as copies."""
    live: Run | None = None
    """Run with a job that is running on this machine, and that is drilled itself."""
    copies: Run | None = None
    """Run with checkpoints to copy. The copies are drilled, without a job."""
    keep: Path | None = None
    on_progress: Callable[[str, RehearsalOutcome | None], None] = field(default=lambda name, outcome: None)
    """Receives the name of each rehearsal: with None when it begins, with the outcome when it has ended."""


def run(options: DrillOptions) -> DrillReport:
    """Run the rehearsals. In every case, all started processes end, and only what ``keep`` requests is left."""
    if options.live is not None:
        return _run_live(options, options.live)
    if options.copies is not None:
        return _run_copies(options, options.copies)
    chosen, began, outcomes = chosen_of(options.only), time.monotonic(), list[RehearsalOutcome]()
    pace = Pace(options.timeout_s)
    made = made_of(options.target)
    with _folder(options.keep) as top:
        if (source := options.source) is not None:
            outcomes.append(_tried(options, "copy", COPIED, lambda: bring(source, top / "store")))
            if outcomes[0].verdict == FAILED:
                chosen = []
        references = References(options.target, top, pace)
        for rehearsal in chosen:
            outcomes.append(
                _in_time(
                    options,
                    rehearsal,
                    began,
                    pace,
                    lambda one, limit: _rehearse(options.target, one, top, limit, references),
                )
            )
            if options.keep is None and options.target.built_in:
                shutil.rmtree(top / rehearsal.name, ignore_errors=True)
    return _report(options, options.target.name, began, outcomes, made)


def _run_live(options: DrillOptions, run: Run) -> DrillReport:
    chosen, began = rehearsals_of(list(options.only)), time.monotonic()
    with contextlib.closing(LiveJob(run)) as live:
        made = live.made_of()
        pace = live.pace(options.timeout_s)
        outcomes = [_in_time(options, rehearsal, began, pace, live.do) for rehearsal in chosen]
    return _report(options, f"{run.store.url.rstrip('/')}/{run.name}", began, outcomes, made)


def _run_copies(options: DrillOptions, run: Run) -> DrillReport:
    from relight.drill import copies

    chosen, began, outcomes = copies.chosen_of(list(options.only)), time.monotonic(), list[RehearsalOutcome]()
    with _folder(options.keep) as top, contextlib.ExitStack() as until:
        made: list[copies.CopyLoads] = []

        def bring_them() -> RehearsalResult:
            made.append(until.enter_context(copies.copied(run, top)))
            newest = made[0].live[-1]
            return RehearsalResult(
                f"step {newest.step} is undamaged"
                + (f", and step {made[0].live[0].step} before it" if len(made[0].live) > 1 else "")
            )

        outcomes.append(_tried(options, "copy", COPIED, bring_them))
        for rehearsal in chosen if made else ():
            outcomes.append(
                _in_time(options, rehearsal, began, Pace(options.timeout_s), lambda one, _: one.do(made[0]))
            )
    return _report(options, f"{run.store.url.rstrip('/')}/{run.name}", began, outcomes)


def _in_time(
    options: DrillOptions, rehearsal: R, began: float, pace: Pace, do: Callable[[R, Limit], RehearsalResult]
) -> RehearsalOutcome:
    name, what = rehearsal.name, rehearsal.what
    over_at = began + options.deadline_s
    if time.monotonic() < over_at:
        outcome = _tried(options, name, what, lambda: do(rehearsal, Limit(pace, over_at)))
        if outcome.verdict == PASSED:
            pace.passed(outcome.took_s)
        return outcome
    outcome = RehearsalOutcome(
        name, what, SKIPPED, f"no time was left: the deadline of {duration_text(options.deadline_s)} has passed"
    )
    options.on_progress(name, outcome)
    return outcome


def _tried(options: DrillOptions, name: str, what: str, do: Callable[[], RehearsalResult]) -> RehearsalOutcome:
    """Return the outcome of a rehearsal."""
    options.on_progress(name, None)
    began, shown = time.monotonic(), RehearsalResult("")
    try:
        shown = do()
        over = over_limits(shown, options)
        verdict, why = (FAILED, over) if over else (PASSED, shown.why)
    except CannotTry as error:
        verdict, why = SKIPPED, str(error)
    except (Wrong, RelightError, OSError) as error:
        verdict, why = FAILED, str(error)
    outcome = RehearsalOutcome(
        name, what, verdict, why, shown.means, shown.noticed_s, shown.decided_s, shown.back_s, shown.steps_lost,
        round(time.monotonic() - began, 3),
    )  # fmt: skip
    options.on_progress(name, outcome)
    return outcome


def _report(
    options: DrillOptions, job: str, began: float, outcomes: list[RehearsalOutcome], made: MadeOf | None = None
) -> DrillReport:
    return DrillReport(
        f"{int(time.time() * 1000):013d}-{secrets.token_hex(3)}", now_text(), socket.gethostname(), job, outcomes,
        round(time.monotonic() - began, 3), options.live is not None, str(options.keep) if options.keep is not None else "",
        options.copies is not None, made,
    )  # fmt: skip


def bring(source: Run, store: Path) -> RehearsalResult:
    """Copy the newest checkpoints of a run into the drill's store, and verify every byte."""
    newest = source.history().live[-BROUGHT:]
    if not newest:
        raise CheckpointNotFound(f"run {source.name} has no checkpoint", where=source.store.url)
    done = execute_copy(plan_copy(source, newest, own_store(store), source.name))
    if done.damaged:
        raise Wrong(f"checkpoint {done.damaged[0][0]} is damaged: {done.damaged[0][1]}")
    return RehearsalResult(
        f"step {newest[-1].step} is undamaged" + (f", and step {newest[0].step} before it" if len(newest) > 1 else "")
    )


def chosen_of(names: Sequence[str]) -> list[Rehearsal]:
    """Return the named rehearsals, in their order; all if none is named."""
    unknown = [name for name in names if name not in REHEARSALS]
    if unknown:
        raise ConfigError(f"there is no rehearsal {unknown[0]!r}", hint=f"there are {', '.join(REHEARSALS)}")
    return [rehearsal for rehearsal in REHEARSALS.values() if not names or rehearsal.name in names]


def _rehearse(
    target: DrillTarget, rehearsal: Rehearsal, top: Path, limit: Limit, references: References
) -> RehearsalResult:
    folder = top / rehearsal.name
    store = folder / "store" if target.built_in else top / "store"
    try:
        return rehearsal.do(RehearsalStage(target, folder, store, limit, references), rehearsal)
    finally:
        for incidents in store.glob(f"*/{DIRECTORY}"):  # these incidents must not count for the next rehearsal
            incidents.rename(folder / f"incidents of {incidents.parent.name}")


def over_limits(shown: RehearsalResult, options: DrillOptions) -> str:
    """Return why a result exceeds the given limits; empty if it does not."""
    if options.max_lost_steps is not None and (shown.steps_lost or 0) > options.max_lost_steps:
        return f"{shown.steps_lost} steps were lost, and {options.max_lost_steps} are allowed: {shown.why}"
    if options.max_seconds is not None and (shown.back_s or 0.0) > options.max_seconds:
        return f"training continued after {duration_text(shown.back_s)}, and {duration_text(options.max_seconds)} are allowed: {shown.why}"
    return ""


class References:
    """Hashes of the built-in job's final state without any failure. Each is computed, by running the job, at its first use."""

    def __init__(self, target: DrillTarget, top: Path, pace: Pace) -> None:
        self._target, self._top, self._pace = target, top, pace
        self._known: dict[int, str] = {}

    def __call__(self, without: int) -> str:
        """Return the hash of an undisturbed run that skips the samples of step ``without``; -1 skips none."""
        if without not in self._known:
            folder = self._top / ("undisturbed" if without < 0 else f"undisturbed-without-{without}")
            folder.mkdir(parents=True)
            alone = folder / "relight.toml"
            # no rank will fail, so no spare is needed
            alone.write_text("[supervise]\nspares = false\n", encoding="ascii")
            with DrillJob(
                replace(self._target, settings=str(alone)), folder, folder / "store", Limit(self._pace)
            ) as job:
                (folder / "out.go").touch()
                job.start(without=without)
                if code := job.has_ended():
                    raise RelightError(f"the undisturbed job ended with {code}: {job.last_words()}")
            self._known[without] = (folder / "out.end").read_text(encoding="ascii")
        return self._known[without]


@contextlib.contextmanager
def _folder(keep: Path | None) -> Iterator[Path]:
    if keep is not None:
        make_kept_directory(keep)
    folder = keep.resolve() if keep is not None else Path(tempfile.mkdtemp(prefix="relight-drill-"))
    try:
        yield folder
    finally:
        if keep is None:
            shutil.rmtree(folder, ignore_errors=True)
