"""torchrun's elastic agent, with Relight's supervisor instead of its restart counter.

The supervisor classifies failures and decides what to do.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import secrets
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs, ProcessFailure, SignalException
from torch.distributed.elastic.multiprocessing.api import SubprocessContext

from relight.observe import emit
from relight.supervise.classify import is_a_loss
from relight.supervise.decide import agreed
from relight.supervise.departing import Departing
from relight.supervise.facts import Decision, Worker
from relight.supervise.procfs import sample_process
from relight.supervise.refusals import limit_of, shown_refusal
from relight.supervise.rendezvous_thread import LOST, Joining
from relight.supervise.spare import Spares
from relight.supervise.stderr_files import EVERY_S, release_printed
from relight.supervise.supervisor import Supervisor
from relight.torch_private.torchrun import allow_restart, context_of, worker_handlers

SETTLE_S = 1.0
"""Seconds after the loss of a rank in which other ranks can notice it and end by themselves. Then they are killed.

This loses no save, because another process, the agent, finishes sealed snapshots.
"""
SHUTDOWN_S = 30
"""torchrun's own default: seconds that healthy ranks have to end when nodes join or leave."""
_TAIL_BYTES = 16 << 10
_SETTINGS, _MEETING = "relight/told", "relight/meeting"
CONTINUING = ("resume", "roll back", "smaller batch")


class RankEnvironments(LogsSpecs):
    """torchrun's logs, and further environment variables of the ranks, which torchrun passes to ``reify``."""

    def __init__(self, logs: LogsSpecs) -> None:
        super().__init__()
        self._logs = logs
        self.variables: Mapping[int, Mapping[str, str]] = {}
        """The variables of the next incarnation, by local rank."""

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Add the variables to ``envs``, and return where the logs are written."""
        for rank, variables in self.variables.items():
            envs[rank].update(variables)
        return self._logs.reify(envs)

    @property
    def root_log_dir(self) -> str:
        """See torch's."""
        return self._logs.root_log_dir


