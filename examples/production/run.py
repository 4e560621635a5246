"""A production run and its trouble: ``python examples/production/run.py --seed 0 --out build/production``.

First the run to which nothing happens, then the same one with trouble that is planted from outside: a rank is killed. Each stage says what
it expects and ends everything if that is not what happened; at the end every step's loss must be, to the bit, that of the first run.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from cloud import Cloud, free_port  # noqa: E402

PATIENCE_S = 240.0
"""How long a stage waits for what should take seconds, on a machine that may be busy with others."""
NODES, EACH = 2, 2


class Unexpected(Exception):
    """What a stage expected is not what happened."""


def wait_until(true: Callable[[], Any], what: str) -> None:
    """Until it is so."""
    ends = time.monotonic() + PATIENCE_S
    while not true():
        if time.monotonic() > ends:
            raise Unexpected(f"not within {PATIENCE_S:.0f} s: {what}")
        time.sleep(0.1)


class Job:
    """One run on two nodes, which are two ``relight run`` with names of their own, in a directory."""

    def __init__(self, folder: Path, cloud: Cloud, steps: int, seed: int) -> None:
        self.folder, self.cloud, self.steps, self.seed = folder, cloud, steps, seed
        folder.mkdir(parents=True)
        self.name = folder.name
        self.hot, self.cold, self.log = folder / "hot" / self.name, f"{cloud.url}/{self.name}-store/{self.name}", folder / "losses.jsonl"
        self.processes: list[subprocess.Popen[bytes]] = []
        self.environment = {**os.environ, **cloud.environment, "OMP_NUM_THREADS": "1"}
        self.relight("keys", "new", str(folder / "first.key"))
        said = self.relight("keys", "new", "--signing", str(folder / "sign.key"))
        trust = next(line.split("RELIGHT_TRUST=")[1].strip() for line in said.splitlines() if "RELIGHT_TRUST=" in line)
        self.environment |= {
            "RELIGHT_KEY": f"file:{folder / 'first.key'}",
            "RELIGHT_SIGN": f"ed25519:file:{folder / 'sign.key'}",
            "RELIGHT_TRUST": trust,
        }

    def relight(self, *words: str, fine: tuple[int, ...] = (0,)) -> str:
        """What a command says."""
        done = subprocess.run(
            [sys.executable, "-m", "relight", *words], env=self.environment, cwd=self.folder, capture_output=True, text=True, check=False
        )
        if done.returncode not in fine:
            raise Unexpected(f"relight {' '.join(words)}: exit code {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
        return done.stdout

    def start(self) -> None:
        """Both nodes."""
        port = free_port()
        for node in range(NODES):
            command = [
                sys.executable, "-m", "relight", "run", "--settings", str(HERE / "relight.toml"),
                "--nnodes", str(NODES), "--nproc-per-node", str(EACH), "--local-addr", "127.0.0.1",
                "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", self.name,
                str(HERE / "train.py"), "--hot", str(self.hot), "--cold", self.cold,
                "--steps", str(self.steps), "--seed", str(self.seed), "--losses", str(self.log),
            ]  # fmt: skip
            with (self.folder / f"node{node}.log").open("ab") as out:
                environment = {**self.environment, "RELIGHT_NODE": f"node{node}"}
                self.processes.append(
                    subprocess.Popen(command, env=environment, cwd=self.folder, stdout=out, stderr=out, start_new_session=True)
                )

    def end(self, code: int, what: str) -> None:
        """Both nodes have ended, with this exit code."""
        wait_until(lambda: all(one.poll() is not None for one in self.processes), what)
        codes = [one.returncode for one in self.processes]
        self.processes.clear()
        if codes != [code] * NODES:
            raise Unexpected(f"{what}: exit codes {codes}, expected {code}; see {self.folder}")

    def stop(self) -> None:
        """All that is left of it, whatever it does: the nodes, and their ranks, which are in sessions of ours."""
        for one in self.processes:
            ranks = self.ranks()
            one.kill()
            one.wait()
            for pid in ranks.values():
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue

    def ranks(self) -> dict[int, int]:
        """The process of each rank that lives: those of this run's script with RANK in their environment."""
        found = {}
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0")
                told = dict(one.split(b"=", 1) for one in (entry / "environ").read_bytes().split(b"\0") if b"=" in one)
            except OSError:
                continue
            if str(self.log).encode() in words and b"RANK" in told and b"run" not in words:
                found[int(told[b"RANK"])] = int(entry.name)
        return found

    def losses(self) -> dict[int, float]:
        """Of each step: what was said of it last."""
        if not self.log.exists():
            return {}
        lines = [line for line in self.log.read_text().splitlines(keepends=True) if line.endswith("\n")]
        return {one["step"]: one["loss"] for one in map(json.loads, lines)}

    def lines(self) -> int:
        """How many steps were made in all, those made twice twice."""
        return len(self.log.read_text().splitlines()) if self.log.exists() else 0

    def reach(self, step: int) -> None:
        """Until it trained so far."""

        def there() -> bool:
            if any(one.poll() is not None for one in self.processes):
                raise Unexpected(f"a node ended before step {step}; see {self.folder}")
            return max(self.losses(), default=-1) >= step

        wait_until(there, f"step {step} of {self.name}")

    def goes_on(self, what: str) -> None:
        """Until three more steps were made."""
        before = self.lines()
        wait_until(lambda: self.lines() >= before + 3, f"training goes on behind {what}")

    def checkpoints(self, where: str) -> list[dict[str, Any]]:
        """As ``relight ls`` tells them."""
        return list(json.loads(self.relight("ls", where, "--json")))

    def incidents(self) -> list[dict[str, Any]]:
        """As ``relight incidents`` tells them."""
        return list(json.loads(self.relight("incidents", str(self.hot), "--json")))


