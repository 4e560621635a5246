"""State of incremental saves: chunks of earlier saves that need not be written again, and measurements that decide on coding."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from relight.format import Part
from relight.format.chunk_locations import CHAIN_MAX, OWN, ChunkLocation
from relight.format.manifest import Pack
from relight.format.names import CheckpointDir, parse_home, stored_file
from relight.format.records import CommitBody
from relight.policy.compact import (
    DRAG,
    EQUAL_MIN,
    LONGER_MAX,
    RECOVERS,
    Choice,
    Compact,
    Conditions,
    Experience,
    choose,
)

if TYPE_CHECKING:
    from relight.commit.nvcomp import OnGpu
    from relight.commit.pack_writer import WriteStats
    from relight.format.entropy import Compress


class IndexedChunk(NamedTuple):
    """Location of a stored chunk. ``homes``: the file, as ``(directory, file)``, of the chunk and of each base of its delta chain."""

    piece: ChunkLocation
    homes: tuple[tuple[str, str], ...]
    """One for each link of the chain."""


MARKS, MARK_BYTES = 4, 16
"""Number of samples per chunk that detect a change quickly, and bytes of one sample."""
OLDER_SAVES, OLDER_MAX = 8, 100_000
"""Chunks of earlier saves that the last one does not have: for how many saves they are remembered, and most of them."""
MEASURED_BYTES_MIN = 1 << 20
SEEN_S_MIN = 1e-3
"""Least seconds of hashing from which CPU contention is estimated."""
MOST = 0.5
"""Least stored (not reused) share of a save from which the joint time of coding and storing is estimated."""
DONORS_MAX = 60
"""Most donors of a save. Each rank announces its donors as bits of a number, and a reader opens all of them."""
Chunks = dict[tuple[bytes, int], IndexedChunk]
"""Stored chunks by hash and length."""
Rows = list[list[IndexedChunk]]
"""Stored chunks by pack and chunk number."""


class PreviousSave(NamedTuple):
    """A committed save still in memory: its id and its packs. ``still``: returns whether the memory is unchanged."""

    id: str
    packs: Sequence[memoryview]
    still: Callable[[], bool]


class UnchangedTensors(NamedTuple):
    """Tensors, by number, that the caller declares unchanged since the checkpoint ``id``."""

    id: str
    tensors: frozenset[int]
    wrong: Callable[[str], None] | None
    """Called with the name of a tensor that did change; the caller then declares none. None: the bytes in memory cannot be audited."""


class KnownChunks(NamedTuple):
    """Stored chunks that a save may reuse, and the previous save's bytes as bases of deltas."""

    chunks: Chunks
    rows: Rows
    before: PreviousSave | None
    hashes: Sequence[Sequence[tuple[int, bytes]]] = ()
    """Length and hash of the chunks of the save before, by pack and number."""
    same: frozenset[int] = frozenset()
    """Numbers of the tensors that are unchanged since the previous save."""

    def there(self, pack: int, number: int, length: int) -> tuple[bytes, IndexedChunk] | None:
        """Return hash and location of the previous save's chunk at this place; None if there is no such chunk, or it cannot be reused."""
        if pack >= len(self.hashes) or number >= len(self.hashes[pack]):
            return None
        then, value = self.hashes[pack][number]
        where = self.chunks.get((value, length)) if then == length else None
        return None if where is None else (value, where)

    def base(self, pack: int, number: int, offset: int, length: int) -> tuple[memoryview, IndexedChunk] | None:
        """Return bytes and location of the previous save's chunk at this place, as the base of a delta; None if it cannot be one."""
        if (
            self.before is None
            or pack >= len(self.rows)
            or number >= len(self.rows[pack])
            or pack >= len(self.before.packs)
        ):
            return None
        data, where = self.before.packs[pack][offset : offset + length], self.rows[pack][number]
        fits = (
            len(data) == length
            and len(where.homes) < CHAIN_MAX
            and where.piece.codec.portable
            and where.piece.codec.exact
        )
        return (data, where) if fits else None


NOTHING = KnownChunks({}, [], None)


