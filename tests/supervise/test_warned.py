"""A node's failure warnings reach its trainers, fade with time, and shorten the interval of ``relight.adaptive()``."""

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
from relight.settings.supervise_settings import SuperviseSettings
from relight.supervise.save_requests import FREQUENT_INTERVAL_S
from relight.supervise.supervisor import Supervisor

HERE = Path(__file__).parent


def test_a_warning_fades_evenly_and_more_is_never_replaced_by_less(tmp_path: Path) -> None:
    """Half of a warning is left after half its time. A weaker warning replaces it only once it has faded below it."""
    page = tmp_path / "heartbeat-0"
    write_risk(page, RiskWarning(100.0, 0.8, 1000.0, "so"))
    assert read_risk(page) == RiskWarning(100.0, 0.8, 1000.0, "so")
    assert [
        RiskWarning(100.0, 0.8, 1000.0).remaining(now) for now in (50.0, 100.0, 600.0, 1100.0, 9e9)
    ] == pytest.approx([0.8, 0.8, 0.4, 0, 0])
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
def test_an_invalid_warning_is_ignored(tmp_path: Path, data: bytes) -> None:
    """An invalid risk file is no warning."""
    risk_path(tmp_path / "heartbeat-0").write_bytes(data)
    assert read_risk(tmp_path / "heartbeat-0") is None
    assert read_risk(tmp_path / "none" / "heartbeat-0") is None


def test_the_supervisor_warns_its_ranks_until_the_incarnation_ends(tmp_path: Path) -> None:
    """The warning has a probability, a duration and a reason. It ends with the incarnation."""
    watched = Supervisor(SuperviseSettings(), "job", tmp_path)
    try:
        page = watched.begin([0, 1], {})[1][SETTING]
        watched.foresee(Alarm(0.0, "disk", "preventive save", "no room", "unchanged", 0.9, "rules", 0.7), False)
        warning = read_risk(page)
        assert warning is not None
        assert (warning.likely, warning.within_s, warning.why) == (0.7, HORIZON_S, "no room")
        assert abs(warning.at - time.monotonic()) < 5
        watched.begin([0, 1], {})
        assert read_risk(page) is None
    finally:
        watched.close()


def test_a_preventive_save_has_the_alarm_as_its_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checkpoint of a preventive save names the alarm, a user's request has priority over it, and a bare signal
    keeps its name."""
    sent: list[int] = []
    monkeypatch.setattr("relight.supervise.save_requests.has_handler", lambda pid, number: True)
    monkeypatch.setattr("relight.supervise.save_requests.os.kill", lambda pid, number: sent.append(number))
    now = [1000.0]
    watched = Supervisor(SuperviseSettings(), "job", tmp_path, lambda: now[0])
    alarm = Alarm(0.0, "disk", "save more often", "2.0 % of the disk are left", "unchanged", 0.9, "rules", 0.7)

    def reason() -> SaveReason:
        watched.saves.poll()
        return add_requester(of_signal("SIGUSR1"))

    try:
        monkeypatch.setenv(SETTING, watched.begin([0, 1], {})[0][SETTING])
        forget()
        watched.started({0: 4711, 1: 4712})
        watched.foresee(alarm, False)
        assert reason() == SaveReason("preventive", "preventive: 2.0 % of the disk are left")
        now[0] += FREQUENT_INTERVAL_S + 1
        assert reason().text.startswith("preventive: saving more often") and len(sent) == 2
        for order in ((1, 0), (0, 1)):
            for which in order:
                (lambda: watched.saves.request_for("anna"), lambda: watched.foresee(alarm, False))[which]()
            assert reason() == SaveReason("requested", "asked for by anna")
        watched.saves.request("SIGUSR1 came")
        assert reason() == of_signal("SIGUSR1")
    finally:
        watched.close()
        forget()


def usual(foreseen: float, before: ScheduleDecision | None = None) -> ScheduleDecision:
    """Return the decision of a run with known costs of saves."""
    seen = ScheduleInput(
        stalls_s=(0.1,),
        durables_s=(2.0,),
        restarts_s=(60.0,),
        devices=64,
        foreseen=foreseen,
        foreseen_why="no room, soon; really",
    )
    return decide(seen, before, IntervalBounds(at_most_s=86400.0))


def test_a_failure_that_is_foreseen_adds_to_the_rate() -> None:
    """A probability of one half within 20 min adds 1.5 failures an hour to the rate. The reason has it in one part."""
    calm, warned = usual(0.0), usual(0.5)
    assert warned.numbers["rate_per_h"] - calm.numbers["rate_per_h"] == pytest.approx(1.5)
    assert warned.interval_s < calm.interval_s / 5
    assert "one is foreseen within 20 min (50 % probable): no room soon really" in warned.reason.split(", ")
    assert "foreseen" not in calm.reason
    assert usual(7.0).numbers["foreseen"] == 1.0


class Clock:
    """A clock that the test sets."""

    now = 1000.0

    def __call__(self) -> float:
        """Return the time."""
        return self.now


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Make this process's heartbeat page, as under ``relight run``."""
    path = tmp_path / "heartbeat-0"
    path.write_bytes(b"\0" * 4096)
    monkeypatch.setenv(SETTING, str(path))
    forget()
    yield path
    forget()


