"""What checkpoints hold, for templates: one of them, and the difference between two. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from relight.serve.draw import StripItem, Tile, histogram, strip, treemap
from relight.serve.pages_addresses import of_checkpoint
from relight.serve.pages_words import number, plural, share, size, when
from relight.serve.pieces import piece_of
from relight.serve.values import CheckpointDetail, DiffDetail, DiffRow, Statistics, Working
from relight.versions.difference import layer_of

TENSORS_MAX, VALUES_MAX = 200, 500
"""Rows of tensors on a page, and of other values that differ."""
TILES_MAX = 398
"""Tensors with an area of their own: a picture has room for one more, of all others together."""


def checkpoint(store: str, name: str, detail: CheckpointDetail, find: str, now: float, after: str = "") -> dict[str, Any]:
    """One checkpoint: its tensors as areas and as rows, a page of them, where it lies, what else is said of it."""
    row = detail.row
    largest = detail.tensors if detail.largest_first else sorted(detail.tensors, key=lambda one: (-one.bytes, one.path))
    wanted = [one for one in largest if find in one.path] if find else largest
    rows, more = piece_of(wanted, after, TENSORS_MAX)
    groups: dict[str, int] = {}
    for one in sorted(largest[:TILES_MAX], key=lambda one: one.path):
        groups.setdefault(group_of(one.path), len(groups))
    tiles = [
        Tile(
            one.path,
            one.bytes,
            f"{size(one.bytes)}, {one.dtype} {shape(one.shape)}",
            of_checkpoint(store, name, row.id, tensor=one.path) + "#tensor",
            one.path[len(group_of(one.path)) + 1 :],
            groups[group_of(one.path)],
        )
        for one in largest[:TILES_MAX]
    ]
    if small := largest[TILES_MAX:]:
        tiles.append(Tile(f"{number(len(small))} more", sum(one.bytes for one in small), "the smallest", group=7))
    total = sum(one.bytes for one in detail.tensors)
    says = f"{plural(len(detail.tensors), 'tensor')}, {size(total)}; a colour a part: {', '.join(list(groups)[:8])}."
    return {
        "run": name,
        "step": row.step,
        "health": "good" if row.good else "failed",
        "why": row.why,
        "tags": list(row.tags),
        "facts": [
            ("Saved", when(row.at, now), row.id),
            ("Stored", size(row.bytes), f"of {size(total)} of tensors"),
            ("Tensors", number(len(detail.tensors)), ""),
            ("Verified", when(detail.verified_at, now) if detail.verified_at else "not yet", "every byte, by hash"),
        ],
        "treemap": treemap(tiles, says) if tiles else None,
        "treemap_says": says,
        "find": find,
        "tensors": [
            {
                "path": one.path,
                "shape": shape(one.shape),
                "dtype": one.dtype,
                "bytes": one.bytes,
                "codec": one.codec or "as it is",
                "ratio": one.ratio,
                "href": of_checkpoint(store, name, row.id, tensor=one.path) + "#tensor",
            }
            for one in rows
        ],
        "cut": f"{number(len(rows))} of {number(len(wanted))}, the largest first." if len(wanted) > len(rows) else "",
        "more": of_checkpoint(store, name, row.id, **({"find": find} if find else {}), after=more) if more else "",
        "residency": [
            {"name": one.name, "health": "good" if one.there else "idle", "word": "there" if one.there else "not there", "bytes": one.bytes}
            for one in detail.residency
        ],
        "values": [(str(key), str(value)) for key, value in detail.facts],
    }


def one_tensor(detail: CheckpointDetail, path: str, told: Statistics | Working | str) -> dict[str, Any] | None:
    """One tensor of a checkpoint, and what its values are; or how far they are read, or why they are not."""
    found = next((one for one in detail.tensors if one.path == path), None)
    if found is None:
        return None
    facts = [
        ("Shape", shape(found.shape), found.dtype),
        ("Size", size(found.bytes), found.codec or "as it is"),
        ("Stored", share(found.ratio), "of its size"),
    ]
    made = {"path": found.path, "facts": facts, "histogram": None, "waiting": False}
    if isinstance(told, str):
        return {**made, "says": told}
    if isinstance(told, Working):
        return {**made, "says": f"{told.says}: {share(told.done)} so far", "waiting": True}
    facts += [(name, number(value), "") for name, value in told.numbers]
    picture = histogram(told.edges, told.counts, f"values of {found.path}") if told.counts else None
    return {**made, "histogram": picture, "says": told.says}


def group_of(path: str) -> str:
    """Which part of the state a tensor is of: the first part of its path."""
    return path.replace("/", ".").partition(".")[0]


def shape(of: Sequence[int]) -> str:
    """2 × 3; a scalar is a dot."""
    return " × ".join(str(one) for one in of) or "·"


def compare(found: DiffDetail) -> dict[str, Any]:
    """What differs between two: a cell a tensor, a row a layer; the tensors that differ; other values."""
    apart = [one for one in found.tensors if one.kind != "same"]
    pieces = [StripItem(layer_of(one.name), one.name, one.share or 0.0, said_of(one), one.kind) for one in found.tensors]
    count = {kind: sum(one.kind == kind for one in found.tensors) for kind in ("same", "changed", "added", "removed")}
    return {
        "found": True,
        "facts": [
            ("The same", number(count["same"]), "to the bit"),
            ("Changed", number(count["changed"]), ""),
            ("Only in that", number(count["added"]), ""),
            ("Only in this", number(count["removed"]), ""),
            ("Other values", number(len(found.values)), ""),
        ],
        "picture": strip(pieces, f"{plural(len(apart), 'tensor')} of {number(len(found.tensors))} differ") if apart else None,
        "tensors": [
            {"name": one.name, "kind": one.kind, "share": one.share, "largest": one.largest}
            for one in sorted(apart, key=lambda one: (-(one.share or 0.0), one.name))[:TENSORS_MAX]
        ],
        "cut": f"The {TENSORS_MAX} that differ most, of {number(len(apart))}." if len(apart) > TENSORS_MAX else "",
        "values": [(str(path), str(one), str(other)) for path, one, other in found.values[:VALUES_MAX]],
        "values_cut": f"The first {VALUES_MAX} of {number(len(found.values))}." if len(found.values) > VALUES_MAX else "",
    }


def compared(answer: DiffDetail | Working) -> dict[str, Any]:
    """A comparison that is there, or how far it is."""
    if isinstance(answer, Working):
        return {
            "found": False,
            "waiting": f"Tensors that differ are being read: {share(answer.done)}. {answer.says or 'The page shows it when it is there.'}",
        }
    return {"waiting": ""} | compare(answer)


def said_of(one: DiffRow) -> str:
    """A difference in words."""
    if one.kind != "changed":
        return {"same": "the same", "added": "only in that", "removed": "only in this"}.get(one.kind, one.kind)
    return f"{share(one.share)} of its values, at most by {number(one.largest)}"
