"""``relight.adaptive()`` in a running job: computes the save interval from measurements.

One rank decides. It requests a save from the other ranks as a clock trigger does (``Ranks.agree_on_save``), without
further exchanges.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Mapping
from itertools import pairwise
from math import inf
from statistics import median, pstdev
from time import monotonic

import msgspec

from relight.checkpointer.hooks import CommittedSave, Hook
from relight.checkpointer.resource_use import ResourceUse
from relight.checkpointer.tier_pacing import TierPacer
from relight.comm import new_threads
from relight.commit import Attempt
from relight.cost_model import Belief, IntervalBounds, ScheduleDecision, ScheduleInput, decide, prior
from relight.cost_model.schedule import STILL, costly
from relight.cost_model.schedule_note import decode, encode
from relight.errors import ConfigError, RelightError, shown
from relight.format.records import NoteBody
from relight.format.topics import RUN_ENDED, SCHEDULE, TIER_PACE
from relight.heartbeat import RiskWarning, heartbeat, read_risk
from relight.log import Checkpoint, History, Log
from relight.log.identity import seconds_since_epoch
from relight.observe import emit
from relight.policy import Adaptive, Tiers, Trigger, adaptive_part
from relight.units import duration_text

REMEMBERED = 32
"""Number of saves and steps over which medians are computed."""
LOSSES, LOSSES_LEAST = 256, 32
"""Number of steps over which the loss's usual scatter is computed, and the least number of losses for it."""
JUMP = 1.5
"""Change of the loss's volatility, as a factor, that causes a decision between two saves."""
RISK_INTERVAL_S = 1.0
"""Seconds between two reads of the risk warning. While a failure is predicted, the interval may change as often."""
_INCIDENTS, _AFTER, _READ, _BYTES_MAX = "incidents", ".after.json", 32, 1 << 20
"""Folder and file name suffix of the restart measurements of ``relight run``; how many files are read, the newest, and
their largest size."""


