"""A real Slurm on this machine alone: munged, slurmctld and slurmd as children, all their files in one directory."""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

NEEDED = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol", "scancel", "squeue")


def missing() -> str:
    """Return what this machine lacks, in words; empty if nothing."""
    path = os.environ["PATH"] + ":/usr/sbin"
    lacking = [name for name in NEEDED if shutil.which(name, path=path) is None]
    if lacking:
        return f"{', '.join(lacking)} not found (Debian: slurmctld slurmd slurm-client munge)"
    return "" if os.geteuid() == 0 else "slurmd wants root"


class Slurm:
    """A running controller and node."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.env = {**os.environ, "SLURM_CONF": str(home / "slurm.conf")}

    def ask(self, *command: str, **more: str) -> str:
        """Return the output of a Slurm command."""
        done = subprocess.run(command, env=self.env | more, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout.strip()

    def state(self, job: str) -> str:
        """RUNNING, PENDING, COMPLETED …"""
        return self.field(job, "JobState")

    def field(self, job: str, name: str) -> str:
        """Return one field of Slurm's description of a job."""
        words = dict(word.split("=", 1) for word in self.ask("scontrol", "show", "job", job).split() if "=" in word)
        return words[name]

    def until(self, job: str, *states: str, within_s: float = 60) -> str:
        """Wait until the job is in one of these states."""
        ends = time.monotonic() + within_s
        while (now := self.state(job)) not in states:
            assert time.monotonic() < ends, f"job {job} is {now} after {within_s} s, not {states}"
            time.sleep(0.3)
        return now


@contextmanager
def slurm(home: Path) -> Iterator[Slurm]:
    """Start it, and end it: every process that is started here is ended here."""
    host, ports = socket.gethostname(), _free_ports(2)
    (home / "key").write_bytes(secrets.token_bytes(64))
    (home / "key").chmod(0o400)
    for name in ("state", "spool", "run"):
        (home / name).mkdir(mode=0o755)
    (home / "slurm.conf").write_text(f"""
ClusterName=lab
SlurmctldHost={host}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={home}/run/munge
CryptoType=crypto/munge
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
StateSaveLocation={home}/state
SlurmdSpoolDir={home}/spool
SlurmctldPidFile={home}/run/ctld.pid
SlurmdPidFile={home}/run/d.pid
SlurmctldLogFile={home}/ctld.log
SlurmdLogFile={home}/d.log
ProctrackType=proctrack/pgid
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
KillWait=10
MinJobAge=600
MpiDefault=none
SchedulerParameters=requeue_delay=1
NodeName={host} CPUs={os.cpu_count()} State=UNKNOWN
PartitionName=all Nodes={host} Default=YES MaxTime=INFINITE State=UP
""")
    daemons = [
        ["munged", "--foreground", "--force", f"--key-file={home}/key", f"--socket={home}/run/munge", f"--pid-file={home}/run/munge.pid",
         f"--log-file={home}/munge.log", f"--seed-file={home}/seed"],
        ["slurmctld", "-D", "-i"],
        ["slurmd", "-D"],
    ]  # fmt: skip
    lab, running = Slurm(home), []
    lab.env["PATH"] += ":/usr/sbin"
    try:
        for command in daemons:
            with (home / f"{command[0]}.out").open("wb") as out:
                where = shutil.which(command[0], path=lab.env["PATH"])
                running.append(
                    subprocess.Popen(
                        [str(where), *command[1:]], env=lab.env, stdout=out, stderr=out, start_new_session=True
                    )
                )
            time.sleep(1)
        ends = time.monotonic() + 60
        while (
            "idle"
            not in subprocess.run(
                ["sinfo", "-h", "-o", "%T"], env=lab.env, capture_output=True, text=True, check=False
            ).stdout
        ):
            output = "".join(
                (home / name).read_text(errors="replace")[-1500:]
                for name in ("ctld.log", "d.log", "munged.out")
                if (home / name).exists()
            )
            assert time.monotonic() < ends, f"Slurm does not come up:\n{output}"
            time.sleep(0.5)
        yield lab
    finally:
        for process in reversed(running):
            process.terminate()
        for process in reversed(running):
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _free_ports(count: int) -> list[int]:
    listening = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [listener.getsockname()[1] for listener in listening]
    for listener in listening:
        listener.close()
    return ports
