"""Stores with checkpoints, written without torch, and functions that run the command line on them."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import relight.cli
from relight.catalog import open_run
from relight.commit import Attempt, SaveInfo, SaveRequest
from relight.errors import Fenced
from relight.format import Leaf, encode_tree
from relight.layout import Bytes, Item
from relight.save_reason import of_record
from relight.store import open_bytes

SOURCE = Path(relight.cli.__file__).parents[2]
STEPS = [99, 199, 249, 299]
"""The live checkpoints of ``demo``: two by attempt 1, two by attempt 2. The second is tagged ``good``."""
HOSTILE = "\x1b[31mred\x1b[0m\x07\r\u202e\x9b2J"
CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def floats(*values: float) -> bytes:
    """Return values as float32 bytes, as a pack stores them."""
    return struct.pack(f"<{len(values)}f", *values)


def request(step: int, **more: Any) -> SaveRequest:
    """A small model, its optimizer, random states, plain values."""
    weights = floats(*(step + n / 8 for n in range(32)))
    tensors = [
        ("model/layer.weight", "float32", (8, 4), "param", weights),
        ("model/layer.bias", "bfloat16", (4,), "param", bytes.fromhex("803f 0040 80ff c07f")),  # 1, 2, -inf, NaN
        ("optimizer/state/0/exp_avg", "float32", (8, 4), "optim", weights[::-1]),
        ("rng/torch", "uint8", (16,), "rng", bytes(range(16))),
        ("scalar", "int64", (), "value", struct.pack("<q", -(2**62) - 1)),
    ]
    items = [
        Item(name, dtype, shape, role, Bytes(data), trainable=role == "param")
        for name, dtype, shape, role, data in tensors
    ]
    tree = {
        "model": {"layer.weight": Leaf("tensor", (0,)), "layer.bias": Leaf("tensor", (1,))},
        "optimizer": {
            "state": {0: {"exp_avg": Leaf("tensor", (2,)), "step": 7}},
            "param_groups": [{"lr": 0.001, "betas": (0.9, 0.99)}],
        },
        "rng": {"torch": Leaf("tensor", (3,))},
        "scalar": Leaf("tensor", (4,)),
        "odd": {"inf": float("inf"), "nan": float("nan"), "bytes": b"\x00", "none": None},
    }
    more.setdefault("reason", "every 100 steps")
    more.setdefault("metrics", {"loss": 300.0 / (step + 1)})
    more.setdefault(
        "components", {"model": "module", "optimizer": "optimizer", "rng": "rng", "scalar": "value", "odd": "value"}
    )
    more.setdefault(
        "environment", {"relight": "0.1.0", "torch": "2.13.0", "host": "node-1", "threads": 8, "devices": []}
    )
    if isinstance(more["reason"], str):
        more["reason"] = of_record(more["reason"], "", "")
    info = SaveInfo(step, **{name: more.pop(name) for name in SaveInfo.__struct_fields__ if name in more})
    return SaveRequest(info, tree=encode_tree(tree), items=items, **more)


def fill(path: Path) -> None:
    """Write the store that most tests use."""
    store = open_bytes(path)
    first = Attempt.begin(store, "demo")
    first.save(request(STEPS[0]))
    first.save(request(STEPS[1]))
    second = Attempt.begin(store, "demo", reason="restart")
    second.save(request(STEPS[2], reason="asked", exact=["the loader has no state"], user={"note": "hello"}))
    second.save(request(STEPS[3]))
    run = open_run(store, "demo")
    run.tag("good", run.history().live[1].id)
    Attempt.begin(store, "baseline").save(request(99))


def fenced(path: Path) -> None:
    """Put a COMMIT of a superseded attempt into the log, as no writer of ours does."""
    store = open_bytes(path)
    old = Attempt.begin(store, "late")
    old.save(request(1))
    Attempt.begin(store, "late", reason="restart")
    try:
        old.save(request(2))
    except Fenced:
        old._place.log.append(lambda view: (view.records[2].body, 1))  # noqa: SLF001


def ids(path: Path, run: str = "demo") -> list[str]:
    """Ids of the live checkpoints, oldest first."""
    return [checkpoint.id for checkpoint in open_run(open_bytes(path), run).history().live]


def directory(path: Path, number: int, run: str = "demo") -> Path:
    """The directory of a live checkpoint."""
    return path / run / open_run(open_bytes(path), run).history().live[number].body.dir


def flip(path: Path, at: int = -1) -> None:
    """Damage one byte."""
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


@dataclass(frozen=True)
class Answer:
    """A command's output and exit code."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """Standard output, as strict JSON."""

        def refuse(name: str) -> None:
            raise AssertionError(f"{name} is not JSON")

        return json.loads(self.out, parse_constant=refuse)


def in_process(monkeypatch: Any, capfd: Any, arguments: list[str]) -> Answer:
    """``main`` in this process."""
    monkeypatch.setattr(sys, "argv", ["relight", *arguments])
    capfd.readouterr()
    try:
        relight.cli.main()
        code = 0
    except SystemExit as end:
        code = int(end.code or 0)
    output = capfd.readouterr()
    return Answer(code, output.out, output.err)


def environment(**more: str) -> dict[str, str]:
    """Return environment variables for child processes: this Relight, and no colours or widths of the caller."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in ("COLUMNS", "LINES", "NO_COLOR", "RELIGHT_DEBUG")
    }
    return {**kept, "PYTHONPATH": str(SOURCE), "TERM": "xterm-256color", **more}


def in_child(*arguments: object, **more: str) -> Answer:
    """A process of its own."""
    command = [sys.executable, "-m", "relight", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(**more), check=False, timeout=60)
    return Answer(done.returncode, done.stdout, done.stderr)


TAKE_TERMINAL = """
import fcntl, os, signal, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
signal.signal(signal.SIGINT, signal.SIG_DFL)  # background processes and their children ignore SIGINT
os.execv(sys.executable, [sys.executable, "-m", "relight", *sys.argv[1:]])
"""


def on_terminal(*arguments: object, typed: str = "", prompt: str = "", columns: int = 80) -> Answer:
    """Run a command in a terminal of ``columns`` columns. Type ``typed`` once ``prompt`` shows.

    ``out`` is the text that the terminal received, without colour codes. ``err`` is the same text with them.
    """
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    command = [sys.executable, "-c", TAKE_TERMINAL, *map(str, arguments)]
    output = b""
    deadline = time.monotonic() + 60
    with subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment(), start_new_session=True
    ) as child:
        os.close(theirs)
        while True:
            if time.monotonic() > deadline:
                child.kill()
                raise AssertionError(f"it hangs: {output[-200:]!r}")
            if not select.select([ours], [], [], 1.0)[0]:
                if typed and prompt.encode() in output:  # only now: an earlier interrupt would be lost
                    os.write(ours, typed.encode())
                continue
            try:
                got = os.read(ours, 65536)
            except OSError:
                break
            output += got
        os.close(ours)
    text = output.decode().replace("\r\n", "\n")
    return Answer(child.returncode, re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text), text)
