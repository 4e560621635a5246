"""A valid store in memory, and tools to forge it: seals, chain and hashes above a forged field are computed again."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest import mock

import msgpack
from blake3 import blake3

from relight.commit import Attempt, SaveInfo, SaveRequest
from relight.format import Leaf, encode_tree
from relight.format.dtypes import dtype_named
from relight.format.records import NoteBody, RetireBody, TagBody
from relight.format.strict import seal
from relight.layout import Bytes, Item
from relight.layout.chunks import cut_chunks
from relight.log import fold
from relight.store import MemoryStore

RUN = "demo"
STEPS = {"z": 5, "a": 10, "b": 20, "c": 30}
"""The checkpoints by the letter their ids repeat. ``z`` is retired, ``a`` is tagged ``keep``, ``c`` is the newest."""
SEQ = {"run": 0, "fence": 1, "z": 2, "a": 3, "tag": 4, "note": 5, "fence2": 6, "b": 7, "retire": 8, "c": 9}
"""Number of each record."""
DIRS = {letter: f"{RUN}/{step:010d}-{letter * 10}-e{1 if letter in 'za' else 2}" for letter, step in STEPS.items()}
TIME = "2026-01-02T03:04:05Z"
Files = dict[str, bytes]

TENSORS = (
    ("model/w", "float32", (12, 8), "param", True),
    ("model/b", "bfloat16", (8,), "param", True),
    ("optim/m", "float32", (12, 8), "optim", False),
    ("scalar", "int64", (), "value", False),
    ("empty", "float32", (0, 4), "buffer", False),
    ("flags", "bool", (5,), "buffer", False),
)


def values(step: int, tensors: Iterable[tuple[str, str, tuple[int, ...], str, bool]] = TENSORS) -> dict[str, bytes]:
    """Return the bytes of each tensor at ``step``."""
    rng = random.Random(step)
    sizes = {name: dtype_named(dtype).itemsize for name, dtype, *_ in tensors}
    result = {}
    for name, dtype, shape, *_ in tensors:
        length = sizes[name]
        for extent in shape:
            length *= extent
        result[name] = bytes(length) if dtype == "bool" else rng.randbytes(length)
    return result


def tree() -> dict[str, Any]:
    """Return the tree of every checkpoint."""
    names = {name: Leaf("tensor", (index,)) for index, (name, *_) in enumerate(TENSORS)}
    model = {"w": names["model/w"], "b": names["model/b"], "tied": names["model/w"]}
    rest = [names["scalar"], names["empty"], names["flags"], (1, 2.5, None, b"x", "é")]
    return {"model": model, "optim": {0: names["optim/m"]}, "rest": rest}


def request(step: int, **more: Any) -> SaveRequest:
    """Return a save of the state at ``step``."""
    tensors = values(step)
    items = [
        Item(name, dtype, shape, role, Bytes(tensors[name]), trainable=t) for name, dtype, shape, role, t in TENSORS
    ]
    info = SaveInfo(
        step,
        metrics={"loss": 1.0 / step},
        **{name: more.pop(name) for name in SaveInfo.__struct_fields__ if name in more},
    )
    return SaveRequest(info, tree=encode_tree(tree()), items=items, **more)


def chunked(chunk_bytes: int, group_bytes: int) -> Any:
    """Cut packs into chunks of these sizes within the block."""
    return mock.patch(
        "relight.commit.plan.cut_chunks", partial(cut_chunks, chunk_bytes=chunk_bytes, group_bytes=group_bytes)
    )


@contextmanager
def fixed(letters: Iterator[str]) -> Iterator[None]:
    """Make ids, times and host names constant within the block; checkpoint ids repeat one of ``letters``."""
    tokens = random.Random(0)
    with ExitStack() as stack:
        put = lambda name, value: stack.enter_context(mock.patch(name, value))  # noqa: E731
        put("relight.commit.save.new_id", lambda: next(letters) * 10)
        put("secrets.token_hex", lambda length=32: tokens.randbytes(length).hex())
        put("socket.gethostname", lambda: "host")
        put("os.getpid", lambda: 42)
        for module in ("relight.commit.save", "relight.log.identity"):
            put(f"{module}.now_text", lambda: TIME)
        yield


@cache
def _good() -> Files:
    store = MemoryStore()
    begin = partial(Attempt.begin, store, RUN, now=lambda: TIME)
    with fixed(iter("zabc")), chunked(512, 256):
        first = begin()
        first.save(request(STEPS["z"]))
        first.save(request(STEPS["a"]))
        log = first._place.log  # noqa: SLF001
        log.append(lambda view: (TagBody(name="keep", id="a" * 10), fold(view).epoch))
        first.note(NoteBody(topic="weather", data={"rain": True, "mm": 3.5, "where": "é", "none": None}))
        second = begin(reason="again")
        second.save(request(STEPS["b"], parents=["a" * 10]))
        second._place.log.append(lambda view: (RetireBody(ids=["z" * 10], reason="old"), 2))  # noqa: SLF001
        second.save(request(STEPS["c"], user={"note": "hello"}))
    return {key: bytes(data) for key, data in store._files.items()}  # noqa: SLF001


def load(files: Files) -> MemoryStore:
    """Return a store in memory with ``files``."""
    store = MemoryStore()
    store._files = dict(files)  # noqa: SLF001
    return store


def write(files: Files, root: Path) -> None:
    """Write ``files`` into the directory ``root``."""
    for key, data in files.items():
        path = root / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


def record_key(seq: int) -> str:
    """Return the key of record ``seq``."""
    return f"{RUN}/log/{seq:012d}.json"


def dumps(value: Any) -> bytes:
    """Encode JSON as Relight does, but permit NaN and lone surrogates."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass")


