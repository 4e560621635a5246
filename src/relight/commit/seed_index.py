"""What an attempt makes use of before its first save: the newest checkpoint of its run, whoever wrote it, and in whichever run it lies."""

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
from relight.store import ByteStore


def seed_from_newest(store: ByteStore, log: Log, smaller: IncrementalState, plan: SavePlan, rank: int) -> None:
    """Once an attempt. Of a run that went on, or branched off, what nothing trains is there already.

    What goes wrong at that is no reason not to save: everything is stored then. Cost: reading a root and a part.
    """
    if smaller.looked or not smaller.rules.reuse:
        return
    smaller.looked = True
    untrained = sum(one.length for number, one in enumerate(plan.tensors) if one.role == "param" and number not in plan.trainable)
    with contextlib.suppress(RelightError):
        view = log.read()
        newest = next(iter(fold(view).live[-1:]), None)
        if newest is None or newest.body.suspect or not untrained or not plan.trainable:
            return
        prefix = newest.lies_in(view.run)
        where = f"{prefix}/{ROOT_FILE}"
        root = decode_root(store.get(where, ROOT_BYTES_MAX), newest.body.root, where)
        if (root.store, root.id) != (view.store_id, newest.id) or rank >= len(root.parts):
            return
        ref = root.parts[rank]
        where = f"{prefix}/{ref.file}"
        part = decode_part(store.get(where, min(PART_BYTES_MAX, max(ref.size, 1))), root, ref, where)
        home = newest.body.home
        keeps = {one.id for one in fold(Log(store, home).read()).live} if home and newest.body.requires else set[str]()
        smaller.seed_from(newest.body, newest.seq, part, untrained / max(plan.logical_bytes, 1), keeps)


def chunks_for(history: History) -> set[str]:
    """The ids whose bytes are there for this run as long as what is live stays: that itself, and of what is lent by another run, what it
    requires there."""
    return {one.id for one in history.live}.union(*(one.body.requires for one in history.live if one.body.home))


def with_lenders(history: History, ids: Iterable[str]) -> list[str]:
    """``ids``, and what is lent by another run that requires some of them: they are kept there for its sake alone."""
    found = set(ids)
    away = found - history.by_id.keys()
    return sorted(found.union(one.id for one in history.live if one.body.home and not away.isdisjoint(one.body.requires)))
