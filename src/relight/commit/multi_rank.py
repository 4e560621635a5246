"""Save one checkpoint from several ranks without a leader: any rank can commit, usually the last one.

Each rank writes its packs and part durably. Then it creates an empty file in ``ready/``. The *name* of this file has all that the commit
needs to know about the part. Rank 0 writes the other fields of the root to ``draft.json``. The rank that finds all ranks ready creates
``root.json`` from these, with the same bytes on any rank, and appends COMMIT unless it exists. The other ranks poll for the root and then
for the COMMIT. Only the committing rank reads data that grows with the number of ranks more than once.

``root.json`` is created once, and it decides. A rank that stops waiting creates it as *void*, and only then deletes its files. So a
complete checkpoint cannot lose a part, and a checkpoint that lost a part cannot be completed.
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
from relight.errors import (
    CheckpointNotFound,
    ConfigError,
    CorruptCheckpoint,
    RelightError,
    SaveFailed,
    StoreUnavailable,
    known,
)
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

WORDS = (
    "created",
    "reason",
    "reason_kind",
    "reason_by",
    "parents",
    "metrics",
    "user",
    "environment",
    "components",
    "exact",
)
"""Fields of the root's draft. Every rank knows the other fields, or computes them from the parts."""
VOID = b"void\n"
"""First line of a void ``root.json``. The reason follows as text."""
_POLL_S = 0.001
"""First pause in seconds of a waiting rank, with two ranks. It grows with the number of ranks: together they poll twice a millisecond.
More would slow the committing rank or the store."""
_POLL_MAX_S = 0.05
_RECHECK_S = 1.0
"""Seconds until a waiting rank checks again whether all ranks are ready: the rank that should commit may have died. Doubles each time."""
_RECHECK_MAX_S = 8.0
_GRACE_S = 0.2
"""Seconds that the rank that created the root has to append the COMMIT, before other ranks do."""


class OthersFailed(SaveFailed):
    """Another rank could not save its part, or stopped waiting. The checkpoint does not exist on any rank."""

    kind = "others_failed"


