"""Names that look like a checkpoint's. A file with such a name that cannot be read is reported and not skipped. Pure."""

from __future__ import annotations

import re

_LEFT = r"(\.(tar|gz|bz2|xz|zst|zip|tmp|part|partial|incomplete|bak|old|\d+))*"
_ENDING = re.compile(rf"\.(pt|pt2|pth|ckpt|chkpt|cpt|ckp|checkpoint|safetensors|distcp|t7|th){_LEFT}$", re.IGNORECASE)
"""Endings that only checkpoints have, also if they are packed or half written."""
_WORD = re.compile(
    r"(^|[-_. ])(checkpoints?|ckpts?|chkpts?|models?|weights?|optim(izer)?s?|state(_dict)?s?|snapshots?"
    r"|global_?step|steps?|iter(ation)?|epoch)"
    r"(?=[-_. =]|\d|$)",
    re.IGNORECASE,
)
_SHARED_ENDING = re.compile(
    rf"^[^.]*(\.[^.]*\d[^.]*)?(\.(bin|pkl|pickle|model|npz|npy|h5|hdf5|dat|tar|zip|gz|tmp|part|\d+))*{_LEFT}$",
    re.IGNORECASE,
)
"""Endings, or none, that other files have too: the name must also contain a checkpoint's word."""
_FOLDER = re.compile(
    r"^(checkpoint|ckpt|chkpt|snapshot|global_?step|step|iter|epoch|mp_rank)s?[-_=. ]?\d+", re.IGNORECASE
)


def is_checkpoint_name(name: str, *, is_folder: bool) -> bool:
    """Return whether a file or folder has a name that frameworks and scripts give to checkpoints."""
    if is_folder:
        return bool(_FOLDER.match(name))
    return bool(_ENDING.search(name)) or bool(_WORD.search(name) and _SHARED_ENDING.match(name))