@dataclass(slots=True)
class IncrementalState:
    """State of an attempt's incremental saves, updated after each save."""

    rules: Compact = field(default_factory=Compact)
    seen: Experience = field(default_factory=Experience)
    chunks: Chunks = field(default_factory=dict)
    """Chunks of the last checkpoint."""
    rows: Rows = field(default_factory=list)
    """The same chunks, by pack and number."""
    hashes: Sequence[Sequence[tuple[int, bytes]]] = ()
    audited: int = 0
    """Number of audited chunks, which are declared unchanged."""
    older: dict[tuple[bytes, int], tuple[int, IndexedChunk]] = field(default_factory=dict)
    """Chunks of earlier saves that the last one does not have, by hash and length: the last save that had it, and its location."""
    marks: dict[tuple[int, int], bytes] = field(default_factory=dict)
    """Samples of each chunk of the last save, by pack and number. A chunk without a common sample has changed."""
    older_marks: list[frozenset[bytes]] = field(default_factory=list)
    """Samples of the saves before it, newest first."""
    saves: int = 0
    """Number of saves of this attempt so far."""
    born: dict[str, int] = field(default_factory=dict)
    """Value of ``saves`` when each checkpoint that a save may need was committed, by id."""
    base: int = 0
    """Record number of the last checkpoint's COMMIT."""
    donors: tuple[str, ...] = ()
    """Ids of the last checkpoint and of its donors. A save that reuses its chunks may need their bytes."""
    chosen: Choice | None = None
    """Choice for the current save; None before ``choice`` was called."""
    searched: bool = False
    """Whether ``seed_from_newest`` has searched for a checkpoint of an earlier attempt."""

    gpu: OnGpu | None = None
    no_gpu: str = ""
    """Why no GPU coder is available, after the first search."""

    def choice(self, under: Conditions) -> Choice:
        """Choose how the next save is stored."""
        self.chosen = choose(self.rules, self.seen, under)
        if self.chosen.coded and self.rules.coder == "gpu":
            self.coder()
            why = self.no_gpu if self.gpu is None else self.gpu.why_not
            who = f"by processors: {why}" if why else "by nvCOMP, on the GPU"
            self.chosen = self.chosen._replace(reason=f"{self.chosen.reason}; {who}")
        return self.chosen

    def coder(self) -> Compress:
        """Return the compressor of planes. A GPU is searched for once, if the rules ask for it."""
        from relight.format.entropy import Leveled, compress

        if self.rules.level is not None:
            return Leveled(self.rules.level)
        if self.rules.coder == "gpu" and self.gpu is None and not self.no_gpu:
            from relight.commit.nvcomp import on_gpu  # with numpy, which takes a tenth of a second to import

            self.gpu, self.no_gpu = on_gpu()
        return compress if self.gpu is None else self.gpu.compress

    def distrust(self, verified: Mapping[str, bool]) -> None:
        """Do not reuse chunks of damaged donors. ``verified``: by id, whether a checkpoint verified."""
        if self.donors and any(verified.get(donor) is False for donor in self.donors):
            self.forget()

    def check_there(self, live: Collection[str]) -> None:
        """Forget chunks of checkpoints that are not ``live``: another process may have retired them, or found them damaged."""
        if not set(self.donors) <= set(live):
            self.forget()
        self.older = {
            key: entry
            for key, entry in self.older.items()
            if all(_id_of(directory) in live for directory, _ in entry[1].homes)
        }

    def known(
        self, before: PreviousSave | None, vouched: UnchangedTensors | None = None, *, older: bool = False
    ) -> KnownChunks:
        """Return what the chosen save may reuse. ``older``: include chunks of saves before the last one.

        Ranks that save together announce donors by their index in the last save's list, so they must leave ``older`` out.
        """
        if self.chosen is None or len(self.donors) > DONORS_MAX:
            return NOTHING
        fits = before is not None and self.chosen.differences and self.donors[:1] == (before.id,)
        same = vouched.tensors if vouched is not None and self.donors[:1] == (vouched.id,) else frozenset[int]()
        chunks = self.chunks if self.chosen.reuse else {}
        if older and chunks and self.older:
            chunks = {**{key: where for key, (_, where) in self.older.items()}, **chunks}
        return KnownChunks(chunks, self.rows, before if fits else None, self.hashes, same)

    def record_cost(self, spent: WriteStats, under: Conditions, lanes: int, whole: int, took_s: float) -> None:
        """Record the cost of a save of ``whole`` bytes: storing with ``lanes`` parallel files, hashing, coding, and ``took_s`` in all.

        Values from few bytes are ignored.
        """
        seen, then = self.seen, self.seen.lane_s_per_byte
        coded = sum(length for length, _ in spent.coded.values())
        if spent.hashing_own_s >= SEEN_S_MIN:
            seen.crowd = _bounded(spent.hashing_s / spent.hashing_own_s)
        if spent.bytes >= MEASURED_BYTES_MIN:
            now = spent.seconds / spent.bytes * lanes
            seen.lane_s_per_byte = now if then is None or not coded else max(now, then * RECOVERS)
        if coded < MEASURED_BYTES_MIN:
            seen.strain = 1 + (seen.strain - 1) * RECOVERS
            seen.drag = None if seen.drag is None else DRAG + (seen.drag - DRAG) * RECOVERS
            return
        rates = {sample.kind: sample.code_s_per_byte for sample in seen.samples or ()}
        should = sum(length * rates[kind] for kind, (length, _) in spent.coded.items() if kind in rates)
        if should > 0:
            seen.strain = _bounded(sum(seconds for kind, (_, seconds) in spent.coded.items() if kind in rates) / should)
        coding_s, paced = sum(seconds for _, seconds in spent.coded.values()), under.bytes_per_second
        alone = max(spent.seconds, coding_s / under.threads, spent.bytes / paced if paced else 0.0)
        if alone > 0 and spent.bytes >= MOST * whole:
            seen.drag = _bounded((took_s - spent.waited_s) / alone)

    def forget(self) -> None:
        """Make the next save store every chunk."""
        self.chunks, self.rows, self.hashes, self.base, self.donors, self.older = {}, [], (), 0, (), {}
        self.seen.equal = self.seen.alike = self.seen.untrained = None
        self.marks, self.older_marks = {}, []

    def seed_from(self, body: CommitBody, seq: int, part: Part, untrained: float, keeps: Collection[str]) -> None:
        """Start from a checkpoint that an earlier attempt committed as record ``seq``. ``untrained``: untrained share of the save.

        ``keeps``: for a checkpoint in another run, the ids that retention keeps there as long as this run needs it.
        """
        of_use = {body.id, *(keeps if body.home else body.requires)}

        def is_kept(directory: str) -> bool:
            parsed = parse_home(directory)
            return parsed is not None and parsed[0] == body.home and parsed[1].id in of_use

        stored = chunks_of(part.packs, rows_of(home_of(body), part.packs))
        self.chunks = {
            key: where for key, where in stored.items() if all(is_kept(directory) for directory, _ in where.homes)
        }
        if self.chunks:
            self.base, self.donors, self.seen.untrained = seq, (body.id, *body.requires), untrained

    def update(self, directory: CheckpointDir, part: Part, seq: int, requires: Sequence[str]) -> None:
        """Record the last checkpoint, committed as record ``seq``, and the ids of its donors."""
        self.base, self.donors = seq, (directory.id, *requires)
        before, self.rows = self.chunks, rows_of(str(directory), part.packs)
        self.chunks, self.hashes = chunks_of(part.packs, self.rows), [pack.chunks for pack in part.packs]
        self.saves += 1
        self.born[directory.id] = self.saves
        if not requires and self.rules.full_every is not None and self.seen.since_full >= self.rules.full_every:
            self.older = {}  # a full save by rule: the next saves must not need earlier ones
        else:
            self._remember(before)
        if before:
            total = sum(length for pack in part.packs for length, _ in pack.chunks)
            equal = sum(length for pack in part.packs for length, value in pack.chunks if (value, length) in before)
            self.seen.equal = equal / max(total, 1)
        oldest = min(
            (self.born[checkpoint_id] for checkpoint_id in requires if checkpoint_id in self.born), default=None
        )
        ages = self.seen.since_full + 1 if oldest is None else self.saves - oldest + 1
        self.seen.since_full = ages if requires else 1
        self.born = {
            checkpoint_id: number
            for checkpoint_id, number in self.born.items()
            if checkpoint_id in self.donors or self.saves - number <= OLDER_SAVES
        }

    @property
    def wants_samples(self) -> bool:
        """Return whether to sample the next save before it is compared with earlier ones.

        True if the last two saves had little in common.
        """
        self.seen.alike = None
        return bool(self.marks) and (self.seen.equal or 0) < EQUAL_MIN

    def remember_marks(self, marks: dict[tuple[int, int], bytes]) -> None:
        """Store the samples of the last save."""
        self.older_marks = [frozenset(self.marks.values()), *self.older_marks][: OLDER_SAVES - 1] if self.older else []
        self.marks = marks

    def may_be_there(self, place: tuple[int, int], mark: bytes) -> bool:
        """Return whether a chunk with these samples may equal, in whole or part, the last save's chunk at its place, or an older chunk."""
        then = self.marks.get(place, b"")
        pieces = range(0, min(len(mark), len(then)), MARK_BYTES)
        alike = any(mark[start : start + MARK_BYTES] == then[start : start + MARK_BYTES] for start in pieces)
        return alike or any(mark in older for older in self.older_marks)

    def _remember(self, before: Chunks) -> None:
        """Keep the previous save's chunks that the last one does not have: a later save may have them again."""
        kept = {
            key: entry
            for key, entry in self.older.items()
            if key not in self.chunks and self.saves - entry[0] < OLDER_SAVES
        }
        for key, where in before.items():
            if key not in self.chunks:
                kept.pop(key, None)
                kept[key] = self.saves - 1, where
        surplus = len(kept) - OLDER_MAX
        self.older = dict(list(kept.items())[surplus:]) if surplus > 0 else kept


