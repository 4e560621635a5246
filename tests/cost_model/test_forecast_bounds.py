"""The longest interval follows the cost of a save, unless the user sets one. The cost of a user's bound is reported
once."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from relight.checkpointer.adaptive_schedule import AdaptiveSchedule, saves_cost
from relight.cli import cli
from relight.commit import Attempt
from relight.cost_model import Costs, IntervalBounds, Level, ScheduleDecision, ScheduleInput, decide, level_intervals
from relight.cost_model.schedule import AT_MOST_S, BOUND_SHARE, following
from relight.cost_model.schedule_note import encode
from relight.format.topics import SCHEDULE
from relight.log import Log, fold
from relight.observe import Event, subscribe
from relight.policy import adaptive
from relight.simulator.clusters import lost_by
from relight.simulator.scenario import Failing, Restarting, SavingCosts, Scenario
from relight.store import open_bytes
from relight.units import percent_text

HOUR = 3600.0
BLOCKED_S = 1800.0
DEAR = ScheduleInput(
    step=100,
    step_s=10.0,
    stalls_s=(BLOCKED_S,),
    durables_s=(BLOCKED_S,),
    restarts_s=(2 * HOUR,),
    devices=4096,
    failures=20,
    watched_s=250 * HOUR,
)


def cluster(stall_s: float = BLOCKED_S) -> Scenario:
    """Return 4,096 GPUs with two failures a day, saves that stop training for 30 minutes, and restarts of two hours."""
    return Scenario(
        name="dear",
        gpus=4096,
        days=60.0,
        step_s=10.0,
        save=SavingCosts(stall_s=stall_s, durable_s=stall_s),
        restart=Restarting(base_s=2 * HOUR, per_gpu_s=0.0),
        failure=(Failing(name="failure", kind="killed", per_day=2.0, takes_nodes=0, broken=0.0, detect_s=0.0),),
    )


def test_saves_of_half_an_hour_are_as_far_apart_as_is_best() -> None:
    """Without a user's bound, the schedule loses at most 3 points more than an oracle. A bound of an hour loses at
    least 15 more."""
    result = lost_by(cluster(), ("adaptive,last=3", "adaptive,last=4,at_most=1h", "oracle"), range(2))
    assert result["adaptive,last=3"] <= result["oracle"] + 0.03, result
    assert result["adaptive,last=4,at_most=1h"] >= result["oracle"] + 0.15, result


def test_the_bound_is_an_hour_for_cheap_saves() -> None:
    """The bound is an hour up to 36 s per save. For longer saves it is the interval at which saves take 1 % of the
    time."""
    assert [IntervalBounds().most_s(stall_s) for stall_s in (0.0, 1.0, 36.0, 72.0, BLOCKED_S)] == [
        AT_MOST_S,
        AT_MOST_S,
        AT_MOST_S,
        7200.0,
        BLOCKED_S / BOUND_SHARE,
    ]
    assert IntervalBounds(at_most_s=60.0).most_s(BLOCKED_S) == 60.0
    assert following(1.0, at_least_s=7200.0) == 7200.0 and adaptive(at_least="2h").at_least_s == 7200  # type: ignore[attr-defined]
    rare = decide(
        ScheduleInput(stalls_s=(1.0,), durables_s=(5.0,), step_s=1.0, failures=0, watched_s=1e7, devices=1),
        None,
        IntervalBounds(),
    )
    assert rare.interval_s == AT_MOST_S and "unless at_most= allows more" in rare.reason and not rare.bound


@pytest.mark.parametrize(
    ("bounds", "name"),
    [
        (IntervalBounds(at_most_s=HOUR), "at_most=1 h"),
        (IntervalBounds(at_least_s=40 * HOUR), "at_least=1 d 16 h"),
        (IntervalBounds(overhead=0.02), "overhead=0.02"),
    ],
    ids=["at_most", "at_least", "overhead"],
)
def test_the_reason_states_which_bound_costs_how_much(bounds: IntervalBounds, name: str) -> None:
    """The cost is in the text and the numbers. Bounds without cost, or with a guessed one, are not mentioned."""
    result = decide(DEAR, None, bounds)
    assert (
        result.bound == name
        and f"{name} costs {percent_text(result.numbers['bound_cost'])} of the time" in result.reason
    )
    assert result.numbers["bound_cost"] > 0.05 and result.numbers["free_s"] == pytest.approx(
        decide(DEAR, None, IntervalBounds()).interval_s
    )
    assert not decide(DEAR, None, IntervalBounds(at_most_s=200 * HOUR)).bound
    assert not decide(ScheduleInput(devices=4096), None, bounds).bound


def test_a_first_measured_save_is_followed_by_no_row_of_saves() -> None:
    """After a first guess of 0.1 s, the next interval fits a measured save of half an hour, not the guess."""
    guessed = decide(ScheduleInput(step_s=10.0, devices=4096), None, IntervalBounds())
    assert guessed.interval_s < 600
    assert decide(DEAR, guessed, IntervalBounds()).interval_s >= 2 * BLOCKED_S


def test_a_tier_s_copies_that_cost_much_are_as_far_apart_as_is_best() -> None:
    """A copy that takes half an hour of the steps: without a bound more than four hours apart, with one of an hour not."""
    far = [Level("far", Costs(BLOCKED_S, BLOCKED_S, 2 * HOUR), 0.3)]
    (free,), (bounded,) = (level_intervals(1 / (12 * HOUR), 60.0, far, 0.5, most_s) for most_s in (None, HOUR))
    assert free.interval_s > 4 * HOUR and bounded.interval_s <= HOUR


class Clock:
    """A clock that is set."""

    now = 100.0

    def __call__(self) -> float:
        """Return the set time."""
        return self.now


def test_a_running_job_reports_a_costly_bound_once() -> None:
    """A process logs the warning once, however often it decides again."""
    events: list[Event] = []
    undo = subscribe(events.append)
    clock = Clock()
    try:
        schedule = AdaptiveSchedule(adaptive(at_most="10m", mtbf="12h"), 0, 4096, clock)
        for step in range(30):
            schedule.interval(step, {}, False)
            clock.now += 10.0
            if step in (10, 20, 25):
                schedule.learn({"blocked": BLOCKED_S if step < 20 else 2 * BLOCKED_S, "total": 1.0}, 10**12, False)
    finally:
        undo()
    warnings = [event for event in events if event.name == "schedule.bound"]
    assert len(warnings) == 1 and warnings[0].fields["bound"] == "at_most=10 min" and warnings[0].fields["share"] > 0.1
    assert warnings[0].fields["free_s"] > HOUR


def test_a_new_process_knows_what_saves_cost(tmp_path: Path) -> None:
    """A new process reads the newest measured decision of the run's log. Guesses are ignored, and the first interval is
    the best one."""
    store = open_bytes(str(tmp_path))
    attempt = Attempt.begin(store, "demo", reason="fresh")
    log = Log(store, "demo")
    log.read()
    measured, guess = decide(DEAR, None, IntervalBounds()), decide(ScheduleInput(devices=4096), None, IntervalBounds())
    for number, decision in enumerate(
        (measured, guess, ScheduleDecision(60.0, 1, "of an older Relight", {"stall_s": 1.0, "durable_s": 2.0}))
    ):
        note = SCHEDULE.note(encode(number, decision))
        log.append(lambda view, note=note: (note, attempt.epoch))  # type: ignore[misc]
    history = fold(log.read())
    assert saves_cost(history) == (BLOCKED_S, BLOCKED_S)
    schedule = AdaptiveSchedule(adaptive(mtbf="12h"), 0, 4096, Clock())
    schedule.on_attempt(attempt, history)
    assert schedule.interval(0, {}, False) > 2 * HOUR  # type: ignore[operator]


def test_plan_and_simulate_state_what_a_bound_costs() -> None:
    """The cost of a given bound is in the text and in JSON. Without a bound it is absent."""
    asked = [
        "plan",
        "70B",
        "--gpus",
        "4096",
        "--stall",
        "30m",
        "--durable",
        "30m",
        "--restart",
        "2h",
        "--levels",
        "store",
    ]
    output = CliRunner().invoke(cli, [*asked, "--at-most", "1h"]).output
    assert "at_most=1 h costs " in output and " between saves would lose least" in output
    assert "costs" not in CliRunner().invoke(cli, asked).output
    wrong = CliRunner().invoke(cli, [*asked, "--at-least", "2h", "--at-most", "1h"])
    assert wrong.exit_code != 0
    command = [
        "plan",
        "simulate",
        "--gpus",
        "4096",
        "--days",
        "10",
        "--seeds",
        "1",
        "--jobs",
        "1",
        "--set",
        "save.stall_s=1800",
        "--set",
        "save.durable_s=1800",
    ]
    shown = CliRunner().invoke(cli, [*command, "--policy", "adaptive,at_most=1h", "--policy", "adaptive"]).output
    assert shown.count("costs") == 1 and "at_most=1 h costs" in shown
