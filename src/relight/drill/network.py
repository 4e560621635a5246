"""A rehearsal on two nodes, each in its own network namespace. The link between them is cut for some time."""

from __future__ import annotations

import os
import time

from relight.drill.pages import Pages
from relight.drill.rehearsals import Rehearsal, RehearsalResult, RehearsalStage, ended
from relight.drill.stage import STEPS_BEFORE, CannotTry, DrillJob, Wrong
from relight.drill.storage import cannot
from relight.drill.warden import environment
from relight.heartbeat import Heartbeat
from relight.units import duration_text

_OWN_NETWORK = ("unshare", "--user", "--map-root-user", "--net")
_WIRE, _PORT = "wire", 29400
_HERE, _THERE = "10.77.0.1", "10.77.0.2"
_ANSWER_S, _NOTICED_WITHIN_S, _LONGER_S = 60.0, 90.0, 70.0
"""Seconds: a node's timeout for an answer of the rendezvous; least time to notice the cut; time that the cut continues after that."""
_STARTS_MAX = 3
_KINDS = ("hang", "network")
"""Accepted classifications. Without an answer, a node cannot distinguish a cut link from a hanging rank; a closed connection shows it."""


def network(stage: RehearsalStage, rehearsal: Rehearsal) -> RehearsalResult:
    """Cut the link until a node has noticed, and some time longer. The drill, in place of a scheduler, restarts a node that has ended."""
    if not stage.target.built_in:
        raise CannotTry("only the built-in job can run as two nodes on this machine")
    reason = cannot([*_OWN_NETWORK, "ip", "link", "add", _WIRE, "type", "veth", "peer", "name", "end"])
    if reason:
        raise CannotTry(f"no network namespace can be created here: {reason}")
    with DrillJob(stage.target, stage.folder, stage.store, stage.limit, _OWN_NETWORK) as job, TwoNodes(job) as nodes:
        nodes.start()
        before = job.wait(nodes.ready, "steps of both nodes after a checkpoint")
        job.makes_steps()
        noticed_within_s = max(_NOTICED_WITHIN_S, _ANSWER_S + 3 * stage.limit.pace.start_s)
        nodes.cut()
        broken = time.monotonic()
        noticed = job.wait(
            lambda: time.monotonic() if job.incidents() else None, "sign that a node has noticed", noticed_within_s
        )
        time.sleep(_LONGER_S)
        nodes.restore_link()
        repaired = time.monotonic()
        beats = job.wait(lambda: nodes.back(before), "step of both nodes after the cut", over=True)
        back = max(beat.first_at for beat in beats)
        lost = max(beat.step for beat in before) - min(beat.restored for beat in beats)
        (stage.folder / "out.go").touch()
        code = job.wait(lambda: nodes.second_code, "end of the second node", over=True)
        if code:
            raise Wrong(f"the second node ended with {code}: {job.last_words()}")
        incidents = job.incidents()
        for incident in incidents:
            if incident.kind not in _KINDS or incident.action != "resume":
                raise Wrong(
                    f"the cut network was classified as {incident.kind}, and the action was {incident.action}: {incident.why}"
                )
        and_then = ended(stage, job, incidents=len(incidents))
        again = "; the second node had ended, and was restarted" if nodes.starts > 1 else ""
        summary = f"{incidents[0].why.splitlines()[0]}{again}; both made steps {duration_text(back - repaired)} after the link was restored"
        means = f"two network namespaces, with the link between them down for {duration_text(repaired - broken)}"
        return RehearsalResult(
            f"{summary}{and_then}", round(noticed - broken, 3), None, round(back - broken, 3), max(0, lost), means
        )


class TwoNodes:
    """The two nodes of a job. The first is the job's own process, which has the rendezvous; the second has its own log."""

    def __init__(self, job: DrillJob) -> None:
        self._job = job
        self._enter: list[str] = []
        self._second, self._pages, self.starts = 0, Pages(0), 0

    def __enter__(self) -> TwoNodes:
        return self

    def __exit__(self, *error: object) -> None:
        self._pages.close()

    def start(self) -> None:
        """Start both nodes and the link between them."""
        job = self._job
        env = environment()
        holder = job.warden.start(
            ["unshare", "--net", "sleep", "infinity"], env=env, cwd="/", log=job.folder / "holder"
        )
        ours = os.readlink(f"/proc/{job.warden.pid}/ns/net")
        job.wait(lambda: True if os.readlink(f"/proc/{holder}/ns/net") != ours else None, "second network", over=True)
        self._enter = ["nsenter", f"--net=/proc/{holder}/ns/net"]
        job.warden.call(["ip", "link", "add", _WIRE, "type", "veth", "peer", "name", _WIRE, "netns", str(holder)])
        for prefix, address in (([], _HERE), (self._enter, _THERE)):
            for arguments in (
                ["addr", "add", f"{address}/24", "dev", _WIRE],
                ["link", "set", "lo", "up"],
                ["link", "set", _WIRE, "up"],
            ):
                job.warden.call([*prefix, "ip", *arguments])
        job.start(*_flags(_HERE), env=_env(_HERE))
        self._start_second()

    def cut(self) -> None:
        """Cut the link silently: packets are lost without an error."""
        self._job.warden.call(["ip", "link", "set", _WIRE, "down"])

    def restore_link(self) -> None:
        """Restore the link."""
        self._job.warden.call(["ip", "link", "set", _WIRE, "up"])

    @property
    def second_code(self) -> int | None:
        """Exit code of the second node; None while it runs."""
        return self._job.warden.ended(self._second)

    def ready(self) -> list[Heartbeat] | None:
        """Return the heartbeats once both nodes make steps and a checkpoint is stored; None before that."""
        beats = self._beats()
        if self.second_code is not None:
            raise Wrong(f"the second node ended with {self.second_code} before the link was cut")
        return (
            beats
            if len(beats) == 2 and all(beat.steps >= STEPS_BEFORE and beat.durable >= 0 for beat in beats)
            else None
        )

    def back(self, before: list[Heartbeat]) -> list[Heartbeat] | None:
        """Return the heartbeats once both nodes have made a step in new processes; None before that.

        Starts the second node again if it has ended, as a scheduler would.
        """
        if self._job.code is not None:
            raise Wrong(f"the first node ended with {self._job.code}: {self._job.last_words()}")
        if self.second_code and self.starts < _STARTS_MAX:
            self._start_second()
        beats, old = self._beats(), {beat.pid for beat in before}
        return beats if len(beats) == 2 and all(beat.steps and beat.pid not in old for beat in beats) else None

    def _start_second(self) -> None:
        self._pages.close()
        self.starts += 1
        job = self._job
        command = [*self._enter, *job.target.command(job.folder, job.store, *_flags(_THERE))]
        self._second = job.warden.start(
            command,
            env={**environment(), **_env(_THERE)},
            cwd=str(job.folder),
            log=job.folder / "log of the second node",
        )
        self._pages = Pages(self._second)

    def _beats(self) -> list[Heartbeat]:
        return [*self._job.beats().values(), *self._pages.beats().values()]


def _flags(address: str) -> list[str]:
    return [
        "--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"{_HERE}:{_PORT}", "--rdzv-id", "drill",
        "--rdzv-conf", f"is_host={address == _HERE}", "--local-addr", address,
    ]  # fmt: skip


def _env(address: str) -> dict[str, str]:
    return {
        "GLOO_SOCKET_IFNAME": _WIRE,
        "RELIGHT_NODE": address,
        "RELIGHT_JOB_SECRET": "none",
    }  # no other process is in these networks
