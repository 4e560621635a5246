"""Decoded chunks and indexes that were read last, of all arrays of a checkpoint together."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any

HELD_BYTES = 64 << 20


class ValueCache:
    """Values that were read last, ``HELD_BYTES`` in all: so memory does not grow with the number of arrays. Any thread.

    The newest value stays, however large it is. ``nbytes`` of a chunk in a temporary file counts too: it takes room in the file system.
    """

    def __init__(self) -> None:
        self._values: OrderedDict[Hashable, tuple[Any, int]] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    def get(self, key: Hashable, read: Callable[[], Any], nbytes: Callable[[Any], int]) -> Any:
        """Return the value of ``key``, read now if it is not held. Two threads may read the same one at once."""
        with self._lock:
            found = self._values.get(key)
            if found is not None:
                self._values.move_to_end(key)
                return found[0]
        value = read()
        with self._lock:
            self._drop(key)
            self._values[key] = value, nbytes(value)
            self._bytes += self._values[key][1]
            while self._bytes > HELD_BYTES and len(self._values) > 1:
                self._drop(next(iter(self._values)))
        return value

    def _drop(self, key: Hashable) -> None:
        _, size = self._values.pop(key, (None, 0))
        self._bytes -= size
