"""Forks a process for each script that its standard input names: torch is imported once, so a slip takes a fraction of a second."""

from __future__ import annotations

import atexit
import contextlib
import gc
import json
import os
import runpy
import signal
import sys
import threading
import time
import traceback


def warm() -> None:
    """Import what scripts need, without starting threads."""
    import torch

    import relight
    import relight.checkpointer
    import relight.cli

    torch.set_num_threads(1)
    weight = torch.nn.Parameter(torch.zeros(1))
    torch.optim.SGD([weight], lr=1.0)
    torch.optim.AdamW([weight])
    assert relight.Checkpointer
    gc.collect()
    gc.freeze()  # a collection in a child would copy all of torch's pages


def main() -> None:
    """Serve until standard input ends."""
    warm()
    print("ready", flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        started = time.monotonic()
        pid = os.fork()
        if pid == 0:
            child(order)
        deadline = started + order["timeout"]
        status = None
        while status is None:
            found, value = os.waitpid(pid, os.WNOHANG)
            if found:
                status = os.waitstatus_to_exitcode(value)
            elif time.monotonic() > deadline:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                status = 124
            else:
                time.sleep(0.005)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)  # what the script started and left
        print(json.dumps({"code": status, "seconds": time.monotonic() - started}), flush=True)


def child(order: dict[str, object]) -> None:
    """Become the process that runs the script, and end as Python does, but without the second that freeing torch takes."""
    os.setsid()
    os.chdir(str(order["directory"]))
    for descriptor, name in ((0, os.devnull), (1, order["out"]), (2, order["err"])):
        opened = os.open(str(name), os.O_RDWR | os.O_CREAT | os.O_APPEND)
        os.dup2(opened, descriptor)
        os.close(opened)
    os.environ.update(dict(order["environment"]))  # type: ignore[call-overload]
    sys.argv = [str(order["script"])]
    sys.path.insert(0, str(order["parts"]))
    code = 0
    try:
        runpy.run_path(str(order["script"]), run_name="__main__")
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        if code and not isinstance(ended.code, int):
            print(ended.code, file=sys.stderr)
    except BaseException as error:
        traceback.print_exc()
        code = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    if code < 0:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


if __name__ == "__main__":
    main()
