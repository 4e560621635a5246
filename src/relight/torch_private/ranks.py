"""Ranks: the store of the default process group."""

from __future__ import annotations

from typing import Any

from relight.torch_private.names import TorchName, check_torch

_STORE = TorchName(
    "torch.distributed.distributed_c10d",
    "_get_default_store",
    "the store in which ranks find out which of them do not answer",
    "a Checkpointer on several ranks is refused",
)


def default_store() -> Any:
    """Return the store of the default process group.

    No public function returns it, and a store of Relight's own would need a port on rank 0's machine, which a firewall
    may block.
    """
    check_torch([_STORE], "a Checkpointer on several ranks")
    from torch.distributed import distributed_c10d

    return distributed_c10d._get_default_store()


NAMES = (_STORE,)
