"""Arrays of zarr 2 and 3, in files or in an OCDBT, read by tensorstore in a process of its own (``relight.zarr_process``)."""

from __future__ import annotations

import importlib.util
import math
import subprocess
import threading
import weakref
from contextlib import suppress
from typing import Any

import msgspec

from relight.comm.children import child_command, child_environment
from relight.decode import from_json_bytes
from relight.errors import CorruptCheckpoint, IncompatibleState, StoreUnavailable, UnsafeContent, extra_hint
from relight.format import DTYPES
from relight.importers.bucket import BucketFiles
from relight.importers.files import LEVELS_MAX, SLAB_BYTES, Files
from relight.importers.http_gateway import BucketGateway
from relight.importers.tensors import AssembledTensor
from relight.store.object_client import Bucket, s3_server
from relight.units import duration_text, size_text
from relight.zarr_process import MEMORY_BYTES, REQUEST_S, ZarrReply, ZarrRequest

CHUNK_BYTES_MAX = 1 << 30
_CACHE_BYTES_MIN = 64 << 20


class ZarrReader:
    """The process that reads the arrays of one checkpoint. It starts with a request, and ends with this object."""

    def __init__(self, request_s: int = REQUEST_S) -> None:
        self._request_s = request_s
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self._end: weakref.finalize[..., ZarrReader] | None = None

    def array(self, spec: dict[str, Any], where: str) -> AssembledTensor:
        """Return the array that tensorstore opens by ``spec``. Its elements are read on demand.

        Raise ``CorruptCheckpoint`` if it cannot be opened, ``UnsafeContent`` if its chunks exceed the limit.
        """
        facts = self._ask(ZarrRequest(spec), memoryview(b""), where)
        if facts.dtype not in DTYPES:
            raise IncompatibleState(f"dtype {facts.dtype[:40]}, which Relight has no name for", where=where)
        itemsize = DTYPES[facts.dtype].itemsize
        chunk_bytes = math.prod(facts.chunk) * itemsize
        if not 0 < chunk_bytes <= CHUNK_BYTES_MAX:
            raise UnsafeContent("chunks of zero bytes, or of more than a gigabyte", where=where)
        source = _ArraySource(self, spec, facts, chunk_bytes, where)
        return AssembledTensor(facts.dtype, facts.shape, source, ("array", where))

    def read_into(self, request: ZarrRequest, into: memoryview, where: str) -> None:
        """Fill ``into`` with the elements of ``request``. Raise ``CorruptCheckpoint`` if a chunk is missing or damaged."""
        self._ask(request, into, where)

    def close(self) -> None:
        """End the process. The next request starts another."""
        with self._lock:
            self._close()

    def _ask(self, request: ZarrRequest, into: memoryview, where: str) -> ZarrReply:
        request.seconds = self._request_s
        with self._lock:
            process = self._started()
            assert process.stdin is not None and process.stdout is not None
            try:
                process.stdin.write(msgspec.json.encode(request) + b"\n")
                process.stdin.flush()
                reply = from_json_bytes(process.stdout.readline(), ZarrReply)
                position = len(into) if reply.error else 0
                while position < len(into):
                    count = process.stdout.readinto(into[position:])  # type: ignore[attr-defined]
                    if not count:
                        raise EOFError
                    position += count
            except (OSError, EOFError, msgspec.MsgspecError):
                self._close()
                raise UnsafeContent(
                    f"tensorstore failed: it needed more than {size_text(MEMORY_BYTES)} or {duration_text(self._request_s)}, or crashed",
                    where=where,
                    hint="the file is damaged, or too large for this machine",
                ) from None
        if reply.error:
            raise CorruptCheckpoint(f"tensorstore cannot read it: {reply.error}", where=where)
        return reply

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            try:
                self._process = subprocess.Popen(
                    child_command("relight.zarr_process"),
                    env=child_environment(),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                )
            except OSError as error:
                raise StoreUnavailable(f"starting tensorstore failed: {error.strerror or error}") from error
            self._end = weakref.finalize(self, _end, self._process)
        return self._process

    def _close(self) -> None:
        if self._end is not None:
            self._end()
        self._process = self._end = None


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        with suppress(OSError):  # a request that it did not take
            assert pipe is not None
            pipe.close()


class _ArraySource:
    """The elements of one array, in row-major order."""

    def __init__(
        self, reader: ZarrReader, spec: dict[str, Any], facts: ZarrReply, chunk_bytes: int, where: str
    ) -> None:
        self._reader, self._spec, self._where = reader, spec, where
        self._itemsize = DTYPES[facts.dtype].itemsize
        self._cache_bytes = max(_CACHE_BYTES_MIN, chunk_bytes + (chunk_bytes >> 2))
        self.length = math.prod(facts.shape) * self._itemsize

    def view(self) -> memoryview | None:
        """Return None: the elements are read on demand."""
        return None

    def fill(self, start: int, into: memoryview) -> None:
        """Read and decode the elements."""
        for position in range(0, len(into), SLAB_BYTES):
            piece = into[position : position + SLAB_BYTES]
            first, count = (start + position) // self._itemsize, len(piece) // self._itemsize
            self._reader.read_into(ZarrRequest(self._spec, self._cache_bytes, first, count), piece, self._where)


def require_tensorstore(where: str) -> None:
    """Raise ``IncompatibleState`` if tensorstore is not installed."""
    if importlib.util.find_spec("tensorstore") is None:
        raise IncompatibleState(
            "zarr arrays, which are read by tensorstore: it is not installed",
            where=where,
            hint=extra_hint("orbax"),
        )


def kvstore_of(files: Files, folder: str) -> dict[str, Any]:
    """Return tensorstore's name for a folder of ``files``. All files below it count as read.

    tensorstore has drivers for S3 and Google Cloud Storage. It reads other buckets through a ``BucketGateway``.
    Raise ``UnsafeContent`` if a file is a link.
    """
    below = f"{folder}/" if folder else ""
    if any(name.startswith(below) and name.count("/") >= LEVELS_MAX for name in files.folders):
        raise IncompatibleState(f"folders nested deeper than {LEVELS_MAX} levels", where=files.where(folder))
    for name in (*files.stamps, *files.others):
        if name.startswith(below):
            files.size(name)
    if not isinstance(files, BucketFiles):
        if not files.path.isprintable():
            raise IncompatibleState(
                "a path that is not UTF-8, or not printable: tensorstore needs one that is", where=files.path
            )
        return {"driver": "file", "path": f"{files.where(folder)}/"}
    bucket = Bucket.from_url(files.path)
    target: dict[str, Any] = {"bucket": bucket.name, "path": f"{bucket.prefix}/{below}".lstrip("/")}
    if bucket.scheme == "gs":
        return {"driver": "gcs", **target}
    if bucket.scheme != "s3":
        files.gateway = files.gateway or BucketGateway(files)
        return files.gateway.kvstore(below)
    server = s3_server()
    for key, given in (("endpoint", server.endpoint), ("aws_region", server.region)):
        if given:
            target[key] = given
    if server.anonymous:  # a public bucket
        target["aws_credentials"] = {"type": "anonymous"}
    return {"driver": "s3", **target}
