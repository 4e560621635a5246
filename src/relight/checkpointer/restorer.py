"""The restores of one Checkpointer: read a checkpoint into its components, and set where training continues."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from time import monotonic

from relight.checkpointer.hook_list import Hooks
from relight.checkpointer.run_progress import RunProgress
from relight.checkpointer.save_loop import SaveLoop
from relight.checkpointer.session import RunSession
from relight.checkpointer.signals import SignalHandlers
from relight.checkpointer.state_capture import StateCapture
from relight.observe import emit
from relight.restore import RestoreRequest, Resumed, restore_state
from relight.restore.result import report_restored
from relight.restore.rollback import scale_learning_rates


class Restorer:
    """Restores the state of one Checkpointer. Only the training thread uses it."""

    def __init__(
        self, session: RunSession, capture: StateCapture, hooks: Hooks, progress: RunProgress, saves: SaveLoop
    ) -> None:
        self._session, self._capture, self._hooks, self._progress, self._saves = (
            session,
            capture,
            hooks,
            progress,
            saves,
        )

    def restore(
        self,
        which: str | int,
        only: list[str] | None,
        strict: bool,
        rename: Mapping[str, str] | Callable[[str], str] | None,
        signals: SignalHandlers | None,
    ) -> int:
        """Restore checkpoint ``which`` and return the first step that still has to run. Collective. See ``Checkpointer.restore``."""
        session, progress, components, peers = (
            self._session,
            self._progress,
            self._capture.components,
            self._hooks.peers,
        )
        self._saves.drain()  # the restored checkpoint is the parent of the next save: no earlier save may be committed between them
        session.takeover.before_restore(whole=which == "latest" and only is None)
        peers.meet()
        first_step = self._saves.options.first_step
        if which == "latest" and session.applies_fresh():
            resumed = Resumed()
        else:
            resumed = restore_state(
                RestoreRequest(
                    session.store,
                    session.run,
                    components,
                    which,
                    only,
                    strict,
                    rename,
                    session.ranks,
                    session.further,
                    peers.remote,
                    first_step,
                )
            )
        peers.forget()
        progress.resumed = resumed
        if resumed.checkpoint is None:
            session.check(self._capture, signals)
            reason = "fresh=True" if session.fresh.used else "it has no checkpoint yet"
            emit(
                "restore.fresh",
                f"run {session.run!r} starts from scratch: {reason} (store {session.store.url})",
                run=session.run,
                store=session.store.url,
                reason=reason,
            )
            start = first_step
        else:
            progress.parent = None if (apart := session.fresh.wanted and which != "latest") else resumed.checkpoint.id
            components.update({name: value for name, value in resumed.values.items() if name in components})
            step = resumed.checkpoint.body.steps_done - 1 + first_step  # as this process counts
            start = step + (1 if resumed.micro_step is None else 0)
            progress.saved = progress.calls.restored(step, resumed.micro_step, part=apart or only is not None)
            progress.step, progress.micro_step = progress.saved or (None, None)
            report_restored(resumed, start, session.environment(self._saves.writer is not None), part=only is not None)
        scale_learning_rates(components, resumed.cut, only if resumed.checkpoint is not None else None)
        self._capture.restart_boundary()
        progress.saved_s = monotonic()
        for hook in self._hooks.in_order:
            hook.on_restore(resumed, start, progress.parent)
        return start
