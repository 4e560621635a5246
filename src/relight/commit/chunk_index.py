"""What an attempt's earlier saves have shown: chunks that need not be written again, and whether coding others pays."""

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
from relight.policy.compact import DRAG, EQUAL_MIN, LONGER_MAX, RECOVERS, Choice, Compact, Conditions, Experience, choose

if TYPE_CHECKING:
    from relight.commit.nvcomp import OnGpu
    from relight.commit.pack_writer import WriteStats
    from relight.format.entropy import Compress


class IndexedChunk(NamedTuple):
    """A chunk's stored bytes, and the files that ``home`` of it and of what it differs from means, as ``(directory, file)``."""

    piece: ChunkLocation
    homes: tuple[tuple[str, str], ...]
    """One for each link of the chain."""


MARKS, MARK_BYTES = 4, 16
"""Samples of each chunk that show at once that it changed, and the bytes of one."""
OLDER_SAVES, OLDER_MAX = 8, 100_000
"""Chunks that the last save does not have and an earlier one had: for how many saves they are remembered, and how many of them."""
MEASURED_BYTES_MIN = 1 << 20
SEEN_S_MIN = 1e-3
"""Hashing for less than that does not tell how crowded the processors are."""
MOST = 0.5
"""Of a save so much must have been stored, rather than lain with an earlier one, to tell how long coding and storing take together."""
DONORS_MAX = 60
"""A rank of several says by a bit of a number whose bytes it needs; and a reader has all of them open."""
Chunks = dict[tuple[bytes, int], IndexedChunk]
"""By hash and length."""
Rows = list[list[IndexedChunk]]
"""By pack, and number in it."""


class PreviousSave(NamedTuple):
    """The bytes of a save that was committed, still in memory: its id, its packs, and whether they are still what they were."""

    id: str
    packs: Sequence[memoryview]
    still: Callable[[], bool]


class UnchangedTensors(NamedTuple):
    """Whoever saves vouches for some tensors, by their numbers: they are what they were in the checkpoint ``id``."""

    id: str
    tensors: frozenset[int]
    wrong: Callable[[str], None] | None
    """To be told the name of one that is not; then it vouches for none. None: what is read now is not what it goes by."""


class KnownChunks(NamedTuple):
    """What a save may make use of: chunks that are there, and those of the save before to code differences from."""

    chunks: Chunks
    rows: Rows
    before: PreviousSave | None
    hashes: Sequence[Sequence[tuple[int, bytes]]] = ()
    """Length and hash of the chunks of the save before, by pack and number."""
    same: frozenset[int] = frozenset()
    """Tensors that are in that one as they are in this."""

    def there(self, pack: int, number: int, length: int) -> tuple[bytes, IndexedChunk] | None:
        """Hash of the chunk in that place of the save before, and where it is stored; None if there is no such, or it is of no use."""
        if pack >= len(self.hashes) or number >= len(self.hashes[pack]):
            return None
        then, value = self.hashes[pack][number]
        where = self.chunks.get((value, length)) if then == length else None
        return None if where is None else (value, where)

    def base(self, pack: int, number: int, at: int, length: int) -> tuple[memoryview, IndexedChunk] | None:
        """The chunk in that place of the save before, and where it is stored."""
        if self.before is None or pack >= len(self.rows) or number >= len(self.rows[pack]) or pack >= len(self.before.packs):
            return None
        data, where = self.before.packs[pack][at : at + length], self.rows[pack][number]
        fits = len(data) == length and len(where.homes) < CHAIN_MAX and not where.piece.derived and not where.piece.lossy
        return (data, where) if fits else None


NOTHING = KnownChunks({}, [], None)


