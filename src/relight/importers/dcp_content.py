"""Import a ``torch.distributed.checkpoint`` directory: tensors are merged from their chunks, optimizers by parameter
name."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

from relight.errors import CorruptCheckpoint, IncompatibleState
from relight.format import Tensor
from relight.importers.archive import TorchArchive
from relight.importers.content import (
    OPTIMIZER,
    RESERVED,
    Content,
    ImportedComponent,
    check_walkable,
    is_optimizer,
    optimizer_of,
)
from relight.importers.dcp import Chunk, Metadata, Value
from relight.importers.files import Files
from relight.importers.nesting import OpaqueNode, Path, crowded, nested
from relight.importers.tensors import AssembledTensor, FileRange, FileSource, Home, StridedSource, Tiled, is_tensor
from relight.layout import Source


def detect_dcp(files: Files) -> Content | None:
    """Return the content of a directory with DCP's ``.metadata``; None for others."""
    if not files.has(".metadata") and ".metadata" not in files.others:
        return None
    content = Content("dcp", "DCP directory (torch.distributed.checkpoint)")
    take_tree(content, read_tree(files), files)
    return content


def read_tree(files: Files) -> dict[Any, Any]:
    """Return the original state dict, with an ``AssembledTensor`` for each tensor; its other values are read."""
    files.bytes(".metadata", 512 << 20)
    metadata = Metadata(files.path, files.open, strangers=True)
    flat = crowded({name: path for name, (path, _) in metadata.found.items()})
    nodes: list[tuple[Path, Any]] = []
    for name, (path, content) in metadata.found.items():
        position: Path = (name,) if name in flat else path
        if isinstance(content, Value):
            where = f"{files.path}/{content.file}: {name[:80]}"
            with files.open(content.file) as handle:
                value = TorchArchive(handle, content.span, where, Home(files, content.file)).content(strangers=True)
            nodes.append((position, OpaqueNode(value)))
        else:
            nodes.append((position, OpaqueNode(_tensor(files, metadata.tensors[content], metadata.chunks[content]))))
    return nested(nodes)


def _tensor(files: Files, tensor: Tensor, chunks: list[Chunk]) -> AssembledTensor:
    where = f"{files.path}: {tensor.name[:80]}"
    if sum(chunk.span.length for chunk in chunks) < tensor.length:
        raise CorruptCheckpoint("its chunks are smaller than it", where=where)
    boxes = [(chunk.box, _DcpChunkSource(files, chunk, tensor)) for chunk in chunks]
    for chunk in chunks:
        files.size(chunk.file)
    source: Source = boxes[0][1] if len(boxes) == 1 else Tiled(tensor.dtype, tensor.shape, boxes, where)
    return AssembledTensor(tensor.dtype, tensor.shape, source, (files.path, tensor.name, tensor.pack))


