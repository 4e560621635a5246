"""Copy checkpoints: verify every byte on the way, and commit at the destination under that run's own identity.

A copy is not an attempt and fences none: its COMMIT is a tool's, with the highest epoch in the destination's log. Packs are copied byte for
byte. Part and root name the destination's store, run and epoch, and the root records its origin. Chunks that the source stores with another
checkpoint, or as differences from one, are stored in full; chunks coded by themselves stay coded. If the source shares chunks with other
checkpoints, chunks that the destination's newest checkpoint has are not copied again: the copy's COMMIT requires their donors.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import msgspec

from relight.catalog import Run
from relight.commit import delete_directory
from relight.commit.chunk_index import Chunks
from relight.commit.save import check_written, new_id
from relight.errors import (
    CheckpointNotFound,
    ConfigError,
    CorruptCheckpoint,
    LeaseHeld,
    RelightError,
    SaveFailed,
    UnsafeContent,
)
from relight.format import Part, PartRef, Root, encode_part, encode_root, hexdigest
from relight.format.chunk_locations import OWN, PackChunks
from relight.format.manifest import Pack, donors_of, is_storing, storing, storing_order
from relight.format.names import DRAFT_FILE, ROOT_FILE, CheckpointDir, stored_file
from relight.format.records import Body, CommitBody
from relight.format.root_keys import COPIED_FROM
from relight.log import Checkpoint, History, Log, LogView, fold
from relight.log.known_damage import was_removed
from relight.log.related import CONTINUES, Change, change, whole_history
from relight.reader import Opened
from relight.reader.chunk_reader import each_chunk
from relight.reader.pack_reader import StoredReader, open_pack
from relight.run_records.best_by import record_best_by
from relight.store import PAGE, ByteStore, Reader, Writer, page_buffer, put
from relight.store.base import Uncertain, rewrites, write_whole
from relight.transfer.stored_there import packs_there, there_already

BUFFER_BYTES = 8 << 20
FORCE_HINT = "copy to a run of its own, or pass --force: then the copy becomes its latest checkpoint"
Progress = Callable[[int], None]
Check = Callable[[History], None]
"""Raises if a copy must not be committed after the destination's present history."""


class GivenUp(SaveFailed):
    """A checkpoint cannot be copied in this directory."""


@dataclass(frozen=True, slots=True)
class CopyPlan:
    """Checkpoints to copy, oldest first, and the destination. ``there``: ``(id, id at the destination)`` of those that it has."""

    source: Run
    destination: ByteStore
    run: str
    checkpoints: list[Checkpoint]
    there: list[tuple[str, str]]
    as_newest: bool = False
    """Whether the destination may resume from the copies although its own history does not lead to them."""
    changes: Change | None = None
    """What the copy changes at the destination; None if its history simply continues."""

    @property
    def bytes(self) -> int:
        """Approximate bytes to copy. Coded chunks and chunks stored elsewhere count with their tensors' bytes."""
        return sum(checkpoint.body.alone_bytes for checkpoint in self.checkpoints)


@dataclass(frozen=True, slots=True)
class CopyReport:
    """Checkpoints copied, and present before, as ``(id, id at the destination)``; and those skipped as damaged, with the error.

    ``removed``: ids of those that retention removed at the source before they were copied.
    """

    copied: list[tuple[str, str]]
    there: list[tuple[str, str]]
    damaged: list[tuple[str, RelightError]]
    removed: list[str] = field(default_factory=list)


