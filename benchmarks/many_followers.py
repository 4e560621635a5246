"""``python -m benchmarks.many_followers``: many followers of one run, on one machine and on several hosts.

On this machine: a trainer saves once a second, one layer changes each time, and 0, 1, 10 and 100 followers in the idle class take each
checkpoint, in turns of random order. Several hosts: four network namespaces with a cache each follow a run in an S3-compatible server
outside them. The kernel counts the bytes that each host's wire carries. Every follower compares its weights with a checksum in them.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from tests.agent.storm import agents_of
from torch import nn

import relight
from benchmarks.link import APART, missing
from benchmarks.machine import describe
from benchmarks.outward import PORT, node
from proofs.warm import IMPORTED, Child, Warm
from relight.catalog import Run
from relight.store import LocalStore

ROOT = Path(__file__).parents[1]
COUNTS, HOSTS = (0, 1, 10, 100), 4
LAYERS, ADAPTER = 8, 20_000
WAIT_S = 300.0
QUIET = {"RELIGHT_EVENTS": "0", "RELIGHT_PROGRESS": "0", "OMP_NUM_THREADS": "1"}


class Net(nn.Module):
    """A model with a checksum: each tensor is its random values, rotated by a step, and ``sums`` has these steps and the last one."""

    def __init__(self, megabytes: int) -> None:
        super().__init__()
        for number in range(LAYERS):
            self.register_parameter(f"layer{number}", nn.Parameter(torch.zeros(megabytes * 1_000_000 // LAYERS // 4)))
            self.register_parameter(f"adapter{number}", nn.Parameter(torch.zeros(ADAPTER)))
        self.register_buffer("sums", torch.zeros(2 * LAYERS + 1, dtype=torch.int64))
        random_bits = torch.Generator().manual_seed(0)
        self._values = [torch.randn(each.shape, generator=random_bits) for each in self.parameters()]

    @torch.no_grad()
    def change(self, what: str, step: int) -> int:
        """Set the tensors that begin with ``what``, or ``all``, to values of the step. Return their bytes."""
        size = 0
        for number, (name, parameter) in enumerate(self.named_parameters()):
            if what == "all" or name.startswith(what):
                parameter.copy_(self._values[number].roll(step))
                self.get_buffer("sums")[number] = step
                size += parameter.nbytes
        self.get_buffer("sums")[-1] = step
        return size + self.get_buffer("sums").nbytes

    @torch.no_grad()
    def is_whole(self, step: int) -> bool:
        """Return whether all tensors are those of ``step``."""
        *steps, last = self.get_buffer("sums").tolist()
        pairs = zip(self.parameters(), self._values, steps, strict=True)
        return last == step and all(torch.equal(live, values.roll(rolled)) for live, values, rolled in pairs)


def follow(url: str, log: Path, megabytes: int, every_s: float, record_folder: str) -> None:
    """Follow, and write a line of JSON for each switch, until the process is killed."""
    torch.set_num_threads(1)
    net = Net(megabytes)
    began_s = time.process_time()
    with log.open("a", buffering=1, encoding="utf-8") as lines, relight.follow(url, net, every=every_s) as follower:
        while True:
            switched = follower.poll()
            if switched is None:
                time.sleep(0.02)
                continue
            now, lag_s = time.time(), switched.lag_s
            assert follower.checkpoint is not None
            if record_folder:
                lag_s = now - record_of(Path(record_folder), follower.checkpoint.seq).stat().st_mtime
            line = {
                "step": switched.step, "lag_s": lag_s, "bytes": switched.bytes, "source": switched.source,
                "whole": net.is_whole(switched.step), "cpu_s": time.process_time() - began_s,
            }  # fmt: skip
            lines.write(json.dumps(line) + "\n")


def train(url: str, log: Path, megabytes: int, seconds: float) -> None:
    """Train for some seconds, save once a second, and write a line of JSON."""
    torch.set_num_threads(1)
    net, weights = Net(megabytes), torch.randn(256, 256)
    with relight.Checkpointer(url, model=net) as ckpt:
        step = ckpt.restore()
        net.change("all", step)
        ckpt.save(step)
        (agent,) = agents_of(os.getpid())
        log.with_suffix(".ready").touch()
        while not log.with_suffix(".go").exists():
            time.sleep(0.05)
        own_s, agent_s = time.process_time(), sum(agent.cpu_times()[:2])
        began = saved = time.monotonic()
        steps, changed = 0, 0
        calls: list[float] = []
        handles = []
        called_s: dict[int, float] = {}
        while (now := time.monotonic()) < began + seconds:
            for _ in range(10):
                weights @ weights
            steps += 1
            if now - saved >= 1.0:
                step, saved = step + 1, saved + 1.0
                changed += net.change(f"layer{step % LAYERS}", step)
                called_s[step], call = time.time(), time.monotonic()
                handles.append(ckpt.save(step, block=False))
                calls.append(time.monotonic() - call)
        took = time.monotonic() - began
        for handle in handles:
            handle.wait()
        committed_s = commit_times(url)
        durable = [committed_s[step] - call_s for step, call_s in called_s.items() if step in committed_s]
        line = {
            "steps": steps, "seconds": took, "last": step, "saves": len(called_s), "committed": len(durable), "changed": changed,
            "call_s": calls,
            "durable_s": durable, "cpu_s": time.process_time() - own_s,
            "agent_s": sum(agent.cpu_times()[:2]) - agent_s,
        }  # fmt: skip
        log.write_text(json.dumps(line) + "\n", encoding="utf-8")


def commit_times(path: str) -> dict[int, float]:
    """Return the time of each checkpoint's record in the log, by step. The log's own times have whole seconds."""
    base, _, run = path.rpartition("/")
    live = Run(LocalStore(base), run).history().live
    return {each.step: record_of(Path(path) / "log", each.seq).stat().st_mtime for each in live}


def record_of(folder: Path, seq: int) -> Path:
    """Return the file of a record."""
    (record,) = folder.glob(f"*{seq:012d}*")
    return record


def host(url: str, logs: Path, count: int, megabytes: int, every_s: float) -> None:
    """Fork the followers of one host, which begin together."""
    torch.set_num_threads(1)
    children = []
    for number in range(count):
        pid = os.fork()
        if not pid:
            while not (logs.parent / "go").exists():
                time.sleep(0.005)
            follow(url, logs.with_name(f"{logs.name}-{number}.log"), megabytes, every_s, "")
        children.append(pid)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    logs.with_suffix(".ready").touch()
    try:
        time.sleep(3600)
    finally:
        for pid in children:
            os.kill(pid, 9)


def lines_of(log: Path) -> list[dict[str, Any]]:
    """Return what a follower has written so far."""
    if not log.exists():
        return []
    return [
        json.loads(line) for line in log.read_text(encoding="utf-8").splitlines(keepends=True) if line.endswith("\n")
    ]


def wait_until_at(logs: Sequence[Path], step: int, ends_s: float = WAIT_S) -> int:
    """Wait until all followers have the step. Return how many have it."""
    ends = time.monotonic() + ends_s
    while True:
        reached = sum(bool(lines) and lines[-1]["step"] >= step for lines in map(lines_of, logs))
        if reached == len(logs) or time.monotonic() > ends:
            return reached
        time.sleep(0.2)


# -- one machine ----------------------------------------------------------------------------------------------------------------


def one_turn(warm: Warm, folder: Path, count: int, megabytes: int, seconds: float, every_s: float) -> dict[str, Any]:
    """Train once with that many followers. Return what all have written."""
    url, done = str(folder / "s" / "run"), folder / "trainer.log"
    null = os.open(os.devnull, os.O_WRONLY)
    errors = os.open(folder / "errors", os.O_WRONLY | os.O_CREAT, 0o600)

    def start(*words: object) -> Child:
        return warm.start(
            [__file__, *map(str, words)], null, errors, {**os.environ, **QUIET}, directory=str(ROOT), path=[str(ROOT)]
        )

    logs = [folder / f"follower{number}.log" for number in range(count)]
    trainer = start("--role=train", url, done, megabytes, seconds)
    processes = [trainer]
    try:
        while not done.with_suffix(".ready").exists():
            assert trainer.poll() is None, (folder / "errors").read_text()[-2000:]
            time.sleep(0.1)
        processes += [start("--role=follow", url, log, megabytes, every_s, folder / "s/run/log") for log in logs]
        ready = wait_until_at(logs, 0)
        assert ready == count, (ready, (folder / "errors").read_text()[-2000:])
        firsts = {log: len(lines_of(log)) for log in logs}
        before_s = sum(lines_of(log)[-1]["cpu_s"] for log in logs)
        done.with_suffix(".go").touch()
        trainer.wait(seconds + WAIT_S)
        results = lines_of(done)
        assert results, (folder / "errors").read_text()[-2000:]
        result = results[0]
        reached = wait_until_at(logs, result["last"], 60.0)
    finally:
        for process in processes:
            process.kill()
            process.wait(30)
        os.close(null)
        os.close(errors)
    switches = [lines_of(log)[firsts[log] :] for log in logs]
    return {
        **result,
        "followers": count,
        "reached_last": reached,
        "not_whole": sum(not line["whole"] for log in logs for line in lines_of(log)),
        "lags_s": [[line["lag_s"] for line in lines] for lines in switches],
        "read": [sum(line["bytes"] for line in lines) for lines in switches],
        "switches": [len(lines) for lines in switches],
        "sources": sorted({line["source"] for lines in switches for line in lines}),
        "followers_cpu_s": sum(lines[-1]["cpu_s"] for lines in switches if lines) - before_s if count else 0.0,
        "load": os.getloadavg()[0],
    }


def one_machine(options: argparse.Namespace) -> dict[str, Any]:
    """Measure all counts, in turns. Return the summary, and all turns."""
    turns: list[dict[str, Any]] = []
    counts = [count for count in COUNTS if count <= options.followers]
    environment = {**os.environ, **QUIET, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    with Warm([*IMPORTED, "relight.followers.follower"], environment) as warm:
        for turn in range(options.rounds):
            for count in random.Random(turn).sample(counts, len(counts)):
                with tempfile.TemporaryDirectory(prefix="followers-", dir=options.folder) as folder:
                    turns.append(one_turn(warm, Path(folder), count, 8, options.seconds, options.every))
                print(f"turn {turn + 1}, {count} followers: {summary([turns[-1]])}", file=sys.stderr, flush=True)
    rows = {str(count): summary([turn for turn in turns if turn["followers"] == count]) for count in counts}
    return {"seconds": options.seconds, "every_s": options.every, "rows": rows, "turns": turns}


def summary(turns: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the numbers of all turns with one count of followers. Seconds and bytes."""
    lags = sorted(lag for turn in turns for follower in turn["lags_s"] for lag in follower)
    medians = sorted(statistics.median(lags_s) for turn in turns for lags_s in turn["lags_s"] if lags_s)
    durable = sorted(each for turn in turns for each in turn["durable_s"])
    saves = sum(turn["saves"] for turn in turns)
    return {
        "steps_a_second": round(statistics.median(turn["steps"] / turn["seconds"] for turn in turns), 1),
        "saves": saves,
        "committed": sum(turn["committed"] for turn in turns),
        "durable_s": quantiles(durable),
        "call_s": quantiles(sorted(each for turn in turns for each in turn["call_s"])),
        "lag_s": quantiles(lags),
        "median_lag_of_each_follower_s": quantiles(medians),
        "read_over_changed": quantiles(sorted(read / turn["changed"] for turn in turns for read in turn["read"])),
        "switches": sum(sum(turn["switches"]) for turn in turns),
        "cpu_s_a_save": {
            "trainer": round(sum(turn["cpu_s"] for turn in turns) / saves, 4),
            "agent": round(sum(turn["agent_s"] for turn in turns) / saves, 4),
            "followers": round(sum(turn["followers_cpu_s"] for turn in turns) / saves, 4),
        },
        "not_whole": sum(turn["not_whole"] for turn in turns),
        "all_reached_last": all(turn["reached_last"] == turn["followers"] for turn in turns),
        "sources": sorted({source for turn in turns for source in turn["sources"]}),
        "load": round(max(turn["load"] for turn in turns), 1),
    }


