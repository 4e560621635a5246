"""One run on two nodes, which are two ``relight run`` processes with node names: started, checked and ended from outside."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from cloud import Cloud
from expecting import PATIENCE_S, Unexpected, wait_until
from onlookers import Onlookers

from relight.comm.ports import free_port

HERE = Path(__file__).resolve().parent
NODES, EACH = 2, 2


class Job:
    """One run, with its folders, processes and settings."""

    NEAR = "near"
    """The near store's name on the dashboard."""

    def __init__(
        self,
        folder: Path,
        cloud: Cloud,
        steps: int,
        seed: int,
        features: frozenset[str],
        arguments: tuple[str, ...] = (),
    ) -> None:
        self.folder, self.cloud, self.steps, self.seed, self.arguments = folder, cloud, steps, seed, arguments
        self.features, self.name = features, folder.name
        self.disk, self.plant, self.log = folder / "disk", folder / "plant", folder / "losses.jsonl"
        self.curve, self.switches = folder / "curve.txt", folder / "switches.jsonl"
        for made in (self.disk, self.plant):
            made.mkdir(parents=True)
        self.drives = [self.disk / f"drive-{number}" / self.NEAR for number in range(1 + ("mirrors" in features))]
        """Directories of the near store."""
        near = f"stripe:mirrors=2,{','.join(map(str, self.drives))}," if "mirrors" in features else str(self.drives[0])
        self.hot, self.cold = f"{near}/{self.name}", f"{cloud.url}/{self.name}-store/{self.name}"
        self.stores = [where.rpartition("/")[0] for where in (self.hot, self.cold)]
        self.small_disk = False
        self.bad = -1
        """Step with a batch that makes the loss NaN or infinite."""
        self.legs: list[tuple[int, int]] = []
        """Steps before which the number of nodes changed, and the number before that."""
        self.nodes = NODES
        self.stages: list[tuple[str, float, int]] = []
        """Planted failures: name, time, step."""
        self.onlookers = Onlookers(self)
        self.processes: list[subprocess.Popen[bytes]] = []
        self.follower: subprocess.Popen[bytes] | None = None
        self.environment = {
            **os.environ,
            **cloud.environment,
            "OMP_NUM_THREADS": "1",
            "RELIGHT_EVENTS": str(folder / "events"),
        }
        self.relight("keys", "new", str(folder / "first.key"))
        self.relight("keys", "new", str(folder / "second.key"))
        self.relight("keys", "new", str(folder / "job.key"))
        output = self.relight("keys", "new", "--signing", str(folder / "sign.key"))
        trust = next(
            line.split("RELIGHT_TRUST=")[1].strip() for line in output.splitlines() if "RELIGHT_TRUST=" in line
        )
        self.environment |= {
            "RELIGHT_KEY": f"file:{folder / 'first.key'} file:{folder / 'second.key'}",  # the second for when keys are exchanged
            "RELIGHT_SIGN": f"ed25519:file:{folder / 'sign.key'}",
            "RELIGHT_TRUST": trust,
            "RELIGHT_JOB_SECRET": f"file:{folder / 'job.key'}",
            "RELIGHT_CHECKPOINT__PEERS__TLS": str("tls" in features).lower(),
        }

    # -- doing -----------------------------------------------------------------------------------------------------------------

    def mount(self, megabytes: int) -> bool:
        """Put the near tier on a disk of its own with that size. Return False if this user may not mount."""
        command = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "relight-production", str(self.disk)]
        self.small_disk = (
            os.geteuid() == 0 and subprocess.run(command, check=False, capture_output=True).returncode == 0
        )
        return self.small_disk

    def relight(self, *words: str, fine: tuple[int, ...] = (0,)) -> str:
        """Return the output of a command."""
        done = subprocess.run(
            [sys.executable, "-m", "relight", *words],
            env=self.environment,
            cwd=self.folder,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode not in fine:
            raise Unexpected(
                f"relight {' '.join(words)}: exit code {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
            )
        return done.stdout

    def start(self, nodes: int = NODES, *words: str, name: str = "node") -> None:
        """Start ``nodes`` nodes, with more arguments for the script."""
        port, self.nodes = free_port(), nodes
        device = ["--device", "sim"] if "device" in self.features else []
        curve = ["--curve", str(self.curve)] if "tracker" in self.features else []
        for node in range(nodes):
            command = [
                sys.executable, "-m", "relight", "run", "--settings", str(HERE / "relight.toml"),
                "--nnodes", str(nodes), "--nproc-per-node", str(EACH), "--local-addr", "127.0.0.1",
                "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", f"{self.name}-{name}",
                str(HERE / "train.py"), "--hot", self.hot, "--cold", self.cold, "--plant", str(self.plant), *device, *curve,
                "--steps", str(self.steps), "--seed", str(self.seed), "--losses", str(self.log), *self.arguments, *words,
            ]  # fmt: skip
            with (self.folder / f"{name}{node}.log").open("ab") as out:
                environment = {**self.environment, "RELIGHT_NODE": f"{name}{node}"}
                self.processes.append(
                    subprocess.Popen(
                        command, env=environment, cwd=self.folder, stdout=out, stderr=out, start_new_session=True
                    )
                )

    def follow(self) -> None:
        """Start the process that has the newest weights all day. It is on the first node, next to an agent."""
        command = [sys.executable, str(HERE / "follower.py"), self.hot, str(self.switches)]
        events = str(self.folder / "follower-events")
        environment = {**self.environment, "RELIGHT_NODE": "node0", "RELIGHT_EVENTS": events}
        with (self.folder / "follower.log").open("wb") as out:
            self.follower = subprocess.Popen(command, env=environment, cwd=self.folder, stdout=out, stderr=out)

    def end(
        self,
        code: int,
        what: str,
        these: list[subprocess.Popen[bytes]] | None = None,
        patience_s: float = PATIENCE_S,
    ) -> None:
        """Wait until those nodes, or all, have ended with this exit code."""
        ending = [*(self.processes if these is None else these)]
        wait_until(lambda: all(process.poll() is not None for process in ending), what, patience_s)
        codes = [process.returncode for process in ending]
        self.processes = [process for process in self.processes if process not in ending]
        if codes != [code] * len(ending):
            raise Unexpected(f"{what}: exit codes {codes}, expected {code}; see {self.folder}")

    def preempt(self) -> None:
        """Ask all nodes to end, and wait until they have stored the last step and ended."""
        for process in self.processes:
            process.send_signal(signal.SIGTERM)
        self.end(75, "the preemption")

    def stop(self, *, agents: bool = True) -> None:
        """Kill all nodes, their ranks (which have sessions of their own) and agents, as a power cut would."""
        for process in self.processes:
            process.kill()
            process.wait()
        self.processes.clear()
        for pid in [*self.ranks().values(), *(self.agents().values() if agents else ())]:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        wait_until(lambda: not self.ranks(), "killed ranks are gone")

    def tidy(self) -> None:
        """End everything."""
        self.onlookers.stop()
        self.stop()
        if self.follower is not None:
            self.follower.kill()
            self.follower.wait()
        if self.small_disk:
            subprocess.run(["umount", "-l", str(self.disk)], check=False, capture_output=True)

    # -- observing -------------------------------------------------------------------------------------------------------------

    def _processes(self) -> list[tuple[int, list[bytes], dict[bytes, bytes]]]:
        processes = []
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0")
                environment = dict(
                    pair.split(b"=", 1) for pair in (entry / "environ").read_bytes().split(b"\0") if b"=" in pair
                )
            except OSError:
                continue
            if environment.get(b"RELIGHT_EVENTS") == self.environment["RELIGHT_EVENTS"].encode():
                processes.append((int(entry.name), words, environment))
        return processes

    def ranks(self) -> dict[int, int]:
        """Return the process of each live rank: processes of this run's script with RANK in their environment."""
        log = str(self.log).encode()
        return {
            int(variables[b"RANK"]): pid
            for pid, words, variables in self._processes()
            if log in words and b"RANK" in variables and b"run" not in words
        }

    def agents(self) -> dict[str, int]:
        """Return the process of each node's agent."""
        return self._by_node(b"relight.agent.server")

    def copiers(self) -> dict[str, int]:
        """Return the process of each node that copies to the object store at the moment."""
        return self._by_node(b"relight.drain")

    def _by_node(self, module: bytes) -> dict[str, int]:
        """Return the process of each node that runs a module. A child has its parent's command line until it runs its program."""
        nodes = {
            pid: variables[b"RELIGHT_NODE"].decode()
            for pid, words, variables in self._processes()
            if module in words and b"RELIGHT_NODE" in variables
        }
        return {node: pid for pid, node in nodes.items() if parent_of(pid) not in nodes}

    def rows(self) -> list[dict[str, Any]]:
        """Return the logged row of each executed step. A repeated step has two rows."""
        if not self.log.exists():
            return []
        return [json.loads(line) for line in self.log.read_text().splitlines(keepends=True) if line.endswith("\n")]

    def losses(self) -> dict[int, float]:
        """Return the last loss of each step."""
        return {row["step"]: row["loss"] for row in self.rows()}

    def lines(self) -> int:
        """Return the number of executed steps, with repeated ones."""
        return len(self.rows())

    def reach(self, step: int) -> None:
        """Wait until training has reached that step."""

        def there() -> bool:
            if any(process.poll() is not None for process in self.processes):
                raise Unexpected(f"a node ended before step {step}; see {self.folder}")
            return max(self.losses(), default=-1) >= step

        wait_until(there, f"step {step} of {self.name}")

    def ends_in(self, steps: int) -> int:
        """Request an end that many steps later. Return the step before which it ends."""
        until = min(max(self.losses()) + steps, self.steps)
        new_file = self.plant / "until.new"
        new_file.write_text(str(until))
        new_file.rename(self.plant / "until")
        return until

    def printed(self, name: str) -> str:
        """Return what the nodes of that name have printed."""
        return "".join(path.read_text(errors="replace") for path in sorted(self.folder.glob(f"{name}[0-9].log")))

    def continues_after(self, what: str) -> None:
        """Wait until three more steps were executed."""
        before = self.lines()
        wait_until(lambda: self.lines() >= before + 3, f"training continues after {what}")

    def checkpoints(self, where: str) -> list[dict[str, Any]]:
        """Return the checkpoints as ``relight ls`` lists them."""
        return list(json.loads(self.relight("ls", where, "--json", fine=(0, 1)) or "[]"))

    def newest(self, where: str) -> int:
        """Return the step of the newest checkpoint; -1 if there is none."""
        return max((checkpoint["step"] for checkpoint in self.checkpoints(where)), default=-1)

    def saves_again(self, where: str) -> None:
        """Wait for a checkpoint that is newer than the present ones."""
        before = self.newest(where)
        wait_until(lambda: self.newest(where) > before, f"a checkpoint newer than step {before} at {where}")

    def incidents(self, where: str = "") -> list[dict[str, Any]]:
        """Return the incidents as ``relight incidents`` lists them, oldest first; by default of the near tier."""
        if not where and not any((drive / self.name).exists() for drive in self.drives):
            return []
        incidents: list[dict[str, Any]] = json.loads(
            self.relight("incidents", where or self.hot, "--json", fine=(0, 1)) or "[]"
        )
        return sorted(incidents, key=lambda incident: incident["id"])

    def events(self, *names: str) -> list[dict[str, Any]]:
        """Return the events of its processes with these names, oldest first. ``from_rank``: the rank of the process."""
        events = []
        for file in sorted(Path(self.environment["RELIGHT_EVENTS"]).glob("*.jsonl")):
            rank = -1
            for line in file.read_text().splitlines():
                try:
                    event = json.loads(line)
                except ValueError:  # it is being written
                    continue
                if event.get("relight") == "events":  # a line that names the process
                    rank = event["rank"]
                elif event.get("event") in names:
                    events.append({**event, "from_rank": rank})
        return sorted(events, key=lambda event: float(event["time"]))


def parent_of(pid: int) -> int:
    """Return the process that started a process, 0 if it has ended."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0
