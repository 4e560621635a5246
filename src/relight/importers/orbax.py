"""Import Orbax's checkpoints: a tree of zarr arrays, in files or in an OCDBT, which tensorstore reads."""

from __future__ import annotations

import math
import re
from typing import Any

from relight.errors import IncompatibleState, UnsafeContent
from relight.importers.content import MODULE, Content, ImportedComponent
from relight.importers.files import JSON_BYTES_MAX, Files
from relight.importers.tensors import AssembledTensor, is_tensor
from relight.importers.zarr import ZarrReader, kvstore_of, require_tensorstore

METADATA = "_METADATA"


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
    require_tensorstore(files.path)
    content = Content("orbax", "Orbax checkpoint")
    formats: set[str] = set()
    reader = ZarrReader()
    try:
        for prefix in prefixes:
            tree, format_name = _tree(files, prefix, reader, content.notes)
            formats.add(format_name)
            _take(content, tree, prefix.rstrip("/") if len(prefixes) > 1 else "")
    finally:
        reader.close()
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


def _tree(files: Files, prefix: str, reader: ZarrReader, notes: list[str]) -> tuple[dict[Any, Any], str]:
    where = files.where(f"{prefix}{METADATA}")
    metadata = files.json(f"{prefix}{METADATA}")
    entries = metadata.get("tree_metadata") if isinstance(metadata, dict) else None
    if not isinstance(metadata, dict) or not isinstance(entries, dict):
        raise UnsafeContent("tree_metadata is missing or not a dict", where=where)
    newer = bool(metadata.get("use_zarr3"))
    ocdbt = files.has(f"{prefix}manifest.ocdbt")
    is_complete = bool(metadata.get("store_array_data_equal_to_fill_value"))
    if not is_complete:
        notes.append("this Orbax leaves out chunks of zeros: a chunk that was lost counts as zeros, too")
    store = kvstore_of(files, prefix.rstrip("/"))
    spec = {
        "driver": "zarr3" if newer else "zarr",
        "recheck_cached_data": "open",
        "fill_missing_data_reads": not is_complete,
    }
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
                place = {"driver": "ocdbt", "base": store, "path": f"{name}/"}
            else:
                files.bytes(f"{prefix}{name}/{'zarr.json' if newer else '.zarray'}", JSON_BYTES_MAX)  # it exists here
                place = {**store, "path": f"{store['path']}{name}/"}
            parent[keys[-1]] = reader.array({**spec, "kvstore": place}, files.where(f"{prefix}{name}"))
        else:
            raise IncompatibleState(f"a value of type {str(kind)[:40]} cannot be imported", where=where)
    return root, ("OCDBT" if ocdbt else "zarr files") + (" of zarr 3" if newer else "")
