"""``make hosts``: jobs on several machines, of which some are lost, cut off, come back, are replaced, or go on alone; in network namespaces.

For each scene: does training go on with those who are left, and how soon; does it grow again; and, from the log's records and from what each
rank wrote down of each step: has one group at most made progress that was committed, was nothing accepted of a group behind which another
had taken charge, and how much did such a group train in vain.
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
"""A save every so many steps."""
PATIENCE_S = 240
"""How long a scene waits for what should take seconds, on a machine that may be busy with others."""
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
    """A store, machines, and a head that holds the rendezvous and trains nothing."""

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
        """A machine that holds one, and trains nothing."""
        head = self.lab.host()
        head.start(sys.executable, "-c", RENDEZVOUS, str(PORT), out=self._log(head.name), env=dict(os.environ), cwd=self.folder / head.name)
        return head

    def go(self, host: Host, head: Host | None = None, nodes: str = "2:3", conf: str = CONF, job: str = "j") -> None:
        """``relight run`` there."""
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

    def said(self, host: Host) -> str:
        """All that was printed there."""
        return (self.folder / f"{host.name}.log").read_text(errors="replace")

    # -- what there is

    def steps(self) -> list[Step]:
        """Of all machines, in order of time."""
        found = []
        for file in (self.folder / "trace").glob("host*"):
            found += [Step(*json.loads(line)) for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")]
        return sorted(found, key=lambda one: one.at)

    def trains(self, hosts: list[Host], since: float, count: int = 3) -> bool:
        """Whether these, and no others, have since then ended so many steps in one group."""
        names = {host.name for host in hosts}
        groups: dict[int, list[Step]] = {}
        for one in self.steps():
            if one.at > since:
                groups.setdefault(one.epoch, []).append(one)
        return any(
            {one.host for one in group} == names and group[0].ranks == len(names) and len({one.step for one in group}) >= count
            for group in groups.values()
        )

    def until(self, name: str, hosts: list[Host], seconds: float) -> None:
        """Wait until these train together: how long it took from now to their first step is kept."""
        since = time.monotonic()
        try:
            wait_until(
                lambda: self.trains(hosts, since), seconds, f"{name}: {', '.join(host.name for host in hosts)} do not train together"
            )
        finally:
            names = {host.name for host in hosts}
            firsts = [one.at for one in self.steps() if one.at > since and one.ranks == len(names) and one.host in names]
            if firsts:
                self.times[name] = firsts[0] - since

    def records(self) -> list[Any]:
        """Of the run's log."""
        return Log(open_bytes(self.folder / "store"), "run").read().records

    def wrong(self) -> list[str]:
        """What must never be, whatever the scene. Counts what fenced groups did on the way."""
        steps, records, wrong = self.steps(), self.records(), list[str]()
        newest, late = 0, 0
        accepted = {one.seq for one in fold(records).live}
        for record in records:  # by the records' own order, not by what ``fold`` makes of it
            if isinstance(record.body, FenceBody):
                newest = max(newest, record.epoch)
            elif isinstance(record.body, CommitBody) and record.epoch < newest:
                late += 1
                if record.seq in accepted:
                    wrong.append(f"record {record.seq}: a commit of epoch {record.epoch} was accepted behind the fence of {newest}")
        began: dict[int, float] = {}
        kept: dict[int, list[Step]] = {}
        sealed = {record.epoch: record.body.step for record in records if isinstance(record.body, CommitBody) and record.seq in accepted}
        for one in steps:
            began.setdefault(one.epoch, one.at)
            if one.step <= sealed.get(one.epoch, -1):
                kept.setdefault(one.epoch, []).append(one)
        spans = sorted((group[0].at, group[-1].at, epoch) for epoch, group in kept.items())
        for (_, end, first), (start, _, second) in zip(spans, spans[1:], strict=False):
            if start < end:
                wrong.append(f"epochs {first} and {second} both made progress that was committed, at one time, for {end - start:.2f} s")
        vain = [one for one in steps if any(began[other] < one.at for other in began if other > one.epoch)]
        self.times["fenced commits, void"] = late
        self.times["steps trained though fenced"] = len({(one.epoch, one.step) for one in vain})
        self.times["seconds"] = max((one.at - min(began[other] for other in began if other > one.epoch) for one in vain), default=0.0)
        if not (accepted and len(began) > 1):
            wrong.append("nothing happened")
        return wrong

    def close(self) -> None:
        """Files."""
        for one in self._out:
            one.close()


def three(scene: Scene, **how: Any) -> list[Host]:
    """Machines that train together, for some saves."""
    hosts = [scene.lab.host() for _ in range(3)]
    for host in hosts:
        scene.go(host, **how)
    scene.until("start", hosts, PATIENCE_S)
    wait_until(lambda: max(one.step for one in scene.steps()) > 2 * SAVES, PATIENCE_S, "no steps")
    time.sleep(scene.rng.random() * SAVES * STEP_S)
    return hosts


def death(scene: Scene) -> None:
    """One machine is gone without a word, or with one; the others go on; it comes back, and they are three again."""
    hosts = three(scene)
    lost = scene.rng.choice(hosts)
    silently = scene.rng.random() < 0.5
    scene.lab.down(lost, silently)
    left = [host for host in hosts if host is not lost]
    scene.until("two go on" + ("" if silently else ", told"), left, PATIENCE_S)
    back = scene.lab.host(lost.number)
    scene.go(back)
    scene.until("three again", [*left, back], PATIENCE_S)


