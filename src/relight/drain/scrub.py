"""Reads all stored bytes before they are needed (scrub), and rewrites damaged files of one tier from an undamaged copy
in another.

Hashes define a file's bytes: a pack's chunk hashes, a part's hash in the root, the root's hash in its record. So
writing the right bytes again changes nothing that a reader could have used. A file that no tier has undamaged stays
unchanged, and is reported.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import msgspec

from relight.catalog import Run
from relight.catalog.tiers import Merged, Reach, TierCopy, merge, reach_all, read_tier
from relight.drain.mirror_scrub import MirrorScrub, RebuiltDrives, report_repairs
from relight.drain.outwards import Notify
from relight.engines import IN_PROCESS, Engine
from relight.errors import CheckpointNotFound, CorruptCheckpoint, RelightError, StoreUnavailable, error_of
from relight.format import Digest, PartRef, Root, decode_part, decode_root, encode_part, encode_root, hexdigest
from relight.format.chunk_codecs import FEATURE
from relight.format.manifest import PART_BYTES_MAX, STORED_CHUNKS, Pack, Ways, adopt_part, is_storing
from relight.format.names import ROOT_FILE
from relight.format.root_keys import COPIED_FROM
from relight.format.strict import ROOT_BYTES_MAX
from relight.log import Checkpoint
from relight.reader import VerifyFinding, verify_checkpoint, verify_checkpoints
from relight.reader.pack_reader import open_pack
from relight.run_records.verification import record_checked
from relight.store import ByteStore, Reader, page_buffer
from relight.store.base import rewrites, write_whole
from relight.transfer.copying import write_pack_from
from relight.transfer.stored_there import own_chunks, packs_there


class Damage(NamedTuple):
    """A file of a tier that differs from what was committed.

    ``repaired_from``: the tier that had it undamaged; "" if none had.
    """

    tier: str
    id: str
    file: str
    detail: str
    repaired_from: str = ""


@dataclass(slots=True)
class Scrubbed:
    """Result of a scrub: what was read, and the damage."""

    checkpoints: int = 0
    bytes: int = 0
    damage: list[Damage] = field(default_factory=list)
    unread: list[Damage] = field(default_factory=list)
    """Files that could not be read or decoded: nothing is known about their bytes."""
    silent: dict[str, RelightError] = field(default_factory=dict)
    """Tiers that did not answer."""
    mirrors: dict[str, RebuiltDrives] = field(default_factory=dict)
    """The drives of each tier on a mirrored store."""


def scrub(
    store: ByteStore,
    run: str,
    *,
    repair: bool = True,
    new_drives: Sequence[str] = (),
    bytes_per_second: float | None = None,
    notify: Notify = lambda name, message, fields: None,
    progress: Callable[[int], None] | None = None,
    stop: Callable[[], bool] = lambda: False,
    engine: Engine = IN_PROCESS,
) -> Scrubbed:
    """Verify every live checkpoint of every tier, and rewrite damaged files that another tier has undamaged.

    The nearest tier comes first. Its newest checkpoint comes first; the oldest, if checkpoints need other checkpoints'
    bytes. Cost: one read of all bytes, at ``bytes_per_second`` at most. A tier that does not answer is neither repaired
    nor used for repair. Of a mirrored store both copies are read, and drives are rebuilt: those that were away, and
    ``new_drives``, directories of the nearest tier's store on drives that replace lost ones.
    The engine's processes read, unless the store is mirrored; this process repairs.
    """
    report, pace = Scrubbed(), _ScrubPace(bytes_per_second, progress)
    reaches = _reaches(store, run)
    report.silent = {reach.name: reach.error for reach in reaches if reach.error is not None}
    merged = merge([reach.history for reach in reaches])
    for place, reach in enumerate(reaches):
        mirror = (
            None
            if reach.view is None
            else MirrorScrub.of(reach.store, reach.run, repair, pace, () if place else new_drives)
        )
        results: dict[str, str] = {}
        repaired: dict[str, str] = {}
        live = reach.history.live
        # else donors come first: their repair also repairs checkpoints that need them
        if not any(checkpoint.requires for checkpoint in live):
            live.reverse()
        targets = [_TierCheckpoint(reaches, merged, place, checkpoint, mirror) for checkpoint in live]
        damage = _verify_all(targets, engine if mirror is None else IN_PROCESS, bytes_per_second, pace)
        for target in targets:
            if stop():
                _record(reach, repaired, results)
                return report
            known = len(report.damage)
            result = _scrub_one(target, next(damage), report, pace, repair, notify)
            if result is not None:
                results[target.checkpoint.id] = result
            for each in report.damage[known:]:
                if each.repaired_from:
                    repaired[each.id] = f"{each.file}: {each.detail}; it was repaired from {each.repaired_from}"
        _record(reach, repaired, results)
        if mirror is not None:
            report.mirrors[reach.name] = _end_mirror(mirror, reach, report, pace, notify)
    return report


def _record(reach: Reach, repaired: Mapping[str, str], results: Mapping[str, str]) -> None:
    """Record in the tier's log what was damaged, also if it was repaired: no save and no copy refers to its chunks from then on."""
    for by_id in (repaired, results):
        record_checked(reach.store, reach.run, by_id, "relight verify --repair")