class _DcpChunkSource:
    """One chunk: a ``torch.save`` file inside a file, opened at the first read."""

    def __init__(self, files: Files, chunk: Chunk, tensor: Tensor) -> None:
        self._files, self._chunk, self._tensor = files, chunk, tensor
        self.length = chunk.box.elements * (tensor.length // max(1, _elements(tensor)))
        self._source: Source | None = None
        self._lock = threading.Lock()

    def view(self) -> memoryview | None:
        """Return None: the chunk is read on demand."""
        return None

    def fill(self, start: int, into: memoryview) -> None:
        """Read the chunk."""
        with self._lock:
            source = self._source = self._source or self._open_source()
        source.fill(start, into)

    def _open_source(self) -> Source:
        file, span, box = self._chunk
        where = f"{self._files.path}/{file}: {self._tensor.name[:80]}"
        with self._files.open(file) as handle:
            spec = TorchArchive(handle, FileRange(span.offset, span.length), where, Home(self._files, file)).tensor()
        if spec.dtype != self._tensor.dtype or spec.shape != box.size or spec.length != self.length:
            raise CorruptCheckpoint("a chunk of another shape or dtype than in the metadata", where=where)
        source = spec.source()
        assert isinstance(source, (FileSource, StridedSource))
        return source


def _elements(tensor: Tensor) -> int:
    count = 1
    for extent in tensor.shape:
        count *= extent
    return count


def take_tree(content: Content, tree: Mapping[Any, Any], files: Files) -> None:
    """Take the components of a state dict that DCP saved: modules by their tensors, optimizers in any of torch's
    forms."""
    check_walkable(tree, files.path)
    if len(tree) == 1:
        (inner,) = tree.values()
        if isinstance(inner, dict) and any(_is_optimizer(entry) for entry in inner.values()):
            tree = inner  # the script wrapped everything in one object
    loose = {str(key): value for key, value in tree.items() if is_tensor(value)}
    rest: dict[Any, Any] = {}
    for key, value in tree.items():
        if is_tensor(value):
            continue
        if key in RESERVED:
            rest[key] = value
        elif _is_optimizer(value):
            content.components[_name(key, "optimizer", tree)] = ImportedComponent(
                OPTIMIZER, _optimizer(value, files.where(".metadata"))
            )
        elif isinstance(value, dict) and _is_nested_module(value):
            content.module("model" if key in ("model", "state_dict", "module") else str(key), _unnested(value))
        else:
            rest[key] = value
    if loose and "model" not in content.components:
        content.module("model", loose)
    elif loose:
        content.kept["tensors"] = loose
    components = dict(content.components)
    content.take(rest, unwrap=not components and not loose)
    content.components = {**content.components, **components}


def _name(key: Any, usual: str, tree: Mapping[Any, Any]) -> str:
    alone = sum(_is_optimizer(value) for value in tree.values()) == 1
    return usual if alone and key in ("optim", "optimizer", "optimizer_state_dict", "opt") else str(key)


def _is_nested_module(node: Mapping[Any, Any]) -> bool:
    """Return whether the node has only tensors, at any depth."""
    return bool(node) and all(
        type(key) is str
        and (is_tensor(value) or key.endswith("_extra_state") or (isinstance(value, dict) and _is_nested_module(value)))
        for key, value in node.items()
    )


def _unnested(node: Mapping[Any, Any], prefix: str = "") -> dict[str, Any]:
    entries: dict[str, Any] = {}
    for key, value in node.items():
        if isinstance(value, dict) and not key.endswith("_extra_state"):
            entries.update(_unnested(value, f"{prefix}{key}."))
        else:
            entries[f"{prefix}{key}"] = value
    return entries


def _is_flat(node: Any) -> bool:
    """Return whether the node is an optimizer's state in the form of ``flatten_optimizer_state_dict``."""
    return (
        isinstance(node, dict)
        and any(str(key).startswith("param_groups.") for key in node)
        and all(str(key).startswith(("state.", "param_groups.")) for key in node)
    )


def _is_optimizer(node: Any) -> bool:
    return _is_flat(node) or is_optimizer(node) or (isinstance(node, dict) and is_optimizer({"state": {}, **node}))


def _optimizer(node: Mapping[Any, Any], where: str) -> dict[str, Any]:
    if _is_flat(node):
        return _unflattened(node, where)
    members = [key for group in node["param_groups"] for key in group["params"]]
    state = node.get("state", {})
    if all(type(member) is int for member in members):
        state = {
            int(key) if type(key) is str and key.isascii() and key.isdigit() and len(key) < 10 else key: value
            for key, value in state.items()
        }
    return optimizer_of({**node, "state": state})


def _unflattened(node: Mapping[Any, Any], where: str) -> dict[str, Any]:
    """Invert ``flatten_optimizer_state_dict``. It does not record groups, so parameters with equal settings form a
    group."""
    state: dict[str, dict[str, Any]] = {}
    settings: dict[str, dict[str, Any]] = {}
    for key, value in node.items():
        home, _, rest = str(key).partition(".")
        name, _, key_name = rest.rpartition(".")
        if not name:
            raise IncompatibleState(f"an optimizer's state with an entry {str(key)[:80]!r}", where=where)
        (state if home == "state" else settings).setdefault(name, {})[key_name] = value
    groups: list[dict[str, Any]] = []
    for name, parameter_settings in settings.items():
        for group in groups:
            if {key: value for key, value in group.items() if key != "params"} == parameter_settings:
                group["params"].append(name)
                break
        else:
            groups.append({**parameter_settings, "params": [name]})
    return {"state": state, "groups": groups, "extra": {}}
