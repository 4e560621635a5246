"""Begin a new log where a run's directory was removed under a live run, if the caller asked for that."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from relight.errors import RelightError, RunRemoved
from relight.observe import emit

if TYPE_CHECKING:
    from relight.checkpointer.loop import Checkpointer

_reported: weakref.WeakSet[Checkpointer] = weakref.WeakSet()
"""Those for which it was reported that no new log could be begun."""


def begin_again(ckpt: Checkpointer, error: RelightError | None) -> None:
    """Take charge of a new, empty run in the same place if ``error`` shows that the old one was removed. The next step is then saved.

    Does nothing unless the failure policy asks for it, and nothing where several ranks save together: they would have to agree.
    """
    if not isinstance(error, RunRemoved) or not ckpt._policy.begin_again or ckpt._ranks is not None or ckpt._attempt is None:
        return
    former, parent = ckpt._attempt, ckpt._parent
    background, ckpt._background = ckpt._background, None
    if background is not None:
        background.close(polite=False)
    ckpt._takeover.release()
    ckpt._attempt = ckpt._parent = None
    try:
        ckpt._take_charge()
    except RelightError as second:
        ckpt._attempt, ckpt._parent = former, parent
        if ckpt not in _reported:
            _reported.add(ckpt)
            emit("save.failed", f"a new log could not be begun: {second}", step=ckpt._last_step or 0, kind=second.kind)
        return
    where = f"{ckpt._store.url}/{ckpt._run}"
    text = f"{where} was removed: a new log is begun there; the older checkpoints are gone"
    emit("run.renewed", text, run=ckpt._run, store=ckpt._store.url)
    if ckpt._last_moments.is_closing and ckpt._last_step is not None:  # no later step will save this one
        ckpt._save(ckpt._last_step, "end", ckpt._last_metrics, None, ckpt._last_micro_step, may_wait=True)
    else:
        ckpt._due = "asked"
