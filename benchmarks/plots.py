"""Plots: bars of lost time, time to durable and loads; for the spread, lines over the number of tensors."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

BARS = {
    "lost": "training time lost per save",
    "durable": "until durable, in training",
    "cold_load": "cold load",
    "warm_load": "warm load",
}
LINES = {
    "idle_blocked": "the call blocks",
    "idle_durable": "until durable",
    "cold_load": "cold load",
    "warm_load": "warm load",
}
OURS, THEIRS = "#c2410c", "#94a3b8"


def draw(kept: dict[str, Any], path: Path) -> None:
    """One picture."""
    spread = len(kept["state_bytes"]) > 1
    names = LINES if spread else BARS
    figure, axes = plt.subplots(2, 2, figsize=(13, 9), layout="constrained")
    for axis, (name, title) in zip(axes.flat, names.items(), strict=True):
        axis.set_title(title, loc="left", fontsize=11)
        (_lines if spread else _bars)(kept, name, axis)
        axis.spines[["top", "right"]].set_visible(False)
    if spread:
        handles, labels = axes.flat[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=5, fontsize=8, frameon=False)
    machine, size = kept["machine"], next(iter(kept["state_bytes"].values())) / 1e9
    rounds = max((row["round"] for row in kept["rounds"]), default=0)
    figure.suptitle(
        f"{kept['size']}: {size:.2f} GB of state, {rounds} rounds, {machine['cores']} cores, torch {machine['torch']}; "
        "every fsync counted; marks: least and most",
        fontsize=10,
    )
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _found(kept: dict[str, Any], workload: str, rival: str, name: str) -> list[float]:
    cells = [row["cells"].get(rival, {}).get("figures", {}) for row in kept["rounds"] if row["workload"] == workload]
    return [figures[name] for figures in cells if name in figures]


def _bars(kept: dict[str, Any], name: str, axis: Axes) -> None:
    workload = next(iter(kept["state_bytes"]))
    rows = [(rival, values) for rival in reversed(kept["rivals"]) if (values := _found(kept, workload, rival, name))]
    for place, (rival, values) in enumerate(rows):
        middle = statistics.median(values)
        axis.barh(place, middle, color=OURS if rival.startswith("Relight") else THEIRS, height=0.65)
        axis.plot([min(values), max(values)], [place, place], color="black", linewidth=1, marker="|", markersize=6)
        axis.annotate(
            f"{middle:.2f}",
            (max(*values, 0), place),
            xytext=(6, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
        )
    axis.set_yticks(range(len(rows)), [rival for rival, _ in rows], fontsize=8)
    axis.set_xlabel("s", fontsize=8)
    axis.margins(x=0.1)


def _lines(kept: dict[str, Any], name: str, axis: Axes) -> None:
    for number, rival in enumerate(kept["rivals"]):
        points = [
            (float(workload.rpartition("-")[2]), _found(kept, workload, rival, name))
            for workload in kept["state_bytes"]
        ]
        points = [(count, values) for count, values in points if values]
        own = rival.startswith("Relight")
        axis.plot(
            [count for count, _ in points], [statistics.median(values) for _, values in points],
            label=rival, color=OURS if own else plt.cm.tab20(number), linewidth=2.5 if own else 1.2,
            linestyle="--" if rival == "Relight" else "-", marker="o", markersize=3,
        )  # fmt: skip
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set_xlabel("tensors", fontsize=8)
    axis.set_ylabel("s", fontsize=8)
