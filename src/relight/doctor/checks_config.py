"""What can be wrong with settings. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from shlex import quote
from urllib.parse import urlsplit

from relight.doctor.facts import DoctorFacts
from relight.doctor.finding import CheckHit, check

_OTHERS = 0o077
_HERE = ("localhost", "127.0.0.1", "::1")


@check("setting-unknown", "warning", "config", "a `RELIGHT_…` variable is set that is no setting")
def _unknown(facts: DoctorFacts) -> Iterator[CheckHit]:
    for name, close in facts.config.unknown:
        yield CheckHit(
            f"{name} is no setting",
            "environment",
            f"did you mean {close}?" if close else "docs/reference.md lists them",
            "what it was to set is not set",
            f"set {close}" if close else "take it away",
            f"unset {name}",
        )


@check("setting-bad", "error", "config", "the value of a setting is none that it can have", "config")
def _bad(facts: DoctorFacts) -> Iterator[CheckHit]:
    for name, trouble in facts.config.bad:
        yield CheckHit(
            f"{name} has a value that it cannot have",
            name,
            trouble.what,
            "whoever needs it stops there",
            trouble.hint or "correct it",
            f"unset {name}",
        )


@check("toml", "error", "config", "`relight.toml` is no TOML, or has an unknown table or key, or a value that it cannot have", "config")
def _toml(facts: DoctorFacts) -> Iterator[CheckHit]:
    error = facts.config.file_error
    if error is not None:
        yield CheckHit(
            "relight.toml is not as it should be",
            error.where or facts.config.file,
            error.what,
            "neither relight run nor a Checkpointer starts",
            error.hint or "correct it",
            "relight config check",
        )


@check("key-file", "warning", "config", "others may read a file that holds a key")
def _key_file(facts: DoctorFacts) -> Iterator[CheckHit]:
    for one in facts.config.key_files:
        if one.mode & _OTHERS:
            yield CheckHit(
                "others may read a key",
                one.path,
                f"its mode is {one.mode & 0o7777:04o}",
                "who reads it opens every checkpoint",
                "keep it to yourself; if somebody may have read it, exchange the key",
                f"chmod 600 {quote(one.path)}",
            )


@check("key-inside", "error", "config", "a key lies in the store that it opens")
def _key_inside(facts: DoctorFacts) -> Iterator[CheckHit]:
    for one in facts.config.key_files:
        if one.in_store:
            yield CheckHit(
                "the key lies in the store that it opens",
                one.path,
                facts.store.url,
                "whoever has the store has the key: it is as if not encrypted",
                "move it elsewhere, and exchange it",
                f"relight keys status {quote(facts.store.url)}",
            )


@check("core-dumps", "warning", "config", "processes that hold keys may leave core dumps (`RELIGHT_CORE_DUMPS=1`)")
def _dumps(facts: DoctorFacts) -> Iterator[CheckHit]:
    if {"RELIGHT_CORE_DUMPS", "RELIGHT_KEY"} <= facts.config.settings:
        yield CheckHit(
            "core dumps may hold keys",
            "RELIGHT_CORE_DUMPS",
            "it is set, and so is RELIGHT_KEY",
            "a crash writes the key to disk, in the clear",
            "set it only to find a crash",
            "unset RELIGHT_CORE_DUMPS",
        )


@check("endpoint-clear", "warning", "config", "an object store is reached without TLS, on another machine")
def _endpoint(facts: DoctorFacts) -> Iterator[CheckHit]:
    address = urlsplit(facts.config.endpoint)
    if facts.store.kind == "object" and address.scheme == "http" and address.hostname not in _HERE:
        yield CheckHit(
            "the object store is reached in the clear",
            "AWS_ENDPOINT_URL",
            facts.config.endpoint,
            "whoever is on the way reads weights, and can change them",
            "use https://",
            facts.config.endpoint and f"export AWS_ENDPOINT_URL=https://{address.netloc}",
        )


@check("single-writer", "warning", "config", "one writer is promised for a store that needs no such promise")
def _single(facts: DoctorFacts) -> Iterator[CheckHit]:
    if facts.config.single_writer and facts.store.exclusive:
        yield CheckHit(
            "a promise that is not needed",
            "RELIGHT_SINGLE_WRITER",
            f"{facts.store.url} lets a name be created once only",
            "set by habit, it takes the guard away where one is missing",
            "take it away",
            "unset RELIGHT_SINGLE_WRITER",
        )


@check("cache", "warning", "config", "the cache's directory cannot be used")
def _cache(facts: DoctorFacts) -> Iterator[CheckHit]:
    if facts.config.cache is not None:
        yield CheckHit(
            "the cache cannot be used",
            facts.config.cache.where or "RELIGHT_CACHE",
            facts.config.cache.what,
            "everything is read from far away again",
            facts.config.cache.hint or "name a directory of a local disk that you may write to",
            "unset RELIGHT_CACHE",
        )


@check("cache-far", "warning", "config", "the cache lies on a network file system or in memory")
def _cache_far(facts: DoctorFacts) -> Iterator[CheckHit]:
    mount = facts.config.cache_mount
    if mount is not None and (mount.is_network or mount.is_memory):
        yield CheckHit(
            "the cache is on no local disk",
            "RELIGHT_CACHE",
            f"{mount.point} is {mount.type}",
            "it takes the memory that training needs" if mount.is_memory else "it is not nearer than the store",
            "name a directory of a local disk",
            'findmnt -T "$RELIGHT_CACHE"',
        )