class Forge:
    """Files of a store to forge. ``Change`` functions change the parsed value in place, or return a new one."""

    def __init__(self, files: Files | None = None) -> None:
        self.files: Files = dict(_good() if files is None else files)

    def payload(self, seq: int) -> Any:
        """Return record ``seq``, parsed."""
        return json.loads(self.files[record_key(seq)])["body"]

    def store_record(self, change: Callable[[Any], Any] | bytes) -> None:
        """Change ``relight.json`` and seal it. Bytes replace the payload unchanged."""
        key = "relight.json"
        self.files[key] = seal(self._changed(json.loads(self.files[key])["body"], change))

    def record(self, seq: int, change: Callable[[Any], Any] | bytes, *, chain: bool = True) -> None:
        """Change record ``seq``, seal it, and chain all later ones to it."""
        self.files[record_key(seq)] = seal(self._changed(self.payload(seq), change))
        if chain:
            self.chain(seq + 1)

    def raw_record(self, seq: int, data: bytes, *, chain: bool = True) -> None:
        """Write ``data`` as the whole file of record ``seq``, and chain all later records to it."""
        self.files[record_key(seq)] = data
        if chain:
            self.chain(seq + 1)

    def chain(self, seq: int) -> None:
        """Correct ``prev`` from record ``seq`` on."""
        while record_key(seq) in self.files and record_key(seq - 1) in self.files:
            value = self.payload(seq)
            value["prev"] = blake3(self.files[record_key(seq - 1)]).hexdigest()
            self.files[record_key(seq)] = seal(dumps(value))
            seq += 1

    def append(self, change: Callable[[Any], Any], like: int, *, chain: bool = True) -> int:
        """Add a record like record ``like`` at the end, chained, then changed."""
        value = self.payload(like)
        seq = 1 + max(int(key[-17:-5]) for key in self.files if key.startswith(f"{RUN}/log/"))
        value["seq"] = seq
        if chain:
            value["prev"] = blake3(self.files[record_key(seq - 1)]).hexdigest()
        self.files[record_key(seq)] = seal(self._changed(value, change))
        return seq

    def root(self, letter: str, change: Callable[[Any], Any] | bytes) -> None:
        """Change the root of a checkpoint, and commit the changed one instead."""
        key = f"{DIRS[letter]}/root.json"
        data = self._changed(json.loads(self.files[key]), change)
        self.files[key] = data

        def commit(value: Any) -> None:
            value["body"]["root"] = blake3(data).hexdigest()
            value["body"]["root_bytes"] = len(data)

        self.record(SEQ[letter], commit)

    def part(self, letter: str, change: Callable[[Any], Any] | bytes) -> None:
        """Change the part of a checkpoint, and commit the changed one instead."""
        key = f"{DIRS[letter]}/part-00000.msgpack"
        if callable(change):
            value = msgpack.unpackb(self.files[key])
            given = change(value)
            data = given if isinstance(given, bytes) else msgpack.packb(value if given is None else given)
        else:
            data = change
        self.files[key] = data

        def root(value: Any) -> None:
            value["parts"][0].update(size=len(data), hash=blake3(data).hexdigest())

        self.root(letter, root)

    def tree(self, letter: str, data: bytes) -> None:
        """Change the tree of a checkpoint, given as its encoded bytes."""
        self.part(letter, lambda part: part.update(tree=data))

    def pack(self, letter: str, change: Callable[[bytes], bytes], *, cut: bool = False) -> None:
        """Change the bytes of a pack, and hash its chunks again. With ``cut``, also set the pack's size to that of the file."""
        key = f"{DIRS[letter]}/pack-00000-000.safetensors"
        data = change(self.files[key])
        self.files[key] = data

        def part(value: Any) -> None:
            offset, chunks = 0, []
            for length, _ in value["packs"][0][2]:
                chunks.append([length, blake3(data[offset : offset + length]).digest()])
                offset += length
            if cut:
                chunks[-1] = [len(data) - (offset - chunks[-1][0]), blake3(data[offset - chunks[-1][0] :]).digest()]
                value["packs"][0][1] = len(data)
            value["packs"][0][2] = chunks

        self.part(letter, part)

    def header(self, letter: str, body: bytes) -> None:
        """Replace the safetensors header of a pack by another one of the same length."""

        def change(data: bytes) -> bytes:
            room = int.from_bytes(data[:8], "little")
            assert len(body) <= room, "the forged header must fit"
            return data[:8] + body.ljust(room) + data[8 + room :]

        self.pack(letter, change)

    def header_of(self, letter: str) -> Any:
        """Return the parsed safetensors header of a pack."""
        data = self.files[f"{DIRS[letter]}/pack-00000-000.safetensors"]
        return json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])

    @staticmethod
    def _changed(value: Any, change: Callable[[Any], Any] | bytes) -> bytes:
        if not callable(change):
            return change
        given = change(value)
        return given if isinstance(given, bytes) else dumps(value if given is None else given)
