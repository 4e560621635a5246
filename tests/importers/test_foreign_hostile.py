"""Malicious, cut and damaged files are refused with an error within a moment; nothing is executed or lost."""

from __future__ import annotations

import io
import json
import os
import pickle
import random
import shutil
import struct
import subprocess
import sys
import time
import types
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from foreign_state import GOLDEN
from safetensors.torch import save_file

import relight
from relight.errors import CorruptCheckpoint, IncompatibleState, RelightError, UnsafeContent
from relight.format.crc import combined, crc32
from relight.importers import deepspeed, detect, import_checkpoint
from relight.importers.content import Content, ImportedComponent
from relight.store import open_bytes

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")


class Canary:
    """Makes a folder if an unpickler calls the function that its pickle names."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def archive(path: Path, pickled: bytes, **entries: bytes) -> Path:
    """Write a file in the format of ``torch.save``, with this pickle."""
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("a/data.pkl", pickled)
        file.writestr("a/version", "3\n")
        for name, data in entries.items():
            file.writestr(f"a/data/{name}", data)
    return path


def refused(path: Path, tmp_path: Path, *kinds: type[RelightError]) -> RelightError:
    """Check that an import soon raises a Relight error, and leaves nothing in the store. Return the error."""
    started = time.process_time()  # of this process alone: other work may keep it waiting
    with pytest.raises(kinds or RelightError) as error:
        import_checkpoint(detect(path), open_bytes(str(tmp_path / "store")), "run")
    assert time.process_time() - started < 5
    assert not list((tmp_path / "store").glob("run/*-e*"))
    return error.value


def by_hand(sang: Path) -> dict[str, bytes]:
    """Return pickles that execute code in an ordinary unpickler, in every known way, by name."""
    text = str(sang)
    short = b"\x8c" + bytes([len(text)]) + text.encode()
    line = f"'{text}'\n".encode()
    code = f"__import__('os').mkdir({text!r})"
    program = b"X" + struct.pack("<I", len(code)) + code.encode()
    return {
        "global, reduce": b"\x80\x02cos\nmkdir\n" + short + b"\x85R.",
        "stack global": b"\x80\x04\x8c\x02os\x8c\x05mkdir\x93" + short + b"\x85R.",
        "inst": b"(S" + line + b"ios\nmkdir\n.",
        "obj": b"(cos\nmkdir\nS" + line + b"o.",
        "newobj of a call": b"\x80\x02cos\nmkdir\n" + short + b"\x85\x81.",
        "eval": b"\x80\x02cbuiltins\neval\n" + program + b"\x85R.",
        "exec": b"\x80\x02cbuiltins\nexec\n" + program + b"\x85R.",
        "old builtins": b"\x80\x02c__builtin__\neval\n" + program + b"\x85R.",
        "dotted name": b"\x80\x04\x8c\x08builtins\x8c\x0deval.__call__\x93" + program + b"\x85R.",
        "getattr": b"\x80\x02cbuiltins\ngetattr\ncos\n__dict__\n\x8c\x05mkdir\x86R" + short + b"\x85R.",
        "class by upper case": b"\x80\x02csubprocess\nPopen\n(]\x8c\x05mkdira" + short + b"attR.",
        "import module": b"\x80\x02cimportlib\nimport_module\n\x8c\x04this\x85R.",
        "run a path": b"\x80\x02crunpy\nrun_path\n" + short + b"\x85R.",
        "partial": b"\x80\x02cfunctools\npartial\ncos\nmkdir\n" + short + b"\x86R)R.",
        "caller": b"\x80\x02coperator\nmethodcaller\n\x8c\x05mkdir" + short + b"\x86R.",
        "code": b"\x80\x02ctypes\nFunctionType\n)R.",
        "torch itself": b"\x80\x02ctorch.hub\nload\n" + short + b"\x85R.",
        "storage within": b"\x80\x02ctorch.storage\n_load_from_bytes\n" + short + b"\x85R.",
        "pip": b"\x80\x02cpip\nmain\n(]\x8c\x07installatR.",
        "numpy": b"\x80\x02cnumpy.testing._private.utils\nrunstring\n" + program + b"}\x86R.",
        "copyreg": b"\x80\x02ccopy_reg\n_reconstructor\ncos\nsystem\ncbuiltins\nobject\nN\x87R.",
        "extension": b"\x80\x02\x82\x01.",
        "build": b"\x80\x02}cos\nmkdir\nb.",
        "persistent": b"\x80\x02" + short + b"Q.",
        "factory": b"\x80\x02ccollections\ndefaultdict\ncos\ngetcwd\n\x85R\x8c\x01xcos\nmkdir\ns.",
    }


def carriers(tmp_path: Path) -> dict[str, Callable[[bytes], Path]]:
    """Return, for each place that may have a pickle, a function that writes a checkpoint with a given pickle there."""

    def copied(name: str, inner: str) -> Callable[[bytes], Path]:
        def put(pickled: bytes) -> Path:
            target = tmp_path / "carrier"
            shutil.rmtree(target, ignore_errors=True)
            shutil.copytree(GOLDEN / name, target)
            archive(next(target.rglob(inner)), pickled)
            return target

        return put

    def old(pickled: bytes) -> Path:
        torch.save({}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
        head = (tmp_path / "old.pt").read_bytes()
        (tmp_path / "old.pt").write_bytes(head[: head.index(b"\x80\x02}q\x00.")] + pickled + pickle.dumps([], 2))
        return tmp_path / "old.pt"

    def metadata(pickled: bytes) -> Path:
        folder = tmp_path / "dcp"
        dcp.save({"w": torch.ones(3)}, checkpoint_id=folder)
        (folder / ".metadata").write_bytes(pickled)
        return folder

    return {
        "torch": lambda pickled: archive(tmp_path / "x.pt", pickled),
        "old torch": old,
        "dcp": metadata,
        "trainer's optimizer": copied("hugging/checkpoint-3", "optimizer.pt"),
        "trainer's generators": copied("hugging/checkpoint-3", "rng_state.pth"),
        "accelerate's generators": copied("accel/state", "random_states_0.pkl"),
        "zero": copied("deep/stage2", "*rank_1*optim_states.pt"),
        "universal": copied("deep/universal2", "optimizer_state.pt"),
    }


NAMES = list(by_hand(Path("/x")))


@pytest.mark.parametrize("name", ["global, reduce", "stack global", "inst", "obj", "eval", "exec", "old builtins"])
def test_the_canary_sings(tmp_path: Path, name: str) -> None:
    """An ordinary unpickler executes these pickles, so the check can fail."""
    pickle.loads(by_hand(tmp_path / "sang")[name])
    assert (tmp_path / "sang").exists()


@pytest.mark.parametrize("carrier", list(carriers(Path("/x"))))
def test_no_trick_runs_anything(tmp_path: Path, carrier: str) -> None:
    """Every way to execute code, in every place that may have a pickle, is refused, and no code runs."""
    put = carriers(tmp_path)[carrier]
    for name, pickled in by_hand(tmp_path / "sang").items():
        refused(put(pickled), tmp_path)
        assert not (tmp_path / "sang").exists(), name


@pytest.mark.parametrize("protocol", [0, 1, 2, 3, 4, 5])
def test_an_object_with_a_reduce_of_its_own(tmp_path: Path, protocol: int) -> None:
    """A pickled function call deep in an otherwise good state is refused, and the error names the function."""
    state = {"model": {"w": 1}, "deep": [{"x": (Canary(tmp_path / "sang"),)}]}
    error = refused(archive(tmp_path / "x.pt", pickle.dumps(state, protocol)), tmp_path, UnsafeContent)
    assert protocol < 2 or "mkdir" in error.what
    assert not (tmp_path / "sang").exists()


class Config(dict):
    """A class of a script's own."""