def plan_copy(
    source: Run,
    checkpoints: Sequence[Checkpoint],
    destination: ByteStore,
    run: str,
    *,
    as_newest: bool = False,
    again: bool = True,
) -> CopyPlan:
    """Plan a copy without the checkpoints that the destination has, so that repeating an interrupted copy continues it.

    ``again``: also copy what the destination had and has pruned. A run resumes from its last commit. So raise ``ConfigError`` if the
    destination's newest checkpoint is not one that the source has or had before the copied ones, unless ``as_newest``. Ids decide, not
    steps.
    """
    target = Run(destination, run)
    try:
        history = target.history()
    except CheckpointNotFound:
        history = History()
    own = fold(source.require_whole_log())
    missing, present = _split(checkpoints, source, target, history, again)
    newest = max((checkpoint.seq for checkpoint in checkpoints if checkpoint.id in dict(present)), default=-1)
    changes = change(own, missing[-1], history) if missing else None
    in_doubt = any(checkpoint.seq < newest for checkpoint in missing) or (
        changes is not None and changes.relation != CONTINUES
    )
    if in_doubt and (source.view().summary is not None or (history.live and target.view().summary is not None)):
        # the logs' summaries may lack the deciding records: read every record before copying again or refusing
        own, history = whole_history(source.store, source.name), whole_history(destination, run)
        missing, present = _split(checkpoints, source, target, history, again)
        changes = change(own, missing[-1], history) if missing else None
    if changes is not None and changes.relation == CONTINUES:
        changes = None
    if changes is not None and not as_newest:
        raise ConfigError(f"the destination's run {run!r} {changes.why}", where=destination.url, hint=FORCE_HINT)
    return CopyPlan(source, destination, run, missing, present, as_newest, changes)


def _split(
    checkpoints: Sequence[Checkpoint], source: Run, target: Run, history: History, again: bool
) -> tuple[list[Checkpoint], list[tuple[str, str]]]:
    """Return, oldest first, the checkpoints that the destination lacks, and of the others ``(id, id at the destination)``."""
    missing: list[Checkpoint] = []
    present: list[tuple[str, str]] = []
    for checkpoint in sorted(checkpoints, key=lambda checkpoint: checkpoint.seq):
        if not again and checkpoint.id in history.retired:
            continue
        copy_id = _copy_of(checkpoint, source, target, history)
        if copy_id is None:
            missing.append(checkpoint)
        else:
            present.append((checkpoint.id, copy_id))
    return missing, present


def execute_with(plan: CopyPlan, copy: Callable[[Opened, Log, Check | None], str]) -> CopyReport:
    """Execute a plan. ``copy`` copies one checkpoint and returns its id at the destination."""
    report = CopyReport([], plan.there, [])
    if not plan.checkpoints:
        return report
    log, source = Log(plan.destination, plan.run), plan.source.history()
    log.start()
    for checkpoint in plan.checkpoints:
        checks = None if plan.as_newest else partial(_check_continues, plan, source)
        try:
            report.copied.append((checkpoint.id, copy(plan.source.open(checkpoint), log, checks)))
        except (CorruptCheckpoint, UnsafeContent) as error:
            if was_removed(plan.source.store, plan.source.name, checkpoint.id):
                report.removed.append(checkpoint.id)
            else:
                report.damaged.append((checkpoint.id, error))
    record_best_by(log, plan.source.history().best_by, over=False)
    return report


def _check_continues(plan: CopyPlan, source: History, now: History) -> None:
    """Raise ``LeaseHeld`` if another process has committed there since the plan: the run would resume from the copy instead."""
    relation = change(source, plan.checkpoints[-1], now)
    if relation is not None and relation.relation != CONTINUES:
        raise LeaseHeld(
            f"the destination's run {plan.run!r} changed during the copy: it {relation.why}",
            where=plan.destination.url,
            hint=FORCE_HINT,
        )


def _copy_of(one: Checkpoint, source: Run, target: Run, history: History) -> str | None:
    """Return the id of a copy of ``one`` at the destination: the same id, or another whose root records ``one`` as its origin."""
    same = history.find(one.id)
    if same and (same.step, same.body.logical_bytes) == (one.step, one.body.logical_bytes):
        return same.id
    view = source.view()
    origin = _origin(view, one.id)
    for other in history.live:
        if other.step == one.step:
            with contextlib.suppress(CorruptCheckpoint, UnsafeContent):
                copied_from = COPIED_FROM.read(target.open(other).root.user)
                if copied_from == origin or (
                    one.body.home and copied_from is not None and {**copied_from, "run": view.run_id} == origin
                ):
                    return other.id
    return None


