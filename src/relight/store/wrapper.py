"""Base class of store wrappers: it forwards every operation, and subclasses override some."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

from relight.keys import StoreSecurity
from relight.store.base import (
    ByteStore,
    Entry,
    Properties,
    Reader,
    Upload,
    Writer,
    invalidate_cache,
    rewrites,
    without_cache,
)


class StoreWrapper:
    """``inner``, unchanged."""

    guard: StoreSecurity | None = None
    """Encryption, signatures and anchor of all of the run's stores. Only set on the outermost wrapper."""

    def __init__(self, inner: ByteStore) -> None:
        self.inner, self.url = inner, inner.url

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.inner!r})"

    def without_cache(self) -> ByteStore:
        """See ``CachesBlocks``."""
        below = without_cache(self.inner)
        return self if below is self.inner else self._over(below)

    def _over(self, below: ByteStore) -> ByteStore:
        """Return an equal wrapper around another store."""
        wrapper = object.__new__(type(self))
        wrapper.__dict__ |= self.__dict__
        wrapper.inner = below
        return wrapper

    def properties(self) -> Properties:
        """See ``ByteStore``."""
        return self.inner.properties()

    def verify_exclusive_create(self) -> bool:
        """See ``ByteStore``."""
        return self.inner.verify_exclusive_create()

    def put_once(self, key: str, data: bytes) -> bool:
        """See ``ByteStore``."""
        return self.inner.put_once(key, data)

    def write(self, key: str, size: int) -> Writer:
        """See ``ByteStore``."""
        return self.inner.write(key, size)

    def rewrite(self, key: str, size: int) -> Writer:
        """See ``Rewrites``."""
        return rewrites(self.inner).rewrite(key, size)

    def sync(self, prefix: str) -> None:
        """See ``ByteStore``."""
        self.inner.sync(prefix)

    def get(self, key: str, limit: int) -> bytes:
        """See ``ByteStore``."""
        return self.inner.get(key, limit)

    def open(self, key: str) -> Reader:
        """See ``ByteStore``."""
        return self.inner.open(key)

    def list(self, prefix: str) -> Iterator[Entry]:
        """See ``ByteStore``."""
        return self.inner.list(prefix)

    def delete(self, key: str) -> None:
        """See ``ByteStore``."""
        self.inner.delete(key)

    def delete_dir(self, prefix: str) -> bool:
        """See ``ByteStore``."""
        return self.inner.delete_dir(prefix)

    def uploads(self, prefix: str) -> Sequence[Upload]:
        """See ``ByteStore``."""
        return self.inner.uploads(prefix)

    def drop_upload(self, upload: Upload) -> None:
        """See ``ByteStore``."""
        self.inner.drop_upload(upload)

    def free_bytes(self) -> int | None:
        """See ``ByteStore``."""
        return self.inner.free_bytes()

    def invalidate(self, key: str, offset: int = 0, length: int | None = None) -> None:
        """See ``CachesBlocks``."""
        invalidate_cache(self.inner, key, offset, length)


W = TypeVar("W", bound=StoreWrapper)


def layer_of(store: ByteStore, kind: type[W]) -> W | None:
    """Return the outermost wrapper of a kind around ``store``; None if there is none."""
    while isinstance(store, StoreWrapper):
        if isinstance(store, kind):
            return store
        store = store.inner
    return None


def guard_of(store: ByteStore) -> StoreSecurity:
    """Return the security settings with which a store was opened. All tiers of a run use the same."""
    while isinstance(store, StoreWrapper):
        if store.guard is not None:
            return store.guard
        store = store.inner
    return StoreSecurity()


def unwrap(store: ByteStore) -> ByteStore:
    """Return the innermost store, without wrappers and without a local cache."""
    while isinstance(store, StoreWrapper):
        store = store.inner
    return without_cache(store)


def rewrapped(store: ByteStore, inner: ByteStore) -> ByteStore:
    """Return the wrappers of ``store`` around another innermost store."""
    return store._over(rewrapped(store.inner, inner)) if isinstance(store, StoreWrapper) else inner
