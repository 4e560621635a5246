"""``make versions``: the tests that touch torch, with each supported torch and Python. Writes the table in ``docs/versions-table.md``.

Each pair has an environment of its own, which is deleted afterwards: torch's builds for CUDA take 5 GB. A Python that is not installed is
left out, and so is a torch that has no build for it.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

ROOT = Path(__file__).parents[2]
RESULTS = Path(__file__).with_name("versions.json")
"""Results of each pair, the last run's."""
PAGE = ROOT / "docs" / "versions-table.md"
PAIRS = (
    ("3.11", "2.6.0"),
    ("3.11", "2.14.1"),
    ("3.13", "2.14.1"),
    ("3.11", "2.9.1"),
    ("3.12", "2.14.1"),
    ("3.11", "2.13.0"),
    ("3.14", "2.14.1"),
)
SLICE = ("torch_private", "capture", "snapshot", "checkpointer", "integrations", "golden", "versions", "exact")
EXTRAS = "demo,s3,encryption,orbax"
NEEDED = (
    "pytest",
    "pytest-timeout",
    "pytest-xdist",
    "hypothesis",
    "msgpack",
    "safetensors",
    "psutil",
    "moto",
    "flask",
    "flask-cors",
    "pydantic",
)
START = """# Table: versions

`make versions` writes this page. It runs the tests that touch torch (`{slice}` below `tests`) in a new environment for each pair.

| Python | torch | numpy | passed | skipped | failed | commit |
|---|---|---|---:|---:|---:|---|
"""


MOST = 3
"""Failed tests that are run again alone."""
PAIR_S = 2400.0
"""The longest time for one pair's tests. pytest-xdist may wait for ever for a worker that crashed."""


class Outcome(NamedTuple):
    """Result of one pair. ``failed``: tests that failed, also alone. ``alone``: tests that passed only alone. ``commit``: what was tested."""

    commit: str
    python: str
    torch: str
    numpy: str
    passed: int
    skipped: int
    failed: list[str]
    alone: Sequence[str] = ()


def interpreter(version: str) -> str | None:
    """Return a Python of that version; None if there is none."""
    path = shutil.which(f"python{version}")
    for candidate in [path, *map(str, Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))]:
        if (
            candidate
            and subprocess.run(
                [candidate, "-c", f"import sys, venv; assert sys.version.startswith('{version}.')"],
                capture_output=True,
                check=False,
            ).returncode
            == 0
        ):
            return candidate
    return None


