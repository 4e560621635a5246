"""Simulate one run of one policy with one seed: events in order of time, in a heap of tuples.

The product's own code makes every decision: ``relight.cost_model`` and ``relight.policy.triggers`` when to save,
``decide_keep`` what to delete, ``owed`` what a further tier lacks, ``relight.supervise.decide`` what to do after a
failure, ``relight.prediction`` whether an alarm counts and what it requires. This module simulates only the world:
time, failures, repairs and copies.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from relight.heartbeat.heartbeat_page import NOT_YET
from relight.policy.rollback_env import BEFORE
from relight.prediction.act import action_for
from relight.prediction.predictor import LATELY, PRECISION, distrust
from relight.prediction.score import HORIZON_S
from relight.simulator.failure_events import LEMON, SILENT, Calendar, Chance, FailureEvent, draw, stream
from relight.simulator.machines import Machines
from relight.simulator.policies import Policy
from relight.simulator.result import DETECTING, LOST, RESTARTING, WAITING, PolicyOutcome
from relight.simulator.saves import CheckpointInventory, SimulatedSave
from relight.simulator.scenario import FAILURES_MAX, Failing, Scenario
from relight.simulator.schedules import bound_of, schedule_of
from relight.supervise.decide import Past, decide
from relight.supervise.facts import Decision, Failure
from relight.supervise.recovery import INCIDENT_COUNTS_S

_TRAINING, _STALLED, _DOWN, _RESTARTING = range(4)
_FAILURE, _DUE, _SEALED, _PEERED, _DURABLE, _COPIED, _READY, _UP, _REPAIRED, _FOUND, _AGAIN, _ALARM, _SETTLE = range(13)
FORESEEN = "foreseen"
"""Cause under which the cost of a machine that leaves before it fails is counted."""


def simulate(
    scenario: Scenario, policy: Policy, seed: int, *, chance: Chance | None = None, calendar: Calendar | None = None
) -> PolicyOutcome:
    """Return the outcome of ``policy``.

    ``chance``: the result of ``draw`` for this scenario and seed, if the caller has it.
    """
    return _Simulation(scenario, policy, seed, chance or draw(scenario, seed, calendar)).run()


class _Simulation:
    """State of one simulated run, from its first second to its last."""

    def __init__(self, scenario: Scenario, policy: Policy, seed: int, chance: Chance) -> None:
        self.scenario, self.policy, self.seed, self.chance = scenario, policy, seed, chance
        self.machines = Machines(scenario, policy, chance.lemons)
        self.shelf = CheckpointInventory(scenario, policy, seed)
        self.schedule = schedule_of(scenario, policy)
        self.heap: list[tuple[float, int, int, int, Any]] = []
        self.pushed = self.life = 0
        self.phase, self.since, self.known_at = _TRAINING, 0.0, 0.0
        self.work = self.trained = self.saving = 0.0
        self.cause, self.failed_at = "", 0.0
        self.spent: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        self.failures, self.actions, self.restored = Counter[str](), Counter[str](), Counter[str]()
        self.past: deque[tuple[float, int, tuple[Failure, Failure], Decision]] = deque()
        self.began_step = self.from_step = 0
        self.last_save_s = 0.0
        self.writing: SimulatedSave | None = None
        self.sending: SimulatedSave | None = None
        """The newest committed save, which peers get unless a node is lost meanwhile. A newer one replaces it."""
        self.plan = 0
        """Number of the current plan for the next save. A due event with an older number is ignored."""
        self.held_up = False
        """True if a save is due while the previous save is not durable yet."""
        self.saves = self.durable = 0
        self.ready = True
        self.dice: FailureEvent | None = None
        self.reading_s = 0.0
        self.onset: float | None = None
        """Seconds of training after which the results are wrong and undetected. None: they are right."""
        self.shows_at = 0.0
        self.culprit = -1
        self.silent_blow: FailureEvent | None = None
        self.silent_dice = stream(seed, SILENT, "again")
        self.avoided: set[int] = set()
        self.leaving: tuple[int, int] | None = None
        self.settled: deque[bool] = deque(maxlen=LATELY)
        self.alarms = self.false_alarms = 0

    # -- time --------------------------------------------------------------------------------------------------------------------

    def run(self) -> PolicyOutcome:
        """Run the simulation and return its outcome."""
        wall = self.scenario.wall_s
        for number, failure in enumerate(self.chance.failures):
            self._push(failure.at, _FAILURE, number)
        self._announce()
        self._plan_save(0.0)
        act: dict[int, Callable[[float, Any], None]] = {
            _FAILURE: self._failure, _DUE: self._due, _SEALED: self._sealed, _PEERED: self._peered, _DURABLE: self._made_durable,
            _COPIED: self._copied, _READY: self._job_ready, _UP: self._up, _REPAIRED: self._repaired, _FOUND: self._silent_shows,
            _AGAIN: self._silent_again, _ALARM: self._alarm, _SETTLE: self._settle_alarm,
        }  # fmt: skip
        heap = self.heap
        while heap and heap[0][0] < wall:
            now, _, event, epoch, payload = heapq.heappop(heap)
            if epoch in (-1, self.life):
                act[event](now, payload)
        self._leave(wall)
        return self._outcome(wall)

    def _push(self, time_s: float, what: int, payload: Any, life: int = -1) -> None:
        """Schedule an event. ``life``: the event is dropped if the job fails first; −1: a failure does not drop it."""
        self.pushed += 1
        heapq.heappush(self.heap, (time_s, self.pushed, what, life, payload))

    def _leave(self, now: float) -> None:
        """Count the time since the last call for the current phase.

        Called at the end of a phase, and wherever the counts are read.
        """
        passed, since, self.since = now - self.since, self.since, now
        if self.phase == _TRAINING:
            self.work += passed
            self.trained += passed
        elif self.phase == _STALLED:
            self.saving += passed
        elif self.phase == _RESTARTING:
            self.spent[self.cause][RESTARTING] += passed
        else:
            detecting = min(passed, max(0.0, self.known_at - since))
            self.spent[self.cause][DETECTING] += detecting
            self.spent[self.cause][WAITING] += passed - detecting

    def _ended(self) -> int:
        """Return the number of completed steps."""
        return int(self.work / self.scenario.step_s + 1e-6)

    # -- saving --------------------------------------------------------------------------------------------------------------------

    def _plan_save(self, now: float) -> None:
        """Schedule the next save. Call while the job trains."""
        steps = self.schedule.next(self._ended(), now, self.last_save_s, self.from_step)
        self.plan += 1
        if math.isfinite(steps):
            self._push(now + steps * self.scenario.step_s - self.work, _DUE, self.plan, self.life)

    def _soon(self, now: float) -> None:
        """Schedule a save at the end of the current step, instead of the planned save."""
        self._leave(now)
        self.plan += 1
        work_left = (self._ended() + 1) * self.scenario.step_s - self.work
        self._push(now + work_left, _DUE, self.plan, self.life)

    def _due(self, now: float, plan: int) -> None:
        if plan != self.plan:
            return
        if self.writing is not None:
            self.schedule.on_delayed()
            self.held_up = True
            return
        self._leave(now)
        assert abs(self.work / self.scenario.step_s - round(self.work / self.scenario.step_s)) < 1e-3, (
            "a save begins between two steps"
        )
        self.work = round(self.work / self.scenario.step_s) * self.scenario.step_s
        save = self.scenario.save
        made = self.shelf.new(
            self._ended() - 1, self.work, now, wrong=self.onset is not None and self.work > self.onset
        )
        self.saves += 1
        self.last_save_s, self.from_step, self.writing = now, self._ended(), made
        self._push(now + max(save.durable_s, save.stall_s), _DURABLE, made)
        if save.stall_s:
            self.phase = _STALLED
            self._push(now + save.stall_s, _SEALED, made, self.life)
        else:
            self._sealed(now, made)

    def _sealed(self, now: float, made: SimulatedSave) -> None:
        self._leave(now)
        self.phase = _TRAINING
        self.shelf.seal(made)
        self._plan_save(now)

    def _peered(self, now: float, made: SimulatedSave) -> None:
        if made is self.sending and not made.gone:
            self.shelf.protect(made)

    def _made_durable(self, now: float, made: SimulatedSave) -> None:
        if made.gone:
            return
        self.writing = None
        self.durable += 1
        self.shelf.commit(made, now)
        if self.policy.peers is not None:
            self.sending = made
            self._push(now + self.scenario.save.peers_s, _PEERED, made)
        self._drain(now)
        self.schedule.saved(now, self.scenario.save.stall_s, now - made.begun, self._ended())
        self.shelf.pace(self.schedule.decision)
        if self.leaving is not None and self.phase == _TRAINING:
            self._move_out(now, *self.leaving)
        elif self.held_up and self.phase == _TRAINING:
            self.held_up = False
            self._soon(now)

    def _drain(self, now: float) -> None:
        for tier, save, takes_s in self.shelf.to_copy():
            self._push(now + takes_s, _COPIED, (tier, save))

    def _copied(self, now: float, payload: tuple[int, SimulatedSave]) -> None:
        self.shelf.arrived(*payload, now)
        self._drain(now)

    # -- failing -------------------------------------------------------------------------------------------------------------------

    def _failure(self, now: float, number: int) -> None:
        failure = self.chance.failures[number]
        if number in self.avoided or self.phase == _DOWN:
            return
        if failure.cause == SILENT:
            self._silent(now, self.machines.at(int(failure.u_node * self.scenario.nodes)), failure)
            return
        if failure.cause == LEMON:
            slot = self.machines.slot_of(failure.machine)
            if slot is None or not self.machines.is_lemon(failure.machine):
                return
            lemons = self.scenario.lemons
            failing = Failing(name=LEMON, broken=lemons.broken, detect_s=lemons.detect_s)
        else:
            failing, slot = self.scenario.failure[failure.failing], int(failure.u_node * self.scenario.nodes)
        slots = self.machines.adjacent(slot, failing.takes_nodes)
        if failure.u_broken >= failing.broken:
            self._fail(now, failing, failure, lost=slots, away=())
        else:
            self._fail(now, failing, failure, lost=slots, away=slots)

    def _fail(
        self,
        now: float,
        failing: Failing,
        dice: FailureEvent,
        *,
        lost: tuple[int, ...],
        away: tuple[int, ...],
        onset: int | None = None,
    ) -> None:
        """End the attempt.

        ``lost``: slots that lost their memory. ``away``: slots with a machine that needs repair or was taken
        away.
        """
        self._leave(now)
        step, in_life = self._ended() - 1, self._ended() - self.began_step
        reached = NOT_YET if self.phase == _RESTARTING else self.began_step - 1
        self.failures[failing.name] += 1
        self.schedule.failed(in_life > 0)
        failure = Failure(
            failing.kind, failing.name, None, step, in_life, failing.name, onset=onset, restored=reached,
            durable=self.shelf.newest_step(), here=False,
        )  # fmt: skip
        machine = self.machines.at(lost[0]) if lost else -1
        decision = self._decide(failure, machine, now)
        self.actions[decision.action] += 1
        if decision.action == "exclude_node" and lost and not away:
            away = lost[:1]
        delay_s = decision.delay_s
        if decision.action == "stop":
            delay_s += self.scenario.restart.human_s
            self.past.clear()
        elif decision.action == "end":
            delay_s += self.scenario.restart.requeue_s
        before = decision.settings.get(BEFORE) if decision.action != "stop" else (None if onset is None else str(onset))
        self._come_back(
            now, failing.name, dice, lost, away, failing.detect_s, delay_s, int(before) if before is not None else None
        )

    def _decide(self, failure: Failure, machine: int, now: float) -> Decision:
        """Decide as the supervisor of the failed machine does. It knows the failures of the last day."""
        while self.past and now - self.past[0][0] > INCIDENT_COUNTS_S:
            self.past.popleft()
        local_failure = replace(failure, here=True)
        history = [
            Past(seen[machine >= 0 and where == machine], decided, time) for time, where, seen, decided in self.past
        ]
        decision = decide(local_failure, history, self.policy.rules, now)
        self.past.append((now, machine, (failure, local_failure), decision))
        return decision

    def _come_back(
        self,
        now: float,
        cause: str,
        dice: FailureEvent,
        lost: tuple[int, ...],
        away: tuple[int, ...],
        detect_s: float,
        delay_s: float,
        before: int | None,
    ) -> None:
        """Stop the job: choose the checkpoint to resume from, send machines to repair, and schedule the restart."""
        if self.writing is not None and (lost or not self.policy.memory or not self.writing.sealed):
            self.writing.gone = True
            self.writing = None
        if lost:
            self.sending = None
        work, place = self.shelf.best(lost, before)
        self.restored[place] += 1
        self.spent[cause][LOST] += self.work - work
        self.work = work
        if self.onset is not None and work <= self.onset:
            self.onset = None
        read_s = self.scenario.read_s * (self.shelf.in_vain + (work > 0))
        self.reading_s = self.scenario.restart.memory_s if place in ("memory", "peers") else read_s
        if self.phase in (_TRAINING, _STALLED):
            self.failed_at = now
        self.life += 1
        self.held_up, self.leaving, self.ready = False, None, False
        self.phase, self.cause, self.known_at, self.dice = _DOWN, cause, now + detect_s, dice
        for machine, back_at in self.machines.send_away(away, now, dice):
            self._push(back_at, _REPAIRED, machine)
        self._push(now + detect_s + delay_s, _READY, None, self.life)

    def _job_ready(self, now: float, _: None) -> None:
        self.ready = True
        self._restart(now)

    def _repaired(self, now: float, machine: int) -> None:
        self.machines.back(machine)
        self._restart(now)

    def _restart(self, now: float) -> None:
        if self.phase != _DOWN or not self.ready or self.machines.missing:
            return
        self._leave(now)
        self.phase, restart = _RESTARTING, self.scenario.restart
        factor = math.exp(restart.spread * self.dice.z_restart) if restart.spread and self.dice is not None else 1.0
        self._push(now + self.scenario.restart_s * factor + self.reading_s, _UP, None, self.life)

    def _up(self, now: float, _: None) -> None:
        self._leave(now)
        self.phase = _TRAINING
        self.began_step = self.from_step = self._ended()
        self.last_save_s = now
        self.schedule.resumed(now, now - self.failed_at, self._ended())
        if self.onset is not None:
            self._push(now + max(0.0, self.shows_at - self.work), _FOUND, None, self.life)
        self._plan_save(now)

    # -- wrong results that nothing reports ----------------------------------------------------------------------------------------

    def _silent(self, now: float, machine: int, dice: FailureEvent) -> None:
        """Begin a silent fault. With probability ``sticky`` the same machine repeats it later."""
        silent = self.scenario.silent
        if dice.u_cured < silent.sticky:
            self._push(now + float(self.silent_dice.exponential(silent.again_s)), _AGAIN, (machine, dice))
        if self.onset is None and self.phase == _TRAINING:
            self._leave(now)
            least, most = silent.lag_steps
            self.onset, self.culprit, self.silent_blow = self.work, machine, dice
            lag = math.exp(math.log(least) + dice.u_broken * math.log(most / least)) if most > least else least
            self.shows_at = self.work + lag * self.scenario.step_s
            self._push(now + self.shows_at - self.work, _FOUND, None, self.life)

    def _silent_again(self, now: float, payload: tuple[int, FailureEvent]) -> None:
        machine, dice = payload
        if self.machines.slot_of(machine) is None:
            return  # the machine was identified and left for repair
        fresh = dice._replace(u_broken=float(self.silent_dice.random()), u_foreseen=float(self.silent_dice.random()))
        self._silent(now, machine, fresh)

    def _silent_shows(self, now: float, _: None) -> None:
        dice = self.silent_blow
        if self.onset is None or dice is None:
            return
        self._leave(now)
        if self.phase != _TRAINING or self.work < self.shows_at - 1e-3:  # saves stalled training in the meantime
            self._push(now + max(self.scenario.save.stall_s, self.shows_at - self.work, 1e-3), _FOUND, None, self.life)
            return
        failing = Failing(name=SILENT, kind="numerical", detect_s=self.scenario.silent.inspect_s)
        slot = self.machines.slot_of(self.culprit)
        away = (slot,) if slot is not None and dice.u_foreseen < self.scenario.silent.found else ()
        self.shelf.set_aside(self.onset)
        self._fail(now, failing, dice, lost=away, away=away, onset=int(self.onset / self.scenario.step_s + 1e-6) + 1)

    # -- failures that are seen coming -----------------------------------------------------------------------------------------------

    def _announce(self) -> None:
        """Schedule the alarms and notices that precede failures, and the false alarms."""
        predictor, expected = self.policy.foresee, 0.0
        for number, failure in enumerate(self.chance.failures):
            failing = self.scenario.failure[failure.failing] if failure.failing >= 0 else None
            if failing is not None and failing.notice_s:
                self._push(max(0.0, failure.at - failing.notice_s), _ALARM, (number, "", True))
            elif failing is not None and failing.risk and predictor is not None:
                expected += predictor.recall
                if failure.u_foreseen < predictor.recall:
                    lead_s = min(predictor.lead_s * failure.e_lead, HORIZON_S)
                    self._push(max(0.0, failure.at - lead_s), _ALARM, (number, failing.risk, True))
                    self._push(failure.at, _SETTLE, True)
        if predictor is None or predictor.precision >= 1 or not expected:
            return
        rng, risks = (
            stream(self.seed, "false alarms"),
            sorted({failing.risk for failing in self.scenario.failure if failing.risk}),
        )
        count = min(int(rng.poisson(expected * (1 / predictor.precision - 1))), FAILURES_MAX)
        for time in sorted((rng.random(count) * self.scenario.wall_s).tolist()):
            self._push(time, _ALARM, (-1, risks[int(rng.integers(len(risks)))], False))
            self._push(time + HORIZON_S, _SETTLE, False)

    def _settle_alarm(self, now: float, true: bool) -> None:
        self.settled.append(true)

    def _alarm(self, now: float, payload: tuple[int, str, bool]) -> None:
        number, risk, true = payload
        predictor = self.policy.foresee
        if self.phase != _TRAINING or (
            risk and (predictor is None or distrust(predictor.precision, PRECISION, self.settled))
        ):
            return
        self.alarms += 1
        self.false_alarms += not true
        self._soon(now)  # each action begins with a save
        if risk and self.policy.drain and action_for(risk)[0] == "drain node" and self.leaving is None:
            slot = (
                int(self.chance.failures[number].u_node * self.scenario.nodes)
                if true
                else int(now) % self.scenario.nodes
            )
            self.leaving = (slot, number)

    def _move_out(self, now: float, slot: int, number: int) -> None:
        """Take a machine out of the job before it fails. Its save is durable."""
        self._leave(now)
        self.leaving = None
        if number >= 0:
            self.avoided.add(number)
        dice = self.chance.failures[max(0, number)]
        self.actions["leave in time"] += 1
        self._come_back(now, FORESEEN, dice, (slot,), (slot,), 0.0, 0.0, None)

    # -- the end ---------------------------------------------------------------------------------------------------------------------

    def _outcome(self, wall: float) -> PolicyOutcome:
        lost = sum(parts.get(LOST, 0.0) for parts in self.spent.values())
        assert math.isclose(self.trained - lost, self.work, rel_tol=1e-9, abs_tol=1.0), (
            "every second of training is either useful or lost"
        )
        peaks, stored = self.shelf.stored(wall)
        return PolicyOutcome(
            self.policy.name, self.seed, wall, self.trained - lost, self.saving, {name: dict(parts) for name, parts in self.spent.items()},
            dict(self.failures), dict(self.actions), dict(self.restored), self.saves, self.durable, self.alarms, self.false_alarms, peaks,
            stored, self.schedule.interval_s, *bound_of(self.schedule.decision),
        )  # fmt: skip
