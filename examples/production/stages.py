"""A day of trouble, with a function for each kind: what is done, and what is expected. Else everything ends."""

from __future__ import annotations

import contextlib
import math
import os
import random
import shutil
import signal
import socket
import ssl
import time
from collections.abc import Callable
from pathlib import Path

import psutil
from expecting import expect, wait_until
from job import EACH, NODES, Job

Stage = Callable[[Job, random.Random], None]


def came(job: Job, kind: str, before: int) -> None:
    """There is an incident more than ``before``, and it is of this kind."""
    wait_until(lambda: len(job.incidents()) > before, f"an incident of the kind {kind!r}")
    new = job.incidents()[before:]
    expect(
        any(incident["kind"] == kind for incident in new),
        f"it was taken for {kind!r}: {'; '.join(incident['why'] for incident in new)}",
    )


def seen(job: Job, rng: random.Random) -> None:
    """Start the observers: a dashboard with roles, an audit log, Prometheus, and an alert of what went wrong so far."""
    del rng
    # there is nothing to serve before the first checkpoint
    wait_until(lambda: job.newest(job.cold) >= 0, "a checkpoint in the object store")
    job.onlookers.start()
    job.onlookers.follow()
    job.onlookers.act()
    kills = sum(incident["kind"] == "killed" for incident in job.incidents())
    counted = {"class": "killed"}
    wait_until(
        lambda: (job.onlookers.number("relight_failures_total", **counted) or 0) == kills, f"{kills} kills in the count"
    )
    expect(True, f"Prometheus counts {kills} kills, as there were")
    job.onlookers.wait_for_alert("failures")


def killed(job: Job, rng: random.Random) -> None:
    """A rank is killed: training continues without help, from what was in memory."""
    job.saves_again(job.hot)
    before, agents, left_out = len(job.incidents()), job.agents(), len(job.events("peers.failed", "peers.unreachable"))
    since = time.time()
    os.kill(job.ranks()[rng.randrange(NODES * EACH)], signal.SIGKILL)
    came(job, "killed", before)
    job.continues_after("a kill")
    now = job.agents()
    expect(now == agents, f"the agents of {' and '.join(sorted(agents))} have outlived it ({agents}; now {now})")
    expect(
        len(job.events("peers.failed", "peers.unreachable")) == left_out, "and each still holds the other's last save"
    )
    sources = {event["source"] for event in job.events("restore.done") if event["time"] > since}
    expect(
        sources and "store" not in sources,
        f"no rank read the store to resume: restored from {', '.join(sorted(sources))}",
    )


def outage(job: Job, rng: random.Random) -> None:
    """The object store does not answer for a while: training and near saves continue, and the copies are made later."""
    job.cloud.pause()
    try:
        job.continues_after("an outage of the object store")
        job.saves_again(job.hot)
        time.sleep(rng.uniform(0, 3))
        newest = job.newest(job.hot)
    finally:
        job.cloud.start()
    expect(True, f"training and near saves, to step {newest}, continued while the object store was away")
    wait_until(lambda: job.newest(job.cold) >= newest, f"step {newest} in the object store")
    expect(True, "and the object store has it now")


def hang(job: Job, rng: random.Random) -> None:
    """A rank stands still: it is found out, and ended."""
    before = len(job.incidents())
    os.kill(job.ranks()[rng.randrange(NODES * EACH)], signal.SIGSTOP)
    came(job, "hang", before)
    job.continues_after("a hang")


def greedy(job: Job, rng: random.Random) -> None:
    """A rank finds no memory in the middle of a step."""
    before = len(job.incidents())
    (job.plant / f"greedy-{rng.randrange(NODES * EACH)}").touch()
    came(job, "memory", before)
    job.continues_after("a lack of memory")


def poisoned(job: Job, rng: random.Random) -> None:
    """A batch makes the loss no number: back to before it, and past it."""
    before = len(job.incidents())
    job.bad = max(job.losses()) + rng.randrange(10, 20)
    (job.plant / f"bad-{job.bad}").touch()
    came(job, "numerical", before)

    def is_past() -> bool:
        return any(row["step"] > job.bad and math.isfinite(row["loss"]) for row in job.rows())

    wait_until(is_past, f"a loss that is a number after step {job.bad}")
    expect(
        sum(row["step"] == job.bad for row in job.rows()) == 1,
        f"step {job.bad} was tried once, and is left out from then on",
    )


