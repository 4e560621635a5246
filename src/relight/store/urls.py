"""URLs to stores."""

from __future__ import annotations

import os
import re

from relight.errors import ConfigError
from relight.store.base import ByteStore
from relight.store.blocks import Blocks, blocks_from_settings
from relight.store.cached import CachedStore
from relight.store.local import LocalStore
from relight.store.memory import MemoryStore
from relight.store.object_client import SCHEMES
from relight.store.objects import ObjectStore
from relight.store.web import WebStore

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)\Z", re.DOTALL)


def open_bytes(url: str | os.PathLike[str], *, cache: Blocks | None = None) -> ByteStore:
    """The store at ``url``: a path, ``file://…``, ``memory://name``, an object store (``s3://``, ``gs://``, ``az://`` and a bucket), or,
    for reading, a web server. What is far away goes through ``cache``, or the one that ``RELIGHT_CACHE`` names."""
    text = os.fspath(url)
    if not text or "\0" in text:
        raise ConfigError("an empty path, or one with a zero byte, is no store")
    match = _SCHEME.match(text)
    if match is None:
        return LocalStore(os.path.expanduser(text))
    scheme, rest = match[1].lower(), match[2]
    if scheme == "file":
        return LocalStore(rest if rest.startswith("/") else f"/{rest.split('/', 1)[-1]}")
    if scheme == "memory":
        return MemoryStore.named(rest.strip("/"))
    if scheme in SCHEMES:
        far = (WebStore if scheme in ("http", "https") else ObjectStore)(text)
        cache = cache or blocks_from_settings()
        return CachedStore(far, cache) if cache is not None else far
    known = "paths, file://, memory://, s3://, gs://, az:// and, for reading, https://"
    raise ConfigError(f"no store for {scheme}://", where=text, hint=f"there are {known}")


def split_run(url: str | os.PathLike[str]) -> tuple[str, str]:
    """``(store's URL, run's name)``: the last component names the run."""
    text = os.fspath(url).rstrip("/")
    match = _SCHEME.match(text)
    scheme, rest = (f"{match[1]}://", match[2]) if match else ("", text)
    head, slash, run = rest.rpartition("/")
    if not run or run in (".", ".."):
        raise ConfigError(f"{text!r} names no run", hint="give store/run, for example runs/demo")
    if not scheme:
        head = head or ("/" if slash else ".")
    return f"{scheme}{head}", run