def quantiles(values: Sequence[float]) -> dict[str, float]:
    """Return the 50th, 90th and 99th percentile, and the maximum, of sorted values. Empty for no values."""
    if not values:
        return {}
    picks = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}
    return {name: round(values[min(len(values) - 1, int(share * len(values)))], 4) for name, share in picks.items()}


# -- several hosts --------------------------------------------------------------------------------------------------------------


class Way(NamedTuple):
    """Followers of each host, and whether the host has a cache."""

    each: int
    cached: bool

    @property
    def name(self) -> str:
        """The name in the results."""
        return f"{self.each} a host, {'a cache' if self.cached else 'no cache'}"


WAYS = (Way(4, True), Way(1, True), Way(4, False), Way(1, False))


def carried() -> list[int]:
    """Return the bytes that each host's wire has carried in both directions, as the kernel counts them."""
    rows = {}
    for row in Path("/proc/net/dev").read_text(encoding="ascii").splitlines()[2:]:
        name, _, fields = row.partition(":")
        rows[name.strip()] = fields.split()
    return [int(rows[f"wire{number}"][0]) + int(rows[f"wire{number}"][8]) for number in range(HOSTS)]


@contextlib.contextmanager
def hosts(
    way: Way, url: str, folder: Path, enters: list[list[str]], options: argparse.Namespace
) -> Iterator[list[Path]]:
    """Yield the logs of the followers, which begin at once when ``go`` exists."""
    processes = []
    for number, enter in enumerate(enters):
        # the run's environment has this process's address of the server
        given = {**os.environ, **QUIET, "AWS_ENDPOINT_URL": f"http://10.79.{number}.1:{PORT}"}
        if way.cached:
            given["RELIGHT_CACHE"] = str(folder / f"cache{number}")
        words = ["--role=host", url, folder / f"host{number}", way.each, options.megabytes, options.every_remote]
        processes.append(subprocess.Popen([*enter, sys.executable, __file__, *map(str, words)], env=given, cwd=ROOT))
    try:
        while len(list(folder.glob("*.ready"))) < len(enters):
            assert not any(process.poll() for process in processes)
            time.sleep(0.1)
        yield [folder / f"host{number}-{each}.log" for number in range(len(enters)) for each in range(way.each)]
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait()


