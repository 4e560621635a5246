"""An encrypted store has all guarantees of a store. Its underlying files are useless without the key."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from relight.errors import CorruptCheckpoint, RelightError, StoreUnavailable, UnsafeContent, WrongKey
from relight.format.cipher import MAGIC, PAGE_BYTES, TAG_BYTES, TRAILER_BYTES, stored_size
from relight.keys import Keychain, write_key_file
from relight.log import require_store
from relight.store import PAGE, LocalStore, MemoryStore, page_buffer, put
from relight.store.encrypted import WRITE_PAGES, EncryptedStore
from relight.store.striped import StripedStore
from relight.testing.store_suite import StoreSuite, read_all, refuses, write_all


def fresh_key(folder: Path, name: str = "a.key") -> Keychain:
    """Return a new key in a new file."""
    folder.mkdir(parents=True, exist_ok=True)
    write_key_file(str(folder / name))
    return Keychain.from_specs(f"file:{folder / name}")


OWN = frozenset({"relight.json", ".keys"})


class TestOnDisk(StoreSuite):
    """An encrypted store over a directory."""

    own = OWN

    def make(self, tmp_path: Path) -> EncryptedStore:
        """Return an encrypted store, with a key next to it."""
        store = EncryptedStore(LocalStore(tmp_path / "store"), fresh_key(tmp_path / "keys"))
        require_store(store)
        return store


class TestInMemory(StoreSuite):
    """An encrypted store over memory."""

    own = OWN
    across_processes = False

    def make(self, tmp_path: Path) -> EncryptedStore:
        """Return an encrypted store, with a key next to it."""
        store = EncryptedStore(MemoryStore(), fresh_key(tmp_path / "keys"))
        require_store(store)
        return store


class TestStriped(StoreSuite):
    """An encrypted store over two directories."""

    own = OWN | {"stripe.json"}

    def make(self, tmp_path: Path) -> EncryptedStore:
        """Return an encrypted store, with a key next to it."""
        store = EncryptedStore(StripedStore([tmp_path / "a", tmp_path / "b"]), fresh_key(tmp_path / "keys"))
        require_store(store)
        return store


@pytest.fixture
def store(tmp_path: Path, keychain: Keychain) -> EncryptedStore:
    """Return an encrypted store over memory, so that tests can read and change the underlying files."""
    encrypted = EncryptedStore(MemoryStore(), keychain)
    require_store(encrypted)
    return encrypted


def files(store: EncryptedStore) -> dict[str, bytes | bytearray]:
    """Return the underlying bytes."""
    assert isinstance(store.inner, MemoryStore)
    return store.inner._files


SIZES = [
    1,
    15,
    16,
    PAGE - 1,
    PAGE_BYTES - 1,
    PAGE_BYTES,
    PAGE_BYTES + 1,
    3 * PAGE_BYTES,
    WRITE_PAGES * PAGE_BYTES + 5,
    2 * WRITE_PAGES * PAGE_BYTES,
]


@pytest.mark.parametrize("size", SIZES)
def test_what_is_written_is_read(store: EncryptedStore, size: int) -> None:
    """Files of any length, read by any range, in one read or several.

    The underlying files have the documented length.
    """
    data = random.Random(size).randbytes(size)
    write_all(store, "a/b", data)
    assert len(files(store)["a/b"]) == stored_size(size)
    assert read_all(store, "a/b") == data and store.get("a/b", size) == data
    draw, reader = random.Random(size), store.open("a/b")
    for _ in range(20):
        offset = draw.randrange(size)
        length = draw.randrange(size - offset) + 1
        into = bytearray(length)
        reader.read_into(offset, memoryview(into))
        assert into == data[offset : offset + length]
    refuses(CorruptCheckpoint, lambda: reader.read_into(size - 1, memoryview(bytearray(2))))
    refuses(UnsafeContent, lambda: store.get("a/b", size - 1))
    reader.close()


def test_ranges_are_read_past_the_page_cache(tmp_path: Path, keychain: Keychain) -> None:
    """``fetch`` returns what ``read_into`` reads, wherever the range begins and ends."""
    store = EncryptedStore(LocalStore(tmp_path / "s"), keychain)
    require_store(store)
    data = random.Random(1).randbytes(9 * PAGE_BYTES + 77)
    write_all(store, "a/b", data)
    os.sync()
    reader, fetched = store.open("a/b"), 0
    for offset, length in [
        (0, 100),
        (5, PAGE_BYTES),
        (PAGE_BYTES, 2 * PAGE_BYTES),
        (PAGE_BYTES - 1, 2),
        (0, len(data)),
        (9 * PAGE_BYTES, 77),
    ]:
        room = page_buffer(-(-length // PAGE) * PAGE + 2 * PAGE)
        view = reader.fetch(offset, length, room)
        if view is not None:
            fetched += 1
            assert view == data[offset : offset + length]
    reader.close()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_pieces_in_any_order(store: EncryptedStore, data: st.DataObject) -> None:
    """A file with a gap is refused, and a page that is written twice: that would use a nonce twice."""
    size = data.draw(st.integers(1, 5 * PAGE_BYTES))
    body = random.Random(size).randbytes(size)
    cuts = sorted({0, size, *data.draw(st.lists(st.integers(0, size), max_size=6))})
    pieces = data.draw(st.permutations(list(zip(cuts, cuts[1:], strict=False))))
    key = f"f/{os.urandom(8).hex()}"
    announced = size + data.draw(st.sampled_from([0, 1, PAGE_BYTES, 10 * PAGE_BYTES]))
    writer = store.write(key, announced)
    for start, stop in pieces:
        writer.write_at(start, memoryview(body)[start:stop])
    writer.finish(size)
    assert read_all(store, key) == body
    assert len(files(store)[key]) == stored_size(size)


def test_a_file_that_was_not_written_whole_is_not_finished(store: EncryptedStore) -> None:
    """A file with a gap is refused, and a page that is written twice: that would use a nonce twice."""
    writer = store.write("a/gap", 4 * PAGE_BYTES)
    writer.write_at(2 * PAGE_BYTES, memoryview(bytes(PAGE_BYTES)))
    refuses(StoreUnavailable, writer.finish)
    writer.abort()
    writer = store.write("a/twice", 4 * PAGE_BYTES)
    writer.write_at(0, memoryview(bytes(PAGE_BYTES)))
    refuses(StoreUnavailable, lambda: writer.write_at(0, memoryview(bytes(PAGE_BYTES))))
    writer.abort()
    writer = store.write("a/short", 4 * PAGE_BYTES)
    writer.write_at(0, memoryview(bytes(PAGE_BYTES + 3)))
    refuses(StoreUnavailable, lambda: writer.finish(PAGE_BYTES + 4))
    writer.abort()


def test_what_the_store_refuses_is_reported(tmp_path: Path, keychain: Keychain) -> None:
    """An error of a write in the background is raised by the next write, or at the end.

    The file never counts as written.
    """

    class Full(MemoryStore):
        def write(self, key: str, size: int):  # type: ignore[no-untyped-def]
            inner, writes = super().write(key, size), [0]

            class Failing:
                align = 1

                def write_at(self, offset: int, data: memoryview) -> None:
                    writes[0] += 1
                    if writes[0] == 3 and key == "a/b":
                        raise StoreUnavailable("no")
                    inner.write_at(offset, data)

                finish, abort = inner.finish, inner.abort

            return Failing()

    store = EncryptedStore(Full(), keychain)
    require_store(store)
    writer = store.write("a/b", 8 * WRITE_PAGES * PAGE_BYTES)

    def write() -> None:
        for page in range(8):
            writer.write_at(page * WRITE_PAGES * PAGE_BYTES, memoryview(bytes(WRITE_PAGES * PAGE_BYTES)))
        writer.finish()

    refuses(StoreUnavailable, write)
    writer.abort()
    assert not list(store.list("a"))


def _flipped(data: bytes | bytearray, at: int, bit: int) -> bytes:
    changed = bytearray(data)
    changed[at] ^= 1 << bit
    return bytes(changed)


def test_every_byte_counts(store: EncryptedStore) -> None:
    """If one bit of any byte is changed, the file is refused, by ``get`` and by a reader."""
    data = b"what was written" * 40
    store.put_once("run/log/1", data)
    whole = bytes(files(store)["run/log/1"])
    for offset in range(len(whole)):
        files(store)["run/log/1"] = _flipped(whole, offset, offset % 8)
        refuses(CorruptCheckpoint, lambda: store.get("run/log/1", 1 << 20))
        refuses(CorruptCheckpoint, lambda: read_all(store, "run/log/1"))
    for length in [*range(1, TRAILER_BYTES + 40), len(whole) - TAG_BYTES, len(whole) - 1]:
        files(store)["run/log/1"] = whole[:length]
        refuses(CorruptCheckpoint, lambda: store.get("run/log/1", 1 << 20))
        files(store)["run/log/1"] = whole[-length:]
        refuses(CorruptCheckpoint, lambda: store.get("run/log/1", 1 << 20))
    files(store)["run/log/1"] = whole + b"\0"
    refuses(CorruptCheckpoint, lambda: store.get("run/log/1", 1 << 20))


def test_every_page_is_where_it_was_written(store: EncryptedStore) -> None:
    """Refused:

    a page in another page's place, a page of another file, exchanged tags, and removed pages with a valid end.
    """
    size = 6 * PAGE_BYTES
    for key in ("run/a/pack", "run/b/pack"):
        write_all(store, key, random.Random(key).randbytes(size))
    mine, theirs = (bytes(files(store)[key]) for key in ("run/a/pack", "run/b/pack"))

    def page(data: bytes, number: int) -> bytes:
        return data[number * PAGE_BYTES : (number + 1) * PAGE_BYTES]

    def tag(data: bytes, number: int) -> bytes:
        return data[size + number * TAG_BYTES :][:TAG_BYTES]

    def made(pages: list[bytes], tags: list[bytes], end: bytes) -> bytes:
        return b"".join([*pages, *tags, end])

    pages, tags, end = [page(mine, n) for n in range(6)], [tag(mine, n) for n in range(6)], mine[-TRAILER_BYTES:]
    forged = {
        "both": theirs,
        "its end": made(pages, tags, theirs[-TRAILER_BYTES:]),
        "fewer": made(pages[:5], tags[:5], end),
    }
    for position in range(6):
        forged[f"page {position}"] = made(
            [*pages[:position], page(theirs, position), *pages[position + 1 :]], tags, end
        )
        forged[f"page and tag {position}"] = made(
            [*pages[:position], page(theirs, position), *pages[position + 1 :]],
            [*tags[:position], tag(theirs, position), *tags[position + 1 :]],
            end,
        )
        other = (position + 1) % 6
        moved, turned = list(pages), list(tags)
        moved[position], moved[other], turned[position], turned[other] = (
            pages[other],
            pages[position],
            tags[other],
            tags[position],
        )
        forged[f"exchanged {position}"] = made(moved, turned, end)
        forged[f"tags {position}"] = made(pages, turned, end)
    for what, data in forged.items():
        files(store)["run/a/pack"] = data
        error = refuses(CorruptCheckpoint, lambda: read_all(store, "run/a/pack"))
        assert error.where == "run/a/pack", what


def test_a_file_opens_only_where_it_was_written(tmp_path: Path, keychain: Keychain, store: EncryptedStore) -> None:
    """A file is refused under another name, and under its own name in another store with the same key."""
    store.put_once("run/log/1", b"one")
    files(store)["run/log/2"] = files(store)["run/log/1"]
    refuses(CorruptCheckpoint, lambda: store.get("run/log/2", 99))
    other = EncryptedStore(MemoryStore(), keychain)
    require_store(other)
    other.put_once("x", b"y")
    files(other)["run/log/1"] = files(store)["run/log/1"]
    refuses(CorruptCheckpoint, lambda: other.get("run/log/1", 99))
    for name, slot in list(files(store).items()):
        if name.startswith(".keys/"):
            files(other)[name.replace("000001-", "000002-")] = slot
    refuses((CorruptCheckpoint, WrongKey), lambda: other.get("run/log/1", 99))


def test_a_sealed_message_opens_with_the_store_s_key_only(
    tmp_path: Path, keychain: Keychain, store: EncryptedStore
) -> None:
    """A sealed message is opened by another process with a key of the store, under its name. Another store, another name,
    a changed byte and plaintext are refused, also while the store takes plaintext files. Nothing is stored."""
    sealed = store.seal("peers-token", b"a secret of 32 bytes, for others")
    assert b"a secret of" not in sealed and sealed != store.seal("peers-token", b"a secret of 32 bytes, for others")
    again = EncryptedStore(store.inner, keychain, takes_plain=True)
    assert again.unseal("peers-token", sealed) == b"a secret of 32 bytes, for others"
    assert not [entry for entry in store.inner.list("") if "token" in entry.name]
    other = EncryptedStore(LocalStore(tmp_path / "other"), keychain)
    other.seal("peers-token", b"another")
    for opens in (
        lambda: other.unseal("peers-token", sealed),
        lambda: again.unseal("another-name", sealed),
        lambda: again.unseal("peers-token", bytes([sealed[0] ^ 1]) + sealed[1:]),
        lambda: again.unseal("peers-token", b"a secret of 32 bytes, for others"),
        lambda: again.unseal("peers-token", b""),
    ):
        refuses(CorruptCheckpoint, opens)


def test_plaintext_files_are_refused(store: EncryptedStore) -> None:
    """A file that was written without the key is refused, whatever its contents."""
    store.put_once("run/log/1", b"one")
    for forged in (b"plain", b"x" * 1000, MAGIC, b"y" * 300 + MAGIC):
        files(store)["run/log/1"] = forged
        error = refuses(CorruptCheckpoint, lambda: store.get("run/log/1", 1 << 20))
        refuses(CorruptCheckpoint, lambda: read_all(store, "run/log/1"))
        assert "encrypt" in str(error) or "short" in str(error) or "end" in str(error)


def test_another_key_opens_nothing(tmp_path: Path, store: EncryptedStore) -> None:
    """``WrongKey`` names the key that would open the store, without its secret."""
    store.put_once("run/log/1", b"one")
    other = EncryptedStore(store.inner, fresh_key(tmp_path, "other.key"))
    error = refuses(WrongKey, lambda: other.get("run/log/1", 99))
    assert "none of the keys" in error.what and "file" in error.hint
    refuses(WrongKey, lambda: other.put_once("run/log/2", b"two"))


def test_a_store_is_encrypted_exactly_if_its_record_states_it(tmp_path: Path, keychain: Keychain) -> None:
    """An encrypted store cannot be opened without a key, nor a plain store with one.

    Either would not be what its user expects.
    """
    inner = MemoryStore()
    require_store(EncryptedStore(inner, keychain))
    assert "RELIGHT_KEY" in refuses(WrongKey, lambda: require_store(inner)).hint
    plain = MemoryStore()
    require_store(plain)
    assert "rekey" in refuses(WrongKey, lambda: require_store(EncryptedStore(plain, keychain))).hint


def test_underlying_files_reveal_nothing(store: EncryptedStore) -> None:
    """No run of written bytes is in any underlying file. Equal files differ, and so do equal writes of one name."""
    marker = b"a secret of this training run"
    for key in ("run/a", "run/b"):
        put(store, key, marker * 10_000)
    store.put_once("run/log/0", marker)
    again = files(store)["run/log/0"]
    store.delete("run/log/0")
    store.put_once("run/log/0", marker)
    assert files(store)["run/log/0"] != again
    assert all(marker[:12] not in bytes(data) for data in files(store).values())
    assert files(store)["run/a"] != files(store)["run/b"]


def test_damage_beneath_never_escapes_as_another_error(store: EncryptedStore) -> None:
    """Any bytes in place of a file raise a ``RelightError``."""
    store.put_once("run/log/1", b"one" * 100)
    whole, draw = bytes(files(store)["run/log/1"]), random.Random(5)
    attacks: list[Callable[[], bytes]] = [
        lambda: draw.randbytes(draw.randrange(1, 700)),
        lambda: draw.randbytes(draw.randrange(1, 700)) + whole[-TRAILER_BYTES:],
        lambda: whole[: draw.randrange(1, len(whole))] + draw.randbytes(draw.randrange(50)),
        lambda: whole[:-TRAILER_BYTES] + draw.randbytes(TRAILER_BYTES - len(MAGIC)) + MAGIC,
    ]
    for number in range(400):
        files(store)["run/log/1"] = attacks[number % 4]()
        refuses(RelightError, lambda: store.get("run/log/1", 1 << 20))
        refuses(RelightError, lambda: read_all(store, "run/log/1"))


def test_a_doubted_range_is_read_again_with_the_tags_of_its_file(tmp_path: Path) -> None:
    """The tags and the trailer at a file's end may be as old as the range: a cache below drops the whole file."""

    class Below(MemoryStore):
        dropped: tuple[str, int, int | None] | None = None

        def invalidate(self, key: str, offset: int = 0, length: int | None = None) -> None:
            self.dropped = (key, offset, length)

        def without_cache(self) -> MemoryStore:
            return self

    below = Below()
    EncryptedStore(below, fresh_key(tmp_path)).invalidate("run/file", 5, 10)
    assert below.dropped == ("run/file", 0, None)
