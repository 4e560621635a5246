"""``relight run`` on real processes: kills, hangs, errors, losses that are none; training ends where it would have ended."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from relight.catalog.incident_sync import DIRECTORY, newest_accounts
from relight.comm.ports import free_port
from relight.keys.files import write_key_file
from relight.store import open_bytes
from relight.supervise.goodput import Account
from relight.supervise.incidents import Incident, incidents_in, read_incidents

JOB = Path(__file__).with_name("job.py")
STEPS = 40


class Job:
    """One in a directory of its own."""

    def __init__(self, path: Path, plan: list[dict[str, Any]] | None = None, **settings: str) -> None:
        self.path = path
        path.mkdir(parents=True, exist_ok=True)
        self.plan = path / "plan.json"
        self.plan.write_text(json.dumps(plan or []))
        self.environment = {**os.environ, **settings}
        self.said = ""

    def start(self, *flags: str, steps: int = STEPS) -> subprocess.Popen[str]:
        """``relight run`` it."""
        command = [sys.executable, "-m", "relight", "run", *(flags or ("--nproc-per-node", "2")), str(JOB)]
        return subprocess.Popen(
            [*command, str(self.path / "store"), str(steps), str(self.plan), str(self.path / "out")],
            cwd=self.path, env=self.environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip

    def run(self, *flags: str, steps: int = STEPS, timeout_s: float = 240) -> int:
        """To its end: the exit code."""
        process = self.start(*flags, steps=steps)
        try:
            self.said = process.communicate(timeout=timeout_s)[0]
        except subprocess.TimeoutExpired:
            process.kill()
            raise AssertionError(process.communicate()[0]) from None
        return process.returncode

    @property
    def end(self) -> str:
        """The weights' hash."""
        return (self.path / "out.end").read_text()

    @property
    def losses(self) -> list[tuple[int, float, int]]:
        """Step, loss, life; as they came."""
        rows = [line.split() for line in (self.path / "out").read_text().splitlines()]
        return [(int(step), float(loss), int(life)) for step, loss, life in rows]

    @property
    def incidents(self) -> list[Incident]:
        """Of the run."""
        return read_incidents(open_bytes(self.path / "store"), "run")


def spares_in(folder: Path) -> list[psutil.Process]:
    """Processes that wait for ranks of a job there."""
    found = []
    for one in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if "relight.supervise.spare" in one.cmdline() and Path(one.cwd()).is_relative_to(folder):
                found.append(one)
    return found


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The weights of a run to which nothing happens."""
    job = Job(tmp_path_factory.mktemp("straight"))
    assert job.run() == 0, job.said
    assert not job.incidents and [step for step, _, _ in job.losses] == list(range(STEPS))
    return job.end


def test_whatever_ends_a_rank_training_goes_on(tmp_path: Path, straight: str) -> None:
    """Five ends of one run, each of another kind; the weights at the end are those of a run without."""
    kinds = {"kill": "killed", "segv": "crash", "value": "user", "full": "storage", "exit": "unknown"}
    plan = [{"rank": n % 2, "step": 7 * n + 6, "what": what} for n, what in enumerate(kinds)]
    job = Job(tmp_path, plan)
    assert job.run() == 0, job.said
    assert job.end == straight, job.said
    found = job.incidents
    assert [(one.kind, one.action) for one in found] == [(kind, "resume") for kind in kinds.values()], job.said
    for one, planned in zip(found, plan, strict=True):
        assert one.rank == planned["rank"] and one.step == planned["step"] - 1
        assert one.after is not None and one.after.restored >= min(worker["durable"] for worker in one.workers)
        assert one.after.seconds["noticed"] + one.after.seconds["decided"] < 2


def test_a_hang_is_found_and_says_where_everybody_stood(tmp_path: Path, straight: str) -> None:
    """A rank that waits for ever, and one that is stopped; the others' stacks show what they waited for."""
    plan = [{"rank": 1, "step": 12, "what": "lock"}, {"rank": 0, "step": 25, "what": "stop"}]
    job = Job(tmp_path, plan)
    assert job.run() == 0, job.said
    assert job.end == straight
    first, second = job.incidents
    assert (first.kind, first.action, second.kind) == ("hang", "resume", "hang"), job.said
    assert "fail" in first.stacks["1"] and "all_reduce" in first.stacks["0"], first.stacks
    assert "stopped by a signal" in second.why and second.rank == 0 or "rank 0" in second.why
    assert max(one.after.seconds["all"] for one in job.incidents if one.after) < 60
    for one in (first, second):  # three usual steps, which are of milliseconds here, and five seconds; a busy machine
        found = re.search(r"for ([0-9.]+) s", one.why)
        assert found is not None and float(found[1]) < 8, one.why
    for arguments, words in (((), ("hang", "resume")), (("latest",), ("clues, the strongest first:", "stacks of rank 1:"))):
        command = [sys.executable, "-m", "relight", "incidents", str(tmp_path / "store" / "run"), *arguments]
        shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        assert all(word in shown for word in words), shown
    told = json.loads(subprocess.run([*command, "--json"], capture_output=True, text=True, check=True).stdout)
    assert told[0]["id"] == second.id and told[0]["after"]["steps_lost"] >= 0


