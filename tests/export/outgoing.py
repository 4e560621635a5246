"""States to be exported, and checkpoints of them."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

import relight
from relight.capture.tensors import TORCH_DTYPES
from relight.catalog import open_run
from relight.commit import Attempt, SaveInfo, SaveRequest
from relight.commit.multi_rank import save_multi_rank
from relight.commit.save import CommitTarget, Participant
from relight.format import Leaf, encode_tree
from relight.layout import Box, Bytes, Item
from relight.log import Log
from relight.reader.opened import Opened
from relight.store import LocalStore, open_bytes

PLAIN = [name for name, dtype in TORCH_DTYPES.items() if dtype in {
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
    torch.float8_e4m3fn, torch.float8_e5m2,
}]  # fmt: skip
"""Dtypes that every version of the safetensors library reads into torch."""


def bits(dtype: torch.dtype, *shape: int, seed: int = 0) -> torch.Tensor:
    """Any bits: infinities, NaNs of all kinds, denormals."""
    generator = torch.Generator().manual_seed(seed)
    if dtype is torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    raw = torch.randint(0, 256, (*shape, dtype.itemsize), dtype=torch.uint8, generator=generator)
    return raw.view(dtype).reshape(shape)


def state() -> dict[str, torch.Tensor]:
    """A tensor of each dtype, odd lengths among them, one without elements and one without dimensions."""
    tensors = {f"layers.{index}.{name}": bits(TORCH_DTYPES[name], 3, 5, seed=index) for index, name in enumerate(PLAIN)}
    return {**tensors, "empty": torch.empty(0, 4), "one": torch.tensor(2.5), "large": bits(torch.float32, 700, 1024)}


def opened(path: Path, run: str = "run", number: int = -1) -> Opened:
    """A live checkpoint of a store."""
    opened_run = open_run(open_bytes(path), run)
    return opened_run.open(opened_run.history().live[number])


def saved(path: Path, model: Mapping[str, torch.Tensor], **more: Any) -> Opened:
    """Save and return a checkpoint of ``model``."""
    relight.save(path / "run", {"model": dict(model), **more}, step=7)
    return opened(path)


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """To the bit."""
    return one.dtype == other.dtype and one.shape == other.shape and raw(one) == raw(other)


def raw(tensor: torch.Tensor) -> bytes:
    """The bytes of its elements, in order."""
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def saved_by_ranks(path: Path, tensors: Mapping[str, torch.Tensor], world: int) -> Opened:
    """A checkpoint that several ranks made: each tensor is cut along its last dimension, each rank has a piece."""
    attempt = Attempt.begin(LocalStore(str(path)), "run")
    failed: list[BaseException] = []

    def work(rank: int) -> None:
        store, own = LocalStore(str(path)), attempt.place
        items = []
        for name, tensor in tensors.items():
            columns = tensor.tensor_split(world, dim=-1)
            begin = sum(column.shape[-1] for column in columns[:rank])
            box = Box((*(0 for _ in tensor.shape[1:]), begin), tuple(columns[rank].shape))
            dtype = str(tensor.dtype).removeprefix("torch.")
            items.append(Item(f"model/{name}", dtype, tuple(tensor.shape), "param", Bytes(raw(columns[rank])), box))
        tree = {"model": {name: Leaf("tensor", (index,)) for index, name in enumerate(tensors)}}
        request = SaveRequest(
            SaveInfo(step=7),
            tree=encode_tree(tree if rank == 0 else {**tree, "rank": {}}),
            items=items,
            id="0000000007",
            seat=Participant(rank, world, "0" * 16, 60.0),
        )
        try:
            save_multi_rank(CommitTarget(store, Log(store, "run"), own.store_id, own.run_id, own.epoch), request)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed, failed
    return opened(path)
