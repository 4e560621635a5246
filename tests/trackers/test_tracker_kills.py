"""A job with a tracker is killed five times: one run of the tracker, each step once, no gap, the values of a run that was
never killed. Read with the tracker's own reader."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tracker_readers
from killed_job import killed_five_times, run_job

import relight

ROOT = Path(__file__).parents[2]
PACKAGES = {"lines": None, "tensorboard": "tensorboard", "wandb": "wandb", "mlflow": "mlflow"}
TOOLS = {
    "tensorboard": ("TensorBoard", "tensorboard"),
    "wandb": ("W&B", "wandb"),
    "mlflow": ("MLflow", "mlflow-skinny"),
}
STEPS, KILLS = 60, (3, 12, 24, 25, 50)
"""The first kill comes before the first save; two follow each other."""


def guide_code(name: str) -> str:
    """Return the guide's block of Python that begins with that file's name."""
    page = (ROOT / "docs" / "guides" / "trackers.md").read_text()
    return page.partition(f"```python\n# {name}\n")[2].partition("```")[0]


def kinds() -> list[Any]:
    """Return the kinds of trackers, with the markers of their rows."""
    why = "killed five times: one run of the tracker, and each step once"
    return [
        pytest.param(
            kind,
            marks=[
                pytest.mark.shows(
                    tool=TOOLS[kind][0], package=TOOLS[kind][1], feature="killed and resumed", outcome="exact", why=why
                )
            ]
            if kind in TOOLS
            else [],
        )
        for kind in PACKAGES
    ]


@pytest.fixture
def kind(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Return the kind of tracker. Skip it if its package is not installed."""
    if PACKAGES[request.param] is not None:
        pytest.importorskip(
            PACKAGES[request.param], reason=f"{PACKAGES[request.param]} is not installed: make trackers"
        )
    for place in (tmp_path, tmp_path / "whole"):
        place.mkdir(exist_ok=True)
        (place / "lines.py").write_text(guide_code("lines.py"))
    if request.param == "mlflow":  # a kill while MLflow creates its tables leaves a database that it cannot open
        for place in (tmp_path, tmp_path / "whole"):
            create = "import sys, mlflow; mlflow.MlflowClient(sys.argv[1]).search_experiments()"
            subprocess.run([sys.executable, "-c", create, f"sqlite:///{place}/mlflow.db"], check=True)
    return request.param


@pytest.mark.crash
@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("default")  # of the trackers, of themselves
@pytest.mark.parametrize("kind", kinds(), indirect=True)
def test_five_kills_leave_one_run_with_each_step_once(kind: str, tmp_path: Path) -> None:
    """Each kill ends all processes of the job, the tracker's own, too. One comes before the first save."""
    losses = run_job(kind, tmp_path / "whole", STEPS)
    killed_five_times(kind, tmp_path, STEPS, KILLS)
    runs = getattr(tracker_readers, kind)(tmp_path)
    if kind == "tensorboard":
        own = runs.pop("relight")
        assert {"relight/stall_s", "relight/durable_s", "relight/bytes", "relight/restarts"} <= own.keys()
    assert len(runs) == 1, "one run"
    (series,) = runs.values()
    assert [step for step, _ in series["loss"]] == list(range(STEPS))
    assert [step for step, _ in series["rate"]] == list(range(0, STEPS, 5))
    assert dict(series["loss"]) == pytest.approx(losses, rel=1e-6), "the values of a run that was never killed"
    if kind in ("mlflow", "wandb"):
        assert len(series["relight/bytes"]) >= 3


@pytest.mark.timeout(120)
@pytest.mark.parametrize("kind", ["lines"], indirect=True)
def test_a_fresh_job_begins_a_run_of_its_own(kind: str, tmp_path: Path) -> None:
    """``fresh=True`` in a run that has checkpoints: the earlier curve stays, and the new job has its own."""
    run_job(kind, tmp_path, 20)
    run_job(kind, tmp_path, 20, fresh=True)
    runs = tracker_readers.lines(tmp_path)
    assert len(runs) == 2
    assert all([step for step, _ in series["loss"]] == list(range(20)) for series in runs.values())


@pytest.mark.timeout(120)
@pytest.mark.parametrize("kind", ["lines"], indirect=True)
def test_a_checkpoint_has_the_id_and_the_url_of_the_run(kind: str, tmp_path: Path) -> None:
    """``relight.load`` returns them, with the rows that the tracker had not confirmed."""
    run_job(kind, tmp_path, 20)
    state = relight.load(tmp_path / "runs" / "demo", only=["tracker"])["tracker"]
    (run,) = tracker_readers.lines(tmp_path)
    assert (state["tracker"], state["run"]) == ("lines", run)
    assert os.path.samefile(state["url"], tmp_path / "lines" / f"{run}.txt")
    assert state["step"] == 19
