"""The end of a node and its effect on other nodes, without processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import pytest
from torch.distributed.elastic.multiprocessing import api
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousTimeoutError,
)

from relight.errors import ConfigError
from relight.heartbeat import SETTING, Heartbeat, HeartbeatPage
from relight.log import Log, fold
from relight.policy.grace import GRACE
from relight.settings.supervise_settings import SuperviseSettings
from relight.store import open_bytes
from relight.store.base import Entry
from relight.store.memory import MemoryStore
from relight.supervise import launch
from relight.supervise.elastic_agent import SupervisedAgent, _end, failure_of
from relight.supervise.supervisor import Supervisor

_SET_BY_LAUNCH = (
    "TORCHELASTIC_SIGNALS_TO_HANDLE", "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE",
)  # fmt: skip
"""Variables that ``launch`` sets for its child processes."""


@pytest.mark.parametrize(
    ("error", "words", "closed"),
    [
        (RendezvousConnectionError("The connection to the C10d store has failed."), "can no longer be reached", 0),
        (RendezvousClosedError(), "another node has ended the job", 1),
        (RendezvousTimeoutError(), "fewer than 1 nodes", 1),
    ],
    ids=["cut off", "closed", "too few"],
)
def test_a_node_that_is_cut_off_does_not_end_the_job_of_the_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: Exception, words: str, closed: int
) -> None:
    """A node that is cut off stops with the reason and leaves the rendezvous open.

    The other nodes wait there for its restart.
    """
    closings: list[int] = []

    class Rendezvous:
        def shutdown(self) -> bool:
            closings.append(1)
            return True

    class Broken:
        def __init__(self, **arguments: Any) -> None:
            pass

        def run(self) -> None:
            raise error

    for name in _SET_BY_LAUNCH:
        monkeypatch.setenv(name, "1")
    monkeypatch.setattr(launch.Meetings, "handler", lambda self: Rendezvous())
    monkeypatch.setattr(launch, "SupervisedAgent", Broken)
    ended = launch.launch(launch.parse(["train.py"]), SuperviseSettings(), tmp_path)
    assert ended.code == 1 and words in ended.message and len(closings) == closed


@pytest.mark.parametrize(("durable", "code"), [(9, 75), (8, 76)])
def test_a_store_that_does_not_answer_does_not_delay_the_exit(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, durable: int, code: int
) -> None:
    """The job was asked to end, and its store does not answer any more. ``relight run`` exits in the grace period, with the right code."""
    silent = threading.Event()

    class Silent(MemoryStore):
        def put_once(self, key: str, data: bytes) -> bool:
            silent.wait(5)
            return super().put_once(key, data)

        def list(self, prefix: str) -> Iterator[Entry]:
            silent.wait(5)
            return super().list(prefix)

    class Asked:
        def __init__(self, *, supervisor: Supervisor, **arguments: Any) -> None:
            self.supervisor = supervisor

        def run(self) -> None:
            environments = self.supervisor.begin([0], {})
            self.supervisor.started({0: os.getpid()})
            store = Silent("silent")
            self.supervisor.recovery.knows_run = True
            self.supervisor.recovery.log.at(store, "run")
            self.supervisor.account.begin_writing()
            beat = Heartbeat(
                pid=1, phase="training", step=9, steps=10, durable=durable, url="memory://silent", run="run"
            )
            HeartbeatPage(environments[0][SETTING]).write(beat)
            monkeypatch.setattr("relight.supervise.incarnation.open_bytes", lambda url: store)
            self.supervisor.end.received("SIGTERM", is_own=False)
            raise api.SignalException("asked to end", sigval=signal.SIGTERM)

    monkeypatch.setenv(GRACE, "2")
    monkeypatch.setattr(launch, "SupervisedAgent", Asked)
    for name in _SET_BY_LAUNCH:
        monkeypatch.setenv(name, "1")
    began = time.monotonic()
    ended = launch.launch(launch.parse(["train.py"]), SuperviseSettings(predict=False, spares=False), tmp_path)
    took_s = time.monotonic() - began
    silent.set()
    assert ended.code == code, ended.message
    assert took_s < 2.0


@pytest.mark.parametrize(
    "written",
    ['{"message": {"message": "Runt', "", "[]", '{"message": 3}', '{"message": {"message": "lost", "extraInfo": 5}}'],
)
def test_a_rank_that_is_ended_as_it_writes_its_error_down_does_not_end_the_supervisor(
    tmp_path: Path, written: str
) -> None:
    """A rank that is killed while it writes its error leaves half a file.

    One of 400 failures of random jobs ended so.
    """
    path = tmp_path / "error.json"
    path.write_text(written)
    result = failure_of(1, 4711, -9, str(path))
    assert (result.local_rank, result.exitcode) == (1, -9) and "SIGKILL" in result.message
    path.write_text('{"message": {"message": "ValueError: none", "extraInfo": {"timestamp": "7"}}}')
    assert "ValueError" in str(failure_of(1, 4711, 1, str(path)).message)


@pytest.mark.parametrize(
    ("given", "script", "its"),
    [
        (
            ["--nproc-per-node", "2", "train.py", "--log", "x", "--nnodes", "9"],
            "train.py",
            ["--log", "x", "--nnodes", "9"],
        ),
        (["--nproc_per_node=2", "-m", "pkg.train", "--role", "x"], "pkg.train", ["--role", "x"]),
        (["--standalone", "--", "train.py", "--log=1"], "train.py", ["--log=1"]),
        (["-r3", "-t", "3", "train.py", "-t"], "train.py", ["-t"]),
        (["train.py"], "train.py", []),
    ],
)
def test_what_is_after_the_script_is_the_scripts(given: list[str], script: str, its: list[str]) -> None:
    """Arguments after the script are the script's, also abbreviations of torchrun's options."""
    options = launch.parse(given)
    assert (options.training_script, options.training_script_args) == (script, its)
    assert options.nnodes == "1:1" and options.role == "default"


@pytest.fixture
def supervisor(tmp_path: Path) -> Any:
    """Make a supervisor without ranks, with the signal handler that the agent installs."""
    made = Supervisor(SuperviseSettings(), "job", tmp_path)
    agent: Any = SimpleNamespace(_supervisor=made, _ends_ranks=False)
    agent._record_signal = partial(SupervisedAgent._record_signal, agent)
    before = signal.signal(signal.SIGTERM, partial(SupervisedAgent._on_signal, agent))
    try:
        yield made
    finally:
        signal.signal(signal.SIGTERM, before)
        made.close()


def test_a_signal_that_a_store_client_took_for_its_own_error_counts(supervisor: Supervisor) -> None:
    """A store client may treat the signal's exception as its own error. The next poll raises it again."""
    agent: Any = SimpleNamespace(_supervisor=supervisor)
    SupervisedAgent._end_if_announced(agent)
    try:
        signal.raise_signal(signal.SIGTERM)
    except Exception as error:
        assert isinstance(error, api.SignalException)
    assert supervisor.announced == "SIGTERM came"
    with pytest.raises(api.SignalException):
        SupervisedAgent._end_if_announced(agent)
    assert supervisor.ended("SIGTERM").reason.startswith("SIGTERM came")


