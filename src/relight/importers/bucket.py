"""Somebody else's checkpoints in a bucket: listed once, read in place by ranges, each object in the version that was listed."""

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
from relight.store import ObjectStore, Reader, Version

SCHEMES = ("s3", "s3a", "gs", "gcs", "az", "azure")
LISTED_MAX = 1_000_000
"""Objects below one place."""
BLOCK_BYTES = 64 << 10
"""What a short read brings along: what says how a file is to be read lies in many places near each other."""
_BLOCKS_HELD = 64
_PIECE_BYTES = 16 << 20


def is_bucket(path: str) -> bool:
    """Whether it is the URL of an object store that can be listed."""
    scheme, there, _ = path.partition("://")
    return bool(there) and scheme.lower() in SCHEMES


class Listing:
    """Objects below ``url``, by their names from there on: listed once. Those with names that no path can have are as if not there."""

    def __init__(self, url: str, versions: Mapping[str, Version] | None = None) -> None:
        self.url = url.rstrip("/")
        self.store = ObjectStore(self.url)
        told = self.store.versions("", LISTED_MAX) if versions is None else versions
        self.versions = {name: one for name, one in told.items() if all(part not in ("", ".", "..") for part in name.split("/"))}
        self._names = sorted(self.versions)

    def below(self, folder: str) -> list[str]:
        """The names of all objects below ``folder``, as they are here."""
        first, behind = (f"{folder}/", f"{folder}0") if folder else ("", "\U0010ffff")  # "0" is what comes behind "/"
        return self._names[bisect_left(self._names, first) : bisect_left(self._names, behind)]

    def is_file(self, name: str) -> bool:
        """Whether there is such an object. One of no bytes with others below its name is what consoles make of a folder."""
        return name in self.versions and not (self.versions[name].size == 0 and self.below(name))

    def inside(self, folder: str) -> list[tuple[str, bool]]:
        """Names directly in ``folder``, in order, and whether each is a folder. One may be both."""
        start = len(folder) + 1 if folder else 0
        found = {(name[start:].partition("/")[0], "/" in name[start:]) for name in self.below(folder)}
        return sorted((one, is_folder) for one, is_folder in found if is_folder or self.is_file(f"{folder}/{one}".lstrip("/")))


