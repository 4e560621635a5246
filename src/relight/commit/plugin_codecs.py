"""Codecs of other packages while they encode: their exceptions cost only the gain, and one that ends the agent is remembered.

The agent notes each call in a file that outlives it. Its trainers and the next agent read there which codecs it ran when it ended.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator

from relight.errors import IncompatibleState
from relight.format.chunk_codecs import ChunkCodec, EncodeContext, EncodedChunk, PluginCodec, plugin_of
from relight.observe import emit

SUFFIX = ".codecs"
"""Of the file's name, which begins like the agent's socket."""
ENDED = 255
"""The byte of a codec that ran when an earlier agent of the run ended."""
_CODES = 256
REPORTED: set[str] = set()
"""Codecs whose failure was reported: once per process, as a save may have thousands of chunks."""


class CodecNotes:
    """One byte for each code: the calls of that codec that run now, or ``ENDED``. In a file, if ``keep_in`` was called. Any thread."""

    def __init__(self) -> None:
        self._path, self._fd = "", -1
        self._calls = bytearray(_CODES)
        self._lock = threading.Lock()

    def keep_in(self, path: str) -> None:
        """Note calls in the file from now on. Codecs that an earlier process was running there when it ended are not used any more."""
        self._path = path
        self.end([code for code, calls in enumerate(_content(path)) if calls])

    def end(self, codes: list[int]) -> None:
        """Do not use these codecs any more in this process."""
        with self._lock:
            for code in codes:
                self._calls[code] = ENDED
                self._write(code)

    def has_ended(self, code: int) -> bool:
        """Return whether a process ended while it ran this codec."""
        return self._calls[code] == ENDED

    @contextlib.contextmanager
    def calling(self, code: int) -> Iterator[None]:
        """Note that this codec runs. Cost: two small writes to the page cache."""
        self._add(code, 1)
        try:
            yield
        finally:
            self._add(code, -1)

    def remove(self) -> None:
        """Remove the file: the process ends normally."""
        if self._path:
            with contextlib.suppress(OSError):
                os.unlink(self._path)
        self._path = ""

    def _add(self, code: int, count: int) -> None:
        with self._lock:
            if self._calls[code] != ENDED:
                self._calls[code] = min(max(self._calls[code] + count, 0), ENDED - 1)
                self._write(code)

    def _write(self, code: int) -> None:
        """Write a code's byte. Without the file, the save continues, and the end of the process gives no reason."""
        if not self._path:
            return
        try:
            if self._fd < 0:
                flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
                self._fd = os.open(self._path, flags, 0o600)
            os.pwrite(self._fd, self._calls[code : code + 1], code)
        except OSError:
            self._path = ""


NOTES = CodecNotes()
"""The process's own, as any thread of any save may run any codec."""


def ended_with(path: str) -> list[str]:
    """Return the codecs that were running when the process that kept the file ended, and do not use them any more in this process."""
    codes = [code for code, calls in enumerate(_content(path)) if calls not in (0, ENDED)]
    NOTES.end(codes)
    return [plugin_of(code).name for code in codes]


def encode_with(codec: ChunkCodec, data: memoryview, context: EncodeContext) -> EncodedChunk | None:
    """Return the chunk coded by ``codec``. None if it does not apply, or if another package's codec fails: no save fails for it."""
    if not isinstance(codec, PluginCodec):
        return codec.encode(data, context)
    if NOTES.has_ended(codec.code):
        _report(codec, f"codec {codec.name} was running when an agent of this run ended")
        return None
    try:
        with NOTES.calling(codec.code):
            return codec.encode(data, context)
    except IncompatibleState as error:
        _report(codec, error.what)
        return None


def _report(codec: ChunkCodec, why: str) -> None:
    if codec.name not in REPORTED:
        REPORTED.add(codec.name)
        emit("codec.failed", f"{why}: chunks are stored without it", codec=codec.name, error=why)


def _content(path: str) -> bytes:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return b""
    try:
        return os.read(fd, _CODES)
    except OSError:
        return b""
    finally:
        os.close(fd)
