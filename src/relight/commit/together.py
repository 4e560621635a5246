"""Several ranks, one checkpoint, no leader: whoever comes last commits, and anybody may.

Each rank writes packs and part and makes them durable; then it says so by an empty file whose *name* holds all that the commit needs to
know of its part (``ready-…``). Rank 0 has put down what the root says besides (``draft.json``). Who finds all ranks ready makes
``root.json`` of that, which comes out the same whoever makes it, and appends COMMIT, unless it is there.

``root.json`` is created once: it decides. A rank that gives up waiting creates it as *void*, and only then takes its files back: a
checkpoint that is complete in somebody's eyes cannot lose a part, and one that lost a part cannot be completed.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from relight.commit.plan import plan_save
from relight.commit.save import (
    Place,
    SaveReport,
    SaveRequest,
    Seat,
    check_part_written,
    commit_body,
    refuse_if_fenced,
    root_of,
    trainable_digest,
    write_part,
)
from relight.errors import CheckpointNotFound, CorruptCheckpoint, RelightError, SaveFailed, StoreUnavailable
from relight.format import Part, PartRef, Root, decode_root, encode_root, hexdigest
from relight.format.names import (
    DRAFT_FILE,
    LOG_DIR,
    ROOT_FILE,
    CheckpointDir,
    Ready,
    failed_file,
    parse_failed,
    parse_ready,
    part_file,
)
from relight.format.records import CommitBody
from relight.format.strict import ROOT_BYTES_MAX, from_json
from relight.log import View, fold
from relight.store import ByteStore, put
from relight.store.base import Uncertain
from relight.world import LateRanks, late

VOID = b"void\n"
"""What ``root.json`` begins with once a rank has given up; why, in words, comes behind it."""
_POLL_S = 0.002
_POLL_MAX_S = 0.05
_LOOK_AGAIN_S = 1.0
"""How often a rank that waits for the last one to commit looks whether it is the last one: that one may have died."""


class OthersFailed(SaveFailed):
    """Another rank could not save its part, or gave up waiting: the checkpoint does not exist on any."""

    kind = "others_failed"


def save_together(
    place: Place, request: SaveRequest, clock: Callable[[], float] = time.monotonic, sleep: Callable[[float], None] = time.sleep
) -> SaveReport:
    """Write this rank's part, wait for the others', and see the checkpoint committed. The same id and step on all of them.

    ``LateRanks`` names those who were not ready in time; ``OthersFailed`` says which rank could not save. Nothing shows then.
    """
    seat = request.seat
    assert seat is not None and request.id
    started = time.perf_counter()
    plan = request.plan or plan_save(request.items, id=request.id, rank=seat.rank)
    directory = CheckpointDir(request.step, request.id, place.epoch)
    prefix = f"{place.log.run}/{directory}"
    timings = {"plan": time.perf_counter() - started}
    try:
        part, data = write_part(place, request, plan, directory, prefix, timings)
        ready = _say_ready(place, request, directory, prefix, part, data, plan.logical_bytes, plan.stored_bytes + len(data), plan.proven)
        mark = time.perf_counter()
        root, seq = _await(place, directory, prefix, seat, clock, sleep, request.waits)
    except BaseException as error:
        _give_up(place.store, prefix, seat, error)
        raise
    plan.proven.add("read")
    for name in (ready.file, *([DRAFT_FILE] if seat.rank == 0 else [])):
        with contextlib.suppress(RelightError):
            place.store.delete(f"{prefix}/{name}")
    timings["commit"] = time.perf_counter() - mark
    timings["total"] = time.perf_counter() - started
    digest = trainable_digest(plan, part.packs)
    return SaveReport(request.id, request.step, str(directory), seq, root.logical_bytes, root.stored_bytes, timings, digest)


def _say_ready(
    place: Place,
    request: SaveRequest,
    directory: CheckpointDir,
    prefix: str,
    part: Part,
    data: bytes,
    logical: int,
    stored: int,
    proven: set[str],
) -> Ready:
    seat = request.seat
    assert seat is not None
    draft = root_of(place, request, directory, [], 0, 0)
    if seat.rank == 0:
        put(place.store, f"{prefix}/{DRAFT_FILE}", encode_root(draft))
    place.store.settle(prefix)
    ref = PartRef(rank=seat.rank, file=part_file(seat.rank), size=len(data), hash=hexdigest(data))
    looked_at = _with_parts(draft, [PartRef(rank=rank, file="", size=0, hash="") for rank in range(seat.world)], 0, 0)
    check_part_written(place.store, prefix, looked_at, ref, (part, data) if proven else (None, b""))
    ready = Ready(seat.rank, seat.plan, ref.hash, ref.size, stored, logical)
    put(place.store, f"{prefix}/{ready.file}", b"")
    return ready


def _await(
    place: Place,
    directory: CheckpointDir,
    prefix: str,
    seat: Seat,
    clock: Callable[[], float],
    sleep: Callable[[float], None],
    waits: Callable[[], bool] | None,
) -> tuple[Root, int]:
    """Until it is committed, by whomever. The root, and the number of its record."""
    began = clock()
    ends = began + seat.timeout_s
    pause, looked, missing = _POLL_S, -_LOOK_AGAIN_S, list[int]()
    doubt: Uncertain | None = None  # once a commit is in doubt, no later error says that there is none
    while True:
        now = clock()
        if waits is not None and not waits():
            ends = min(ends, now)
        try:
            if now - looked >= _LOOK_AGAIN_S or now >= ends:  # at first, and again now and then: who should have completed it may be gone
                looked = now
                missing = _complete(place, prefix, seat)
                if missing:
                    refuse_if_fenced(place.log.read(), place.epoch)
            root = _root(place, directory, prefix)
            if root is not None:  # whoever made it may have been killed between its name and that being durable
                place.store.settle(prefix)
                return root, _append(place, directory, root)
            if now >= ends:
                error = late(missing, f"writing their parts of checkpoint {directory.id} (step {directory.step})", now - began)
                if _void(place.store, prefix, error.what):
                    raise error
        except StoreUnavailable as error:
            doubt = error if isinstance(error, Uncertain) else doubt
            if now >= ends:
                raise doubt or error from None
        sleep(min(pause, max(_POLL_S, ends - now)))
        pause = min(pause * 1.2, _POLL_MAX_S)


def _complete(place: Place, prefix: str, seat: Seat) -> list[int]:
    """Make ``root.json`` if all are ready; those who are not."""
    store = place.store
    found: dict[int, Ready] = {}
    for entry in store.list(prefix):
        ready = parse_ready(entry.name)
        if ready is not None:
            found[ready.rank] = ready
        else:
            failed = parse_failed(entry.name)
            if failed is not None:
                _void(store, prefix, f"rank {failed[0]} could not save its part: {failed[1]}")
                return []
    missing = [rank for rank in range(seat.world) if rank not in found]
    if missing:
        return missing
    others = [rank for rank, ready in sorted(found.items()) if ready.plan != seat.plan]
    if others:
        _void(store, prefix, f"ranks {others[:8]} hold other tensors than rank {seat.rank} was told of")
        return []
    try:
        draft = from_json(store.get(f"{prefix}/{DRAFT_FILE}", ROOT_BYTES_MAX), prefix, ROOT_BYTES_MAX)
    except CheckpointNotFound:  # rank 0 has seen it committed, and tidied up
        return []
    store.settle(place.log.run)  # the directory's own name: whoever made it may not have come to that
    store.put_once(f"{prefix}/{ROOT_FILE}", encode_root(_joined(draft, [found[rank] for rank in range(seat.world)])))
    return []


def _joined(draft: Mapping[str, Any], ready: list[Ready]) -> Root:
    refs = [PartRef(rank=one.rank, file=part_file(one.rank), size=one.size, hash=one.hash) for one in ready]
    return _with_parts(msgspec.convert(draft, Root), refs, sum(one.logical for one in ready), sum(one.stored for one in ready))


def _with_parts(draft: Root, parts: list[PartRef], logical: int, stored: int) -> Root:
    return msgspec.structs.replace(
        draft, parts=parts, world=len(parts), logical_bytes=logical, stored_bytes=stored, new_bytes=stored
    )


def _root(place: Place, directory: CheckpointDir, prefix: str) -> Root | None:
    """The root if it is made. ``OthersFailed``, which says why, if it is void."""
    data = _get(place.store, f"{prefix}/{ROOT_FILE}")
    if data is None:
        return None
    if data.startswith(VOID):
        why = data[len(VOID) : 1000].decode("utf-8", "replace").strip()
        raise OthersFailed(f"given up: {why}", where=prefix, hint="that rank's own log says more")
    root = decode_root(data, hexdigest(data), f"{prefix}/{ROOT_FILE}")
    if (root.store, root.run, root.id, root.epoch) != (place.store_id, place.run_id, directory.id, place.epoch):
        raise CorruptCheckpoint("root.json is another checkpoint's", where=prefix)
    return root


def _append(place: Place, directory: CheckpointDir, root: Root) -> int:
    """COMMIT, unless it is there; its number."""
    data = encode_root(root)
    body = commit_body(root, str(directory), hexdigest(data), len(data))
    there: list[int] = []

    def decide(view: View) -> tuple[CommitBody, int] | None:
        found = fold(view).find(root.id)
        if found is not None:
            there.append(found.seq)
            return None
        refuse_if_fenced(view, place.epoch)
        return body, place.epoch

    record = place.log.append(decide)
    if record is not None:
        return record.seq
    place.store.settle(f"{place.log.run}/{LOG_DIR}")  # whoever appended it may not have come to that
    return there[-1]


def _void(store: ByteStore, prefix: str, why: str) -> bool:
    """Call the checkpoint off, for everybody and for good. False if it is complete: then it cannot be."""
    store.put_once(f"{prefix}/{ROOT_FILE}", VOID + f"{why}\n".encode())
    return (_get(store, f"{prefix}/{ROOT_FILE}") or b"").startswith(VOID)


def _give_up(store: ByteStore, prefix: str, seat: Seat, error: BaseException) -> None:
    """Tell the others, call the checkpoint off, and take back what this rank wrote; nothing of it if it is complete, or may be.

    ``root.json`` stays, void, as long as the attempt lasts.
    """
    with contextlib.suppress(RelightError):
        if not isinstance(error, (OthersFailed, LateRanks)):
            kind = error.kind if isinstance(error, RelightError) else "save_failed"
            put(store, f"{prefix}/{failed_file(seat.rank, kind)}", b"")
        why = error.what if isinstance(error, RelightError) else f"{type(error).__name__}: {error}"
        if not _void(store, prefix, f"rank {seat.rank} could not save its part: {why}"):
            return
        mark = f"-{seat.rank:05d}"
        for entry in sorted(store.list(prefix), key=lambda entry: not entry.name.startswith("ready")):
            if entry.name.startswith((f"ready{mark}", f"part{mark}", f"pack{mark}")) or (entry.name == DRAFT_FILE and not seat.rank):
                store.delete(f"{prefix}/{entry.name}")


def _get(store: ByteStore, key: str) -> bytes | None:
    try:
        return store.get(key, ROOT_BYTES_MAX)
    except CheckpointNotFound:
        return None