def test_objects_of_unknown_classes_are_left_out_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint with a script's own objects is imported without them."""
    Config.__module__ = "my_project.settings"
    for name in ("my_project", "my_project.settings"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setattr(sys.modules["my_project.settings"], "Config", Config, raising=False)
    config = Config(depth=3)
    config.extra = 1  # type: ignore[attr-defined]
    torch.save({"model": {"w": torch.ones(2)}, "config": config, "epoch": 4}, tmp_path / "x.pt")
    detected = detect(tmp_path / "x.pt")
    assert detected.tensors == 1 and [
        what for what, why in detected.left_out if "my_project.settings.Config" in why
    ] == ["imported/config"]
    report = import_checkpoint(detected, open_bytes(str(tmp_path / "store")), "run")
    assert report.tensors == 1


@pytest.mark.parametrize(
    "payload",
    [b"]" * 40_000_000, b"N\x94" * 20_000_000, b"(" * 40_000_000, b"}" * 30_000_000, b"K\x01\x85" * 13_000_000],
)
def test_a_pickle_that_asks_for_much_memory(tmp_path: Path, payload: bytes) -> None:
    """Such a pickle is refused within seconds, with 1.5 GB of address space."""
    archive(tmp_path / "x.pt", b"\x80\x04" + payload + b".")
    script = (
        "import resource, sys; from relight.importers import detect; from relight.errors import RelightError\n"
        "import relight.importers.single_file\n"
        "resource.setrlimit(resource.RLIMIT_AS, (3 << 29,) * 2)\n"
        "try:\n    detect(sys.argv[1])\nexcept RelightError as error:\n    print('REFUSED', error.what)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "x.pt")], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout.startswith("REFUSED"), done.stderr[-500:]


def test_values_that_repeat_a_list(tmp_path: Path) -> None:
    """Sixty levels of lists that contain a list twice are refused before they are traversed."""
    deep = b"\x80\x04]\x94" + b"".join(b"]\x94(h" + bytes([i]) + b"h" + bytes([i]) + b"e" for i in range(60)) + b"."
    with pytest.raises(UnsafeContent):
        detect(archive(tmp_path / "x.pt", b"\x80\x04}\x8c\x01a" + deep[2:-1] + b"s."))


@pytest.mark.parametrize("use", ["as a key", "in a set", "as a value"])
def test_tuples_in_tuples_in_tuples(tmp_path: Path, use: str) -> None:
    """A million levels are refused, and the process survives: hashing them by recursion would exhaust the stack."""
    deep = b")" + b"\x85" * 1_000_000
    pickled = {
        "as a key": b"}" + deep + b"K\x01s",
        "in a set": b"\x8f(" + deep + b"\x90",
        "as a value": b"}K\x01" + deep + b"s",
    }[use]
    archive(tmp_path / "x.pt", b"\x80\x04" + pickled + b".")
    script = "import sys; from relight.importers import detect; from relight.errors import RelightError\n"
    script += "try:\n    detect(sys.argv[1])\nexcept RelightError:\n    print('REFUSED')\n"
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "x.pt")], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout == "REFUSED\n", (done.returncode, done.stderr[-300:])


