"""Chooses the port of an incarnation's store. The kernel gives it to no connection before rank 0 listens there."""

from __future__ import annotations

import os

from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousStoreInfo

from relight.comm.ports import free_port

OWN_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
"""torch's variable.

With "1", each incarnation's ranks have a store of their own. By default (2.13) all incarnations share the agent's
store: ranks find the addresses of dead ranks in it, and gloo's process group cannot be created again.
"""
_KEY = "relight/port"


def with_own_port(info: RendezvousInfo, address: str = "") -> RendezvousInfo:
    """Return ``info`` with a port that rank 0's node has chosen, if each incarnation's ranks have their own store.

    ``address``: this node's, used if it has rank 0; empty: the address that torch has written to the rendezvous' store.

    torch gets a port from the kernel and releases it, seconds before rank 0 listens there (rank 0 imports torch first).
    Meanwhile the kernel may give that port to any connection, and the incarnation would fail at its start. Cost: one
    key in the rendezvous' store.
    """
    bootstrap = info.bootstrap_store_info
    if os.environ.get(OWN_STORE) != "1" or bootstrap is None:
        return info
    if info.rank == 0:
        info.store.set(_KEY, f"{free_port()} {address or bootstrap.master_addr}")
    port, _, host = info.store.get(_KEY).decode().partition(" ")
    return RendezvousInfo(info.store, info.rank, info.world_size, RendezvousStoreInfo(host, int(port)))
