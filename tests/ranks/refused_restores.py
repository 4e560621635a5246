"""A rank to which the system refuses memory during its first restore: ``refused_restores.py RANK WORLD PORT JSON``.

JSON: ``run``, ``place`` (see ``refuse_at``) and ``rank`` of the refusal. Rank 0 reads and writes for all ranks. Prints the kind of each
restore's error, the seconds that it took, and whether the state was restored.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from typing import Any

import rank_script
import torch

import relight
from relight.restore import from_rank_0

DEADLINE_S = 30.0


def refuse_at(place: str) -> None:
    """Make one place of the first restore raise once."""
    refused: list[str] = []

    def once(usual: Callable[..., Any], error: Exception) -> Callable[..., Any]:
        def call(*words: Any, **named: Any) -> Any:
            if not refused:
                refused.append(place)
                raise error
            return usual(*words, **named)

        return call

    name, error = {
        "listing": ("from_msgpack", MemoryError("listing")),  # of a message that rank 0 has sent to all
        "needs": ("_boxes", MemoryError("needs")),  # before this rank requests bytes
        "room": ("bytearray", MemoryError("room")),  # for the bytes that arrive
        "arrival": (
            "_put",
            RuntimeError("CUDA out of memory. Tried to allocate 20.00 MiB"),
        ),  # after bytes have arrived
        "requests": ("_decode_boxes", MemoryError("requests")),  # on rank 0, of the other ranks' requests
        "posting": ("_Distributor._post", MemoryError("posting")),  # on rank 0, of the last bytes
    }[place]
    owner: Any = from_rank_0
    *path, name = name.split(".")
    for part in path:
        owner = getattr(owner, part)
    usual = bytearray if name == "bytearray" else getattr(owner, name)
    setattr(owner, name, once(usual, error))


def main() -> None:
    """Save, restore twice, report."""
    rank, options = rank_script.begin()

    def state(value: float) -> dict[str, Any]:
        return {
            "shared": {"tensor": torch.full((1000,), value)},
            "own": {
                "tensor": torch.full((2_500_000,), value + rank),
                "odd": torch.full((3, 7), value - rank),
            },  # 10 MB: several pieces
        }

    def make(value: float) -> relight.Checkpointer:
        return relight.Checkpointer(
            options["run"] if not rank else "nowhere://run", **state(value), per_rank=["own"], signals=False,
            writer="rank 0", background=False, limits=relight.Limits(deadline_s=DEADLINE_S),
        )  # fmt: skip

    with make(1.0) as ckpt:
        ckpt.save(0)
    if rank == options["rank"]:
        refuse_at(options["place"])
    ckpt = make(0.0)
    for _ in range(2):
        report: dict[str, Any] = {"kind": "", "text": ""}
        began = time.monotonic()
        try:
            ckpt.restore()
        except relight.RelightError as error:
            report = {"kind": error.kind, "text": error.what}
        same = all(ckpt[name][key].equal(value) for name, values in state(1.0).items() for key, value in values.items())
        print(json.dumps({**report, "took_s": time.monotonic() - began, "restored": same}), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
