"""Base class of store wrappers: it forwards every operation, and subclasses override some."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from relight.keys import StoreSecurity
from relight.store.base import (
    ByteStore,
    Entry,
    Properties,
    Reader,
    Rewrites,
    Upload,
    Writer,
    invalidate_cache,
    without_cache,
)


class StoreWrapper:
    """``inner``, unchanged."""

    guard: StoreSecurity
    """Encryption, signatures and anchor of all of the run's stores. Only set on the outermost wrapper."""

    def __init__(self, inner: ByteStore) -> None:
        self.inner = inner
        self.url, self.shared, self.needs_sync, self.parallel_reads = (
            inner.url,
            inner.shared,
            inner.needs_sync,
            inner.parallel_reads,
        )

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.inner!r})"

    def __getattr__(self, name: str) -> Any:
        some = (
            "lanes",
            "blocks",
            "counts",
            "encrypts",
            "guard",
            "anchored",
            "trusts",
        )  # attributes that only some stores have
        if name in some and "inner" in self.__dict__:
            return getattr(self.inner, name)
        raise AttributeError(name)

    @property
    def without_cache(self) -> ByteStore:
        """Return this store without a local cache. See ``base.without_cache``."""
        below = without_cache(self.inner)
        return self if below is self.inner else self._over(below)  # type: ignore[return-value]

    def _over(self, below: ByteStore) -> ByteStore:
        """Return an equal wrapper around another store."""
        raise NotImplementedError

    def properties(self) -> Properties:
        """See ``ByteStore``."""
        return self.inner.properties()

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
        """See ``invalidate_cache``."""
        invalidate_cache(self.inner, key, offset, length)


def guard_of(store: ByteStore) -> StoreSecurity:
    """Return the security settings with which a store was opened. All tiers of a run use the same."""
    guard: StoreSecurity = getattr(store, "guard", None) or StoreSecurity()
    return guard


def unwrap(store: ByteStore) -> ByteStore:
    """Return the innermost store, without wrappers and without a local cache."""
    while isinstance(store, StoreWrapper):
        store = store.inner
    return without_cache(store)


def rewrites(store: ByteStore) -> Rewrites:
    """Return ``store`` as ``Rewrites``. Raise ``StoreUnavailable`` if its files cannot be replaced."""
    if not hasattr(store, "rewrite"):
        from relight.errors import StoreUnavailable

        raise StoreUnavailable("no file can take another's place in this store", where=store.url, retryable=False)
    rewritable: Rewrites = store  # type: ignore[assignment]
    return rewritable
