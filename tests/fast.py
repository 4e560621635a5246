"""Run what a change most likely breaks, in under two minutes: linters, the house's rules, and the tests of the changed files.

``make fast``. The changed files are those that differ from ``--against`` (by default the branch's common ancestor with ``origin/main``, or
else the last commit), and files that git does not know yet. The tests of a source file are those that import it;
those of modules that few tests import are run first. When the time is over, pytest is interrupted: it prints what has failed until then.
"""

from __future__ import annotations

import argparse
import ast
import json
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
HOUSE = (
    "test_house.py", "test_process_state.py", "test_removals.py", "test_children.py", "test_capabilities.py", "test_docs.py", "test_prose.py",
)  # fmt: skip
"""Tests of the house that take seconds. ``make check`` and CI run all of them."""
SECONDS = 110.0
_LAST_FAILED = ROOT / ".pytest_cache" / "v" / "cache" / "lastfailed"
_OURS = ("relight", "proofs")
LEFT_OUT = ("slow", "distributed", "crash", "gpu", "grid")
"""Markers of tests that take long."""


def main(arguments: list[str] | None = None) -> int:
    """Run the command. Return 0 if nothing failed, else 1."""
    parser = argparse.ArgumentParser(prog="python tests/fast.py", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--against", default="", help="commit to compare with")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="time for all of it")
    parser.add_argument("--list", action="store_true", help="print the test files, and run nothing")
    options = parser.parse_args(arguments)
    began = time.monotonic()
    changed = changed_files(options.against)
    tests = tests_of(changed)
    if options.list:
        print("\n".join(tests))
        return 0
    python = [file for file in changed if file.endswith(".py") and (ROOT / file).is_file()]
    print(f"{len(changed)} changed files, {len(tests)} test files", flush=True)
    wrong = [
        " ".join(command[:4])
        for command in _linters(python)
        if subprocess.run(command, cwd=ROOT, check=False).returncode
    ]
    house = [str(Path("tests/house") / name) for name in HOUSE]
    left_s = options.seconds - (time.monotonic() - began)
    failed, is_over = _pytest([*house, *tests], left_s)
    wrong += ["tests"] if failed else []
    if is_over:
        print(f"the time is over: make test runs the rest of {len(tests)} test files")
    print(f"{', '.join(wrong)} failed" if wrong else "nothing failed", f"after {time.monotonic() - began:.0f} s")
    return 1 if wrong else 0


def changed_files(against: str = "") -> list[str]:
    """Return the paths of the changed and the new files, relative to the root, sorted."""
    base = against or _git("merge-base", "HEAD", "origin/main").strip()
    if not against and base in ("", _git("rev-parse", "HEAD").strip()):
        base = "HEAD" if _git("status", "--porcelain") else "HEAD~1"
    return sorted(
        {*_git("diff", "--name-only", base).split(), *_git("ls-files", "--others", "--exclude-standard").split()}
    )


def tests_of(changed: Iterable[str]) -> list[str]:
    """Return the test files that changed, then those that import a changed module, the most specific first."""
    files = list(changed)
    tests = [file for file in files if file.startswith("tests/") and Path(file).name.startswith("test_")]
    own = [file for file in tests if not file.startswith("tests/house/") and (ROOT / file).is_file()]
    modules = {_module_of(file) for file in files if file.startswith(("src/", "proofs/")) and file.endswith(".py")}
    imported = {
        str(path.relative_to(ROOT)): modules & set(_imports(path))
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
    }
    if any(file.startswith("src/relight/cli/") for file in files):
        own += ["tests/cli/test_cli_start.py", "tests/cli/test_cli_documented.py", "tests/serve/test_serve_effects.py"]
    users = Counter(module for about in imported.values() for module in about)
    ranked = [
        (-sum(1 / users[module] for module in about), name)
        for name, about in imported.items()
        if about and name not in own and not name.startswith("tests/house/")
    ]
    return [*own, *(name for _, name in sorted(ranked))]


def _module_of(file: str) -> str:
    name = file.removeprefix("src/").removesuffix(".py").replace("/", ".")
    return name.removesuffix(".__init__")


def _imports(path: Path) -> Iterator[str]:
    """Yield the modules of Relight and its proofs that a test imports, with the names that may be modules."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith(_OURS))
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith(_OURS):
            yield str(node.module)
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _linters(files: list[str]) -> Iterator[list[str]]:
    run = [sys.executable, "-m"]
    if files:
        yield [*run, "ruff", "check", "--quiet", *files]
        yield [*run, "ruff", "format", "--check", "--quiet", *files]
    yield [*run, "mypy", "--no-error-summary"]
    yield [str(Path(sys.executable).parent / "lint-imports"), "--no-cache", "--no-logo"]


def _pytest(files: list[str], seconds: float) -> tuple[bool, bool]:
    """Run the files, interrupted after ``seconds``. Return whether a test failed, and whether the time was over."""
    markers = " and ".join(f"not {marker}" for marker in LEFT_OUT)
    command = [sys.executable, "-m", "pytest", "-q", "--numprocesses", "2", "--dist", "loadfile", "-m", markers, *files]
    _LAST_FAILED.unlink(missing_ok=True)
    process = subprocess.Popen(command, cwd=ROOT)
    try:
        return process.wait(max(seconds, 1.0)) not in (0, 5), False
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
    try:
        process.wait(20.0)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    return _LAST_FAILED.is_file() and bool(json.loads(_LAST_FAILED.read_text(encoding="utf-8"))), True


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False).stdout


if __name__ == "__main__":
    sys.exit(main())
