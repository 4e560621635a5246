"""A slice of ``make faults``: one broken request at a time, of each kind, and lives in which many are."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from tests.store.faults import PATIENCE, Bench, bench_of, many_faults, one_fault
from tests.store.proxy import faults_of, proxied
from tests.store.servers import Server

from relight.errors import RelightError
from relight.store.objects import ObjectStore

SEED = 7
SLOW = ("hang", "hang after")


@pytest.fixture(scope="module")
def bench(s3_server: Server) -> Iterator[Bench]:
    with bench_of(s3_server) as made:
        yield made


def test_one_broken_request_is_as_if_nothing_had_been(bench: Bench) -> None:
    """Six faults, each at a seeded place, cause no false failure, loss or leftover, and all restores have their
    bytes."""
    plain = bench.trial(SEED, lambda request: "")
    assert plain.error is None and plain.wrong == []
    places: dict[str, list[int]] = {}
    for request in plain.requests:
        for fault in faults_of(request):
            places.setdefault(fault, []).append(request.number)
    assert len(places) == 16
    rng = random.Random(SEED)
    for fault in rng.sample(sorted(places), 6):
        for number in rng.sample(places[fault], 1):
            assert one_fault(bench, SEED, number, fault) == [], f"{fault} at request {number}"


@pytest.mark.parametrize("seed", [31, 32])
def test_many_broken_requests_lose_nothing(bench: Bench, seed: int) -> None:
    """Every failure is a ``RelightError``. Nothing that was acknowledged is lost, and the run resumes."""
    wrong, trial = many_faults(bench, seed)
    assert wrong == [], f"{trial.error}"
    assert trial.broken


def test_an_upload_in_parts_is_all_there_or_not_at_all(
    s3_server: Server, s3: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever request of an upload of 17 MiB fails in whichever way, the object is complete, or absent without
    leftovers."""
    data = memoryview(random.Random(1).randbytes(17 << 20))
    broken: tuple[int, str] = (-1, "")
    counted: list[str] = []

    def write(url: str) -> RelightError | None:
        proxy.seen.clear()
        writer = ObjectStore(url, patience=PATIENCE).write("run/pack", len(data))
        try:
            for start in range(0, len(data), 1 << 20):
                writer.write_at(start, data[start : start + (1 << 20)])
            writer.finish()
        except RelightError as error:
            writer.abort()
            return error
        return None

    with proxied(s3_server.address, lambda request: broken[1] if request.number == broken[0] else "") as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.address)
        assert write(f"{s3}/plain") is None
        requests = list(proxy.seen)
        assert len(requests) >= 6, "asked whether it is there, begun, three parts, completed"
        assert any("200 error" in faults_of(request) for request in requests)
        for request in requests:
            for fault in faults_of(request):
                if (fault in SLOW and request.number % 3) or (request.number + len(counted)) % 2:
                    counted.append("")  # every other one; ``make faults`` tries all, in whole lives
                    continue
                broken = (request.number, fault)
                url = f"{s3}/{request.number}-{fault.replace(' ', '-')}"
                error = write(url)
                broken = (-1, "")
                store = ObjectStore(url, patience=PATIENCE)
                names = [entry.name for entry in store.list("run")]
                counted.append(fault)
                if error is None:
                    assert store.get("run/pack", len(data)) == data, broken
                else:
                    assert names == [] and not store.uploads(""), f"{fault} at {request}: {error}"
    assert sum(map(bool, counted)) > 12