def follow(schedule: AdaptiveSchedule, clock: Clock, seconds: int) -> list[float | None]:
    """Return the schedule's interval in each second, with one step a second."""
    intervals = []
    for _ in range(seconds):
        clock.now += 1.0
        intervals.append(schedule.interval(int(clock.now), {}, False))
    return intervals


def test_the_interval_falls_within_seconds_and_comes_back_smoothly(page: Path) -> None:
    """Without a save the interval falls to a fifth or less, and rises again as the warning fades, by a factor of two a
    second at most."""
    clock = Clock()
    schedule = AdaptiveSchedule(adaptive(at_most="1d"), 0, 64, clock)
    before = follow(schedule, clock, 30)[-1]
    assert before is not None
    write_risk(page, RiskWarning(clock.now, 0.5, 1200.0, "no room"))
    fell = [interval_s for interval_s in follow(schedule, clock, 15) if interval_s is not None]
    assert fell[-1] < before / 5
    rose = [interval_s for interval_s in follow(schedule, clock, 1300) if interval_s is not None]
    assert rose == sorted(rose), "it only rises"
    assert all(later <= 2.001 * interval_s for interval_s, later in zip(rose, rose[1:]))
    assert rose[1190] > 2 * rose[0]
    for _ in range(10):
        schedule.learn({"blocked": 0.1, "copy": 1.0, "total": 8.9}, 10**6, False)
        last = follow(schedule, clock, 1)[-1]
    assert last == pytest.approx(before, rel=0.3)


def test_another_rank_than_0_has_an_interval_only_while_its_own_node_is_at_risk(page: Path) -> None:
    """Rank 0 has no warning of another node, so a rank on that node requests a save of all ranks."""
    clock = Clock()
    schedule = AdaptiveSchedule(adaptive(), 3, 64, clock)
    assert follow(schedule, clock, 5) == [None] * 5
    write_risk(page, RiskWarning(clock.now, 0.5, 100.0))
    assert all(interval_s is not None for interval_s in follow(schedule, clock, 99)[1:])
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
    """The disk of a job of one minute fills up after 25 s.

    The unchanged script saves more often, and ``relight log --why`` shows it.
    """
    (tmp_path / "train.py").write_text(SCRIPT)
    store = tmp_path / "store" / "demo"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(HERE / "foretold.py"), "25", "run", str(tmp_path / "train.py"), str(store)]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    explain = [sys.executable, "-m", "relight", "log", "--why", str(store), "--last", "100"]
    result = json.loads(subprocess.run([*explain, "--json"], capture_output=True, check=True).stdout)
    foreseen = [decision["numbers"]["foreseen"] > 0 for decision in result]
    assert any(foreseen), done.stdout + done.stderr
    calm = result[foreseen.index(True) - 1]["interval_s"]
    warned = min(decision["interval_s"] for decision in result if decision["numbers"]["foreseen"] > 0)
    assert warned < calm / 3
    output = subprocess.run(explain, capture_output=True, text=True, check=True).stdout
    assert "one is foreseen within 20 min" in output
    assert "are left" in output
