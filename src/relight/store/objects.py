"""Object stores as a store of bytes: see ``object_client`` for which.

How the operations get there: ``put_once`` is a put with "create if absent", never multipart; ``write`` a put, or a multipart upload fed in
order by a thread of its own, so that an object is there whole or not at all; what was answered is durable and listed, so ``settle`` does
nothing; an open reader is bound to the version it found, whatever happens to its name; directories are only prefixes.
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
from relight.errors import CheckpointNotFound, ConfigError, CorruptCheckpoint, RelightError, StoreUnavailable, UnsafeContent
from relight.observe import emit
from relight.store.base import Entry, Properties, Reader, Uncertain, Upload, Writer, check_key
from relight.store.object_client import Bucket, Clients, RetryTimes, clients_of, is_behind_end, is_taken, translate
from relight.store.object_uploads import abort_upload, boto3_client, list_uploads
from relight.store.object_writer import ObjectWriter
from relight.store.probe import exclusive_create, single_writer_promised
from relight.store.retry import retry, sleep

T = TypeVar("T")

MARK = "relightmark"
"""The attribute by which a creation knows its own work again, when its first answer was lost. Letters only: Azure and some proxies take no
other sign."""
HEAD_BYTES = 64 << 10
"""What opening brings along: all of a small object, which then stays readable after it is deleted."""
PIECE_BYTES = 4 << 20
"""Longer reads are made of pieces, several at a time."""
PARALLEL = 16
IDLE_PAGES_MAX = 100
"""Pages of a listing, one behind the other, without a name that is new."""


class Version(NamedTuple):
    """By which an object is known to be the same as when it was listed. ``tag`` is the server's, None where it gives none."""

    size: int
    tag: str | None


