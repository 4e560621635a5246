"""Thousands of places in packs, damaged in seven ways: reading and verifying find each, and name file and tensor."""

from __future__ import annotations

import os
import random
import time
from collections import Counter
from dataclasses import dataclass
from functools import cache

import pytest
from forge import RUN, chunked, fixed

from relight.catalog import Run
from relight.commit import Attempt, SaveInfo, SaveRequest
from relight.errors import CorruptCheckpoint
from relight.format import Leaf, encode_tree
from relight.format.dtypes import dtype_named
from relight.layout import Bytes, Item
from relight.reader import read_tensors, verify_checkpoint
from relight.reader.opened import Opened
from relight.store import MemoryStore

PLACES = int(os.environ.get("RELIGHT_DAMAGE_PLACES", "2000"))
PAGE = 4096
SHAPES = [
    ("w", "float32", (96, 64)),
    ("m", "float32", (96, 64)),
    ("h", "bfloat16", (64, 48)),
    ("n", "int64", (3,)),
    ("s", "float64", ()),
]
SHAPES += [(f"small/{n}", "float16", (40 + n,)) for n in range(20)] + [("bytes", "uint8", (5001,))]


@dataclass(frozen=True)
class Target:
    """A checkpoint with one damaged pack, and the files that may replace it."""

    store: MemoryStore
    run: Run
    opened: Opened
    key: str
    good: bytes
    older: bytes
    """A pack of the same name and length, of the save before."""


def saved(attempt: Attempt, step: int) -> None:
    """Save tensors of many sizes, full of noise."""
    rng = random.Random(step)
    items = []
    for name, dtype, shape in SHAPES:
        length = dtype_named(dtype).itemsize
        for extent in shape:
            length *= extent
        items.append(Item(name, dtype, shape, "param", Bytes(rng.randbytes(length)), trainable=True))
    attempt.save(
        SaveRequest(
            SaveInfo(step=step), tree=encode_tree([Leaf("tensor", (n,)) for n in range(len(items))]), items=items
        )
    )


@cache
def target() -> Target:
    """Return the store and its pack, made once. Each case changes that file and restores it."""
    store = MemoryStore()
    with fixed(iter("ab")), chunked(4096, 300):
        attempt = Attempt.begin(store, RUN)
        saved(attempt, 1)
        saved(attempt, 2)
    run = Run(store, RUN)
    older, newest = run.history().live
    opened = run.open(newest)
    key = f"{opened.prefix}/pack-00000-000.safetensors"
    return Target(
        store,
        run,
        opened,
        key,
        bytes(store._files[key]),
        bytes(store._files[f"{RUN}/{older.body.dir}/pack-00000-000.safetensors"]),
    )


def damage(rng: random.Random, good: bytes, older: bytes) -> tuple[str, bytes]:
    """Damage the bytes in one way at one place."""
    how = rng.choice(("bit",) * 6 + ("cut", "longer", "swapped", "zeroed page", "doubled block", "older", "lost page"))
    offset = rng.randrange(len(good))
    data = bytearray(good)
    if how == "bit":
        data[offset] ^= 1 << rng.randrange(8)
    elif how == "cut":
        del data[offset:]
    elif how == "longer":
        data += rng.randbytes(rng.choice((1, 16, PAGE)))
    elif how == "swapped":
        data[:] = rng.randbytes(len(good)) if rng.random() < 0.5 else older[: rng.randrange(len(good))]
    elif how == "zeroed page":
        page = offset // PAGE * PAGE
        data[page : page + PAGE] = bytes(len(data[page : page + PAGE]))
    elif how == "doubled block":
        size = rng.choice((16, 512, PAGE))
        data[offset : offset + size] = (
            data[offset - size : offset][: len(data[offset : offset + size])]
            if offset >= size
            else bytes(len(data[offset : offset + size]))
        )
    elif how == "lost page":  # a write that never reached the disk leaves older bytes
        page = offset // PAGE * PAGE
        data[page : page + PAGE] = older[page : page + PAGE]
    else:
        data[:] = older
    return how, bytes(data)


def harmed(good: bytes, bad: bytes, opened: Opened) -> set[str]:
    """Return the names of the tensors with changed bytes."""
    return {
        tensor.name
        for tensor in opened.parts[0].tensors
        if good[tensor.offset : tensor.offset + tensor.length] != bad[tensor.offset : tensor.offset + tensor.length]
    }


