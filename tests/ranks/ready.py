"""A process that has imported torch, and forks a rank of a job for whoever asks: importing takes longer than most jobs do.

``python ready.py FD``: a socket on which each request is a JSON object and a file descriptor for what the rank prints. The answer is its
process id; when it ends, the id and its exit status.
"""

from __future__ import annotations

import json
import os
import runpy
import select
import signal
import socket
import sys
import threading
from importlib import import_module
from typing import Any

TOLD = 1 << 20


IMPORTED = (
    "torch.distributed.checkpoint.state_dict", "torch.distributed.fsdp", "torch.distributed.optim", "torch.distributed.tensor.parallel",
    "relight.checkpointer", "relight.interop.dcp",
)  # fmt: skip
"""What ranks' programs begin with."""


def import_all() -> None:
    """Nothing of it may leave a thread: those do not survive a fork."""
    for name in IMPORTED:
        import_module(name)
    assert threading.active_count() == 1


def become(request: dict[str, Any], output: int) -> None:
    """In the child: the rank, as if it had been started by itself. Ends as any program does."""
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.argv = request["argv"]
    sys.path[0] = os.path.dirname(sys.argv[0])
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    runpy.run_path(sys.argv[0], run_name="__main__")


def serve(asked: socket.socket) -> None:
    """Until nobody asks any more; what runs is then killed."""
    children: dict[int, int] = {}
    while True:
        for ready in select.select([asked, *children], [], [])[0]:
            if ready is asked:
                message, descriptors, _, _ = socket.recv_fds(asked, TOLD, 1)
                if not message:
                    for pid in children.values():
                        os.kill(pid, signal.SIGKILL)
                    return
                request = json.loads(message)
                pid = os.fork()
                if not pid:
                    asked.close()
                    for other in children:
                        os.close(other)
                    become(request, descriptors[0])
                    return
                os.close(descriptors[0])
                children[os.pidfd_open(pid)] = pid
                asked.send(json.dumps([pid]).encode())
            else:
                pid = children.pop(ready)
                os.close(ready)
                asked.send(json.dumps([pid, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])]).encode())


if __name__ == "__main__":
    import_all()
    serve(socket.socket(fileno=int(sys.argv[1])))
