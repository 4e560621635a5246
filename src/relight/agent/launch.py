"""Finding a run's agent on this node, and starting it where there is none.

The address is an abstract one: no file, so nothing is left behind; it belongs to the network namespace, and the kernel says who is at the
other end. One agent serves all processes of one user that write one run of one store.
"""

from __future__ import annotations

import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

from relight.agent.client import Agent
from relight.agent.messages import PROTOCOL
from relight.errors import StoreUnavailable
from relight.format import hexdigest
from relight.observe import emit
from relight.version import VERSION

START_S = 20.0
_WORDS_BYTES = 16 << 10
_CRASHES = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)


def address_of(url: str, run: str) -> str:
    """The abstract address for a run, with its leading zero byte."""
    name = hexdigest("\0".join((VERSION, str(PROTOCOL), str(os.getuid()), os.environ.get("RELIGHT_NODE", ""), url, run)).encode())[:40]
    return f"\0relight-{name}"


def reach(url: str, run: str) -> Agent | None:
    """The agent that is there already, None if there is none."""
    return _connect(address_of(url, run))


def dismiss(url: str, run: str, wait_s: float) -> None:
    """The run is over, and nothing was saved by this process: an agent that is still there for a trainer before it keeps nothing any more.
    Waits until it has written what that one sealed, ``wait_s`` at most."""
    try:
        agent = reach(url, run)
    except OSError:  # no descriptor is left for it: it ends by itself
        return
    if agent is not None:
        agent.bye(wait_s)
        agent.close()


def connect(url: str, run: str, *, nice: int = 10, linger_s: float = 300.0, deadline_s: float = START_S) -> Agent:
    """The run's agent, started if need be. ``StoreUnavailable`` if none can be had before the deadline."""
    address = address_of(url, run)
    ends = time.monotonic() + deadline_s
    started: subprocess.Popen[bytes] | None = None
    while True:
        agent = _connect(address)
        if agent is not None:
            return agent
        if started is None or started.poll() is not None:
            if started is not None and time.monotonic() > ends - deadline_s / 2:
                raise StoreUnavailable(f"the agent ends as soon as it is started (exit status {started.returncode})")
            started = _start(address, nice, linger_s)
        if time.monotonic() > ends:
            raise StoreUnavailable(f"no agent within {deadline_s:.0f} s")
        time.sleep(0.01)


def _connect(address: str) -> Agent | None:
    found = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        found.connect(address)
        pid, uid, _ = struct.unpack("3i", found.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    except OSError:
        found.close()
        return None
    if uid not in (os.getuid(), 0):  # somebody squats on the address
        found.close()
        return None
    return Agent(found, pid)


def _start(address: str, nice: int, linger_s: float) -> subprocess.Popen[bytes]:
    # Its own session, so that Ctrl-C at the terminal does not reach it; this very Relight, not one that lies in the working directory.
    home = str(Path(__file__).resolve().parents[2])
    rest = os.environ.get("PYTHONPATH")
    environment = {**os.environ, "PYTHONPATH": home + (os.pathsep + rest if rest else ""), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-P", "-m", "relight.agent.serve", address[1:], str(nice), str(linger_s)]
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
