"""What a supervisor owns: told a sample each second, it says when something is about to go wrong, and what to do.

The rules always count. What was learned counts only as long as it is right: on runs that were held out of its training, and here, in this
job. A detector that does not count goes on being asked, so that it can come to count again.
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
from relight.prediction.features import LOOK_S, FeatureWindow, FeatureWindows
from relight.prediction.history import FIRST_LOOK, GAP_S
from relight.prediction.model import DetectorModel, Worth, read_model, without_model
from relight.prediction.sample import NodeSample, SampleShape
from relight.prediction.score import HORIZON_S, Alarming, Enough
from relight.prediction.signals import SignalHistory
from relight.prediction.trace import HOURS, Happened, SampleRecorder, keep_newest, name_of

Array = np.ndarray[Any, Any]
PRECISION = 0.5
RECORDINGS = 50
"""So many are kept."""
LATELY = 20
"""So many of a detector's last alarms count."""
_HELD_OUT_COUNTS = 2
"""Held-out precision counts as much as so many alarms of this job."""
_LOOKED_AFTER_S = 60.0
"""Seconds after which the model's file is looked at again: a running job takes a model that was trained meanwhile."""
_OF_THE_SCRIPT = ("user", "fenced", "preemption", "numerical", "data")
"""Classes of failures of which a node shows nothing before: a detector cannot miss them."""


class Alarm(NamedTuple):
    """Something is about to go wrong."""

    at: float
    kind: str
    """Of risk: see ``ACTIONS``."""
    action: str
    """``preventive save``, ``save more often``, ``drain node``, ``reduce load``."""
    why: str
    """What was seen."""
    reason: str
    """Why this action."""
    score: float
    detector: str
    likely: float = PRECISION
    """The share of its alarms that come true within ``HORIZON_S``, as far as is known."""


class DetectorStanding(NamedTuple):
    """A detector, in this job."""

    detector: str
    used: bool
    why: str
    """Not, if it is not."""
    true: int
    """Of its last alarms here."""
    false: int


class _Watcher:
    """A detector with its alarms in this job, and whether they came true."""

    def __init__(self, name: str, detector: Detector, worth: Worth, precision: float) -> None:
        self.name, self._worth, self._precision = name, worth, precision
        self.open: list[float] = []
        self.settled: deque[bool] = deque(maxlen=LATELY)
        self.said = ""
        self.begin(detector)

    def begin(self, detector: Detector) -> None:
        self.detector = detector.fresh()
        self._alarming = Alarming(self._worth.threshold)

    def update(self, look: FeatureWindow) -> Risk | None:
        """The risk, if it is an alarm."""
        late = [at for at in self.open if look.at - at > HORIZON_S]
        if late:
            self.open = self.open[len(late) :]
            for _ in late:
                self._resolve_alarm("false", False)
        risk = self.detector.update(look)
        if not self._alarming.update(look.at, risk.score, risk.kind if self.name == "rules" else None):
            return None
        self.open.append(look.at)
        return risk

    def failed(self, at: float, *, shows: bool = True) -> None:
        """What it warned of in the horizon came true, once. ``shows``: whether a failure of this class could be seen coming."""
        if any(0 <= at - one <= HORIZON_S for one in self.open):
            self._resolve_alarm("true", True)
        elif shows:
            self._resolve_alarm("missed", None)
        self.open = []

    def _resolve_alarm(self, outcome: str, came_true: bool | None) -> None:
        used = not self.distrusted()
        if came_true is not None:
            self.settled.append(came_true)
        words = {"true": "an alarm came true", "false": f"an alarm did not come true within {HORIZON_S / 60:.0f} min"}
        say = f"{self.name}: {words.get(outcome, 'a failure came without an alarm')}"
        emit("prediction.scored", say, detector=self.name, outcome=outcome, used=used)

    def distrusted(self) -> str:
        """Why it does not count; empty if it does."""
        if self.name == "rules":
            return ""
        return distrust(self._worth.precision, self._precision, self.settled)

    @property
    def likely(self) -> float:
        """The share of its alarms that come true: on held-out runs and in this job. Of rules, of which the former is not known, half."""
        return came_true(self._worth.precision if self._worth.precision >= 0 else PRECISION, self.settled)


def distrust(precision: float, asked: float, settled: Collection[bool]) -> str:
    """Why a detector does not count that had this precision on held-out runs, and whose last alarms came true or not; empty if it does."""
    if not precision >= asked:
        return f"of its alarms on held-out runs {_percent(precision)} were true, and {_percent(asked)} are asked for"
    return f"of its last {len(settled)} alarms in this job {sum(settled)} came true" if came_true(precision, settled) < asked else ""


