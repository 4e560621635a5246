"""The process that ``relight run`` starts instead of the script: ``relight.supervise.worker [-m] SCRIPT [ARGS…]``.

It writes its stacks on a signal, and records an exception's message. Otherwise the script runs as if started directly.
"""

from __future__ import annotations

import ctypes
import json
import os
import runpy
import signal
import sys
import time
import traceback
from pathlib import Path
from types import TracebackType

from relight.comm.children import enter_script
from relight.heartbeat import record_supervisor
from relight.heartbeat.writer import last_words
from relight.supervise import stacks

_PR_SET_PDEATHSIG = 1
_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"


def main() -> None:
    """Run the script. An exception is recorded and printed, and ends the process with exit code 1."""
    stacks.offer()
    _end_with(os.getppid())
    arguments = sys.argv[1:]
    as_module = bool(arguments) and arguments[0] == "-m"
    arguments = arguments[as_module:]
    if not arguments:
        raise SystemExit("relight.supervise.worker is started by relight run")
    sys.argv, trainer = arguments, os.getpid()
    try:
        enter_script(arguments[0], as_module=as_module)
        if as_module:
            runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(arguments[0], run_name="__main__")
    except Exception as error:  # noqa: BLE001 (it is recorded and printed in full)
        if os.getpid() == trainer:  # a forked child's error is not the rank's
            for report in last_words:
                report(error)
            _write_down(error)
        error.__traceback__ = _from_the_script_on(error)
        sys.excepthook(type(error), error, error.__traceback__)
        raise SystemExit(1) from None


def _end_with(parent: int) -> None:
    """Record the supervisor, and have the kernel send SIGTERM to this process when the supervisor ends.

    An unsupervised job must not continue, because it may be started again elsewhere.
    """
    record_supervisor(parent)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGTERM)


def _write_down(error: BaseException) -> None:
    """Write the exception to the error file that torch's launcher reads, unless the script has done so itself."""
    path = os.environ.get(_ERROR_FILE, "")
    if not path or Path(path).exists():
        return
    kind = type(error)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    message = f"{name}: {error}" if str(error) else f"{name}: "
    extra = {"py_callstack": "".join(traceback.format_exception(error)), "timestamp": str(int(time.time()))}
    try:
        with open(path, "x", encoding="utf-8") as file:
            json.dump({"message": {"message": message[:10_000], "extraInfo": extra}}, file)
    except OSError as unwritten:
        print(f"relight: the error could not be recorded: {unwritten}", file=sys.stderr)


def _from_the_script_on(error: BaseException) -> TracebackType | None:
    """Return the traceback from the script's first frame on."""
    trace = error.__traceback__
    while trace is not None and (
        trace.tb_frame.f_code.co_filename == __file__ or "runpy" in trace.tb_frame.f_code.co_filename
    ):
        trace = trace.tb_next
    return trace or error.__traceback__


if __name__ == "__main__":
    main()
