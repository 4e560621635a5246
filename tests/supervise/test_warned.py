"""What is foreseen of a node comes to the trainers there: told, read, faded, and heeded by ``relight.adaptive()``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from relight.checkpointer.adaptive_schedule import AdaptiveSchedule
from relight.checkpointer.signals import add_requester
from relight.cost_model import IntervalBounds, ScheduleDecision, ScheduleInput, decide
from relight.heartbeat import SETTING, RiskWarning, read_risk, risk_path, write_risk
from relight.heartbeat.writer import forget
from relight.policy import adaptive
from relight.prediction import HORIZON_S, Alarm
from relight.save_reason import SaveReason, of_signal
from relight.supervise.decide import SuperviseRules
from relight.supervise.limits import HangTimeouts
from relight.supervise.supervisor import Supervisor

HERE = Path(__file__).parent


def test_a_warning_fades_evenly_and_more_is_never_replaced_by_less(tmp_path: Path) -> None:
    """Half of it is left after half its time; a weaker one does not take its place before it has faded below it."""
    page = tmp_path / "pulse-0"
    write_risk(page, RiskWarning(100.0, 0.8, 1000.0, "so"))
    assert read_risk(page) == RiskWarning(100.0, 0.8, 1000.0, "so")
    assert [RiskWarning(100.0, 0.8, 1000.0).remaining(at) for at in (50.0, 100.0, 600.0, 1100.0, 9e9)] == pytest.approx(
        [0.8, 0.8, 0.4, 0, 0]
    )
    write_risk(page, RiskWarning(200.0, 0.5, 1000.0, "less"))
    assert read_risk(page).why == "so"  # type: ignore[union-attr]
    write_risk(page, RiskWarning(600.0, 0.5, 1000.0, "less"))
    assert read_risk(page).why == "less"  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "data",
    [
        b"", b"{", b"[]", b"[1, 2, 3]", b'[1, 2, 3, "more than certain"]', b'[1, 0.5, 0, "at once"]', b'[1, 0.5, 1e999, "never"]',
        b'["x", 0.5, 10, ""]', b'[1, NaN, 10, ""]', b"[" * 100_000, b"\xff" * 100, b"[" + b"9" * 4000 + b', 0.5, 10, ""]', b"null",
    ],
    ids=range(13),
)  # fmt: skip
def test_what_makes_no_sense_is_no_warning(tmp_path: Path, data: bytes) -> None:
    """Whatever lies there."""
    risk_path(tmp_path / "pulse-0").write_bytes(data)
    assert read_risk(tmp_path / "pulse-0") is None
    assert read_risk(tmp_path / "none" / "pulse-0") is None


def test_the_supervisor_tells_its_ranks_and_a_new_life_knows_nothing_of_it(tmp_path: Path) -> None:
    """How probable, for how long, and why; behind a failure it is over."""
    watched = Supervisor(SuperviseRules(), HangTimeouts(), "job", tmp_path)
    try:
        page = watched.begin([0, 1], {})[1][SETTING]
        watched.foreseen(Alarm(0.0, "disk", "preventive save", "no room", "as it is", 0.9, "rules", 0.7), False)
        told = read_risk(page)
        assert told is not None
        assert (told.likely, told.within_s, told.why) == (0.7, HORIZON_S, "no room")
        assert abs(told.at - time.monotonic()) < 5
        watched.begin([0, 1], {})
        assert read_risk(page) is None
    finally:
        watched.close()


def test_a_preventive_save_has_the_alarm_as_its_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checkpoint of a preventive save names the alarm, a person's request goes before it, and a bare signal keeps its name."""
    sent: list[int] = []
    monkeypatch.setattr("relight.supervise.supervisor.catches", lambda pid, number: True)
    monkeypatch.setattr("relight.supervise.supervisor.os.kill", lambda pid, number: sent.append(number))
    watched = Supervisor(SuperviseRules(), HangTimeouts(), "job", tmp_path)
    alarm = Alarm(0.0, "disk", "save more often", "2.0 % of the disk are left", "as it is", 0.9, "rules", 0.7)

    def reason() -> SaveReason:
        watched._ask_for_save()
        return add_requester(of_signal("SIGUSR1"))

    try:
        monkeypatch.setenv(SETTING, watched.begin([0, 1], {})[0][SETTING])
        forget()
        watched.started({0: 4711, 1: 4712})
        watched.foreseen(alarm, False)
        assert reason() == SaveReason("preventive", "preventive: 2.0 % of the disk are left")
        watched._often = (watched._often[0] - 61.0, watched._often[1])
        assert reason().text.startswith("preventive: saving more often") and len(sent) == 2
        for order in ((1, 0), (0, 1)):
            for which in order:
                (lambda: watched.request_save("anna"), lambda: watched.foreseen(alarm, False))[which]()
            assert reason() == SaveReason("requested", "asked for by anna")
        watched.save_now("SIGUSR1 came")
        assert reason() == of_signal("SIGUSR1")
    finally:
        watched.close()
        forget()


