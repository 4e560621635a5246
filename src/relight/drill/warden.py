"""Process that owns the drill's processes: ``python -m relight.drill.warden``. All its descendants end when it ends.

It reads commands as lines of JSON from standard input, and answers each with a line on standard output. When its input ends, because the
process that controls it has ended in any way, it kills what is left. Orphans become its own children, so that none escapes.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from relight.comm.children import child_command, child_environment
from relight.drill.processes import kill_below
from relight.errors import RelightError
from relight.settings.environment import leave_out_tiers

_PR_SET_CHILD_SUBREAPER = 36
_POLL_INTERVAL_S = 0.1
CALL_S = 300.0


class Warden:
    """The controlling side of the warden."""

    def __init__(self, prefix: Sequence[str] = ()) -> None:
        """``prefix``: a command that starts the warden, such as ``unshare``."""
        self._process = subprocess.Popen(
            [*prefix, *child_command("relight.drill.warden")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment(),
            start_new_session=True,
        )

    def __enter__(self) -> Warden:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def pid(self) -> int:
        """Its process."""
        return self._process.pid

    def start(self, command: Sequence[str], *, env: Mapping[str, str], cwd: str, log: Path) -> int:
        """Start a command, with its output appended to ``log``. Return the new process id."""
        return int(self._ask(start=list(command), env=dict(env), cwd=cwd, log=str(log))["pid"])

    def ended(self, pid: int) -> int | None:
        """Return the exit code of a started process, as ``Popen`` does; None while it runs."""
        code = self._ask(poll=pid)["code"]
        return None if code is None else int(code)

    def call(self, command: Sequence[str]) -> None:
        """Run a command to its end. Raise ``RelightError`` with its output if its exit code is not 0."""
        done = self._ask(call=list(command))
        if done["code"]:
            raise RelightError(f"{command[0]} ended with {done['code']}", details=str(done["output"]).splitlines()[-5:])

    def sweep(self) -> None:
        """End all started processes and their descendants."""
        self._ask(sweep=True)

    def close(self) -> None:
        """End the warden and all its descendants."""
        assert self._process.stdin is not None and self._process.stdout is not None and self._process.stderr is not None
        with self._process.stdin, self._process.stdout, self._process.stderr:
            self._process.stdin.close()
            self._process.wait()

    def _ask(self, **what: Any) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None and self._process.stderr is not None
        try:
            self._process.stdin.write(json.dumps(what).encode() + b"\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
        except OSError:
            answer = b""
        if not answer:
            lines = self._process.stderr.read().decode(errors="replace").strip().splitlines()[-5:]
            raise RelightError("the process that owns the drill's processes has ended", details=lines)
        reply: dict[str, Any] = json.loads(answer)
        if "error" in reply:
            raise RelightError(reply["error"])
        return reply


def environment() -> dict[str, str]:
    """Return the environment of the drill's processes: they write nothing elsewhere."""
    variables = child_environment()
    variables.pop("RELIGHT_ANCHOR", None)  # the anchor has the state of the real run's log
    leave_out_tiers(variables)
    return variables


class _Owner:
    """The warden's own side."""

    def __init__(self) -> None:
        self._started: dict[int, subprocess.Popen[bytes]] = {}
        self._codes: dict[int, int] = {}

    def do(self, command: dict[str, Any]) -> dict[str, Any]:
        if "start" in command:
            with open(command["log"], "ab") as log:
                process = subprocess.Popen(
                    command["start"],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=command["env"],
                    cwd=command["cwd"],
                    start_new_session=True,
                )
            self._started[process.pid] = process
            return {"pid": process.pid}
        if "call" in command:
            done = subprocess.run(
                command["call"],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                timeout=CALL_S,
                check=False,
            )
            return {"code": done.returncode, "output": done.stdout.decode(errors="replace")}
        self.reap()
        if "poll" in command:
            return {"code": self._codes.get(command["poll"])}
        kill_below(os.getpid())
        self._codes |= {pid: self._codes.get(pid, -signal.SIGKILL) for pid in self._started}
        return {}

    def reap(self) -> None:
        """Reap ended processes: started ones and orphans."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if not pid:
                return
            self._codes[pid] = os.waitstatus_to_exitcode(status)


def main() -> None:
    """Execute commands until standard input ends."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # it ends when its input does, after the controlling process
    owner, buffer = _Owner(), b""
    while True:
        if not select.select([0], [], [], _POLL_INTERVAL_S)[0]:
            owner.reap()
            continue
        data = os.read(0, 1 << 20)
        if not data:
            break
        buffer += data
        while b"\n" in buffer:
            line, _, buffer = buffer.partition(b"\n")
            try:
                answer = owner.do(json.loads(line))
            except (OSError, subprocess.SubprocessError) as error:
                answer = {"error": str(error)}
            os.write(1, json.dumps(answer).encode() + b"\n")
    kill_below(os.getpid())


if __name__ == "__main__":
    main()
