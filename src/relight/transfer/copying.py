"""Copying checkpoints: every byte verified on the way, committed at the other end under that run's own identity.

A copy is no attempt and fences nobody: its COMMIT is a tool's, with the highest epoch read from the destination's log.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from relight.catalog import Opened, Run, open_run
from relight.commit import delete_directory
from relight.commit.save import check_written, new_id
from relight.errors import CorruptCheckpoint, RelightError
from relight.format import Digest, Part, PartRef, Root, encode_part, encode_root, hexdigest
from relight.format.manifest import Pack
from relight.format.names import ROOT_FILE, CheckpointDir
from relight.format.records import Body, CommitBody
from relight.log import Checkpoint, History, Log, View, fold
from relight.store import ByteStore, put
from relight.store.base import Uncertain

BUFFER_BYTES = 8 << 20
Progress = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class CopyPlan:
    """What is to be copied where; ``there`` lists ids that the destination has already."""

    source: Run
    destination: ByteStore
    run: str
    checkpoints: list[Checkpoint]
    there: list[str]

    @property
    def bytes(self) -> int:
        """Bytes to be copied."""
        return sum(one.body.stored_bytes for one in self.checkpoints)


@dataclass(frozen=True, slots=True)
class CopyReport:
    """What was copied: ``(id, id at the destination)``."""

    copied: list[tuple[str, str]]
    there: list[str]


def plan_copy(source: Run, checkpoints: Sequence[Checkpoint], destination: ByteStore, run: str) -> CopyPlan:
    """Leave out what a former copy brought already, so that an interrupted copy is gone on with by saying it again."""
    try:
        known = fold(open_run(destination, run).view()).committed_ids
    except RelightError:
        known = set()
    missing = [one for one in checkpoints if one.id not in known]
    return CopyPlan(source, destination, run, missing, [one.id for one in checkpoints if one.id in known])


def execute_copy(plan: CopyPlan, *, progress: Progress | None = None) -> CopyReport:
    """Copy, oldest first. Stops at the first damaged one; what was committed before stays."""
    log = Log(plan.destination, plan.run)
    log.start()
    copied = []
    for checkpoint in plan.checkpoints:
        opened = plan.source.open(checkpoint)
        copied.append((checkpoint.id, _copy_one(opened, plan.destination, log, progress)))
    return CopyReport(copied, plan.there)


def _copy_one(opened: Opened, store: ByteStore, log: Log, progress: Progress | None) -> str:
    view = log.read()
    history = fold(view)
    free = opened.root.id not in history.committed_ids
    directory = CheckpointDir(opened.root.step, opened.root.id if free else new_id(), history.epoch)
    prefix = f"{log.run}/{directory}"
    if any(True for _ in store.list(prefix)):  # left by an interrupted copy of the same one: its name is never used again
        directory = directory._replace(id=new_id())
        prefix = f"{log.run}/{directory}"
    try:
        root = _write(opened, store, view, directory, prefix, progress)
        root_hash, root_bytes = check_written(store, prefix, root)
        body = _commit_body(opened, root, str(directory), root_hash, root_bytes, history)

        def decide(now: View) -> tuple[Body, int]:
            if fold(now).epoch != directory.epoch:
                raise CorruptCheckpoint(
                    "an attempt took charge of the destination while this was copied", where=log.run, hint="copy again", retryable=True
                )
            return body, directory.epoch

        log.append(decide)
    except Uncertain:
        raise
    except BaseException:
        with contextlib.suppress(RelightError):
            delete_directory(store, prefix)
        raise
    return directory.id


def _write(
    opened: Opened, store: ByteStore, view: View, directory: CheckpointDir, prefix: str, progress: Progress | None
) -> Root:
    refs = []
    for part in opened.parts:
        for pack in part.packs:
            _copy_pack(opened, pack, store, f"{prefix}/{pack.file}", progress)
        moved: Part = msgspec.structs.replace(
            part, store=view.store_id, run=view.run_id, id=directory.id, step=directory.step, epoch=directory.epoch
        )
        data = encode_part(moved)
        ref = opened.root.parts[part.rank]
        put(store, f"{prefix}/{ref.file}", data)
        refs.append(PartRef(rank=part.rank, file=ref.file, size=len(data), hash=hexdigest(data)))
    origin = {"store": opened.root.store, "run": opened.root.run, "id": opened.root.id}
    root: Root = msgspec.structs.replace(
        opened.root,
        store=view.store_id,
        run=view.run_id,
        id=directory.id,
        epoch=directory.epoch,
        parts=refs,
        user={**opened.root.user, "relight.copied_from": origin},
    )
    put(store, f"{prefix}/{ROOT_FILE}", encode_root(root))
    store.settle(prefix)
    return root


def _copy_pack(opened: Opened, pack: Pack, store: ByteStore, key: str, progress: Progress | None) -> None:
    """Chunk by chunk: read, check, write. Memory: two chunks."""
    reader = opened.store.open(f"{opened.prefix}/{pack.file}")
    try:
        writer = store.write(key, pack.size)
        try:
            align = writer.align
            buffer = memoryview(mmap.mmap(-1, BUFFER_BYTES))
            at = held = 0  # bytes written; bytes waiting in the buffer
            scratch = memoryview(bytearray(max(length for length, _ in pack.chunks)))
            position = 0
            for number, (length, value) in enumerate(pack.chunks):
                piece = scratch[:length]
                reader.read_into(position, piece)
                if Digest(piece).digest() != value:
                    raise CorruptCheckpoint(f"chunk {number} is not what was committed", where=f"{opened.prefix}/{pack.file}")
                position += length
                taken = 0
                while taken < length:
                    step = min(length - taken, BUFFER_BYTES - held)
                    buffer[held : held + step] = piece[taken : taken + step]
                    held, taken = held + step, taken + step
                    if held == BUFFER_BYTES:
                        writer.write_at(at, buffer)
                        at, held = at + held, 0
                if progress:
                    progress(length)
            if held:
                writer.write_at(at, buffer[: -(-held // align) * align])
            writer.finish()
        except BaseException:
            writer.abort()
            raise
    finally:
        reader.close()


def _commit_body(opened: Opened, root: Root, directory: str, root_hash: str, root_bytes: int, history: History) -> CommitBody:
    body: CommitBody = msgspec.structs.replace(
        opened.checkpoint.body,
        id=root.id,
        dir=directory,
        root=root_hash,
        root_bytes=root_bytes,
        parents=[one for one in root.parents if one in history.committed_ids],
    )
    return body
