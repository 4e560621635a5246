"""The RDMA plane of peers by NIXL against TCP, in the same run: protecting, rebuilding and reading, with processor time.

``python -m benchmarks.rdma``: agents in processes of their own protect each other, one is killed, and one process reads
the parts back. Three arms, in another order each round: NIXL over UCX's shared memory, NIXL over UCX's TCP, and the TCP
of peers. Without an RDMA device the figures show what the plane costs, and what a transfer without the other side's
processor saves. They do not show what a network card does.

*push*: bytes sent to holders. *rebuild*: bytes of the lost part. *restore*: bytes read from the agents that have them.
Processor seconds are those of all agents, of the reader and of their NIXL processes, for each GB. *connect*: seconds until
the reader's plane exists and has read a few bytes of each part; a restore reads over TCP during that time.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "peers"))
os.environ.setdefault("RELIGHT_LOG", "quiet")  # a killed peer is expected

from neighbours import Nursery, Town, cpu_s

from benchmarks.machine import describe
from relight.observe import subscribe
from relight.peers import Remote, rdma
from relight.store import page_buffer

ARMS = {
    "NIXL, shared memory": ({"UCX_TLS": "tcp,sm,self"}, "rdma"),
    "NIXL, TCP": ({"UCX_TLS": "tcp"}, "rdma"),
    "TCP": ({}, "tcp"),
}
"""Environment of the agents, and the plane."""
AGENTS, DATA, PARITY = 4, 3, 1
THREADS = 2
READ_BYTES = 4 << 20
FIGURES = ("push", "rebuild", "restore")


def read(remote: Remote, id: str, ranks: list[int], most: int | None = None) -> int:
    """Read those ranks' parts with several threads, or their first bytes. Return the bytes read."""
    total = 0
    rooms = [page_buffer(READ_BYTES) for _ in range(THREADS)]
    with ThreadPoolExecutor(THREADS) as pool:
        for rank in ranks:
            pack = 0
            while (reader := remote.reader(id, rank, pack)) is not None and (most is None or not pack):
                size = reader.size if most is None else min(most, reader.size)
                starts = list(range(0, size, READ_BYTES))

                def read_share(number: int, reader: Any = reader, size: int = size, starts: Any = starts) -> None:
                    for start in starts[number::THREADS]:
                        reader.read_into(start, rooms[number][: min(READ_BYTES, size - start)])

                list(pool.map(read_share, range(THREADS)))
                total += size
                pack += 1
    return total


def busy(town: Town) -> float:
    """Processor seconds of the agents, of this process, and of their NIXL processes."""
    return sum(town.all("cpu")) + cpu_s()


def one_arm(nursery: Nursery, plane: str, size: int) -> dict[str, float]:
    """Push, restore, kill one agent, rebuild."""
    figures: dict[str, float] = {}
    with contextlib.closing(nursery.town([[size]] * AGENTS, DATA, PARITY, plane=plane)) as town:
        town.protect("c0", 1)  # agents live for hours: their connections exist
        for agent in town.agents:
            agent.call("fill", "c1", 2, agent.sizes)
        spent, started = busy(town), time.perf_counter()
        town.all("offer")
        assert all(town.all("wait", 600.0))
        figures["push"], count = time.perf_counter() - started, AGENTS * size * PARITY
        figures["push GB/s"] = count / figures.pop("push") / 1e9
        figures["push processor s/GB"] = (busy(town) - spent) / (count / 1e9)
        for name, victims in (("restore", 0), ("rebuild", 1)):
            for agent in town.agents[:victims]:
                agent.kill()
            living = Town(town.token, town.agents[victims:], DATA, PARITY)
            living.plane = plane
            ranks = list(range(AGENTS)) if not victims else list(range(victims))
            started = time.perf_counter()
            with contextlib.closing(living.remote()) as remote:
                read(remote, "c1", ranks, 4096)
                figures[f"{name} connect s"] = time.perf_counter() - started
                spent, started = busy(living), time.perf_counter()
                count = read(remote, "c1", ranks)
                seconds = time.perf_counter() - started
                figures[f"{name} GB/s"] = count / seconds / 1e9
                figures[f"{name} processor s/GB"] = (busy(living) - spent) / (count / 1e9)
    return {name: round(value, 3) for name, value in figures.items()}


def medians(rounds: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Return the median of each arm's figures."""
    return {
        arm: {name: round(statistics.median(each[arm][name] for each in rounds), 3) for name in rounds[0][arm]}
        for arm in ARMS
    }


def ratios(rounds: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Return each NIXL arm's figures over those of TCP in the same round, as medians."""
    return {
        arm: {
            name: round(statistics.median(each[arm][name] / each["TCP"][name] for each in rounds), 3)
            for figure in FIGURES
            for name in (f"{figure} GB/s", f"{figure} processor s/GB")
        }
        for arm in ARMS
        if arm != "TCP"
    }


def main() -> None:
    """Measure, print, and keep."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--megabytes", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="print what is kept, and nothing else")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    options = parser.parse_args()
    package = rdma.installed()
    if package is None:
        sys.exit(f"NIXL is not installed: {rdma.INSTALL}")
    planes: dict[str, int] = {}
    reasons: list[str] = []

    def note(event: Any) -> None:
        if event.name == "peers.moved":
            planes[event.fields["plane"]] = planes.get(event.fields["plane"], 0) + event.fields["bytes"]
        elif event.name == "peers.fallback":
            reasons.append(str(event.fields["why"]))

    undo = subscribe(note)
    report: dict[str, Any] = {
        "machine": describe(Path(tempfile.gettempdir())), package[0]: package[1], "devices": rdma.devices(),
        "megabytes": options.megabytes, "agents": AGENTS, "data": DATA, "parity": PARITY, "threads": THREADS, "rounds": [],
    }  # fmt: skip
    with contextlib.ExitStack() as stack:
        nurseries = {name: stack.enter_context(Nursery(env)) for name, (env, _) in ARMS.items()}
        for number in range(options.rounds):
            order = list(ARMS)
            random.Random(number).shuffle(order)
            measured: dict[str, Any] = {"load before": round(os.getloadavg()[0], 2)}
            for arm in order:
                measured[arm] = one_arm(nurseries[arm], ARMS[arm][1], options.megabytes * 1_000_000)
            report["rounds"].append(measured)
            if not options.json:
                print(json.dumps(measured), flush=True)
    undo()
    report |= {"medians": medians(report["rounds"]), "of TCP": ratios(report["rounds"])}
    report |= {"read bytes by plane": planes, "fallbacks": reasons}
    print(json.dumps(report if options.json else report["medians"] | {"of TCP": report["of TCP"]}, indent=1))
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "rdma.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