def one_way(way: Way, url: str, folder: Path, enters: list[list[str]], options: argparse.Namespace) -> dict[str, Any]:
    """Save and follow. Return for each save the bytes changed, and those that each host's wire carried."""
    net, phases = Net(options.megabytes), []
    rules = relight.Compact(codecs="never") if options.compact else None  # the bytes that changed, not encoded
    saves = ("all", *["adapter"] * options.adapter_saves, *["all"] * options.dense_saves)
    # without an agent: its memory would be on the same machine as the hosts
    with relight.Checkpointer(url, model=net, background=False, compact=rules) as ckpt:
        ckpt.restore()
        with hosts(way, url, folder, enters, options) as logs:
            for step, kind in enumerate(saves):
                changed = net.change(kind, step)
                before = carried()
                ckpt.save(step)
                (folder / "go").touch()
                reached = wait_until_at(logs, step)
                assert reached == len(logs), f"{reached} of {len(logs)} have step {step}"
                wires = [now - then for now, then in zip(carried(), before, strict=True)]
                phases.append({"kind": kind if step else "first", "changed": changed, "wires": wires})
            before = carried()
            time.sleep(options.idle)
            idle = [(now - then) / options.idle / way.each for now, then in zip(carried(), before, strict=True)]
    lines = [line for log in logs for line in lines_of(log)]
    return {
        "phases": phases,
        "idle_bytes_a_second_and_follower": round(statistics.mean(idle)),
        "not_whole": sum(not line["whole"] for line in lines),
        "sources": sorted({line["source"] for line in lines}),
        "wire_over_changed": {
            kind: round(statistics.mean(each for phase in phases if phase["kind"] == kind for each in _over(phase)), 3)
            for kind in ("first", "adapter", "all")
        },
    }