def expect(true: object, what: str) -> None:
    """Or end everything."""
    if not true:
        raise Unexpected(what)
    print(f"    as expected: {what}", flush=True)


def killed(job: Job, rng: random.Random) -> None:
    """A rank is killed: training goes on with nobody's help."""
    os.kill(job.ranks()[rng.randrange(NODES * EACH)], signal.SIGKILL)
    wait_until(lambda: len(job.incidents()) >= 1, "an incident of the kill")
    job.goes_on("a kill")
    expect(any(one["kind"] == "killed" for one in job.incidents()), "it was taken for a kill")


STAGES: list[Callable[[Job, random.Random], None]] = [killed]


def day(folder: Path, seed: int, steps: int, stages: list[Callable[[Job, random.Random], None]]) -> None:
    """All of it."""
    rng = random.Random(seed)
    cloud = Cloud(folder)
    jobs = []
    try:
        cloud.start()
        for name in ("straight", "trouble"):
            cloud.new_bucket(f"{name}-store")
        straight = Job(folder / "straight", cloud, steps, seed)
        jobs.append(straight)
        print(f"seed {seed}: {steps} steps to which nothing happens", flush=True)
        straight.start()
        straight.end(0, "the run to which nothing happens")
        expect(len(straight.losses()) == straight.lines() == steps, f"{steps} steps, each once")
        expect(not straight.incidents(), "no incidents")
        expect(straight.checkpoints(straight.cold), "there are checkpoints in the object store")
        job = Job(folder / "trouble", cloud, steps, seed)
        jobs.append(job)
        job.start()
        for number, stage in enumerate(stages, 1):
            job.reach(steps * number // (len(stages) + 2))
            print(f"seed {seed}, step {max(job.losses())}: {(stage.__doc__ or '').strip()}", flush=True)
            stage(job, rng)
        job.end(0, "the run with its troubles")
        wrong = [step for step, loss in straight.losses().items() if job.losses().get(step) != loss]
        expect(
            not wrong,
            f"all {steps} losses are, to the bit, those of the run to which nothing happened; the last is {straight.losses()[steps - 1]!r}",
        )
        for where in (str(job.hot), job.cold):
            job.relight("verify", where)
        print(job.relight("goodput", str(job.hot)))
        print(job.relight("incidents", str(job.hot)))
    finally:
        for one in jobs:
            one.stop()
        cloud.stop()


def main() -> int:
    """Exit code 1 if anything was not as expected."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--out", type=Path, help="a new directory for everything, kept; otherwise none is")
    parser.add_argument("--only", nargs="*", choices=[one.__name__ for one in STAGES], help="these stages")
    options = parser.parse_args()
    stages = [one for one in STAGES if options.only is None or one.__name__ in options.only]
    with tempfile.TemporaryDirectory(prefix="production-") as folder:
        try:
            day((options.out or Path(folder)).resolve(), options.seed, options.steps, stages)
        except Unexpected as error:
            print(f"seed {options.seed}: NOT as expected: {error}", flush=True)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
