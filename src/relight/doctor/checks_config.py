"""Checks of settings. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from shlex import quote
from urllib.parse import urlsplit

from relight.doctor.facts import DoctorFacts
from relight.doctor.finding import CheckHit, check

_OTHERS = 0o077
_HERE = ("localhost", "127.0.0.1", "::1")


@check("setting-unknown", "warning", "config", "a `RELIGHT_…` variable is set that is not a setting")
def _unknown(facts: DoctorFacts) -> Iterator[CheckHit]:
    for name, close in facts.config.unknown:
        yield CheckHit(
            f"{name} is not a setting",
            "environment",
            f"did you mean {close}?" if close else "docs/reference.md lists all settings",
            "the variable has no effect",
            f"set {close}" if close else "remove it",
            f"unset {name}",
        )


@check("setting-bad", "error", "config", "a setting has an invalid value", "config")
def _bad(facts: DoctorFacts) -> Iterator[CheckHit]:
    for name, trouble in facts.config.bad:
        yield CheckHit(
            f"{name} has an invalid value",
            name,
            trouble.what,
            "every command that needs the setting fails",
            trouble.hint or "correct it",
            f"unset {name}",
        )


@check(
    "toml",
    "error",
    "config",
    "`relight.toml` is not valid TOML, or has an unknown table or key, or an invalid value",
    "config",
)
def _toml(facts: DoctorFacts) -> Iterator[CheckHit]:
    error = facts.config.file_error
    if error is not None:
        yield CheckHit(
            "relight.toml is invalid",
            error.where or facts.config.file,
            error.what,
            "neither relight run nor a Checkpointer starts",
            error.hint or "correct it",
            "relight config check",
        )


@check("key-file", "warning", "config", "other users may read a file that holds a key")
def _key_file(facts: DoctorFacts) -> Iterator[CheckHit]:
    for file in facts.config.key_files:
        if file.mode & _OTHERS:
            yield CheckHit(
                "other users may read a key",
                file.path,
                f"its mode is {file.mode & 0o7777:04o}",
                "a user who reads it can decrypt every checkpoint",
                "restrict the mode; if another user may have read the key, rotate it",
                f"chmod 600 {quote(file.path)}",
            )


@check("key-inside", "error", "config", "a key is stored in the store that it opens")
def _key_inside(facts: DoctorFacts) -> Iterator[CheckHit]:
    for file in facts.config.key_files:
        if file.in_store:
            yield CheckHit(
                "the key is stored in the store that it opens",
                file.path,
                facts.store.url,
                "a copy of the store includes the key, so encryption protects nothing",
                "move it elsewhere, and rotate it",
                f"relight keys status {quote(facts.store.url)}",
            )


@check("core-dumps", "warning", "config", "processes that hold keys may leave core dumps (`RELIGHT_CORE_DUMPS=1`)")
def _dumps(facts: DoctorFacts) -> Iterator[CheckHit]:
    if {"RELIGHT_CORE_DUMPS", "RELIGHT_KEY"} <= facts.config.settings:
        yield CheckHit(
            "core dumps may hold keys",
            "RELIGHT_CORE_DUMPS",
            "it is set, and so is RELIGHT_KEY",
            "a crash writes the key to disk unencrypted",
            "set it only to find a crash",
            "unset RELIGHT_CORE_DUMPS",
        )


@check("endpoint-clear", "warning", "config", "an object store on another machine is used without TLS")
def _endpoint(facts: DoctorFacts) -> Iterator[CheckHit]:
    address = urlsplit(facts.config.endpoint)
    if facts.store.kind == "object" and address.scheme == "http" and address.hostname not in _HERE:
        yield CheckHit(
            "the object store is used without TLS",
            "AWS_ENDPOINT_URL",
            facts.config.endpoint,
            "anyone on the network path can read and change weights",
            "use https://",
            facts.config.endpoint and f"export AWS_ENDPOINT_URL=https://{address.netloc}",
        )


@check("single-writer", "warning", "config", "`RELIGHT_SINGLE_WRITER` is set for a store that does not need it")
def _single(facts: DoctorFacts) -> Iterator[CheckHit]:
    if facts.config.single_writer and facts.store.exclusive:
        yield CheckHit(
            "RELIGHT_SINGLE_WRITER is set and not needed",
            "RELIGHT_SINGLE_WRITER",
            f"{facts.store.url} supports exclusive creation",
            "on a store without exclusive creation, it would disable the guard against a second writer",
            "remove it",
            "unset RELIGHT_SINGLE_WRITER",
        )


@check("cache", "warning", "config", "the cache's directory cannot be used")
def _cache(facts: DoctorFacts) -> Iterator[CheckHit]:
    if facts.config.cache is not None:
        yield CheckHit(
            "the cache cannot be used",
            facts.config.cache.where or "RELIGHT_CACHE",
            facts.config.cache.what,
            "every read goes to the remote store again",
            facts.config.cache.hint or "name a writable directory on a local disk",
            "unset RELIGHT_CACHE",
        )


@check("cache-far", "warning", "config", "the cache is on a network file system or in memory")
def _cache_far(facts: DoctorFacts) -> Iterator[CheckHit]:
    mount = facts.config.cache_mount
    if mount is not None and (mount.is_network or mount.is_memory):
        yield CheckHit(
            "the cache is not on a local disk",
            "RELIGHT_CACHE",
            f"{mount.point} is {mount.type}",
            "it uses memory that training needs" if mount.is_memory else "it may be no faster than the store",
            "name a directory on a local disk",
            'findmnt -T "$RELIGHT_CACHE"',
        )
