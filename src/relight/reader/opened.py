"""Open a checkpoint: read its root and parts, and check them against the hash in its COMMIT record. Reads no tensor."""

from __future__ import annotations

from dataclasses import dataclass

from relight.errors import CheckpointNotFound, CorruptCheckpoint, UnsafeContent
from relight.format import Part, PartRef, Root, decode_part, decode_root
from relight.format.manifest import PART_BYTES_MAX, check_complete
from relight.format.names import ROOT_FILE
from relight.format.strict import ROOT_BYTES_MAX
from relight.log import Checkpoint
from relight.store import ByteStore
from relight.store.base import reread
from relight.store.retry import decode_with_reread


@dataclass(frozen=True, slots=True)
class Opened:
    """Checkpoint with verified metadata."""

    store: ByteStore
    prefix: str
    checkpoint: Checkpoint
    root: Root
    parts: tuple[Part, ...]
    spares: tuple[tuple[ByteStore, str], ...] = ()
    """Other copies of its packs, nearest first: the store, and the checkpoint's directory there. Used if reading ``store`` fails."""
    nearer: tuple[tuple[ByteStore, str], ...] = ()
    """Copies in nearer tiers, with damaged metadata. Their plain packs are read first."""


def open_checkpoint(store: ByteStore, run: str, checkpoint: Checkpoint, *, store_id: str, run_id: str) -> Opened:
    """Read and check root and parts. ``CorruptCheckpoint`` or ``UnsafeContent`` names the bad file."""
    body = checkpoint.body
    prefix = checkpoint.directory_in(run)
    where = f"{prefix}/{ROOT_FILE}"
    longest = min(ROOT_BYTES_MAX, max(body.root_bytes, 1))
    root = decode_with_reread(
        reread(store, where, lambda: _get(store, where, longest)),
        lambda data: decode_root(data, body.root, where),
        where,
    )
    at_home = root.run if body.home else run_id  # the root's hash in this run's own log vouches for its home run
    if (root.store, root.run, root.id, root.step, root.epoch) != (
        store_id,
        at_home,
        body.id,
        body.step,
        checkpoint.epoch,
    ):
        raise UnsafeContent("root.json belongs to another checkpoint, run or store", where=where)
    if not set(root.requires) <= set(body.requires):
        raise UnsafeContent("root.json needs checkpoints that its COMMIT record does not list", where=where)
    parts = [_part(store, f"{prefix}/{ref.file}", root, ref) for ref in root.parts]
    check_complete(parts)
    return Opened(store, prefix, checkpoint, root, tuple(parts))


def _part(store: ByteStore, where: str, root: Root, ref: PartRef) -> Part:
    longest = min(PART_BYTES_MAX, max(ref.size, 1))
    return decode_with_reread(
        reread(store, where, lambda: _get(store, where, longest)),
        lambda data: decode_part(data, root, ref, where),
        where,
    )


def _get(store: ByteStore, key: str, limit: int) -> bytes:
    try:
        return store.get(key, limit)
    except CheckpointNotFound as error:
        raise CorruptCheckpoint("a file of this checkpoint is missing", where=key) from error
    except UnsafeContent as error:
        raise CorruptCheckpoint(f"not the file that was written: {error.what}", where=key) from error
