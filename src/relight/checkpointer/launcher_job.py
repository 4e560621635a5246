"""The launcher's job that this process belongs to, and whether the job has run before: torchrun, ``relight run``, Slurm, Kubernetes."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from relight.format import hexdigest

AGENT, ELASTIC, SLURM, POD, CONTAINER = "agent", "TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "pod", "container"
"""Kinds of names.

An ``agent`` is one call of torchrun or ``relight run`` on one node. All its workers, of all restarts, share it.
"""
ELASTIC_RESTARTS, SLURM_RESTARTS = "TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"
NAMES_MAX = 128
"""Maximum number of recorded names of a job. A job with more nodes is recognised by some of its agents."""
_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
"""torchrun's file for a worker's error, ``LOGS/attempt_N/RANK/error.json``. LOGS is a new directory for each agent."""
_ANY_RUN = "none"
"""torchrun's run id if the user gives none: all such jobs have the same."""
_MOUNTS = Path("/proc/self/mountinfo")
_POD = re.compile(r"/pods/([0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})/containers/[^/\s]+/([0-9a-f]+)\s")
"""Source of a container's termination-log mount: it has the pod's uid, and a name that is new for each start of the container."""


class LauncherJob(NamedTuple):
    """``names``: ``KIND=NAME`` of all launchers at work. ``elastic`` and ``slurm``: numbers of restarts by each."""

    names: frozenset[str]
    elastic: int = 0
    slurm: int = 0

    @property
    def text(self) -> str:
        """The names in one line, as a NOTE has them. Empty if there is no launcher."""
        return " ".join(sorted(self.names, key=lambda name: (_kind(name) == AGENT, name))[:NAMES_MAX])

    @property
    def has_agent(self) -> bool:
        """Whether an agent of the job is known."""
        return any(_kind(name) == AGENT for name in self.names)

    def began(self, text: str) -> bool:
        """Return whether ``text``, the names of a job that may have ended long ago, names an earlier start of this very job.

        One agent in common proves it. A Slurm job's id counts after a requeue only: an interactive allocation runs many trainings. So does
        torchrun's run id, which scripts may set to a constant, and only where agents are not known.
        """
        shared = self._shared(names := frozenset(text.split()))
        return (
            AGENT in shared
            or (SLURM in shared and self.slurm > 0)
            or (ELASTIC in shared and self.elastic > 0 and not self._knows_agents(names))
            or (POD in shared and CONTAINER not in shared)
        )

    def restarts(self, other: LauncherJob) -> bool:
        """Return whether this is a later start of ``other``, a job with a process that still exists: a launcher's count is higher now."""
        shared = self._shared(other.names)
        by_agent = AGENT in shared or (ELASTIC in shared and not self._knows_agents(other.names))
        return (by_agent and self.elastic > other.elastic) or (SLURM in shared and self.slurm > other.slurm)

    def _shared(self, names: frozenset[str]) -> set[str]:
        return {_kind(name) for name in self.names & names}

    def _knows_agents(self, names: frozenset[str]) -> bool:
        return self.has_agent and LauncherJob(names).has_agent


def job_of(variables: Mapping[str, str]) -> LauncherJob:
    """Return the job of a process with these environment variables."""
    names = {_name(kind, variables[kind]) for kind in (ELASTIC, SLURM) if variables.get(kind)} - {
        _name(ELASTIC, _ANY_RUN)
    }
    logs, attempt, _ = variables.get(_ERROR_FILE, "").rpartition("/attempt_")
    if logs and attempt:
        names.add(_name(AGENT, hexdigest(f"{socket.gethostname()}:{logs}".encode())[:16]))
    if variables.get("KUBERNETES_SERVICE_HOST"):
        names |= _pod()
    return LauncherJob(frozenset(names), count_of(variables, ELASTIC_RESTARTS), count_of(variables, SLURM_RESTARTS))


def with_agents(job: LauncherJob, names: Iterable[str]) -> LauncherJob:
    """Return ``job`` with the agents of all its nodes: rank 0 may be on another node after a restart."""
    return job._replace(names=job.names | {name for name in names if _kind(name) == AGENT})


def count_of(variables: Mapping[str, str], name: str) -> int:
    """Return a launcher's count of restarts; 0 if it is missing or invalid."""
    text = variables.get(name, "")
    return int(text) if text.isdecimal() and len(text) < 10 else 0


def _pod() -> set[str]:
    try:
        match = _POD.search(_MOUNTS.read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return set()
    return {_name(POD, match[1]), _name(CONTAINER, match[2])} if match else set()


def _name(kind: str, value: str) -> str:
    return f"{kind}={'_'.join(value.split())[:200]}"


def _kind(name: str) -> str:
    return name.partition("=")[0]
