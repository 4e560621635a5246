"""Bugs of the protocol, planted one at a time. The schedules must find each. A bug is an edit of a function's source
at run time.

If a line has left the source, that is a failure, too: keep the table up to date.
"""

from __future__ import annotations
import __future__

import contextlib
import importlib
import inspect
import textwrap
from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import Any, NamedTuple


class Edit(NamedTuple):
    """In ``function`` (``module:qualified.name``) ``old`` becomes ``new``."""

    function: str
    old: str
    new: str


class Bug:
    """Edits, and the faults that must happen (``required``) or must not happen (``without``) for the bug to be found."""

    def __init__(
        self, *edits: Edit, required: frozenset[str] = frozenset(), without: frozenset[str] = frozenset()
    ) -> None:
        self.edits, self.required, self.without = edits, required, without


SAVE, TOGETHER, ATTEMPT = "relight.commit.save", "relight.commit.multi_rank", "relight.commit.attempt"
CHAIN, HISTORY, TRUNCATED = "relight.log.log", "relight.log.history", "relight.log.truncated"
PRUNE, SWEEP, RECALL = "relight.reclaim.prune", "relight.reclaim.sweep", "relight.reclaim.recall"
SHELF = "proofs.shelf"

_FENCED = "    if history.epoch > epoch:\n"
_VOIDED = (
    '        if not void_root(store, prefix, f"rank {seat.rank} could not save its part: {why}"):\n            return\n'
)

