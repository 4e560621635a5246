"""``relight plan simulate``: simulate months of a fleet in seconds, with several policies."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from relight.cli.common import drawn, engine_of, engine_options, json_option, plot_option
from relight.cli.output import Styled, emit_json, escape, table
from relight.engines import Engine
from relight.errors import ConfigError
from relight.units import count_text, duration_text, percent_text, size_text

if TYPE_CHECKING:
    from relight.simulator.policies import Policy
    from relight.simulator.result import Summary
    from relight.simulator.scenario import Scenario
    from relight.simulator.sweep import Case

_SEEDS_MAX, _COLUMNS_MAX, _NAME_MAX = 10_000, 4, 11


@click.command("plan simulate")
@click.argument("scenario", metavar="[FILE|NAME]", required=False)
@click.option("--gpus", type=click.IntRange(1, 1_000_000), help="Number of GPUs; by default the scenario's.")
@click.option("--days", type=click.FloatRange(0, 3650, min_open=True), help="Days to simulate.")
@click.option(
    "--policy",
    "policies",
    multiple=True,
    metavar="POLICY",
    help="A policy to compare: adaptive, 30m, 500steps,last=3 … Repeatable.",
)
@click.option(
    "--set", "settings", multiple=True, metavar="KEY=VALUE", help="Change the scenario: save.stall_s=2, spares=0 …"
)
@click.option("--sweep", metavar="KEY=V1,V2…", help="Try several values of one key.")
@click.option(
    "--seeds", type=click.IntRange(1, _SEEDS_MAX), default=5, show_default=True, help="Number of random seeds."
)
@engine_options("processes")
@click.option("--replay", metavar="RUN", help="Use this run's recorded failures instead of random ones.")
@plot_option("Draw where the time went, and storage.")
@click.option("--list", "listed", is_flag=True, help="List the shipped scenarios.")
@json_option
def command(
    scenario: str | None,
    gpus: int | None,
    days: float | None,
    policies: tuple[str, ...],
    settings: tuple[str, ...],
    sweep: str | None,
    seeds: int,
    jobs: int | None,
    engine: str | None,
    replay: str | None,
    plot: Path | None,
    listed: bool,
    as_json: bool,
) -> int:
    """Simulate months of a fleet in seconds, and compare policies on its failures.

    The policies are the real ones: the code that schedules, keeps, protects and recovers in a run also decides here. All policies of a seed
    see the same failures at the same times. A scenario is a TOML file, or the name of a shipped one (--list); by default llama3-54-days.

    \b
    A policy is when to save, and then keys:
      adaptive, oracle, young, daly, never, 30m, 500steps
      at_least= at_most= overhead= between which intervals, if adaptive
      last= lag_steps= hourly= …      what to keep, as relight.keep
      copies= | data= parity=      who protects whom, as relight.Peers
      node_failures= failures= …   how to continue, as [supervise]
      near=local far=20GB/s far_last=2 memory=off spares=0
      recall=0.3 precision=0.6 lead=5m drain=on

    \b
    Examples:
      relight plan simulate
      relight plan simulate --gpus 4096 --days 30 --policy adaptive --policy 1h
      relight plan simulate a-hundred-thousand --seeds 20 --plot fleet.png
      relight plan simulate mine.toml --sweep spares=0,2,8
      relight plan simulate --replay runs/demo --policy 10m --policy adaptive
    """
    if listed:
        return _list(as_json)
    cases = _cases(scenario, {"gpus": gpus, "days": days}, policies, settings, sweep, replay)
    with engine_of(engine, jobs, "processes" if len(cases) * seeds > 1 else "local") as workers:
        summaries = _simulate(cases, seeds, workers)
    if plot is not None:
        from relight.simulator.plot import draw

        draw(
            [(_title(case), summaries_of_case) for case, summaries_of_case in zip(cases, summaries, strict=True)],
            cases[0].scenario.days,
            plot,
        )
        drawn(plot)
    if as_json:
        emit_json([_to_dict(case, summaries_of_case) for case, summaries_of_case in zip(cases, summaries, strict=True)])
    else:
        for number, (case, summaries_of_case) in enumerate(zip(cases, summaries, strict=True)):
            if number:
                click.echo()
            _show(case, summaries_of_case, seeds)
    return 0


def _list(as_json: bool) -> int:
    from relight.simulator.read import read_scenario, shipped

    scenarios = [read_scenario(name) for name in shipped()]
    if as_json:
        emit_json(
            [
                {"name": scenario.name, "gpus": scenario.gpus, "days": scenario.days, "about": scenario.about}
                for scenario in scenarios
            ]
        )
    else:
        rows = [
            [scenario.name, f"{count_text(scenario.gpus)}", f"{scenario.days:g}", scenario.about]
            for scenario in scenarios
        ]
        table(["name", "gpus", "days", "what it is"], rows, right=("gpus", "days"), wrap=("what it is",))
    return 0


def _cases(
    named: str | None,
    flags: dict[str, Any],
    policies: Sequence[str],
    settings: Sequence[str],
    sweep: str | None,
    replay: str | None,
) -> list[Case]:
    from relight.simulator.read import read_scenario, setting_of, value_of
    from relight.simulator.sweep import Case

    changes = dict(setting_of(assignment) for assignment in settings) | {
        key: value for key, value in flags.items() if value is not None
    }
    tried: list[dict[str, Any]] = [{}]
    if sweep is not None:
        key, _ = setting_of(sweep)
        tried = [{key: value_of(value)} for value in sweep.partition("=")[2].split(",")]
    recorded = _recorded(replay, changes, named) if replay is not None else None
    cases = []
    for values in tried:
        if recorded is not None:
            from relight.simulator.replay import replayed

            made, calendar = replayed(recorded, changes | values)
        else:
            made, calendar = read_scenario(named or "llama3-54-days", changes | values), None
        about = ", ".join(f"{key}={value}" for key, value in values.items())
        cases.append(Case(made, _policies(made, policies), about, calendar))
    return cases


def _recorded(run: str, changes: dict[str, Any], named: str | None) -> Any:
    from relight.cli.common import open_run_at
    from relight.simulator.replay import recorded_of
    from relight.supervise.incidents import read_accounts, read_incidents

    if named is not None:
        raise ConfigError("--replay takes the place of a scenario", where=named, hint="leave one of the two out")
    opened = open_run_at(run, warnings=False)
    store, name = opened.run.store, opened.run.name
    return recorded_of(name, read_incidents(store, name), read_accounts(store, name))


def _policies(scenario: Scenario, texts: Sequence[str]) -> tuple[Policy, ...]:
    from relight.simulator.policies import USUAL, policy_of

    if texts:
        chosen = [policy_of(text) for text in texts]
    elif scenario.policy:
        chosen = [policy_of(text, name) for name, text in scenario.policy.items()]
    else:
        chosen = [policy_of(text, name) for name, text in USUAL.items()]
    names = [policy.name for policy in chosen]
    if len(set(names)) < len(names):
        raise ConfigError(f"the policy {next(name for name in names if names.count(name) > 1)!r} twice")
    return tuple(chosen)


def _simulate(cases: list[Case], seeds: int, engine: Engine) -> list[list[Summary]]:
    from relight.simulator.result import summary_of
    from relight.simulator.sweep import sweep

    with _counting(sum(len(case.policies) for case in cases) * seeds) as done:
        outcomes = sweep(cases, range(seeds), engine=engine, done=done)
    return [
        [summary_of(outcome, policy.text, of_case[0]) for policy, outcome in zip(case.policies, of_case, strict=True)]
        for case, of_case in zip(cases, outcomes, strict=True)
    ]


@contextmanager
def _counting(total: int) -> Iterator[Callable[[int], None]]:
    """Show a bar of finished simulations, on a terminal only."""
    if not sys.stderr.isatty():
        yield lambda count: None
        return
    with click.progressbar(length=total, label="simulating", file=sys.stderr, show_pos=True) as bar:
        yield bar.update


# -- output -------------------------------------------------------------------------------------------------------------------------


def _title(case: Case) -> str:
    scenario = case.scenario
    return f"{scenario.name}: {count_text(scenario.gpus)} GPUs, {scenario.days:g} days" + (
        f", {case.about}" if case.about else ""
    )


def _to_dict(case: Case, summaries: list[Summary]) -> dict[str, Any]:
    import msgspec

    return {
        "scenario": msgspec.to_builtins(case.scenario),
        "sweep": case.about,
        "policies": [summary.to_dict() for summary in summaries],
    }


def _show(case: Case, summaries: list[Summary], seeds: int) -> None:
    failures = sum(summary.failures for summary in summaries) / len(summaries)
    click.echo(f"{escape(_title(case))}; {count_text(seeds, 'seed')}, about {count_text(failures, 'failure')}")
    click.echo(f"{escape(case.scenario.about)}\n" if case.scenario.about else "")
    best = max(summary.goodput.median for summary in summaries)
    rows = [
        _row(summary, summary.goodput.median == best and len(summaries) > 1, case.scenario.days)
        for summary in summaries
    ]
    columns = ["policy", "goodput", "5 to 95 %", "redone", "saving", "down", "every", "a day", "stored"]
    table([*columns], rows, right=columns[1:])
    click.echo()
    _by_cause(summaries)
    bounded = [summary for summary in summaries if summary.bound]
    if bounded:
        click.echo()
    for summary in bounded:
        click.echo(f"{escape(_short(summary.policy))}: {escape(summary.bound)}")
    if len(summaries) > 1:
        click.echo()
        _against_first(summaries)


def _share(part: float) -> str:
    """Return a part of the time in at most six characters: a row of the table has 84."""
    return percent_text(part, 2 if part < 0.0995 else 1)


def _row(summary: Summary, best: bool, days: float) -> list[object]:
    down = summary.parts["detecting"] + summary.parts["waiting"] + summary.parts["restarting"]
    goodput = percent_text(summary.goodput.median, 2)
    every = "-" if summary.interval_s == float("inf") else duration_text(summary.interval_s)
    return [
        _short(summary.policy), Styled(goodput, "green" if best else ""), f"{100 * summary.goodput.p5:.1f}–{100 * summary.goodput.p95:.1f}",
        _share(summary.parts["lost"]), _share(summary.parts["saving"]), _share(down), every,
        count_text(summary.saves / days), size_text(summary.stored_peak),
    ]  # fmt: skip


def _by_cause(summaries: Sequence[Summary]) -> None:
    """Print the time lost to each cause, for the first policies side by side."""
    shown = summaries[:_COLUMNS_MAX]
    causes = list(dict.fromkeys(cause for summary in shown for cause in summary.by_cause))
    causes.sort(key=lambda cause: -max(summary.by_cause.get(cause, 0.0) for summary in shown))
    heads = [_short(summary.policy) for summary in shown]
    rows = [[_short(cause, 24), *(_share(summary.by_cause.get(cause, 0.0)) for summary in shown)] for cause in causes]
    table(["time lost to", *heads], rows, right=heads)


def _against_first(summaries: Sequence[Summary]) -> None:
    for summary in summaries[1:]:
        if summary.better is None:
            continue
        better = summary.better
        gain = f"{100 * better.median:+.2f} points of goodput (5 to 95 %: {100 * better.p5:+.2f} to {100 * better.p95:+.2f})"
        click.echo(f"{escape(_short(summary.policy))} against {escape(_short(summaries[0].policy))}: {gain}")


def _short(name: str, most: int = _NAME_MAX) -> str:
    return name if len(name) <= most else f"{name[: most - 1]}…"