@dataclass(slots=True)
class IncrementalState:
    """How an attempt's saves are stored; learns from each."""

    rules: Compact = field(default_factory=Compact)
    seen: Experience = field(default_factory=Experience)
    chunks: Chunks = field(default_factory=dict)
    """Those of the last checkpoint."""
    rows: Rows = field(default_factory=list)
    """The same, by their places."""
    hashes: Sequence[Sequence[tuple[int, bytes]]] = ()
    audited: int = 0
    """How many chunks were compared that are said to be unchanged."""
    older: dict[tuple[bytes, int], tuple[int, IndexedChunk]] = field(default_factory=dict)
    """Chunks of earlier saves that the last one does not have, by hash and length: in which save they were last, and where they are."""
    marks: dict[tuple[int, int], bytes] = field(default_factory=dict)
    """Samples of each chunk of the last save, by pack and number: what has none in common with them is no chunk of that save."""
    older_marks: list[frozenset[bytes]] = field(default_factory=list)
    """The samples of the saves before it, the newest first."""
    saves: int = 0
    """Saves of this attempt so far."""
    born: dict[str, int] = field(default_factory=dict)
    """Of the checkpoints that a save may need, by id: the number that ``saves`` had when each was committed."""
    base: int = 0
    """The number of its COMMIT."""
    donors: tuple[str, ...] = ()
    """Its id, and those that it requires: whose bytes a save that shares with it may need."""
    chosen: Choice | None = None
    """What the save that is being made is; None if it was not asked for."""
    looked: bool = False
    """Whether it was looked for a checkpoint that somebody else had written before."""

    gpu: OnGpu | None = None
    no_gpu: str = ""
    """Why there is none, once it was looked for."""

    def choice(self, under: Conditions) -> Choice:
        """What the next save is to be."""
        self.chosen = choose(self.rules, self.seen, under)
        if self.chosen.coded and self.rules.coder == "gpu":
            self.coder()
            why = self.no_gpu if self.gpu is None else self.gpu.why_not
            who = f"by processors: {why}" if why else "by nvCOMP, on the GPU"
            self.chosen = self.chosen._replace(reason=f"{self.chosen.reason}; {who}")
        return self.chosen

    def coder(self) -> Compress:
        """Who makes frames of planes. A GPU is looked for once, if one is asked for."""
        from relight.format.entropy import Leveled, compress

        if self.rules.level is not None:
            return Leveled(self.rules.level)
        if self.rules.coder == "gpu" and self.gpu is None and not self.no_gpu:
            from relight.commit.nvcomp import on_gpu  # with numpy, which takes a tenth of a second to import

            self.gpu, self.no_gpu = on_gpu()
        return compress if self.gpu is None else self.gpu.compress

    def distrust(self, verified: Mapping[str, bool]) -> None:
        """``verified``: which checkpoints were found to verify, or not. What is damaged is stored anew."""
        if self.donors and any(verified.get(one) is False for one in self.donors):
            self.forget()

    def check_there(self, live: Collection[str]) -> None:
        """Another may have saved since, and retired what this one goes by."""
        if not set(self.donors) <= set(live):
            self.forget()
        self.older = {key: one for key, one in self.older.items() if all(_id_of(directory) in live for directory, _ in one[1].homes)}

    def known(self, before: PreviousSave | None, vouched: UnchangedTensors | None = None, *, older: bool = False) -> KnownChunks:
        """What the save that was chosen for may make use of. ``older``: chunks of saves before the last one as well. Several ranks name
        the checkpoints that they need by their places in a list of the last save's, so they leave ``older`` out."""
        if self.chosen is None or len(self.donors) > DONORS_MAX:
            return NOTHING
        fits = before is not None and self.chosen.differences and self.donors[:1] == (before.id,)
        same = vouched.tensors if vouched is not None and self.donors[:1] == (vouched.id,) else frozenset[int]()
        chunks = self.chunks if self.chosen.reuse else {}
        if older and chunks and self.older:
            chunks = {**{key: where for key, (_, where) in self.older.items()}, **chunks}
        return KnownChunks(chunks, self.rows, before if fits else None, self.hashes, same)

    def record_cost(self, spent: WriteStats, under: Conditions, lanes: int, whole: int, took_s: float) -> None:
        """What the store took that wrote ``lanes`` files at a time, hashing, coding, and all of a save of ``whole`` bytes. Of a few bytes
        that says nothing."""
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
        rates = {one.kind: one.code_s_per_byte for one in seen.samples or ()}
        should = sum(length * rates[kind] for kind, (length, _) in spent.coded.items() if kind in rates)
        if should > 0:
            seen.strain = _bounded(sum(seconds for kind, (_, seconds) in spent.coded.items() if kind in rates) / should)
        coding_s, paced = sum(seconds for _, seconds in spent.coded.values()), under.bytes_per_second
        alone = max(spent.seconds, coding_s / under.threads, spent.bytes / paced if paced else 0.0)
        if alone > 0 and spent.bytes >= MOST * whole:
            seen.drag = _bounded((took_s - spent.waited_s) / alone)

    def forget(self) -> None:
        """Have the next save store everything itself."""
        self.chunks, self.rows, self.hashes, self.base, self.donors, self.older = {}, [], (), 0, (), {}
        self.seen.equal = self.seen.alike = self.seen.untrained = None
        self.marks, self.older_marks = {}, []

    def seed_from(self, body: CommitBody, seq: int, part: Part, untrained: float, keeps: Collection[str]) -> None:
        """Before the first save: a checkpoint of the run, record ``seq`` of its log, that somebody else has written; and what share of the
        save nothing trains. ``keeps``: of one that lies in another run, the ids that are kept there as long as it is lent."""
        of_use = {body.id, *(keeps if body.home else body.requires)}

        def is_kept(directory: str) -> bool:
            parsed = parse_home(directory)
            return parsed is not None and parsed[0] == body.home and parsed[1].id in of_use

        there = chunks_of(part.packs, rows_of(home_of(body), part.packs))
        self.chunks = {key: where for key, where in there.items() if all(is_kept(directory) for directory, _ in where.homes)}
        if self.chunks:
            self.base, self.donors, self.seen.untrained = seq, (body.id, *body.requires), untrained

    def update(self, directory: CheckpointDir, part: Part, seq: int, requires: Sequence[str]) -> None:
        """The checkpoint that was committed last, as record ``seq``, and whose bytes it requires."""
        self.base, self.donors = seq, (directory.id, *requires)
        before, self.rows = self.chunks, rows_of(str(directory), part.packs)
        self.chunks, self.hashes = chunks_of(part.packs, self.rows), [pack.chunks for pack in part.packs]
        self.saves += 1
        self.born[directory.id] = self.saves
        if not requires and self.rules.full_every is not None and self.seen.since_full >= self.rules.full_every:
            self.older = {}  # this save was to need no earlier one, so the next ones start from it
        else:
            self._remember(before)
        if before:
            total = sum(length for pack in part.packs for length, _ in pack.chunks)
            equal = sum(length for pack in part.packs for length, value in pack.chunks if (value, length) in before)
            self.seen.equal = equal / max(total, 1)
        oldest = min((self.born[one] for one in requires if one in self.born), default=None)
        ages = self.seen.since_full + 1 if oldest is None else self.saves - oldest + 1
        self.seen.since_full = ages if requires else 1
        self.born = {one: number for one, number in self.born.items() if one in self.donors or self.saves - number <= OLDER_SAVES}

    @property
    def wants_samples(self) -> bool:
        """Whether samples of the next save's chunks must decide if it is compared with earlier ones: the last two had little in common."""
        self.seen.alike = None
        return bool(self.marks) and (self.seen.equal or 0) < EQUAL_MIN

    def remember_marks(self, marks: dict[tuple[int, int], bytes]) -> None:
        """Take the samples of the save that was learned last."""
        self.older_marks = [frozenset(self.marks.values()), *self.older_marks][: OLDER_SAVES - 1] if self.older else []
        self.marks = marks

    def may_be_there(self, place: tuple[int, int], mark: bytes) -> bool:
        """Whether a chunk with such samples may be, in whole or in part, that of the last save at its place, or an older save's."""
        then = self.marks.get(place, b"")
        pieces = range(0, min(len(mark), len(then)), MARK_BYTES)
        alike = any(mark[at : at + MARK_BYTES] == then[at : at + MARK_BYTES] for at in pieces)
        return alike or any(mark in older for older in self.older_marks)

    def _remember(self, before: Chunks) -> None:
        """Keep the chunks of the save before that the last one does not have: a later save may have them again."""
        kept = {key: one for key, one in self.older.items() if key not in self.chunks and self.saves - one[0] < OLDER_SAVES}
        for key, where in before.items():
            if key not in self.chunks:
                kept.pop(key, None)
                kept[key] = self.saves - 1, where
        surplus = len(kept) - OLDER_MAX
        self.older = dict(list(kept.items())[surplus:]) if surplus > 0 else kept


