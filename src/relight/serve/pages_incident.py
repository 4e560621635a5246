"""Template values of an incident's page: the decision, the evidence in words, tracebacks, and the last output of each rank. Pure."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from typing import Any

from relight.serve.pages_words import number, when
from relight.serve.values import IncidentRow
from relight.supervise.facts import KINDS
from relight.units import UNKNOWN, count_text, duration_text

_TRACEBACK = "Traceback (most recent call last):"
ACTIONS = {
    "resume": "The job was restarted, and resumed from its newest good checkpoint.",
    "roll back": "The job was restarted from an earlier checkpoint, because the newer ones may be wrong.",
    "smaller batch": "The job was restarted with a smaller batch.",
    "exclude_node": "This machine left the job.",
    "end": "The job was ended on request.",
    "stop": "The job was stopped: another attempt would fail in the same way.",
}
"""What each action of the supervisor means."""


def incident(row: IncidentRow, now: float) -> dict[str, Any]:
    """Return the template values of one incident."""
    ranks = [_rank(worker) for worker in row.workers if isinstance(worker, Mapping)]
    first = next((rank for rank in ranks if rank["rank"] == row.rank), None) or next(
        (rank for rank in ranks if rank["traceback"] or rank["error"]), None
    )
    return {
        "kind": row.kind,
        "kind_words": KINDS.get(row.kind, ""),
        "why": row.why,
        "action": row.action,
        "action_words": ACTIONS.get(row.action, ""),
        "reason": row.reason,
        "facts": [
            ("When", when(row.at, now), ""),
            ("Step", number(row.step), "the last that all ranks had completed"),
            ("Rank", number(row.rank), row.host),
            ("Steps lost", number(row.steps_lost), ""),
            ("Downtime", duration_text(row.seconds), "from the failure to the next step"),
        ],
        "clues": [_clue(clue) for clue in row.clues],
        "first": first,
        "others": [rank for rank in ranks if rank is not first and rank["tail"]],
        "ranks": ranks,
        "words": row.words if first is None else "",
        "stacks": list(row.stacks.items()),
    }


def _clue(clue: Any) -> dict[str, str]:
    """Return a piece of evidence in words: what was seen, what it is a sign of, and how certain that is."""
    kind, what, weight = (*clue, "", "", "")[:3] if isinstance(clue, list | tuple) else ("", clue, "")
    sure = ""
    if isinstance(weight, int | float):
        sure = "certain" if weight >= 90 else "likely" if weight >= 50 else "possible"
    return {"what": str(what), "kind": str(kind), "means": KINDS.get(str(kind), ""), "sure": sure}


def _rank(worker: Mapping[str, Any]) -> dict[str, Any]:
    tail = worker.get("tail")
    lines = [str(line) for line in tail] if isinstance(tail, Sequence) and not isinstance(tail, str) else []
    step = worker.get("step")
    return {
        "rank": worker.get("rank"),
        "ended": ended(worker.get("exit"), bool(worker.get("stopped"))),
        "phase": str(worker.get("phase") or UNKNOWN),
        "step": step if isinstance(step, int) and step >= 0 else None,
        "error": str(worker.get("error") or ""),
        "traceback": "\n".join(traceback_of(lines)),
        "tail": "\n".join(lines),
        "lines": count_text(len(lines), "line"),
    }


def ended(code: object, stopped: bool) -> str:
    """Return in words how a process ended. ``code``: its exit code, negative for a signal; None if it was still running."""
    if stopped:
        return "ended by the supervisor, after another rank"
    if not isinstance(code, int):
        return "was still running"
    if code < 0:
        names = {number.value: number.name for number in signal.Signals}
        return f"killed by {names.get(-code, f'signal {-code}')}"
    return f"exit code {code}" if code else "ended normally"


def traceback_of(lines: Sequence[str]) -> list[str]:
    """Return the last traceback in a process's output, to the line of its exception; empty if there is none."""
    begins = [index for index, line in enumerate(lines) if line.endswith(_TRACEBACK)]
    if not begins:
        return []
    end = next((i for i in range(begins[-1] + 1, len(lines)) if not _is_inner(begins[-1], i, lines)), len(lines) - 1)
    return list(lines[begins[-1] : end + 1])


def _is_inner(begin: int, index: int, lines: Sequence[str]) -> bool:
    """Return whether a line is before the exception: it is indented more than the traceback's first line."""
    head = lines[begin]
    prefix = head[: len(head) - len(_TRACEBACK)]
    return lines[index].removeprefix(prefix).startswith(" ")
