"""Copy one checkpoint to a further tier, by all nodes of a job together. No node leads.

The nearest tier is seen by all nodes, and what a copy writes follows from the original, the directory and ``draft.json``. So any node can
write any part, and two nodes that write the same file write the same bytes.

A node takes a part by creating ``ready/taken-PART-ATTEMPT``, exclusively, writes it, and creates ``ready/copied-PART``. A part that is
taken and does not arrive, or is freed by ``ready/freed-PART-ATTEMPT``, is taken again, with the next attempt's number. The node that finds
all parts there creates ``root.json`` and appends COMMIT, unless another has done so, as ranks do when they save (``commit.multi_rank``).
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import NamedTuple, NoReturn

import msgspec

from relight.catalog import Run
from relight.commit import delete_directory
from relight.commit.chunk_index import Chunks
from relight.commit.multi_rank import is_root_there, void_root
from relight.commit.save import check_written, delete_announcements
from relight.decode import from_json_bytes
from relight.engines import IN_PROCESS, Engine
from relight.errors import (
    CheckpointNotFound,
    CorruptCheckpoint,
    Fenced,
    LeaseHeld,
    RelightError,
    SaveFailed,
    StoreUnavailable,
    UnsafeContent,
)
from relight.format import encode_root
from relight.format.names import (
    DRAFT_FILE,
    READY_DIR,
    ROOT_FILE,
    CheckpointDir,
    base36,
    copied_file,
    copying_node_file,
    freed_file,
    is_copying_node_file,
    is_written_file,
    parse_copied,
    parse_taken,
    taken_file,
)
from relight.format.records import Body
from relight.log import Checkpoint, History, Log, LogView, fold
from relight.reader import Opened
from relight.reader.by_reference import (
    CheckpointReference,
    PackRange,
    open_reference,
    ranges_of_part,
    reference_to,
    shared_url,
)
from relight.store import ByteStore, Writer, open_bytes
from relight.store.base import SharesWrites
from relight.transfer.copying import (
    Check,
    CopyDraft,
    CopyPlan,
    CopyReport,
    CopyWriter,
    GivenUp,
    copied_body,
    copy_one,
    execute_with,
    parents_there,
    stays_coded,
)
from relight.transfer.stored_there import chunks_there, there_already

DRAFT_BYTES_MAX = 1 << 20
NAMES_MAX = 16
"""Directory names that are tried for one checkpoint and attempt. A name is left only after damage, or if its draft became useless."""
POLL_S = 0.25
"""Seconds between two listings of what the other nodes have done, with up to a hundred parts; more with more parts."""
TIDY_POLLS = 4
"""Listings of what other nodes delete, within two polls of theirs."""
LATE_AFTER_S = 3.0
LATE_BYTES_PER_S = 50e6
LATE_FACTOR = 4.0
LATE_DOUBLINGS_MAX = 5
"""A part that another node copies counts as abandoned after ``LATE_AFTER_S``, plus ``LATE_FACTOR`` times the time that this node would
take at the speed of its own parts; at ``LATE_BYTES_PER_S`` if it has copied none. The time doubles with each attempt, at most
``LATE_DOUBLINGS_MAX`` times."""


class Shared(NamedTuple):
    """What this node did: the parts and bytes that it copied, of how many parts, and whether it committed the copy, which has ``id``."""

    parts: int
    of: int
    bytes: int
    committed: bool
    id: str


def copy_together(
    opened: Opened,
    store: ByteStore,
    log: Log,
    charge: int,
    *,
    own: frozenset[int] = frozenset(),
    share: Callable[[int, int], None] = lambda length, nodes: None,
    progress: Callable[[int], None] = lambda length: None,
    hold: Callable[[], None] = lambda: None,
    pause: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
    checks: Check = lambda history: None,
    command: bool = False,
    engine: Engine = IN_PROCESS,
) -> Shared:
    """Copy a checkpoint to the tier at ``log``, together with all processes that make the same call. Return when it is committed.

    ``charge``: epoch of the attempt. If the tier has another, raise ``Fenced``. ``own``: this node copies the parts of these ranks first.
    ``share`` is called with bytes that are written and the number of nodes that take part, ``progress`` with bytes of the checkpoint,
    ``hold`` before the first byte is copied by anyone. ``pause`` waits, and may raise. ``checks`` raises if the copy must not be
    committed. ``command``: also copy what the tier had and has retired, and do not wait for parts that another process has taken, as it
    was probably killed. The engine's processes write the packs.
    Raise ``CorruptCheckpoint`` or ``UnsafeContent`` if the original is damaged, on every node. After other errors, a later call continues.
    """
    copy = _Copy(opened, store, log, charge, own, share, progress, hold, pause, clock, checks, command, engine)
    while copy.join():
        try:
            copy.write_parts()
            return copy.commit()
        except GivenUp:
            continue
    return copy.result(False)


class _Copy:
    """One node's side of a copy."""

    def __init__(
        self, opened: Opened, store: ByteStore, log: Log, charge: int, own: frozenset[int], share: Callable[[int, int], None],
        progress: Callable[[int], None], hold: Callable[[], None], pause: Callable[[float], None], clock: Callable[[], float],
        checks: Check, command: bool, engine: Engine,
    ) -> None:  # fmt: skip
        self._opened, self._store, self._log, self._charge = opened, store, log, charge
        self._share, self._progress, self._hold, self._pause, self._clock = share, progress, hold, pause, clock
        self._checks, self._command, self._engine = checks, command, engine
        self._origin = opened.checkpoint.original_id
        self._sizes = [sum(pack.size for pack in part.packs) for part in opened.parts]
        self._order = _order([part.rank for part in opened.root.parts], own)
        self._useless: set[str] = set()
        self._node = base36(secrets.randbits(48)).zfill(10)[:10]
        self._nodes = 1
        self._mine: list[str] = []
        """Names of the files in ``ready/`` that this node has created."""
        self._prefix = ""
        self._taken: dict[int, int] = {}
        """Attempts that exist although a listing may not show them yet, by part."""
        self._freed: set[tuple[int, int]] = set()
        """Attempts that were ended without the part."""
        self._first_seen: dict[tuple[int, int], float] = {}
        self._arrived: set[int] = set()
        self._parts = self._bytes = 0
        self._seconds = 0.0
        self._id = ""

    def result(self, committed: bool) -> Shared:
        """Return what this node did."""
        return Shared(self._parts, len(self._sizes), self._bytes, committed, self._id)

    # -- the directory

    def join(self) -> bool:
        """Begin or join the copy. Return False if the tier has or had the checkpoint."""
        tries = 0
        for id in self._names():
            view = self._log.read()
            history = fold(view)
            self._check_charge(view)
            if self._is_copied(history):
                return False
            directory = CheckpointDir(self._opened.root.step, id, self._charge)
            prefix = f"{view.run}/{directory}"
            if id in history.committed_ids:
                continue
            tries += 1
            if tries > NAMES_MAX:
                break
            if id in self._useless:
                continue
            draft = self._draft(prefix, history)
            if draft is None or not self._is_usable(prefix):
                if self._is_copied(fold(self._log.read())):  # committed by other nodes meanwhile
                    return False
                continue
            known: Chunks = {}
            if draft.donor:
                donor = history.find(draft.donor)
                # it was retired, or its donors may be: no copy could be committed
                if donor is None or donor.self_contained:
                    continue
                known = chunks_there(Run(self._store, view.run), donor)
            self._enter(view, directory, draft, known)
            return True
        raise CorruptCheckpoint(
            f"{NAMES_MAX} copies of this checkpoint were given up",
            where=self._log.run,
            hint="relight verify shows damage; the next attempt of the run tries again",
        )

    def _names(self) -> Iterator[str]:
        """Yield the ids under which this checkpoint may be copied, in the order that every node uses."""
        root = self._opened.root
        yield root.id
        for number in itertools.count(1):
            digest = hashlib.sha256(f"{self._origin} {root.id} {self._charge} {number}".encode()).digest()
            yield base36(int.from_bytes(digest[:8], "big")).zfill(10)[-10:]

    def _draft(self, prefix: str, history: History) -> CopyDraft | None:
        """Return the draft of a shared copy of this checkpoint in the directory. Create it if the directory is new. None if
        something else is there."""
        draft = self._read_draft(prefix)
        if draft is None and any(True for _ in self._store.list(prefix)):
            draft = self._read_draft(prefix)  # another node may have created it since
        elif draft is None:
            self._hold()
            opened, donor = self._opened, ""
            if opened.checkpoint.requires:
                donor, _ = there_already(Run(self._store, self._log.run), history)
            draft = CopyDraft(self._origin, donor, stays_coded(opened), parents_there(opened, history))
            if not self._store.put_once(f"{prefix}/{DRAFT_FILE}", msgspec.json.encode(draft)):
                draft = self._read_draft(prefix)
        return draft if draft is not None and draft.origin == self._origin else None

    def _read_draft(self, prefix: str) -> CopyDraft | None:
        try:
            return from_json_bytes(self._store.get(f"{prefix}/{DRAFT_FILE}", DRAFT_BYTES_MAX), CopyDraft)
        except (
            CheckpointNotFound,
            CorruptCheckpoint,
            UnsafeContent,
            msgspec.MsgspecError,
        ):  # absent, of ranks that saved, or damaged
            return None

    def _is_usable(self, prefix: str) -> bool:
        try:
            is_root_there(self._store, prefix)
        except SaveFailed:  # it is void
            return False
        return True

    def _enter(self, view: LogView, directory: CheckpointDir, draft: CopyDraft, known: Chunks) -> None:
        self._writer = CopyWriter(self._opened, self._store, view, directory, draft, known, self._sent)
        self._prefix, self._ready = self._writer.prefix, f"{self._writer.prefix}/{READY_DIR}"
        self._mine, self._taken, self._freed, self._first_seen = [], {}, set(), {}
        self._announce(copying_node_file(self._node))

    def _announce(self, name: str) -> bool:
        """Create a file in ``ready/`` with this node's name. Return False if another node has created it."""
        key, own = f"{self._ready}/{name}", self._node.encode()
        if not self._store.put_once(key, own):
            try:
                if self._store.get(key, len(own)) != own:  # else an earlier answer was lost
                    return False
            except (CheckpointNotFound, UnsafeContent):
                return False
        self._mine.append(name)
        return True

    # -- parts

    def write_parts(self) -> None:
        """Return when all parts are there. Raise ``GivenUp`` if they never will be."""
        while (left := self._parts_left()) is not None:
            now = self._clock()
            free = [number for number in self._order if number in left and self._is_free(number, left[number], now)]
            if not free:
                self._pause(max(POLL_S, POLL_S * len(self._sizes) / 100))
            elif not self._engine.is_local:
                self._share_out(free, left)
            elif self._take(free[0], left):
                self._write_part(free[0], left[free[0]] + 1)

    def _take(self, number: int, left: dict[int, int]) -> bool:
        """Take a part. Return False if another node has taken it since the listing."""
        self._taken[number] = attempt = left[number] + 1
        return self._announce(taken_file(number, attempt))

    def _parts_left(self) -> dict[int, int] | None:
        """Return the newest attempt at each part that is not there, −1 for none. None if all are there, or another node has completed
        the copy."""
        try:
            if is_root_there(self._store, self._prefix):
                return None
        except SaveFailed as error:
            self._clear()
            raise CorruptCheckpoint(error.what, where=self._prefix) from error
        left = {number: self._taken.get(number, -1) for number in range(len(self._sizes))}
        nodes, arrived = 0, set[int]()
        for entry in self._store.list(self._ready):
            nodes += is_copying_node_file(entry.name)
            if (number := parse_copied(entry.name)) is not None:
                arrived.add(number)
            elif (taken := parse_taken(entry.name)) is not None and taken[0] in left:
                number, attempt, is_freed = taken
                left[number] = max(left[number], attempt)
                self._freed |= {(number, attempt)} if is_freed else set()
        self._nodes = max(1, nodes)
        for number in arrived - self._arrived:
            self._arrived.add(number)
            self._progress(self._sizes[number])
        if not arrived and self._read_draft(self._prefix) is None:
            # another node has deleted it: its attempt is over, or the tier has the checkpoint in another directory
            self._check_charge(self._log.read())
            self._give_up("its directory was deleted")
        return {number: attempt for number, attempt in left.items() if number not in arrived} or None

    def _is_free(self, number: int, attempt: int, now: float) -> bool:
        """Return whether no node copies a part, or the one that did is late. ``attempt``: the newest one at it."""
        if attempt < 0 or (number, attempt) in self._freed or self._command:
            return True
        since = self._first_seen.setdefault((number, attempt), now)
        speed = self._bytes / self._seconds / LATE_FACTOR if self._bytes and self._seconds > 0 else LATE_BYTES_PER_S
        return now - since > (LATE_AFTER_S + self._sizes[number] / speed) * 2.0 ** min(attempt, LATE_DOUBLINGS_MAX)

    def _write_part(self, number: int, attempt: int) -> None:
        started = self._clock()
        try:
            self._writer.write_part(number, self._progress, again=attempt > 0)
        except (CorruptCheckpoint, UnsafeContent) as error:
            if not self._give_up_part(number, error):
                return
            raise
        except GivenUp as error:
            self._give_up(error.what)
        except BaseException:
            with contextlib.suppress(RelightError):
                self._announce(freed_file(number, attempt))
            raise
        self._complete(number)
        self._seconds += self._clock() - started

    def _share_out(self, free: list[int], left: dict[int, int]) -> None:
        """Have the engine's processes write the packs of the free parts, by ranges where several processes can write one file."""
        started, writer = self._clock(), self._writer
        target = _CopyTarget(
            reference_to(self._opened),
            shared_url(self._store),
            self._log.run,
            writer.directory,
            msgspec.json.encode(writer.draft),
        )
        waiting: dict[int, int] = {}
        """Number of tasks that are left of each part."""
        files: dict[tuple[int, int], tuple[Writer, int]] = {}
        """Packs that are written by ranges: their writers here, and the number of ranges that are left."""

        def tasks() -> Iterator[_PackTask]:
            for number in free:
                if self._take(number, left):
                    ranges = ranges_of_part(self._opened, number)
                    counts = Counter(chunks.pack for chunks in ranges)
                    shared = {pack for pack, count in counts.items() if count > 1 and self._takes_ranges(number, pack)}
                    whole = sorted(counts.keys() - shared)
                    waiting[number] = len(whole) + sum(counts[pack] for pack in shared)
                    for pack in whole:
                        yield _PackTask(target, PackRange(number, pack, 0, 0))
                    for chunks in ranges:
                        if chunks.pack in shared:
                            yield _PackTask(target, chunks, self._shared_file(chunks, counts[chunks.pack], files))
                    if not ranges:
                        self._finish_part(number, waiting)

        try:
            for task, length in self._engine.run(_write_pack, tasks()):
                number, pack = task.chunks.part, task.chunks.pack
                self._sent(length)
                if task.file:
                    file, ranges_left = files[number, pack]
                    files[number, pack] = file, ranges_left - 1
                    if ranges_left == 1:
                        file.finish()
                        del files[number, pack]
                self._progress(
                    task.chunks.bytes_of(self._opened.parts[number].packs)
                    or self._opened.parts[number].packs[pack].size
                )
                waiting[number] -= 1
                if not waiting[number]:
                    self._finish_part(number, waiting)
        except (CorruptCheckpoint, UnsafeContent) as error:
            if self._give_up_part(min(waiting, default=0), error):
                raise
        except GivenUp as error:
            self._give_up(error.what)
        except BaseException:
            with contextlib.suppress(RelightError):
                for number in waiting:
                    self._announce(freed_file(number, self._taken[number]))
            raise
        finally:
            for file, _ in files.values():
                file.abort()
        self._seconds += self._clock() - started

    def _takes_ranges(self, number: int, pack: int) -> bool:
        """Return whether several processes can write a pack."""
        return isinstance(self._store, SharesWrites) and self._writer.is_plain(number, pack)

    def _shared_file(self, chunks: PackRange, count: int, files: dict[tuple[int, int], tuple[Writer, int]]) -> str:
        """Return the name by which other processes write a pack's file. Create the file before the first of its ``count`` ranges."""
        assert isinstance(self._store, SharesWrites)
        place = chunks.part, chunks.pack
        if place not in files:
            pack = self._opened.parts[chunks.part].packs[chunks.pack]
            file = self._store.rewrite(f"{self._prefix}/{pack.file}", pack.size)
            files[place] = file, count
        return self._store.share(files[place][0])

    def _finish_part(self, number: int, waiting: dict[int, int]) -> None:
        self._writer.write_part_file(number, again=True)
        self._complete(number)
        del waiting[number]

    def _give_up_part(self, number: int, error: RelightError) -> bool:
        """Make the directory void, as a part of the original is damaged. Return False if another node has read it whole, and
        completed the copy."""
        if not void_root(self._store, self._prefix, f"part {number} of the original: {error.what}"):
            return False
        self._clear()
        return True

    def _complete(self, number: int) -> None:
        """Make a written part durable, and announce it."""
        self._store.sync(self._prefix)
        self._announce(copied_file(number))
        self._arrived.add(number)
        self._parts += 1

    def _sent(self, length: int) -> None:
        self._bytes += length
        self._share(length, self._nodes)

    # -- the end

    def commit(self) -> Shared:
        """Commit the copy, unless another node has or does. Raise ``GivenUp`` if it cannot be."""
        store, log, root = self._store, self._log, self._writer.root()
        store.sync(log.run)  # the directory's name: its creator may not have made it durable
        if not store.put_once(f"{self._prefix}/{ROOT_FILE}", encode_root(root)):
            # its creator has this long to append the COMMIT; that of an interrupted command has ended
            ends = self._clock() + (0.0 if self._command else LATE_AFTER_S)
            while not self._copies(fold(log.read())) and self._clock() < ends:
                self._pause(POLL_S)
        committed = False
        if not self._copies(fold(log.read())):
            store.sync(self._prefix)
            try:
                root_hash, root_bytes = check_written(store, self._prefix, root)
            except (CorruptCheckpoint, UnsafeContent, CheckpointNotFound) as error:
                self._give_up(str(error))
            body = copied_body(self._opened, root, str(self._writer.directory), root_hash, root_bytes)

            def decide(now: LogView) -> tuple[Body, int] | None:
                history = fold(now)
                self._check_charge(now)
                if self._copies(history):
                    return None
                self._checks(history)
                if not set(root.requires) <= history.by_id.keys():
                    self._give_up("a checkpoint that has some of its chunks was retired")
                return body, self._charge

            committed = log.append(decide) is not None
        view = log.read()
        copies = self._copies(fold(view), durable=not committed)
        self._id = copies[0].id if copies else self._writer.directory.id
        self._leave()
        with contextlib.suppress(RelightError):
            if committed:
                self._tidy()
            elif not view.faults and self._writer.directory.id not in [copy.id for copy in copies]:
                # the tier has the checkpoint in another directory, so no node can commit this one
                delete_directory(store, self._prefix)
        return self.result(committed)

    def _tidy(self) -> None:
        """Delete the files in ``ready/`` that other nodes do not delete themselves, because they have ended."""
        for _ in range(TIDY_POLLS):
            if not any(True for _ in self._store.list(self._ready)):
                return
            self._pause(2 * POLL_S / TIDY_POLLS)
        delete_announcements(self._store, self._prefix)

    def _clear(self) -> None:
        """Delete everything in a void directory but the void root. A node that still writes there does the same afterwards."""
        self._leave()
        with contextlib.suppress(RelightError):
            for entry in list(self._store.list(self._prefix)):
                if entry.name != ROOT_FILE and is_written_file(entry.name):
                    self._store.delete(f"{self._prefix}/{entry.name}")

    def _leave(self) -> None:
        """Delete this node's files in ``ready/``, and the directory if it was the last."""
        with contextlib.suppress(RelightError):
            for name in self._mine:
                self._store.delete(f"{self._ready}/{name}")
            self._store.delete_dir(self._ready)

    def _give_up(self, why: str) -> NoReturn:
        """Use this directory no more."""
        self._useless.add(self._writer.directory.id)
        self._leave()
        raise GivenUp(f"copy aborted: {why}", where=self._prefix)

    def _check_charge(self, view: LogView) -> None:
        """Raise ``Fenced`` if another attempt is in charge of the tier. No node can commit this copy then."""
        history = fold(view)
        if history.epoch == self._charge:
            return
        copies = [copy.id for copy in self._copies(history)]
        if self._prefix and not view.faults and self._writer.directory.id not in copies:  # nor ever will it be one
            with contextlib.suppress(RelightError):
                delete_directory(self._store, self._prefix)
        raise Fenced(f"attempt {self._charge} there was superseded by attempt {history.epoch}", where=self._log.run)

    def _is_copied(self, history: History) -> bool:
        copies = self._copies(history, durable=True)
        self._id = copies[0].id if copies else ""
        return bool(copies)

    def _copies(self, history: History, *, durable: bool = False) -> list[Checkpoint]:
        """Return the checkpoint's copies that the tier has, or had unless those are copied again, under any id. ``durable``: make their
        records durable, as the nodes that wrote them may not have done so."""
        every = [*history.by_id.values(), *(() if self._command else history.retired.values())]
        copies = [copy for copy in every if copy.original_id == self._origin]
        for copy in copies if durable else ():
            self._log.sync(copy.seq)
        return copies


