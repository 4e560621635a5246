"""``python -m benchmarks.compact``: does ``codecs="auto"`` ever make a save slower than none, on stores of any speed?

The state of a GPT that trains in mixed precision is saved to the disk at ``--dir``, at its full speed and at limited
rates, with codecs off, ``"auto"`` and ``"always"``, in an order drawn for each round. The processors are idle, or used
by a training (the saver has a lower priority than it, as the agent has). Seconds are until the packs, part, root and
record are durable; ratios to "never" are of the same round. Earlier saves, which do not count, give ``"auto"`` its
measurements.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import shutil
import statistics
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.codecs import train
from benchmarks.machine import describe
from relight.commit import Attempt, PackPlan, SaveInfo, SaveRequest, plan_save
from relight.commit.chunk_index import IncrementalState
from relight.commit.save import new_id
from relight.format import encode_tree
from relight.layout import Bytes, Item
from relight.layout.sources import copy_from
from relight.policy.compact import Compact
from relight.store import PAGE, LocalStore, Writer, page_buffer
from relight.store.wrapper import StoreWrapper

RATES: tuple[float | None, ...] = (100, 400, 1000, None)
"""Megabytes a second; None: as the disk."""
MODES = ("never", "auto", "always")
NICE = 10
LEARNS = 3
"""Saves that do not count."""


class Slowed(StoreWrapper):
    """Takes no more than so many bytes a second, all writers together."""

    def __init__(self, inner: LocalStore, rate: float | None) -> None:
        super().__init__(inner)
        self.rate, self.lock, self.free_at = rate, threading.Lock(), 0.0

    def write(self, key: str, size: int) -> Writer:
        """See ``ByteStore``."""
        return _Slowed(self.inner.write(key, size), self)

    def take(self, length: int) -> None:
        """Waits as long as the link takes for so much."""
        if self.rate is None:
            return
        with self.lock:
            self.free_at = max(self.free_at, time.perf_counter()) + length / self.rate / 1e6
            until = self.free_at
        time.sleep(max(0.0, until - time.perf_counter()))


class _Slowed:
    def __init__(self, inner: Writer, store: Slowed) -> None:
        self.inner, self.store, self.align = inner, store, inner.align

    def write_at(self, offset: int, data: memoryview) -> None:
        self.inner.write_at(offset, data)
        self.store.take(len(data))

    def finish(self, size: int | None = None) -> None:
        self.inner.finish(size)

    def abort(self) -> None:
        self.inner.abort()


class Case:
    """Saves of one way, to one store."""

    def __init__(self, folder: Path, rate: float | None, mode: str, items: list[Item]) -> None:
        self.folder, self.items, self.step = folder, items, 0
        self.attempt = Attempt.begin(Slowed(LocalStore(folder), rate), "run")
        self.attempt.make_smaller(Compact(reuse=False, codecs=mode))

    def save(self) -> tuple[float, float, str]:
        """Save once and delete the files. Return seconds, stored bytes over logical ones, and the reason of the
        choice."""
        saved = new_id()
        plan = plan_save(self.items, id=saved)
        plan = replace(plan, packs=[replace(pack, image=in_memory(pack)) for pack in plan.packs])
        began = time.perf_counter()
        request = SaveRequest(
            SaveInfo(step=self.step), tree=encode_tree({}), items=self.items, id=saved, plan=plan, smaller=self.smaller
        )
        report = self.attempt.save(request)
        seconds, self.step = time.perf_counter() - began, self.step + 1
        for path in (self.folder / "run" / report.dir).glob("pack-*"):
            path.unlink()
        chosen = self.smaller.chosen
        return seconds, report.stored_bytes / report.logical_bytes, "" if chosen is None else chosen.reason

    @property
    def smaller(self) -> IncrementalState:
        """Return what the case has learned."""
        assert self.attempt.smaller is not None
        return self.attempt.smaller


IMAGES: dict[int, memoryview] = {}


def in_memory(pack: PackPlan) -> memoryview:
    """Return the whole pack in memory, as an agent has it. Its tensors are the same each time."""
    image = IMAGES.setdefault(pack.size, page_buffer(-(-pack.size // PAGE) * PAGE))
    offset = 0
    for source in pack.sources[: 1 if image[offset] and len(pack.sources) > 1 else None]:
        copy_from(source, 0, image[offset : offset + source.length])
        offset += source.length
    return image


def _busy(running: Any, ended: Any) -> None:
    """Trains, more or less, on all processors."""
    left, right = torch.randn(768, 768), torch.randn(768, 768)
    while not ended.is_set():
        if running.wait(0.1):
            left = torch.tanh(left @ right)


def main() -> None:
    """Run all cases and print the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=["S", "M"], default="M")
    parser.add_argument("--share", type=float, default=0.15, help="so much of each kind of its tensors")
    parser.add_argument("--warm", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/compact.json"))
    options = parser.parse_args()
    state = next(train(options.size, True, options.warm))[1]
    items = [
        Item(
            name,
            "bfloat16" if "bfloat16" in name else "float32",
            (len(data) // (2 if "bfloat16" in name else 4),),
            "optim" if "moment" in name else "param",
            Bytes(data),
        )
        for name, data in ((name, data[: int(len(data) * options.share) // 8 * 8]) for name, data in state.items())
    ]
    folder = Path(tempfile.mkdtemp(prefix="compact-", dir=options.dir))
    starting = multiprocessing.get_context("spawn")
    rows: list[dict[str, Any]] = []
    running, ended = starting.Event(), starting.Event()
    plain_pair = starting.Process(target=_busy, args=(running, ended))
    plain_pair.start()
    os.nice(NICE)  # after the other process has started, which must keep its priority
    try:
        for busy in (False, True):
            cases = {
                (rate, mode): Case(folder / f"{busy}-{rate}-{mode}", rate, mode, items)
                for rate in RATES
                for mode in MODES
            }
            if busy:
                running.set()
                time.sleep(3)
            try:
                for (rate, mode), case in cases.items():
                    times = [f"{case.save()[0]:.2f} s" for _ in range(LEARNS)]
                    print(
                        f"{'busy' if busy else 'idle'}, {rate or 'disk'}, {mode}: learns by saves of {', '.join(times)}",
                        flush=True,
                    )
                took: dict[tuple[float | None, str], list[tuple[float, float, str]]] = {}
                for number in range(options.rounds):
                    for key in random.Random(number).sample(list(cases), len(cases)):
                        took.setdefault(key, []).append(cases[key].save())
                    print(f"round {number + 1} of {options.rounds}", flush=True)
            finally:
                running.clear()
            for (rate, mode), pairs in took.items():
                plain = took[rate, "never"]
                ratio = statistics.median(
                    pair[0] / plain_pair[0] for pair, plain_pair in zip(pairs, plain, strict=True)
                )
                rows.append({
                    "busy": busy, "mb_s": rate, "codecs": mode, "seconds": statistics.median(row[0] for row in pairs), "over_never": ratio,
                    "of_it": statistics.median(row[1] for row in pairs), "said": pairs[-1][2],
                })  # fmt: skip
    finally:
        ended.set()
        plain_pair.join(30)
        shutil.rmtree(folder, ignore_errors=True)
    rows.sort(key=lambda row: (row["busy"], row["mb_s"] or 1e9, MODES.index(row["codecs"])))
    report = {
        "size": options.size,
        "warm": options.warm,
        "rounds": options.rounds,
        "machine": describe(options.dir),
        "rows": rows,
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(f"{'processors':10} {'MB/s':>6} {'codecs':8} {'seconds':>8} {'/ never':>8} {'of it':>6}  why")
    for row in rows:
        load, rate = "busy" if row["busy"] else "idle", row["mb_s"] or "disk"
        print(
            f"{load:10} {rate:>6} {row['codecs']:8} {row['seconds']:8.2f} {row['over_never']:8.2f} {row['of_it']:6.3f}  {row['said']}"
        )


if __name__ == "__main__":
    main()
