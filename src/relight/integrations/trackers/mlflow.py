"""MLflow: the same run by its id; values that it has already are left out. Tested with 3.17."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from relight.integrations.frameworks import needed
from relight.integrations.trackers.rows import CheckpointLink, StepRow
from relight.integrations.trackers.tracker import Tracker
from relight.observe.masking import mask_users

_KEY = "relight.key"
"""Tag that names the training, by which a start finds the run of an earlier start that saved nothing."""
_BATCH_MAX = 1000
"""Most metrics that MLflow takes in one request."""


class MLflow(Tracker):
    """Logs to an MLflow run of ``experiment``, which is created if it does not exist.

    ``uri``: the tracking server, or ``sqlite:///FILE``; None: MLflow's own setting (``MLFLOW_TRACKING_URI``).
    MLflow keeps every value that it is given, and deletes none: a repeated step keeps the values of the first time.
    """

    name = "mlflow"

    def __init__(
        self,
        experiment: str,
        *,
        uri: str | None = None,
        run_name: str | None = None,
        tags: Mapping[str, str] | None = None,
    ) -> None:
        self._mlflow = needed("mlflow", "mlflow")
        self._experiment, self._uri, self._run_name, self._tags = experiment, uri, run_name, dict(tags or {})
        self._client: Any = None
        self._last: dict[str, int] = {}
        super().__init__()

    def open(self, run: str, key: str, first: int) -> tuple[str, str]:
        """See ``Tracker``."""
        client = self._client = self._mlflow.MlflowClient(tracking_uri=self._uri)
        experiment = client.get_experiment_by_name(self._experiment)
        number = client.create_experiment(self._experiment) if experiment is None else experiment.experiment_id
        if run:
            opened = client.get_run(run)
        else:
            begun = client.search_runs([number], filter_string=f"tags.`{_KEY}` = '{key}'", max_results=1)
            tags = {**self._tags, _KEY: key}
            opened = begun[0] if begun else client.create_run(number, run_name=self._run_name or key, tags=tags)
        client.update_run(opened.info.run_id, status="RUNNING")
        self._last = {metric.key: metric.step for metric in opened.data.to_proto().metrics}
        base = mask_users(str(self._uri or self._mlflow.get_tracking_uri())).rstrip("/")
        path = f"experiments/{opened.info.experiment_id}/runs/{opened.info.run_id}"
        return opened.info.run_id, f"{base}/#/{path}" if base.startswith("http") else f"{base}#{path}"

    def has(self, name: str, step: int) -> bool:
        """See ``Tracker``."""
        return step <= self._last.get(name, -1)

    def write(self, rows: Sequence[StepRow]) -> None:
        """See ``Tracker``. Each row is in one request, so MLflow has it as a whole or not at all."""
        metric = self._mlflow.entities.Metric
        batch: list[Any] = []
        for row in rows:
            time_ms = int(row.time_s * 1000)
            metrics = [metric(name, value, time_ms, row.step) for name, value in row.values.items()]
            for note in row.notes:
                metrics += [
                    metric(name, value, time_ms, note.step)
                    for name, value in note.values.items()
                    if not self.has(name, note.step)
                ]
            if len(batch) + len(metrics) > _BATCH_MAX:
                self._send(batch)
                batch = []
            batch += metrics
        self._send(batch)

    def _send(self, metrics: list[Any]) -> None:
        for begin in range(0, len(metrics), _BATCH_MAX):
            self._client.log_batch(self._run, metrics=metrics[begin : begin + _BATCH_MAX])

    def link(self, checkpoint: CheckpointLink) -> None:
        """See ``Tracker``."""
        for field in ("uri", "id", "step", "digest"):
            self._client.set_tag(self._run, f"relight.checkpoint.{field}", str(getattr(checkpoint, field)))

    def finish(self) -> None:
        """See ``Tracker``."""
        self._client.set_terminated(self._run)
