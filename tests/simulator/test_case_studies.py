"""The shipped case studies reach their targets in simulation; and the cost of checkpoints that cannot be restored."""

from __future__ import annotations

import json
from pathlib import Path

import numpy
import pytest
from click.testing import CliRunner
from fleet_made import one_kind

import relight as product
from relight.cli import cli
from relight.simulator.engine import simulate
from relight.simulator.policies import policy_of
from relight.simulator.read import read_scenario
from relight.simulator.result import PolicyOutcome
from relight.simulator.scenario import SavingCosts, Scenario
from relight.simulator.schedules import costs_of

WAYS_BACK = ("detecting", "waiting", "restarting")


def first_policy(name: str, days: float = 15.0) -> tuple[Scenario, PolicyOutcome]:
    """Fifteen days of a shipped scenario under the policy that its table has first."""
    scenario = read_scenario(name, {"days": days})
    label, text = next(iter(scenario.policy.items()))
    return scenario, simulate(scenario, policy_of(text, label), 0)


def way_back_s(found: PolicyOutcome) -> float:
    """Return the mean seconds from a failure until training continues."""
    return sum(found.parts()[part] for part in WAYS_BACK) / max(1, sum(found.failures.values()))


@pytest.mark.parametrize(
    ("case", "before_s", "after_s", "overhead", "goodput"),
    [("blocking-saves", 2 * 3600, 15 * 60, 0.01, 0.90), ("costly-saves", 4 * 3600, 8 * 60, 0.03, 0.95)],
)
def test_a_case_study_reaches_its_targets(
    case: str, before_s: float, after_s: float, overhead: float, goodput: float
) -> None:
    """Before: restarts take as long as the case states. After: goodput, overhead and restarts are within the
    targets."""
    scenario, before = first_policy(f"{case}-before")
    _, after = first_policy(f"{case}-after")
    assert costs_of(scenario).restart_s == pytest.approx(before_s, rel=0.01)
    assert way_back_s(after) < after_s and after.saving_s / after.wall_s < overhead
    assert after.goodput > goodput > before.goodput + 0.25


def test_before_and_after_are_the_same_job_with_the_same_failures() -> None:
    """Before and after differ in saves, restarts and the policy. Nothing else improves."""
    for case in ("blocking-saves", "costly-saves"):
        before, after = (read_scenario(f"{case}-{side}") for side in ("before", "after"))
        for name in ("gpus", "days", "step_s", "spares", "failure", "repair", "lemons", "silent"):
            assert getattr(before, name) == getattr(after, name), name
        assert (
            before.save.bytes == after.save.bytes and before.restart.read_bytes_per_s == after.restart.read_bytes_per_s
        )


def test_a_checkpoint_that_cannot_be_restored_costs_its_reading_and_the_way_to_the_one_before() -> None:
    """A share of 1 costs nothing. With half of the checkpoints the job loses more steps and restarts take longer.

    Restores from memory are unaffected.
    """
    policy, kept = policy_of("600s,last=4,memory=off,backoff_s=0"), policy_of("600s,last=4,backoff_s=0")
    scenarios = [
        one_kind(days=20.0, save=SavingCosts(stall_s=5.0, durable_s=60.0, bytes=10**9, restorable=share))
        for share in (1.0, 0.5)
    ]
    whole, half = (simulate(scenario, policy, 0) for scenario in scenarios)
    assert half.parts()["lost"] > 1.5 * whole.parts()["lost"] and sum(half.restored.values()) > 50
    reading = [
        simulate(one_kind(days=20.0, save=scenario.save, restart=product_restart(scenario)), policy, 0)
        for scenario in scenarios
    ]
    assert reading[1].parts()["restarting"] > 1.5 * reading[0].parts()["restarting"]
    assert simulate(scenarios[1], policy, 0) == half
    in_memory = [simulate(scenario, kept, 0).parts()["lost"] for scenario in scenarios]
    assert in_memory[1] == pytest.approx(in_memory[0], rel=0.1)


def product_restart(scenario: Scenario) -> object:
    """Return the scenario's restart with a read of 200 seconds."""
    from msgspec.structs import replace

    return replace(scenario.restart, read_bytes_per_s=5e6)


def test_a_plan_s_storage_is_what_a_run_has_stored(tmp_path: Path) -> None:
    """The share of a run's stored bytes is computed from its log. It scales the storage and its price."""
    weights = numpy.random.default_rng(1).standard_normal(500_000).astype(numpy.float32)
    compact = product.Compact(reuse=True, codecs="never")
    with product.Checkpointer(
        tmp_path / "run", w=weights, n=numpy.zeros(1), save=product.every(steps=1), compact=compact
    ) as ckpt:
        for step in range(ckpt.restore(), 4):
            ckpt.step(step)
    asked = ["plan", "1B", "--store-price", "20", "--json"]
    whole, stored = (
        json.loads(CliRunner().invoke(cli, [*asked, *more]).stdout)
        for more in ([], ["--stored", str(tmp_path / "run")])
    )
    share = stored["known"]["stored"]["value"]
    assert 0.2 < share < 0.4 and stored["known"]["stored"]["source"] == "measured: 4 checkpoints of run"
    assert stored["kept_bytes"] == pytest.approx(share * whole["kept_bytes"]) and stored["month"][
        "storage"
    ] == pytest.approx(share * whole["month"]["storage"])
    assert "stored" not in whole["known"]
    (tmp_path / "none").mkdir()
    assert CliRunner().invoke(cli, [*asked, "--stored", str(tmp_path / "none")]).exit_code != 0
