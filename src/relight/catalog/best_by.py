"""Recording a run's own metric in its log: what "best" means there."""

from __future__ import annotations

from relight.format.records import Body, NoteBody
from relight.log import Log, LogView, fold
from relight.log.history import BEST_BY


def record_best_by(log: Log, best_by: tuple[str, str] | None, epoch: int | None = None, *, over: bool = True) -> None:
    """Append the NOTE that "best" goes by this metric and mode, if the log does not record it already. Cost: at most one record.

    ``epoch``: that of the attempt that records it; None: a tool does, in the epoch that holds. ``over``: also if the run records another.
    """
    if best_by is None:
        return
    metric, mode = best_by

    def decide(view: LogView) -> tuple[Body, int] | None:
        history = fold(view)
        if history.best_by == best_by or (history.best_by is not None and not over) or (epoch is not None and history.epoch > epoch):
            return None
        return NoteBody(topic=BEST_BY, data={"metric": metric, "mode": mode}), history.epoch if epoch is None else epoch

    log.append(decide)
