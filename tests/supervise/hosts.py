"""``make hosts``: jobs on several machines in network namespaces. Machines are lost, cut off, return, are replaced, or continue alone.

For each scene it measures how soon the remaining machines train, and whether the job grows again.
From the log's records and each rank's trace it checks that at most one group made committed progress, that no commit of a
fenced group was accepted, and how many steps such a group trained in vain.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, NamedTuple

from relight.format.records import CommitBody, FenceBody
from relight.log import Log, fold
from relight.store import open_bytes

if __package__:
    from tests.supervise.lab import Host, Lab, missing, wait_until, within
else:
    from lab import Host, Lab, missing, wait_until, within

JOB = Path(__file__).with_name("traced.py")
PORT = 29400
STEP_S = 0.1
SAVES = 10
"""Steps between saves."""
PATIENCE_S = 240
"""Seconds that a scene waits for events that take seconds on an idle machine."""
CONF = "last_call_timeout=4,keep_alive_interval=1,keep_alive_max_attempt=3,read_timeout=5"
RENDEZVOUS = """
import sys, time
from datetime import timedelta
from torch.distributed import TCPStore
store = TCPStore("0.0.0.0", int(sys.argv[1]), is_master=True, wait_for_workers=False)
while True:
    time.sleep(60)
"""


class Step(NamedTuple):
    """A line of a trace."""

    host: str
    rank: int
    ranks: int
    step: int
    epoch: int
    at: float


class Scene:
    """A store, machines, and a head machine with the rendezvous, which does not train."""

    def __init__(self, lab: Lab, rng: random.Random, settings: str = "") -> None:
        self.lab, self.rng, self.folder = lab, rng, lab.folder
        self.times: dict[str, float] = {}
        (self.folder / "trace").mkdir()
        (self.folder / "plan.json").write_text("[]")
        self.settings = "[supervise]\nspares = false\n" + settings
        self.runs: dict[str, Any] = {}
        self._out: list[IO[str]] = []
        self.head = self.rendezvous()

    def rendezvous(self) -> Host:
        """Start a machine with a rendezvous, which does not train."""
        head = self.lab.host()
        head.start(
            sys.executable,
            "-c",
            RENDEZVOUS,
            str(PORT),
            out=self._log(head.name),
            env=dict(os.environ),
            cwd=self.folder / head.name,
        )
        return head

    def go(self, host: Host, head: Host | None = None, nodes: str = "2:3", conf: str = CONF, job: str = "j") -> None:
        """Start ``relight run`` on ``host``."""
        cwd = self.folder / host.name
        cwd.mkdir(exist_ok=True)
        (cwd / "relight.toml").write_text(self.settings)
        command = [
            sys.executable, "-m", "relight", "run", "--nnodes", nodes, "--nproc-per-node", "1", "--rdzv-backend", "c10d",
            "--rdzv-endpoint", f"{(head or self.head).address}:{PORT}", "--rdzv-id", job, *(["--rdzv-conf", conf] if conf else []),
            "--local-addr", host.address, str(JOB), str(self.folder / "store"), "1000000", str(self.folder / "plan.json"), str(self.folder / "out"),
        ]  # fmt: skip
        env = {
            **os.environ, "GLOO_SOCKET_IFNAME": "eth0", "JOB_TRACE": str(self.folder / "trace"), "JOB_STEP_S": str(STEP_S),
            "JOB_EVERY": str(SAVES), "OMP_NUM_THREADS": "1", "RELIGHT_JOB_SECRET": "none",
        }  # fmt: skip
        self.runs[host.name] = host.start(*command, out=self._log(host.name), env=env, cwd=cwd)

    def _log(self, name: str) -> IO[str]:
        self._out.append((self.folder / f"{name}.log").open("a"))
        return self._out[-1]

    def output(self, host: Host) -> str:
        """Return the output of ``host``."""
        return (self.folder / f"{host.name}.log").read_text(errors="replace")

    # -- results

    def steps(self) -> list[Step]:
        """Return the steps of all machines in order of time."""
        steps = []
        for file in (self.folder / "trace").glob("host*"):
            steps += [
                Step(*json.loads(line)) for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")
            ]
        return sorted(steps, key=lambda step: step.at)

    def trains(self, hosts: list[Host], since: float, count: int = 3) -> bool:
        """Return whether exactly these machines have completed ``count`` steps in one group since ``since``."""
        names = {host.name for host in hosts}
        groups: dict[int, list[Step]] = {}
        for step in self.steps():
            if step.at > since:
                groups.setdefault(step.epoch, []).append(step)
        return any(
            {step.host for step in group} == names
            and group[0].ranks == len(names)
            and len({step.step for step in group}) >= count
            for group in groups.values()
        )

    def until(self, name: str, hosts: list[Host], seconds: float) -> None:
        """Wait until these machines train together. Keep the seconds from now to their first step."""
        since = time.monotonic()
        try:
            wait_until(
                lambda: self.trains(hosts, since),
                seconds,
                f"{name}: {', '.join(host.name for host in hosts)} do not train together",
            )
        finally:
            names = {host.name for host in hosts}
            firsts = [
                step.at for step in self.steps() if step.at > since and step.ranks == len(names) and step.host in names
            ]
            if firsts:
                self.times[name] = firsts[0] - since

    def records(self) -> list[Any]:
        """Return the records of the run's log."""
        return Log(open_bytes(self.folder / "store"), "run").read().records

    def wrong(self) -> list[str]:
        """Return violations that no scene may have. Count the commits and steps of fenced groups."""
        steps, records, wrong = self.steps(), self.records(), list[str]()
        newest, late = 0, 0
        accepted = {commit.seq for commit in fold(records).live}
        for record in records:  # in the records' order, independent of ``fold``
            if isinstance(record.body, FenceBody):
                newest = max(newest, record.epoch)
            elif isinstance(record.body, CommitBody) and record.epoch < newest:
                late += 1
                if record.seq in accepted:
                    wrong.append(
                        f"record {record.seq}: a commit of epoch {record.epoch} was accepted after the fence of {newest}"
                    )
        began: dict[int, float] = {}
        kept: dict[int, list[Step]] = {}
        sealed = {
            record.epoch: record.body.step
            for record in records
            if isinstance(record.body, CommitBody) and record.seq in accepted
        }
        for step in steps:
            began.setdefault(step.epoch, step.at)
            if step.step <= sealed.get(step.epoch, -1):
                kept.setdefault(step.epoch, []).append(step)
        spans = sorted((group[0].at, group[-1].at, epoch) for epoch, group in kept.items())
        for (_, end, first), (start, _, second) in zip(spans, spans[1:], strict=False):
            if start < end:
                wrong.append(
                    f"epochs {first} and {second} both made progress that was committed, at one time, for {end - start:.2f} s"
                )
        vain = [step for step in steps if any(began[other] < step.at for other in began if other > step.epoch)]
        self.times["fenced commits, void"] = late
        self.times["steps trained though fenced"] = len({(step.epoch, step.step) for step in vain})
        self.times["seconds"] = max(
            (step.at - min(began[other] for other in began if other > step.epoch) for step in vain), default=0.0
        )
        if not (accepted and len(began) > 1):
            wrong.append("nothing happened")
        return wrong

    def close(self) -> None:
        """Close the output files."""
        for file in self._out:
            file.close()


