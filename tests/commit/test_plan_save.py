"""Laying out a save: properties of the plan, against the words of the format."""

from __future__ import annotations

import math
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relight.commit import plan as plan_module
from relight.commit import plan_save, write_pack
from relight.errors import IncompatibleState
from relight.format import DTYPES, digest, parse_header
from relight.format.manifest import Pack, Part, check_part
from relight.layout import Bytes, Extent, Item, cut_chunks
from relight.store import MemoryStore

DTYPE_NAMES = sorted(DTYPES)


@st.composite
def states(draw: st.DrawFn) -> list[Item]:
    """Draw a few tensors of any dtype, shape and role, also empty and 0-d ones."""
    items = []
    for n in range(draw(st.integers(0, 12))):
        dtype = draw(st.sampled_from(DTYPE_NAMES))
        shape = tuple(draw(st.lists(st.integers(0, 9), max_size=3)))
        data = bytes([n % 251]) * (math.prod(shape) * DTYPES[dtype].itemsize)
        role = draw(st.sampled_from(["param", "buffer", "optim", "value"]))
        items.append(Item(f"t{n}", dtype, shape, role, Bytes(data), None, draw(st.booleans())))
    return items


@settings(max_examples=150, deadline=None)
@given(items=states(), pack_bytes_max=st.sampled_from([1, 100, 600, 1 << 30]), lanes=st.integers(1, 5))
def test_tensors_and_chunks_tile_each_pack(items: list[Item], pack_bytes_max: int, lanes: int) -> None:
    """Every tensor is in one pack, packs are header and tensors without gaps, chunks tile them, and a reader accepts the part."""
    with mock.patch.object(plan_module, "LANE_BYTES_MIN", 50):
        plan = plan_save(items, id="p" * 10, pack_bytes_max=pack_bytes_max, lanes=lanes)
    assert [tensor.name for tensor in plan.tensors] == [item.name for item in items]
    assert plan.logical_bytes == sum(item.source.length for item in items)
    packs = []
    for pack in plan.packs:
        assert sum(pack.chunks) == pack.size == sum(source.length for source in pack.sources)
        assert pack.chunks[0] == pack.sources[0].length, "the header is a chunk of its own"
        assert pack.chunks[0] % 4096 == 0, "data starts on a page"
        packs.append(Pack(pack.file, pack.size, [(length, b"h" * 32) for length in pack.chunks]))
    part = Part(store="", run="", id="", step=0, epoch=0, rank=0, world=1, packs=packs, tensors=plan.tensors, tree=b"")
    check_part(part, "the plan")


class _Length:
    """A source with a length and no contents."""

    def __init__(self, length: int) -> None:
        self.length = length

    def view(self) -> memoryview | None:
        return None

    def fill(self, start: int, into: memoryview) -> None:
        raise AssertionError


