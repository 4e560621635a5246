"""Rules about lost logs and lines of descent: what must stay visible and undeleted after a user's mistake.

``proofs.invariants`` lists them.
"""

from __future__ import annotations

from proofs.invariants import rule, saves, simulated
from relight.commit import Attempt, SaveInfo, SaveRequest
from relight.errors import CorruptCheckpoint, RelightError
from relight.format.names import is_record_key
from relight.log import Log, fold, line_of, newest_good
from relight.policy import keep
from relight.reclaim import execute, execute_rebuild, execute_sweep, plan_prune, plan_rebuild, plan_sweep
from relight.store import ByteStore
from relight.testing.scenario import RUN, log_files, state_of


def line(store: ByteStore, reason: str, parent: str | None, *steps: int) -> tuple[Attempt, list[str]]:
    """Begin an attempt and save these steps, the first one after ``parent``. Return the attempt and the ids."""
    attempt, ids = Attempt.begin(store, RUN, reason=reason), list[str]()
    for step in steps:
        before, state = ids[-1] if ids else parent, state_of(f"lines/{attempt.epoch}/{step}")
        request = SaveRequest(
            SaveInfo(step=step, parents=[before] if before else []), tree=state.tree, items=state.items
        )
        ids.append(attempt.save(request).id)
    return attempt, ids


def live(store: ByteStore) -> list[str]:
    """Return the live ids, oldest first."""
    return [checkpoint.id for checkpoint in fold(Log(store, RUN).read()).live]


def lose_records(store: ByteStore, keep_first: int = 0) -> None:
    """Delete the run's records, except for the first ``keep_first``."""
    for key in [key for key in log_files(store) if is_record_key(key)][keep_first:]:
        store.delete(key)


def _refuses(store: ByteStore) -> bool:
    try:
        Attempt.begin(store, RUN)
    except CorruptCheckpoint:
        return True
    return False


@rule
def a_missing_log_stops_a_start() -> list[str]:
    """Checkpoint directories next to an empty log stop a start; nothing is swept; the rebuilt log lists all of them."""
    _, store = simulated()
    _, ids, _ = saves(store, 1, 2, 3)
    lose_records(store)
    problems = [] if _refuses(store) else ["an attempt has begun without the log"]
    try:
        execute_sweep(plan_sweep(store, RUN), store)
        problems.append("a sweep was planned without the log")
    except RelightError:
        pass
    if not problems:
        execute_rebuild(plan_rebuild(store, RUN), store)
        problems += [] if live(store) == ids else ["the rebuilt log lists other checkpoints"]
    return problems


@rule
def a_log_without_its_newest_records_stops_a_start() -> list[str]:
    """A log that is older than the checkpoint directories stops a start: a directory has an unknown attempt or an unknown parent."""
    problems = []
    for kept, steps, what in ((4, (3,), "without its last FENCE"), (6, (3, 4, 5), "without its last COMMITs")):
        _, store = simulated()
        _, first = line(store, "fresh", None, 1, 2)  # records: RUN, FENCE, two COMMITs
        # step 3 names a known parent: only the FENCE shows that its attempt is lost
        line(store, "restored", first[-1], *steps)
        lose_records(store, keep_first=kept)
        problems += [] if _refuses(store) else [f"an attempt has begun in a log {what}"]
    return problems


@rule
def an_interrupted_rebuild_stops_a_start() -> list[str]:
    """No attempt begins while a log is being rebuilt, however many of its records exist already."""
    _, store = simulated()
    _, ids, _ = saves(store, 1, 2)
    lose_records(store)
    execute_rebuild(plan_rebuild(store, RUN), store)
    lose_records(store, keep_first=5)  # RUN, NOTE, FENCE, two COMMITs; the last NOTE is gone
    problems = [] if _refuses(store) else ["an attempt has begun in a log that is being rebuilt"]
    return problems + ([] if live(store) == ids else ["a COMMIT is gone"])


@rule
def abandoned_checkpoints_stay() -> list[str]:
    """Retention retires only ancestors of the newest good checkpoint: in a run that restarted from scratch, and in one that was rolled back."""
    problems = []
    for reason, back in (("fresh", False), ("restored", True)):
        _, store = simulated()
        _, old = line(store, "fresh", None, 1, 2, 8, 9)
        attempt, new = line(store, reason, old[1] if back else None, 3, 4, 5)
        plan = plan_prune(store, RUN, keep(last=1))
        execute(plan, store, epoch=attempt.epoch)
        kept = {*old[2:], *new[2:], *(() if back else old)}
        planned = {verdict.id for verdict in plan.verdicts if verdict.keep}
        problems += [] if planned == kept else [f"{reason}: the plan keeps {len(planned)}, not {len(kept)}"]
        problems += [] if set(live(store)) == kept else [f"{reason}: {len(live(store))} stay of {len(kept)}"]
    return problems


@rule
def a_line_that_comes_after_the_plan_counts() -> list[str]:
    """A checkpoint of another line that is committed between plan and RETIRE keeps what the plan took for ancestors."""
    _, store = simulated()
    _, old = line(store, "fresh", None, 1, 2, 3)
    plan = plan_prune(store, RUN, keep(last=1))
    line(store, "fresh", None, 0)
    execute(plan, store)
    return [] if set(old) <= set(live(store)) else ["a checkpoint that is not an ancestor of the newest was retired"]


@rule
def an_unknown_parent_may_be_any_older_one() -> list[str]:
    """If a parent is not in the log, older checkpoints of earlier steps may be ancestors. Those of later steps are not.

    A copy of some checkpoints has such a log.
    """
    _, store = simulated()
    line(store, "start", None, 1, 7)
    _, ids = line(store, "start", "absentxxxx", 5)
    history = fold(Log(store, RUN).read())
    head = newest_good(history)
    steps = sorted(
        checkpoint.step for checkpoint in history.live if head is not None and checkpoint.id in line_of(history, head)
    )
    return [] if steps == [1, 5] and head is not None and head.id == ids[0] else [f"ancestors are steps {steps}"]
