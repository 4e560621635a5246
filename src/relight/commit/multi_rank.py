"""Several ranks, one checkpoint, no leader: whoever comes last commits, and anybody may.

Each rank writes packs and part and makes them durable; then it says so by an empty file whose *name* holds all that the commit needs to
know of its part (in ``ready/``). Rank 0 has put down what the root says besides (``draft.json``). Who finds all ranks ready, the last one
as a rule, makes ``root.json`` of that, which comes out the same whoever makes it, and appends COMMIT, unless it is there. The others look
for the root, and then for the COMMIT: but for that one, nobody reads what grows with the number of ranks more than once.

``root.json`` is created once: it decides. A rank that gives up waiting creates it as *void*, and only then takes its files back: a
checkpoint that is complete in somebody's eyes cannot lose a part, and one that lost a part cannot be completed.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from relight.comm import RankTimeout, late
from relight.commit.parallel_packs import lanes_of_rank
from relight.commit.plan import SavePlan, plan_save
from relight.commit.save import (
    CommitTarget,
    DonorRetired,
    Participant,
    SaveReport,
    SaveRequest,
    check_part_written,
    commit_body,
    read_back,
    refuse_if_fenced,
    refuse_without_donors,
    root_of,
    trainable_digest,
    write_part,
)
from relight.commit.seed_index import with_lenders
from relight.decode import from_plain
from relight.errors import CheckpointNotFound, ConfigError, CorruptCheckpoint, RelightError, SaveFailed, StoreUnavailable, known
from relight.format import Part, PartRef, Root, decode_root, encode_root, hexdigest
from relight.format.manifest import OTHER_RUNS, SHORT_PARTS, STORED_CHUNKS, donors_of, storing
from relight.format.names import (
    DRAFT_FILE,
    PLAN_DIGITS,
    READY_DIR,
    ROOT_FILE,
    CheckpointDir,
    Ready,
    failed_file,
    parse_failed,
    parse_ready,
    part_file,
    ready_rank,
)
from relight.format.records import CommitBody
from relight.format.strict import ROOT_BYTES_MAX, from_json, to_json
from relight.log import History, LogView, fold
from relight.observe import record_span
from relight.store import ByteStore, put
from relight.store.base import Uncertain

WORDS = ("created", "reason", "parents", "metrics", "user", "environment", "components", "exact")
"""What the draft of a root holds: the rest is known to every rank, or comes from their parts."""
VOID = b"void\n"
"""What ``root.json`` begins with once a rank has given up; why, in words, comes behind it."""
_POLL_S = 0.001
"""The first pause of a rank that waits, two of them; more have longer ones: together they look twice a millisecond, or would keep the one
that commits, or the store, from its work."""
_POLL_MAX_S = 0.05
_LOOK_AGAIN_S = 1.0
"""When a rank that waits for the last one to commit looks again whether it is the last one: that one may have died. Then less often."""
_LOOK_AGAIN_MAX_S = 8.0
_GRACE_S = 0.2
"""How long whoever made the root has until others append the COMMIT."""


class OthersFailed(SaveFailed):
    """Another rank could not save its part, or gave up waiting: the checkpoint does not exist on any."""

    kind = "others_failed"


def save_multi_rank(
    place: CommitTarget, request: SaveRequest, clock: Callable[[], float] = time.monotonic, sleep: Callable[[float], None] = time.sleep
) -> SaveReport:
    """Write this rank's part, wait for the others', and see the checkpoint committed. The same id and step on all of them.

    ``LateRanks`` names those who were not ready in time; ``OthersFailed`` says which rank could not save. Nothing shows then.
    """
    seat = request.seat
    assert seat is not None and request.id
    if not place.store.properties().exclusive_create:
        raise ConfigError(
            "this store ignores 'create if absent': several ranks cannot agree in it on what is a checkpoint",
            where=place.store.url,
            hint='let one rank write: writer="rank 0", with RELIGHT_SINGLE_WRITER=1',
        )
    started = time.perf_counter()
    plan = request.plan or plan_save(request.items, id=request.id, rank=seat.rank, lanes=lanes_of_rank(place.store, seat.world))
    directory = CheckpointDir(request.step, request.id, place.epoch)
    prefix = f"{place.log.run}/{directory}"
    timings = {"plan": time.perf_counter() - started}
    said: list[Ready] = []
    try:
        part, data = write_part(place, request, plan, directory, prefix, timings)
        mark = time.perf_counter()
        said.append(_proven(place, request, directory, prefix, part, data, plan))
        put(place.store, f"{prefix}/{READY_DIR}/{said[0].file}", b"")
        record_span("parts", request.id, request.step, mark, ready := time.perf_counter(), rank=seat.rank)
        mark = ready
        committed, seq = _await(place, directory, prefix, seat, clock, sleep, request.waits)
    except BaseException as error:
        if isinstance(error, (DonorRetired, OthersFailed)) and request.smaller is not None:
            request.smaller.forget()  # only who completes it is told that a donor is gone
        _give_up(place.store, prefix, seat, error, bool(said))
        raise
    plan.proven.add("read")
    if request.smaller is not None:
        read_back(request.smaller, plan, directory, part, seq, committed.requires)
    with contextlib.suppress(RelightError):
        place.store.delete(f"{prefix}/{READY_DIR}/{said[0].file}")
        if seat.rank == 0:
            place.store.delete(f"{prefix}/{DRAFT_FILE}")
        place.store.delete_dir(f"{prefix}/{READY_DIR}")  # the last one's is empty
    timings["commit"] = time.perf_counter() - mark
    record_span("commit", request.id, request.step, mark, mark + timings["commit"], rank=seat.rank, world=seat.world)
    timings["total"] = time.perf_counter() - started
    digest = trainable_digest(plan, part.packs)
    return SaveReport(request.id, request.step, str(directory), seq, committed.logical_bytes, committed.stored_bytes, timings, digest)


def _proven(
    place: CommitTarget, request: SaveRequest, directory: CheckpointDir, prefix: str, part: Part, data: bytes, plan: SavePlan
) -> Ready:
    """What there is to be said of the part, once it is durable and reads back as it was written."""
    seat = request.seat
    assert seat is not None
    draft = root_of(place, request, directory, [], 0, 0)
    if seat.rank == 0:
        put(place.store, f"{prefix}/{DRAFT_FILE}", _words(draft))
    place.store.sync(prefix)
    ref = PartRef(rank=seat.rank, file=part_file(seat.rank), size=len(data), hash=hexdigest(data))
    donors, shares = donors_of(part.packs), any(pack.stored is not None for pack in part.packs)
    none = [PartRef(rank=rank, file="", size=0, hash="") for rank in range(seat.world)]
    looked_at = _with_parts(draft, none, 0, 0, 0, donors, storing(part.packs))
    check_part_written(place.store, prefix, looked_at, ref, (part, data) if plan.proven and not shares else (None, b""))
    stored = sum(pack.stored_bytes for pack in part.packs) + len(data)
    ready = Ready(seat.rank, seat.plan[:PLAN_DIGITS], ref.hash, ref.size, stored, plan.logical_bytes)
    if not shares or request.smaller is None:
        return ready
    new = sum(pack.new_bytes for pack in part.packs) + len(data)
    return ready._replace(new=new, base=request.smaller.base, donors=sum(1 << request.smaller.donors.index(one) for one in donors))


def _await(
    place: CommitTarget,
    directory: CheckpointDir,
    prefix: str,
    seat: Participant,
    clock: Callable[[], float],
    sleep: Callable[[float], None],
    waits: Callable[[Sequence[int]], bool] | None,
) -> tuple[Root | CommitBody, int]:
    """Until it is committed, by whomever. What is said of it, and the number of its record."""
    began = clock()
    ends = began + seat.timeout_s
    pause, look, again, grace, missing = min(_POLL_S * max(1, seat.world // 2), _POLL_MAX_S), began, _LOOK_AGAIN_S, -1.0, list[int]()
    doubt: Uncertain | None = None  # once a commit is in doubt, no later error says that there is none
    while True:
        now = clock()
        if waits is not None and not waits(missing):
            ends = min(ends, now)
        try:
            if now >= look or now >= ends:  # at first, and again now and then: who should have completed it may be gone
                first, look, again = look == began, now + again, min(2 * again, _LOOK_AGAIN_MAX_S)
                missing, mine = _complete(place, directory, prefix, seat)
                if mine is not None:
                    return mine, _append(place, directory, mine)
                if missing and not first:
                    refuse_if_fenced(place.log.read(), place.epoch)
            if _is_made(place.store, prefix):
                found = _committed(place, directory)
                if found is not None:
                    return found
                grace = now + _GRACE_S * (1 + seat.rank / seat.world) if grace < 0 else grace  # one after the other
                if now >= min(grace, ends):  # who made it may be gone, or not have come to making its name durable
                    root = _root(place, directory, prefix)
                    place.store.sync(prefix)
                    return root, _append(place, directory, root)
            elif now >= ends:
                error = late(missing, f"writing their parts of checkpoint {directory.id} (step {directory.step})", now - began)
                if _void(place.store, prefix, error.what):
                    raise error
        except StoreUnavailable as error:
            doubt = error if isinstance(error, Uncertain) else doubt
            if now >= ends:
                raise doubt or error from None
        sleep(min(pause, max(_POLL_S, ends - now)))
        pause = min(pause * 1.6, _POLL_MAX_S)


def _complete(place: CommitTarget, directory: CheckpointDir, prefix: str, seat: Participant) -> tuple[list[int], Root | None]:
    """Make ``root.json`` if all are ready: those who are not, and the root if this rank has made it."""
    store = place.store
    names = [entry.name for entry in store.list(f"{prefix}/{READY_DIR}")]
    for failed in filter(None, map(parse_failed, names)):
        _void(store, prefix, f"rank {failed[0]} could not save its part: {failed[1]}")
        return [], None
    missing = sorted(set(range(seat.world)).difference(map(ready_rank, names)))
    if missing:
        return missing, None
    found = {ready.rank: ready for ready in filter(None, map(parse_ready, names))}
    others = [rank for rank, ready in sorted(found.items()) if ready.plan != seat.plan[:PLAN_DIGITS]]
    if others:
        _void(store, prefix, f"ranks {others[:8]} hold other tensors than rank {seat.rank} was told of")
        return [], None
    try:
        draft = from_json(store.get(f"{prefix}/{DRAFT_FILE}", ROOT_BYTES_MAX), prefix, ROOT_BYTES_MAX)
    except CheckpointNotFound:  # rank 0 has seen it committed, and tidied up
        return [], None
    store.sync(place.log.run)  # the directory's own name: whoever made it may not have come to that
    root = _joined(place, directory, draft, [found[rank] for rank in range(seat.world)])
    return [], root if store.put_once(f"{prefix}/{ROOT_FILE}", encode_root(root)) else None


def _words(draft: Root) -> bytes:
    """What only rank 0 can say of the checkpoint: short, since whoever commits reads it."""
    said = from_json(encode_root(draft), DRAFT_FILE, ROOT_BYTES_MAX)
    return to_json({name: said[name] for name in WORDS if said[name]})


def _joined(place: CommitTarget, directory: CheckpointDir, words: Mapping[str, Any], ready: list[Ready]) -> Root:
    known = {"store": place.store_id, "run": place.run_id, "id": directory.id, "step": directory.step, "epoch": directory.epoch}
    draft = from_plain({**words, **known, "parts": [], "logical_bytes": 0, "stored_bytes": 0, "new_bytes": 0}, Root)
    refs = [PartRef(rank=one.rank, file=part_file(one.rank), size=one.size, hash=one.hash) for one in ready]
    new = sum(one.stored if one.new is None else one.new for one in ready)
    requires, stored = _donors(place, ready) if any(one.new is not None for one in ready) else ([], [])
    return _with_parts(draft, refs, sum(one.logical for one in ready), sum(one.stored for one in ready), new, requires, stored)


def _donors(place: CommitTarget, ready: list[Ready]) -> tuple[list[str], list[str]]:
    """Whose bytes the ranks need, and what the root is to say of how packs are stored. ``DonorRetired`` if the log does not show the
    checkpoint that a rank goes by."""
    found: set[str] = set()
    history = fold(place.log.read()) if any(one.donors for one in ready) else History()
    live = {one.seq: one for one in history.live}
    for one in ready:
        base = live.get(one.base)
        names = [base.id, *base.body.requires] if base is not None else []
        if one.donors >> len(names):
            raise DonorRetired(f"rank {one.rank} needs bytes of a checkpoint that is not there any more", where=place.log.run)
        found.update(name for bit, name in enumerate(names) if one.donors >> bit & 1)
    requires = with_lenders(history, found)
    elsewhere = any(one.body.home and one.id in requires for one in history.live)
    return requires, [STORED_CHUNKS, OTHER_RUNS] if elsewhere else [STORED_CHUNKS]


def _with_parts(draft: Root, parts: list[PartRef], logical: int, size: int, new: int, requires: list[str], stored: list[str]) -> Root:
    """``stored``: what ``storing`` gives for all packs."""
    return msgspec.structs.replace(
        draft, features=[SHORT_PARTS, *stored], parts=parts, world=len(parts),
        logical_bytes=logical, stored_bytes=size, new_bytes=new, requires=requires,
    )  # fmt: skip


def _is_made(store: ByteStore, prefix: str) -> bool:
    """Whether there is a root, of which no more than its beginning is read. ``OthersFailed``, which says why, if it is void."""
    try:
        reader = store.open(f"{prefix}/{ROOT_FILE}")
    except CheckpointNotFound:
        return False
    try:
        head = bytearray(min(len(VOID), reader.size))
        reader.read_into(0, memoryview(head))
    finally:
        reader.close()
    if head == VOID:
        why = (_get(store, f"{prefix}/{ROOT_FILE}") or VOID)[len(VOID) : 1000].decode("utf-8", "replace").strip()
        raise OthersFailed(f"given up: {why}", where=prefix, hint="that rank's own log says more")
    return True


def _committed(place: CommitTarget, directory: CheckpointDir) -> tuple[CommitBody, int] | None:
    """What COMMIT says, and its number, if it is there; made durable, as whoever appended it may not have come to that."""
    history = fold(place.log.read())
    found = history.find(directory.id) or history.retired.get(directory.id)
    if found is None:
        return None
    place.log.sync(found.seq)
    return found.body, found.seq


def _root(place: CommitTarget, directory: CheckpointDir, prefix: str) -> Root:
    data = place.store.get(f"{prefix}/{ROOT_FILE}", ROOT_BYTES_MAX)
    root = decode_root(data, hexdigest(data), f"{prefix}/{ROOT_FILE}")
    if (root.store, root.run, root.id, root.epoch) != (place.store_id, place.run_id, directory.id, place.epoch):
        raise CorruptCheckpoint("root.json is another checkpoint's", where=prefix)
    return root


def _append(place: CommitTarget, directory: CheckpointDir, root: Root) -> int:
    """COMMIT, unless it is there; its number."""
    data = encode_root(root)
    body = commit_body(root, str(directory), hexdigest(data), len(data))
    there: list[int] = []

    def decide(view: LogView) -> tuple[CommitBody, int] | None:
        found = fold(view).find(root.id)
        if found is not None:
            there.append(found.seq)
            return None
        refuse_if_fenced(view, place.epoch)
        refuse_without_donors(view, body)
        return body, place.epoch

    record = place.log.append(decide)
    if record is not None:
        return record.seq
    place.log.sync(there[-1])  # whoever appended it may not have come to that
    return there[-1]


def _void(store: ByteStore, prefix: str, why: str) -> bool:
    """Call the checkpoint off, for everybody and for good. False if it is complete: then it cannot be."""
    store.put_once(f"{prefix}/{ROOT_FILE}", VOID + f"{why}\n".encode())
    return (_get(store, f"{prefix}/{ROOT_FILE}") or b"").startswith(VOID)


def void_checkpoint(place: CommitTarget, step: int, id_: str, why: str) -> None:
    """Have a save of this attempt that is under way come to nothing; one that all ranks have made already is committed."""
    directory = CheckpointDir(step, id_, place.epoch)
    prefix = f"{place.log.run}/{directory}"
    if not _void(place.store, prefix, why):
        root = _root(place, directory, prefix)
        place.store.sync(prefix)
        _append(place, directory, root)


def _give_up(store: ByteStore, prefix: str, seat: Participant, error: BaseException, said: bool) -> None:
    """Tell the others, call the checkpoint off, and take back what this rank wrote; nothing of it if it is complete, or may be.

    Without this rank's having ``said`` that it is ready there is no checkpoint: then it takes its files back first. On a full disk that
    makes the room to say so. ``root.json`` stays, void, as long as the attempt lasts.
    """
    if not said:
        with contextlib.suppress(RelightError):
            _remove_own_files(store, prefix, seat)
    if not isinstance(error, (OthersFailed, RankTimeout)):
        kind = known(error).kind
        with contextlib.suppress(RelightError):
            put(store, f"{prefix}/{READY_DIR}/{failed_file(seat.rank, kind)}", b"")
    why = error.what if isinstance(error, RelightError) else f"{type(error).__name__}: {error}"
    with contextlib.suppress(RelightError):
        if not _void(store, prefix, f"rank {seat.rank} could not save its part: {why}"):
            return
        _remove_own_files(store, prefix, seat)


def abort_part(place: CommitTarget, step: int, checkpoint_id: str, seat: Participant, error: RelightError) -> None:
    """For a rank whose part another process was to write that is no more: none need wait for it. Nothing, if the checkpoint is complete."""
    _give_up(place.store, f"{place.log.run}/{CheckpointDir(step, checkpoint_id, place.epoch)}", seat, error, True)


def _remove_own_files(store: ByteStore, prefix: str, seat: Participant) -> None:
    """Delete what this rank wrote, first of all that it is ready."""
    for entry in list(store.list(f"{prefix}/{READY_DIR}")):
        ready = parse_ready(entry.name)
        if ready is not None and ready.rank == seat.rank:
            store.delete(f"{prefix}/{READY_DIR}/{entry.name}")
    store.delete_dir(f"{prefix}/{READY_DIR}")
    mark = f"-{seat.rank:05d}"
    for entry in list(store.list(prefix)):
        if entry.name.startswith((f"part{mark}", f"pack{mark}")) or (entry.name == DRAFT_FILE and not seat.rank):
            store.delete(f"{prefix}/{entry.name}")


def _get(store: ByteStore, key: str) -> bytes | None:
    try:
        return store.get(key, ROOT_BYTES_MAX)
    except CheckpointNotFound:
        return None
