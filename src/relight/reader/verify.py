"""Verify that every byte is what was committed. Findings name the file, chunk and tensor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from relight.errors import (
    CheckpointNotFound,
    ConfigError,
    CorruptCheckpoint,
    NewerFormat,
    RelightError,
    StoreUnavailable,
    error_of,
)
from relight.format import Part, Tensor, decode_tree, dtype_named, encode_header
from relight.format.collector import collector_paused
from relight.format.manifest import Pack, header_names
from relight.format.names import LOG_DIR
from relight.format.pack import HEADER_BYTES_MAX, header_metadata, parse_header
from relight.log import Checkpoint, Log, LogView, read_store
from relight.log.truncated import refuse_truncated
from relight.reader.chunk_reader import each_chunk
from relight.reader.opened import Opened, open_checkpoint
from relight.reader.pack_reader import open_pack
from relight.store import ByteStore
from relight.store.base import without_cache

ENTRY_BYTES_MIN = 40
"""Smallest number of bytes of a tensor's entry in a header."""


@dataclass(frozen=True, slots=True)
class VerifyFinding:
    """One damage. ``kind`` is an error's kind."""

    kind: str
    file: str
    tensor: str
    detail: str

    @property
    def is_unknown(self) -> bool:
        """Return whether nothing is known about the bytes: the store did not answer, a newer Relight wrote them, or a codec is missing."""
        return issubclass(error_of(self.kind), (StoreUnavailable, NewerFormat, ConfigError))

    def to_dict(self) -> dict[str, str]:
        """Return the fields for ``--json``."""
        return asdict(self)


def verify_log(store: ByteStore, view: LogView, *, whole: bool = False) -> list[VerifyFinding]:
    """Return the damage of the store's own record and the run's log. ``whole``: also check the records that a summary replaces."""
    if whole and view.summary is not None:
        view = Log(store, view.run, whole=True).read()
    findings = [VerifyFinding("corrupt", fault.file, "", fault.reason) for fault in view.faults]
    try:
        read_store(store)
    except RelightError as error:
        findings.append(VerifyFinding(error.kind, "relight.json", "", error.what))
    try:
        refuse_truncated(store, Log(store, view.run), view)
    except CorruptCheckpoint as error:
        findings.append(VerifyFinding("corrupt", f"{view.run}/{LOG_DIR}", "", f"{error.what}; {error.hint}"))
    return findings


def verify_checkpoint(
    store: ByteStore,
    view: LogView,
    checkpoint: Checkpoint,
    *,
    data: bool = True,
    progress: Callable[[int], None] | None = None,
) -> list[VerifyFinding]:
    """Return all damage of ``checkpoint``; empty if every byte is what was committed. ``data=False`` skips the packs' bytes.

    Bypasses caches. Cost: reads the checkpoint once. Memory: a few chunks.
    """
    store = without_cache(store)
    try:
        with collector_paused():
            opened = open_checkpoint(store, view.run, checkpoint, store_id=view.store_id, run_id=view.run_id)
    except RelightError as error:
        return [VerifyFinding(error.kind, error.where, "", error.what)]
    findings: list[VerifyFinding] = []
    for ref, part in zip(opened.root.parts, opened.parts, strict=True):
        where = f"{opened.prefix}/{ref.file}"
        try:
            with collector_paused():
                decode_tree(part.tree, len(part.tensors), where)
        except RelightError as error:
            findings.append(VerifyFinding(error.kind, where, "", error.what))
        for index, pack in enumerate(part.packs):
            findings += _verify_pack(opened, part, index, pack, data, progress)
    return findings


def _verify_pack(
    opened: Opened, part: Part, index: int, pack: Pack, data: bool, progress: Callable[[int], None] | None
) -> list[VerifyFinding]:
    key = f"{opened.prefix}/{pack.file}"
    try:
        reader = open_pack(opened.store, opened.prefix, pack)
    except CheckpointNotFound:
        return [VerifyFinding("corrupt", key, "", "the file is missing")]
    except RelightError as error:
        return [VerifyFinding(error.kind, key, "", error.what)]
    findings: list[VerifyFinding] = []
    try:
        if reader.size != pack.size:
            findings.append(VerifyFinding("corrupt", key, "", f"{reader.size} bytes long, {pack.size} were committed"))
        if not data:
            return findings
        for number, offset, piece in each_chunk(reader, pack, key, opened.store.properties().parallel_reads):
            length = pack.chunks[number][0]
            try:
                if isinstance(piece, RelightError):
                    raise piece
                if number == 0:
                    with collector_paused():
                        _check_header(bytes(piece), part, index, key)
            except RelightError as error:
                affected = _held(part, index, offset, offset + length)
                findings.append(
                    VerifyFinding(
                        error.kind, key, affected, f"chunk {number}, bytes {offset}–{offset + length}: {error.what}"
                    )
                )
            if progress:
                progress(length)
    finally:
        reader.close()
    return findings


def _held(part: Part, index: int, start: int, end: int) -> str:
    names = [t.name for t in part.tensors if t.pack == index and t.offset < end and start < t.offset + t.length]
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


def _check_header(data: bytes, part: Part, index: int, key: str) -> None:
    """Raise ``CorruptCheckpoint`` if the safetensors header contradicts the part. Its hash is checked too; this detects a faulty writer."""
    tensors = sorted((tensor for tensor in part.tensors if tensor.pack == index), key=lambda tensor: tensor.offset)
    names = header_names((tensor.name, tensor.box) for tensor in tensors)
    if data == _as_written(data, tensors, names):  # the usual case: 10 times as fast as parsing it
        return
    entries = parse_header(data, key)
    expected = {}
    for tensor, name in zip(tensors, names, strict=True):
        dtype = dtype_named(tensor.dtype)
        dims = tensor.local_shape if dtype.safetensors else (*tensor.local_shape, dtype.itemsize)
        offset = tensor.offset - len(data)
        if tensor.length or name in entries:
            expected[name] = (dtype.safetensors or "U8", dims, offset, offset + tensor.length)
    for name in entries.keys() | expected.keys():
        if entries.get(name) != expected.get(name):
            raise CorruptCheckpoint(f"the pack's header disagrees with the part about {name[:80]!r}", where=key)


def _as_written(data: bytes, tensors: Sequence[Tensor], names: Sequence[str]) -> bytes | None:
    """Encode the header of these tensors with the metadata of ``data``.

    None if ``data`` has an implausible size or no metadata, or if a tensor is empty: its entry may be anywhere in a header.
    """
    fits = ENTRY_BYTES_MIN * len(tensors) < len(data) <= HEADER_BYTES_MAX
    metadata = header_metadata(data) if fits else None
    if metadata is None or not all(tensor.length for tensor in tensors):
        return None
    rows = [
        (name, tensor.dtype, tensor.local_shape, tensor.length) for tensor, name in zip(tensors, names, strict=True)
    ]
    try:
        return encode_header(rows, metadata)
    except UnicodeError:  # an unpaired surrogate cannot be encoded
        return None
