"""Tables and plots from what a run kept: medians and spread, ratios of same-round pairs, figures against floors and targets."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from benchmarks import plots
from benchmarks.floors import NAME as FLOORS
from benchmarks.targets import target_rows

BUSY = 0.1
"""More than this part of the processors in other hands, and a figure is doubtful."""
OURS = ("Relight background", "Relight")
TRAINED = {
    "blocked": "blocks", "lost": "lost", "durable": "durable", "idle_durable": "durable, idle", "idle_cpu": "CPU",
    "cold_load": "cold load", "warm_load": "warm load",
}  # fmt: skip
SPREAD = {
    "idle_blocked": "blocks",
    "idle_durable": "durable",
    "idle_cpu": "CPU",
    "cold_load": "cold load",
    "warm_load": "warm load",
}
RATIOS = ("lost", "durable", "idle_durable", "idle_cpu", "cold_load", "warm_load")
NOTES = """
Seconds: median (least–most) of the rounds. *blocks*: the call. *lost*: wall time of steps with a save until it is durable and no helper
process is busy any more, less that of as many steps without, taken in the same process just before and after. *durable*: from the call
until all is on the disk, in training; *idle*: the same, and *CPU* (all processes), with the trainer waiting. Durability is counted for
everybody: after a rival's own end every file and directory of its save is fsynced in a thread, which counts in *durable* and, as far as
training feels it, in *lost*; Relight does its own. *memory*: peak of private and shared memory of all processes beyond the training's own,
over the first two saves; *load memory*: peak resident memory while loading, mapped files included. Loads go into live objects, cold ones
after the page cache was dropped (`mincore` checks it), warm ones after reading every byte once; Relight verifies every byte, the others
none. *as called*: whether every tensor was stored as it was at the call. Relight prunes within its time, others' old saves are removed
outside theirs. In each cell idle saves, loads, and the floors too, are medians of three where the state is below 2 GiB; the floor of
reading is that of the best way.
"""


def values(kept: dict[str, Any], workload: str, rival: str, name: str) -> dict[int, float]:
    """A figure by round, of the rounds that have it."""
    by_cell = {}
    for row in kept["rounds"]:
        figures = row["cells"].get(rival, {}).get("figures", {})
        if row["workload"] == workload and isinstance(figures.get(name), int | float):
            by_cell[row["round"]] = figures[name]
    return by_cell


def ratio(kept: dict[str, Any], workload: str, ours: tuple[str, str], theirs: tuple[str, str]) -> float | None:
    """Return the median of same-round ratios of two (rival, figure). Rounds with a divisor of 0 or less are left
    out."""
    a, b = values(kept, workload, *ours), values(kept, workload, *theirs)
    pairs = [a[number] / b[number] for number in a.keys() & b.keys() if b[number] > 0]
    return statistics.median(pairs) if pairs else None


def brief(cell: dict[str, Any]) -> str:
    """Return a cell as one line."""
    if "figures" not in cell:
        return cell.get("error") or cell.get("why_not") or "cannot run"
    others = f", others took {cell['others']:.0%}" if cell.get("others", 0) > BUSY else ""
    names = [
        name for name in (*TRAINED, "idle_blocked", "memcpy_1", "direct_write", "cold_read") if name in cell["figures"]
    ]
    return ", ".join(f"{name} {cell['figures'][name]:.3g}" for name in names) + others


def write(kept: dict[str, Any], path: Path) -> None:
    """Write ``path``'s neighbours ``.md`` and ``.png``, and print the table."""
    text = "\n".join(page(kept)) + "\n"
    path.with_suffix(".md").write_text(text, encoding="utf-8")
    print("\n" + text)
    plots.draw(kept, path.with_suffix(".png"))


def page(kept: dict[str, Any]) -> list[str]:
    """The whole page."""
    machine, rounds = kept["machine"], max((row["round"] for row in kept["rounds"]), default=0)
    lines = [f"# Bench {kept['size']}, {rounds} rounds, seed {kept['seed']}", ""]
    lines.append("; ".join(f"{name.replace('_', ' ')} {value}" for name, value in machine.items()))
    lines.append(NOTES)
    if kept.get("environment"):
        settings = " ".join(f"{name}={value}" for name, value in kept["environment"].items())
        lines.append(
            f"Every cell ran with `{settings}`: training that gives its memory back spends a fifth of each step on page faults.\n"
        )
    workloads = list(kept["state_bytes"])
    for workload in workloads:
        lines += [
            f"## {workload}: {kept['state_bytes'][workload] / 1e9:.3f} GB of state",
            "",
            *table(kept, workload),
            "",
        ]
        lines += [*ratio_table(kept, workload), ""]
    lines += ["## Against the floors", "", *target_rows(kept, ratio, values), ""]
    if len(workloads) > 1:
        lines += ["## A tensor more costs", "", *slopes(kept, workloads), ""]
    lines += [*remarks(kept), "## How each is used", ""]
    lines += [
        f"- **{name}** ({kept['versions'].get(name, '?')}): {kept['how'][name]}"
        for name in kept["rivals"]
        if name in kept["how"]
    ]
    lines += [f"- **{name}** cannot run here: {why}" for name, why in kept["why_not"].items()]
    return lines


