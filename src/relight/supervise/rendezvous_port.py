"""Where the ranks of a life meet: at a port that no connection is given meanwhile."""

from __future__ import annotations

import os

from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousStoreInfo

from relight.comm.ports import free_port

OWN_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
"""Each life's ranks meet in a store of their own. As it is by default (2.13), all lives share the agent's, where they find the addresses of
ranks that are dead, and gloo's group cannot be made again."""
_KEY = "relight/port"


def with_own_port(info: RendezvousInfo, address: str = "") -> RendezvousInfo:
    """``info``, with a port that the node of rank 0 has chosen, where each life's ranks have a store of their own.

    ``address``: this node's, which counts if it has rank 0; empty: the one that torch has written to the rendezvous' store.

    torch asks the kernel for a port and gives it back, seconds before rank 0, which imports torch first, listens there: any connection that
    is made meanwhile may be given it, and that life ends before it began. Cost: one key in the rendezvous' store.
    """
    said = info.bootstrap_store_info
    if os.environ.get(OWN_STORE) != "1" or said is None:
        return info
    if info.rank == 0:
        info.store.set(_KEY, f"{free_port()} {address or said.master_addr}")
    port, _, host = info.store.get(_KEY).decode().partition(" ")
    return RendezvousInfo(info.store, info.rank, info.world_size, RendezvousStoreInfo(host, int(port)))
