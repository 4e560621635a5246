"""Less load on a node that is too hot or under pressure: real pauses, real limits, measured, undone, and only then counted as done."""

from __future__ import annotations

import json
import math
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

from relight.checkpointer.step_pauses import PAUSE_MAX_S, StepPauses
from relight.errors import ConfigError
from relight.heartbeat import Heartbeat, HeartbeatWriter, read_beat
from relight.heartbeat.ease import Eased, ease_path, read_ease, write_ease
from relight.heartbeat.heartbeat_page import make_page
from relight.observe import Event, subscribe
from relight.prediction import Alarm
from relight.prediction.detect import RULES
from relight.prediction.sample import Accelerator, Host, NodeSample
from relight.settings.supervise_settings import SuperviseSettings
from relight.supervise.load import HOLDS_S, QUIET_S, RENEW_S, TRY_S, Load
from relight.supervise.prediction_thread import PredictionThread
from relight.supervise.settings import settings_of
from relight.supervise.supervisor import Supervisor


def alarm(kind: str = "heat", action: str = "reduce load", detector: str = "forest") -> Alarm:
    """Return an alarm."""
    return Alarm(0.0, kind, action, "why", "reason", 0.9, detector)


def heat(celsius: float) -> NodeSample:
    """Return a sample of a node with that temperature at its second accelerator."""
    return NodeSample(0.0, accelerators=(Accelerator(40.0), Accelerator(celsius)))


def text_of(event: Event) -> str:
    """Return the sentence of an event."""
    return str(event.fields["message"])


class Node:
    """A node with a load that can be reduced, and a clock that the test sets."""

    def __init__(
        self, pause: float = 0.2, can_pause: bool = True, limits: list[tuple[float, float]] | None = None
    ) -> None:
        self.now, self.eased, self.power = 1000.0, list[tuple[float, float]](), list[str]()
        self._limits, self.can, self.kept, self.paused_s = limits or [], can_pause, list[tuple[float, float]](), 0.0
        self.load = Load(pause, self._ease, self, lambda: self.now)

    def _ease(self, share: float, until: float) -> bool:
        self.eased.append((share, until))
        return self.can

    def lower_power(self, share: float) -> list[tuple[float, float]]:
        """Record the request. Return the planned limits."""
        self.power.append(f"{share:g}")
        return self._limits

    def restore_power(self) -> list[tuple[float, float]]:
        """Record the request. Return the limits that the driver refuses to restore."""
        self.power.append("restored")
        return self.kept

    def passes(self, seconds: float, sample: NodeSample, *, pausing: bool = True) -> None:
        """Let that many seconds pass, with one reading a second. ``pausing``: whether ranks pause then."""
        for _ in range(int(seconds)):
            self.now += 1
            self.paused_s += 0.2 * pausing
            self.load.update(sample, self.paused_s)


@pytest.fixture
def events() -> Any:
    """Yield the list of emitted events."""
    emitted: list[Event] = []
    end = subscribe(emitted.append)
    yield emitted
    end()


def test_load_is_reduced_measured_and_restored_when_the_reading_falls(events: list[Event]) -> None:
    """Ranks pause and limits are lowered; after a minute of a lower temperature both are undone, with both readings reported."""
    node = Node(limits=[(700.0, 560.0), (700.0, 560.0)])
    assert node.load.reduce(alarm(), heat(86))
    assert node.eased == [(0.2, 1000 + RENEW_S)] and node.power == ["0.8"]
    node.passes(HOLDS_S + 5, heat(84))
    assert node.eased[-1] == (0.2, node.now + RENEW_S), "renewed while it is hot"
    node.passes(HOLDS_S + 1, heat(78))
    assert node.eased[-1] == (0.0, 0.0) and node.power == ["0.8", "restored"]
    first, last = (event for event in events if event.name == "run.load")
    assert "ranks pause 20 % of the time; power limit of 2 accelerators 700 → 560 W; temperature 86 °C" in text_of(
        first
    )
    assert "temperature 86 °C, now 78 °C" in text_of(last) and last.fields["reading_after"] == 78