def save_multi_rank(
    place: CommitTarget,
    request: SaveRequest,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> SaveReport:
    """Write this rank's part, wait for the other ranks' parts, and return after the commit. All ranks pass the same id and step.

    Raise ``RankTimeout`` with the ranks that were not ready in time, or ``OthersFailed`` with the rank that could not save. There is no
    checkpoint then.
    """
    seat = request.seat
    assert seat is not None and request.id
    started = time.perf_counter()
    directory = CheckpointDir(request.step, request.id, place.epoch)
    prefix = f"{place.log.run}/{directory}"
    announced: list[Ready] = []
    try:
        if not place.store.verify_exclusive_create():
            raise ConfigError(
                "this store ignores 'create if absent': several ranks cannot agree in it on what is a checkpoint",
                where=place.store.url,
                hint='let one rank write: writer="rank 0", with RELIGHT_SINGLE_WRITER=1',
            )
        plan = request.plan or plan_save(
            request.items, id=request.id, rank=seat.rank, lanes=lanes_of_rank(place.store, seat.world)
        )
        timings = {"plan": time.perf_counter() - started}
        part, data = write_part(place, request, plan, directory, prefix, timings)
        mark = time.perf_counter()
        announced.append(_proven(place, request, directory, prefix, part, data, plan))
        put(place.store, f"{prefix}/{READY_DIR}/{announced[0].file}", b"")
        record_span("parts", request.id, request.step, mark, ready := time.perf_counter(), rank=seat.rank)
        mark = ready
        committed, seq = _await(place, directory, prefix, seat, clock, sleep, request.waits)
    except BaseException as error:
        if isinstance(error, (DonorRetired, OthersFailed)) and request.smaller is not None:
            request.smaller.forget()  # only the committing rank knows whether a donor is gone, so every rank forgets
        _give_up(place.store, prefix, seat, error, bool(announced))
        raise
    plan.proven.add("read")
    if request.smaller is not None:
        read_back(request.smaller, plan, directory, part, seq, committed.requires)
    with contextlib.suppress(RelightError):
        place.store.delete(f"{prefix}/{READY_DIR}/{announced[0].file}")
        if seat.rank == 0:
            place.store.delete(f"{prefix}/{DRAFT_FILE}")
        place.store.delete_dir(f"{prefix}/{READY_DIR}")  # empty after the last rank's deletion
    timings["commit"] = time.perf_counter() - mark
    record_span("commit", request.id, request.step, mark, mark + timings["commit"], rank=seat.rank, world=seat.world)
    timings["total"] = time.perf_counter() - started
    digest = trainable_digest(plan, part.packs)
    return SaveReport(
        request.id, request.step, str(directory), seq, committed.logical_bytes, committed.stored_bytes, timings, digest
    )


def _proven(
    place: CommitTarget,
    request: SaveRequest,
    directory: CheckpointDir,
    prefix: str,
    part: Part,
    data: bytes,
    plan: SavePlan,
) -> Ready:
    """Verify that the durable part reads back as written, and return its ready file's name."""
    seat = request.seat
    assert seat is not None
    draft = root_of(place, request, directory, [], 0, 0)
    if seat.rank == 0:
        put(place.store, f"{prefix}/{DRAFT_FILE}", _words(draft))
    place.store.sync(prefix)
    ref = PartRef(rank=seat.rank, file=part_file(seat.rank), size=len(data), hash=hexdigest(data))
    donors, shares = donors_of(part.packs), any(pack.stored is not None for pack in part.packs)
    none = [PartRef(rank=rank, file="", size=0, hash="") for rank in range(seat.world)]
    provisional = _with_parts(draft, none, 0, 0, 0, donors, storing(part.packs))
    check_part_written(
        place.store, prefix, provisional, ref, (part, data) if plan.proven and not shares else (None, b"")
    )
    stored = sum(pack.stored_bytes for pack in part.packs) + len(data)
    ready = Ready(seat.rank, seat.plan[:PLAN_DIGITS], ref.hash, ref.size, stored, plan.logical_bytes)
    if not shares or request.smaller is None:
        return ready
    new = sum(pack.new_bytes for pack in part.packs) + len(data)
    return ready._replace(
        new=new, base=request.smaller.base, donors=sum(1 << request.smaller.donors.index(donor) for donor in donors)
    )


def _await(
    place: CommitTarget,
    directory: CheckpointDir,
    prefix: str,
    seat: Participant,
    clock: Callable[[], float],
    sleep: Callable[[float], None],
    waits: Callable[[Sequence[int]], bool] | None,
) -> tuple[Root | CommitBody, int]:
    """Wait until some rank has committed the checkpoint. Return its root or COMMIT, and the number of the record."""
    began = clock()
    ends = began + seat.timeout_s
    pause, next_check, again, grace, missing = (
        min(_POLL_S * max(1, seat.world // 2), _POLL_MAX_S),
        began,
        _RECHECK_S,
        -1.0,
        list[int](),
    )
    doubt: Uncertain | None = None  # after an uncertain commit, no later error may report that there is no commit
    while True:
        now = clock()
        if waits is not None and not waits(missing):
            ends = min(ends, now)
        try:
            # at first, and then repeatedly: the rank that should have completed it may have died
            if now >= next_check or now >= ends:
                first, next_check, again = next_check == began, now + again, min(2 * again, _RECHECK_MAX_S)
                missing, mine = _complete(place, directory, prefix, seat)
                if mine is not None:
                    return mine, _append(place, directory, mine)
                if missing and not first:
                    refuse_if_fenced(place.log.read(), place.epoch)
            if is_root_there(place.store, prefix):
                committed = _committed(place, directory)
                if committed is not None:
                    return committed
                grace = now + _GRACE_S * (1 + seat.rank / seat.world) if grace < 0 else grace  # staggered by rank
                if now >= min(grace, ends):  # the root's creator may have died, or not yet made the name durable
                    root = _root(place, directory, prefix)
                    place.store.sync(prefix)
                    return root, _append(place, directory, root)
            elif now >= ends:
                error = late(
                    missing, f"writing their parts of checkpoint {directory.id} (step {directory.step})", now - began
                )
                if void_root(place.store, prefix, error.what):
                    raise error
        except StoreUnavailable as error:
            doubt = error if isinstance(error, Uncertain) else doubt
            if now >= ends:
                raise doubt or error from None
        sleep(min(pause, max(_POLL_S, ends - now)))
        pause = min(pause * 1.6, _POLL_MAX_S)


def _complete(
    place: CommitTarget, directory: CheckpointDir, prefix: str, seat: Participant
) -> tuple[list[int], Root | None]:
    """Create ``root.json`` if all ranks are ready. Return the missing ranks, and the root if this rank created it."""
    store = place.store
    names = [entry.name for entry in store.list(f"{prefix}/{READY_DIR}")]
    for failed in filter(None, map(parse_failed, names)):
        void_root(store, prefix, f"rank {failed[0]} could not save its part: {failed[1]}")
        return [], None
    missing = sorted(set(range(seat.world)).difference(map(ready_rank, names)))
    if missing:
        return missing, None
    ready_by_rank = {ready.rank: ready for ready in filter(None, map(parse_ready, names))}
    others = [rank for rank, ready in sorted(ready_by_rank.items()) if ready.plan != seat.plan[:PLAN_DIGITS]]
    if others:
        void_root(store, prefix, f"ranks {others[:8]} have other tensors than rank {seat.rank} expects")
        return [], None
    try:
        draft = from_json(store.get(f"{prefix}/{DRAFT_FILE}", ROOT_BYTES_MAX), prefix, ROOT_BYTES_MAX)
    except CheckpointNotFound:  # rank 0 has deleted it after the commit
        return [], None
    store.sync(place.log.run)  # the directory's name: its creator may not have made it durable
    root = _joined(place, directory, draft, [ready_by_rank[rank] for rank in range(seat.world)])
    return [], root if store.put_once(f"{prefix}/{ROOT_FILE}", encode_root(root)) else None


def _words(draft: Root) -> bytes:
    """Return the fields of the root that only rank 0 knows. Short, since the committing rank reads it."""
    fields = from_json(encode_root(draft), DRAFT_FILE, ROOT_BYTES_MAX)
    return to_json({name: fields[name] for name in WORDS if fields[name]})


def _joined(place: CommitTarget, directory: CheckpointDir, words: Mapping[str, Any], ready: list[Ready]) -> Root:
    known = {
        "store": place.store_id,
        "run": place.run_id,
        "id": directory.id,
        "step": directory.step,
        "epoch": directory.epoch,
    }
    draft = from_plain({**words, **known, "parts": [], "logical_bytes": 0, "stored_bytes": 0, "new_bytes": 0}, Root)
    refs = [
        PartRef(rank=rank_ready.rank, file=part_file(rank_ready.rank), size=rank_ready.size, hash=rank_ready.hash)
        for rank_ready in ready
    ]
    new = sum(rank_ready.stored if rank_ready.new is None else rank_ready.new for rank_ready in ready)
    requires, stored = _donors(place, ready) if any(rank_ready.new is not None for rank_ready in ready) else ([], [])
    return _with_parts(
        draft,
        refs,
        sum(rank_ready.logical for rank_ready in ready),
        sum(rank_ready.stored for rank_ready in ready),
        new,
        requires,
        stored,
    )


def _donors(place: CommitTarget, ready: list[Ready]) -> tuple[list[str], list[str]]:
    """Return the ids of the donors of all ranks, and the root's features for stored packs.

    Raise ``DonorRetired`` if the base checkpoint of a rank is not live any more.
    """
    donors: set[str] = set()
    history = fold(place.log.read()) if any(rank_ready.donors for rank_ready in ready) else History()
    live = {checkpoint.seq: checkpoint for checkpoint in history.live}
    for rank_ready in ready:
        base = live.get(rank_ready.base)
        names = [base.id, *base.body.requires] if base is not None else []
        if rank_ready.donors >> len(names):
            raise DonorRetired(
                f"rank {rank_ready.rank} needs bytes of a checkpoint that was retired", where=place.log.run
            )
        donors.update(name for bit, name in enumerate(names) if rank_ready.donors >> bit & 1)
    requires = with_lenders(history, donors)
    elsewhere = any(checkpoint.body.home and checkpoint.id in requires for checkpoint in history.live)
    return requires, [STORED_CHUNKS, OTHER_RUNS] if elsewhere else [STORED_CHUNKS]


def _with_parts(
    draft: Root, parts: list[PartRef], logical: int, size: int, new: int, requires: list[str], stored: list[str]
) -> Root:
    """Return the root with these parts. ``stored``: the result of ``storing`` for all packs."""
    return msgspec.structs.replace(
        draft, features=[SHORT_PARTS, *stored], parts=parts, world=len(parts),
        logical_bytes=logical, stored_bytes=size, new_bytes=new, requires=requires,
    )  # fmt: skip


def is_root_there(store: ByteStore, prefix: str) -> bool:
    """Return whether the root exists. Reads only its beginning. Raise ``OthersFailed`` with the reason if the root is void."""
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
        raise OthersFailed(f"save aborted: {why}", where=prefix, hint="see that rank's own log")
    return True


def _committed(place: CommitTarget, directory: CheckpointDir) -> tuple[CommitBody, int] | None:
    """Return the COMMIT and its number; None if it does not exist. Make it durable: its writer may not have done so."""
    history = fold(place.log.read())
    checkpoint = history.find(directory.id) or history.retired.get(directory.id)
    if checkpoint is None:
        return None
    place.log.sync(checkpoint.seq)
    return checkpoint.body, checkpoint.seq


def _root(place: CommitTarget, directory: CheckpointDir, prefix: str) -> Root:
    data = place.store.get(f"{prefix}/{ROOT_FILE}", ROOT_BYTES_MAX)
    root = decode_root(data, hexdigest(data), f"{prefix}/{ROOT_FILE}")
    if (root.store, root.run, root.id, root.epoch) != (place.store_id, place.run_id, directory.id, place.epoch):
        raise CorruptCheckpoint("root.json is another checkpoint's", where=prefix)
    return root


def _append(place: CommitTarget, directory: CheckpointDir, root: Root) -> int:
    """Append COMMIT unless it exists. Return its number."""
    data = encode_root(root)
    body = commit_body(root, str(directory), hexdigest(data), len(data))
    seqs: list[int] = []

    def decide(view: LogView) -> tuple[CommitBody, int] | None:
        checkpoint = fold(view).find(root.id)
        if checkpoint is not None:
            seqs.append(checkpoint.seq)
            return None
        refuse_if_fenced(view, place.epoch)
        refuse_without_donors(view, body)
        return body, place.epoch

    record = place.log.append(decide, commits=True)
    if record is not None:
        return record.seq
    place.log.sync(seqs[-1])  # its writer may not have made it durable
    return seqs[-1]


def void_root(store: ByteStore, prefix: str, why: str) -> bool:
    """Abort the checkpoint permanently, for all ranks. Return False if it is complete, and can no longer be aborted."""
    store.put_once(f"{prefix}/{ROOT_FILE}", VOID + f"{why}\n".encode())
    return (_get(store, f"{prefix}/{ROOT_FILE}") or b"").startswith(VOID)


def void_checkpoint(place: CommitTarget, step: int, id_: str, why: str) -> None:
    """Abort a running save of this attempt. If all ranks have completed it already, commit it instead."""
    directory = CheckpointDir(step, id_, place.epoch)
    prefix = f"{place.log.run}/{directory}"
    if not void_root(place.store, prefix, why):
        root = _root(place, directory, prefix)
        place.store.sync(prefix)
        _append(place, directory, root)


def _give_up(store: ByteStore, prefix: str, seat: Participant, error: BaseException, announced: bool) -> None:
    """Notify the other ranks, abort the checkpoint, and delete this rank's files. Keep everything if the checkpoint is or may be complete.

    ``announced``: whether this rank has announced that it is ready. If not, there is no checkpoint, so it deletes its files
    first. On a full
    disk, that makes space for the notice. The void ``root.json`` stays as long as the attempt lasts.
    """
    if not announced:
        with contextlib.suppress(RelightError):
            _remove_own_files(store, prefix, seat)
    if not isinstance(error, (OthersFailed, RankTimeout)):
        kind = known(error).kind
        with contextlib.suppress(RelightError):
            put(store, f"{prefix}/{READY_DIR}/{failed_file(seat.rank, kind)}", b"")
    why = error.what if isinstance(error, RelightError) else f"{type(error).__name__}: {error}"
    with contextlib.suppress(RelightError):
        if not void_root(store, prefix, f"rank {seat.rank} could not save its part: {why}"):
            return
        _remove_own_files(store, prefix, seat)


def abort_part(place: CommitTarget, step: int, checkpoint_id: str, seat: Participant, error: RelightError) -> None:
    """Abort the part of a rank if the process that should have written it has died, so that no rank waits. No effect on a complete save."""
    _give_up(place.store, f"{place.log.run}/{CheckpointDir(step, checkpoint_id, place.epoch)}", seat, error, True)


def _remove_own_files(store: ByteStore, prefix: str, seat: Participant) -> None:
    """Delete this rank's files, its ready file first."""
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
