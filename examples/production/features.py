"""What a seed switches on in addition to what each day has, and what must be true of it at the end of the day."""

from __future__ import annotations

import json
import math
import random
import subprocess
import sys
from collections import Counter
from importlib.util import find_spec

from accelerator import ROOT
from curve import lines_of
from expecting import expect, wait_until
from job import EACH, NODES, Job

FEATURES = {
    "device": "the trainer's tensors are on a simulated accelerator",
    "tls": "agents encrypt what they exchange, and refuse strangers",
    "mirrors": "the near tier is on two mirrored drives, and one is lost",
    "outward": "both nodes copy to the object store, and copying processes are killed",
    "follower": "another process has the newest weights all day",
    "tracker": "a tracker gets each step's loss, once",
}


def draw(seed: int) -> frozenset[str]:
    """Return the features of a seed. Any three seeds in a row have each feature at least once."""
    rng = random.Random(f"features {seed}")
    return frozenset(name for number, name in enumerate(FEATURES) if rng.random() < 0.5 or seed % 3 == number % 3)


def left_out(features: frozenset[str]) -> dict[str, str]:
    """Return which of these features this machine lacks, and why. Builds the simulated accelerator."""
    if "device" not in features:
        return {}
    code = "import sys; from tests.device import simulated; sys.exit(simulated.why_not() or (simulated.load() and 0))"
    built = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    return {"device": built.stderr.strip()[-300:]} if built.returncode else {}


def table(features: frozenset[str], lacking: dict[str, str]) -> list[str]:
    """Return a line of Markdown for each feature: whether it is on, or why it is left out."""
    state = {name: "on" if name in features else "off" for name in FEATURES}
    state |= {name: f"left out: {why}" for name, why in lacking.items()}
    packages = [name for name in ("tensorboard", "wandb", "mlflow") if find_spec(name) is None]
    more = {
        "tracker": f" (a file; not installed, and killed by `make trackers`: {', '.join(packages)})" if packages else ""
    }
    return [
        "| feature | here | what it is |",
        "|---|---|---|",
        *(f"| {name} | {state[name]} | {what}{more.get(name, '')} |" for name, what in FEATURES.items()),
    ]


def on_the_device(job: Job) -> None:
    """Each step was computed on the simulated accelerator."""
    devices = Counter(row["device"] for row in job.rows())
    expect(all(name.startswith("sim:") for name in devices), f"steps by device: {dict(devices)}")


def encrypted(job: Job) -> None:
    """The agents exchanged all parts by TLS."""
    expect(job.events("peers.sent"), "agents sent their parts to each other")
    expect(not job.events("peers.unencrypted"), "and nothing in the clear")


def mirrored(job: Job) -> None:
    """Both drives have the same files."""
    files = [
        {path.relative_to(drive): path.read_bytes() for path in (drive / job.name).rglob("*") if path.is_file()}
        for drive in job.drives
    ]
    different = sorted(
        str(path) for path in files[0].keys() | files[1].keys() if files[0].get(path) != files[1].get(path)
    )
    expect(
        not different,
        f"both drives have the same {len(files[0])} files{''.join(f'; not {path}' for path in different)}",
    )


def copied_once(job: Job) -> None:
    """The object store has what it must have, each checkpoint once, and both nodes have copied."""
    lacks = json.loads(job.relight("cp", "--tiers", "--dry-run", "--json", job.hot))["copy"]
    expect(not lacks, f"the object store has every checkpoint that it must have{lacks or ''}")
    listed = [checkpoint["dir"] for checkpoint in job.checkpoints(job.cold)]
    stored = job.cloud.directories(f"{job.name}-store", job.name)
    left = len(stored - set(listed))
    expect(
        set(listed) <= stored and len(set(listed)) == len(listed),
        f"each of its {len(listed)} once; {left} unfinished copies wait for the next attempt to delete them",
    )
    parts = Counter(event["from_rank"] // EACH for event in job.events("drain.done") if event["from_rank"] % EACH == 0)
    expect(len(parts) == NODES, f"both nodes copied: node 0 parts of {parts[0]} checkpoints, node 1 of {parts[1]}")


def followed(job: Job) -> None:
    """The follower has the last checkpoint, and never had weights of any other than the checkpoint that it named."""
    last = job.checkpoints(job.hot)[-1]["id"]

    def switches() -> list[dict[str, str]]:
        return [json.loads(line) for line in job.switches.read_text().splitlines(keepends=True) if line.endswith("\n")]

    wait_until(lambda: switches()[-1]["id"] == last, f"a follower at {last}; see {job.folder / 'follower.log'}")
    taken, compared = switches(), [line for line in switches() if line["stored"]]
    expect(taken[-1]["weights"] == taken[-1]["stored"], "the follower has the last checkpoint's weights, to the bit")
    expect(
        all(line["weights"] == line["stored"] for line in compared) and 2 * len(compared) > len(taken),
        f"it took {len(taken)}; {len(compared)} could be compared with the store, and none was a mixture",
    )


def tracked(job: Job) -> None:
    """The tracker has each step's loss once, and it is the step's.

    A file keeps the first value of a step. After the rollback, that is NaN for the steps that were computed before the loss was read.
    """
    rows = [(step, value) for step, _, value in lines_of(job.curve.read_text()) if step != job.bad]
    losses = {step: loss for step, loss in job.losses().items() if step != job.bad}
    lost = {row["step"] for row in job.rows() if math.isnan(row["loss"])}
    expect([step for step, _ in rows] == sorted(losses), f"the tracker has {len(rows)} steps, each once")
    same = [value == losses[step] for step, value in rows if step not in lost]
    expect(all(same), f"with the losses of the last time that each was made, but for {len(lost)} steps of a rollback")


CHECKS = {
    "device": on_the_device,
    "tls": encrypted,
    "mirrors": mirrored,
    "outward": copied_once,
    "follower": followed,
    "tracker": tracked,
}