class AdaptiveSchedule(Hook):
    """The adaptive schedule of one Checkpointer. Without ``relight.adaptive()`` it does nothing.

    Rank 0 has the interval. Another rank has none, except while a failure of its node is predicted: then it has its
    own.
    """

    def __init__(
        self,
        trigger: Trigger | None,
        rank: int,
        devices: int,
        clock: Callable[[], float] = monotonic,
        tiers: Tiers | None = None,
    ) -> None:
        rules = self._rules = adaptive_part(trigger)
        self._leads = rank == 0
        self._onwards = TierPacer(tiers.tiers if tiers is not None and rules is not None and self._leads else (), clock)
        self._devices, self._clock, self._began = devices, clock, clock()
        self._bounds = (
            IntervalBounds(rules.at_least_s, rules.at_most_s, rules.overhead) if rules is not None else IntervalBounds()
        )
        self._stalls, self._durables, self._waited = (deque[float](maxlen=REMEMBERED) for _ in range(3))
        self._quiet, self._losses = deque[float](maxlen=REMEMBERED), deque[float](maxlen=LOSSES)
        self._restarts: tuple[float, ...] = ()
        self._failures, self._watched_s, self._bytes = 0, 0.0, 0
        self._lives: tuple[float, ...] = ()
        self._last_s, self._step, self._extra_s = 0.0, 0, 0.0
        self._due, self._unsteady = True, 1.0
        self._bound_reported = False
        self._warned: RiskWarning | None = None
        self._likely, self._next_check_s = 0.0, 0.0
        self.decision: ScheduleDecision | None = None
        self._attempt: Attempt | None = None
        self._unwritten: deque[NoteBody] = deque(maxlen=REMEMBERED)
        self._writer: threading.Thread | None = None
        self._phase, self._why = "", ""
        self._use: ResourceUse | None = None

    @property
    def phase(self) -> str:
        """The named phase of training."""
        return self._phase

    @phase.setter
    def phase(self, name: str) -> None:
        if not isinstance(name, str):
            raise ConfigError(
                f"ckpt.phase must be a name, not {shown(name)}", where="phase", hint='ckpt.phase = "warm-up"'
            )
        if self._rules is not None and self._rules.phases and name and name not in self._rules.phases:
            phases = ", ".join(self._rules.phases)
            raise ConfigError(
                f"adaptive(phases=…) has no phase {name!r}",
                where="phase",
                hint=f"it has {phases}; an empty name is none of them",
            )
        self._phase = name

    def on_attempt(self, attempt: Attempt, history: History) -> None:
        """Read earlier attempts' lifetimes, costs of saves and restart times from the run's log and incident files."""
        if self._rules is None:
            return
        self._began = self._clock()
        self._lives, self._watched_s = attempt_lifetimes(history, attempt.epoch)
        self._failures = len(self._lives)
        if not self._leads:
            return
        if cost := saves_cost(history):
            self._stalls.append(cost[0])
            self._durables.append(cost[1])
        self._attempt = attempt
        with contextlib.suppress(RelightError):
            self._restarts = measured_restarts(attempt)

    def interval(self, step: int, metrics: Mapping[str, float], writing: bool) -> float | None:
        """Return the interval in seconds at the end of ``step``; None: this rank has none. ``writing``: whether a save
        is in progress."""
        if self._rules is None:
            return None
        now = self._clock()
        if self._last_s and step == self._step + 1:
            self._took(now - self._last_s, writing)
        self._last_s, self._step = now, step
        if self._rules.loss is not None:
            self._losses.append(metrics.get(self._rules.loss, float("nan")))
        turned = self._has_turned(now)
        if not self._leads and not self._likely:
            self.decision, self._due = None, True  # without a predicted failure only rank 0 decides
            return None
        if self._due or turned or self._has_jumped():
            self._decide(now)
        return self._scaled(self._rules, self.decision, writing) if self.decision is not None else None

    def on_durable(self, done: CommittedSave) -> None:
        """Record the costs of a checkpoint."""
        self.learn(done.timings, done.save.bytes, done.waits)

    def learn(self, timings: Mapping[str, float], stored: int, waits: bool) -> None:
        """Record the costs of a durable save. ``waits``: whether another save already waits after it."""
        if self._rules is None:
            return
        blocked = timings.get("blocked", 0.0)
        durable = blocked + timings.get("copy", 0.0) + timings.get("total", 0.0)
        self._stalls.append(max(blocked, self._extra_s))
        self._durables.append(durable)
        self._waited.append(float(waits))
        self._extra_s, self._bytes, self._due = 0.0, stored, True

    def on_close(self, polite: bool) -> None:
        """Wait up to 5 s until the last decision is in the log."""
        self._onwards.close()
        if self._writer is not None:
            self._writer.join(5.0)

    # -- inside

    def _scaled(self, rules: Adaptive, decision: ScheduleDecision, writing: bool) -> float:
        """Return the decision's interval scaled for the phase and the machine's other load. Emit an event if the
        scaling changes."""
        if not rules.phases and not rules.busy:
            return decision.interval_s
        if rules.busy and self._use is None and self._attempt is not None:
            self._use = ResourceUse(self._attempt.store.url, self._clock)
        if self._use is not None:
            self._use.sample(writing)
        interval_s, why = rules.scaled(
            decision.interval_s, self._phase, self._use.shares if self._use is not None else {}
        )
        kind = why if not rules.busy else f"{self._phase} {'busy' if 'in use' in why else ''}"
        if kind != self._why and self._leads:
            self._why = kind
            reason = f"every {duration_text(interval_s)}: {why or 'as decided, in no phase and with nothing busy'}; {decision.reason}"
            emit(
                "schedule.changed",
                f"from step {self._step} on: {reason}",
                step=self._step,
                interval_s=round(interval_s, 3),
                reason=reason,
            )
        return interval_s

    def _took(self, seconds: float, writing: bool) -> None:
        """Record a step's seconds. If a save was in progress, the time beyond the usual step counts as a cost of the
        save."""
        if not writing:
            self._quiet.append(seconds)
            self._onwards.stepped(self._clock(), seconds)
        elif self._quiet:
            self._extra_s += seconds - median(self._quiet)

    def _has_turned(self, now: float) -> bool:
        """Return whether the predicted failure probability has changed since the last decision, or the interval is
        still approaching the wanted one."""
        if now < self._next_check_s:
            return False
        self._next_check_s = now + RISK_INTERVAL_S
        path = heartbeat().path
        self._warned = read_risk(path) if path else None
        before, self._likely = self._likely, self._warned.remaining(now) if self._warned is not None else 0.0
        decided = self.decision.numbers["foreseen"] if self.decision is not None else before
        if not self._likely or not decided:
            return self._likely != decided
        return max(decided, self._likely) >= JUMP * min(decided, self._likely) or self._moves()

    def _moves(self) -> bool:
        if self.decision is None:
            return True
        wanted_s, interval_s = self.decision.numbers["wanted_s"], self.decision.interval_s
        return not interval_s / STILL < wanted_s < interval_s * STILL

    def _has_jumped(self) -> bool:
        now = loss_volatility(list(self._losses))
        return max(now, self._unsteady) >= JUMP * min(now, self._unsteady)

    def _decide(self, now: float) -> None:
        assert self._rules is not None
        self._due, self._unsteady = False, loss_volatility(list(self._losses))
        before, self.decision = self.decision, decide(self._seen(now, self._rules), self.decision, self._bounds)
        if self._leads and (before is None or _shown(before) != _shown(self.decision)):
            emit(
                "schedule.changed",
                f"from step {self._step} on: {self.decision.reason}",
                step=self._step,
                interval_s=round(self.decision.interval_s, 3),
                reason=self.decision.reason,
            )
            self._unwritten.append(SCHEDULE.note(encode(self._step, self.decision)))
        if self._leads and self.decision.bound and not self._bound_reported:
            self._bound_reported = True
            numbers = self.decision.numbers
            warning = costly(self.decision.bound, numbers["bound_cost"], numbers["free_s"])
            share, free_s = round(numbers["bound_cost"], 4), round(numbers["free_s"], 3)
            emit("schedule.bound", warning, bound=self.decision.bound, share=share, free_s=free_s)
        paces = self._onwards.decide(self.decision, self._rules.overhead, self._rules.at_most_s)
        if paces is not None:
            self._unwritten.append(TIER_PACE.note({**paces}))
        if self._unwritten and self._attempt is not None and (self._writer is None or not self._writer.is_alive()):
            writer = threading.Thread(target=self._write, args=(self._attempt,), name="relight-schedule", daemon=True)
            self._writer = writer if new_threads.start(writer) else None  # without it the next decision writes both

    def _seen(self, now: float, rules: Adaptive) -> ScheduleInput:
        belief = prior(self._devices)
        if rules.mtbf_s is not None:
            belief = Belief(belief.shape, belief.shape * rules.mtbf_s)
        return ScheduleInput(
            now_s=now - self._began, step=self._step, total_steps=rules.total_steps,
            step_s=median(self._quiet) if self._quiet else 0.0, stalls_s=tuple(self._stalls), durables_s=tuple(self._durables),
            restarts_s=self._restarts, devices=self._devices, failures=self._failures, watched_s=self._watched_s + now - self._began,
            unsteady=self._unsteady, risk=_risk(rules), foreseen=self._likely,
            foreseen_within_s=self._warned.within_s if self._warned is not None else 1.0,
            foreseen_why=self._warned.why if self._warned is not None else "",
            pressure=sum(self._waited) / len(self._waited) if self._waited else 0.0,
            save_bytes=self._bytes, bytes_per_s_most=rules.bytes_per_s_most, lives_s=self._lives,
            age_s=now - self._began, belief=belief,
        )  # fmt: skip

    def _write(self, attempt: Attempt) -> None:
        """Append the waiting notes to the log. Runs in a thread, because the store may be slow. The next decision
        retries a failure."""
        with contextlib.suppress(RelightError):
            log = Log(attempt.store, attempt.run)  # a separate object: the training thread uses the attempt's log
            log.read()
            while self._unwritten:
                note = self._unwritten[0]
                log.append(lambda view, note=note: (note, attempt.epoch))  # type: ignore[misc]
                self._unwritten.popleft()


