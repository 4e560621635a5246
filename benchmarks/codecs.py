"""``python -m benchmarks.codecs``: stored size of chunks of real training, and speed on one core, next to other codecs.

A GPT trains on real text with AdamW, once in float32 and once with bfloat16 weights and float32 masters; its state is
kept 1, 10 and 100 steps apart. Each kind of tensor is coded in chunks of 4 MiB, by each codec in turn, in an order
drawn for each round. *of it*: stored bytes over raw bytes. Megabytes a second are raw bytes over processor time of the
process, which runs nothing else (one of the codecs works in a thread of its own). Medians.
All of it is decoded and compared.

``--model NAME=FILE`` codes the weights of a model, too, a ``.safetensors`` or a torch file as PyPI's packages ship
them: unchanged, and rounded to bfloat16.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.machine import describe
from benchmarks.workloads import SHAPES
from relight.demo.gpt import GPT
from relight.demo.text import read_text
from relight.format import codecs, entropy
from relight.format.codecs import ElementKind
from relight.format.planes import Rooms

CHUNK = 4 << 20
APART = (1, 10, 100)
State = dict[str, memoryview]
"""By kind of tensor, all of them back to back."""


class Codec(NamedTuple):
    """``encode(chunk, kind, earlier)`` gives bytes, ``decode(stored, kind, length, earlier)`` the chunk again."""

    name: str
    encode: Callable[[memoryview, ElementKind, memoryview | None], bytes]
    decode: Callable[[bytes, ElementKind, int, memoryview | None], Any]


class Training:
    """A GPT on real text with AdamW at 3e-4, in float32, or with bfloat16 weights over float32 masters."""

    def __init__(self, size: str, mixed: bool, seed: int = 0) -> None:
        shape = self.shape = SHAPES[size]
        torch.manual_seed(seed)
        self.model = GPT(
            vocabulary=shape.vocabulary,
            context=shape.context,
            width=shape.width,
            layers=shape.layers,
            heads=shape.heads,
            dropout=0.0,
        )
        self.text = torch.frombuffer(bytearray(read_text()), dtype=torch.uint8)
        self.generator = torch.Generator().manual_seed(seed)
        self.mixed, self.live = mixed, list(self.model.parameters())
        self.masters = self.live
        if mixed:
            self.masters = [parameter.detach().clone().requires_grad_() for parameter in self.live]
            self.model.to(torch.bfloat16)
            self.live = list(self.model.parameters())
        self.optimizer = torch.optim.AdamW(self.masters, lr=3e-4)

    def step(self) -> None:
        """One of training."""
        shape = self.shape
        starts = torch.randint(len(self.text) - shape.context - 1, (shape.batch,), generator=self.generator)
        pieces = torch.stack([self.text[start : start + shape.context + 1] for start in starts.tolist()]).long()
        self.model.zero_grad(set_to_none=True)
        self.model.loss(pieces[:, :-1], pieces[:, 1:]).backward()
        if self.mixed:
            for master, parameter in zip(self.masters, self.live, strict=True):
                master.grad = parameter.grad.float() if parameter.grad is not None else None
        self.optimizer.step()
        if self.mixed:
            with torch.no_grad():
                for master, parameter in zip(self.masters, self.live, strict=True):
                    parameter.copy_(master)


def train(size: str, mixed: bool, warm: int) -> Iterator[tuple[int, State]]:
    """The state after ``warm`` steps, and so many further ones, as ``(further steps, state)``."""
    training = Training(size, mixed)
    for step in range(warm + max(APART) + 1):
        training.step()
        if step - warm in (0, *APART):
            moments = [training.optimizer.state[master] for master in training.masters]
            state = {"weights bfloat16" if mixed else "weights float32": _flat(training.live)}
            state |= {"masters float32": _flat(training.masters)} if mixed else {}
            state["first moment"] = _flat([moment["exp_avg"] for moment in moments])
            state["second moment"] = _flat([moment["exp_avg_sq"] for moment in moments])
            yield step - warm, state


def shipped(given: str) -> Iterator[tuple[str, memoryview, ElementKind]]:
    """``NAME=FILE``: the model's floating-point tensors, back to back, by dtype, and as bfloat16."""
    name, _, path = given.rpartition("=")
    if path.endswith(".safetensors"):
        from safetensors.torch import load_file

        contents = load_file(path)
    else:
        contents = torch.load(path, map_location="cpu", weights_only=True)
        contents = contents.get("model_state", contents)
    tensors = [
        tensor for tensor in contents.values() if isinstance(tensor, torch.Tensor) and tensor.dtype == torch.float32
    ]
    label = name or Path(path).stem
    yield f"{label}, float32", _flat(tensors), ElementKind(4, True)
    yield f"{label}, bfloat16", _flat([tensor.to(torch.bfloat16) for tensor in tensors]), ElementKind(2, True)


def _flat(tensors: list[torch.Tensor]) -> memoryview:
    return memoryview(torch.cat([tensor.detach().reshape(-1) for tensor in tensors]).view(torch.uint8).numpy())


def ours(difference: bool) -> Codec:
    """Relight's, alone or against the earlier save."""

    rooms, room = Rooms(), memoryview(bytearray(CHUNK))

    def encode(chunk: memoryview, kind: ElementKind, earlier: memoryview | None) -> bytes:
        base = earlier if difference else None
        way = codecs.choose(chunk, kind, base)
        body = None if way is None else codecs.encode(chunk, way, base if way.difference else None, rooms)
        return bytes(chunk) if body is None else body

    def decode(stored: bytes, kind: ElementKind, length: int, earlier: memoryview | None) -> Any:
        """Into memory that is there, as a restore does."""
        if len(stored) == length:
            return stored
        into = room[:length]
        view = memoryview(stored)
        codecs.decode(view, into, earlier if codecs.needs_base(view) else None, rooms)
        return into

    return Codec("Relight, differences" if difference else "Relight", encode, decode)


