"""``make outward``: processes copy a checkpoint of eight ranks to a further tier together, and one of them is killed at a random moment.

Each trial: four processes, each with the parts of two ranks; one gets SIGKILL. The others complete the copy. Then the tier must have the
checkpoint once, every byte must verify, and the next drain must find nothing to do. With ``--all`` every process is killed, and the
next drain completes the copy.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.commit.thread_ranks import Ranks

from relight.catalog import Run
from relight.catalog.tiers import announce
from relight.drain import drain
from relight.policy import Tiers, tier
from relight.reader import verify_checkpoint
from relight.store import LocalStore
from relight.transfer import shared_copy

PROCESSES, RANKS, TIME_S = 4, 8, 0.5
FORK = multiprocessing.get_context("fork")


class WideRanks(Ranks):
    """Ranks with enough bytes for a kill to hit."""

    def request(self, rank: int, step: int, timeout_s: float, value: int) -> Any:
        from relight.layout import Box, Bytes, Item

        request = super().request(rank, step, timeout_s, value)
        size = 1 << 18
        request.items[:] = [
            Item("t", "uint8", (self.world, size), "value", Bytes(bytes([value]) * size), Box((rank, 0), (1, size)))
        ]
        return request


def node(near: Path, number: int) -> None:
    """Copy, as one node."""
    shared_copy.LATE_AFTER_S = 0.4  # else each trial would wait for seconds
    each = RANKS // PROCESSES
    report = drain(LocalStore(near), "run", ranks=frozenset(range(number * each, (number + 1) * each)))
    os._exit(1 if report.errors or any(report.owed.values()) else 0)


def trial(seed: int, folder: Path, everyone: bool) -> str:
    """Return what is wrong, or an empty text; ``missed`` if the processes had ended before the kill."""
    rng = random.Random(seed)
    ranks = WideRanks(folder / "near", RANKS)
    saved = ranks.save(1)[0]
    tiers = Tiers(
        near=folder / "near" / "run", far=tier(str(folder / "far" / "run"), bytes_per_second=RANKS * (1 << 18) / TIME_S)
    )
    announce(ranks.attempt.place.log, tiers.tiers, ranks.attempt.epoch)
    processes = [FORK.Process(target=node, args=(folder / "near", number)) for number in range(PROCESSES)]
    for process in processes:
        process.start()
    time.sleep(rng.random() * 1.6 * TIME_S)
    victims = processes if everyone else [rng.choice(processes)]
    missed = not any(victim.is_alive() for victim in victims)
    for victim in victims:
        victim.kill()
    for process in processes:
        process.join(60)
        if process.exitcode is None:
            process.kill()
            return "a process did not end within 60 s"
        if process.exitcode not in (0, -signal.SIGKILL):
            return f"a process that was not killed ended with {process.exitcode}"
    last = drain(LocalStore(folder / "near"), "run")
    if last.errors:
        return f"the next drain failed: {last.errors}"
    if last.copied and not everyone:
        return "the processes that lived did not complete the copy"
    run = Run(LocalStore(folder / "far"), "run")
    live = run.history().live
    if [checkpoint.original_id for checkpoint in live] != [saved.id]:
        return f"the tier has {[checkpoint.id for checkpoint in live]}"
    if damage := verify_checkpoint(run.store, run.view(), live[0]):
        return f"damaged: {damage}"
    return "missed" if missed else ""


def main() -> int:
    """Exit code 1 if anything is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=200, help="kills that hit")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--all", action="store_true", help="kill every process, and let a new one continue")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    hit, wrong, seed = 0, list[str](), options.seed
    while hit < options.count:
        folder = Path(tempfile.mkdtemp(prefix="outward-"))
        outcome = trial(seed, folder, options.all)
        shutil.rmtree(folder, ignore_errors=True)
        hit += outcome != "missed"
        if outcome not in ("", "missed"):
            wrong.append(f"seed {seed}: {outcome}")
            print(wrong[-1], file=sys.stderr, flush=True)
        seed += 1
        if hit % 20 == 0 and outcome != "missed":
            print(f"{hit} of {options.count} kills, {len(wrong)} wrong", file=sys.stderr, flush=True)
    print(
        json.dumps({"kills": hit, "trials": seed - options.seed, "wrong": wrong})
        if options.json
        else f"{hit} kills, {len(wrong)} wrong"
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
