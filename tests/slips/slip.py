"""One slip: the script that a hurried user wrote, and the expected result. Scripts run in their own processes and new
directories."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field

STEPS = (2, 5, 8)
"""Steps of the checkpoints in ``runs/demo`` before a slip. The weight that belongs to step s of origin o is ``1000 * o + s + 1``."""


@dataclass(frozen=True)
class Slip:
    """A slip, its script, and the expected result."""

    name: str
    item: str
    """The item of issue 33 that it belongs to; ``-`` for one that was found by reading the pages."""
    slip: str
    """What the user did: a cell of the table."""
    does: str
    """What Relight does: a cell of the table."""
    do: str
    """What to do then: a cell of the table."""
    script: str
    old: str = ""
    """How the code before issue 33 failed, as observed."""
    refused: bool = False
    """Whether the script must end with an error of Relight's."""
    shows: tuple[str, ...] = ()
    """Regular expressions that must all match the output."""
    hides: tuple[str, ...] = ()
    """Regular expressions that must not match the output."""
    quote: str = ""
    """Regular expression of the line that the page quotes; for a refused slip the error is quoted by default."""
    takes: tuple[int, int] | str = (9, 1)
    """First step and origin that the next start gets; ``refused``: it gets an error; ``any``: it may get either of several."""
    removes: tuple[int, ...] = ()
    """Steps of earlier checkpoints that the user's own rule or own hand removes."""
    setup: str = "demo"
    """``demo``: the run is there, with its three checkpoints; ``none``: an empty directory."""
    run: str = "runs/demo"
    """Where the run is afterwards."""
    environment: dict[str, str] = field(default_factory=dict)
    code: int | None = None
    """The exit status, if it is neither 0 nor, when refused, 1."""
    slow: bool = False
    """Whether it takes many seconds, as it imports torch again: ``make slips`` runs it, CI does not."""


def plain(text: str, directory: str) -> str:
    """Return output without what differs between two runs: paths, ids, times, process numbers."""
    text = text.replace(os.path.realpath(directory), "…").replace(directory, "…")
    text = re.sub(r"\b\d{10}-[0-9a-z]{10}-e\d+", "…", text)
    text = re.sub(r"(?<=checkpoint )[0-9a-z]{10}\b|(?<=saved as )[0-9a-z]{10}\b|(?<=\()[0-9a-z]{10}(?=\))", "…", text)
    text = re.sub(r"\b(?=[a-z]*\d)[0-9a-z]{10}\b", "…", text)
    text = re.sub(r"\d+\.\d+(?= ?(s|ms|kB|MB|GB)\b)", "…", text)
    text = re.sub(r"\b(pid|process|kill) (\(\d+\)|\d+)|(?<=\()\d{3,}(?=\))|0x[0-9a-f]+|:\d+:[0-9a-f]{8}\b", "…", text)
    text = re.sub(r"\b\d+ (s|min|h) ago|\d{4}-\d\d-\d\d[ T][\d:]+Z?", "…", text)
    text = text.replace(os.uname().nodename, "…")
    return re.sub(r"…(/…)+", "…", text)


def error_in(output: str) -> str:
    """Return the last Relight error in a traceback: its message with its hint."""
    errors = list(re.finditer(r"^relight\.errors\.\w+: (.*(?:\n  (?:- |→ |… ).*)*)", output, re.MULTILINE))
    return errors[-1][1] if errors else ""


def matches(quoted: str, output: str) -> bool:
    """Whether the pieces of a quotation, parted by ``…``, stand in the output in that order."""
    pieces = [re.escape(piece) for piece in quoted.split("…")]
    return re.search("[^\n]*?".join(pieces), output) is not None