def _over(phase: dict[str, Any]) -> list[float]:
    return [wire / phase["changed"] for wire in phase["wires"]]


def inside(options: argparse.Namespace) -> dict[str, Any]:
    """Measure all ways, in the namespace of the server."""
    from tests.store.servers import CREDENTIALS, Server, wait_for

    torch.set_num_threads(1)
    ways = {}
    with tempfile.TemporaryDirectory(prefix="followers-", dir=options.folder) as top, contextlib.ExitStack() as stack:
        enters = [stack.enter_context(node(number, 10_000)) for number in range(HOSTS)]
        server = subprocess.Popen(
            [sys.executable, str(ROOT / "tests/store/moto_server.py"), str(PORT), "0.0.0.0"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "MOTO_S3_CUSTOM_ENDPOINTS": ""},
        )
        stack.callback(lambda: (server.kill(), server.wait()))
        address = f"http://127.0.0.1:{PORT}"
        wait_for(address, server, 120.0)
        os.environ.update({**CREDENTIALS, **QUIET, "AWS_ENDPOINT_URL": address})
        for way in WAYS:
            folder = Path(top) / f"{way.each}{way.cached}"
            folder.mkdir()
            bucket = Server(address, CREDENTIALS).new_bucket()
            ways[way.name] = one_way(way, f"s3://{bucket}/run", folder, enters, options)
            print(f"{way.name}: {ways[way.name]['wire_over_changed']}", file=sys.stderr, flush=True)
    return {
        "hosts": HOSTS,
        "compact": options.compact,
        "megabytes": options.megabytes,
        "every_s": options.every_remote,
        "ways": ways,
    }


