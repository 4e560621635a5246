"""Save one checkpoint: write packs, part and root, read them back, and commit."""

from __future__ import annotations

import contextlib
import secrets
import time
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, compress
from typing import Any, NamedTuple

import msgspec

from relight.commit.chunk_index import IncrementalState, PreviousSave, UnchangedTensors
from relight.commit.pack_writer import WriteLimits, WriteStats
from relight.commit.parallel_packs import write_packs
from relight.commit.plan import SavePlan, plan_save
from relight.commit.seed_index import chunks_for, seed_from_newest, with_lenders
from relight.errors import CorruptCheckpoint, RelightError, SaveFailed, shown
from relight.format import Digest, Part, PartRef, Root, decode_part, decode_root, encode_part, encode_root, hexdigest
from relight.format.chunk_codecs import plugin
from relight.format.manifest import PART_BYTES_MAX, Pack, check_complete, donors_of, storing
from relight.format.names import (
    DRAFT_FILE,
    READY_DIR,
    ROOT_FILE,
    STEP_MAX,
    CheckpointDir,
    is_announcement_file,
    is_written_file,
    part_file,
    stored_file,
)
from relight.format.records import CommitBody, metric_of
from relight.format.root_keys import COMPACT, FIRST_STEP, LOSSY, SUSPECT
from relight.format.strict import ROOT_BYTES_MAX
from relight.layout import Item
from relight.log import Log, LogView, fold
from relight.log.identity import now_text
from relight.log.replaced import replaced_attempt
from relight.log.superseded import superseded
from relight.observe import emit, record_span
from relight.policy.compact import BOUNDED, LOSSY_BOUNDS, Compact, Conditions, is_used, unmatched
from relight.save_reason import ASKED, SaveReason
from relight.store import ByteStore, put
from relight.store.base import Uncertain, reread, without_cache
from relight.store.durable import rewritten_of, temporary_of
from relight.store.retry import decode_with_reread

_ALPHABET = "0123456789abcdefghijklmnopqrstuvwxyz"


class SaveInfo(msgspec.Struct, frozen=True, array_like=True):
    """Metadata that a checkpoint records about itself. Trainer, slot, agent and commit pass it whole.

    ``metrics``: numbers by name. ``user``: the run's metadata, and what a restore needs to know. ``environment``: versions and devices.
    ``components``: the kind of each component. ``exact``: reasons why a resume is not bit-exact. ``parents``: ids of the checkpoints that
    training continued from. ``tag``: given to the checkpoint after its commit.
    """

    step: int
    reason: SaveReason = ASKED
    metrics: Mapping[str, float] = {}
    user: Mapping[str, Any] = {}
    environment: Mapping[str, Any] = {}
    components: Mapping[str, str] = {}
    exact: Sequence[str] = ()
    parents: Sequence[str] = ()
    tag: str | None = None


@dataclass(frozen=True, slots=True)
class SaveRequest:
    """A state to save. ``tree`` is encoded; its leaves point into ``items``.

    ``id``, ``plan``: given if the caller has planned the layout already; ``items`` is not used then.
    ``packs_written``: called when all packs are durable, before part and root are written. An exception aborts the save.
    ``seat``: this rank's place among several that save one checkpoint with one ``id``. Metadata comes from rank 0.
    ``waits``: called repeatedly while this rank waits for the commit, with the ranks known to be missing. False: stop waiting.
    ``smaller``: write incrementally, unless ``urgent``.
    ``before``: bytes of the previous save, if in memory. ``vouched``: unchanged tensors, which are neither read nor hashed.
    """

    info: SaveInfo
    tree: bytes
    items: Sequence[Item]
    id: str = ""
    plan: SavePlan | None = None
    pace: WriteLimits | None = None
    packs_written: Callable[[], None] | None = None
    seat: Participant | None = None
    waits: Callable[[Sequence[int]], bool] | None = None
    smaller: IncrementalState | None = None
    urgent: bool = False
    before: PreviousSave | None = None
    vouched: UnchangedTensors | None = None

    @property
    def step(self) -> int:
        """Training step of the state."""
        return self.info.step


