"""How often a further tier gets the saves of ``relight.adaptive()``: which copies are postponed, which never are, and
the copy at the end."""

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
from relight.commit import Attempt, SaveInfo, SaveRequest
from relight.cost_model import Costs, Level, ScheduleDecision, level_intervals, waste
from relight.drain import drain
from relight.errors import ConfigError
from relight.format import encode_tree
from relight.format.topics import TIER_PACE
from relight.observe import Event, emit, subscribe
from relight.policy import Tiers, keep, tier
from relight.policy.keep import Candidate, Keep
from relight.policy.tiers import NOW, TierPace, owed
from relight.save_reason import of_record
from relight.store import LocalStore, open_bytes


def saves(*times_s: float, routine: bool = True) -> list[Candidate]:
    """Return a checkpoint for each of these times."""
    return [Candidate(str(seq), seq, seq, time_s=time_s, routine=routine) for seq, time_s in enumerate(times_s)]


def test_only_what_a_schedule_saved_is_held_back_and_never_what_is_named_for_good() -> None:
    """Scheduled saves are postponed until the interval after the previous copy.

    Requested saves, a clock that went back and an empty tier are not.
    """
    assert owed(Keep(), saves(0, 50), 0, TierPace(60, 0.0)) == []
    assert owed(Keep(), saves(0, 50, 60), 0, TierPace(60, 0.0)) == ["2"]
    assert owed(Keep(), saves(0, 50, routine=False), 0, TierPace(60, 0.0)) == ["1"]
    assert owed(Keep(), saves(100, 50), 0, TierPace(60, 100.0)) == ["1"]
    assert owed(Keep(), saves(50), -1, TierPace(60, None)) == ["0"]
    assert owed(keep(every=1), saves(0, 50), 0, TierPace(60, 0.0)) == ["1"]
    assert owed(Keep(), saves(0, 50), 0) == ["1"]


def test_each_level_s_interval_loses_least_of_all_multiples() -> None:
    """The chosen multiple wastes least of all multiples up to 1000, and no interval is shorter than its copy.

    Free copies are made as often as possible.
    """
    for stall_s, durable_s, base_s in ((1.0, 30.0, 20.0), (0.05, 4.0, 60.0), (20.0, 300.0, 7.0), (0.0, 45.0, 20.0)):
        level = Level("cold", Costs(stall_s, durable_s, 120.0), 0.85)
        (plan,) = level_intervals(1 / 7200, base_s, [level])
        feasible = [count for count in range(1, 1000) if count * base_s >= durable_s]
        best = min(feasible, key=lambda count: waste(base_s * count, 0.85 / 7200, level.costs))  # noqa: B023
        assert plan.multiple == best
        assert plan.interval_s == pytest.approx(best * base_s)
    near, far = level_intervals(
        1 / 7200, 20.0, [Level("warm", Costs(1, 30, 120), 0.77), Level("cold", Costs(5, 300, 120), 0.08)]
    )
    assert far.multiple % near.multiple == 0
    assert far.multiple > near.multiple > 1
    (bounded,) = level_intervals(1 / 7200, 20.0, [Level("cold", Costs(20.0, 30.0, 120.0), 0.85)], overhead=0.001)
    assert bounded.interval_s >= 20_000


def begin(folder: Path) -> Attempt:
    """Begin an attempt with a near and a far tier."""
    from relight.catalog.tiers import announce

    attempt = Attempt.begin(LocalStore(folder / "near"), "run")
    announce(
        attempt.place.log,
        Tiers(near=str(folder / "near" / "run"), far=str(folder / "far" / "run")).tiers,
        attempt.epoch,
    )
    return attempt


def made(attempt: Attempt, step: int, reason: str = "adaptive, every 1 s") -> str:
    """Save with that reason and return the id."""
    return attempt.save(
        SaveRequest(SaveInfo(step=step, reason=of_record(reason, "", "")), tree=encode_tree({}), items=())
    ).id


def paced(attempt: Attempt, **data: object) -> None:
    """Write the note about the paces of the attempt's tiers."""
    note = TIER_PACE.note(data)
    attempt.place.log.append(lambda view: (note, attempt.epoch))


def test_draining_follows_the_schedule_of_the_current_attempt(tmp_path: Path) -> None:
    """Scheduled saves are postponed, requested saves and manual drains are not.

    A new attempt begins without a pace, and an invalid pace is ignored.
    """
    attempt = begin(tmp_path)
    ids = [made(attempt, 0)]
    assert [copy[1] for copy in drain(attempt.store, "run").copied] == ids
    paced(attempt, far=3600.0)
    postponed = made(attempt, 1)
    assert drain(attempt.store, "run").copied == []
    asked = made(attempt, 2, "asked")
    assert [copy[1] for copy in drain(attempt.store, "run").copied] == [asked], (
        "and the postponed one before it is never copied"
    )
    made(attempt, 3)
    assert [copy[1] for copy in drain(attempt.store, "run", at_pace=False).copied] != [postponed]
    made(attempt, 4)
    assert drain(attempt.store, "run").copied == []
    paced(attempt, **{NOW: True})
    paced(attempt, far=3600.0)
    assert len(drain(attempt.store, "run").copied) == 1, (
        "once a caller waits, each is copied at once, whatever a later note states"
    )
    for nonsense in (-1.0, 0, "often", None):
        fresh = Attempt.begin(attempt.store, "run")
        made(fresh, 5)
        paced(fresh, far=nonsense)
        assert len(drain(fresh.store, "run").copied) == 1, nonsense


