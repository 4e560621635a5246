"""``python -m benchmarks.scale``: what planning and committing cost each rank of large jobs, without their bytes.

The real code: tables, shares, layout of packs, parts and roots as they are encoded, for models of 8 B to 1 T parameters with AdamW on up
to 4,096 ranks; and the commit of up to 64 ranks, as threads over a store in memory that counts what is asked of it. Writes
``docs/scale.md``'s tables.
"""

from __future__ import annotations

import argparse
import json
import math
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from relight.commit import Attempt, SaveRequest, plan_save
from relight.commit.save import Place, Seat
from relight.commit.together import save_together
from relight.format import Part, PartRef, Root, encode_part, encode_root, encode_tree
from relight.format.manifest import Pack
from relight.layout import Box, Bytes, Item
from relight.layout.roster import REPLICATED, Entry, Mesh, Roster, Table
from relight.log import Log
from relight.store import MemoryStore


class Model(NamedTuple):
    """A decoder: layers, width, width of the feed-forward part, vocabulary, heads' share for keys and values."""

    name: str
    layers: int
    width: int
    inner: int
    vocabulary: int
    kv: int
    ranks: int


MODELS = [
    Model("8 B", 32, 4096, 14336, 128256, 4, 64),
    Model("70 B", 80, 8192, 28672, 128256, 8, 512),
    Model("405 B", 126, 16384, 53248, 128256, 8, 4096),
    Model("1 T", 128, 25600, 76800, 128256, 16, 4096),
]
LAYOUTS = ("fsdp", "hsdp", "tp8+fsdp")


class Sized:
    """A source of which only the length matters."""

    def __init__(self, length: int) -> None:
        self.length = length

    def view(self) -> memoryview | None:
        return None

    def fill(self, start: int, into: memoryview) -> None:
        raise AssertionError("nothing is read")


def shapes(model: Model) -> Iterator[tuple[str, tuple[int, ...], int]]:
    """Names and shapes of the parameters, and along which dimension tensor parallelism cuts them (−1: it does not)."""
    width, inner, small = model.width, model.inner, model.width // model.kv
    yield "embed.weight", (model.vocabulary, width), 0
    for layer in range(model.layers):
        at = f"layers.{layer}"
        for name, shape, cut in (
            ("q", (width, width), 0), ("k", (small, width), 0), ("v", (small, width), 0), ("o", (width, width), 1), ("gate", (inner,
            width), 0), ("up", (inner, width), 0), ("down", (width, inner), 1), ("norm1", (width,), -1), ("norm2", (width,), -1),
        ):  # fmt: skip
            yield f"{at}.{name}.weight", shape, cut
    yield "norm.weight", (width,), -1
    yield "output.weight", (model.vocabulary, width), 0