class ObjectStore:
    """The store at ``url``, such as ``s3://bucket/some/prefix``. Making it asks nobody anything. Threads may share it."""

    parallel_reads = PARALLEL
    shared = True
    needs_sync = False

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
        """What the server was found to honour, by asking it once in a process: some ten small requests."""
        return Properties(exclusive_create=exclusive_create(self), durable=True)

    def put_once(self, key: str, data: bytes) -> bool:
        """See ``ByteStore``. ``ConfigError`` where the server ignores "create if absent", unless one writer is promised."""
        path = self._path(key, file=True)
        if exclusive_create(self):
            return self.create(path, data)
        if not single_writer_promised():
            raise ConfigError(
                "this server ignores 'create if absent': of two processes that commit at once, both would believe they did",
                where=self.url,
                hint="if only one process ever writes to this store, say so: RELIGHT_SINGLE_WRITER=1. Else choose another store",
            )
        emit("store.no_conditional_put", f"{self.url} ignores 'create if absent': nothing keeps a second writer out", url=self.url)
        return self._put_alone(path, data)

    def create(self, path: str, data: bytes) -> bool:
        """Create an object, or False if there is one: a conditional put, said again until it is answered.

        ``Uncertain`` if the deadline comes first. Whether an object that is there is our own, of a request whose answer was lost, its mark
        tells; where marks are not kept, its content, if an answer was lost.
        """
        mark = secrets.token_hex(16)
        ends = time.monotonic() + self._patience.deadline_s
        pause, doubt = self._patience.pause_s, None
        while True:
            try:
                self._call("put")(self._clients().once, path, data, mode="create", use_multipart=False, attributes={MARK: mark})
                return True
            except RelightError:
                raise
            except Exception as error:
                if is_taken(error):
                    found = self._read_back(path, len(data))
                    if found is not None:
                        return found[0] == mark if found[0] else doubt is not None and found[1] == data
                else:
                    known = translate(error, "creating an object", path)
                    if not known.retryable:
                        raise Uncertain(f"it may have been created: {known.what}", where=path) if doubt else known from None
                    doubt = known
            if time.monotonic() + pause > ends:
                why = doubt.what if doubt else "it is refused as taken, and is not there"
                raise Uncertain(f"cannot tell whether an object was created: {why}", where=path)
            sleep(pause)
            pause = min(2 * pause, self._patience.pause_max_s)

    def probe_path(self, name: str) -> str:
        """Where the probe's objects lie."""
        return self._path(name, file=True)

    def overwrite(self, path: str, data: bytes) -> None:
        """Put an object, whatever is there: for the probe, and where one writer is promised."""
        self._ask("writing an object", path, lambda: self._call("put")(self._clients().patient, path, data, use_multipart=False))

    def _put_alone(self, path: str, data: bytes) -> bool:
        if self._read_head(path, 0) is not None:
            return False
        try:
            self.overwrite(path, data)
        except StoreUnavailable as error:
            if not error.retryable:
                raise
            raise Uncertain(f"it may have been created: {error.what}", where=path) from None
        found = self._read_back(path, len(data))
        return found is not None and found[1] == data

    def _read_back(self, path: str, limit: int) -> tuple[str, bytes] | None:
        """The same, once something may have been put there: ``Uncertain`` if it cannot be seen."""
        try:
            return self._read_head(path, limit)
        except StoreUnavailable as error:
            raise Uncertain(f"it may have been created: {error.what}", where=path) from None

    def _read_head(self, path: str, limit: int) -> tuple[str, bytes] | None:
        """Mark and beginning of an object; None if it is not there."""

        def look() -> tuple[str, bytes]:
            result = self._call("get")(self._clients().patient, path)
            mark = str(dict(result.attributes).get(MARK, ""))
            return mark, b"" if result.meta["size"] > limit else bytes(result.bytes())

        try:
            return retry(self._patience, lambda: self._ask("looking at an object", path, look))
        except CheckpointNotFound:
            return None

    def write(self, key: str, size: int) -> Writer:
        """See ``ByteStore``. Pieces may come out of order by as much as the writer keeps in memory: 64 MiB."""
        path = self._path(key, file=True)
        if self._size(path) is not None:
            raise StoreUnavailable("that name exists", where=key, retryable=False)
        return ObjectWriter(self._put_stream, self._delete, path, size)

    def rewrite(self, key: str, size: int) -> Writer:
        """See ``Rewrites``: an object is replaced by the whole of another."""
        return ObjectWriter(self._put_stream, lambda path: None, self._path(key, file=True), size)

    def sync(self, prefix: str) -> None:
        """Nothing to do: what was answered is there."""
        self._path(prefix)

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
                raise StoreUnavailable(f"{len(data)} bytes came of {size}", where=key)
            return data

        return retry(self._patience, lambda: self._ask("reading", path, read))

    def open(self, key: str) -> Reader:
        """See ``ByteStore``. One request, which brings the first bytes along."""
        path = self._path(key, file=True)

        def begin() -> _ObjectReader:
            client = self._clients().patient
            try:
                result = self._call("get")(client, path, options={"range": (0, HEAD_BYTES)})
            except FileNotFoundError:
                raise
            except Exception as error:  # of an empty object, no range can be had
                if not is_behind_end(error):
                    raise
                meta = self._call("head")(client, path)
                if meta["size"]:
                    raise
                return _ObjectReader(self, path, 0, None, b"")
            size, head = result.meta["size"], bytes(result.bytes())
            if len(head) != min(size, HEAD_BYTES):
                raise StoreUnavailable(f"{len(head)} bytes came of the first {min(size, HEAD_BYTES)}", where=key)
            return _ObjectReader(self, path, size, result.meta["e_tag"], head)

        return retry(self._patience, lambda: self._ask("opening", path, begin))

    def list(self, prefix: str) -> Iterator[Entry]:
        """See ``ByteStore``. ``StoreUnavailable`` if the listing has no end within the deadline."""
        path = self._path(prefix)
        found = retry(self._patience, lambda: self._ask("listing", path, lambda: self._listed(path)))
        start = len(path) + 1 if path else 0
        names = {Entry(one.rstrip("/")[start:], True) for one in found["common_prefixes"]}
        names |= {Entry(one["path"][start:], False) for one in found["objects"]}
        return iter([one for one in names if one.name and "/" not in one.name])

    def delete(self, key: str) -> None:
        """See ``ByteStore``."""
        self._delete(self._path(key))

    def delete_dir(self, prefix: str) -> bool:
        """Directories are only prefixes here."""
        return not any(True for _ in self.list(prefix))

    def uploads(self, prefix: str) -> Sequence[Upload]:
        """See ``ByteStore``. Of S3, where boto3 is installed; Azure drops them by itself, elsewhere a rule of the bucket should."""
        path = self._path(prefix)
        if self._bucket.scheme != "s3" or (client := boto3_client()) is None:
            return []
        start = len(self._bucket.prefix) + 1 if self._bucket.prefix else 0
        below = f"{path}/" if path else ""
        found = self._ask("listing uploads", path, lambda: list_uploads(client, self._bucket.name, below))
        return [Upload(key[start:], upload_id) for key, upload_id in found]

    def drop_upload(self, upload: Upload) -> None:
        """See ``ByteStore``."""
        path, client = self._path(upload.key, file=True), boto3_client()
        if client is not None:
            self._ask("dropping an upload", path, lambda: abort_upload(client, self._bucket.name, path, upload.id))

    def free_bytes(self) -> int | None:
        """Unknown."""
        return None

    def versions(self, prefix: str, limit: int) -> dict[str, Version]:
        """All objects below ``prefix``, at any depth, by their names from there on: some requests a thousand. ``UnsafeContent`` if they are
        more than ``limit``."""
        path = self._path(prefix)
        start, found, idle = len(path) + 1 if path else 0, dict[str, Version](), 0
        pages = iter(self._call("list")(self._clients().patient, path or None, chunk_size=1000))
        while True:
            page = self._ask("listing", path, lambda: next(pages, None))
            if page is None:
                return found
            before = len(found)
            found.update((str(one["path"])[start:], Version(int(one["size"]), one["e_tag"])) for one in page)
            idle = idle + 1 if len(found) == before else 0
            if len(found) > limit:
                raise UnsafeContent(f"more than {limit:,} objects", where=f"{self.url}/{prefix}".rstrip("/"))
            if idle > IDLE_PAGES_MAX:
                raise StoreUnavailable("the listing says the same again and again", where=self.url, retryable=False)

    def version(self, key: str) -> Version | None:
        """What is there under a name now; None if nothing is."""
        path = self._path(key, file=True)
        try:
            meta = retry(self._patience, lambda: self._ask("looking at", path, lambda: self._call("head")(self._clients().patient, path)))
        except CheckpointNotFound:
            return None
        return Version(int(meta["size"]), meta["e_tag"])

    def at(self, key: str, version: Version) -> Reader:
        """A reader of an object as it was listed. Asks for nothing yet; ``CorruptCheckpoint`` from it if there is another now."""
        return _ObjectReader(self, self._path(key, file=True), version.size, version.tag, b"")

    # -- inside

    def read_range(self, path: str, etag: str | None, offset: int, into: memoryview) -> None:
        """Fill ``into`` from one version of an object."""
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
        errors = [job.exception() for job in jobs]  # none of them may write to ``into`` once this has returned
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
            at = 0
            for piece in result.stream(min_chunk_size=1 << 20):
                data = memoryview(piece).cast("B")
                if at + len(data) > len(into):
                    raise StoreUnavailable("more bytes came than were asked for", where=path)
                into[at : at + len(data)] = data
                at += len(data)
            if at != len(into):
                raise StoreUnavailable(f"{at} bytes came of {len(into)}", where=path)

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
            meta = self._ask("looking at an object", path, lambda: self._call("head")(self._clients().patient, path))
        except CheckpointNotFound:
            return None
        return int(meta["size"])

    def _listed(self, path: str) -> Any:
        """Within the deadline, or called off: a server may answer with one more page for ever."""
        import asyncio  # not needed to start a command

        from relight.store.object_loop import run

        client, ask = self._clients().patient, self._call("list_with_delimiter_async")
        told: list[Any] = []

        async def listing() -> Any:
            return await asyncio.wait_for(ask(client, f"{path}/" if path else None), self._patience.deadline_s)

        def work() -> None:
            try:
                told.append((run(listing()), None))
            except BaseException as error:
                told.append((None, error))

        thread = threading.Thread(target=work, name="relight-list", daemon=True)  # the caller may be in an event loop of its own
        if new_threads.start(thread):
            thread.join()
        else:
            work()
        result, error = told[0]
        if isinstance(error, (asyncio.TimeoutError, TimeoutError)):
            raise StoreUnavailable(f"the listing had no end after {self._patience.deadline_s:.0f} s", where=self.url, retryable=False)
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
        self._clients()  # says what is missing, if it is
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
            raise CorruptCheckpoint(f"the object ends at byte {self.size}, sooner than it should", where=self._path)
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