@pytest.mark.slow
def test_slow_is_not_stuck(tmp_path: Path, straight: str) -> None:
    """A step that takes eight seconds for once and works, and an evaluation that says so."""
    job = Job(tmp_path, [{"rank": 0, "step": 15, "what": "evaluate"}])
    assert job.run() == 0, job.said
    assert job.end == straight and not job.incidents, job.said


def test_an_error_that_would_only_repeat_stops_at_once(tmp_path: Path) -> None:
    """Before any step: nothing is tried again, the reason is said, and no store is needed to write it down."""
    job = Job(tmp_path, [{"rank": 0, "step": 0, "what": "type"}])
    assert job.run() == 1
    assert "TypeError" in job.said and "would only repeat" in job.said and "incarnation 2" not in job.said, job.said
    found = job.incidents or incidents_in(tmp_path / "relight-incidents")
    assert [(one.kind, one.action) for one in found] == [("user", "stop")]


@pytest.mark.slow
def test_the_same_again_stops(tmp_path: Path) -> None:
    """Three times at one step."""
    job = Job(tmp_path, [{"rank": 0, "step": 8, "what": "exit"}] * 3)
    assert job.run() == 1, job.said
    assert [one.action for one in job.incidents] == ["resume", "resume", "stop"]
    assert "3 times at step 7" in job.said


@pytest.mark.parametrize("what", ["poison", pytest.param("jump", marks=pytest.mark.slow)])
def test_a_loss_that_went_wrong_is_gone_back_behind(tmp_path: Path, what: str) -> None:
    """Samples that make it no number, weights that jump: the run goes back, leaves the samples out, and ends well; the log says so."""
    job = Job(tmp_path, [{"rank": 0, "step": 63, "what": what}], JOB_EVERY="10", JOB_STEP_S="0.03")
    assert job.run(steps=100) == 0, job.said
    (one,) = job.incidents
    assert (one.kind, one.action) == ("numerical", "roll back") and one.settings["RELIGHT_BEFORE"] == "63", job.said
    second = [step for step, _, life in job.losses if life == 1]
    assert (
        second == [*range(second[0], 63), *range(64, 100)] and second[0] > 0 and all(abs(loss) < 10 for _, loss, life in job.losses if life)
    )
    said = subprocess.run(
        [sys.executable, "-m", "relight", "log", str(tmp_path / "store" / "run")], capture_output=True, text=True, check=True
    )
    assert "rolled back: before=63 skip=63-63" in said.stdout


@pytest.mark.parametrize("saves", [pytest.param("1", marks=pytest.mark.slow), "1000000"])
def test_asked_to_end_it_says_whether_the_last_step_is_stored(tmp_path: Path, straight: str, saves: str) -> None:
    """SIGTERM to the supervisor: the ranks save and end; started again, it ends where it would have."""
    job = Job(tmp_path, JOB_STEP_S="0.1", JOB_EVERY=saves)
    process = job.start()
    while not (tmp_path / "out").exists() or len(job.losses) < 8:
        time.sleep(0.05)
        assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    said = process.communicate(timeout=60)[0]
    assert process.returncode == 75, said
    assert [(one.kind, one.action) for one in job.incidents] == [("preemption", "end")]
    assert job.run() == 0, job.said
    assert job.end == straight
    lives = [step for step, _, _ in job.losses]
    assert lives == list(range(STEPS)), "no step was done twice"


