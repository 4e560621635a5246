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
from relight.log.known_damage import REMOVED_TRIES, was_removed
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
from relight.settings.short_traceback import short_traceback
from relight.store import ByteStore, open_bytes
from relight.store.anchored import anchored_runs
from relight.store.durable import StaleHandle
from relight.store.urls import split_run

if TYPE_CHECKING:
    import torch

    from relight.restore.lazy_checkpoint import LazyCheckpoint
    from relight.restore.opened_state import OpenedState

T = TypeVar("T")


@short_traceback
def save(
    url: str | os.PathLike[str],
    state: Mapping[str, object],
    *,
    step: int,
    metrics: Mapping[str, float] | None = None,
    encrypt: str | Sequence[str] | None = None,
) -> SaveReport:
    """Save a state as one checkpoint of a run, without a training loop. Return its report, with ``id`` and
    ``stored_bytes``.

    The checkpoint is durable on return. Its parent is the run's newest checkpoint. This process takes over the run, so
    a Checkpointer that trains the run is fenced.

    Args:
        url: The store and the run, such as ``runs/demo``.
        state: The components by name: whatever a Checkpointer takes, and plain values.
        step: The number of the step after which this is the state.
        metrics: Metrics by name: numbers, or tensors of one element.
        encrypt: Where the key of an encrypted store is, as for a Checkpointer.
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
    dtype: torch.dtype | str | None = None,
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
    dtype: torch.dtype | str | None = None,
    lazy: Literal[True],
) -> LazyCheckpoint: ...


@short_traceback
def load(
    url: str | os.PathLike[str],
    which: str | int = "latest",
    *,
    only: Sequence[str] | None = None,
    encrypt: str | Sequence[str] | None = None,
    mmap: bool = False,
    device: torch.device | str | int | None = None,
    dtype: torch.dtype | str | None = None,
    lazy: bool = False,
) -> dict[str, Any] | LazyCheckpoint:
    """Return the state of a checkpoint as a plain tree: dicts, lists, values, tensors, arrays.

    Bytes are verified while they are read, and no stored code runs. A checkpoint of several ranks is returned as one
    state: every tensor whole, and rank 0's own state. An optimizer's part is in the form of torch's ``state_dict``,
    with names as the parameters' ids: ``optimizer.load_state_dict(state["optimizer"])``.

    Args:
        url: The store and the run. The checkpoint may follow it: ``relight.load("runs/demo@step=400")``.
        which: The checkpoint: ``latest``, ``best``, ``best:METRIC``, a tag, a step, an id or its first letters.
            ``latest`` skips damaged checkpoints with a warning.
        only: Patterns of what to read, such as ``["model/*"]``. None: everything.
        encrypt: Where the key of an encrypted store is, as for a Checkpointer.
        mmap: Tensors are mappings of the checkpoint's files. Their pages are read when they are first touched, and
            **not verified** (``relight verify`` does that). Writing to such a tensor changes only this process's
            memory. Tensors that are coded, shared with an earlier save or sharded over ranks are read and verified as
            usual. The store must be a local directory without encryption.
        device: Where the tensors are, by default the CPU. Tensors of generators and loaders, and arrays, stay on the
            CPU.
        dtype: The floating-point dtype of the tensors, such as ``"bfloat16"`` or ``torch.bfloat16``. Each tensor is
            cast while it is read; with ``lazy=True``, on access. None: the stored dtypes. Unchanged are integers,
            booleans, complex numbers, arrays, quantised tensors, the step counts of optimizers, and tensors of
            generators and loaders.
        lazy: Read only metadata, and return a ``LazyCheckpoint``: ``keys()``, ``get_tensor(name)`` and
            ``get_slice(name)[10:20]`` read single tensors, or the needed chunks of them. Damage shows when a tensor is
            read.
    """
    from relight.restore.lazy_checkpoint import LazyCheckpoint
    from relight.restore.opened_state import checked_device, checked_dtype

    which = which_of(which)
    check_bool(mmap, "load(mmap=…)")
    check_bool(lazy, "load(lazy=…)")
    on_device, in_dtype = checked_device(device), checked_dtype(dtype)
    if mmap and (lazy or on_device.type != "cpu" or in_dtype is not None):
        hint = "leave mmap= out: lazy=True reads and verifies single tensors, device= and dtype= copy all of them"
        raise ConfigError(
            "load(mmap=True) maps whole tensors on the CPU in their stored dtype", where="load(…)", hint=hint
        )
    take_environment()  # it may set the place of the audit log
    url, which = _split_which(url, which, encrypt)
    options = {"mmap": mmap, "lazy": lazy, "device": str(on_device) if device is not None else ""}
    options["dtype"] = str(in_dtype) if in_dtype is not None else ""
    facts = ActionFacts(given={"url": url, "which": which, "only": only, **{k: v for k, v in options.items() if v}})

    def read(state: OpenedState) -> dict[str, Any] | LazyCheckpoint:
        if lazy:
            return LazyCheckpoint(state, on_device, only, in_dtype)
        with collector_paused():
            plan = state.plan(only=only, mmap=mmap, device=on_device, dtype=in_dtype)
        state.read(plan.sinks)
        return state.optimizers_of(plan.result())

    with recorded("load", f"{url}@{which}", facts), memory_refusals(f"the state of {url}", str(which)):
        return _first_good(url, which, encrypt, read)


def _refuse_selector(url: str) -> None:
    """Raise ``ConfigError`` if ``url`` names a checkpoint: ``relight.open`` opens a store or a run."""
    try:
        which = locate(url).which
    except (CheckpointNotFound, ConfigError):
        return
    if which is not None and url.endswith(f"@{which}"):
        run = url.removesuffix(f"@{which}")
        hint = f'relight.load("{url}") returns its state; relight.open("{run}").verify("{which}") checks it'
        raise ConfigError(f"relight.open failed: {which!r} is a checkpoint of a run", where=url, hint=hint) from None


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
    """Return what ``read`` returns for the checkpoint ``which``; for ``latest``, for the newest one that is intact.

    If retention removes the checkpoint meanwhile, the log is read again, and what ``which`` means then is read.
    """
    from relight.restore.opened_state import OpenedState

    store_url, run_name = split_run(url)
    run = open_run(_opened(store_url, encrypt), run_name)
    failed: dict[str, str] = {}
    for left in reversed(range(REMOVED_TRIES)):
        view = run.require_whole_log()
        chosen = choose_all(fold(view), which)
        if not chosen:
            raise nothing_there(view, run_name, store_url)
        for checkpoint in [report(each) for each in chosen if each.checkpoint.id not in failed]:
            try:
                with collector_paused():
                    state = OpenedState(
                        open_checkpoint(run.store, run.name, checkpoint, store_id=view.store_id, run_id=view.run_id)
                    )
                return read(state)
            except (CorruptCheckpoint, UnsafeContent, StaleHandle) as error:
                if left and was_removed(run.store, run.name, checkpoint.id):
                    break  # the run has newer ones, or the name means another one now
                if which != "latest" or isinstance(error, StaleHandle):
                    raise
                failed[checkpoint.id] = str(error).splitlines()[0]
                emit(
                    "restore.skipped",
                    f"checkpoint {checkpoint.id} is skipped: {error}",
                    id=checkpoint.id,
                    kind=error.kind,
                )
        else:
            break
    raise CorruptCheckpoint(
        f"none of the {len(failed)} checkpoints of run {run_name!r} can be read",
        where=store_url,
        details=list(failed.values()),
    )


def _opened(url: str | os.PathLike[str], encrypt: str | Sequence[str] | None) -> ByteStore:
    take_environment()
    return open_bytes(url, guard=StoreSecurity.from_settings(encrypt))


class Store(ObjectView):
    """A store, or one run of it, opened for reading and maintenance. ``relight.open(url)`` returns one.

    Args:
        url: The store or the run.
        encrypt: Where the key of an encrypted store is.
    """

    _bytes: ByteStore
    _run: str | None

    @short_traceback
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
            try:
                open_run(self._bytes, run)
            except CheckpointNotFound:
                _refuse_selector(os.fspath(url))
                raise

    @property
    def runs(self) -> list[str]:
        """The names of the runs, or of the opened run."""
        return [run_name(name) for name in ([self._run] if self._run else list_runs(self._bytes))]

    @short_traceback
    def run(self, name: str | None = None) -> Run:
        """Return one run, for reading.

        Args:
            name: The run's name. None: the opened run.
        """
        return open_run(self._bytes, self._name(name))

    @short_traceback
    def checkpoints(self, run: str | None = None) -> CheckpointList:
        """Return the committed checkpoints, oldest first. A notebook shows the list as a table.

        Args:
            run: The run's name, if a store with several runs is open.
        """
        history = self.run(run).history()
        self._read = CheckpointList(history.tagged(checkpoint) for checkpoint in history.live)
        return self._read

    @short_traceback
    def latest(self, run: str | None = None) -> Checkpoint:
        """Return the newest committed checkpoint, without verifying it.

        Args:
            run: The run's name, if a store with several runs is open.
        """
        history = self.run(run).history()
        return history.tagged(choose(history, "latest").checkpoint)

    def verify(
        self, which: str | int | None = None, run: str | None = None
    ) -> Iterator[tuple[Checkpoint, list[VerifyFinding]]]:
        """Verify all checkpoints, or one. Yield each with its findings as soon as it is read; no findings: it is intact.

        Skips a checkpoint that retention removes meanwhile. Raise ``CheckpointNotFound`` if ``which`` names it.

        Args:
            which: The checkpoint, as for ``relight.load``. None: all.
            run: The run's name, if a store with several runs is open.
        """
        opened = self.run(run)
        view, history = opened.view(), opened.history()
        for checkpoint in history.live if which is None else [report(choose(history, which_of(which)))]:
            with progress_bar(f"verifying step {checkpoint.step}", checkpoint.body.stored_bytes) as meter:
                findings = _verify(self._bytes, view, checkpoint, progress=meter)
            if findings and was_removed(self._bytes, opened.name, checkpoint.id):
                if which is not None:
                    raise CheckpointNotFound(
                        f"checkpoint {checkpoint.id} was removed while it was verified", where=opened.name
                    )
                continue
            yield history.tagged(checkpoint), findings

    @short_traceback
    def tag(self, name: str, which: str | int | None, run: str | None = None) -> None:
        """Point a tag at a checkpoint.

        Args:
            name: The tag.
            which: The checkpoint, as for ``relight.load``. None removes the tag.
            run: The run's name, if a store with several runs is open.
        """
        opened = self.run(run)
        opened.tag(name, None if which is None else report(choose(opened.history(), which_of(which))).id)

    @short_traceback
    def branch(self, name: str, which: str | int = "latest", run: str | None = None, *, why: str = "") -> None:
        """Create a run that continues from a checkpoint without copying its bytes. Idempotent.

        Args:
            name: The new run's name.
            which: The checkpoint, as for ``relight.load``.
            run: The run's name, if a store with several runs is open.
            why: The reason, for the new run's log.
        """
        from relight.audit.audit_log import user
        from relight.versions.branching import branch

        opened = self.run(run)
        branch(opened, report(choose(opened.history(), which_of(which))), name, by=user(), why=why)

    @short_traceback
    def promote(
        self,
        which: str | int = "latest",
        stage: Literal["candidate", "staging", "production"] | None = None,
        run: str | None = None,
        *,
        why: str = "",
    ) -> str:
        """Point a stage at this checkpoint. Return the stage.

        Args:
            which: The checkpoint, as for ``relight.load``.
            stage: The stage. None: the one after the checkpoint's present stage.
            run: The run's name, if a store with several runs is open.
            why: The reason, for the run's log.
        """
        from relight.versions.stages import promote

        opened = self.run(run)
        return promote(opened, report(choose(opened.history(), which_of(which))), stage, why=why)

    @short_traceback
    def report(
        self, metrics: Mapping[str, float], which: str | int = "latest", run: str | None = None, *, name: str = ""
    ) -> bool:
        """Record metrics of a checkpoint after its commit, such as results of an evaluation. They count as the checkpoint's own.

        So ``best:METRIC``, retention, ``relight ls`` and the dashboard use them. Of two values of a metric, the later one counts.
        Return whether this call recorded them.

        Args:
            metrics: Numbers by name, such as ``{"accuracy": 0.9}``.
            which: The checkpoint, as for ``relight.load``.
            run: The run's name, if a store with several runs is open.
            name: The evaluation. A second result of the same name for a checkpoint is not recorded. Empty: each call records.
        """
        from relight.run_records.results import (
            EvaluationResult,
            check_evaluation_name,
            check_result_metrics,
            record_result,
        )

        checked = check_result_metrics(metrics)
        check_evaluation_name(name, "report(name=…)")
        opened = self.run(run)
        checkpoint = report(choose(opened.history(), which_of(which)))
        return record_result(opened.store, opened.name, EvaluationResult(checkpoint.id, name, checked))

    @short_traceback
    def plan_prune(self, rules: Keep, run: str | None = None) -> PrunePlan:
        """Return what ``prune`` would do, with a reason for each checkpoint. Changes nothing.

        Args:
            rules: What to keep: ``relight.keep(…)``.
            run: The run's name, if a store with several runs is open.
        """
        return plan_prune(self._bytes, self._name(run), rules)

    @short_traceback
    def prune(self, rules: Keep, run: str | None = None) -> PruneReport:
        """Retire the checkpoints that no rule keeps, and delete their bytes.

        Args:
            rules: What to keep: ``relight.keep(…)``.
            run: The run's name, if a store with several runs is open.
        """
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


@short_traceback
def open(url: str | os.PathLike[str], *, encrypt: str | Sequence[str] | None = None) -> Store:
    """Open a store, or one run of it, for reading and maintenance.

    Args:
        url: The store (``runs``) or the run (``runs/demo``).
        encrypt: Where the key of an encrypted store is, as for a Checkpointer.
    """
    return Store(url, encrypt=encrypt)
