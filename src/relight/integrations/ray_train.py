"""Ray Train: ``report`` reports a Relight save to Ray, and ``where`` returns its run and id. Tested with 2.60.

In the workers' function, use ``relight.Checkpointer`` as anywhere: Ray has initialised ``torch.distributed``, and a
worker that Ray restarts after a failure continues from ``restore()``.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from relight.checkpointer import Checkpointer, Save
from relight.errors import CheckpointNotFound
from relight.integrations.frameworks import needed

if TYPE_CHECKING:
    from ray import train
else:
    train = needed("ray.train", "'ray[train]'")

_FILE = "relight.json"


def report(ckpt: Checkpointer, save: Save | None, metrics: dict[str, Any]) -> None:
    """Call ``ray.train.report`` with ``metrics`` and, if there is a save, with a checkpoint that names it.

    Every worker must call it. ``save`` is the result of ``ckpt.step``. The call waits until the save is durable, as Ray
    may keep it, or resume from it. Ray gets a file of a hundred bytes; the state stays in its run. The run's ``keep=``
    applies: tag a checkpoint that Ray keeps, or keep as many as Ray does.

    Args:
        ckpt: The worker's Checkpointer.
        save: The result of ``ckpt.step``.
        metrics: Metrics by name, for Ray.
    """
    if save is None:
        train.report(metrics)
        return
    save.wait()
    with tempfile.TemporaryDirectory(prefix="relight-") as folder:
        named = {"path": f"{ckpt.store_urls[0]}/{ckpt.run}", "id": save.id, "step": save.step}
        (Path(folder) / _FILE).write_text(json.dumps(named), encoding="utf-8")
        train.report(metrics, checkpoint=train.Checkpoint.from_directory(folder))


def where(checkpoint: Any) -> tuple[str, str]:
    """Return the run and the id that Ray's checkpoint names, for ``relight.load(*where(result.checkpoint))``.

    Args:
        checkpoint: Ray's checkpoint: ``result.checkpoint``.
    """
    with checkpoint.as_directory() as folder:
        try:
            named = json.loads((Path(folder) / _FILE).read_bytes()[:65536])
            return str(named["path"]), str(named["id"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointNotFound(f"no Relight checkpoint is named there: {error}", where=str(checkpoint)) from None
