"""Import Orbax's checkpoints: a tree of zarr arrays, in files that Relight reads or in an OCDBT that tensorstore reads."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any

from relight.errors import CorruptCheckpoint, IncompatibleState, UnsafeContent
from relight.format import DTYPES
from relight.importers.chunked import CODED_MORE, boxes_of, chunked_array, elements_of, numbers_of
from relight.importers.content import MODULE, Content, ImportedComponent
from relight.importers.files import Files
from relight.importers.tensors import AssembledTensor, is_tensor
from relight.importers.zarr3 import read_zarr3
from relight.layout import Box

if TYPE_CHECKING:
    from relight.importers.chunked import Elements

METADATA = "_METADATA"
_NUMPY = {
    "f8": "float64", "f4": "float32", "f2": "float16", "i8": "int64", "i4": "int32", "i2": "int16", "i1": "int8", "b1": "bool",
    "u8": "uint64", "u4": "uint32", "u2": "uint16", "u1": "uint8", "c8": "complex64", "c16": "complex128",
}  # fmt: skip


def detect_orbax(files: Files) -> Content | None:
    """Return the content of such a folder, or of one step's folder with its items; None for others."""
    prefixes = sorted(
        name[: -len(METADATA)]
        for name in files.stamps
        if name == METADATA or (name.count("/") == 1 and name.endswith(f"/{METADATA}"))
    )
    if not prefixes:
        return None
    if "" in prefixes:
        prefixes = [""]
    content = Content("orbax", "Orbax checkpoint")
    formats: set[str] = set()
    for prefix in prefixes:
        tree, format_name = _tree(files, prefix)
        formats.add(format_name)
        _take(content, tree, prefix.rstrip("/") if len(prefixes) > 1 else "")
    content.format = f"Orbax checkpoint ({', '.join(sorted(formats))})"
    if content.step is None and re.fullmatch(r"[0-9]{1,15}", files.name):
        content.step = int(files.name)
    content.notes.append("names are those of a tree of JAX, joined by dots")
    return content


def _take(content: Content, tree: dict[Any, Any], item: str) -> None:
    loose: dict[str, Any] = {}
    for key, value in tree.items():
        name = f"{item}.{key}" if item else str(key)
        if (
            isinstance(value, dict)
            and (flat := _flat(value))
            and all(map(is_tensor, flat.values()))
            and name not in ("grad", "rank", "rng", "imported")
        ):
            content.components[name] = ImportedComponent(MODULE, flat)
        else:
            loose[name] = value
    content.kept |= loose
    step = tree.get("step")
    if (
        isinstance(step, AssembledTensor)
        and step.dtype in ("int64", "int32")
        and math.prod(step.shape) == 1
        and content.step is None
    ):
        buffer = bytearray(step.made_of.length)
        step.made_of.fill(0, memoryview(buffer))
        number = int.from_bytes(buffer, "little", signed=True)
        content.step = number if 0 <= number < 10**15 else None


def _flat(node: dict[Any, Any], prefix: str = "", level: int = 0) -> dict[str, Any]:
    entries: dict[str, Any] = {}
    if level > 60:
        raise UnsafeContent("a tree nested too deeply")
    for key, value in node.items():
        if isinstance(value, dict):
            entries.update(_flat(value, f"{prefix}{key}.", level + 1))
        else:
            entries[f"{prefix}{key}"] = value
    return entries


def _tree(files: Files, prefix: str) -> tuple[dict[Any, Any], str]:
    where = files.where(f"{prefix}{METADATA}")
    metadata = files.json(f"{prefix}{METADATA}")
    entries = metadata.get("tree_metadata") if isinstance(metadata, dict) else None
    if not isinstance(metadata, dict) or not isinstance(entries, dict):
        raise UnsafeContent("tree_metadata is missing or not a dict", where=where)
    newer = bool(metadata.get("use_zarr3"))
    ocdbt = files.has(f"{prefix}manifest.ocdbt")
    root: dict[Any, Any] = {}
    for entry in entries.values():
        try:
            keys = [str(key_entry["key"]) for key_entry in entry["key_metadata"]]
            kind = entry["value_metadata"]["value_type"]
        except (KeyError, TypeError) as error:
            raise UnsafeContent("an invalid entry of the tree", where=where) from error
        if not 0 < len(keys) <= 60:
            raise UnsafeContent("an entry of the tree without a name, or nested too deeply", where=where)
        parent = root
        for key in keys[:-1]:
            parent = parent.setdefault(key, {})
            if not isinstance(parent, dict):
                raise UnsafeContent("an entry below another's value", where=where)
        if kind in ("None", "Dict", "List", "Tuple", "NamedTuple"):
            parent[keys[-1]] = None if kind == "None" else {}
        elif kind in ("jax.Array", "np.ndarray", "scalar"):
            name = ".".join(keys)
            if ocdbt:
                parent[keys[-1]] = _ocdbt(files, prefix, name, "zarr3" if newer else "zarr")
            else:
                parent[keys[-1]] = read_zarr3(files, f"{prefix}{name}") if newer else _zarr(files, prefix, name)
        else:
            raise IncompatibleState(f"a value of type {str(kind)[:40]}", where=where)
    return root, ("OCDBT" if ocdbt else "zarr files") + (" of zarr 3" if newer else "")