def _shown(decision: ScheduleDecision) -> tuple[float, float]:
    """Return the interval and the number of guessed inputs. An event is emitted if one of them has changed."""
    return decision.interval_s, decision.numbers.get("guesses", 0.0)


def _risk(rules: Adaptive) -> float:
    """Return the result of the caller's risk function; 1 if it is not a finite number above 0."""
    risk = rules.risk() if rules.risk is not None else 1.0
    return float(risk) if isinstance(risk, (int, float)) and 0 < risk < float("inf") else 1.0


def loss_volatility(losses: list[float]) -> float:
    """Return the volatility of the newest eighth of losses relative to the earlier ones (standard deviation of
    step-to-step changes), at least 1."""
    if len(losses) < LOSSES_LEAST:
        return 1.0
    moves = [after - before for before, after in pairwise(losses)]
    moves = [move for move in moves if abs(move) < float("inf")]
    newest = moves[-max(8, len(losses) // 8) :]
    usual = pstdev(moves[: -len(newest)]) if len(moves) > 2 * len(newest) else 0.0
    return max(1.0, pstdev(newest) / usual) if usual > 0 else 1.0


def saves_cost(history: History) -> tuple[float, float] | None:
    """Return the seconds that a save took from the steps, and until it was durable, from the newest decision in the log
    that has measured them; None if none has.

    Otherwise a new process would guess that a save is cheap, and after each failure save too often until its interval
    has doubled up to the right one for an expensive save.
    """
    for _, data in SCHEDULE.among(reversed(history.notes)):
        if (decision := decode(data)) is not None:
            stall_s, durable_s = decision.numbers.get("stall_s", inf), decision.numbers.get("durable_s", inf)
            if decision.numbers.get("guessed_save") == 0.0 and 0 <= stall_s <= durable_s < inf:
                return stall_s, durable_s
    return None


def attempt_lifetimes(history: History, epoch: int) -> tuple[tuple[float, ...], float]:
    """Return the lifetimes in seconds, until their last save, of earlier attempts that failed after some progress, and
    the total seconds for which earlier attempts were observed."""
    by_epoch: dict[int, list[Checkpoint]] = {}
    for checkpoint in sorted([*history.live, *history.retired.values()], key=lambda checkpoint: checkpoint.seq):
        by_epoch.setdefault(checkpoint.epoch, []).append(checkpoint)
    failed, seconds = list[float](), 0.0
    ended = {record.epoch for record, _ in RUN_ENDED.among(history.notes)}
    for fence in history.fences:
        saved = by_epoch.get(fence.epoch, [])
        if fence.epoch >= epoch or not saved:
            continue
        begun, last = seconds_since_epoch(fence.time), seconds_since_epoch(saved[-1].time)
        life_s = max(0.0, last - begun) if begun is not None and last is not None else 0.0
        seconds += life_s
        last_reason = saved[-1].body.save_reason
        if fence.epoch not in ended and (not last_reason.is_final or last_reason.kind == "exception"):
            failed.append(life_s)
    return tuple(failed), seconds


def measured_restarts(attempt: Attempt) -> tuple[float, ...]:
    """Return the seconds from each failure to the first step after it, measured by ``relight run``. Invalid files are
    skipped."""
    store, folder = attempt.place.store, f"{attempt.place.log.run}/{_INCIDENTS}"
    names = sorted(entry.name for entry in store.list(folder) if entry.name.endswith(_AFTER))[-_READ:]
    restarts_s = []
    for name in names:
        with contextlib.suppress(RelightError, msgspec.MsgspecError, KeyError, TypeError, ValueError):
            seconds = float(msgspec.json.decode(store.get(f"{folder}/{name}", _BYTES_MAX))["seconds"]["all"])
            if 0 < seconds < float("inf"):
                restarts_s.append(seconds)
    return tuple(restarts_s)