@dataclass(frozen=True, slots=True)
class SaveReport:
    """A committed save. ``timings_s``: seconds by phase. ``trainable_digest``: equal for equal trainable state."""

    id: str
    step: int
    dir: str
    seq: int
    logical_bytes: int
    stored_bytes: int
    timings_s: dict[str, float]
    trainable_digest: bytes


class DonorRetired(SaveFailed):
    """A donor of this checkpoint was retired before the commit."""


class Participant(NamedTuple):
    """One rank of several that save together."""

    rank: int
    world: int
    plan: str
    """Digest of names, shapes and dtypes, on which all ranks must agree: 16 hexadecimal digits."""
    timeout_s: float
    """Seconds to wait for the other ranks after its own part is durable."""


class CommitTarget(NamedTuple):
    """Destination of a save: store, run and attempt."""

    store: ByteStore
    log: Log
    store_id: str
    run_id: str
    epoch: int


def new_id() -> str:
    """Return a random checkpoint id: ten characters, 51 bits. Directories are created exclusively, so a collision only fails one save."""
    return "".join(secrets.choice(_ALPHABET) for _ in range(10))


def save(place: CommitTarget, request: SaveRequest) -> SaveReport:
    """Write a checkpoint and commit it. On an error before the commit, delete the written files.

    Costs one read of the state, one write, and per save: fsyncs of each pack, the part, the root, three directories and the record.
    """
    if not 0 <= request.step <= STEP_MAX:
        raise SaveFailed(f"step {request.step} is out of range", hint="steps count from 0", retryable=False)
    started = time.perf_counter()
    checkpoint_id = request.id or new_id()
    plan = request.plan or plan_save(request.items, id=checkpoint_id, lanes=place.store.properties().lanes)
    directory = CheckpointDir(request.step, checkpoint_id, place.epoch)
    prefix = f"{place.log.run}/{directory}"
    timings = {"plan": time.perf_counter() - started}
    committing = False
    try:
        root, part, data = _write(place, request, plan, directory, prefix, timings)
        digest = trainable_digest(plan, part.packs)
        committing = True
        proven = plan.proven and all(pack.stored is None for pack in part.packs)
        record = _commit(place, root, prefix, str(directory), timings, {part_file(0): (part, data)} if proven else {})
        plan.proven.add("read")
    except BaseException as error:
        if isinstance(error, DonorRetired) and request.smaller is not None:
            request.smaller.forget()
        # An interrupt may arrive just after the commit, and Uncertain means that it may exist: do not delete its files then.
        if not committing or (isinstance(error, RelightError) and not isinstance(error, Uncertain)):
            with contextlib.suppress(RelightError):
                delete_directory(place.store, prefix)
        raise
    timings["total"] = time.perf_counter() - started
    if request.smaller is not None:
        read_back(request.smaller, plan, directory, part, record, root.requires)
    return SaveReport(
        checkpoint_id, request.step, str(directory), record, plan.logical_bytes, root.stored_bytes, timings, digest
    )


def _write(
    place: CommitTarget,
    request: SaveRequest,
    plan: SavePlan,
    directory: CheckpointDir,
    prefix: str,
    timings: dict[str, float],
) -> tuple[Root, Part, bytes]:
    part, data = write_part(place, request, plan, directory, prefix, timings)
    mark = time.perf_counter()
    refs = [PartRef(rank=0, file=part_file(0), size=len(data), hash=hexdigest(data))]
    root = root_of(
        place, request, directory, refs, plan.logical_bytes, sum(pack.stored_bytes for pack in part.packs) + len(data)
    )
    if any(pack.stored is not None for pack in part.packs):
        new_bytes = sum(pack.new_bytes for pack in part.packs) + len(data)
        requires = with_lenders(fold(place.log.read()), donors_of(part.packs))
        root = msgspec.structs.replace(root, features=storing(part.packs), requires=requires, new_bytes=new_bytes)
    put(place.store, f"{prefix}/{ROOT_FILE}", encode_root(root))
    place.store.sync(prefix)
    timings["parts"] += time.perf_counter() - mark
    record_span("parts", root.id, root.step, mark, time.perf_counter(), rank=0)
    return root, part, data


