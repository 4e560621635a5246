"""What each tracker has recorded, read with its own reader: the points of each series, for each run of the tracker."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

Series = dict[str, list[tuple[int, float]]]


def tensorboard(root: Path) -> dict[str, Series]:
    """TensorBoard's multiplexer, as its server uses it."""
    from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
    from tensorboard.util import tensor_util

    reader = EventMultiplexer(tensor_size_guidance={"scalars": 0}).AddRunsFromDirectory(str(root / "tensorboard"))
    reader.Reload()
    runs: dict[str, Series] = {}
    for run in reader.Runs():
        tags = reader.Runs()[run]["tensors"]
        runs[run] = {
            tag: [
                (e.step, float(tensor_util.make_ndarray(e.tensor_proto).reshape(-1)[0]))
                for e in reader.Tensors(run, tag)
            ]
            for tag in tags
            if not tag.endswith("text_summary")
        }
    return runs


def mlflow(root: Path) -> dict[str, Series]:
    """MLflow's client."""
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{root}/mlflow.db")
    experiment = client.get_experiment_by_name("demo")
    runs = {}
    for run in client.search_runs([experiment.experiment_id]):
        id_ = run.info.run_id
        runs[id_] = {
            key: [(point.step, point.value) for point in client.get_metric_history(id_, key)]
            for key in run.data.metrics
        }
    return runs


def wandb(root: Path) -> dict[str, Series]:
    """The files of the offline runs, which W&B reads in the order of their names, as its own protocol buffers."""
    from relight.integrations.trackers.wandb_files import WandbFile

    runs: dict[str, Series] = defaultdict(lambda: defaultdict(list))
    for path in sorted(root.glob("wandb/offline-run-*/run-*.wandb")):
        for row in WandbFile(path).rows():
            for name, value in row.items():
                if not name.startswith("_"):
                    runs[path.stem][name].append((row["_step"], value))
    return {run: dict(series) for run, series in runs.items()}


def lines(root: Path) -> dict[str, Series]:
    """The guide's own tracker: a file of lines for each run."""
    runs: dict[str, Series] = {}
    for path in sorted((root / "lines").glob("*.txt")):
        series: Series = defaultdict(list)
        for line in path.read_text().splitlines():
            step, name, value = line.split()
            series[name].append((int(step), float(value)))
        runs[path.stem] = dict(series)
    return runs