@pytest.mark.parametrize(
    ("names", "code", "words"),
    [("INT TERM TERM", 75, "SIGINT came; the last step is stored"), ("TERM INT HUP", 75, "SIGTERM came; the last step is stored"),
     ("INT INT", 76, "SIGINT came; the last step is not stored")],
)  # fmt: skip
def test_further_signals_do_not_end_the_wait_for_the_ranks(tmp_path: Path, names: str, code: int, words: str) -> None:
    """``relight run`` ends after its ranks, however many signals it gets, so that exit code and message are true.

    A second SIGINT ends the ranks without the save.
    """
    script = tmp_path / "train.py"
    script.write_text(
        "import sys, time, torch, relight\n"
        "model = torch.nn.Linear(2, 2)\n"
        "with relight.Checkpointer(sys.argv[1], model=model, save=relight.every(steps=1000)) as ckpt:\n"
        "    for step in range(ckpt.restore(), 100):\n"
        "        open(sys.argv[2], 'a').write('.')\n"
        "        time.sleep(4.0 if step else 0.1)\n"
        "        ckpt.step(step)\n"
    )
    command = [
        sys.executable,
        "-m",
        "relight",
        "run",
        "--nproc-per-node",
        "1",
        str(script),
        str(tmp_path / "run"),
        str(tmp_path / "out"),
    ]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as job:
        while not (tmp_path / "out").exists() or len((tmp_path / "out").read_text()) < 2:
            time.sleep(0.05)
            assert job.poll() is None
        for name in names.split():
            job.send_signal(signal.Signals[f"SIG{name}"])
            time.sleep(0.3)
        output = job.communicate(timeout=100)[0]
    assert job.returncode == code and words in output, output
    stored = [checkpoint.step for checkpoint in fold(Log(open_bytes(tmp_path), "run").read()).live]
    assert stored == ([1] if code == 75 else []), output


@pytest.mark.parametrize(
    ("sealed", "words"), [(8, "not stored yet; the process that saves has it"), (7, "the checkpoint before it stands")]
)
def test_a_save_that_another_process_may_finish_is_not_given_up(tmp_path: Path, sealed: int, words: str) -> None:
    """If the ranks were ended while the agent still writes, the message states that the step may still be stored."""
    made = Supervisor(SuperviseSettings(), "job", tmp_path)
    try:
        page = made.begin([0], {})[0][SETTING]
        made.started({0: os.getpid()})
        HeartbeatPage(page).write(
            Heartbeat(pid=1, phase="ending", step=8, steps=9, restored=-1, sealed=sealed, durable=4)
        )
        code, sentence, _ = launch._run_requested(made, "SIGTERM came")
        assert code == launch.UNSAVED and words in sentence
    finally:
        made.close()


