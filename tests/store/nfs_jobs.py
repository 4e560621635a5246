"""What runs on client machines in the tests of network file systems: ``nfs_jobs.py JOB ARGUMENTS``.

A job reports what it did in lines of JSON.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator

from relight.commit import Attempt
from relight.errors import CheckpointNotFound, Fenced, RelightError, StoreUnavailable
from relight.log import Log, fold
from relight.reclaim import execute_sweep, plan_sweep
from relight.store import Disk, LocalStore, put
from relight.store.base import Uncertain
from relight.testing import scenario
from relight.testing.scenario import RUN, prune, read_state, save, state_of


def report(*what: object) -> None:
    print(json.dumps(what), flush=True)


def asked() -> Iterator[list[str]]:
    """Yield the test's commands, line by line. Prints "ready" first."""
    report("ready")
    for line in sys.stdin:
        yield json.loads(line)


def race(root: str, me: str) -> None:
    """Call ``put_once`` for each requested name. Print whether it won, and what the name holds then."""
    store = LocalStore(root)
    for (name,) in asked():
        mine = f"{me} {name} {random.random()}".encode()
        report("put", *create(store, f"race/{name}", mine), mine.decode(), read(store, f"race/{name}"))


def create(store: LocalStore, key: str, data: bytes) -> tuple[object, int]:
    """Return the outcome, and the number of earlier failures.

    A failure other than ``Uncertain`` has created nothing.
    """
    for tries in range(200):
        try:
            return store.put_once(key, data), tries
        except Uncertain:
            return "uncertain", tries
        except StoreUnavailable:
            time.sleep(0.05)
    return "unavailable", tries


def read(store: LocalStore, key: str) -> str:
    try:
        return store.get(key, 999).decode()
    except RelightError as error:
        return f"{type(error).__name__}: {error}"


def hold(root: str) -> None:
    """Report whether each requested name exists, and its contents; or list, put and delete on request."""
    store = LocalStore(root)
    for what, name in asked():
        if what == "there":
            report(os.path.lexists(f"{root}/{name}"), read(store, name))
        elif what == "list":
            report(sorted(os.listdir(f"{root}/{name}")), sorted(entry.name for entry in store.list(name)))
        elif what == "put":
            put(store, name, b"x")
            report("done")
        elif what == "delete_dir":
            report(store.delete_dir(name))
        elif what == "delete":
            report(store.delete(name))


def saves(root: str, seed: str, count: str) -> None:
    """Begin an attempt and save on request.

    After a store error it continues, as training does. ``count`` 0: until stopped.
    """
    store = LocalStore(root)
    attempt, step, large = Attempt.begin(store, RUN, reason=seed), 0, "/large" if seed.startswith("large") else ""
    report("begun", str(attempt.epoch))
    commands = asked() if count == "0" else iter([["go"]] * int(count))
    for _ in commands:
        step += 1
        try:
            for fact in save(attempt, f"{seed}/{step}{large}", int(time.time() * 1000)):
                report(*fact)
        except Fenced:
            report("fenced")
        except StoreUnavailable as error:
            report("failed", error.kind, error.what)


def restores(root: str) -> None:
    """The newest checkpoint each time it is asked for, every byte verified: its id and key, or what was wrong."""
    store, log = LocalStore(root), Log(LocalStore(root), RUN)
    for _ in asked():
        report(*newest(store, log))


def newest(store: LocalStore, log: Log) -> tuple[str, ...]:
    view = log.read()
    live = fold(view).live
    if not live:
        return ("none",)
    key, state = read_state(store, view, live[-1])
    return ("restored", live[-1].id, key) if state == state_of(key) else ("wrong", live[-1].id, key)


def churn(root: str, seconds: str) -> None:
    """Save, retire all but the newest, and sweep, continuously."""
    store, step, counts = LocalStore(root), 0, Counter[str]()
    attempt = Attempt.begin(store, RUN, reason="churn")
    ends = time.monotonic() + float(seconds)
    report("ready")
    while time.monotonic() < ends:
        step += 1
        for fact in [*save(attempt, f"churn/{step}/large", step), *prune(store, {"last": 1}, attempt.epoch)]:
            counts[fact[0]] += 1
        execute_sweep(plan_sweep(store, RUN), store)
    report("done", dict(counts))


def look(root: str, seconds: str) -> None:
    """Restore the newest checkpoint repeatedly.

    What vanishes meanwhile is an error of ours. Wrong bytes are never returned.
    """
    store, log, counts = LocalStore(root), Log(LocalStore(root), RUN), Counter[str]()
    ends = time.monotonic() + float(seconds)
    report("ready")
    while time.monotonic() < ends:
        try:
            counts[newest(store, log)[0]] += 1
        except RelightError as error:
            counts[f"{error.kind}: {error.what.split(',')[0]}"] += 1
        for entry in store.list(RUN):
            with contextlib.suppress(CheckpointNotFound):
                if any(entry.name.startswith(".nfs") for entry in store.list(f"{RUN}/{entry.name}")):
                    counts["odd names"] += 1
    report("done", dict(counts))


def check(root: str, facts: str) -> None:
    """Check the facts: nothing acknowledged is lost, everything restores exactly, the run resumes, nothing is left over."""
    with open(facts, encoding="utf-8") as lines:
        known = [tuple(json.loads(line)) for line in lines]
    report(*scenario.check(LocalStore(root), known, 7))


class DiesAt(Disk):
    """Kills its process just before the ``n``-th call ``name`` of those that concern the log's records."""

    def __init__(self, name: str, n: int) -> None:
        self.left = n
        setattr(self, name, self._counted(getattr(self, name)))

    def _counted(self, call):  # type: ignore[no-untyped-def]
        def counted(path, *rest):  # type: ignore[no-untyped-def]
            if isinstance(path, int) or "/log" in path:
                self.left -= 1
                if self.left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
            return call(path, *rest)

        return counted


def dying(root: str, seed: str, name: str, n: str) -> None:
    """Save, and be killed at that call, for example between link and fsync of the directory."""
    store = LocalStore(root, disk=DiesAt(name, int(n)))
    attempt = Attempt.begin(store, RUN, reason=seed)
    report("begun", str(attempt.epoch))
    for step in range(5):
        for fact in save(attempt, f"{seed}/{step}", int(time.time() * 1000)):
            report(*fact)


def many(root: str, me: str, count: str) -> None:
    """Call ``put_once`` for many names in turn, without waiting for the other machine. Print each outcome."""
    store = LocalStore(root)
    for n in range(int(count)):
        mine = f"{me} {n} {random.random()}"
        report(n, str(create(store, f"many/{n}", mine.encode())[0]), mine)


def read_all(root: str, folder: str) -> None:
    """Report the contents of each file in a folder."""
    store = LocalStore(root)
    report({entry.name: read(store, f"{folder}/{entry.name}") for entry in store.list(folder)})


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
