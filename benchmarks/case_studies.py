"""``python -m benchmarks.case_studies``: both case studies of docs/case-studies.md, before and after: goodput, way back, network, storage.

Saves of a GPT in mixed precision, coded and as differences, give the share of the bytes that is stored: those of ``benchmarks.mixed``, or
with ``--train`` new ones, which ``relight plan --stored`` reads. The shipped scenarios are simulated, ``relight plan`` has the price of
the storage, and ``link.json`` the share of a link (``make link``). One figure, one JSON.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch

import relight
from benchmarks.codecs import Training
from benchmarks.machine import describe
from benchmarks.workloads import SHAPES, Shape
from relight.comm.children import child_command, child_environment

RESULTS = Path(__file__).parent / "results"
CASES = {"A": "blocking-saves", "B": "costly-saves"}
TARGETS = {
    "A": {
        "save": "30 min → 4.5 min",
        "network": "90 % → 20 %",
        "way back": "2 h → 15 min",
        "verified": "95 % → 99.9 %",
    },
    "B": {"way back": "4 h → 8 min", "overhead": "20 % → 3 %", "storage": "100 % → 60 %"},
}
PLAN = ("plan", "70B", "--gpus", "1024", "--keep", "24", "--store-price", "20", "--json")


def saved(folder: Path, warm: int, apart: int, count: int, small: bool) -> Path:
    """A run with so many saves of a GPT that trains, ``apart`` steps from each other."""
    SHAPES["XS"] = Shape(layers=4, width=192, heads=4, vocabulary=256, batch=4, context=64, steps=0, saves=0)
    torch.set_num_threads(1)
    training = Training("XS" if small else "S", mixed=True)
    with relight.Checkpointer(
        folder / "run",
        model=training.model,
        optimizer=training.optimizer,
        state={"masters": training.masters},
        background=True,
        compact=relight.Compact(codecs="always", full_every=8),
        save=relight.every(steps=10**9),
        keep=relight.keep(last=100),
    ) as ckpt:
        ckpt.restore()
        for step in range(1, warm + apart * (count - 1) + 1):
            training.step()
            if step >= warm and (step - warm) % apart == 0:
                ckpt.save(step).wait(600)
    return folder / "run"


def output_of(*arguments: str) -> Any:
    """Run a command and return its output of --json."""
    command = child_command("relight", *arguments)
    return json.loads(subprocess.run(command, env=child_environment(), stdout=subprocess.PIPE, check=True).stdout)


def measured_before(apart: int) -> float:
    """The share of the bytes that saves so many steps apart have stored, as ``python -m benchmarks.mixed`` has measured it."""
    rows = json.loads((RESULTS / "mixed-S.json").read_bytes())["apart"][str(apart)]
    return float(sum(row["of_it"] * row["logical_bytes"] for row in rows) / sum(row["logical_bytes"] for row in rows))


def summary(case: dict[str, Any]) -> dict[str, Any]:
    """Return what the page has of each policy: shares of the time, seconds of a restart, bytes."""
    wall_s = case["scenario"]["days"] * 86400
    rows = {}
    for each in case["policies"]:
        parts, failures = each["parts"], max(each["failures"], 1e-9)
        down_s = sum(parts[name] for name in ("detecting", "waiting", "restarting")) * wall_s / failures
        rows[each["policy"]] = {
            "goodput": each["goodput"]["median"], "saving": parts["saving"], "redone": parts["lost"], "way_back_s": down_s,
            "interval_s": each["interval_s"], "stored_peak": each["stored_peak"], "restored": each["restored"], "bound": each["bound"],
        }  # fmt: skip
    return rows


def draw(found: dict[str, Any], path: Path) -> None:
    """Draw the shares of the time, before and after."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(9, 3.2), sharey=True)
    for axis, (name, case) in zip(axes, found["cases"].items(), strict=True):
        bars = [("before", next(iter(case["before"].values()))), ("after", next(iter(case["after"].values())))]
        below = [0.0, 0.0]
        parts = (("useful", "goodput"), ("saving", "saving"), ("done again", "redone"), ("coming back", ""))
        for label, key in parts:
            rest = [1 - policy["goodput"] - policy["saving"] - policy["redone"] for _, policy in bars]
            shares = [policy[key] for _, policy in bars] if key else rest
            axis.bar([side for side, _ in bars], shares, bottom=below, label=label)
            below = [was + more for was, more in zip(below, shares, strict=True)]
        axis.set_title(f"Case {name}")
    axes[0].set_ylabel("share of the time")
    axes[1].legend(loc="lower right", fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    """Measure, simulate, plan, draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--warm", type=int, default=200)
    parser.add_argument("--apart", type=int, default=100)
    parser.add_argument("--count", type=int, default=9)
    parser.add_argument(
        "--train", action="store_true", help="train a GPT and store its saves, instead of what mixed-S.json has"
    )
    parser.add_argument("--small", action="store_true", help="a GPT of 2 million parameters instead of 10")
    parser.add_argument("--out", type=Path, default=RESULTS / "case-studies.json")
    options = parser.parse_args()
    whole = output_of(*PLAN)
    if options.train:
        with tempfile.TemporaryDirectory() as top:
            run = saved(Path(top), options.warm, options.apart, options.count, options.small)
            stored = output_of(*PLAN, "--stored", str(run))["known"]["stored"]
    else:
        stored = {
            "value": measured_before(options.apart),
            "source": f"measured: mixed-S.json, {options.apart} steps apart",
        }
    report: dict[str, Any] = {
        "machine": describe(Path(tempfile.gettempdir())),
        "seeds": options.seeds,
        "targets": TARGETS,
        "cases": {},
    }
    report["storage"] = {
        "share": stored["value"], "source": stored["source"], "bytes": [whole["kept_bytes"], round(whole["kept_bytes"] * stored["value"])],
        "price_a_month": [whole["month"]["storage"], whole["month"]["storage"] * stored["value"]],
    }  # fmt: skip
    for name, scenario in CASES.items():
        sides = {
            side: output_of("plan", "simulate", f"{scenario}-{side}", "--seeds", str(options.seeds), "--json")[0]
            for side in ("before", "after")
        }
        report["cases"][name] = {side: summary(policies_of_side) for side, policies_of_side in sides.items()}
        for side, policies in report["cases"][name].items():
            for policy, outcome in policies.items():
                words = f"goodput {outcome['goodput']:.2%}, saves {outcome['saving']:.2%}, back {outcome['way_back_s']:.0f} s"
                print(f"{name} {side:6} {policy:11} {words}", flush=True)
    if (RESULTS / "link.json").is_file():
        report["link"] = json.loads((RESULTS / "link.json").read_bytes())["ways"]
    options.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    draw(report, options.out.with_suffix(".png"))
    price = report["storage"]["price_a_month"]
    print(f"stored: {report['storage']['share']:.1%} of the bytes, {price[0]:,.0f} → {price[1]:,.0f} a month")


if __name__ == "__main__":
    main()