def _verify_all(
    targets: Sequence[_TierCheckpoint], engine: Engine, bytes_per_second: float | None, pace: _ScrubPace
) -> Iterator[list[VerifyFinding]]:
    """Yield the damage of each checkpoint before anything is repaired."""
    if engine.is_local:
        yield from (_verify(target, pace) for target in targets)
        return
    views = [
        (target.here.store, target.here.view, target.checkpoint) for target in targets if target.here.view is not None
    ]
    damage = verify_checkpoints(views, engine, progress=pace.count, bytes_per_second=bytes_per_second)
    for target, findings in zip(targets, damage, strict=True):
        # a repair since then may have repaired this checkpoint, too
        yield _verify(target, pace) if findings else []


def _end_mirror(mirror: MirrorScrub, reach: Reach, report: Scrubbed, pace: _ScrubPace, notify: Notify) -> RebuiltDrives:
    """Verify the other runs on a mirrored store's drives, if a drive was rebuilt, and all files that no hash covers."""
    for run in mirror.other_runs:
        other = read_tier(reach.name, reach.store, run)
        merged = merge([other.history])
        for checkpoint in other.history.live:
            target = _TierCheckpoint([other], merged, 0, checkpoint, mirror)
            _scrub_one(target, _verify(target, pace), report, pace, mirror.repair, notify)
    rebuilt = mirror.end()
    report_repairs(mirror.report, reach.name, notify)
    for damage in mirror.report.damage:
        where = f"{damage.drive}: {damage.detail}"
        report.damage.append(Damage(reach.name, "", damage.file, where, damage.repaired_from))
    report.bytes = pace.read
    return rebuilt


_ALONE: Sequence[Ways] = (partial(packs_there, there={}, coded=True), partial(packs_there, there={}, coded=False))


class _ScrubPace:
    def __init__(self, limit: float | None, progress: Callable[[int], None] | None) -> None:
        self._limit, self._progress = limit, progress
        self._began, self.read = time.monotonic(), 0

    def count(self, length: int) -> None:
        """Count bytes that other processes have read, at their own pace."""
        self.read += length
        if self._progress is not None:
            self._progress(length)

    def __call__(self, length: int) -> None:
        self.count(length)
        if self._limit:
            time.sleep(max(0.0, self.read / self._limit - (time.monotonic() - self._began)))


class _TierCheckpoint(NamedTuple):
    """A checkpoint in one tier, and its copies in the others."""

    reaches: Sequence[Reach]
    merged: Merged
    place: int
    checkpoint: Checkpoint
    mirror: MirrorScrub | None = None

    @property
    def here(self) -> Reach:
        return self.reaches[self.place]

    @property
    def prefix(self) -> str:
        return self.checkpoint.directory_in(self.here.run)

    @property
    def others(self) -> list[TierCopy]:
        return [copy for copy in self.merged.copies.get(self.checkpoint.original_id, []) if copy.place != self.place]