def table(kept: dict[str, Any], workload: str) -> list[str]:
    """A row a rival, also for the one that cannot run."""
    columns = SPREAD if workload.startswith("spread") else TRAINED
    heads = ["", *columns.values(), "memory MB", "load memory MB", "disk / state", "as called"]
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    for rival in [*kept["rivals"]]:
        cells = [row["cells"][rival] for row in kept["rounds"] if row["workload"] == workload and rival in row["cells"]]
        good = [cell["figures"] for cell in cells if "figures" in cell]
        if not good:
            why = kept["why_not"].get(rival) or next(
                (cell["error"] for cell in cells if "error" in cell), "did not run"
            )
            lines.append(f"| {rival} | {why} |" + " |" * (len(heads) - 2))
            continue
        row = [rival + (f" ({len(cells) - len(good)} of {len(cells)} rounds failed)" if len(good) < len(cells) else "")]
        row += [spread([figures[name] for figures in good if name in figures]) for name in columns]
        row += [
            f"{statistics.median(figures[name] for figures in good) / 1e6:.0f}"
            for name in ("save_memory", "load_memory")
        ]
        row.append(f"{statistics.median(figures['disk_bytes'] / figures['state_bytes'] for figures in good):.4f}")
        wrong = max(figures["wrong"] for figures in good)
        row.append(f"**{wrong} wrong**" if wrong else "yes")
        lines.append("| " + " | ".join(row) + " |")
    return lines


def ratio_table(kept: dict[str, Any], workload: str) -> list[str]:
    """Relight's figure / the rival's."""
    ours = next((name for name in OURS if values(kept, workload, name, "idle_durable")), None)
    if ours is None:
        return ["Relight did not run, so there are no ratios."]
    names = [name for name in RATIOS if values(kept, workload, ours, name)]
    lines = [
        f"**{ours} / rival**, medians of same-round ratios",
        "",
        "| | " + " | ".join(TRAINED[name] for name in names) + " |",
    ]
    lines.append("|---" * (len(names) + 1) + "|")
    for rival in kept["rivals"]:
        if rival != ours and values(kept, workload, rival, "idle_durable"):
            ratios = [ratio(kept, workload, (ours, name), (rival, name)) for name in names]
            lines.append(
                f"| {rival} | " + " | ".join("–" if result is None else f"{result:.2f}" for result in ratios) + " |"
            )
    return lines


def slopes(kept: dict[str, Any], workloads: list[str]) -> list[str]:
    """Microseconds a tensor, from the fewest to the most tensors, median of the rounds that have both."""
    lines = ["| µs a tensor | " + " | ".join(SPREAD.values()) + " |", "|---" * (len(SPREAD) + 1) + "|"]
    few, many = workloads[0], workloads[-1]
    count = float(many.rpartition("-")[2]) - float(few.rpartition("-")[2])
    for rival in kept["rivals"]:
        row = []
        for name in SPREAD:
            a, b = values(kept, few, rival, name), values(kept, many, rival, name)
            each = [(b[number] - a[number]) / count * 1e6 for number in a.keys() & b.keys()]
            row.append(f"{statistics.median(each):.1f}" if each else "–")
        lines.append(f"| {rival} | " + " | ".join(row) + " |")
    return lines


def remarks(kept: dict[str, Any]) -> list[str]:
    """Return the reasons to doubt a figure."""
    lines = []
    for row in kept["rounds"]:
        for rival, cell in row["cells"].items():
            doubts = []
            if cell.get("others", 0) > BUSY:
                doubts.append(f"other processes or the host took {cell['others']:.0%} of the processors")
            if cell.get("figures", {}).get("cold_resident", 0) > 0.01:
                doubts.append(
                    f"{cell['figures']['cold_resident']:.0%} of the files stayed in the page cache: the cold load was not cold"
                )
            if cell.get("left_behind"):
                doubts.append(f"{cell['left_behind']} processes outlived it")
            if doubts:
                lines.append(f"- {row['workload']}, round {row['round']}, {rival}: {'; '.join(doubts)}")
    return ["## Doubts", "", *lines, ""] if lines else []


def spread(found: list[float]) -> str:
    """Median, least and most."""
    if not found:
        return "–"
    digits = 3 if max(abs(value) for value in found) < 1 else 2
    return f"{statistics.median(found):.{digits}f} ({min(found):.{digits}f}–{max(found):.{digits}f})"


def floors_of(kept: dict[str, Any], workload: str) -> dict[str, float]:
    """Median of each floor."""
    names = {name for row in kept["rounds"] for name in row["cells"].get(FLOORS, {}).get("figures", {})}
    return {
        name: statistics.median(cells.values())
        for name in sorted(names)
        if (cells := values(kept, workload, FLOORS, name))
    }
