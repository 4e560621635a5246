"""What ``relight run`` starts in place of the script: ``relight.supervise.worker [-m] SCRIPT [ARGS…]``.

Writes stacks down when it is asked to, and what an exception said; apart from that the script runs as if it had been started by itself.
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
from relight.heartbeat.writer import last_words
from relight.supervise import stacks

_PR_SET_PDEATHSIG = 1
_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"


def main() -> None:
    """Run it. What it raises is written down, printed, and ends the process as it would have."""
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
    except Exception as error:  # noqa: BLE001 (it is told, in full)
        if os.getpid() == trainer:  # a forked child's error is not the rank's
            for tell in last_words:
                tell(error)
            _write_down(error)
        error.__traceback__ = _from_the_script_on(error)
        sys.excepthook(type(error), error, error.__traceback__)
        raise SystemExit(1) from None


def _end_with(parent: int) -> None:
    """Be asked to end if the supervisor is gone: a job that nobody watches over, and that another may start again, is not to go on."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGTERM)


def _write_down(error: BaseException) -> None:
    """As torch's launcher expects it, unless the script has done so itself."""
    path = os.environ.get(_ERROR_FILE, "")
    if not path or Path(path).exists():
        return
    kind = type(error)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    said = f"{name}: {error}" if str(error) else f"{name}: "
    extra = {"py_callstack": "".join(traceback.format_exception(error)), "timestamp": str(int(time.time()))}
    try:
        with open(path, "x", encoding="utf-8") as file:
            json.dump({"message": {"message": said[:10_000], "extraInfo": extra}}, file)
    except OSError as unwritten:
        print(f"relight: the error could not be written down: {unwritten}", file=sys.stderr)


def _from_the_script_on(error: BaseException) -> TracebackType | None:
    """Where a traceback begins, if the script is all that there is."""
    trace = error.__traceback__
    while trace is not None and (trace.tb_frame.f_code.co_filename == __file__ or "runpy" in trace.tb_frame.f_code.co_filename):
        trace = trace.tb_next
    return trace or error.__traceback__


if __name__ == "__main__":
    main()
