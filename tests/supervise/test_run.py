"""``relight run`` with real processes: kills, hangs, errors, NaN losses.

Training ends with the same weights as without failures.
"""

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

from relight.comm.ports import free_port
from relight.keys.files import write_key_file
from relight.run_records.incident_sync import DIRECTORY, newest_accounts
from relight.store import open_bytes
from relight.supervise.goodput import Account
from relight.supervise.incidents import Incident, incidents_in, read_incidents
from relight.units import parse_duration

JOB = Path(__file__).with_name("job.py")
STEPS = 40


class Job:
    """A job in its own directory."""

    def __init__(self, path: Path, plan: list[dict[str, Any]] | None = None, **settings: str) -> None:
        self.path = path
        path.mkdir(parents=True, exist_ok=True)
        self.plan = path / "plan.json"
        self.plan.write_text(json.dumps(plan or []))
        self.environment = {**os.environ, **settings}
        self.output = ""

    def start(self, *flags: str, steps: int = STEPS) -> subprocess.Popen[str]:
        """Start ``relight run`` with the job."""
        command = [sys.executable, "-m", "relight", "run", *(flags or ("--nproc-per-node", "2")), str(JOB)]
        return subprocess.Popen(
            [*command, str(self.path / "store"), str(steps), str(self.plan), str(self.path / "out")],
            cwd=self.path,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, *flags: str, steps: int = STEPS, timeout_s: float = 240) -> int:
        """Run the job to its end and return the exit code."""
        process = self.start(*flags, steps=steps)
        try:
            self.output = process.communicate(timeout=timeout_s)[0]
        except subprocess.TimeoutExpired:
            process.kill()
            raise AssertionError(process.communicate()[0]) from None
        return process.returncode

    @property
    def end(self) -> str:
        """Return the hash of the weights."""
        return (self.path / "out.end").read_text()

    @property
    def losses(self) -> list[tuple[int, float, int]]:
        """Return step, loss and incarnation of every row, in the order in which they were written."""
        rows = [line.split() for line in (self.path / "out").read_text().splitlines()]
        return [(int(step), float(loss), int(life)) for step, loss, life in rows]

    @property
    def incidents(self) -> list[Incident]:
        """Return the incidents of the run."""
        return read_incidents(open_bytes(self.path / "store"), "run")


