"""A second start of a run: refused while another process trains it, never after a crash, and both sides name the other."""

from __future__ import annotations

import os
import pty
import re
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.scripts import Script, run_script

import relight
from relight.checkpointer import takeover
from relight.commit import Attempt
from relight.errors import ConfigError, Fenced, LeaseHeld
from relight.observe import subscribe

TRAINER = """
import os, sys, time, socket, relight
from relight.checkpointer import takeover
mode, run, option = sys.argv[1], sys.argv[2], sys.argv[3] or None
if mode == "elsewhere":  # another host: its name differs, and its sockets cannot be reached from here
    socket.gethostname = lambda: "elsewhere"
    takeover._address = lambda *of: takeover.name_of("elsewhere", *map(str, of))
ckpt = relight.Checkpointer(run, state={'x': 1}, save=relight.every(steps=1), takeover=option)
start = ckpt.restore()
print("start", start, flush=True)
for step in range(start, start + int(sys.argv[4])):
    ckpt.save(step) if mode == "saved" else ckpt.step(step)
    print("step", step, flush=True)
    time.sleep(float(sys.argv[5]))
if mode == "open":
    time.sleep(60)
ckpt.close()
if mode == "closed":
    print("closed", flush=True)
    time.sleep(60)
"""


class Trainer:
    """A process that trains ``run``: one step each ``pause`` seconds."""

    process: subprocess.Popen[str] | Script

    def __init__(
        self,
        run: str,
        mode: str = "open",
        option: str = "",
        steps: int = 3,
        pause: float = 0.0,
        forked: bool = True,
        **environment: str,
    ) -> None:
        """If not ``forked``, the process has an interpreter of its own. Killed, it is a zombie until it is waited for."""
        arguments = (TRAINER, mode, run, option, str(steps), str(pause))
        if forked:
            self.process = Script(*arguments, **environment)
        else:
            self.process = subprocess.Popen(
                [sys.executable, "-c", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env={**os.environ, **environment},
            )

    def until(self, line: str) -> None:
        """Read the process's output up to ``line``."""
        assert self.process.stdout is not None and self.process.stderr is not None
        for printed in self.process.stdout:
            if printed.strip() == line:
                return
        raise AssertionError(self.process.stderr.read())

    def ends(self) -> tuple[int, str, str]:
        """Return exit code, stdout and stderr."""
        out, err = self.process.communicate(timeout=60)
        return self.process.returncode, out, err

    def kill(self) -> None:
        """SIGKILL."""
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def run(tmp_path: Path) -> str:
    return str(tmp_path / "store" / "run")


@pytest.fixture
def events() -> Iterator[list[str]]:
    lines: list[str] = []
    undo = subscribe(lambda event: lines.append(f"{event.name}: {event.fields.get('message', '')}"))
    yield lines
    undo()


def make(run: str, **options: object) -> relight.Checkpointer:
    return relight.Checkpointer(run, state={"x": 1}, save=None, background=False, **options)  # type: ignore[arg-type]


def taken(events: list[str]) -> list[str]:
    return [line for line in events if line.startswith("takeover.taken")]


def test_a_second_start_is_refused_while_the_first_process_trains(run: str) -> None:
    """Refuse restore() of a run that another process trains. The error has that process's id and the remedies, and
    nothing is written."""
    first = Trainer(run)
    try:
        first.until("step 2")
        before = sorted(Path(run).rglob("*"))
        with pytest.raises(LeaseHeld) as caught:
            make(run).restore()
        assert f"process {first.process.pid} on this host ({socket.gethostname()})" in caught.value.what and re.search(
            r" ago|just now", caught.value.what
        )
        assert all(
            way in caught.value.hint for way in (f"kill {first.process.pid}", "run name", 'takeover="take"', "Fenced")
        )
        assert all(
            way in caught.value.hint for way in ("to read only: restore(only=", "restore(STEP)", "relight.load()")
        )
        with pytest.raises(LeaseHeld, match=f"process {first.process.pid}") as caught:
            make(run, fresh=True).step(0)  # without restore()
        assert "to read only" not in caught.value.hint
        assert sorted(Path(run).rglob("*")) == before
    finally:
        first.kill()


@pytest.mark.parametrize("background", ["0", "1"])
def test_a_restart_right_after_a_kill_needs_no_option(run: str, background: str) -> None:
    """A trainer that was killed a moment ago is never in the way of the next start on its host."""
    first = Trainer(run, "saved", steps=100, pause=0.2, forked=False, RELIGHT_BACKGROUND=background)
    first.until("step 2")
    first.process.kill()  # killed, and not reaped
    started = time.monotonic()
    with make(run) as ckpt:
        assert ckpt.restore() >= 3
    assert time.monotonic() - started < 10
    first.kill()


def test_a_process_that_closed_its_checkpointer_is_not_in_the_way(run: str) -> None:
    """A run that was closed is free, though its process lives on."""
    first = Trainer(run, "closed")
    try:
        first.until("closed")
        with make(run) as ckpt:
            assert ckpt.restore() == 3
            ckpt.step(3)
    finally:
        first.kill()


def test_the_superseded_process_fails_at_its_next_step_and_names_the_other(run: str, events: list[str]) -> None:
    """Name the other process on both sides with takeover="take": in a warning before and at the takeover, and in Fenced
    at the other's next step."""
    first = Trainer(run, steps=1000, pause=0.2)
    try:
        first.until("step 1")
        ckpt = make(run, takeover="take")
        start = ckpt.restore()
        assert len(taken(events)) == 1 and f"process {first.process.pid} on this host" in taken(events)[0]
        assert "this process only reads until its first step() or save()" in taken(events)[0]
        ckpt.save(start)
        assert (
            len(taken(events)) == 2
            and "this process takes it over; the other one fails with Fenced at its next step" in taken(events)[1]
        )
        code, _, errors = first.ends()
        assert code and "Fenced" in errors
        assert (
            f"was superseded by attempt 2: process {os.getpid()} on host {socket.gethostname()} took the run over at 2"
            in errors
        )
        ckpt.close()
    finally:
        first.process.kill()


AGENT = {"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_ERROR_FILE": "/tmp/torchelastic_a/none_b/attempt_0/0/error.json"}
OTHER = {"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_ERROR_FILE": "/tmp/torchelastic_c/none_d/attempt_1/0/error.json"}


@pytest.mark.parametrize(
    ("first", "second", "way"),
    [
        ({"SLURM_JOB_ID": "7"}, {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "1"}, "take"),
        ({"TORCHELASTIC_RUN_ID": "x"}, {"TORCHELASTIC_RESTART_COUNT": "2", "TORCHELASTIC_RUN_ID": "x"}, "take"),
        (AGENT, {**AGENT, "TORCHELASTIC_RESTART_COUNT": "1"}, "take"),
        (AGENT, {**OTHER, "TORCHELASTIC_RESTART_COUNT": "1"}, "refuse"),  # its first start was refused, too
        ({"SLURM_JOB_ID": "6"}, {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "1"}, "refuse"),
        (
            {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "1"},
            {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "1"},
            "refuse",
        ),
        ({}, {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "1"}, "refuse"),
        ({}, {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, "refuse"),
        ({}, {"SLURM_JOB_ID": "7"}, "refuse"),
        ({}, {"TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_RUN_ID": "x"}, "refuse"),
    ],
)
def test_a_launcher_takes_over_from_its_own_job_only(
    run: str, first: dict[str, str], second: dict[str, str], way: str
) -> None:
    """Let a restarted job take over from its own former process. A first start, or another job's restart, takes over no
    healthy run."""
    former = Trainer(run, forked=False, **first)  # its environment is read from /proc
    try:
        former.until("step 2")
        code, out, errors = Trainer(run, "closing", steps=1, **second).ends()
        assert (
            (code == 0 and "start 3" in out and "takes it over" in errors)
            if way == "take"
            else (code == 1 and "LeaseHeld" in errors)
        ), errors
    finally:
        former.kill()


@pytest.mark.parametrize(
    ("mine", "other", "replaces"),
    [
        ("train-b7k2x", "train-x9wqz", True),
        ("train-b7k2x", "other-x9wqz", False),
        ("train-1", "train-0", False),
        ("train-b7k2x", "train-b7k2x", False),
    ],
)
def test_only_a_pod_of_the_same_controller_is_replaced(
    monkeypatch: pytest.MonkeyPatch, mine: str, other: str, replaces: bool
) -> None:
    """Kubernetes names no restart. The pod of a Job that is made again has the same name, but for its last five letters."""
    for name in ("SLURM_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    monkeypatch.setattr(takeover, "_has_terminal", lambda: False)
    monkeypatch.setattr(takeover, "_host", lambda: mine)
    sign = takeover.Sign(1, 1, "", other, 7, 1.0, certain=False)
    assert takeover.restarts(sign) is replaces
    assert not takeover.restarts(sign._replace(certain=True, pid=os.getpid()))


@pytest.mark.slow
def test_a_second_relight_run_leaves_the_first_alone(tmp_path: Path) -> None:
    """Started twice by hand, the second one stops at once with the reason. It neither fences the first nor tries again until it does."""
    run, script = str(tmp_path / "store" / "run"), tmp_path / "train.py"
    script.write_text(TRAINER.replace("time.sleep(60)", "pass"))
    command = [sys.executable, "-m", "relight", "run", str(script), "open", run, "", "400", "0.05"]
    variables = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=variables
    ) as first:
        assert first.stdout is not None
        lines = iter(first.stdout)
        assert any("step 3" in line for line in lines)
        second = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, env=variables)
        assert second.returncode and "still trains this run" in second.stdout + second.stderr
        assert "incarnation 2" not in second.stdout + second.stderr
        rest = first.communicate(timeout=120)[0]
    assert first.returncode == 0 and "Fenced" not in rest, rest[-2000:]


@pytest.mark.parametrize(("answer", "takes"), [("y\n", True), pytest.param("\n", False, marks=pytest.mark.slow)])
def test_ask_asks_on_a_terminal(run: str, answer: str, takes: bool) -> None:
    """Show the other process and ask with takeover="ask". Only yes takes over. Without a terminal it refuses."""
    first = Trainer(run)
    try:
        first.until("step 2")
        code, _, errors = Trainer(run, "closing", "ask", 1).ends()
        assert code == 1 and "LeaseHeld" in errors
        controller, terminal = pty.openpty()
        second = subprocess.Popen(
            [sys.executable, "-c", TRAINER, "closing", run, "ask", "1", "0"],
            stdin=terminal,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        os.write(controller, answer.encode())
        out, err = second.communicate(timeout=60)
        assert f"process {first.process.pid} on this host" in err.decode() and "Take it over? [y/N]" in err.decode()
        assert (second.returncode == 0 and b"step 3" in out) if takes else second.returncode == 1
        os.close(controller)
        os.close(terminal)
    finally:
        first.kill()


def test_an_unknown_way_is_refused(run: str) -> None:
    """takeover= takes one of three words."""
    with pytest.raises(ConfigError, match="takeover="):
        make(run, takeover="force")


def test_a_process_of_another_host_that_saves_is_refused(run: str) -> None:
    """A process on another host is known only by its log. A start waits, and is refused at the next checkpoint."""
    first = Trainer(run, "elsewhere", steps=1000, pause=1.0)
    try:
        first.until("step 2")
        with pytest.raises(LeaseHeld, match=f"process {first.process.pid} on host elsewhere"):
            make(run).restore()
    finally:
        first.kill()


def test_an_evaluation_during_training_takes_nothing_over(run: str, events: list[str]) -> None:
    """restore() alone fences no process, whatever ``takeover=`` is: the warning states that, and the trainer continues."""
    first = Trainer(run, steps=60, pause=0.1)
    try:
        first.until("step 1")
        ckpt = make(run, takeover="take")
        assert (
            ckpt.restore() >= 2
            and "only reads" in taken(events)[0]
            and not any("takes it over" in line for line in taken(events))
        )
        ckpt.close()
        first.until("step 59")
    finally:
        first.kill()


def test_a_dead_host_delays_a_start_for_a_bounded_time(
    run: str, events: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A host that was lost seconds ago delays a start by a stated time. takeover="take" skips the wait."""
    first = Trainer(run, "elsewhere", steps=3, pause=0.1)
    first.until("step 2")
    first.kill()
    started = time.monotonic()
    make(run, takeover="take").restore()
    assert time.monotonic() - started < 2 and "host elsewhere" in taken(events)[0]
    monkeypatch.setattr(takeover, "WAIT_MIN_S", 4.0)
    monkeypatch.setattr(takeover, "_window", lambda seen: 4.0)
    started, ckpt = time.monotonic(), make(run)
    assert ckpt.restore() == 3
    ckpt.step(3)
    assert time.monotonic() - started < 6
    assert any("takeover.waiting" in line and 'takeover="take" skips the wait' in line for line in events)
    ckpt.close()


def test_another_host_that_ended_properly_delays_nothing(run: str, events: list[str]) -> None:
    """A save at the end of a run shows that its process has ended."""
    first = Trainer(run, "elsewhere", steps=2, RELIGHT_BACKGROUND="0")
    assert first.ends()[0] == 0
    script = TRAINER.replace("save=relight.every(steps=1)", "save=None")
    assert run_script(script, "elsewhere", run, "take", "1", "0").returncode == 0
    started = time.monotonic()
    assert make(run).restore() == 3
    assert time.monotonic() - started < 2 and not taken(events)


def test_reading_a_run_that_trains_is_only_warned_of(run: str, events: list[str]) -> None:
    """A restore of a given checkpoint or a part may be an evaluation. It is allowed, and its first step is refused."""
    first = Trainer(run)
    try:
        first.until("step 2")
        ckpt = make(run)
        ckpt.restore(1, strict=False)
        assert "only reads here" in taken(events)[0]
        with pytest.raises(LeaseHeld):
            ckpt.step(2)
    finally:
        first.kill()


def test_a_second_checkpointer_of_one_process_takes_over(run: str, events: list[str]) -> None:
    """The later Checkpointer of a process takes the run over, with one log line. The first one raises Fenced, and
    closes quietly."""
    with make(run) as first:
        first.step(0)
        second = make(run)
        assert second.restore() == 0 and not taken(events), "reading takes nothing over"
        first.save(1)
        second.step(2)
        assert (
            len(taken(events)) == 1
            and "second Checkpointer of this process" in taken(events)[0]
            and "step 1" in taken(events)[0]
        )
        with pytest.raises(Fenced, match="another Checkpointer of this process took the run over after step 1"):
            first.step(2)
        with pytest.raises(Fenced, match="took the run over"):
            first.save(2)
    second.close()
    assert [checkpoint.step for checkpoint in relight.open(run).checkpoints()] == [1, 2]


def test_a_second_checkpointer_under_another_path_takes_over(run: str, tmp_path: Path, events: list[str]) -> None:
    """Identify a run by its ids, so that a link to the store is the same run."""
    first = make(run)
    first.save(0)
    (tmp_path / "link").symlink_to(tmp_path / "store")
    second = make(str(tmp_path / "link" / "run"))
    assert second.restore() == 1
    second.save(1)
    assert "second Checkpointer of this process" in taken(events)[0]
    with pytest.raises(Fenced):
        first.save(2)
    second.close()


def test_a_checkpointer_of_another_thread_is_not_touched_while_it_works(run: str) -> None:
    """Raise Fenced in the superseded trainer at its next call, in its own thread."""
    going, over = threading.Event(), threading.Event()
    errors: list[type[BaseException]] = []

    def train() -> None:
        ckpt = make(run, signals=False)
        ckpt.save(0)
        going.set()
        over.wait(30)
        try:
            ckpt.step(1)
        except Fenced as error:
            errors.append(type(error))

    thread = threading.Thread(target=train)
    thread.start()
    assert going.wait(30)
    with make(run) as second:
        assert second.restore() == 1
        second.save(1)
        over.set()
        thread.join()
    assert errors == [Fenced]


def test_a_forked_child_of_a_killed_trainer_is_no_sign_of_life(run: str) -> None:
    """Workers inherit descriptors, and live seconds longer than their trainer: the run is free all the same."""
    script = textwrap.dedent(
        """
        import os, sys, time, relight
        ckpt = relight.Checkpointer(sys.argv[1], state={'x': 1}, background=False)
        ckpt.save(0)
        if os.fork() == 0:
            time.sleep(30)
            os._exit(0)
        print("ready", flush=True)
        time.sleep(30)
        """
    )
    first = Script(script, run, leads=True)
    try:
        assert first.stdout.readline() == "ready\n"
        first.kill()
        first.wait()
        first.stdout.close()
        with make(run) as ckpt:
            assert ckpt.restore() == 1
    finally:
        os.killpg(first.pid, signal.SIGKILL)
        first.stderr.close()


def test_every_superseded_writer_names_who_has_the_run(run: str) -> None:
    """Name host, process and time in Fenced, and what to do."""
    first = make(run)
    first.save(0)
    Attempt.begin(first._session.store, "run", reason="restored")
    with pytest.raises(Fenced) as caught:
        first.save(1)
    assert f"process {os.getpid()} on host {socket.gethostname()} took the run over at 2" in caught.value.what
    assert "stop this process" in caught.value.hint and "run name of its own" in caught.value.hint