def write_part(
    place: CommitTarget,
    request: SaveRequest,
    plan: SavePlan,
    directory: CheckpointDir,
    prefix: str,
    timings: dict[str, float],
) -> tuple[Part, bytes]:
    """Write packs and part of one rank, durably except for the names."""
    rank, world = (request.seat.rank, request.seat.world) if request.seat is not None else (0, 1)
    mark = time.perf_counter()
    packs, fsync_s = _write_packs(place, request, plan, prefix)
    record_span(
        "write",
        directory.id,
        directory.step,
        mark,
        written := time.perf_counter(),
        rank=rank,
        fsync_s=round(fsync_s, 6),
    )
    if request.packs_written is not None:
        request.packs_written()
    timings["fsync"] = fsync_s
    timings["write"] = time.perf_counter() - mark - fsync_s
    mark = time.perf_counter()
    record_span("wait", directory.id, directory.step, written, mark, rank=rank)
    part = Part(
        store=place.store_id,
        run=place.run_id,
        id=directory.id,
        step=directory.step,
        epoch=directory.epoch,
        rank=rank,
        world=world,
        packs=packs,
        tensors=plan.tensors,
        tree=request.tree,
    )
    data = encode_part(part)
    if len(data) > PART_BYTES_MAX:
        raise SaveFailed(f"a part of {len(data)} bytes; at most {PART_BYTES_MAX} are allowed", retryable=False)
    put(place.store, f"{prefix}/{part_file(rank)}", data)
    timings["parts"] = time.perf_counter() - mark
    record_span("parts", directory.id, directory.step, mark, mark + timings["parts"], rank=rank)
    return part, data


def _storage_facts(request: SaveRequest) -> dict[str, Any]:
    """Return the root's ``user`` entries about how the packs are stored, and why."""
    if request.smaller is None:
        return {}
    chosen, rules = None if request.urgent else request.smaller.chosen, request.smaller.rules
    if chosen is None:
        return COMPACT.field({"reuse": False, "coded": False, "reason": "urgent"})
    summary = {"reuse": chosen.reuse, "coded": chosen.coded, "reason": chosen.reason, "differences": chosen.differences}
    facts = COMPACT.field({**summary, **({} if chosen.kinds is None else {"kinds": list(chosen.kinds)})})
    lossy = _lossy_here(request).items() if rules.inexact else ()
    return (
        {**facts, **LOSSY.field({pattern: _inexactly(rules, pattern, way) for pattern, way in lossy})}
        if lossy
        else facts
    )


def _inexactly(rules: Compact, pattern: str, encoding: str) -> dict[str, Any]:
    """Return a root's entry for a pattern: the encoding, the error that it allows, and the bound that the caller chose."""
    if pattern in rules.plugin_codecs:
        return {"as": encoding, "relative_error": plugin(encoding).relative_error}
    most = LOSSY_BOUNDS[encoding] if encoding != BOUNDED else max(LOSSY_BOUNDS.values())
    chosen = {"max_error": rules.max_error[pattern]} if pattern in rules.max_error else {}
    return {"as": encoding, "relative_error": most, **chosen}


def _lossy_here(request: SaveRequest) -> dict[str, str]:
    """Return the patterns that match a tensor of this save; all patterns if several ranks save, as each knows only its own part."""
    if request.smaller is None or request.urgent:
        return {}
    rules, tensors = request.smaller.rules, request.items if request.plan is None else request.plan.tensors
    plugins = {pattern: name for pattern, name in rules.plugin_codecs.items() if not plugin(name).exact}
    lossy = {**dict.fromkeys(rules.max_error, BOUNDED), **rules.lossy, **plugins}
    if request.seat is not None:
        return lossy
    kinds = [(tensor.name, tensor.dtype) for tensor in tensors]
    return {pattern: way for pattern, way in lossy.items() if is_used(rules, pattern, kinds)}


