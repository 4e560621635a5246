"""Reading everything again, before it is needed: what is damaged in one tier is written anew from another that has it whole.

A file's name stands for its bytes: a pack's by the hashes of its chunks, a part's by the root's word, the root's by the record's. So
putting the right bytes there again changes nothing that anybody could have relied on. What no tier has whole stays as it is, and is told.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import msgspec

from relight.catalog import Run, VerifyFinding, verify_checkpoint
from relight.catalog.checked import record_checked
from relight.catalog.packs import open_pack
from relight.catalog.tiers import Merged, Reach, TierCopy, merge, reach_all, read_tier
from relight.drain.outwards import Tell
from relight.errors import CheckpointNotFound, CorruptCheckpoint, RelightError
from relight.format import Digest, PartRef, Root, decode_part, decode_root, encode_part, encode_root, hexdigest
from relight.format.manifest import PART_BYTES_MAX, STORED_CHUNKS, STORING, Pack, Ways, adopt_part
from relight.format.names import ROOT_FILE
from relight.format.strict import ROOT_BYTES_MAX
from relight.log import Checkpoint
from relight.store import ByteStore, Reader, page_buffer
from relight.store.base import write_whole
from relight.store.wrapper import rewrites
from relight.transfer.copying import COPIED_FROM, write_pack_from
from relight.transfer.stored_there import own_chunks, packs_there


class Damage(NamedTuple):
    """One file of one tier that is not what was committed. ``repaired_from`` is the tier that had it whole; "" if none did."""

    tier: str
    id: str
    file: str
    detail: str
    repaired_from: str = ""


@dataclass(slots=True)
class Scrubbed:
    """What was read, and what was found."""

    checkpoints: int = 0
    bytes: int = 0
    damage: list[Damage] = field(default_factory=list)
    silent: dict[str, RelightError] = field(default_factory=dict)
    """Tiers that did not answer."""


def scrub(
    store: ByteStore,
    run: str,
    *,
    repair: bool = True,
    bytes_per_second: float | None = None,
    tell: Tell = lambda name, say, fields: None,
    progress: Callable[[int], None] | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> Scrubbed:
    """Verify every live checkpoint of every tier, nearest tier and newest checkpoint first, or the oldest where some need others' bytes;
    write anew what another tier has whole.

    Cost: one read of everything, at ``bytes_per_second`` at most. Nothing is repaired in a tier that does not answer, or from one.
    """
    report, pace = Scrubbed(), _ScrubPace(bytes_per_second, progress)
    reaches = _reaches(store, run)
    report.silent = {reach.name: reach.error for reach in reaches if reach.error is not None}
    merged = merge([reach.history for reach in reaches])
    for place, reach in enumerate(reaches):
        found: dict[str, str] = {}
        live = reach.history.live
        if not any(one.requires for one in live):  # else what others need comes first: mended, it mends those, too
            live.reverse()
        for one in live:
            if stop():
                record_checked(reach.store, reach.run, found, "relight scrub")
                return report
            found[one.id] = _scrub_one(_TierCheckpoint(reaches, merged, place, one), report, pace, repair, tell)
        record_checked(reach.store, reach.run, found, "relight scrub")
    return report


_ALONE: Sequence[Ways] = (partial(packs_there, there={}, coded=True), partial(packs_there, there={}, coded=False))


class _ScrubPace:
    def __init__(self, limit: float | None, progress: Callable[[int], None] | None) -> None:
        self._limit, self._progress = limit, progress
        self._began, self.read = time.monotonic(), 0

    def __call__(self, length: int) -> None:
        self.read += length
        if self._progress is not None:
            self._progress(length)
        if self._limit:
            time.sleep(max(0.0, self.read / self._limit - (time.monotonic() - self._began)))


class _TierCheckpoint(NamedTuple):
    """A checkpoint in one tier, and all that is known of the others."""

    reaches: Sequence[Reach]
    merged: Merged
    place: int
    one: Checkpoint

    @property
    def here(self) -> Reach:
        return self.reaches[self.place]

    @property
    def prefix(self) -> str:
        return self.one.lies_in(self.here.run)

    @property
    def others(self) -> list[TierCopy]:
        return [copy for copy in self.merged.copies.get(self.one.original_id, []) if copy.place != self.place]


def _reaches(store: ByteStore, run: str) -> list[Reach]:
    reaches = reach_all(store, run)
    if reaches[0].error is not None:
        raise reaches[0].error
    if reaches[0].view is None:
        raise CheckpointNotFound(f"no run {run!r} here", where=store.url)
    return reaches


def _scrub_one(at: _TierCheckpoint, report: Scrubbed, pace: _ScrubPace, repair: bool, tell: Tell) -> str:
    """Read one, and repair what can be; return what is still wrong with it, empty if nothing is."""
    findings = _verify(at, pace)
    report.checkpoints += 1
    report.bytes = pace.read
    for _ in range(3):  # root, then parts, then packs: what is in one says what the next should be
        damaged = {found.file: found for found in findings}
        if not damaged:
            return ""
        mended = {file: source for file in damaged if repair and (source := _repair(at, file))}
        for file, source in mended.items():
            found = Damage(at.here.name, at.one.id, file, damaged[file].detail, source)
            report.damage.append(found)
            say = f"{at.here.name}: {file} was damaged ({found.detail}), and is whole again, from {source}"
            tell("scrub.repaired", say, found._asdict())
        if not mended:
            break
        findings = _verify(at, pace)
    for file, finding in {found.file: found for found in findings}.items():
        lost = Damage(at.here.name, at.one.id, file, finding.detail)
        report.damage.append(lost)
        tell("scrub.damaged", f"{at.here.name}: {file} is damaged ({finding.detail}), and no tier has it whole", lost._asdict())
    return f"{findings[0].file}: {findings[0].detail}{', and no tier has it whole' if repair else ''}" if findings else ""


def _verify(at: _TierCheckpoint, pace: _ScrubPace) -> list[VerifyFinding]:
    """Nothing is wrong with what retention has taken meanwhile."""
    view = at.here.view
    assert view is not None
    findings = verify_checkpoint(at.here.store, view, at.one, progress=pace)
    if findings and read_tier(at.here.name, at.here.store, at.here.run).history.find(at.one.id) is None:
        return []
    return [found for found in findings if not found.is_silence]


def _repair(at: _TierCheckpoint, file: str) -> str:
    """Write ``file`` anew; the tier it came from, "" if none has what it takes."""
    name = file.rpartition("/")[2]
    with contextlib.suppress(RelightError):
        if name == ROOT_FILE:
            return _repair_root(at)
        root = _root_of(at.here, at.one)
        ref = next((ref for ref in root.parts if ref.file == name), None)
        if ref is not None:
            return _repair_part(at, root, ref)
        return _repair_pack(at, root, name)
    return ""


def _repair_root(at: _TierCheckpoint) -> str:
    """The root as it was written here, of another's, the record, and the parts, wherever they are whole. What does not have the hash
    that the record names is not taken."""
    for copy in at.others:
        reach = at.reaches[copy.place]
        with contextlib.suppress(RelightError):
            root = _root_of(reach, copy.checkpoint)
            for way in (list, *_ways(at)):
                found = _root_here(at, root, way)
                if found is not None:
                    _rewrite(at, ROOT_FILE, found)
                    return reach.name
    return ""


def _ways(at: _TierCheckpoint) -> list[Ways]:
    """How this tier may store what another one has otherwise: by itself, or with those that it requires here."""
    found = list(_ALONE)
    if at.one.body.requires:
        with contextlib.suppress(RelightError):
            run = Run(at.here.store, at.here.run)
            donors = [one for one in at.here.history.there if one.id in at.one.body.requires]
            for order in (donors[::-1], donors):
                there = own_chunks(run, order)
                found += [partial(packs_there, there=there, coded=coded) for coded in (True, False)]
    return found


def _root_here(at: _TierCheckpoint, root: Root, way: Ways) -> bytes | None:
    """This tier's root, of another's, if its chunks are stored in that way."""
    body = at.one.body
    refs = [_ref_here(at, root, ref, way) for ref in root.parts]
    known = {"parents": body.parents, "stored_bytes": body.stored_bytes, "new_bytes": body.new_bytes, "parts": refs}
    own = {key: value for key, value in root.user.items() if key != COPIED_FROM}
    plain = [one for one in root.features if one not in STORING]
    for user in (root.user, own, {**own, COPIED_FROM: _origin(at)}):
        for features in (root.features, plain, [*plain, STORED_CHUNKS]):
            said = {**known, "user": user, "features": features, "requires": body.requires}
            data = encode_root(msgspec.structs.replace(root, **_identity(at), **said))
            if hexdigest(data) == body.root:
                return data
    return None


def _origin(at: _TierCheckpoint) -> dict[str, str]:
    """What a copy that was drained says of where it came from."""
    near = at.reaches[0].view
    return {"store": near.store_id, "run": near.run_id, "id": at.one.original_id} if near is not None else {}


def _ref_here(at: _TierCheckpoint, root: Root, ref: PartRef, way: Ways) -> PartRef:
    """What this tier's root says of a part of which ``root``, another tier's, says ``ref``."""
    for _, data in _everywhere(at, ref.file):
        with contextlib.suppress(RelightError):
            part, _ = adopt_part(data, root, ref, ref.file, _ALONE)
            mine = encode_part(msgspec.structs.replace(part, **_identity(at), packs=way(part.packs)))
            return PartRef(rank=ref.rank, file=ref.file, size=len(mine), hash=hexdigest(mine))
    raise CorruptCheckpoint("no tier has this part whole", where=ref.file)


def _repair_part(at: _TierCheckpoint, root: Root, ref: PartRef) -> str:
    ways = _ways(at)
    for name, data in _everywhere(at, ref.file):
        with contextlib.suppress(RelightError):
            _, mine = adopt_part(data, root, ref, ref.file, ways)
            _rewrite(at, ref.file, mine)
            return name
    return ""


def _everywhere(at: _TierCheckpoint, file: str) -> Iterator[tuple[str, bytes]]:
    """What lies under that name in each tier that has a copy, whole or not."""
    for copy in at.merged.copies.get(at.one.original_id, []):
        reach = at.reaches[copy.place]
        with contextlib.suppress(RelightError):
            yield reach.name, reach.store.get(f"{copy.checkpoint.lies_in(reach.run)}/{file}", PART_BYTES_MAX)


def _root_of(reach: Reach, one: Checkpoint) -> Root:
    where = f"{one.lies_in(reach.run)}/{ROOT_FILE}"
    return decode_root(reach.store.get(where, ROOT_BYTES_MAX), one.body.root, where)


def _identity(at: _TierCheckpoint) -> dict[str, object]:
    view, body = at.here.view, at.one.body
    assert view is not None
    return {"store": view.store_id, "run": view.run_id, "id": body.id, "step": body.step, "epoch": at.one.epoch}


def _repair_pack(at: _TierCheckpoint, root: Root, file: str) -> str:
    """All of it is read from others, each chunk from the nearest that has it: once to see whether it can be done, once to do it."""
    pack = _pack_of(at.here, at.one, root, file)
    if pack is None:
        return ""
    with contextlib.ExitStack() as files:
        readers: list[tuple[str, Reader]] = []
        for copy in at.others:
            reach = at.reaches[copy.place]
            with contextlib.suppress(RelightError):
                reader = _open_other(reach, copy.checkpoint, file)
                files.callback(reader.close)
                readers.append((reach.name, reader))
        used: set[str] = set()
        for _ in _chunks(pack, readers, used):
            pass
        key = f"{at.prefix}/{file}"
        _still_live(at)
        write_pack_from(rewrites(at.here.store).rewrite(key, pack.size), _chunks(pack, readers, used))
        at.here.store.sync(at.prefix)
        return ", ".join(sorted(used))


def _open_other(reach: Reach, one: Checkpoint, file: str) -> Reader:
    """That pack of another tier's copy, however it is stored there."""
    prefix = one.lies_in(reach.run)
    with contextlib.suppress(RelightError):
        pack = _pack_of(reach, one, _root_of(reach, one), file)
        if pack is not None:
            return open_pack(reach.store, prefix, pack)
    return reach.store.open(f"{prefix}/{file}")