def test_an_end_before_the_first_step_loses_none(tmp_path: Path) -> None:
    """The exit code is that of a stored step, and the message claims no step."""
    made = Supervisor(SuperviseSettings(), "job", tmp_path)
    try:
        page = made.begin([0], {})[0][SETTING]
        made.started({0: os.getpid()})
        HeartbeatPage(page).write(Heartbeat(pid=1, phase="ending", restored=-1))
        code, sentence, _ = launch._run_requested(made, "SIGTERM came")
        assert code == launch.SAVED and "no step was completed here, so none is lost" in sentence
    finally:
        made.close()


def test_a_signal_while_killed_ranks_are_waited_for_is_not_lost(
    supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A signal during the wait for killed ranks is kept."""
    with subprocess.Popen(["sleep", "60"], start_new_session=True) as process:

        class Slow:
            pid = process.pid

            def wait(self, timeout: float) -> None:
                signal.raise_signal(signal.SIGTERM)

        context: Any = SimpleNamespace(subprocess_handlers={0: SimpleNamespace(proc=Slow())})
        with pytest.raises(api.SignalException):
            _end(context, [0], {})


@pytest.mark.parametrize(
    "flags",
    ["--nproc-per-node 0", "--nproc-per-node many", "--nnodes 3:2", "--nnodes 0", "--nnodes x", "--rdzv-conf foo",
     "--nnodes 2 --node-rank 5 --master-addr 127.0.0.1 --master-port 29511"],
)  # fmt: skip
def test_a_value_that_torchrun_refuses_is_a_usage_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, flags: str
) -> None:
    """It is neither a bug of Relight nor a wait for nodes that do not exist."""
    for name in (
        "TORCHELASTIC_SIGNALS_TO_HANDLE",
        "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE",
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE",
    ):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("RELIGHT_JOB_SECRET", "none")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    with pytest.raises(ConfigError, match="is invalid|has an invalid value|--node-rank is 5"):
        launch.launch(launch.parse([*flags.split(), "train.py"]), SuperviseSettings(), tmp_path)


ORDERS = [
    (
        ["--nproc-per-node", "2", "--settings", "X.toml", "train.py", "--settings", "its own"],
        "X.toml",
        ["--settings", "its own"],
    ),
    (["--settings=X.toml", "--nproc_per_node=2", "train.py"], "X.toml", []),
    (["--standalone", "--settings=X.toml", "-m", "pkg.train", "--incidents", "y"], "X.toml", ["--incidents", "y"]),
    (["-t", "3", "--settings", "X.toml", "--", "train.py", "--", "-q"], "X.toml", ["--", "-q"]),
    (["--nproc-per-node", "2", "train.py", "--settings", "y"], None, ["--settings", "y"]),
]


@pytest.mark.parametrize(("given", "settings", "its"), ORDERS)
def test_own_options_stand_anywhere_before_the_script(given: list[str], settings: str | None, its: list[str]) -> None:
    """The order of Relight's own options and torchrun's flags does not matter; what follows the script is the
    script's."""
    from relight.cli.run import command

    context = command.make_context("run", list(given))
    assert context.params["settings"] == (Path(settings) if settings else None)
    parsed = launch.parse(list(context.params["arguments"]))
    assert parsed.training_script_args == its


def test_own_options_of_a_drill_stand_anywhere_before_the_script() -> None:
    """A drill accepts the flags in any order too, and passes them to its job."""
    from relight.cli.drill import command

    context = command.make_context("drill", ["--nproc-per-node", "2", "--only", "kill", "--json", "train.py", "--json"])
    assert context.params["only"] == "kill" and context.params["as_json"]
    assert context.params["arguments"] == ("--nproc-per-node", "2", "train.py", "--json")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["--nprocs-per-node", "2", "train.py"], "--nproc-per-node"),
        (["--nnodes", "1"], "no script"),
        (["--nnodes"], "expected one argument"),
    ],
)
def test_a_wrong_flag_is_one_line(given: list[str], words: str, capfd: pytest.CaptureFixture[str]) -> None:
    """A usage error is one of Relight's errors, with the nearest flag, and not torchrun's usage of sixty lines."""
    with pytest.raises(ConfigError) as caught:
        launch.parse(given)
    assert words in str(caught.value) and capfd.readouterr().err == ""


def test_an_option_of_relight_itself_is_named_with_its_place() -> None:
    """``--set`` after the command is not an abbreviation of ``--settings``."""
    from relight.cli.run import command

    with pytest.raises(click.UsageError, match="before the command: relight --set supervise.same=4 run"):
        command.make_context("run", ["--set", "supervise.same=4", "train.py"])
