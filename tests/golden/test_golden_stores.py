"""Stores of format version 1 stay readable forever: by Relight, and by a reader that shares no code with it."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import independent_reader
import pytest
from fingerprints import every_byte
from render import render

from relight.catalog import Run, candidates, list_runs, resolve
from relight.reader import read_tensors, verify_checkpoint, verify_log
from relight.errors import CheckpointNotFound
from relight.format import DTYPES, decode_tree
from relight.format.records import COMMIT, FENCE, NOTE, RETIRE, RUN, TAG
from relight.layout import Bytes
from relight.store import LocalStore

GOLDEN = Path(__file__).parent / "v1"
EVERY_BYTE = "3d07e01704885b85cc66fbbae998adc0a31124f2fdba52c4139462737e37f47d"
"""Hash over all files' names and bytes. It never changes."""
STORES = ("one-rank", "two-ranks")


@cache
def expected(store: str) -> dict[str, Any]:
    """Return the generator's record of a store's content, by checkpoint id."""
    return json.loads((GOLDEN / f"{store}.expected.json").read_text())


def test_they_are_what_they_were() -> None:
    """Compare every byte of the golden files. No file changes, is added or removed."""
    assert every_byte(GOLDEN) == EVERY_BYTE


@pytest.mark.parametrize("name", STORES)
def test_relight_reads_them(name: str) -> None:
    """Open and verify every live checkpoint, and compare its tensors and tree."""
    store = LocalStore(GOLDEN / name)
    run = Run(store, "run")
    view, history = run.view(), run.history()
    assert list_runs(store) == ["run"]
    assert not verify_log(store, view)
    assert {checkpoint.id for checkpoint in history.live} | history.retired.keys() == expected(name).keys()
    for checkpoint in candidates(history):
        assert not verify_checkpoint(store, view, checkpoint)
        opened = run.open(checkpoint)
        ranks = []
        for part in opened.parts:
            buffers = [bytearray(tensor.length) for tensor in part.tensors]
            read_tensors(opened, part, {index: Bytes(buffer) for index, buffer in enumerate(buffers)})
            tree = decode_tree(part.tree, len(part.tensors), "golden")
            tensors = {
                tensor.name: [tensor.dtype, list(tensor.shape), buffer.hex()] for tensor, buffer in zip(part.tensors, buffers, strict=True)
            }
            ranks.append({"tensors": tensors, "tree": render(tree)})
        assert ranks == expected(name)[checkpoint.id]


@pytest.mark.parametrize("name", STORES)
def test_the_independent_reader_reads_them(name: str) -> None:
    """Read the same checkpoints, tensors and trees with 80 lines that were written from the format page alone."""
    live = independent_reader.checkpoints(GOLDEN / name, "run")
    assert [record["body"]["id"] for record in live] == [
        checkpoint.id for checkpoint in candidates(Run(LocalStore(GOLDEN / name), "run").history())
    ]
    for record in live:
        _, read = independent_reader.read(GOLDEN / name, "run", record)
        ranks = [
            {"tensors": {tensor[0]: [tensor[1], list(tensor[2]), tensor[4].hex()] for tensor in tensors}, "tree": render(tree)}
            for tensors, tree in read
        ]
        assert ranks == expected(name)[record["body"]["id"]]


def test_the_history_is_what_it_was() -> None:
    """Read one retired and one tagged checkpoint, two fences, a void tag, a note, and numbers that JSON lacks."""
    history = Run(LocalStore(GOLDEN / "one-rank"), "run").history()
    assert [(checkpoint.id, checkpoint.step, checkpoint.epoch) for checkpoint in history.live] == [("x" * 10, 2, 1), ("y" * 10, 3, 2)]
    assert list(history.retired) == ["w" * 10]
    assert history.tags == {"good/one": "x" * 10}
    assert [record.body.reason for record in history.fences] == ["start", "again"]
    assert [record.body.name for record, _ in history.void] == ["fenced"]
    assert [record.body.data for record in history.notes] == [{"rain": True, "mm": 3.5, "n": 7, "where": "é", "none": None}]
    assert history.live[1].body.metrics == {"loss": "nan", "accuracy": 0.5, "high": "inf", "low": "-inf", "count": 2**63}
    assert resolve(history, "good/one").step == 2
    assert resolve(history, "best:accuracy").step == 3
    with pytest.raises(CheckpointNotFound, match="retired"):
        resolve(history, "w" * 10)