def replacement(scene: Scene) -> None:
    """One machine is gone; another, of another name and without anything in memory, takes its place."""
    hosts = three(scene)
    lost = scene.rng.choice(hosts)
    scene.lab.down(lost)
    left = [host for host in hosts if host is not lost]
    new = scene.lab.host()
    scene.go(new)
    scene.until("three again", [*left, new], PATIENCE_S)


def partition(scene: Scene) -> None:
    """One machine is cut off from all others; they go on; then it is not any more, and they are three again."""
    hosts = three(scene)
    lost = scene.rng.choice(hosts)
    left = [host for host in hosts if host is not lost]
    scene.lab.part([lost], [*left, scene.head])
    scene.until("two go on", left, PATIENCE_S)
    scene.lab.part([lost], [*left, scene.head], apart=False)
    scene.until("three again", hosts, PATIENCE_S)


def one_way(scene: Scene) -> None:
    """What one machine sends is lost, or what it is sent."""
    hosts = three(scene)
    lost = scene.rng.choice(hosts)
    left = [host for host in hosts if host is not lost]
    speaks = scene.rng.random() < 0.5
    pairs = [(other, lost) if speaks else (lost, other) for other in (*left, scene.head)]
    for pair in pairs:
        scene.lab.cut(*pair)
    scene.until("two go on", left, PATIENCE_S)
    for pair in pairs:
        scene.lab.heal(*pair)
    scene.until("three again", hosts, PATIENCE_S)


def between(scene: Scene) -> None:
    """Two machines do not reach each other, but the third and the rendezvous do: nobody is left out, and all train again once they do."""
    hosts = three(scene)
    one, other = scene.rng.sample(hosts, 2)
    scene.lab.part([one], [other])
    began = time.monotonic()
    time.sleep(30)
    assert not scene.trains(hosts, began + 15), "they train, and cannot"
    scene.lab.part([one], [other], apart=False)
    scene.until("three again", hosts, PATIENCE_S)


def split_brain(scene: Scene) -> None:
    """Two of four are cut off from whoever starts jobs, and train on; it takes them for dead, and has two others train."""
    first = [scene.lab.host(), scene.lab.host()]
    for host in first:
        scene.go(host, nodes="2")
    scene.until("start", first, PATIENCE_S)
    wait_until(lambda: max(one.step for one in scene.steps()) > 2 * SAVES, PATIENCE_S, "no steps")
    time.sleep(scene.rng.random() * SAVES * STEP_S)
    other = scene.rendezvous()
    second = [scene.lab.host(), scene.lab.host()]
    scene.lab.part([*first, scene.head], [*second, other])
    for host in second:
        scene.go(host, other, nodes="2", job="k")
    scene.until("the other two", second, PATIENCE_S)
    for host in first:
        wait_until(lambda host=host: scene.runs[host.name].poll() is not None, PATIENCE_S, f"{host.name} is fenced, and goes on")  # type: ignore[misc]
        assert scene.runs[host.name].returncode == 1, scene.said(host)
    assert any("another attempt has taken this run over" in scene.said(host) for host in first), "nobody says why it ended"
    began = time.monotonic()
    wait_until(lambda: scene.trains(second, began), PATIENCE_S, "the others do not go on")


SCENES: dict[str, Callable[[Scene], None]] = {
    one.__name__.replace("_", " "): one for one in (death, replacement, partition, one_way, between, split_brain)
}


def play(name: str, seed: int, folder: Path) -> tuple[list[str], dict[str, float], str]:
    """What was wrong, what took how long, and what was printed."""
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
    said = "\n".join(f"--- {file.stem}\n{file.read_text(errors='replace')[-6000:]}" for file in sorted(folder.glob("*.log")))
    return wrong, scene.times, said


def main() -> int:
    """Each scene with each seed. Exit code 1 if anything was wrong, 77 if none could be played."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0, help="the first")
    parser.add_argument("--scene", action="append", choices=SCENES)
    parser.add_argument("--patience", type=float, default=PATIENCE_S, help="seconds that are waited for anything")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    globals()["PATIENCE_S"] = options.patience
    if not options.inside:
        if lacks := missing():
            print(lacks)
            return 77
        os.execvp("unshare", within(__file__, [*sys.argv[1:], "--inside"]))
    signal.signal(signal.SIGTERM, lambda *_: os._exit(1))  # the first process of a namespace is sent none that it has not asked for
    bad = 0
    with tempfile.TemporaryDirectory(prefix="hosts-") as top:
        for seed in range(options.seed, options.seed + options.seeds):
            for name in options.scene or SCENES:
                began = time.monotonic()
                wrong, times, said = play(name, seed, Path(top) / f"{name} {seed}".replace(" ", "-"))
                took = ", ".join(
                    f"{what} {value:.1f} s" if isinstance(value, float) else f"{what} {value}" for what, value in times.items()
                )
                print(f"{name}, seed {seed}: {took}; {time.monotonic() - began:.0f} s; {'wrong' if wrong else 'well'}", flush=True)
                if wrong:
                    bad += 1
                    print(said + "\n" + "\n".join(f"  {one}" for one in wrong), flush=True)
    print(f"{bad} of {options.seeds * len(options.scene or SCENES)} scenes went wrong")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
