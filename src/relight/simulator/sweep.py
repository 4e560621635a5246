"""Run many simulations: policies, seeds and swept values, in this process, in several processes, or on Ray."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from relight.engines import IN_PROCESS, Engine
from relight.errors import ConfigError
from relight.simulator.engine import simulate
from relight.simulator.failure_events import Calendar, draw
from relight.simulator.policies import Policy
from relight.simulator.result import PolicyOutcome
from relight.simulator.scenario import SAVES_MAX, Scenario


class Case(NamedTuple):
    """One scenario with the policies to simulate. ``about`` names it if there are several."""

    scenario: Scenario
    policies: tuple[Policy, ...]
    about: str = ""
    calendar: Calendar | None = None


def check_case(case: Case) -> None:
    """Raise ``ConfigError`` if a policy would make more than ``SAVES_MAX`` saves."""
    save = case.scenario.save
    for policy in case.policies:
        least = {"every": policy.every, "steps": policy.every * case.scenario.step_s}.get(policy.schedule, 0.0)
        count = case.scenario.wall_s / max(least, save.durable_s, save.stall_s, case.scenario.step_s)
        if count > SAVES_MAX:
            message = (
                f"up to {count:,.0f} saves in {case.scenario.days:g} days, and at most {SAVES_MAX:,} are simulated"
            )
            raise ConfigError(
                message, where=policy.name, hint="a longer interval, a true save.durable_s, or fewer days"
            )


def sweep(
    cases: Sequence[Case],
    seeds: Sequence[int],
    *,
    engine: Engine = IN_PROCESS,
    done: Callable[[int], None] = lambda count: None,
) -> list[list[list[PolicyOutcome]]]:
    """Return the outcomes by case, policy and seed.

    ``done`` gets the number of simulations that ended. The result does not depend on ``engine``.
    """
    for case in cases:
        check_case(case)
    tasks = [(case, index, seed) for index, case in enumerate(cases) for seed in seeds]
    results: dict[tuple[int, int], list[PolicyOutcome]] = {}
    for (_, index, seed), outcomes in engine.run(_one, tasks):
        results[index, seed] = outcomes
        done(len(outcomes))
    return [
        [[results[index, seed][policy] for seed in seeds] for policy in range(len(case.policies))]
        for index, case in enumerate(cases)
    ]


def _one(task: tuple[Case, int, int]) -> list[PolicyOutcome]:
    """Simulate all policies of one case with one seed. Their failures are drawn once."""
    case, _, seed = task
    chance = draw(case.scenario, seed, case.calendar)
    return [simulate(case.scenario, policy, seed, chance=chance) for policy in case.policies]
