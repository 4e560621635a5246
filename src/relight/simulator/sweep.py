"""Run many simulations: policies, seeds and swept values, in this process, in several processes, or on Ray."""

from __future__ import annotations

import importlib.util
import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from typing import Any, NamedTuple

from relight.comm.children import safe_spawn
from relight.errors import ConfigError
from relight.simulator.engine import simulate
from relight.simulator.failure_events import Calendar, draw
from relight.simulator.policies import Policy
from relight.simulator.result import PolicyOutcome
from relight.simulator.scenario import SAVES_MAX, Scenario

ENGINES = ("local", "ray")


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
    jobs: int = 1,
    engine: str = "local",
    done: Callable[[int], None] = lambda count: None,
) -> list[list[list[PolicyOutcome]]]:
    """Return the outcomes by case, policy and seed.

    ``done`` gets the number of simulations that ended. The result does not depend on ``engine``.
    """
    for case in cases:
        check_case(case)
    tasks = [(case, index, seed) for index, case in enumerate(cases) for seed in seeds]
    results: dict[tuple[int, int], list[PolicyOutcome]] = {}
    for (index, seed), outcomes in _run(tasks, jobs, engine):
        results[index, seed] = outcomes
        done(len(outcomes))
    return [
        [[results[index, seed][policy] for seed in seeds] for policy in range(len(case.policies))]
        for index, case in enumerate(cases)
    ]


_Task = tuple[Case, int, int]
_Done = tuple[tuple[int, int], list[PolicyOutcome]]


def _one(task: _Task) -> _Done:
    """Simulate all policies of one case with one seed. Their failures are drawn once."""
    case, index, seed = task
    chance = draw(case.scenario, seed, case.calendar)
    return (index, seed), [simulate(case.scenario, policy, seed, chance=chance) for policy in case.policies]


def _run(tasks: Sequence[_Task], jobs: int, engine: str) -> Iterator[_Done]:
    if engine == "ray":
        yield from _on_ray(tasks)
    elif jobs == 1 or len(tasks) == 1:
        yield from map(_one, tasks)
    else:
        with safe_spawn():
            pool = ProcessPoolExecutor(min(jobs, len(tasks)), mp_context=multiprocessing.get_context("spawn"))
            waiting = [pool.submit(_one, task) for task in tasks]
        with pool:
            try:
                for future in as_completed(waiting):
                    yield future.result()
            except BrokenProcessPool:
                message = "a simulating process was killed, perhaps for lack of memory"
                raise ConfigError(message, hint=f"fewer than --jobs {jobs}, or fewer saves and days") from None
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise


def _on_ray(tasks: Sequence[_Task]) -> Iterator[_Done]:
    if importlib.util.find_spec("ray") is None:
        raise ConfigError(
            "--engine ray needs Ray", hint="pip install ray, or leave --engine out: --jobs uses this machine's cores"
        )
    ray: Any = importlib.import_module("ray")
    if not ray.is_initialized():
        ray.init(log_to_driver=False)
    remote = ray.remote(_one)
    waiting = [remote.remote(task) for task in tasks]
    while waiting:
        ready, waiting = ray.wait(waiting)
        yield ray.get(ready[0])
