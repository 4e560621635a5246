"""Hashing and writing of a pack from memory, as the agent does it, with a given number of threads. Torch-free."""

from __future__ import annotations

from relight.commit import PackPlan, write_pack
from relight.commit.pack_writer import WriteLimits
from relight.layout import Extent, cut_chunks
from relight.store import ByteStore


def write_image(store: ByteStore, key: str, image: memoryview, threads: int) -> None:
    """Write ``image``, a multiple of the page size long, durably as a pack under ``key``."""
    plan = PackPlan(key, len(image), [], cut_chunks([Extent(len(image), "param")]), image)
    writer = store.write(key, plan.size)
    try:
        write_pack(writer, plan, pace=WriteLimits(threads))
        writer.finish()
    except BaseException:
        writer.abort()
        raise
    store.sync(key.rpartition("/")[0])
