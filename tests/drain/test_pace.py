"""How often a further tier gets what ``relight.adaptive()`` saves: what holds a copy back, what never does, and that it is all there in the end."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

import relight
from relight.catalog import Run
from relight.checkpointer.tier_pacing import REMEMBERED, TierPacer
from relight.cli import cli
from relight.commit import Attempt, SaveRequest
from relight.cost_model import Costs, Level, ScheduleDecision, onwards, waste
from relight.drain import drain
from relight.errors import ConfigError
from relight.format import encode_tree
from relight.format.records import NoteBody
from relight.observe import Event, emit, subscribe
from relight.policy import Tiers, keep, tier
from relight.policy.keep import Candidate, Keep
from relight.policy.tiers import NOW, PACE_TOPIC, TierPace, owed
from relight.save_reason import of_record
from relight.store import LocalStore, open_bytes


def saves(*times_s: float, routine: bool = True) -> list[Candidate]:
    """A checkpoint at each of these times."""
    return [Candidate(str(seq), seq, seq, time_s=at, routine=routine) for seq, at in enumerate(times_s)]


def test_only_what_a_schedule_saved_is_held_back_and_never_what_is_named_for_good() -> None:
    """Until so long behind the one before; a save that was asked for, a clock that went back, a tier that has nothing yet: at once."""
    assert owed(Keep(), saves(0, 50), 0, TierPace(60, 0.0)) == []
    assert owed(Keep(), saves(0, 50, 60), 0, TierPace(60, 0.0)) == ["2"]
    assert owed(Keep(), saves(0, 50, routine=False), 0, TierPace(60, 0.0)) == ["1"]
    assert owed(Keep(), saves(100, 50), 0, TierPace(60, 100.0)) == ["1"]
    assert owed(Keep(), saves(50), -1, TierPace(60, None)) == ["0"]
    assert owed(keep(every=1), saves(0, 50), 0, TierPace(60, 0.0)) == ["1"]
    assert owed(Keep(), saves(0, 50), 0) == ["1"]


def test_each_level_s_interval_loses_least_of_all_multiples() -> None:
    """Against every multiple up to a thousand; none is shorter than its copy takes; what costs nothing comes as often as it can."""
    for stall_s, durable_s, base_s in ((1.0, 30.0, 20.0), (0.05, 4.0, 60.0), (20.0, 300.0, 7.0), (0.0, 45.0, 20.0)):
        level = Level("cold", Costs(stall_s, durable_s, 120.0), 0.85)
        (found,) = onwards(1 / 7200, base_s, [level])
        feasible = [count for count in range(1, 1000) if count * base_s >= durable_s]
        best = min(feasible, key=lambda count: waste(base_s * count, 0.85 / 7200, level.costs))  # noqa: B023
        assert found.multiple == best
        assert found.interval_s == pytest.approx(best * base_s)
    near, far = onwards(1 / 7200, 20.0, [Level("warm", Costs(1, 30, 120), 0.77), Level("cold", Costs(5, 300, 120), 0.08)])
    assert far.multiple % near.multiple == 0
    assert far.multiple > near.multiple > 1
    (bounded,) = onwards(1 / 7200, 20.0, [Level("cold", Costs(20.0, 30.0, 120.0), 0.85)], overhead=0.001)
    assert bounded.interval_s >= 20_000


def begin(folder: Path) -> Attempt:
    """An attempt with a near and a far tier."""
    from relight.catalog.tiers import announce

    attempt = Attempt.begin(LocalStore(folder / "near"), "run")
    announce(attempt.place.log, Tiers(near=str(folder / "near" / "run"), far=str(folder / "far" / "run")).tiers, attempt.epoch)
    return attempt


def made(attempt: Attempt, step: int, reason: str = "adaptive, every 1 s") -> str:
    """A save with that reason."""
    return attempt.save(SaveRequest(step=step, tree=encode_tree({}), items=(), reason=of_record(reason, "", ""))).id


def paced(attempt: Attempt, **data: object) -> None:
    """The attempt's word about its tiers."""
    note = NoteBody(topic=PACE_TOPIC, data=data)  # type: ignore[arg-type]
    attempt.place.log.append(lambda view: (note, attempt.epoch))


