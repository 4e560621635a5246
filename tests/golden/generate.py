"""Writes the golden stores of format version 1. Run once, by hand; what it wrote is never written again.

    python tests/golden/generate.py DIRECTORY

A change of the format makes a new version next to the old: it does not touch these files.
"""

import json
import math
import sys
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "format")]

from forge import TIME, chunked, fixed, write  # noqa: E402
from render import render  # noqa: E402

from relight.format.records import NoteBody
from relight.commit import Attempt, SaveInfo, SaveRequest, plan_save  # noqa: E402
from relight.commit.pack_writer import write_pack  # noqa: E402
from relight.commit.save import check_written  # noqa: E402
from relight.format import DTYPES, Leaf, Part, PartRef, Root, encode_part, encode_root, encode_tree, hexdigest  # noqa: E402
from relight.format.manifest import Pack  # noqa: E402
from relight.format.records import CommitBody, RetireBody, TagBody  # noqa: E402
from relight.layout import Box, Bytes, Item  # noqa: E402
from relight.log import Log  # noqa: E402
from relight.store import MemoryStore, put  # noqa: E402

Row = tuple[str, str, tuple[int, ...], str, bytes]


def filled(length: int, seed: int) -> bytes:
    """Bytes that are anything but regular."""
    state, out = seed * 2654435761 + 1, bytearray()
    for _ in range(length):
        state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
        out.append(state >> 56)
    return bytes(out)


def integers(*numbers: int) -> bytes:
    """Numbers as int64."""
    return b"".join(number.to_bytes(8, "little", signed=True) for number in numbers)


def everything() -> tuple[list[Row], dict[str, Any]]:
    """Tensors of every dtype and shape, and a tree with every kind of node and leaf."""
    rows: list[Row] = []

    def add(name: str, dtype: str, shape: tuple[int, ...], role: str = "value", data: bytes | None = None) -> int:
        length = math.prod(shape) * DTYPES[dtype].itemsize
        if data is None:
            data = bytes(n % 2 for n in range(length)) if dtype == "bool" else filled(length, len(rows))
        assert len(data) == length
        rows.append((name, dtype, shape, role, data))
        return len(rows) - 1

    def leaf(kind: str, *tensors: int, meta: Any = None) -> Leaf:
        return Leaf(kind, tensors, meta)

    dtypes = {name: leaf("tensor", add(f"dtypes/{name}", name, (3,))) for name in DTYPES}
    tied = leaf("tensor", add("shapes/embedding", "float32", (4, 2), "param"))
    shapes = {
        "embedding": tied,
        "head": tied,
        "scalar": leaf("tensor", add("shapes/scalar", "float64", (), "buffer")),
        "empty": leaf("tensor", add("shapes/empty", "bfloat16", (0, 7), "buffer")),
        "empty too": leaf("tensor", add("shapes/empty too", "complex128", (2, 0), "grad")),
        "many dimensions": leaf("tensor", add("shapes/many dimensions", "int16", (1, 2, 1, 3, 1, 1, 2), "optim")),
        "expanded": leaf("expanded", add("shapes/expanded", "float16", (1, 3), "rng"), meta=(5, 3)),
        "a/b%c~d é 名": leaf("tensor", add("shapes/a%2Fb%25c~d é 名", "uint8", (1,))),
    }
    compressed = [add(f"kinds/csr/{n}", "int64", (n,), data=integers(*range(n))) for n in (3, 2)]
    kinds = {
        "numpy": leaf("numpy", add("kinds/numpy", "float64", (2, 2)), meta=("<f8", (2, 2))),
        "numpy of other order": leaf("numpy", add("kinds/numpy of other order", "uint8", (8,)), meta=(">i4", (2,))),
        "numpy text": leaf("numpy", add("kinds/numpy text", "uint8", (16,), data="añ名!".encode("utf-32-le")), meta=("<U2", (2,))),
        "numpy scalar": leaf("numpy_scalar", meta=("<f4", b"\x00\x00\xc0\x7f")),
        "sparse_coo": leaf(
            "sparse_coo",
            add("kinds/coo/indices", "int64", (2, 2), data=integers(0, 1, 1, 0)),
            add("kinds/coo/values", "float32", (2,)),
            meta=((2, 2), True),
        ),
        "sparse_csr": leaf("sparse_csr", *compressed, add("kinds/csr/values", "float32", (2,)), meta=(2, 2)),
        "quantized_tensor": leaf("quantized_tensor", add("kinds/quantized", "uint8", (4,)), meta=("quint8", 0.25, 3)),
        "quantized_channel": leaf(
            "quantized_channel",
            add("kinds/channels/int_repr", "int8", (2, 2)),
            add("kinds/channels/scales", "float64", (2,)),
            add("kinds/channels/zeros", "int64", (2,), data=integers(0, 0)),
            meta=("qint8", 0),
        ),
        "torch_dtype": leaf("torch_dtype", meta="bfloat16"),
        "torch_device": leaf("torch_device", meta="cuda:1"),
        "torch_size": leaf("torch_size", meta=(2, 3)),
    }
    plain = {
        "none": None,
        "booleans": [True, False],
        "integers": [0, -1, 2**31, -(2**63), 2**64 - 1, 2**64, -(2**63) - 1, 10**40, -(10**40)],
        "floats": [0.0, -0.0, 1.5, math.inf, -math.inf, math.nan, 5e-324, 1.7976931348623157e308],
        "complex": [1j, complex(math.nan, -0.0)],
        "texts": ["", "a", "é名\U0001f525", "a\0b\n", "x" * 40],
        "bytes": [b"", b"\x00\xff"],
        "sequences": [[], (), [[]], ((1,), [2]), {1, 2}, frozenset({"a"}), set()],
        "keys": {
            0: "int",
            1.5: "float",
            None: "none",
            (1, "a"): "tuple",
            b"k": "bytes",
            "0": "text",
            True: "boolean",
            2**70: "big",
        },
        "": {"": {}},
        "__class__": "os.system",
    }
    return rows, {"dtypes": dtypes, "shapes": shapes, "kinds": kinds, "plain": plain, "deep": nested(60)}


