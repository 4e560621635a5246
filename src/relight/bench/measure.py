"""Rounds of measurements, in another random order each time, so that other work on the machine affects all figures alike."""

from __future__ import annotations

import importlib.util
import os
import platform
import random
import statistics
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from relight.arena import available_bytes
from relight.bench import floors
from relight.bench.advice import BenchFacts, advise
from relight.bench.cache import drop_cache, read_through
from relight.bench.figures import floor_figures, medians, noise, our_figures, thread_counts, useful
from relight.bench.pace import write_image
from relight.bench.place import BenchDir, end_between, find_store, make_place
from relight.bench.plan import BenchPlan, BenchSpace, plan_bench, spread
from relight.bench.report import BenchReport
from relight.errors import ConfigError
from relight.store import LocalStore
from relight.units import percent_text
from relight.version import VERSION

if TYPE_CHECKING:
    from relight.bench.ours import Ours
    from relight.bench.state import BenchState

T = TypeVar("T")
Progress = Callable[[int], None]
Block = Callable[[dict[str, float]], None]
_FIRST_BYTES = 16_000_000
"""Bytes written to estimate the disk's speed, before the size of the state is chosen."""
LOST_TIMES = 3
"""Number of saves in a round with measured cost to training: no other figure differs as much from save to save."""
_WARM = 0.1
"""Fraction in the page cache above which a checkpoint does not count as cold."""


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """What to measure, and how to show progress: ``progress(label, bytes)`` is called once."""

    store: str = "runs"
    size: int | None = None
    tensors: int | None = None
    rounds: int = 5
    progress: Callable[[str, int], AbstractContextManager[Progress]] = field(
        default=lambda label, total: nullcontext(lambda count: None)
    )


def run(options: BenchOptions) -> BenchReport:
    """Measure, and return figures and recommended settings. Raise ``NoSpace`` if disk or memory do not suffice. All files are removed."""
    if options.tensors is not None and options.tensors < 1:
        raise ConfigError(f"--tensors must be a whole number from 1 on, not {options.tensors}")
    store = find_store(options.store)
    torch = importlib.util.find_spec("torch") is not None
    available = available_bytes()
    before = BenchSpace(store.free_bytes(), available, torch=torch)
    plan_bench(before, options.size, options.rounds, where=store.url)  # refuses before a file is written
    with end_between() as end_if_asked, make_place(store) as place:
        room = (
            before
            if options.size is not None
            else BenchSpace(before.disk_bytes, available, _write_bps(place.folder), torch)
        )
        plan = plan_bench(room, options.size, options.rounds, where=store.url)
        state = _make_state(plan, options.tensors) if torch else None
        end_if_asked()
        size = state.size if state is not None else plan.size
        bench = _Bench(place, plan, size, end_if_asked)
        with options.progress("measuring", bench.moved_bytes(torch)) as meter:
            bench.measure(state, meter)
    facts = _facts(options, plan, bench, available)
    threads = {"memcpy": bench.copying, "hash": bench.hashing}
    floor_rows = floor_figures(bench.rounds, size, threads)
    return BenchReport(
        store=store.url,
        state_bytes=size,
        tensors=bench.tensors,
        rounds=plan.rounds,
        machine=_machine(bench, available),
        floors=tuple(floor_rows),
        relight=tuple(our_figures(bench.rounds, size, "write_direct" if bench.direct else "write_buffered")),
        pace=tuple(sorted(facts.pace.items())),
        notes=(*bench.notes, *noise(floor_rows)),
        advice=advise(facts),
    )