class SupervisedAgent(LocalElasticAgent):
    """torchrun's agent of one node. It calls ``supervisor`` at each poll and at each failure.

    ``grace_s``: seconds that ranks have to end when the job is asked to end. With 0, ``shutdown_timeout`` counts.
    ``signals``: names of the signals that ask the job to end. ``keeps_logs``: whether the user reads the logs of the ranks.
    """

    def __init__(
        self,
        *,
        supervisor: Supervisor,
        spares: Spares,
        joining: Joining,
        departing: Departing,
        grace_s: float,
        shutdown_timeout: int | None,
        signals: Sequence[str],
        keeps_logs: bool,
        logs_specs: LogsSpecs,
        **kwargs: Any,
    ) -> None:
        shutdown_timeout = SHUTDOWN_S if shutdown_timeout is None else shutdown_timeout
        self._environments, self._signals = RankEnvironments(logs_specs), tuple(signals)
        super().__init__(logs_specs=self._environments, **kwargs)
        self._grace_s, self._others_s = grace_s or shutdown_timeout, shutdown_timeout
        self._supervisor, self._spares, self._joining = supervisor, spares, joining
        self._departing, self._keeps_logs = departing, keeps_logs
        self._released_at = time.monotonic()
        """When space of the copies of stderr was released last."""
        joining.over = lambda: supervisor.recovery.stopped_elsewhere(supervisor.incarnation.began)
        self._decision: Decision | None = None
        self._settings: dict[str, str] = {}
        self._meeting = ""
        """Name that all nodes give this incarnation; empty for one node."""
        self._lives = 0
        self._is_refused = False
        """Whether the system has refused a poll what it needs: reported once."""
        self._ends_ranks = False
        """Whether the job was asked to end, and its ranks are signalled: no signal interrupts the wait for them."""
        allow_restart(self, is_allowed=True)  # the supervisor decides about a restart, not a counter

    # -- an incarnation

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        while True:
            try:
                super()._rendezvous(worker_group)
                self._agree(worker_group)
            except LOST as error:
                self._joining.lost(error)
            else:
                return self._joining.joined()

    def _agree(self, worker_group: WorkerGroup) -> None:
        """Agree with the other nodes on the settings of the next incarnation.

        Until then each node has decided only by the end of its own ranks.
        """
        self._meeting = ""
        count, store = worker_group.group_world_size or 1, worker_group.store
        decision = self._supervisor.recovery.decision
        settings = dict(decision.settings) if decision is not None else {}
        if count > 1 and store is not None:
            store.set(f"{_SETTINGS}/{worker_group.group_rank}", json.dumps(settings))
            if worker_group.group_rank == 0:
                store.set(_MEETING, secrets.token_hex(8))
            settings = agreed([json.loads(store.get(f"{_SETTINGS}/{rank}")) for rank in range(count)])
            self._meeting = store.get(_MEETING).decode()
        self._settings = settings

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        environments = self._supervisor.begin(
            [worker.global_rank for worker in worker_group.workers], self._settings, self._meeting
        )
        restarts = {"TORCHELASTIC_RESTART_COUNT": str(self._lives)}
        self._environments.variables = {
            worker.local_rank: {**environments[worker.global_rank], **restarts} for worker in worker_group.workers
        }
        ignored = [number for number in (signal.SIGHUP, signal.SIGQUIT) if signal.getsignal(number) is signal.SIG_IGN]
        try:
            with worker_handlers(self._spares.take):
                pids: dict[int, Any] = super()._start_workers(worker_group)
        except SignalException as error:  # torchrun handles signals while it starts the workers
            self._record_signal(error.sigval)
            raise
        self._handle_signals(ignored)
        self._lives += 1
        self._supervisor.started({worker.global_rank: pids[worker.local_rank] for worker in worker_group.workers})
        return pids

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        context = context_of(self)
        torch_monitor: Callable[[WorkerGroup], RunResult] = super()._monitor_workers
        if not isinstance(context, SubprocessContext):
            return torch_monitor(worker_group)
        codes = _exits(context)  # read once, and here: torchrun's own poll would kill the other ranks at once
        if any(codes.values()):  # not None, and not 0
            return self._fail(worker_group, context, "")
        if all(code == 0 for code in codes.values()):
            return torch_monitor(worker_group)
        self._end_if_announced()
        if not self._keeps_logs and time.monotonic() - self._released_at > EVERY_S:
            self._released_at = time.monotonic()
            release_printed(filter(None, context.stderrs.values()))
        hung = ""
        try:
            hung = self._supervisor.poll()
            if self._supervisor.incarnation.steps:
                # not earlier: spares would compete with the job's own imports
                self._spares.fill(self._supervisor.incarnation.ahead_bytes)
        except (OSError, RuntimeError, MemoryError) as error:
            # the ranks may train on: what this poll misses, a later one sees
            if not (limit := limit_of(error)):
                raise
            if not self._is_refused:
                self._is_refused = True
                emit(
                    "run.refused", f"{shown_refusal(error, limit)}; hangs are not seen meanwhile", why=str(error)[:200]
                )
        if hung:
            return self._fail(worker_group, context, hung)
        return RunResult(state=WorkerState.HEALTHY)

    def _fail(self, worker_group: WorkerGroup, context: SubprocessContext, hung: str) -> RunResult:
        """Wait for ranks that lost another rank, collect the evidence, kill the remaining ranks, and decide."""
        noticed = time.monotonic()
        self._supervisor.publish_loss()
        by_local = {worker.local_rank: worker for worker in worker_group.workers}
        died = {rank: noticed for rank, code in _exits(context).items() if code is not None}
        states: dict[int, str] = {}
        delaying = self._supervisor.incarnation.hung if hung else ()
        causes = [rank for rank, worker in by_local.items() if worker.global_rank in delaying]
        _end(context, causes, states)  # only these: for the other ranks they have died by themselves
        since = time.monotonic()
        while alive := [rank for rank, code in _exits(context).items() if code is None and rank not in causes]:
            handover_s = self._supervisor.incarnation.handing_over_s({by_local[rank].global_rank for rank in alive})
            is_known = hung or _is_cause_known(context)
            if time.monotonic() > since + max(handover_s, 0.0 if is_known else SETTLE_S):
                break
            time.sleep(0.01)
            for rank, code in _exits(context).items():
                if code is not None:
                    died.setdefault(rank, time.monotonic())
        codes = _exits(context)
        stopped = [rank for rank, code in codes.items() if code is None or rank in causes]
        _end(context, [rank for rank in stopped if rank not in causes], states)
        codes.update(dict.fromkeys(stopped))
        workers = [
            Worker(
                rank=by_local[rank].global_rank,
                exit=codes[rank],
                died_at=died.get(rank, 0.0),
                error=_error(context.error_files[rank]),
                tail=_tail(context.stderrs[rank]),
                state=states.get(rank, ""),
                stopped=rank in stopped,
            )
            for rank in sorted(codes)
        ]
        is_requested = not self._supervisor.announced and any(codes.values())
        departure = (
            self._departing.others(worker_group.store, worker_group.group_world_size or 1) if is_requested else None
        )
        self._decide(self._supervisor.failed(workers, hung=hung, noticed=noticed, departure=departure))
        pids = {rank: handler.proc.pid for rank, handler in context.subprocess_handlers.items()}
        failures = {
            by_local[rank].global_rank: failure_of(rank, pids[rank], code or -signal.SIGKILL, context.error_files[rank])
            for rank, code in codes.items()
            if code or rank in stopped
        }
        return RunResult(state=WorkerState.FAILED, failures=failures)

    def _end_if_announced(self) -> None:
        """Send this process SIGTERM if the end of the job was announced.

        It is sent again at each poll, because interrupted code may have handled the first signal as its own error.
        """
        if self._supervisor.announced:
            os.kill(os.getpid(), signal.SIGTERM)

    def _decide(self, decision: Decision) -> None:
        self._decision = decision
        allow_restart(self, is_allowed=decision.action in CONTINUING)

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        allow_restart(self, is_allowed=True)
        if self._decision is not None and self._decision.delay_s:
            time.sleep(self._decision.delay_s)
        self._end_if_announced()
        self._supervisor.recovery.backoff_over()
        super()._restart_workers(worker_group)

    def _stop_workers(self, worker_group: WorkerGroup, *_: Any, **__: Any) -> None:
        decided, self._decision = self._decision, None
        if decided is None:  # nodes join or leave: these ranks are healthy, and may save
            self._supervisor.end_for_membership_change()
            self._end_ranks(signal.SIGTERM, self._others_s)
        else:
            self._end_ranks(signal.SIGKILL, SETTLE_S)

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, *_: Any, **__: Any) -> None:
        self._end_ranks(death_sig, self._grace_s)

    def _end_ranks(self, death_sig: signal.Signals, within_s: float) -> None:
        """Send the ranks a signal. Kill those that have not ended ``within_s`` later."""
        self._ends_ranks = bool(self._supervisor.announced)
        if self._supervisor.announced and context_of(self) is not None:
            group, why = self.get_worker_group(), f"node {socket.gethostname()} ({self._supervisor.announced})"
            self._departing.announce(group.store, group.group_rank or 0, group.group_world_size or 1, why)
        known = inspect.signature(super()._shutdown).parameters
        arguments: dict[str, Any] = {}
        if "timeout" in known:
            arguments["timeout"] = within_s
        elif (context := context_of(self)) is not None:  # before torch 2.12
            context.close(death_sig, within_s)  # type: ignore[arg-type]
        if "is_restart" in known:  # torch 2.6: otherwise it closes the rendezvous for all nodes
            arguments["is_restart"] = True
        super()._shutdown(death_sig, **arguments)

    def _handle_signals(self, ignored: Sequence[signal.Signals]) -> None:
        """Handle the signals that ask the job to end, in place of the handler that torchrun has just installed.

        ``ignored``: signals that were ignored before. torch before 2.10 installs its handler for them as well.
        """
        if threading.current_thread() is not threading.main_thread():
            return
        for number in ignored:
            signal.signal(number, signal.SIG_IGN)
        for name in self._signals:
            if name.strip() in signal.Signals.__members__:  # torchrun has warned about the others
                signal.signal(signal.Signals[name.strip()], self._on_signal)

    def _on_signal(self, number: int, frame: Any) -> None:
        """Record that the job must end, then raise torchrun's exception.

        The exception is raised wherever the main thread is. During a request to a store, it may be handled as an error
        of the store, and the job would continue. The recorded signal is checked again at each poll.

        While the ranks are ended, a further signal raises nothing: ``relight run`` would end before they have stored
        the last step. A second SIGINT is passed on to the ranks, which end at once by it.
        """
        received = signal.Signals(number)
        if self._ends_ranks:
            is_repeated = received == signal.SIGINT and self._supervisor.announced == f"{received.name} came"
            context = context_of(self)
            if is_repeated and isinstance(context, SubprocessContext):
                for handler in context.subprocess_handlers.values():
                    handler.proc.send_signal(signal.SIGINT)
            return
        self._record_signal(received)
        raise SignalException(f"process {os.getpid()} received {received.name}", sigval=received)

    def _record_signal(self, received: signal.Signals) -> None:
        self._supervisor.end.received(received.name, is_own=bool(self._supervisor.announced))


