"""Kill agents while their memory is read by RDMA: other agents have the bytes, in bounded time.

``python tests/peers/rdma_kills.py --count 100``. Each round has four agents in processes of their own, with UCX over shared memory and TCP
in turn, and kills one agent at a random moment: while its part is read (*owner*), while a lost part is rebuilt with what it holds
(*holder*), or while agents send each other a new checkpoint (*sender*). All parts must then be read, bit-exactly.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

os.environ.setdefault("RELIGHT_LOG", "quiet")  # a killed peer is expected

from neighbours import Nursery, Town, expected, lost_is_read_back

from relight.observe import subscribe
from relight.peers import Remote, rdma

TRANSPORTS = {"shared memory": "tcp,sm,self", "tcp": "tcp"}
KINDS = ("owner", "holder", "sender")
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


def one_kill(nursery: Nursery, kind: str, rng: random.Random, size: int) -> float:
    """Return the seconds from the kill until all parts were read."""
    with contextlib.closing(nursery.town([[size + rng.randrange(5000)]] * AGENTS, DATA, PARITY, plane="rdma")) as town:
        if kind == "sender":
            return kill_during_a_push(nursery, town, rng)
        town.protect("c1", 1)
        first, second = rng.sample(range(AGENTS), 2)
        if kind == "holder":
            town.agents[first].kill()
        with contextlib.closing(town.remote("rdma", TIMEOUT_S)) as remote:
            read_all(remote, "c1", town)  # connections exist
            killed: list[float] = []

            def kill() -> None:
                town.agents[second].kill()
                killed.append(time.monotonic())

            timer = threading.Timer(rng.uniform(0, 0.08), kill)
            timer.start()
            while not killed:
                read_all(remote, "c1", town)
            timer.join()
            read_all(remote, "c1", town)
            return time.monotonic() - killed[0]


def kill_during_a_push(nursery: Nursery, town: Town, rng: random.Random) -> float:
    """Kill one agent while all send. A new agent takes its place, and all are protected again."""
    town.protect("c1", 1)
    for agent in town.agents:
        agent.call("fill", "c2", 2, agent.sizes)
    for agent in town.agents:
        agent.call("offer")
    victim = rng.randrange(AGENTS)
    time.sleep(rng.uniform(0, 0.05))
    town.agents[victim].kill()
    killed = time.monotonic()
    new = nursery.agent(town.token, plane="rdma")
    new.sizes = town.agents[victim].sizes
    new.call("fill", "c2", 2, new.sizes)
    new.call("offer")
    town.agents[victim].close()
    town.agents[victim] = new
    town.join()
    assert all(town.all("wait", LIMIT_S)), "not protected again"
    read = town.remote
    town.remote = lambda: read("rdma", TIMEOUT_S)  # type: ignore[assignment,method-assign]
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
            reasons[f"{event.fields['reason']}: {event.fields['why']}"] += 1

    undo = subscribe(note)
    try:
        with contextlib.ExitStack() as stack:
            nurseries = {
                name: stack.enter_context(Nursery({"UCX_TLS": transports})) for name, transports in TRANSPORTS.items()
            }
            for number in range(count):
                rng = random.Random(f"{seed}/{number}")
                kind, transport = KINDS[number % 3], list(nurseries)[number // 3 % 2]
                seconds = one_kill(nurseries[transport], kind, rng, int(megabytes * 1_000_000))
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
