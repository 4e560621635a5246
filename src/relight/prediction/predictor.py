"""The failure predictor of a supervisor: it gets a sample each second, and returns alarms with an action.

The rules always count. A learned detector counts only while its alarms are precise enough, on held-out runs and in this
job. A detector that does not count is still evaluated, so that it can count again.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from relight.errors import RelightError
from relight.observe import emit
from relight.prediction.act import action_for
from relight.prediction.detect import Detector, Risk
from relight.prediction.features import WINDOW_INTERVAL_S, FeatureWindow, FeatureWindows
from relight.prediction.history import FIRST_WINDOW, GAP_S
from relight.prediction.model import DetectorModel, Worth, read_model, without_model
from relight.prediction.sample import NodeSample, SampleShape
from relight.prediction.score import HORIZON_S, Alarming, Enough
from relight.prediction.signals import SignalHistory
from relight.prediction.trace import HOURS, Happened, SampleRecorder, keep_newest, name_of
from relight.units import duration_text, percent_text

Array = np.ndarray[Any, Any]
PRECISION = 0.5
RECORDINGS = 50
"""Recordings that are kept."""
LATELY = 20
"""Last alarms of a detector that count for its precision in this job."""
_HELD_OUT_COUNTS = 2
"""Weight of the held-out precision, in alarms of this job."""
_RELOAD_CHECK_S = 60.0
"""Seconds between checks of the model's file, so that a running job uses a newly trained model."""
OF_THE_SCRIPT = ("user", "fenced", "preemption", "numerical", "data")
"""Kinds of failures that a node shows no sign of: a detector cannot miss them."""


class Alarm(NamedTuple):
    """The prediction of a failure."""

    at: float
    kind: str
    """Kind of risk: see ``ACTIONS``."""
    action: str
    """``preventive save``, ``save more often``, ``drain node``, ``reduce load``."""
    why: str
    """The observation."""
    reason: str
    """Reason for the action."""
    score: float
    detector: str
    likely: float = PRECISION
    """Estimated share of the detector's alarms that come true within ``HORIZON_S``."""


class DetectorStanding(NamedTuple):
    """Standing of a detector in this job."""

    detector: str
    used: bool
    why: str
    """Why it is not used; empty if it is."""
    true: int
    """Number of its last alarms in this job that came true."""
    false: int


class _Watcher:
    """A detector with its alarms in this job, and whether they came true."""

    def __init__(self, name: str, detector: Detector, worth: Worth, precision: float) -> None:
        self.name, self._worth, self._precision = name, worth, precision
        self.open: list[float] = []
        self.settled: deque[bool] = deque(maxlen=LATELY)
        self.reported_why = ""
        self.begin(detector)

    def begin(self, detector: Detector) -> None:
        self.detector = detector.fresh()
        self._alarming = Alarming(self._worth.threshold)

    def update(self, window: FeatureWindow) -> Risk | None:
        """Return the risk if it is an alarm, else None. Alarms older than the horizon are settled as false."""
        late = [alarm_at for alarm_at in self.open if window.at - alarm_at > HORIZON_S]
        if late:
            self.open = self.open[len(late) :]
            for _ in late:
                self._resolve_alarm("false", False)
        risk = self.detector.update(window)
        if not self._alarming.update(window.at, risk.score, risk.kind if self.name == "rules" else None):
            return None
        self.open.append(window.at)
        return risk

    def failed(self, time_s: float, *, shows: bool = True) -> None:
        """Settle the open alarms by a failure: one counts as true.

        ``shows``: whether this kind of failure can show signs before.
        """
        if any(0 <= time_s - alarm_at <= HORIZON_S for alarm_at in self.open):
            self._resolve_alarm("true", True)
        elif shows:
            self._resolve_alarm("missed", None)
        self.open = []

    def _resolve_alarm(self, outcome: str, came_true: bool | None) -> None:
        used = not self.distrusted()
        if came_true is not None:
            self.settled.append(came_true)
        words = {
            "true": "an alarm came true",
            "false": f"an alarm did not come true within {duration_text(HORIZON_S)}",
        }
        text = f"{self.name}: {words.get(outcome, 'a failure came without an alarm')}"
        emit("prediction.scored", text, detector=self.name, outcome=outcome, used=used)

    def distrusted(self) -> str:
        """Return why the detector does not count; empty if it does."""
        if self.name == "rules":
            return ""
        return distrust(self._worth.precision, self._precision, self.settled)

    @property
    def likely(self) -> float:
        """Return the estimated share of its alarms that come true, from held-out runs and this job.

        For rules, held-out precision is 0.5.
        """
        return came_true(self._worth.precision if self._worth.precision >= 0 else PRECISION, self.settled)


