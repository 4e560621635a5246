"""Find a run's agent on this node, or start it.

The agent listens in this user's private directory. Agent and trainer prove to each other that they know the secret
there before anything else is sent (``comm.local_sockets``, ``comm.proof``). One agent serves all processes of one user
that write one run of one store.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable

from relight.agent.client import Agent
from relight.agent.messages import PROTOCOL
from relight.comm import new_threads
from relight.comm.children import child_command, child_environment
from relight.comm.local_sockets import LocalDirectory, NotPrivate, name_of, peer_of
from relight.comm.process_state import STOPPED, command_of, process_at
from relight.comm.proof import ProofFailed, prove_as_caller
from relight.comm.standstill import CONTINUE_AFTER_S, END_AFTER_S, end, wake
from relight.commit.plugin_codecs import SUFFIX
from relight.errors import StoreUnavailable
from relight.observe import emit
from relight.settings.environment import environment
from relight.units import duration_text
from relight.version import VERSION

START_S = 20.0
PROOF_S = 20.0
"""Seconds that a listening process has to prove itself, even if the caller would wait longer for answers."""
UNUSABLE = 4
"""Exit status of an agent that cannot listen in its directory; 3: another agent listens already."""
_WORDS_BYTES = 16 << 10
_MODULE = "relight.agent.server"
_unreaped: list[subprocess.Popen[bytes]] = []
"""Agents for which no thread waits: they are reaped when this process starts another, or ends."""
_CRASHES = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)


def address_of(url: str, run: str) -> str:
    """Return the name of the socket of a run's agent."""
    return name_of("agent", VERSION, str(PROTOCOL), environment().node, url, run)


def reach(url: str, run: str, wait_s: float = START_S) -> Agent | None:
    """Return the running agent, or None if there is none. Raise ``StoreUnavailable`` if it does not prove itself
    within ``wait_s``."""
    try:
        with LocalDirectory() as directory:
            return _connect(directory, address_of(url, run), wait_s)
    except NotPrivate:  # then no agent of this user could listen either
        return None


def dismiss(url: str, run: str, wait_s: float) -> None:
    """End a run in which this process saved nothing: have the agent of an earlier trainer release everything.

    Waits until the agent has written what that trainer sealed, ``wait_s`` seconds at most.
    """
    try:
        agent = reach(url, run, wait_s)
    except (OSError, StoreUnavailable):  # no descriptor is left, or the agent does not answer: it ends by itself
        return
    if agent is not None:
        agent.bye(wait_s)
        agent.close()


def connect(
    url: str,
    run: str,
    *,
    nice: int = 10,
    linger_s: float = 300.0,
    deadline_s: float = START_S,
    seen: Callable[[int], None] = lambda pid: None,
) -> Agent:
    """Return the run's agent, and start it if necessary. Raise ``StoreUnavailable`` if there is none before the
    deadline.

    ``seen`` is called with the pid of the listening process before that process has proved itself: a stopped process
    never does.
    """
    ends = time.monotonic() + deadline_s
    full: list[str] = []
    while True:
        try:
            directory = LocalDirectory(without=full)
        except NotPrivate as error:
            hint = (
                "free space and inodes in the named directories, or remove them, or have the administrator remove them"
            )
            raise StoreUnavailable(
                f"starting the agent failed: no private directory for its socket: {error.strerror}", hint=hint
            ) from error
        with directory:
            agent = _find_or_start(directory, address_of(url, run), nice, linger_s, (deadline_s, ends), seen)
        if agent is not None:
            return agent
        full.append(directory.path)


def _find_or_start(
    directory: LocalDirectory,
    name: str,
    nice: int,
    linger_s: float,
    deadline: tuple[float, float],
    seen: Callable[[int], None],
) -> Agent | None:
    """Return the agent that listens in ``directory``, or None if none can listen there. ``deadline``: its seconds, and
    the time when they end."""
    (deadline_s, ends), failures = deadline, list[str]()
    started: subprocess.Popen[bytes] | None = None
    while True:
        agent = _connect(directory, name, max(1.0, ends - time.monotonic()), seen, failures)
        if agent is not None:
            return agent
        if started is None or started.poll() is not None:
            if started is not None and started.returncode == UNUSABLE:
                return None
            if started is not None and time.monotonic() > ends - deadline_s / 2:
                raise StoreUnavailable(
                    f"starting the agent failed: it ended at once (exit status {started.returncode})"
                )
            started = _start(name, nice, linger_s, directory.path)
        if started.poll() is None:
            _continue_or_end(started.pid, deadline_s)  # it may have been stopped before it began to listen
        if time.monotonic() > ends:
            why = f": {failures[-1]}" if failures else ""
            raise StoreUnavailable(
                f"starting the agent failed: it did not answer within {duration_text(deadline_s)}{why}",
                where=f"{directory.path}/{name}.sock",
            )
        time.sleep(0.01)


