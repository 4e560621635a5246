"""Fields of a command's audit record: its arguments, and the run, checkpoint and values that they mean before it runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from relight.audit.facts import ActionFacts
from relight.catalog.find import choose
from relight.catalog.locate import locate
from relight.catalog.run import Run, list_runs
from relight.errors import RelightError
from relight.log import Checkpoint, History, LogView, fold
from relight.run_records.holds import holds_of
from relight.versions.stages import earlier_in, next_stage

Given = Mapping[str, Any]
_PATHS = ("path", "source", "run", "old")
_ONE = ("tag", "tag --hold", "tag --stage", "branch", "note", "export")
"""Commands that act on one checkpoint."""


def facts_of(name: str, given: Given) -> ActionFacts:
    """Return the fields of command ``name`` with its arguments. If its run cannot be read, the arguments alone; the command reports why."""
    plain = ActionFacts(
        why=str(given.get("why") or given.get("text") or ""),
        given={key: value for key, value in given.items() if value is not None},
    )
    path = next((str(given[key]) for key in _PATHS if given.get(key)), "")
    if not path or name in ("import", "import --all", "keys", "keys rekey"):  # these name no run that is read
        return replace(plain, run=path)
    try:
        place = locate(path)
        runs = [place.run] if place.run is not None else list_runs(place.store)
        if len(runs) != 1:
            return replace(plain, run=path)
        view = Run(place.store, runs[0]).view()
        history = fold(view)
        which = given.get("which")
        which = which[0] if isinstance(which, tuple) and len(which) == 1 else which if isinstance(which, str) else None
        checkpoint = (
            choose(history, which or place.which or "latest").checkpoint
            if name in _ONE or which or place.which
            else None
        )
        values = _VALUES[name](given, history, view, checkpoint) if name in _VALUES else ("", "")
    except (RelightError, OSError):
        return replace(plain, run=path)
    return replace(
        plain,
        run=runs[0],
        checkpoint=checkpoint.id if checkpoint is not None else "",
        before=values[0],
        after=values[1],
    )


def _tag(given: Given, history: History, view: LogView, checkpoint: Checkpoint | None) -> tuple[str, str]:
    return history.tags.get(str(given.get("name")), ""), "" if given.get(
        "delete"
    ) or checkpoint is None else checkpoint.id


def _promote(given: Given, history: History, view: LogView, checkpoint: Checkpoint | None) -> tuple[str, str]:
    stage = (
        str(given["stage"])
        if given.get("stage")
        else next_stage(history, checkpoint.id)
        if checkpoint is not None
        else ""
    )
    if given.get("back"):
        after = earlier_in(view, stage)
    else:
        after = "" if given.get("emptied") or checkpoint is None else checkpoint.id
    return f"{stage}: {history.tags.get(stage, '')}", f"{stage}: {after}"


def _hold(given: Given, history: History, view: LogView, checkpoint: Checkpoint | None) -> tuple[str, str]:
    reason = holds_of(history).get(checkpoint.id) if checkpoint is not None else None
    return "" if reason is None else f"held: {reason}", "" if given.get("let_go") else f"held: {given.get('why') or ''}"


def _branch(given: Given, history: History, view: LogView, checkpoint: Checkpoint | None) -> tuple[str, str]:
    name = str(given.get("name") or "")
    return (name, "") if given.get("dropped") else ("", name)


def _live(given: Given, history: History, view: LogView, checkpoint: Checkpoint | None) -> tuple[str, str]:
    return ", ".join(live.id for live in history.live), ""


def _undelete(given: Given, history: History, view: LogView, checkpoint: Checkpoint | None) -> tuple[str, str]:
    return ", ".join(history.recallable), ""


_VALUES: dict[str, Callable[[Given, History, LogView, Checkpoint | None], tuple[str, str]]] = {
    "tag": _tag, "tag --stage": _promote, "tag --hold": _hold, "branch": _branch, "prune": _live, "undelete": _undelete,
}  # fmt: skip