def _zarr(files: Files, prefix: str, name: str) -> AssembledTensor:
    """Return an array of zarr 2 with one file for each chunk: uncompressed, or zstd."""
    folder = f"{prefix}{name}"
    where = files.where(folder)
    metadata = files.json(f"{folder}/.zarray")
    if (
        not isinstance(metadata, dict)
        or metadata.get("zarr_format") != 2
        or metadata.get("order") != "C"
        or metadata.get("filters")
    ):
        raise IncompatibleState("an array that is not zarr 2 in row-major order", where=where)
    compressor = metadata.get("compressor")
    if compressor is not None and (not isinstance(compressor, dict) or compressor.get("id") != "zstd"):
        raise IncompatibleState("chunks compressed by something other than zstd", where=where)
    shape, chunks = numbers_of(metadata.get("shape"), where), numbers_of(metadata.get("chunks"), where)
    separator = metadata.get("dimension_separator", ".")
    dtype = _dtype(metadata.get("dtype"), where)
    if len(shape) != len(chunks) or separator not in (".", "/"):
        raise UnsafeContent("chunks of another number of dimensions", where=where)

    def read(box: Box) -> Elements:
        numbers = [start // extent for start, extent in zip(box.start, chunks, strict=True)]
        file = f"{folder}/{separator.join(map(str, numbers)) or '0'}"
        pieces = files.pieces(file, math.prod(chunks) * DTYPES[dtype].itemsize + CODED_MORE)
        return elements_of(pieces, compressor is not None, chunks, box, dtype, files.where(file))

    for box in boxes_of(shape, chunks, dtype, where):
        numbers = [start // extent for start, extent in zip(box.start, chunks, strict=True)]
        files.size(f"{folder}/{separator.join(map(str, numbers)) or '0'}")
    return chunked_array(dtype, shape, chunks, read, where, files.cache)


def _ocdbt(files: Files, prefix: str, name: str, driver: str) -> AssembledTensor:
    """Return an array in an OCDBT: tensorstore's own format, so tensorstore reads it."""
    where = files.where(f"{prefix}{name}")
    if files.in_bucket:
        raise IncompatibleState(
            "an OCDBT in a bucket: only tensorstore reads it, and only from a file system",
            where=files.where(f"{prefix}manifest.ocdbt"),
            hint="copy this folder to a file system, or mount the bucket, and import it from there",
        )
    try:
        import tensorstore
    except ModuleNotFoundError as error:
        raise IncompatibleState(
            "an OCDBT, which only tensorstore reads",
            where=files.where(f"{prefix}manifest.ocdbt"),
            hint="pip install tensorstore, and run the import again",
        ) from error
    base = files.where(prefix.rstrip("/"))
    for name_of_file in files.stamps:
        if name_of_file.startswith(prefix) and (name_of_file.endswith("manifest.ocdbt") or "/d/" in f"/{name_of_file}"):
            files.read.setdefault(name_of_file, None)
    spec = {"driver": driver, "kvstore": {"driver": "ocdbt", "base": f"file://{base}/", "path": f"{name}/"}}
    try:
        opened = tensorstore.open(spec, open=True, read=True).result(timeout=60)
        shape, chunks = tuple(opened.shape), tuple(opened.chunk_layout.read_chunk.shape or ())
    except (ValueError, OSError, TimeoutError, OverflowError) as error:
        raise CorruptCheckpoint(f"tensorstore cannot read it: {str(error)[:120]}", where=where) from None
    dtype = str(opened.dtype.name)
    if dtype not in DTYPES:
        raise IncompatibleState(f"dtype {dtype[:40]}, which Relight has no name for", where=where)

    def read(box: Box) -> Elements:
        try:
            data = opened[tuple(slice(a, a + n) for a, n in zip(*box, strict=True))].read().result(timeout=600)
        except (ValueError, OSError, TimeoutError) as error:
            raise CorruptCheckpoint(f"tensorstore cannot read it: {str(error)[:120]}", where=where) from None
        import numpy as np

        return np.ascontiguousarray(data).view(f"V{DTYPES[dtype].itemsize}")

    return chunked_array(dtype, shape, chunks, read, where, files.cache)


def _dtype(name_in_file: Any, where: str) -> str:
    name = name_in_file if isinstance(name_in_file, str) else ""
    dtype = _NUMPY.get(name[1:]) if name[:1] in ("<", "|") else name if name in DTYPES else None
    if dtype is None:
        raise IncompatibleState(f"dtype {str(name_in_file)[:40]}, which Relight has no name for", where=where)
    return dtype
