"""The sbatch templates with real bash and real signals.

Slurm's commands are stand-ins here, and the real ones in ``make slurm``.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.deploy.slurm_lab import missing, slurm

TEMPLATES = Path(__file__).parents[2] / "deploy" / "slurm"

SRUN = """
import signal, subprocess, sys, os
# Stand-in for srun: it starts the step, writes its pid for scancel, and ends with the step's exit code.
open(os.environ["LAB"] + "/srun.pid", "w").write(str(os.getpid()))
rest = [word for word in sys.argv[1:]]
while rest and rest[0].startswith("--"):
    rest.pop(0)
child = subprocess.Popen(rest)
signal.signal(signal.SIGTERM, lambda *_: child.terminate())
sys.exit(child.wait())
"""
RELIGHT = """
import os, signal, sys, time
# Stand-in for relight run: at SIGTERM it stores the last step and exits with 75.
lab = os.environ["LAB"]
open(lab + "/relight", "a").write(" ".join(sys.argv[1:]) + " grace=" + os.environ["RELIGHT_GRACE_S"] + "\\n")
def end(*_):
    open(lab + "/terms", "a").write("TERM\\n")
    time.sleep(0.3)
    sys.exit(int(os.environ.get("CODE", "75")))
signal.signal(signal.SIGTERM, end)
open(lab + "/up", "w").close()
time.sleep(float(os.environ.get("LASTS", "30")))
sys.exit(int(os.environ.get("LAST", "0")))
"""
SCANCEL = """
import os, signal, sys
# Stand-in for scancel: it sends the named signal to the step, and records the call.
lab = os.environ["LAB"]
open(lab + "/scancel", "a").write(" ".join(sys.argv[1:]) + "\\n")
named = [word.partition("=")[2] for word in sys.argv[1:] if word.startswith("--signal=")]
if named:
    os.kill(int(open(lab + "/srun.pid").read()), getattr(signal, "SIG" + named[0]))
"""
SCONTROL = """
import os, sys
# Stand-in for scontrol: it prints host names, and records requeue.
if sys.argv[1:3] == ["show", "hostnames"]:
    print("node1\\nnode2")
else:
    open(os.environ["LAB"] + "/scontrol", "a").write(" ".join(sys.argv[1:]) + "\\n")
"""


class Job:
    """A template, run as Slurm runs it."""

    def __init__(self, lab: Path, template: str, **env: str) -> None:
        self.lab, programs = lab, lab / "bin"
        programs.mkdir()
        for name, text in (("srun", SRUN), ("relight", RELIGHT), ("scancel", SCANCEL), ("scontrol", SCONTROL)):
            (programs / name).write_text(f"#!{sys.executable} -S\n{text.strip()}\n")
            (programs / name).chmod(0o755)
        given = {
            "PATH": f"{programs}:/usr/bin:/bin", "LAB": str(lab), "SLURM_JOB_ID": "41", "SLURM_JOB_NODELIST": "node[1-2]", "SLURM_NNODES": "2",
            "SLURM_ARRAY_TASK_ID": "1", "SLURM_ARRAY_JOB_ID": "40", "NPROC": "1",
        }  # fmt: skip
        self.process = subprocess.Popen(
            ["bash", str(TEMPLATES / template), "train.py", "--lr", "1"],
            env=given | env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def up(self) -> Job:
        """Wait until the step runs."""
        ends = time.monotonic() + 20
        while not (self.lab / "up").exists():
            assert time.monotonic() < ends, "the step was not started"
            time.sleep(0.02)
        return self

    def send(self, number: int) -> Job:
        """Send a signal to the batch script alone, as ``--signal=B:`` does."""
        os.kill(self.process.pid, number)
        return self

    def end(self) -> tuple[int, str]:
        """Return the exit code and the output."""
        output, _ = self.process.communicate(timeout=25)
        return self.process.returncode, output

    def recorded(self, name: str) -> str:
        """Return the calls that a stand-in recorded; empty if none."""
        path = self.lab / name
        return path.read_text() if path.exists() else ""


def test_before_the_time_is_up_the_ranks_save_and_the_job_queues_itself_again(tmp_path: Path) -> None:
    """After SIGUSR1 the script sends SIGTERM to the step, waits for its exit code, and requeues the job."""
    job = Job(tmp_path, "train.sbatch").up().send(signal.SIGUSR1)
    code, output = job.end()
    assert code == 0, output
    assert job.recorded("scancel") == "--signal=TERM 41\n"
    assert job.recorded("terms") == "TERM\n"
    assert job.recorded("scontrol") == "requeue 41\n"
    assert "the last step is stored" in output
    command = job.recorded("relight")
    assert "--nnodes 2 --nproc-per-node 1" in command
    assert "--rdzv-endpoint node1:29400 --rdzv-id 41.0 train.py --lr 1 grace=110" in command


def test_two_signals_ask_once(tmp_path: Path) -> None:
    """If Slurm's SIGTERM follows SIGUSR1 while the ranks save, the step gets one SIGTERM and the job is requeued."""
    job = Job(tmp_path, "train.sbatch").up().send(signal.SIGUSR1)
    time.sleep(0.1)
    code, output = job.send(signal.SIGTERM).end()
    assert (code, job.recorded("terms"), job.recorded("scontrol")) == (0, "TERM\n", "requeue 41\n"), output


