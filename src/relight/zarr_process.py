"""``python -m relight.zarr_process``: read zarr arrays with tensorstore, for an import, which starts it.

tensorstore parses files in C++: damaged ones may need any amount of memory, or end the process. So this process has limits
on memory and time. Each line of standard input is a ``ZarrRequest`` as JSON. A ``ZarrReply`` answers it, and the elements
follow. The process ends with its input.

It is outside of ``importers``, so that its start imports little.
"""

from __future__ import annotations

import math
import os
import resource
import signal
import sys
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import msgspec

from relight.decode import from_json_bytes

MEMORY_BYTES = 4 << 30
"""Address space of this process: a chunk, encoded and decoded, the interpreter and its libraries."""
REQUEST_S = 600
_WORDS_MAX = 400
OPEN_MAX = 2
"""Arrays that stay open, each with a cache for the chunk that it reads."""


class ZarrRequest(msgspec.Struct):
    """An array, by tensorstore's spec, and ``count`` of its elements from number ``first`` on, in row-major order."""

    spec: dict[str, Any]
    cache_bytes: int = 0
    first: int = 0
    count: int = 0
    seconds: int = REQUEST_S


class ZarrReply(msgspec.Struct):
    """The array's properties, or why it cannot be read."""

    dtype: str = ""
    shape: tuple[int, ...] = ()
    chunk: tuple[int, ...] = ()
    """Shape of the parts that are decoded as a whole."""
    error: str = ""


def boxes_of(shape: tuple[int, ...], first: int, last: int) -> Iterator[tuple[slice, ...]]:
    """Yield boxes that have the elements ``first`` to ``last`` in row-major order."""
    if not shape:
        yield ()
        return
    row = math.prod(shape[1:])
    while first < last:
        top, skip = divmod(first, row)
        if skip or last - first < row:
            end = min(last, (top + 1) * row)
            yield from ((slice(top, top + 1), *inner) for inner in boxes_of(shape[1:], skip, end - top * row))
        else:
            end = last // row * row
            yield slice(top, end // row), *(slice(0, extent) for extent in shape[1:])
        first = end


class _Arrays:
    """The arrays that were read last."""

    def __init__(self) -> None:
        self._opened: OrderedDict[bytes, Any] = OrderedDict()

    def answer(self, request: ZarrRequest) -> tuple[ZarrReply, bytes]:
        """Return the reply to ``request``, and the elements."""
        array = self._open(request)
        shape, chunk = tuple(array.shape), tuple(array.chunk_layout.read_chunk.shape or ())
        reply = ZarrReply(array.dtype.name, shape, chunk)
        pieces = boxes_of(shape, request.first, request.first + request.count) if request.count else ()
        return reply, b"".join(array[box].read().result().tobytes() for box in pieces)

    def _open(self, request: ZarrRequest) -> Any:
        import tensorstore

        key = msgspec.json.encode((request.spec, request.cache_bytes))
        if key not in self._opened:
            context = tensorstore.Context({"cache_pool": {"total_bytes_limit": request.cache_bytes}})
            self._opened[key] = tensorstore.open(request.spec, context=context, open=True, read=True).result()
            if len(self._opened) > OPEN_MAX:
                self._opened.popitem(last=False)
        self._opened.move_to_end(key)
        return self._opened[key]


def _cause(error: Exception) -> str:
    """Return an error's text without tensorstore's spec. The cause is at its end."""
    text = str(error).partition(" [tensorstore_spec=")[0].partition(" [source locations=")[0] or type(error).__name__
    return text if len(text) <= _WORDS_MAX else f"…{text[-_WORDS_MAX:]}"


def main() -> int:
    """Answer requests until the input ends. Return the exit status."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the import ends this process
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    limit = MEMORY_BYTES if hard == resource.RLIM_INFINITY else min(hard, MEMORY_BYTES)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints is no reply
    arrays = _Arrays()
    for line in sys.stdin.buffer:
        request, data = from_json_bytes(line, ZarrRequest), b""
        signal.alarm(request.seconds)  # ends the process
        try:
            reply, data = arrays.answer(request)
        except MemoryError:
            reply = ZarrReply(error="there is not enough memory for it")
        except (ArithmeticError, ImportError, LookupError, OSError, RuntimeError, TypeError, ValueError) as error:
            reply = ZarrReply(error=_cause(error))
        signal.alarm(0)
        out.write(msgspec.json.encode(reply) + b"\n" + data)
        out.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
