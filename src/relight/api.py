"""Without a loop: ``relight.save``, ``relight.load``, ``relight.open``."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from relight.audit import recorded
from relight.audit.facts import ActionFacts
from relight.catalog import Run, VerifyFinding, check_pack, list_runs, open_checkpoint, open_run, read_tensors
from relight.catalog import verify_checkpoint as _verify
from relight.catalog.find import choose, choose_all, nothing_there, report
from relight.catalog.mapped import Mapped
from relight.catalog.merged_parts import check_pieces, whole_of
from relight.catalog.one_writer import apart
from relight.commit import Attempt, SaveReport, SaveRequest
from relight.errors import CheckpointNotFound, ConfigError, CorruptCheckpoint, UnsafeContent, shown
from relight.format import decode_tree, encode_tree
from relight.format.class_names import CLASSES
from relight.format.collector import collector_paused
from relight.format.step_number import step_of, which_of
from relight.heartbeat import assert_past_standby
from relight.keys import StoreSecurity
from relight.log import Checkpoint, fold, newest_good, read_store
from relight.observe import emit
from relight.policy import Keep
from relight.policy.units import check_bool
from relight.reclaim import PrunePlan, PruneReport, execute, plan_prune
from relight.run_names import run_name
from relight.settings.file import take_environment
from relight.store import ByteStore, open_bytes
from relight.store.anchored import anchored_runs
from relight.store.urls import split_run


def save(
    url: str | os.PathLike[str],
    state: Mapping[str, object],
    *,
    step: int,
    metrics: Mapping[str, float] | None = None,
    encrypt: str | Sequence[str] | None = None,
) -> SaveReport:
    """Save ``state``, a dict of anything a Checkpointer takes, as ``step`` of the run at ``url``. Durable when it returns.

    Takes charge of the run, as every saver does: one at a time. The new checkpoint continues the run's newest one.
    ``encrypt``: where the key of an encrypted store is, as for a Checkpointer.
    """
    from relight.capture import capture, class_paths, environment
    from relight.checkpointer.metric_values import check_metrics, numbers_of

    step = step_of(step)
    check_metrics(metrics := metrics if metrics is not None else {})
    if not isinstance(state, Mapping) or not all(isinstance(name, str) for name in state):
        raise ConfigError(f"state is a dict by name, not {shown(state)}", where="state", hint='relight.save(url, {"model": model}, step=…)')
    assert_past_standby("relight.save")
    store_url, run = split_run(url)
    captured = capture(state, rng=False)
    attempt = Attempt.begin(_opened(store_url, encrypt), run, reason="relight.save")
    newest = newest_good(attempt.history())
    return attempt.save(
        SaveRequest(
            step=step,
            tree=encode_tree(captured.tree),
            items=captured.items,
            metrics=numbers_of(metrics),
            environment=environment(),
            components=captured.kinds,
            exact=captured.notes,
            parents=[newest.id] if newest is not None else [],
            user={CLASSES: class_paths(state)},
        )
    )


def load(
    url: str | os.PathLike[str],
    which: str | int = "latest",
    *,
    only: Sequence[str] | None = None,
    encrypt: str | Sequence[str] | None = None,
    mmap: bool = False,
) -> dict[str, Any]:
    """The state of a checkpoint as a plain tree: dicts, lists, values, CPU tensors, arrays. Verified while it is read; runs nothing.

    ``latest`` passes over damaged ones, with a warning; ``only=["model/*"]`` reads just what matches. What several ranks saved comes as
    one: every tensor whole; of what each rank had of its own, rank 0's.

    ``mmap``: tensors are mappings of the checkpoint's files. Their pages are read when they are first touched, and **not checked**
    (``relight verify`` does that). Writing to such a tensor changes this process's memory alone. Tensors that are coded, shared with an
    earlier save or spread over ranks are read and checked as ever. It takes a store in a local directory that is not encrypted.
    """
    which = which_of(which)
    check_bool(mmap, "load(mmap=…)")
    take_environment()  # which may say where it is written down
    with recorded(
        "load", f"{url}@{which}", ActionFacts(given={"url": url, "which": which, "only": only, **({"mmap": True} if mmap else {})})
    ):
        return _load(url, which, only, encrypt, mmap)


def _load(
    url: str | os.PathLike[str], which: str | int, only: Sequence[str] | None, encrypt: str | Sequence[str] | None, mmap: bool
) -> dict[str, Any]:
    from relight.capture import build_tree, sinks_by_part

    store_url, run_name = split_run(url)
    run = open_run(_opened(store_url, encrypt), run_name)
    view = run.require_whole_log()
    history = fold(view)
    tried = [report(one) for one in choose_all(history, which)]
    if not tried:
        raise nothing_there(view, run_name, store_url)
    failed: list[str] = []
    for checkpoint in tried:
        try:
            with collector_paused():
                opened = open_checkpoint(run.store, run.name, checkpoint, store_id=view.store_id, run_id=view.run_id)
                part = opened.parts[0]
                if len(opened.parts) == 1:
                    check = partial(check_pack, opened, part)
                    tree, _ = apart(opened.root, decode_tree(part.tree, len(part.tensors), opened.prefix), opened.prefix)
                    mapped = Mapped(opened) if mmap else None
                    plan = build_tree(part.tensors, tree, only=only, where=opened.prefix, check=check, mapped=mapped)
                    by_part = [plan.sinks]
                else:
                    joined = whole_of(opened)
                    check = partial(check_pieces, opened, joined)
                    mapped = Mapped(opened, joined) if mmap else None
                    plan = build_tree(joined.tensors, joined.tree_of(0), only=only, where=opened.prefix, check=check, mapped=mapped)
                    by_part = sinks_by_part(plan.sinks, joined.tensors, joined.pieces, len(opened.parts))
            for one, sinks in zip(opened.parts, by_part, strict=True):
                read_tensors(opened, one, sinks)
        except (CorruptCheckpoint, UnsafeContent) as error:
            if which != "latest":
                raise
            failed.append(str(error).splitlines()[0])
            emit("restore.skipped", f"checkpoint {checkpoint.id} is passed over: {error}", id=checkpoint.id, kind=error.kind)
            continue
        result: dict[str, Any] = plan.result()
        return result
    raise CorruptCheckpoint(f"none of the {len(failed)} checkpoints of run {run_name!r} can be read", where=store_url, details=failed)


def _opened(url: str | os.PathLike[str], encrypt: str | Sequence[str] | None) -> ByteStore:
    take_environment()
    return open_bytes(url, guard=StoreSecurity.from_settings(encrypt))


class Store:
    """A store, or one run of it, opened for looking and for housekeeping. ``relight.open(url)`` makes it."""

    def __init__(self, url: str | os.PathLike[str], *, encrypt: str | Sequence[str] | None = None) -> None:
        bytes_at = _opened(url, encrypt)
        try:
            read_store(bytes_at)
            self._bytes, self._run = bytes_at, None
        except CheckpointNotFound:
            if anchored_runs(bytes_at):  # a store that was emptied: each of its runs is refused
                self._bytes, self._run = bytes_at, None
                return
            store_url, run = split_run(url)
            self._bytes, self._run = _opened(store_url, encrypt), run
            open_run(self._bytes, run)

    @property
    def runs(self) -> list[str]:
        """The names of the runs, or of the one that was opened."""
        return [run_name(one) for one in ([self._run] if self._run else list_runs(self._bytes))]

    def run(self, name: str | None = None) -> Run:
        """One run, for reading."""
        return open_run(self._bytes, self._name(name))

    def checkpoints(self, run: str | None = None) -> list[Checkpoint]:
        """Committed checkpoints, oldest first."""
        return self.run(run).history().live

    def latest(self, run: str | None = None) -> Checkpoint:
        """The newest committed checkpoint, unread."""
        return choose(self.run(run).history(), "latest").checkpoint

    def verify(self, which: str | int | None = None, run: str | None = None) -> Iterator[tuple[Checkpoint, list[VerifyFinding]]]:
        """Each checkpoint (or one) with what is wrong with it, while it is found out."""
        opened = self.run(run)
        view, history = opened.view(), opened.history()
        for one in history.live if which is None else [report(choose(history, which_of(which)))]:
            yield one, _verify(self._bytes, view, one)

    def tag(self, name: str, which: str | int | None, run: str | None = None) -> None:
        """Point a tag at a checkpoint; None takes it away."""
        opened = self.run(run)
        opened.tag(name, None if which is None else report(choose(opened.history(), which_of(which))).id)

    def branch(self, name: str, which: str | int = "latest", run: str | None = None, *, why: str = "") -> None:
        """Make the run ``name``, which goes on from a checkpoint, at no cost in bytes. Said again it changes nothing."""
        from relight.versions.branching import branch
        from relight.versions.stages import who

        opened = self.run(run)
        branch(opened, report(choose(opened.history(), which_of(which))), name, by=who(), why=why)

    def promote(self, which: str | int = "latest", stage: str | None = None, run: str | None = None, *, why: str = "") -> str:
        """Have a stage, by default the one behind where it is, be this checkpoint. Gives the stage."""
        from relight.versions.stages import promote

        opened = self.run(run)
        return promote(opened, report(choose(opened.history(), which_of(which))), stage, why=why)

    def plan_prune(self, rules: Keep, run: str | None = None) -> PrunePlan:
        """What ``prune`` would do, with a reason for each checkpoint."""
        return plan_prune(self._bytes, self._name(run), rules)

    def prune(self, rules: Keep, run: str | None = None) -> PruneReport:
        """Retire and delete what no rule keeps."""
        return execute(self.plan_prune(rules, run), self._bytes)

    def _name(self, run: str | None) -> str:
        name = run or self._run
        if name is None:
            raise ConfigError("which run?", hint=f"this store has {', '.join(self.runs[:8]) or 'none yet'}: pass run=")
        return name


def open(url: str | os.PathLike[str], *, encrypt: str | Sequence[str] | None = None) -> Store:
    """Open the store, or the run, at ``url`` for looking and housekeeping. ``encrypt``: where its key is, if it is encrypted."""
    return Store(url, encrypt=encrypt)