def usual(foreseen: float, before: ScheduleDecision | None = None) -> ScheduleDecision:
    """What is decided by a run that knows what saves cost."""
    seen = ScheduleInput(
        stalls_s=(0.1,), durables_s=(2.0,), restarts_s=(60.0,), devices=64, foreseen=foreseen, foreseen_why="no room, soon; really"
    )
    return decide(seen, before, IntervalBounds(at_most_s=86400.0))


def test_a_failure_that_is_foreseen_adds_to_the_rate() -> None:
    """A probability of one half within 20 min is 1.5 an hour beside the usual; the reason says so in one part, and no more than it is."""
    calm, warned = usual(0.0), usual(0.5)
    assert warned.numbers["rate_per_h"] - calm.numbers["rate_per_h"] == pytest.approx(1.5)
    assert warned.interval_s < calm.interval_s / 5
    assert "one is foreseen within 20 min (50% probable): no room soon really" in warned.reason.split(", ")
    assert "foreseen" not in calm.reason
    assert usual(7.0).numbers["foreseen"] == 1.0


class Clock:
    """One that is set."""

    now = 1000.0

    def __call__(self) -> float:
        """What it shows."""
        return self.now


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """This process's, as if under ``relight run``."""
    path = tmp_path / "pulse-0"
    path.write_bytes(b"\0" * 4096)
    monkeypatch.setenv(SETTING, str(path))
    forget()
    yield path
    forget()


def follow(schedule: AdaptiveSchedule, clock: Clock, seconds: int) -> list[float | None]:
    """Its interval in each second, at a step a second."""
    found = []
    for _ in range(seconds):
        clock.now += 1.0
        found.append(schedule.interval(int(clock.now), {}, False))
    return found


def test_the_interval_falls_within_seconds_and_comes_back_smoothly(page: Path) -> None:
    """Without a save in between: by a factor of two a second at most, to a fifth or less, and back as the warning fades."""
    clock = Clock()
    schedule = AdaptiveSchedule(adaptive(at_most="1d"), 0, 64, clock)
    before = follow(schedule, clock, 30)[-1]
    assert before is not None
    write_risk(page, RiskWarning(clock.now, 0.5, 1200.0, "no room"))
    fell = [one for one in follow(schedule, clock, 15) if one is not None]
    assert fell[-1] < before / 5
    rose = [one for one in follow(schedule, clock, 1300) if one is not None]
    assert rose == sorted(rose), "it never turns back"
    assert all(later <= 2.001 * one for one, later in zip(rose, rose[1:]))
    assert rose[1190] > 2 * rose[0]
    for _ in range(10):
        schedule.learn({"blocked": 0.1, "copy": 1.0, "total": 8.9}, 10**6, False)
        last = follow(schedule, clock, 1)[-1]
    assert last == pytest.approx(before, rel=0.3)


def test_another_rank_than_0_has_an_interval_only_while_its_own_node_is_at_risk(page: Path) -> None:
    """Of another node rank 0 hears nothing: whoever is there asks all to save."""
    clock = Clock()
    schedule = AdaptiveSchedule(adaptive(), 3, 64, clock)
    assert follow(schedule, clock, 5) == [None] * 5
    write_risk(page, RiskWarning(clock.now, 0.5, 100.0))
    assert all(one is not None for one in follow(schedule, clock, 99)[1:])
    assert follow(schedule, clock, 5)[-1] is None
    (page.with_name("risk")).unlink()
    assert AdaptiveSchedule(None, 0, 8, clock).interval(1, {}, False) is None


SCRIPT = """
import sys, time, torch, relight
model = torch.nn.Linear(4, 4)
with relight.Checkpointer(sys.argv[1], model=model, save=relight.adaptive(at_least=0.5, mtbf="1d")) as ckpt:
    for step in range(ckpt.restore(), 1200):
        time.sleep(0.05)
        ckpt.step(step)
"""


@pytest.mark.slow
def test_a_real_job_under_relight_run_saves_more_often_once_something_is_foreseen(tmp_path: Path) -> None:
    """Nothing in the script knows of it: the disk of a minute's job fills up behind 25 s, and ``relight explain schedule`` says so."""
    (tmp_path / "train.py").write_text(SCRIPT)
    store = tmp_path / "store" / "demo"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(HERE / "foretold.py"), "25", "run", str(tmp_path / "train.py"), str(store)]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    explain = [sys.executable, "-m", "relight", "explain", "schedule", str(store), "--last", "100"]
    told = json.loads(subprocess.run([*explain, "--json"], capture_output=True, check=True).stdout)
    foreseen = [one["numbers"]["foreseen"] > 0 for one in told]
    assert any(foreseen), done.stdout + done.stderr
    calm = told[foreseen.index(True) - 1]["interval_s"]
    warned = min(one["interval_s"] for one in told if one["numbers"]["foreseen"] > 0)
    assert warned < calm / 3
    said = subprocess.run(explain, capture_output=True, text=True, check=True).stdout
    assert "one is foreseen within 20 min" in said
    assert "are left" in said
