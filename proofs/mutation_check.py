"""Negative controls: remove one fsync, link or check from the product. Some proof must then fail.

``python -m proofs.mutation_check`` prints the table. A mutation is an edit of the source, applied at its
import in a process of its own. Then the proofs run, the likeliest first, until one fails. If none fails, the mutation
survives: a check is missing, or the line was superfluous. If a line has left the source, that is a failure, too:
keep the table up to date.
"""

from __future__ import annotations

import argparse
import importlib.abc
import importlib.machinery
import json
import os
import re
import resource
import signal
import sys
import tempfile
import time
import unittest
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import CodeType, ModuleType
from typing import NamedTuple

from proofs.mutations import MUTATIONS, Mutation

CPU_SECONDS_MAX, SECONDS_MAX = 300, 1200
"""Limits of one mutation: of CPU time, and for a proof that waits for ever. All proofs together take 52 s of CPU."""


class MutationVerdict(NamedTuple):
    """The proof that caught a mutation (None if it survived) and its message."""

    mutation: Mutation
    caught_by: str | None
    output: str
    seconds: float


class _Mutated(importlib.machinery.SourceFileLoader):
    edits: dict[str, Mutation] = {}

    def get_code(self, fullname: str) -> CodeType | None:
        mutation = self.edits[fullname]
        source = Path(self.path).read_text(encoding="utf-8")
        if source.count(mutation.old) < 1:
            raise LookupError(f"{fullname} has no such line any more: {mutation.old.strip()[:80]!r}")
        return compile(source.replace(mutation.old, mutation.new), self.path, "exec")


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in _Mutated.edits:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.origin is not None:
            spec.loader = _Mutated(fullname, spec.origin)
        return spec


def mutate(mutation: Mutation) -> None:
    """Apply the edit when the module is imported. The process must not have imported the module yet."""
    _Mutated.edits = {mutation.module: mutation}
    sys.meta_path.insert(0, _Finder())


def _cuts() -> Iterator[str]:
    """Cut the power in a life."""
    yield from _points(r":cut-", share=0.25, lives=1)


def _deaths() -> Iterator[str]:
    """Kill and interrupt a life."""
    yield from _points(r":(before|after|half|byte|page|interrupt-.*):", share=0.4, lives=3)


def _early() -> Iterator[str]:
    """Kill a life while its store is made, then cut the power."""
    yield from _points(r":(kill-then-cut|cut-mixed):([1-9]|[1-6][0-9])\.", share=1.0, lives=6)


def _takeovers() -> Iterator[str]:
    """Let another attempt take over during a life, then cut the power."""
    yield from _points(r":takeover", share=1.0, lives=3)


def _points(pattern: str, share: float, lives: int) -> Iterator[str]:
    from proofs.crash import CrashSampler, crash_report, simulate
    from relight.testing.scenario import prepared

    compiled = re.compile(pattern)
    for seed in range(lives):
        report = crash_report(seed)
        with prepared() as names:
            simulate(
                seed,
                CrashSampler(report, share=share, choose=lambda point: compiled.search(point) is not None, stop=1),
                names,
            )
        for violation in report.violations:
            yield f"{violation.wrong[0]} ({violation.trial})"


def _faults() -> Iterator[str]:
    """Let each call of a save fail."""
    from proofs.faults import fail_at, positions
    from relight.testing.scenario import prepared

    trials = list(positions())
    with prepared() as names:
        for trial in trials:
            for text in fail_at(trial, names):
                yield f"{text} ({trial})"


def _rules() -> Iterator[str]:
    """Check the rules of the log, of commits and of reclaiming."""
    from proofs.invariants import broken

    yield from broken()


def _suite() -> Iterator[str]:
    """Run the conformance suite on a real directory."""
    from relight.store import ByteStore, LocalStore
    from relight.testing.disks import ShortDisk
    from relight.testing.store_suite import StoreSuite

    class Local(StoreSuite):
        def make(self, tmp_path: Path) -> ByteStore:
            return LocalStore(tmp_path)

    class Short(StoreSuite):
        def make(self, tmp_path: Path) -> ByteStore:
            return LocalStore(tmp_path, disk=ShortDisk(997), direct=False)

    for suite in (Local(), Short()):
        for name in sorted(dir(suite)):
            if name.startswith("test_"):
                with tempfile.TemporaryDirectory() as directory:
                    try:
                        getattr(suite, name)(Path(directory))
                    except unittest.SkipTest:  # no strace here
                        pass
                    except Exception as error:
                        yield f"{name}: {error!r}"