def _reaches(store: ByteStore, run: str) -> list[Reach]:
    reaches = reach_all(store, run)
    if reaches[0].error is not None:
        raise reaches[0].error
    if reaches[0].view is None:
        raise CheckpointNotFound(f"no run {run!r} here", where=store.url)
    return reaches


def _scrub_one(
    target: _TierCheckpoint,
    findings: list[VerifyFinding],
    report: Scrubbed,
    pace: _ScrubPace,
    repair: bool,
    notify: Notify,
) -> str | None:
    """Repair what can be repaired of ``findings``, a checkpoint's damage.

    Return the first remaining damage as text; empty if there is none. None if no damage is known, but some files could not be read.
    """
    report.checkpoints += 1
    report.bytes = pace.read
    for _ in range(3):  # root, then parts, then packs: each has the hashes of the next
        damaged = {finding.file: finding for finding in findings}
        if not damaged:
            return ""
        repaired = {
            file: source
            for file, finding in damaged.items()
            if repair and _is_repairable(finding) and (source := _repair(target, file))
        }
        for file, source in repaired.items():
            damage = Damage(target.here.name, target.checkpoint.id, file, damaged[file].detail, source)
            report.damage.append(damage)
            text = f"{target.here.name}: {file} was damaged ({damage.detail}), and was repaired from {source}"
            notify("scrub.repaired", text, damage._asdict())
        if not repaired:
            break
        findings = _verify(target, pace)
    unread = [finding for finding in findings if finding.is_unknown]
    findings = [finding for finding in findings if not finding.is_unknown]
    for file, finding in {finding.file: finding for finding in unread}.items():
        report.unread.append(Damage(target.here.name, target.checkpoint.id, file, finding.detail))
    for file, finding in {finding.file: finding for finding in findings}.items():
        lost = Damage(target.here.name, target.checkpoint.id, file, finding.detail)
        report.damage.append(lost)
        notify(
            "scrub.damaged",
            f"{target.here.name}: {file} is damaged ({finding.detail}), and no tier has it whole",
            lost._asdict(),
        )
    if findings:
        return f"{findings[0].file}: {findings[0].detail}{', and no tier has it whole' if repair else ''}"
    return None if unread else ""


def _is_repairable(finding: VerifyFinding) -> bool:
    """Return whether writing the file again can help: it is damaged, or its store cannot read it, for example a bad sector."""
    return not finding.is_unknown or issubclass(error_of(finding.kind), StoreUnavailable)


def _verify(target: _TierCheckpoint, pace: _ScrubPace) -> list[VerifyFinding]:
    """Return all findings of a checkpoint; none if retention has retired it meanwhile."""
    view = target.here.view
    assert view is not None
    if target.mirror is not None:
        findings = target.mirror.verify(view, target.checkpoint)
    else:
        findings = verify_checkpoint(target.here.store, view, target.checkpoint, progress=pace)
    if (
        findings
        and read_tier(target.here.name, target.here.store, target.here.run).history.find(target.checkpoint.id) is None
    ):
        return []
    return findings


def _repair(target: _TierCheckpoint, file: str) -> str:
    """Rewrite ``file``. Return the tier that its bytes came from; "" if no tier has them."""
    name = file.rpartition("/")[2]
    with contextlib.suppress(RelightError):
        if name == ROOT_FILE:
            return _repair_root(target)
        root = _root_of(target.here, target.checkpoint)
        ref = next((ref for ref in root.parts if ref.file == name), None)
        if ref is not None:
            return _repair_part(target, root, ref)
        return _repair_pack(target, root, name)
    return ""


def _repair_root(target: _TierCheckpoint) -> str:
    """Rebuild this tier's root from another tier's root, the record, and undamaged parts of any tier.

    A result without the hash in the record is rejected.
    """
    for copy in target.others:
        reach = target.reaches[copy.place]
        with contextlib.suppress(RelightError):
            root = _root_of(reach, copy.checkpoint)
            for way in (list, *_ways(target)):
                data = _root_here(target, root, way)
                if data is not None:
                    _rewrite(target, ROOT_FILE, data)
                    return reach.name
    return ""


