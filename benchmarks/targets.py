"""Relight's targets, as ratios to the machine's floors and to the best rival."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable
from typing import Any

from benchmarks.floors import NAME as FLOORS

Values = Callable[[dict[str, Any], str, str, str], dict[int, float]]
Ratio = Callable[[dict[str, Any], str, tuple[str, str], tuple[str, str]], "float | None"]
OURS = ("Relight", "Relight background")


def target_rows(kept: dict[str, Any], ratio: Ratio, values: Values) -> list[str]:
    """A table: figure, what was measured, target."""
    lines = ["| state | figure | " + " | ".join(OURS) + " | target |", "|---|---|---|---|---|"]
    for workload in kept["state_bytes"]:
        for figure, target, measured in _figures(kept, workload, ratio, values):
            cells = ["–" if value is None else f"{value:.3g}" for value in map(measured, OURS)]
            if cells != ["–", "–"]:
                lines.append(f"| {workload} | {figure} | {' | '.join(cells)} | {target} |")
        floors = [(name, values(kept, workload, FLOORS, name)) for name in ("memcpy_1", "memcpy_2", "blake3_1", "blake3_2", "direct_write",
                  "cold_read", "cached_read_blake3_1", "cached_read_blake3_2", "core_seconds")]  # fmt: skip
        medians = ", ".join(f"{name} {statistics.median(figures.values()):.3g}" for name, figures in floors if figures)
        lines.append(f"| {workload} | floors, s | {medians} | | |")
    return lines


def _figures(
    kept: dict[str, Any], workload: str, ratio: Ratio, values: Values
) -> list[tuple[str, str, Callable[[str], float | None]]]:
    cores = kept["machine"].get("cores", os.cpu_count() or 1)
    many = workload.endswith(("1e4", "1e5"))
    trained = not workload.startswith("spread")

    def to_floor(name: str, floor: str, scale: float = 1.0) -> Callable[[str], float | None]:
        def measured(ours: str) -> float | None:
            share = ratio(kept, workload, (ours, name), (FLOORS, floor))
            return None if share is None else share * scale

        return measured

    def median(function: Callable[[dict[str, Any]], float]) -> Callable[[str], float | None]:
        def measured(ours: str) -> float | None:
            cells = [row["cells"].get(ours, {}).get("figures") for row in kept["rounds"] if row["workload"] == workload]
            results = [function(figures) for figures in cells if figures]
            return statistics.median(results) if results else None

        return measured

    def to_best(names: tuple[str, ...]) -> Callable[[str], float | None]:
        def measured(ours: str) -> float | None:
            own, theirs = values(kept, workload, ours, "lost"), [values(kept, workload, name, "lost") for name in names]
            pairs = []
            for number, value in own.items():
                others = [their[number] for their in theirs if their.get(number, 0) > 0]
                if others:
                    pairs.append(value / min(others))
            return statistics.median(pairs) if pairs else None

        return measured

    def blocked_over(ours: str) -> float | None:
        memcpy, own = (
            values(kept, workload, FLOORS, "memcpy_1"),
            values(kept, workload, ours, "blocked" if trained else "idle_blocked"),
        )
        pairs = [own[number] / (0.002 + 0.02 * memcpy[number]) for number in own.keys() & memcpy.keys()]
        return statistics.median(pairs) if pairs else None

    def pooled(ours: str) -> list[tuple[float, float, float]]:
        """Return each step during a save, with the median and the mean of its cell's steps without."""
        steps = []
        for row in kept["rounds"]:
            figures = row["cells"].get(ours, {}).get("figures", {})
            plain = figures.get("steps_plain") if row["workload"] == workload else None
            if plain:
                steps += [(step, statistics.median(plain), statistics.mean(plain)) for step in figures["steps_running"]]
        return steps

    def step_p99(ours: str) -> float | None:
        ratios = sorted(step / middle for step, middle, _ in pooled(ours))
        return ratios[min(len(ratios) - 1, int(0.99 * len(ratios)))] if ratios else None

    def step_mean(ours: str) -> float | None:
        ratios = [step / mean for step, _, mean in pooled(ours)]
        return statistics.mean(ratios) if ratios else None

    def near_over(ours: str) -> float | None:
        own = values(kept, workload, ours, "near_load")
        memcpy, hashing = values(kept, workload, FLOORS, "memcpy_2"), values(kept, workload, FLOORS, "blake3_2")
        pairs = [own[number] / (memcpy[number] + hashing[number]) for number in own.keys() & memcpy.keys()]
        return statistics.median(pairs) if pairs else None

    def near_to_cold(ours: str) -> float | None:
        return ratio(kept, workload, (ours, "near_load"), (ours, "cold_load"))

    rivals = tuple(name for name in kept["rivals"] if name not in OURS)
    dcp = tuple(name for name in rivals if name.startswith("DCP"))
    rows: list[tuple[str, str, Callable[[str], float | None]]] = [
        ("blocks / (2 ms + 0.02 × memcpy)", "≤ 1", blocked_over)
    ]
    if trained:
        rows += [
            ("lost / (core seconds of copy, hash, write / cores)", "≤ 1.25", to_floor("lost", "core_seconds", cores)),
            ("lost / best rival's lost, in each round", "≤ 1/3", to_best(rivals)),
            ("lost / best DCP's lost, in each round", "≤ 1/5", to_best(dcp)),
            ("p99 step in a save / median step", "≤ 1.5", step_p99),
            ("mean step in a save / mean step", "≤ 1.03 beyond the writing's own core time", step_mean),
        ]
    return [
        *rows,
        ("durable, idle / direct write", "≤ 1.35" if many else "≤ 1.10", to_floor("idle_durable", "direct_write")),
        ("cold load / cold read", "≤ 1.40" if many else "≤ 1.10", to_floor("cold_load", "cold_read")),
        ("warm load / cached read + hash", "≤ 1.2", to_floor("warm_load", "cached_read_blake3_2")),
        ("load from memory / (memcpy + hash)", "≤ 1.3", near_over),
        ("load from memory / cold load", "≤ 1/4", near_to_cold),
        (
            "memory of saves / state",
            "≤ 1.02 one slot, ≤ 2.02 two",
            median(lambda one: one["save_memory"] / one["state_bytes"]),
        ),
        ("memory of a load, MiB", "≤ 128", median(lambda one: one["load_memory"] / (1 << 20))),
        ("bytes on disk / state", "≤ 1.002", median(lambda one: one["disk_bytes"] / one["state_bytes"])),
    ]
