"""Record a run's own metric in its log: what "best" means for this run."""

from __future__ import annotations

from relight.format.records import Body
from relight.format.topics import BEST_BY, BestByNote
from relight.log import Log, LogView, fold


def record_best_by(log: Log, best_by: tuple[str, str] | None, epoch: int | None = None, *, over: bool = True) -> None:
    """Append the NOTE that "best" means this metric and mode, unless the log records it already. Cost: at most one record.

    ``epoch``: the epoch of the attempt that records the metric. None: a tool records it, in the current epoch. ``over``: replace another
    recorded metric.
    """
    if best_by is None:
        return
    metric, mode = best_by

    def decide(view: LogView) -> tuple[Body, int] | None:
        history = fold(view)
        if (
            history.best_by == best_by
            or (history.best_by is not None and not over)
            or (epoch is not None and history.epoch > epoch)
        ):
            return None
        return BEST_BY.note(BestByNote(metric=metric, mode=mode)), history.epoch if epoch is None else epoch

    log.append(decide)