PLANTED: dict[str, Bug] = {
    # fencing
    "a save does not ask whether it is fenced": Bug(Edit(f"{SAVE}:refuse_if_fenced", _FENCED, "    if False:\n")),
    "a new attempt takes the epoch of the previous attempt": Bug(
        Edit(f"{ATTEMPT}:_next_epoch", "return history.epoch + 1 + later", "return max(history.epoch, 1)"),
    ),
    "neither the save nor readers ask whether a COMMIT is fenced": Bug(
        Edit(f"{SAVE}:refuse_if_fenced", _FENCED, "    if False:\n"),
        Edit(f"{HISTORY}:fold", "if record.epoch < history.epoch:", "if False:"),
    ),
    "retention does not ask whether it is fenced": Bug(
        Edit(f"{PRUNE}:execute", "if epoch is not None and history.epoch > epoch:", "if False:"),
    ),
    # the commit of several ranks
    "files are deleted before the checkpoint is void": Bug(
        Edit(f"{TOGETHER}:_give_up", _VOIDED, "        if False:\n            return\n"),
    ),
    "files are deleted though the checkpoint is complete": Bug(
        Edit(f"{TOGETHER}:_give_up", _VOIDED, _VOIDED.replace("            return", "            pass")),
    ),
    "void overwrites an existing root": Bug(
        Edit(
            f"{TOGETHER}:void_root",
            "    store.put_once(",
            '    store.delete(f"{prefix}/{ROOT_FILE}")\n    store.put_once(',
        ),
    ),
    "a root overwrites the void one": Bug(
        Edit(
            f"{TOGETHER}:_complete",
            "    return [], root if store.put_once(",
            '    store.delete(f"{prefix}/{ROOT_FILE}")\n    return [], root if store.put_once(',
        ),
    ),
    "a rank reports that it is ready before its part exists": Bug(
        Edit(
            f"{SAVE}:write_part",
            '    put(place.store, f"{prefix}/{part_file(rank)}", data)\n',
            '    if request.seat is None:\n        put(place.store, f"{prefix}/{part_file(rank)}", data)\n',
        ),
        Edit(
            f"{TOGETHER}:_proven",
            "    check_part_written(\n"
            '        place.store, prefix, provisional, ref, (part, data) if plan.proven and not shares else (None, b"")\n'
            "    )\n",
            "",
        ),
        Edit(
            f"{TOGETHER}:save_multi_rank",
            "        mark = ready\n",
            '        mark = ready\n        put(place.store, f"{prefix}/{part_file(seat.rank)}", data)\n',
        ),
    ),
    "COMMIT is written without checking whether it exists": Bug(
        Edit(f"{TOGETHER}:_append", "if checkpoint is not None:", "if False:")
    ),
    "COMMIT is written though a rank is missing": Bug(
        Edit(f"{TOGETHER}:_complete", "    if missing:\n", "    if len(missing) == seat.world:\n"),
        Edit(
            f"{TOGETHER}:_complete",
            "[ready_by_rank[rank] for rank in range(seat.world)]",
            "[ready_by_rank[rank] for rank in sorted(ready_by_rank)]",
        ),
    ),
    "the plans of ranks are not compared": Bug(
        Edit(f"{TOGETHER}:_complete", "if ready.plan != seat.plan[:PLAN_DIGITS]]", "if False]")
    ),
    "a save that may have been committed is removed": Bug(
        Edit(
            f"{SAVE}:save",
            "(isinstance(error, RelightError) and not isinstance(error, Uncertain))",
            "isinstance(error, RelightError)",
        ),
    ),
    "a rank that waited too long does not abort the save": Bug(
        Edit(
            f"{TOGETHER}:_await",
            "                if void_root(place.store, prefix, error.what):\n",
            "                if True:\n",
        ),
        Edit(
            f"{TOGETHER}:_give_up",
            _VOIDED,
            "        if isinstance(error, RankTimeout):\n            return\n" + _VOIDED,
        ),
    ),
    "a rank that may be ready deletes its files before it aborts the save": Bug(
        Edit(f"{TOGETHER}:_give_up", "    if not announced:\n", "    if True:\n")
    ),
    "a COMMIT is reported before it is durable": Bug(
        Edit(f"{TOGETHER}:_committed", "    place.log.sync(checkpoint.seq)\n", ""),
    ),
    "a root is taken for a COMMIT": Bug(
        Edit(
            f"{TOGETHER}:_await",
            "                committed = _committed(place, directory)\n",
            "                committed = _root(place, directory, prefix), 0\n",
        ),
    ),
    "a rank that commits for another does not make the root durable": Bug(
        Edit(f"{TOGETHER}:_await", "                    place.store.sync(prefix)\n", ""),
    ),
    "no other rank commits": Bug(
        Edit(f"{TOGETHER}:_await", "                if now >= min(grace, ends):", "                if False:"),
    ),
    "a rank waits without end": Bug(
        Edit(f"{TOGETHER}:_await", "            elif now >= ends:\n", "            elif False:\n")
    ),
    # the log
    "a missing log is started from scratch": Bug(
        Edit(f"{CHAIN}:Log._view_or_refuse", "            if view.head >= 0 or not names:\n", "            if True:\n")
    ),
    "lost records are not noticed": Bug(
        Edit(f"{TRUNCATED}:refuse_truncated", "        if not lost and", "        if True or not lost and")
    ),
    "a log that was unreadable for a moment counts as damaged": Bug(
        Edit(
            f"{TRUNCATED}:refuse_truncated", "    for pause_s in (*PAUSES_S, None):\n", "    for pause_s in (None,):\n"
        ),
    ),
    "a tool does not refuse a log that lacks records": Bug(
        Edit(f"{RECALL}:sweep_recallable", "        refuse_truncated(store, log)\n", "        log.read()\n"),
        Edit(f"{PRUNE}:execute", "        refuse_truncated(store, log)\n", "        log.read()\n"),
    ),
    "creating an existing name overwrites it": Bug(Edit(f"{SHELF}:create", "    if over:\n        return False\n", "")),
    "the writer of a record is not checked": Bug(
        Edit(
            f"{CHAIN}:Log._append",
            "        if not created and not self._is_ours(key, data):\n            return None\n",
            "",
        ),
    ),
    "a process takes its own record for another's": Bug(
        Edit(f"{CHAIN}:Log._append", "if not created and not self._is_ours(key, data):", "if not created:"),
        required=frozenset({"answered_twice"}),
        without=frozenset({"refused", "done"}),
    ),
    # durability
    "the names of packs and parts are not made durable": Bug(
        Edit(f"{SAVE}:_write", "    place.store.sync(prefix)\n", ""),
        Edit(f"{TOGETHER}:_proven", "    place.store.sync(prefix)\n", ""),
    ),
    # deletion
    "sweep deletes files that their attempt may still be writing": Bug(
        Edit(f"{SWEEP}:plan_sweep", "elif parsed.epoch < history.epoch:", "elif True:"),
    ),
    "sweep deletes live checkpoints": Bug(
        Edit(f"{SWEEP}:plan_sweep", "if parsed is None or name in live:", "if parsed is None:")
    ),
    "sweep leaves the files of dead attempts": Bug(
        Edit(f"{SWEEP}:plan_sweep", "elif parsed.epoch < history.epoch:", "elif False:"),
    ),
    "retention deletes before it retires": Bug(
        Edit(
            f"{PRUNE}:execute",
            "    if going and log.append(decide) is not None",
            "    early = fold(log.read())\n    early.retired = {one: early.by_id[one] for one in plan.going if one in early.by_id}\n"
            "    delete_checkpoints(store, plan.run, early, plan.going)\n    if going and log.append(decide) is not None",
        ),
    ),
    "sweep deletes recallable checkpoints": Bug(
        Edit(f"{SWEEP}:plan_sweep", "if name in retired and retired[name] in history.recallable:", "if False:"),
    ),
    "a recallable checkpoint is deleted before its SWEEP": Bug(
        Edit(
            f"{RECALL}:sweep_recallable",
            "    if log.append(decide) is None:\n",
            "    early = fold(log.read())\n    early.recallable = {}\n"
            "    delete_checkpoints(store, run, early, list(ids))\n    if log.append(decide) is None:\n",
        ),
    ),
    "a swept checkpoint is recalled": Bug(
        Edit(
            f"{HISTORY}:_apply",
            "if history.recallable.pop(recalled, None)\n",
            "if history.recallable.pop(recalled, None) or recalled in history.retired\n",
        ),
        Edit(f"{RECALL}:recall", "if checkpoint_id in history.recallable:", "if True:"),
    ),
    "retention retires a checkpoint that another needs": Bug(
        Edit(
            f"{PRUNE}:execute",
            "        together = not_needed(history, set(free) - abandoned)\n",
            "        together = set(free) - abandoned\n",
        ),
        Edit(
            "relight.policy.keep:decide_keep",
            "        users = [user for user in checkpoint.needed_by if reasons.get(user)]\n",
            "        users = []\n",
        ),
    ),
    "a checkpoint that another needs is swept": Bug(
        Edit(
            f"{RECALL}:sweep_recallable",
            "not_needed(history, chosen - unsure(view, history))",
            "set(ids)",
        ),
    ),
    "a checkpoint does not record which chunks it needs": Bug(
        Edit(f"{SAVE}:commit_body", "requires=root.requires", "requires=[]")
    ),
    "retention retires a tagged checkpoint": Bug(
        Edit(f"{PRUNE}:execute", " and not history.tags_of(checkpoint.id)", "")
    ),
}
"""Bugs by description."""