def nested(levels: int) -> Any:
    """Lists in lists."""
    return [nested(levels - 1)] if levels else "bottom"


def items(rows: list[Row]) -> list[Item]:
    """Return rows as items to save."""
    return [Item(name, dtype, shape, role, Bytes(data), trainable=role == "param") for name, dtype, shape, role, data in rows]


def small(step: int) -> tuple[list[Row], dict[str, Any]]:
    """A state of one tensor."""
    return [("w", "float32", (4,), "param", filled(16, 100 + step))], {"w": Leaf("tensor", (0,)), "step": step}


def one_rank(expected: dict[str, Any]) -> MemoryStore:
    """A run of one rank with every record: saved as the library saves."""
    store = MemoryStore()
    with (
        fixed(iter("wxyz")),
        chunked(64, 48),
        mock.patch("relight.commit.save.plan_save", partial(plan_save, pack_bytes_max=360)),
    ):
        first = Attempt.begin(store, "run", now=lambda: TIME)
        for step in (1, 2):
            rows, tree = small(step)
            first.save(SaveRequest(SaveInfo(step=step, metrics={"loss": 1 / step}), tree=encode_tree(tree), items=items(rows)))
            keep(expected, "wx"[step - 1] * 10, [(rows, tree)])
        first.note(NoteBody(topic="weather", data={"rain": True, "mm": 3.5, "n": 7, "where": "é", "none": None}))
        log = first._place.log
        log.append(lambda view: (TagBody(name="good/one", id="x" * 10), 1))
        log.append(lambda view: (TagBody(name="gone", id="w" * 10), 1))
        log.append(lambda view: (RetireBody(ids=["w" * 10], reason="too old"), 1))
        second = Attempt.begin(store, "run", reason="again", now=lambda: TIME)
        log.append(lambda view: (TagBody(name="fenced", id="x" * 10), 1))  # void: the fence is above it
        rows, tree = everything()
        request = SaveRequest(SaveInfo(step=3, metrics={"loss": math.nan, "accuracy": 0.5, "high": math.inf, "low": -math.inf, "count": 2**63}, user={"note": "é", "nested": {"list": [1, None, True, 1.5]}}, environment={"python": "3.11.7"}, components=dict.fromkeys(tree, "value"), exact=["a reason"], parents=["x" * 10]), tree=encode_tree(tree), items=items(rows))
        second.save(request)
        keep(expected, "y" * 10, [(rows, tree)])
    return store