def test_the_cost_of_a_copy_is_its_slowdown_of_steps() -> None:
    """Steps take 1.0 s without a copy and 1.5 s during one. 20 such steps cost 10 s, so copies are made less often;
    ``lag`` limits the interval."""
    numbers = {"rate_per_h": 0.5, "durable_s": 2.0, "restart_s": 60.0}
    intervals = {}
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
        intervals[lag] = data
        assert pace.decide(ScheduleDecision(10.0, 1, "", numbers), 0.5) is None, "nothing is new"
        pace.close()
    best_s = level_intervals(0.5 / 3600, 10.0, [Level("cold", Costs(10.0, 32.0, 60.0), 1 - 63 / 419)])[0].interval_s
    assert intervals[None]["cold"] == pytest.approx(best_s - 5)
    assert "costs the steps 10 s" in str(intervals[None]["cold.why"])
    assert intervals["90s"]["cold"] == pytest.approx(80)
    assert intervals[0]["cold"] == 0
    with pytest.raises(ConfigError):
        tier("/b/run", lag=-1)


def test_a_run_drains_at_the_interval_that_it_found_and_its_end_is_everywhere(tmp_path: Path) -> None:
    """If copies take 60 s, the far tier gets the first saves, and the last one when the run ends.

    The log has the reason.
    """
    tiers = relight.Tiers(hot=tmp_path / "hot" / "run", cold=tmp_path / "cold" / "run")
    model = torch.nn.Linear(4, 4)
    events: list[Event] = []
    save = relight.adaptive(at_most=0.2, overhead=0.9)
    undo = subscribe(events.append)
    try:
        with relight.Checkpointer(
            tiers, model=model, save=save, background=False, limits=relight.Limits(deadline_s=40)
        ) as ckpt:
            for step in range(ckpt.restore(), 150):
                time.sleep(0.02)
                ckpt.step(step)
                # more entries than real copies, as some of those take under 20 steps
                for _ in range(REMEMBERED if step == 20 else 0):
                    emit("drain.done", tier="cold", id="x", seconds=60.0)
        began = time.monotonic()
    finally:
        undo()
    output = CliRunner().invoke(cli, ["log", "--why", str(tmp_path / "hot" / "run")]).output
    assert "tier cold: one in" in output
    assert "since then every save" in output
    near, far = (Run(open_bytes(str(tmp_path / name)), "run").history().live for name in ("hot", "cold"))
    assert far[-1].step == near[-1].step == 149
    paced_events = [event for event in events if event.name == "tiers.paced"]
    assert paced_events and "costs the steps" in paced_events[0].fields["reason"]
    from_step = max(
        event.fields["step"] for event in events[: events.index(paced_events[0])] if event.name == "save.durable"
    )
    postponed = [checkpoint.step for checkpoint in near if from_step + 20 < checkpoint.step < 149]
    assert len(postponed) >= 3 and not {checkpoint.step for checkpoint in far} & set(postponed)
    assert time.monotonic() - began < 60


def test_lag_spaces_the_copies_of_a_fixed_schedule(tmp_path: Path) -> None:
    """With ``every()`` and ``lag=``, the far tier gets milestones, requested saves and the last one, but few others."""
    rules = relight.keep(last=1, every=20)
    tiers = relight.Tiers(hot=tmp_path / "hot" / "run", cold=tier(tmp_path / "cold" / "run", keep=rules, lag="1h"))
    model, copied = torch.nn.Linear(4, 4), list[int]()
    reasons = list[str]()

    def note(event: Event) -> None:
        if event.name == "drain.done":
            copied.append(event.fields["step"])
        elif event.name == "tiers.paced":
            reasons.append(event.fields["reason"])

    undo = subscribe(note)
    try:
        with relight.Checkpointer(tiers, model=model, save=relight.every(steps=5), background=False) as ckpt:
            for step in range(ckpt.restore(), 60):
                ckpt.step(step)
                if step == 31:
                    ckpt.save(step)
                if step in (4, 9, 19, 31, 39):
                    assert ckpt._hooks.tiers._drainer is not None and ckpt._hooks.tiers._drainer.wait(60)
    finally:
        undo()
    assert copied == [4, 19, 31, 39, 59]
    assert reasons == ["one scheduled save in 1 h, because of lag="]