def spares_in(folder: Path) -> list[psutil.Process]:
    """Return the spare processes with a working directory in ``folder``."""
    spares = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if "relight.supervise.spare" in process.cmdline() and Path(process.cwd()).is_relative_to(folder):
                spares.append(process)
    return spares


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the hash of the weights of a run without failures."""
    job = Job(tmp_path_factory.mktemp("straight"))
    assert job.run() == 0, job.output
    assert not job.incidents and [step for step, _, _ in job.losses] == list(range(STEPS))
    return job.end


def test_whatever_ends_a_rank_training_continues(tmp_path: Path, straight: str) -> None:
    """A run with five failures, each of another kind, ends with the weights of a run without failures."""
    kinds = {"kill": "killed", "segv": "crash", "value": "user", "full": "storage", "exit": "unknown"}
    plan = [{"rank": n % 2, "step": 7 * n + 6, "what": what} for n, what in enumerate(kinds)]
    job = Job(tmp_path, plan)
    assert job.run() == 0, job.output
    assert job.end == straight, job.output
    incidents = job.incidents
    assert [(incident.kind, incident.action) for incident in incidents] == [
        (kind, "resume") for kind in kinds.values()
    ], job.output
    for incident, planned in zip(incidents, plan, strict=True):
        assert incident.rank == planned["rank"] and incident.step == planned["step"] - 1
        assert incident.after is not None and incident.after.restored >= min(
            worker["durable"] for worker in incident.workers
        )
        assert incident.after.seconds["noticed"] + incident.after.seconds["decided"] < 2


def test_a_hang_is_found_and_has_every_rank_s_stack(tmp_path: Path, straight: str) -> None:
    """One rank waits for ever, and one is stopped by a signal.

    The stacks of the other ranks show what they waited for.
    """
    plan = [{"rank": 1, "step": 12, "what": "lock"}, {"rank": 0, "step": 25, "what": "stop"}]
    job = Job(tmp_path, plan)
    assert job.run() == 0, job.output
    assert job.end == straight
    first, second = job.incidents
    assert (first.kind, first.action, second.kind) == ("hang", "resume", "hang"), job.output
    assert "fail" in first.stacks["1"] and "all_reduce" in first.stacks["0"], first.stacks
    assert "stopped by a signal" in second.why and second.rank == 0 or "rank 0" in second.why
    assert max(incident.after.seconds["all"] for incident in job.incidents if incident.after) < 60
    for incident in (first, second):
        # three usual steps of some milliseconds, and five seconds; 8 allows for a busy machine
        stuck = re.search(r"for ([0-9.]+ m?s)", incident.why)
        assert stuck is not None and (parse_duration(stuck[1]) or 8) < 8, incident.why
    for arguments, words in (
        ((), ("hang", "resume")),
        (("latest",), ("clues, the strongest first:", "stacks of rank 1:")),
        ((first.id[-6:],), ("clues, the strongest first:", first.why[:30])),
        ((second.id[-6:],), ("clues, the strongest first:", "stopped by a signal")),
    ):
        command = [sys.executable, "-m", "relight", "incidents", str(tmp_path / "store" / "run"), *arguments]
        shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        assert all(word in shown for word in words), shown
    incidents = json.loads(subprocess.run([*command, "--json"], capture_output=True, text=True, check=True).stdout)
    assert incidents[0]["id"] == second.id and incidents[0]["after"]["steps_lost"] >= 0


def test_a_job_continues_without_its_terminal(tmp_path: Path, straight: str) -> None:
    """Nothing can be written to the stderr of ``relight run``: its disk is full. A rank is killed, and training continues to the end."""
    (tmp_path / "tmp").mkdir()
    job = Job(tmp_path, [{"rank": 1, "step": 6, "what": "kill"}], TMPDIR=str(tmp_path / "tmp"))
    command = [sys.executable, "-m", "relight", "run", "--nproc-per-node", "2", str(JOB), str(tmp_path / "store")]
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [*command, str(STEPS), str(job.plan), str(tmp_path / "out")],
            cwd=tmp_path, env=job.environment, stdout=subprocess.PIPE, stderr=full, timeout=240, check=False,
        )  # fmt: skip
    assert (done.returncode, job.end) == (0, straight)
    assert not list((tmp_path / "tmp").glob("torchelastic_*")), "copies of the ranks' stderr"
    assert [incident.action for incident in job.incidents] == ["resume"]


@pytest.mark.slow
def test_slow_is_not_stuck(tmp_path: Path, straight: str) -> None:
    """Neither one step of eight seconds nor an evaluation that is declared as a phase is a hang."""
    job = Job(tmp_path, [{"rank": 0, "step": 15, "what": "evaluate"}])
    assert job.run() == 0, job.output
    assert job.end == straight and not job.incidents, job.output


def test_an_error_that_would_only_repeat_stops_at_once(tmp_path: Path) -> None:
    """A TypeError before any step is not retried. The reason is printed and recorded, also without a store."""
    job = Job(tmp_path, [{"rank": 0, "step": 0, "what": "type"}])
    assert job.run() == 1
    assert "TypeError" in job.output and "would only repeat" in job.output and "incarnation 2" not in job.output, (
        job.output
    )
    incidents = job.incidents or incidents_in(tmp_path / "relight-incidents")
    assert [(incident.kind, incident.action) for incident in incidents] == [("user", "stop")]


@pytest.mark.slow
def test_the_same_again_stops(tmp_path: Path) -> None:
    """The third failure at the same step stops the job."""
    job = Job(tmp_path, [{"rank": 0, "step": 8, "what": "exit"}] * 3)
    assert job.run() == 1, job.output
    assert [incident.action for incident in job.incidents] == ["resume", "resume", "stop"]
    assert "3 times at step 7" in job.output


@pytest.mark.parametrize("what", ["poison", pytest.param("jump", marks=pytest.mark.slow)])
def test_a_loss_that_went_wrong_is_rolled_back(tmp_path: Path, what: str) -> None:
    """After a NaN loss or a jump of the weights the run is rolled back and skips the samples.

    The log has the record.
    """
    job = Job(tmp_path, [{"rank": 0, "step": 63, "what": what}], JOB_EVERY="10", JOB_STEP_S="0.03")
    assert job.run(steps=100) == 0, job.output
    (incident,) = job.incidents
    assert (incident.kind, incident.action) == ("numerical", "roll back") and incident.settings[
        "RELIGHT_BEFORE"
    ] == "63", job.output
    second = [step for step, _, life in job.losses if life == 1]
    assert (
        second == [*range(second[0], 63), *range(64, 100)]
        and second[0] > 0
        and all(abs(loss) < 10 for _, loss, life in job.losses if life)
    )
    shown = subprocess.run(
        [sys.executable, "-m", "relight", "log", str(tmp_path / "store" / "run")],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "rolled back: before=63 skip=63-63" in shown.stdout


@pytest.mark.parametrize("saves", [pytest.param("1", marks=pytest.mark.slow), "1000000"])
def test_asked_to_end_it_reports_whether_the_last_step_is_stored(tmp_path: Path, straight: str, saves: str) -> None:
    """After SIGTERM to the supervisor the ranks save and end.

    A second start completes the run with the same weights.
    """
    job = Job(tmp_path, JOB_STEP_S="0.1", JOB_EVERY=saves)
    process = job.start()
    while not (tmp_path / "out").exists() or len(job.losses) < 8:
        time.sleep(0.05)
        assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    output = process.communicate(timeout=60)[0]
    assert process.returncode == 75, output
    assert [(incident.kind, incident.action) for incident in job.incidents] == [("preemption", "end")]
    assert job.run() == 0, job.output
    assert job.end == straight
    lives = [step for step, _, _ in job.losses]
    assert lives == list(range(STEPS)), "no step was done twice"


def test_if_the_supervisor_is_killed_the_ranks_save_and_end(tmp_path: Path, straight: str) -> None:
    """Without a supervisor the ranks end after a save. The next start resumes from it."""
    job = Job(tmp_path, JOB_STEP_S="0.1", JOB_EVERY="1000000")
    process = job.start()
    while not (tmp_path / "out").exists() or len(job.losses) < 8:
        time.sleep(0.05)
        assert process.poll() is None
    process.kill()
    process.communicate(timeout=60)
    ends = time.monotonic() + 30
    while (
        subprocess.run(["pgrep", "-f", str(tmp_path / "plan.json")], capture_output=True, check=False).stdout
        and time.monotonic() < ends
    ):
        time.sleep(0.1)
    assert job.run() == 0, job.output
    assert job.end == straight
    assert [step for step, _, _ in job.losses] == list(range(STEPS))


def test_two_nodes_meet_again(tmp_path: Path, straight: str) -> None:
    """Two nodes have a supervisor each. If a rank of one node is killed, both restart their ranks."""
    port = free_port()
    write_key_file(str(tmp_path / "secret"))
    job = Job(tmp_path, [{"rank": 1, "step": 17, "what": "kill"}], RELIGHT_JOB_SECRET=f"file:{tmp_path}/secret")
    flags = (
        "--nnodes",
        "2",
        "--nproc-per-node",
        "1",
        "--rdzv-backend",
        "c10d",
        "--rdzv-endpoint",
        f"127.0.0.1:{port}",
        "--rdzv-id",
        "j",
    )
    both = [job.start(*flags, "--local-addr", "127.0.0.1") for _ in range(2)]
    outputs = [process.communicate(timeout=240)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0], outputs
    assert job.end == straight
    folder = tmp_path / "store" / "run" / DIRECTORY
    kept = newest_accounts(path.name for path in folder.iterdir()).values()
    accounts = [msgspec.json.decode((folder / name).read_bytes(), type=Account) for name in kept]
    assert [(account.failures, account.steps) for account in accounts] == [({"killed": 1}, STEPS)] * 2, (
        "each node knows the cause"
    )


@pytest.mark.slow
def test_two_nodes_at_a_fixed_port_need_one_restart_for_one_failure(tmp_path: Path, straight: str) -> None:
    """With ``--master-port`` no rank connects to an address of an ended incarnation: one killed rank costs one restart
    of each node."""
    flags = ("--nnodes", "2", "--nproc-per-node", "1", "--master-addr", "127.0.0.1", "--master-port", str(free_port()))
    job = Job(tmp_path, [{"rank": 1, "step": 17, "what": "kill"}], RELIGHT_JOB_SECRET="none")
    both = [job.start(*flags, "--node-rank", str(rank)) for rank in range(2)]
    outputs = [process.communicate(timeout=240)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0], outputs
    assert job.end == straight and max(life for _, _, life in job.losses) == 1, outputs
    assert all("Connection refused" not in output for output in outputs), outputs


@pytest.mark.slow
@pytest.mark.parametrize("nodes", ["1:2", "2"])
def test_a_node_that_is_asked_to_go_leaves_the_others_at_work(tmp_path: Path, nodes: str) -> None:
    """After SIGTERM one ``relight run`` of two saves and leaves (exit code 75).

    The other continues from that step, or ends with 75 if the job needs both nodes.
    """
    flags = ("--nnodes", nodes, "--nproc-per-node", "1", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}",
             "--rdzv-id", "j", "--rdzv-conf", "last_call_timeout=3", "--local-addr", "127.0.0.1")  # fmt: skip
    job = Job(tmp_path, JOB_STEP_S="0.1", JOB_EVERY="1000", RELIGHT_JOB_SECRET="none")
    stays, goes = (job.start(*flags, steps=60) for _ in range(2))
    while not (tmp_path / "out").exists() or len(job.losses) < 6:
        time.sleep(0.1)
        assert stays.poll() is None
    goes.terminate()
    outputs = [process.communicate(timeout=240)[0] for process in (goes, stays)]
    assert goes.returncode == 75 and "the last step is stored" in outputs[0], outputs
    assert stays.returncode == (0 if nodes == "1:2" else 75), outputs
    if nodes == "1:2":
        steps = [step for step, _, _ in job.losses]
        # no step is lost, and none is done twice
        assert steps == list(range(60)) and "1 node continues" in outputs[1], outputs


@pytest.mark.slow
def test_two_nodes_go_back_together(tmp_path: Path) -> None:
    """A rank of one node has a NaN loss. The other node only lost a rank, and both roll back."""
    port = free_port()
    job = Job(
        tmp_path,
        [{"rank": 1, "step": 23, "what": "poison"}],
        JOB_OWN_LOSS="1",
        JOB_STEP_S="0.03",
        RELIGHT_JOB_SECRET="none",
    )
    flags = (
        "--nnodes",
        "2",
        "--nproc-per-node",
        "1",
        "--rdzv-backend",
        "c10d",
        "--rdzv-endpoint",
        f"127.0.0.1:{port}",
        "--rdzv-id",
        "j",
    )
    both = [job.start(*flags, "--local-addr", "127.0.0.1") for _ in range(2)]
    outputs = [process.communicate(timeout=240)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0], outputs
    second = [step for step, _, life in job.losses if life == 1]
    assert second == [*range(second[0], 23), *range(24, STEPS)], outputs


def test_of_two_supervisors_one_acts(tmp_path: Path) -> None:
    """The second start is refused while the first one trains. With ``takeover="take"`` the first one's ranks are fenced at their next
    save, and it stops and reports it."""
    job = Job(tmp_path, JOB_STEP_S="0.2", JOB_EVERY="2")
    first = job.start(steps=4000)
    while not (tmp_path / "out").exists() or len(job.losses) < 6:
        time.sleep(0.05)
        assert first.poll() is None
    refused = Job(tmp_path)
    assert refused.run(steps=300) != 0 and "still trains this run" in refused.output, refused.output
    assert re.search("stopped: rank [01]: relight.errors.LeaseHeld", refused.output), refused.output
    assert first.poll() is None
    second = Job(tmp_path, RELIGHT_CHECKPOINT__TAKEOVER="take")
    assert second.run(steps=300) == 0, second.output
    output = first.communicate(timeout=60)[0]
    assert first.returncode == 1 and "another attempt has taken this run over" in output, output


@pytest.mark.slow
def test_a_spare_takes_a_ranks_place(tmp_path: Path, straight: str) -> None:
    """A spare has finished its imports, gets the rank's environment and writes to the same output files.

    No spare outlives the job.
    """
    (tmp_path / "relight.toml").write_text('[supervise]\nspares = true\npreload = ["fractions", "no_such_module_"]\n')
    job = Job(tmp_path, [{"rank": 1, "step": 25, "what": "kill"}], JOB_STEP_S="0.3")
    assert job.run() == 0, job.output
    assert job.end == straight
    (incident,) = job.incidents
    assert incident.after is not None and incident.after.seconds["all"] < 10
    assert "a spare could not import no_such_module_" in job.output
    assert not spares_in(tmp_path)


@pytest.mark.slow
def test_a_spare_runs_the_script_ahead(tmp_path: Path, straight: str) -> None:
    """A spare runs the script up to standby(), without a rank.

    Its output until then is in the output of the rank that it replaces.
    """
    job = Job(tmp_path, [{"rank": 1, "step": 25, "what": "kill"}], JOB_STEP_S="0.4", JOB_STANDBY="yes")
    assert job.run() == 0, job.output
    assert job.end == straight
    (incident,) = job.incidents
    assert incident.after is not None and incident.after.seconds["began"] < 2
    assert job.output.count("built as a rank") == 2 and job.output.count("built ahead") == 2, job.output
    assert not spares_in(tmp_path)


@pytest.mark.slow
def test_a_script_that_cannot_be_run_ahead_continues_anyway(tmp_path: Path, straight: str) -> None:
    """A script that reads its rank before standby() is reported once, with its own error.

    The ranks are started without spares.
    """
    job = Job(tmp_path, [{"rank": 1, "step": 25, "what": "kill"}], JOB_STEP_S="0.4", JOB_STANDBY="unfit")
    assert job.run() == 0, job.output
    assert job.end == straight
    assert job.output.count("a spare ended before relight.standby(): KeyError: 'RANK'") == 1, job.output
    assert job.output.count("built as a rank") == 4 and not spares_in(tmp_path), job.output


@pytest.mark.parametrize(
    "wrong",
    [
        "[supervise]\nspare = true",
        "[supervise]\nfailures = 0",
        "supervise = 3",
        "[supervise",
        "[supervise]\npreload = [3]",
    ],
)
def test_settings_are_checked(tmp_path: Path, wrong: str) -> None:
    """A wrong setting is refused before any process is started."""
    (tmp_path / "relight.toml").write_text(wrong)
    job = Job(tmp_path)
    assert (
        job.run() == 2
        and "incarnation 1" not in job.output
        and "relight.toml" in job.output
        or "supervise" in job.output
    ), job.output


def test_a_usage_error_is_one(tmp_path: Path) -> None:
    """The exit code is 2, as of every command. Only torchrun's flags are known next to Relight's own."""
    for arguments in (["--no-such-flag", "2", "x.py"], [], ["--settings", "none.toml", "x.py"]):
        done = subprocess.run(
            [sys.executable, "-m", "relight", "run", *arguments],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 2, done.stderr
        assert "Traceback" not in done.stderr
