"""Decisions about failures: the table of docs/recovery.md, and cases that it does not have."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from relight.errors import ConfigError
from relight.policy.rollback_env import BEFORE, CUT, SKIP, SPLIT
from relight.settings.supervise_settings import SuperviseRules
from relight.supervise.decide import Past, agreed, decide
from relight.supervise.facts import KINDS, Decision, Failure
from relight.supervise.settings import settings_of

DOCS = Path(__file__).parents[2] / "docs" / "recovery.md"
RULES = SuperviseRules()


def failure(kind: str, step: int = 100, steps: int = 50, **more: object) -> Failure:
    """Return a failure at ``step`` in an incarnation that completed ``steps``."""
    return replace(Failure(kind, f"why of {kind}", 0, step, steps, f"words of {kind}", restored=step - steps), **more)  # type: ignore[arg-type]


def after(*failures: Failure, rules: SuperviseRules = RULES) -> Decision:
    """Return the decision about the last failure, after decisions about all before it."""
    history: list[Past] = []
    for number, failure_ in enumerate(failures):
        history.append(Past(failure_, decide(failure_, history, rules, float(number)), float(number)))
    return history[-1].decision


def table() -> dict[str, list[str]]:
    """Return rows of the page: a kind and the action at its first, second and third failure at one step."""
    rows = re.findall(r"^\| `([a-z ]+)` \|([^\n]*)\|$", DOCS.read_text(encoding="utf-8"), re.MULTILINE)
    return {kind: [cell.strip() for cell in cells.split("|")] for kind, cells in rows}


def test_the_table_has_every_kind() -> None:
    """The table has every kind and no other."""
    assert set(table()) == set(KINDS)


@pytest.mark.parametrize("kind", KINDS)
def test_the_table_is_what_is_done(kind: str) -> None:
    """Every cell of the table matches the decision."""
    cells = table()[kind]
    rules = SuperviseRules(split=True) if kind == "device memory" else RULES
    for times, cell in enumerate(cells[1:4], 1):
        if cell == "–":
            continue
        assert after(*[failure(kind)] * times, rules=rules).action == cell, (kind, times)


def test_an_error_of_the_script_stops_at_once_only_if_nothing_worked() -> None:
    """An error after some steps may have a cause outside the script, so it is retried."""
    assert after(failure("user", -1, 0)).action == "stop"
    assert (
        after(
            failure("user", 99, 0),
        ).action
        == "stop"
    )
    assert after(failure("killed"), failure("user", 100, 0)).action == "resume"
    assert after(failure("user")).action == "resume"
    assert after(failure("user"), failure("user", 150)).action == "resume"


def test_waiting_grows_and_is_bounded() -> None:
    """The delay is 0, then 1, 2, 4 … 60 s, until a step is reached that was not reached before."""
    rules = SuperviseRules(failures=100)
    assert [after(*[failure("network")] * times, rules=rules).delay_s for times in range(1, 10)] == [
        0,
        1,
        2,
        4,
        8,
        16,
        32,
        60,
        60,
    ]
    assert after(*[failure("network")] * 5, failure("network", 101), rules=rules).delay_s == 0


def test_a_job_that_gets_on_may_fail_for_ever() -> None:
    """A thousand failures with progress between them do not stop the job."""
    assert after(*[failure("killed", step) for step in range(1000)]).action == "resume"


def test_a_machine_with_repeated_hardware_failures_is_left() -> None:
    """A machine stops after three hardware failures at any steps.

    Failures of other machines and other kinds do not count.
    """
    broken = [failure("hardware", step) for step in (100, 500, 900)]
    assert after(*broken).action == "exclude_node" and "third time" in after(*broken).reason
    assert after(*broken[:2], failure("killed", 700), failure("network", 800)).action == "resume"
    elsewhere = [replace(failure_, here=False) for failure_ in broken]
    assert after(*elsewhere, *elsewhere, broken[0]).action == "resume"
    assert after(*broken, rules=SuperviseRules(node_failures=4)).action == "resume"


def test_failures_of_more_than_a_day_ago_exclude_no_machine() -> None:
    """In a job of weeks each machine may fail three times in total."""
    history: list[Past] = []
    for day, step in enumerate((100, 500, 900)):
        failure_ = failure("hardware", step)
        history.append(Past(failure_, decide(failure_, history, RULES, 86400.0 * day), 86400.0 * day))
    assert history[-1].decision.action == "resume"
    assert decide(failure("hardware", 950), [*history, history[-1]], RULES, 86400.0 * 2 + 5).action == "exclude_node"


def test_failures_without_progress_are_counted() -> None:
    """Failures of different kinds do not count as the same failure."""
    kinds = ["network", "storage", "hardware", "network"] * 3
    assert [after(*[failure(kind, here=False) for kind in kinds[:count]]).action for count in (10, 11)] == [
        "resume",
        "stop",
    ]


def test_going_back_goes_further_each_time() -> None:
    """Further rollbacks go further back and skip more samples, three times at most."""
    first = failure("numerical", 109, 10, onset=105, restored=99)
    decision = after(first)
    assert (decision.action, dict(decision.settings)) == ("roll back", {BEFORE: "105", SKIP: "105-105"})
    two = after(first, replace(first, restored=99))
    assert dict(two.settings) == {BEFORE: "99", SKIP: "105-106"}
    three = after(first, first, replace(first, restored=89))
    assert dict(three.settings) == {BEFORE: "89", SKIP: "105-108"}
    assert after(first, first, first, first).action == "stop"
    assert after(first, first, first, replace(first, onset=5000, step=5003)).action == "roll back"


def test_an_incarnation_that_died_before_its_rollback_passes_it_on() -> None:
    """If the incarnation died before it rolled back, the next one gets the rollback again."""
    first, died = failure("numerical", onset=90), failure("killed", -1, 0, restored=-2)
    assert dict(after(first, died).settings) == {BEFORE: "90", SKIP: "90-90"}
    assert dict(after(first, failure("killed", 95)).settings) == {}


def test_micro_batches_shrink_where_that_is_allowed() -> None:
    """The batch is split by 2, 4, 8 and 16. Later incarnations keep the split."""
    rules = SuperviseRules(split=True)
    decisions = [after(*[failure("device memory")] * times, rules=rules) for times in range(1, 6)]
    assert [dict(decision.settings) for decision in decisions[:4]] == [
        {SPLIT: "2"},
        {SPLIT: "4"},
        {SPLIT: "8"},
        {SPLIT: "16"},
    ]
    assert decisions[4].action == "stop"
    assert dict(after(failure("device memory"), failure("killed", 200), rules=rules).settings) == {SPLIT: "2"}
    assert after(failure("device memory")).action == "resume"


@pytest.mark.parametrize(
    "wrong", [{"failures": 0}, {"same": 1.5}, {"backoff_s": -1}, {"backoff_max_s": "1"}, {"roll_backs": True}, {"skip": 0}, {"split": 1},
              {"spikes": -1}],
)  # fmt: skip
def test_rules_are_checked(wrong: dict[str, object]) -> None:
    """A wrong setting is refused with its name."""
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        settings_of(wrong, "")


def test_all_nodes_get_the_same_settings() -> None:
    """Nodes agree on the earliest rollback with its samples, and on the smallest batches.

    Without settings they agree on none.
    """
    back, further = {"RELIGHT_BEFORE": "30", "RELIGHT_SKIP": "30-31"}, {"RELIGHT_BEFORE": "9", "RELIGHT_SKIP": "9-9"}
    assert agreed([{}, {}]) == {}
    assert agreed([{}, back]) == agreed([back, {}]) == back
    assert agreed([back, further, {"RELIGHT_SPLIT": "4"}, {"RELIGHT_SPLIT": "2"}]) == {**further, "RELIGHT_SPLIT": "4"}
    assert agreed([{}, {**further, CUT: "0.5"}, back]) == {**further, CUT: "0.5"}, (
        "how far rates are lowered goes with it"
    )
