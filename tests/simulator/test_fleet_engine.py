"""The simulator itself: time adds up, seeds repeat, formulas hold where they hold, and what must help helps."""

from __future__ import annotations

import math

import pytest
from fleet_made import EVERYTHING, fleet, one_kind
from hypothesis import given, settings
from hypothesis import strategies as st

from relight.cost_model import Costs, best_interval, waste
from relight.simulator import policy_of, simulate
from relight.simulator.failure_events import Calendar, draw
from relight.simulator.machines import Machines
from relight.simulator.saves import CheckpointInventory
from relight.simulator.scenario import Failing, Lemons, Restarting, SavingCosts, Silent

POLICIES = (
    "adaptive,last=2,hourly=4", "10m,last=1", "50steps,last=3,copies=1", "daly,memory=off,last=1", "oracle,data=3,parity=1,last=2",
    "15m,near=local,far=50MB/s,far_last=2,last=3", "20m,recall=0.8,precision=0.6,lead=10m,drain=on,last=2", "never",
    "5m,node_failures=1,spares=0,last=1,undo_window=2h", "30m,last=2,lag_steps=500,far=1GB/s",
)  # fmt: skip
BARE = "memory=off,backoff_s=0"


@pytest.mark.parametrize("text", POLICIES)
def test_every_second_of_the_wall_is_counted_once(text: str) -> None:
    """Useful, lost, saving, detecting, waiting and restarting sum to the wall time. None is negative."""
    outcome = simulate(fleet(), policy_of(text), 3)
    parts = outcome.parts()
    assert sum(parts.values()) == pytest.approx(outcome.wall_s, abs=1e-3)
    assert min(parts.values()) >= -1e-6
    assert 0 <= outcome.goodput <= 1
    assert sum(outcome.failures.values()) > 20


@given(
    per_day=st.floats(0, 200), stall=st.floats(0, 300), durable=st.floats(20, 900), restart=st.floats(0, 3000), step=st.floats(2, 900),
    nodes=st.integers(0, 5), broken=st.floats(0, 1), spares=st.integers(0, 3), text=st.sampled_from(POLICIES), seed=st.integers(0, 99),
)  # fmt: skip
@settings(max_examples=20, deadline=None, derandomize=True)
def test_time_adds_up_whatever_the_fleet_is_like(
    per_day: float,
    stall: float,
    durable: float,
    restart: float,
    step: float,
    nodes: int,
    broken: float,
    spares: int,
    text: str,
    seed: int,
) -> None:
    """Parts sum to the wall time for any costs, rates and policies."""
    failing = (*EVERYTHING, Failing(name="more", per_day=per_day, takes_nodes=nodes, broken=broken))
    made = fleet(
        days=0.5,
        step_s=step,
        spares=spares,
        save=SavingCosts(stall_s=stall, durable_s=durable, bytes=10**9),
        failure=failing,
        restart=Restarting(base_s=restart),
    )
    outcome = simulate(made, policy_of(text), seed)
    assert sum(outcome.parts().values()) == pytest.approx(outcome.wall_s, abs=1e-3)
    assert outcome.durable <= outcome.saves


def test_the_same_seed_gives_the_same_and_another_gives_another() -> None:
    """Results of one seed are equal to the last digit."""
    made, policy = fleet(days=3.0), policy_of(POLICIES[0])
    assert simulate(made, policy, 5) == simulate(made, policy, 5)
    assert simulate(made, policy, 5) != simulate(made, policy, 6)


def test_what_fails_does_not_depend_on_the_policy_nor_on_what_else_fails() -> None:
    """Each failure process has random numbers of its own: a further kind of failure moves none of the others."""
    more = fleet(failure=(Failing(name="more", per_day=4.0), *EVERYTHING))
    first, second = draw(fleet(), 1), draw(more, 1)
    assert [
        failure._replace(failing=max(-1, failure.failing - 1)) for failure in second.failures if failure.cause != "more"
    ] == list(first.failures)
    times = {cause: {failure.at for failure in second.failures if failure.cause == cause} for cause in ("more", "gpu")}
    assert all(times.values()) and not times["more"] & times["gpu"], "the same rate, and dice of their own"


