"""Before the first step: does the store have room for what is to be kept? (Whether it works at all is tried by ``log.tried``.)"""

from __future__ import annotations

from relight.checkpointer.collective_errors import raise_on_all_ranks
from relight.checkpointer.one_writer import OneWriter
from relight.checkpointer.ranks import Ranks
from relight.log.write_probe import probe
from relight.observe import emit
from relight.store import ByteStore
from relight.store.retry import first_contact

__all__ = ["check_room", "probe", "try_store"]


def try_store(store: ByteStore, run: str, ranks: Ranks | None, rank: int, state_bytes: int, checkpoints: int) -> None:
    """Write to the store, and compare its room with what is to be kept; by rank 0. Where one rank writes for all, all raise its error."""
    with raise_on_all_ranks(ranks if isinstance(ranks, OneWriter) else None, "trying the store"):
        if rank == 0:
            first_contact(lambda: probe(store, run))
            check_room(store, state_bytes, checkpoints)


def check_room(store: ByteStore, state_bytes: int, checkpoints: int) -> str | None:
    """A warning, with numbers, if there is not room for two more checkpoints, or for all that the retention rules will keep."""
    free = store.free_bytes()
    if free is None or not state_bytes:
        return None
    fits = free // state_bytes
    if fits >= max(2, checkpoints):
        return None
    text = (
        f"{store.url} has {_gb(free)} free and a checkpoint of this state takes {_gb(state_bytes)}: room for {fits}, "
        f"while {max(2, checkpoints)} will be there at a time; make room or keep fewer (relight.keep(last=…))"
    )
    emit("preflight.warning", text, free_bytes=free, state_bytes=state_bytes)
    return text


def _gb(size: int) -> str:
    return f"{size / 1e9:.2f} GB" if size >= 10**7 else f"{size / 1e6:.2f} MB"