def _id_of(directory: str) -> str:
    """The id of the checkpoint whose directory that is; empty if it is none."""
    parsed = parse_home(directory)
    return parsed[1].id if parsed is not None else ""


def _bounded(times: float) -> float:
    return min(max(1.0, times), LONGER_MAX)


def home_of(body: CommitBody) -> str:
    """The directory of a checkpoint, as others of the run say it that have chunks of it."""
    return f"{body.home}/{body.dir}" if body.home else body.dir


def rows_of(directory: str, packs: Iterable[Pack]) -> Rows:
    """Where the chunks of a checkpoint are stored that lies in ``directory``, as ``home_of`` gives it."""
    found: Rows = []
    run = directory.rpartition("/")[0]
    for pack in packs:
        own, at = (directory, pack.file if pack.stored is None else stored_file(pack.file)), 0
        others = pack.stored.homes if pack.stored is not None else []
        homes = [own, *((f"{run}/{one}" if run and "/" not in one else one, file) for one, file in others)]
        row = []
        for number, (length, value) in enumerate(pack.chunks):
            piece = ChunkLocation(OWN, at, length, False, value) if pack.stored is None else pack.stored.pieces[number]
            row.append(IndexedChunk(piece, tuple(homes[link.home] for link in piece.links())))
            at += length
        found.append(row)
    return found


def chunks_of(packs: Iterable[Pack], rows: Rows) -> Chunks:
    """The same, by what is in them."""
    return {
        (value, length): where
        for pack, row in zip(packs, rows, strict=True)
        for (length, value), where in zip(pack.chunks, row, strict=True)
        if not where.piece.derived
    }


def placed(where: IndexedChunk, homes: dict[tuple[str, str], int]) -> ChunkLocation:
    """The piece, as this pack says it."""
    links = list(where.piece.links())
    piece: ChunkLocation | None = None
    for link, home in zip(reversed(links), reversed(where.homes), strict=True):
        piece = msgspec.structs.replace(link, home=homes.setdefault(home, len(homes) + 1), base=piece)
    assert piece is not None
    return piece
