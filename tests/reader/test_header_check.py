"""A pack with a header that differs from its part is damaged. The fast check and the full check agree."""

from __future__ import annotations

import json
from typing import Any

import pytest

from relight.commit import plan_save
from relight.errors import CorruptCheckpoint
from relight.format import Part
from relight.format.manifest import Pack
from relight.format.pack import header_metadata
from relight.layout import Box, Bytes, Item
from relight.reader import verify

ITEMS = [
    Item("a", "float32", (2, 3), "param", Bytes(bytes(24))),
    Item("é\n", "bfloat16", (5,), "param", Bytes(bytes(10))),
    Item("c", "complex64", (2,), "optim", Bytes(bytes(16))),
    Item("d", "float32", (4, 2), "param", Bytes(bytes(8)), Box((1, 0), (1, 2))),
    Item("d", "float32", (4, 2), "param", Bytes(bytes(8)), Box((3, 0), (1, 2))),
]
EMPTY = Item("none", "float32", (0,), "param", Bytes(b""))


def made(items: list[Item]) -> tuple[Part, bytes]:
    """A part of one pack, and the pack's header."""
    plan = plan_save(items, id="p" * 10)
    (pack,) = plan.packs
    packs = [Pack(pack.file, pack.size, [(length, b"h" * 32) for length in pack.chunks])]
    part = Part(store="", run="", id="", step=0, epoch=0, rank=0, world=1, packs=packs, tensors=plan.tensors, tree=b"")
    return part, bytes(pack.sources[0].view() or b"")


def changed(header: bytes, change: Any) -> bytes:
    """Return a changed header of the same length."""
    entries = json.loads(header[8:])
    change(entries)
    body = json.dumps(entries, ensure_ascii="ud800" in str(entries), separators=(",", ":")).encode()
    assert len(body) <= len(header) - 8
    return header[:8] + body.ljust(len(header) - 8)


DIFFERENCES: dict[str, Any] = {
    "a tensor more": lambda entries: entries.update(x={"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}),
    "a tensor less": lambda entries: entries.pop("a"),
    "another name": lambda entries: entries.update(b=entries.pop("a")),
    "another dtype": lambda entries: entries["a"].update(dtype="I32"),
    "another shape": lambda entries: entries["a"].update(shape=[3, 2]),
    "another place": lambda entries: entries["a"].update(data_offsets=[1, 25]),
}
SAME: dict[str, Any] = {
    "other metadata": lambda entries: entries["__metadata__"].update(id="q" * 10, more="x"),
    "no metadata": lambda entries: entries.pop("__metadata__"),
    "another order": lambda entries: entries.update(a=entries.pop("a")),
    "metadata that are not texts": lambda entries: entries.update(__metadata__={"a": [1]}),
    "half a character": lambda entries: entries["__metadata__"].update(more="\ud800"),
    "unchanged": lambda entries: None,
}


@pytest.mark.parametrize("items", [ITEMS, [*ITEMS, EMPTY]], ids=["whole", "one takes no bytes"])
@pytest.mark.parametrize("at_a_glance", [True, False])
def test_headers_that_differ_from_the_part_are_refused(
    items: list[Item], at_a_glance: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every difference is found. A header with equal contents in another notation is accepted."""
    if not at_a_glance:
        monkeypatch.setattr(verify, "_as_written", lambda *_: None)
    part, header = made(items)
    for edit in DIFFERENCES.values():
        with pytest.raises(CorruptCheckpoint, match="disagrees with the part about"):
            verify._check_header(changed(header, edit), part, 0, "pack")
    for other in SAME.values():
        verify._check_header(changed(header, other), part, 0, "pack")
    for cut in (header[:-1], header[:8] + b"x" * (len(header) - 8), header[:9]):
        with pytest.raises(CorruptCheckpoint):
            verify._check_header(cut, part, 0, "pack")


def test_headers_that_no_tensor_fits_into(monkeypatch: pytest.MonkeyPatch) -> None:
    """A header that is too short for the tensors, or too long for other readers, is refused before one is built."""
    part, header = made(ITEMS)
    monkeypatch.setattr(verify, "encode_header", lambda *_: pytest.fail("it was made"))
    short = b'{"__metadata__":{}}'
    assert verify._as_written(len(short).to_bytes(8, "little") + short, part.tensors, ["x"] * len(part.tensors)) is None
    monkeypatch.setattr(verify, "HEADER_BYTES_MAX", len(header) - 1)
    assert verify._as_written(header, part.tensors, ["x"] * len(part.tensors)) is None


def test_the_usual_header_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A header with exactly the bytes that are written is accepted by the fast check."""
    part, header = made(ITEMS)
    monkeypatch.setattr(verify, "parse_header", lambda *_: pytest.fail("it was read"))
    verify._check_header(header, part, 0, "pack")


@pytest.mark.parametrize(
    "data", [b"", b"x" * 40, b'12345678{"__metadata__":', b'12345678{"__metadata__":7,', b'12345678{"__metadata__":{"a":"b","a":"c"},',
             b'12345678{"__metadata__":' + b"[" * 100_000, b'12345678{"__metadata__":{"a":' + b"9" * 100_000]
)  # fmt: skip
def test_invalid_metadata_are_ignored_quickly(data: bytes) -> None:
    """``header_metadata`` returns None for an invalid header, without parsing deep nesting or long numbers."""
    assert header_metadata(data) is None