def test_what_does_not_help_is_undone_and_not_tried_again_soon(events: list[Event]) -> None:
    """After ten minutes without effect ranks pause no more; the next alarm within an hour is not acted on."""
    node = Node()
    pressed = NodeSample(0.0, Host(psi_cpu_some=70.0, psi_io_full=math.nan))
    assert node.load.reduce(alarm("pressure"), pressed)
    node.passes(TRY_S + 1, pressed)
    assert node.eased[-1] == (0.0, 0.0) and "did not help" in text_of(events[-1]) and node.power == []
    assert not node.load.reduce(alarm("pressure"), pressed)
    node.now += QUIET_S
    assert node.load.reduce(alarm("pressure"), pressed)
    node.load.close()
    assert node.eased[-1] == (0.0, 0.0)


def test_without_anything_done_an_alarm_is_not_acted_on() -> None:
    """Pauses are off and no limit may be lowered; or the page cannot be written; or the risk is one that less load does not lower."""
    assert not Node(pause=0.0).load.reduce(alarm(), heat(86))
    assert not Node(can_pause=False).load.reduce(alarm(), heat(86))
    assert not Node().load.reduce(alarm("memory"), heat(86))
    assert Node(pause=0.0, limits=[(300.0, 240.0)]).load.reduce(alarm(), heat(86))


def test_only_what_keeps_a_failure_away_counts_as_averted(tmp_path: Path) -> None:
    """A save, or more saves, do not: the alarm comes true or it does not. Nor does a drain that is not allowed, nor load that stays,
    nor a pause that no rank makes."""
    watched = Supervisor(SuperviseSettings(), "job", tmp_path)
    sample, alarms = (
        heat(86),
        [alarm("link", "save more often"), alarm("ecc", "drain node"), alarm(), alarm("memory", "preventive save")],
    )
    cases = (
        (False, 0.0, 0.0, set()), (True, 0.0, 0.0, {"drain node"}), (False, 0.2, 0.0, set()), (False, 0.2, 0.1, {"reduce load"}),
    )  # fmt: skip
    for drain, pause, paused_s, averted in cases:
        heeded = set[str]()
        foresight: Any = SimpleNamespace(
            sample=lambda _, once=iter([alarms]): next(once, []),
            discard_alarm=lambda one, to=heeded: to.add(one.action),
        )
        rounds = iter([False, False, True])
        beats = iter(Heartbeat(pid=7, steps=steps, paused_s=paused_s * steps) for steps in (1, 2))
        foreseeing = PredictionThread(
            SuperviseSettings(predict=False),
            lambda beats=beats: {0: (7, next(beats))},
            lambda one, drain=drain: watched.foresee(one, drain),
            None,
            "h",
            Load(pause, lambda *_: True),
        )
        foreseeing._over = SimpleNamespace(wait=lambda _, rounds=rounds: next(rounds))  # type: ignore[assignment]
        foreseeing._watch(foresight, SimpleNamespace(sample=lambda ranks, _: sample))  # type: ignore[arg-type]
        assert heeded == averted, (drain, pause, paused_s)
    watched.close()


def test_ranks_pause_for_their_share_of_the_time(tmp_path: Path) -> None:
    """Ranks pause a fifth of the time, at most five seconds at once, and not after the supervisor's request has
    ended."""
    watched = Supervisor(SuperviseSettings(), "job", tmp_path)
    now, slept = [100.0], list[float]()
    pauses = StepPauses(lambda: now[0], slept.append)
    try:
        page = watched.begin([0, 1], {})[1]["RELIGHT_HEARTBEAT"]

        def step(seconds: float) -> float:
            now[0] += seconds
            return pauses.after_step(page)

        assert step(1) == step(1) == 0
        assert watched.pages.ease(0.2, 150.0)
        assert [step(1), step(4), step(40)] == pytest.approx([0.25, 1.0, PAUSE_MAX_S])
        assert step(10) == 0, "its time is over"
        assert watched.pages.ease(0.2, 1e6) and step(1) > 0 and watched.pages.ease(0.0, 0.0) and step(1) == 0
        assert slept == pytest.approx([0.25, 1.0, PAUSE_MAX_S, 0.25]) and StepPauses().after_step("") == 0
    finally:
        watched.close()