def full(job: Job, rng: random.Random) -> None:
    """The near disk is full for a while: training continues, and saves once there is room again."""
    del rng
    if not job.small_disk:
        print("    left out: a disk of its own for the near tier takes the right to mount one", flush=True)
        return
    job.saves_again(job.hot)
    filler, since = job.disk / "filler", time.time()

    def waiting() -> list[int]:
        """Return steps with a save requested since, not durable though training has continued. Fill what retention
        frees."""
        fill(filler)
        asked, durable = (
            {event["step"] for event in job.events(name) if event["time"] > since}
            for name in ("save.requested", "save.durable")
        )
        return sorted(step for step in asked - durable if max(job.losses()) >= step + 6)

    try:
        wait_until(waiting, "a save that finds no room, and training that continues")
        job.continues_after("a save without free room")
        (step,) = waiting()[:1] or [-1]
        expect(step >= 0, f"the save of step {step} waits while the disk is full, and training continues")
    finally:
        filler.unlink()
    wait_until(lambda: job.newest(job.hot) >= step, f"a checkpoint of step {step} or after it")
    expect(True, "and there were saves again when there was room")


def fill(path: Path) -> None:
    """Write to the file until the disk is full."""
    with path.open("ab", buffering=0) as file:
        try:
            while True:
                file.write(bytes(1 << 16))
        except OSError:
            pass


def rotated(job: Job, rng: random.Random) -> None:
    """The key is exchanged in mid-run, in both tiers: saves continue, and a later start has the new key alone."""
    del rng
    failed = len(job.events("save.failed"))
    for store in job.stores:
        slots = [line.split() for line in job.relight("keys", "status", store).splitlines()[1:]]
        job.relight("keys", "rotate", store, slots[0][1], f"file:{job.folder / 'second.key'}")
    job.saves_again(job.hot)
    job.saves_again(job.cold)
    expect(len(job.events("save.failed")) == failed, "saves continued in both tiers, and none failed")
    job.environment["RELIGHT_KEY"] = f"file:{job.folder / 'second.key'}"
    expect(job.checkpoints(job.hot), "the new key opens what the old one wrote")


def preempted(job: Job, rng: random.Random) -> None:
    """The job is preempted. The newest checkpoint is damaged meanwhile, then the job starts again."""
    job.preempt()
    last, newest = max(job.losses()), job.newest(job.hot)
    expect(newest == last, f"the last step, {last}, was stored before the end")
    damage(job, newest, rng)
    job.start()
    job.continues_after("a preemption and a damaged checkpoint")


