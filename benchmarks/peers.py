"""Peers against the machine itself: protecting and rebuilding over loopback, next to a plain copy and a plain TCP
stream of the same bytes.

``python -m benchmarks.peers``: agents in processes of their own fill their slots, protect each other, and some are killed; their parts are
read back by one process with several threads, as a restore does. Rounds are interleaved with the floors; read the ratios, and the processor
seconds for what goes over the wire: all agents share these few cores, where each would have its node's. *Protecting* is counted in bytes of
parts, of all agents together; each goes over the wire once for each row of parity.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import socket
import statistics
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "peers"))

from neighbours import Neighbour, Nursery, Town

from benchmarks.machine import describe, own_cpu_s
from relight.peers.galois import BLOCK, accumulate, coefficient, invert, multiply
from relight.store import page_buffer

CODINGS = ((2, 1, 1), (4, 3, 1), (6, 4, 2), (7, 4, 2))
"""Agents, data, parity."""
THREADS = 2
READ_BYTES = 4 << 20


def timed(call: Any) -> float:
    """Seconds."""
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def copy_floor(size: int) -> float:
    """MB/s of copying that much memory, both sides mapped."""
    source, target = page_buffer(size), page_buffer(size)

    def copy() -> None:
        target[:] = source

    copy()
    return size / timed(copy) / 1e6


def _sink(listener: socket.socket) -> None:
    connection, _ = listener.accept()
    room = memoryview(bytearray(READ_BYTES))
    while connection.recv_into(room):
        pass
    connection.sendall(b"x")


def stream_floor(size: int) -> tuple[float, float]:
    """MB/s of one TCP stream to another process over loopback, in pieces of 4 MiB, and both ends' processor seconds for each GB."""
    busy = own_cpu_s()
    listener = socket.create_server(("127.0.0.1", 0))
    other = multiprocessing.get_context("fork").Process(target=_sink, args=(listener,))
    other.start()
    with socket.create_connection(listener.getsockname()) as connection:
        data = page_buffer(READ_BYTES)

        def send() -> None:
            for _ in range(0, size, READ_BYTES):
                connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
            connection.recv(1)

        seconds = timed(send)
    other.join()
    listener.close()
    return size / seconds / 1e6, (own_cpu_s() - busy) / (size / 1e9)


def arithmetic() -> dict[str, float]:
    """MB/s of adding one piece of 4 MiB to another, by factor."""
    into, data = page_buffer(READ_BYTES), page_buffer(READ_BYTES)
    rates = {}
    factors = {"XOR": 1, "row 1, first 4": coefficient(1, 3), "row 1, 32nd": coefficient(1, 31), "row 3": coefficient(3, 3),
               "rebuilding": multiply(coefficient(1, 2), invert(coefficient(1, 1) ^ coefficient(1, 3)))}  # fmt: skip
    for name, factor in factors.items():
        accumulate(into, data, factor)
        times = [timed(lambda factor=factor: accumulate(into, data, factor)) for _ in range(9)]  # type: ignore[misc]
        rates[name] = round(READ_BYTES / min(times) / 1e6)
    return rates


def read_all(town: Town, id: str, ranks: list[int]) -> tuple[float, int]:
    """Seconds and bytes of reading those ranks' parts, from asking who has them on."""
    started, total = time.perf_counter(), 0
    remote = town.remote()
    with ThreadPoolExecutor(THREADS) as pool:
        for rank in ranks:
            pack = 0
            while (reader := remote.reader(id, rank, pack)) is not None:
                ranges = [
                    (offset, min(READ_BYTES, reader.size - offset)) for offset in range(0, reader.size, READ_BYTES)
                ]
                rooms = threading.local()

                def read(one: tuple[int, int], reader: Any = reader, rooms: Any = rooms) -> None:
                    if not hasattr(rooms, "room"):
                        rooms.room = page_buffer(READ_BYTES)
                    reader.read_into(one[0], rooms.room[: one[1]])

                list(pool.map(read, ranges))
                total += reader.size
                pack += 1
    seconds = time.perf_counter() - started
    remote.close()
    return seconds, total


