"""A store that ends the process before its n-th change: what was changed until then stays."""

from __future__ import annotations

from relight.store import ByteStore
from relight.store.base import Writer
from relight.store.wrapper import StoreWrapper


class Killed(BaseException):
    """As if the process had ended here."""


class Mortal(StoreWrapper):
    """``inner``; ``left`` counts the changes that are still made, −1: for ever. Once one was refused, all are until ``left`` is set anew."""

    def __init__(self, inner: ByteStore, left: int = -1) -> None:
        super().__init__(inner)
        self.left = left

    def _over(self, below: ByteStore) -> ByteStore:
        return Mortal(below, self.left)

    def change(self) -> None:
        """One more; ``Killed`` if it is one too many."""
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
