"""A thread that samples the node each second, records and judges the samples, and reports alarms.

It is a separate thread because a file system or a driver may not answer. The supervisor must watch the ranks even then.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from relight.comm.new_threads import start
from relight.errors import RelightError
from relight.heartbeat import Heartbeat
from relight.observe import emit
from relight.prediction import Alarm, FailurePredictor, Gauges, HostGauges, Rank, SampleShape, rss_bytes
from relight.settings.supervise_settings import SuperviseSettings
from relight.supervise.load import Load

EVERY_S = 1.0
CLOSE_S = 2.0
"""Seconds to wait for the thread at the end, and then for a driver that must restore power limits."""


Seen = Mapping[int, tuple[int, Heartbeat]]
"""By rank, the process id and the last heartbeat."""


class PredictionThread:
    """The thread. It begins with the first completed step, because samples of a job's start predict nothing."""

    def __init__(
        self,
        settings: SuperviseSettings,
        seen: Callable[[], Seen],
        act: Callable[[Alarm], bool],
        gauges: Gauges | None,
        host: str,
        load: Load,
    ) -> None:
        """``seen`` and ``act`` are called in this thread. ``act`` returns whether its action averts the failure."""
        self._load = load
        self._settings, self._seen, self._act, self._gauges, self._host = settings, seen, act, gauges, host
        self._failures: queue.SimpleQueue[tuple[str, float, str]] = queue.SimpleQueue()
        self._over = threading.Event()
        self._steps: dict[int, Heartbeat] = {}
        self._step_s: dict[int, float] = {}
        self._paused_s = 0.0
        """Seconds that ranks of this node have paused."""
        self._unheeded: list[Alarm] = []
        """Alarms for which a load reduction was requested that has no effect yet."""
        self._thread = threading.Thread(target=self._run, name="relight-predict", daemon=True)
        self._runs = settings.predict and start(self._thread)

    def failed(self, kind: str, cause: str) -> None:
        """Record that an incarnation failed, so that alarms before it count as correct."""
        self._failures.put((kind, time.time(), cause))

    def close(self, within_s: float = CLOSE_S) -> None:
        """End the thread. The recorded samples are written first. Each wait is at most ``within_s``."""
        wait_s = min(CLOSE_S, within_s)
        self._over.set()
        if not self._runs:
            return
        self._thread.join(wait_s)
        if self._thread.is_alive() and self._load.is_reduced:  # it waits for a driver; another device may still answer
            last = threading.Thread(target=self._load.close, name="relight-load", daemon=True)
            if start(last):
                last.join(wait_s)
            if last.is_alive():
                text = "the driver of an accelerator does not answer: power limits that were lowered may stay lowered"
                emit("run.load", text, kind="heat", action="kept", reading_before=None, reading_after=None)

    # -- inside

    def _run(self) -> None:
        try:
            self._predict()
        except Exception as error:  # noqa: BLE001 - a driver's library may raise anything, and a thread's error reaches no process
            why = f"{type(error).__name__}: {error}"
            emit("prediction.detector_disabled", f"this node is no longer sampled: {why}", detector="all", why=why)

    def _predict(self) -> None:
        while not (beats := self._ready()):
            if self._over.wait(EVERY_S):
                return
        beat = next(iter(beats.values()))[1]
        accelerators = len(self._gauges.read()) if self._gauges is not None else 0
        model = Path(self._settings.model) if self._settings.model else None
        foresight = FailurePredictor(model, shape=SampleShape(1, len(beats), accelerators))
        host = HostGauges((_place(beat.url),))
        try:
            self._watch(foresight, host)
        finally:
            self._load.close()
        if self._settings.recordings:
            with contextlib.suppress(OSError):
                Path(self._settings.recordings).mkdir(parents=True, exist_ok=True)
            try:
                foresight.write(Path(self._settings.recordings), host=self._host)
            except (OSError, RelightError) as error:
                emit(
                    "prediction.detector_disabled",
                    f"recorded samples could not be written: {error}",
                    detector="recorder",
                    why=str(error),
                )

    def _watch(self, foresight: FailurePredictor, host: HostGauges) -> None:
        while not self._over.wait(EVERY_S):
            while not self._failures.empty():
                foresight.failed(*self._failures.get())
            sample = host.sample(self._ranks(), self._gauges)
            for alarm in foresight.sample(sample):
                averts = self._act(alarm)
                if alarm.action == "reduce load":
                    self._unheeded += [alarm] if self._load.reduce(alarm, sample) else []
                elif averts:
                    foresight.discard_alarm(alarm)
            self._load.update(sample, self._paused_s)
            if self._load.has_effect:  # a rank pauses at the end of its step only, or never
                for alarm in self._unheeded:
                    foresight.discard_alarm(alarm)
            if self._load.has_effect or not self._load.is_reduced:
                self._unheeded = []

    def _ready(self) -> Seen:
        beats = self._seen()
        return beats if beats and all(beat.steps for _, beat in beats.values()) else {}

    def _ranks(self) -> list[Rank]:
        ranks = []
        for rank, (pid, beat) in sorted(self._seen().items()):
            before = self._steps.get(rank)
            paused_s = beat.paused_s - (before.paused_s if before is not None and before.pid == beat.pid else 0.0)
            self._paused_s += max(0.0, paused_s)
            if before is not None and before.pid == beat.pid and beat.steps > before.steps and before.steps:
                # without the pauses: longer steps would raise an alarm about a slow link
                self._step_s[rank] = (beat.step_at - before.step_at - paused_s) / (beat.steps - before.steps)
            elif before is None or before.pid != beat.pid:
                self._step_s.pop(rank, None)
            self._steps[rank] = beat
            step_s = self._step_s.get(rank, float("nan")) if beat.phase == "training" else float("nan")
            ranks.append(Rank(step_s, beat.loss, beat.saves_s or float("nan"), rss_bytes(pid)))
        return ranks


def _place(url: str) -> str:
    """Return the path of the file system to sample: the store's if it is a directory, else the working directory."""
    path = url.removeprefix("file://")
    return path if path.startswith("/") else "."
