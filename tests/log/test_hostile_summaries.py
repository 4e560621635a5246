"""Summaries that no writer of ours makes: refused with an error of ours, or read without harm."""

from __future__ import annotations

import json
import random
import zlib
from collections.abc import Callable
from typing import Any

import pytest
from tests.log.test_log_summaries import Writer

from relight.errors import CorruptCheckpoint, RelightError, UnsafeContent
from relight.log import LogView, fold, line_of
from relight.log.summary import condense, decode, encode

STRANGE: tuple[Any, ...] = (
    None,
    True,
    -1,
    0,
    2**63 - 1,
    10**400,
    1e308,
    "",
    "x" * 10_000,
    "../..",
    [],
    [[]],
    {},
    [None],
    {"a": []},
)


def a_summary(seed: int = 1) -> bytes:
    """Return the file of a summary with live and retired checkpoints, tags, roll-backs and lines."""
    writer = Writer(seed)
    for _ in range(300):
        writer.act()
    return encode(condense(writer.view(), trusted=False))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"x",
        b"x\x9c\x03\x00\x00\x00\x00\x01",
        zlib.compress(b"[]"),
        zlib.compress(b"{"),
        zlib.compress(b"0" * 2**28 + b"0"),
    ],
)
def test_bytes_of_another_kind_are_refused(data: bytes) -> None:
    """Other bytes in a summary's place raise our own error. Decompression without bound is stopped."""
    with pytest.raises((CorruptCheckpoint, UnsafeContent)):
        decode(data, "here")


def test_a_newer_version_is_named() -> None:
    """A summary of a newer version is refused with that version's number."""
    with pytest.raises(UnsafeContent, match="version 9"):
        decode(zlib.compress(b'{"relight":"summary","version":9}'), "here")


@pytest.mark.parametrize("change", [
    lambda file: file["cuts"].update({"": 1e9}), lambda file: file["cuts"].update({"": -0.5}),
    lambda file: file["tags"].update({"../x": next(iter(file["tags"].values()))}),
    lambda file: file.update(live=file["live"] + file["live"][:1]), lambda file: file.update(live=[file["upto"] + 1]),
    lambda file: file.update(counted=file["upto"] + 2), lambda file: file.update(best_by=["loss", "first"]),
])  # fmt: skip
def test_inconsistent_summaries_are_refused(change: Callable[[dict[str, Any]], None]) -> None:
    """Fields that contradict each other, or that no writer writes, are refused though each has the right type."""
    file = json.loads(zlib.decompress(a_summary()))
    assert file["tags"] and file["live"]
    change(file)
    with pytest.raises(UnsafeContent):
        decode(zlib.compress(json.dumps(file).encode()), "here")


@pytest.mark.parametrize("seed", range(4))
def test_any_change_is_refused_or_read(seed: int) -> None:
    """300 changes of one value somewhere in the file: each is refused, or what is read folds without another error."""
    pick, data = random.Random(seed), a_summary(seed)
    refused = 0
    for _ in range(300):
        file = json.loads(zlib.decompress(data))
        _change(file, pick)
        try:
            summary = decode(zlib.compress(json.dumps(file).encode()), "here")
        except RelightError:
            refused += 1
            continue
        history = fold(
            LogView(
                "run", summary.store, summary.run, summary.records, summary.faults, summary.upto, summary.hash, summary
            )
        )
        for head in history.live[-3:]:
            line_of(history, head)
    assert refused > 150


def _change(file: dict[str, Any], pick: random.Random) -> None:
    """Replace, remove or repeat one value, at any depth."""
    node: Any = file
    while True:
        keys = list(node) if isinstance(node, dict) else range(len(node))
        if not keys:
            return
        key = pick.choice(keys)
        if isinstance(node[key], (dict, list)) and node[key] and pick.random() < 0.85:
            node = node[key]
            continue
        draw = pick.random()
        if draw < 0.15:
            del node[key]
        elif draw < 0.3 and isinstance(node, list):
            node.append(node[key])
        else:
            node[key] = pick.choice(STRANGE)
        return
