"""Parameters laid end to end and cut into runs: who holds what of each, and who writes it."""

from __future__ import annotations

import math
import random

import pytest
import torch

from relight.errors import IncompatibleState
from relight.layout import Box, check_tiling
from relight.layout.rank_tables import Mesh, Table, TableEntry, TensorOwnership
from relight.layout.shards import relative


def lines(rng: random.Random) -> list[list[tuple[str, tuple[int, ...], int]]]:
    """Return random lines of parameters. Each parameter has a name, a shape, and an offset in its padded line."""
    result = []
    for number in range(rng.randint(1, 3)):
        offset, line = 0, []
        for index in range(rng.randint(1, 6)):
            offset += rng.choice((0, 0, 1, 3))
            shape = tuple(rng.choice((1, 2, 3, 5, 8)) for _ in range(rng.randint(0, 3)))
            line.append((f"{number}.{index}", shape, offset))
            offset += math.prod(shape)
        result.append(line)
    return result


@pytest.mark.parametrize("seed", range(5))
def test_runs_are_what_torch_cuts_and_are_written_once(seed: int) -> None:
    """Each rank's pieces hold its elements, and the boxes that ranks write tile the shapes, for random lines."""
    rng = random.Random(seed)
    for _ in range(200):
        copies, world = rng.choice(((1, 1), (1, 2), (1, 3), (2, 2), (3, 1), (1, 7)))
        mesh = Mesh(
            (copies, world) if copies > 1 else (world,), tuple(rng.sample(range(copies * world), copies * world))
        )
        entries: list[list[TableEntry]] = [[] for _ in range(copies * world)]
        expected: dict[tuple[int, str], list[float]] = {}
        values: dict[str, torch.Tensor] = {}
        for line in lines(rng):
            total = line[-1][2] + math.prod(line[-1][1])
            flat = torch.arange(float(total))
            each = -(-total // world)
            chunks = list(flat.chunk(world))
            for name, shape, begin in line:
                values[name] = flat[begin : begin + math.prod(shape)].view(shape)
                for place, rank in enumerate(mesh.ranks):
                    local_chunk = chunks[place % world] if place % world < len(chunks) else flat[:0]
                    mine = [value for value in local_chunk.tolist() if begin <= value < begin + math.prod(shape)]
                    if mine:
                        entries[rank].append(TableEntry(name, "float32", 4, shape, "param", 0, (), (begin, each)))
                        expected[rank, name] = mine
        tables = [Table((mesh,), tuple(rank_entries)) for rank_entries in entries]
        known = {table: number for number, table in enumerate(dict.fromkeys(tables))}
        roster = TensorOwnership(list(known), [known[table] for table in tables])
        written: dict[str, list[Box]] = {name: [] for name in values}
        for rank, table in enumerate(tables):
            pieces = roster.pieces(rank)
            for entry, entry_pieces in zip(table.entries, pieces, strict=True):
                local = torch.tensor(expected[rank, entry.name])
                expected_parts = [
                    local[piece.at[0] : piece.at[0] + piece.box.elements].view(piece.box.size) for piece in entry_pieces
                ]
                cut = [
                    values[entry.name][tuple(slice(a, a + n) for a, n in zip(*piece.box, strict=True))]
                    for piece in entry_pieces
                ]
                assert all(map(torch.equal, expected_parts, cut))
                assert sum(piece.box.elements for piece in entry_pieces) == len(local)
            for work in roster.work(rank):
                entry = table.entries[work.entry]
                if entry.shape:
                    inner = relative(work.box, pieces[work.entry][work.piece].box)
                    assert all(a >= 0 for a in inner.start)
                    written[entry.name].append(work.box)
        for name, boxes in written.items():
            if values[name].shape:
                assert check_tiling(tuple(values[name].shape), boxes) is None, (name, boxes)


def test_a_rank_that_lacks_what_it_holds_elements_of_is_named() -> None:
    """A rank without elements of a tensor may lack it. A rank with elements must have it."""
    mesh = Mesh((3,), (0, 1, 2))
    entry = TableEntry("w", "float32", 4, (4, 5), "param", 0, (), (2, 10))
    with pytest.raises(IncompatibleState, match=r"w: ranks \[2\] hold elements of it, and do not have it"):
        TensorOwnership([Table((mesh,), (entry,)), Table((mesh,), ())], [0, 0, 1])
    short = TableEntry("w", "float32", 4, (3, 5), "param", 0, (), (2, 10))
    roster = TensorOwnership([Table((mesh,), (short,)), Table((mesh,), ())], [0, 0, 1])
    assert [len(roster.work(rank)) > 0 for rank in range(3)] == [True, True, False]
