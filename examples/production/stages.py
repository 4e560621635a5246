"""A day of trouble, with a function for each kind: what is done, and what is expected. Else everything ends."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

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
    job.saves_again(str(job.hot))
    before, agents, left_out = len(job.incidents()), job.agents(), len(job.events("peers.failed", "peers.unreachable"))
    since = time.time()
    os.kill(job.ranks()[rng.randrange(NODES * EACH)], signal.SIGKILL)
    came(job, "killed", before)
    job.continues_after("a kill")
    expect(job.agents() == agents, f"the agents of {' and '.join(sorted(agents))} have outlived it")
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
        job.saves_again(str(job.hot))
        time.sleep(rng.uniform(0, 3))
        newest = job.newest(str(job.hot))
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
    wait_until(lambda: max(job.losses()) > job.bad + 1, f"training continues after step {job.bad}")
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
    job.saves_again(str(job.hot))
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
    wait_until(lambda: job.newest(str(job.hot)) >= step, f"a checkpoint of step {step} or after it")
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
    for store in (str(job.hot.parent), job.cold.rsplit("/", 1)[0]):
        slots = [line.split() for line in job.relight("keys", "status", store).splitlines()[1:]]
        job.relight("keys", "rotate", store, slots[0][1], f"file:{job.folder / 'second.key'}")
    job.saves_again(str(job.hot))
    job.saves_again(job.cold)
    expect(len(job.events("save.failed")) == failed, "saves continued in both tiers, and none failed")
    job.environment["RELIGHT_KEY"] = f"file:{job.folder / 'second.key'}"
    expect(job.checkpoints(str(job.hot)), "the new key opens what the old one wrote")


def preempted(job: Job, rng: random.Random) -> None:
    """The job is preempted. The newest checkpoint is damaged meanwhile, then the job starts again."""
    job.preempt()
    last, newest = max(job.losses()), job.newest(str(job.hot))
    expect(newest == last, f"the last step, {last}, was stored before the end")
    damage(job, newest, rng)
    job.start()
    job.continues_after("a preemption and a damaged checkpoint")


def damage(job: Job, step: int, rng: random.Random) -> None:
    """A bit of one of its packs is turned over, and verify finds that."""
    packs: list[Path] = sorted(job.hot.glob(f"{step:010d}-*/pack-*"))
    expect(packs, f"the checkpoint of step {step} has packs")
    pack = packs[rng.randrange(len(packs))]
    data = bytearray(pack.read_bytes())
    data[rng.randrange(len(data) // 2, len(data))] ^= 1 << rng.randrange(8)
    pack.write_bytes(data)
    expect(job.relight("verify", str(job.hot), fine=(1,)), f"verify finds the bit that was turned over in {pack.name}")


def resized(job: Job, rng: random.Random) -> None:
    """A node is taken away, and training continues with half the world. Later the node is back."""
    del rng
    for nodes in (NODES // 2, NODES):
        was = job.nodes
        job.preempt()
        last = max(job.losses())
        expect(job.newest(str(job.hot)) == last, f"the last step of {was} nodes, {last}, was stored")
        job.legs.append((last + 1, was))
        before = job.lines()
        job.start(nodes)
        wait_until(lambda before=before: job.lines() >= before + 6, f"training continues with {nodes} nodes")
        row = job.rows()[before]
        expect(
            (row["step"], row["ranks"]) == (last + 1, nodes * EACH),
            f"{row['ranks']} ranks continued at step {row['step']}",
        )
    job.saves_again(str(job.hot))  # later stages return no further than to this world
    wait_until(lambda: job.newest(job.cold) > last, f"a checkpoint newer than step {last} in the object store")


def doubled(job: Job, rng: random.Random) -> None:
    """The same run is started again, and refused; then with takeover="take": the job that was there is fenced, reports it and ends."""
    del rng
    first = [*job.processes]
    job.saves_again(str(job.hot))
    job.start(name="refused")
    job.end(1, "the start that is refused", [process for process in job.processes if process not in first])
    expect("still trains this run" in job.printed("refused"), "the refused supervisors report who trains this run")
    expect(all(process.poll() is None for process in first), "and those trained on")
    job.environment["RELIGHT_CHECKPOINT__TAKEOVER"] = "take"
    job.start(name="other")
    del job.environment["RELIGHT_CHECKPOINT__TAKEOVER"]
    job.end(1, "the supervisors that were there first", first)
    expect(
        "another attempt has taken this run over" in job.printed("node"),
        "the first supervisors report that another attempt has taken the run over",
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
    job.saves_again(str(job.hot))
    wait_until(lambda: len(job.incidents()) >= incidents > 0, "the incidents are on the new disk too")
    expect(True, f"and the new disk has checkpoints, and the {incidents} incidents from before")


STAGES: list[Stage] = [killed, seen, poisoned, outage, hang, greedy, full, rotated, resized, preempted, doubled, lost]
