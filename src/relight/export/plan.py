"""Plan an export: the tensors to write, their checkpoint, their names and their files."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from relight.errors import ConfigError
from relight.export.atomic_output import check_free
from relight.export.average import Mixture, check_alike
from relight.export.files import MODEL, OutputFile, safetensors_files
from relight.export.selection import ExportEntry, Options, SelectedTensors, choose
from relight.export.torch_files import dcp_files, pt_files, split_values
from relight.format.collector import collector_paused
from relight.reader.merged_parts import MergedCheckpoint, whole_of
from relight.reader.opened import Opened

FORMATS = ("safetensors", "pt", "dcp")
ENDINGS = {"safetensors": (".safetensors",), "pt": (".pt", ".pth", ".bin", ".ckpt"), "dcp": ()}
"""Formats by the suffix of the target."""


@dataclass(frozen=True, slots=True)
class ExportPlan:
    """Files to write. ``folder``: ``path`` is a directory that will contain ``files``."""

    opened: Opened
    whole: MergedCheckpoint
    path: str
    folder: bool
    options: Options
    chosen: SelectedTensors
    files: list[OutputFile]
    mixed: Mixture | None = None
    """The averaged checkpoints; ``opened`` is the last of them."""

    @property
    def entries(self) -> list[ExportEntry]:
        """The exported tensors."""
        return self.chosen.entries

    @property
    def bytes(self) -> int:
        """Approximate bytes to read."""
        once = sum(self.whole.tensors[number].length for number in {entry.tensor for entry in self.entries})
        return once * (len(self.mixed.parts) if self.mixed is not None else 1)

    @property
    def bytes_written(self) -> int:
        """Total size of the files."""
        return sum(file.size for file in self.files)


def plan_export(opened: Opened | Mixture, path: str | os.PathLike[str], options: Options | None = None) -> ExportPlan:
    """Plan the export of a checkpoint or an average. Reads no tensor and writes nothing.

    Raise ``ConfigError`` if the target exists, names clash, or the format cannot hold the state; ``IncompatibleState`` if the checkpoints
    cannot be averaged.
    """
    options = options or Options()
    target = os.fspath(path)
    if options.to not in FORMATS:
        raise ConfigError(f"no format {options.to[:40]!r}", hint=f"one of {', '.join(FORMATS)}")
    folder = is_folder(target, options)
    check_free(target, folder=folder, overwrite=options.overwrite)
    mixed = opened if isinstance(opened, Mixture) else None
    with collector_paused():
        newest = opened.last.opened if isinstance(opened, Mixture) else opened
        whole = mixed.last.whole if mixed is not None else whole_of(newest)
        chosen = choose(whole.tree, whole.tensors, newest.root.components, options)
    if mixed is not None:
        check_alike(mixed, chosen.entries)
    name = MODEL if folder else os.path.basename(os.path.abspath(target))
    if options.to != "safetensors":
        chosen = split_values(chosen)
    return ExportPlan(newest, whole, target, folder, options, chosen, _files(whole, chosen, options, name), mixed)


def format_of(target: str) -> str:
    """Return the format for a target's suffix."""
    return next((name for name, endings in ENDINGS.items() if target.endswith(endings)), "safetensors")


def _files(whole: MergedCheckpoint, chosen: SelectedTensors, options: Options, name: str) -> list[OutputFile]:
    if options.to == "pt":
        tree = whole.tree if options.everything and not options.rename else None
        return pt_files(chosen, options.tied, tree, options.rename, name)
    if options.to == "dcp":
        return dcp_files(chosen, options.tied, options.rename)
    return safetensors_files(chosen.entries, options.tied, options.shard_bytes, name)


def is_folder(target: str, options: Options) -> bool:
    """Return whether the target is a directory: its suffix is not that of a file."""
    if not target.rstrip("/"):
        raise ConfigError("the target is empty", hint="name a file or a directory")
    if options.shard_bytes is not None and options.to != "safetensors":
        raise ConfigError(f"--shard is for safetensors, not for {options.to}")
    is_file = options.to == "pt" or target.endswith(ENDINGS[options.to])
    if is_file and options.shard_bytes is not None:
        raise ConfigError("several files need a directory", where=target, hint="name one, or leave --shard away")
    return not is_file


def facts(plan: ExportPlan) -> dict[str, Any]:
    """Return the plan's fields for ``--json``."""
    root = plan.opened.root
    return {
        "id": root.id,
        "step": root.step,
        "to": plan.options.to,
        "path": plan.path,
        "component": plan.chosen.component,
        "files": [{"name": file.name, "bytes": file.size} for file in plan.files],
        "tensors": len(plan.entries),
        "bytes": plan.bytes_written,
        "tied": {entry.name: entry.alias for entry in plan.entries if entry.alias is not None},
        "average": plan.mixed.to_record() if plan.mixed is not None else [],
        "left_out": [{"what": what, "why": why} for what, why in left_out(plan)],
    }


def left_out(plan: ExportPlan) -> list[tuple[str, str]]:
    """Return what of the component is not exported, with the reasons."""
    omitted = plan.chosen.values if plan.options.to == "safetensors" else []
    values = [(".".join(map(str, keys)), "a value, not a tensor") for keys, _ in omitted]
    return [*plan.chosen.left_out, *values]
