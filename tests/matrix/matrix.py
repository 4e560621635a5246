"""``make matrix``: combinations of features. Each cell saves in one way, is killed while it saves, and is restored
bit-exactly in another way.

Every pair of values of different factors is in some cell. ``python tests/matrix/matrix.py --seed N``; ``--only NUMBER`` repeats one cell.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[1] / "ranks"))
sys.path.insert(0, str(Path(__file__).parent))
sys.path.append(str(Path(__file__).parents[2] / "examples" / "production"))

from curve import lines_of
from job import Job, run
from pairs import Row, rows_of
from protected_ranks import agents, agents_at
from tests.device import simulated
from tests.store.servers import Server, moto

import relight
from relight.agent.launch import address_of
from relight.store.urls import split_run
from relight.supervise.procfs import sample_process

FACTORS = {
    "layout": ["plain-1", "ddp-2", "fsdp-2", "tensor-2", "rank 0 writes-2", "nodes-2"],
    "then": ["plain-1", "ddp-2", "fsdp-3"],
    "codec": ["never", "auto", "always", "differences"],
    "reuse": ["no", "yes"],
    "cipher": ["none", "key", "key and signature"],
    "stores": ["disk", "disk, disk", "disk, objects", "objects", "mirrors", "mirrors, objects"],
    "by": ["agent", "trainer"],
    "source": ["memory", "near", "far", "peers", "one drive"],
    "device": ["host", "simulated"],
    "tls": ["no", "yes"],
    "follower": ["no", "yes"],
    "tracker": ["no", "yes"],
}
HERE = Path(__file__).parent
DRIVES = ("drive-0", "drive-1")


def possible(row: Row) -> bool:
    """Return whether the cell is possible: what it will be restored from must exist.

    Peers, and so TLS, are between nodes. Both nodes copy to a further store.
    """
    nodes = row["layout"] == "nodes-2"
    return (
        (row["source"] != "memory" or row["by"] == "agent")
        and (row["source"] != "far" or "," in row["stores"])
        and (row["source"] != "one drive" or row["stores"].startswith("mirrors"))
        and (row["source"] in ("peers", "far") if nodes else row["source"] != "peers")
        and (not nodes or row["by"] == "agent")
        and (nodes or row["tls"] == "no")
    )


def factors() -> dict[str, list[str]]:
    """Return what this machine can combine. Print what it lacks."""
    why = simulated.why_not()
    if why is None:
        return FACTORS
    print(f"left out: device simulated: {why}", flush=True)
    return {**FACTORS, "device": ["host"]}


def try_cell(row: Row, seed: int, folder: Path, server: Server) -> str:
    """Run one cell, and return what is wrong with it: an empty string if nothing is."""
    rng = random.Random(seed)
    urls = [_url(kind, number, folder, server) for number, kind in enumerate(row["stores"].split(", "))]
    environment = {**server.environment, "RELIGHT_BACKGROUND": str(int(row["by"] == "agent"))} | _keys(row, folder)
    layout, _, world = row["layout"].rpartition("-")
    order = {
        "verb": "save",
        "urls": urls,
        "options": _options(row),
        "pause_s": rng.choice([0.0, 0.01, 0.05]),
        "nodes": layout == "nodes",
        "device": row["device"],
        "curve": str(folder / "curve.txt") if row["tracker"] == "yes" else "",
    }
    order["layout"] = {"rank 0 writes": "fsdp", "nodes": "ddp"}.get(layout, layout)
    with _environment(environment):
        with _follower(order) if row["follower"] == "yes" else contextlib.nullcontext() as follower:
            safe, far = _save_until_killed(order, int(world), rng, row["source"] == "far")
            wrong = _followed(follower, safe) if follower is not None else ""
        wrong = wrong or _lose(row, urls, folder, int(world), rng)
        try:
            return wrong or _restore(row, order, environment, safe if row["source"] != "far" else far)
        finally:
            _end_agents(urls, 3)


def _url(kind: str, number: int, folder: Path, server: Server) -> str:
    """Return the URL of a run in a new store."""
    if kind == "objects":
        return f"s3://{server.new_bucket()}/store/run"
    if kind == "mirrors":
        return f"stripe:mirrors=2,{','.join(str(folder / drive / 'store') for drive in DRIVES)},/run"
    return str(folder / f"store-{number}" / "run")


def _keys(row: Row, folder: Path) -> dict[str, str]:
    if row["cipher"] == "none":
        return {}
    key = folder / "key"
    key.write_text(os.urandom(32).hex())
    key.chmod(0o600)
    settings = {"RELIGHT_KEY": f"file:{key}"}
    return (
        settings
        if row["cipher"] == "key"
        else settings | {"RELIGHT_SIGN": f"hash:file:{key}", "RELIGHT_TRUST": f"hash:file:{key}"}
    )


def _options(row: Row) -> dict[str, Any]:
    codec = row["codec"]
    options: dict[str, Any] = {
        "compact": {"reuse": row["reuse"] == "yes", "codecs": "always" if codec == "differences" else codec}
    }
    if codec == "differences":
        options["compact"]["full_every"] = 4
    if row["layout"].startswith("rank 0 writes"):
        options["writer"] = "rank 0"
    if row["layout"].startswith("nodes"):
        options["peers"] = {"copies": 1, "tls": row["tls"] == "yes"}
    return options


def _save_until_killed(order: dict[str, Any], world: int, rng: random.Random, drained: bool) -> tuple[int, int]:
    """Return the last step reported as durable, and the last one reported as drained. All ranks are killed together, at
    a random moment."""
    job = Job(str(HERE / "matrix_cell.py"), world, [json.dumps(order)])
    try:
        ends = time.monotonic() + 120
        while not any(("drained" if drained else "done") in report for report in job.reports(0)):
            if time.monotonic() > ends or any(rank.poll() is not None for rank in job.ranks):
                raise AssertionError("\n".join(f"rank {rank}: {_words(job.output(rank))}" for rank in range(world)))
            time.sleep(0.01)
        time.sleep(rng.uniform(0.0, 0.6))
        for rank in job.ranks:
            rank.send_signal(signal.SIGKILL)
        for rank in job.ranks:
            rank.wait(20)
        reports = [report for rank in range(world) for report in job.reports(rank)]
        return max(report["done"] for report in reports if "done" in report), max(
            (report["drained"] for report in reports if "drained" in report), default=-1
        )
    finally:
        job.close()


@contextlib.contextmanager
def _follower(order: dict[str, Any]) -> Iterator[Job]:
    """Start a process that follows the run, on the first node."""
    node = {"RELIGHT_NODE": "node0"} if order["nodes"] else {}
    job = Job(str(HERE / "matrix_cell.py"), 1, [json.dumps({**order, "verb": "follow"})], **node)
    try:
        yield job
    finally:
        job.ranks[0].send_signal(signal.SIGKILL)
        job.ranks[0].wait(20)
        job.close()


def _followed(follower: Job, safe: int) -> str:
    """Wait until the follower has the last durable checkpoint. Return what is wrong with any that it took."""
    ends = time.monotonic() + 60
    while not any(report["followed"] >= safe for report in follower.reports(0)):
        if time.monotonic() > ends or follower.ranks[0].poll() is not None:
            return f"the follower did not reach step {safe}: {_words(follower.output(0))}"
        time.sleep(0.05)
    wrong = [f"step {report['followed']}: {report['wrong'][:5]}" for report in follower.reports(0) if report["wrong"]]
    return f"the follower had wrong weights: {'; '.join(wrong)}" if wrong else ""


def _lose(row: Row, urls: list[str], folder: Path, world: int, rng: random.Random) -> str:
    """Remove what the restore must do without."""
    if row["source"] == "memory":
        return ""
    if row["source"] == "peers":  # lose a node: its memory, its agent, its packs on disk
        pids = agents(urls[0], world)
        if 1 not in pids:
            return "node 1 has no agent"
        os.kill(pids[1], signal.SIGKILL)
        return ""
    _end_agents(urls, world)
    if row["source"] == "one drive":
        (folder / rng.choice(DRIVES)).rename(folder / "removed")
    if row["source"] == "far":
        near = [folder / name for name in ("store-0", *DRIVES)]
        ends = time.monotonic() + 5
        # a process that ends may still write or remove a file
        while any(path.exists() for path in near) and time.monotonic() < ends:
            for path in near:
                shutil.rmtree(path, ignore_errors=True)
        if any(path.exists() for path in near):
            return "a process still writes to the nearest store"
    return ""


def _restore(row: Row, order: dict[str, Any], environment: dict[str, str], least: int) -> str:
    layout, _, world = row["then"].rpartition("-")
    again = {**order, "verb": "restore", "layout": layout, "nodes": False}
    again["options"] = {key: value for key, value in order["options"].items() if key not in ("peers", "writer")}
    reports = run(str(HERE / "matrix_cell.py"), int(world), [json.dumps(again)], 120)
    first = reports[0][0]
    for rank, (report,) in enumerate(reports):
        if report["wrong"]:
            return f"rank {rank} restored step {report['start'] - 1} from {report.get('source')}; wrong: {', '.join(report['wrong'][:5])}"
        if report["start"] != first["start"]:
            return f"rank {rank} begins with step {report['start']}, rank 0 with {first['start']}"
    if first["start"] - 1 < least:
        return f"step {first['start'] - 1} was restored, but step {least} had been reported safe"
    if row["source"] == "memory" and row["stores"] != "objects" and first["source"] not in ("memory", "store"):
        return f"it was restored from {first['source']}"
    store = relight.open(order["urls"][0])
    bad = [f"{checkpoint.id}: {findings}" for checkpoint, findings in store.verify() if findings]
    if bad:
        return "; ".join(bad)
    newest = store.latest()
    if newest is None or newest.step != first["start"]:
        return f"the newest is {newest and newest.step} after step {first['start']} was saved"
    _end_agents(order["urls"], 3)
    plain = {**again, "layout": "plain", "device": "host"}
    ((alone,),) = run(str(HERE / "matrix_cell.py"), 1, [json.dumps(plain)], 120)
    if alone["wrong"] or alone["start"] != first["start"] + 1:
        return f"the save after the restore was restored as step {alone['start'] - 1}, with {alone['wrong'][:5] or 'nothing'} wrong"
    return _tracked(Path(order["curve"]), alone["start"]) if order["curve"] else ""


def _tracked(curve: Path, last: int) -> str:
    """Return what is wrong with what the tracker has: each step once, in order, at least to ``last``."""
    rows = lines_of(curve.read_text())
    steps = [step for step, _, _ in rows]
    if steps != list(range(len(steps))) or len(steps) <= last:
        return f"the tracker has the steps {steps[:3]} to {steps[-3:]}, {len(steps)} rows, after step {last}"
    wrong = [step for step, _, value in rows if value != step / 8]
    return f"the tracker has wrong values at the steps {wrong[:5]}" if wrong else ""


def _end_agents(urls: list[str], nodes: int) -> None:
    """Kill all agents at once, with the memory that they hold."""
    pids = [pid for url in urls for pid in (_agent_here(*split_run(url)), *agents(url, nodes).values()) if pid]
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    ends = time.monotonic() + 10
    while any(sample_process(pid).state not in ("", "Z") for pid in pids) and time.monotonic() < ends:
        time.sleep(0.01)


def _agent_here(store: str, name: str) -> int:
    """Return the process id of the agent that has no node name, or 0 if there is none."""
    return agents_at({address_of(url, name)[1:]: 0 for url in (store, f"file://{store}")}).get(0, 0)


def _words(output: str) -> str:
    """Return the last lines that a rank printed in addition to its reports, and its last report."""
    lines = output.splitlines()
    reports = [line for line in lines if line.startswith("{")]
    return "\n".join([*[line for line in lines if not line.startswith("{")][-30:], *reports[-1:]])


@contextlib.contextmanager
def _environment(variables: dict[str, str]) -> Any:
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def main() -> int:
    """Run the cells, and print the number of failed ones in the last line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=0, help="number of cells to run; 0: all")
    parser.add_argument("--only", type=int, help="one cell")
    options = parser.parse_args()
    rows = rows_of(factors(), possible, options.seed)
    wanted = [options.only] if options.only is not None else range(len(rows))[: options.count or None]
    bad = 0
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="matrix-") as top, moto(Path(top)) as server:
        for count, number in enumerate(wanted, 1):
            folder = Path(top) / str(number)
            folder.mkdir()
            try:
                wrong = try_cell(rows[number], 1000 * options.seed + number, folder, server)
            except AssertionError as error:
                wrong = str(error)[-3000:]
            bad += bool(wrong)
            shown = ", ".join(f"{name} {value}" for name, value in rows[number].items())
            print(
                f"{count}/{len(wanted)} cell {number}: {shown}; {'WRONG: ' + wrong if wrong else 'right'}; {time.monotonic() - started:.0f} s",
                flush=True,
            )
            shutil.rmtree(folder, ignore_errors=True)
    print(f"{len(wanted)} cells of {len(rows)}, {bad} wrong")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