def three(scene: Scene, **how: Any) -> list[Host]:
    """Start three machines and wait until they have trained together for some saves."""
    hosts = [scene.lab.host() for _ in range(3)]
    for host in hosts:
        scene.go(host, **how)
    scene.until("start", hosts, PATIENCE_S)
    wait_until(lambda: max(step.step for step in scene.steps()) > 2 * SAVES, PATIENCE_S, "no steps")
    time.sleep(scene.rng.random() * SAVES * STEP_S)
    return hosts


def death(scene: Scene) -> None:
    """One machine is lost, with or without closing its connections.

    The others continue; it returns, and three train again.
    """
    hosts = three(scene)
    lost = scene.rng.choice(hosts)
    silently = scene.rng.random() < 0.5
    scene.lab.down(lost, silently)
    left = [host for host in hosts if host is not lost]
    scene.until("two continue" + ("" if silently else ", connections closed"), left, PATIENCE_S)
    back = scene.lab.host(lost.number)
    scene.go(back)
    scene.until("three again", [*left, back], PATIENCE_S)


def replacement(scene: Scene) -> None:
    """One machine is lost. Another machine with another name and empty memory replaces it."""
    hosts = three(scene)
    lost = scene.rng.choice(hosts)
    scene.lab.down(lost)
    left = [host for host in hosts if host is not lost]
    new = scene.lab.host()
    scene.go(new)
    scene.until("three again", [*left, new], PATIENCE_S)


def partition(scene: Scene) -> None:
    """One machine is cut off from all others, which continue. It is reconnected, and three train again."""
    hosts = three(scene)
    lost = scene.rng.choice(hosts)
    left = [host for host in hosts if host is not lost]
    scene.lab.part([lost], [*left, scene.head])
    scene.until("two continue", left, PATIENCE_S)
    scene.lab.part([lost], [*left, scene.head], apart=False)
    scene.until("three again", hosts, PATIENCE_S)


