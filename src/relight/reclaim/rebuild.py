"""Rebuild a lost log, or its newest records, from the checkpoint directories: root and parts contain all that a COMMIT contains.

What is lost for good: tags, holds, notes, roll-backs, and which checkpoints retention had retired. Nothing is deleted.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from relight.commit.save import commit_body
from relight.errors import CheckpointNotFound, ConfigError, CorruptCheckpoint, UnsafeContent
from relight.format import hexdigest
from relight.format.manifest import Root, decode_root
from relight.format.names import ROOT_FILE, CheckpointDir, parse_dir
from relight.format.records import Body, CommitBody, FenceBody, epoch_max
from relight.format.strict import ROOT_BYTES_MAX
from relight.format.topics import REBUILDING, REBUILT, RebuildingNote, RebuiltNote
from relight.log import Checkpoint, History, Log, LogView, fold, read_store
from relight.log.ancestors import REBUILT as REBUILT_FENCE
from relight.log.identity import checkpoint_dirs, peek_root
from relight.log.listing import has_records
from relight.log.truncated import is_being_rebuilt
from relight.reader.chunk_reader import check_pack
from relight.reader.opened import Opened, open_checkpoint
from relight.reader.verify import verify_checkpoint
from relight.store import ByteStore
from relight.store.anchored import anchor_of


@dataclass(frozen=True, slots=True)
class UncommittedDirectory:
    """Checkpoint directory that no record commits: its COMMIT if it is whole, otherwise the reason to leave it alone."""

    name: str
    step: int
    epoch: int
    commit: CommitBody | None = None
    created: str = ""
    why: str = ""


@dataclass(frozen=True, slots=True)
class RebuildPlan:
    """Records that a log lacks. ``missing``: whether there is no log at all. Printing it is the dry run."""

    run: str
    run_id: str
    missing: bool
    interrupted: bool
    found: tuple[UncommittedDirectory, ...]

    @property
    def commits(self) -> list[UncommittedDirectory]:
        """Directories to commit, in the order of their records."""
        whole = [directory for directory in self.found if directory.commit is not None]
        return sorted(whole, key=lambda directory: (directory.epoch, directory.created, directory.step))

    @property
    def left(self) -> list[UncommittedDirectory]:
        """Directories that are left alone, each with the reason."""
        return [directory for directory in self.found if directory.commit is None]

    @property
    def is_needed(self) -> bool:
        """Return whether anything has to be appended."""
        return self.missing or self.interrupted or bool(self.commits)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields for ``--json``."""
        return {
            "run": self.run, "missing": self.missing, "needed": self.is_needed,
            "commits": [{"id": row.commit.id, "step": row.step, "dir": row.name} for row in self.commits if row.commit is not None],
            "left": [{"dir": directory.name, "step": directory.step, "reason": directory.why} for directory in self.left],
        }  # fmt: skip


@dataclass(slots=True)
class RebuildReport:
    """Result of a rebuild: ids of the checkpoints that the log has now, and the number of its records."""

    committed: list[str] = field(default_factory=list)
    records: int = 0


def plan_rebuild(
    store: ByteStore, run: str, *, verify: bool = False, progress: Callable[[int], None] | None = None
) -> RebuildPlan:
    """Find the whole checkpoints that the run's log does not commit. Changes nothing.

    A directory counts as whole if its root and parts are well formed, of this store and run, and its packs have their sizes. With
    ``verify`` every byte is read as well. ``CheckpointNotFound`` if there is neither log nor checkpoint directory; ``CorruptCheckpoint``
    if the log has damaged records: ``relight verify --repair`` repairs those. Cost: reading the root and the parts of each such directory.
    """
    where = f"{store.url.rstrip('/')}/{run}"
    names = checkpoint_dirs(store, run)
    missing = not has_records(store, run)
    anchor = anchor_of(store)
    if missing and anchor is not None and anchor.read(run).pins:
        Log(store, run, whole=True).read()  # raises: the anchor has seen a log, and it is gone
    if missing and not names:
        raise CheckpointNotFound(
            "there is neither a log nor a checkpoint directory", where=where, hint="relight ls STORE shows its runs"
        )
    view = None if missing else Log(store, run, whole=True).read()
    if view is not None and view.faults:
        raise CorruptCheckpoint(
            f"the log is there, and {len(view.faults)} of its records are damaged: only a missing log is rebuilt",
            where=where,
            details=[f"{fault.file}: {fault.reason}" for fault in view.faults[:5]],
            hint="relight verify --repair repairs records from another tier; relight verify shows all damage",
        )
    history = fold(view) if view is not None else History()
    known = (
        {record.body.id for record in view.records if isinstance(record.body, CommitBody)}
        if view is not None
        else set()
    )
    unknown = [name for name in names if (parsed := parse_dir(name)) is not None and parsed.id not in known]
    peeked = {name: peek_root(store, f"{run}/{name}") for name in unknown}
    store_id, run_id = (
        (view.store_id, view.run_id)
        if view is not None
        else _ids(store, [root for root in peeked.values() if root], where)
    )
    ids = LogView(run, store_id, run_id, (), (), -1, "")
    examined = []
    for name in unknown:
        directory = parse_dir(name)
        assert directory is not None
        if peeked[name] is None:
            examined.append(
                UncommittedDirectory(
                    name, directory.step, directory.epoch, why="it has no root: its save was not finished"
                )
            )
        elif directory.epoch < history.epoch:
            why = f"attempt {history.epoch} has superseded its attempt {directory.epoch}: a COMMIT would be void"
            examined.append(UncommittedDirectory(name, directory.step, directory.epoch, why=why))
        else:
            examined.append(_examined(store, ids, name, directory, verify, progress))
    return RebuildPlan(run, run_id, missing, view is not None and is_being_rebuilt(view), tuple(examined))