def _inexact(request: SaveRequest) -> list[str]:
    """Return why a resume is not exact because of lossy tensors."""
    bounds = request.smaller.rules.max_error if request.smaller is not None else {}
    within = {pattern: f"with errors up to {bound}" for pattern, bound in bounds.items()}
    ways = {
        pattern: within.get(pattern, "") if way == BOUNDED else f"as {way}"
        for pattern, way in _lossy_here(request).items()
    }
    return [f"{pattern} is stored {how}" for pattern, how in ways.items()]


def _write_packs(place: CommitTarget, request: SaveRequest, plan: SavePlan, prefix: str) -> tuple[list[Pack], float]:
    """Write packs in full or incrementally, and record the cost for later saves."""
    smaller = request.smaller
    if smaller is None or request.urgent:
        return write_packs(place.store, prefix, plan, request.pace)
    from relight.commit.incremental_writer import (  # with numpy, which takes a tenth of a second to import
        alike,
        audited,
        write_smaller_packs,
    )

    spent = WriteStats()
    pace = replace(request.pace or WriteLimits(), spent=spent)
    seed_from_newest(place.store, place.log, smaller, plan, request.seat.rank if request.seat is not None else 0)
    if smaller.donors:
        smaller.check_there(chunks_for(fold(place.log.read())))
    alone = request.seat is None
    if alone and not smaller.saves:  # a rank of several has only its own part's names
        for setting, pattern in unmatched(smaller.rules, [tensor.name for tensor in plan.tensors]):
            message = f"Compact({setting}=…): {shown(pattern)} matches no tensor of this run"
            emit("compact.unmatched", message, setting=setting, pattern=pattern)
    if smaller.wants_samples:
        smaller.seen.alike = alike(plan, smaller)
    under = Conditions(pace.threads, min(place.store.properties().lanes, len(plan.packs)), pace.bytes_per_second)
    choice, began = smaller.choice(under), time.perf_counter()
    lanes = under.lanes
    if choice.reuse or choice.coded or choice.differences or smaller.rules.inexact or smaller.rules.plugin_codecs:
        lanes = 1
        known = smaller.known(request.before, request.vouched, older=alone)
        if known.same and request.vouched is not None and request.vouched.wrong is not None:
            known = audited(smaller, plan, known, request.vouched.wrong)
        packs, fsync_s = write_smaller_packs(
            place.store, prefix, plan, known, choice, pace, smaller.rules, smaller.coder()
        )
    else:
        packs, fsync_s = write_packs(place.store, prefix, plan, pace)
    smaller.record_cost(spent, under, lanes, plan.logical_bytes, time.perf_counter() - began)
    return packs, fsync_s


def read_back(
    smaller: IncrementalState, plan: SavePlan, directory: CheckpointDir, part: Part, seq: int, requires: Sequence[str]
) -> None:
    """Update the incremental state with a committed save, for the next one."""
    smaller.update(directory, part, seq, requires)
    if smaller.rules.reuse or smaller.rules.full_every is not None:
        from relight.commit.incremental_writer import marks_of

        smaller.remember_marks(marks_of(plan))
    if smaller.rules.codecs != "never":
        from relight.commit.incremental_writer import sampled

        samples = tuple(sampled(plan, part.packs, smaller.coder()))
        if samples or not requires:  # otherwise every chunk was reused, which shows nothing about changing chunks
            smaller.seen.samples = samples


def root_of(
    place: CommitTarget,
    request: SaveRequest,
    directory: CheckpointDir,
    parts: list[PartRef],
    logical_bytes: int,
    stored_bytes: int,
) -> Root:
    """Return the root of a checkpoint with these parts."""
    return Root(
        store=place.store_id,
        run=place.run_id,
        id=directory.id,
        step=directory.step,
        epoch=directory.epoch,
        created=now_text(),
        reason=request.info.reason.text,
        reason_kind=request.info.reason.kind,
        reason_by=request.info.reason.by,
        parents=list(request.info.parents),
        metrics={name: metric_of(value) for name, value in request.info.metrics.items()},
        user={**request.info.user, **_storage_facts(request)},
        environment=dict(request.info.environment),
        components=dict(request.info.components),
        exact=[*request.info.exact, *_inexact(request)],
        world=len(parts) or 1,
        parts=parts,
        logical_bytes=logical_bytes,
        stored_bytes=stored_bytes,
        new_bytes=stored_bytes,
    )