# -- the report -----------------------------------------------------------------------------------------------------------------


def table(report: dict[str, Any]) -> str:
    """Return the tables of the docs."""
    text = ""
    if "machine_followers" in report:
        text += (
            "| Followers | Steps a second | Save until durable, p50 / p99 | Lag, p50 / p90 / p99 / max | Read over changed "
            "| CPU s a save: trainer / agent / followers | Mixtures | All reach the last |\n|---:|---:|---:|---:|---:|---:|---:|---|\n"
        )
        for count, row in report["machine_followers"]["rows"].items():
            lag, saved, read, cpu = (row[name] for name in ("lag_s", "durable_s", "read_over_changed", "cpu_s_a_save"))
            lags = " / ".join(f"{value:.2f}" for value in lag.values()) + " s" if lag else "–"
            text += (
                f"| {count} | {row['steps_a_second']} | {saved['p50']:.3f} / {saved['p99']:.3f} s | {lags} "
                f"| {format(read['p50'], '.3f') if read else '–'} | {cpu['trainer']:.2f} / {cpu['agent']:.2f} / {cpu['followers']:.2f} "
                f"| {row['not_whole']} | {'yes' if row['all_reached_last'] else 'no'} |\n"
            )
    if "hosts_followers" in report:
        text += (
            "\n| Followers | First checkpoint | Adapters | Everything | Idle, bytes a second and follower | Mixtures |\n"
            "|---|---:|---:|---:|---:|---:|\n"
        )
        for name, row in report["hosts_followers"]["ways"].items():
            ratios = " | ".join(f"{row['wire_over_changed'][kind]:.2f}" for kind in ("first", "adapter", "all"))
            text += f"| {name} | {ratios} | {row['idle_bytes_a_second_and_follower']} | {row['not_whole']} |\n"
        text += "\nBytes over each host's wire, both directions, over bytes changed.\n"
    return text


def _draw_lag(axis: Any, turns: list[dict[str, Any]]) -> None:
    for count, colour in zip((1, 10, 100), ("#94a3b8", "#0f766e", "#c2410c"), strict=True):
        lags = sorted(lag for turn in turns if turn["followers"] == count for each in turn["lags_s"] for lag in each)
        if lags:
            shares = [(place + 1) / len(lags) for place in range(len(lags))]
            axis.plot(lags, shares, color=colour, label="1 follower" if count == 1 else f"{count} followers")
    axis.set(xlabel="seconds from commit to switch", ylabel="share of switches", title="Lag on one machine")
    axis.legend(frameon=False)


