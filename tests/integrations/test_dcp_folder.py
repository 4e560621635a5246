"""Directories that DCP wrote by itself, read as data: every kind of value, by name or pattern, into live objects."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

from relight.errors import CheckpointNotFound, ConfigError, IncompatibleState, UnsafeContent
from relight.integrations import dcp as interop

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int8, torch.uint8, torch.bool, torch.complex64,
          torch.uint16, torch.float8_e4m3fn)  # fmt: skip


def a_net() -> tuple[nn.Module, torch.optim.Optimizer]:
    net = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 2))
    optimizer = torch.optim.AdamW(
        [{"params": net[0].parameters(), "lr": 0.5}, {"params": [*net[1].parameters(), *net[2].parameters()]}], lr=0.25
    )
    return net, optimizer


def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(2)
    net, optimizer = a_net()
    net(torch.randn(3, 4)).sum().backward()
    optimizer.step()
    return net, optimizer


def equal(first: tuple[nn.Module, torch.optim.Optimizer], second: tuple[nn.Module, torch.optim.Optimizer]) -> bool:
    ours, theirs = first[1].state_dict(), second[1].state_dict()
    return (
        all(
            torch.equal(a, b)
            for a, b in zip(first[0].state_dict().values(), second[0].state_dict().values(), strict=True)
        )
        and ours["param_groups"] == theirs["param_groups"]
        and all(
            torch.equal(value, theirs["state"][index][key])
            for index, state in ours["state"].items()
            for key, value in state.items()
        )
    )


def test_every_kind_of_value(tmp_path: Path) -> None:
    """Tensors of all dtypes, empty ones, other memory formats, arrays, and plain values; also from several files and threads."""
    state: dict[str, Any] = {str(dtype): torch.arange(6).to(dtype).view(2, 3) for dtype in DTYPES}
    state |= {
        "last": torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
        "view": torch.randn(6, 6)[1:3, ::2],
        "t": torch.randn(3, 4).t(),
    }
    state |= {
        "none": torch.empty(0, 3),
        "one": torch.tensor(1.5),
        "list": [torch.ones(2), {"x": None}],
        "words": ["a", "b"],
        "pair": (1, 2.5),
    }
    state |= {
        "array": np.arange(4.0),
        "number": np.float32(2.5),
        "bytes": b"\0\xff",
        "set": {1, 2},
        "big": -(2**100),
        "c": 1 + 2j,
    }
    state |= {
        "dtype": torch.bfloat16,
        "size": torch.Size([2, 3]),
        "device": torch.device("cpu"),
        "inner": (torch.arange(3), "x"),
        "true": True,
    }
    for number, options in enumerate(({}, {"single_file_per_rank": False}, {"thread_count": 2})):
        dcp.save(state, storage_writer=FileSystemWriter(tmp_path / str(number), **options))
        state_read = interop.read(tmp_path / str(number))
        assert state_read.keys() == state.keys()
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                assert state_read[key].dtype == value.dtype and state_read[key].shape == value.shape, key
                if value.dtype != torch.float8_e4m3fn:
                    assert torch.equal(state_read[key], value), key
            elif key not in ("list", "inner", "array"):
                assert state_read[key] == value and type(state_read[key]) is type(value), key
        assert torch.equal(state_read["list"][0], torch.ones(2)) and state_read["list"][1] == {"x": None}
        assert torch.equal(state_read["inner"][0], torch.arange(3)) and state_read["inner"][1] == "x"
        assert state_read["array"].dtype == np.float64 and state_read["array"].tolist() == [0, 1, 2, 3]


def test_only_what_matches(tmp_path: Path) -> None:
    """Select by DCP's flat names or by paths. An unreadable value that is not selected causes no error."""
    dcp.save(
        {"model": {"a.w": torch.ones(2), "b.w": torch.zeros(2)}, "odd": FileSystemWriter, "step": 3},
        checkpoint_id=tmp_path / "out",
    )
    assert list(interop.read(tmp_path / "out", only=["model.a*"])["model"]) == ["a.w"]
    assert list(interop.read(tmp_path / "out", only=["model", "step"])) == ["model", "step"]
    assert interop.read(tmp_path / "out", only=["model/b.w"])["model"]["b.w"].tolist() == [0, 0]
    with pytest.raises(UnsafeContent, match="FileSystemWriter"):
        interop.read(tmp_path / "out")