def others() -> list[Codec | str]:
    """Return the installed codecs, and for each other one the reason why it is not measured."""
    zstd = entropy.zstd
    codecs: list[Codec | str] = [
        Codec(
            "zstd 1",
            lambda chunk, kind, _: zstd.compress(chunk, 1),
            lambda stored, kind, length, _: zstd.decompress(stored),
        )
    ]
    try:
        from lz4 import block

        codecs.append(
            Codec(
                "lz4",
                lambda chunk, kind, _: block.compress(chunk),
                lambda stored, kind, length, _: block.decompress(stored),
            )
        )
    except ImportError as error:
        codecs.append(f"lz4: {error}")
    try:
        import blosc2

        blosc2.set_nthreads(1)
        for name, codec, how in (
            ("blosc2 bitshuffle + lz4", "LZ4", "BITSHUFFLE"),
            ("blosc2 shuffle + zstd 1", "ZSTD", "SHUFFLE"),
        ):
            given = {"codec": getattr(blosc2.Codec, codec), "clevel": 1, "filters": [getattr(blosc2.Filter, how)]}
            codecs.append(
                Codec(
                    name,
                    lambda chunk, kind, _, given=given: blosc2.compress2(
                        chunk, typesize=kind.width, nthreads=1, **given
                    ),
                    lambda stored, kind, length, _: blosc2.decompress2(stored, nthreads=1),
                )
            )
    except ImportError as error:
        codecs.append(f"blosc2: {error}")
    try:
        from zipnn import ZipNN

        def nn(kind: ElementKind) -> Any:
            return ZipNN(input_format="byte", bytearray_dtype={2: "bfloat16", 4: "float32"}[kind.width], threads=1)

        codecs.append(
            Codec(  # it changes what it is given
                "zipnn",
                lambda chunk, kind, _: nn(kind).compress(bytearray(chunk)),
                lambda stored, kind, length, _: nn(kind).decompress(stored),
            )
        )
    except Exception as error:
        codecs.append(f"zipnn: {error}")
    return codecs


def measure(codec: Codec, data: memoryview, kind: ElementKind, earlier: memoryview | None) -> dict[str, float]:
    """Encode and decode all chunks once. Return the stored share, and both rates."""
    stored_bytes, encode_s, decode_s = 0, 0.0, 0.0
    for offset in range(0, len(data), CHUNK):
        chunk, base = data[offset : offset + CHUNK], earlier[offset : offset + CHUNK] if earlier is not None else None
        before = time.process_time()
        stored = codec.encode(chunk, kind, base)
        encode_s += time.process_time() - before
        before = time.process_time()
        again = codec.decode(stored, kind, len(chunk), base)
        decode_s += time.process_time() - before
        if bytes(again) != bytes(chunk):
            raise AssertionError(f"{codec.name} gave other bytes back")
        stored_bytes += len(stored)
    return {
        "of_it": stored_bytes / len(data),
        "encode_mb_s": len(data) / encode_s / 1e6,
        "decode_mb_s": len(data) / decode_s / 1e6,
    }


def main() -> None:
    """Train, code, and print the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=["S", "M"], default="S")
    parser.add_argument("--warm", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--model", action="append", default=[], metavar="NAME=FILE", help="a model that a package ships; again for more"
    )
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    options = parser.parse_args()
    torch.set_num_threads(os.cpu_count() or 1)
    installed = others()
    rivals = [codec for codec in installed if isinstance(codec, Codec)]
    cases: list[tuple[str, Codec, memoryview, ElementKind, memoryview | None]] = []
    for given in options.model:
        for label, data, kind in shipped(given):
            cases += [(label, codec, data, kind, None) for codec in (ours(difference=False), *rivals)]
    for mixed in (False, True):
        states = dict(train(options.size, mixed, options.warm))
        last = states[max(APART)]
        for name, data in last.items():
            kind = ElementKind(2 if "bfloat16" in name else 4, True)
            label = f"{name}{', mixed' if mixed and 'moment' in name else ''}"
            cases += [(label, codec, data, kind, None) for codec in (ours(difference=False), *rivals)]
            for apart in APART:
                cases.append(
                    (f"{label}, {apart} later", ours(difference=True), states[apart][name], kind, states[0][name])
                )
    rows: dict[tuple[str, str], list[dict[str, float]]] = {}
    order = random.Random(0)
    for number in range(options.rounds):
        for label, codec, data, kind, earlier in order.sample(cases, len(cases)):
            rows.setdefault((label, codec.name), []).append(measure(codec, data, kind, earlier))
        print(f"round {number + 1} of {options.rounds}", flush=True)
    table = [
        {"what": label, "codec": name, **{key: statistics.median(row[key] for row in report) for key in report[0]}}
        for (label, name), report in sorted(rows.items())
    ]
    missing = [codec for codec in installed if isinstance(codec, str)]
    report = {
        "size": options.size,
        "warm": options.warm,
        "machine": describe(options.out),
        "missing": missing,
        "rows": table,
    }
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / f"codecs-{options.size}.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(f"{'what':34} {'codec':26} {'of it':>7} {'MB/s in':>9} {'MB/s out':>9}")
    for row in table:
        print(
            f"{row['what']:34} {row['codec']:26} {row['of_it']:7.3f} {row['encode_mb_s']:9,.0f} {row['decode_mb_s']:9,.0f}"
        )


if __name__ == "__main__":
    main()
