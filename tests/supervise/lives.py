"""``make lives``: real jobs on two ranks that fail again and again in random ways. Each failure is checked.

For each failure: its kind matches the injected fault, its action matches docs/recovery.md, and no step before the last
snapshot is lost. At the end the weights equal those of a run without failures.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from relight.store import open_bytes
from relight.supervise.incidents import Incident, read_incidents

JOB = Path(__file__).with_name("job.py")
DOCS = Path(__file__).parents[2] / "docs" / "recovery.md"
STEPS, EVERY = 160, 5
KINDS = {
    "kill": "killed", "segv": "crash", "abort": "crash", "value": "user", "type": "user", "full": "storage", "exit": "unknown",
    "memory": "memory", "device memory": "device memory", "loader": "data", "lock": "hang", "stop": "hang",
}  # fmt: skip


def at_first() -> dict[str, str]:
    """Return the page's action for the first failure of each kind."""
    rows = re.findall(r"^\| `([a-z ]+)` \| [^|]* \| ([a-z ]+) \|", DOCS.read_text(encoding="utf-8"), re.MULTILINE)
    return {kind: action.strip() for kind, action in rows} | {"device memory": "resume"}  # without split = true


def plan_of(rng: random.Random, count: int) -> list[dict[str, Any]]:
    """Return ``count`` random failures in order of their steps."""
    steps = sorted(rng.sample(range(2, STEPS - 2), count))
    return [{"rank": rng.randrange(2), "step": step, "what": rng.choice(list(KINDS))} for step in steps]


def run(
    folder: Path, plan: list[dict[str, Any]], spares: bool, **settings: str
) -> tuple[int, str, list[Incident], str]:
    """Run a job. Return its exit code, output, incidents and the weights' hash."""
    folder.mkdir()
    (folder / "plan.json").write_text(json.dumps(plan))
    (folder / "relight.toml").write_text(f"[supervise]\nspares = {str(spares).lower()}\nfailures = 1000\n")
    command = [sys.executable, "-m", "relight", "run", "--nproc-per-node", "2", str(JOB)]
    done = subprocess.run(
        [*command, str(folder / "store"), str(STEPS), str(folder / "plan.json"), str(folder / "out")],
        cwd=folder,
        env={**os.environ, "JOB_EVERY": str(EVERY), "JOB_STEP_S": "0.02", **settings},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    end = folder / "out.end"
    incidents = read_incidents(open_bytes(folder / "store"), "run")
    return done.returncode, done.stdout, incidents, end.read_text() if end.exists() else ""


def wrong_with(plan: list[dict[str, Any]], found: list[Incident], code: int, end: str, straight: str) -> list[str]:
    """Return all violations."""
    wrong = [] if code == 0 else [f"exit code {code}"]
    if end != straight:
        wrong.append("the weights at the end differ")
    if len(found) != len(plan):
        wrong.append(f"{len(found)} incidents of {len(plan)} failures")
    expected = at_first()
    for incident, planned in zip(found, plan, strict=False):
        kind = KINDS[planned["what"]]
        if incident.kind != kind:
            wrong.append(f"step {planned['step']}: {planned['what']} was taken for {incident.kind}: {incident.why}")
        elif incident.action != expected[kind]:
            wrong.append(
                f"step {planned['step']}: {incident.action} was done about {kind}, and the table has {expected[kind]}"
            )
        sealed = min((worker.get("sealed", -1) for worker in incident.workers), default=-1)
        if incident.after is None or incident.after.restored < sealed:
            wrong.append(
                f"step {planned['step']}: sealed up to {sealed}, restored {incident.after.restored if incident.after else '?'}"
            )
    return wrong


def main() -> int:
    """Run jobs until there were ``--count`` failures. Exit code 1: a violation."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--each", type=int, default=10, help="failures of one job")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="lives-") as top:
        code, output, _, straight = run(Path(top) / "straight", [], False)
        if code:
            print(output)
            return 1
        count, number, bad, seconds, lost = 0, 0, 0, list[float](), list[int]()
        started = time.monotonic()
        while count < options.count:
            rng = random.Random(options.seed + number)
            plan = plan_of(rng, min(options.each, options.count - count))
            standby = {"JOB_STANDBY": "yes"} if number % 4 == 0 else {}
            code, output, incidents, end = run(Path(top) / str(number), plan, spares=number % 2 == 0, **standby)
            wrong = wrong_with(plan, incidents, code, end, straight)
            count, number = count + len(plan), number + 1
            seconds += [problem.after.seconds["all"] for problem in incidents if problem.after is not None]
            lost += [problem.after.steps_lost for problem in incidents if problem.after is not None]
            middle = sorted(seconds)[len(seconds) // 2] if seconds else 0.0
            print(
                f"{count}/{options.count} failures, {number} jobs, {len(wrong)} wrong in seed {options.seed + number - 1}; "
                f"back after {middle:.1f} s (median), {lost.count(0)} times without a step lost, at most {max(lost, default=0)}; {time.monotonic() - started:.0f} s",
                flush=True,
            )
            if wrong:
                bad += len(wrong)
                print("\n".join(f"  {problem}" for problem in wrong))
                print("\n".join(f"    {line}" for line in output.splitlines() if "relight:" in line), flush=True)
                if code:
                    print("\n".join(f"    | {line}" for line in output.splitlines()[-60:]), flush=True)
    print(f"{count} failures, {bad} wrong")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
