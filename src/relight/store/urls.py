"""Open a store by its URL."""

from __future__ import annotations

import os
import re
from collections.abc import Callable

from relight.errors import ConfigError, shown
from relight.format.names import STRIPE_FILE
from relight.keys import StoreSecurity
from relight.run_names import dir_of
from relight.store.anchored import AnchoredStore
from relight.store.base import ByteStore
from relight.store.blocks import BlockCache, blocks_from_settings
from relight.store.cached import CachedStore
from relight.store.encrypted import EncryptedStore
from relight.store.local import LocalStore
from relight.store.memory import MemoryStore
from relight.store.mirrored import MirroredStore
from relight.store.object_client import SCHEMES
from relight.store.objects import ObjectStore
from relight.store.plugins import open_plugin, plugin_schemes
from relight.store.signed import SignedStore
from relight.store.striped import MIRRORS, SCHEME, StripedStore, is_mirrored, places_in
from relight.store.web import WebStore
from relight.store.wrapper import StoreWrapper

_OPENERS: dict[str, Callable[[str], ByteStore]] = {
    "file": lambda url: _local(_path_of_file(url)),
    "memory": lambda url: MemoryStore.named(url[len("memory://") :].strip("/")),
    **dict.fromkeys(SCHEMES, ObjectStore),
    **dict.fromkeys(("http", "https"), WebStore),
}
"""Relight's own stores by the scheme of their URL. Other schemes are those of plug-ins."""
_ONE_SLASH = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):/([^/].*)\Z", re.DOTALL)
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)\Z", re.DOTALL)


def open_bytes(
    url: str | os.PathLike[str], *, cache: BlockCache | None = None, guard: StoreSecurity | None = None
) -> ByteStore:
    """Return the store at ``url``.

    ``url``: a path, ``file://…``, several paths (``stripe:/a,/b,``), ``memory://name``, an object store (``s3://``, ``gs://``, ``az://``
    and a bucket), a plug-in's scheme, or, for reading, a web server. Remote stores are read through ``cache``, or the cache of
    ``RELIGHT_CACHE``. Encryption, signatures and anchor follow ``guard``, or the settings.
    """
    store = _open(path_text(url), cache)
    guard = StoreSecurity.from_settings() if guard is None else guard
    if guard.keys is not None:
        store = EncryptedStore(store, guard.keys)
    if guard.anchor:
        store = AnchoredStore(store, _open(guard.anchor, None), guard.trust)
    if guard.signer is not None or guard.trust is not None:
        store = SignedStore(store, guard.signer, guard.trust)
    if isinstance(store, StoreWrapper):
        store.guard = guard
    return store


def path_text(url: object) -> str:
    """Return a path or URL as a text. Raise ``ConfigError`` for other types, which must not become file names by accident."""
    text = os.fspath(url) if isinstance(url, (str, os.PathLike)) else None
    if not isinstance(text, str):
        raise ConfigError(
            f"a path must be a text or a pathlib.Path, not {shown(url)}", where="path", hint="such as runs/demo"
        )
    return text


def _open(text: str, cache: BlockCache | None) -> ByteStore:
    if not text or "\0" in text:
        raise ConfigError("a store's path is empty or has a zero byte")
    if is_stripe(text):
        places, below = places_in(text)
        kind = MirroredStore if is_mirrored(text) else StripedStore
        return kind([f"{os.path.expanduser(place)}{below}" for place in places])
    match = _SCHEME.match(text)
    lacking = _ONE_SLASH.match(text)
    if lacking is not None and lacking[1].lower() in _OPENERS:
        raise ConfigError(
            f"{lacking[1]}:/ is no scheme", where=text, hint=f"write two slashes: {lacking[1]}://{lacking[2]}"
        )
    if match is None:
        return _local(os.path.expanduser(text))
    scheme = match[1].lower()
    store = _OPENERS[scheme](text) if scheme in _OPENERS else open_plugin(scheme, text)
    if store is None:
        known = "paths, stripe:, file://, memory://, s3://, gs://, az:// and, for reading, https://"
        plugins = "".join(f"; installed plug-ins: {name}://" for name in plugin_schemes())
        raise ConfigError(
            f"no store for {scheme}://",
            where=text,
            hint=f"there are {known}{plugins}; or install a package that registers it",
        )
    if store.properties().remote and (cache := cache or blocks_from_settings()) is not None:
        return CachedStore(store, cache)
    return store


def is_stripe(url: str) -> bool:
    """Return whether ``url`` names several directories as one store."""
    return url.startswith(SCHEME)


def stripe_scheme(url: str) -> str:
    """Return what comes before the directories in a stripe's URL."""
    return SCHEME + (MIRRORS if is_mirrored(url) else "")


def local_path(url: str) -> str | None:
    """Return the absolute path of a store in one directory; None for every other URL."""
    path = _path_of_file(url) if url.startswith("file://") else url
    if not path or "\0" in path or "://" in path or is_stripe(path):
        return None
    return os.path.abspath(os.path.expanduser(path))


def absolute(url: str) -> str:
    """Return local paths, also in a stripe, without ``~``, ``.`` and ``..``, so that the last component is a name. URLs stay unchanged."""
    if is_stripe(url) and "\0" not in url:
        places, below = places_in(url)
        below = os.path.normpath(below) if below else ""
        return f"{stripe_scheme(url)}{','.join(os.path.abspath(os.path.expanduser(place)) for place in places)},{below}"
    if not url or "://" in url or "\0" in url:
        return url.rstrip("/") if "://" in url and not url.endswith("://") else url
    return os.path.abspath(os.path.expanduser(url))


def _path_of_file(url: str) -> str:
    rest = url[len("file://") :]
    return rest if rest.startswith("/") else f"/{rest.split('/', 1)[-1]}"  # the first component is a host


def _local(path: str) -> LocalStore:
    """Return a directory as a store. Refuse one place of a stripe: it lacks files, which would count as damage or be partially deleted."""
    if os.path.lexists(os.path.join(path, STRIPE_FILE)):
        raise ConfigError(
            "this directory is one part of a striped store",
            where=path,
            hint="name all of them: stripe:/nvme0/ckpts,/nvme1/ckpts,",
        )
    return LocalStore(path)


def split_run(url: str | os.PathLike[str]) -> tuple[str, str]:
    """Return ``(store's URL, run's directory)``: the last component names the run. An invalid run name is returned unchanged."""
    text = path_text(url).rstrip("/")
    match = _SCHEME.match(text)
    scheme, rest = (f"{match[1]}://", match[2]) if match else ("", text)
    if is_stripe(text):
        places, rest = places_in(text)
        scheme = f"{stripe_scheme(text)}{','.join(places)},"
    head, slash, run = rest.rpartition("/")
    if not run or run in (".", ".."):
        raise ConfigError(f"{text!r} names no run", hint="give store/run, for example runs/demo")
    if not scheme:
        head = head or ("/" if slash else ".")
    return f"{scheme}{head}", dir_of(run)
