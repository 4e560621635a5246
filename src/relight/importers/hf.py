"""Import folders of Hugging Face: models, sharded or not, a ``Trainer``'s ``checkpoint-N``, and folders of
``accelerate``."""

from __future__ import annotations

import re
from typing import Any

from relight.errors import CorruptCheckpoint, RelightError, UnsafeContent
from relight.importers.content import (
    OPTIMIZER,
    RNG,
    SCALER,
    SCHEDULER,
    Content,
    ImportedComponent,
    is_module,
    is_optimizer,
    optimizer_of,
)
from relight.importers.dcp_content import read_tree, take_tree
from relight.importers.files import Files
from relight.importers.rng_states import host_rng
from relight.importers.safetensors import is_safetensors, read_safetensors
from relight.importers.tensors import is_tensor
from relight.importers.torch_file import read_torch

_SMALL = ("config.json", "generation_config.json", "adapter_config.json")
WEIGHTS = (
    "model.safetensors",
    "pytorch_model.bin",
    "adapter_model.safetensors",
    "adapter_model.bin",
    "diffusion_pytorch_model.safetensors",
)


def weights_in(files: Files) -> str:
    """Return the file or index that has a folder's weights; empty if there is none."""
    for name in WEIGHTS:
        if files.has(f"{name}.index.json"):
            return f"{name}.index.json"
        if files.has(name) or name in files.others:
            return name
    return ""


def read_weights(files: Files, name: str, folder: str = "") -> dict[str, Any]:
    """Return a model's tensors by name, from a file or from the shards that an index names."""
    if not name.endswith(".index.json"):
        return _read_module(files, f"{folder}{name}")
    where, index = files.where(f"{folder}{name}"), files.json(f"{folder}{name}")
    places = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(places, dict) or not places:
        raise UnsafeContent("an index without a weight_map", where=where)
    shards: dict[str, dict[str, Any]] = {}
    for file in sorted({str(file_name) for file_name in places.values()}):
        if "/" in file:
            raise UnsafeContent(f"it names a file outside of the folder: {file[:80]!r}", where=where)
        shards[file] = _read_module(files, files.inside(f"{folder}{file}", where))
    tensors_by_name: dict[str, Any] = {}
    for key, file in places.items():
        if not isinstance(file, str) or key not in shards[file]:
            raise CorruptCheckpoint(f"{key[:80]!r} is not in {str(file)[:80]}, where the index has it", where=where)
        tensors_by_name[key] = shards[file][key]
    more = [key for tensors in shards.values() for key in tensors if key not in tensors_by_name]
    if more:
        raise CorruptCheckpoint(
            f"the shards hold {len(more)} tensors that the index does not know, such as {more[0][:80]!r}", where=where
        )
    return tensors_by_name


def _read_module(files: Files, name: str) -> dict[str, Any]:
    if is_safetensors(files, name):
        return dict(read_safetensors(files, name)[0])
    content = read_torch(files, name)
    if not is_module(content):
        raise UnsafeContent("something other than a model's tensors", where=files.where(name))
    return dict(content)


def detect_model(files: Files) -> Content | None:
    """Return the content of a folder that ``save_pretrained`` wrote; None for others."""
    name = weights_in(files)
    if not name:
        return None
    content = Content("hf", f"Hugging Face folder ({name})")
    content.module("model", read_weights(files, name))
    _keep_small(content, files)
    return content


def detect_trainer(files: Files) -> Content | None:
    """Return the content of a ``checkpoint-N`` of ``transformers.Trainer``; None for other folders.

    It has weights, optimizer, scheduler, generators and the trainer's state.
    """
    if not files.has("trainer_state.json"):
        return None
    name = weights_in(files)
    content = Content("trainer", f"Hugging Face Trainer checkpoint ({name or 'without weights of its own'})")
    if name:
        content.module("model", read_weights(files, name))
    _trainer_state(content, files)
    _optimizer(content, files, "optimizer", ("optimizer.pt", "optimizer.bin"))
    _scheduler(content, files, "scheduler", ("scheduler.pt", "scheduler.bin"))
    if files.has("scaler.pt"):
        content.components["scaler"] = ImportedComponent(SCALER, read_torch(files, "scaler.pt"))
    _rng(content, files)
    if files.has("training_args.bin"):
        content.left_out.append(("training_args.bin", "an object of transformers' own: the script sets it"))
    add_fsdp(content, files)
    content.left_out.append(("data position", "the Trainer computes it from global_step; it saves none"))
    _keep_small(content, files)
    return content


