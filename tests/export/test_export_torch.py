"""``relight.export`` to what torch itself reads: ``torch.load(weights_only=True)``, also mapped, and ``torch.distributed.checkpoint``."""

from __future__ import annotations

import os
import random
import warnings
import zipfile
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from outgoing import bits, opened, same, saved, saved_by_ranks, state

import relight
from relight.errors import ConfigError, IncompatibleState
from relight.export import Options, execute_export, plan_export
from relight.export.archive import torch_archive
from relight.export.pickled import pickled
from relight.export.torch_files import tensor_value
from relight.format.crc import joined_crc


def export(checkpoint: Any, path: Path, **options: Any) -> Path:
    """Export, and give the path."""
    execute_export(plan_export(checkpoint, path, Options(**options)))
    return path


@pytest.mark.parametrize("mmap", [False, True])
def test_torch_loads_what_went_in_without_running_anything(tmp_path: Path, mmap: bool) -> None:
    """Each dtype with a torch storage, and those stored as bytes, restore exactly.

    The zip file's checksums are right.
    """
    model = {
        **state(),
        **{
            f"more.{dtype}": bits(dtype, 5, 3)
            for dtype in (torch.uint16, torch.uint64, torch.complex64, torch.float8_e8m0fnu)
        },
    }
    path = export(saved(tmp_path / "runs", model), tmp_path / "out.pt", to="pt")
    loaded = torch.load(path, weights_only=True, mmap=mmap)
    assert list(loaded) == list(model)
    assert [name for name in model if not same(loaded[name], model[name])] == []
    with zipfile.ZipFile(path) as file:
        assert file.testzip() is None
    assert sorted(os.listdir(tmp_path)) == ["out.pt", "runs"]


def test_what_ranks_hold_across_and_other_dtypes_have_right_sums_too(tmp_path: Path) -> None:
    """Pieces arrive in any order; their sums are joined."""
    model = {"cut": bits(torch.float32, 700, 900), "row": torch.randn(99_999), "big": torch.randn(2_000_000)}
    path = export(saved_by_ranks(tmp_path / "runs", model, 3), tmp_path / "out.pt", to="pt", dtype="bfloat16")
    loaded = torch.load(path, weights_only=True)
    assert same(loaded["row"], model["row"].bfloat16()) and same(loaded["big"], model["big"].bfloat16())
    assert torch.equal(loaded["cut"].nan_to_num(), model["cut"].bfloat16().nan_to_num())
    with zipfile.ZipFile(path) as file:
        assert file.testzip() is None


def test_tied_weights_share_memory_when_they_are_loaded(tmp_path: Path) -> None:
    """As they do when torch saves them; with ``each`` they do not."""
    weight = torch.randn(50, 4)
    checkpoint = saved(tmp_path / "runs", {"wte": weight, "lm_head": weight})
    loaded = torch.load(export(checkpoint, tmp_path / "a.pt", to="pt"))
    assert loaded["wte"].data_ptr() == loaded["lm_head"].data_ptr() and same(loaded["wte"], weight)
    loaded = torch.load(export(checkpoint, tmp_path / "b.pt", to="pt", tied="each"))
    assert loaded["wte"].data_ptr() != loaded["lm_head"].data_ptr() and same(loaded["lm_head"], weight)


VALUES: dict[str, Any] = {
    "none": None, "yes": True, "no": False, "small": 7, "two": 300, "neg": -5, "long": 2**60, "huge": -(2**200), "half": 0.5,
    "text": "é\n\0", "bytes": b"\x00\xff", "complex": 1 - 2j, "list": [1, [2.0, "x"], {}], "tuple": (1, (), None), "set": {1, 2}, "empty": {},
    "size": torch.Size([2, 3]), "dtype": torch.bfloat16, "device": torch.device("cpu"), 3: "by number", "with": [torch.ones(2), 5],
}  # fmt: skip


def test_a_pt_file_has_the_whole_state_unchanged(tmp_path: Path) -> None:
    """Numbers, texts, lists with tensors in them and without, torch's small things: all that may be read without running it."""
    relight.save(
        tmp_path / "runs" / "run",
        {"model": {"w": torch.ones(2)}, "rest": VALUES, "frozen": frozenset((1,)), "n": 2**3000},
        step=1,
    )
    plan = plan_export(opened(tmp_path / "runs"), tmp_path / "all.pt", Options(to="pt", everything=True))
    execute_export(plan)
    loaded = torch.load(tmp_path / "all.pt", weights_only=True)
    assert torch.equal(loaded["rest"].pop("with")[0], torch.ones(2))
    assert loaded["rest"] == {key: value for key, value in VALUES.items() if key != "with"}
    assert {what for what, _ in plan.chosen.left_out} == {"frozen", "n"}
    assert loaded.keys() == {"model", "rest"}


