"""What is known of a job when something is wrong with it, and what that is taken to be. Values only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from relight.heartbeat import Heartbeat

KINDS: dict[str, str] = {
    "user": "an error in the script or its settings, which would only repeat",
    "memory": "the host's memory, or the job's share of it, was not enough",
    "device memory": "an accelerator's memory was not enough",
    "hardware": "a device, its memory or its link is broken",
    "network": "ranks lost each other, and none is known to have failed first",
    "storage": "a file system or object store refused, or was full",
    "data": "a sample or a loader's process",
    "numerical": "a value that is none, or a loss that jumped",
    "preemption": "the machine is wanted back",
    "hang": "no rank moved any more",
    "crash": "native code ended a process",
    "killed": "somebody killed a process, and nothing says who",
    "fenced": "another attempt of this run has taken over",
    "unknown": "nothing tells",
}


class Clue(NamedTuple):
    """One thing that speaks for a kind of failure."""

    kind: str
    weight: int
    """From 0 to 100: how sure it is by itself."""
    what: str
    rank: int | None = None


@dataclass(frozen=True, slots=True)
class Worker:
    """One rank at the end of a life of the job. Times of the monotonic clock."""

    rank: int
    exit: int | None = None
    """Its exit code, negative for a signal; None: it was still there."""
    died_at: float = 0.0
    error: str = ""
    """The exception that it wrote down, type and words; empty if there was none."""
    tail: tuple[str, ...] = ()
    """The last lines it printed."""
    beat: Heartbeat | None = None
    state: str = ""
    """What the kernel says of it: ``R``, ``S``, ``D``, ``T``, ``Z``."""
    stacks: str = ""
    stopped: bool = False
    """Ended by the supervisor."""


class Departure(NamedTuple):
    """Other nodes that were asked to go, and with which this node's ranks have ended."""

    nodes: str
    """Each node's name, and what asked it to go."""
    left: int
    """How many nodes are left."""
    least: int
    """How many the job needs."""


@dataclass(frozen=True, slots=True)
class FailureEvidence:
    """A life of a job that is over, or must be."""

    workers: tuple[Worker, ...]
    hung: str = ""
    """Why it is taken to hang; empty if it is not."""
    asked_to_end: str = ""
    """What has asked the supervisor to end the job, in words: a signal, a notice; empty if nothing has."""
    oom_kills: int = 0
    """How many processes the kernel killed for want of memory, of this job's."""
    kernel: tuple[str, ...] = ()
    """Lines of the kernel's log."""
    full: tuple[str, ...] = ()
    """File systems without room."""
    departure: Departure | None = None


@dataclass(frozen=True, slots=True)
class Failure:
    """What is taken to have happened."""

    kind: str
    why: str
    """The strongest clue, in words."""
    rank: int | None
    """Who is taken to have failed first."""
    step: int
    """The last step that all ranks had ended; −1: none."""
    steps: int
    """How many steps were ended in this life."""
    words: str
    """What was said, without numbers and addresses: equal for two failures that are alike."""
    clues: tuple[Clue, ...] = ()
    onset: int | None = None
    """The first step that was wrong, if that is known to be before the last."""
    restored: int = -2
    """The step that this life had begun from; −1: from none; −2: it had not asked yet."""
    durable: int = -1
    """The newest step that is stored."""
    here: bool = True
    """Whether it is a rank of this machine that failed first; True if nobody knows."""
    departure: Departure | None = None
    """Set if the life ended because other nodes were asked to go."""


@dataclass(frozen=True, slots=True)
class Decision:
    """What is done about it."""

    action: str
    """``resume``, ``roll back``, ``smaller batch``, ``leave``, ``end``, ``stop``."""
    reason: str
    delay_s: float = 0.0
    settings: Mapping[str, str] = field(default_factory=dict)
    """Environment of the next life."""