def _commit(
    place: CommitTarget,
    root: Root,
    prefix: str,
    directory: str,
    timings: dict[str, float],
    known: Mapping[str, tuple[Part, bytes]],
) -> int:
    mark = time.perf_counter()
    root_hash, root_bytes = check_written(place.store, prefix, root, known)
    body = commit_body(root, directory, root_hash, root_bytes)

    def decide(view: LogView) -> tuple[CommitBody, int]:
        refuse_if_fenced(view, place.epoch)
        refuse_without_donors(view, body)
        return body, place.epoch

    record = place.log.append(decide, commits=True)
    assert record is not None
    timings["commit"] = time.perf_counter() - mark
    record_span("commit", root.id, root.step, mark, mark + timings["commit"], rank=0, world=1)
    return record.seq


def commit_body(root: Root, directory: str, root_hash: str, root_bytes: int) -> CommitBody:
    """Return the COMMIT record of a checkpoint."""
    return CommitBody(
        id=root.id,
        step=root.step,
        dir=directory,
        root=root_hash,
        root_bytes=root_bytes,
        parents=root.parents,
        reason=root.reason,
        reason_kind=root.reason_kind,
        reason_by=root.reason_by,
        metrics=root.metrics,
        logical_bytes=root.logical_bytes,
        stored_bytes=root.stored_bytes,
        new_bytes=root.new_bytes,
        requires=root.requires,
        suspect=SUSPECT.name in root.user,
        lossy=_lossy(root),
        first_step=FIRST_STEP.read(root.user) or 0,
    )


def _lossy(root: Root) -> float:
    """Return the largest relative error that a value may have; 0 if the checkpoint is exact."""
    ways = (LOSSY.read(root.user) or {}).values()
    bounds = [way.get("relative_error") for way in ways if isinstance(way, dict)]
    return max((float(bound) for bound in bounds if isinstance(bound, (int, float))), default=0.0)


def refuse_if_fenced(view: LogView, epoch: int) -> None:
    """Raise ``Fenced`` if a newer attempt has taken over the run, and ``RunReplaced`` if its log lacks this attempt."""
    history = fold(view)
    if history.epoch > epoch:
        raise superseded(history, epoch, view.run)
    if view.head >= 0 and history.epoch < epoch and not view.damaged:  # a damaged record may have been the FENCE
        raise replaced_attempt(history, epoch, view.run)


def refuse_without_donors(view: LogView, body: CommitBody) -> None:
    """Raise ``DonorRetired`` if a donor is no longer live: retention would not keep its bytes."""
    if not body.requires:
        return
    history = fold(view)
    lent = {
        donor
        for checkpoint in history.live
        if checkpoint.body.home and checkpoint.id in body.requires
        for donor in checkpoint.body.requires
    }
    gone = sorted(set(body.requires) - history.by_id.keys() - lent)
    if gone:
        raise DonorRetired(
            f"the save reuses chunks of checkpoint {', '.join(gone)}, which was removed during the save",
            where=f"{view.run}/{body.dir}",
            hint="the next save stores all of them itself",
        )


def check_written(
    store: ByteStore, prefix: str, expected: Root, known: Mapping[str, tuple[Part, bytes]] | None = None
) -> tuple[str, int]:
    """Read root and parts back from the store and verify them as a reader would, except for the chunks. Return the root's hash and length.

    ``known``: parts and their encoded bytes, by file, if a part with the same tensors at the same places was verified before. Then equal
    bytes suffice.
    """
    store = without_cache(store)
    where, wanted = f"{prefix}/{ROOT_FILE}", encode_root(expected)

    def decode(data: bytes) -> Root:
        root = decode_root(data, hexdigest(data), where)
        if data != wanted:
            raise CorruptCheckpoint("root.json reads back differently", where=prefix)
        return root

    root = decode_with_reread(reread(store, where, lambda: store.get(where, ROOT_BYTES_MAX)), decode, where)
    root_hash, root_bytes = hexdigest(wanted), len(wanted)
    parts = []
    for ref in root.parts:
        parts.append(check_part_written(store, prefix, root, ref, (known or {}).get(ref.file, (None, b""))))
    if len(known or ()) < len(parts):
        check_complete(parts)
    return root_hash, root_bytes