def damage(job: Job, step: int, rng: random.Random) -> None:
    """A bit of one of its packs is turned over, on each drive, and verify finds that."""
    packs: list[Path] = sorted((job.drives[0] / job.name).glob(f"{step:010d}-*/pack-*"))
    expect(packs, f"the checkpoint of step {step} has packs")
    pack = packs[rng.randrange(len(packs))]
    data = bytearray(pack.read_bytes())
    data[rng.randrange(len(data) // 2, len(data))] ^= 1 << rng.randrange(8)
    for drive in job.drives:
        (drive / pack.relative_to(job.drives[0])).write_bytes(data)
    expect(job.relight("verify", job.hot, fine=(1,)), f"verify finds the bit that was turned over in {pack.name}")


def resized(job: Job, rng: random.Random) -> None:
    """A node is taken away, and training continues with half the world. Later the node is back."""
    del rng
    for nodes in (NODES // 2, NODES):
        was = job.nodes
        job.preempt()
        last = max(job.losses())
        expect(job.newest(job.hot) == last, f"the last step of {was} nodes, {last}, was stored")
        job.legs.append((last + 1, was))
        before = job.lines()
        job.start(nodes)
        wait_until(lambda before=before: job.lines() >= before + 6, f"training continues with {nodes} nodes")
        row = job.rows()[before]
        expect(
            (row["step"], row["ranks"]) == (last + 1, nodes * EACH),
            f"{row['ranks']} ranks continued at step {row['step']}",
        )
    job.saves_again(job.hot)  # later stages return no further than to this world
    wait_until(lambda: job.newest(job.cold) > last, f"a checkpoint newer than step {last} in the object store")


def doubled(job: Job, rng: random.Random) -> None:
    """The same run is started again, and refused; then with takeover="take": the job that was there is fenced, reports it and ends."""
    del rng
    first = [*job.processes]
    job.saves_again(job.hot)
    job.start(name="refused")
    job.end(1, "the start that is refused", [process for process in job.processes if process not in first])
    expect("still trains this run" in job.printed("refused"), "the refused supervisors report who trains this run")
    expect(all(process.poll() is None for process in first), "and those trained on")
    job.environment["RELIGHT_CHECKPOINT__TAKEOVER"] = "take"
    job.start(name="other")
    del job.environment["RELIGHT_CHECKPOINT__TAKEOVER"]
    job.end(1, "the supervisors that were there first", first)
    reports = ("another attempt has taken this run over", "still trains this run")  # the second: after a restart
    expect(
        any(report in job.printed("node") for report in reports),
        "the first supervisors report that another attempt has the run",
    )
    job.continues_after("two supervisors on one run")
    expect(len(job.ranks()) == NODES * EACH, "one group of ranks trains")


def lost(job: Job, rng: random.Random) -> None:
    """The power is cut, and afterwards the near disk is empty: the object store has the run."""
    del rng
    newest = job.newest(job.cold)
    expect(newest > 0, f"the object store has step {newest}")
    job.stop()
    incidents = len(job.incidents(job.cold))
    for path in job.disk.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    before = job.lines()
    job.start()
    wait_until(lambda: job.lines() >= before + 3, "training continues from the object store")
    first = job.rows()[before]["step"]
    expect(first > newest, f"it continued at step {first}, not at the beginning")
    job.saves_again(job.hot)
    wait_until(lambda: len(job.incidents()) >= incidents > 0, "the incidents are on the new disk too")
    expect(True, f"and the new disk has checkpoints, and the {incidents} incidents from before")


def strangers(job: Job, rng: random.Random) -> None:
    """A caller without the job's token gets nothing. Then a node loses its memory, and the other node's restores it."""
    node = rng.randrange(NODES)
    agent = job.agents()[f"node{node}"]
    (address,) = (each.laddr for each in psutil.Process(agent).net_connections("tcp") if each.status == "LISTEN")
    expect(b"relight" not in answer_to(address, tls=False), "a stranger's call in the clear gets nothing")
    expect(len(answer_to(address, tls=True)) <= 48, "and by TLS no more than the request to prove itself")
    wait_until(lambda: job.events("peers.refused"), "a report that a caller was refused")
    before, since = len(job.incidents()), time.time()
    wait_until(lambda: protected(job, node), "a checkpoint that the other node holds, too")
    for pid in (agent, job.ranks()[node * EACH + rng.randrange(EACH)]):
        os.kill(pid, signal.SIGKILL)
    came(job, "killed", before)
    job.continues_after("the loss of a node's memory")
    events = [event for event in job.events("restore.done", "peers.moved") if event["time"] > since]
    restored = {event["from_rank"]: event["bytes"] for event in events if event["event"] == "restore.done"}
    read = {event["from_rank"]: event["bytes"] for event in events if event.get("action") == "read"}
    lost = range(node * EACH, (node + 1) * EACH)
    expect(
        all(read.get(rank) == restored[rank] for rank in lost),
        f"the other node's memory restored ranks {lost[0]} and {lost[-1]}: {sum(read.get(rank, 0) for rank in lost):,} bytes",
    )


def answer_to(address: tuple[str, int], *, tls: bool) -> bytes:
    """Return what an agent sends to a caller that proves nothing."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    received = b""
    with socket.create_connection(address, 20) as raw, context.wrap_socket(raw) if tls else raw as stream:
        stream.sendall(bytes(64))
        with contextlib.suppress(ConnectionError):
            while more := stream.recv(4096):
                received += more
    return received


def protected(job: Job, node: int) -> bool:
    """Return whether the other node's memory has that node's parts of the newest checkpoint, and no save is being made."""
    newest, asked = (job.events(name)[-1] for name in ("save.durable", "save.requested"))
    sent = {event["rank"] for event in job.events("peers.sent") if event["checkpoint"] == newest["id"]}
    return asked["step"] <= newest["step"] and sent >= {*range(node * EACH, (node + 1) * EACH)}


def unplugged(job: Job, rng: random.Random) -> None:
    """A drive of the near tier vanishes. Saves continue on the other one; a new drive gets everything during training."""
    drive, away = rng.choice(job.drives), len(job.events("store.mirror_away"))
    removed = drive.parent.rename(f"{drive.parent}.removed")
    wait_until(lambda: len(job.events("store.mirror_away")) > away, "a drive that is set away")
    job.saves_again(job.hot)
    job.continues_after("the loss of a drive")
    shutil.rmtree(removed)
    drive.mkdir(parents=True)
    output = job.relight("verify", "--repair", job.hot, "--new-drive", str(drive))
    expect(f"REBUILT  {drive}" in output, "saves continued with one drive, and a new one was rebuilt")
    job.saves_again(job.hot)


def stranded(job: Job, rng: random.Random) -> None:
    """A process that copies to the object store is killed, three times: each copy is completed, by either node."""
    kills = 0
    while kills < 3:
        wait_until(job.copiers, "a process that copies to the object store")
        time.sleep(rng.uniform(0.0, 0.5))
        for pid in [*job.copiers().values()][:1]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                kills += 1
    newest = job.newest(job.hot)
    wait_until(lambda: job.newest(job.cold) >= newest, f"step {newest} in the object store")
    expect(True, f"step {newest} is in the object store after {kills} kills of processes that copied")


STAGES: list[Stage] = [
    killed, seen, strangers, poisoned, outage, stranded, hang, greedy, unplugged, full, rotated, resized, preempted, doubled, lost,
]  # fmt: skip
NEEDS: dict[Stage, str] = {strangers: "tls", stranded: "outward", unplugged: "mirrors"}
"""Stages that need a feature which the seed draws."""