def distrust(precision: float, asked: float, settled: Collection[bool]) -> str:
    """Return why a detector does not count, from its held-out precision and its last alarms; empty if it does.

    ``settled``: for each of its last alarms in this job, whether it came true.
    """
    if not precision >= asked:
        return f"of its alarms on held-out runs {_percent(precision)} were true, and {_percent(asked)} are required"
    return (
        f"of its last {len(settled)} alarms in this job {sum(settled)} came true"
        if came_true(precision, settled) < asked
        else ""
    )


def came_true(precision: float, settled: Collection[bool]) -> float:
    """Return the estimated share of a detector's alarms that come true: held-out precision and this job's last alarms."""
    return (sum(settled) + _HELD_OUT_COUNTS * precision) / (len(settled) + _HELD_OUT_COUNTS)


class FailurePredictor:
    """The predictor of one node. Used from one thread. A call takes 0.2 ms, and every fifth one 1 ms more."""

    def __init__(
        self,
        model: Path | None = None,
        *,
        shape: SampleShape | None = None,
        precision: float = PRECISION,
        hours: float = HOURS,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """``model``: a file of ``relight plan predict train``, read again when it changes.

        If it cannot be read, an event reports it, and the rules still count.
        """
        self.recorder = SampleRecorder(shape or SampleShape(), hours)
        self._path, self._precision, self._clock = model, precision, clock
        self._stamp: tuple[int, int] | None = None
        self._checked = -math.inf
        self._watchers: list[_Watcher] = []
        self._row: Array | None = None
        self._second = self._count = 0
        self._take(without_model())
        self._reload()
        self._begin()

    def sample(self, sample: NodeSample) -> list[Alarm]:
        """Add a sample, one each second. Return the alarms.

        Missing seconds repeat the sample before, up to five minutes. After a longer gap the predictor starts from
        scratch.
        """
        before = self._row
        row = self.recorder.add(sample)
        passed = int(sample.at) - self._second
        if not 0 <= passed <= GAP_S:
            self._begin()
            passed, before = 1, None
        self._row, self._second = row, int(sample.at)
        alarms: list[Alarm] = []
        for missing in range(passed - 1, -1, -1):
            alarms += self._next(sample.at - missing, row if not missing or before is None else before)
        return alarms

    def failed(self, kind: str, failed_at: float | None = None, cause: str = "") -> None:
        """Record a failure of the job: settle the alarms, add it to the recording, relearn the usual values."""
        time_s = self._clock() if failed_at is None else failed_at
        self.recorder.note(Happened(time_s, kind, cause))
        for watcher in self._watchers:
            watcher.failed(time_s, shows=kind not in OF_THE_SCRIPT)
        self._begin()

    def discard_alarm(self, alarm: Alarm) -> None:
        """Drop an alarm after an action that may have averted the failure: whether it was true is then unknown."""
        for watcher in self._watchers:
            watcher.open = [alarm_at for alarm_at in watcher.open if abs(alarm_at - alarm.at) > HORIZON_S]

    def standing(self) -> list[DetectorStanding]:
        """Return which detectors count, and why others do not."""
        return [
            DetectorStanding(
                watcher.name,
                not (why := watcher.distrusted()),
                why,
                sum(watcher.settled),
                len(watcher.settled) - sum(watcher.settled),
            )
            for watcher in self._watchers
        ]

    def write(self, directory: Path, **metadata: str) -> Path:
        """Write the recording, for ``relight plan predict train --recordings``, and begin a new one.

        No second is in two recordings. The newest fifty recordings in the directory are kept.
        """
        path = directory / name_of(self._clock())
        self.recorder.trace(**metadata).write(path)
        self.recorder.clear()
        keep_newest(directory, RECORDINGS)
        return path

    # -- inside ----------------------------------------------------------------------------------------------------------------

    def _next(self, time_s: float, row: Array) -> list[Alarm]:
        self._windows.add(self._signals.signals(row[None])[0])
        self._count += 1
        if time_s - self._checked >= _RELOAD_CHECK_S:
            self._checked = time_s
            self._reload()
        if self._count % WINDOW_INTERVAL_S or self._count <= FIRST_WINDOW * WINDOW_INTERVAL_S:
            return []
        window, alarms = self._windows.window(time_s), []
        for watcher in self._watchers:
            name, risk, why = watcher.name, watcher.update(window), watcher.distrusted()
            if why and not watcher.reported_why:
                emit("prediction.detector_disabled", f"detector {name} is not used: {why}", detector=name, why=why)
            watcher.reported_why = why
            if risk is not None and not why and self._enough.update(time_s):
                action, reason = action_for(risk.kind)
                alarms.append(
                    Alarm(time_s, risk.kind, action, risk.why, reason, round(risk.score, 3), name, watcher.likely)
                )
                emit(
                    "prediction.alarm",
                    f"{risk.why}: {action}",
                    kind=risk.kind,
                    action=action,
                    detector=name,
                    score=alarms[-1].score,
                )
        return alarms

    def _begin(self) -> None:
        self._signals, self._windows, self._enough = (
            SignalHistory(self.recorder.shape.columns),
            FeatureWindows(),
            Enough(),
        )
        self._row, self._second, self._count = None, -(1 << 62), 0
        for watcher in self._watchers:
            watcher.begin(watcher.detector)

    def _reload(self) -> None:
        """Read the model if its file has changed."""
        if self._path is None:
            return
        try:
            status = self._path.stat()
            stamp = (status.st_mtime_ns, status.st_ino)
        except OSError:
            stamp = None
        if stamp == self._stamp and (stamp or self._checked > -math.inf):
            return
        self._stamp = stamp
        try:
            model = read_model(self._path)
            self._take(model)
            created = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(model.made_at))
            text = f"the model {self._path.name} of {created} is in use: {', '.join(model.detectors)}"
            emit(
                "prediction.model_loaded",
                text,
                path=str(self._path),
                made_at=model.made_at,
                detectors=list(model.detectors),
            )
        except RelightError as error:
            emit(
                "prediction.detector_disabled",
                f"the prediction model is not used: {error.what}",
                detector="model",
                why=error.what,
            )

    def _take(self, model: DetectorModel) -> None:
        """Use a model's detectors, and the rules in any case.

        Detectors keep the alarms of earlier ones with the same name.
        """
        old, rules = {watcher.name: watcher for watcher in self._watchers}, without_model()
        detectors, worth = {**rules.detectors, **model.detectors}, {**rules.worth, **model.worth}
        self._watchers = [
            _Watcher(name, detector, worth[name], self._precision) for name, detector in detectors.items()
        ]
        for watcher in self._watchers:
            if watcher.name in old:
                watcher.settled.extend(old[watcher.name].settled)
                watcher.open = old[watcher.name].open  # these alarms are not settled yet


def _percent(share: float) -> str:
    return "none" if math.isnan(share) else percent_text(share)
