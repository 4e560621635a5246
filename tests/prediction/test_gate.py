"""The failure predictor of a supervisor: early alarms, detectors that count only while they are right, and cheap
calls."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from pathlib import Path

import made
import numpy as np
import pytest

from relight.observe import Event, subscribe
from relight.prediction import FailurePredictor, NodeSample
from relight.prediction.detect import DetectionRules, Risk
from relight.prediction.features import FEATURES, Scale
from relight.prediction.history import runs_of
from relight.prediction.learn import evaluate
from relight.prediction.lstm import CLASSES, INPUTS, NAMES, Lstm
from relight.prediction.model import DetectorModel, Worth
from relight.prediction.predictor import came_true
from relight.prediction.score import AlarmCosts
from relight.prediction.simulate import simulate
from relight.prediction.trace import read_trace


@pytest.fixture
def events() -> Iterator[list[Event]]:
    """Collect alarms and reports of disabled detectors."""
    events: list[Event] = []
    undo = subscribe(
        lambda event: (
            events.append(event) if event.name in ("prediction.alarm", "prediction.detector_disabled") else None
        )
    )
    yield events
    undo()


def untrained() -> Lstm:
    """Return a network of zeros: it takes each class for equally likely, so each score is 0.8."""
    shapes = ((4, INPUTS), (4, 1), (4,), (1, 1), (1,), (1,), (len(CLASSES), 2), (len(CLASSES),))
    weights = {name: np.zeros(shape, np.float32) for name, shape in zip(NAMES, shapes)}
    return Lstm(Scale(np.zeros(len(FEATURES)), np.ones(len(FEATURES))), weights)


def model(path: Path, precision: float, threshold: float = 0.0) -> Path:
    """Write a model with only a network of that held-out precision. With threshold 0 it alarms as often as allowed.

    The rules need no model.
    """
    DetectorModel({"lstm": untrained()}, {"lstm": Worth(threshold, precision)}).write(path)
    return path


def calm(foresight: FailurePredictor, seconds: int, at: float = 1e9) -> list:
    """Feed ``seconds`` calm samples and return the alarms."""
    return [alarm for second in range(seconds) for alarm in foresight.sample(made.sample(at + second))]


def test_a_leak_raises_an_alarm_in_time_with_an_action(events: list[Event]) -> None:
    """A memory leak raises an alarm with an action, and repeats it ever more rarely. A calm node raises none."""
    foresight = FailurePredictor(shape=made.SHAPE)
    alarms = [alarm for sample in made.leak(1500, 600, 1500) for alarm in foresight.sample(sample)]
    assert (alarms[0].kind, alarms[0].action, alarms[0].detector) == ("memory", "preventive save", "rules")
    assert 250 < 1e9 + 1500 - alarms[0].at < 400 and len(alarms) <= 3
    assert "it is full in" in alarms[0].why and alarms[0].reason
    assert alarms[0].likely == 0.5, "the prior of the rules, before any of their alarms was settled"
    assert [event.name for event in events] == ["prediction.alarm"] * len(alarms)
    assert calm(FailurePredictor(shape=made.SHAPE), 900) == []


def test_how_probable_an_alarm_is_goes_by_what_came_true() -> None:
    """Held-out precision counts as two alarms of this job, so many alarms of this job outweigh it."""
    assert came_true(0.8, []) == pytest.approx(0.8)
    assert came_true(0.5, [True] * 18) == pytest.approx(0.95)
    assert came_true(0.9, [False] * 10) == pytest.approx(0.15)


def test_online_is_what_was_evaluated() -> None:
    """Samples of a simulated run, fed second by second, raise the alarms that the evaluation counted."""
    for number in range(200):
        trace = simulate(4, number, 1.0, 0.0)
        if trace.happened[0].cause == "leak" and len(trace.at) < 8000:
            break
    run = runs_of(trace, "x")[0]
    counted = evaluate(DetectorModel({"rules": DetectionRules()}, {"rules": Worth()}), [run], 0.5, AlarmCosts())[0]
    foresight = FailurePredictor(shape=made.SHAPE)
    # the ring buffer has another shape than the trace, so its rows are fed directly
    foresight.recorder._columns = trace.columns
    foresight.recorder.shape = type(
        "Shape", (), {"columns": trace.columns, "row": staticmethod(lambda sample: sample.host)}
    )()
    foresight.recorder._values = np.zeros((len(trace.at), len(trace.columns)), np.float32)
    foresight.recorder._at = np.zeros(len(trace.at))
    foresight.recorder._rows = len(trace.at)
    foresight._begin()
    alarms = [
        alarm
        for second, row in zip(trace.at, trace.values)
        for alarm in foresight.sample(NodeSample(float(second), row))
    ]
    assert len(alarms) == counted.alarms > 0 and trace.happened[0].at - max(alarm.at for alarm in alarms) < 1200


def test_a_detector_with_low_held_out_precision_is_reported_once_and_not_used(
    tmp_path: Path, events: list[Event]
) -> None:
    """A detector with low held-out precision is reported once and not used, but still evaluated."""
    foresight = FailurePredictor(model(tmp_path / "m", 0.2), shape=made.SHAPE)
    assert calm(foresight, 900) == []
    assert [event.fields["detector"] for event in events] == ["lstm"] and "20 %" in events[0].fields["why"]
    standing = {detector.detector: detector for detector in foresight.standing()}
    assert standing["rules"].used and not standing["lstm"].used and "held-out" in standing["lstm"].why


def test_a_detector_that_is_wrong_here_stops_counting_and_one_that_is_right_comes_back(
    tmp_path: Path, events: list[Event]
) -> None:
    """A detector is used or not by its last alarms in this job. Each failure makes one alarm true."""
    foresight = FailurePredictor(model(tmp_path / "m", 0.9), shape=made.SHAPE)
    alarms = calm(foresight, 3600)
    assert alarms and {alarm.detector for alarm in alarms} == {"lstm"}
    network = foresight.standing()[1]
    assert not network.used and network.true == 0 and network.false >= 2 and "in this job" in network.why
    assert (
        max(alarm.at for alarm in alarms) < 1e9 + 2000
        and [event.name for event in events].count("prediction.detector_disabled") == 1
    )
    now = 1e9 + 3600
    for _ in range(6):
        calm(foresight, 360, now)
        now += 360
        foresight.failed("hang", now)
    assert foresight.standing()[1].used and foresight.standing()[1].true == 6


def test_an_alarm_that_was_heeded_counts_for_nothing(tmp_path: Path) -> None:
    """After a drained node it is unknown whether the node would have failed."""
    foresight = FailurePredictor(model(tmp_path / "m", 0.9), shape=made.SHAPE)
    for second in range(2500):
        for alarm in foresight.sample(made.sample(1e9 + second)):
            foresight.discard_alarm(alarm)
    assert foresight.standing()[1] == ("lstm", True, "", 0, 0)


@pytest.fixture
def others() -> Iterator[list[Event]]:
    """Collect reports of loaded models and settled alarms."""
    events: list[Event] = []
    undo = subscribe(
        lambda event: events.append(event) if event.name in ("prediction.model_loaded", "prediction.scored") else None
    )
    yield events
    undo()


def test_a_running_job_takes_a_model_that_was_trained_meanwhile(tmp_path: Path, others: list[Event]) -> None:
    """Another file of the same name is in use within a minute, also in the first minutes of an incarnation.

    Open alarms are kept.
    """
    foresight = FailurePredictor(model(tmp_path / "m", 0.9), shape=made.SHAPE)
    calm(foresight, 500)
    waiting = list(foresight._watchers[1].open)
    assert waiting
    DetectorModel({"lstm": untrained()}, {"lstm": Worth(0.0, 0.95)}, made_at=1.7e9).write(tmp_path / "new")
    (tmp_path / "new").replace(tmp_path / "m")
    calm(foresight, 62, 1e9 + 500)
    assert [event.name for event in others].count("prediction.model_loaded") == 2
    assert others[-1].fields["made_at"] == 1.7e9 and others[-1].fields["detectors"] == ["lstm"]
    assert foresight._watchers[1].open[: len(waiting)] == waiting and foresight._watchers[1]._worth.precision == 0.95
    foresight.failed("hang", 1e9 + 600)
    (tmp_path / "m").unlink()
    model(tmp_path / "m", 0.8)
    calm(foresight, 62, 1e9 + 600)
    assert [event.name for event in others].count("prediction.model_loaded") == 3, (
        "long before the first evaluation of the next incarnation"
    )


def test_what_became_of_each_alarm_is_reported(tmp_path: Path, others: list[Event]) -> None:
    """Each alarm is settled once, as true or false; a failure without one is missed, unless the script itself is its
    cause."""
    foresight = FailurePredictor(model(tmp_path / "m", 0.9), shape=made.SHAPE)
    foresight.failed("hang", 1e9)
    foresight.failed("user", 1e9)
    assert [(event.fields["detector"], event.fields["outcome"]) for event in others[1:]] == [
        ("rules", "missed"),
        ("lstm", "missed"),
    ]
    del others[:]
    calm(foresight, 400)
    foresight.failed("hang", 1e9 + 400)
    assert [(event.fields["detector"], event.fields["outcome"]) for event in others] == [
        ("rules", "missed"),
        ("lstm", "true"),
    ]
    del others[:]
    calm(foresight, 9000, 1e9 + 400)
    assert {(event.fields["detector"], event.fields["outcome"]) for event in others} == {("lstm", "false")}
    assert {event.fields["used"] for event in others} == {True, False}


@pytest.mark.parametrize("damage", ["none", "damaged", "directory"])
def test_an_unreadable_model_is_reported_and_the_rules_are_used(
    tmp_path: Path, events: list[Event], damage: str
) -> None:
    """An unreadable model is reported once and the rules are used. A good model is used once it exists."""
    path = tmp_path / "m"
    if damage == "damaged":
        path.write_bytes(b'{"seal":"')
    if damage == "directory":
        path.mkdir()
    foresight = FailurePredictor(path, shape=made.SHAPE)
    assert [event.fields["detector"] for event in events] == ["model"]
    assert [detector.detector for detector in foresight.standing()] == ["rules"]
    calm(foresight, 700)
    assert len(events) == 1, "once"
    if damage == "directory":
        path.rmdir()
    model(path, 0.9, 1.0)
    calm(foresight, 700, 1e9 + 700)
    assert [detector.detector for detector in foresight.standing()] == ["rules", "lstm"]


def test_clocks_and_gaps(tmp_path: Path) -> None:
    """Missing seconds repeat the second before.

    After a long gap, or if the clock went back, the windows start from scratch.
    """
    whole, holes = FailurePredictor(shape=made.SHAPE), FailurePredictor(shape=made.SHAPE)
    for second in range(1000):
        sample = made.sample(1e9 + second, step_s=1 + (second // 10) % 3)
        whole.sample(sample)
        if second % 10 == 0 or second == 999:
            holes.sample(sample)
    np.testing.assert_allclose(whole._windows.window(0).values, holes._windows.window(0).values, rtol=1e-6)
    for now in (1e9 + 2000, 1e9 - 5):
        holes.sample(made.sample(now))
        assert holes._count == 1
    holes.sample(made.sample(1e9 - 4.9))
    assert holes._count == 1, "no second has passed"


def test_what_was_seen_and_what_happened_is_written(tmp_path: Path) -> None:
    """Samples and failures are written as a recording for training detectors."""
    foresight = FailurePredictor(shape=made.SHAPE, clock=lambda: 1e9 + 800)
    calm(foresight, 800)
    foresight.failed("memory")
    trace = read_trace(foresight.write(tmp_path / "deep", host="n1"))
    assert len(trace.at) == 800 and trace.happened[0][:2] == (1e9 + 800, "memory") and trace.metadata["host"] == "n1"
    runs = runs_of(trace, "x")
    assert len(runs) == 1 and runs[0].failed is not None and runs[0].failed.kind == "memory"
    foresight.sample(made.sample(1e9 + 801))
    assert len(foresight.recorder.trace().at) == 1 and not foresight.recorder.trace().happened, (
        "no second is in two recordings"
    )


def test_a_call_costs_less_than_a_millisecond(learned: DetectorModel, tmp_path: Path) -> None:
    """The median of a call with all learned detectors is below 1 ms.

    The best of three counts, because the machine may be busy.
    """
    learned.write(tmp_path / "m")
    foresight, medians = FailurePredictor(tmp_path / "m", shape=made.SHAPE), []
    calm(foresight, 400)
    for begin in (400, 500, 600):
        times = []
        for second in range(begin, begin + 100):
            sample, before = made.sample(1e9 + second), time.perf_counter()
            foresight.sample(sample)
            times.append(time.perf_counter() - before)
        medians.append(sorted(times)[50])
    assert min(medians) < 1e-3, medians


def test_a_risk_without_reason_is_still_one() -> None:
    """A detector may leave out reason and kind of a risk."""
    assert Risk(0.3) == (0.3, "", "unusual") and not math.isnan(Risk(0.3).score)
