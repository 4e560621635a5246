"""Every request of a run's life in an object store × everything that can go wrong with it. ``make faults``; a slice is in the suite.

A life (two attempts, saves, a tag, retention, a fence, a sweep; then every checkpoint restored) goes through a proxy
that breaks one request in one way, or many at random. What must hold then:

- If one request is broken, the life ends within bounded time as if nothing had happened, without a false failure.
- If many are broken, every error is one of ours. Read without the proxy, nothing acknowledged is lost, nothing is
committed twice, every checkpoint restores to its bytes, the run continues, and no temporary is left.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from relight.errors import RelightError
from relight.format.records import CommitBody
from relight.log import Log
from relight.store import ByteStore, probe
from relight.store.object_client import RetryTimes
from relight.store.objects import ObjectStore
from relight.testing import scenario
from relight.testing.scenario import RUN, Fact

HERE = Path(__file__).resolve()
sys.path.insert(0, str(HERE.parents[2]))

from tests.store.proxy import Proxy, Request, faults_of, proxied  # noqa: E402
from tests.store.servers import Server, moto  # noqa: E402

PATIENCE = RetryTimes(request_s=0.8, deadline_s=8.0, tries=5, pause_s=0.01, pause_max_s=0.1)
BOUND_S = 30.0


class Trial(NamedTuple):
    """One life. ``error`` is how it ended, ``wrong`` what then does not hold."""

    error: RelightError | None
    wrong: list[str]
    seconds: float
    requests: list[Request]
    broken: Counter[str]


class Bench:
    """A server, and a proxy between it and the client."""

    def __init__(self, server: Server, proxy: Proxy) -> None:
        self._server, self._proxy = server, proxy

    def trial(self, seed: int, decide: Callable[[Request], str]) -> Trial:
        """Run a life at a new place with faults, then check it without faults."""
        url = f"s3://{self._server.new_bucket()}/place"
        broken: Counter[str] = Counter()

        def counted_decide(request: Request) -> str:
            fault = decide(request)
            broken[fault] += bool(fault)
            return fault

        probe.forget()
        self._proxy.seen.clear()
        self._proxy.decide = counted_decide
        facts: list[Fact] = []
        error: RelightError | None = None
        wrong: list[str] = []
        started = time.monotonic()
        with self._through(self._proxy.address):
            store = ObjectStore(url, patience=PATIENCE)
            try:
                scenario.perform(scenario.life(store, seed), facts)
                log = Log(store, RUN)
                log.read()
                wrong = [f"under faults: {problem}" for problem in scenario.examine(store, log, facts)]
            except RelightError as caught:
                error = caught
        seconds = time.monotonic() - started
        if error is not None:
            wrong = []  # a failed life may not have seen the rest
        requests = list(self._proxy.seen)
        self._proxy.decide = lambda request: ""
        with self._through(self._server.address):
            plain = ObjectStore(url, patience=PATIENCE)
            if sum(broken.values()) > 1:
                wrong = []
            wrong += scenario.check(plain, facts, seed) + committed_twice(plain)
        return Trial(error, wrong, seconds, requests, +broken)

    @contextlib.contextmanager
    def _through(self, address: str) -> Iterator[None]:
        before = os.environ["AWS_ENDPOINT_URL"]
        os.environ["AWS_ENDPOINT_URL"] = address
        try:
            yield
        finally:
            os.environ["AWS_ENDPOINT_URL"] = before


def committed_twice(store: ByteStore) -> list[str]:
    """Ids that more than one COMMIT names."""
    with contextlib.suppress(RelightError):
        ids = Counter(
            record.body.id for record in Log(store, RUN).read().records if isinstance(record.body, CommitBody)
        )
        return [f"{checkpoint_id} is committed {count} times" for checkpoint_id, count in ids.items() if count > 1]
    return []


def one_fault(bench: Bench, seed: int, number: int, fault: str) -> list[str]:
    """Return what is wrong with a life with one broken request."""
    trial = bench.trial(seed, lambda request: fault if request.number == number and fault in faults_of(request) else "")
    wrong = list(trial.wrong)
    if trial.error is not None:
        wrong.append(f"a false failure: {trial.error}")
    if trial.seconds > BOUND_S:
        wrong.append(f"took {trial.seconds:.0f} s")
    return wrong


def many_faults(bench: Bench, seed: int) -> tuple[list[str], Trial]:
    """Return what is wrong with a life in which any request may be broken, in any way."""
    rng = random.Random(f"many {seed}")
    share = rng.choice((0.02, 0.1, 0.3, 0.6))

    def decide(request: Request) -> str:
        return rng.choice(faults_of(request)) if rng.random() < share else ""

    trial = bench.trial(seed, decide)
    wrong = list(trial.wrong)
    if trial.seconds > 10 * BOUND_S:
        wrong.append(f"took {trial.seconds:.0f} s")
    return wrong, trial


@contextlib.contextmanager
def bench_of(server: Server) -> Iterator[Bench]:
    """Yield a bench, with the server's environment set."""
    before = dict(os.environ)
    os.environ.update(server.environment)
    try:
        with proxied(server.address) as proxy:
            yield Bench(server, proxy)
    finally:
        os.environ.clear()
        os.environ.update(before)


def main() -> None:
    """Run all lives, or a part of them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--stride", type=int, default=1, help="only every so-manieth request")
    parser.add_argument("--many", type=int, default=300, help="lives with many faults")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    started, violations, counts, ended = time.monotonic(), 0, Counter[str](), Counter[str]()
    with tempfile.TemporaryDirectory() as folder, moto(Path(folder)) as server, bench_of(server) as bench:
        plain = bench.trial(options.seed, lambda request: "").requests
        trials = [(request, fault) for request in plain[:: options.stride] for fault in faults_of(request)]
        for done, (request, fault) in enumerate(trials):
            for wrong in one_fault(bench, options.seed, request.number, fault):
                violations += 1
                print(f"WRONG {fault} at {request}: {wrong}", flush=True)
            counts[fault] += 1
            if not options.json and done % 100 == 0:
                print(
                    f"{done} of {len(trials)} broken requests, {violations} wrong, {time.monotonic() - started:.0f} s",
                    flush=True,
                )
        for seed in range(options.seed, options.seed + options.many):
            wrongs, trial = many_faults(bench, seed)
            counts += trial.broken
            ended[type(trial.error).__name__ if trial.error else "as if nothing had been"] += 1
            for wrong in wrongs:
                violations += 1
                print(f"WRONG seed {seed}: {wrong}", flush=True)
            if not options.json and seed % 50 == 0:
                print(f"seed {seed}, {violations} wrong, {time.monotonic() - started:.0f} s", flush=True)
    result = {
        "requests": len(plain), "lives": len(trials) + options.many, "broken": dict(counts), "ended": dict(ended), "wrong": violations,
        "seconds": round(time.monotonic() - started),
    }  # fmt: skip
    print(json.dumps(result) if options.json else "\n".join(f"{name:10} {value}" for name, value in result.items()))
    sys.exit(1 if violations else 0)


if __name__ == "__main__":
    main()
