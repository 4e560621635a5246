"""The report: numbers for each kill, JSON, the table, the picture."""

from __future__ import annotations

import io
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from relight.demo.compare import Finished, compare
from relight.demo.report import DemoReport, Kill, curve_digest


def steps(count: int = 20) -> list[Finished]:
    """A run's steps."""
    return [Finished(step, (5.0 / (step + 1)).hex(), "") for step in range(count)]


def report(killed: list[Finished] | None = None) -> DemoReport:
    """A report on a run of 20 steps, killed twice."""
    return DemoReport(
        seed=1, quick=True, steps=20, save_every=5,
        kills=(Kill(1, 7, None, 0.0, 5, 2.5, 3.0), Kill(2, 14, "0000000014-aaaaaaaaaa-e2", 9.0, 10, 2.25, 2.5)),
        difference=compare(20, steps(), killed or steps(), ("d", "d")), problem=None,
        curve_digest=curve_digest(steps()), state_digest="d", saves=6, stall_ms_median=40.0, stall_ms_max=70.0,
        bytes_per_save=7_700_000, parameters=630_000, text_bytes=2_000_000, loader="DataLoader", picture="out.png", seconds=25.0,
    )  # fmt: skip


def shown(value: DemoReport) -> str:
    """The report as a terminal of 80 columns shows it."""
    out = io.StringIO()
    Console(file=out, width=80).print(value)
    return out.getvalue()


def test_a_kill_learns_from_the_journal() -> None:
    """The next process's entries give its first step, when it started, and when it had caught up."""
    kill = Kill(1, step=7, saving=None, time=100.0)
    assert kill.after({"what": "finished", "step": 7, "time": 100.1}) is kill
    kill = kill.after({"what": "started", "start": 5, "time": 102.0})
    assert (kill.resumed_from, kill.redone, kill.back_s) == (5, 3, None)
    kill = kill.after({"what": "finished", "step": 5, "time": 102.5})
    assert (kill.back_s, kill.caught_up_s) == (2.5, None)
    kill = kill.after({"what": "finished", "step": 8, "time": 103.0})
    assert (kill.back_s, kill.caught_up_s) == (2.5, 3.0)
    assert kill.after({"what": "finished", "step": 9, "time": 104.0}) is kill


def test_equal_runs_are_ok() -> None:
    """If the runs are equal, the report is ok, and the table counts kills and steps."""
    value = report()
    assert value.ok
    text = shown(value)
    assert "equal to the bit" in text
    assert "2, of them 1 inside a save; 8 steps redone" in text


def test_one_different_bit_fails_the_report() -> None:
    """One different bit of one loss makes the report fail. Table and JSON name the step."""
    killed = steps()
    killed[13] = replace(killed[13], loss=math.nextafter(float.fromhex(killed[13].loss), 0.0).hex())
    value = report(killed)
    assert not value.ok
    assert "step 13" in shown(value)
    report_json = json.loads(json.dumps(value.to_json()))
    assert (report_json["ok"], report_json["difference"]["step"]) == (False, 13)
    assert curve_digest(killed) != curve_digest(steps())


def test_a_problem_fails_the_report() -> None:
    """Equal curves without enough kills are no proof."""
    value = replace(report(), problem="too few kills")
    assert not value.ok
    assert "too few kills" in shown(value)


def test_json_has_all_that_the_table_has() -> None:
    """The JSON is plain values, and has for each kill what the table shows."""
    report_json = json.loads(json.dumps(report().to_json()))
    assert report_json["ok"] is True
    assert (report_json["kills_inside_save"], report_json["redone"]) == (1, 8)
    assert report_json["kills"][1]["inside_save"] is True
    assert report_json["kills"][1]["redone"] == 5


def test_fits_eighty_columns() -> None:
    """The table is not wrapped in a terminal of 80 columns."""
    assert " kill -9  after step  inside a save  resumed from  steps redone  back at work" in shown(report())


@pytest.mark.parametrize("different", [False, True])
def test_picture(tmp_path: Path, different: bool) -> None:
    """A picture is drawn of equal runs and of different ones."""
    pytest.importorskip("matplotlib")
    from relight.demo.plot import draw

    killed = steps()
    if different:
        killed[13] = replace(killed[13], loss=(9.0).hex())
    path = tmp_path / "new" / "demo.png"
    draw(report(killed), steps(), killed, path)
    assert path.read_bytes().startswith(b"\x89PNG")