def _ways(target: _TierCheckpoint) -> list[Ways]:
    """Return the ways in which this tier may store a checkpoint's chunks: alone, or with the donors that it requires
    here."""
    ways = list(_ALONE)
    if target.checkpoint.body.requires:
        with contextlib.suppress(RelightError):
            run = Run(target.here.store, target.here.run)
            donors = [
                checkpoint
                for checkpoint in target.here.history.there
                if checkpoint.id in target.checkpoint.body.requires
            ]
            for order in (donors[::-1], donors):
                chunks = own_chunks(run, order)
                ways += [partial(packs_there, there=chunks, coded=coded) for coded in (True, False)]
    return ways


def _root_here(target: _TierCheckpoint, root: Root, way: Ways) -> bytes | None:
    """Return this tier's root, from another tier's root, if its chunks are stored in that way; else None."""
    body = target.checkpoint.body
    refs = [_ref_here(target, root, ref, way) for ref in root.parts]
    known = {"parents": body.parents, "stored_bytes": body.stored_bytes, "new_bytes": body.new_bytes, "parts": refs}
    own = {key: value for key, value in root.user.items() if key != COPIED_FROM.name}
    plain = [feature for feature in root.features if not is_storing(feature)]
    codecs = [feature for feature in root.features if feature.startswith(FEATURE)]
    for user in (root.user, own, {**own, **COPIED_FROM.field(_origin(target))}):
        for features in (root.features, plain, [*plain, STORED_CHUNKS], [*plain, STORED_CHUNKS, *codecs]):
            fields = {**known, "user": user, "features": features, "requires": body.requires}
            data = encode_root(msgspec.structs.replace(root, **_identity(target), **fields))
            if hexdigest(data) == body.root:
                return data
    return None


def _origin(target: _TierCheckpoint) -> dict[str, str]:
    """Return the origin that a drained copy's root names."""
    near = target.reaches[0].view
    return {"store": near.store_id, "run": near.run_id, "id": target.checkpoint.original_id} if near is not None else {}


def _ref_here(target: _TierCheckpoint, root: Root, ref: PartRef, way: Ways) -> PartRef:
    """Return this tier's reference to a part. ``root`` and ``ref`` are another tier's."""
    for _, data in _everywhere(target, ref.file):
        with contextlib.suppress(RelightError):
            part, _ = adopt_part(data, root, ref, ref.file, _ALONE)
            mine = encode_part(msgspec.structs.replace(part, **_identity(target), packs=way(part.packs)))
            return PartRef(rank=ref.rank, file=ref.file, size=len(mine), hash=hexdigest(mine))
    raise CorruptCheckpoint("every tier's copy of this file is damaged or missing", where=ref.file)


def _repair_part(target: _TierCheckpoint, root: Root, ref: PartRef) -> str:
    ways = _ways(target)
    for name, data in _everywhere(target, ref.file):
        with contextlib.suppress(RelightError):
            _, mine = adopt_part(data, root, ref, ref.file, ways)
            _rewrite(target, ref.file, mine)
            return name
    return ""


def _everywhere(target: _TierCheckpoint, file: str) -> Iterator[tuple[str, bytes]]:
    """Yield the bytes of that file in each tier that has a copy, damaged or not."""
    for name, store in target.mirror.copies if target.mirror is not None else ():
        with contextlib.suppress(RelightError):
            yield name, store.get(f"{target.prefix}/{file}", PART_BYTES_MAX)
    for copy in target.merged.copies.get(target.checkpoint.original_id, []):
        reach = target.reaches[copy.place]
        with contextlib.suppress(RelightError):
            yield reach.name, reach.store.get(f"{copy.checkpoint.directory_in(reach.run)}/{file}", PART_BYTES_MAX)


def _root_of(reach: Reach, checkpoint: Checkpoint) -> Root:
    where = f"{checkpoint.directory_in(reach.run)}/{ROOT_FILE}"
    return decode_root(reach.store.get(where, ROOT_BYTES_MAX), checkpoint.body.root, where)