def run(python: str, torch: str, folder: Path, jobs: int) -> Outcome | str:
    """Test one pair. Return the reason if it cannot be installed."""
    executable = interpreter(python)
    if executable is None:
        return f"Python {python} is not installed"
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([executable, "-m", "venv", str(folder)], check=True)
    pip = [str(folder / "bin/python"), "-m", "pip", "install", "--quiet"]
    for words in ([f"torch=={torch}", "numpy"], [f"torch=={torch}", f"{ROOT}[{EXTRAS}]", *NEEDED]):
        done = subprocess.run([*pip, *words], capture_output=True, text=True, check=False)
        if done.returncode:
            lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
            return f"torch {torch} cannot be installed for Python {python}: {(lines or [done.stderr[-200:]])[-1]}"
    code = "import json, numpy, torch; print(json.dumps([torch.__version__, numpy.__version__]))"
    answer = subprocess.run([str(folder / "bin/python"), "-c", code], capture_output=True, text=True, check=True)
    torch_there, numpy_there = json.loads(answer.stdout)
    tests, results = [f"tests/{name}" for name in SLICE], folder.parent / f"{folder.name}.xml"
    results.unlink(missing_ok=True)
    command = [
        str(folder / "bin/python"),
        "-m",
        "pytest",
        "-q",
        "--numprocesses",
        str(jobs),
        "--dist",
        "loadfile",
        "--tb=line",
        "-p",
        "no:cacheprovider",
        f"--junitxml={results}",
        *tests,
    ]
    environment = {**os.environ, "PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT / "src")}
    log = folder.parent / f"{folder.name}.log"
    with (
        log.open("w") as output,
        subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=output, env=environment) as tests_run,
    ):
        try:
            tests_run.wait(PAIR_S)
        except subprocess.TimeoutExpired:
            tests_run.send_signal(signal.SIGINT)
    if not results.exists():
        return (
            f"pytest ended with {tests_run.returncode} for Python {python} and torch {torch}: {log.read_text()[-300:]}"
        )
    passed, skipped, failed = 0, 0, list[str]()
    for case in ElementTree.parse(results).iter("testcase"):
        kinds = {child.tag for child in case}
        if kinds & {"failure", "error"}:
            failed.append(f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name')}")
        elif "skipped" in kinds:
            skipped += 1
        else:
            passed += 1
    alone = list[str]()
    if 0 < len(failed) <= MOST:  # as in `make unit`: the load of other tests may have disturbed them
        for name in failed:
            test = [*command[:4], "-n0", "-p", "no:cacheprovider", name]
            again = subprocess.run(test, cwd=ROOT, capture_output=True, env=environment, timeout=PAIR_S, check=False)
            alone += [name] if again.returncode == 0 else []
        failed, passed = [name for name in failed if name not in alone], passed + len(alone)
    words = ["git", "rev-parse", "--short=8", "HEAD"]
    commit = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()
    return Outcome(commit, python, torch_there, numpy_there, passed, skipped, failed, alone)


def page(outcomes: Iterable[Outcome], left_out: list[str]) -> str:
    """Return the page of the docs."""
    outcomes = sorted(
        outcomes, key=lambda outcome: [int(each) for each in re.findall(r"\d+", f"{outcome.python} {outcome.torch}")]
    )
    rows = [
        f"| {outcome.python} | {outcome.torch} | {outcome.numpy} | {outcome.passed} | {outcome.skipped} | {len(outcome.failed)} | {outcome.commit} |"
        for outcome in outcomes
    ]
    more = [f"\nNot tested: {'; '.join(left_out)}."] if left_out else []
    failed = [
        f"- Python {outcome.python}, torch {outcome.torch}: `{name}`" for outcome in outcomes for name in outcome.failed
    ]
    return (
        START.format(slice="`, `".join(SLICE))
        + "\n".join([*rows, *more, *(["\nFailed:\n", *failed] if failed else [])])
        + "\n"
    )


def main() -> int:
    """Test every pair, print progress, write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--pair",
        action="append",
        metavar="PYTHON:TORCH",
        help="only this pair: the other rows of the page stay; repeatable",
    )
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--keep", action="store_true", help="keep the environments")
    given = parser.parse_args()
    pairs = [tuple(pair.split(":")) for pair in given.pair] if given.pair else PAIRS
    kept = json.loads(RESULTS.read_text(encoding="utf-8")) if given.pair and RESULTS.exists() else {}
    outcomes = {pair: Outcome(**result) for pair, result in kept.items()}
    left_out, bad = list[str](), False
    for python, torch in pairs:
        began, folder = time.monotonic(), ROOT / "build" / "versions" / f"python{python}-torch{torch}"
        folder.parent.mkdir(parents=True, exist_ok=True)
        result = run(python, torch, folder, given.jobs)
        if not given.keep:
            shutil.rmtree(folder, ignore_errors=True)
        if isinstance(result, str):
            left_out.append(result.partition(": ")[0])
            print(result, flush=True)
        else:
            outcomes[f"{python}:{torch}"] = result
            bad |= bool(result.failed)
            print(
                f"Python {python}, torch {result.torch}: {result.passed} passed, {len(result.failed)} failed, {time.monotonic() - began:.0f} s",
                *result.failed[:30],
                sep="\n  ",
                flush=True,
            )
        # after each pair: an interruption leaves a page of those before it
        results = {pair: outcome._asdict() for pair, outcome in outcomes.items()}
        RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
        PAGE.write_text(page(outcomes.values(), left_out), encoding="utf-8")
    return bad


if __name__ == "__main__":
    sys.exit(main())
