"""A store that simulates a death before its n-th change. Earlier changes stay."""

from __future__ import annotations

from relight.store import ByteStore
from relight.store.base import Writer
from relight.store.wrapper import StoreWrapper


class Killed(BaseException):
    """Simulated death of the process."""


class Mortal(StoreWrapper):
    """``inner`` with at most ``left`` more changes; −1: no limit.

    After that every change is refused until ``left`` is set again.
    """

    def __init__(self, inner: ByteStore, left: int = -1) -> None:
        super().__init__(inner)
        self.left = left

    def change(self) -> None:
        """Count one change. Raise ``Killed`` if none is left."""
        if self.left == 0:
            raise Killed
        self.left -= 1

    def put_once(self, key: str, data: bytes) -> bool:
        """See ``ByteStore``."""
        self.change()
        return super().put_once(key, data)

    def write(self, key: str, size: int) -> Writer:
        """See ``ByteStore``."""
        self.change()
        return _Dying(super().write(key, size), self)

    def rewrite(self, key: str, size: int) -> Writer:
        """See ``Rewrites``."""
        self.change()
        return _Dying(super().rewrite(key, size), self)

    def delete(self, key: str) -> None:
        """See ``ByteStore``."""
        self.change()
        super().delete(key)

    def delete_dir(self, prefix: str) -> bool:
        """See ``ByteStore``."""
        self.change()
        return super().delete_dir(prefix)


class _Dying:
    def __init__(self, inner: Writer, store: Mortal) -> None:
        self._inner, self._store, self.align = inner, store, inner.align

    def write_at(self, offset: int, data: memoryview) -> None:
        """See ``Writer``."""
        self._store.change()
        self._inner.write_at(offset, data)

    def finish(self, size: int | None = None) -> None:
        """See ``Writer``."""
        self._store.change()
        self._inner.finish(size)

    def abort(self) -> None:
        """See ``Writer``."""
        self._inner.abort()