def _draw_wire(axis: Any, ways: dict[str, Any]) -> None:
    for place, (name, row) in enumerate(ways.items()):
        ratios = list(row["wire_over_changed"].values())
        axis.bar([kind + place * 0.2 - 0.3 for kind in range(3)], ratios, 0.18, label=name)
    axis.set_xticks(range(3), ["first", "adapters", "everything"])
    axis.axhline(1, color="#94a3b8", linewidth=0.8)
    axis.set(title="Bytes over a host's wire / bytes changed")
    axis.legend(frameon=False)


def plot(report: dict[str, Any], path: Path) -> None:
    """Draw the distribution of the lag, and the bytes over the wire."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    turns_of_machine = report.get("machine_followers", {}).get("turns", [])
    ways = report.get("hosts_followers", {}).get("ways", {})
    panels = [draw for draw, data in ((_draw_lag, turns_of_machine), (_draw_wire, ways)) if data]
    figure, axes = plt.subplots(1, len(panels), figsize=(5.5 * len(panels), 4), layout="constrained", squeeze=False)
    for draw, axis in zip(panels, axes[0], strict=True):
        draw(axis, ways if draw is _draw_wire else turns_of_machine)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main() -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=("machine", "hosts"), help="only this one")
    parser.add_argument("--followers", type=int, default=100, help="on this machine, at most")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=20.0, help="of training in each turn")
    parser.add_argument("--every", type=float, default=0.25, help="seconds between two checks on this machine")
    parser.add_argument("--every-remote", type=float, default=2.0, help="seconds between two checks of the server")
    parser.add_argument("--idle", type=float, default=10.0, help="seconds without a save, on the hosts")
    parser.add_argument("--megabytes", type=int, default=32, help="of the model that the hosts follow")
    parser.add_argument("--adapter-saves", type=int, default=10, help="to the server, after the first one")
    parser.add_argument("--dense-saves", type=int, default=3, help="after these")
    parser.add_argument(
        "--raw",
        dest="compact",
        action="store_false",
        help="without compact=: each pack on the server has all tensors",
    )
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.add_argument("--role", choices=("train", "follow", "host", "inside"), help=argparse.SUPPRESS)
    parser.add_argument("words", nargs="*", help=argparse.SUPPRESS)
    options = parser.parse_args()
    words = options.words
    if options.role == "train":
        train(words[0], Path(words[1]), int(words[2]), float(words[3]))
    elif options.role == "follow":
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))  # a hundred at nice 19 would take half of two cores
        follow(words[0], Path(words[1]), int(words[2]), float(words[3]), words[4])
    elif options.role == "host":
        host(words[0], Path(words[1]), int(words[2]), int(words[3]), float(words[4]))
    elif options.role == "inside":
        print(json.dumps(inside(options)))
    else:
        return _report(options)
    return 0


def _report(options: argparse.Namespace) -> int:
    report: dict[str, Any] = {"machine": describe(Path(options.folder or tempfile.gettempdir()))}
    if options.part != "hosts":
        report["machine_followers"] = one_machine(options)
    if options.part != "machine":
        if why := missing():
            print(why, file=sys.stderr)
            return 1
        arguments = [
            f"--megabytes={options.megabytes}",
            f"--every-remote={options.every_remote}",
            f"--idle={options.idle}",
        ]
        arguments += [f"--adapter-saves={options.adapter_saves}", f"--dense-saves={options.dense_saves}"]
        arguments += [] if options.compact else ["--raw"]
        arguments += [f"--folder={options.folder}"] if options.folder else []
        done = subprocess.run(
            [*APART, sys.executable, __file__, "--role=inside", *arguments],
            stdout=subprocess.PIPE,
            check=True,
            cwd=ROOT,
        )
        report["hosts_followers"] = json.loads(done.stdout)
    if options.out is not None:
        options.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    if options.plot is not None:
        plot(report, options.plot)
    print(json.dumps(report) if options.json else table(report))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