def one_coding(nursery: Nursery, agents: int, data: int, parity: int, size: int, seq: int) -> dict[str, float]:
    """Protect; read one part from its agent; kill as many agents as may be lost, and read their parts."""
    town = nursery.town([[size]] * agents, data, parity)
    try:
        town.all("fill", "c1", seq, [])
        for agent in town.agents:
            agent.call("fill", "c1", seq, agent.sizes)
        busy = sum(town.all("cpu"))

        def protect() -> None:
            town.all("offer")
            assert all(town.all("wait", 600.0))

        seconds = timed(protect)
        busy = sum(town.all("cpu")) - busy
        rates = {
            "protect MB/s": agents * size / seconds / 1e6,
            "protect processor s/GB sent": busy / (agents * size * parity / 1e9),
        }
        held_bytes = [memory["held"] for memory in town.all("memory")]
        rates["memory"] = 1 + max(held_bytes) / size
        direct, count = read_all(town, "c1", [agents - 1])
        rates["read MB/s"] = count / direct / 1e6
        victims: list[Neighbour] = town.agents[:parity]
        for victim in victims:
            victim.kill()
        living = Town(town.token, town.agents[parity:], data, parity)
        busy = sum(living.all("cpu")) + time.process_time()
        seconds, count = read_all(town, "c1", list(range(parity)))
        rates["rebuild MB/s"] = count / seconds / 1e6
        rates["rebuild processor s/GB received"] = (sum(living.all("cpu")) + time.process_time() - busy) / (
            count * data / 1e9
        )
    finally:
        town.close()
    return {name: round(value, 3) for name, value in rates.items()}


def name_of(agents: int, data: int, parity: int) -> str:
    """Return the coding's name in the results."""
    return f"{agents} agents, {data}+{parity}"


def ratios(rounds: list[dict[str, Any]], agents: int, data: int, parity: int) -> dict[str, float]:
    """Return bytes on the wire over those of the plain stream.

    A protected part is sent once for each row. A rebuilt part takes as much from each of k agents.
    """
    rows = {}
    for name, times in (("protect", parity), ("read", 1), ("rebuild", data)):
        each = [
            round_[name_of(agents, data, parity)][f"{name} MB/s"] * times / round_["stream MB/s"] for round_ in rounds
        ]
        rows[name] = round(statistics.median(each), 3)
    return rows


def main() -> None:
    """Measure, print, and keep."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--megabytes", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="print what is kept, and nothing else")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    options = parser.parse_args()
    size = options.megabytes * 1_000_000
    report: dict[str, Any] = {
        "machine": describe(Path(tempfile.gettempdir())), "megabytes": options.megabytes, "threads": THREADS, "block": BLOCK, "rounds": [],
    }  # fmt: skip
    report["accumulate MB/s"] = arithmetic()
    with Nursery() as nursery:
        for number in range(options.rounds):
            load = os.getloadavg()[0]
            measured: dict[str, Any] = {"load before": round(load, 2), "copy MB/s": round(copy_floor(size))}
            speed, busy = stream_floor(size)
            measured |= {"stream MB/s": round(speed), "stream processor s/GB": round(busy, 3)}
            order = list(CODINGS)
            random.Random(number).shuffle(order)
            for agents, data, parity in order:
                measured[name_of(agents, data, parity)] = one_coding(nursery, agents, data, parity, size, 1)
            report["rounds"].append(measured)
            if not options.json:
                print(json.dumps(measured), flush=True)
    report["of the stream's rate"] = {name_of(*coding): ratios(report["rounds"], *coding) for coding in CODINGS}
    print(json.dumps(report if options.json else report["of the stream's rate"], indent=1))
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "peers.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
