"""What to do about a failure: one pure function of it, what came before, the rules and the time. The table in docs/recovery.md is this."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from relight.errors import ConfigError
from relight.heartbeat.heartbeat_page import NOT_YET
from relight.policy.rollback_env import BEFORE, CUT, SKIP, SPLIT, once_back
from relight.supervise.facts import Decision, Failure

_WAITS = ("storage", "network", "hardware")
"""What may be over by itself, later."""
SPLIT_MAX = 16
DAY_S = 86400.0
ACTIONS = ("resume", "roll back", "smaller batch", "exclude_node", "end", "stop")
FENCED = "another attempt has taken this run over: it is in charge now"


@dataclass(frozen=True, slots=True)
class SuperviseRules:
    """``[supervise]`` of relight.toml. Times in seconds."""

    failures: int = 10
    """How many in a row without a step of progress between them."""
    same: int = 3
    """How many that are alike, at the same step."""
    backoff_s: float = 1.0
    backoff_max_s: float = 60.0
    roll_backs: int = 3
    """How often it goes back to before one onset."""
    node_failures: int = 3
    """After so many failures of its hardware within a day a machine leaves the job."""
    skip: int = 1
    """How many steps' samples are skipped behind a roll-back: twice as many at each further one."""
    lr_cut: float = 1.0
    """By what learning rates are multiplied at each roll-back; 1: they stay."""
    split: bool = False
    """Whether micro-batches may be made smaller: the script must ask ``ckpt.micro_batch_split``."""
    spikes: float = 10.0
    """How many standard deviations above the usual a loss has to be, several times in a row, to count as one that jumped; 0: none does."""

    def __post_init__(self) -> None:
        for name in ("failures", "same", "roll_backs", "node_failures", "skip"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ConfigError(f"[supervise] {name} is a whole number from 1 on, not {value!r}")
        for name in ("backoff_s", "backoff_max_s", "spikes"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 86400:
                raise ConfigError(f"[supervise] {name} is a number from 0 to 86400, not {value!r}")
        cut = self.lr_cut
        if isinstance(cut, bool) or not isinstance(cut, (int, float)) or not 0 < cut <= 1:
            raise ConfigError(f"[supervise] lr_cut is a number above 0, at most 1, not {cut!r}")
        if not isinstance(self.split, bool):
            raise ConfigError(f"[supervise] split is true or false, not {self.split!r}")


class Past(NamedTuple):
    """A failure that came before, and what was done."""

    failure: Failure
    decision: Decision
    at: float


def decide(failure: Failure, history: Sequence[Past], rules: SuperviseRules, now: float) -> Decision:
    """What to do. ``history``: of this job, oldest first. Same facts, same decision."""
    if failure.kind == "fenced":
        return Decision("stop", FENCED)
    if failure.kind == "preemption" and failure.departure is not None:
        left, least = failure.departure.left, failure.departure.least
        if left >= least:
            nodes = "1 node continues" if left == 1 else f"{left} nodes continue"
            return Decision("resume", f"{failure.why}: {nodes}", 0.0, _kept(failure, history))
        return Decision("end", f"{failure.why}: too few nodes are left, {left} of at least {least}")
    if failure.kind == "preemption":
        return Decision("end", f"{failure.why}: whoever wants the machine back starts the job again")
    stuck, alike = _without_progress(failure, history), _alike(failure, history)
    if failure.kind == "numerical":
        return _roll_back(failure, history, rules)
    if failure.kind == "hardware" and failure.here:
        broken = 1 + sum(one.failure.kind == "hardware" and one.failure.here and now - one.at < DAY_S for one in history)
        if broken >= rules.node_failures:
            return Decision("exclude_node", f"{failure.why}: the {_nth(broken)} time within a day that this machine's hardware fails")
    if failure.kind == "user":
        if not failure.steps and not any(one.failure.steps for one in history):
            return Decision("stop", f"{failure.why}: it would only repeat")
        if alike:
            return Decision("stop", f"{failure.why}: the same as last time, at step {failure.step}")
    if failure.kind == "data" and alike:
        return _roll_back(failure, history, rules)
    if failure.kind == "device memory" and rules.split:
        return _smaller(failure, history)
    if alike + 1 >= rules.same and failure.kind not in _WAITS:
        return Decision("stop", f"{failure.why}: {alike + 1} times at step {failure.step}")
    if stuck + 1 > rules.failures:
        return Decision("stop", f"{failure.why}: {stuck + 1} failures without progress, of which {rules.failures} are allowed")
    delay = min(rules.backoff_max_s, rules.backoff_s * 2.0 ** (stuck - 1)) if stuck else 0.0
    say = failure.why + (f"; failure {stuck + 1} without progress" if stuck else "")
    return Decision("resume", say, delay, _kept(failure, history))


def _roll_back(failure: Failure, history: Sequence[Past], rules: SuperviseRules) -> Decision:
    """Back to before what went wrong, and past the samples of the steps behind which it did."""
    onset = failure.onset if failure.onset is not None else failure.step + 1
    same = [one for one in history if one.decision.action == "roll back" and _onset(one.failure) <= onset <= _onset(one.failure) + _WINDOW]
    if len(same) >= rules.roll_backs:
        return Decision("stop", f"{failure.why}: went back {len(same)} times to before step {_onset(same[0].failure)}, and it came again")
    count = rules.skip * 2 ** len(same)
    first, last = onset, onset + count - 1
    before = min(onset, max(failure.restored, 0)) if same else onset  # what was restored the last time did not help
    settings = {**_kept(failure, history), BEFORE: str(before), SKIP: f"{first}-{last}"}
    if rules.lr_cut < 1:
        settings[CUT] = f"{rules.lr_cut:g}"
    shown = f"step {first}" if first == last else f"steps {first} to {last}"
    return Decision("roll back", f"{failure.why}: going back to before step {before}, past the samples of {shown}", 0.0, settings)


def agreed(told: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """What the ranks of all nodes are told, of what each node's supervisor would tell its own: one saw what the others only suffered. To go
    back as far as any says, past the samples and with the rates that one names; and the smallest micro-batches."""
    back = min((one for one in told if BEFORE in one), key=lambda one: int(one[BEFORE]), default={})
    split = max((one for one in told if SPLIT in one), key=lambda one: int(one[SPLIT]), default={})
    return {name: one[name] for one, names in ((back, (BEFORE, SKIP, CUT)), (split, (SPLIT,))) for name in names if name in one}


_WINDOW = 100
"""Steps behind an onset in which another is taken to be the same."""


def _nth(number: int) -> str:
    return {1: "first", 2: "second", 3: "third"}.get(number, f"{number}th")


def _onset(failure: Failure) -> int:
    return failure.onset if failure.onset is not None else failure.step + 1


def _smaller(failure: Failure, history: Sequence[Past]) -> Decision:
    before = int(history[-1].decision.settings.get(SPLIT, "1")) if history else 1
    if before >= SPLIT_MAX:
        return Decision("stop", f"{failure.why}: even with micro-batches {before} times smaller")
    return Decision("smaller batch", f"{failure.why}: each micro-batch in {2 * before}", 0.0, {SPLIT: str(2 * before)})


def _without_progress(failure: Failure, history: Sequence[Past]) -> int:
    """How many failures there were since a step was ended that none had reached before."""
    count, reached = 0, failure.step
    for one in reversed(history):
        if one.failure.step < reached:
            break
        count += 1
    return count


def _alike(failure: Failure, history: Sequence[Past]) -> int:
    """How many of the last failures were the same, at the same step."""
    count = 0
    for one in reversed(history):
        if (one.failure.kind, one.failure.step, one.failure.words) != (failure.kind, failure.step, failure.words):
            break
        count += 1
    return count


def _kept(failure: Failure, history: Sequence[Past]) -> dict[str, str]:
    """What a life was told is told to the next: batches stay small; to go back, until one has."""
    told = dict(history[-1].decision.settings) if history else {}
    return told if failure.restored == NOT_YET else once_back(told)
