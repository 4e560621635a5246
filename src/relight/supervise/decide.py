"""Decides what to do about a failure. Pure. docs/recovery.md has the same rules as a table.

The decision depends on the failure, the earlier failures, the rules and the time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from relight.heartbeat.heartbeat_page import NOT_YET
from relight.policy.rollback_env import BEFORE, CUT, SKIP, SPLIT, once_back
from relight.settings.supervise_settings import SuperviseRules
from relight.supervise.facts import Decision, Failure

_WAITS = ("storage", "network", "hardware")
"""Kinds of failure that may disappear by themselves. They are retried even if they repeat."""
SPLIT_MAX = 16
DAY_S = 86400.0
ACTIONS = ("resume", "roll back", "smaller batch", "exclude_node", "end", "stop")
FENCED = "another attempt has taken this run over: it is in charge now"


class Past(NamedTuple):
    """An earlier failure, and the decision about it."""

    failure: Failure
    decision: Decision
    at: float


def decide(failure: Failure, history: Sequence[Past], rules: SuperviseRules, now: float) -> Decision:
    """Return what to do about a failure.

    ``history``: this job's earlier failures, oldest first. The same facts give the same decision.
    """
    if failure.kind == "fenced":
        return Decision("stop", failure.why if "LeaseHeld" in failure.why else FENCED)
    if failure.kind == "preemption" and failure.departure is not None:
        left, least = failure.departure.left, failure.departure.least
        if left >= least:
            nodes = "1 node continues" if left == 1 else f"{left} nodes continue"
            return Decision("resume", f"{failure.why}: {nodes}", 0.0, _kept(failure, history))
        return Decision("end", f"{failure.why}: too few nodes are left, {left} of at least {least}")
    if failure.kind == "preemption":
        return Decision("end", f"{failure.why}: the job ends; its scheduler starts it again")
    stuck, alike = _without_progress(failure, history), _alike(failure, history)
    if failure.kind == "numerical":
        return _roll_back(failure, history, rules)
    if failure.kind == "hardware" and failure.here:
        broken = 1 + sum(
            past.failure.kind == "hardware" and past.failure.here and now - past.at < DAY_S for past in history
        )
        if broken >= rules.node_failures:
            return Decision(
                "exclude_node",
                f"{failure.why}: the {_nth(broken)} time within a day that this machine's hardware fails",
            )
    if failure.kind == "user":
        if not failure.steps and not any(past.failure.steps for past in history):
            return Decision("stop", f"{failure.why}: a restart would only repeat it")
        if alike:
            return Decision("stop", f"{failure.why}: the same as last time, at step {failure.step}")
    if failure.kind == "data" and alike:
        return _roll_back(failure, history, rules)
    if failure.kind == "device memory" and rules.split:
        return _smaller(failure, history)
    if alike + 1 >= rules.same and failure.kind not in _WAITS:
        return Decision("stop", f"{failure.why}: {alike + 1} times at step {failure.step}")
    if stuck + 1 > rules.failures:
        return Decision("stop", f"{failure.why}: {stuck + 1} failures without progress, {rules.failures} are allowed")
    delay = min(rules.backoff_max_s, rules.backoff_s * 2.0 ** (stuck - 1)) if stuck else 0.0
    reason = failure.why + (f"; failure {stuck + 1} without progress" if stuck else "")
    return Decision("resume", reason, delay, _kept(failure, history))


def _roll_back(failure: Failure, history: Sequence[Past], rules: SuperviseRules) -> Decision:
    """Decide to resume before the onset of the failure, and to skip the samples of the steps from the onset on."""
    onset = failure.onset if failure.onset is not None else failure.step + 1
    same = [
        past
        for past in history
        if past.decision.action == "roll back" and _onset(past.failure) <= onset <= _onset(past.failure) + _WINDOW
    ]
    if len(same) >= rules.roll_backs:
        return Decision(
            "stop", f"{failure.why}: it came back after {len(same)} rollbacks to before step {_onset(same[0].failure)}"
        )
    count = rules.skip * 2 ** len(same)
    first, last = onset, onset + count - 1
    # the checkpoint restored last time did not help: go further back
    before = min(onset, max(failure.restored, 0)) if same else onset
    settings = {**_kept(failure, history), BEFORE: str(before), SKIP: f"{first}-{last}"}
    if rules.lr_cut < 1:
        settings[CUT] = f"{rules.lr_cut:g}"
    shown = f"step {first}" if first == last else f"steps {first} to {last}"
    return Decision(
        "roll back", f"{failure.why}: going back to before step {before}, past the samples of {shown}", 0.0, settings
    )


def agreed(chosen: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """Return one set of settings for the ranks of all nodes, from the settings that each node's supervisor chose.

    Only one node may know the cause. The furthest rollback counts, with its skipped samples and learning rates. The
    smallest micro-batches count.
    """
    back = min(
        (settings for settings in chosen if BEFORE in settings), key=lambda settings: int(settings[BEFORE]), default={}
    )
    split = max(
        (settings for settings in chosen if SPLIT in settings), key=lambda settings: int(settings[SPLIT]), default={}
    )
    return {
        name: settings[name]
        for settings, names in ((back, (BEFORE, SKIP, CUT)), (split, (SPLIT,)))
        for name in names
        if name in settings
    }


_WINDOW = 100
"""Steps after an onset within which another onset counts as the same one."""


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
    """Return the number of failures since a new furthest step was completed."""
    count, reached = 0, failure.step
    for past in reversed(history):
        if past.failure.step < reached:
            break
        count += 1
    return count


def _alike(failure: Failure, history: Sequence[Past]) -> int:
    """Return how many of the last failures had the same cause at the same step."""
    count = 0
    for past in reversed(history):
        if (past.failure.kind, past.failure.step, past.failure.words) != (failure.kind, failure.step, failure.words):
            break
        count += 1
    return count


def _kept(failure: Failure, history: Sequence[Past]) -> dict[str, str]:
    """Return the settings that the next incarnation keeps.

    They are small micro-batches, and a rollback until an incarnation has done it.
    """
    settings = dict(history[-1].decision.settings) if history else {}
    return settings if failure.restored == NOT_YET else once_back(settings)
