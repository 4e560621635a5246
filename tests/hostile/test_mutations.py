"""Records, roots, parts and trees changed at random, hashed and sealed again so that the parsers are reached."""

from __future__ import annotations

import copy
import json
import os
import random
from collections.abc import Callable
from typing import Any

import msgpack
import pytest
from case import part_of
from examine import Seen, Straight, examine, read_all
from forge import RUN, SEQ, STEPS, Forge, dumps, load, values

from relight.catalog import candidates
from relight.errors import RelightError
from relight.log import Log, fold
from relight.reader import open_checkpoint

COUNT = int(os.environ.get("RELIGHT_FUZZ", "20000"))
BATCHES = 8
ODD: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2**31, 2**53 + 1, 2**63 - 1, 2**63, 2**64 - 1, -(2**63), 0.0, -0.0, 1.5, 1e308,
    float("nan"),
    "", "0", "../../x", "/etc/passwd", "\0", "\x1b[31m", "é", "\ud800", "a" * 64, "A" * 64, "0" * 32, "c" * 10, "x" * 5000, "nan",
    [], [[]], {}, {"": 0}, [0] * 65, b"", b"\0" * 32, b"x" * 31, "float32", "float64", "param", "COMMIT",
    "RETIRE", "part-00000.msgpack",
)  # fmt: skip


def places(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the path of every value in ``value``."""
    result = [at] if at else []
    if isinstance(value, dict):
        for key, item in value.items():
            result += places(item, (*at, key))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            result += places(item, (*at, index))
    return result


def change(rng: random.Random, value: Any, odd: Callable[[], Any]) -> Any:
    """``value`` with one thing in it replaced, moved, doubled, dropped, or off by a little."""
    value = copy.deepcopy(value)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        spots = places(value)
        if not spots:
            return odd()
        path = rng.choice(spots)
        holder = value
        for step in path[:-1]:
            holder = holder[step]
        key = path[-1]
        what = rng.randrange(7)
        if what == 0:
            del holder[key]
        elif what == 1 and isinstance(holder[key], int):
            holder[key] += rng.choice((1, -1, 8, -8, 256, 2**32))
        elif what == 2 and isinstance(holder, list):
            holder.insert(key, copy.deepcopy(rng.choice(holder)))
        elif what == 3 and isinstance(holder, dict):
            holder[rng.choice(("extra", "__class__", "id", "\x1b"))] = odd()
        elif what == 4:
            other = rng.choice(spots)
            source = value
            for step in other:
                source = source[step] if isinstance(source, (dict, list)) and _has(source, step) else None
            holder[key] = copy.deepcopy(source)
        elif what == 5 and isinstance(holder[key], (str, bytes)) and holder[key]:
            cut = rng.randrange(len(holder[key]))
            holder[key] = holder[key][:cut]
        else:
            holder[key] = odd()
    return value


def _has(holder: Any, step: Any) -> bool:
    return step in holder if isinstance(holder, dict) else isinstance(step, int) and step < len(holder)


def scramble(rng: random.Random, data: bytes) -> bytes:
    """``data`` with a few bytes flipped, dropped, doubled or put in."""
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 4))):
        index = rng.randrange(len(out)) if out else 0
        what = rng.randrange(4)
        if what == 0 and out:
            out[index] ^= 1 << rng.randrange(8)
        elif what == 1 and out:
            del out[index : index + rng.randrange(1, 9)]
        elif what == 2:
            out[index:index] = out[index : index + rng.randrange(1, 40)]
        else:
            out[index:index] = rng.choice(
                (b"\xdd\xff\xff\xff\xff", b"\x91" * 300, b"[" * 300, b"\xff", b"\0", b'"', b"9" * 400, b"1e999", b"NaN")
            )
    return bytes(out)


def mutate(rng: random.Random, forge: Forge) -> str:
    """Change one thing in the forged store. Return a description of it."""
    target = rng.choice(("record", "record", "root", "part", "part", "tree", "store"))
    seq = rng.choice(list(SEQ.values()))

    def plain() -> Any:
        return copy.deepcopy(rng.choice([odd for odd in ODD if not isinstance(odd, bytes)]))

    def any_odd() -> Any:
        return copy.deepcopy(rng.choice([odd for odd in ODD if odd != "\ud800"]))

    raw = rng.random() < 0.3
    if target == "record":
        payload = forge.payload(seq)
        forge.record(
            seq, scramble(rng, dumps(payload)) if raw else dumps(change(rng, payload, plain)), chain=rng.random() < 0.5
        )
    elif target == "store":
        payload = json.loads(forge.files["relight.json"])["body"]
        forge.store_record(scramble(rng, dumps(payload)) if raw else dumps(change(rng, payload, plain)))
    elif target == "root":
        forge.root("c", lambda root: scramble(rng, dumps(root)) if raw else dumps(change(rng, root, plain)))
    elif target == "part":
        part = msgpack.unpackb(forge.files[part_of("c")])
        forge.part("c", scramble(rng, msgpack.packb(part)) if raw else msgpack.packb(change(rng, part, any_odd)))
    else:
        tree = msgpack.unpackb(forge.files[part_of("c")])["tree"]
        node = msgpack.unpackb(tree, strict_map_key=False)
        forge.tree("c", scramble(rng, tree) if raw else msgpack.packb(change(rng, node, any_odd)))
    return f"{target} {seq if target == 'record' else ''}"


@pytest.mark.parametrize("batch", range(BATCHES))
def test_a_mutation_gives_an_error_or_saved_bytes(batch: int, capsys: pytest.CaptureFixture[str]) -> None:
    """Any mutation of a store with valid hashes gives a ``RelightError`` or bytes that were saved."""
    saved = {letter: set(values(step).values()) for letter, step in STEPS.items()}
    refused = whole = 0
    for number in range(COUNT // BATCHES):
        seed = batch * 1_000_000 + number
        rng = random.Random(seed)
        forge = Forge()
        what = mutate(rng, forge)
        store = load(forge.files)
        try:
            if number % 25 == 0:
                seen = examine(store, RUN)
                assert seen.good or seen.refused or what.startswith(("record", "store"))
                assert all(set(tensors.values()) <= saved[checkpoint.id[0]] for checkpoint, tensors in seen.good)
                continue
            view = Log(store, RUN).read()
            chosen = candidates(fold(view))
            if not chosen:
                refused += 1
                continue
            opened = open_checkpoint(store, RUN, chosen[0], store_id=view.store_id, run_id=view.run_id)
            tensors = read_all(opened, Straight, Seen())
            assert set(tensors.values()) <= saved[opened.root.id[0]], "bytes that were never saved"
            whole += 1
        except RelightError:
            refused += 1
        except BaseException as error:
            raise AssertionError(f"seed {seed}, {what}: {type(error).__name__}: {error}") from error
    assert refused > whole / 10, "the mutations do not bite"
    if batch == BATCHES - 1:
        with capsys.disabled():
            print(
                f"\n{COUNT} mutations; of the last {COUNT // BATCHES}, {refused} refused, {whole} harmless or skipped"
            )