def test_a_cancelled_job_is_not_requeued(tmp_path: Path) -> None:
    """After SIGTERM (scancel, preemption) the step saves.

    Slurm decides about a requeue, and the exit code states what was stored.
    """
    code, output = (job := Job(tmp_path, "train.sbatch", CODE="76").up().send(signal.SIGTERM)).end()
    assert (code, job.recorded("terms"), job.recorded("scontrol")) == (76, "TERM\n", ""), output
    assert "the checkpoint before it stands" in output


@pytest.mark.parametrize("last", ["0", "1", "77"])
def test_a_job_that_ends_by_itself_keeps_its_code(tmp_path: Path, last: str) -> None:
    """A job that finishes or fails without a signal keeps its exit code. A requeue would repeat the failure."""
    code, output = (job := Job(tmp_path, "train.sbatch", LASTS="0.1", LAST=last)).end()
    assert (code, job.recorded("scontrol"), job.recorded("scancel")) == (int(last), "", ""), output


def test_a_job_that_finishes_during_the_request_is_not_requeued(tmp_path: Path) -> None:
    """Exit code 0 after SIGUSR1 is the end of the run."""
    code, output = (job := Job(tmp_path, "train.sbatch", CODE="0").up().send(signal.SIGUSR1)).end()
    assert (code, job.recorded("scontrol")) == (0, ""), output


def test_lives_are_counted(tmp_path: Path) -> None:
    """After LIVES restarts the job is not requeued and keeps the exit code."""
    code, output = (
        job := Job(tmp_path, "train.sbatch", LIVES="3", SLURM_RESTART_COUNT="3").up().send(signal.SIGUSR1)
    ).end()
    assert (code, job.recorded("scontrol")) == (75, ""), output
    assert "which is the most that LIVES allows" in output


def test_a_piece_that_is_stored_makes_way_for_the_next(tmp_path: Path) -> None:
    """After SIGUSR1 the piece saves and exits with 0, so that the array continues."""
    code, output = (job := Job(tmp_path, "pieces.sbatch").up().send(signal.SIGUSR1)).end()
    assert (code, job.recorded("terms"), job.recorded("scancel")) == (0, "TERM\n", "--signal=TERM 41\n"), output


@pytest.mark.parametrize(("last", "takes_out"), [("0", True), ("1", True), ("77", False)])
def test_a_piece_that_finishes_or_fails_takes_the_others_out(tmp_path: Path, last: str, takes_out: bool) -> None:
    """Pending pieces are cancelled if the run is finished or would fail again.

    Exit code 77 keeps them: another machine may succeed.
    """
    code, output = (job := Job(tmp_path, "pieces.sbatch", LASTS="0.1", LAST=last)).end()
    assert (code, job.recorded("scancel")) == (int(last), "--state=PENDING 40\n" if takes_out else ""), output


@pytest.mark.parametrize("template", sorted(TEMPLATES.glob("*.sbatch")), ids=lambda path: path.name)
def test_there_is_time_for_what_is_promised(template: Path) -> None:
    """The ranks' grace period is shorter than the time of ``--signal``, which signals only the batch script."""
    text = template.read_text()
    given = re.search(r"^#SBATCH --signal=B:USR1@(\d+)$", text, re.MULTILINE)
    grace = re.search(r"GRACE_S:=(\d+)", text)
    assert given and grace and 0 < int(grace[1]) < int(given[1])


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_real_slurm_signals_and_queues_again(tmp_path: Path) -> None:
    """Slurm sends the signal before its time limit. A real run saves, is requeued and resumes; scancel then ends it."""
    if why := missing():
        pytest.skip(why)
    script = tmp_path / "train.py"
    script.write_text(
        "import time, torch, relight\n"
        "model = torch.nn.Linear(4, 4)\n"
        f"ckpt = relight.Checkpointer({str(tmp_path / 'run')!r}, model=model, save=relight.every(steps=1_000_000))\n"
        "start = ckpt.restore()\n"
        "print('begins at step', start, flush=True)\n"
        "for step in range(start, 10_000_000):\n"
        "    time.sleep(0.05)\n"
        "    ckpt.step(step)\n"
    )
    log = tmp_path / "job.log"
    with slurm(tmp_path) as lab:
        env = {"NPROC": "1", "GRACE_S": "20", "PATH": f"{Path(sys.executable).parent}:{lab.env['PATH']}"}
        job = lab.ask(
            "sbatch",
            "--parsable",
            "--nodes=1",
            "--time=2",
            "--signal=B:USR1@60",
            f"--output={log}",
            str(TEMPLATES / "train.sbatch"),
            str(script),
            **env,
        )
        lab.until(job, "RUNNING")
        lab.until(job, "PENDING", within_s=240)  # it was signalled, saved and queued again
        first = log.read_text()
        assert "the time limit is near" in first and "the last step is stored" in first, first
        lab.until(job, "RUNNING", within_s=180)
        ends = time.monotonic() + 60
        while len(begun := re.findall(r"begins at step (\d+)", log.read_text())) < 2:
            assert time.monotonic() < ends, log.read_text()
            time.sleep(0.5)
        assert int(begun[0]) == 0 < int(begun[1])
        assert lab.field(job, "Restarts") == "1"
        lab.ask("scancel", job)
        assert lab.until(job, "CANCELLED", "COMPLETED", "FAILED", within_s=60) == "CANCELLED"
