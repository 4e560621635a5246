"""Collect facts about settings: the environment, ``relight.toml``, key files."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from difflib import get_close_matches
from pathlib import Path

from relight.doctor.facts import ConfigFacts, KeyFile, Trouble
from relight.doctor.facts_store import mount_of
from relight.errors import ConfigError, RelightError
from relight.keys import StoreSecurity
from relight.policy.argument_checks import bytes_of
from relight.policy.file_defaults import defaults_of
from relight.settings.file import FILE, checked
from relight.settings.marks import marks
from relight.settings.registry import PROCESS_VARIABLES, VARIABLES
from relight.settings.registry import SETTINGS as NAMES
from relight.store.object_client import RetryTimes
from relight.store.probe import single_writer_promised
from relight.store.urls import local_path
from relight.supervise.settings import read_settings

SETTINGS = (*VARIABLES, *PROCESS_VARIABLES)
"""Environment variables that are settings."""
_OURS = "RELIGHT_"
_OF_TESTS = f"{_OURS}TEST_"


def collect_config(url: str) -> ConfigFacts:
    """Collect the settings in effect for a process that starts here and uses the store at ``url``."""
    given = {name: value for name, value in os.environ.items() if name.startswith(_OURS) and value}
    unknown = [name for name in sorted(given) if name not in SETTINGS and not name.startswith(_OF_TESTS)]
    file = Path(FILE)
    exists = file.is_file()
    error = _tried(lambda: (read_settings(None), checked("checkpoint", defaults_of))) if exists else None
    cache = os.environ.get("RELIGHT_CACHE", "")
    return ConfigFacts(
        settings=frozenset(given),
        unknown=tuple((name, next(iter(get_close_matches(name, SETTINGS, 1, 0.75)), "")) for name in unknown),
        bad=tuple(_bad(given)),
        file=str(file.absolute()) if exists else "",
        file_error=error,
        key_files=tuple(_key_files(url)),
        endpoint=next(
            (
                value
                for name in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
                if (value := os.environ.get(name, ""))
            ),
            "",
        ),
        cache=_cache(cache) if cache else None,
        cache_mount=mount_of(cache) if cache else None,
        single_writer=os.environ.get("RELIGHT_SINGLE_WRITER", "").lower() in ("1", "true", "yes"),
        assigned=frozenset(_assigned()),
        threads=os.environ.get("OMP_NUM_THREADS", ""),
        grace=bool(os.environ.get("RELIGHT_GRACE_S")) or (exists and error is None and _knows_the_end()),
    )


def _knows_the_end() -> bool:
    """Return whether ``relight.toml`` sets a grace period or a source of preemption notices."""
    settings = read_settings(None)
    return bool(settings.start.grace_s or settings.announced.notices)


def _assigned() -> set[str]:
    """Return the names of the settings that are set. If the file cannot be read, only those of variables."""
    try:
        return {name for name, mark in marks().items() if mark}
    except ConfigError:
        return {name for name, setting in NAMES.items() if os.environ.get(setting.variable)}


def _tried(call: Callable[[], object]) -> Trouble | None:
    try:
        call()
    except RelightError as error:
        return Trouble.from_error(error)
    return None


def _bad(given: dict[str, str]) -> Iterator[tuple[str, Trouble]]:
    tries: dict[str, Callable[[], object]] = {
        "RELIGHT_STORE_PATIENCE_S": RetryTimes.usual,
        "RELIGHT_SINGLE_WRITER": single_writer_promised,
        "RELIGHT_CACHE_BYTES": lambda: bytes_of(given["RELIGHT_CACHE_BYTES"], "RELIGHT_CACHE_BYTES"),
        "RELIGHT_GRACE_S": lambda: _seconds("RELIGHT_GRACE_S", given["RELIGHT_GRACE_S"]),
        "RELIGHT_KEY": lambda: StoreSecurity.from_settings(sign="", trust=(), anchor=""),
        "RELIGHT_SIGN": lambda: StoreSecurity.from_settings(encrypt=(), trust=(), anchor=""),
        "RELIGHT_TRUST": lambda: StoreSecurity.from_settings(encrypt=(), sign="", anchor=""),
    }
    for name, call in tries.items():
        if name in given and (trouble := _tried(call)) is not None:
            yield name, trouble


def _seconds(name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 86400:
        raise ConfigError(f"{name} must be a number of seconds, at most 86400, and is {text[:40]!r}")
    return value


def _key_files(url: str) -> Iterator[KeyFile]:
    """Return the key files that the specs of encryption and signing keys name."""
    directory = local_path(url)
    top = os.path.realpath(directory) if directory is not None else None
    specs = [*os.environ.get("RELIGHT_KEY", "").split(), *os.environ.get("RELIGHT_SIGN", "").split()]
    for spec in specs:
        path = spec.rpartition("file:")[2] if "file:" in spec else ""
        if not path:
            continue
        real = os.path.realpath(os.path.expanduser(path))
        try:
            mode = os.stat(real).st_mode & 0o7777
        except OSError:  # an invalid key is reported with its setting
            continue
        yield KeyFile(path, mode, top is not None and (real == top or real.startswith(top.rstrip("/") + "/")))


def _cache(folder: str) -> Trouble | None:
    """Return why the cache cannot be used; None if it can. A directory that does not exist is created at its first use."""
    if "\0" in folder or "://" in folder:
        return Trouble("config", "RELIGHT_CACHE must be a directory on a local disk", folder[:200])
    path = os.path.abspath(os.path.expanduser(folder))
    while not os.path.lexists(path) and os.path.dirname(path) != path:
        path = os.path.dirname(path)
    if not os.path.isdir(path):
        return Trouble("config", "it is not a directory", path)
    if not os.access(path, os.W_OK | os.X_OK):
        return Trouble("store", "it is not writable", path)
    return None