def _origin(view: LogView, checkpoint_id: str) -> dict[str, Any]:
    return {"store": view.store_id, "run": view.run_id, "id": checkpoint_id}


class CopyDraft(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a copy is stored, as ``draft.json``. Its exclusive creation claims the copy's directory, so it stays as long as that.

    With the original and the directory's name it determines every byte of the copy.
    """

    origin: str = ""
    """The original's id. Empty: one process makes this copy, and no other may take part."""
    donor: str = ""
    """Id of the checkpoint at the destination that has some of its chunks already; empty for none."""
    coded: bool = False
    """Whether coded chunks stay coded."""
    parents: list[str] = []


def copy_one(
    opened: Opened,
    store: ByteStore,
    log: Log,
    progress: Progress | None,
    *,
    checks: Check | None = None,
) -> str:
    """Copy a checkpoint and commit it at the destination, in its present epoch. Return its id there.

    ``progress``: called with bytes of the checkpoint. ``checks``: raises if the copy must not be committed after the destination's present
    history. The process that created the draft owns the directory, and only it writes or deletes there.
    """
    view = log.read()
    history = fold(view)
    free = opened.root.id not in history.committed_ids
    directory = CheckpointDir(opened.root.step, opened.root.id if free else new_id(), history.epoch)
    donor, known = there_already(Run(store, log.run), history) if opened.checkpoint.requires else ("", {})
    draft = CopyDraft("", donor, stays_coded(opened), parents_there(opened, history))
    while not _claim(store, f"{log.run}/{directory}", draft):
        directory = directory._replace(id=new_id())
    writer = CopyWriter(opened, store, view, directory, draft, known)
    committing = False
    try:
        for number in range(len(opened.parts)):
            writer.write_part(number, progress)
        root = writer.root()
        put(store, f"{writer.prefix}/{ROOT_FILE}", encode_root(root))
        store.sync(writer.prefix)
        root_hash, root_bytes = check_written(store, writer.prefix, root)
        body = copied_body(opened, root, str(directory), root_hash, root_bytes)

        def decide(now: LogView) -> tuple[Body, int]:
            if checks is not None:
                checks(fold(now))
            if not set(root.requires) <= fold(now).by_id.keys():
                raise LeaseHeld(
                    "a checkpoint that has some of its chunks was retired meanwhile",
                    where=log.run,
                    hint="repeat the command",
                )
            if fold(now).epoch != directory.epoch:
                raise LeaseHeld(
                    "an attempt took charge of the destination while this was copied",
                    where=log.run,
                    hint="repeat the command",
                )
            return body, directory.epoch

        committing = True
        log.append(decide)
    except BaseException as error:
        # As in commit: an interrupt may come just after the commit. Then nothing of the copy may be deleted.
        if not committing or (isinstance(error, RelightError) and not isinstance(error, Uncertain)):
            with contextlib.suppress(RelightError):
                delete_directory(store, writer.prefix)
        if isinstance(error, GivenUp):  # the next draft describes the original in its present form
            return copy_one(opened, store, log, progress, checks=checks)
        raise
    return directory.id


def _claim(store: ByteStore, prefix: str, draft: CopyDraft) -> bool:
    """Claim a directory. Return False if it exists: another copy has it, or an interrupted one had. No name is used twice."""
    if any(True for _ in store.list(prefix)):
        return False
    try:
        return store.put_once(f"{prefix}/{DRAFT_FILE}", msgspec.json.encode(draft))
    except RelightError:
        with contextlib.suppress(RelightError):
            store.delete_dir(prefix)  # deletes it only if it is empty
        raise


def stays_coded(opened: Opened) -> bool:
    """Return whether a copy keeps coded chunks. A repaired pack's coded bytes may be damaged."""
    stored = {pack.file for part in opened.parts for pack in part.packs if pack.stored is not None}
    return bool(stored) and stored.isdisjoint(entry.name for entry in opened.store.list(opened.prefix))


def parents_there(opened: Opened, history: History) -> list[str]:
    """Return the checkpoint's parents that the destination has or had."""
    return [parent for parent in opened.root.parents if parent in history.committed_ids]


class _Written(NamedTuple):
    """What the root states of a part: its reference, its bytes and those in own files, its donors, and features of its packs."""

    ref: PartRef
    size: int
    new: int
    donors: frozenset[str]
    stored: frozenset[str]


class CopyWriter:
    """Writes the files of a copy in its directory. All bytes follow from the original, the directory and the draft.

    ``known``: the chunks of the draft's donor. ``sent``: called with bytes written.
    """

    def __init__(
        self,
        opened: Opened,
        store: ByteStore,
        view: LogView,
        directory: CheckpointDir,
        draft: CopyDraft,
        known: Chunks,
        sent: Progress | None = None,
    ) -> None:
        self.directory, self.prefix, self.draft = directory, f"{view.run}/{directory}", draft
        self._opened, self._store, self._view, self._known, self._tell_sent = opened, store, view, known, sent
        self._made: dict[int, _Written] = {}

    def write_part(self, number: int, progress: Progress | None, *, again: bool = False) -> None:
        """Write a part and its packs; their names need ``sync``. ``again``: another process may have written some of them."""
        for index in range(len(self._opened.parts[number].packs)):
            self.write_pack(number, index, progress, again=again)
        self.write_part_file(number, again=again)

    def write_pack(self, number: int, index: int, progress: Progress | None, *, again: bool = False) -> None:
        """Read, verify and write pack number ``index`` of a part."""
        (after,) = packs_there([pack := self._opened.parts[number].packs[index]], self._known, coded=self.draft.coded)
        self._copy_pack(pack, after, progress, again)

    def write_range(self, number: int, index: int, chunks: range, writer: Writer) -> None:
        """Read, verify and write chunks of a pack that the copy stores as a plain file."""
        pack = self._opened.parts[number].packs[index]
        offset = sum(length for length, _ in pack.chunks[: chunks.start])
        with _reader(self._opened, pack) as reader:
            for data in self._sent(_sound_chunks(self._opened, pack, reader, None, chunks.__contains__)):
                writer.write_at(offset, data)
                offset += len(data)

    def is_plain(self, number: int, index: int) -> bool:
        """Return whether the copy stores a pack as a plain file."""
        (after,) = packs_there([self._opened.parts[number].packs[index]], self._known, coded=self.draft.coded)
        return after.stored is None

    def write_part_file(self, number: int, *, again: bool = False) -> None:
        """Write a part without its packs."""
        _, data = self._encoded(number)
        key = f"{self.prefix}/{self._opened.root.parts[number].file}"
        write_whole(self._writer(key, len(data), again), data)

    def root(self) -> Root:
        """Return the copy's root."""
        opened, view, origin = self._opened, self._view, self._opened.root
        for number in range(len(opened.parts)):
            if number not in self._made:
                self._encoded(number)
        parts = [self._made[number] for number in range(len(opened.parts))]
        stored = set[str]().union(*(part.stored for part in parts))
        root: Root = msgspec.structs.replace(
            origin,
            store=view.store_id,
            run=view.run_id,
            id=self.directory.id,
            epoch=self.directory.epoch,
            parents=list(self.draft.parents),
            parts=[part.ref for part in parts],
            features=[
                *(feature for feature in origin.features if not is_storing(feature)),
                *storing_order(stored),
            ],
            requires=sorted(set[str]().union(*(part.donors for part in parts))),
            stored_bytes=sum(part.size for part in parts),
            new_bytes=sum(part.new for part in parts),
            user={**origin.user, **COPIED_FROM.field({"store": origin.store, "run": origin.run, "id": origin.id})},
        )
        return root

    def _encoded(self, number: int) -> tuple[Part, bytes]:
        """Return a part of the copy, and its bytes."""
        part, ref, new = self._opened.parts[number], self._opened.root.parts[number], self.directory
        moved: Part = msgspec.structs.replace(
            part,
            store=self._view.store_id,
            run=self._view.run_id,
            id=new.id,
            step=new.step,
            epoch=new.epoch,
            packs=packs_there(part.packs, self._known, coded=self.draft.coded),
        )
        data = encode_part(moved)
        self._made[number] = _Written(
            PartRef(rank=part.rank, file=ref.file, size=len(data), hash=hexdigest(data)),
            len(data) + sum(pack.stored_bytes for pack in moved.packs),
            len(data) + sum(pack.new_bytes for pack in moved.packs),
            frozenset(donors_of(moved.packs)),
            frozenset(storing(moved.packs)),
        )
        return moved, data

    def _writer(self, key: str, size: int, again: bool) -> Writer:
        return rewrites(self._store).rewrite(key, size) if again else self._store.write(key, size)

    def _copy_pack(self, pack: Pack, after: Pack, progress: Progress | None, again: bool) -> None:
        """Read, verify and write a pack."""
        if after.stored is None:
            with contextlib.closing(sound_chunks(self._opened, pack, progress)) as chunks:
                key = f"{self.prefix}/{pack.file}"
                write_pack_from(self._writer(key, pack.size, again), self._sent(chunks), pack.size, key)
            return
        with contextlib.closing(_stored_chunks(self._opened, pack, after.stored, progress)) as chunks:
            if after.stored.size:
                key = f"{self.prefix}/{stored_file(pack.file)}"
                size = after.stored.size
                write_pack_from(self._writer(key, size, again), self._sent(chunks), size, key)
            else:
                for _ in chunks:  # no chunk is written: iterating only reports the progress
                    pass

    def _sent(self, chunks: Iterator[memoryview]) -> Iterator[memoryview]:
        for data in chunks:
            yield data
            if self._tell_sent is not None:
                self._tell_sent(len(data))


def write_pack_of(pack: Pack, store: ByteStore, key: str, chunks: Iterator[memoryview]) -> None:
    """Write adjacent chunks under ``key``. If the iterator raises, nothing stays.

    Each chunk must be valid only until the next is requested. Memory: a buffer of ``BUFFER_BYTES`` if the store needs aligned pieces.
    """
    write_pack_from(store.write(key, pack.size), chunks, pack.size, key)


def write_pack_from(writer: Writer, chunks: Iterator[memoryview], size: int, key: str) -> None:
    """Write adjacent chunks with ``writer`` and finish it. Abort it if the iterator raises, or if the chunks do not have ``size`` bytes."""
    written = 0
    try:
        for offset, length, data in poured(chunks) if writer.align > 1 else _placed(chunks):
            writer.write_at(offset, data[: -(-length // writer.align) * writer.align])
            written = offset + length
        if written != size:  # a store cuts a longer file to the announced size, so nothing later would detect it
            raise SaveFailed(f"{written} bytes were written, {size} were announced", where=key)
        writer.finish()
    except BaseException:
        writer.abort()
        raise


Piece = tuple[int, int, memoryview]
"""Offset, length and bytes."""


def sound_chunks(opened: Opened, pack: Pack, progress: Progress | None = None) -> Generator[memoryview, None, None]:
    """Yield all chunks of a pack in order, verified. A chunk is valid until the next is requested.

    Raise ``CorruptCheckpoint`` for a chunk that is not what was committed. Memory: as ``each_chunk``.
    """
    with _reader(opened, pack) as reader:
        yield from _sound_chunks(opened, pack, reader, progress, lambda number: True)


def _stored_chunks(
    opened: Opened, pack: Pack, after: PackChunks, progress: Progress | None
) -> Generator[memoryview, None, None]:
    """Yield the bytes that a copy stores of each chunk. Coded chunks are decoded to verify them. Chunks already there are not read.

    Coded bytes come from the stored chunks, even if a repair or repack has put the pack next to them as one plain file. Raise ``GivenUp``
    if such a file is there and the stored chunks are damaged: another draft can copy from that file.
    """
    own = [number for number, piece in enumerate(after.pieces) if piece.home == OWN]
    mine = set(own)
    coded = any(after.pieces[number].coded for number in own)
    try:
        with _stored_reader(opened, pack) if coded else _reader(opened, pack) as reader:
            for number, data in zip(own, _sound_chunks(opened, pack, reader, progress, mine.__contains__), strict=True):
                yield reader.stored(number) if isinstance(reader, StoredReader) and after.pieces[number].coded else data
    except CorruptCheckpoint as error:
        if not coded or stays_coded(opened):
            raise
        raise GivenUp(
            f"the original was repacked or repaired, and {error.what}", where=f"{opened.prefix}/{pack.file}"
        ) from error
    if progress is not None:
        progress(sum(length for number, (length, _) in enumerate(pack.chunks) if number not in mine))


@contextlib.contextmanager
def _stored_reader(opened: Opened, pack: Pack) -> Iterator[Reader]:
    """Open the stored chunks of a pack, not a plain file next to them."""
    with contextlib.closing(StoredReader(opened.store, opened.prefix, pack)) as reader:
        yield reader


@contextlib.contextmanager
def _reader(opened: Opened, pack: Pack) -> Iterator[Reader]:
    source = f"{opened.prefix}/{pack.file}"
    try:
        reader = open_pack(opened.store, opened.prefix, pack)
    except CheckpointNotFound as error:
        raise CorruptCheckpoint("a file of this checkpoint is missing", where=source) from error
    try:
        if reader.size != pack.size:
            raise CorruptCheckpoint(f"{reader.size} bytes long, {pack.size} were committed", where=source)
        yield reader
    finally:
        reader.close()


def _sound_chunks(
    opened: Opened, pack: Pack, reader: Reader, progress: Progress | None, wanted: Callable[[int], bool]
) -> Iterator[memoryview]:
    for number, _, piece in each_chunk(
        reader, pack, f"{opened.prefix}/{pack.file}", opened.store.properties().parallel_reads, wanted
    ):
        if isinstance(piece, CorruptCheckpoint):
            raise CorruptCheckpoint(f"chunk {number}: {piece.what}", where=piece.where) from piece
        if isinstance(piece, RelightError):
            raise piece
        yield piece
        if progress:
            progress(pack.chunks[number][0])


def _placed(chunks: Iterator[memoryview]) -> Iterator[Piece]:
    """Yield the chunks with their offsets, unchanged."""
    offset = 0
    for piece in chunks:
        yield offset, len(piece), piece
        offset += len(piece)


def poured(chunks: Iterator[memoryview]) -> Iterator[Piece]:
    """Join adjacent chunks of any length to pieces that every store accepts: page-aligned, and readable up to the next page's end."""
    buffer = page_buffer(BUFFER_BYTES)
    given = filled = 0
    for piece in chunks:
        while piece:
            step = min(len(piece), BUFFER_BYTES - filled)
            buffer[filled : filled + step] = piece[:step]
            filled, piece = filled + step, piece[step:]
            if filled == BUFFER_BYTES:
                yield given, filled, buffer
                given, filled = given + filled, 0
    if filled:
        yield given, filled, buffer[: -(-filled // PAGE) * PAGE]


def copied_body(opened: Opened, root: Root, directory: str, root_hash: str, root_bytes: int) -> CommitBody:
    """Return the COMMIT of a copy."""
    body: CommitBody = msgspec.structs.replace(
        opened.checkpoint.body,
        id=root.id,
        origin=origin if (origin := opened.checkpoint.original_id) != root.id else "",
        dir=directory,
        home="",
        root=root_hash,
        root_bytes=root_bytes,
        parents=root.parents,
        requires=root.requires,
        stored_bytes=root.stored_bytes,
        new_bytes=root.new_bytes,
    )
    return body
