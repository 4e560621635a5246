"""Recognise a checkpoint by its content: without flags, file name endings, or the frameworks."""

from __future__ import annotations

import os
import re
from collections.abc import Callable

from relight.errors import IncompatibleState, UnsafeContent
from relight.importers.accelerate import detect_accelerate
from relight.importers.bucket import BucketFiles, is_bucket
from relight.importers.content import Content
from relight.importers.dcp_content import detect_dcp
from relight.importers.deepspeed import detect_deepspeed
from relight.importers.files import Files, pread
from relight.importers.found import DetectedCheckpoint, found_of
from relight.importers.hf import add_trainer, detect_model, detect_trainer
from relight.importers.hub import from_hub, is_hub
from relight.importers.megatron import detect_megatron
from relight.importers.orbax import detect_orbax
from relight.importers.single_file import detect_file
from relight.importers.snapshot import detect_snapshot


def _deepspeed(files: Files) -> Content | None:
    content = detect_deepspeed(files)
    if content is not None:
        add_trainer(content, files)
    return content


Looker = Callable[[Files], Content | None]
FOLDERS: tuple[Looker, ...] = (
    detect_megatron, detect_dcp, detect_snapshot, _deepspeed, detect_trainer, detect_accelerate, detect_orbax, detect_model,
)  # fmt: skip
"""Detectors for folders, the most specific first."""
KNOWN = (
    "torch.save and safetensors files, Hugging Face folders and Trainer checkpoints, Lightning .ckpt, DCP directories, Accelerate, "
    "DeepSpeed, Megatron, torchsnapshot and Orbax folders"
)


_PACKED = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"\x28\xb5\x2f\xfd": "zstd"}


def detect(path: str | os.PathLike[str]) -> DetectedCheckpoint:
    """Return the checkpoint at ``path``, which may be the URL of an object store or of the Hub, from its metadata alone.

    Nothing in it is executed, and no tensor is read. Raise ``IncompatibleState``, with a listing, if the format is
    unknown; ``CorruptCheckpoint`` or ``UnsafeContent`` if the checkpoint is invalid. Memory: the metadata's size, at
    most some hundred megabytes.

    Args:
        path: A file, a directory, or the URL of an object store or of the Hub.
    """
    text = os.fspath(path)
    if is_hub(text):
        return detect_files(from_hub(text))
    return detect_files(BucketFiles.from_url(text) if is_bucket(text) else Files(text))


def detect_files(files: Files) -> DetectedCheckpoint:
    """Return the checkpoint in ``files``, like ``detect``."""
    try:
        return _detected(files)
    except RecursionError:
        raise UnsafeContent("values nested too deeply", where=files.path) from None


def _detected(files: Files) -> DetectedCheckpoint:
    content = None
    if files.is_folder:
        for detector in FOLDERS:
            content = detector(files)
            if content is not None:
                break
    else:
        content = detect_file(files)
    if content is None:
        raise _nothing(files)
    detected = found_of(content, files)
    if not detected.tensors and not detected.parts:
        raise IncompatibleState(
            "a checkpoint with nothing to import", where=files.path, details=[f"{a}: {b}" for a, b in detected.left_out]
        )
    return detected


def _no_format(files: Files) -> str:
    """Return why a file's format is unknown, from its size and first bytes."""
    size = files.size("")
    if not size:
        return "an empty file"
    with files.open("") as handle:
        head = pread(handle, 0, min(size, 64), files.where(""))
    if head.startswith(b"version https://git-lfs"):
        return "a pointer of Git LFS: the file itself was not fetched"
    packed = next((name for magic, name in _PACKED.items() if head.startswith(magic)), "")
    if packed:
        return f"a file packed by {packed}: unpack it first"
    if not any(head):
        return f"a file of {size} bytes that begins with zeros, as if it was never completely written"
    return f"a file of {size} bytes of no known format"


def _nothing(files: Files) -> IncompatibleState:
    if not files.is_folder:
        return IncompatibleState(_no_format(files), where=files.path, hint=f"known are {KNOWN}")
    shown = sorted({name.split("/")[0] for name in (*files.stamps, *files.folders, *files.others)})
    below = [name for name in shown if re.search(r"\d", name) and name in files.folders]
    hint = (
        f"is it one of those below: {', '.join(below[-4:])}? relight import --all takes them all"
        if below
        else f"known are {KNOWN}"
    )
    listed = ", ".join(shown[:8]) + (f" and {len(shown) - 8} more" if len(shown) > 8 else "")
    return IncompatibleState(f"a folder of no known format: {listed or 'it is empty'}", where=files.path, hint=hint)
