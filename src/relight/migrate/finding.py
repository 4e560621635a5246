"""All checkpoints below a directory, whoever wrote them, and the runs they belong to."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass

from relight.errors import CheckpointNotFound, ConfigError, IncompatibleState, RelightError
from relight.foreign import Found, look
from relight.format.names import STORE_FILE, is_run_name
from relight.migrate.journal import HOME

NEVER = (".json", ".txt", ".md", ".yaml", ".yml", ".log", ".py", ".csv", ".jsonl", ".html", ".png", ".lock", ".toml", ".sh")
"""Ends of names of files that are looked at only as a part of something."""
LEVELS_MAX = 16
_ODD = re.compile(r"[^A-Za-z0-9._-]+")
_NUMBER = re.compile(r"[0-9]+")


@dataclass(frozen=True, slots=True)
class Source:
    """A checkpoint that was found: ``name`` is its path below the directory that was searched."""

    name: str
    path: str
    run: str
    step: int
    format: str
    bytes: int
    tensors: int


@dataclass(frozen=True, slots=True)
class Findings:
    """Checkpoints, by run and step; what seems to be one and cannot be read, with why."""

    sources: list[Source]
    unreadable: list[tuple[str, str]]


def find(old: str, run: str | None = None, skip: str = "") -> Findings:
    """Look at everything below ``old``. A folder that is a checkpoint is not looked into any further. Links are not followed; neither
    ``skip`` nor another store of Relight is looked into.

    A run is the folder that its checkpoints lie in, by its path; ``run`` names that of those that lie in ``old`` itself. A checkpoint that
    does not say its step has the last number in its name.
    """
    root = os.path.realpath(old)
    if not os.path.exists(root):
        hint = "mount the bucket, or copy it here: other formats are read from a file system" if "://" in old else ""
        raise CheckpointNotFound("there is nothing here", where=old, hint=hint)
    found: list[tuple[str, Found]] = []
    unreadable: list[tuple[str, str]] = []
    for name, what in _walk(root, "", skip):
        if isinstance(what, Found):
            found.append((name, what))
        else:
            unreadable.append((name or ".", str(what.what)))
    names = _runs({os.path.dirname(name) for name, _ in found}, run or os.path.basename(root))
    sources = [
        Source(
            name or os.path.basename(root),
            one.path,
            names[os.path.dirname(name)],
            _step(name or root, one),
            one.format,
            one.bytes,
            one.tensors,
        )
        for name, one in found
    ]
    return Findings(sorted(sources, key=lambda one: (one.run, one.step, one.name)), sorted(unreadable))


def _walk(path: str, name: str, skip: str, level: int = 0) -> Iterator[tuple[str, Found | RelightError]]:
    if path == skip or os.path.exists(os.path.join(path, STORE_FILE)):
        return
    try:
        yield name, look(path)
        return
    except IncompatibleState:
        pass
    except RelightError as error:
        if not os.path.isdir(path):
            yield name, error
            return
        inner = list(_below(path, name, skip, level))
        yield from inner or [(name, error)]
        return
    yield from _below(path, name, skip, level)


def _below(path: str, name: str, skip: str, level: int) -> Iterator[tuple[str, Found | RelightError]]:
    if not os.path.isdir(path) or level >= LEVELS_MAX:
        return
    try:
        with os.scandir(path) as entries:
            inside = sorted((entry.name, entry.is_dir(follow_symlinks=False), entry.is_file(follow_symlinks=False)) for entry in entries)
    except OSError as error:
        yield name, RelightError(f"cannot be listed: {error.strerror}", where=path)
        return
    for one, is_dir, is_file in inside:
        if is_dir or (is_file and not one.startswith(".") and not one.endswith(NEVER)):
            yield from _walk(os.path.join(path, one), f"{name}/{one}" if name else one, skip, level + 1)


def _step(name: str, found: Found) -> int:
    if found.step is not None:
        return found.step
    numbers = _NUMBER.findall(os.path.basename(name))
    return int(numbers[-1]) % 10**15 if numbers else 0


def _runs(folders: set[str], top: str) -> dict[str, str]:
    """A run's name for each folder, no two the same."""
    names: dict[str, str] = {}
    taken: set[str] = {HOME}
    for folder in sorted(folders):
        plain = _ODD.sub("-", folder.replace("/", "-") or top).strip("-.")[:120] or "run"
        name, number = plain, 2
        while name in taken or not is_run_name(name):
            name, number = f"{plain if is_run_name(plain) else 'run'}-{number}", number + 1
            if number > 10**6:
                raise ConfigError("no name for a run", where=folder)
        taken.add(name)
        names[folder] = name
    return names