def came_true(precision: float, settled: Collection[bool]) -> float:
    """The share of a detector's alarms that come true, by its precision on held-out runs and its last alarms here."""
    return (sum(settled) + _HELD_OUT_COUNTS * precision) / (len(settled) + _HELD_OUT_COUNTS)


class FailurePredictor:
    """Of one node. Used from one thread; a call takes a fifth of a millisecond, and each fifth one a whole one more."""

    def __init__(
        self,
        model: Path | None = None,
        *,
        shape: SampleShape | None = None,
        precision: float = PRECISION,
        hours: float = HOURS,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """``model``: of ``relight predict train``, read again when it has changed; one that cannot be read is said, and the rules go on."""
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
        """One each second. What is missing between two is as the first of them, up to five minutes; behind more it begins anew."""
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

    def failed(self, kind: str, at: float | None = None, cause: str = "") -> None:
        """The job did, in this way: alarms are settled, the recording has it, and what is usual is learned anew."""
        at = self._clock() if at is None else at
        self.recorder.note(Happened(at, kind, cause))
        for one in self._watchers:
            one.failed(at, shows=kind not in _OF_THE_SCRIPT)
        self._begin()

    def heeded(self, alarm: Alarm) -> None:
        """More than a save was done about it: whether it would have come true cannot be known, so it counts for nothing."""
        for one in self._watchers:
            one.open = [at for at in one.open if abs(at - alarm.at) > HORIZON_S]

    def standing(self) -> list[DetectorStanding]:
        """Which detectors count, and why others do not."""
        return [
            DetectorStanding(one.name, not (why := one.distrusted()), why, sum(one.settled), len(one.settled) - sum(one.settled))
            for one in self._watchers
        ]

    def write(self, directory: Path, **told: str) -> Path:
        """The recording, for ``relight predict train --recordings``; a new one begins, so that no second is in two of them.

        Of those there the newest fifty stay.
        """
        path = directory / name_of(self._clock())
        self.recorder.trace(**told).write(path)
        self.recorder.clear()
        keep_newest(directory, RECORDINGS)
        return path

    # -- inside ----------------------------------------------------------------------------------------------------------------

    def _next(self, at: float, row: Array) -> list[Alarm]:
        self._windows.add(self._signals.signals(row[None])[0])
        self._count += 1
        if at - self._checked >= _LOOKED_AFTER_S:
            self._checked = at
            self._reload()
        if self._count % LOOK_S or self._count <= FIRST_LOOK * LOOK_S:
            return []
        look, alarms = self._windows.window(at), []
        for one in self._watchers:
            risk = one.update(look)
            why = one.distrusted()
            if why and not one.said:
                emit("prediction.detector_disabled", f"{one.name} does not count: {why}", detector=one.name, why=why)
            one.said = why
            if risk is not None and not why and self._enough.update(at):
                action, reason = action_for(risk.kind)
                alarms.append(Alarm(at, risk.kind, action, risk.why, reason, round(risk.score, 3), one.name, one.likely))
                emit("prediction.alarm", f"{risk.why}: {action}", kind=risk.kind, action=action, detector=one.name, score=alarms[-1].score)
        return alarms

    def _begin(self) -> None:
        self._signals, self._windows, self._enough = SignalHistory(self.recorder.shape.columns), FeatureWindows(), Enough()
        self._row, self._second, self._count = None, -(1 << 62), 0
        for one in self._watchers:
            one.begin(one.detector)

    def _reload(self) -> None:
        """The model, if its file is another than the last time."""
        if self._path is None:
            return
        try:
            found = self._path.stat()
            stamp = (found.st_mtime_ns, found.st_ino)
        except OSError:
            stamp = None
        if stamp == self._stamp and (stamp or self._checked > -math.inf):
            return
        self._stamp = stamp
        try:
            model = read_model(self._path)
            self._take(model)
            made = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(model.made_at))
            say = f"the model {self._path.name} of {made} is in use: {', '.join(model.detectors)}"
            emit("prediction.model_loaded", say, path=str(self._path), made_at=model.made_at, detectors=list(model.detectors))
        except RelightError as error:
            emit("prediction.detector_disabled", f"the model does not count: {error.what}", detector="model", why=error.what)

    def _take(self, model: DetectorModel) -> None:
        """Its detectors, and the rules in any case; what those of the same name did in this job until now still counts."""
        old, rules = {one.name: one for one in self._watchers}, without_model()
        detectors, worth = {**rules.detectors, **model.detectors}, {**rules.worth, **model.worth}
        self._watchers = [_Watcher(name, one, worth[name], self._precision) for name, one in detectors.items()]
        for one in self._watchers:
            if one.name in old:
                one.settled.extend(old[one.name].settled)
                one.open = old[one.name].open  # what it warned of is still to be settled


def _percent(share: float) -> str:
    return "none" if math.isnan(share) else f"{100 * share:.0f} %"
