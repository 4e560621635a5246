"""Helpers for tests of foreign checkpoints: import one and read it back, and compare bit for bit."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

import relight
from relight.importers import DetectedCheckpoint, ImportReport, detect, import_checkpoint
from relight.store import open_bytes

GOLDEN = Path(os.environ.get("RELIGHT_TEST_FOREIGN") or Path(__file__).parent / "golden").resolve()
"""Checkpoints that the frameworks wrote: the committed ones, or those that ``make foreign`` has just written."""


def imported(source: Path, tmp_path: Path, **words: Any) -> tuple[DetectedCheckpoint, ImportReport, dict[str, Any]]:
    """Import a checkpoint. Return the detected checkpoint, the report, and the imported state, read back."""
    detected = detect(source)
    report = import_checkpoint(detected, open_bytes(str(tmp_path / "store")), "run", **words)
    return detected, report, relight.load(str(tmp_path / "store" / "run"))


def same(first: Any, second: Any) -> bool:
    """Return whether two values are equal bit for bit, with the same dtypes and shapes."""
    if isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor):
        if first.dtype != second.dtype or first.shape != second.shape:
            return False
        return bool(
            torch.equal(first.contiguous().view(-1).view(torch.uint8), second.contiguous().view(-1).view(torch.uint8))
        )
    if isinstance(first, dict) and isinstance(second, dict):
        return first.keys() == second.keys() and all(same(first[key], second[key]) for key in first)
    if isinstance(first, (list, tuple)) and type(first) is type(second):
        return len(first) == len(second) and all(map(same, first, second))
    return bool(first == second)


def by_number(node: dict[str, Any]) -> dict[str, Any]:
    """Return a loaded optimizer with numbers for its parameters, as torch's own ``state_dict`` has them."""
    order = [name for group in node["param_groups"] for name in group["params"]]
    numbers = {name: index for index, name in enumerate(order)}
    groups = [{**group, "params": [numbers[name] for name in group["params"]]} for group in node["param_groups"]]
    return {"state": {numbers[name]: value for name, value in node["state"].items()}, "param_groups": groups}
