"""Gathering on one rank: every byte once, from a rank that has it, in buffers of a few MiB."""

from __future__ import annotations

import random
import tracemalloc
from collections import Counter
from math import prod

import pytest
import torch

from relight.capture.sharded import ShardingOf
from relight.capture.tensors import TensorSource
from relight.comm import RankTimeout, ThreadGroup
from relight.layout import Box, Item, whole
from relight.layout.rank_tables import REPLICATED, Mesh, Table, TableEntry, TensorOwnership
from relight.layout.routes import Gathering, Route, gatherings
from relight.layout.shards import LocalBox
from relight.ranks import gather
from relight.ranks.gather import GatheredSource, HeldPieces, Rank0Exchange

DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "uint8": torch.uint8,
    "complex128": torch.complex128,
}


def random_roster(rng: random.Random, world: int) -> TensorOwnership:
    """Return tensors of many shapes, some plain and some spread over all ranks."""
    meshes = (Mesh((world,), tuple(range(world))), Mesh((2, world // 2), tuple(range(world))))
    entries = []
    for number in range(30):
        dtype = rng.choice(list(DTYPES))
        shape = tuple(rng.randrange(1, 14) for _ in range(rng.randrange(4)))
        mesh = rng.randrange(-1, 2) if shape else -1
        placements = tuple(
            rng.choice([REPLICATED, (rng.randrange(len(shape)), 1)]) for _ in (meshes[mesh].shape if mesh >= 0 else ())
        )
        entries.append(TableEntry(f"t{number}", dtype, DTYPES[dtype].itemsize, shape, "param", mesh, placements))
    return TensorOwnership([Table(meshes, tuple(entries))], [0] * world)


def value_of(entry: TableEntry) -> torch.Tensor:
    """Return bytes that differ between tensors and places."""
    generator = torch.Generator().manual_seed(sum(map(ord, entry.name)))
    size = prod(entry.shape) * entry.weight
    return (
        torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)
        .view(DTYPES[entry.dtype])
        .view(entry.shape)
    )


def held_by(roster: TensorOwnership, rank: int) -> HeldPieces:
    """Return that rank's pieces, each tensor's in one local tensor."""
    items, spreads = [], {}
    pieces = roster.pieces(rank)
    for index, entry in enumerate(roster.tables[0].entries):
        full = value_of(entry)
        ends = [
            tuple(start + size for start, size in zip(piece.at, piece.box.size, strict=True)) for piece in pieces[index]
        ]
        shape = tuple(map(max, zip(*ends, strict=True))) if ends else (0,) * len(entry.shape)
        local = torch.zeros(shape if entry.shape else (), dtype=full.dtype)
        for piece in pieces[index]:
            target = local[
                tuple(slice(start, start + size) for start, size in zip(piece.at, piece.box.size, strict=True))
            ]
            target.copy_(
                full[
                    tuple(
                        slice(start, start + size) for start, size in zip(piece.box.start, piece.box.size, strict=True)
                    )
                ]
            )
        if not entry.shape:
            local.copy_(full)
        items.append(Item(entry.name, entry.dtype, entry.shape, "param", TensorSource(local)))
        if entry.mesh >= 0:
            spreads[index] = ShardingOf(roster.tables[0].meshes[entry.mesh], entry.placements, local)
    return HeldPieces(items, spreads, pieces)


@pytest.mark.parametrize("seed", range(6))
def test_routes_give_every_element_once_and_what_rank_0_has_from_there(seed: int) -> None:
    """This is true of all placements. Replicas do not travel."""
    roster = random_roster(random.Random(seed), 4)
    for entry, routes in gatherings(roster):
        assert sum(route.box.elements for route in routes) == prod(entry.shape)
        cells: Counter[tuple[int, ...]] = Counter()
        for route in routes:
            grid = torch.zeros(entry.shape)
            grid[
                tuple(slice(start, start + size) for start, size in zip(route.box.start, route.box.size, strict=True))
            ] = 1
            cells.update(map(tuple, grid.nonzero().tolist()))
        assert set(cells.values()) <= {1}
        here = {piece.box for piece in roster.pieces(0)[int(entry.name[1:])]} or {whole(entry.shape)}
        assert all(route.rank == 0 for route in routes if route.box in here)


@pytest.mark.parametrize("seed", range(6))
def test_what_is_gathered_is_what_the_ranks_hold(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gathered bytes are equal, read whole or in runs, in any order, and with buffers smaller than the tensors."""
    monkeypatch.setattr(gather, "PIECE_BYTES", 256)
    monkeypatch.setattr(gather, "SMALL_BYTES", 300 * (seed % 2))
    monkeypatch.setattr(gather, "SMALL_HELD_BYTES", 600)
    roster = random_roster(random.Random(seed), 4)
    result = gatherings(roster)

    def rank(world: ThreadGroup) -> bytes:
        desk = Rank0Exchange(world)
        if world.rank:
            return desk.answer_requests(held_by(roster, world.rank))
        rng = random.Random(seed)
        sources = [GatheredSource(desk, entry.shape, entry.weight, routes) for entry, routes in result]
        desk.begin(held_by(roster, 0), sources)
        read(rng, result, sources)
        desk.end(b"done")
        return b"done"

    assert ThreadGroup.run(4, rank, 20.0) == [b"done"] * 4


def read(rng: random.Random, found: list[Gathering], sources: list[GatheredSource]) -> None:
    """Read each tensor completely, some in two runs, in random order, and check the bytes."""
    order = list(range(len(found)))
    if rng.random() < 0.5:
        rng.shuffle(order)
    for index in order:
        entry, room = found[index].entry, bytearray(sources[index].length)
        middle = rng.randrange(prod(entry.shape) + 1) * entry.weight if rng.random() < 0.5 else len(room)
        for start, end in ((0, middle), (middle, len(room))):
            if start < end:
                sources[index].fill(start, memoryview(room)[start:end])
        expected = value_of(entry)
        assert torch.equal(torch.frombuffer(room, dtype=torch.uint8), expected.reshape(-1).view(torch.uint8)), entry


def test_memory_is_bounded_and_every_byte_travels_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """40 MiB in 2 large and 2,000 small tensors arrive from two ranks, with a few buffers, and no byte twice."""
    monkeypatch.setattr(gather, "PIECE_BYTES", 1 << 20)
    monkeypatch.setattr(gather, "SMALL_HELD_BYTES", 2 << 20)
    large, small = (1 << 18, 18), (100, 8)
    shapes = [large, *[small] * 2000, large]
    sent: Counter[int] = Counter()
    usual = ThreadGroup.send

    def counted(self: ThreadGroup, data: memoryview, to: list[int], doing: str) -> None:
        if self.rank:
            sent[self.rank] += len(data)
        usual(self, data, to, doing)

    monkeypatch.setattr(ThreadGroup, "send", counted)
    local = {rank: [torch.full((rows // 2, columns), float(rank)) for rows, columns in shapes] for rank in (1, 2)}
    rooms = [torch.zeros(shape).numpy() for shape in shapes]

    def rank(world: ThreadGroup) -> int:
        desk = Rank0Exchange(world)
        if world.rank:
            items = [
                Item(f"{n}", "float32", tuple(tensor.shape), "param", TensorSource(tensor))
                for n, tensor in enumerate(local[world.rank])
            ]
            desk.answer_requests(
                HeldPieces(
                    items,
                    {},
                    [
                        [LocalBox(Box(((world.rank - 1) * len(tensor), 0), tuple(tensor.shape)), (0, 0))]
                        for tensor in local[world.rank]
                    ],
                )
            )
            return 0
        sources = []
        for number, (rows, columns) in enumerate(shapes):
            routes = [Route(r, number, 0, Box(((r - 1) * rows // 2, 0), (rows // 2, columns))) for r in (1, 2)]
            sources.append(GatheredSource(desk, (rows, columns), 4, routes))
        desk.begin(HeldPieces([], {}, []), sources)
        tracemalloc.start()
        try:
            before = tracemalloc.get_traced_memory()[0]
            for source, room in zip(sources, rooms, strict=True):
                source.fill(0, memoryview(room).cast("B"))
            return tracemalloc.get_traced_memory()[1] - before
        finally:
            tracemalloc.stop()
            desk.end(b"")

    peak = ThreadGroup.run(3, rank, 60.0)[0]
    total = sum(rows * columns * 4 for rows, columns in shapes)
    assert total < sum(sent.values()) < 1.01 * total
    assert all(int(room[0, 0]) == 1 and int(room[-1, -1]) == 2 for room in rooms)
    # all three ranks' buffers are in this process: a room each, letters on their way, small tensors held
    assert (
        peak
        < 3 * gather.PIECE_BYTES + 2 * gather.AHEAD * gather.PIECE_BYTES + gather.SMALL_HELD_BYTES + (2 << 20)
        < total / 3
    )


def test_a_rank_that_does_not_answer_is_named() -> None:
    """Neither rank 0, which asks, nor the rank that waits for requests waits longer than the deadline. Nothing is sent
    later."""

    def rank(world: ThreadGroup) -> tuple[int, ...]:
        desk = Rank0Exchange(world)
        if world.rank == 1:
            return ()
        with pytest.raises(RankTimeout) as caught:
            if world.rank == 0:
                source = GatheredSource(desk, (4,), 4, [Route(1, 0, 0, whole((4,)))])
                desk.begin(HeldPieces([], {}, []), [source])
                source.fill(0, memoryview(bytearray(16)))
            else:
                desk.answer_requests(HeldPieces([], {}, []))
        assert desk.lost
        desk.end(b"not sent")
        return caught.value.ranks

    assert ThreadGroup.run(3, rank, 0.3) == [(1,), (), (0,)]
