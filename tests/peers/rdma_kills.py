"""Kill agents while their memory is read by RDMA: other agents have the bytes, in bounded time.

``python tests/peers/rdma_kills.py --count 100``. Each round has four agents in processes of their own, with UCX over shared memory and TCP
in turn, and kills one agent with its NIXL process at a random moment: while its part is read (*owner*), while a lost part is rebuilt with
what it holds (*holder*), or while agents send each other a new checkpoint (*sender*). In a fourth kind of round, *process*, only the NIXL
process of an agent is killed. All parts must then be read, bit-exactly, and no other agent may end.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import signal
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

os.environ.setdefault("RELIGHT_LOG", "quiet")  # a killed peer is expected

from neighbours import Neighbour, Nursery, Town, expected, lost_is_read_back

from relight.observe import subscribe
from relight.peers import Remote, rdma

TRANSPORTS = {"shared memory": "tcp,sm,self", "tcp": "tcp"}
KINDS = ("owner", "holder", "sender", "process")
AGENTS, DATA, PARITY = 4, 2, 2
LIMIT_S = 60.0
TIMEOUT_S = 5.0


def read_all(remote: Remote, id: str, town: Town) -> None:
    """Read the parts of all agents, killed ones as well, and compare them."""
    for agent in town.agents:
        for rank, size in agent.sizes:
            for pack, right in enumerate(expected(id, rank, size)):
                reader = remote.reader(id, rank, pack)
                assert reader is not None, f"rank {rank} is at no peer"
                room = bytearray(len(right))
                for begin in range(0, len(right), 4 << 20):
                    reader.read_into(begin, memoryview(room)[begin : begin + (4 << 20)])
                assert room == right, f"rank {rank}: wrong bytes"


def nixl_of(pid: int) -> list[int]:
    """Return the processes that an agent has started."""
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for task in tasks for child in task.read_text().split()]


def kill_node(agent: Neighbour, rng: random.Random) -> None:
    """Kill an agent and its NIXL process, in any order, as the loss of a node does."""
    children = nixl_of(agent.pid)
    assert children, "the agent has no NIXL process"
    for pid in rng.sample([*children, agent.pid], len(children) + 1):
        with contextlib.suppress(ProcessLookupError):
            agent.kill() if pid == agent.pid else os.kill(pid, signal.SIGKILL)


def one_kill(nursery: Nursery, kind: str, rng: random.Random, size: int, reasons: Counter[str]) -> float:
    """Return the seconds from the kill until all parts were read. Count in ``reasons`` why living agents used TCP."""
    with contextlib.closing(nursery.town([[size + rng.randrange(5000)]] * AGENTS, DATA, PARITY, plane="rdma")) as town:
        town.timeout_s = TIMEOUT_S
        if kind == "sender":
            return kill_during_a_push(nursery, town, rng, reasons)
        town.protect("c1", 1)
        first, second = rng.sample(range(AGENTS), 2)
        if kind == "holder":
            kill_node(town.agents[first], rng)
        with contextlib.closing(town.remote()) as remote:
            read_all(remote, "c1", town)  # connections exist
            killed: list[float] = []

            def kill() -> None:
                if kind == "process":
                    for pid in nixl_of(town.agents[second].pid):
                        os.kill(pid, signal.SIGKILL)
                else:
                    kill_node(town.agents[second], rng)
                killed.append(time.monotonic())

            timer = threading.Timer(rng.uniform(0, 0.08), kill)
            timer.start()
            while not killed:
                read_all(remote, "c1", town)
            timer.join()
            read_all(remote, "c1", town)
            seconds = time.monotonic() - killed[0]
        for number, agent in enumerate(town.agents):
            if kind == "process" or number not in (first, second):
                count_reasons(agent, reasons)  # it lives
        return seconds


def count_reasons(agent: Neighbour, reasons: Counter[str]) -> None:
    """Count why a living agent has used TCP."""
    for name, text in agent.call("events"):
        if name == "peers.fallback":
            reasons[plain(text.partition("RDMA: ")[2])] += 1


def plain(why: str) -> str:
    """Return a reason without numbers of processes."""
    return re.sub(r"\[[^]]*\] *", "", why)


def kill_during_a_push(nursery: Nursery, town: Town, rng: random.Random, reasons: Counter[str]) -> float:
    """Kill one agent while all send. A new agent takes its place, and all are protected again."""
    town.protect("c1", 1)
    for agent in town.agents:
        agent.call("fill", "c2", 2, agent.sizes)
    for agent in town.agents:
        agent.call("offer")
    victim = rng.randrange(AGENTS)
    time.sleep(rng.uniform(0, 0.05))
    kill_node(town.agents[victim], rng)
    killed = time.monotonic()
    new = nursery.agent(town.token, plane="rdma")
    new.sizes = town.agents[victim].sizes
    new.call("fill", "c2", 2, new.sizes)
    new.call("offer")
    town.agents[victim].close()
    town.agents[victim] = new
    town.join()
    assert all(town.all("wait", LIMIT_S)), "not protected again"
    for agent in town.agents:
        count_reasons(agent, reasons)
    lost_is_read_back(town, "c2", rng.sample(range(AGENTS), 2))
    return time.monotonic() - killed


def main(count: int, seed: int, megabytes: float) -> dict[str, Any]:
    """Make that many kills. Return what happened; ``AssertionError`` at the first wrong one."""
    rounds: Counter[str] = Counter()
    longest: dict[str, float] = {}
    moved: Counter[str] = Counter()
    reasons: Counter[str] = Counter()

    def note(event: Any) -> None:
        if event.name == "peers.moved":
            moved[event.fields["plane"]] += event.fields["bytes"]
        elif event.name == "peers.fallback":
            reasons[plain(str(event.fields["why"]))] += 1

    undo = subscribe(note)
    try:
        with contextlib.ExitStack() as stack:
            nurseries = {
                name: stack.enter_context(Nursery({"UCX_TLS": transports})) for name, transports in TRANSPORTS.items()
            }
            for number in range(count):
                rng = random.Random(f"{seed}/{number}")
                kind, transport = KINDS[number % len(KINDS)], list(nurseries)[number // len(KINDS) % 2]
                seconds = one_kill(nurseries[transport], kind, rng, int(megabytes * 1_000_000), reasons)
                name = f"{kind}, {transport}"
                rounds[name] += 1
                longest[name] = max(longest.get(name, 0.0), round(seconds, 2))
                assert seconds < LIMIT_S, f"round {number} ({name}) took {seconds:.1f} s"
    finally:
        undo()
    return {
        "kills": count, "seed": seed, "megabytes": megabytes, "rounds": dict(rounds), "longest_s": longest,
        "read_bytes": dict(moved), "fallbacks": dict(reasons),
    }  # fmt: skip


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--megabytes", type=float, default=12)
    parser.add_argument("--out", type=Path, help="a file for the results")
    options = parser.parse_args()
    if rdma.installed() is None:
        sys.exit(f"NIXL is not installed: {rdma.INSTALL}")
    started = time.monotonic()
    result = main(options.count, options.seed, options.megabytes)
    result["seconds"] = round(time.monotonic() - started, 1)
    text = json.dumps(result, indent=1) + "\n"
    if options.out is not None:
        options.out.write_text(text, encoding="utf-8")
    sys.stdout.write(text)
