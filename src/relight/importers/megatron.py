"""Import Megatron's checkpoints: ``torch_dist``, which is DCP with a few more files, and the older format with a file
for each rank."""

from __future__ import annotations

import re
from typing import Any

from relight.errors import CorruptCheckpoint, IncompatibleState, UnsafeContent
from relight.importers.content import (
    MODULE,
    OPTIMIZER,
    Content,
    ImportedComponent,
    check_walkable,
)
from relight.importers.dcp_content import read_tree
from relight.importers.files import Files
from relight.importers.megatron_legacy import detect_legacy, take_rest
from relight.importers.tensors import is_tensor
from relight.importers.torch_file import read_torch

LATEST = "latest_checkpointed_iteration.txt"
_RANK = re.compile(r"(?:(.*)/)?mp_rank_(\d+)(?:_(\d+))?(?:_(\d+))?/model_optim_rng\.pt")
_STATE = re.compile(r"(?:(chained_\d+)\.)?optimizer\.state\.(fp32_param|exp_avg|exp_avg_sq|[a-z_]+?)\.(.+)")
_MASTER = "fp32_param"


def detect_megatron(files: Files) -> Content | None:
    """Return the content of a Megatron folder; None for other folders. In a parent folder, follow the newest iteration."""
    if files.has(LATEST):
        text = files.text(LATEST, 64)
        name = text if text == "release" else f"iter_{int(text):07d}" if re.fullmatch(r"[0-9]{1,15}", text) else ""
        if name not in files.folders:
            raise CorruptCheckpoint(
                f"it names the iteration {text[:20]!r}, which is missing", where=files.where(LATEST)
            )
        return _detect_in(files.below(name))
    return _detect_in(files)


def _detect_in(files: Files) -> Content | None:
    if files.has("metadata.json") and files.has("common.pt"):
        return _torch_dist(files)
    ranks = {match: name for name in files.stamps if (match := _RANK.fullmatch(name)) is not None and match[1] is None}
    return detect_legacy(files, ranks) if ranks else None


def _torch_dist(files: Files) -> Content:
    metadata = files.json("metadata.json")
    backend = metadata.get("sharded_backend") if isinstance(metadata, dict) else None
    if backend != "torch_dist":
        raise IncompatibleState(
            f"a Megatron checkpoint of format {str(backend)[:30]!r}", where=files.path, hint="torch_dist is understood"
        )
    content = Content(
        "megatron",
        f"Megatron torch_dist, version {str(metadata.get('sharded_backend_version'))[:10]}"
        if isinstance(metadata, dict)
        else "",
    )
    common = read_torch(files, "common.pt")
    if not isinstance(common, dict):
        raise UnsafeContent("a common.pt that is not a dict", where=files.where("common.pt"))
    tree = read_tree(files)
    check_walkable(tree, files.path)
    model: dict[str, Any] = {}
    state: dict[str, dict[str, Any]] = {}
    for key, value in _flat(tree).items():
        match = _STATE.fullmatch(key)
        if match is not None and is_tensor(value):
            state.setdefault(match[3], {})[f"{match[1]}.{match[2]}" if match[1] else match[2]] = value
        elif is_tensor(value):
            model[key] = value
        elif "_extra_state" in key:
            content.kept.setdefault("extra_states", {})[key] = value
        else:
            content.kept.setdefault("objects", {})[key] = value
    content.components["model"] = ImportedComponent(MODULE, model)
    _optimizer(content, common.get("optimizer"), state)
    take_rest(content, common)
    if "extra_states" in content.kept:
        content.left_out.append(("extra states", "of layers by number: kept as values"))
    content.notes.append(
        "names are Megatron's own: layers are stacked in one tensor each, and a script's modules have them one by one"
    )
    return content


def _flat(node: Any, prefix: str = "") -> dict[str, Any]:
    """Return flat names, like Megatron's keys."""
    entries: dict[str, Any] = {}
    for key, value in node.items():
        name = f"{prefix}{key}"
        if (
            isinstance(value, dict)
            and value
            and not is_tensor(value)
            and "_extra_state" not in name
            and any(is_tensor(child) for child in value.values())
        ):
            entries.update(_flat(value, f"{name}."))
        else:
            entries[name] = value
    return entries


def _optimizer(content: Content, common: Any, state: dict[str, dict[str, Any]]) -> None:
    """Take state under parameters' names. The files do not record which parameter is in which group, so settings are
    kept as values."""
    groups = common.get("param_groups") if isinstance(common, dict) else None
    if groups is None and isinstance(common, dict) and isinstance(common.get("optimizer"), dict):
        groups = common["optimizer"].get("param_groups")
    if common is not None:
        content.kept["optimizer_common"] = common
    if not state:
        return
    masters = {name: entry[_MASTER] for name, entry in state.items() if _MASTER in entry}
    moments = {name: {key: value for key, value in entry.items() if key != _MASTER} for name, entry in state.items()}
    single = groups[0] if isinstance(groups, list) and len(groups) == 1 and isinstance(groups[0], dict) else None
    if single is None:
        content.left_out.append(
            ("optimizer/groups", "the group of each parameter is not recorded: settings are kept as values")
        )
    settings = {key: value for key, value in (single or {}).items() if key != "params"}
    node: dict[str, Any] = {"state": moments, "groups": [{**settings, "params": list(state)}], "extra": {}}
    if masters:
        node["masters"] = masters
    content.components["optimizer"] = ImportedComponent(OPTIMIZER, node)