def _end(context: SubprocessContext, ranks: list[int], states: dict[int, str]) -> None:
    """Record each rank's process state in ``states``, then kill these ranks and their child processes with SIGKILL."""
    for rank in ranks:
        handler = context.subprocess_handlers[rank]
        states[rank] = sample_process(handler.proc.pid).state
        with contextlib.suppress(ProcessLookupError):
            os.killpg(handler.proc.pid, signal.SIGKILL)
    for rank in ranks:
        with contextlib.suppress(subprocess.TimeoutExpired):
            context.subprocess_handlers[rank].proc.wait(SETTLE_S)


def failure_of(local_rank: int, pid: int, code: int, path: str) -> ProcessFailure:
    """Return torchrun's description of a failed rank.

    torchrun reads the rank's error file, and fails if the file is incomplete, for example because the rank was killed
    while it wrote. In that case, return a description without the file.
    """
    if _error(path):
        with contextlib.suppress(Exception):
            return ProcessFailure(local_rank, pid, code, path)
    return ProcessFailure(local_rank, pid, code, "")


def _is_cause_known(context: SubprocessContext) -> bool:
    """Return whether it is known which rank failed. If so, the ranks that lost it need not end by themselves first."""
    for rank, code in _exits(context).items():
        if code is not None and code < 0:
            return True
        if (message := _error(context.error_files[rank])) and not is_a_loss(message):
            return True
    return False


def _exits(context: SubprocessContext) -> dict[int, int | None]:
    return {rank: handler.proc.poll() for rank, handler in context.subprocess_handlers.items()}


def _error(path: str) -> str:
    """Return the message of the exception that a worker recorded; empty if there is none."""
    try:
        message = json.loads(Path(path).read_text(encoding="utf-8"))["message"]
        return str(message["message"] if isinstance(message, dict) else message)
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def _tail(path: str) -> tuple[str, ...]:
    """Return the last lines that a worker wrote to stderr, if stderr is a file."""
    try:
        with open(path, "rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - _TAIL_BYTES))
            return tuple(file.read().decode(errors="replace").splitlines()[-60:])
    except OSError:
        return ()