def test_if_the_supervisor_is_killed_the_ranks_save_and_end(tmp_path: Path, straight: str) -> None:
    """Nobody is left to watch over them; whoever starts the job again goes on where they ended."""
    job = Job(tmp_path, JOB_STEP_S="0.1", JOB_EVERY="1000000")
    process = job.start()
    while not (tmp_path / "out").exists() or len(job.losses) < 8:
        time.sleep(0.05)
        assert process.poll() is None
    process.kill()
    process.communicate(timeout=60)
    ends = time.monotonic() + 30
    while subprocess.run(["pgrep", "-f", str(tmp_path / "plan.json")], capture_output=True, check=False).stdout and time.monotonic() < ends:
        time.sleep(0.1)
    assert job.run() == 0, job.said
    assert job.end == straight
    assert [step for step, _, _ in job.losses] == list(range(STEPS))


def test_two_nodes_meet_again(tmp_path: Path, straight: str) -> None:
    """A supervisor on each; a rank of one of them is killed, and both start anew."""
    port = free_port()
    write_key_file(str(tmp_path / "secret"))
    job = Job(tmp_path, [{"rank": 1, "step": 17, "what": "kill"}], RELIGHT_JOB_SECRET=f"file:{tmp_path}/secret")
    flags = ("--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "j")
    both = [job.start(*flags, "--local-addr", "127.0.0.1") for _ in range(2)]
    said = [one.communicate(timeout=240)[0] for one in both]
    assert [one.returncode for one in both] == [0, 0], said
    assert job.end == straight
    folder = tmp_path / "store" / "run" / DIRECTORY
    kept = newest_accounts(path.name for path in folder.iterdir()).values()
    accounts = [msgspec.json.decode((folder / name).read_bytes(), type=Account) for name in kept]
    assert [(one.failures, one.steps) for one in accounts] == [({"killed": 1}, STEPS)] * 2, "each node knows what it was"


@pytest.mark.slow
def test_two_nodes_at_a_fixed_port_need_one_life_more_for_one_failure(tmp_path: Path, straight: str) -> None:
    """With ``--master-port`` no rank connects to an address of a dead life: one killed rank costs one restart of each node."""
    flags = ("--nnodes", "2", "--nproc-per-node", "1", "--master-addr", "127.0.0.1", "--master-port", str(free_port()))
    job = Job(tmp_path, [{"rank": 1, "step": 17, "what": "kill"}], RELIGHT_JOB_SECRET="none")
    both = [job.start(*flags, "--node-rank", str(rank)) for rank in range(2)]
    said = [one.communicate(timeout=240)[0] for one in both]
    assert [one.returncode for one in both] == [0, 0], said
    assert job.end == straight and max(life for _, _, life in job.losses) == 1, said
    assert all("Connection refused" not in one for one in said), said


@pytest.mark.slow
@pytest.mark.parametrize("nodes", ["1:2", "2"])
def test_a_node_that_is_asked_to_go_leaves_the_others_at_work(tmp_path: Path, nodes: str) -> None:
    """SIGTERM to one ``relight run`` of two: it saves and leaves (75). The other continues from that step, or ends with 75 if it is too few."""
    flags = ("--nnodes", nodes, "--nproc-per-node", "1", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}",
             "--rdzv-id", "j", "--rdzv-conf", "last_call_timeout=3", "--local-addr", "127.0.0.1")  # fmt: skip
    job = Job(tmp_path, JOB_STEP_S="0.1", JOB_EVERY="1000", RELIGHT_JOB_SECRET="none")
    stays, goes = (job.start(*flags, steps=60) for _ in range(2))
    while not (tmp_path / "out").exists() or len(job.losses) < 6:
        time.sleep(0.1)
        assert stays.poll() is None
    goes.terminate()
    said = [one.communicate(timeout=240)[0] for one in (goes, stays)]
    assert goes.returncode == 75 and "the last step is stored" in said[0], said
    assert stays.returncode == (0 if nodes == "1:2" else 75), said
    if nodes == "1:2":
        steps = [step for step, _, _ in job.losses]
        assert steps == list(range(60)) and "1 node continues" in said[1], said  # no step is lost, and none is done twice


