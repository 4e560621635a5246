"""Statistics and histogram of a tensor on its checkpoint's page: read from the store on demand, and verified."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.serve.made_server import Server, serving

import relight
from relight.catalog.run import Run
from relight.reader.spread import CLASSES, pieces_named, spread_of
from relight.serve import index as index_module
from relight.serve.spread import statistics_of
from relight.store import open_bytes

NORMAL = np.random.default_rng(7).normal(1.0, 0.02, (300, 500)).astype("f4")
STATE: dict[str, Any] = {
    "w": NORMAL,
    "odd": np.array([1.0, np.nan, -np.inf, 3.0, 2.0], "f8"),
    "same": np.full(9, 0.5, "f4"),
    "none": np.array([np.nan, np.nan], "f4"),
    "huge": np.array([-1.7e308, 1.7e308], "f8"),
    "close": np.array([1.0, np.nextafter(1.0, 2.0)], "f8"),
    "ints": np.arange(-5, 95, dtype="i2"),
    "half": torch.linspace(-2, 2, 1000).to(torch.bfloat16),
    "waves": np.array([1 + 2j, 3 - 1j], "c8"),
    "empty": np.zeros((0, 4), "f4"),
    "number": torch.tensor(3.5),
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a store with one checkpoint of tensors of many kinds."""
    store = tmp_path_factory.mktemp("values") / "runs"
    relight.save(store / "demo", STATE, step=3)
    return store


def asked(server: Server, path: str) -> Any:
    """Return the answer, once the tensor has been read."""
    ends = time.monotonic() + 20
    while (
        "done" in (answer := server.get(f"/api/v1/runs/runs/demo/checkpoints/3/values?path={path}").json())
        and time.monotonic() < ends
    ):
        time.sleep(0.05)
    return answer


def test_numbers_and_classes_are_those_of_the_values(root: Path, tmp_path: Path) -> None:
    """The API's statistics and histogram agree with numpy's, and the page shows the histogram."""
    with serving([root], tmp_path) as server:
        answer = asked(server, "w")
        numbers = dict(answer["numbers"])
        wide = NORMAL.astype("f8")
        assert numbers["Least"] == wide.min() and numbers["Largest"] == wide.max()
        assert numbers["Mean"] == pytest.approx(wide.mean()) and numbers["Norm"] == pytest.approx(np.linalg.norm(wide))
        assert sum(answer["counts"]) == NORMAL.size and len(answer["edges"]) == CLASSES + 1
        counted, _ = np.histogram(wide, answer["edges"])
        assert np.abs(counted - answer["counts"]).sum() <= 4, "only values on an edge may differ"
        page = server.get("/runs/runs/demo/checkpoints/3?tensor=w").text
        assert 'class="picture histogram"' in page and "150,000 values in 48 classes" in page


def test_odd_values_are_counted_and_a_missing_histogram_has_its_reason(root: Path) -> None:
    """NaN and infinite values are counted separately. Without a possible histogram, a text has the reason."""
    run = Run(open_bytes(str(root)), "demo")
    opened = run.open(run.history().live[-1])

    def statistics(name: str) -> Any:
        return statistics_of(opened, name, lambda _: None)

    odd = statistics("odd")
    assert dict(odd.numbers) | {"Norm": 0} == {
        "Least": 1.0,
        "Mean": 2.0,
        "Largest": 3.0,
        "Norm": 0,
        "NaN": 1.0,
        "Infinite": 1.0,
    }
    assert sum(odd.counts) == 3
    assert statistics("same").says == "All its values are equal." and not statistics("same").counts
    assert dict(statistics("none").numbers) == {"NaN": 2.0, "Infinite": 0.0}
    assert "too far apart" in statistics("huge").says and "too close" in statistics("close").says
    assert sum(statistics("ints").counts) == 100 and sum(statistics("half").counts) == 1000
    assert [name for name, _ in statistics("waves").numbers] == ["Norm", "NaN", "Infinite"] and not statistics(
        "waves"
    ).counts
    assert dict(statistics("number").numbers)["Mean"] == 3.5
    pieces = pieces_named(opened, lambda name: name == "ints")["ints"]
    edges, counts = spread_of(opened, pieces, -5, 94)
    assert edges[0] == -5 and edges[-1] == 94 and max(counts) <= 3 and min(counts) >= 2


def test_a_missing_too_long_or_damaged_tensor_is_reported(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page is shown even if the tensor is unknown, too large or damaged."""
    with serving([root], tmp_path) as server:
        for path, why in (("unknown", 404), ("empty", 404)):
            assert server.get(f"/api/v1/runs/runs/demo/checkpoints/3/values?path={path}").status_code == why
        assert "Tensors by size" in server.get("/runs/runs/demo/checkpoints/3?tensor=unknown").text
        assert "no tensor" in server.get("/runs/runs/demo/checkpoints/3?tensor=empty").text
        monkeypatch.setattr(index_module, "VALUES_MAX", 1000)
        page = server.get("/runs/runs/demo/checkpoints/3?tensor=w").text
        assert "more than is read for a page" in page and "Tensors by size" in page
        monkeypatch.setattr(index_module, "VALUES_MAX", 1 << 30)
        (pack,) = [
            path for path in (root / "demo").rglob("*") if path.is_file() and path.stat().st_size > NORMAL.nbytes
        ]
        data = bytearray(pack.read_bytes())
        pack.chmod(0o644)
        offset = data.index(NORMAL.tobytes()[:64])
        data[offset] ^= 1
        pack.write_bytes(data)
        try:
            ends = time.monotonic() + 20
            while (
                "being read" in (page := server.get("/runs/runs/demo/checkpoints/3?tensor=w").text)
                and time.monotonic() < ends
            ):
                time.sleep(0.05)
            assert "not what was committed" in page or "hash" in page, page[:2000]
            assert (
                "Tensors by size" in page
                and server.get("/api/v1/runs/runs/demo/checkpoints/3/values?path=w").status_code == 422
            )
        finally:
            data[offset] ^= 1
            pack.write_bytes(data)
