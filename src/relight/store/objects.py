"""Object stores (S3, Google Cloud Storage, Azure, HTTP) as a ``ByteStore``; see ``object_client``.

- ``put_once`` is a conditional put ("create if absent"), never multipart.
- ``write`` is a put, or a multipart upload that a separate thread feeds in order. An object is complete or does not exist.
- An acknowledged operation is durable and listed, so ``sync`` does nothing.
- An open reader reads the version that it opened, even if the name is replaced or deleted.
- Directories are only prefixes.
"""

from __future__ import annotations

import importlib
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

from relight.comm import new_threads
from relight.comm.new_threads import ThreadPool
from relight.errors import (
    CheckpointNotFound,
    ConfigError,
    CorruptCheckpoint,
    RelightError,
    StoreUnavailable,
    UnsafeContent,
)
from relight.observe import emit
from relight.settings.environment import environment
from relight.store.base import Entry, Properties, Reader, StoreBase, Uncertain, Upload, Writer, check_key
from relight.store.object_client import Bucket, Clients, RetryTimes, clients_of, is_past_end, is_taken, translate
from relight.store.object_uploads import abort_upload, boto3_client, list_uploads
from relight.store.object_writer import ObjectWriter
from relight.store.probe import exclusive_create
from relight.store.retry import retry, sleep
from relight.units import duration_text

T = TypeVar("T")

MARK = "relightmark"
"""Attribute that identifies our own object after the reply to its creation was lost. Letters only: Azure and some proxies reject other
characters."""
HEAD_BYTES = 64 << 10
"""Bytes that ``open`` reads: all of a small object, which then stays readable after it is deleted."""
PIECE_BYTES = 4 << 20
"""Bytes per request. Longer reads are split into pieces, which are read in parallel."""
PARALLEL = 16
IDLE_PAGES_MAX = 100
"""Most consecutive pages of a listing without a new name."""


_PROPERTIES = Properties(
    exclusive_create=True, durable=True, needs_sync=False, shared=True, remote=True, parallel_reads=PARALLEL
)


class Version(NamedTuple):
    """Size and ETag of a listed object, to detect a later replacement. ``tag``: None if the server gives no ETag."""

    size: int
    tag: str | None


