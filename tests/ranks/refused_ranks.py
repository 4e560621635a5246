"""A rank to which the system refuses something during one save: ``refused_ranks.py RANK WORLD PORT JSON``.

JSON: ``run``, ``writer``, ``place`` (see ``refuse_at``), ``rank`` and ``step`` of the refusal. Prints, for each step, the kind of the
save's error, its text and the seconds until the outcome was known; at the end, what the step raised.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import time
from collections.abc import Callable
from typing import Any

import msgspec
import rank_script
import torch
import torch.distributed as dist

import relight
from relight.comm import torch_world
from relight.ranks import gather, replicas, several

STEPS = 5
DEADLINE_S = 30.0


class Part:
    """A component with one tensor, another one from ``grows`` on, and a refusal at one step."""

    def __init__(self, value: float, size: int, grows: int = STEPS) -> None:
        self.value, self.size, self.step, self.grows = value, size, 0, grows
        self.raises: Callable[[], None] = lambda: None

    def state_dict(self) -> dict[str, Any]:
        """Return the tensors, or raise what was planned."""
        self.raises()
        extra = {"more": torch.ones(5)} if self.step >= self.grows else {}
        return {"tensor": torch.full((self.size,), self.value + self.step), **extra}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Do nothing: no test restores it."""


class Decoding:
    """The module ``msgspec``, except that its decoder has no memory for message ``at`` of one save."""

    def __init__(self, is_due: Callable[[], bool], at: int) -> None:
        self.json, self.msgpack, self._decode = msgspec.json, self, msgspec.msgpack.decode
        self.encode, self._is_due, self._left = msgspec.msgpack.encode, is_due, at

    def decode(self, data: bytes) -> Any:
        """Decode a message, or raise."""
        if self._is_due():
            self._left -= 1
            if self._left < 0:
                raise MemoryError("decoding")
        return self._decode(data)


def refuse_at(place: str, is_due: Callable[[], bool], shared: Part, own: Part, ckpt: relight.Checkpointer) -> None:
    """Make one place of a save raise while ``is_due``."""

    def refused(usual: Callable[..., Any], error: Exception) -> Callable[..., Any]:
        def call(*words: Any, **named: Any) -> Any:
            if is_due():
                raise error
            return usual(*words, **named)

        return call

    out_of_memory = RuntimeError("CUDA out of memory. Tried to allocate 20.00 MiB")
    if place == "waiting":  # before the first exchange
        ckpt._saves.open_writer = refused(ckpt._saves.open_writer, MemoryError("open_writer"))  # type: ignore[method-assign]
    elif place == "state":
        shared.raises = refused(lambda: None, out_of_memory)
    elif place == "fault":
        shared.raises = refused(lambda: None, TypeError("a fault of the component"))
    elif place == "table":  # between the exchange of the tables and the next one
        several.Replicas = refused(several.Replicas, MemoryError("table"))  # type: ignore[misc,assignment]
    elif place in ("states", "sums"):  # of what the other ranks sent: before and after the comparison of replicas
        several.msgspec = Decoding(is_due, 0 if place == "states" else ckpt._session.world.size)  # type: ignore[assignment]
    elif place == "sum":
        replicas._sum = refused(replicas._sum, MemoryError("sum"))
    elif place == "exchange":  # while the ranks exchange bytes
        torch_world.bytearray = refused(bytearray, MemoryError("exchange"))  # type: ignore[attr-defined]
    elif place == "own":  # after the ranks have agreed
        own.raises = refused(lambda: None, OSError(errno.EMFILE, "Too many open files"))
    elif place == "request":  # after the capture, before the writer has the save
        ckpt._capture.user_fields = refused(ckpt._capture.user_fields, MemoryError("request"))  # type: ignore[method-assign]
    elif place == "bytes":  # while rank 0 requests bytes of this rank
        gather.copy_from = refused(gather.copy_from, out_of_memory)
    elif place == "arrival":  # on rank 0, after bytes have arrived
        gather._put = refused(gather._put, MemoryError("arrival"))


def main() -> None:
    """Train, save at each step, report."""
    rank, options = rank_script.begin()
    shared = Part(1.0, 1000, grows=options["step"] if options["place"] == "table" else STEPS)
    own = Part(10.0 * rank, 4 << 20)  # 16 MiB: rank 0 asks for it in several pieces
    ckpt = relight.Checkpointer(
        options["run"] if options["writer"] == "every rank" or not rank else "nowhere://run",
        shared=shared, own=own, per_rank=["own"], save=relight.every(steps=1), signals=False, writer=options["writer"],
        limits=relight.Limits(deadline_s=DEADLINE_S),
    )  # fmt: skip
    if rank == options["rank"]:
        refuse_at(options["place"], lambda: shared.step == options["step"], shared, own, ckpt)
    raised = ""
    try:
        for step in range(ckpt.restore(), STEPS):
            dist.all_reduce(torch.zeros(1))
            shared.step = own.step = step
            began = time.monotonic()
            save = ckpt.step(step)
            if save is None:
                print(json.dumps({"step": step, "kind": "none"}), flush=True)
                continue
            with contextlib.suppress(relight.RelightError):
                save.wait(DEADLINE_S)
            kind, text = ("", "") if save.error is None else (save.error.kind, save.error.what)
            took_s = time.monotonic() - began
            print(json.dumps({"step": step, "kind": kind, "text": text, "took_s": took_s}), flush=True)
        ckpt.close()
    except Exception as error:
        raised = f"{type(error).__name__}: {error}"
    print(json.dumps({"raised": raised}), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
