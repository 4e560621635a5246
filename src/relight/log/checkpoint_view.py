"""How checkpoints look in a shell and in a notebook."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from relight.log.identity import seconds_since_epoch
from relight.observe.object_view import html_table
from relight.units import age_text, size_text

if TYPE_CHECKING:
    from relight.log.history import Checkpoint

ROWS_MAX = 50
METRICS_MAX = 3
_COLUMNS = ("step", "id", "saved", "size", "metrics", "reason")


class CheckpointList(list["Checkpoint"]):
    """Checkpoints of one run, oldest first, which a notebook shows as a table, newest first."""

    def _repr_html_(self) -> str:
        shown = [
            (each.step, each.id, age_of(each), size_text(each.body.stored_bytes), metrics_of(each), each.body.reason)
            for each in self[: -ROWS_MAX - 1 : -1]
        ]
        more = f", the newest {ROWS_MAX}" if len(self) > ROWS_MAX else ""
        return html_table(f"{len(self)} checkpoints{more}", _COLUMNS, shown)


def age_of(checkpoint: Checkpoint) -> str:
    """Return how long ago a checkpoint was committed, by this host's clock; its recorded time if that is not a time."""
    then = seconds_since_epoch(checkpoint.time)
    return checkpoint.time if then is None else age_text(time.time() - then)


def metrics_of(checkpoint: Checkpoint) -> str:
    """Return the first metrics as ``loss=1.234 …``."""
    metrics = list(checkpoint.body.metrics.items())
    texts = [f"{name}={value:.6g}" if isinstance(value, float) else f"{name}={value}" for name, value in metrics]
    return " ".join(texts[:METRICS_MAX] + (["…"] if len(texts) > METRICS_MAX else []))


def known_checkpoints(checkpoints: Sequence[Checkpoint] | None) -> list[tuple[str, object]]:
    """Return the facts of ``checkpoints``, oldest first: their number, and the newest. None if they are unknown."""
    if checkpoints is None:
        return []
    newest = checkpoints[-1] if checkpoints else None
    text = (
        f"step {newest.step} ({newest.id}, {size_text(newest.body.stored_bytes)}, {age_of(newest)})" if newest else ""
    )
    return [("checkpoints", len(checkpoints)), ("newest", text)]