@settings(max_examples=150, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 100 << 20), min_size=1, max_size=60),
    lanes=st.integers(1, 8),
    pack_bytes_max=st.sampled_from([1 << 40, 200 << 20]),
)
def test_lanes_get_packs_of_about_one_size(sizes: list[int], lanes: int, pack_bytes_max: int) -> None:
    """There are at most as many packs as lanes, and fewer for few bytes. A pack differs from its share by at most the
    largest tensor."""
    items = [Item(f"t{n:03d}", "uint8", (size,), "param", _Length(size)) for n, size in enumerate(sizes)]
    plan = plan_save(items, id="p" * 10, lanes=lanes, pack_bytes_max=pack_bytes_max)
    tensor_bytes = [pack.size - pack.chunks[0] for pack in plan.packs]
    total = sum(sizes)
    assert sum(tensor_bytes) == total
    useful = max(1, min(lanes, total // plan_module.LANE_BYTES_MIN))
    if pack_bytes_max == 1 << 40:
        assert len(tensor_bytes) <= useful
        if total and max(sizes) * 2 * useful <= total:
            assert len(tensor_bytes) == useful
            assert all(abs(size - total / useful) <= max(sizes) for size in tensor_bytes)
    else:
        assert all(size <= pack_bytes_max for size in tensor_bytes)


@settings(max_examples=100, deadline=None)
@given(items=states())
def test_tensors_are_aligned_for_foreign_readers(items: list[Item]) -> None:
    """Each tensor starts at a multiple of its element's size."""
    for item, tensor in zip(items, plan_save(items, id="p" * 10).tensors, strict=True):
        assert tensor.length == 0 or tensor.offset % DTYPES[item.dtype].itemsize == 0


@settings(max_examples=100, deadline=None)
@given(items=states(), shuffled=st.randoms())
def test_equal_states_are_laid_out_equally(items: list[Item], shuffled: object) -> None:
    """The order in which tensors are given does not matter: reuse of chunks rests on it."""
    other = list(items)
    shuffled.shuffle(other)  # type: ignore[attr-defined]
    first, second = plan_save(items, id="p" * 10), plan_save(other, id="p" * 10)
    assert {tensor.name: tensor for tensor in first.tensors} == {tensor.name: tensor for tensor in second.tensors}
    assert [pack.chunks for pack in first.packs] == [pack.chunks for pack in second.packs]


@settings(max_examples=60, deadline=None)
@given(items=states(), slab_bytes=st.sampled_from([4096, 8192, 1 << 20]))
def test_packs_match_their_plan(items: list[Item], slab_bytes: int) -> None:
    """A written pack has each tensor at its planned offset, correct hashes, and a header that agrees with the plan."""
    plan = plan_save(items, id="p" * 10)
    store = MemoryStore()
    for index, pack in enumerate(plan.packs):
        hashes = write_pack(store.write(pack.file, pack.size), pack, slab_bytes=slab_bytes)
        data = store.get(pack.file, 1 << 30)
        offset = 0
        for length, value in zip(pack.chunks, hashes, strict=True):
            assert digest(data[offset : offset + length]) == value
            offset += length
        header = parse_header(data[: pack.chunks[0]], pack.file)
        for item, tensor in zip(items, plan.tensors, strict=True):
            if tensor.length and tensor.pack == index:
                assert data[tensor.offset : tensor.offset + tensor.length] == bytes(item.source.view() or b"")
                start = tensor.offset - pack.chunks[0]
                assert header[item.name][2:] == (start, start + tensor.length)


@settings(max_examples=200, deadline=None)
@given(
    extents=st.lists(st.builds(Extent, st.integers(0, 5000), st.sampled_from("ab")), max_size=30),
    chunk=st.sampled_from([16, 64, 1024]),
    group=st.sampled_from([16, 100, 1000]),
)
def test_chunks_are_cut_as_the_format_specifies(extents: list[Extent], chunk: int, group: int) -> None:
    """A chunk is a range of one tensor, or whole tensors of one group. It ends a tensor or at a multiple of 16."""
    lengths = cut_chunks(extents, chunk_bytes=chunk, group_bytes=group)
    assert sum(lengths) == sum(extent.length for extent in extents)
    assert all(length > 0 for length in lengths)
    ends, starts, offset = set(), {}, 0
    for extent in extents:
        if extent.length:
            starts[offset] = extent
            offset += extent.length
            ends.add(offset)
    offset = 0
    for length in lengths:
        inside = [
            (start, extent)
            for start, extent in starts.items()
            if start < offset + length and offset < start + extent.length
        ]
        if len(inside) > 1:
            assert length <= group
            assert inside[0][0] == offset
            assert offset + length in ends
            assert len({extent.group for _, extent in inside}) == 1
        elif offset + length not in ends:
            assert length % 16 == 0
            assert length == chunk
        offset += length


def test_the_shared_chunk_has_the_limit_that_is_documented() -> None:
    """Tensors share a chunk up to 1 MiB, larger ones are cut every 4 MiB."""
    assert cut_chunks([Extent(600_000, "a"), Extent(400_000, "a"), Extent(100_000, "a")]) == [1_000_000, 100_000]
    assert cut_chunks([Extent(9 << 20, "a")]) == [4 << 20, 4 << 20, 1 << 20]


def test_two_tensors_of_one_name_are_refused() -> None:
    """Names are unique in a save."""
    with pytest.raises(IncompatibleState, match="two tensors"):
        plan_save(
            [Item("a", "int8", (1,), "param", Bytes(b"x")), Item("a", "int8", (1,), "param", Bytes(b"y"))], id="p" * 10
        )


def test_a_large_pack_streams_through_two_slabs_and_threads() -> None:
    """A tensor much larger than a slab, hashed in pieces by threads, gives the same file and hashes as all at once."""
    data = bytes(range(256)) * 40_000
    items = [
        Item("big", "uint8", (len(data),), "param", Bytes(bytearray(data))),
        Item("small", "uint8", (3,), "param", Bytes(b"abc")),
    ]
    (pack,) = plan_save(items, id="p" * 10).packs
    results = []
    for slab_bytes, threads in ((1 << 16, 2), (1 << 20, 4), (1 << 30, 1)):
        store = MemoryStore()
        hashes = write_pack(store.write("pack", pack.size), pack, slab_bytes=slab_bytes, threads=threads)
        results.append((store.get("pack", 1 << 30), hashes))
    assert results[0] == results[1] == results[2]


def test_a_source_that_fails_fails_the_pack_and_leaves_no_thread() -> None:
    """An error in a source reaches the caller. No thread reads the caller's memory afterwards."""
    import threading

    class Bad:
        length = 1 << 20

        def view(self) -> memoryview | None:
            return None

        def fill(self, start: int, into: memoryview) -> None:
            raise OSError("gone")

    for slab_bytes in (1 << 16, 1 << 24):
        (pack,) = plan_save([Item("bad", "uint8", (1 << 20,), "param", Bad())], id="p" * 10).packs
        with pytest.raises(OSError, match="gone"):
            write_pack(MemoryStore().write("pack", pack.size), pack, slab_bytes=slab_bytes)
        assert not [thread for thread in threading.enumerate() if thread.name.startswith("relight-hash")]
