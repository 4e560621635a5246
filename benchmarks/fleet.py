"""The simulator against closed forms and published results, and a learning schedule against one that knows the rates.

``python -m benchmarks.fleet``: an hour of one core, no store, no device. It writes ``benchmarks/results/fleet.json`` (what agrees with
what, and how fast it is), ``schedule.json`` and ``schedule.png`` (20 clusters), and ``simulate-*.png``, pictures of shipped scenarios.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure as Drawing

from benchmarks.machine import describe
from relight.simulator.clusters import FIXED, clusters, compare
from relight.simulator.plot import draw
from relight.simulator.policies import USUAL, policy_of
from relight.simulator.published import closed_forms, published, speed
from relight.simulator.read import read_scenario
from relight.simulator.result import summary_of
from relight.simulator.sweep import Case, sweep
from relight.supervise.plot import GOOD, INK, LOST, PAPER

RESULTS = Path(__file__).parent / "results"

PARTS = ("checks", "clusters", "pictures")


def checks(failures: int) -> bool:
    """Closed forms, published results, speed."""
    report: dict[str, list[dict[str, Any]]] = {"closed_forms": [], "published": []}
    for name, rows in (("closed_forms", closed_forms(failures)), ("published", published())):
        for check in rows:
            report[name].append(check.to_dict())
            print(
                f"{'ok ' if check.holds else 'NO '} {check.what}: {check.known}, simulated {check.simulated:.4g}",
                flush=True,
            )
    seconds = speed()
    print(seconds, flush=True)
    _write(
        "fleet.json",
        {"machine": describe(RESULTS), "failures_each": failures, "seconds_of_one_core": seconds, **report},
    )
    return all(row["holds"] for rows in report.values() for row in rows)


def learned(count: int, seeds: int, lives: float) -> bool:
    """Twenty clusters."""
    comparison = compare(clusters(count, lives=lives), seeds=range(seeds), report=lambda text: print(text, flush=True))
    over, best = comparison["over_oracle"], comparison["best_fixed"]
    print(
        f"adaptive loses {over:+.2%} on the oracle; the best fixed one, {best}, {comparison['best_fixed_over_oracle']:+.1%}"
    )
    _write("schedule.json", {"seeds": seeds, "failures_each": lives, **comparison})
    _draw_learned(comparison, RESULTS / "schedule.png")
    return bool(over <= 0.03 and all(comparison["mean"]["adaptive"] < comparison["mean"][fixed] for fixed in FIXED))


def _draw_learned(found: dict[str, Any], path: Path) -> None:
    drawing = Drawing(figsize=(10, 4.2), facecolor=PAPER, dpi=150)
    FigureCanvasAgg(drawing)
    axes = drawing.subplots()
    axes.set_facecolor(PAPER)
    rows = sorted(found["clusters"], key=lambda row: row["mtbf_s"])
    hours = [row["mtbf_s"] / 3600 for row in rows]
    shown = {"2m": LOST[2], "15m": LOST[1], "1h": LOST[0], "6h": LOST[3], "adaptive": GOOD}
    for name, colour in shown.items():
        lost = [100 * (row["lost"][name] / row["lost"]["oracle"] - 1) for row in rows]
        label = "adaptive" if name == "adaptive" else f"every {name}"
        axes.plot(
            hours, lost, color=colour, marker="o", markersize=3.5, linewidth=2 if name == "adaptive" else 1, label=label
        )
    axes.set_xscale("log")
    axes.set_yscale("symlog", linthresh=10)
    axes.set_ylim(-12, 5000)
    axes.set_xlabel("true hours between failures of the cluster", color=INK, fontsize=9)
    axes.set_ylabel("more lost than by an oracle, %", color=INK, fontsize=9)
    axes.axhline(3, color=INK, linewidth=0.7, linestyle=":")
    axes.legend(frameon=False, fontsize=8.5, ncols=len(shown), loc="lower left", bbox_to_anchor=(0, 1))
    axes.tick_params(colors=INK, labelsize=8.5)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    drawing.tight_layout()
    drawing.savefig(path, facecolor=PAPER)


def pictures(seeds: int) -> bool:
    """What ``relight plan simulate --plot`` draws of shipped scenarios."""
    for name in ("llama3-54-days", "meta-rsc"):
        scenario = read_scenario(name)
        texts = scenario.policy or USUAL
        case = Case(scenario, tuple(policy_of(text, label) for label, text in texts.items()))
        outcomes = sweep([case], range(seeds))[0]
        summaries = [
            summary_of(policy_outcomes, policy.text, outcomes[0])
            for policy, policy_outcomes in zip(case.policies, outcomes, strict=True)
        ]
        draw(
            [(f"{name}: {scenario.gpus:,} GPUs, {scenario.days:g} days", summaries)],
            scenario.days,
            RESULTS / f"simulate-{name}.png",
        )
    return True


def _write(name: str, value: Any) -> None:
    (RESULTS / name).write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


def main() -> int:
    """0 if everything is as it should be."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", choices=PARTS, help="one part of it")
    parser.add_argument("--failures", type=int, default=20_000, help="in each closed form")
    parser.add_argument("--count", type=int, default=20, help="clusters")
    parser.add_argument("--seeds", type=int, default=3, help="of each cluster")
    parser.add_argument(
        "--lives", type=float, default=100.0, help="expected failures in each cluster; it runs at least a month"
    )
    options = parser.parse_args()
    parts = {
        "checks": lambda: checks(options.failures),
        "clusters": lambda: learned(options.count, options.seeds, options.lives),
        "pictures": lambda: pictures(2),
    }
    passed = [part() for name, part in parts.items() if options.only in (None, name)]
    return 0 if all(passed) else 1


if __name__ == "__main__":
    sys.exit(main())
