"""Import a folder of ``Accelerator.save_state``: models, optimizers, schedulers, samplers and generators, in numbered
files."""

from __future__ import annotations

import re
from typing import Any

from relight.importers.content import (
    OPTIMIZER,
    SCALER,
    SCHEDULER,
    Content,
    ImportedComponent,
    is_optimizer,
    optimizer_of,
)
from relight.importers.files import Files
from relight.importers.hf import add_fsdp, read_weights, take_rng
from relight.importers.torch_file import read_torch
from relight.units import count_text

_KINDS = (("optimizer", "bin", OPTIMIZER), ("scheduler", "bin", SCHEDULER))
_MODEL = re.compile(r"(?:model|pytorch_model)(?:_(\d+))?\.(?:safetensors|bin)(\.index\.json)?")


def detect_accelerate(files: Files) -> Content | None:
    """Return the content of such a folder, which has the generators of its ranks; None for others."""
    states = sorted(name for name in files.names() if re.fullmatch(r"random_states_\d+\.pkl", name))
    if not states:
        return None
    content = Content("accelerate", f"Accelerate save_state folder, {count_text(len(states), 'rank')}")
    _models(content, files)
    for name, ending, kind in _KINDS:
        _numbered(content, files, name, ending, kind)
    if files.has("scaler.pt"):
        content.components["scaler"] = ImportedComponent(SCALER, read_torch(files, "scaler.pt"))
    generators = {name: read_torch(files, name) for name in states}
    first = generators[states[0]]
    if isinstance(first, dict) and type(first.get("step")) is int:
        content.first_step = 1
        content.step = first["step"] if 0 <= first["step"] < 10**15 else None
    if len(generators) > 1 or not take_rng(content, first, ("random_state", "numpy_random_seed", "torch_manual_seed")):
        content.kept["random_states"] = generators
        content.left_out.append(("rng", f"generators of {len(generators)} ranks: kept as values, and not restored"))
    for name in files.names():
        if re.fullmatch(r"(?:sampler|dl_state_dict)(?:_\d+)?\.bin|custom_checkpoint_\d+\.pkl", name):
            content.kept[name.rpartition(".")[0]] = read_torch(files, name)
            content.left_out.append((name, "Accelerate's own: kept as values, no component takes it"))
    add_fsdp(content, files)
    done = {folder for folder, _ in files.within}
    for folder in sorted(files.folders - done):
        if "/" not in folder:
            content.left_out.append((folder, "a folder of a plugin's own (DeepSpeed …): import that by itself"))
    return content


def _models(content: Content, files: Files) -> None:
    indexes = {name for name in files.names() if name.endswith(".index.json")}
    for name in files.names():
        match = _MODEL.fullmatch(name)
        if match is None or (not match[2] and f"{name}.index.json" in indexes):
            continue
        content.module("model" if match[1] is None else f"model_{match[1]}", read_weights(files, name))


def _numbered(content: Content, files: Files, name: str, ending: str, kind: str) -> None:
    for file in files.names():
        match = re.fullmatch(rf"({name}(?:_\d+)?)\.{ending}", file)
        if match is None:
            continue
        state: Any = read_torch(files, file)
        if kind == OPTIMIZER and not is_optimizer(state):
            content.kept[match[1]] = state
            content.left_out.append((match[1], "not as torch's are: kept as a value"))
        else:
            content.components[match[1]] = ImportedComponent(kind, optimizer_of(state) if kind == OPTIMIZER else state)
