"""``relight.load(lazy=True)``: single tensors and slices are read from a checkpoint, verified, and nothing else is."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.descriptors import new_descriptors, open_descriptors
from torch import nn

import relight
from relight.checkpointer import boundary, session
from relight.comm import SingleProcess, ThreadGroup
from relight.errors import CheckpointNotFound, ConfigError, CorruptCheckpoint, IncompatibleState
from relight.keys import write_key_file
from relight.layout import CHUNK_BYTES
from relight.restore import opened_state

MIB = 1 << 20
ROWS, COLUMNS = 1024, 3072
"""Of the large tensor: 12 MiB, three chunks of 4 MiB."""


class Parts(nn.Module):
    """A module with a large matrix, a stack of matrices, and small tensors of other dtypes, one of them tied."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.large = nn.Parameter(torch.randn(ROWS, COLUMNS))
        self.stack = nn.Parameter(torch.zeros(2, 4, MIB, dtype=torch.bfloat16) + torch.arange(4)[:, None])
        self.tied = self.large
        self.register_buffer("flags", torch.arange(1001) % 3 == 0)
        self.register_buffer("scalar", torch.tensor(3.5, dtype=torch.float64))
        self.register_buffer("empty", torch.empty(0, 4))


def save_into(path: Path, *, steps: int = 1, **options: Any) -> dict[str, torch.Tensor]:
    """Save a run. Return the tensors of its last step."""
    model = Parts()
    options = {"signals": False, "background": False, "save": None, **options}
    state = {"sparse": torch.eye(3).to_sparse(), "array": np.arange(5.0), "number": 7}
    with relight.Checkpointer(path, model=model, state=state, **options) as ckpt:
        ckpt.restore()
        for step in range(steps):
            with torch.no_grad():
                model.large[step].add_(1)
            ckpt.save(step)
    return {f"model/{name}": value.detach().clone() for name, value in model.state_dict().items()}


