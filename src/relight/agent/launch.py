"""Find a run's agent on this node, or start it.

It listens in this user's private directory, and agent and trainer prove to each other that they know the secret there before anything else
is sent (``world.local_sockets``, ``world.proof``). One agent serves all processes of one user that write one run of one store.
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
from relight.errors import StoreUnavailable
from relight.observe import emit
from relight.version import VERSION
from relight.world.children import child_command, child_environment
from relight.world.local_sockets import LocalDirectory, NotPrivate, name_of, peer_of
from relight.world.proof import ProofFailed, prove_as_caller

START_S = 20.0
UNUSABLE = 4
"""Exit status of an agent that cannot listen at all; 3: another agent listens already."""
_WORDS_BYTES = 16 << 10
_CRASHES = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)


def address_of(url: str, run: str) -> str:
    """Return the name of the socket of a run's agent."""
    return name_of("agent", VERSION, str(PROTOCOL), os.environ.get("RELIGHT_NODE", ""), url, run)


def reach(url: str, run: str, wait_s: float = START_S) -> Agent | None:
    """Return the agent that is there already, None if there is none. ``StoreUnavailable`` if it does not prove itself within ``wait_s``."""
    try:
        with LocalDirectory() as directory:
            return _connect(directory, address_of(url, run), wait_s)
    except NotPrivate:  # then no agent of this user could listen either
        return None


def dismiss(url: str, run: str, wait_s: float) -> None:
    """The run is over, and nothing was saved by this process: an agent that is still there for a trainer before it keeps nothing any more.
    Waits until it has written what that one sealed, ``wait_s`` at most."""
    try:
        agent = reach(url, run, wait_s)
    except (OSError, StoreUnavailable):  # no descriptor is left for it, or it does not answer: it ends by itself
        return
    if agent is not None:
        agent.bye(wait_s)
        agent.close()


def connect(
    url: str, run: str, *, nice: int = 10, linger_s: float = 300.0, deadline_s: float = START_S,
    seen: Callable[[int], None] = lambda pid: None,
) -> Agent:  # fmt: skip
    """Return the run's agent, started if need be. ``StoreUnavailable`` if there is none before the deadline.

    ``seen`` gets the process that listens before it has proved itself: one that has stopped never does.
    """
    name = address_of(url, run)
    ends = time.monotonic() + deadline_s
    started: subprocess.Popen[bytes] | None = None
    try:
        directory = LocalDirectory()
    except NotPrivate as error:
        hint = "remove the named directories, or have the administrator remove them"
        raise StoreUnavailable(f"there is no private directory for the agent's socket: {error.strerror}", hint=hint) from error
    with directory:
        while True:
            agent = _connect(directory, name, max(1.0, ends - time.monotonic()), seen)
            if agent is not None:
                return agent
            if started is None or started.poll() is not None:
                if started is not None and started.returncode == UNUSABLE:
                    raise StoreUnavailable(f"the agent cannot listen in {directory.path}", hint="free space and inodes there")
                if started is not None and time.monotonic() > ends - deadline_s / 2:
                    raise StoreUnavailable(f"the agent ends as soon as it is started (exit status {started.returncode})")
                started = _start(name, nice, linger_s)
            if time.monotonic() > ends:
                raise StoreUnavailable(f"no agent within {deadline_s:.0f} s")
            time.sleep(0.01)


def _connect(directory: LocalDirectory, name: str, timeout_s: float, seen: Callable[[int], None] = lambda pid: None) -> Agent | None:
    try:
        found = directory.connect(name, timeout_s)
    except OSError:
        return None
    pid = 0
    try:
        pid, _ = peer_of(found)
        seen(pid)
        prove_as_caller(found, directory.secret(), name, timeout_s)
        found.settimeout(None)
        return Agent(found, pid)
    except TimeoutError as error:
        found.close()
        raise StoreUnavailable(f"the agent (process {pid}) did not answer within {timeout_s:.0f} s") from error
    except (ProofFailed, NotPrivate) as error:
        found.close()
        where = f"{directory.path}/{name}.sock"
        what = f"process {pid} is not this run's agent: {error.strerror or error}"
        raise StoreUnavailable(what, where=where, hint=f"end process {pid}") from error
    except OSError:  # it ended meanwhile
        found.close()
        return None


def _start(name: str, nice: int, linger_s: float) -> subprocess.Popen[bytes]:
    # Its own session, so that Ctrl-C at the terminal does not reach it.
    environment = child_environment(OMP_NUM_THREADS="1")
    command = child_command("relight.agent.serve", name, str(nice), str(linger_s))
    words = os.memfd_create("relight-agent-words", os.MFD_CLOEXEC)
    command.append(str(words))
    try:
        process = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            start_new_session=True, pass_fds=(words,), cwd="/",
        )  # fmt: skip
    except OSError:
        os.close(words)
        raise
    threading.Thread(target=_reap, args=(process, words), name="relight-agent-reaper", daemon=True).start()
    return process


def _reap(process: subprocess.Popen[bytes], words: int) -> None:
    """It must not stay behind as a zombie; and if it ended of itself as none should, that is told, with where it stood."""
    status = process.wait()
    said = os.pread(words, _WORDS_BYTES, 0).decode(errors="replace")
    os.close(words)
    if status < 0 and -status in _CRASHES:
        stood = next((line.strip() for line in said.splitlines() if line.startswith("  File ")), "nobody knows where")
        how = f"by {signal.Signals(-status).name} ({stood})"
    elif status in (1, 2):
        how = f"with exit status {status}"
    else:
        return
    emit("agent.crashed", f"the process that writes saves ended {how}; the next save has another", pid=process.pid, status=status)
