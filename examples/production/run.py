"""A production run and its trouble: ``python examples/production/run.py --seed 0 --out build/production``.

First a day of trouble, planted from outside (``stages.py``), then the same run with none of it, but for the one batch
that no run survives. Each stage states what it expects, and ends everything if something else happened. At the end
every step's loss must equal, to the bit, that of the run to which nothing happened. ``report.md`` has all results.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from cloud import Cloud  # noqa: E402
from expecting import PATIENCE_S, Unexpected, expect  # noqa: E402
from features import CHECKS, FEATURES, draw, left_out, table  # noqa: E402
from job import NODES, Job  # noqa: E402
from report import write_report  # noqa: E402
from stages import NEEDS, STAGES, Stage, preempted  # noqa: E402

DISK_MB = 256
APART, END_AFTER = 15, 30
"""Steps from one trouble to the next at least, and after the last one."""
SLOW_STEP_S = 2.0
"""Seconds of a step on the simulated accelerator, on a machine that is busy with others."""
BUSY = "the next save came before it was sent"
"""Reason of peers for a part that was not sent, on a machine that has too much to do."""


def straight_run(
    folder: Path,
    cloud: Cloud,
    most: int,
    steps: int,
    seed: int,
    features: frozenset[str],
    legs: list[tuple[int, int]],
    arguments: tuple[str, ...],
) -> Job:
    """Make the run to which nothing happens, except that its world has the required size at each step."""
    job = Job(folder / "straight", cloud, most, seed, features, arguments)
    try:
        for until, nodes in [*legs, (steps, NODES)]:
            job.start(nodes, "--until", str(until))
            what = f"the run to which nothing happens, to step {until}"
            job.end(0, what, patience_s=PATIENCE_S + SLOW_STEP_S * until)
        made = steps - (arguments.count("--without"))
        expect(len(job.losses()) == job.lines() == made, f"{made} steps, each once")
        expect(not job.incidents(), "no incidents")
        warnings = job.events("peers.failed", "peers.unreachable", "save.failed", "agent.lost", "agent.crashed")
        warnings = [event for event in warnings if event.get("why") != BUSY]
        expect(not warnings, f"and nothing to warn of{''.join(f'; {event}' for event in warnings)}")
        expect(job.checkpoints(job.cold), "there are checkpoints in the object store")
    finally:
        job.tidy()
    return job


def compare(job: Job, straight: Job) -> None:
    """The losses of both."""
    ours, theirs = job.losses(), straight.losses()
    wrong = [step for step, loss in theirs.items() if ours.get(step) != loss]
    shown = f"; not: {wrong[:10]}" if wrong else ""
    same = len(theirs) - len(wrong)
    expect(
        not wrong, f"{same} of {len(theirs)} losses are, to the bit, those of the run to which nothing happened{shown}"
    )
    expect(theirs.keys() <= ours.keys(), "no step is missing")


def day(
    folder: Path, seed: int, most: int, stages: list[Stage], features: frozenset[str], layout: tuple[str, ...]
) -> None:
    """Run the day of trouble, then the straight run, and compare them."""
    rng = random.Random(seed)
    lacking = left_out(features)
    features -= lacking.keys()
    switched = table(features, lacking)
    print(f"seed {seed} switches on:", *switched, sep="\n", flush=True)
    stages = [stage for stage in stages if NEEDS.get(stage) in {None, *features}]
    cloud = Cloud(folder)
    job = Job(folder / "trouble", cloud, most, seed, features, layout)
    try:
        cloud.start()
        for name in ("straight", "trouble"):
            cloud.new_bucket(f"{name}-store")
        job.mount(DISK_MB)
        job.start()
        if "follower" in features:
            job.follow()
        for stage in stages:
            job.reach(max(job.losses(), default=-1) + APART)
            print(f"seed {seed}, step {max(job.losses())}: {(stage.__doc__ or '').strip()}", flush=True)
            job.stages.append((stage.__name__, time.time(), max(job.losses())))
            stage(job, rng)
        steps = job.ends_in(END_AFTER)
        job.end(0, "the run with its troubles")
        print(f"seed {seed}: the end of the day", flush=True)
        for where in (job.hot, job.cold):
            job.relight("verify", where, fine=(0, 1) if preempted in stages else (0,))
        for name in sorted(features):
            CHECKS[name](job)
        print(f"seed {seed}: {steps} steps to which nothing happens", flush=True)
        without = () if job.bad < 0 else ("--without", str(job.bad))
        straight = straight_run(folder, cloud, most, steps, seed, features, job.legs, (*layout, *without))
        compare(job, straight)
        print(job.relight("goodput", job.hot))
        print(job.relight("incidents", job.hot))
        print(f"seed {seed}: {write_report(job, straight, seed, switched, folder)}", flush=True)
    finally:
        job.tidy()
        cloud.stop()


def main() -> int:
    """Exit code 1 if anything was not as expected."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=5000, help="at most; it ends when all has been planted")
    parser.add_argument(
        "--tp", type=int, default=1, help="ranks that share each feed-forward layer, in addition to FSDP2"
    )
    parser.add_argument("--out", type=Path, help="a new directory for everything, kept; otherwise none is")
    parser.add_argument("--only", nargs="*", choices=[stage.__name__ for stage in STAGES], help="these stages")
    parser.add_argument("--features", nargs="*", choices=FEATURES, help="these features, not those of the seed")
    options = parser.parse_args()
    stages = [stage for stage in STAGES if options.only is None or stage.__name__ in options.only]
    features = draw(options.seed) if options.features is None else frozenset(options.features)
    layout = ("--tp", str(options.tp))
    with tempfile.TemporaryDirectory(prefix="production-") as folder:
        try:
            day((options.out or Path(folder)).resolve(), options.seed, options.steps, stages, features, layout)
        except Unexpected as error:
            print(f"seed {options.seed}: NOT as expected: {error}", flush=True)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
