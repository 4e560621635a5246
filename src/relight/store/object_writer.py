"""Write an object: a small one in one put, a large one as a multipart upload with a bounded window in memory."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from relight.comm import new_threads
from relight.errors import RelightError, StoreUnavailable
from relight.units import size_text

PART_BYTES = 8 << 20
"""Bytes of one part of a multipart upload, and the largest object that is put in one request."""
PARTS_MAX = 9000
"""Most parts of an upload. S3 allows ten thousand."""
WINDOW_BYTES = 64 << 20
"""Most bytes that are buffered for the upload."""
STALL_S = 60.0
"""Seconds that a piece waits for the piece before it."""
PARALLEL = 8
OBJECT_BYTES_MAX = 5 << 40


class Put(Protocol):
    """Upload an object. ``part_bytes`` 0: in one request."""

    def __call__(self, path: str, data: Any, part_bytes: int, parallel: int, /) -> None:
        """Return when the object is durable."""


class _Aborted(Exception):
    """Raised in the upload's thread to abort the upload."""


class ObjectWriter:
    """See ``Writer``. Any thread. Pieces may arrive out of order within ``WINDOW_BYTES``."""

    align = 1

    def __init__(self, put: Put, delete: Callable[[str], None], path: str, size: int) -> None:
        if size > OBJECT_BYTES_MAX:
            raise StoreUnavailable(
                f"an object of {size} bytes; at most {OBJECT_BYTES_MAX} are allowed", where=path, retryable=False
            )
        self._put, self._delete, self._path, self._size = put, delete, path, size
        self._changed = threading.Condition()
        self._pieces: dict[int, bytes] = {}
        self._held = 0
        self._next = 0
        """Offset up to which the upload has consumed the bytes."""
        self._aborted = self._finished = False
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    def write_at(self, offset: int, data: memoryview) -> None:
        """See ``Writer``. Waits while the window is full and the upload can continue."""
        data = data.cast("B")
        length = min(len(data), self._size - offset)  # the last piece may be padded
        if length <= 0:
            return
        if self._size <= PART_BYTES:
            with self._changed:
                self._pieces[offset] = bytes(data[:length])
            return
        piece = bytes(data[:length])  # copied without the lock, so that the upload continues
        with self._changed:
            self._start()
            if (
                not self._changed.wait_for(lambda: self._takes(offset, length), STALL_S)
                and self._next not in self._pieces
            ):
                what = f"nothing was written at byte {self._next}, and {size_text(WINDOW_BYTES)} after it wait"
                raise StoreUnavailable(what, where=self._path, retryable=False)
            self._changed.wait_for(lambda: self._takes(offset, length))
            self._raise()
            self._pieces[offset] = piece
            self._held += length
            self._changed.notify_all()

    def finish(self, size: int | None = None) -> None:
        """See ``Writer``."""
        in_one = self._size <= PART_BYTES
        with self._changed:
            self._size = self._size if size is None else size
        if in_one:
            self._raise()
            self._finished = True
            self._put(self._path, self._small(), 0, 1)
            return
        with self._changed:
            self._start()
            self._finished = True
            self._changed.notify_all()
        assert self._thread is not None
        self._thread.join()
        self._raise()

    def abort(self) -> None:
        """See ``Writer``. The upload is aborted. If it has become an object, the object is deleted."""
        with self._changed:
            self._aborted = True
            self._pieces.clear()
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()
        if self._finished:  # the object may exist even if the upload failed
            self._finished = False  # once: the name may be another object's later
            try:
                self._delete(self._path)
            except RelightError:
                pass  # swept later

    # -- inside

    def _start(self) -> None:
        if self._thread is None:
            thread = threading.Thread(target=self._upload, name="relight-put", daemon=True)
            if not new_threads.start(thread):
                raise StoreUnavailable(
                    "no thread could be started to upload it", where=self._path, hint="raise ulimit -u or pids.max"
                )
            self._thread = thread

    def _takes(self, offset: int, length: int) -> bool:
        """Return whether a piece may be added: there is space, the upload waits for this piece, or the upload has ended."""
        return (
            self._held + length <= WINDOW_BYTES
            or not self._held
            or offset == self._next
            or self._aborted
            or self._error is not None
        )

    def _small(self) -> bytes:
        whole = bytearray(self._size)
        covered = 0
        for offset, piece in self._pieces.items():
            whole[offset : offset + len(piece)] = piece
            covered += len(piece)
        if covered < self._size:
            raise StoreUnavailable(f"{covered} bytes were written of {self._size}", where=self._path, retryable=False)
        return bytes(whole)

    def _upload(self) -> None:
        part = (
            max(PART_BYTES, -(-self._size // PARTS_MAX >> 20) + 1 << 20)
            if self._size > PART_BYTES * PARTS_MAX
            else PART_BYTES
        )
        try:
            self._put(self._path, self._in_order(), part, PARALLEL)
            if self._next < self._size:
                raise StoreUnavailable(f"{self._next} bytes were taken of {self._size}", where=self._path)
        except BaseException as error:
            with self._changed:
                self._error = error
                self._pieces.clear()
                self._changed.notify_all()

    def _in_order(self) -> Iterator[bytes]:
        while self._next < self._size:
            with self._changed:
                while self._next not in self._pieces:
                    if self._finished and self._next >= self._size:  # shorter than announced
                        return
                    if self._aborted:
                        raise _Aborted("aborted")
                    if self._finished:
                        raise StoreUnavailable(
                            f"nothing was written at byte {self._next}", where=self._path, retryable=False
                        )
                    self._changed.wait()
                piece = self._pieces.pop(self._next)
                self._held -= len(piece)
                self._next += len(piece)
                self._changed.notify_all()
            yield piece

    def _raise(self) -> None:
        if self._aborted:
            raise StoreUnavailable("this writer was aborted", where=self._path, retryable=False)
        if isinstance(self._error, RelightError):
            raise self._error
        if self._error is not None:
            raise StoreUnavailable(f"writing an object failed: {self._error}", where=self._path)