def table_of(model: Model, layout: str) -> Table:
    """Weights in bfloat16; master weights and two moments in float32; a step for each."""
    ranks = tuple(range(model.ranks))
    if layout == "fsdp":
        mesh = Mesh((model.ranks,), ranks)
    elif layout == "hsdp":
        mesh = Mesh((model.ranks // 64 or 1, min(64, model.ranks)), ranks)
    else:
        mesh = Mesh((model.ranks // 8, 8), ranks)
    entries = []
    for name, shape, cut in shapes(model):
        if layout == "fsdp":
            places: tuple[tuple[int, int], ...] = ((0, 1),)
        elif layout == "hsdp":
            places = (REPLICATED, (0, 1))
        else:
            places = ((0, 8 if cut == 0 else 1), (cut, 1) if cut >= 0 else REPLICATED)
        entries.append(Entry(f"model/{name}", "bfloat16", 2, shape, "param", 0, places))
        entries += [
            Entry(f"optimizer/state/{name}/{key}", "float32", 4, shape, "optim", 0, places) for key in ("master", "exp_avg", "exp_avg_sq")
        ]
        entries.append(Entry(f"optimizer/state/{name}/step", "float32", 4, (), "optim"))
    return Table((mesh,), tuple(entries))


def planned(model: Model, layout: str) -> dict[str, Any]:
    """Each figure for the most loaded of a few ranks."""
    table = table_of(model, layout)
    row: dict[str, Any] = {
        "model": model.name, "layout": layout, "ranks": model.ranks, "tensors": len(table.entries),
        "state_bytes": sum(math.prod(entry.shape) * entry.weight for entry in table.entries),
        "told_once_bytes": len(msgspec.msgpack.encode(table)), "told_each_save_bytes": 16 + 2 * 12,
        "plan_s": 0.0, "rank_bytes": [], "pieces": 0, "part_bytes": 0, "part_bytes_rank0": 0,
    }  # fmt: skip
    for rank in (0, 1, model.ranks // 2, model.ranks - 1):
        started = time.perf_counter()
        roster = Roster([table], [0] * model.ranks)
        works = roster.work(rank)
        items = [_item(table.entries[work.entry], work.box) for work in works]
        if roster.leads(rank):
            there = {work.entry for work in works}
            items += [
                _item(entry, Box((0,) * len(entry.shape), (0,) * len(entry.shape)))
                for i, entry in enumerate(table.entries)
                if i not in there
            ]
        plan = plan_save(items, id="0" * 10, rank=rank)
        row["plan_s"] = max(row["plan_s"], time.perf_counter() - started)
        packs = [Pack(one.file, one.size, [(length, bytes(32)) for length in one.chunks]) for one in plan.packs]
        tree = encode_tree({}) if rank else bytes(60 * len(table.entries))
        part = Part(
            store="0" * 32,
            run="0" * 32,
            id="0" * 10,
            step=1,
            epoch=1,
            rank=rank,
            world=model.ranks,
            packs=packs,
            tensors=plan.tensors,
            tree=tree,
        )
        row["part_bytes_rank0" if rank == 0 else "part_bytes"] = max(
            row["part_bytes_rank0" if rank == 0 else "part_bytes"], len(encode_part(part))
        )
        row["pieces"] = max(row["pieces"], len(works))
        row["rank_bytes"].append(plan.stored_bytes - sum(pack.chunks[0] for pack in plan.packs))
    row["root_bytes"] = len(encode_root(_root(model.ranks)))
    return row


def _item(entry: Entry, box: Box) -> Item:
    return Item(
        entry.name,
        entry.dtype,
        entry.shape,
        entry.role,
        Sized(box.elements * entry.weight if entry.shape else 4),
        box if entry.shape else None,
    )


def _root(world: int) -> Root:
    refs = [PartRef(rank=rank, file=f"part-{rank:05d}.msgpack", size=100_000, hash="0" * 64) for rank in range(world)]
    return Root(
        store="0" * 32, run="0" * 32, id="0" * 10, step=1, epoch=1, created="2026-01-01T00:00:00Z", reason="every 500 steps", world=world,
        parts=refs, logical_bytes=1, stored_bytes=1, new_bytes=1,
    )  # fmt: skip


class Counting:
    """A store in memory that counts, by thread, operations and bytes."""

    def __init__(self, inner: MemoryStore, counts: dict[int, Counter[str]]) -> None:
        self._inner, self._counts = inner, counts

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        if not callable(found):
            return found

        def counted(*args: Any, **options: Any) -> Any:
            mine = self._counts.setdefault(threading.get_ident(), Counter())
            mine[name] += 1
            result = found(*args, **options)
            if name == "list":
                result = list(result)
                mine["bytes_listed"] += sum(len(entry.name) for entry in result)
                return iter(result)
            if name == "get":
                mine["bytes_got"] += len(result)
            if name == "put_once":
                mine["bytes_put"] += len(args[1])
            return result

        return counted


def committed(world: int) -> dict[str, Any]:
    """A save of one row a rank by threads; seconds behind the part, and what was asked of the store by the busiest and by the median
    rank.
    """
    memory, counts = MemoryStore(), {}
    attempt = Attempt.begin(memory, "run")
    own = attempt.place
    commits: list[float] = []
    ready = threading.Barrier(world)

    def rank(number: int) -> None:
        store: Any = Counting(memory, counts)
        place = Place(store, Log(store, "run"), own.store_id, own.run_id, own.epoch)
        place.log.read()
        counts[threading.get_ident()].clear()
        ready.wait()
        row = Item("t", "uint8", (world, 64), "value", Bytes(bytes(64)), Box((number, 0), (1, 64)))
        seat = Seat(number, world, "0" * 16, 60.0)
        report = save_together(place, SaveRequest(step=1, tree=encode_tree({}), items=[row], id="0" * 10, seat=seat))
        commits.append(report.timings_s["commit"])

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    each = sorted(counts.values(), key=lambda one: one["bytes_got"] + one["bytes_listed"] + one["bytes_put"])
    busiest, median = each[-1], each[len(each) // 2]
    through = lambda one: one["bytes_got"] + one["bytes_listed"] + one["bytes_put"]  # noqa: E731
    names = ("list", "get", "put_once", "write", "open", "settle", "delete")
    return {
        "ranks": world, "commit_s": min(commits), "bytes_busiest_per_rank": through(busiest) / world, "bytes_median_per_rank":
        through(median) / world, "asked_busiest": {name: busiest[name] for name in names}, "asked_median": {name: median[name] for name in
        names},
    }  # fmt: skip


def main() -> None:
    """Print both tables, as text or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="a JSON file")
    options = parser.parse_args()
    plans = [planned(model, layout) for model in MODELS for layout in LAYOUTS]
    commits = [committed(world) for world in (1, 2, 4, 8, 16, 32, 64)]
    for row in [*plans, *commits]:
        print(json.dumps(row), flush=True)
    if options.out:
        options.out.write_text(json.dumps({"plans": plans, "commits": commits}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