class BucketFiles(Files):
    """One object of a listing, or all below one folder of it, as ``Files`` has those of a file system."""

    def __init__(self, listing: Listing, name: str, *, is_folder: bool) -> None:
        self._set_up(f"{listing.url}/{name}" if name else listing.url)
        self.listing, self.at, self.is_folder = listing, name, is_folder
        self._blocks: OrderedDict[tuple[str, int], bytes] = OrderedDict()
        self._staged: tuple[tuple[str, int, int], mmap.mmap] | None = None
        self._lock = threading.Lock()
        if not is_folder:
            self.stamps[""] = _stamp(listing.versions[name])
            return
        start = len(name) + 1 if name else 0
        for number, one in enumerate(listing.below(name)):
            if number >= ENTRIES_MAX:
                raise UnsafeContent(f"more than {ENTRIES_MAX} objects", where=self.path)
            parts = one[start:].split("/")
            self.folders.update("/".join(parts[:count]) for count in range(1, len(parts)))
            if listing.is_file(one):
                self.stamps[one[start:]] = _stamp(listing.versions[one])

    @classmethod
    def from_url(cls, url: str) -> BucketFiles:
        """What ``url`` names: an object, or what lies below it. ``CheckpointNotFound`` if that is nothing."""
        url = url.rstrip("/")
        home, _, name = url.rpartition("/")
        if not home.endswith("/"):  # not a bucket's own name
            version = ObjectStore(home).version(name)
            if version is not None and version.size:
                return cls(Listing(home, {name: version}), name, is_folder=False)
        listing = Listing(url)
        if not listing.versions:
            raise CheckpointNotFound("there is nothing here", where=url)
        return cls(listing, "", is_folder=True)

    @property
    def in_bucket(self) -> bool:
        """There is no path by which another library could open it."""
        return True

    def below(self, folder: str) -> Files:
        """See ``Files``."""
        if folder not in self.folders:
            raise CorruptCheckpoint("the folder is missing", where=self.where(folder))
        inner = BucketFiles(self.listing, self._key(folder), is_folder=True)
        inner.sums, inner.held = self.sums, self.held
        self.within.append((folder, inner))
        return inner

    @contextmanager
    def open(self, name: str) -> Iterator[Handle]:
        """See ``Files``. Nothing is asked for: what is read will be, in the version that was listed."""
        self._stamp(name)
        key = self._key(name)
        yield _Far(self.listing.store.at(key, self.listing.versions[key]), lambda number, make: self._block(key, number, make))

    @contextmanager
    def mapped(self, name: str, offset: int, length: int) -> Iterator[mmap.mmap]:
        """See ``Files``. The bytes are brought to a file without a name where temporary files lie: one such stretch at a time is kept."""
        with self._lock:
            if self._staged is None or self._staged[0] != (name, offset, length):
                self._staged = None
                self._staged = (name, offset, length), self._stage(name, offset, length)
            found = self._staged[1]
        yield found

    def check_unchanged(self) -> None:
        """See ``Files``: all is listed again."""
        self.sums.check(self.path)
        if self.is_folder:
            now: Mapping[str, Version | None] = self.listing.store.versions(self.at, LISTED_MAX)
        else:
            now = {"": self.listing.store.version(self.at)}
        for name in self.read:
            there = now.get(name)
            if there is None or _stamp(there) != self.stamps[name]:
                raise CorruptCheckpoint(
                    "it has changed while it was read", where=self.where(name), hint="import it when nobody writes to it any more"
                )
        for _, inner in self.within:
            inner.check_unchanged()

    def _key(self, name: str) -> str:
        return f"{self.at}/{name}".strip("/")

    def _block(self, key: str, number: int, make: Callable[[], bytes]) -> bytes:
        with self._lock:
            found = self._blocks.get((key, number))
            if found is None:
                found = self._blocks[key, number] = make()
                while len(self._blocks) > _BLOCKS_HELD:
                    self._blocks.popitem(last=False)
            self._blocks.move_to_end((key, number))
            return found

    def _stage(self, name: str, offset: int, length: int) -> mmap.mmap:
        room = memoryview(bytearray(min(length, _PIECE_BYTES)))
        try:
            with tempfile.TemporaryFile(prefix="relight-") as file, self.open(name) as handle:
                assert isinstance(handle, _Far)
                for start in range(0, length, _PIECE_BYTES):
                    piece = room[: min(_PIECE_BYTES, length - start)]
                    handle.read_into(offset + start, piece)
                    file.write(piece)
                file.flush()
                return mmap.mmap(file.fileno(), length, prot=mmap.PROT_READ)
        except OSError as error:
            raise NoSpace(
                f"{length:,} bytes of a tensor that does not lie in order cannot be laid down here: {error.strerror}",
                where=self.where(name), hint=f"make room in {tempfile.gettempdir()}, or say where there is some: TMPDIR",
            ) from error  # fmt: skip


class _Far:
    """An object that is read by ranges: short ones out of blocks that are kept a while."""

    def __init__(self, reader: Reader, block: Callable[[int, Callable[[], bytes]], bytes]) -> None:
        self._reader, self._block, self.size = reader, block, reader.size

    def read_into(self, offset: int, into: memoryview) -> None:
        """Fill ``into``, which lies within the object."""
        into = into.cast("B")
        if len(into) >= BLOCK_BYTES:
            self._reader.read_into(offset, into)
            return
        at = 0
        while at < len(into):
            number, skip = divmod(offset + at, BLOCK_BYTES)
            data = memoryview(self._block(number, lambda number=number: self._fetch(number)))[skip : skip + len(into) - at]  # type: ignore[misc]
            into[at : at + len(data)] = data
            at += len(data)

    def _fetch(self, number: int) -> bytes:
        start = number * BLOCK_BYTES
        found = bytearray(min(BLOCK_BYTES, self.size - start))
        self._reader.read_into(start, memoryview(found))
        return bytes(found)


def _stamp(version: Version) -> Stamp:
    """Its tag stands for the time of its last change."""
    tag = int.from_bytes(Digest((version.tag or "").encode()).digest()[:7], "little")
    return Stamp(version.size, tag, 0)