def _connect(
    directory: LocalDirectory,
    name: str,
    timeout_s: float,
    seen: Callable[[int], None] = lambda pid: None,
    failures: list[str] | None = None,
) -> Agent | None:
    """Return the listening agent, or None if there is none. Other reasons for None are appended to ``failures``."""
    try:
        secret = directory.secret()  # before connecting: a bad secret is not the agent's fault
    except OSError as error:
        hint = f"free space and inodes in {directory.path}, or remove the named file"
        raise StoreUnavailable(
            f"connecting to the agent failed: its secret cannot be used: {error.strerror or error}",
            where=directory.path,
            hint=hint,
        ) from error
    failures = [] if failures is None else failures
    try:
        connection = directory.connect(name, timeout_s)
    except (FileNotFoundError, ConnectionRefusedError):
        return None
    except OSError as error:
        failures.append(f"connecting failed ({error.strerror or error})")
        return None
    pid = 0
    try:
        pid, _ = peer_of(connection)
        seen(pid)
        timeout_s = min(timeout_s, PROOF_S)
        _continue_or_end(pid, timeout_s)
        prove_as_caller(connection, secret, name, timeout_s, lambda: _continue_or_end(pid, timeout_s))
        connection.settimeout(None)
        return Agent(connection, pid, f"{directory.path}/{name}{SUFFIX}")
    except TimeoutError as error:
        connection.close()
        raise StoreUnavailable(f"the agent (process {pid}) did not answer within {duration_text(timeout_s)}") from error
    except ProofFailed as error:
        connection.close()
        where = f"{directory.path}/{name}.sock"
        what = f"process {pid} is not this run's agent: {error.strerror or error}"
        raise StoreUnavailable(what, where=where, hint=f"end process {pid}") from error
    except OSError as error:  # the agent ended meanwhile, or has no descriptor or secret to prove itself with
        connection.close()
        failures.append(f"process {pid} ended the proof ({error.strerror or error})")
        return None


def _continue_or_end(pid: int, timeout_s: float) -> None:
    """Continue a listening agent that is stopped, as it would never answer; end it if it stays stopped. Return at once
    if it runs."""
    process = process_at(pid)
    if process is None or process.state not in STOPPED:
        return
    for action, wait_s in ((wake, CONTINUE_AFTER_S), (end, END_AFTER_S)):
        ends = time.monotonic() + min(wait_s, timeout_s / 4)
        while process.state in STOPPED:
            if time.monotonic() > ends:
                if action is wake:
                    wake(process, min(wait_s, timeout_s / 4))
                elif _MODULE in command_of(pid):  # an unproved process is ended only if it was started as an agent
                    end(process)
                break
            time.sleep(0.02)
        else:
            return


def _start(name: str, nice: int, linger_s: float, path: str) -> subprocess.Popen[bytes]:
    _unreaped[:] = [child for child in _unreaped if child.poll() is None]
    # A separate session, so that Ctrl-C at the terminal does not reach the agent.
    environment = child_environment(OMP_NUM_THREADS="1")
    command = child_command(_MODULE, name, str(nice), str(linger_s))
    words = os.memfd_create("relight-agent-words", os.MFD_CLOEXEC)
    command += [str(words), path]
    try:
        process = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            start_new_session=True, pass_fds=(words,), cwd="/",
        )  # fmt: skip
    except OSError:
        os.close(words)
        raise
    if not new_threads.start(
        threading.Thread(target=_reap, args=(process, words), name="relight-agent-reaper", daemon=True)
    ):
        os.close(words)
        _unreaped.append(process)
    return process


def _reap(process: subprocess.Popen[bytes], words: int) -> None:
    """Wait for the agent, so that it leaves no zombie. If it crashed, emit ``agent.crashed`` with the place of the
    crash."""
    status = process.wait()
    traceback = os.pread(words, _WORDS_BYTES, 0).decode(errors="replace")
    os.close(words)
    if status < 0 and -status in _CRASHES:
        place = next((line.strip() for line in traceback.splitlines() if line.startswith("  File ")), "place unknown")
        how = f"by {signal.Signals(-status).name} ({place})"
    elif status in (1, 2):
        how = f"with exit status {status}"
    else:
        return
    emit(
        "agent.crashed",
        f"the process that writes saves ended {how}; the next save has another",
        pid=process.pid,
        status=status,
    )