def execute_rebuild(plan: RebuildPlan, store: ByteStore) -> RebuildReport:
    """Append the plan's records, marked as rebuilt by NOTEs before and after.

    After an interruption, plan and execute again to continue; until then no attempt can begin. Raise ``ConfigError`` if another process
    changes the log at the same time.
    """
    report = RebuildReport()
    if not plan.is_needed:
        return report
    log = Log(store, plan.run)
    view = log.begin_rebuilt(plan.run_id) if plan.missing else log.read()
    _append(log, lambda view: REBUILDING.note(RebuildingNote(checkpoints=len(plan.commits))))
    for directory in plan.commits:
        if directory.epoch > fold(view).epoch:
            _fence(log, directory.epoch)
        _append(log, partial(_checked, directory), directory.epoch)
        assert directory.commit is not None
        report.committed.append(directory.commit.id)
        view = log.read()
    _append(log, lambda view: REBUILT.note(RebuiltNote(checkpoints=len(report.committed))))
    report.records = log.read().head + 1
    return report


def _append(log: Log, body: Callable[[LogView], Body], epoch: int | None = None) -> None:
    log.append(lambda view: (body(view), fold(view).epoch if epoch is None else epoch))


def _checked(directory: UncommittedDirectory, view: LogView) -> CommitBody:
    assert directory.commit is not None
    if fold(view).epoch != directory.epoch:
        raise ConfigError(
            f"attempt {fold(view).epoch} has begun meanwhile",
            where=view.run,
            hint="stop the job that saves to this run",
        )
    return directory.commit


def _fence(log: Log, epoch: int) -> None:
    """Append the FENCE of ``epoch``. A record's number bounds its epoch, so NOTEs come first where the log is too short for it."""
    while epoch_max(log.read().head + 1) < epoch:
        _append(log, lambda view: REBUILDING.note(RebuildingNote(epoch=epoch)))
    _append(log, lambda view: FenceBody(attempt=secrets.token_hex(8), reason=REBUILT_FENCE), epoch)


def _ids(store: ByteStore, roots: list[dict[str, Any]], where: str) -> tuple[str, str]:
    """Return the ids of the store and run that most roots contain."""
    if not roots:
        raise CorruptCheckpoint(
            "no checkpoint directory has a root: there is nothing to rebuild the log from", where=where
        )
    (store_id, run_id), _ = Counter((root["store"], root["run"]) for root in roots).most_common(1)[0]
    try:
        named = read_store(store).id
    except CheckpointNotFound:
        return store_id, run_id
    if named != store_id:
        raise CorruptCheckpoint(
            f"these checkpoints belong to store {store_id}, and relight.json names store {named}",
            where=where,
            hint="copy relight.json back from where the run came from; if it is new and no other run is here, remove it",
        )
    return store_id, run_id


def _examined(
    store: ByteStore,
    ids: LogView,
    name: str,
    directory: CheckpointDir,
    verify: bool,
    progress: Callable[[int], None] | None,
) -> UncommittedDirectory:
    prefix = f"{ids.run}/{name}"
    where = f"{prefix}/{ROOT_FILE}"
    try:
        data = store.get(where, ROOT_BYTES_MAX)
        root: Root = decode_root(data, hexdigest(data), where)
        if (root.id, root.step, root.epoch) != (directory.id, directory.step, directory.epoch):
            raise UnsafeContent("the root belongs to another directory", where=where)
        body = commit_body(root, name, hexdigest(data), len(data))
        checkpoint = Checkpoint(0, root.created, root.epoch, body)
        opened: Opened = open_checkpoint(store, ids.run, checkpoint, store_id=ids.store_id, run_id=ids.run_id)
        for part in opened.parts:
            for index in range(len(part.packs)):
                check_pack(opened, part, index)
        findings = verify_checkpoint(store, ids, checkpoint, progress=progress) if verify else []
        if findings:
            raise CorruptCheckpoint(findings[0].detail, where=findings[0].file)
    except (CorruptCheckpoint, UnsafeContent, CheckpointNotFound) as error:
        return UncommittedDirectory(name, directory.step, directory.epoch, why=str(error).splitlines()[0])
    return UncommittedDirectory(name, directory.step, directory.epoch, body, root.created)
