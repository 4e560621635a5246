"""torchft: ``Transport`` sends a recovering replica group its state through a store. Tested with 0.2.

``Manager(…, checkpoint_transport=Transport("store/heal"))``. If all groups may fail at once, also save checkpoints:
the manager has a state, so ``relight.Checkpointer("store/run", model=…, optimizer=…, manager=manager)`` takes it like
any component.
"""

from __future__ import annotations

import time
import uuid
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from relight.api import Store, load, save
from relight.errors import CheckpointNotFound, StoreUnavailable
from relight.integrations.frameworks import needed, save_options
from relight.policy import keep
from relight.units import duration_text

if TYPE_CHECKING:
    from torchft.checkpointing.transport import CheckpointTransport
else:
    CheckpointTransport = needed("torchft.checkpointing.transport", "torchft").CheckpointTransport

_PAUSE_S = 0.05


class Transport(CheckpointTransport[Any]):
    """A checkpoint transport through ``path``, a store that all replica groups reach.

    Each process sends through its own run below the path; the newest two checkpoints are kept. A state is a dict of
    tensors, arrays and plain values. Every byte is verified, and nothing is executed.

    Args:
        path: A store that all replica groups reach.
        **options: Options of ``relight.save``: ``encrypt=``.
    """

    def __init__(self, path: str, **options: Any) -> None:
        self._run, self._options = f"{str(path).rstrip('/')}/{uuid.uuid4().hex}", save_options(options)

    def metadata(self) -> str:
        """Return the run in which other processes find this process's states."""
        return self._run

    def send_checkpoint(self, dst_ranks: list[int], step: int, state_dict: Any, timeout: timedelta) -> None:
        """Save the state. Durable when it returns, for any number of receivers."""
        save(self._run, {"torchft": state_dict}, step=step, **self._options)
        # the saves are independent: none continues another
        Store(self._run, **self._options).prune(keep(last=2, prune_abandoned=True))

    def recv_checkpoint(self, src_rank: int, metadata: str, step: int, timeout: timedelta) -> Any:
        """Wait for the state of ``step`` and return it, on the CPU. Raise ``StoreUnavailable`` after ``timeout``."""
        ends = time.monotonic() + timeout.total_seconds()
        while True:
            try:
                return load(metadata, step, **self._options)["torchft"]
            except CheckpointNotFound:
                if time.monotonic() + _PAUSE_S > ends:
                    raise StoreUnavailable(
                        f"rank {src_rank} has not sent step {step} in {duration_text(timeout.total_seconds())}",
                        where=metadata,
                    ) from None
            time.sleep(_PAUSE_S)