class ObjectStore(StoreBase):
    """Store at ``url``, such as ``s3://bucket/some/prefix``. Construction sends no request. Thread-safe."""

    def __init__(self, url: str, *, patience: RetryTimes | None = None) -> None:
        self._bucket = Bucket.from_url(url)
        self._patience = patience or RetryTimes.usual()
        self.url = url.rstrip("/")
        self._pool: ThreadPool | None = None
        self._pool_lock = threading.Lock()

    def __repr__(self) -> str:
        return f"ObjectStore({self.url!r})"

    def __reduce__(self) -> tuple[object, ...]:
        return (_again, (type(self), self.url, self._patience))

    def properties(self) -> Properties:
        """See ``ByteStore``. ``put_once`` refuses a server without exclusive creation."""
        return _PROPERTIES

    def verify_exclusive_create(self) -> bool:
        """Return whether the server has exclusive creation, by trying it. Cost: about ten small requests, once per process."""
        return self.properties().exclusive_create and exclusive_create(self)

    def put_once(self, key: str, data: bytes) -> bool:
        """See ``ByteStore``. Raise ``ConfigError`` if the server ignores "create if absent", unless the user promised a single writer."""
        path = self._path(key, file=True)
        if exclusive_create(self):
            return self.create(path, data)
        if not environment().single_writer:
            raise ConfigError(
                "this server ignores 'create if absent': of two processes that commit at once, both would believe they did",
                where=self.url,
                hint="if only one process ever writes to this store, set RELIGHT_SINGLE_WRITER=1. Otherwise choose another store",
            )
        emit(
            "store.no_conditional_put",
            f"{self.url} ignores 'create if absent': a second writer would not be detected",
            url=self.url,
        )
        return self._put_alone(path, data)

    def create(self, path: str, data: bytes) -> bool:
        """Create an object by a conditional put, repeated until it is answered. Return False if another writer created it.

        Raise ``Uncertain`` if the deadline comes first. If the reply to an earlier try was lost, the existing object may be our own:
        its mark identifies it. If the server does not keep marks, its content is compared.
        """
        mark = secrets.token_hex(16)
        ends = time.monotonic() + self._patience.deadline_s
        pause, doubt = self._patience.pause_s, None
        while True:
            try:
                self._call("put")(
                    self._clients().once, path, data, mode="create", use_multipart=False, attributes={MARK: mark}
                )
                return True
            except RelightError:
                raise
            except Exception as error:
                if is_taken(error):
                    existing = self._read_back(path, len(data))
                    if existing is not None:
                        return existing[0] == mark if existing[0] else doubt is not None and existing[1] == data
                else:
                    known = translate(error, "creating an object", path)
                    if not known.retryable:
                        raise (
                            Uncertain(f"it may have been created: {known.what}", where=path) if doubt else known
                        ) from None
                    doubt = known
            if time.monotonic() + pause > ends:
                why = doubt.what if doubt else "the server reports that it exists, but it cannot be read"
                raise Uncertain(f"cannot determine whether an object was created: {why}", where=path)
            sleep(pause)
            pause = min(2 * pause, self._patience.pause_max_s)

    def probe_path(self, name: str) -> str:
        """Return the path of a probe's object."""
        return self._path(name, file=True)

    def overwrite(self, path: str, data: bytes) -> None:
        """Put an object, replacing an existing one: for the probe, and if the user promised a single writer."""
        self._ask(
            "writing an object",
            path,
            lambda: self._call("put")(self._clients().patient, path, data, use_multipart=False),
        )

    def _put_alone(self, path: str, data: bytes) -> bool:
        if self._read_head(path, 0) is not None:
            return False
        try:
            self.overwrite(path, data)
        except StoreUnavailable as error:
            if not error.retryable:
                raise
            raise Uncertain(f"it may have been created: {error.what}", where=path) from None
        existing = self._read_back(path, len(data))
        return existing is not None and existing[1] == data

    def _read_back(self, path: str, limit: int) -> tuple[str, bytes] | None:
        """Return mark and content after a put. Raise ``Uncertain`` if the object cannot be read: the put may have taken effect."""
        try:
            return self._read_head(path, limit)
        except StoreUnavailable as error:
            raise Uncertain(f"it may have been created: {error.what}", where=path) from None

    def _read_head(self, path: str, limit: int) -> tuple[str, bytes] | None:
        """Return mark and content of an object, the content empty if longer than ``limit``; None if the object does not exist."""

        def read() -> tuple[str, bytes]:
            result = self._call("get")(self._clients().patient, path)
            mark = str(dict(result.attributes).get(MARK, ""))
            return mark, b"" if result.meta["size"] > limit else bytes(result.bytes())

        try:
            return retry(self._patience, lambda: self._ask("reading an object", path, read))
        except CheckpointNotFound:
            return None

    def write(self, key: str, size: int) -> Writer:
        """See ``ByteStore``. Pieces may arrive out of order within 64 MiB, which the writer keeps in memory."""
        path = self._path(key, file=True)
        if self._size(path) is not None:
            raise StoreUnavailable("a file of this name exists already", where=key, retryable=False)
        return ObjectWriter(self._put_stream, self._delete, path, size)

    def rewrite(self, key: str, size: int) -> Writer:
        """See ``Rewrites``. The object is replaced atomically."""
        return ObjectWriter(self._put_stream, lambda path: None, self._path(key, file=True), size)

    def get(self, key: str, limit: int) -> bytes:
        """See ``ByteStore``."""
        path = self._path(key, file=True)

        def read() -> bytes:
            result = self._call("get")(self._clients().patient, path)
            size = result.meta["size"]
            if size > limit:
                raise UnsafeContent(f"{size} bytes where at most {limit} are allowed", where=key)
            data = bytes(result.bytes())
            if len(data) != size:
                raise StoreUnavailable(f"only {len(data)} of {size} bytes were received", where=key)
            return data

        return retry(self._patience, lambda: self._ask("reading", path, read))

    def open(self, key: str) -> Reader:
        """See ``ByteStore``. Cost: one request, which also reads the first ``HEAD_BYTES``."""
        path = self._path(key, file=True)

        def begin() -> _ObjectReader:
            client = self._clients().patient
            try:
                result = self._call("get")(client, path, options={"range": (0, HEAD_BYTES)})
            except FileNotFoundError:
                raise
            except Exception as error:  # a range request for an empty object fails
                if not is_past_end(error):
                    raise
                meta = self._call("head")(client, path)
                if meta["size"]:
                    raise
                return _ObjectReader(self, path, 0, None, b"")
            size, head = result.meta["size"], bytes(result.bytes())
            if len(head) != min(size, HEAD_BYTES):
                raise StoreUnavailable(
                    f"only {len(head)} of the first {min(size, HEAD_BYTES)} bytes were received", where=key
                )
            return _ObjectReader(self, path, size, result.meta["e_tag"], head)

        return retry(self._patience, lambda: self._ask("opening", path, begin))

    def list(self, prefix: str) -> Iterator[Entry]:
        """See ``ByteStore``. Raise ``StoreUnavailable`` if the listing does not end within the deadline."""
        path = self._path(prefix)
        listing = retry(self._patience, lambda: self._ask("listing", path, lambda: self._listed(path)))
        start = len(path) + 1 if path else 0
        names = {Entry(directory.rstrip("/")[start:], True) for directory in listing["common_prefixes"]}
        names |= {Entry(item["path"][start:], False) for item in listing["objects"]}
        return iter([entry for entry in names if entry.name and "/" not in entry.name])

    def delete(self, key: str) -> None:
        """See ``ByteStore``."""
        self._delete(self._path(key))

    def uploads(self, prefix: str) -> Sequence[Upload]:
        """See ``ByteStore``. Only for S3 with boto3 installed. Azure removes old uploads itself; elsewhere, a lifecycle rule should."""
        path = self._path(prefix)
        if self._bucket.scheme != "s3" or (client := boto3_client()) is None:
            return []
        start = len(self._bucket.prefix) + 1 if self._bucket.prefix else 0
        below = f"{path}/" if path else ""
        uploads = self._ask("listing uploads", path, lambda: list_uploads(client, self._bucket.name, below))
        return [Upload(key[start:], upload_id) for key, upload_id in uploads]

    def drop_upload(self, upload: Upload) -> None:
        """See ``ByteStore``."""
        path, client = self._path(upload.key, file=True), boto3_client()
        if client is not None:
            self._ask("dropping an upload", path, lambda: abort_upload(client, self._bucket.name, path, upload.id))

    def versions(self, prefix: str, limit: int) -> dict[str, Version]:
        """Return all objects below ``prefix``, at any depth, by their names relative to it. Cost: a request per thousand objects.

        Raise ``UnsafeContent`` if there are more than ``limit``.
        """
        path = self._path(prefix)
        start, versions, idle = len(path) + 1 if path else 0, dict[str, Version](), 0
        pages = iter(self._call("list")(self._clients().patient, path or None, chunk_size=1000))
        while True:
            page = self._ask("listing", path, lambda: next(pages, None))
            if page is None:
                return versions
            before = len(versions)
            versions.update((str(item["path"])[start:], Version(int(item["size"]), item["e_tag"])) for item in page)
            idle = idle + 1 if len(versions) == before else 0
            if len(versions) > limit:
                raise UnsafeContent(f"more than {limit:,} objects", where=f"{self.url}/{prefix}".rstrip("/"))
            if idle > IDLE_PAGES_MAX:
                raise StoreUnavailable("the listing repeats itself without end", where=self.url, retryable=False)

    def version(self, key: str) -> Version | None:
        """Return the current version of an object; None if it does not exist."""
        path = self._path(key, file=True)
        try:
            meta = retry(
                self._patience,
                lambda: self._ask("checking", path, lambda: self._call("head")(self._clients().patient, path)),
            )
        except CheckpointNotFound:
            return None
        return Version(int(meta["size"]), meta["e_tag"])

    def at(self, key: str, version: Version) -> Reader:
        """Return a reader of a listed version. Sends no request. Reads raise ``CorruptCheckpoint`` if the object was replaced."""
        return _ObjectReader(self, self._path(key, file=True), version.size, version.tag, b"")

    # -- inside

    def read_range(self, path: str, etag: str | None, offset: int, into: memoryview) -> None:
        """Fill ``into`` from one version of an object, in parallel pieces."""
        if len(into) <= PIECE_BYTES:
            self._read_piece(path, etag, offset, into)
            return
        with self._pool_lock:
            if self._pool is None:
                self._pool = ThreadPool(PARALLEL, "relight-get")
        jobs = [
            self._pool.submit(self._read_piece, path, etag, offset + start, into[start : start + PIECE_BYTES])
            for start in range(0, len(into), PIECE_BYTES)
        ]
        errors = [job.exception() for job in jobs]  # wait for all: none may write to ``into`` after the return
        for error in errors:
            if error is not None:
                raise error

    def _read_piece(self, path: str, etag: str | None, offset: int, into: memoryview) -> None:
        options: dict[str, Any] = {"range": (offset, offset + len(into))}
        if etag:
            options["if_match"] = etag

        def read() -> None:
            try:
                result = self._call("get")(self._clients().patient, path, options=options)
            except Exception as error:
                if is_taken(error):
                    raise CorruptCheckpoint("it was replaced while it was read", where=path) from None
                raise
            filled = 0
            for piece in result.stream(min_chunk_size=1 << 20):
                data = memoryview(piece).cast("B")
                if filled + len(data) > len(into):
                    raise StoreUnavailable("more bytes were received than requested", where=path)
                into[filled : filled + len(data)] = data
                filled += len(data)
            if filled != len(into):
                raise StoreUnavailable(f"only {filled} of {len(into)} bytes were received", where=path)

        retry(self._patience, lambda: self._ask("reading", path, read))

    def _put_stream(self, path: str, data: Any, part_bytes: int, parallel: int) -> None:
        put, client = self._call("put"), self._clients().patient
        if part_bytes:
            arguments = {"use_multipart": True, "chunk_size": part_bytes, "max_concurrency": parallel}
        else:
            arguments = {"use_multipart": False}
        self._ask("writing an object", path, lambda: put(client, path, data, **arguments))

    def _delete(self, path: str) -> None:
        try:
            self._ask("deleting an object", path, lambda: self._call("delete")(self._clients().patient, path))
        except CheckpointNotFound:
            return

    def _size(self, path: str) -> int | None:
        try:
            meta = self._ask("checking an object", path, lambda: self._call("head")(self._clients().patient, path))
        except CheckpointNotFound:
            return None
        return int(meta["size"])

    def _listed(self, path: str) -> Any:
        """Return the listing, or abort at the deadline: a server may send pages without end."""
        import asyncio  # not needed to start a command

        from relight.store.object_loop import run

        client, ask = self._clients().patient, self._call("list_with_delimiter_async")
        outcome: list[Any] = []

        async def listing() -> Any:
            return await asyncio.wait_for(ask(client, f"{path}/" if path else None), self._patience.deadline_s)

        def work() -> None:
            try:
                outcome.append((run(listing()), None))
            except BaseException as error:
                outcome.append((None, error))

        # the caller may be inside an event loop
        thread = threading.Thread(target=work, name="relight-list", daemon=True)
        if new_threads.start(thread):
            thread.join()
        else:
            work()
        result, error = outcome[0]
        if isinstance(error, (asyncio.TimeoutError, TimeoutError)):
            raise StoreUnavailable(
                f"the listing did not end within {duration_text(self._patience.deadline_s)}",
                where=self.url,
                retryable=False,
            )
        if error is not None:
            raise error
        return result

    def _ask(self, doing: str, path: str, call: Callable[[], T]) -> T:
        try:
            return call()
        except RelightError:
            raise
        except Exception as error:
            raise translate(error, doing, path) from None

    def _clients(self) -> Clients:
        return clients_of(self._bucket, self._patience)

    def _call(self, name: str) -> Any:
        self._clients()  # raises ConfigError if the library is missing
        return getattr(importlib.import_module("obstore"), name)

    def _path(self, key: str, *, file: bool = False) -> str:
        check_key(key, file=file)
        return "/".join(part for part in (self._bucket.prefix, key) if part)


class _ObjectReader:
    def __init__(self, store: ObjectStore, path: str, size: int, etag: str | None, head: bytes) -> None:
        self._store, self._path, self.size, self._etag, self._head = store, path, size, etag, head

    def fetch(self, offset: int, length: int, room: memoryview) -> memoryview | None:
        return None

    def read_into(self, offset: int, into: memoryview) -> None:
        into = into.cast("B")
        if offset + len(into) > self.size:
            raise CorruptCheckpoint(f"the object ends at byte {self.size}, and is truncated", where=self._path)
        known = self._head[offset : offset + len(into)]
        into[: len(known)] = known
        if len(known) == len(into):
            return
        try:
            self._store.read_range(self._path, self._etag, offset + len(known), into[len(known) :])
        except CheckpointNotFound as error:
            raise CorruptCheckpoint("it was deleted while it was read", where=self._path) from error

    def close(self) -> None:
        pass


def _again(kind: type[ObjectStore], url: str, patience: Sequence[Any]) -> ObjectStore:
    return kind(url, patience=RetryTimes(*patience))