def _identity(target: _TierCheckpoint) -> dict[str, object]:
    view, body = target.here.view, target.checkpoint.body
    assert view is not None
    return {
        "store": view.store_id,
        "run": view.run_id,
        "id": body.id,
        "step": body.step,
        "epoch": target.checkpoint.epoch,
    }


def _repair_pack(target: _TierCheckpoint, root: Root, file: str) -> str:
    """Rewrite a pack: each chunk from this tier if it is whole here, else from the nearest other tier that has it.

    Reads it twice: first to check, then to write.
    """
    pack = _pack_of(target.here, target.checkpoint, root, file)
    if pack is None:
        return ""
    with contextlib.ExitStack() as files:
        readers: list[tuple[str, Reader]] = []
        own = [(target.here.name, target.here.store)]
        for name, store in target.mirror.copies if target.mirror is not None else own:
            with contextlib.suppress(RelightError):
                reader = open_pack(store, target.prefix, pack)
                files.callback(reader.close)
                readers.append((name, reader))
        for copy in target.others:
            reach = target.reaches[copy.place]
            with contextlib.suppress(RelightError):
                reader = _open_other(reach, copy.checkpoint, file)
                files.callback(reader.close)
                readers.append((reach.name, reader))
        used: set[str] = set()
        for _ in _chunks(pack, readers, used):
            pass
        key = f"{target.prefix}/{file}"
        _still_live(target)
        write_pack_from(
            rewrites(target.here.store).rewrite(key, pack.size), _chunks(pack, readers, used), pack.size, key
        )
        target.here.store.sync(target.prefix)
        return ", ".join(sorted(used - {target.here.name}) or sorted(used))


def _open_other(reach: Reach, checkpoint: Checkpoint, file: str) -> Reader:
    """Open that pack of another tier's copy, whatever its encoding there."""
    prefix = checkpoint.directory_in(reach.run)
    with contextlib.suppress(RelightError):
        pack = _pack_of(reach, checkpoint, _root_of(reach, checkpoint), file)
        if pack is not None:
            return open_pack(reach.store, prefix, pack)
    return reach.store.open(f"{prefix}/{file}")


def _pack_of(reach: Reach, checkpoint: Checkpoint, root: Root, file: str) -> Pack | None:
    """Return that pack's description from the parts of that tier; None if no part has it."""
    for ref in root.parts:
        where = f"{checkpoint.directory_in(reach.run)}/{ref.file}"
        part = decode_part(reach.store.get(where, PART_BYTES_MAX), root, ref, where)
        for pack in part.packs:
            if pack.file == file:
                return pack
    return None


def _chunks(pack: Pack, readers: Sequence[tuple[str, Reader]], used: set[str]) -> Iterator[memoryview]:
    """Yield each chunk from the first reader that has it undamaged. Raise ``CorruptCheckpoint`` if none has."""
    room, offset = page_buffer(max(length for length, _ in pack.chunks)), 0
    for number, (length, value) in enumerate(pack.chunks):
        piece = room[:length]
        for name, reader in readers:
            with contextlib.suppress(RelightError):
                reader.read_into(offset, piece)
                if Digest(piece).digest() == value:
                    used.add(name)
                    break
        else:
            raise CorruptCheckpoint(f"chunk {number} is damaged or missing in every tier", where=pack.file)
        yield piece
        offset += length


def _rewrite(target: _TierCheckpoint, name: str, data: bytes) -> None:
    key = f"{target.prefix}/{name}"
    _still_live(target)
    write_whole(rewrites(target.here.store).rewrite(key, len(data)), data)
    target.here.store.sync(target.prefix)


def _still_live(target: _TierCheckpoint) -> None:
    """Raise ``CheckpointNotFound`` if retention has retired the checkpoint: its directory may be deleted at any
    time."""
    if read_tier(target.here.name, target.here.store, target.here.run).history.find(target.checkpoint.id) is None:
        raise CheckpointNotFound(f"checkpoint {target.checkpoint.id} was retired", where=target.prefix)
