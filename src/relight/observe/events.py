"""Events: a name from one table, fields, a time.

Every report of what happened, for people or programs, goes through here.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from relight.observe import console
from relight.run_names import run_name, shown

EVENTS: dict[str, tuple[int, str]] = {
    "attempt.started": (logging.INFO, "this process took charge of the run"),
    "attempt.ended": (logging.INFO, "this process has ended its work on the run normally"),
    "restore.done": (logging.INFO, "state was restored from a checkpoint"),
    "run.renewed": (
        logging.WARNING,
        "the run's directory was removed, and a new log was begun in the same place, as requested",
    ),
    "store.retried": (logging.WARNING, "the store failed at the first contact, and is tried again for a few seconds"),
    "restore.fresh": (logging.INFO, "there was nothing to restore: a fresh run"),
    "best.chosen": (logging.INFO, "a checkpoint was chosen as the best, and by which metric"),
    "metric.unreadable": (
        logging.WARNING,
        "a metric is left out of saves: it cannot be read as a number, or there are too many",
    ),
    "metric.missing": (logging.WARNING, "a metric that saves or retention use was not reported"),
    "restore.rolled_back": (logging.WARNING, "the run continues from a checkpoint before the failure"),
    "spare.failed": (logging.WARNING, "a spare that ran the script ahead ended before relight.standby()"),
    "run.started": (logging.INFO, "relight run started the processes of a job"),
    "run.hang": (logging.WARNING, "no rank makes progress"),
    "rendezvous.lost": (logging.WARNING, "the rendezvous of a job cannot be reached"),
    "rendezvous.restored": (logging.INFO, "the rendezvous can be reached again"),
    "run.failure": (logging.WARNING, "an incarnation of a job failed"),
    "run.decision": (logging.INFO, "what is done about the failure"),
    "run.recovered": (logging.INFO, "training continues after a failure"),
    "prediction.alarm": (logging.WARNING, "a failure is predicted"),
    "prediction.model_loaded": (logging.INFO, "a model of failures was read, at the start or because its file changed"),
    "prediction.scored": (logging.INFO, "an alarm came true or not, or a failure came without one"),
    "prediction.detector_disabled": (logging.INFO, "a learned detector or a model is not used, and why"),
    "restore.repaired": (logging.WARNING, "bytes that are damaged or gone in one tier were read from another"),
    "run.save": (logging.INFO, "the supervisor has the ranks save at the end of their step"),
    "run.straggler": (logging.WARNING, "the other ranks wait for one"),
    "run.notices": (
        logging.WARNING,
        "a source of cloud notices does not answer properly, and why; it answers again; or it announces a later end",
    ),
    "run.refused": (
        logging.WARNING,
        "the system refused relight run a descriptor, memory, a thread or a process; training continues",
    ),
    "run.load": (logging.WARNING, "the load of a node was reduced, or restored"),
    "agent.hung": (logging.WARNING, "the agent, which writes saves, was stuck and was killed"),
    "restore.lr_scaled": (logging.WARNING, "learning rates were lowered after a rollback"),
    "restore.skipped": (logging.WARNING, "a damaged checkpoint was skipped"),
    "follow.switched": (logging.DEBUG, "a follower's live tensors have another checkpoint"),
    "follow.skipped": (logging.WARNING, "a follower could not read a checkpoint"),
    "follow.partial": (logging.WARNING, "a follower leaves out what does not fit"),
    "follow.ended": (logging.DEBUG, "a follower was closed"),
    "follow.pushed": (logging.DEBUG, "an inference engine has a follower's checkpoint"),
    "log.damaged": (logging.WARNING, "a record of the run's log is damaged and is ignored"),
    "steps.done": (
        logging.DEBUG,
        "training continues: steps since the last such event, and their metrics; from rank 0, at least every ten seconds",
    ),
    "steps.repeated": (logging.WARNING, "a step was reported twice: step() is called once per optimizer step"),
    "audit.failed": (
        logging.WARNING,
        "a job's own restore could not be written to the audit log; the restore continues",
    ),
    "save.requested": (logging.DEBUG, "a save was requested"),
    "state.missed": (
        logging.WARNING,
        "attributes of a component change in training, and its state_dict() leaves them out",
    ),
    "torch.name_missing": (
        logging.WARNING,
        "this torch lacks a private name that Relight uses: what replaces it is slower or does less",
    ),
    "optimizer.missed": (
        logging.WARNING,
        "an optimizer that steps parameters of a component was not given to the Checkpointer",
    ),
    "loader.reread": (logging.INFO, "a plain loader finds its position: what it delivered before is read again"),
    "loader.continued": (logging.INFO, "a loader with other settings continues by its count of samples"),
    "loader.prefetched": (
        logging.INFO,
        "batches that were taken from a loader before the training loop used them count as not delivered",
    ),
    "loader.short": (logging.WARNING, "a training epoch after a resume lacks batches"),
    "loader.reset": (logging.WARNING, "a loader's position was discarded: its training epoch begins from its start"),
    "loader.unverified": (
        logging.WARNING,
        "batches that were read again differ, because the data draws from the process's generators",
    ),
    "save.sealed": (logging.DEBUG, "a save's values are copied: training may change them, and the trainer may die"),
    "save.coalesced": (
        logging.INFO,
        "a save was postponed: the agent is not ready yet, or earlier saves are still being written",
    ),
    "agent.memory": (logging.WARNING, "there is less memory for snapshots than was requested"),
    "frozen_param.modified": (logging.WARNING, "a frozen parameter was changed without a trace"),
    "agent.crashed": (logging.WARNING, "the agent, which writes saves, crashed"),
    "agent.stopped": (
        logging.WARNING,
        "a process that saves or copies was stopped: it was continued, or ended and replaced",
    ),
    "threads.refused": (logging.WARNING, "the system started no thread: saves and restores use fewer, and take longer"),
    "agent.lost": (logging.WARNING, "there is no agent: the trainer writes saves itself and waits for them"),
    "ranks.differ": (logging.WARNING, "ranks hold different values that should be equal; one of them is saved"),
    "replicas.differ": (logging.ERROR, "ranks that should hold the same tensor do not: the checkpoint is suspect"),
    "ranks.late": (
        logging.WARNING,
        "some ranks did not arrive where all ranks agree on saves: this process saves no more",
    ),
    "settings.read": (logging.INFO, "a Checkpointer read options from relight.toml that the script does not set"),
    "schedule.changed": (logging.INFO, "relight.adaptive() saves at this interval from now on, and why"),
    "schedule.bound": (
        logging.WARNING,
        "a bound given to relight.adaptive() costs 1 % of the time or more; once in a process",
    ),
    "tiers.paced": (
        logging.INFO,
        "a further tier gets only some of the scheduled saves from now on, and why",
    ),
    "save.backpressured": (
        logging.WARNING,
        "a save waits in memory, because the nearest tier is full of checkpoints that are not copied to a further tier yet",
    ),
    "save.durable": (logging.INFO, "a save became a checkpoint"),
    "save.failed": (logging.WARNING, "a save did not become a checkpoint"),
    "rank.state_recovered": (
        logging.WARNING,
        "a rank has failed, and another rank with the same state has saved the last step for all",
    ),
    "save.skipped_no_time": (
        logging.WARNING,
        "the job was asked to end, and there is no time for a save: the checkpoint before it stands",
    ),
    "save.stale": (logging.WARNING, "all trainable tensors equal those of the previous save"),
    "save.inconsistent": (logging.WARNING, "a save was skipped, because the state was not consistent"),
    "prune.done": (logging.INFO, "checkpoints were retired and deleted"),
    "prune.failed": (logging.WARNING, "retention failed this time"),
    "sweep.done": (logging.INFO, "leftovers of dead attempts were deleted"),
    "drain.done": (logging.INFO, "a further tier has a checkpoint now"),
    "drain.found": (logging.INFO, "a further tier has a checkpoint that another node has copied"),
    "drain.waiting": (logging.INFO, "the run ends, and waits until its last checkpoint is on the further tiers"),
    "drain.failed": (logging.WARNING, "a checkpoint could not be copied to a further tier this time"),
    "drain.fenced": (logging.ERROR, "another attempt has taken charge of a further tier: nothing more is copied there"),
    "scrub.repaired": (logging.WARNING, "a damaged file was rewritten from another tier"),
    "scrub.damaged": (logging.ERROR, "a file is damaged, and no tier has it whole"),
    "verify.done": (logging.DEBUG, "every byte of a checkpoint was read, and equals what was committed"),
    "compact.unmatched": (logging.WARNING, "a pattern of Compact(…) matches no tensor"),
    "codec.failed": (logging.WARNING, "a codec of another package failed: the chunks are stored as without it"),
    "verify.damaged": (logging.ERROR, "a checkpoint differs from what was committed"),
    "peers.sent": (logging.DEBUG, "this node has sent its peers what a part can be rebuilt from"),
    "peers.complete": (logging.DEBUG, "a piece of parity held for peers is complete"),
    "peers.moved": (logging.DEBUG, "bytes were sent to peers, or read from them, by RDMA or TCP"),
    "peers.fallback": (logging.WARNING, "peers that should use RDMA use TCP, and why"),
    "peers.failed": (logging.WARNING, "a part is not protected by a peer"),
    "peers.degraded": (
        logging.WARNING,
        "peers protect less than was requested: too few nodes, or too many of them in one place",
    ),
    "peers.unreachable": (logging.WARNING, "a peer did not answer, and is left out"),
    "peers.refused": (logging.WARNING, "a caller of this node's agent did not prove that it belongs to the job"),
    "peers.unencrypted": (logging.WARNING, "the peers of an encrypted run exchange its data in the clear"),
    "tier.unreachable": (logging.WARNING, "a tier did not answer"),
    "read.retried": (logging.WARNING, "bytes were damaged at the first read, and correct at the second"),
    "cache.read": (logging.DEBUG, "a file was read through the cache"),
    "cache.off": (logging.WARNING, "the cache's disk failed: nothing more is cached"),
    "drain.unfinished": (logging.WARNING, "the run ended before further tiers had what they must hold"),
    "anchor.failed": (logging.WARNING, "the log's head could not be written to its anchor"),
    "log.unsummarized": (logging.WARNING, "no summary of a run's log could be written, so reading it takes longer"),
    "anchor.adopted": (logging.WARNING, "an anchor of an earlier version was accepted, with damaged records below it"),
    "store.mirror_away": (
        logging.ERROR,
        "a drive of a mirrored store failed: what is saved has one copy until it is rebuilt",
    ),
    "store.mirror_doubted": (
        logging.WARNING,
        "a drive of a mirrored store gave wrong bytes or is being rebuilt: it is read last",
    ),
    "store.mirror_back": (logging.INFO, "a drive of a mirrored store is whole again"),
    "store.no_conditional_put": (
        logging.WARNING,
        "the store ignores conditional writes, which keep a second writer out",
    ),
    "signal.received": (logging.WARNING, "a signal requested a save"),
    "signal.worker": (logging.WARNING, "the signal that ends the job has also ended a data loader worker"),
    "signal.unhandled": (
        logging.WARNING,
        "a signal will not make this process save: it has another handler, or none can be installed",
    ),
    "takeover.taken": (logging.WARNING, "this process takes the run over from one that may still train it"),
    "takeover.waiting": (logging.WARNING, "another host may still train the run: this start waits for a sign of it"),
    "preflight.warning": (logging.WARNING, "a problem of the store or the machine that will cause failures later"),
    "save.span": (logging.DEBUG, "a stage of a save ended: its begin, its end, and the process"),
    "alert.fired": (logging.WARNING, "a rule for alerts holds"),
    "alert.resolved": (logging.INFO, "a rule for alerts no longer holds"),
    "alert.unsent": (logging.ERROR, "an alert could not be delivered"),
    "tracker.opened": (logging.INFO, "an experiment tracker's run begins or continues"),
    "tracker.failed": (
        logging.WARNING,
        "an experiment tracker takes no rows; they are kept and written later, and training continues",
    ),
    "traces.off": (logging.WARNING, "variables of OpenTelemetry request traces, and none are sent"),
    "traces.lost": (logging.WARNING, "the receiver of traces does not take spans; training continues"),
    "events.lost": (logging.WARNING, "events came faster than they could be written"),
    "environment.differs": (logging.WARNING, "resuming under other software or settings than the checkpoint's"),
}
"""Level and meaning of every event. ``docs/reference.md`` lists them; a test compares."""

logger = logging.getLogger("relight")


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that happened.

    Args:
        name: The event's name, such as ``save.durable``.
        fields: Its fields.
        time_s: Seconds since the epoch, for people.
    """

    name: str
    fields: Mapping[str, Any]
    time_s: float = field(default_factory=time.time)

    def to_json(self) -> str:
        """Return the event as one line of JSON."""
        return json.dumps({"event": self.name, "time": self.time_s, **self.fields}, default=str, ensure_ascii=False)


