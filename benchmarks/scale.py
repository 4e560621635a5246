"""``python -m benchmarks.scale``: what planning and committing cost each rank of large jobs, without their bytes.

The real code runs: tables, shares, layout of packs, encoded parts and roots, for models of 8 B to 1 T parameters with
AdamW on up to 4,096 ranks. Commits of up to 256 ranks run as threads: what each transfers over a counting store, and
how much time the commit adds, on a disk, to that of one rank alone. Writes ``docs/scale.md``'s tables.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from relight.commit import Attempt, SaveInfo, SaveRequest, plan_save
from relight.commit.save import CommitTarget, Participant
from relight.format import Part, PartRef, Root, encode_part, encode_root, encode_tree
from relight.format.manifest import SHORT_PARTS, Pack
from relight.format.names import LOG_DIR, parse_ready, part_file
from relight.layout import Box, Bytes, Item
from relight.layout.rank_tables import REPLICATED, Mesh, Table, TableEntry, TensorOwnership
from relight.log import Log
from relight.store import LocalStore, MemoryStore
from relight.testing.counting import CountingStore


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
    """A source that has only a length."""

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
        prefix = f"layers.{layer}"
        for name, shape, cut in (
            ("q", (width, width), 0), ("k", (small, width), 0), ("v", (small, width), 0), ("o", (width, width), 1), ("gate", (inner,
            width), 0), ("up", (inner, width), 0), ("down", (width, inner), 1), ("norm1", (width,), -1), ("norm2", (width,), -1),
        ):  # fmt: skip
            yield f"{prefix}.{name}.weight", shape, cut
    yield "norm.weight", (width,), -1
    yield "output.weight", (model.vocabulary, width), 0


def table_of(model: Model, layout: str) -> Table:
    """Return the table: weights in bfloat16, master weights and two moments in float32, and a step for each."""
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
        entries.append(TableEntry(f"model/{name}", "bfloat16", 2, shape, "param", 0, places))
        entries += [
            TableEntry(f"optimizer/state/{name}/{key}", "float32", 4, shape, "optim", 0, places)
            for key in ("master", "exp_avg", "exp_avg_sq")
        ]
        entries.append(TableEntry(f"optimizer/state/{name}/step", "float32", 4, (), "optim"))
    return Table((mesh,), tuple(entries))


def planned(model: Model, layout: str) -> dict[str, Any]:
    """Return each figure for the most loaded of a few ranks."""
    table = table_of(model, layout)
    row: dict[str, Any] = {
        "model": model.name, "layout": layout, "ranks": model.ranks, "tensors": len(table.entries),
        "state_bytes": sum(math.prod(entry.shape) * entry.weight for entry in table.entries),
        "told_once_bytes": len(msgspec.msgpack.encode(table)), "told_each_save_bytes": 16 + 2 * 12,
        "plan_s": 0.0, "rank_bytes": [], "pieces": 0, "part_bytes": 0, "part_bytes_rank0": 0,
    }  # fmt: skip
    for rank in (0, 1, model.ranks // 2, model.ranks - 1):
        started = time.perf_counter()
        roster = TensorOwnership([table], [0] * model.ranks)
        works = roster.work(rank)
        items = [_item(table.entries[work.entry], work.box) for work in works]
        if roster.leads(rank):
            entries = {work.entry for work in works}
            items += [
                _item(entry, Box((0,) * len(entry.shape), (0,) * len(entry.shape)))
                for i, entry in enumerate(table.entries)
                if i not in entries
            ]
        plan = plan_save(items, id="0" * 10, rank=rank)
        row["plan_s"] = max(row["plan_s"], time.perf_counter() - started)
        packs = [Pack(pack.file, pack.size, [(length, bytes(32)) for length in pack.chunks]) for pack in plan.packs]
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


def _item(entry: TableEntry, box: Box) -> Item:
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
        features=[SHORT_PARTS], parts=refs, logical_bytes=1, stored_bytes=1, new_bytes=1,
    )  # fmt: skip


def committed(world: int) -> dict[str, Any]:
    """Save one row a rank by threads over a store in memory.

    Return the bytes and store requests of the busiest and the median rank. Packs and parts are separate, as each rank
    writes its own, whichever rank commits.
    """
    memory = MemoryStore()
    own = Attempt.begin(memory, "run").place
    stores = [CountingStore(memory, apart=lambda name: name.startswith(("pack-", "part-"))) for _ in range(world)]
    _save_as_threads(own, stores, world)
    each = sorted(stores, key=lambda store: store.through)
    busiest, median = each[-1], each[len(each) // 2]
    return {
        "ranks": world, "bytes_busiest_per_rank": busiest.through / world, "bytes_median_per_rank": median.through / world,
        "bytes_busiest": dict(busiest.bytes), "asked_busiest": dict(busiest.asked), "asked_median": dict(median.asked),
    }  # fmt: skip


def timed(world: int, folder: Path, rounds: int, way: str = "processes") -> dict[str, Any]:
    """Return seconds from the last rank's durable part to a durable COMMIT, on a disk. Ranks have one row each.

    A save of one rank alone is the reference: from its durable part to a durable COMMIT. Medians, taken in turn.
    """
    own_s, all_s = [], []
    for _ in range(rounds):
        own_s.append(_after_the_part(1, folder, way))
        all_s.append(_after_the_part(world, folder, way))
    own, many = statistics.median(own_s), statistics.median(all_s)
    bound = 0.005 + 0.001 * math.log2(world)
    return {
        "ranks": world, "as": way, "rounds": rounds, "one_rank_s": own, "commit_s": many, "added_s": many - own,
        "times_one_rank": many / own, "bound_s": bound, "one_rank_each_s": own_s, "commit_each_s": all_s,
    }  # fmt: skip


class _Seen:
    """Time at which this rank was ready, and at which COMMIT was durable if this rank appended it; else None."""

    def __init__(self, world: int) -> None:
        self.ready: float | None = None
        self.done: float | None = None
        self._world = world

    def name_created(self, key: str, now: float) -> None:
        """Record the time if the new name is a ready file, a part or a record."""
        name = key.rpartition("/")[2]
        if f"/{LOG_DIR}/" in key:
            self.done = now
        elif parse_ready(name) is not None or (self._world == 1 and name == part_file(0)):
            self.ready = now


def _after_the_part(world: int, folder: Path, way: str) -> float:
    with tempfile.TemporaryDirectory(dir=folder) as root:
        own = Attempt.begin(LocalStore(root), "run").place
        if way == "threads":
            seen = [_Seen(world) for _ in range(world)]
            _save_as_threads(
                own, [CountingStore(LocalStore(root), on_create=rank_seen.name_created) for rank_seen in seen], world
            )
            times = [(rank_seen.ready, rank_seen.done) for rank_seen in seen]
        else:
            times = _save_as_processes(own, root, world)
        return min(done for _, done in times if done is not None) - max(
            ready for ready, _ in times if ready is not None
        )


def _save_as_processes(own: CommitTarget, root: str, world: int) -> list[tuple[float | None, float | None]]:
    """Return each rank's times. Ranks are forks of this process, with its memory and the machine's clock."""
    fork = multiprocessing.get_context("fork")
    together, queue = fork.Barrier(world), fork.SimpleQueue()

    def rank(number: int) -> None:
        seen = _Seen(world)
        try:
            _save_as(number, world, own, CountingStore(LocalStore(root), on_create=seen.name_created), together.wait)
            queue.put((seen.ready, seen.done))
        except BaseException as error:
            together.abort()
            queue.put(repr(error))

    processes = [fork.Process(target=rank, args=(number,)) for number in range(world)]
    for process in processes:
        process.start()
    results = [queue.get() for _ in processes]
    for process in processes:
        process.join()
    failed = [result for result in results if isinstance(result, str)]
    if failed:
        raise RuntimeError(failed[0])
    return results


def _save_as_threads(own: CommitTarget, stores: list[CountingStore], world: int) -> None:
    together = threading.Barrier(world)
    failed: list[BaseException] = []

    def rank(number: int) -> None:
        try:
            _save_as(number, world, own, stores[number], together.wait)
        except BaseException as error:
            together.abort()
            failed.append(error)

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]


def _save_as(number: int, world: int, own: CommitTarget, store: CountingStore, together: Callable[[], object]) -> None:
    """Save as one rank, once all are ready. Counts begin then."""
    place = CommitTarget(store, Log(store, "run"), own.store_id, own.run_id, own.epoch)
    place.log.read()
    store.bytes.clear()
    store.asked.clear()
    row = Item("t", "uint8", (world, 64), "value", Bytes(bytes(64)), Box((number, 0), (1, 64)))
    seat = Participant(number, world, "0" * 16, 60.0) if world > 1 else None
    request = SaveRequest(SaveInfo(step=1), tree=encode_tree({}), items=[row], id="0" * 10, seat=seat)
    together()
    Attempt(place).save(request)


def main() -> None:
    """Print all tables, as JSON a line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", "--json", type=Path, help="a JSON file")
    parser.add_argument("--only", choices=["plans", "bytes", "time"], help="this table alone")
    parser.add_argument(
        "--folder", type=Path, default=Path(tempfile.gettempdir()), help="a folder on the disk to be timed"
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--ranks", choices=["processes", "threads"], default="processes", help="what the ranks of a timed commit are"
    )
    options = parser.parse_args()
    makes: dict[str, Iterator[dict[str, Any]]] = {
        "plans": (planned(model, layout) for model in MODELS for layout in LAYOUTS),
        "bytes": (committed(world) for world in (2, 4, 8, 16, 32, 64, 256)),
        "time": (timed(world, options.folder, options.rounds, options.ranks) for world in (2, 4, 8, 16, 32, 64)),
    }
    tables: dict[str, list[dict[str, Any]]] = {name: [] for name in makes if options.only in (None, name)}
    for name, rows in tables.items():
        for row in makes[name]:
            print(json.dumps(row), flush=True)
            rows.append(row)
    if options.out:
        options.out.write_text(json.dumps(tables, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
