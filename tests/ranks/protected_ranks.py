"""Ranks on separate nodes (``RELIGHT_NODE``) that protect each other's snapshots, and the loss of nodes.

A job saves until its peers hold the last checkpoint, and dies. Agents of some nodes are killed with their memory, and packs are
deleted. A second job, possibly of another size, restores and reports the source.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import relight
from relight.agent.launch import address_of
from relight.format import hexdigest

ELEMENTS = 1 << 20
MARK = "TESTS_MARK"
"""Variable with digits that change the values and names of a test, so that captured packets of other tests do not have them."""


def value(seed: int) -> torch.Tensor:
    seed += 1000 * int(os.environ.get(MARK, "0"))
    return torch.randn(4, ELEMENTS // 4, generator=torch.Generator().manual_seed(seed))


def names() -> list[str]:
    """Return the names of the model's parameters."""
    return [f"{name}{os.environ.get(MARK, '')}" for name in "abc"]


def rank_main(
    url: str,
    rank: int,
    world: int,
    meeting: str,
    peers: relight.Peers,
    saves: int,
    reports: Any,
    raises: bool,
    kind: str,
) -> None:
    try:
        train(url, rank, world, meeting, peers, saves, reports, raises, kind)
    except BaseException as error:
        reports.put((rank, {"error": f"{type(error).__name__}: {error}"}))
        raise


def train(
    url: str,
    rank: int,
    world: int,
    meeting: str,
    peers: relight.Peers,
    saves: int,
    reports: Any,
    raises: bool,
    kind: str,
) -> None:
    os.environ["RELIGHT_NODE"], os.environ["RELIGHT_BACKGROUND"] = f"node{rank}", "1"
    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)
    dist.init_process_group("gloo", store=dist.FileStore(meeting, world), rank=rank, world_size=world)
    device = torch.device(kind, rank % torch.accelerator.device_count()) if kind != "cpu" else torch.device(kind)
    model = torch.nn.ParameterDict(
        {name: torch.nn.Parameter(torch.zeros(4, ELEMENTS // 4, device=device)) for name in names()}
    )
    sent: dict[str, threading.Event] = {}
    result: dict[str, Any] = {"events": []}

    def collect(event: relight.observe.Event) -> None:
        if event.name == "peers.sent":
            sent.setdefault(str(event.fields["checkpoint"]), threading.Event()).set()
        elif event.name == "restore.done":
            result.update(source=event.fields["source"], bytes=event.fields["bytes"])
        if event.name.startswith(("peers.", "restore.")):
            result["events"].append((event.name, str(event.fields)[:200]))

    relight.observe.subscribe(collect)
    ckpt = relight.Checkpointer(url, model=model, signals=False, peers=peers, limits=relight.Limits(deadline_s=30))
    result["start"] = ckpt.restore()
    result["digest"] = hexdigest(b"".join(parameter.detach().cpu().numpy().tobytes() for parameter in model.values()))
    result["token"] = ckpt._hooks.peers._token.hex()
    reports.put((rank, result))
    for step in range(result["start"], result["start"] + saves):
        with torch.no_grad():
            for number, parameter in enumerate(model.values()):
                parameter.copy_(value(100 * step + number))
        save = ckpt.save(step)
        is_held = sent.setdefault(str(save.id), threading.Event()).wait(30)
        reports.put((rank, {"step": step, "id": save.id, "held": is_held}))
    dist.barrier()
    if raises:
        ckpt.__exit__(RuntimeError, RuntimeError("the rank on the other node was killed"), None)
    if saves:
        os.kill(os.getpid(), signal.SIGKILL)
    ckpt.close(save=False)


def job(
    url: str, world: int, peers: relight.Peers, saves: int, *, raises: bool = False, kind: str = "cpu"
) -> list[tuple[int, dict[str, Any]]]:
    """Run a job and return its ranks' reports.

    ``raises``: the Checkpointers exit by an error, as after the kill of one rank. ``kind``: the device type of their parameters.
    """
    context = multiprocessing.get_context("fork" if kind == "cpu" else "spawn")
    reports, meeting = context.SimpleQueue(), f"{url}-{time.monotonic_ns()}.meeting"
    Path(url).parent.mkdir(parents=True, exist_ok=True)
    ranks = [
        context.Process(target=rank_main, args=(url, rank, world, meeting, peers, saves, reports, raises, kind))
        for rank in range(world)
    ]
    for process in ranks:
        process.start()
    received = []
    for _ in range(world * (1 + saves)):
        assert reports._reader.poll(90), received
        received.append(reports.get())
        assert "error" not in received[-1][1], received[-1]
    for process in ranks:
        process.join(60)
        assert process.exitcode == (-signal.SIGKILL if saves else 0), process.exitcode
    with contextlib.suppress(FileNotFoundError):
        os.unlink(meeting)
    return received


def agents(url: str, nodes: int) -> dict[int, int]:
    """Return the process id of each node's agent that runs."""
    store, _, run = url.rpartition("/")
    wanted = {}
    for node in range(nodes):
        os.environ["RELIGHT_NODE"] = f"node{node}"
        wanted[address_of(f"file://{store}" if "://" not in store else store, run)] = node
        wanted[address_of(store, run)] = node
    del os.environ["RELIGHT_NODE"]
    return agents_at(wanted)


def lose(url: str, nodes: set[int], world: int) -> None:
    """Kill the agents of ``nodes`` and delete the packs of their ranks."""
    agent_pids = agents(url, world)
    assert agent_pids.keys() == set(range(world))
    for node in nodes:
        os.kill(agent_pids[node], signal.SIGKILL)
        for pack in Path(url).rglob(f"pack-{node:05d}-*"):
            pack.unlink()
    time.sleep(0.2)


def agents_at(wanted: Mapping[str, int]) -> dict[int, int]:
    """Return the process ids of agents that listen at these addresses, by the addresses' values."""
    pids = {}
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            words = path.read_bytes().decode(errors="replace").split("\0")
            if (
                "relight.agent.server" in words
                and (node := wanted.get(words[words.index("relight.agent.server") + 1])) is not None
            ):
                pids[node] = int(path.parent.name)
    return pids


def expected(step: int) -> str:
    return hexdigest(b"".join(value(100 * step + number).numpy().tobytes() for number in range(3)))