counters: Counter[str] = Counter()
"""Count of each event in this process."""

_subscribers: list[Callable[[Event], None]] = []
"""Events are emitted where no subscriber is known, as in a logging library."""
_failed: list[Callable[[Event], None]] = []
"""Subscribers with a reported failure."""
_lock = threading.RLock()  # a signal handler may emit while the same thread is emitting
os.register_at_fork(after_in_child=_lock._at_fork_reinit)  # type: ignore[attr-defined]


_modest = False
"""Whether INFO lines are logged at DEBUG: set on all ranks but rank 0."""


def demote_info_logs() -> None:
    """Log events of level info at level debug from now on: another rank of the same job logs the same."""
    global _modest
    _modest = True


def emit(name: str, sentence: str = "", **fields: Any) -> Event:
    """Emit an event: to the log, to the counters, to subscribers.

    Return it. ``sentence``: its text for people, field ``message``.
    """
    level, meaning = EVENTS[name]
    sentence = shown(sentence)
    if isinstance(run := fields.get("run"), str):
        fields["run"] = run_name(run)
    event = Event(name, {**fields, "message": sentence} if sentence else fields)
    with _lock:
        counters[name] += 1
        listeners = list(_subscribers)
    facts = " ".join(f"{key}={value}" for key, value in fields.items())
    if _modest and level == logging.INFO:
        level = logging.DEBUG
    text = sentence or f"{meaning} ({facts})"
    if console.applies(logger):  # without it, Python's handler of last resort would write only warnings
        console.show(logger, name, level, text, fields)
    else:
        logger.log(level, "%s", text, extra={"relight": event})
    for listener in listeners:
        try:
            listener(event)
        except Exception as error:  # noqa: BLE001 - its error, such as a chat server's silence, would end a save or the training
            _report_failure(listener, error)
    return event


def _report_failure(listener: Callable[[Event], None], error: Exception) -> None:
    """Log, once for each subscriber, that it has raised an error. Not as an event: it would get that one, too."""
    with _lock:
        if listener in _failed:
            return
        _failed.append(listener)
    text = f"subscriber {listener!r} failed: {type(error).__name__}: {error}; training continues, and the subscriber gets the next events"
    if console.applies(logger):
        console.show(logger, "", logging.WARNING, text, {})
    else:
        logger.warning(text, exc_info=error)


def subscribe(listener: Callable[[Event], None]) -> Callable[[], None]:
    """Have ``listener`` called with every event, in the thread that emits it.

    Return a function that unsubscribes it. An error that it raises is logged once, and stops nothing.

    Args:
        listener: A function of one event. The emitting thread waits for it.
    """
    with _lock:
        _subscribers.append(listener)

    def undo() -> None:
        with _lock:
            for listeners in (_subscribers, _failed):
                if listener in listeners:
                    listeners.remove(listener)

    return undo
