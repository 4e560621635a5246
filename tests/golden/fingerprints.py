"""Fingerprints of the golden stores and of the values that they contain."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch
from blake3 import blake3


def every_byte(folder: Path) -> str:
    """Over all files' names and bytes."""
    everything = blake3()
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        data = path.read_bytes()
        everything.update(f"{path.relative_to(folder).as_posix()}\n{len(data)}\n".encode() + data)
    return everything.hexdigest()


def hashed(tensor: torch.Tensor) -> str:
    """Return the hash of a tensor's bytes."""
    return hashlib.sha256(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()
