"""Made-up histories: the same again, failures as labelled, split by run."""

from __future__ import annotations

from pathlib import Path

import made
import numpy as np
import pytest

from relight.errors import CorruptCheckpoint
from relight.prediction.history import CHECK, HELD_OUT, TRAIN, part_of, recorded, runs_of, simulated
from relight.prediction.simulate import CAUSES, FAILING, SUDDEN, simulate
from relight.prediction.trace import Happened, SampleRecorder, SampleTrace


def test_a_seed_gives_the_same_run_again_and_others_differ() -> None:
    """A seed repeats a run to the bit."""
    first, again, other = simulate(3, 4), simulate(3, 4), simulate(3, 5)
    np.testing.assert_array_equal(first.values, again.values)
    assert first.happened == again.happened and first.values.shape != other.values.shape


def test_failures_are_those_that_are_asked_for_and_end_the_run() -> None:
    """All causes occur, sudden failures too. The failure is the last event of its run."""
    traces = [simulate(1, number, failing=1.0) for number in range(40)]
    assert all(len(trace.happened) == 1 and trace.happened[0].at == trace.at[-1] for trace in traces)
    causes = [trace.happened[0].cause for trace in traces]
    assert set(causes) <= {*CAUSES, "sudden"} and len(set(causes)) > 4 and 10 < causes.count("sudden") < 34
    assert sum(share for _, share in CAUSES.values()) == pytest.approx(1)
    assert (
        0.2 < np.mean([bool(simulate(2, number).happened) for number in range(40)]) < 0.6
        and 0 < SUDDEN < 1
        and 0 < FAILING < 1
    )


def test_a_leak_ends_without_memory_and_a_filling_disk_without_room() -> None:
    """A leak and a filling disk end without memory or room. Healthy runs never do."""
    seen = set()
    for number in range(60):
        trace = simulate(1, number)
        place = {name: number for number, name in enumerate(trace.columns)}
        free = trace.values[:, place["host.memory_available_bytes"]] / trace.values[:, place["host.memory_size_bytes"]]
        room = trace.values[:, place["room0.free_bytes"]] / trace.values[:, place["room0.size_bytes"]]
        cause = trace.happened[0].cause if trace.happened else ""
        seen.add(cause)
        assert (free[-1] < 0.02) == (cause == "leak"), cause
        assert (room[-1] < 0.005) == (cause == "disk"), cause
        assert np.isfinite(trace.values[:, place["host.cpu"]]).all()
    assert {"leak", "disk", ""} <= seen


def test_runs_are_split_as_a_whole() -> None:
    """Of five made-up runs three are for training, one for checks, one held out. A recording's part follows from its
    name."""
    parts = [part for part, _ in simulated(0, 5)]
    assert sorted(parts) == sorted([TRAIN, TRAIN, TRAIN, CHECK, HELD_OUT])
    np.testing.assert_array_equal(
        next(simulated(0, 1, (HELD_OUT,)))[1].features, runs_of(simulate(0, 0), "x")[0].features
    )
    parts_of_runs = [part_of(f"{number}") for number in range(300)]
    assert (
        parts_of_runs == [part_of(f"{number}") for number in range(300)]
        and 0.5 < parts_of_runs.count(TRAIN) / 300 < 0.7
        and set(parts_of_runs) == {TRAIN, CHECK, HELD_OUT}
    )


def test_a_recording_is_cut_at_failures_and_gaps(tmp_path: Path) -> None:
    """Each incarnation is a run. Short ones are left out. A missing second has the values of the second before it."""
    recorder = SampleRecorder(made.SHAPE, hours=2)
    for second in [*range(1000), *range(1000, 1800, 2), *range(3000, 3700), *range(3700, 4000)]:
        recorder.add(made.sample(1e9 + second))
    recorder.note(Happened(1e9 + 999.5, "memory"))
    recorder.note(Happened(1e9 + 3699.5, "hang"))
    trace = recorder.trace()
    runs = runs_of(trace, "n")
    assert [(run.name, run.failed.kind if run.failed else None) for run in runs] == [
        ("n/0", "memory"),
        ("n/1", None),
        ("n/2", "hang"),
    ]
    assert [run.at[0] - 1e9 for run in runs] == [299, 1299, 3299]
    assert (
        runs[0].before_failure.all()
        and not runs[1].before_failure.any()
        and len(runs[1].at) == len(runs[1].features) == 100
    )
    trace.write(tmp_path / "n.trace")
    assert len(list(recorded(tmp_path))) == 3
    (tmp_path / "o.trace").write_bytes(b"no recording")
    with pytest.raises(CorruptCheckpoint, match=r"o\.trace"):
        list(recorded(tmp_path))
    assert isinstance(trace, SampleTrace)