@pytest.mark.parametrize(
    "data",
    [b"", b"{", b"[]", b"[1, 2, 3]", b"[2, 5]", b"[-1, 5]", b"[0.5, 1e999]", b'["x", 1]', b"[NaN, 5]", b"[" * 9000],
)
def test_an_invalid_page_asks_for_no_pause(tmp_path: Path, data: bytes) -> None:
    """Invalid contents of the file ask for no pause."""
    page = tmp_path / "pulse-0"
    write_ease(page, Eased(0.5, 7.0))
    assert read_ease(page) == Eased(0.5, 7.0) and json.loads(ease_path(page).read_bytes()) == [0.5, 7.0]
    ease_path(page).write_bytes(data)
    assert read_ease(page) is None


def test_the_settings_are_checked() -> None:
    """A share of the time, and a switch."""
    for wrong in ({"pause": 1.5}, {"pause": True}, {"pause": "much"}, {"lower_power": 1}):
        with pytest.raises(ConfigError):
            settings_of(wrong, "")


def test_reduced_load_answers_only_alarms_of_its_kind() -> None:
    """An alarm of another kind meanwhile is not acted on by it, so that other actions are tried."""
    node = Node(limits=[(700.0, 560.0)])
    assert node.load.reduce(alarm(), heat(86))
    assert node.load.reduce(alarm(), heat(87))
    assert not node.load.reduce(alarm("memory"), heat(86)) and not node.load.reduce(alarm("pressure"), heat(86))


def test_a_pause_that_no_rank_makes_is_not_judged(events: list[Event]) -> None:
    """During a long evaluation no rank completes a step: nothing was done, so the next alarm may try it again."""
    node, pressed = Node(), NodeSample(0.0, Host(psi_cpu_some=80.0))
    assert node.load.reduce(alarm("pressure"), pressed) and not node.load.has_effect
    node.passes(TRY_S + 1, pressed, pausing=False)
    assert "no rank paused" in text_of(events[-1]) and not node.load.is_reduced
    assert node.load.reduce(alarm("pressure"), pressed)
    node.passes(1, pressed)
    assert node.load.has_effect


def test_a_reading_that_never_comes_is_no_proof(events: list[Event]) -> None:
    """Without a reading nothing shows whether less load helps. The first reading that comes later is the one to fall."""
    node = Node()
    assert node.load.reduce(alarm(), NodeSample(0.0))
    node.passes(TRY_S + 1, NodeSample(0.0))
    assert "no reading shows" in text_of(events[-1]) and node.load.reduce(alarm(), NodeSample(0.0)), (
        "it may be tried again"
    )
    node.passes(5, heat(90))
    node.passes(HOLDS_S + 2, heat(80))
    assert "temperature 90 °C, now 80 °C" in text_of(events[-1])


def test_the_reading_is_that_of_the_alarm() -> None:
    """Processors that training itself keeps busy do not hide that the disks have recovered."""
    node = Node()
    assert node.load.reduce(
        alarm("pressure", detector="rules"), NodeSample(0.0, Host(psi_cpu_some=95.0, psi_io_full=70.0))
    )
    node.passes(HOLDS_S + 2, NodeSample(0.0, Host(psi_cpu_some=95.0, psi_io_full=5.0)))
    assert not node.load.is_reduced
    assert [name for name, rule in RULES.items() if rule.kind == "pressure"] == ["all wait for disks"]