PROOFS: dict[str, Callable[[], Iterator[str]]] = {
    "rules": _rules,
    "suite": _suite,
    "faults": _faults,
    "deaths": _deaths,
    "early": _early,
    "cuts": _cuts,
    "takeovers": _takeovers,
}


def prove(first: str) -> tuple[str | None, str]:
    """Return the first proof that fails, and its message. A ``NameError`` is raised: the mutation names a variable that is gone."""
    for name in (first, *(proof for proof in PROOFS if proof != first)):
        try:
            message = next(PROOFS[name](), None)
        except (LookupError, NameError):
            raise
        except BaseException as error:
            message = repr(error)
        if message is not None:
            return name, message
    return None, ""


def bite(mutation: Mutation) -> MutationVerdict:
    """Try one mutation in a child process that has not imported the product."""
    began = time.perf_counter()
    read_end, write_end = os.pipe()
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        answer: list[str | None] = [None, "it died"]
        try:
            os.close(read_end)
            signal.alarm(SECONDS_MAX)
            resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS_MAX, CPU_SECONDS_MAX))
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            mutate(mutation)
            answer = list(prove(mutation.proof))
        except BaseException as error:
            answer = [None, f"not tried: {error}"]
        finally:
            os.write(write_end, json.dumps(answer).encode()[:60_000])
            os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end, "rb") as pipe:
        data = pipe.read()
    os.waitpid(child, 0)
    caught_by, message = (
        json.loads(data)
        if data
        else ("the time limit", f"it ran more than {CPU_SECONDS_MAX} s of CPU, or {SECONDS_MAX} s")
    )
    return MutationVerdict(mutation, caught_by, message or "", time.perf_counter() - began)


def unmutated() -> str:
    """Run the proofs on the unchanged product.

    Return what fails; empty if nothing does. Otherwise the table would prove nothing.
    """
    verdict = bite(Mutation("nothing", "relight.nothing", "", "", "rules"))
    return f"{verdict.caught_by}: {verdict.output}" if verdict.caught_by or verdict.output else ""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Return 0 if every mutation is caught, 1 if one survives."""
    parser = argparse.ArgumentParser(
        prog="python -m proofs.mutation_check", description=(__doc__ or "").split("\n\n")[0]
    )
    parser.add_argument(
        "--only", default="", help="only mutations with this text in their description, module or proof"
    )
    parser.add_argument("--every", type=int, default=1, help="try every N-th mutation")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    import blake3  # noqa: F401  (needed by the children and never mutated: imported once)
    import msgspec  # noqa: F401

    if any(name.startswith("relight.store") for name in sys.modules):
        print("the product is imported already: run this as a command", file=sys.stderr)
        return 2
    chosen = [
        mutation for mutation in MUTATIONS if options.only in f"{mutation.what} {mutation.module} {mutation.proof}"
    ][:: options.every]
    problems = unmutated()
    verdicts: list[MutationVerdict] = []
    if not options.json:
        print(f"{'unmutated':64} {problems or 'no proof fails'}")
    for mutation in chosen if not problems else []:
        verdict = bite(mutation)
        verdicts.append(verdict)
        if not options.json:
            print(
                f"{mutation.what:64} {verdict.caught_by or 'SURVIVED':10} {verdict.seconds:5.1f} s  {verdict.output[:110]}",
                flush=True,
            )
    survivors = [verdict.mutation.what for verdict in verdicts if verdict.caught_by is None]
    if options.json:
        table = [
            {"what": v.mutation.what, "caught_by": v.caught_by, "said": v.output, "seconds": round(v.seconds, 2)}
            for v in verdicts
        ]
        print(json.dumps({"ok": not survivors and not problems, "unmutated": problems, "mutations": table}, indent=1))
    else:
        print(f"{len(verdicts)} mutations, {len(survivors)} survived")
    return 1 if survivors or problems else 0


if __name__ == "__main__":
    sys.exit(main())
