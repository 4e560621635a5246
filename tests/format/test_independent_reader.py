"""docs/format.md suffices to write a reader: the independent reader and Relight agree on every byte."""

from __future__ import annotations

import ast
import random
from pathlib import Path

import independent_reader
import pytest
from forge import DIRS, RUN, SEQ, STEPS, TENSORS, Forge, record_key, values, write

from relight.format.dtypes import DTYPES
from relight.log import Log, fold
from relight.store import LocalStore

LINES_MAX = 110
ALLOWED = {"base64", "io", "json", "math", "collections", "pathlib", "msgpack", "blake3"}


def checked(root: Path) -> str:
    """Compare the newest checkpoint that the reader accepts with the saved state. Return the letter of its id."""
    for record in independent_reader.checkpoints(root, RUN):
        try:
            _, [(tensors, tree)] = independent_reader.read(root, RUN, record)
        except (ValueError, KeyError, OSError):
            continue
        letter = record["body"]["id"][0]
        expected_values = values(STEPS[letter])
        expected = [(name, dtype, shape, None, expected_values[name]) for name, dtype, shape, *_ in TENSORS]
        assert tensors == expected
        leaves = [("@", "tensor", (index,), None) for index in range(6)]
        rest = [*leaves[3:], (1, 2.5, None, b"x", "é")]
        assert tree == {
            "model": {"w": leaves[0], "b": leaves[1], "tied": leaves[0]},
            "optim": {0: leaves[2]},
            "rest": rest,
        }
        return letter
    raise AssertionError("nothing is whole")


def test_the_reader_reads_saved_checkpoints(tmp_path: Path) -> None:
    """The newest checkpoint's tensors and tree equal the saved ones, and retired checkpoints are not listed."""
    write(Forge().files, tmp_path)
    assert [record["body"]["step"] for record in independent_reader.checkpoints(tmp_path, RUN)] == [30, 20, 10]
    assert checked(tmp_path) == "c"


def test_the_reader_rejects_a_flipped_bit(tmp_path: Path) -> None:
    """A bit flip in a file of a checkpoint makes the reader skip the checkpoint, and in the log, the record."""
    rng = random.Random(1)
    good = Forge().files
    write(good, tmp_path)
    for key in sorted(good):
        for _ in range(12):
            data = bytearray(good[key])
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
            (tmp_path / key).write_bytes(data)
            assert checked(tmp_path) == ("b" if key.startswith(DIRS["c"]) or key == record_key(SEQ["c"]) else "c"), key
        (tmp_path / key).write_bytes(good[key])


def test_the_reader_follows_the_rules_of_the_history(tmp_path: Path) -> None:
    """A commit of a fenced epoch is void, a retired checkpoint is not listed, and a forked record affects only itself."""
    forge = Forge()
    forge.record(SEQ["c"], lambda record: record.update(epoch=1))
    write(forge.files, tmp_path / "fenced")
    assert checked(tmp_path / "fenced") == "b"
    forge = Forge()
    forge.append(lambda record: record["body"].update(ids=["c" * 10]), SEQ["retire"])
    write(forge.files, tmp_path / "retired")
    assert checked(tmp_path / "retired") == "b"
    for kinds, newest in ((["RECALL"], "c"), (["SWEEP"], "b"), (["SWEEP", "RECALL"], "b"), (["RECALL", "SWEEP"], "c")):
        forge = Forge()
        forge.append(lambda record: record["body"].update(ids=["c" * 10], undo_s=60), SEQ["retire"])
        for kind in kinds:
            body = {"ids": ["c" * 10], **({"reason": ""} if kind == "RECALL" else {})}
            forge.append(lambda record, kind=kind, body=body: record.update(kind=kind, body=body), SEQ["retire"])
        write(forge.files, tmp_path / f"{kinds}")
        assert checked(tmp_path / f"{kinds}") == newest, kinds
        assert Log(LocalStore(tmp_path / f"{kinds}"), RUN).read().faults == ()
        assert [checkpoint.id[0] for checkpoint in fold(Log(LocalStore(tmp_path / f"{kinds}"), RUN).read()).live][
            -1
        ] == newest, kinds
    forge = Forge()
    forge.record(SEQ["retire"], lambda record: record.update(prev="0" * 64), chain=False)
    write(forge.files, tmp_path / "forked")
    assert [record["body"]["step"] for record in independent_reader.checkpoints(tmp_path / "forked", RUN)] == [
        30,
        20,
        10,
        5,
    ]


def test_the_reader_is_short_and_independent() -> None:
    """The reader has at most 110 lines, and imports only the standard library, msgpack and blake3."""
    source = Path(independent_reader.__file__).read_text()
    assert len(source.splitlines()) <= LINES_MAX
    imported = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add(node.module)
        elif isinstance(node, ast.Name):
            assert node.id not in ("__import__", "eval", "exec"), node.id
    assert imported <= ALLOWED, imported - ALLOWED


def test_the_readers_sizes_are_those_of_the_page() -> None:
    """Every dtype of the page has the same size here as in Relight, and both are on the page."""
    page = (Path(__file__).parents[2] / "docs" / "format.md").read_text()
    for dtype in DTYPES.values():
        assert independent_reader.SIZES.get(dtype.name, 1) == dtype.itemsize, dtype.name
        family = {"int": "`int1`…`int7`", "uint": "`uint1`…`uint7`"}.get(dtype.name.rstrip("1234567"))
        assert f"`{dtype.name}`" in page or family in page, dtype.name


def test_packs_open_as_safetensors(tmp_path: Path) -> None:
    """A pack is a safetensors file: the library reads the same names, shapes and bytes from it."""
    torch = pytest.importorskip("torch")
    safetensors = pytest.importorskip("safetensors")
    write(Forge().files, tmp_path)
    expected_values = values(STEPS["c"])
    with safetensors.safe_open(tmp_path / DIRS["c"] / "pack-00000-000.safetensors", framework="pt") as pack:
        assert set(pack.keys()) == {name for name, *_ in TENSORS}
        for name, dtype, shape, *_ in TENSORS:
            tensor = pack.get_tensor(name)
            assert (tuple(tensor.shape), str(tensor.dtype)) == (shape, f"torch.{dtype}")
            assert bytes(tensor.reshape(-1).view(torch.uint8).tolist()) == expected_values[name]
