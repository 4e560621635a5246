"""Functions without a Checkpointer: ``relight.save``, ``relight.load``, ``relight.open``."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

from relight.audit import recorded
from relight.audit.facts import ActionFacts
from relight.catalog import Run, list_runs, open_run
from relight.catalog.find import choose, choose_all, nothing_there, report
from relight.catalog.locate import locate
from relight.commit import Attempt, SaveInfo, SaveReport, SaveRequest
from relight.commit.pack_writer import WriteLimits
from relight.errors import CheckpointNotFound, ConfigError, CorruptCheckpoint, UnsafeContent, memory_refusals, shown
from relight.format import encode_tree
from relight.format.collector import collector_paused
from relight.format.root_keys import CLASSES
from relight.format.step_number import step_of, which_of
from relight.heartbeat import assert_past_standby
from relight.keys import StoreSecurity
from relight.log import Checkpoint, fold, newest_good, read_store
from relight.log.checkpoint_list import CheckpointList, known_checkpoints
from relight.observe import emit
from relight.observe.object_view import Facts, ObjectView
from relight.observe.progress_bar import progress_bar
from relight.policy import Keep
from relight.policy.argument_checks import check_bool
from relight.reader import VerifyFinding, open_checkpoint
from relight.reader import verify_checkpoint as _verify
from relight.reclaim import PrunePlan, PruneReport, execute, plan_prune
from relight.run_names import run_name
from relight.settings.file import take_environment
from relight.store import ByteStore, open_bytes
from relight.store.anchored import anchored_runs
from relight.store.urls import split_run

if TYPE_CHECKING:
    import torch

    from relight.restore.lazy_checkpoint import LazyCheckpoint
    from relight.restore.opened_state import OpenedState

T = TypeVar("T")


def save(
    url: str | os.PathLike[str],
    state: Mapping[str, object],
    *,
    step: int,
    metrics: Mapping[str, float] | None = None,
    encrypt: str | Sequence[str] | None = None,
) -> SaveReport:
    """Save ``state``, a dict of any components that a Checkpointer takes, as ``step`` of the run at ``url``. Return its
    report.

    The checkpoint is durable on return. Its parent is the run's newest checkpoint. This process takes over the run, so
    a Checkpointer that trains the run is fenced. ``encrypt``: place of the key of an encrypted store, as for a
    Checkpointer.
    """
    from relight.capture import capture, class_paths, environment
    from relight.checkpointer.metric_values import check_metrics, numbers_of

    step = step_of(step)
    check_metrics(metrics := metrics if metrics is not None else {})
    if not isinstance(state, Mapping) or not all(isinstance(name, str) for name in state):
        raise ConfigError(
            f"state must be a dict by name, not {shown(state)}",
            where="state",
            hint='relight.save(url, {"model": model}, step=…)',
        )
    assert_past_standby("relight.save")
    store_url, run = split_run(url)
    captured = capture(state, rng=False)
    attempt = Attempt.begin(_opened(store_url, encrypt), run, reason="relight.save")
    newest = newest_good(attempt.history())
    info = SaveInfo(
        step=step,
        metrics=numbers_of(metrics),
        environment=environment(),
        components=captured.kinds,
        exact=captured.notes,
        parents=[newest.id] if newest is not None else [],
        user=CLASSES.field(class_paths(state)),
    )
    with progress_bar(f"saving step {step}", captured.logical_bytes) as meter:
        pace = WriteLimits(progress=meter)
        return attempt.save(SaveRequest(info, tree=encode_tree(captured.tree), items=captured.items, pace=pace))


@overload
def load(
    url: str | os.PathLike[str],
    which: str | int = "latest",
    *,
    only: Sequence[str] | None = None,
    encrypt: str | Sequence[str] | None = None,
    mmap: bool = False,
    device: torch.device | str | int | None = None,
    lazy: Literal[False] = False,
) -> dict[str, Any]: ...


@overload
def load(
    url: str | os.PathLike[str],
    which: str | int = "latest",
    *,
    only: Sequence[str] | None = None,
    encrypt: str | Sequence[str] | None = None,
    mmap: Literal[False] = False,
    device: torch.device | str | int | None = None,
    lazy: Literal[True],
) -> LazyCheckpoint: ...


def load(
    url: str | os.PathLike[str],
    which: str | int = "latest",
    *,
    only: Sequence[str] | None = None,
    encrypt: str | Sequence[str] | None = None,
    mmap: bool = False,
    device: torch.device | str | int | None = None,
    lazy: bool = False,
) -> dict[str, Any] | LazyCheckpoint:
    """Return the state of a checkpoint as a plain tree: dicts, lists, values, tensors, arrays. Bytes are verified while
    they are read, and no stored code runs.

    ``which`` may also follow the run, as on the command line: ``relight.load("runs/demo@step=400")``.

    ``latest`` skips damaged checkpoints with a warning. ``only=["model/*"]`` reads only matching parts. A checkpoint of
    several ranks is returned as one state: every tensor whole, and rank 0's own state.

    ``device``: where the tensors are, by default the CPU. Tensors of generators and loaders, and arrays, stay on the CPU.

    ``lazy=True`` reads only metadata, and returns a ``LazyCheckpoint``: ``keys()``, ``get_tensor(name)`` and
    ``get_slice(name)[10:20]`` read single tensors, or the needed chunks of them. Damage shows when a tensor is read.

    ``mmap=True``: tensors are mappings of the checkpoint's files. Their pages are read when they are first touched, and
    **not verified** (``relight verify`` does that). Writing to such a tensor changes only this process's memory.
    Tensors that are coded, shared with an earlier save or sharded over ranks are read and verified as usual. The store
    must be a local directory without encryption.
    """
    from relight.restore.lazy_checkpoint import LazyCheckpoint
    from relight.restore.opened_state import checked_device

    which = which_of(which)
    check_bool(mmap, "load(mmap=…)")
    check_bool(lazy, "load(lazy=…)")
    on_device = checked_device(device)
    if mmap and (lazy or on_device.type != "cpu"):
        hint = "leave mmap= out: lazy=True reads and verifies single tensors, device= copies all of them"
        raise ConfigError("load(mmap=True) maps whole tensors on the CPU", where="load(…)", hint=hint)
    take_environment()  # it may set the place of the audit log
    url, which = _split_which(url, which, encrypt)
    options = {"mmap": mmap, "lazy": lazy, "device": str(on_device) if device is not None else ""}
    facts = ActionFacts(given={"url": url, "which": which, "only": only, **{k: v for k, v in options.items() if v}})

    def read(state: OpenedState) -> dict[str, Any] | LazyCheckpoint:
        if lazy:
            return LazyCheckpoint(state, on_device, only)
        with collector_paused():
            plan = state.plan(only=only, mmap=mmap, device=on_device)
        state.read(plan.sinks)
        result: dict[str, Any] = plan.result()
        return result

    with recorded("load", f"{url}@{which}", facts), memory_refusals(f"the state of {url}", str(which)):
        return _first_good(url, which, encrypt, read)


def _split_which(
    url: str | os.PathLike[str], which: str | int, encrypt: str | Sequence[str] | None
) -> tuple[str | os.PathLike[str], str | int]:
    """Return the run's URL and the checkpoint that the URL names after ``@``, else ``which``. A run's name may have an ``@``,
    too."""
    text = os.fspath(url)
    if "@" not in text:
        return url, which
    with contextlib.suppress(CheckpointNotFound, ConfigError):
        store_url, name = split_run(text)
        open_run(_opened(store_url, encrypt), name)
        return url, which
    named = locate(text).which
    if named is None or not text.endswith(f"@{named}"):
        return url, which
    if which != "latest":
        raise ConfigError(
            f"the URL names {named[:80]!r}, and which={which!r} another", where="which", hint="leave one out"
        )
    return text[: -len(named) - 1], named


def _first_good(
    url: str | os.PathLike[str],
    which: str | int,
    encrypt: str | Sequence[str] | None,
    read: Callable[[OpenedState], T],
) -> T:
    """Return what ``read`` returns for the checkpoint ``which``; for ``latest``, for the newest one that is intact."""
    from relight.restore.opened_state import OpenedState

    store_url, run_name = split_run(url)
    run = open_run(_opened(store_url, encrypt), run_name)
    view = run.require_whole_log()
    history = fold(view)
    tried = [report(each) for each in choose_all(history, which)]
    if not tried:
        raise nothing_there(view, run_name, store_url)
    failed: list[str] = []
    for checkpoint in tried:
        try:
            with collector_paused():
                state = OpenedState(
                    open_checkpoint(run.store, run.name, checkpoint, store_id=view.store_id, run_id=view.run_id)
                )
            return read(state)
        except (CorruptCheckpoint, UnsafeContent) as error:
            if which != "latest":
                raise
            failed.append(str(error).splitlines()[0])
            emit(
                "restore.skipped", f"checkpoint {checkpoint.id} is skipped: {error}", id=checkpoint.id, kind=error.kind
            )
    raise CorruptCheckpoint(
        f"none of the {len(failed)} checkpoints of run {run_name!r} can be read", where=store_url, details=failed
    )


def _opened(url: str | os.PathLike[str], encrypt: str | Sequence[str] | None) -> ByteStore:
    take_environment()
    return open_bytes(url, guard=StoreSecurity.from_settings(encrypt))


class Store(ObjectView):
    """A store, or one run of it, opened for reading and maintenance. ``relight.open(url)`` returns one."""

    _bytes: ByteStore
    _run: str | None

    def __init__(self, url: str | os.PathLike[str], *, encrypt: str | Sequence[str] | None = None) -> None:
        self._read: CheckpointList | None = None
        """What ``checkpoints`` returned last."""
        bytes_at = _opened(url, encrypt)
        try:
            read_store(bytes_at)
            self._bytes, self._run = bytes_at, None
        except CheckpointNotFound:
            if anchored_runs(bytes_at):  # the store was emptied: every access to its runs raises
                self._bytes, self._run = bytes_at, None
                return
            store_url, run = split_run(url)
            self._bytes, self._run = _opened(store_url, encrypt), run
            open_run(self._bytes, run)

    @property
    def runs(self) -> list[str]:
        """The names of the runs, or of the opened run."""
        return [run_name(name) for name in ([self._run] if self._run else list_runs(self._bytes))]

    def run(self, name: str | None = None) -> Run:
        """Return one run, for reading."""
        return open_run(self._bytes, self._name(name))

    def checkpoints(self, run: str | None = None) -> CheckpointList:
        """Return the committed checkpoints, oldest first. A notebook shows the list as a table."""
        self._read = CheckpointList(self.run(run).history().live)
        return self._read

    def latest(self, run: str | None = None) -> Checkpoint:
        """Return the newest committed checkpoint, without verifying it."""
        return choose(self.run(run).history(), "latest").checkpoint

    def verify(
        self, which: str | int | None = None, run: str | None = None
    ) -> Iterator[tuple[Checkpoint, list[VerifyFinding]]]:
        """Verify all checkpoints, or one. Yield each with its findings as soon as it is read; no findings: it is
        intact."""
        opened = self.run(run)
        view, history = opened.view(), opened.history()
        for checkpoint in history.live if which is None else [report(choose(history, which_of(which)))]:
            with progress_bar(f"verifying step {checkpoint.step}", checkpoint.body.stored_bytes) as meter:
                findings = _verify(self._bytes, view, checkpoint, progress=meter)
            yield checkpoint, findings

    def tag(self, name: str, which: str | int | None, run: str | None = None) -> None:
        """Point a tag at a checkpoint; ``which=None`` removes the tag."""
        opened = self.run(run)
        opened.tag(name, None if which is None else report(choose(opened.history(), which_of(which))).id)

    def branch(self, name: str, which: str | int = "latest", run: str | None = None, *, why: str = "") -> None:
        """Create the run ``name``, which continues from a checkpoint without copying its bytes. Idempotent."""
        from relight.versions.branching import branch
        from relight.versions.stages import who

        opened = self.run(run)
        branch(opened, report(choose(opened.history(), which_of(which))), name, by=who(), why=why)

    def promote(
        self, which: str | int = "latest", stage: str | None = None, run: str | None = None, *, why: str = ""
    ) -> str:
        """Point a stage at this checkpoint, by default the stage after its present one. Return the stage."""
        from relight.versions.stages import promote

        opened = self.run(run)
        return promote(opened, report(choose(opened.history(), which_of(which))), stage, why=why)

    def plan_prune(self, rules: Keep, run: str | None = None) -> PrunePlan:
        """Return what ``prune`` would do, with a reason for each checkpoint. Changes nothing."""
        return plan_prune(self._bytes, self._name(run), rules)

    def prune(self, rules: Keep, run: str | None = None) -> PruneReport:
        """Retire the checkpoints that no rule keeps, and delete their bytes."""
        return execute(self.plan_prune(rules, run), self._bytes)

    def _facts(self) -> Facts:
        known = known_checkpoints(self._read if self._run is not None else None)  # else of an unknown one of its runs
        return Facts(self._bytes.url, [("run", run_name(self._run or "")), *known])

    def _name(self, run: str | None) -> str:
        name = run or self._run
        if name is None:
            raise ConfigError(
                "this path is a store, and no run is named",
                hint=f"this store has {', '.join(self.runs[:8]) or 'none yet'}: pass run=",
            )
        return name


def open(url: str | os.PathLike[str], *, encrypt: str | Sequence[str] | None = None) -> Store:
    """Open the store, or the run, at ``url`` for reading and maintenance. ``encrypt``: place of the key of an encrypted
    store."""
    return Store(url, encrypt=encrypt)