def _id_of(directory: str) -> str:
    """Return the id of the checkpoint in ``directory``; empty if it is not a checkpoint's directory."""
    parsed = parse_home(directory)
    return parsed[1].id if parsed is not None else ""


def _bounded(times: float) -> float:
    return min(max(1.0, times), LONGER_MAX)


def home_of(body: CommitBody) -> str:
    """Return the directory of a checkpoint as other checkpoints of the run refer to it."""
    return f"{body.home}/{body.dir}" if body.home else body.dir


def rows_of(directory: str, packs: Iterable[Pack]) -> Rows:
    """Return the locations of a checkpoint's chunks. ``directory``: from ``home_of``."""
    rows: Rows = []
    run = directory.rpartition("/")[0]
    for pack in packs:
        own, offset = (directory, pack.file if pack.stored is None else stored_file(pack.file)), 0
        others = pack.stored.homes if pack.stored is not None else []
        homes = [
            own,
            *(
                (f"{run}/{directory_name}" if run and "/" not in directory_name else directory_name, file)
                for directory_name, file in others
            ),
        ]
        row = []
        for number, (length, value) in enumerate(pack.chunks):
            piece = (
                ChunkLocation(OWN, offset, length, False, value) if pack.stored is None else pack.stored.pieces[number]
            )
            row.append(IndexedChunk(piece, tuple(homes[link.home] for link in piece.links())))
            offset += length
        rows.append(row)
    return rows


def chunks_of(packs: Iterable[Pack], rows: Rows) -> Chunks:
    """Return the locations in ``rows`` by hash and length."""
    return {
        (value, length): where
        for pack, row in zip(packs, rows, strict=True)
        for (length, value), where in zip(pack.chunks, row, strict=True)
        if where.piece.codec.portable
    }


def placed(where: IndexedChunk, homes: dict[tuple[str, str], int]) -> ChunkLocation:
    """Return the location relative to this pack's list of files ``homes``, which may grow."""
    links = list(where.piece.links())
    piece: ChunkLocation | None = None
    for link, home in zip(reversed(links), reversed(where.homes), strict=True):
        piece = msgspec.structs.replace(link, home=homes.setdefault(home, len(homes) + 1), base=piece)
    assert piece is not None
    return piece