def test_dcp_loads_it_and_what_it_makes_of_it_is_the_same(tmp_path: Path) -> None:
    """``torch.distributed.checkpoint.load`` fills a model; its converter gives the whole state back."""
    model = {name: tensor for name, tensor in state().items() if tensor.numel()}
    weight = torch.randn(6)
    checkpoint = saved(
        tmp_path / "runs",
        {**model, "tied": weight, "tied2": weight},
        extra={"step": 5, "l": [1, torch.ones(2)], 3: "x"},
    )
    live = {name: torch.zeros_like(tensor) for name, tensor in model.items()} | {
        "tied": torch.zeros(6),
        "tied2": torch.zeros(6),
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(live, checkpoint_id=export(checkpoint, tmp_path / "dcp", to="dcp"))
        assert [name for name in model if not same(live[name], model[name])] == []
        assert same(live["tied"], weight) and same(live["tied2"], weight)
        from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

        dcp_to_torch_save(export(checkpoint, tmp_path / "all", to="dcp", everything=True), tmp_path / "back.pt")
    assert sorted(os.listdir(tmp_path / "dcp")) == [".metadata", "__0_0.distcp"]
    loaded = torch.load(tmp_path / "back.pt", weights_only=False)
    assert all(same(loaded["model"][name], tensor) for name, tensor in model.items())
    assert loaded["extra"]["step"] == 5 and loaded["extra"]["l"][0] == 1 and loaded["extra"]["3"] == "x"


def test_relight_reads_the_dcp_it_wrote_as_it_reads_anybodys(tmp_path: Path) -> None:
    """Its own reader of foreign directories, which checks every box and sum."""
    from relight.integrations import dcp as ours

    model = {"w": bits(torch.float32, 70, 90), "b": bits(torch.bfloat16, 9)}
    loaded = ours.read(export(saved(tmp_path / "runs", model), tmp_path / "dcp", to="dcp"))
    assert all(same(loaded[name], tensor) for name, tensor in model.items())


def test_a_dcp_that_is_there_is_replaced_only_when_asked(tmp_path: Path) -> None:
    """And then as a whole."""
    checkpoint = saved(tmp_path / "runs", {"w": torch.ones(3)})
    export(checkpoint, tmp_path / "dcp", to="dcp")
    with pytest.raises(ConfigError, match="there already"):
        plan_export(checkpoint, tmp_path / "dcp", Options(to="dcp"))
    export(checkpoint, tmp_path / "dcp", to="dcp", overwrite=True)
    with pytest.raises(ConfigError, match="--shard"):
        plan_export(checkpoint, tmp_path / "x", Options(to="dcp", shard_bytes=10))


def test_sizes_beyond_32_bits(tmp_path: Path) -> None:
    """Storages after and above 4 GiB: torch maps them and finds their bytes, and Python's zip reader agrees.

    The file is sparse.
    """
    from relight.export.selection import ExportEntry

    large, small = ExportEntry("l", 0, "uint8", ((5 << 30) + 7,)), ExportEntry("s", 1, "float32", (2,))
    value = pickled({"l": tensor_value(large, 0), "s": tensor_value(small, 1)})
    archive = torch_archive("x", value, [large.length, small.length])
    with open(tmp_path / "x.pt", "wb") as file:
        file.truncate(archive.size)
        pieces = [
            *archive.fixed,
            (archive.rooms[0].offset + large.length - 1, b"\x05"),
            (archive.rooms[1].offset, torch.ones(2).numpy().tobytes()),
        ]
        for offset, data in pieces:
            file.seek(offset)
            file.write(data)
    loaded = torch.load(tmp_path / "x.pt", weights_only=True, mmap=True)
    assert loaded["l"].shape == large.shape and loaded["l"][-1] == 5 and loaded["s"].tolist() == [1, 1]
    with zipfile.ZipFile(tmp_path / "x.pt") as file:
        assert [(entry.filename, entry.file_size) for entry in file.infolist() if "/data/" in entry.filename] == [
            ("x/data/0", large.length),
            ("x/data/1", small.length),
        ]
        assert file.getinfo("x/data/1").header_offset > 5 << 30


def test_more_entries_than_16_bits_count() -> None:
    """The end of the directory is written as wide as that needs."""
    archive = torch_archive("x", pickled({}), [0] * 70_000)
    assert len(archive.rooms) == 70_000
    end = archive.fixed[-1][1]
    assert end[:4] == b"PK\6\6" and int.from_bytes(end[32:40], "little") == 70_000 + 5


def test_sums_of_runs_are_the_sum_of_the_whole() -> None:
    """Any runs, in any order, empty ones among them."""
    draw = random.Random(5)
    for _ in range(200):
        data = draw.randbytes(draw.randrange(0, 3000))
        cuts = sorted(draw.choices(range(len(data) + 1), k=draw.randrange(0, 6)))
        runs = [(a, b - a, zlib.crc32(data[a:b])) for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]
        draw.shuffle(runs)
        assert joined_crc(runs) == zlib.crc32(data)


@pytest.mark.parametrize(
    "value", [object(), frozenset(), 2**3000, {"a": [bytearray()]}], ids=lambda value: type(value).__name__
)
def test_what_cannot_be_read_without_running_it_is_not_written(value: object) -> None:
    """``IncompatibleState``, wherever it is in the tree."""
    with pytest.raises(IncompatibleState):
        pickled(value)