def _order(ranks: list[int], own: frozenset[int]) -> list[int]:
    """Return the parts in the order in which a node takes them: those of its ranks, then the following ones, around the ring.

    So nodes that have finished begin at different places. A node without ranks begins anywhere.
    """
    mine = [number for number, rank in enumerate(ranks) if rank in own]
    first = mine[-1] + 1 if mine else secrets.randbelow(len(ranks))
    return [*mine, *(number for number in [*range(first, len(ranks)), *range(first)] if number not in mine)]


class _CopyTarget(NamedTuple):
    """A copy in progress, for other processes: in a directory of run ``run`` of the store at ``url``."""

    reference: CheckpointReference
    url: str
    run: str
    directory: CheckpointDir
    draft: bytes


class _PackTask(NamedTuple):
    """Chunks of a pack, to be written to a ``file`` that several processes share; or the whole pack, without a file."""

    target: _CopyTarget
    chunks: PackRange
    file: str = ""


def _write_pack(task: _PackTask) -> int:
    """Write a pack or a range of it, in any process. Return the bytes written."""
    writer, store, sent = _writer_of(task.target)
    sent.clear()
    number, pack, first, last = task.chunks
    if not task.file:
        writer.write_pack(number, pack, None, again=True)
        return sum(sent)
    assert isinstance(store, SharesWrites)
    file = store.join(task.file)
    try:
        writer.write_range(number, pack, range(first, last), file)
        file.finish()
    except BaseException:
        file.abort()
        raise
    return sum(sent)


