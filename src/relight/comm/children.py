"""The command, environment and import path of every Python process that Relight starts.

Invariant: a child runs the same Relight as its parent. Relight's own imports in a child never search the working
directory. Only a user's script gets the directory on ``sys.path`` that Python gives a script.
``tests/house/test_children.py`` finds other uses of ``sys.executable``.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

_BOOTSTRAP = str(Path(__file__).resolve().with_name("bootstrap.py"))
_PATH, _SAFE = "PYTHONPATH", "PYTHONSAFEPATH"

_PATH_SETTINGS = ("RELIGHT_EVENTS", "RELIGHT_CACHE", "RELIGHT_SETTINGS")
"""Settings that are paths."""


def child_command(module: str, *arguments: str, unbuffered: bool = False) -> list[str]:
    """Return the command that runs ``module`` of this Relight in a new interpreter.

    The interpreter ignores the environment and the user's site directory if this one does.
    """
    inherited = [
        flag for flag, is_set in (("-E", sys.flags.ignore_environment), ("-s", sys.flags.no_user_site)) if is_set
    ]
    return [sys.executable, *inherited, "-P", *(["-u"] if unbuffered else []), _BOOTSTRAP, module, *arguments]


def script_command(path: str | os.PathLike[str], *arguments: str, safe: bool = False) -> list[str]:
    """Return the command that runs the program at ``path``, for tests. Python adds the script's directory to the path
    unless ``safe``."""
    return [sys.executable, *(["-P"] if safe else []), str(path), *arguments]


def child_environment(base: Mapping[str, str] | None = None, **added: str) -> dict[str, str]:
    """Return the environment of a child that runs only Relight's code: ``base``, or this process's, and ``added``.

    Empty entries of ``PYTHONPATH`` name the working directory: they are removed. Relative entries, and relative paths in settings, are made
    absolute, as the child may run in another directory.
    """
    environment = {**(os.environ if base is None else base), **added}
    for name in _PATH_SETTINGS:
        value = environment.get(name, "")
        if value and value != "0" and not value.startswith("~"):
            environment[name] = os.path.abspath(value)
    entries = [os.path.abspath(entry) for entry in environment.pop(_PATH, "").split(os.pathsep) if entry]
    if entries:
        environment[_PATH] = os.pathsep.join(entries)
    return environment


def script_directory(script: str, *, as_module: bool) -> str:
    """Return the directory that Python puts first on ``sys.path`` for this script or ``-m`` module; "" if the user has
    disabled that."""
    if os.environ.get(_SAFE):
        return ""
    return os.getcwd() if as_module else os.path.dirname(os.path.realpath(script))


def enter_script(script: str, *, as_module: bool) -> None:
    """Put the script's directory first on ``sys.path``, right before the script runs in this process. Relight's own
    modules get none."""
    if as_module and script.partition(".")[0] == "relight":
        return
    if directory := script_directory(script, as_module=as_module):
        sys.path.insert(0, directory)


@contextmanager
def safe_spawn() -> Iterator[None]:
    """Keep the working directory off the path of processes that ``multiprocessing`` spawns within this block.

    Its command is ``python -c``, for which Python puts the working directory first. The variable is set for the whole process meanwhile, so
    keep the block as short as the spawn itself.
    """
    former = os.environ.get(_SAFE)
    os.environ[_SAFE] = "1"
    try:
        yield
    finally:
        if former is None:
            os.environ.pop(_SAFE, None)
        else:
            os.environ[_SAFE] = former
