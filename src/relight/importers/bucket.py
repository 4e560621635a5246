"""Foreign checkpoints in a bucket: listed once, then read by ranges, each object in the version that was listed."""

from __future__ import annotations

import mmap
import tempfile
import threading
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from relight.errors import CheckpointNotFound, CorruptCheckpoint, NoSpace, UnsafeContent
from relight.format import Digest
from relight.importers.files import ENTRIES_MAX, Files, Handle, Stamp
from relight.importers.http_gateway import BucketGateway
from relight.store import ObjectStore, Reader, Version
from relight.units import size_text

SCHEMES = ("s3", "s3a", "gs", "gcs", "az", "azure")
LISTED_MAX = 1_000_000
"""Objects below one URL, at most."""
BLOCK_BYTES = 64 << 10
"""Bytes that a short read fetches: metadata is often in many places close to each other."""
_BLOCKS_HELD = 64
_PIECE_BYTES = 16 << 20


def is_bucket(path: str) -> bool:
    """Return whether the path is the URL of an object store that can be listed."""
    scheme, separator, _ = path.partition("://")
    return bool(separator) and scheme.lower() in SCHEMES


class Listing:
    """The objects below ``url``, by relative names. They are listed once; names that are not valid paths are ignored."""

    def __init__(self, url: str, versions: Mapping[str, Version] | None = None) -> None:
        self.url = url.rstrip("/")
        self.store = ObjectStore(self.url)
        listed = self.store.versions("", LISTED_MAX) if versions is None else versions
        self.versions = {
            name: version
            for name, version in listed.items()
            if all(part not in ("", ".", "..") for part in name.split("/"))
        }
        self._names = sorted(self.versions)

    def below(self, folder: str) -> list[str]:
        """Return the names of all objects below ``folder``."""
        first, end = (f"{folder}/", f"{folder}0") if folder else ("", "\U0010ffff")  # "0" is the character after "/"
        return self._names[bisect_left(self._names, first) : bisect_left(self._names, end)]

    def is_file(self, name: str) -> bool:
        """Return whether there is such an object. An empty object with others below its name is a console's folder
        marker."""
        return name in self.versions and not (self.versions[name].size == 0 and self.below(name))

    def inside(self, folder: str) -> list[tuple[str, bool]]:
        """Return the names directly in ``folder``, sorted, and whether each is a folder. A name may be both."""
        start = len(folder) + 1 if folder else 0
        entries = {(name[start:].partition("/")[0], "/" in name[start:]) for name in self.below(folder)}
        return sorted(
            (entry, is_folder)
            for entry, is_folder in entries
            if is_folder or self.is_file(f"{folder}/{entry}".lstrip("/"))
        )