@pytest.mark.parametrize("flat", [False, True])
def test_a_model_and_its_optimizer_come_back(tmp_path: Path, flat: bool) -> None:
    """Restore every parameter, buffer, moment and group setting of ``get_state_dict``, flattened or not."""
    net, optimizer = trained()
    model, optim = get_state_dict(net, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=flat))
    dcp.save({"model": model, "optim": optim}, checkpoint_id=tmp_path / "out")
    other = a_net()
    other[1].param_groups[0]["lr"] = 9.0
    interop.restore(tmp_path / "out", model=other[0], optim=other[1])
    assert equal((net, optimizer), other)


def test_an_optimizers_own_state_dict(tmp_path: Path) -> None:
    """Restore state by number into the live optimizer's parameters in their order."""
    net, optimizer = trained()
    dcp.save({"model": net.state_dict(), "optim": optimizer.state_dict()}, checkpoint_id=tmp_path / "out")
    other = a_net()
    interop.restore(tmp_path / "out", model=other[0], optim=other[1])
    assert equal((net, optimizer), other)


def test_a_modules_own_state_dict(tmp_path: Path) -> None:
    """Restore a state dict without a top-level name into the one given component, compiled or wrapped too."""
    net, _ = trained()
    dcp.save(net.state_dict(), checkpoint_id=tmp_path / "out")
    other = a_net()[0]
    interop.restore(tmp_path / "out", net=torch.compile(other))
    assert all(torch.equal(a, b) for a, b in zip(net.state_dict().values(), other.state_dict().values(), strict=True))


def test_a_state_that_does_not_fit_changes_nothing(tmp_path: Path) -> None:
    """List all mismatches. With ``strict=False``, restore what fits."""
    net, _ = trained()
    dcp.save({"model": net.state_dict()}, checkpoint_id=tmp_path / "out")
    other = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2), nn.Linear(2, 2))
    before = [tensor.clone() for tensor in other.state_dict().values()]
    with pytest.raises(IncompatibleState) as caught:
        interop.restore(tmp_path / "out", model=other)
    assert len(caught.value.details) == 9
    assert all(torch.equal(a, b) for a, b in zip(before, other.state_dict().values(), strict=True))
    interop.restore(tmp_path / "out", strict=False, model=other)
    assert torch.equal(other[2].bias, net[2].bias)


def test_plain_values_are_refilled_in_place(tmp_path: Path) -> None:
    """Restore dicts, lists and tensors in place. Refuse an immutable value."""
    dcp.save({"own": {"n": 3, "t": torch.arange(3)}, "step": 7}, checkpoint_id=tmp_path / "out")
    own = {"n": 0, "t": torch.zeros(3, dtype=torch.int64)}
    tensor = own["t"]
    interop.restore(tmp_path / "out", own=own)
    assert own["n"] == 3 and own["t"] is tensor and tensor.tolist() == [0, 1, 2]
    with pytest.raises(ConfigError, match="step"):
        interop.restore(tmp_path / "out", step=0)


def test_memory_is_bounded(tmp_path: Path) -> None:
    """Read into the tensors directly, with one buffer of a slab in addition."""
    dcp.save({"w": torch.ones(1 << 22), "v": torch.ones(1 << 22)}, checkpoint_id=tmp_path / "out")
    net = nn.ParameterDict({"w": nn.Parameter(torch.zeros(1 << 22)), "v": nn.Parameter(torch.zeros(1 << 22))})
    tracemalloc.start()
    interop.restore(tmp_path / "out", net=net)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert float(net["w"].sum()) == 1 << 22
    assert peak < 4 << 20


def test_no_checkpoint_there(tmp_path: Path) -> None:
    """Raise CheckpointNotFound for a directory without metadata, such as an unfinished one."""
    with pytest.raises(CheckpointNotFound):
        interop.read(tmp_path)
    with pytest.raises(CheckpointNotFound):
        interop.read(tmp_path / "nowhere")