@pytest.mark.slow
def test_two_nodes_go_back_together(tmp_path: Path) -> None:
    """The loss of a rank of one of them is no number; the other's only lost a rank, and goes back as well."""
    port = free_port()
    job = Job(tmp_path, [{"rank": 1, "step": 23, "what": "poison"}], JOB_OWN_LOSS="1", JOB_STEP_S="0.03", RELIGHT_JOB_SECRET="none")
    flags = ("--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "j")
    both = [job.start(*flags, "--local-addr", "127.0.0.1") for _ in range(2)]
    said = [one.communicate(timeout=240)[0] for one in both]
    assert [one.returncode for one in both] == [0, 0], said
    second = [step for step, _, life in job.losses if life == 1]
    assert second == [*range(second[0], 23), *range(24, STEPS)], said


def test_of_two_supervisors_one_acts(tmp_path: Path) -> None:
    """The second start is refused while the first one trains. With ``takeover="take"`` the first one's ranks are fenced at their next
    save, and it stops and reports it."""
    job = Job(tmp_path, JOB_STEP_S="0.2", JOB_EVERY="2")
    first = job.start(steps=4000)
    while not (tmp_path / "out").exists() or len(job.losses) < 6:
        time.sleep(0.05)
        assert first.poll() is None
    refused = Job(tmp_path)
    assert refused.run(steps=300) != 0 and "still trains this run" in refused.said, refused.said
    assert first.poll() is None
    second = Job(tmp_path, RELIGHT_CHECKPOINT__TAKEOVER="take")
    assert second.run(steps=300) == 0, second.said
    said = first.communicate(timeout=60)[0]
    assert first.returncode == 1 and "another attempt has taken this run over" in said, said


@pytest.mark.slow
def test_a_spare_takes_a_ranks_place(tmp_path: Path, straight: str) -> None:
    """It has its imports behind it, its own environment and its output in the same files; no spare is left behind."""
    (tmp_path / "relight.toml").write_text('[supervise]\nspares = true\npreload = ["fractions", "no_such_module_"]\n')
    job = Job(tmp_path, [{"rank": 1, "step": 25, "what": "kill"}], JOB_STEP_S="0.3")
    assert job.run() == 0, job.said
    assert job.end == straight
    (one,) = job.incidents
    assert one.after is not None and one.after.seconds["all"] < 10
    assert "a spare could not import no_such_module_" in job.said
    assert not spares_in(tmp_path)


@pytest.mark.slow
def test_a_spare_runs_the_script_ahead(tmp_path: Path, straight: str) -> None:
    """Up to standby(), without a rank, and no further; what it said there is in the output of the rank that it became."""
    job = Job(tmp_path, [{"rank": 1, "step": 25, "what": "kill"}], JOB_STEP_S="0.4", JOB_STANDBY="yes")
    assert job.run() == 0, job.said
    assert job.end == straight
    (one,) = job.incidents
    assert one.after is not None and one.after.seconds["began"] < 2
    assert job.said.count("built as a rank") == 2 and job.said.count("built ahead") == 2, job.said
    assert not spares_in(tmp_path)


@pytest.mark.slow
def test_a_script_that_cannot_be_run_ahead_goes_on_all_the_same(tmp_path: Path, straight: str) -> None:
    """It asks for its rank too early: said once, with the script's own words; the ranks are started as ever."""
    job = Job(tmp_path, [{"rank": 1, "step": 25, "what": "kill"}], JOB_STEP_S="0.4", JOB_STANDBY="unfit")
    assert job.run() == 0, job.said
    assert job.end == straight
    assert job.said.count("a spare ended before relight.standby(): KeyError: 'RANK'") == 1, job.said
    assert job.said.count("built as a rank") == 4 and not spares_in(tmp_path), job.said


@pytest.mark.parametrize(
    "wrong", ["[supervise]\nspare = true", "[supervise]\nfailures = 0", "supervise = 3", "[supervise", "[supervise]\npreload = [3]"]
)
def test_settings_are_checked(tmp_path: Path, wrong: str) -> None:
    """Before anything is started."""
    (tmp_path / "relight.toml").write_text(wrong)
    job = Job(tmp_path)
    assert job.run() == 2 and "incarnation 1" not in job.said and "relight.toml" in job.said or "supervise" in job.said, job.said


def test_a_usage_error_is_one(tmp_path: Path) -> None:
    """Exit code 2, as of every command; torchrun's flags are known, others are not."""
    for arguments in (["--no-such-flag", "2", "x.py"], [], ["--settings", "none.toml", "x.py"]):
        done = subprocess.run(
            [sys.executable, "-m", "relight", "run", *arguments], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert done.returncode == 2, done.stderr
        assert "Traceback" not in done.stderr