@pytest.mark.parametrize("use", ["as a key", "in a set", "in a call of set", "in an OrderedDict"])
def test_keys_that_contain_one_tuple_again_and_again(tmp_path: Path, use: str) -> None:
    """A tuple of the same tuple twice, at each of many levels, is refused as a key: hashing it would take years."""
    doubled = b"K\x01\x85\x94" + b"".join(b"0h" + bytes([i]) + b"h" + bytes([i]) + b"\x86\x94" for i in range(20))
    pickled = {
        "as a key": b"}" + doubled + b"K\x01s",
        "in a set": b"\x8f(" + doubled + b"\x90",
        "in a call of set": b"cbuiltins\nset\n]" + doubled + b"a\x85R",
        "in an OrderedDict": b"ccollections\nOrderedDict\n]]" + doubled + b"aK\x01aa\x85R",
    }[use]
    error = refused(archive(tmp_path / "x.pt", b"\x80\x04" + pickled + b"."), tmp_path, UnsafeContent)
    assert "a key of more than 1000 values" in error.what


def test_keys_that_are_tuples_are_taken(tmp_path: Path) -> None:
    """Tuples of a few values, also of tuples, remain keys and members of sets."""
    table = {("layers", (0, 1)): 2, ("layers", (0, 2)): 3}
    torch.save({"model": {"w": torch.ones(2)}, "table": table, "seen": {(1, (2, 3))}}, tmp_path / "x.pt")
    import_checkpoint(detect(tmp_path / "x.pt"), open_bytes(str(tmp_path / "store")), "run")
    imported = relight.load(tmp_path / "store" / "run")["imported"]
    assert imported == {"table": table, "seen": {(1, (2, 3))}}


@pytest.mark.parametrize("count", [500, 100_000])
def test_dicts_in_dicts_in_dicts(tmp_path: Path, count: int) -> None:
    """Deep nesting is refused in each place that is read, at any depth."""
    dicts = b"}\x8c\x05model" * count + b"}" + b"s" * count
    refused(archive(tmp_path / "x.pt", b"\x80\x04" + dicts + b"."), tmp_path, UnsafeContent)
    folder = tmp_path / "mega"
    shutil.copytree(GOLDEN / "mega" / "iter_0000100", folder)
    archive(folder / "common.pt", b"\x80\x04" + dicts.replace(b"model", b"other") + b".")
    refused(folder, tmp_path)
    legacy = tmp_path / "iter_0000007" / "mp_rank_00"
    legacy.mkdir(parents=True)
    archive(legacy / "model_optim_rng.pt", b"\x80\x04" + dicts + b".")
    refused(legacy.parent, tmp_path)