@pytest.fixture(name="read")
def read_fixture(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of bytes that each reading has read from the store."""
    reads: list[int] = []
    read = opened_state.read_tensors

    def counted(*args: Any, **options: Any) -> int:
        reads.append(read(*args, **options))
        return reads[-1]

    monkeypatch.setattr(opened_state, "read_tensors", counted)
    return reads


def read_calls() -> int:
    """Return the bytes that this process has read by system calls, as the kernel counts them."""
    return int(
        next(line for line in Path("/proc/self/io").read_text().splitlines() if line.startswith("rchar")).split()[1]
    )


def encrypted(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the options that encrypt a store, for a Checkpointer and for ``load``."""
    write_key_file(str(path / "key"))
    return {"encrypt": f"file:{path / 'key'}"}, {"encrypt": f"file:{path / 'key'}"}


STORES: dict[str, Callable[[Path], tuple[dict[str, Any], dict[str, Any]]]] = {
    "plain": lambda path: ({}, {}),
    "encrypted": encrypted,
    "coded": lambda path: ({"compact": relight.Compact(reuse=False, codecs="always")}, {}),
    "deltas": lambda path: ({"compact": relight.Compact(codecs="always"), "steps": 3}, {}),
}


@pytest.mark.parametrize("kind", STORES)
def test_every_tensor_is_as_saved_and_reads_its_chunks_only(kind: str, tmp_path: Path, read: list[int]) -> None:
    """Opening reads no tensor. A tensor reads its own bytes, a slice of rows the chunks that have them."""
    saving, loading = STORES[kind](tmp_path)
    expected = save_into(tmp_path / "run", **saving)
    with relight.load(tmp_path / "run", lazy=True, **loading) as checkpoint:
        assert {*expected, "sparse"} <= set(checkpoint.keys()) and "array" not in checkpoint
        large = checkpoint.get_slice("model/large")
        assert (large.shape, large.dtype) == (torch.Size([ROWS, COLUMNS]), torch.float32)
        assert (large.get_shape(), large.get_dtype()) == ([ROWS, COLUMNS], "F32")
        assert sum(read) == 0
        for name, value in expected.items():
            tensor = checkpoint.get_tensor(name)
            assert torch.equal(tensor, value) and tensor.dtype == value.dtype, name
        assert torch.equal(checkpoint.get_tensor("sparse").to_dense(), torch.eye(3))
        read.clear()
        assert torch.equal(large[10:20], expected["model/large"][10:20])
        assert sum(read) == CHUNK_BYTES, "ten rows are within one chunk"
        read.clear()
        assert torch.equal(checkpoint.get_tensor("model/scalar"), expected["model/scalar"])
        assert sum(read) < MIB


def test_the_kernel_counts_few_bytes(tmp_path: Path) -> None:
    """Opening and one row of a run of 50 MB read a chunk and the metadata, by the kernel's own count."""
    expected = save_into(tmp_path / "run")
    before = read_calls()
    with relight.load(tmp_path / "run", lazy=True) as checkpoint:
        metadata = read_calls() - before
        row = checkpoint.get_slice("model/large")[ROWS - 1]
        whole = read_calls() - before
    assert torch.equal(row, expected["model/large"][-1])
    assert metadata < MIB and whole < CHUNK_BYTES + MIB


KEYS: dict[str, Any] = {
    "rows": slice(3, 9), "a row": 5, "the last row": -1, "an element": (7, 9), "a column": (slice(None), 3), "columns": (..., slice(1, 4)),
    "every third row": slice(0, 30, 3), "all": ..., "nothing": slice(5, 5), "backwards bounds": slice(9, 3), "beyond": slice(1020, 5000),
    "negative": slice(-5, -2), "numpy": np.int64(4), "a step of both": (slice(1, 20, 4), slice(None, 100, 7)), "all, by a tuple": (),
}  # fmt: skip


@pytest.mark.parametrize("key", KEYS)
def test_a_slice_is_what_torch_gives(key: str, shared: Any) -> None:
    """Integers, slices and an ellipsis index as they index a tensor."""
    path, expected = shared
    with relight.load(path, lazy=True) as checkpoint:
        got, wanted = checkpoint.get_slice("model/large")[KEYS[key]], expected["model/large"][KEYS[key]]
    assert got.shape == wanted.shape and torch.equal(got, wanted)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    """A run that several tests read, and its tensors."""
    path = tmp_path_factory.mktemp("lazy") / "run"
    os.environ.setdefault("RELIGHT_EVENTS", "0")
    return path, save_into(path)


def test_of_a_stack_only_the_chunks_of_one_matrix_are_read(shared: Any, read: list[int]) -> None:
    """A slice along a middle dimension skips the chunks between its parts."""
    path, expected = shared
    with relight.load(path, lazy=True) as checkpoint:
        part = checkpoint.get_slice("model/stack")[:, 2:3]
    assert torch.equal(part, expected["model/stack"][:, 2:3])
    assert sum(read) == 2 * CHUNK_BYTES == expected["model/stack"].nbytes // 2


@pytest.mark.parametrize("key", [2000, (0, 0, 0), "x", [1, 2], slice(None, None, -1), (..., ...), None])
def test_other_indices_are_refused(key: Any, shared: Any) -> None:
    """Nothing is read for an index that does not fit."""
    with relight.load(shared[0], lazy=True) as checkpoint, pytest.raises(IndexError, match="model/large"):
        checkpoint.get_slice("model/large")[key]


def test_names_and_states_that_do_not_fit_are_refused(shared: Any) -> None:
    """An unknown name lists others; a closed checkpoint, a pattern without matches and mmap= are refused."""
    path, _ = shared
    with relight.load(path, lazy=True) as checkpoint:
        with pytest.raises(CheckpointNotFound, match="no tensor 'model/lrge'") as caught:
            checkpoint.get_tensor("model/lrge")
        assert "model/large" in caught.value.hint
        with pytest.raises(ConfigError, match="sparse_coo"):
            checkpoint.get_slice("sparse")
        large = checkpoint.get_slice("model/large")
        assert "open" in repr(checkpoint) and "float32" in repr(large)
    for call in (
        lambda: checkpoint.get_tensor("model/large"),
        lambda: large[0],
        lambda: checkpoint.get_slice("model/large"),
    ):
        with pytest.raises(ConfigError, match="closed"):
            call()
    with pytest.raises(IncompatibleState, match="nothing in the checkpoint fits"):
        relight.load(path, lazy=True, only=["modle/*"])
    with pytest.raises(ConfigError, match="mmap"):
        relight.load(path, lazy=True, mmap=True)  # type: ignore[call-overload]
    with pytest.raises(ConfigError, match="lazy"):
        relight.load(path, lazy=1)  # type: ignore[call-overload]
    assert relight.load(path, lazy=True, only=["model/fl*"]).keys() == ["model/flags"]


def test_damage_is_found_when_a_tensor_is_read(tmp_path: Path) -> None:
    """A flipped bit makes the reads of its chunk fail, and no other ones."""
    expected = save_into(tmp_path / "run")
    (pack,) = (tmp_path / "run").rglob("*.safetensors")
    raw = bytearray(pack.read_bytes())
    place = raw.find(expected["model/large"][0, :8].numpy().tobytes())
    raw[place] ^= 1
    pack.chmod(0o600)
    pack.write_bytes(raw)
    with relight.load(tmp_path / "run", lazy=True) as checkpoint:
        with pytest.raises(CorruptCheckpoint):
            checkpoint.get_slice("model/large")[0]
        assert torch.equal(checkpoint.get_slice("model/large")[-1], expected["model/large"][-1])


def test_no_file_stays_open(shared: Any) -> None:
    """After two hundred slices this process has the descriptors that it had before."""
    before = open_descriptors()
    with relight.load(shared[0], lazy=True) as checkpoint:
        large = checkpoint.get_slice("model/flags")
        for row in range(200):
            assert large[row].item() == (row % 3 == 0)
        assert not new_descriptors(before, target=str(shared[0]))


def test_threads_read_at_once(shared: Any) -> None:
    """Eight threads read different rows of one checkpoint."""
    path, expected = shared
    wrong: list[int] = []
    with relight.load(path, lazy=True) as checkpoint:

        def read_rows(first: int) -> None:
            for row in range(first, first + 10):
                if not torch.equal(checkpoint.get_slice("model/large")[row], expected["model/large"][row]):
                    wrong.append(row)

        threads = [threading.Thread(target=read_rows, args=(100 * number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong


def test_a_tensor_that_two_ranks_wrote(tmp_path: Path, read: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Names, values and slices are those of the whole tensors."""
    models, local = [Parts() for _ in range(2)], threading.local()
    monkeypatch.setattr(session, "find_world", lambda timeout_s: getattr(local, "world", SingleProcess()))
    monkeypatch.setattr(boundary, "FREE_S", 1.0)

    def rank(world: ThreadGroup) -> dict[str, Any]:
        local.world = world
        options: dict[str, Any] = {"save": None, "signals": False, "background": False}
        with relight.Checkpointer(tmp_path / "run", model=models[world.rank], **options) as ckpt:
            ckpt.save(0)
        return dict(models[world.rank].state_dict())

    state = ThreadGroup.run(2, rank)[0]
    with relight.load(tmp_path / "run", lazy=True) as checkpoint:
        assert torch.equal(checkpoint.get_tensor("model/large"), state["large"])
        read.clear()
        for rows in (slice(0, 5), slice(500, 520), slice(1020, 1024)):
            assert torch.equal(checkpoint.get_slice("model/large")[rows, 100:200], state["large"][rows, 100:200])
        assert sum(read) <= 5 * CHUNK_BYTES


@pytest.mark.parametrize("mmap", [False, True])
def test_load_is_unchanged_without_it(mmap: bool, shared: Any) -> None:
    """Without ``lazy=`` the whole tree is returned, on the CPU by default and by name."""
    path, expected = shared
    for device in (None, "cpu", torch.device("cpu")):
        loaded = relight.load(path, mmap=mmap, device=device)
        assert torch.equal(loaded["model"]["large"], expected["model/large"]) and loaded["number"] == 7


@pytest.mark.parametrize(
    "device,message", [("meta", "no bytes"), ("cuda:77", "cannot be used here"), ("gpu!", "cuda:0"), (3.5, "cuda:0")]
)
def test_devices_without_memory_here_are_refused(device: Any, message: str, shared: Any) -> None:
    """The error names the device and the reason, before anything is read."""
    for lazy in (False, True):
        with pytest.raises(ConfigError, match=message):
            relight.load(shared[0], device=device, lazy=lazy)
