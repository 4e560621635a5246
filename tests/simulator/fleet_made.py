"""Fleets for tests: small, with everything in them that there is."""

from __future__ import annotations

from relight.simulator.scenario import Failing, Lemons, Repairing, Restarting, SavingCosts, Scenario, Silent

EVERYTHING = (
    Failing(name="gpu", per_day=4.0, risk="ecc", broken=0.5),
    Failing(name="rack", per_day=0.5, takes_nodes=4, aftershock=0.5, aftershock_s=600.0, shape=0.6),
    Failing(name="bug", kind="user", per_day=3.0, takes_nodes=0, broken=0.0),
    Failing(name="hang", kind="hang", per_day=2.0, takes_nodes=0, broken=0.0, detect_s=600.0),
    Failing(name="spot", kind="preemption", per_day=0.5, notice_s=120.0),
)


def fleet(**changes: object) -> Scenario:
    """Return 128 GPUs for ten days with every kind of failure. ``changes`` replace fields of the scenario."""
    usual: dict[str, object] = {
        "gpus": 128, "days": 10.0, "step_s": 7.0, "spares": 2, "failure": EVERYTHING, "lemons": Lemons(share=0.1, mtbf_hours=24.0),
        "silent": Silent(per_million_gpu_hours=30.0, lag_steps=(1, 2000)), "repair": Repairing(median_s=1800.0, sigma=1.5),
        "restart": Restarting(base_s=120.0, spread=0.3, read_bytes_per_s=1e9), "save": SavingCosts(stall_s=3.0, durable_s=40.0, bytes=10**10),
    }  # fmt: skip
    return Scenario(**{**usual, **changes})  # type: ignore[arg-type]


def one_kind(**changes: object) -> Scenario:
    """Return a job of one machine that fails at random and restarts by itself. ``changes`` replace fields."""
    failing = {"name": "failure", "kind": "killed", "per_day": 12.0, "takes_nodes": 0, "broken": 0.0, "detect_s": 0.0}
    mine = {key: changes.pop(key) for key in list(changes) if key in failing or key in Failing.__struct_fields__}
    usual: dict[str, object] = {
        "gpus": 8, "days": 60.0, "step_s": 1.0, "save": SavingCosts(stall_s=5.0, durable_s=60.0),
        "restart": Restarting(base_s=120.0, per_gpu_s=0.0, memory_s=0.0), "failure": (Failing(**{**failing, **mine}),),  # type: ignore[arg-type]
    }  # fmt: skip
    return Scenario(**{**usual, **changes})  # type: ignore[arg-type]
