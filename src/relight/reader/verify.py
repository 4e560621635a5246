"""Verify that every byte is what was committed. Findings name the file, chunk and tensor."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple

from relight.engines import Engine
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
from relight.reader.by_reference import CheckpointReference, PackRange, open_reference, ranges_of, reference_to
from relight.reader.chunk_reader import each_chunk
from relight.reader.opened import Opened, open_checkpoint
from relight.reader.pack_reader import open_pack
from relight.store import ByteStore, Reader
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
    opened, findings = _verify_metadata(store, view, checkpoint)
    if opened is None:
        return findings
    for part in opened.parts:
        for index in range(len(part.packs)):
            if data:
                findings += _verify_pack(opened, part, index, progress=progress)
            else:
                findings += _verify_size(opened, part, index)
    return findings


def verify_checkpoints(
    targets: Iterable[tuple[ByteStore, LogView, Checkpoint]],
    engine: Engine,
    *,
    progress: Callable[[int], None] | None = None,
    bytes_per_second: float | None = None,
) -> Iterator[list[VerifyFinding]]:
    """Yield for each target, in order, what ``verify_checkpoint`` returns for it. The engine's processes read the packs.

    ``bytes_per_second``: largest rate of all processes together.
    """
    if engine.is_local and bytes_per_second is None:
        yield from (verify_checkpoint(*target, progress=progress) for target in targets)
        return
    verifying: list[_Verifying] = []
    rate = bytes_per_second / engine.jobs if bytes_per_second else None

    def tasks() -> Iterator[_VerifyTask]:
        for store, view, checkpoint in targets:
            opened, findings = _verify_metadata(store, view, checkpoint)
            state = _Verifying([findings])
            verifying.append(state)
            if opened is not None:
                reference = reference_to(opened)
                for number, chunks in enumerate(ranges_of(opened)):
                    state.findings.append([])
                    state.left += 1
                    yield _VerifyTask(len(verifying) - 1, number + 1, reference, chunks, rate)
            state.is_open = False

    given = 0
    for task, (length, findings) in engine.run(_verify_range, tasks()):
        state = verifying[task.target]
        state.findings[task.number] = findings
        state.left -= 1
        if progress:
            progress(length)
        while given < len(verifying) and verifying[given].is_complete:
            yield verifying[given].take()
            given += 1
    for state in verifying[given:]:
        yield state.take()


@dataclass(slots=True)
class _Verifying:
    """A checkpoint that is being verified: the damage of its metadata, then of each range; and the number of ranges that are left."""

    findings: list[list[VerifyFinding]]
    left: int = 0
    is_open: bool = True
    """Whether more ranges follow."""

    @property
    def is_complete(self) -> bool:
        return not self.is_open and not self.left

    def take(self) -> list[VerifyFinding]:
        findings, self.findings = self.findings, []
        return list(dict.fromkeys(finding for of_range in findings for finding in of_range))


class _VerifyTask(NamedTuple):
    target: int
    number: int
    reference: CheckpointReference
    chunks: PackRange
    bytes_per_second: float | None


def _verify_range(task: _VerifyTask) -> tuple[int, list[VerifyFinding]]:
    """Return the number of bytes of a range, and its damage."""
    chunks, started, read = task.chunks, time.monotonic(), 0
    try:
        opened = open_reference(task.reference)
    except RelightError as error:  # it was damaged or deleted since the command opened it
        return 0, [VerifyFinding(error.kind, error.where, "", error.what)]
    part = opened.parts[chunks.part]

    def pace(length: int) -> None:
        nonlocal read
        read += length
        if task.bytes_per_second:
            time.sleep(max(0.0, read / task.bytes_per_second - (time.monotonic() - started)))

    findings = _verify_pack(opened, part, chunks.pack, range(chunks.first, chunks.last), pace)
    return chunks.bytes_of(part.packs), findings


def _verify_metadata(
    store: ByteStore, view: LogView, checkpoint: Checkpoint
) -> tuple[Opened | None, list[VerifyFinding]]:
    """Return the checkpoint, if it can be opened, and the damage of its root and parts."""
    store = without_cache(store)
    try:
        with collector_paused():
            opened = open_checkpoint(store, view.run, checkpoint, store_id=view.store_id, run_id=view.run_id)
    except RelightError as error:
        return None, [VerifyFinding(error.kind, error.where, "", error.what)]
    findings: list[VerifyFinding] = []
    for ref, part in zip(opened.root.parts, opened.parts, strict=True):
        where = f"{opened.prefix}/{ref.file}"
        try:
            with collector_paused():
                decode_tree(part.tree, len(part.tensors), where)
        except RelightError as error:
            findings.append(VerifyFinding(error.kind, where, "", error.what))
    return opened, findings


def _verify_size(opened: Opened, part: Part, index: int) -> list[VerifyFinding]:
    """Return the damage of a pack that shows without reading it."""
    reader, findings = _open_and_measure(opened, part.packs[index])
    if reader is not None:
        reader.close()
    return findings


def _open_and_measure(opened: Opened, pack: Pack) -> tuple[Reader | None, list[VerifyFinding]]:
    key = f"{opened.prefix}/{pack.file}"
    try:
        reader = open_pack(opened.store, opened.prefix, pack)
    except CheckpointNotFound:
        return None, [VerifyFinding("corrupt", key, "", "the file is missing")]
    except RelightError as error:
        return None, [VerifyFinding(error.kind, key, "", error.what)]
    if reader.size != pack.size:
        return reader, [VerifyFinding("corrupt", key, "", f"{reader.size} bytes long, {pack.size} were committed")]
    return reader, []


def _verify_pack(
    opened: Opened,
    part: Part,
    index: int,
    chunks: range | None = None,
    progress: Callable[[int], None] | None = None,
) -> list[VerifyFinding]:
    """Read ``chunks`` of a pack, all by default, and return the damage. The range with chunk 0 includes that of the file as a whole."""
    pack = part.packs[index]
    key = f"{opened.prefix}/{pack.file}"
    chunks = range(len(pack.chunks)) if chunks is None else chunks
    reader, of_file = _open_and_measure(opened, pack)
    findings = of_file if 0 in chunks else []
    if reader is None:
        return findings
    try:
        for number, offset, piece in each_chunk(
            reader, pack, key, opened.store.properties().parallel_reads, chunks.__contains__
        ):
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
