"""Ray Train: ``report``, which tells Ray of a Relight save, and ``where``, which finds it again. Seen with 2.60.

In the function that the workers run, ``relight.Checkpointer`` is used as anywhere: Ray has set ``torch.distributed`` up, and a worker that
Ray starts again after a failure goes on from what ``restore()`` finds.
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
    """``ray.train.report`` of ``metrics`` and, where there is a save, of a checkpoint that names it. Every worker calls it.

    ``save`` is what ``ckpt.step`` gave. It waits until that is durable, as Ray may keep, or resume from, what it was told of. Ray gets
    a file of a hundred bytes; the state stays in its run, whose ``keep=`` says how long: one that Ray is to keep wants a tag, or as many.
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
    """The run and the id that a checkpoint of Ray's names, for ``relight.load(*where(result.checkpoint))``."""
    with checkpoint.as_directory() as folder:
        try:
            named = json.loads((Path(folder) / _FILE).read_bytes()[:65536])
            return str(named["path"]), str(named["id"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointNotFound(f"no Relight checkpoint is named there: {error}", where=str(checkpoint)) from None
