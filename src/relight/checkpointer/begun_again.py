"""Begin a new log if a run's directory was removed during training, and the failure policy allows it."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from relight.checkpointer.background import Background
from relight.checkpointer.save_handle import Save
from relight.errors import RelightError, RunRemoved
from relight.observe import emit
from relight.save_reason import ASKED, END

if TYPE_CHECKING:
    from relight.checkpointer.checkpointer import Checkpointer

_renewed: weakref.WeakKeyDictionary[Checkpointer, int] = weakref.WeakKeyDictionary()
"""The last step before a new log was begun: saves up to it went to the old run."""
_reported: weakref.WeakSet[Checkpointer] = weakref.WeakSet()
"""Checkpointers that have reported the failure to begin a new log."""


def begin_again(ckpt: Checkpointer, failed: Save) -> None:
    """Take charge of a new, empty run in the same place if ``failed`` shows that the old one was removed. The next step is then saved.

    Does nothing unless the failure policy asks for it, and nothing where several ranks save together: they would have to agree.
    """
    if not isinstance(failed.error, RunRemoved) or not ckpt._options.policy.begin_again or ckpt._ranks.several or ckpt._attempt is None:
        return
    if failed.step <= _renewed.get(ckpt, -1):  # begun before the new log was
        return
    former, parent = ckpt._attempt, ckpt._progress.parent
    background, ckpt._background = ckpt._background, None
    if background is not None:
        background.close(polite=False)
    ckpt._takeover.release()
    ckpt._attempt = ckpt._progress.parent = None
    try:
        ckpt._begin_attempt()
    except RelightError as second:
        ckpt._attempt, ckpt._progress.parent = former, parent
        if ckpt not in _reported:
            _reported.add(ckpt)
            emit("save.failed", f"a new log could not be begun: {second}", step=ckpt._progress.step or 0, kind=second.kind)
        return
    _renewed[ckpt] = ckpt._progress.step if ckpt._progress.step is not None else failed.step
    if isinstance(background, Background) and isinstance(fresh := ckpt._in_background(), Background):
        fresh.number_from(background)
    where = f"{ckpt._store.url}/{ckpt._run}"
    text = f"{where} was removed: a new log is begun there; the older checkpoints are gone"
    emit("run.renewed", text, run=ckpt._run, store=ckpt._store.url)
    if ckpt._last_moments.is_closing and ckpt._progress.step is not None:  # no later step will save it
        ckpt._save(ckpt._progress.step, END, ckpt._progress.metrics, None, ckpt._progress.micro_step, may_wait=True)
    else:
        ckpt._progress.due = ASKED
