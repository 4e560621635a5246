"""A cache of decoded chunks and indexes, for all arrays of a checkpoint together."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any

CACHE_BYTES = 64 << 20


class ValueCache:
    """The last values that were read, ``CACHE_BYTES`` in total, so that memory does not grow with the number of arrays.
    Thread-safe.

    The newest value stays, whatever its size. A chunk in a temporary file counts too: it uses space in the file
    system.
    """

    def __init__(self) -> None:
        self._values: OrderedDict[Hashable, tuple[Any, int]] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    def get(self, key: Hashable, read: Callable[[], Any], nbytes: Callable[[Any], int]) -> Any:
        """Return the value of ``key``; read it if it is not cached. Two threads may read the same value at once."""
        with self._lock:
            entry = self._values.get(key)
            if entry is not None:
                self._values.move_to_end(key)
                return entry[0]
        value = read()
        with self._lock:
            self._drop(key)
            self._values[key] = value, nbytes(value)
            self._bytes += self._values[key][1]
            while self._bytes > CACHE_BYTES and len(self._values) > 1:
                self._drop(next(iter(self._values)))
        return value

    def _drop(self, key: Hashable) -> None:
        _, size = self._values.pop(key, (None, 0))
        self._bytes -= size
