"""``python -m relight.drain STORE RUN NICE [RANK…]``: drain once. Events go to standard output, one JSON list a line.

The first line of standard input has the stores' keys and security settings. It ends when standard input ends, or on
SIGTERM; it aborts the present copy then. Exit status 0: every tier has what it must hold.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from typing import Any

from relight.comm import lower_priority
from relight.drain.outwards import drain
from relight.errors import RelightError
from relight.keys import StoreSecurity
from relight.keys.dumps import keep_out_of_core_dumps
from relight.store import open_bytes


def main() -> int:
    """Drain the run once. Return the exit status."""
    url, run, nice, *ranks = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:])
    stopped = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopped.set())
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    lower_priority(nice)

    def watch() -> None:
        while os.read(0, 1024):
            pass
        stopped.set()

    def print_event(name: str, text: str, fields: dict[str, Any]) -> None:
        print(json.dumps([name, text, fields]), flush=True)

    settings = sys.stdin.buffer.readline()
    threading.Thread(target=watch, daemon=True).start()
    try:
        guard = StoreSecurity.from_line(settings)
        if guard:
            keep_out_of_core_dumps(whole=True)
        store = open_bytes(url, guard=guard)
        report = drain(store, run, notify=print_event, stop=stopped.is_set, ranks=frozenset(ranks))
    except RelightError as error:
        print_event("drain.failed", str(error), {"kind": error.kind})
        return 1
    return 1 if report.errors or any(report.owed.values()) else 0


if __name__ == "__main__":
    try:
        status = main()
        sys.stdout.flush()
    except BrokenPipeError:
        status = 1
    os._exit(status)  # threads of a library must not hold the process