@pytest.mark.parametrize(
    ("stall", "durable", "restart", "interval"),
    [(5.0, 60.0, 120.0, 605), (30.0, 30.0, 300.0, 630), (0.0, 45.0, 600.0, 300)],
)
def test_where_a_formula_holds_the_simulator_agrees(
    stall: float, durable: float, restart: float, interval: int
) -> None:
    """Useful time is within one per cent of the renewal argument's exact share. If durable = stall, that is Daly's."""
    made = one_kind(
        days=240.0,
        save=SavingCosts(stall_s=stall, durable_s=durable),
        restart=Restarting(base_s=restart, per_gpu_s=0.0),
    )
    exact = 1 - waste(interval, 12 / 86400, Costs(stall, durable, restart))
    assert simulate(made, policy_of(f"{interval - stall:.0f}steps,{BARE}"), 0).goodput == pytest.approx(exact, rel=0.01)


def test_the_best_interval_of_the_formula_is_the_best_here() -> None:
    """Half and twice the optimum lose more, with the same failures."""
    made = one_kind(days=100.0, save=SavingCosts(stall_s=20.0, durable_s=20.0))
    best = best_interval(12 / 86400, Costs(20.0, 20.0, 120.0)).seconds
    goodputs = [
        simulate(made, policy_of(f"{round(times * best - 20)}steps,{BARE}"), 2).goodput for times in (0.5, 1, 2)
    ]
    assert goodputs[1] > max(goodputs[0], goodputs[2])


def test_more_failures_never_help() -> None:
    """With the same failures and further ones, goodput falls for each seed."""
    few = one_kind(days=15.0)
    more = one_kind(days=15.0, failure=(*few.failure, Failing(name="more", per_day=12.0, takes_nodes=0, broken=0.0)))
    for seed in range(5):
        assert (
            simulate(more, policy_of(f"600steps,{BARE}"), seed).goodput
            < simulate(few, policy_of(f"600steps,{BARE}"), seed).goodput
        )


def test_without_failures_only_saves_cost_time() -> None:
    """Each save costs its stall, and nothing is lost."""
    outcome = simulate(one_kind(failure=()), policy_of("595steps,last=1"), 0)
    assert outcome.goodput == pytest.approx(595 / 600, abs=1e-4)
    assert outcome.spent == {}


def test_a_save_counts_only_once_it_is_durable() -> None:
    """A failure 30 s after a save that takes 60 s until durable leaves the save before it."""
    made = one_kind(days=0.1, save=SavingCosts(stall_s=0.0, durable_s=60.0))
    calendar_ = Calendar((2030.0,), (0,))
    outcome = simulate(made, policy_of(f"1000steps,{BARE}"), 0, calendar=calendar_)
    assert outcome.spent["failure"]["lost"] == pytest.approx(1030.0)
    kept = simulate(made, policy_of("1000steps,backoff_s=0,last=1"), 0, calendar=calendar_)
    assert kept.spent["failure"]["lost"] == pytest.approx(30.0), (
        "a writer of its own still has the snapshot, and only processes ended"
    )
    assert kept.restored == {"memory": 1}


@pytest.mark.parametrize(
    ("failures", "restored", "lost_s"),
    [
        ((2030.0,), {"peers": 1}, 1030.0),  # the save of step 2000 is not committed
        ((2062.0,), {"near": 1}, 62.0),  # it is committed, and being sent to peers
        ((2070.0,), {"peers": 1}, 70.0),  # they have it
        ((2062.0, 2500.0), {"near": 2}, 62.0 + 318.0),  # the lost machine no longer sends it
    ],
)
def test_peers_have_a_save_only_after_its_commit(
    failures: tuple[float, ...], restored: dict[str, int], lost_s: float
) -> None:
    """A machine that is lost before the commit of a save takes it along. Peers have a save 5 s after its commit."""
    made = one_kind(days=0.04, takes_nodes=1, gpus=32, save=SavingCosts(stall_s=0.0, durable_s=60.0, peers_s=5.0))
    calendar_ = Calendar(failures, (0,) * len(failures))
    alone = simulate(made, policy_of("1000steps,last=1"), 0, calendar=calendar_)
    peers = simulate(made, policy_of("1000steps,last=1,copies=1"), 0, calendar=calendar_)
    assert peers.restored == restored
    assert peers.spent["failure"]["lost"] == alone.spent["failure"]["lost"] == pytest.approx(lost_s)