def keep(expected: dict[str, Any], name: str, ranks: list[tuple[list[Row], Any]]) -> None:
    """Record what a reader must find."""
    expected[name] = [
        {"tensors": {row[0]: [row[1], list(row[2]), row[4].hex()] for row in rows}, "tree": render(tree)} for rows, tree in ranks
    ]


def two_ranks(expected: dict[str, Any]) -> MemoryStore:
    """Write a checkpoint of two ranks with shards: rows, columns, uneven, empty, and whole tensors of one rank."""
    store = MemoryStore()
    pieces: list[tuple[str, str, tuple[int, ...], int, Box | None]] = [
        ("rows", "float32", (5, 2), 0, Box((0, 0), (3, 2))),
        ("rows", "float32", (5, 2), 1, Box((3, 0), (2, 2))),
        ("columns", "bfloat16", (3, 4), 0, Box((0, 2), (3, 2))),
        ("columns", "bfloat16", (3, 4), 1, Box((0, 0), (3, 2))),
        ("uneven", "int64", (1,), 0, Box((0,), (1,))),
        ("uneven", "int64", (1,), 1, Box((1,), (0,))),
        ("whole", "float8_e4m3fn", (3,), 1, None),
    ]
    with fixed(iter("v")):
        attempt = Attempt.begin(store, "run", now=lambda: TIME)
        log: Log = attempt._place.log
        view = log.read()
        identity = {"store": view.store_id, "run": view.run_id, "id": "v" * 10, "step": 7, "epoch": 1, "world": 2}
        prefix, refs, ranks = "run/0000000007-vvvvvvvvvv-e1", [], []
        logical = stored = 0
        for rank in (0, 1):
            rank_items, rows = [], []
            for seed, (name, dtype, shape, owner, box) in enumerate(pieces):
                if owner == rank:
                    local = shape if box is None else box.size
                    data = filled(math.prod(local) * DTYPES[dtype].itemsize, seed + 50)
                    rank_items.append(Item(name, dtype, shape, "param", Bytes(data), box))
                    rows.append((name, dtype, shape, "param", data))
            plan = plan_save(rank_items, id="v" * 10, rank=rank)
            packs = []
            for pack in plan.packs:
                writer = store.write(f"{prefix}/{pack.file}", pack.size)
                packs.append(Pack(pack.file, pack.size, list(zip(pack.chunks, write_pack(writer, pack), strict=True))))
                writer.finish()
            tree = {"rank": rank, **{item.name: Leaf("tensor", (index,)) for index, item in enumerate(rank_items)}}
            data = encode_part(Part(rank=rank, packs=packs, tensors=plan.tensors, tree=encode_tree(tree), **identity))
            put(store, f"{prefix}/part-{rank:05d}.msgpack", data)
            refs.append(PartRef(rank=rank, file=f"part-{rank:05d}.msgpack", size=len(data), hash=hexdigest(data)))
            ranks.append((rows, tree))
            logical, stored = logical + plan.logical_bytes, stored + plan.stored_bytes + len(data)
        root = Root(created=TIME, reason="asked", parts=refs, logical_bytes=logical, stored_bytes=stored, new_bytes=stored, **identity)
        put(store, f"{prefix}/root.json", encode_root(root))
        digest, size = check_written(store, prefix, root)
        sizes = {"logical_bytes": logical, "stored_bytes": stored, "new_bytes": stored}
        body = CommitBody(
            id="v" * 10,
            step=7,
            dir=prefix[4:],
            root=digest,
            root_bytes=size,
            parents=[],
            metrics={},
            requires=[],
            **sizes,
        )
        log.append(lambda view: (body, 1))
        keep(expected, "v" * 10, ranks)
    return store


def main(target: Path) -> None:
    """Write all of it below ``target``, which must not exist."""
    target.mkdir()
    for name, make in (("one-rank", one_rank), ("two-ranks", two_ranks)):
        expected: dict[str, Any] = {}
        store = make(expected)
        write({key: bytes(data) for key, data in store._files.items()}, target / name)
        (target / f"{name}.expected.json").write_text(json.dumps(expected, ensure_ascii=False, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
