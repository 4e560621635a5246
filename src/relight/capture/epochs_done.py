"""Count the complete training epochs of a loader."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader

from relight.capture.loader_watch import ATTRIBUTE, batches_in, place_of


def epochs_of(loader: DataLoader[Any]) -> tuple[int, int, int]:
    """Return how many training epochs of a watched loader were complete before the current one, are now, and will be
    after the next step.

    An epoch is complete once the loop has used its last batch. A loader without a length shows that only at the
    request for another batch.
    """
    watch = loader.__dict__[ATTRIBUTE]
    with watch.lock:
        if watch.pending is not None:
            begun, used, ended = watch.pending["epochs"], watch.pending["delivered"], False
        else:
            epoch, ahead = place_of(watch)
            if epoch is None:
                return watch.epochs, watch.epochs, watch.epochs
            begun, used = watch.epochs - (epoch is not watch.epoch), epoch.delivered - ahead
            ended = epoch.left or (epoch.over and not ahead)
        length, rate = batches_in(loader), watch.pace.rate or 1
        now = begun - 1 + (ended or used >= length)
        return begun - 1, now, now + ((used + rate if now < begun else rate) >= length)