def test_they_hold_what_the_page_lists() -> None:
    """Check that the golden files contain every dtype, every kind of record, two packs, two ranks and pieces. What they
    lack is not protected."""
    store = LocalStore(GOLDEN / "one-rank")
    run = Run(store, "run")
    assert {record.kind for record in run.view().records} == {RUN, FENCE, COMMIT, RETIRE, TAG, NOTE}
    part = run.open(candidates(run.history())[0]).parts[0]
    assert {tensor.dtype for tensor in part.tensors} == DTYPES.keys()
    assert len(part.packs) == 2
    assert {tensor.role for tensor in part.tensors} == {"param", "buffer", "optim", "grad", "rng", "value"}
    two = Run(LocalStore(GOLDEN / "two-ranks"), "run")
    opened = two.open(candidates(two.history())[0])
    assert [len(part.tensors) for part in opened.parts] == [3, 4]
    assert any(tensor.box for part in opened.parts for tensor in part.tensors)


def test_their_packs_open_as_safetensors() -> None:
    """Read every golden pack with the safetensors library, and compare the bytes."""
    torch = pytest.importorskip("torch")
    if not hasattr(torch, "float8_e8m0fnu"):
        pytest.skip("torch 2.6 has no float8_e8m0fnu")
    safetensors = pytest.importorskip("safetensors")
    seen = 0
    for path in sorted(GOLDEN.rglob("pack-*.safetensors")):
        name, letter = path.relative_to(GOLDEN).parts[0], path.parent.name.split("-")[1]
        stored = {key: value for rank in expected(name)[letter] for key, value in rank["tensors"].items()}
        rank = int(path.name.split("-")[1])
        stored |= expected(name)[letter][rank]["tensors"]
        with safetensors.safe_open(path, framework="pt") as pack:
            for key in pack.keys():
                tensor = pack.get_tensor(key)
                raw = tensor.reshape(-1).view(torch.uint8) if tensor.numel() else tensor.reshape(-1)
                assert bytes(raw.tolist()).hex() == stored[key][2], key
                seen += 1
    assert seen == 1 + 1 + len(expected("one-rank")["y" * 10][0]["tensors"]) + 7


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_they_come_back_as_torch_objects() -> None:
    """Rebuild every kind of leaf in the golden files as torch objects, ties and expanded views included."""
    torch = pytest.importorskip("torch")
    if not hasattr(torch, "float8_e8m0fnu"):
        pytest.skip("torch 2.6 has no float8_e8m0fnu")
    import relight

    state = relight.load(str(GOLDEN / "one-rank" / "run"))
    shapes, kinds = state["shapes"], state["kinds"]
    assert shapes["embedding"] is shapes["head"] or shapes["embedding"].data_ptr() == shapes["head"].data_ptr()
    assert shapes["scalar"].shape == () and shapes["empty"].shape == (0, 7)
    assert shapes["expanded"].shape == (5, 3) and shapes["expanded"].stride(0) == 0
    assert [kinds["sparse_coo"].layout, kinds["sparse_csr"].layout] == [torch.sparse_coo, torch.sparse_csr]
    assert kinds["numpy text"].tolist() == ["añ", "名!"] and kinds["numpy of other order"].dtype.str == ">i4"
    assert (kinds["torch_dtype"], kinds["torch_size"]) == (torch.bfloat16, torch.Size([2, 3]))
    stored = expected("one-rank")["y" * 10][0]["tensors"]
    for name, tensor in state["dtypes"].items():
        assert bytes(tensor.view(torch.uint8).tolist()).hex() == stored[f"dtypes/{name}"][2], name
