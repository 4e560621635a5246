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
from relight.policy.compact import Compact, lossy_of, with_asked
from relight.policy.file_defaults import defaults_of
from relight.policy.grace import GRACE
from relight.settings.environment import PREFIX, PROCESS_VARIABLES, environment, given_variables, text_of
from relight.settings.file import FILE, checked
from relight.settings.marks import marks
from relight.settings.registry import settings_by_name, settings_by_variable, typed_text
from relight.store.object_client import s3_server
from relight.store.urls import local_path
from relight.supervise.settings import read_settings

_OF_TESTS = f"{PREFIX}TEST_"


def collect_config(url: str) -> ConfigFacts:
    """Collect the settings in effect for a process that starts here and uses the store at ``url``."""
    given = given_variables()
    names = (*settings_by_variable(), *PROCESS_VARIABLES)
    unknown = [name for name in sorted(given) if name not in names and not name.startswith(_OF_TESTS)]
    file = Path(FILE)
    exists = file.is_file()
    error = _tried(lambda: (read_settings(None), checked("checkpoint", defaults_of))) if exists else None
    now = environment()
    return ConfigFacts(
        settings=frozenset(given),
        unknown=tuple((name, next(iter(get_close_matches(name, names, 1, 0.75)), "")) for name in unknown),
        bad=tuple(_bad(given)),
        file=str(file.absolute()) if exists else "",
        file_error=error,
        key_files=tuple(_key_files(url)),
        endpoint=s3_server().endpoint or "",
        cache=_cache(now.cache) if now.cache else None,
        cache_mount=mount_of(now.cache) if now.cache else None,
        single_writer=_is_promised(),
        assigned=frozenset(_assigned()),
        threads=os.environ.get("OMP_NUM_THREADS", ""),
        grace=bool(text_of(GRACE)) or (exists and error is None and _knows_the_end()),
    )


def _is_promised() -> bool:
    try:
        return environment().single_writer
    except ConfigError:  # reported with the other variables
        return False


def _knows_the_end() -> bool:
    """Return whether ``relight.toml`` sets a grace period or a source of preemption notices."""
    settings = read_settings(None)
    return bool(settings.grace_s or settings.notices)


def _assigned() -> set[str]:
    """Return the names of the settings that are set. If the file cannot be read, only those of variables."""
    try:
        return {name for name, mark in marks().items() if mark}
    except ConfigError:
        return {name for name, setting in settings_by_name().items() if text_of(setting.variable)}


def _tried(call: Callable[[], object]) -> Trouble | None:
    try:
        call()
    except RelightError as error:
        return Trouble.from_error(error)
    return None


def _bad(given: dict[str, str]) -> Iterator[tuple[str, Trouble]]:
    for name, text in given.items():
        checks = name in settings_by_variable() and "__" not in name
        if checks and (trouble := _tried(lambda name=name, text=text: check_variable(name, text))) is not None:  # type: ignore[misc]
            yield name, trouble


def check_variable(variable: str, text: str) -> None:
    """Raise ``ConfigError`` if a setting's variable may not have this text: by the setting's type, and by the code that reads it."""
    typed_text(settings_by_variable()[variable], text)
    key = settings_by_variable()[variable].name.removeprefix("environment.")
    if key == "lossy":
        with_asked(Compact(), lossy_of(text))
    elif key in ("key", "sign", "trust"):
        specs = {"encrypt": "", "sign": "", "trust": (), "anchor": ""}
        StoreSecurity.from_settings(**{**specs, "encrypt" if key == "key" else key: text})  # type: ignore[arg-type]


def _key_files(url: str) -> Iterator[KeyFile]:
    """Return the key files that the specs of encryption and signing keys name."""
    directory = local_path(url)
    top = os.path.realpath(directory) if directory is not None else None
    specs = [*environment().key.split(), *environment().sign.split()]
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
