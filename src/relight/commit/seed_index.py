"""Seed an attempt's incremental state from the newest checkpoint of its run, which an earlier attempt or another run may have written."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

from relight.commit.chunk_index import IncrementalState
from relight.commit.plan import SavePlan
from relight.errors import RelightError
from relight.format import decode_part, decode_root
from relight.format.manifest import PART_BYTES_MAX
from relight.format.names import ROOT_FILE
from relight.format.strict import ROOT_BYTES_MAX
from relight.log import History, Log, fold
from relight.log.known_damage import once_damaged
from relight.store import ByteStore


def seed_from_newest(store: ByteStore, log: Log, smaller: IncrementalState, plan: SavePlan, rank: int) -> None:
    """Once per attempt, find the chunks of untrained tensors in the newest checkpoint of a resumed or branched run.

    On an error, everything is stored instead. Cost: reading a root and a part.
    """
    if smaller.searched or not smaller.rules.reuse:
        return
    smaller.searched = True
    untrained = sum(
        tensor.length
        for number, tensor in enumerate(plan.tensors)
        if tensor.role == "param" and number not in plan.trainable
    )
    with contextlib.suppress(RelightError):
        view = log.read()
        newest = next(iter(fold(view).live[-1:]), None)
        if newest is None or newest.body.suspect or not untrained or not plan.trainable:
            return
        prefix = newest.directory_in(view.run)
        where = f"{prefix}/{ROOT_FILE}"
        root = decode_root(store.get(where, ROOT_BYTES_MAX), newest.body.root, where)
        if (root.store, root.id) != (view.store_id, newest.id) or rank >= len(root.parts):
            return
        ref = root.parts[rank]
        where = f"{prefix}/{ref.file}"
        part = decode_part(store.get(where, min(PART_BYTES_MAX, max(ref.size, 1))), root, ref, where)
        home = newest.body.home
        keeps = chunks_for(fold(Log(store, home).read())) if home else set[str]()
        if home and newest.id not in keeps:  # found damaged there
            return
        smaller.seed_from(newest.body, newest.seq, part, untrained / max(plan.logical_bytes, 1), keeps)


def chunks_for(history: History) -> set[str]:
    """Return the ids of the checkpoints with chunks that a save may reuse.

    Retention keeps them as long as the live checkpoints stay: these, and the donors of those stored in another run. None of them was ever
    found damaged.
    """
    kept = {checkpoint.id for checkpoint in history.live}.union(
        *(checkpoint.body.requires for checkpoint in history.live if checkpoint.body.home)
    )
    return kept - once_damaged(history)


def with_lenders(history: History, ids: Iterable[str]) -> list[str]:
    """Return ``ids`` and the checkpoints of other runs that require some of them, since only these keep such ids there."""
    needed = set(ids)
    away = needed - history.by_id.keys()
    return sorted(
        needed.union(
            checkpoint.id
            for checkpoint in history.live
            if checkpoint.body.home and not away.isdisjoint(checkpoint.body.requires)
        )
    )