def one_way(scene: Scene) -> None:
    """All packets from one machine are lost, or all packets to it."""
    hosts = three(scene)
    lost = scene.rng.choice(hosts)
    left = [host for host in hosts if host is not lost]
    speaks = scene.rng.random() < 0.5
    pairs = [(other, lost) if speaks else (lost, other) for other in (*left, scene.head)]
    for pair in pairs:
        scene.lab.cut(*pair)
    scene.until("two continue", left, PATIENCE_S)
    for pair in pairs:
        scene.lab.heal(*pair)
    scene.until("three again", hosts, PATIENCE_S)


def between(scene: Scene) -> None:
    """Two machines do not reach each other, but reach the third and the rendezvous.

    All train again once the two are reconnected.
    """
    hosts = three(scene)
    first, second = scene.rng.sample(hosts, 2)
    scene.lab.part([first], [second])
    began = time.monotonic()
    time.sleep(30)
    assert not scene.trains(hosts, began + 15), "they train although two of them are cut off from each other"
    scene.lab.part([first], [second], apart=False)
    scene.until("three again", hosts, PATIENCE_S)


def split_brain(scene: Scene) -> None:
    """Two of four machines are cut off from the scheduler and continue.

    The scheduler starts two other machines for the same run.
    """
    first = [scene.lab.host(), scene.lab.host()]
    for host in first:
        scene.go(host, nodes="2")
    scene.until("start", first, PATIENCE_S)
    wait_until(lambda: max(step.step for step in scene.steps()) > 2 * SAVES, PATIENCE_S, "no steps")
    time.sleep(scene.rng.random() * SAVES * STEP_S)
    other = scene.rendezvous()
    second = [scene.lab.host(), scene.lab.host()]
    scene.lab.part([*first, scene.head], [*second, other])
    for host in second:
        scene.go(host, other, nodes="2", job="k")
    scene.until("the other two", second, PATIENCE_S)
    for host in first:
        wait_until(
            lambda host=host: scene.runs[host.name].poll() is not None,
            PATIENCE_S,
            f"{host.name} is fenced, but continues",
        )  # type: ignore[misc]
        assert scene.runs[host.name].returncode == 1, scene.output(host)
    assert any("another attempt has taken this run over" in scene.output(host) for host in first), (
        "no machine reports why it ended"
    )
    began = time.monotonic()
    wait_until(lambda: scene.trains(second, began), PATIENCE_S, "the others do not continue")


SCENES: dict[str, Callable[[Scene], None]] = {
    scene.__name__.replace("_", " "): scene for scene in (death, replacement, partition, one_way, between, split_brain)
}


def play(name: str, seed: int, folder: Path) -> tuple[list[str], dict[str, float], str]:
    """Return violations, times in seconds, and the output."""
    folder.mkdir()
    lab = Lab(folder)
    scene = Scene(lab, random.Random(f"{name} {seed}"))
    wrong = []
    try:
        SCENES[name](scene)
    except (AssertionError, TimeoutError) as error:
        wrong.append(str(error))
    finally:
        lab.close()
        scene.close()
    wrong += scene.wrong() if (folder / "store" / "run").exists() else ["nothing was trained"]
    output = "\n".join(
        f"--- {file.stem}\n{file.read_text(errors='replace')[-6000:]}" for file in sorted(folder.glob("*.log"))
    )
    return wrong, scene.times, output


def main() -> int:
    """Run each scene with each seed. Exit code 1: a violation. 77: no scene could run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0, help="the first")
    parser.add_argument("--scene", action="append", choices=SCENES)
    parser.add_argument("--patience", type=float, default=PATIENCE_S, help="most seconds to wait for an event")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    globals()["PATIENCE_S"] = options.patience
    if not options.inside:
        if lacks := missing():
            print(lacks)
            return 77
        os.execvp("unshare", within(__file__, [*sys.argv[1:], "--inside"]))
    # the first process of a namespace gets only signals that it handles
    signal.signal(signal.SIGTERM, lambda *_: os._exit(1))
    bad = 0
    with tempfile.TemporaryDirectory(prefix="hosts-") as top:
        for seed in range(options.seed, options.seed + options.seeds):
            for name in options.scene or SCENES:
                began = time.monotonic()
                wrong, times, output = play(name, seed, Path(top) / f"{name} {seed}".replace(" ", "-"))
                took = ", ".join(
                    f"{what} {value:.1f} s" if isinstance(value, float) else f"{what} {value}"
                    for what, value in times.items()
                )
                print(
                    f"{name}, seed {seed}: {took}; {time.monotonic() - began:.0f} s; {'wrong' if wrong else 'well'}",
                    flush=True,
                )
                if wrong:
                    bad += 1
                    print(output + "\n" + "\n".join(f"  {problem}" for problem in wrong), flush=True)
    print(f"{bad} of {options.seeds * len(options.scene or SCENES)} scenes went wrong")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