def add_trainer(content: Content, files: Files) -> None:
    """Add the files that a ``Trainer`` writes next to a DeepSpeed checkpoint."""
    if files.has("trainer_state.json"):
        content.format += ", of a Hugging Face Trainer"
        content.notes = [note for note in content.notes if "random number" not in note]
        _trainer_state(content, files)
        _rng(content, files)
        if "scheduler" not in content.components:
            _scheduler(content, files, "scheduler", ("scheduler.pt",))


def add_fsdp(content: Content, files: Files) -> None:
    """Add FSDP's subfolders of a Trainer's or Accelerate's folder: DCP directories, one for the model and one for the
    optimizer."""
    for folder in sorted(files.folders):
        if re.fullmatch(r"pytorch_model_fsdp_\d+|optimizer_\d+", folder) and files.has(f"{folder}/.metadata"):
            inner = files.below(folder)
            taken = Content("dcp", "")
            take_tree(taken, read_tree(inner), inner)
            number = folder.rpartition("_")[2]
            for name, part in taken.components.items():
                content.components[name if number == "0" else f"{name}_{number}"] = part
            content.kept |= {f"{folder}/{key}": value for key, value in taken.kept.items()}


def _trainer_state(content: Content, files: Files) -> None:
    state = files.json("trainer_state.json")
    if not isinstance(state, dict):
        raise UnsafeContent("a trainer's state that is not a JSON object", where=files.where("trainer_state.json"))
    step = state.get("global_step")
    content.first_step = 1
    content.step = step if type(step) is int and 0 <= step < 10**15 else None
    _history(content, state.get("log_history"))
    content.kept["trainer_state"] = state


def _optimizer(content: Content, files: Files, prefix: str, names: tuple[str, ...]) -> None:
    name = next((candidate for candidate in names if files.has(candidate)), None)
    if name is None:
        return
    state = read_torch(files, name)
    if is_optimizer(state):
        content.components[prefix] = ImportedComponent(OPTIMIZER, optimizer_of(state))
    else:
        content.kept[prefix] = state
        content.left_out.append((prefix, "not as torch's are: kept as a value"))


def _scheduler(content: Content, files: Files, prefix: str, names: tuple[str, ...]) -> None:
    name = next((candidate for candidate in names if files.has(candidate)), None)
    if name is not None:
        content.components[prefix] = ImportedComponent(SCHEDULER, read_torch(files, name))


def _rng(content: Content, files: Files) -> None:
    """Take one process's generators. Generators of several ranks are kept as values: the new job assigns them to ranks."""
    names = sorted(name for name in files.names() if re.fullmatch(r"rng_state(?:_\d+)?\.pth", name))
    if not names:
        content.notes.append("it has no random number generators")
        return
    states = {name: read_torch(files, name) for name in names}
    if len(states) == 1:
        (state,) = states.values()
        if take_rng(content, state, ("python", "numpy", "cpu")):
            return
    content.kept["rng_states"] = states
    why = f"of {len(states)} ranks" if len(states) > 1 else "not as expected"
    content.left_out.append(("rng", f"generators {why}: kept as values, and not restored"))


def take_rng(content: Content, states: Any, keys: tuple[str, str, str]) -> bool:
    """Take a process's generators as Relight's own. Return False if they have another form."""
    if not isinstance(states, dict):
        return False
    devices = {kind: _states(states.get(kind)) for kind in ("cuda", "xpu")}
    devices["cuda"] = devices["cuda"] or _states(states.get("torch_cuda_manual_seed"))
    python, numpy, cpu = (states.get(key) for key in keys)
    node = host_rng(python, numpy, cpu, devices)
    if node is None:
        return False
    content.components["rng"] = ImportedComponent(RNG, node)
    return True


def _states(value: Any) -> list[Any]:
    if is_tensor(value):
        return [value]
    return value if isinstance(value, list) and all(map(is_tensor, value)) else []


def _history(content: Content, history: Any) -> None:
    """Take the newest metrics of the log."""
    for entry in history if isinstance(history, list) else ():
        if isinstance(entry, dict):
            for key in ("loss", "eval_loss"):
                content.measured(key, entry.get(key))


def _keep_small(content: Content, files: Files) -> None:
    for name in _SMALL:
        if files.has(name):
            try:
                content.kept[name.removesuffix(".json")] = files.json(name)
            except RelightError as error:
                content.left_out.append((name, error.what))
