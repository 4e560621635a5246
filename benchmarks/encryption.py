"""``python -m benchmarks.encryption``: what hashing and encrypting cost a save, and decrypting a restore, where a disk is used directly.

Each round, in a random order: the bytes written unchanged, without a hash; hashed and written, as a save does;
hashed, encrypted and written; each until it is durable; and cold restores, verified, of a checkpoint that is
encrypted and one that is not. Ratios are taken round by round.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import relight
from benchmarks.machine import describe
from relight.commit import PackPlan
from relight.commit.pack_writer import SLAB_BYTES, write_pack
from relight.keys import StoreSecurity, write_key_file
from relight.store import ByteStore, open_bytes, page_buffer

CHUNK = 4 << 20
TENSORS = 64


def image_of(size: int) -> memoryview:
    """Bytes that nothing makes smaller."""
    image, block = page_buffer(size), os.urandom(64 << 20)
    for offset in range(0, size, len(block)):
        image[offset : offset + len(block)] = block[: min(len(block), size - offset)]
    return image


def written(store: ByteStore, image: memoryview, hashed: bool) -> float:
    """Seconds until it is durable."""
    plan = PackPlan("pack-00000-000.safetensors", len(image), [], [CHUNK] * (len(image) // CHUNK), image)
    started = time.perf_counter()
    writer = store.write("run/x", len(image))
    if hashed:
        write_pack(writer, plan)
    else:
        for offset in range(0, len(image), SLAB_BYTES):
            writer.write_at(offset, image[offset : offset + SLAB_BYTES])
    writer.finish()
    store.sync("run")
    spent = time.perf_counter() - started
    store.delete("run/x")
    return spent


def restored(url: Path, key: str) -> float:
    """Seconds of a cold load, verified."""
    for path in url.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)
    started = time.perf_counter()
    relight.load(url / "run", encrypt=key or None)
    return time.perf_counter() - started


def main() -> None:
    """Print medians of ratios, and write all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--out", "--json", type=Path)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(dir=options.dir))
    try:
        report = measured(folder, options.megabytes << 20, options.rounds)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(json.dumps({name: value for name, value in report.items() if not name.endswith("each_s")}, indent=1))
    if options.out:
        options.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def measured(folder: Path, size: int, rounds: int) -> dict[str, Any]:
    """Measure writes and restores in rounds. Return all figures."""
    write_key_file(str(folder / "key"))
    key = f"file:{folder / 'key'}"
    image = image_of(size)
    stores: dict[str, tuple[ByteStore, str]] = {}
    for name, spec in (("plain", ""), ("encrypted", key)):
        store = open_bytes(folder / name, guard=StoreSecurity.from_settings(spec))
        step = size // TENSORS
        state = {
            f"t{number}": torch.frombuffer(image[number * step : (number + 1) * step], dtype=torch.uint8)
            for number in range(TENSORS)
        }
        relight.save(folder / name / "run", state, step=1, encrypt=spec or None)
        stores[name] = store, spec
    ways: dict[str, Callable[[], float]] = {
        "write": lambda: written(stores["plain"][0], image, hashed=False),
        "hash": lambda: written(stores["plain"][0], image, hashed=True),
        "encrypt": lambda: written(stores["encrypted"][0], image, hashed=True),
        "load": lambda: restored(folder / "plain", ""),
        "decrypt": lambda: restored(folder / "encrypted", key),
    }
    each: dict[str, list[float]] = {name: [] for name in ways}
    draw = random.Random(0)
    for number in range(rounds + 1):
        for name in draw.sample(sorted(ways), len(ways)):
            spent = ways[name]()
            if number:  # the first round warms up
                each[name].append(spent)
    medians = {f"{name}_s": statistics.median(values) for name, values in each.items()}

    def ratio(one: str, other: str) -> float:
        return statistics.median(a / b for a, b in zip(each[one], each[other], strict=True))

    return {
        "bytes": size, "rounds": rounds, **medians,
        "hash/write": ratio("hash", "write"), "encrypt/write": ratio("encrypt", "write"), "encrypt/hash": ratio("encrypt", "hash"),
        "decrypt/load": ratio("decrypt", "load"), "machine": describe(folder), "each_s": each,
    }  # fmt: skip


if __name__ == "__main__":
    main()