def _pack_of(reach: Reach, one: Checkpoint, root: Root, file: str) -> Pack | None:
    """What the parts there say of that pack."""
    for ref in root.parts:
        where = f"{one.lies_in(reach.run)}/{ref.file}"
        part = decode_part(reach.store.get(where, PART_BYTES_MAX), root, ref, where)
        for pack in part.packs:
            if pack.file == file:
                return pack
    return None


def _chunks(pack: Pack, readers: Sequence[tuple[str, Reader]], used: set[str]) -> Iterator[memoryview]:
    """Each chunk from the first that has it whole; ``CorruptCheckpoint`` if none has."""
    room, at = page_buffer(max(length for length, _ in pack.chunks)), 0
    for number, (length, value) in enumerate(pack.chunks):
        piece = room[:length]
        for name, reader in readers:
            with contextlib.suppress(RelightError):
                reader.read_into(at, piece)
                if Digest(piece).digest() == value:
                    used.add(name)
                    break
        else:
            raise CorruptCheckpoint(f"chunk {number} is whole in no other tier", where=pack.file)
        yield piece
        at += length


def _rewrite(at: _TierCheckpoint, name: str, data: bytes) -> None:
    key = f"{at.prefix}/{name}"
    _still_live(at)
    write_whole(rewrites(at.here.store).rewrite(key, len(data)), data)
    at.here.store.sync(at.prefix)


def _still_live(at: _TierCheckpoint) -> None:
    """``CheckpointNotFound`` if retention has taken it: its directory is somebody's to delete."""
    if read_tier(at.here.name, at.here.store, at.here.run).history.find(at.one.id) is None:
        raise CheckpointNotFound(f"checkpoint {at.one.id} was retired", where=at.prefix)