def test_values_that_repeat_a_dict(tmp_path: Path) -> None:
    """Sixty levels, each with the level below twice, are refused before they are traversed, in each kind of file."""
    nested: dict[str, Any] = {"w": torch.ones(1)}
    for _ in range(60):
        nested = {"a": nested, "b": nested}
    saved = io.BytesIO()
    torch.save({"model": nested, "iteration": 1}, saved)
    legacy = tmp_path / "iter_0000001" / "mp_rank_00"
    legacy.mkdir(parents=True)
    (legacy / "model_optim_rng.pt").write_bytes(saved.getvalue())
    refused(legacy.parent, tmp_path, UnsafeContent)
    (tmp_path / "x.pt").write_bytes(saved.getvalue())
    refused(tmp_path / "x.pt", tmp_path, UnsafeContent)
    state = tmp_path / "state"
    state.mkdir()
    torch.save({"step": 1}, state / "random_states_0.pkl")
    torch.save(nested, state / "scheduler.bin")
    refused(state, tmp_path, UnsafeContent)


def test_a_module_within_itself(tmp_path: Path) -> None:
    """A module that contains itself twice is refused: a traversal would never end."""
    model = torch.nn.Sequential(torch.nn.Linear(1, 1))
    model._modules["a"] = model._modules["b"] = model
    saved = io.BytesIO()
    torch.save(model, saved)
    (tmp_path / "x.pt").write_bytes(saved.getvalue())
    refused(tmp_path / "x.pt", tmp_path, UnsafeContent)