def test_draining_goes_by_what_the_attempt_in_charge_said(tmp_path: Path) -> None:
    """Held back; then asked for; by hand it is copied all the same; a new attempt begins without any pace; nonsense is none."""
    attempt = begin(tmp_path)
    ids = [made(attempt, 0)]
    assert [one[1] for one in drain(attempt.store, "run").copied] == ids
    paced(attempt, far=3600.0)
    held = made(attempt, 1)
    assert drain(attempt.store, "run").copied == []
    asked = made(attempt, 2, "asked")
    assert [one[1] for one in drain(attempt.store, "run").copied] == [asked], "and what came before it never goes"
    made(attempt, 3)
    assert [one[1] for one in drain(attempt.store, "run", at_pace=False).copied] != [held]
    made(attempt, 4)
    assert drain(attempt.store, "run").copied == []
    paced(attempt, **{NOW: True})
    paced(attempt, far=3600.0)
    assert len(drain(attempt.store, "run").copied) == 1, "once somebody waits, each goes at once, whatever is said later"
    for nonsense in (-1.0, 0, "often", None):
        fresh = Attempt.begin(attempt.store, "run")
        made(fresh, 5)
        paced(fresh, far=nonsense)
        assert len(drain(fresh.store, "run").copied) == 1, nonsense


def test_what_a_copy_takes_from_the_steps_is_told_from_what_they_take_anyway() -> None:
    """Steps beside a copy take 1.0 s, within it 1.5 s: over 20 of them it cost 10 s, and is made more seldom for that; ``lag`` bounds it."""
    numbers = {"rate_per_h": 0.5, "durable_s": 2.0, "restart_s": 60.0}
    found = {}
    for lag in (None, "90s", 0):
        now = [0.0]
        pace = TierPacer(Tiers(near="/a/run", cold=tier("/b/run", lag=lag)).tiers, lambda now=now: now[0])
        assert pace.decide(ScheduleDecision(10.0, 1, "", numbers), 0.5) is None, "nothing was copied yet"
        for seconds, count in ((1.0, 40), (1.5, 20)):
            for _ in range(count):
                now[0] += seconds
                pace.stepped(now[0], seconds)
        emit("drain.done", tier="cold", id="x", seconds=30.0)
        data = pace.decide(ScheduleDecision(10.0, 1, "", numbers), 0.5)
        assert data is not None
        found[lag] = data
        assert pace.decide(ScheduleDecision(10.0, 1, "", numbers), 0.5) is None, "nothing is new"
        pace.close()
    best_s = onwards(0.5 / 3600, 10.0, [Level("cold", Costs(10.0, 32.0, 60.0), 1 - 63 / 419)])[0].interval_s
    assert found[None]["cold"] == pytest.approx(best_s - 5)
    assert "costs the steps 10 s" in str(found[None]["cold.why"])
    assert found["90s"]["cold"] == pytest.approx(80)
    assert found[0]["cold"] == 0
    with pytest.raises(ConfigError):
        tier("/b/run", lag=-1)


def test_a_run_drains_at_the_interval_that_it_found_and_its_end_is_everywhere(tmp_path: Path) -> None:
    """Copies are said to take 60 s: of many saves the far tier then gets the first ones, and the last when the run ends; the log says why."""
    tiers = relight.Tiers(hot=tmp_path / "hot" / "run", cold=tmp_path / "cold" / "run")
    model = torch.nn.Linear(4, 4)
    heard: list[Event] = []
    save = relight.adaptive(at_most=0.2, overhead=0.9)
    undo = subscribe(heard.append)
    try:
        with relight.Checkpointer(tiers, model=model, save=save, background=False, limits=relight.Limits(deadline_s=40)) as ckpt:
            for step in range(ckpt.restore(), 150):
                time.sleep(0.02)
                ckpt.step(step)
                for _ in range(
                    REMEMBERED if step == 20 else 0
                ):  # more than what real copies say, of which some are quicker than twenty steps
                    emit("drain.done", tier="cold", id="x", seconds=60.0)
        began = time.monotonic()
    finally:
        undo()
    said = CliRunner().invoke(cli, ["explain", "schedule", str(tmp_path / "hot" / "run")]).output
    assert "tier cold: one in" in said
    assert "since then every save" in said
    near, far = (Run(open_bytes(str(tmp_path / one)), "run").history().live for one in ("hot", "cold"))
    assert far[-1].step == near[-1].step == 149
    told = [one for one in heard if one.name == "tiers.paced"]
    assert told and "costs the steps" in told[0].fields["reason"]
    from_step = max(one.fields["step"] for one in heard[: heard.index(told[0])] if one.name == "save.durable")
    held = [one.step for one in near if from_step + 20 < one.step < 149]
    assert len(held) >= 3 and not {one.step for one in far} & set(held)
    assert time.monotonic() - began < 60
