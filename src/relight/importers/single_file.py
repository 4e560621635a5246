"""Import one file: safetensors, or ``torch.save`` with the content of a script or of Lightning."""

from __future__ import annotations

from typing import Any

from relight.errors import IncompatibleState
from relight.importers.content import (
    MODULE,
    OPTIMIZER,
    SCHEDULER,
    Content,
    ImportedComponent,
    is_optimizer,
    kind_of,
    optimizer_of,
    pickled_module,
)
from relight.importers.files import Files
from relight.importers.safetensors import is_safetensors, read_safetensors
from relight.importers.torch_file import form_of, read_torch
from relight.importers.tree_builder import described

_LIGHTNING = "pytorch-lightning_version"


def detect_file(files: Files, name: str = "") -> Content | None:
    """Return the content of a single file; None if its format is unknown."""
    if is_safetensors(files, name):
        tensors, metadata = read_safetensors(files, name)
        content = Content("safetensors", "safetensors file")
        content.module("model", tensors)
        if metadata:
            content.kept["metadata"] = metadata
        return content
    form = form_of(files, name)
    if not form:
        return None
    loaded = read_torch(files, name)
    writer = "torch.save" if form == "zip" else "torch.save before 1.6"
    if isinstance(loaded, dict) and _LIGHTNING in loaded and isinstance(loaded.get("state_dict"), dict):
        return lightning(loaded)
    return from_dict("torch", f"{writer} file", loaded, files.where(name))


def from_dict(kind: str, format: str, loaded: Any, where: str) -> Content:
    """Return the content of a script's own dict, a module's state, or an optimizer's."""
    content = Content(kind, format)
    if (state := pickled_module(loaded)) is not None:
        content.notes.append("model: saved as an object; its state is taken, its class is not")
        loaded = state
    if kind_of(loaded) == MODULE:
        content.module("model", loaded)
    elif is_optimizer(loaded):
        content.components["optimizer"] = ImportedComponent(OPTIMIZER, optimizer_of(loaded))
    elif isinstance(loaded, dict):
        content.take(loaded)
    else:
        raise IncompatibleState(
            f"it holds {described(loaded)} instead of a state dict or a dict of state dicts", where=where
        )
    return content


def lightning(checkpoint: dict[Any, Any]) -> Content:
    """Return the content of a ``.ckpt`` of Lightning's ``Trainer``.

    It has one module, numbered optimizers and schedulers. Loops and callbacks are kept as values.
    """
    version = checkpoint.get(_LIGHTNING)
    content = Content(
        "lightning",
        f"Lightning {version} .ckpt" if isinstance(version, str) and len(version) < 30 else "Lightning .ckpt",
    )
    state = checkpoint["state_dict"]
    if kind_of(state) == MODULE:
        content.components["model"] = ImportedComponent(MODULE, state)
    else:
        content.kept["state_dict"] = state
        content.left_out.append(("model", "its state is not a module's: kept as values"))
    for key, kind, name in (("optimizer_states", OPTIMIZER, "optimizer"), ("lr_schedulers", SCHEDULER, "scheduler")):
        states = checkpoint.get(key)
        states = states if isinstance(states, list) else []
        for index, state_entry in enumerate(states):
            component = name if len(states) == 1 else f"{name}_{index}"
            if kind == OPTIMIZER and is_optimizer(state_entry):
                content.components[component] = ImportedComponent(kind, optimizer_of(state_entry))
            elif kind == SCHEDULER and isinstance(state_entry, dict):
                content.components[component] = ImportedComponent(kind, state_entry)
            else:
                content.kept[component] = state_entry
                content.left_out.append((component, "not as torch's are: kept as a value"))
    content.first_step = 1
    content.step = (
        checkpoint["global_step"]
        if type(checkpoint.get("global_step")) is int and 0 <= checkpoint["global_step"] < 10**15
        else None
    )
    done = ("state_dict", "optimizer_states", "lr_schedulers")
    content.kept |= {key: value for key, value in checkpoint.items() if key not in done and type(key) is str}
    if "loops" in checkpoint:
        content.left_out.append(
            ("loops", "Lightning's own position in its data: kept as values, no component takes it")
        )
    content.notes.append("Lightning saves no random number generators")
    _callback_metrics(content, checkpoint.get("callbacks"))
    return content


def _callback_metrics(content: Content, callbacks: Any) -> None:
    """Take the metrics that ``ModelCheckpoint`` callbacks monitor."""
    for callback in callbacks.values() if isinstance(callbacks, dict) else ():
        if (
            isinstance(callback, dict)
            and isinstance(callback.get("monitor"), str)
            and callback["monitor"].isprintable()
        ):
            content.measured(callback["monitor"][:80], callback.get("current_score"))
