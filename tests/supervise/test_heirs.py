"""A rank fails, its replica lives: nothing since the last step is lost, what was each rank's own neither."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from relight.checkpointer.handover import SLACK_S, is_worth_it
from relight.heartbeat import RankStateWriter, make_rank_state, read_rank_state
from relight.heartbeat.rank_state import WILL_BYTES
from relight.store import open_bytes
from relight.supervise.incidents import Incident, read_incidents

JOB = Path(__file__).with_name("job.py")
STEPS = 45


def run(path: Path, plan: list[dict[str, Any]], **settings: str) -> tuple[str, list[Incident], str]:
    """Saves are so rare that what is not handed over is lost. The weights' hash, incidents, what it said."""
    path.mkdir(exist_ok=True)
    (path / "plan.json").write_text(json.dumps(plan))
    command = [sys.executable, "-m", "relight", "run", "--nproc-per-node", "2", str(JOB)]
    done = subprocess.run(
        [*command, str(path / "store"), str(STEPS), str(path / "plan.json"), str(path / "out")], cwd=path, text=True,
        env={**os.environ, "JOB_EVERY": "1000", "JOB_STEP_S": "0.1", "JOB_NOISE": "1", **settings}, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    return (path / "out.end").read_text(), read_incidents(open_bytes(path / "store"), "run"), done.stdout


KINDS = {"kill": "killed", "value": "user", "stop": "hang", "lock": "hang", "segv": "crash"}


@pytest.mark.parametrize("kinds", [["kill", "value", "stop"], pytest.param([*KINDS], marks=pytest.mark.slow)], ids=["three", "each"])
def test_a_healthy_replica_saves_what_a_dead_rank_held(tmp_path: Path, kinds: list[str]) -> None:
    """Killed, failed, stopped, stuck: each is taken up behind the last step that it ended, with its own generators and position."""
    straight, found, said = run(tmp_path / "straight", [])
    assert not found, said
    plan = [{"rank": n % 2, "step": 8 * n + 7, "what": what} for n, what in enumerate(kinds)]
    end, found, said = run(tmp_path / "failing", plan)
    assert [one.kind for one in found] == [KINDS[kind] for kind in kinds], said
    nothing = [one.after.steps_lost == 0 and one.after.restored == planned["step"] - 1 for one, planned in zip(found, plan) if one.after]
    assert len(nothing) == len(plan) and nothing.count(False) <= 1, said  # on a busy machine a survivor may come too late once
    assert end == straight, said
    assert said.count("is saved for all 2 ranks") >= len(plan) - 1


@pytest.mark.slow
def test_a_rank_that_dies_behind_its_update_costs_nothing_either(tmp_path: Path) -> None:
    """The other has all it needs to end that step: both go on behind it, the dead one with the generators that it had in front of its update."""
    straight, _, _ = run(tmp_path / "straight", [])
    plan = [{"rank": n % 2, "step": 9 * n + 8, "what": what, "behind": True} for n, what in enumerate(["kill", "stop", "segv"])]
    end, found, said = run(tmp_path / "failing", plan)
    went_on = [(one.after.restored, one.after.steps_lost) for one in found if one.after]
    assert len(went_on) == 3, said
    assert sum(pair in went_on for pair in [(8, 0), (17, 0), (26, 0)]) >= 2, said  # on a busy machine a survivor may come too late once
    assert said.count("from before its update") >= len(plan) - 1, said
    assert end == straight, said


@pytest.mark.slow
def test_the_first_step_of_a_life_is_not_lost(tmp_path: Path) -> None:
    """Ranks know what they hold in common by its end: a failure in the second has something to go on from."""
    _, found, said = run(tmp_path / "again", [{"rank": n % 2, "step": 7 + n, "what": "kill"} for n in range(3)])
    went_on = [(one.after.restored, one.after.steps_lost) for one in found if one.after]
    assert len(went_on) == 3 and sum(pair in went_on for pair in [(6, 0), (7, 0), (8, 0)]) >= 2, said  # as above


@pytest.mark.slow
def test_a_script_need_not_say_with(tmp_path: Path) -> None:
    """What ends it is heard of all the same."""
    _, found, said = run(
        tmp_path / "plain", [{"rank": 0, "step": 9, "what": "kill"}, {"rank": 0, "step": 17, "what": "value"}], JOB_PLAIN="1"
    )
    assert [(one.after.restored, one.after.steps_lost) for one in found if one.after] == [(8, 0), (16, 0)], said


@pytest.mark.slow
def test_a_rank_that_computes_wrongly_is_not_inherited_from(tmp_path: Path) -> None:
    """A weight changes on one rank: the next save says so, and both go back to before it."""
    straight, _, _ = run(tmp_path / "straight", [], JOB_EVERY="6")
    end, found, said = run(tmp_path / "failing", [{"rank": 1, "step": 20, "what": "flip"}], JOB_EVERY="6")
    assert [(one.kind, one.action) for one in found] == [("hardware", "resume")], said
    assert found[0].after is not None and found[0].after.restored < 20, said
    assert "is not the same on ranks 0, 1" in found[0].why and "for all 2 ranks" not in said
    assert end == straight, said


def test_what_is_left_can_be_read_when_its_writer_is_gone(tmp_path: Path) -> None:
    """The newest; nothing of what does not fit, of one that is being written, of what is no such file."""
    path = tmp_path / "will"
    assert read_rank_state(path) is None
    make_rank_state(path)
    assert read_rank_state(path) is None
    will = RankStateWriter(path)
    assert will.write(3, b"three") and will.write(4, b"four")
    assert read_rank_state(path) == (4, b"four")
    data = bytearray(path.read_bytes())
    data[8] += 1  # its writer died in the midst of it
    path.write_bytes(data)
    assert read_rank_state(path) is None
    assert not will.write(5, bytes(WILL_BYTES))
    assert read_rank_state(path) is None
    path.write_bytes(b"rlwill01" + bytes(8))
    assert read_rank_state(path) is None


@pytest.mark.parametrize(("steps", "step_s", "save_s", "yes"), [
    (0, 1.0, SLACK_S, True), (0, 1.0, SLACK_S + 0.1, False), (10, 1.0, 20.0, True), (10, 1.0, 21.0, False),
])  # fmt: skip
def test_a_save_that_costs_more_than_it_keeps_is_not_made(steps: int, step_s: float, save_s: float, yes: bool) -> None:
    """Short steps, a large state: what is done again is done sooner."""
    assert is_worth_it(steps, step_s, save_s) is yes
