"""``python -m benchmarks.outward``: a checkpoint of eight ranks is copied to an object store by 1, 2, 4 and 8 nodes.

Each node is a network namespace with a link of its own to the store, limited by tc to ``--megabits``. The nearest tier is a directory
that all see. Time counts from when all nodes begin until all have seen the commit. Rounds are interleaved. Wants what
``benchmarks.link`` wants.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.link import APART, call, missing

NODES, RANKS, PORT = (1, 2, 4, 8), 8, 9000
CHILD = """
import os, sys, time
from relight.drain import drain
from relight.store import open_bytes
near, folder, number, *ranks = sys.argv[1:]
open(f"{folder}/ready-{number}", "w").close()
while not os.path.exists(f"{folder}/go"):
    time.sleep(0.005)
report = drain(open_bytes(near), "run", ranks=frozenset(map(int, ranks)))
sys.exit(bool(report.errors) or any(report.owed.values()))
"""


@contextlib.contextmanager
def node(number: int, megabits: int) -> Iterator[list[str]]:
    """Yield the command that enters a node's namespace. The store is at ``10.79.NUMBER.1``; what the node sends is limited."""
    holder = subprocess.Popen(["unshare", "--net", "sleep", "infinity"])
    try:
        ours = os.readlink("/proc/self/ns/net")
        while os.readlink(f"/proc/{holder.pid}/ns/net") == ours:
            time.sleep(0.02)
        enter, wire = ["nsenter", f"--net=/proc/{holder.pid}/ns/net"], f"wire{number}"
        call("ip", "link", "add", wire, "type", "veth", "peer", "name", "wire", "netns", str(holder.pid))
        for prefix, name, end in (([], wire, 1), (enter, "wire", 2)):
            for words in (
                ["addr", "add", f"10.79.{number}.{end}/24", "dev", name],
                ["link", "set", "lo", "up"],
                ["link", "set", name, "up"],
            ):
                call(*prefix, "ip", *words)
        bucket = ["rate", f"{megabits}mbit", "burst", "64kb", "latency", "100ms"]
        call(*enter, "tc", "qdisc", "add", "dev", "wire", "root", "tbf", *bucket)
        yield enter
    finally:
        holder.kill()
        holder.wait()