@lru_cache(maxsize=1)
def _writer_of(target: _CopyTarget) -> tuple[CopyWriter, ByteStore, list[int]]:
    """Return a process's writer of a copy, its store, and the list to which the writer adds the bytes that it writes."""
    store, draft = open_bytes(target.url), from_json_bytes(target.draft, CopyDraft)
    run, known, sent = Run(store, target.run), Chunks(), list[int]()
    if draft.donor:
        donor = run.history().find(draft.donor)
        if donor is None:
            raise StoreUnavailable(
                "a checkpoint that has some of its chunks was retired", where=target.run, hint="repeat the command"
            )
        known = chunks_there(run, donor)
    opened = open_reference(target.reference)
    return CopyWriter(opened, store, run.view(), target.directory, draft, known, sent.append), store, sent


def execute_copy(
    plan: CopyPlan, *, progress: Callable[[int], None] | None = None, engine: Engine = IN_PROCESS
) -> CopyReport:
    """Copy, oldest first. Damaged checkpoints are skipped and reported. Other errors stop the copy; committed copies stay.

    If the engine has processes, they copy packs, and a second call continues what an interrupted one has begun.
    """

    def copy(opened: Opened, log: Log, checks: Check | None) -> str:
        if engine.is_local:
            return copy_one(opened, plan.destination, log, progress, checks=checks)
        try:
            return copy_together(
                opened,
                plan.destination,
                log,
                fold(log.read()).epoch,
                checks=checks or (lambda history: None),
                command=True,
                engine=engine,
                progress=progress or (lambda length: None),
            ).id
        except Fenced as error:
            raise LeaseHeld(
                "an attempt took charge of the destination while this was copied",
                where=log.run,
                hint="repeat the command",
            ) from error

    return execute_with(plan, copy)