def test_own_disks_go_with_their_machine_and_the_further_tier_is_left() -> None:
    """If the nearest store is the nodes' own disks, a lost node means a return to the last copied checkpoint."""
    made = one_kind(
        days=0.2, takes_nodes=1, gpus=32, save=SavingCosts(stall_s=0.0, durable_s=20.0, bytes=1_400_000_000)
    )
    calendar_ = Calendar((5500.0,), (0,))
    slow = simulate(made, policy_of("1000steps,near=local,far=1MB/s,last=3"), 0, calendar=calendar_)
    assert slow.restored == {"far": 1}
    assert slow.spent["failure"]["lost"] == pytest.approx(2500.0), (
        "copies take 1400 s: that of step 3000 is the last that arrived"
    )
    none = simulate(made, policy_of("1000steps,near=local,last=3"), 0, calendar=calendar_)
    assert none.restored == {"nothing": 1}


def test_two_machines_that_hold_each_others_copies() -> None:
    """Copies are on the product's own rings: of machines that are lost together some pairs are too much for one copy."""
    made, policy = fleet(gpus=32, nodes_per_rack=1), policy_of("10m,copies=1,last=1")
    survived = []
    for two in ((0, 1), (0, 2), (0, 3)):
        shelf = CheckpointInventory(made, policy)
        shelf.protect(shelf.new(0, 70.0, 0.0, wrong=False))
        survived.append(shelf.best(two, None) == (70.0, "peers"))
    assert sorted(survived) == [False, True, True]


def test_a_lemon_leaves_sooner_under_stricter_rules() -> None:
    """The supervisor's own decision takes a machine out that fails again and again."""
    made = fleet(failure=(), silent=Silent(), lemons=Lemons(share=0.2, mtbf_hours=3.0, cured=1.0), spares=8, days=20.0)
    patient, strict = (simulate(made, policy_of(f"10m,last=1,node_failures={count}"), 4) for count in (50, 1))
    assert patient.actions.get("exclude_node", 0) == 0 < strict.actions["exclude_node"]
    assert strict.failures["lemon"] < patient.failures["lemon"] / 3
    assert strict.goodput > patient.goodput


def test_silent_errors_are_rolled_back_if_something_older_is_kept() -> None:
    """With only the newest checkpoint all is lost. With one that is older than the lag, little is."""
    made = fleet(
        failure=(),
        lemons=Lemons(),
        days=20.0,
        silent=Silent(per_million_gpu_hours=40.0, lag_steps=(400, 500), found=1.0),
    )
    newest, older = (
        simulate(made, policy_of(f"10m,{kept},memory=off"), 1) for kept in ("last=1", "last=1,lag_steps=500")
    )
    assert newest.failures["silent"] and newest.restored["nothing"] and not older.restored.get("nothing")
    assert older.actions["roll back"] == older.failures["silent"]
    assert older.goodput > newest.goodput + 0.1


def test_without_spares_the_job_waits_for_repairs() -> None:
    """With enough spares the job does not wait."""
    waiting = [
        simulate(fleet(lemons=Lemons(), silent=Silent()), policy_of(f"10m,last=1,spares={count}"), 0).parts()["waiting"]
        for count in (0, 40)
    ]
    assert waiting[0] > 10 * waiting[1]


def test_failures_that_are_seen_coming_cost_less_and_false_alarms_are_counted() -> None:
    """A save before each failure costs less, even on a lost machine. A detector below its precision is not used."""
    made = fleet(
        failure=(Failing(name="gpu", per_day=20.0, risk="hardware", broken=0.0),), lemons=Lemons(), silent=Silent()
    )
    blind, seeing, lying = (
        simulate(made, policy_of(f"30m,last=1,memory=off,node_failures=99{more}"), 0)
        for more in ("", ",recall=0.9,precision=0.7,lead=15m", ",recall=0.9,precision=0.4,lead=15m")
    )
    assert seeing.parts()["lost"] < 0.8 * blind.parts()["lost"]
    assert seeing.alarms > 50 and seeing.false_alarms > 10
    assert lying.alarms == 0 and lying.goodput == blind.goodput


