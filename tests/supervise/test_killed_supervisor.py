"""SIGKILL of one node's ``relight run`` alone: its ranks save and end, and the other nodes continue."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("torch")

from tests.supervise.test_run import Job

from relight.checkpointer.signals import SignalHandlers
from relight.comm import ThreadGroup
from relight.comm.ports import free_port
from relight.heartbeat import Heartbeat, HeartbeatWriter, read_beat
from relight.heartbeat.heartbeat_page import make_page
from relight.heartbeat.supervisor_process import is_supervisor_gone
from relight.policy import TriggerInput
from relight.ranks import several
from relight.ranks.several import SeveralRanks
from relight.settings.supervise_settings import SuperviseRules
from relight.supervise.classify import classify
from relight.supervise.decide import decide
from relight.supervise.facts import Departure, FailureEvidence, Worker

LEFT_ALONE = Heartbeat(pid=1, phase="ending", step=8, steps=9, restored=-1, durable=8, unsupervised=1)
ENDED = (Worker(0, -15, 5.0, beat=LEFT_ALONE),)

PARENT = """
import os, signal, subprocess, sys, threading, time
threading.Thread(target=time.sleep, args=(60,), daemon=True).start()  # the last thread ends after the main thread
subprocess.Popen([sys.executable, "-c", sys.argv[1]])
signal.pause()
"""
CHILD = """
import os, signal, time
from relight.heartbeat import is_supervisor_gone
from relight.supervise import worker

def answer(number, frame):
    signal.signal(number, signal.SIG_IGN)  # the kernel may send it for each thread of the parent that ends
    gone = is_supervisor_gone()
    if os.fork() == 0:
        os.write(1, b"child %d\\n" % is_supervisor_gone())
        os._exit(0)
    os.wait()
    os.write(1, b"rank %d\\n" % gone)
    os._exit(0)

signal.signal(signal.SIGTERM, answer)
before = is_supervisor_gone()
worker._end_with(os.getppid())
os.write(1, b"ready %d %d\\n" % (before, is_supervisor_gone()))
while True:
    time.sleep(0.01)  # a signal just before pause() would be handled after the next one
"""


def test_a_rank_knows_at_the_signal_that_its_supervisor_is_gone() -> None:
    """The handler of the kernel's SIGTERM sees it, though threads of the supervisor may still be ending."""
    with subprocess.Popen([sys.executable, "-c", PARENT, CHILD], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None and parent.stdout.readline() == "ready 0 0\n"
        parent.kill()
        assert parent.stdout.read() == "child 0\nrank 1\n"
    assert not is_supervisor_gone(), "this process has no supervisor"


@pytest.mark.parametrize("gone", [False, True])
def test_all_ranks_publish_why_they_end(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, gone: bool) -> None:
    """If the supervisor of one rank is gone, every rank's page has that. A SIGTERM of another sender is no such end."""
    pages = [tmp_path / str(rank) for rank in range(3)]
    for page in pages:
        make_page(page)
    writers = [HeartbeatWriter(str(page)) for page in pages]
    published: list[int] = []
    monkeypatch.setattr(several, "is_supervisor_gone", lambda: gone)

    def rank(world: ThreadGroup) -> tuple[list[str], bool]:
        ranks, signals, reasons = SeveralRanks(world, (), 5.0), SignalHandlers(lambda name: None), []
        for step in range(4):
            if (world.rank, step) == (1, 1):
                signals._ending = signal.SIGTERM
            reason = ranks.agree_on_save(TriggerInput(step, float(step), None, 0.0), None, signals, False)
            reasons.append(reason.by if reason is not None else "")
        return reasons, signals.ending

    class Beat:
        def ends_unsupervised(self) -> None:
            published.append(1)

    monkeypatch.setattr(several, "heartbeat", Beat)
    assert ThreadGroup.run(3, rank) == [(["", "", "SIGTERM", ""], True)] * 3
    assert len(published) == (3 if gone else 0)
    writers[0].ends_unsupervised()
    beats = [read_beat(page) for page in pages]
    assert [beat is not None and beat.unsupervised for beat in beats] == [1, 0, 0]


def test_the_other_nodes_resume() -> None:
    """The end counts as the other node's, not as this node's: resume. What is known better has precedence."""
    failure = classify(FailureEvidence(ENDED))
    assert (failure.kind, failure.departure) == ("killed", None) and "relight run of another node" in failure.why
    assert decide(failure, (), SuperviseRules(), 0.0).action == "resume"
    asked = classify(FailureEvidence(ENDED, asked_to_end="SIGTERM came"))
    assert asked.kind == "preemption" and decide(asked, (), SuperviseRules(), 0.0).action == "end"
    leaves = classify(FailureEvidence(ENDED, departure=Departure("node b (SIGTERM came)", 1, 2)))
    assert decide(leaves, (), SuperviseRules(), 0.0).action == "end", "a node has announced that it leaves"
    assert (
        classify(FailureEvidence((Worker(0, -15, 5.0, beat=LEFT_ALONE._replace(unsupervised=0)),))).kind == "preemption"
    )


def started(job: Job, port: int, static: bool, rank: int, nodes: str) -> subprocess.Popen[str]:
    """Start ``relight run`` of one node."""
    meet = (
        ("--master-addr", "127.0.0.1", "--master-port", str(port), "--node-rank", str(rank)) if static
        else ("--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "j", "--rdzv-conf", "last_call_timeout=3",
              "--local-addr", "127.0.0.1")
    )  # fmt: skip
    return job.start("--nnodes", nodes, "--nproc-per-node", "1", *meet, steps=60)


@pytest.mark.slow
@pytest.mark.parametrize("static", [False, True], ids=["c10d", "fixed port"])
def test_the_other_node_continues_without_a_lost_step(tmp_path: Path, static: bool) -> None:
    """With ``--nnodes 1:2`` the other node continues alone. At a fixed port it continues once the node is back."""
    job, port, nodes = (
        Job(tmp_path, JOB_STEP_S="0.1", JOB_EVERY="1000", RELIGHT_JOB_SECRET="none"),
        free_port(),
        "2" if static else "1:2",
    )
    stays, goes = (started(job, port, static, rank, nodes) for rank in range(2))
    while not (tmp_path / "out").exists() or len(job.losses) < 6:
        time.sleep(0.1)
        assert stays.poll() is None
    os.kill(goes.pid, signal.SIGKILL)
    goes.communicate(timeout=60)
    back = [started(job, port, static, 1, nodes)] if static else []
    outputs = [process.communicate(timeout=240)[0] for process in (stays, *back)]
    assert [process.returncode for process in (stays, *back)] == [0] * (1 + static), outputs
    assert "the relight run of another node was killed" in outputs[0], outputs
    assert [step for step, _, _ in job.losses] == list(range(60)), "no step is lost, and none is done twice"