def tensor_pickle(count: int, shape: tuple[int, ...], stride: tuple[int, ...], offset: int = 0) -> bytes:
    """Return the pickle of a tensor ``w`` in a storage ``0`` of ``count`` floats, with any shape, stride and offset."""
    saved = io.BytesIO()
    torch.save({"w": torch.zeros(max(count, 1))}, saved)
    with zipfile.ZipFile(saved) as file:
        data = file.read(next(name for name in file.namelist() if name.endswith("data.pkl")))

    def number(value: int) -> bytes:
        return (
            b"\x8a"
            + bytes([max(1, (value.bit_length() + 8) // 8)])
            + value.to_bytes(max(1, (value.bit_length() + 8) // 8), "little", signed=True)
        )

    def row(values: tuple[int, ...]) -> bytes:
        return b"(" + b"".join(map(number, values)) + b"t"

    head, _, tail = data.partition(b"QK\x00")
    pickled = head + b"Q" + number(offset) + row(shape) + row(stride) + tail[tail.index(b"\x89") :]
    return pickled


@pytest.mark.parametrize(
    ("shape", "stride", "offset"),
    [((5,), (1,), 0), ((4,), (2,), 0), ((4,), (1,), 1), ((2**40,), (1,), 0), ((2**32, 2**32, 0), (1, 1, 1), 0), ((-1,), (1,), 0), ((4,), (-1,), 3),
     ((1 << 20, 1 << 20), (1, 1), 0), ((2,), (1,), -4), ((1 << 30,), (0,), 0)],
)  # fmt: skip
def test_tensors_beyond_their_storage(
    tmp_path: Path, shape: tuple[int, ...], stride: tuple[int, ...], offset: int
) -> None:
    """Shapes, strides and offsets that exceed the storage, or make a huge tensor of a small one, are refused."""
    refused(archive(tmp_path / "x.pt", tensor_pickle(4, shape, stride, offset), **{"0": bytes(16)}), tmp_path)


@pytest.mark.parametrize(
    ("shape", "stride", "offset"),
    [((2, 0, 4), (0, 0, 1), 1000), ((2, 0), (0, 1), 4), ((0,), (1,), 2**40), ((3, 0, 2), (5, 0, 0), 0)],
)
def test_an_empty_tensor_reads_nothing(
    tmp_path: Path, shape: tuple[int, ...], stride: tuple[int, ...], offset: int
) -> None:
    """An empty tensor is imported empty, with its shape, for any strides and offset."""
    secret = b"outside of the storage" * 1000
    detected = detect(
        archive(tmp_path / "x.pt", tensor_pickle(4, shape, stride, offset), **{"0": bytes(16), "1": secret})
    )
    import_checkpoint(detected, open_bytes(str(tmp_path / "store")), "run")
    (component,) = relight.load(tmp_path / "store/run").values()
    assert tuple(component["w"].shape) == shape
    assert not any(secret[:16] in pack.read_bytes() for pack in (tmp_path / "store").rglob("*.safetensors"))


def test_one_that_stays_within_it_comes_in(tmp_path: Path) -> None:
    """A tensor within its storage is imported, so the check above can fail."""
    detected = detect(archive(tmp_path / "x.pt", tensor_pickle(4, (4,), (1,)), **{"0": bytes(16)}))
    assert detected.tensors == 1 and detected.bytes == 16


def test_a_zip_with_wrong_sizes_or_positions(tmp_path: Path) -> None:
    """A zip bomb, overlapping entries, and positions outside the file are refused."""
    good = tmp_path / "good.pt"
    torch.save({"w": torch.arange(1000.0), "v": torch.arange(1000.0)}, good)
    detect(good)
    with zipfile.ZipFile(tmp_path / "bomb.pt", "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("a/data.pkl", tensor_pickle(4, (4,), (1,)))
        file.writestr("a/data/0", bytes(50 << 20))
    refused(tmp_path / "bomb.pt", tmp_path, UnsafeContent)
    data = good.read_bytes()
    directory = data.index(b"PK\x01\x02")
    entries = [start for start in range(directory, len(data)) if data[start : start + 4] == b"PK\x01\x02"]
    storages = [start for start in entries if b"/data/" in data[start + 46 : start + 80]]
    overlapping = bytearray(data)
    overlapping[storages[1] + 42 : storages[1] + 46] = data[storages[0] + 42 : storages[0] + 46]
    (tmp_path / "overlap.pt").write_bytes(overlapping)
    assert "overlap" in refused(tmp_path / "overlap.pt", tmp_path, UnsafeContent).what
    for field in (20, 24, 42):
        outside = bytearray(data)
        outside[storages[1] + field : storages[1] + field + 4] = struct.pack("<I", 0x7FFFFFFF)
        (tmp_path / "outside.pt").write_bytes(outside)
        refused(tmp_path / "outside.pt", tmp_path)


def test_a_way_out_in_a_name_leads_nowhere(tmp_path: Path) -> None:
    """A storage's name with ``..`` is a name like others: nothing is unpacked, and no file is made."""
    with zipfile.ZipFile(tmp_path / "x.pt", "w") as file:
        file.writestr("a/data.pkl", tensor_pickle(4, (4,), (1,)))
        file.writestr("a/data/0", bytes(16))
        file.writestr("../../../escaped", b"x")
    import_checkpoint(detect(tmp_path / "x.pt"), open_bytes(str(tmp_path / "store")), "run")
    assert not list(tmp_path.parent.parent.glob("escaped"))


def header(tmp_path: Path, fields: Any, data: bytes = bytes(16), length: int | None = None) -> Path:
    """Write a safetensors file with this header."""
    text = fields if isinstance(fields, bytes) else json.dumps(fields).encode()
    path = tmp_path / "x.safetensors"
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


F = {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}


@pytest.mark.parametrize(
    "fields",
    [
        {"w": {**F, "data_offsets": [0, 17]}}, {"w": {**F, "data_offsets": [8, 24]}}, {"w": {**F, "data_offsets": [-16, 0]}}, {"w": {**F, "shape": [-4]}},
        {"w": {**F, "shape": [2**62, 4]}}, {"w": {**F, "dtype": "F33"}}, {"w": F, "v": F}, {"w": {**F, "shape": [2], "data_offsets": [0, 8]}}, {"w": 3},
        {"w": {**F, "shape": "4"}}, [1], {"w": F, "__metadata__": {"a": 1}}, b'{"w":' + b"[" * 100_000, b'{"w":1,"w":1}',
        b'{"a":' + b"1,".join([b'"b":'] * 9) + b"}", b"{" + b",".join(b'"k%d":[]' % i for i in range(200_000)) + b"}", {},
        {"w": {**F, "shape": [2**63]}}, {"w": {**F, "shape": [1] * 100}}, b"{\xff\xfe}", {"\ud800": F},
    ],
    ids=lambda fields: str(fields)[:40],
)  # fmt: skip
def test_invalid_safetensors_headers(tmp_path: Path, fields: Any) -> None:
    """Overlaps, holes, lengths that differ from the shapes, absurd numbers and endless nesting are refused."""
    refused(header(tmp_path, fields), tmp_path)


def test_a_safetensors_header_longer_than_its_file(tmp_path: Path) -> None:
    """The header is refused before memory is allocated for it."""
    refused(header(tmp_path, {"w": F}, length=2**40), tmp_path)
    refused(header(tmp_path, {"w": F}, data=bytes(12)), tmp_path, CorruptCheckpoint)
    detect(header(tmp_path, {"w": F}))


@pytest.mark.parametrize(
    "name",
    [
        "../outside.safetensors",
        "/etc/passwd",
        "sub/x.safetensors",
        "a\\b",
        "",
        ".",
        "..",
        "missing.safetensors",
        3,
        None,
    ],
)
def test_an_index_that_names_files_elsewhere(tmp_path: Path, name: Any) -> None:
    """Names of shards outside the folder, or of missing files, are refused."""
    save_file({"w": torch.ones(2)}, tmp_path / "outside.safetensors")
    folder = tmp_path / "model"
    (folder / "sub").mkdir(parents=True)
    save_file({"w": torch.ones(2)}, folder / "sub" / "x.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": name}}))
    refused(folder, tmp_path)


def test_links_are_not_followed(tmp_path: Path) -> None:
    """Links to a shard or to another checkpoint's folder are refused, with a hint on what to do."""
    folder = tmp_path / "model"
    folder.mkdir()
    save_file({"w": torch.ones(2)}, tmp_path / "other.safetensors")
    (folder / "model.safetensors").symlink_to(tmp_path / "other.safetensors")
    assert "cp -rL" in refused(folder, tmp_path, UnsafeContent).hint
    (folder / "model.safetensors").unlink()
    os.mkfifo(folder / "model.safetensors")
    refused(folder, tmp_path, UnsafeContent)
    shutil.copytree(GOLDEN / "deep" / "stage1", tmp_path / "zero")
    (tmp_path / "zero" / "latest").write_text("../hidden")
    refused(tmp_path / "zero", tmp_path, UnsafeContent)


def test_a_link_that_the_user_names_is_followed(tmp_path: Path) -> None:
    """A named link such as ``latest -> checkpoint-3`` is followed. Only links inside a checkpoint are refused."""
    (tmp_path / "latest").symlink_to(GOLDEN / "hugging" / "checkpoint-3")
    assert detect(tmp_path / "latest").step == 3


def test_a_file_that_changes_during_the_import_is_refused(tmp_path: Path) -> None:
    """If the file was replaced between detection and the end of the import, nothing is committed."""
    save_file({"w": torch.ones(2)}, tmp_path / "x.safetensors")
    detected = detect(tmp_path / "x.safetensors")
    save_file({"w": torch.zeros(2)}, tmp_path / "y.safetensors")
    os.replace(tmp_path / "y.safetensors", tmp_path / "x.safetensors")
    with pytest.raises(CorruptCheckpoint, match="changed"):
        import_checkpoint(detected, open_bytes(str(tmp_path / "store")), "run")
    assert not list((tmp_path / "store").glob("run/*-e*"))


@pytest.mark.parametrize("what", ["empty file", "text", "empty folder", "folder of runs", "nothing"])
def test_a_path_without_a_checkpoint_is_reported(tmp_path: Path, what: str) -> None:
    """The error describes what is at the path."""
    path = tmp_path / "it"
    if what == "empty file":
        path.touch()
    elif what == "text":
        path.write_text("hello " * 100)
    elif what != "nothing":
        path.mkdir()
    if what == "folder of runs":
        (path / "checkpoint-500").mkdir()
    with pytest.raises(RelightError) as error:
        detect(path)
    assert (what == "nothing") != isinstance(error.value, IncompatibleState)
    assert what != "folder of runs" or "checkpoint-500" in error.value.hint


def test_checksums_are_put_together(tmp_path: Path) -> None:
    """The combined checksum of two pieces equals zlib's checksum of their concatenation."""
    chance = random.Random(1)
    for _ in range(200):
        data = chance.randbytes(chance.randrange(3000))
        cut = chance.randint(0, len(data))
        assert combined(crc32(data[:cut]), crc32(data[cut:]), len(data) - cut) == crc32(data) == zlib.crc32(data)


@pytest.mark.parametrize("where", [0.5, 0.2, 0.99])
def test_a_flipped_bit_in_a_tensor_is_noticed(tmp_path: Path, where: float) -> None:
    """Bytes are compared with the checksums in torch's zip before the commit, also for several slabs."""
    big = torch.arange(10_000_000, dtype=torch.float32)
    torch.save({"w": big, "v": torch.arange(30.0)}, tmp_path / "x.pt")
    data = bytearray((tmp_path / "x.pt").read_bytes())
    begin = data.index(bytes(big[:8].numpy().tobytes()))
    data[begin + int(where * 40_000_000)] ^= 4
    (tmp_path / "x.pt").write_bytes(data)
    assert "checksum" in refused(tmp_path / "x.pt", tmp_path, CorruptCheckpoint).what


def test_a_file_without_checksums_is_imported(tmp_path: Path) -> None:
    """A file without checksums, which torch can write, is imported."""
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"w": torch.ones(3)}, tmp_path / "x.pt")
    finally:
        torch.serialization.set_crc32_options(True)
    assert import_checkpoint(detect(tmp_path / "x.pt"), open_bytes(str(tmp_path / "store")), "run").tensors == 1


def sources(tmp_path: Path) -> dict[str, Path]:
    """Return a checkpoint of each format."""
    torch.save({"model": {"w": torch.randn(9, 3).t(), "v": torch.ones(2).expand(3, 2)}, "step": 3}, tmp_path / "x.pt")
    torch.save({"w": torch.randn(9, 3)}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    save_file({"w": torch.randn(5), "v": torch.ones(2, 2)}, tmp_path / "x.safetensors")
    dcp.save({"model": {"w": torch.randn(4, 3)}, "n": {"step": 3, "text": "x"}}, checkpoint_id=tmp_path / "dcp")
    paths = {
        "torch": tmp_path / "x.pt",
        "old": tmp_path / "old.pt",
        "safetensors": tmp_path / "x.safetensors",
        "dcp": tmp_path / "dcp",
    }
    return paths | {name: GOLDEN / name for name in GOLDEN_NAMES}


GOLDEN_NAMES = (
    "hugging/checkpoint-3",
    "hugging/sharded",
    "light/last.ckpt",
    "accel/state",
    "deep/stage2",
    "deep/stage3",
    "deep/universal2",
    "mega_ranks/tp2_pp2",
    "orb/files3",
    "snap/snapshot",
    "mega",
    "orb/files",
    "orb/ocdbt",
    "orb/ocdbt3",
)
"""Stored checkpoints that are damaged: at least one of each directory."""
COUNT = int(os.environ.get("RELIGHT_TEST_FUZZ", "60"))
KEYS = ["torch", "old", "safetensors", "dcp", *GOLDEN_NAMES]


def test_a_checkpoint_of_each_framework_is_damaged() -> None:
    """A new framework's stored checkpoint belongs in ``GOLDEN_NAMES``."""
    assert {name.split("/")[0] for name in GOLDEN_NAMES} == {path.name for path in GOLDEN.iterdir() if path.is_dir()}


@pytest.mark.parametrize("name", KEYS)
def test_wounded_files_come_in_or_are_refused(tmp_path: Path, name: str) -> None:
    """Files with any changed, cut or doubled bytes give a checkpoint or a Relight error, in bounded time and memory."""
    (tmp_path / "work").mkdir()
    command = [
        sys.executable,
        str(Path(__file__).parent / "foreign_fuzz.py"),
        str(sources(tmp_path)[name]),
        "1",
        str(COUNT),
        str(tmp_path / "work"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=max(280, 2 * COUNT), check=False)
    assert done.returncode == 0, done.stdout[-500:] + done.stderr[-1500:]
    came, refused_count = map(int, done.stdout.split())
    assert came + refused_count == COUNT and refused_count > 0


def test_names_of_tied_weights_may_be_anything() -> None:
    """``shared_params`` of a damaged DeepSpeed checkpoint may have invalid names: they tie nothing."""
    content = Content("deepspeed", "1", components={"model": ImportedComponent("module", {"a": 1, "b": 2})})
    deepspeed._tie(content, {"b": ["a"], "c": {}, "d": 3, "e": "none", 4: "a", "f": "a"})
    assert content.components["model"].node == {"a": 1, "b": 2, "f": 1}