def check_part_written(
    store: ByteStore, prefix: str, root: Root, ref: PartRef, known: tuple[Part | None, bytes]
) -> Part:
    """Read one part back, and check the sizes of its packs."""
    store = without_cache(store)
    where = f"{prefix}/{ref.file}"
    known_part, written = known
    part = decode_with_reread(
        reread(store, where, lambda: store.get(where, PART_BYTES_MAX)),
        lambda data: known_part if known_part is not None and data == written else decode_part(data, root, ref, where),
        where,
    )
    for pack in part.packs:
        key = f"{prefix}/{pack.file if pack.stored is None else stored_file(pack.file)}"
        if not pack.new_bytes:
            continue
        reader = store.open(key)
        try:
            if reader.size != pack.new_bytes:
                raise CorruptCheckpoint(f"{reader.size} bytes where {pack.new_bytes} were written", where=key)
        finally:
            reader.close()
    return part


def delete_directory(store: ByteStore, prefix: str) -> bool:
    """Delete Relight's files below ``prefix``, and the directory if it is empty then. Unknown files stay."""
    for entry in list(store.list(prefix)):
        if entry.is_dir and entry.name == READY_DIR:
            delete_announcements(store, prefix)
        if not entry.is_dir and (
            is_written_file(rewritten_of(entry.name) or entry.name)
            or temporary_of(entry.name) in (ROOT_FILE, DRAFT_FILE)
        ):
            store.delete(f"{prefix}/{entry.name}")
    return store.delete_dir(prefix)


def delete_announcements(store: ByteStore, prefix: str) -> bool:
    """Delete the files by which ranks and nodes agreed on the checkpoint at ``prefix``. Return whether their directory is gone."""
    folder = f"{prefix}/{READY_DIR}"
    for entry in list(store.list(folder)):
        if not entry.is_dir and is_announcement_file(temporary_of(entry.name) or entry.name):
            store.delete(f"{folder}/{entry.name}")
    return store.delete_dir(folder)


def trainable_digest(plan: SavePlan, packs: list[Pack]) -> bytes:
    """Return one hash over the chunks with trainable tensors; empty if there are none, as a rank's share may have only moments.

    Trainable tensors share no chunk with others, so equal values give equal hashes.
    """
    if "trainable" not in plan.marked:
        plan.marked["trainable"] = _trainable_chunks(plan, packs)
    marked = plan.marked["trainable"]
    if not any(map(any, marked)):
        return b""
    hasher = Digest()
    for pack, wanted in zip(packs, marked, strict=True):
        for _, value in compress(pack.chunks, wanted):
            hasher.update(value)
    return hasher.digest()


def _trainable_chunks(plan: SavePlan, packs: list[Pack]) -> list[list[bool]]:
    """Return for each chunk of each pack whether it has bytes of a trainable tensor."""
    marked = []
    for index, pack in enumerate(packs):
        trainable = (plan.tensors[i] for i in plan.trainable)
        spans = sorted(
            (tensor.offset, tensor.offset + tensor.length)
            for tensor in trainable
            if tensor.pack == index and tensor.length
        )
        ends = [end for _, end in spans]
        edges = [0, *accumulate(length for length, _ in pack.chunks)]
        # the first span that ends after the chunk's start
        nearest = [bisect_right(ends, begin) for begin in edges[:-1]]
        marked.append(
            [near < len(spans) and spans[near][0] < end for near, end in zip(nearest, edges[1:], strict=True)]
        )
    return marked
