"""Lists of checkpoints, and what is known of them, for views in a shell and in a notebook."""

from __future__ import annotations

from collections.abc import Sequence

from relight.log.checkpoint_view import age_of, first_metrics
from relight.log.history import Checkpoint
from relight.observe.object_view import html_table
from relight.units import size_text

ROWS_MAX = 50
_COLUMNS = ("step", "id", "saved", "size", "metrics", "reason")


class CheckpointList(list[Checkpoint]):
    """Checkpoints of one run, oldest first, which a notebook shows as a table, newest first."""

    def _repr_html_(self) -> str:
        rows = [
            (each.step, each.id, age_of(each.time), size_text(each.body.stored_bytes), first_metrics(each.metrics), each.body.reason)
            for each in self[: -ROWS_MAX - 1 : -1]
        ]  # fmt: skip
        more = f", the newest {ROWS_MAX}" if len(self) > ROWS_MAX else ""
        return html_table(f"{len(self)} checkpoints{more}", _COLUMNS, rows)


def known_checkpoints(checkpoints: Sequence[Checkpoint] | None) -> list[tuple[str, object]]:
    """Return the facts of ``checkpoints``, oldest first: their number, and the newest. None if they are unknown."""
    if checkpoints is None:
        return []
    newest = checkpoints[-1] if checkpoints else None
    size_and_age = f"{size_text(newest.body.stored_bytes)}, {age_of(newest.time)}" if newest else ""
    return [
        ("checkpoints", len(checkpoints)),
        ("newest", f"step {newest.step} ({newest.id}, {size_and_age})" if newest else ""),
    ]
