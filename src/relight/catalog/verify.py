"""Is every byte what was committed? What is not is named: file, chunk, tensor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass

from relight.catalog.opened import Opened, open_checkpoint
from relight.errors import CheckpointNotFound, CorruptCheckpoint, RelightError
from relight.format import Digest, Part
from relight.format.manifest import Pack
from relight.format.pack import parse_header
from relight.log import Checkpoint, View, read_store
from relight.store import ByteStore


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong. ``kind`` is an error's kind."""

    kind: str
    file: str
    tensor: str
    detail: str

    def to_dict(self) -> dict[str, str]:
        """For ``--json``."""
        return asdict(self)


def verify_log(store: ByteStore, view: View) -> list[Finding]:
    """What is wrong with the store's own record and the run's log."""
    findings = [Finding("corrupt", fault.file, "", fault.reason) for fault in view.faults]
    try:
        record = read_store(store)
        if record.id != view.store_id:
            findings.append(Finding("corrupt", "relight.json", "", "the log belongs to another store"))
    except RelightError as error:
        findings.append(Finding(error.kind, "relight.json", "", error.what))
    return findings


def verify_checkpoint(
    store: ByteStore,
    view: View,
    checkpoint: Checkpoint,
    *,
    data: bool = True,
    progress: Callable[[int], None] | None = None,
) -> list[Finding]:
    """Everything wrong with ``checkpoint``; empty means every byte is what was committed. ``data=False`` leaves out the packs' bytes.

    Cost: one read of it, one chunk of memory.
    """
    try:
        opened = open_checkpoint(store, view.run, checkpoint, store_id=view.store_id, run_id=view.run_id)
    except RelightError as error:
        return [Finding(error.kind, error.where, "", error.what)]
    findings: list[Finding] = []
    for part in opened.parts:
        for index, pack in enumerate(part.packs):
            findings += _verify_pack(opened, part, index, pack, data, progress)
    return findings


def _verify_pack(
    opened: Opened, part: Part, index: int, pack: Pack, data: bool, progress: Callable[[int], None] | None
) -> list[Finding]:
    key = f"{opened.prefix}/{pack.file}"
    try:
        reader = opened.store.open(key)
    except CheckpointNotFound:
        return [Finding("corrupt", key, "", "the file is missing")]
    except RelightError as error:
        return [Finding(error.kind, key, "", error.what)]
    findings: list[Finding] = []
    try:
        if reader.size != pack.size:
            findings.append(Finding("corrupt", key, "", f"{reader.size} bytes long, {pack.size} were committed"))
        if not data:
            return findings
        buffer = memoryview(bytearray(max(length for length, _ in pack.chunks)))
        at = 0
        for number, (length, value) in enumerate(pack.chunks):
            piece = buffer[:length]
            try:
                reader.read_into(at, piece)
                if Digest(piece).digest() != value:
                    held = [t.name for t in part.tensors if t.pack == index and t.offset < at + length and at < t.offset + t.length]
                    detail = f"chunk {number}, bytes {at}–{at + length}, is not what was committed"
                    findings.append(Finding("corrupt", key, ", ".join(held[:8]), detail))
                elif number == 0:
                    _check_header(bytes(piece), part, index, key)
            except RelightError as error:
                findings.append(Finding(error.kind, key, "", f"chunk {number}: {error.what}"))
            at += length
            if progress:
                progress(length)
    finally:
        reader.close()
    return findings


def _check_header(data: bytes, part: Part, index: int, key: str) -> None:
    """The safetensors header says the same as the part. It is hashed like all else; this guards against a writer that lied."""
    entries = parse_header(data, key)
    expected = {t.name: (t.offset - len(data), t.offset - len(data) + t.length) for t in part.tensors if t.pack == index and t.length}
    for name, span in expected.items():
        if name not in entries or entries[name][2:] != span:
            raise CorruptCheckpoint(f"the pack's header disagrees with the part about {name[:80]!r}", where=key)
