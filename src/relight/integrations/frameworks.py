"""Common code of the plug-ins for frameworks: import a framework, and build the Checkpointer's arguments."""

from __future__ import annotations

import inspect
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from relight.api import Store, load, save
from relight.checkpointer import Checkpointer
from relight.checkpointer.option_names import refuse_slip
from relight.errors import CheckpointNotFound, ConfigError, IncompatibleState, shown
from relight.format.names import STORE_FILE
from relight.policy import keep
from relight.store import ByteStore, Entry, open_bytes

OPTIONS = frozenset(inspect.signature(Checkpointer).parameters) - {"path", "components"}
"""A Checkpointer's options by name."""
_RESERVED = frozenset({"step", "samples", "micro_step"})
"""Names of ``Checkpointer.step``'s own arguments, which no metric can have."""
_RUN = "run"
"""Name of the run that stands for a framework's file."""


def needed(module: str, install: str) -> Any:
    """Import and return the framework's module. Raise ``ConfigError``, with what to install, if that fails."""
    try:
        return import_module(module)
    except (ImportError, OSError, RuntimeError) as error:
        raise ConfigError(
            f"{module} cannot be imported: {type(error).__name__}: {error}",
            hint=f"this plug-in needs it: pip install {install}",
        ) from error


def numbers(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metrics that are numbers, for ``Checkpointer.step``. Tensors are not read yet."""
    return {
        name: value
        for name, value in metrics.items()
        if name not in _RESERVED
        and (
            isinstance(value, (int, float))
            or (isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_complex())
        )
    }


def checkpointer_options(options: Mapping[str, Any], state: Mapping[str, object]) -> dict[str, Any]:
    """Return the arguments of a plug-in's Checkpointer: the caller's options, and ``state`` plus the caller's ``state=``.

    Raise ``ConfigError`` at once for a keyword that is neither an option nor a component; otherwise it would be found
    only when training begins.
    """
    for name, value in options.items():
        if name not in OPTIONS:
            refuse_slip(name, value, OPTIONS)
    more = options.get("state")
    if more is not None and not isinstance(more, Mapping):
        raise ConfigError(f"state= must be a dict of components by name, not {shown(more)}", where="state=")
    twice = sorted(set(more or ()) & set(state))
    if twice:
        raise ConfigError(f"the plug-in saves {twice[0]!r} itself", where="state=", hint="give it another name")
    return {**options, "state": {**state, **(more or {})}}


def save_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a plug-in that saves with ``relight.save``: only ``encrypt``.

    Raise ``ConfigError`` for others, before the first save.
    """
    for name in options:
        if name != "encrypt":
            raise ConfigError(f"{name!r} is not an option of this plug-in", where=f"{name}=", hint="it takes encrypt=")
    return dict(options)


def loaders_in(data: Any) -> dict[str, object]:
    """Return the loaders and stateful objects in a framework's nested data, as components ``data_0``, …"""
    loaders = [
        leaf
        for leaf in _leaves(data)
        if isinstance(leaf, torch.utils.data.DataLoader)
        or (hasattr(leaf, "state_dict") and hasattr(leaf, "load_state_dict"))
    ]
    return {f"data_{index}": loader for index, loader in enumerate(loaders)}


def _leaves(data: Any) -> Iterator[Any]:
    """Yield what is in nested containers, in order. An object with a state of its own is no container."""
    if not isinstance(data, (dict, list, tuple, deque)) or hasattr(data, "state_dict"):
        yield data
        return
    for child in data.values() if isinstance(data, dict) else data:
        yield from _leaves(child)


def write_as_file(path: str | os.PathLike[str], value: object, step: int, options: Mapping[str, Any]) -> None:
    """Save ``value``, which a framework would write to the file ``path``, as a run in a directory of that name.

    Durable when it returns. The run's previous checkpoint exists until then, and is deleted afterwards.
    """
    run = _run_in(path)
    save(run, {"file": value}, step=step, **options)
    Store(run, **options).prune(keep(last=1, prune_abandoned=True))  # an overwritten file has no older version, either


def read_as_file(path: str | os.PathLike[str], options: Mapping[str, Any]) -> Any:
    """Return the last value of ``write_as_file``, verified. Raise ``IncompatibleState`` for another program's file."""
    content = {} if Path(path).is_file() else load(_run_in(path), **options)
    if "file" not in content:
        raise IncompatibleState(
            "this plug-in did not write this checkpoint",
            where=os.fspath(path),
            hint="read it with the program that wrote it",
        )
    return content["file"]


def remove_as_file(path: str | os.PathLike[str]) -> None:
    """Delete what ``write_as_file`` wrote. Raise ``CheckpointNotFound``, and delete nothing, if ``path`` is anything else."""
    place = os.fspath(path)
    if os.path.islink(place.removeprefix("file://").rstrip("/")):
        raise CheckpointNotFound("this is a link: its target is not removed", where=place)
    store = open_bytes(place)
    if not {Entry(STORE_FILE, is_dir=False), Entry(_RUN, is_dir=True)} <= set(store.list("")):
        raise CheckpointNotFound("this plug-in did not write this checkpoint: nothing is removed", where=place)
    _delete_below(store, "")


def _delete_below(store: ByteStore, prefix: str) -> None:
    """Delete everything below ``prefix``. The store's record is last, so that an interrupted removal can be repeated."""
    for entry in sorted(store.list(prefix), key=lambda entry: entry.name == STORE_FILE):
        key = f"{prefix}/{entry.name}".lstrip("/")
        if entry.is_dir:
            _delete_below(store, key)
        else:
            store.delete(key)
    store.delete_dir(prefix)


def _run_in(path: str | os.PathLike[str]) -> str:
    """Return the run for a framework's path, which may be a URL: ``Path`` would make ``s3:/`` of ``s3://``."""
    return f"{os.fspath(path).rstrip('/')}/{_RUN}"


class StateFunctions:
    """A component made of two functions: ``get_state`` returns its state, and ``set_state`` restores it."""

    def __init__(self, get_state: Callable[[], dict[str, Any]], set_state: Callable[[dict[str, Any]], None]) -> None:
        self._get_state, self._set_state = get_state, set_state

    def state_dict(self) -> dict[str, Any]:
        """Return the result of ``get_state``."""
        return self._get_state()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Pass the state to ``set_state``."""
        self._set_state(state)
