"""Malicious, truncated and damaged DCP directories: reading fails with an error within seconds, and executes
nothing."""

from __future__ import annotations

import copy
import os
import pickle
import random
import shutil
import struct
import time
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from relight.errors import CheckpointNotFound, CorruptCheckpoint, RelightError, StoreUnavailable, UnsafeContent
from relight.importers.pickles import AllowedCall, AllowedClass, read_pickle
from relight.integrations import dcp as interop

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")


class Canary:
    """Create a directory when it is unpickled by an unpickler that makes every requested call."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    out = tmp_path / "out"
    dcp.save({"w": torch.arange(12.0).view(3, 4), "n": {"step": 3, "text": "x"}}, checkpoint_id=out)
    return out


def metadata(folder: Path) -> Metadata:
    content = pickle.loads((folder / ".metadata").read_bytes())
    assert isinstance(content, Metadata)
    return content


def put(folder: Path, content: Any) -> None:
    (folder / ".metadata").write_bytes(pickle.dumps(content))


def refused(folder: Path, *kinds: type[RelightError]) -> RelightError:
    started = time.monotonic()
    with pytest.raises(kinds or RelightError) as caught:
        interop.read(folder)
    assert time.monotonic() - started < 5
    return caught.value


def test_the_canary_sings(tmp_path: Path) -> None:
    """Check of the canary itself: an ordinary unpickler runs it."""
    pickle.loads(pickle.dumps(Canary(tmp_path / "sang")))
    assert (tmp_path / "sang").exists()


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_nothing_in_the_metadata_is_executed(folder: Path, tmp_path: Path, protocol: int) -> None:
    """Refuse a call wherever it stands in the metadata, and name the requested function in the error."""
    original = metadata(folder)
    for place in ("alone", "planner_data", "storage_data", "key"):
        changed = copy.deepcopy(original)
        if place == "planner_data":
            changed.planner_data = {"w": (Canary(tmp_path / "sang"),)}
        elif place == "storage_data":
            changed.storage_data[MetadataIndex("v")] = Canary(tmp_path / "sang")
        elif place == "key":
            changed.state_dict_metadata = {Canary(tmp_path / "sang"): 1}  # type: ignore[dict-item]
        (folder / ".metadata").write_bytes(
            pickle.dumps(Canary(tmp_path / "sang") if place == "alone" else changed, protocol=protocol)
        )
        assert "mkdir" in refused(folder, UnsafeContent).what
    assert not (tmp_path / "sang").exists()


class OfOlderPython:
    """An enum member in the form in which Python up to 3.11.3 pickled it."""

    def __reduce__(self) -> Any:
        return getattr, (_MEM_FORMAT_ENCODING, "TORCH_CONTIGUOUS_FORMAT")


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_metadata_of_older_pythons_is_read(folder: Path, protocol: int) -> None:
    """Read metadata from older Pythons in every pickle protocol."""
    changed = metadata(folder)
    assert changed.storage_meta is not None
    changed.storage_meta.modules = [OfOlderPython()]  # type: ignore[list-item]
    (folder / ".metadata").write_bytes(pickle.dumps(changed, protocol=protocol))
    assert interop.read(folder)["n"] == {"step": 3, "text": "x"}


def test_nothing_in_a_value_is_executed(tmp_path: Path) -> None:
    """Refuse a call in a pickled value of the state dict. The other values can still be read."""
    dcp.save(
        {"bad": [Canary(tmp_path / "sang")], "deep": (1, {"x": Canary(tmp_path / "sang")}), "good": 1},
        checkpoint_id=tmp_path / "out",
    )
    assert "mkdir" in refused(tmp_path / "out", UnsafeContent).what
    assert interop.read(tmp_path / "out", only=["good"]) == {"good": 1}
    assert not (tmp_path / "sang").exists()


def test_nothing_in_a_tensors_chunk_is_executed(folder: Path, tmp_path: Path) -> None:
    """Refuse a chunk, which is a file of ``torch.save``, if it contains anything but a tensor."""
    changed = metadata(folder)
    with (folder / "evil.distcp").open("wb") as file:
        torch.save(Canary(tmp_path / "sang"), file)
    length = (folder / "evil.distcp").stat().st_size
    for key in changed.storage_data:
        if key.fqn == "w":
            changed.storage_data[key] = _StorageInfo("evil.distcp", 0, length)
    changed.state_dict_metadata["w"].size = torch.Size([1])  # small enough for its chunk to be read
    changed.state_dict_metadata["w"].chunks = [ChunkStorageMetadata(torch.Size([0]), torch.Size([1]))]
    changed.storage_data = {
        MetadataIndex(key.fqn, [0] if key.fqn == "w" else None): value for key, value in changed.storage_data.items()
    }
    put(folder, changed)
    assert "mkdir" in refused(folder, UnsafeContent).what
    assert not (tmp_path / "sang").exists()


@pytest.mark.parametrize(
    "name",
    ["builtins.eval", "builtins.exec", "os.system", "posix.system", "torch.load", "torch.hub.load", "builtins.__import__", "numpy.load",
     "torch.storage._load_from_bytes", "torch._utils._rebuild_wrapper_subclass", "torch.jit.load", "copyreg._reconstructor"],
)  # fmt: skip
def test_a_function_outside_the_list_is_not_called(name: str) -> None:
    """Refuse a function that is not on the list, also through the NEWOBJ opcode and as a dotted name."""
    module, _, function = name.rpartition(".")
    for code in (
        f"c{module}\n{function}\n(X\x01\0\0\0atR.".encode(),
        b"\x80\x04\x8c"
        + bytes([len(module)])
        + module.encode()
        + b"\x8c"
        + bytes([len(function)])
        + function.encode()
        + b"\x93)\x81.",
        b"\x80\x04\x8c\x05torch\x8c" + bytes([len(name)]) + name.encode() + b"\x93)R.",
    ):
        with pytest.raises(UnsafeContent, match="not on the list"):
            read_pickle(code, {"torch.Size": AllowedCall(tuple)}, "here")


@pytest.mark.parametrize(
    ("code", "why"),
    [
        (b"\x80\x04\x8e\xff\xff\xff\xff\xff\xff\xff\x7f.", "ends too soon"),
        (b"\x80\x04\x8b\xff\xff\xff\x7f" + b"\0" * 100 + b".", "integer"),
        (b"}r\xff\xff\xff\xff0N.", ""),
        (b"(" * 1000, "IndexError"),
        (b"]q\0" + b"h\0a" * 10 + b".", ""),
        (b"N)R.", "call"),
        (b"cbuiltins\ngetattr\n.", "list"),
        (b"(N.", "more than one"),
        (b".", "more than one"),
        (b"", "IndexError"),
        (b"\x80\x04P1\n.", "opcode"),
        (b"cA\nB\n)\x81}b}b.", ""),
        (b"\x85.", ""),
    ],
)
def test_malformed_pickles(code: bytes, why: str) -> None:
    """Lengths beyond the input, missing marks and unneeded opcodes give an error or a harmless value."""
    try:
        read_pickle(code, {"A.B": AllowedClass("B")}, "here")
    except UnsafeContent as error:
        assert why in error.what
    else:
        assert not why


def test_values_that_multiply(tmp_path: Path) -> None:
    """Refuse nested values that are small in the file and huge or infinite as a tree. The first list contains itself
    twice at each of 30 levels; the second contains itself."""
    grown: list[Any] = [1]
    for _ in range(30):
        grown = [grown, grown]
    endless: list[Any] = []
    endless.append(endless)
    for number, value in enumerate(((grown,), (endless,))):
        dcp.save({"v": value}, checkpoint_id=tmp_path / str(number))
        refused(tmp_path / str(number), UnsafeContent)


def test_keys_that_collide(tmp_path: Path) -> None:
    """Refuse many keys with one hash, because inserting them takes quadratic time."""
    dcp.save({"v": ({index * (2**61 - 1): 1 for index in range(1, 200)},)}, checkpoint_id=tmp_path / "out")
    assert "collide" in refused(tmp_path / "out", UnsafeContent).what


def _outside(content: Metadata) -> None:
    for info in content.storage_data.values():
        info.relative_path = "../secret.distcp"


def _absolute(content: Metadata) -> None:
    for info in content.storage_data.values():
        info.relative_path = "/etc/passwd"


def _huge(content: Metadata) -> None:
    content.state_dict_metadata["w"].size = torch.Size([2**40, 4])
    content.state_dict_metadata["w"].chunks = [ChunkStorageMetadata(torch.Size([0, 0]), torch.Size([2**40, 4]))]


def _gap(content: Metadata) -> None:
    content.state_dict_metadata["w"].size = torch.Size([30, 4])


def _one_place(content: Metadata) -> None:
    info = next(value for key, value in content.storage_data.items() if key.fqn == "w")
    chunks = [ChunkStorageMetadata(torch.Size([3 * n, 0]), torch.Size([3, 4])) for n in range(1000)]
    content.state_dict_metadata["w"] = TensorStorageMetadata(
        TensorProperties(torch.float32), torch.Size([3000, 4]), chunks
    )
    content.storage_data |= {MetadataIndex("w", chunk.offsets): info for chunk in chunks}


def _beyond(content: Metadata) -> None:
    next(iter(content.storage_data.values())).offset = 2**50


def _negative(content: Metadata) -> None:
    next(iter(content.storage_data.values())).offset = -1


def _no_storage(content: Metadata) -> None:
    content.storage_data = {}


def _long_list(content: Metadata) -> None:
    content.planner_data["w"] = ("list", 2**40)


def _deep(content: Metadata) -> None:
    content.planner_data["n.step"] = ("a",) * 100_000


def _other_dtype(content: Metadata) -> None:
    content.state_dict_metadata["w"].properties = TensorProperties(torch.int32)


def _transformed(content: Metadata) -> None:
    next(iter(content.storage_data.values())).transform_descriptors = ["zstd"]


def _swapped(content: Metadata) -> None:
    content.state_dict_metadata["w"] = BytesStorageMetadata()


@pytest.mark.parametrize(
    "change",
    [
        _outside,
        _absolute,
        _huge,
        _gap,
        _one_place,
        _beyond,
        _negative,
        _no_storage,
        _long_list,
        _other_dtype,
        _transformed,
        _swapped,
    ],
)
def test_wrong_metadata_is_refused(folder: Path, change: Callable[[Metadata], None]) -> None:
    """Refuse wrong places, sizes, shapes and kinds before memory is allocated for them."""
    content = metadata(folder)
    change(content)
    put(folder, content)
    refused(folder)


def test_paths_that_nest_without_end_are_left_flat(folder: Path) -> None:
    """Return a value under its flat name if its path is nested too deeply for a tree."""
    content = metadata(folder)
    _deep(content)
    put(folder, content)
    assert interop.read(folder)["n.step"] == 3


def test_files_that_are_missing_cut_or_damaged(folder: Path, tmp_path: Path) -> None:
    """Name the missing, truncated or damaged file. A checksum detects a flipped bit in a tensor."""
    data = next(folder.glob("*.distcp"))
    original = data.read_bytes()
    offset = original.index(struct.pack("<3f", 1, 2, 3))
    for change, kind in (
        (original[:-1], CorruptCheckpoint),
        (original[: len(original) // 2], CorruptCheckpoint),
        (b"", CorruptCheckpoint),
        (original[:offset] + b"\x01" + original[offset + 1 :], CorruptCheckpoint),
        (b"\0" * len(original), UnsafeContent),
    ):
        data.write_bytes(change)
        refused(folder, kind)
    data.unlink()
    assert data.name in refused(folder, CorruptCheckpoint).where
    data.symlink_to(tmp_path / "elsewhere")
    refused(folder, StoreUnavailable)
    data.unlink()
    os.mkfifo(data)
    refused(folder, UnsafeContent)
    (folder / ".metadata").unlink()
    refused(folder, CheckpointNotFound)


def test_wrong_zip_archives_are_refused(folder: Path) -> None:
    """Refuse compressed entries, a missing storage or one with a wrong size, and strides that leave it."""
    forged = metadata(folder)
    key = next(index for index in forged.storage_data if index.fqn == "w")

    def archive(content: bytes, storage: bytes | None, how: int = zipfile.ZIP_STORED) -> None:
        with zipfile.ZipFile(folder / "evil.distcp", "w", how) as file:
            file.writestr("a/data.pkl", content)
            if storage is not None:
                file.writestr("a/data/0", storage)
        forged.storage_data[key] = _StorageInfo("evil.distcp", 0, (folder / "evil.distcp").stat().st_size)
        put(folder, forged)

    def pickled(
        count: int = 12, shape: bytes = b"(K\x03K\x04t", stride: bytes = b"(K\x04K\x01t", offset: bytes = b"K\0"
    ) -> bytes:
        storage = b"(X\x07\0\0\0storagectorch\nFloatStorage\nX\x01\0\0\x000X\x03\0\0\0cpuK" + bytes([count]) + b"tQ"
        return (
            b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n("
            + storage
            + offset
            + shape
            + stride
            + b"\x89ccollections\nOrderedDict\n)RtR."
        )

    archive(pickled(), struct.pack("<12f", *range(12)))
    assert torch.equal(interop.read(folder)["w"], torch.arange(12.0).view(3, 4))
    for content, storage in (
        (pickled(), None),
        (pickled(), b"\0" * 44),
        (pickled(200), b"\0" * 48),
        (pickled(offset=b"K\x01"), b"\0" * 48),
        (pickled(stride=b"(K\x40K\x01t"), b"\0" * 48),
        (pickled(stride=b"(J\xff\xff\xff\xffK\x01t"), b"\0" * 48),
        (pickled(shape=b"(M\xff\xffM\xff\xfft", stride=b"(K\0K\0t"), b"\0" * 48),
        (pickled(1, stride=b"(K\0K\0t"), b"\0" * 4),
        (pickled(shape=b"(K\x0ct"), b"\0" * 48),
    ):
        archive(content, storage)
        refused(folder)
    archive(pickled(), b"\0" * 48, zipfile.ZIP_DEFLATED)
    assert "compressed" in refused(folder, UnsafeContent).what


def test_random_damage(folder: Path, tmp_path: Path) -> None:
    """Return the state dict or raise a Relight error for randomly changed, deleted or inserted bytes, and execute
    nothing."""
    rng = random.Random(3)
    originals = {path.name: path.read_bytes() for path in folder.iterdir()}
    outcomes = {True: 0, False: 0}
    for _ in range(400):
        name = rng.choice(sorted(originals))
        data = bytearray(originals[name])
        for _ in range(rng.choice((1, 1, 1, 4, 30))):
            offset = rng.randrange(len(data))
            how = rng.random()
            if how < 0.7:
                data[offset] = rng.randrange(256)
            elif how < 0.85:
                del data[offset : offset + rng.randrange(1, 9)]
            else:
                data[offset:offset] = rng.randbytes(rng.randrange(1, 9))
        (folder / name).write_bytes(data)
        try:
            interop.read(folder)
            outcomes[True] += 1
        except RelightError:
            outcomes[False] += 1
        (folder / name).write_bytes(originals[name])
    assert min(outcomes.values()) > 20
    shutil.rmtree(folder)


def test_ordered_dicts_and_versions_are_values(tmp_path: Path) -> None:
    """Accept harmless types that DCP's users often save."""
    state = OrderedDict(a=OrderedDict(b=1), v=(OrderedDict(x=2),))
    dcp.save(state, checkpoint_id=tmp_path / "out")
    assert interop.read(tmp_path / "out") == {"a": {"b": 1}, "v": ({"x": 2},)}
