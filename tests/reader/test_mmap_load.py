"""``relight.load(mmap=True)``: tensors are mappings of the packs, read when they are touched."""

from __future__ import annotations

import re
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import relight
from relight.checkpointer import boundary, session
from relight.comm import SingleProcess, ThreadGroup
from relight.errors import ConfigError, CorruptCheckpoint
from relight.keys import write_key_file
from relight.restore import opened_state

MIB = 1 << 20


class Parts(nn.Module):
    """A module with two large tensors and small ones of other dtypes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Parameter(torch.randn(4 * MIB // 4))
        self.second = nn.Parameter(torch.randn(2 * MIB, 4)[:, :2].to(torch.bfloat16))
        self.register_buffer("flags", torch.arange(1001) % 3 == 0)
        self.register_buffer("small", torch.ones(7, dtype=torch.float64))


def saved(path: Path, **options: Any) -> dict[str, Any]:
    """A run of one step. Return the state that it saved."""
    model = Parts()
    options = {"signals": False, "background": False, "save": None, **options}
    with relight.Checkpointer(path / "run", model=model, state={"lists": [1, np.arange(5.0)]}, **options) as ckpt:
        ckpt.save(0)
    return dict(model.state_dict())


def resident(path: Path) -> int:
    """Bytes of the run's packs in this process's memory, by the kernel's own count."""
    pages, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            inside = str(path) in line
        elif inside and line.startswith("Rss:"):
            pages += 1024 * int(line.split()[1])
    return pages


@pytest.fixture(name="read")
def read_fixture(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes that each call of ``read_tensors`` read."""
    reads: list[int] = []

    def counted(*args: Any, **options: Any) -> int:
        reads.append(read(*args, **options))
        return reads[-1]

    read = opened_state.read_tensors
    monkeypatch.setattr(opened_state, "read_tensors", counted)
    return reads


def test_a_tensor_is_read_when_it_is_touched(tmp_path: Path, read: list[int]) -> None:
    """Loading reads no tensor. Touching a tensor reads only its bytes. All values equal the saved ones."""
    state = saved(tmp_path)
    whole = sum(value.nbytes for value in state.values())
    loaded = relight.load(tmp_path / "run", mmap=True)
    assert sum(read) == 0 and resident(tmp_path) < MIB
    assert torch.equal(loaded["model"]["first"], state["first"])
    assert 4 * MIB <= resident(tmp_path) < 5 * MIB < whole
    assert all(
        torch.equal(value, loaded["model"][name]) and value.dtype == loaded["model"][name].dtype
        for name, value in state.items()
    )
    assert loaded["lists"][0] == 1 and np.array_equal(loaded["lists"][1], np.arange(5.0))
    relight.load(tmp_path / "run")
    assert sum(read) >= whole, "without mmap all of it is read"


def test_the_file_is_never_written(tmp_path: Path) -> None:
    """A write to such a tensor stays in the process, and the mapping outlives the checkpoint's deletion."""
    state = saved(tmp_path)
    loaded = relight.load(tmp_path / "run", mmap=True)["model"]
    loaded["first"].zero_()
    assert torch.equal(relight.load(tmp_path / "run")["model"]["first"], state["first"])
    assert not any(findings for _, findings in relight.open(tmp_path / "run").verify())
    for pack in (tmp_path / "run").rglob("*.safetensors"):
        pack.unlink()
    assert torch.equal(loaded["second"], state["second"])


def test_coded_packs_are_read_and_checked(tmp_path: Path, read: list[int]) -> None:
    """Coded chunks are read, verified and decoded, because they cannot be mapped."""
    state = saved(tmp_path, compact=relight.Compact(reuse=False, lossy={"none/*": "int8"}, codecs="always"))
    model = Parts()
    with relight.Checkpointer(
        tmp_path / "run",
        model=model,
        state={"lists": [1, np.arange(5.0)]},
        signals=False,
        background=False,
        save=None,
        compact=relight.Compact(reuse=False, codecs="always"),
    ) as ckpt:
        ckpt.restore()
        ckpt.save(1)
    loaded = relight.load(tmp_path / "run", mmap=True)["model"]
    assert sum(read) > 0
    assert all(torch.equal(value, loaded[name]) for name, value in state.items())


def test_stores_that_cannot_be_mapped_are_refused(tmp_path: Path) -> None:
    """Encrypted stores, stores in memory, and packs shorter than committed are refused."""
    key = tmp_path / "key"
    write_key_file(str(key))
    saved(tmp_path / "hidden", encrypt=f"file:{key}")
    with pytest.raises(ConfigError, match="cannot be mapped"):
        relight.load(tmp_path / "hidden" / "run", mmap=True, encrypt=f"file:{key}")
    with pytest.raises(ConfigError, match="mmap"):
        relight.load(tmp_path / "hidden" / "run", mmap=1, encrypt=f"file:{key}")  # type: ignore[arg-type]
    saved(tmp_path / "short")
    pack = max((tmp_path / "short" / "run").rglob("*.safetensors"), key=lambda path: path.stat().st_size)
    with pack.open("r+b") as file:
        file.truncate(pack.stat().st_size - 1)
    with pytest.raises(CorruptCheckpoint):
        relight.load(tmp_path / "short" / "run", mmap=True)


def test_of_two_ranks(tmp_path: Path, read: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor that one rank wrote is mapped. A large tensor that two ranks wrote in halves is read."""
    models = [Parts() for _ in range(2)]
    local = threading.local()
    monkeypatch.setattr(session, "find_world", lambda timeout_s: getattr(local, "world", SingleProcess()))
    monkeypatch.setattr(boundary, "FREE_S", 1.0)

    def rank(world: ThreadGroup) -> dict[str, Any]:
        local.world = world
        model = models[world.rank]
        with relight.Checkpointer(
            tmp_path / "store" / "run", model=model, save=None, signals=False, background=False
        ) as ckpt:
            ckpt.save(0)
        return dict(model.state_dict())

    state = ThreadGroup.run(2, rank)[0]
    loaded = relight.load(tmp_path / "store" / "run", mmap=True)["model"]
    assert all(torch.equal(value, loaded[name]) for name, value in state.items())
    written, read[:] = sum(read), []
    assert written <= state["first"].nbytes + state["second"].nbytes + 4096
    assert torch.equal(
        relight.load(tmp_path / "store" / "run", only=["model/small"], mmap=True)["model"]["small"], state["small"]
    )
    assert sum(read) == 0