class BucketFiles(Files):
    """One object of a listing, or all objects below a folder of it, with the interface of ``Files``."""

    def __init__(self, listing: Listing, name: str, *, is_folder: bool) -> None:
        self._set_up(f"{listing.url}/{name}" if name else listing.url)
        self.listing, self.at, self.is_folder = listing, name, is_folder
        self._blocks: OrderedDict[tuple[str, int], bytes] = OrderedDict()
        self._staged: tuple[tuple[str, int, int], mmap.mmap] | None = None
        self._lock = threading.Lock()
        self.gateway: BucketGateway | None = None
        """The server by which tensorstore reads these objects, if it has no driver for the bucket."""
        if not is_folder:
            self.stamps[""] = _stamp(listing.versions[name])
            return
        start = len(name) + 1 if name else 0
        for number, key in enumerate(listing.below(name)):
            if number >= ENTRIES_MAX:
                raise UnsafeContent(f"more than {ENTRIES_MAX} objects", where=self.path)
            parts = key[start:].split("/")
            self.folders.update("/".join(parts[:count]) for count in range(1, len(parts)))
            if listing.is_file(key):
                self.stamps[key[start:]] = _stamp(listing.versions[key])

    @classmethod
    def from_url(cls, url: str) -> BucketFiles:
        """Return the object at ``url``, or the objects below it. Raise ``CheckpointNotFound`` if there are none."""
        url = url.rstrip("/")
        home, _, name = url.rpartition("/")
        if not home.endswith("/"):  # not a bucket's own name
            version = ObjectStore(home).version(name)
            if version is not None and version.size:
                return cls(Listing(home, {name: version}), name, is_folder=False)
        listing = Listing(url)
        if not listing.versions:
            raise CheckpointNotFound("this path does not exist", where=url)
        return cls(listing, "", is_folder=True)

    def below(self, folder: str) -> Files:
        """See ``Files``."""
        if folder not in self.folders:
            raise CorruptCheckpoint("the folder is missing", where=self.where(folder))
        inner = BucketFiles(self.listing, self._key(folder), is_folder=True)
        inner.sums = self.sums
        self.within.append((folder, inner))
        return inner

    @contextmanager
    def open(self, name: str) -> Iterator[Handle]:
        """See ``Files``. Sends no request: later reads do, for the version that was listed."""
        self._stamp(name)
        key = self._key(name)
        yield _Far(
            self.listing.store.at(key, self.listing.versions[key]), lambda number, make: self._block(key, number, make)
        )

    @contextmanager
    def mapped(self, name: str, offset: int, length: int) -> Iterator[mmap.mmap]:
        """See ``Files``. The bytes are copied to an unlinked temporary file; one such range at a time is kept."""
        with self._lock:
            if self._staged is None or self._staged[0] != (name, offset, length):
                self._staged = None
                self._staged = (name, offset, length), self._stage(name, offset, length)
            mapping = self._staged[1]
        yield mapping

    def check_unchanged(self) -> None:
        """See ``Files``: the objects are listed again."""
        self.sums.check(self.path)
        if self.is_folder:
            now: Mapping[str, Version | None] = self.listing.store.versions(self.at, LISTED_MAX)
        else:
            now = {"": self.listing.store.version(self.at)}
        for name in self.read:
            version = now.get(name)
            if version is None or _stamp(version) != self.stamps[name]:
                raise CorruptCheckpoint(
                    "it has changed while it was read",
                    where=self.where(name),
                    hint="import it when no process writes to it",
                )
        for _, inner in self.within:
            inner.check_unchanged()

    def _key(self, name: str) -> str:
        return f"{self.at}/{name}".strip("/")

    def _block(self, key: str, number: int, make: Callable[[], bytes]) -> bytes:
        with self._lock:
            block = self._blocks.get((key, number))
            if block is None:
                block = self._blocks[key, number] = make()
                while len(self._blocks) > _BLOCKS_HELD:
                    self._blocks.popitem(last=False)
            self._blocks.move_to_end((key, number))
            return block

    def _stage(self, name: str, offset: int, length: int) -> mmap.mmap:
        buffer = memoryview(bytearray(min(length, _PIECE_BYTES)))
        try:
            with tempfile.TemporaryFile(prefix="relight-") as file, self.open(name) as handle:
                assert isinstance(handle, _Far)
                for start in range(0, length, _PIECE_BYTES):
                    piece = buffer[: min(_PIECE_BYTES, length - start)]
                    handle.read_into(offset + start, piece)
                    file.write(piece)
                file.flush()
                return mmap.mmap(file.fileno(), length, prot=mmap.PROT_READ)
        except OSError as error:
            raise NoSpace(
                f"{size_text(length)} of a non-contiguous tensor cannot be written to a temporary file: {error.strerror}",
                where=self.where(name),
                hint=f"make room in {tempfile.gettempdir()}, or name another directory: TMPDIR",
            ) from error


class _Far:
    """An object that is read by ranges: short ones from cached blocks."""

    def __init__(self, reader: Reader, block: Callable[[int, Callable[[], bytes]], bytes]) -> None:
        self._reader, self._block, self.size = reader, block, reader.size

    def read_into(self, offset: int, into: memoryview) -> None:
        """Fill ``into`` from ``offset``; the range is inside the object."""
        into = into.cast("B")
        if len(into) >= BLOCK_BYTES:
            self._reader.read_into(offset, into)
            return
        position = 0
        while position < len(into):
            number, skip = divmod(offset + position, BLOCK_BYTES)
            block = memoryview(self._block(number, lambda number=number: self._fetch(number)))  # type: ignore[misc]
            data = block[skip : skip + len(into) - position]
            into[position : position + len(data)] = data
            position += len(data)

    def _fetch(self, number: int) -> bytes:
        start = number * BLOCK_BYTES
        data = bytearray(min(BLOCK_BYTES, self.size - start))
        self._reader.read_into(start, memoryview(data))
        return bytes(data)


def _stamp(version: Version) -> Stamp:
    """Return an object's stamp; its tag replaces the time of its last change."""
    tag = int.from_bytes(Digest((version.tag or "").encode()).digest()[:7], "little")
    return Stamp(version.size, tag, 0)