class _Bench:
    """All measurements. ``rounds`` has seconds by name. Floors in memory are measured with a part of the size, and scaled."""

    def __init__(self, place: BenchDir, plan: BenchPlan, size: int, end_if_asked: Callable[[], None]) -> None:
        self._folder, self._plan, self.size, self._end_if_asked = place.folder, plan, size, end_if_asked
        self._store = LocalStore(place.folder)
        self._source, self._target = floors.bytes_in_ordinary_pages(plan.part), floors.random_bytes(plan.part)
        self._meter: Progress = lambda count: None
        self._scale = size / plan.part
        self.cores = len(os.sched_getaffinity(0))
        self.counts = thread_counts(self.cores)
        self.direct = floors.direct_works(place.folder)
        self.copying = self.hashing = 1
        self.rounds: list[dict[str, float]] = []
        self.tensors: int | None = None
        self.accelerator = False
        self.notes = [
            f"{left} exists: another bench is running, or was killed; if none is running, remove it"
            for left in place.left
        ]

    def moved_bytes(self, torch: bool) -> int:
        """Return how many bytes will be reported as progress."""
        memory = (4 + len(self.counts) + self.direct) * self._plan.part
        return self._plan.rounds * (memory + 4 * self.size + torch * (5 + LOST_TIMES) * self.size)

    def measure(self, state: BenchState | None, meter: Progress) -> None:
        """Measure all rounds."""
        self._choose_threads()
        self._meter = meter
        if state is None:
            self.notes.append(
                "torch is not installed: only floors and the writing of packs were measured, no saves and restores"
            )
            self._rounds([self._memory, self._disk, self._pace])
            return
        from relight.bench.ours import at_work
        from relight.bench.state import has_accelerator

        self.accelerator, self.tensors = has_accelerator(), len(state.tensors())
        if self.accelerator:
            self.notes.append(
                "there is an accelerator, but the state is in host memory: copies from the device are not measured"
            )
        with at_work(self._folder, state) as runs:
            blocks: list[Block] = [self._memory, self._disk, self._pace, partial(self._waiting, runs)]
            if runs.warm_up():
                blocks.append(partial(self._background, runs))
            else:
                self.notes.append("saves in the background are not available here: the warnings above have the reason")
            self._rounds(blocks)
            if runs.cold_resident > _WARM:
                self.notes.append(
                    f"the page cache could not be emptied ({percent_text(runs.cold_resident)} stayed): figures labelled cold are not cold"
                )

    def _rounds(self, blocks: list[Block]) -> None:
        for number in range(self._plan.rounds):
            row: dict[str, float] = {}
            order = list(blocks)
            random.Random(number).shuffle(order)
            for block in order:
                block(row)
            self.rounds.append(row)

    def _choose_threads(self) -> None:
        """Choose the number of threads for copying and hashing by the best of three tries: a disturbance only slows a try down."""

        def choose(action: Callable[[int], None]) -> int:
            self._end_if_asked()
            return useful({count: min(floors.timed(partial(action, count)) for _ in range(3)) for count in self.counts})

        self.copying = choose(partial(floors.copy, self._target, self._source))
        self.hashing = choose(partial(floors.hash_bytes, self._source))

    def _memory(self, row: dict[str, float]) -> None:
        for name, action in (
            ("memcpy_1", partial(floors.copy, self._target, self._source, 1)),
            ("memcpy", partial(floors.copy, self._target, self._source, self.copying)),
            ("hash_1", partial(floors.hash_bytes, self._source, 1)),
            ("hash", partial(floors.hash_bytes, self._source, self.hashing)),
        ):
            row[name] = self._timed(action, self._plan.part) * self._scale

    def _disk(self, row: dict[str, float]) -> None:
        path, block, size = self._folder / "floor", self._target, self.size
        less = self._plan.part if self.direct else size  # slow, and only a comparison where direct I/O works
        row["write_buffered"] = self._timed(partial(floors.write, path, block, less, direct=False), less) * size / less
        if self.direct:
            path.unlink()
            row["write_direct"] = self._timed(partial(floors.write, path, block, size, direct=True))
        reads = []
        for threads, direct in ((1, self.direct), (2, self.direct)):
            drop_cache(self._folder)
            reads.append(self._timed(partial(floors.read, path, size, threads, direct=direct)))
        row["read_cold"] = min(reads)
        read_through(self._folder)
        row["read_cached"] = self._timed(partial(floors.read, path, size, self.copying))
        path.unlink()

    def _pace(self, row: dict[str, float]) -> None:
        for count in self.counts:
            key = f"pace/{count}"
            row[f"pace_{count}"] = self._timed(
                partial(write_image, self._store, key, self._source, count), self._plan.part
            )
            self._store.delete(key)

    def _waiting(self, ours: Ours, row: dict[str, float]) -> None:
        for name, action in (
            ("save_waiting", ours.save_waiting),
            ("restore_cold", ours.restore_cold),
            ("restore_warm", ours.restore_warm),
        ):
            row[name] = self._reported(action)
        ours.forget()

    def _background(self, ours: Ours, row: dict[str, float]) -> None:
        row["save_blocked"], row["save_durable"] = self._reported(ours.save_background)
        seconds = self._reported(ours.restore_memory)
        if seconds is not None:
            row["restore_memory"] = seconds
        ours.forget()
        lost = []
        for _ in range(LOST_TIMES):
            lost.append(self._reported(ours.save_training))
            ours.forget()
        row["save_lost"] = statistics.median(lost)

    def _reported(self, action: Callable[[], T]) -> T:
        """Run ``action`` unless the bench was asked to end, and report its bytes as progress."""
        self._end_if_asked()
        result = action()
        self._meter(self.size)
        return result

    def _timed(self, action: Callable[[], object], size: int | None = None) -> float:
        self._end_if_asked()
        seconds = floors.timed(action)
        self._meter(self.size if size is None else size)
        return seconds


def _make_state(plan: BenchPlan, tensors: int | None) -> BenchState:
    from relight.bench.state import BenchState

    return BenchState(spread(plan.size, tensors))


def _write_bps(folder: Path) -> float:
    """Return the bytes per second at which a first file is written."""
    path, direct = folder / "first", floors.direct_works(folder)
    block = floors.random_bytes(_FIRST_BYTES)
    seconds = floors.timed(partial(floors.write, path, block, _FIRST_BYTES, direct=direct))
    path.unlink()
    return _FIRST_BYTES / seconds


def _machine(bench: _Bench, available: int | None) -> dict[str, object]:
    """Return facts about the machine, without names of hosts or paths."""
    return {
        "relight": VERSION,
        "python": platform.python_version(),
        "processor": platform.machine(),
        "cores": bench.cores,
        "memory_available": available,
        "accelerator": bench.accelerator,
        "direct_io": bench.direct,
    }


def _facts(options: BenchOptions, plan: BenchPlan, bench: _Bench, available: int | None) -> BenchFacts:
    seconds = medians(bench.rounds)
    return BenchFacts(
        store=options.store,
        state_bytes=bench.size,
        asked=plan.asked,
        available_bytes=available,
        direct=bench.direct,
        write_buffered_s=seconds["write_buffered"],
        write_direct_s=seconds.get("write_direct"),
        pace={count: plan.part / seconds[f"pace_{count}"] for count in bench.counts},
        accelerator=bench.accelerator,
        waiting_s=seconds.get("save_waiting"),
        blocked_s=seconds.get("save_blocked"),
        durable_s=seconds.get("save_durable"),
        lost_s=seconds.get("save_lost"),
    )