def save(folder: Path, megabytes: int) -> None:
    """Save a checkpoint of ``RANKS`` ranks, which are threads."""
    from relight.commit import Attempt, SaveInfo, SaveRequest
    from relight.commit.multi_rank import save_multi_rank
    from relight.commit.save import CommitTarget, Participant
    from relight.format import encode_tree
    from relight.format.tree import Leaf
    from relight.layout import Box, Bytes, Item
    from relight.log import Log
    from relight.store import LocalStore

    begun, each = Attempt.begin(LocalStore(folder), "run"), megabytes * 1_000_000 // RANKS

    def one(rank: int) -> None:
        store = LocalStore(folder)
        place = CommitTarget(store, Log(store, "run"), begun.place.store_id, begun.place.run_id, begun.epoch)
        row = Item("t", "uint8", (RANKS, each), "value", Bytes(os.urandom(each)), Box((rank, 0), (1, each)))
        tree = encode_tree({"t": Leaf("tensor", (0,))} if rank == 0 else {"rank": {}})
        seat = Participant(rank, RANKS, "0" * 16, 60.0)
        save_multi_rank(place, SaveRequest(SaveInfo(step=1), tree=tree, items=[row], id="0123456789", seat=seat))

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(RANKS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def copy(near: Path, bucket: str, nodes: int, enters: list[list[str]], given: dict[str, str]) -> float:
    """Copy to a new bucket by that many nodes. Return the seconds."""
    from relight.catalog import Run
    from relight.catalog.tiers import announce
    from relight.log import Log, fold
    from relight.policy import Tiers
    from relight.reader import verify_checkpoint
    from relight.store import LocalStore, open_bytes

    log = Log(LocalStore(near), "run")
    tiers = Tiers(near=near / "run", **{bucket: f"s3://{bucket}/run"})
    announce(log, tiers.tiers, fold(log.read()).epoch)
    with tempfile.TemporaryDirectory() as folder:
        each, processes = RANKS // nodes, []
        for number in range(nodes):
            ranks = map(str, range(number * each, (number + 1) * each))
            command = [*enters[number], sys.executable, "-c", CHILD, str(near), folder, str(number), *ranks]
            endpoint = {"AWS_ENDPOINT_URL": f"http://10.79.{number}.1:{PORT}"}
            processes.append(subprocess.Popen(command, env={**os.environ, **given, **endpoint}))
        while len(list(Path(folder).iterdir())) < nodes:
            time.sleep(0.02)
        (Path(folder) / "go").touch()
        began = time.perf_counter()
        codes = [process.wait() for process in processes]
        seconds = time.perf_counter() - began
    assert not any(codes), codes
    run = Run(open_bytes(f"s3://{bucket}"), "run")
    (copied,) = run.history().live
    assert not verify_checkpoint(run.store, run.view(), copied)
    return seconds


def _inside(megabits: int, megabytes: int, rounds: int) -> dict[str, Any]:
    from tests.store.servers import CREDENTIALS, Server, wait_for

    import relight  # noqa: F401  imported before anything is measured

    times: dict[int, list[float]] = {nodes: [] for nodes in NODES}
    with tempfile.TemporaryDirectory() as top, contextlib.ExitStack() as stack:
        near = Path(top) / "near"
        save(near, megabytes)
        enters = [stack.enter_context(node(number, megabits)) for number in range(max(NODES))]
        server = subprocess.Popen(
            [sys.executable, str(Path(__file__).parents[1] / "tests/store/moto_server.py"), str(PORT), "0.0.0.0"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "MOTO_S3_CUSTOM_ENDPOINTS": ""},
        )
        stack.callback(lambda: (server.kill(), server.wait()))
        wait_for(f"http://10.79.0.1:{PORT}", server, 120.0)
        given = {**CREDENTIALS, "AWS_ENDPOINT_URL": f"http://10.79.0.1:{PORT}"}
        os.environ.update(given)
        for turn in range(rounds):
            for nodes in NODES if turn % 2 == 0 else NODES[::-1]:
                bucket = Server(given["AWS_ENDPOINT_URL"], given).new_bucket()
                times[nodes].append(round(copy(near, bucket, nodes, enters, CREDENTIALS), 3))
                print(
                    f"round {turn + 1} of {rounds}: {nodes} nodes, {times[nodes][-1]:.2f} s",
                    file=sys.stderr,
                    flush=True,
                )
    return {"megabits": megabits, "megabytes": megabytes, "seconds": times}


def plot(report: dict[str, Any], path: Path) -> None:
    """Draw each round's time, and what one node's time divided by the number of nodes would be."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axis = plt.subplots(figsize=(6, 4), layout="constrained")
    single = statistics.median(report["seconds"]["1"])
    for nodes, seconds in report["seconds"].items():
        axis.plot([int(nodes)] * len(seconds), seconds, "o", color="#c2410c")
    axis.plot(
        NODES, [single / nodes for nodes in NODES], "--", color="#94a3b8", label="one node's time, divided by the nodes"
    )
    axis.set(
        xscale="log", yscale="log", xticks=NODES, xlabel="nodes", ylabel="seconds",
        title=f"{report['megabytes']} MB to an object store, {report['megabits']} Mbit/s each",
    )  # fmt: skip
    axis.set_xticks(NODES, [str(nodes) for nodes in NODES])
    medians = [statistics.median(seconds) for seconds in report["seconds"].values()]
    axis.set_yticks(medians, [f"{median:.1f}" for median in medians])
    axis.minorticks_off()
    axis.legend(frameon=False)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main() -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabits", type=int, default=24, help="a second, of each node's link")
    parser.add_argument("--megabytes", type=int, default=120, help="of state")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    numbers = [f"--megabits={options.megabits}", f"--megabytes={options.megabytes}", f"--rounds={options.rounds}"]
    if options.inside:
        print(json.dumps(_inside(options.megabits, options.megabytes, options.rounds)))
        return 0
    if why := missing():
        print(why, file=sys.stderr)
        return 1
    from benchmarks.machine import describe

    command = [*APART, sys.executable, "-m", "benchmarks.outward", "--inside", *numbers]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, env={**os.environ, "RELIGHT_JOB_SECRET": "none"})
    report = {"machine": describe(Path(tempfile.gettempdir())), **json.loads(done.stdout)}
    if options.out is not None:
        options.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    if options.plot is not None:
        plot(report, options.plot)
    if options.json:
        print(json.dumps(report))
        return 0
    single = statistics.median(report["seconds"]["1"])
    print(f"{options.megabytes} MB, a link of {options.megabits} Mbit/s for each node, medians of {options.rounds}")
    for nodes, seconds in report["seconds"].items():
        median = statistics.median(seconds)
        print(f"{nodes:>2} nodes  {median:6.2f} s  {median / single:.3f} of one node's time")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