def test_ranks_that_can_no_longer_be_asked_end_the_reduction(events: list[Event]) -> None:
    """The memory for the file is full: ranks stop pausing by themselves, and the supervisor reports that."""
    node, pressed = Node(), NodeSample(0.0, Host(psi_cpu_some=80.0))
    assert node.load.reduce(alarm("pressure"), pressed)
    node.passes(2, pressed)
    node.can = False
    node.passes(RENEW_S - 2, pressed)
    assert node.load.is_reduced, "they still pause"
    node.passes(4, pressed)
    assert not node.load.is_reduced and "can no longer be asked" in text_of(events[-1])


def test_a_limit_that_the_driver_does_not_restore_is_reported_and_tried_again(events: list[Event]) -> None:
    """It is not reported as restored. It is tried each half minute, and at the job's end."""
    node = Node(limits=[(700.0, 560.0)])
    assert node.load.reduce(alarm(), heat(86)) and node.load.has_effect, "a lower limit has an effect at once"
    node.kept = [(700.0, 560.0)]
    node.passes(HOLDS_S + 2, heat(70))
    assert "the power limit of 1 accelerator stays at 560 W in place of 700 W" in text_of(events[-1])
    node.passes(RENEW_S, heat(70))
    tries = node.power.count("restored")
    assert tries == 2
    node.kept = []
    node.load.close()
    node.passes(2 * RENEW_S, heat(70))
    node.load.close()
    assert node.power.count("restored") == 3


def test_a_driver_that_does_not_answer_at_the_end_does_not_keep_the_limits(events: list[Event]) -> None:
    """The thread waits for one device. Limits of the others are restored, and if not, that is reported."""
    node, stuck = Node(limits=[(700.0, 560.0)]), threading.Event()
    for answers in (True, False):
        node.load.reduce(alarm(), heat(86))
        if not answers:
            node.load._power.restore_power = lambda: stuck.wait() and []  # type: ignore[union-attr, method-assign]
        foreseeing = PredictionThread(SuperviseSettings(), dict, lambda _: False, None, "h", node.load)
        foreseeing._over = SimpleNamespace(wait=lambda _: stuck.wait(), set=lambda: None)  # type: ignore[assignment]
        foreseeing.close()
        assert not node.load.is_reduced
        assert events[-1].fields["action"] == ("restored" if answers else "kept")
    stuck.set()


def test_steps_are_measured_without_the_pauses(tmp_path: Path) -> None:
    """Longer steps would raise an alarm about a slow link. The page has the pauses up to the last completed step."""
    make_page(tmp_path / "page")
    writer = HeartbeatWriter(str(tmp_path / "page"))
    beats = []
    for step, pause in enumerate((0.3, 0.3, 0.0)):
        writer.stepped(step)
        writer.paused(pause)
        beats.append(read_beat(tmp_path / "page"))
        time.sleep(pause + 0.01)
    assert [beat.paused_s for beat in beats if beat is not None] == pytest.approx([0, 0.3, 0.6])
    foreseeing = PredictionThread(
        SuperviseSettings(predict=False), dict, lambda _: False, None, "h", Load(0.2, lambda *_: True)
    )
    for beat in beats:
        foreseeing._seen = lambda beat=beat: {0: (1, beat)}  # type: ignore[misc]
        step_s = foreseeing._ranks()[0].step_s
    assert 0.005 < step_s < 0.2 and foreseeing._paused_s == pytest.approx(0.6)


def test_a_library_that_raises_anything_ends_only_the_samples(events: list[Event]) -> None:
    """It is reported, and no thread ends with a traceback."""
    gauges: Any = SimpleNamespace(read=lambda: 1 / 0)
    foreseeing = PredictionThread(
        SuperviseSettings(),
        lambda: {0: (1, Heartbeat(steps=1))},
        lambda _: False,
        gauges,
        "h",
        Load(0.2, lambda *_: True),
    )
    foreseeing._thread.join(5)
    foreseeing.close()
    assert "no longer sampled: ZeroDivisionError" in text_of(events[-1])