def planted(name: str | None) -> contextlib.AbstractContextManager[None]:
    """Plant one of ``PLANTED`` within the block."""
    return plant(PLANTED[name] if name else None)


@contextlib.contextmanager
def plant(bug: Bug | None) -> Iterator[None]:
    """Edit the functions within the block."""
    originals: list[tuple[FunctionType, CodeType]] = []
    try:
        edits: dict[str, list[Edit]] = {}
        for edit in bug.edits if bug is not None else ():
            edits.setdefault(edit.function, []).append(edit)
        for where, function_edits in edits.items():
            function = _function(where)
            originals.append((function, function.__code__))
            function.__code__ = _edited(function, function_edits)
        yield
    finally:
        for function, code in originals:
            function.__code__ = code


def _function(where: str) -> FunctionType:
    module, _, path = where.partition(":")
    owner: Any = importlib.import_module(module)
    for name in path.split("."):
        owner = owner.__dict__[name] if isinstance(owner, type) else getattr(owner, name)
    function = inspect.unwrap(getattr(owner, "__func__", owner))
    assert isinstance(function, FunctionType)
    return function


def _edited(function: FunctionType, edits: list[Edit]) -> CodeType:
    source = inspect.getsource(function)
    for edit in edits:
        if source.count(edit.old) != 1:
            raise LookupError(f"{edit.function} does not have exactly once: {edit.old!r}")
        source = source.replace(edit.old, edit.new)
    flags = __future__.annotations.compiler_flag
    code = compile(textwrap.dedent(source), function.__code__.co_filename, "exec", flags)
    (edited,) = [
        constant
        for constant in code.co_consts
        if isinstance(constant, CodeType) and constant.co_name == function.__name__
    ]
    if edited.co_freevars != function.__code__.co_freevars:
        raise LookupError(f"{function.__qualname__} is a closure: it cannot be edited")
    return edited
