"""What ``relight run`` needs of torch: missing names are reported, and what torchrun offers is used."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
from torch.distributed.elastic.multiprocessing import api as multiprocessing_api

from relight.errors import ConfigError
from relight.supervise.departing import is_own_address
from relight.supervise.elastic_agent import RankEnvironments, SupervisedAgent
from relight.supervise.end_request import EndRequest
from relight.torch_private.names import TorchName, check_torch
from relight.torch_private.torchrun import NAMES, worker_handlers


@pytest.mark.parametrize("name", NAMES, ids=str)
def test_the_installed_torch_has_each_name(name: TorchName) -> None:
    """Each name is found where it is expected, so the check can find that it is missing elsewhere."""
    assert name.exists and not TorchName(name.owner, f"{name.name}_of_the_future").exists


@pytest.mark.parametrize(
    "name",
    [
        TorchName("torch.distributed.elastic._nowhere", "x"),
        TorchName("torch.distributed.elastic:_Nothing", "x"),
        TorchName("torch.distributed.elastic", "_x"),
    ],
    ids=str,
)
def test_a_missing_name_is_reported_with_the_version(name: TorchName) -> None:
    """The error names what is missing, in which version of torch, and what to install."""
    with pytest.raises(ConfigError) as caught:
        check_torch([NAMES[0], name, name], "relight run", "; or else")
    words = str(caught.value)
    assert words.startswith(f"relight run does not support torch {torch.__version__}: it lacks {str(name)}")
    assert "install torch 2.6 to 2.14" in words and words.endswith("; or else") and caught.value.details == (str(name),)


def test_relight_run_reports_it_in_place_of_a_traceback(tmp_path: Path) -> None:
    """The command ends before it starts anything."""
    script = (
        "from torch.distributed.elastic.rendezvous import dynamic_rendezvous\n"
        "del dynamic_rendezvous._RendezvousExitOp\n"
        "from relight.cli import main\n"
        "main()\n"
    )
    command = [sys.executable, "-c", script, "run", "train.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "it lacks torch.distributed.elastic.rendezvous.dynamic_rendezvous._RendezvousExitOp" in done.stderr
    assert "start the script with torchrun" in done.stderr


def test_ranks_get_their_variables_before_the_logs_are_placed(tmp_path: Path) -> None:
    """torchrun names the directory of an incarnation's logs by a variable that the agent sets."""
    logs = RankEnvironments(DefaultLogsSpecs(str(tmp_path), tee=Std.ERR))
    logs.variables = {0: {"TORCHELASTIC_RESTART_COUNT": "7", "A": "1"}, 1: {"TORCHELASTIC_RESTART_COUNT": "7"}}
    envs = {rank: {"TORCHELASTIC_RUN_ID": "job", "TORCHELASTIC_RESTART_COUNT": "0"} for rank in (0, 1)}
    places = logs.reify(envs)
    assert envs[0]["A"] == "1" and envs[1]["TORCHELASTIC_RESTART_COUNT"] == "7" and "A" not in envs[1]
    assert "attempt_7" in places.error_files[1] and envs[1]["TORCHELASTIC_ERROR_FILE"] == places.error_files[1]
    assert logs.root_log_dir == str(tmp_path)


def test_a_worker_is_taken_from_the_spares_first(tmp_path: Path) -> None:
    """If there is none, torchrun's own process starts. Afterwards torchrun makes its handlers as before."""
    before, asked = vars(multiprocessing_api)["get_subprocess_handler"], list[tuple[str, ...]]()
    spare: Any = SimpleNamespace(pid=4711)
    answers = [spare, None]

    def take(args: Any, env: Any, out: Any, errors: Any) -> Any:
        asked.append((*args, env["A"], Path(out.name).name, str(errors)))
        return answers.pop(0)

    with worker_handlers(take):
        make = vars(multiprocessing_api)["get_subprocess_handler"]
        handlers = [
            make("sleep", ("60",), {"A": "1"}, str(tmp_path / "out"), "", local_rank_id=0, numa_options=None)
            for _ in range(2)
        ]
    assert asked == [("sleep", "60", "1", "out", "None")] * 2
    assert handlers[0].proc is spare
    handlers[0]._stdout.close()
    assert handlers[1].proc.poll() is None
    handlers[1].close(signal.SIGKILL)
    assert handlers[1].proc.wait() == -signal.SIGKILL
    assert vars(multiprocessing_api)["get_subprocess_handler"] is before


class Started(LocalElasticAgent):
    """torchrun's agent without processes. ``during`` is called while it starts the workers."""

    during: Any

    def _start_workers(self, worker_group: Any) -> dict[int, Any]:
        signal.signal(signal.SIGTERM, raise_signal)
        self.during()
        return {0: 4711}


def raise_signal(number: int, frame: Any) -> None:
    """Raise torchrun's exception, as its handler does."""
    raise SignalException("by torchrun", signal.Signals(number))


class Agent(SupervisedAgent, Started):
    """Relight's agent above torchrun's without processes."""


@pytest.fixture
def agent() -> Any:
    """Make an agent of one rank, and restore the handlers afterwards."""
    made: Any = Agent.__new__(Agent)
    made._supervisor = SimpleNamespace(
        begin=lambda *_: {0: {}}, started=lambda pids: None, announced="", end=EndRequest(time.monotonic)
    )
    made._settings, made._meeting, made._lives, made._ends_ranks = {}, "", 0, False
    made._environments = RankEnvironments(DefaultLogsSpecs(os.devnull))
    made._spares, made._signals = SimpleNamespace(take=None), ("SIGTERM", " SIGUSR2", "SIGNONE")
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2)}
    yield made
    for number, handler in before.items():
        signal.signal(number, handler)


GROUP: Any = SimpleNamespace(workers=[SimpleNamespace(local_rank=0, global_rank=0)])


def test_the_agent_handles_signals_once_its_workers_have_started(agent: Any) -> None:
    """Its handler replaces torchrun's. A signal that was ignored stays ignored (nohup)."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    agent.during = lambda: signal.signal(signal.SIGHUP, raise_signal)
    assert agent._start_workers(GROUP) == {0: 4711}
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    with pytest.raises(SignalException, match="received SIGUSR2"):
        os.kill(os.getpid(), signal.SIGUSR2)
    assert agent._supervisor.end.signal == "SIGUSR2 came"


def test_a_signal_while_workers_start_is_recorded(agent: Any) -> None:
    """torchrun's handler raises its exception, and the agent records the signal as if its own had received it."""
    agent.during = lambda: signal.raise_signal(signal.SIGTERM)
    with pytest.raises(SignalException, match="by torchrun"):
        agent._start_workers(GROUP)
    assert agent._supervisor.end.signal == "SIGTERM came"


def test_own_addresses_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that no server knows is this machine's if it is its host name."""
    monkeypatch.setattr("socket.gethostname", lambda: "node-a.invalid")
    assert all(map(is_own_address, ("localhost", "127.0.0.1", "127.0.0.9", "node-a.invalid")))
    assert not any(map(is_own_address, ("192.0.2.1", "node-b.invalid")))
