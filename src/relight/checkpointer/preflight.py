"""Check before the first save: whether the store works (``log.write_probe``), and has room for the checkpoints that
will be kept."""

from __future__ import annotations

from relight.log.write_probe import probe
from relight.observe import emit
from relight.ranks.collective_errors import raise_on_all_ranks
from relight.ranks.group import RankGroup
from relight.store import ByteStore
from relight.store.retry import first_contact
from relight.units import size_text

__all__ = ["check_room", "probe", "try_store"]


def try_store(store: ByteStore, run: str, ranks: RankGroup, rank: int, state_bytes: int, checkpoints: int) -> None:
    """Try a write to the store and check its free space, on rank 0. All ranks raise its error."""
    with raise_on_all_ranks(ranks, "trying the store"):
        if rank == 0:
            first_contact(lambda: probe(store, run))
            check_room(store, state_bytes, checkpoints)


def check_room(store: ByteStore, state_bytes: int, checkpoints: int) -> str | None:
    """Emit and return a warning if the store has no room for two checkpoints, or for all that the retention rules keep;
    else None."""
    free = store.free_bytes()
    if free is None or not state_bytes:
        return None
    fits = free // state_bytes
    if fits >= max(2, checkpoints):
        return None
    text = (
        f"{store.url} has {size_text(free)} free and a checkpoint of this state takes {size_text(state_bytes)}: room for {fits}, "
        f"while {max(2, checkpoints)} will be there at a time; make room or keep fewer (relight.keep(last=…))"
    )
    emit("preflight.warning", text, free_bytes=free, state_bytes=state_bytes)
    return text