def check(case: Target, bad: bytes) -> str:
    """Assert that verify and a read report the damage. Return the kind of damaged place."""
    opened, part = case.opened, case.opened.parts[0]
    hurt = harmed(case.good, bad, opened)
    findings = verify_checkpoint(case.store, case.run.view(), opened.checkpoint)
    assert findings, "verify found nothing"
    assert {finding.file for finding in findings} == {case.key}
    named = {name for finding in findings for name in finding.tensor.split(", ") if name}
    assert hurt <= named, f"verify did not name {hurt - named}"
    buffers = [bytearray(tensor.length) for tensor in part.tensors]
    try:
        read_tensors(opened, part, {index: Bytes(buffer) for index, buffer in enumerate(buffers)})
    except CorruptCheckpoint as error:
        assert error.where == case.key
        assert len(bad) != len(case.good) or any(name in error.what for name in hurt), error.what
        return "length" if len(bad) != len(case.good) else "data"
    assert not hurt, f"reading handed out {hurt}"
    assert len(bad) == len(case.good)
    for tensor, buffer in zip(part.tensors, buffers, strict=True):
        assert buffer == case.good[tensor.offset : tensor.offset + tensor.length]
    return "header"  # the header has no tensor, so a read returns the right bytes


def sweep(seeds: range) -> Counter[tuple[str, str]]:
    """Each seed is one place."""
    case, seen = target(), Counter[tuple[str, str]]()
    for seed in seeds:
        rng = random.Random(seed)
        how, bad = "", case.good
        while bad == case.good:
            how, bad = damage(rng, case.good, case.older)
        case.store._files[case.key] = bad
        try:
            seen[how, check(case, bad)] += 1
        except AssertionError as error:
            raise AssertionError(f"seed {seed}, {how}: {error}") from error
        finally:
            case.store._files[case.key] = case.good
    return seen


def test_two_thousand_places(capsys: pytest.CaptureFixture[str]) -> None:
    """Wherever and however a pack is damaged, reading and verifying name file and tensor, and no wrong byte is handed out."""
    started = time.perf_counter()
    seen = sweep(range(PLACES))
    assert sum(seen.values()) == PLACES
    assert len({how for how, _ in seen}) == 8
    by_place = Counter[str]()
    for (_, place), count in seen.items():
        by_place[place] += count
    with capsys.disabled():
        print(
            f"\n{PLACES} damaged places in packs: all found by verify ({time.perf_counter() - started:.0f} s);"
            f" what a reader met: {dict(by_place)}"
        )


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_hundred_thousand_places(capsys: pytest.CaptureFixture[str]) -> None:
    """A hundred thousand damaged places are found."""
    seen = sweep(range(10**6, 10**6 + 100_000))
    with capsys.disabled():
        print(f"\n{sum(seen.values())} damaged places in packs: all found")


def test_the_undamaged_pack_is_clean() -> None:
    """Without damage nothing is reported, so the check can fail."""
    case = target()
    assert not verify_checkpoint(case.store, case.run.view(), case.opened.checkpoint)
    with pytest.raises(AssertionError, match="verify found nothing"):
        check(case, case.good)


def test_damage_costs_only_the_tensors_in_its_chunk() -> None:
    """Tensors in other chunks can still be read, each byte of them right."""
    case = target()
    part = case.opened.parts[0]
    rng = random.Random(7)
    for _ in range(200):
        hit = rng.choice([tensor for tensor in part.tensors if tensor.length])
        bad = bytearray(case.good)
        offset = hit.offset + rng.randrange(hit.length)
        bad[offset] ^= 1
        edge, chunk = 0, range(0)
        for length, _ in part.packs[0].chunks:
            chunk, edge = (range(edge, edge + length) if edge <= offset < edge + length else chunk), edge + length
        case.store._files[case.key] = bytes(bad)
        try:
            for index, tensor in enumerate(part.tensors):
                shares = tensor.offset < chunk.stop and chunk.start < tensor.offset + tensor.length
                buffer = bytearray(tensor.length)
                if shares:
                    with pytest.raises(CorruptCheckpoint, match="is not what was committed"):
                        read_tensors(case.opened, part, {index: Bytes(buffer)})
                else:
                    read_tensors(case.opened, part, {index: Bytes(buffer)})
                    assert buffer == case.good[tensor.offset : tensor.offset + tensor.length]
        finally:
            case.store._files[case.key] = case.good
