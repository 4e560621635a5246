"""Checks of a run. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator
from shlex import quote

from relight.doctor.checks_machine import numbers
from relight.doctor.facts import DoctorFacts, RunFacts
from relight.doctor.finding import CheckHit, check
from relight.units import age_text, count_text, duration_text
from relight.version import VERSION

_BARREN = 5
"""Number of consecutive attempts without a checkpoint that is reported."""
_LATE_LEAST_S, _LATE_TIMES = 600.0, 10.0
"""A live run is stale if its newest checkpoint is older than this many seconds and this many usual intervals."""
_LAG_S = 3600.0
"""Seconds for which a further tier may lack a checkpoint that it should have."""
_DONORS_MAX = 50
_DAY_S = 86400.0
_SAME_MAX = 3


@check("run-unreadable", "error", "run", "a run's log cannot be read", "corrupt")
def _unreadable(facts: DoctorFacts) -> Iterator[CheckHit]:
    for run in facts.runs:
        if run.error is not None and run.error.kind != "wrong_key":
            yield CheckHit(
                "the run cannot be read",
                run.error.where or run.path,
                run.error.what,
                "training cannot resume from it",
                run.error.hint or "restore its log from a copy, or from a further tier",
                f"relight verify {quote(run.path)}",
            )


@check(
    "log-damaged",
    "error",
    "run",
    "a record of a run's log is damaged or missing",
    "A log record is ignored",
)
def _log_damaged(facts: DoctorFacts) -> Iterator[CheckHit]:
    for run in facts.runs:
        if run.faults:
            file, reason = run.faults[0]
            more = f"; {len(run.faults) - 1} more" if len(run.faults) > 1 else ""
            yield CheckHit(
                "a record of the log is ignored",
                f"{run.path}: {file}",
                f"{reason}{more}",
                "a checkpoint that it committed does not count; leftovers of dead attempts are kept, because they may be its files",
                "restore the file from a copy; check the disk",
                f"relight log {quote(run.path)}",
            )


@check(
    "checkpoint-damaged",
    "error",
    "run",
    "metadata or sizes of a checkpoint are not what was committed",
    "A checkpoint is skipped",
)
def _damaged(facts: DoctorFacts) -> Iterator[CheckHit]:
    for run in facts.runs:
        bad = [checkpoint for checkpoint in run.checkpoints if checkpoint.damage]
        if bad:
            assert bad[-1].damage
            newest = bad[-1] is run.newest
            yield CheckHit(
                f"{'the newest checkpoint' if newest else 'a checkpoint'} is damaged"
                + (f", and {len(bad) - 1} more" if len(bad) > 1 else ""),
                f"{run.path}@{bad[-1].id}",
                f"step {bad[-1].step}: {bad[-1].damage[0]}",
                "a resume skips it, and continues from the previous checkpoint" if newest else "it cannot be restored",
                "repair it from another tier, if the run has one; otherwise check the disk",
                f"relight verify {quote(run.path)} --repair"
                if run.tiers
                else f"relight verify {quote(run.path)} {bad[-1].id}",
            )


@check("none-left", "error", "run", "all of a run's checkpoints are damaged")
def _none_left(facts: DoctorFacts) -> Iterator[CheckHit]:
    for run in facts.runs:
        checked = [checkpoint for checkpoint in run.checkpoints if checkpoint.damage is not None]
        if checked and len(checked) == len(run.checkpoints) and all(checkpoint.damage for checkpoint in checked):
            yield CheckHit(
                "no checkpoint of this run can be restored",
                run.path,
                f"all of its {len(checked)} checkpoints are damaged",
                "a resume is refused",
                "restore one from another tier or a copy, or with relight undelete",
                f"relight undelete {quote(run.path)}",
            )


@check("empty", "warning", "run", "a run has attempts and no checkpoint, and no process trains it here")
def _empty(facts: DoctorFacts) -> Iterator[CheckHit]:
    for run in facts.runs:
        if run.attempts and not run.checkpoints and not run.retired and run.error is None and not _is_live(facts, run):
            since = facts.machine.now - (run.attempts[-1].time_s or facts.machine.now)
            if since > _LATE_LEAST_S:
                yield CheckHit(
                    "the run has no checkpoint",
                    run.path,
                    f"its last attempt began {age_text(since)}, on {run.attempts[-1].host}",
                    "all of its training is lost",
                    "read that job's log; check that it calls step(), and that save= is short enough",
                    f"relight log {quote(run.path)}",
                )


@check("stale", "warning", "run", "a run that is training here has not saved for ten usual intervals")
def _stale(facts: DoctorFacts) -> Iterator[CheckHit]:
    for run in facts.runs:
        newest, usual = run.newest, run.interval_s
        if newest is None or newest.time_s is None or usual is None or not _is_live(facts, run):
            continue
        age = facts.machine.now - newest.time_s
        if age > max(_LATE_LEAST_S, _LATE_TIMES * usual):
            yield CheckHit(
                "the run is training and no longer saves",
                run.path,
                f"the newest checkpoint is {duration_text(age)} old; the usual interval is {duration_text(usual)}",
                "the next failure loses all steps since then",
                "read the job's warnings: each failed save logs its reason",
                f"relight incidents {quote(run.path)}",
            )


@check("no-progress", "error", "run", "five attempts in a row have committed nothing")
def _no_progress(facts: DoctorFacts) -> Iterator[CheckHit]:
    for run in facts.runs:
        barren = 0
        for attempt in reversed(run.attempts):
            if attempt.commits:
                break
            barren += 1
        if barren >= _BARREN and not _is_live(facts, run):
            hosts = sorted({attempt.host for attempt in run.attempts[-barren:]})
            yield CheckHit(
                "the job is started again and again without progress",
                run.path,
                f"{barren} attempts without a checkpoint, on {', '.join(hosts[:4])}",
                "machine time is wasted",
                "find out what ends the job",
                f"relight incidents {quote(run.path)}",
            )


@check(
    "superseded",
    "warning",
    "run",
    "an attempt continued to commit after a newer attempt took over: two jobs write one run",
    "fenced",
)
def _superseded(facts: DoctorFacts) -> Iterator[CheckHit]:
    for run in facts.runs:
        if run.void:
            yield CheckHit(
                "two jobs have written this run",
                run.path,
                run.void[-1] + (f"; {len(run.void)} such records" if len(run.void) > 1 else ""),
                "the superseded job's saves are void",
                "stop that job, or give it its own run name",
                f"relight log {quote(run.path)}",
            )


@check(
    "suspect",
    "warning",
    "run",
    "ranks held different values of a tensor that must be equal when the newest checkpoint was saved",
    "… is not what it is on …, a suspect checkpoint",
)
def _suspect(facts: DoctorFacts) -> Iterator[CheckHit]:
    for run in facts.runs:
        if run.newest is not None and run.newest.suspect:
            yield CheckHit(
                "the newest checkpoint is suspect",
                f"{run.path}@{run.newest.id}",
                f"step {run.newest.step}: ranks held different values of one tensor",
                "a resume skips it; a rank computes wrongly, or each rank has its own value of that component",
                "if each rank has its own value, name the component in per_rank=[…]; otherwise check the machines",
                f"relight show {quote(run.path)}",
            )


@check("loss", "warning", "run", "a metric of the newest checkpoint is NaN or infinite")
def _loss(facts: DoctorFacts) -> Iterator[CheckHit]:
    for run in facts.runs:
        if run.newest is not None:
            odd = sorted(name for name, value in run.newest.metrics.items() if not math.isfinite(value))
            if odd:
                good = [
                    checkpoint
                    for checkpoint in run.checkpoints
                    if all(math.isfinite(value) for value in checkpoint.metrics.values())
                ]
                yield CheckHit(
                    f"{odd[0]} is NaN or infinite",
                    f"{run.path}@{run.newest.id}",
                    f"step {run.newest.step}: {odd[0]} is {run.newest.metrics[odd[0]]}",
                    "training has diverged; the steps that follow are useless",
                    "roll back to an earlier checkpoint, as relight run does",
                    f"relight branch {quote(run.path)}@{good[-1].id} NEW" if good else f"relight ls {quote(run.path)}",
                )


@check("leftovers", "note", "run", "superseded attempts have left uncommitted files")
def _leftovers(facts: DoctorFacts) -> Iterator[CheckHit]:
    for run in facts.runs:
        if run.leftovers:
            yield CheckHit(
                f"{count_text(len(run.leftovers), 'leftover')} of ended attempts",
                run.path,
                f"{run.leftovers[0][0]}: {run.leftovers[0][1]}",
                "they use space until the run's next attempt, or a sweep",
                "sweep them",
                f"relight prune {quote(run.path)} --sweep",
                fix="leftovers",
            )


@check("temporaries", "note", "run", "temporary files of killed writers exist")
def _temporaries(facts: DoctorFacts) -> Iterator[CheckHit]:
    for run in facts.runs:
        if run.temporaries:
            yield CheckHit(
                f"{count_text(len(run.temporaries), 'temporary file')} of writers that were killed",
                run.path,
                ", ".join(run.temporaries[:3]),
                "each of them uses an inode",
                "sweep them",
                f"relight prune {quote(run.path)} --sweep",
                fix="leftovers",
            )


@check(
    "tier-away",
    "error",
    "run",
    "a further tier cannot be read",
    "The nearest tier has no checkpoint, and … may have some, but does not answer",
)
def _tier_away(facts: DoctorFacts) -> Iterator[CheckHit]:
    for run in facts.runs:
        for tier in run.tiers:
            if tier.error is not None:
                yield CheckHit(
                    f"the tier {tier.name} does not answer",
                    tier.url,
                    tier.error.what,
                    "no checkpoint is copied to it or read from it",
                    tier.error.hint or "make it reachable",
                    f"relight ls {quote(tier.url)}",
                )


@check("tier-behind", "warning", "run", "a further tier has lacked a checkpoint that it should have for an hour")
def _tier_behind(facts: DoctorFacts) -> Iterator[CheckHit]:
    for run in facts.runs:
        for tier in run.tiers:
            if tier.error is None and tier.lacks and tier.lacks_s > _LAG_S:
                yield CheckHit(
                    f"the tier {tier.name} lags",
                    tier.url,
                    f"it lacks {count_text(tier.lacks, 'checkpoint')}, the oldest for {duration_text(tier.lacks_s)}",
                    "if this disk fails, these checkpoints are lost",
                    "copy them now",
                    f"relight cp {quote(run.path)} --tiers",
                )


@check("stopped", "warning", "run", "`relight run` gave up the job, and no process has trained since")
def _stopped(facts: DoctorFacts) -> Iterator[CheckHit]:
    for run in facts.runs:
        last = run.incidents[-1] if run.incidents else None
        since = [run.newest.time_s] if run.newest is not None else []
        since += [attempt.time_s for attempt in run.attempts[-1:]]  # another machine may have started the job again
        if (
            last is not None
            and last.action == "stop"
            and last.kind != "fenced"  # the attempt that took the run over is in charge
            and not _is_live(facts, run)
            and all((last.time_s or 0.0) >= (time_s or 0.0) for time_s in since)
        ):
            yield CheckHit(
                "relight run gave up the job",
                run.path,
                f"{last.kind}: {last.why[:160]}",
                "the job does not train",
                "fix the cause, and start the job again",
                f"relight incidents {quote(run.path)} latest",
            )


@check("again", "warning", "run", "a job failed three times within a day in the same way")
def _again(facts: DoctorFacts) -> Iterator[CheckHit]:
    for run in facts.runs:
        recent = [
            incident
            for incident in run.incidents
            if incident.time_s is not None and facts.machine.now - incident.time_s < _DAY_S
        ]
        for kind in sorted({incident.kind for incident in recent} - {"preemption"}):
            same = [incident for incident in recent if incident.kind == kind]
            if len(same) >= _SAME_MAX:
                yield CheckHit(
                    f"the job keeps failing: {kind}",
                    run.path,
                    f"{len(same)} times within a day; last: {same[-1].why[:140]}",
                    "each failure costs the steps since the last save",
                    "find the cause; relight run only restarts the job",
                    f"relight incidents {quote(run.path)}",
                )


@check(
    "inexact",
    "note",
    "run",
    "the newest checkpoint states why a resume from it is not bit-exact",
    "This resume may not be bit-exact",
)
def _inexact(facts: DoctorFacts) -> Iterator[CheckHit]:
    for run in facts.runs:
        if run.exact:
            yield CheckHit(
                "a resume from here is not bit-exact",
                run.path,
                run.exact[0],
                "training continues, but not with the same numbers",
                "check whether this matters to you, and whether the script can avoid it",
                f"relight show {quote(run.path)}",
            )


@check(
    "software",
    "note",
    "run",
    "the newest checkpoint was made with other versions or another number of threads than this environment has",
    "This resume may not be bit-exact",
)
def _software(facts: DoctorFacts) -> Iterator[CheckHit]:
    installed = {package.name: package.installed for package in facts.machine.packages if package.installed}
    for run in facts.runs:
        made, here = str(run.environment.get("torch", "")), installed.get("torch", "")
        other = [f"torch {made} → {here}"] if made and here and numbers(made) != numbers(here) else []
        threads = run.environment.get("threads")
        if facts.config.threads and threads is not None and str(threads) != facts.config.threads:
            other.append(f"{threads} threads → OMP_NUM_THREADS={facts.config.threads}")
        if other:
            yield CheckHit(
                "this resume may not be bit-exact",
                run.path,
                "; ".join(other),
                "kernels may sum in another order",
                "use the same versions and threads, or accept the difference",
                f"relight show {quote(run.path)}",
            )


@check("newer-relight", "warning", "run", "the newest checkpoint was written by a newer Relight than this one")
def _newer(facts: DoctorFacts) -> Iterator[CheckHit]:
    for run in facts.runs:
        wrote = str(run.environment.get("relight", ""))
        if numbers(wrote) > numbers(VERSION):
            yield CheckHit(
                "a newer Relight has written this run",
                run.path,
                f"it was {wrote}, this is {VERSION}",
                "the run may use features that this version refuses",
                f"install Relight {wrote} or newer here, from where this one was installed",
                "pip show relight",
            )


@check("chain", "note", "run", "the newest checkpoint needs the bytes of more than fifty other checkpoints")
def _chain(facts: DoctorFacts) -> Iterator[CheckHit]:
    for run in facts.runs:
        if run.newest is not None and run.newest.requires > _DONORS_MAX:
            yield CheckHit(
                "the newest checkpoint depends on many others",
                f"{run.path}@{run.newest.id}",
                f"it needs bytes of {run.newest.requires} other checkpoints",
                "retention keeps all of these, and a restore opens all of them",
                "repack it, so that it depends on no other checkpoint",
                f"relight repack {quote(run.path)} {run.newest.id}",
            )


def _is_live(facts: DoctorFacts, run: RunFacts) -> bool:
    """Return whether a process on this machine trains the run."""
    return any(
        live.run == run.name and live.url.rstrip("/") == facts.store.url.rstrip("/") for live in facts.machine.live
    )