def test_a_machine_that_leaves_in_time_does_not_fail() -> None:
    """The machine is drained after its save, so its failure costs nothing."""
    made = fleet(failure=(Failing(name="gpu", per_day=10.0, risk="ecc"),), lemons=Lemons(), silent=Silent(), spares=20)
    stays, leaves = (
        simulate(made, policy_of(f"1h,last=1,recall=0.9,lead=15m,drain={drain}"), 0) for drain in ("off", "on")
    )
    assert leaves.actions["leave in time"] > 20
    assert leaves.failures["gpu"] < 0.6 * stays.failures["gpu"]


def test_a_storm_of_loads_takes_as_long_as_the_store_gives() -> None:
    """All readers read the whole checkpoint at once."""
    quick, storm = (
        simulate(
            one_kind(
                takes_nodes=1,
                gpus=32,
                save=SavingCosts(bytes=10**10),
                restart=Restarting(base_s=0.0, per_gpu_s=0.0, read_bytes_per_s=1e9, readers=count),
            ),
            policy_of("10m,last=1,node_failures=999,backoff_s=0"),
            0,
        )
        for count in (1, 20)
    )
    assert storm.parts()["restarting"] > 15 * quick.parts()["restarting"] > 0


def test_storage_is_what_the_rules_keep() -> None:
    """Three checkpoints and the one being written are stored. With time to recall deleted ones, there are more."""
    made = one_kind(days=10.0, save=SavingCosts(bytes=1000))
    assert simulate(made, policy_of("10m,last=3"), 0).stored_peak == {"near": 4000}
    assert simulate(made, policy_of("10m,last=3,undo_window=1h"), 0).stored_peak["near"] >= 8000
    everything = simulate(made, policy_of("10m"), 0)
    assert everything.stored_peak["near"] == 1000 * everything.durable
    assert everything.stored[-1] == everything.stored_peak["near"] > everything.stored[0]


def test_machines_side_by_side_are_of_one_rack() -> None:
    """Neighbours are of one rack, up to the rack's size."""
    machines = Machines(fleet(gpus=128, nodes_per_rack=4), policy_of("10m"), frozenset())
    assert machines.adjacent(6, 4) == (4, 5, 6, 7)
    assert set(machines.adjacent(5, 2)) <= {4, 5, 6, 7}
    assert len(set(machines.adjacent(15, 6))) == 6


def test_an_aftershock_follows_and_weibull_keeps_the_rate() -> None:
    """Rates are those of the scenario: an aftershock share of half doubles failures, and Weibull groups them."""
    plain, shaken, grouped = (
        [failure.at for failure in draw(one_kind(days=1000.0, **more), 0).failures]
        for more in ({}, {"aftershock": 0.5}, {"shape": 0.5})
    )
    assert len(plain) == pytest.approx(12_000, rel=0.03)
    assert len(shaken) == pytest.approx(24_000, rel=0.05)
    assert len(grouped) == pytest.approx(12_000, rel=0.08)
    close = [sum(b - a < 60 for a, b in zip(times, times[1:], strict=False)) / len(times) for times in (plain, grouped)]
    assert close[1] > 5 * close[0]


def test_a_person_has_to_restart_the_job_when_the_supervisor_stops() -> None:
    """If failures end every restart, the real rules stop the job, and hours pass."""
    made = one_kind(
        per_day=86400 / 60, days=2.0, restart=Restarting(base_s=300.0, per_gpu_s=0.0, human_s=7200.0), detect_s=1.0
    )
    outcome = simulate(made, policy_of("10m,last=1"), 0)
    assert outcome.actions["stop"] > 3
    assert outcome.parts()["waiting"] > 3 * 7200 * 0.9
    assert math.isclose(sum(outcome.parts().values()), outcome.wall_s, abs_tol=1e-3)
