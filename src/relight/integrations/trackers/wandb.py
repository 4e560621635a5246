"""Weights & Biases: the same run by its id; rows that it has already are left out. Tested with 0.31, offline."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from relight.integrations.frameworks import needed
from relight.integrations.trackers.rows import CheckpointLink, StepRow
from relight.integrations.trackers.tracker import Tracker
from relight.integrations.trackers.wandb_files import WandbFile, steps_on_disk

_UPLOAD_S = 120.0
"""Seconds that a row stays in the checkpoints of an online run: W&B does not report which rows its server has."""


class WandB(Tracker):
    """Logs to a W&B run of ``project``. ``options``: ``wandb.init``'s, such as ``mode="offline"``, ``dir`` and ``name``.

    W&B takes steps in increasing order only: a repeated step keeps the values of the first time. Relight's own numbers
    are in the row of the step at which they were reported, with the save's step as ``relight/save_step``.
    An offline run is one directory for each start; ``wandb sync --id ID DIRECTORY…`` uploads all as one run.
    """

    name = "wandb"

    def __init__(self, project: str, **options: Any) -> None:
        self._wandb = needed("wandb", "wandb")
        self._project, self._options = project, options
        self._wandb_run: Any = None
        self._file: WandbFile | None = None
        self._last = -1
        self._sent: deque[tuple[float, int]] = deque()
        """Time and step of the rows that the server may lack."""
        super().__init__()

    @property
    def run(self) -> Any:
        """The object of ``wandb.init``, for images and tables; None until the first row was written."""
        return self._wandb_run

    def open(self, run: str, key: str, first: int) -> tuple[str, str]:
        """See ``Tracker``."""
        id_ = run or str(self._options.get("id") or _as_id(key))
        options = {"resume": "allow", **self._options, "project": self._project, "id": id_}
        directory = Path(os.fspath(self._options.get("dir") or os.environ.get("WANDB_DIR") or "."))
        on_disk = steps_on_disk(directory, id_)
        opened = self._wandb_run = self._wandb.init(**options)
        offline = bool(opened.offline)
        self._last = on_disk if offline else int(opened.starting_step) - 1
        self._file = WandbFile(Path(opened.settings.sync_file)) if offline else None
        opened.define_metric("relight/save_step", hidden=True)
        opened.define_metric("relight/*", step_metric="relight/save_step")
        return id_, opened.url or f"wandb://{self._project}/{id_}"

    def has(self, name: str, step: int) -> bool:
        """See ``Tracker``."""
        return step <= self._last

    def write(self, rows: Sequence[StepRow]) -> None:
        """See ``Tracker``."""
        for row in rows:
            values: dict[str, float] = dict(row.values)
            for note in row.notes:
                values |= {**note.values, "relight/save_step": float(note.step)}
            if row.values:
                self._wandb_run.log(values, step=row.step, commit=True)
                self._sent.append((time.monotonic(), row.step))
            else:  # after the last step: a row of its own would take the next step's place
                self._wandb_run.summary.update(values)

    def confirmed_step(self) -> int:
        """See ``Tracker``. A row of an offline run counts once it is in the run's file, which W&B buffers for 15 s."""
        if self._file is not None:
            return self._file.newest_step()
        step = -1
        while self._sent and time.monotonic() - self._sent[0][0] > _UPLOAD_S:
            step = self._sent.popleft()[1]
        return step

    def link(self, checkpoint: CheckpointLink) -> None:
        """See ``Tracker``. The artifact refers to the checkpoint; nothing is uploaded."""
        artifact = self._wandb.Artifact(f"checkpoint-{self._run}", type="checkpoint", metadata=checkpoint._asdict())
        uri = checkpoint.uri if "://" in checkpoint.uri else Path(checkpoint.uri).absolute().as_uri()
        artifact.add_reference(uri, name="checkpoint", checksum=False)
        self._wandb_run.log_artifact(artifact)

    def finish(self) -> None:
        """See ``Tracker``."""
        self._wandb_run.finish()


def _as_id(key: str) -> str:
    """Return the key as an id that W&B takes: 64 characters, without the marks that it refuses."""
    name, _, digest = key.rpartition("-")
    plain = "".join(letter if letter.isascii() and (letter.isalnum() or letter in "-_") else "-" for letter in name)
    return f"{plain[:48]}-{digest}"
