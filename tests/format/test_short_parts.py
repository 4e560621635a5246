"""Roots of several ranks encode their parts in few bytes, malformed ones are refused, and names of ready files are complete."""

from __future__ import annotations

import json
import random
import threading
from pathlib import Path
from typing import Any

import independent_reader
import pytest

from relight.commit import Attempt, SaveInfo, SaveRequest
from relight.commit.save import CommitTarget, Participant
from relight.errors import UnsafeContent
from relight.format import PartRef, Root, decode_root, encode_root, encode_tree, hexdigest
from relight.format.manifest import PART_BYTES_MAX, SHORT_PARTS
from relight.format.names import Ready, parse_ready
from relight.layout import Box, Bytes, Item
from relight.log import Log
from relight.store import LocalStore

HASH = "A" * 43


def root_of(sizes: list[int], features: list[str]) -> Root:
    rng = random.Random(1)
    refs = [
        PartRef(rank=i, file=f"part-{i:05d}.msgpack", size=size, hash=rng.randbytes(32).hex())
        for i, size in enumerate(sizes)
    ]
    return Root(
        store="0" * 32, run="0" * 32, id="0" * 10, step=1, epoch=1, created="", reason="", world=len(refs), features=features, parts=refs,
        logical_bytes=1, stored_bytes=1, new_bytes=1,
    )  # fmt: skip


@pytest.mark.parametrize("features", [[], [SHORT_PARTS]])
def test_written_parts_are_read_back(features: list[str]) -> None:
    """Ranks, files, sizes and hashes are read from the long form and the short form. The short form is less than half
    as long."""
    root = root_of([0, 35, 36, 123_456, PART_BYTES_MAX] * 20, features)
    data = encode_root(root)
    assert decode_root(data, hexdigest(data), "here") == root
    assert len(encode_root(root_of([123_456] * 100, [SHORT_PARTS]))) < 100 * 51 + 500


@pytest.mark.parametrize(
    "parts",
    [
        [{"rank": 0, "file": "part-00000.msgpack", "size": 1, "hash": "0" * 64}], [HASH], [f"{HASH}01"], [f"{HASH}A"], [f"{HASH}1\n"],
        [f"{HASH[:-1]}+1"], [f"{HASH}zzzzzzz"], [f"{HASH}zzzzzzzz"], [f"{HASH}1", f"{HASH}1"], [], HASH, None, [1], [None], [[HASH]],
    ],
)  # fmt: skip
def test_malformed_parts_are_refused(parts: Any) -> None:
    """Malformed parts are refused."""
    value = json.loads(encode_root(root_of([1], [SHORT_PARTS]))) | {"parts": parts}
    data = json.dumps(value).encode()
    with pytest.raises(UnsafeContent):
        decode_root(data, hexdigest(data), "here")


def test_names_encode_their_fields() -> None:
    """Names of ready files encode any rank, hash and sizes; a changed name parses to other values or not at all."""
    rng = random.Random(2)
    for _ in range(200):
        numbers = [rng.randrange(10 ** rng.randrange(1, high)) for high in (8, 10, 18, 18)]
        ready = Ready(numbers[0], rng.randbytes(3).hex(), rng.randbytes(32).hex(), *numbers[1:])
        assert parse_ready(ready.file) == ready and len(ready.file) < 255
        offset = rng.randrange(len(ready.file))
        assert (
            parse_ready(ready.file[:offset] + rng.choice("0aZ-_.") + ready.file[offset + 1 :]) != ready
            or ready.file[offset] in "0aZ-_."
        )
        assert parse_ready(f"{ready.file}0") is None and parse_ready(f"0{ready.file}") is None


def test_the_independent_reader_reads_them(tmp_path: Path) -> None:
    """The page describes the short form: the independent reader reads what two ranks saved."""
    own = Attempt.begin(LocalStore(str(tmp_path)), "run").place

    def work(rank: int) -> None:
        store = LocalStore(str(tmp_path))
        row = Item("t", "uint8", (2, 8), "value", Bytes(bytes([rank]) * 8), Box((rank, 0), (1, 8)))
        request = SaveRequest(
            SaveInfo(step=1), tree=encode_tree({}), items=[row], id="0" * 10, seat=Participant(rank, 2, "0" * 16, 20.0)
        )
        Attempt(CommitTarget(store, Log(store, "run"), own.store_id, own.run_id, own.epoch)).save(request)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (record,) = independent_reader.checkpoints(tmp_path, "run")
    root, ranks = independent_reader.read(tmp_path, "run", record)
    assert root["features"] == [SHORT_PARTS] and all(isinstance(text, str) for text in root["parts"])
    assert [tensors[0][4] for tensors, _ in ranks] == [bytes(8), b"\1" * 8]
