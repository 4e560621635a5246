"""The crash engine: a slice of what ``make crash`` does in full, and that it can fail."""

from __future__ import annotations

import pytest

from proofs import crash

pytestmark = pytest.mark.crash


def test_simulated_deaths_and_power_cuts() -> None:
    """At every call of a run, a death, an interrupt, a takeover or a power cut breaks no invariant."""
    report = crash.run(1500, 1000, ["simulated"], share=0.15)
    assert not report.violations, report.show()
    assert report.total >= 1500
    assert {name.split()[1] for name in report.trials} >= {
        "before",
        "after",
        "half",
        "byte",
        "cut-mixed",
        "kill-then-cut",
        "takeover",
    }


@pytest.mark.slow
def test_real_processes_that_kill_themselves() -> None:
    """At every call of a run, a real SIGKILL breaks no invariant."""
    report = crash.run(600, 2000, ["fork"], share=0.5)
    assert not report.violations, report.show()
    assert report.total >= 600


def test_a_point_can_be_replayed() -> None:
    """A point's name is enough to do exactly that point again."""
    for point in (
        "3:simulated:before:40",
        "3:simulated:cut-mixed:77.after.1",
        "3:simulated:kill-then-cut:9.after.0",
        "3:fork:after:0.20",
    ):
        report = crash.replay(point)
        assert report.total == 1
        assert not report.violations


def test_points_are_the_same_again() -> None:
    """Equal seeds give the same points with the same calls: a violation can be reproduced."""
    watched = []
    for _ in range(2):
        report = crash.crash_report(5)
        calls: list[str] = []
        with crash.prepared() as names:
            watch = crash.CrashSampler(report, choose=lambda point: ":after:" in point)
            watch.put = lambda point, call, wrong, calls=calls: calls.append(f"{point} {call}")  # type: ignore[method-assign]
            crash.simulate(5, watch, names)
        watched.append(calls)
    assert len(watched[0]) > 300
    assert watched[0] == watched[1]


def test_the_command_fails_if_a_promise_is_broken(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """If an invariant does not hold, the command exits with 1 and names the point to replay. Otherwise it exits
    with 0."""
    assert crash.main(["--points", "40", "--engine", "simulated", "--json"]) == 0
    monkeypatch.setattr(crash, "check", lambda *_: ["I1: gone"])
    assert crash.main(["--points", "40", "--engine", "simulated"]) == 1
    assert "--replay 0:simulated:before:1" in capsys.readouterr().out
