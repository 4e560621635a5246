"""``relight prune``: remove checkpoints that no rule keeps, with the reasons."""

from __future__ import annotations

from typing import Literal

import click

from relight.catalog.tiers import open_tier, recorded_tiers
from relight.cli.common import OpenedRun, confirmed, json_option, open_run_at
from relight.cli.output import Styled, emit_json, escape, table, warn
from relight.drain.carried_marks import MARKED, marked_there
from relight.errors import ConfigError, RelightError
from relight.log import Log, fold
from relight.observe.progress_bar import progress_bar
from relight.policy import keep
from relight.reclaim import PrunePlan, SweepPlan, execute, execute_sweep, plan_prune, plan_sweep
from relight.run_records.verification import damage
from relight.store.wrapper import guard_of
from relight.units import count_text, duration_text, size_text

POSITIVE = click.IntRange(min=1)


@click.command("prune")
@click.argument("path")
@click.option("--keep-last", type=POSITIVE, metavar="N", help="Keep the newest N.")
@click.option("--keep-best", type=POSITIVE, metavar="N", help="Keep the N best by --metric.")
@click.option(
    "--metric", metavar="NAME", help="Metric of --keep-best. Default: the run's own metric, else its only one."
)
@click.option(
    "--mode",
    type=click.Choice(["min", "max"]),
    help="Whether a lower or higher value is better. Default: from its name.",
)
@click.option(
    "--keep-every",
    type=POSITIVE,
    metavar="N",
    help="Keep the first checkpoint at or after each multiple of N finished steps.",
)
@click.option("--keep-within", metavar="TIME", help="Keep checkpoints at most TIME older than the newest: 36h, 7d.")
@click.option(
    "--keep-hourly", type=POSITIVE, metavar="N", help="Keep the newest of each of the last N hours that have one."
)
@click.option("--keep-daily", type=POSITIVE, metavar="N", help="Likewise for days.")
@click.option("--keep-weekly", type=POSITIVE, metavar="N", help="Likewise for weeks.")
@click.option("--keep-monthly", type=POSITIVE, metavar="N", help="Likewise for months.")
@click.option("--keep-budget", metavar="SIZE", help="Keep the newest that together fit into SIZE: 500GB.")
@click.option(
    "--keep-lag-steps", type=POSITIVE, metavar="STEPS", help="Keep one at least STEPS steps older than the newest."
)
@click.option("--undo-window", metavar="TIME", help="Keep the bytes of retired checkpoints for TIME: relight undelete.")
@click.option(
    "--prune-abandoned",
    is_flag=True,
    help="Also remove checkpoints that are not ancestors of the newest good one; otherwise all of them stay.",
)
@click.option("--sweep", is_flag=True, help="Also delete what superseded attempts left unfinished.")
@click.option("--dry-run", is_flag=True, help="Only list what would go, and why.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
@json_option
def command(
    path: str,
    keep_last: int | None,
    keep_best: int | None,
    metric: str | None,
    mode: Literal["min", "max"] | None,
    keep_every: int | None,
    keep_within: str | None,
    keep_hourly: int | None,
    keep_daily: int | None,
    keep_weekly: int | None,
    keep_monthly: int | None,
    keep_budget: str | None,
    keep_lag_steps: int | None,
    undo_window: str | None,
    prune_abandoned: bool,
    sweep: bool,
    dry_run: bool,
    yes: bool,
    as_json: bool,
) -> None:
    """Remove the checkpoints that no rule keeps, and show for each why it stays or goes.

    Tagged checkpoints, those on hold, the newest, and the newest that verifies always stay. Asks before it removes anything, unless --yes.
    The run's own rules do not count here, nor does their undo window: without --undo-window, what is removed cannot be recalled.
    With --dry-run and no rule, show what the run's own rules remove next, on each of its tiers.

    \b
    Examples:
      relight prune runs/demo --keep-last 3 --keep-every 1000 --dry-run
      relight prune runs/demo --keep-best 1 --metric accuracy --mode max --yes
      relight prune runs/demo --dry-run
    """
    rules = keep(
        last=keep_last, best=keep_best, metric=metric, mode=mode, every=keep_every, within=keep_within, hourly=keep_hourly,
        daily=keep_daily, weekly=keep_weekly, monthly=keep_monthly, budget=keep_budget, lag_steps=keep_lag_steps, undo_window=undo_window,
        prune_abandoned=prune_abandoned,
    )  # fmt: skip
    if rules.is_everything and not sweep and not dry_run:
        raise ConfigError(
            "no rule was given, so everything stays",
            hint="--keep-last N, --keep-daily N, --keep-budget SIZE …, or --sweep; --dry-run alone shows the run's own rules",
        )
    opened = open_run_at(path)
    if opened.which:
        raise ConfigError("this names one checkpoint, but rules are about all of a run", where=path)
    if rules.is_everything and not sweep:
        show_own_plans(opened, as_json)
        return
    store = opened.run.store
    newest_bytes = opened.history.live[-1].body.stored_bytes if opened.history.live else 0
    with progress_bar("verifying what stays", newest_bytes) as meter:
        plan = plan_prune(store, opened.run.name, rules, progress=meter)
    swept = plan_sweep(store, opened.run.name) if sweep else SweepPlan(opened.run.name, [], [])
    if not as_json:
        print_plan(plan, swept, undo_window)
    doing = bool(plan.going or plan.due or swept.directories or swept.temporaries) and not dry_run
    doing = doing and confirmed(
        "Remove them?" if undo_window else "Remove them for good?",
        "removes checkpoints",
        yes,
        as_json,
        ", or --dry-run to see what would go",
    )
    report = execute(plan, store) if doing else None
    swept_report = execute_sweep(swept, store) if doing else None
    deleted = [*report.deleted, *swept_report.deleted] if report and swept_report else []
    left = [*report.left, *swept_report.left] if report and swept_report else []
    if as_json:
        emit_json(
            {
                "dry_run": dry_run,
                **_plan_fields(plan),
                "sweep": [{"dir": name, "reason": reason} for name, reason in swept.directories],
                "held": [{"dir": name, "reason": reason} for name, reason in swept.held],
                "retired": report.retired if report else [],
                "deleted": deleted,
                "left": left,
            }
        )
        return
    if doing and report:
        leftovers = f", swept {count_text(len(swept_report.deleted), 'leftover')}" if sweep and swept_report else ""
        recallable = f", which can be recalled for {undo_window}" if undo_window and report.retired else ""
        click.echo(f"removed {count_text(len(report.retired), 'checkpoint')}{leftovers}{recallable}")
        for name in left:
            click.echo(f"{escape(name)} could not be deleted yet: the next --sweep tries again")
    else:
        click.echo("dry run: nothing was done" if dry_run else "nothing was done")


def show_own_plans(opened: OpenedRun, as_json: bool) -> None:
    """Show, for each tier, what the rules that the run's log records would remove after the next save.

    No checkpoint is read: each that is not known to be damaged counts as undamaged.
    """
    tiers, plans = recorded_tiers(opened.history), list[dict[str, object]]()
    if not tiers:
        raise ConfigError(
            "no rule was given, and the log of this run records none: only a run with Tiers(…) records its rules",
            hint="give the rules of its script as options, such as --keep-last 2",
        )
    for place, tier in enumerate(tiers):
        try:
            store, run = (
                (opened.run.store, opened.run.name) if not place else open_tier(tier, guard_of(opened.run.store))
            )
            history = fold(Log(store, run).read())
            known = {checkpoint.id: True for checkpoint in history.live if checkpoint.id not in damage(history)}
            plan = plan_prune(store, run, tier.keep, verified=known)
        except RelightError as error:
            warn(f"tier {tier.name}: {error}")
            continue
        if place:
            plan = plan.sparing(marked_there(opened.history, history), MARKED)
        plans.append({"tier": tier.name, "rules": str(tier.keep), **_plan_fields(plan)})
        if not as_json:
            click.echo(f"{tier.name}, by its own rules: {escape(str(tier.keep))}")
            print_plan(plan, SweepPlan(run, [], []), duration_text(tier.keep.undo_s) if tier.keep.undo_s else None)
            click.echo()
    if as_json:
        emit_json({"dry_run": True, "tiers": plans})
    else:
        click.echo("dry run: nothing was done")


def _plan_fields(plan: PrunePlan) -> dict[str, object]:
    """Return a plan's verdicts and bytes for JSON."""
    rows = [{"id": v.id, "step": v.step, "keep": v.keep, "reason": v.reason} for v in plan.verdicts]
    return {"checkpoints": rows, "bytes_freed": plan.bytes_freed, "due": list(plan.due)}


def print_plan(plan: PrunePlan, swept: SweepPlan, undo_window: str | None) -> None:
    """Print each verdict with its reason, and the totals."""
    rows: list[list[object]] = []
    for verdict in plan.verdicts:
        fate = Styled("stays", "green") if verdict.keep else Styled("goes", "red")
        rows.append([verdict.id, verdict.step, fate, verdict.reason])
    if rows:
        table(["id", "step", "fate", "because"], rows, right=("step",), wrap=("because",))
    leftovers: list[list[object]] = [[name, Styled("goes", "red"), reason] for name, reason in swept.directories]
    leftovers += [
        [name, Styled("goes", "red"), "an unfinished file of a record; another record has its name"]
        for name in swept.temporaries
    ]
    leftovers += [[name, Styled("stays", "green"), reason] for name, reason in swept.held]
    if leftovers:
        table(["leftover", "fate", "because"], leftovers, wrap=("leftover", "because"))
    if plan.due:
        click.echo(
            f"the bytes of {count_text(len(plan.due), 'checkpoint')} retired before go: the time to recall them is over"
        )
    count = len(plan.going)
    click.echo(
        f"{count} of {count_text(len(plan.verdicts), 'checkpoint')} {'goes' if count == 1 else 'go'}, {size_text(plan.bytes_freed)}"
    )
    if count and undo_window:
        click.echo(f"relight undelete can recall {'it' if count == 1 else 'them'} for {undo_window}")
    elif count:
        click.echo(f"{'it' if count == 1 else 'they'} cannot be recalled: --undo-window 12h keeps the bytes for 12 h")
