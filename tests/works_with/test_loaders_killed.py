"""Loaders of libraries in a job that is killed twice by SIGKILL: each batch and loss as without a kill, to the bit, or the reason why not.

All of them: ``make loaders``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from tests.plugins.killing import killed_and_resumed, run
from tests.works_with.loader_kinds import BATCHES, KINDS

pytestmark = pytest.mark.slow
KILLS = [BATCHES + 2, BATCHES + 37]
"""The newest save before the first kill is at the end of a training epoch."""


class Tried(NamedTuple):
    """A tool with one way of using it."""

    tool: str
    package: str
    module: str
    what: str


TOOLS = {
    "torch": Tried("DataLoader", "torch", "torch", "`shuffle=True`"),
    "stateful": Tried("torchdata", "torchdata", "torchdata", "`StatefulDataLoader`, `shuffle=True`"),
    "nodes": Tried("torchdata", "torchdata", "torchdata", "`torchdata.nodes.Loader`, over a sampler with `set_epoch`"),
    "hf": Tried("datasets, streaming", "datasets", "datasets", "`DataLoader`, in order"),
    "hf-shuffled": Tried("datasets, streaming", "datasets", "datasets", "`DataLoader`, `.shuffle(seed=0)` and `set_epoch()`"),
    "hf-stateful": Tried("datasets, streaming", "datasets", "datasets", "`StatefulDataLoader`, in order"),
    "hf-stateful-shuffled": Tried("datasets, streaming", "datasets", "datasets", "`StatefulDataLoader`, `.shuffle(seed=0)` and `set_epoch()`"),
    "wds": Tried("WebDataset", "webdataset", "webdataset", "`DataLoader`, in order"),
    "wds-seeded": Tried("WebDataset", "webdataset", "webdataset", "`DataLoader`, `detshuffle` with the epoch's number"),
    "mosaic": Tried("MosaicML Streaming", "mosaicml-streaming", "streaming", "`StreamingDataLoader`, `shuffle=True`"),
}  # fmt: skip
RANDOM = Tried("WebDataset", "webdataset", "webdataset", "`DataLoader`, `.shuffle()` without a seed")
SHARED = Path("/dev/shm")
WORKERS = {0: "killed and resumed", 2: "killed and resumed, 2 workers"}


def case(name: str, tried: Tried, workers: int, outcome: str, why: str = "") -> Any:
    """Return a parameter of a test, with the marker of its row."""
    text = f"{tried.what}: {why}" if why else tried.what
    return pytest.param(
        name,
        workers,
        id=f"{name}-{workers}",
        marks=[
            pytest.mark.shows(
                tool=tried.tool, package=tried.package, feature=WORKERS[workers], outcome=outcome, why=text
            ),
            pytest.mark.skipif(not find_spec(tried.module), reason=f"{tried.module} is not installed: make loaders"),
        ],
    )


@pytest.fixture(autouse=True)
def _no_shared_memory_stays() -> Iterator[None]:
    """Remove what MosaicML's processes leave when they are killed."""
    before = set(SHARED.iterdir())
    yield
    for path in set(SHARED.iterdir()) - before:
        if re.fullmatch(r"\d{6}_\w+", path.name):
            path.unlink(missing_ok=True)


def command(name: str, workers: int, folder: Path) -> list[str]:
    """Write the data, and return the job's command without the run."""
    folder.mkdir()
    KINDS[name].write(folder)
    return ["-m", "tests.works_with.loader_job", name, str(workers), str(folder)]


def test_each_kind_is_tried() -> None:
    """No loader of the job is left out."""
    assert {*TOOLS, "wds-random"} == KINDS.keys()


@pytest.mark.parametrize(
    ("name", "workers"), [case(name, tried, workers, "exact") for name, tried in TOOLS.items() for workers in WORKERS]
)
def test_a_loader_resumes_to_the_bit(name: str, workers: int, tmp_path: Path) -> None:
    """Every batch and loss of the uninterrupted run comes once, in its place."""
    killed_and_resumed(command(name, workers, tmp_path / "data"), KILLS, tmp_path)


WITHOUT_A_SEED = "each process has another order, which no state records; use `detshuffle` with a seed, and set its `epoch` before each pass"


@pytest.mark.parametrize(
    ("name", "workers"), [case("wds-random", RANDOM, workers, "refused", WITHOUT_A_SEED) for workers in WORKERS]
)
def test_an_order_that_cannot_be_repeated_is_refused(name: str, workers: int, tmp_path: Path) -> None:
    """The resume ends with ``IncompatibleState``, which names the way out, before the first step."""
    job = [*command(name, workers, tmp_path / "data"), str(tmp_path / "run")]
    first = run(job, kill_at=37)
    with pytest.raises(AssertionError, match="(?s)are not those that were delivered.*reset_position") as caught:
        run(job)
    assert first.killed and "loss" not in str(caught.value).partition("Traceback")[0]
