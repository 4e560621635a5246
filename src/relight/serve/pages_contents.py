"""Template values of a checkpoint's page and of the comparison of two checkpoints. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from relight.serve.draw import StripItem, Tile, histogram, strip, treemap
from relight.serve.pages_addresses import of_checkpoint
from relight.serve.pages_words import number, shape_of, when
from relight.serve.pieces import piece_of
from relight.serve.values import CheckpointDetail, CheckpointRow, DiffDetail, DiffRow, Statistics, Working
from relight.units import count_text, percent_text, size_text
from relight.versions.difference import layer_of

TENSORS_MAX, VALUES_MAX = 200, 500
"""Maximum rows of tensors on a page, and of other values that differ."""
TILES_MAX = 398
"""Maximum tiles of single tensors. One more tile stands for all other tensors together."""


def checkpoint(
    store: str, name: str, detail: CheckpointDetail, find: str, now: float, after: str = ""
) -> dict[str, Any]:
    """Return the template values of a checkpoint: tensors as a treemap and as one page of rows, the tiers that have it, other facts."""
    row = detail.row
    largest = (
        detail.tensors
        if detail.largest_first
        else sorted(detail.tensors, key=lambda tensor: (-tensor.bytes, tensor.path))
    )
    matching = [tensor for tensor in largest if find in tensor.path] if find else largest
    rows, more = piece_of(matching, after, TENSORS_MAX)
    groups: dict[str, int] = {}
    for tensor in sorted(largest[:TILES_MAX], key=lambda tensor: tensor.path):
        groups.setdefault(group_of(tensor.path), len(groups))
    tiles = [
        Tile(
            tensor.path,
            tensor.bytes,
            f"{size_text(tensor.bytes)}, {tensor.dtype} {shape(tensor.shape)}",
            of_checkpoint(store, name, row.id, tensor=tensor.path) + "#tensor",
            tensor.path[len(group_of(tensor.path)) + 1 :],
            groups[group_of(tensor.path)],
        )
        for tensor in largest[:TILES_MAX]
    ]
    if small := largest[TILES_MAX:]:
        tiles.append(Tile(f"{number(len(small))} more", sum(tensor.bytes for tensor in small), "the smallest", group=7))
    total = sum(tensor.bytes for tensor in detail.tensors)
    caption = f"{count_text(len(detail.tensors), 'tensor')}, {size_text(total)}; one colour for each part: {', '.join(list(groups)[:8])}."
    return {
        "run": name,
        "step": row.step,
        "health": shape_of(row.state),
        "state": row.state,
        "why": row.why,
        "hold": detail.hold,
        "tags": list(row.tags),
        "facts": [
            ("Saved", when(row.at, now), row.id),
            ("Stored", size_text(row.bytes), f"tensors: {size_text(total)}"),
            ("Tensors", number(len(detail.tensors)), ""),
            ("Verified", when(detail.verified_at, now) if detail.verified_at else "not yet", "every byte, by hash"),
        ],
        "treemap": treemap(tiles, caption) if tiles else None,
        "treemap_caption": caption,
        "find": find,
        "tensors": [
            {
                "path": tensor.path,
                "shape": shape(tensor.shape),
                "dtype": tensor.dtype,
                "bytes": tensor.bytes,
                "codec": tensor.codec or "raw",
                "ratio": tensor.ratio,
                "href": of_checkpoint(store, name, row.id, tensor=tensor.path) + "#tensor",
            }
            for tensor in rows
        ],
        "cut": f"{number(len(rows))} of {number(len(matching))}, the largest first."
        if len(matching) > len(rows)
        else "",
        "more": of_checkpoint(store, name, row.id, **({"find": find} if find else {}), after=more) if more else "",
        "residency": [
            {
                "name": tier.name,
                "health": "good" if tier.there else "idle",
                "word": "present" if tier.there else "missing",
                "bytes": tier.bytes,
            }
            for tier in detail.residency
        ],
        "values": [(str(key), str(value)) for key, value in detail.facts],
    }


def one_tensor(detail: CheckpointDetail, path: str, result: Statistics | Working | str) -> dict[str, Any] | None:
    """Return the template values of one tensor: statistics, the progress of reading them, or an error. None if there is no such tensor."""
    tensor = next((tensor for tensor in detail.tensors if tensor.path == path), None)
    if tensor is None:
        return None
    facts = [
        ("Shape", shape(tensor.shape), tensor.dtype),
        ("Size", size_text(tensor.bytes), tensor.codec or "raw"),
        ("Stored", percent_text(tensor.ratio), "of its size"),
    ]
    context = {"path": tensor.path, "facts": facts, "histogram": None, "waiting": False}
    if isinstance(result, str):
        return {**context, "note": result}
    if isinstance(result, Working):
        return {**context, "note": f"{result.says}: {percent_text(result.done)} so far", "waiting": True}
    facts += [(name, number(value), "") for name, value in result.numbers]
    picture = histogram(result.edges, result.counts, f"values of {tensor.path}") if result.counts else None
    return {**context, "histogram": picture, "note": result.says}


def group_of(path: str) -> str:
    """Return the part of the state that a tensor belongs to: the first part of its path."""
    return path.replace("/", ".").partition(".")[0]


def shape(lengths: Sequence[int]) -> str:
    """Return a shape as text, such as ``2 × 3``. A scalar is a dot."""
    return " × ".join(str(length) for length in lengths) or "·"


def compare(detail: DiffDetail) -> dict[str, Any]:
    """Return the template values of a comparison: a picture with a row for each layer, and tables of what differs."""
    differing = [tensor for tensor in detail.tensors if tensor.kind != "same"]
    pieces = [
        StripItem(layer_of(tensor.name), tensor.name, tensor.share or 0.0, difference_text(tensor), tensor.kind)
        for tensor in detail.tensors
    ]
    count = {
        kind: sum(tensor.kind == kind for tensor in detail.tensors) for kind in ("same", "changed", "added", "removed")
    }
    return {
        "found": True,
        "facts": [
            ("Equal", number(count["same"]), "bit-identical"),
            ("Changed", number(count["changed"]), ""),
            ("Only in B", number(count["added"]), ""),
            ("Only in A", number(count["removed"]), ""),
            ("Other values", number(len(detail.values)), ""),
        ],
        "picture": strip(pieces, f"{count_text(len(differing), 'tensor')} of {number(len(detail.tensors))} differ")
        if differing
        else None,
        "tensors": [
            {"name": tensor.name, "kind": tensor.kind, "share": tensor.share, "largest": tensor.largest}
            for tensor in sorted(differing, key=lambda tensor: (-(tensor.share or 0.0), tensor.name))[:TENSORS_MAX]
        ],
        "cut": f"The {TENSORS_MAX} that differ most, of {number(len(differing))}."
        if len(differing) > TENSORS_MAX
        else "",
        "values": [(str(path), str(left), str(right)) for path, left, right in detail.values[:VALUES_MAX]],
        "values_cut": f"The first {VALUES_MAX} of {number(len(detail.values))}."
        if len(detail.values) > VALUES_MAX
        else "",
    }


def sides(rows: Sequence[CheckpointRow]) -> list[dict[str, Any]]:
    """Return the state of each side of a comparison."""
    return [
        {
            "name": name,
            "id": row.id,
            "step": row.step,
            "health": shape_of(row.state),
            "state": row.state,
            "why": row.why.removeprefix(f"{row.state}: "),
        }
        for name, row in zip("AB", rows, strict=False)
    ]


def compared(answer: DiffDetail | Working) -> dict[str, Any]:
    """Return the template values of a complete comparison, or of its progress."""
    if isinstance(answer, Working):
        return {
            "found": False,
            "waiting": f"Tensors that differ are being read: {percent_text(answer.done)}. "
            f"{answer.says or 'The page then shows the result.'}",
        }
    return {"waiting": ""} | compare(answer)


def difference_text(row: DiffRow) -> str:
    """Return a tensor's difference in words."""
    if row.kind != "changed":
        return {"same": "equal", "added": "only in B", "removed": "only in A"}.get(row.kind, row.kind)
    return f"{percent_text(row.share)} of its values, at most by {number(row.largest)}"
