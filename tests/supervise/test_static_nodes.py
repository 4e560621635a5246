"""Several nodes at a fixed address: each life has a store of its own, and all nodes begin it together."""

from __future__ import annotations

import socket
import threading
import time
from datetime import timedelta
from typing import Any

import pytest

pytest.importorskip("torch")

from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousTimeoutError,
)

from relight.comm.ports import free_port
from relight.errors import ConfigError
from relight.supervise.rendezvous import Forged, Meetings


def node(port: int, rank: int, secret: bytes = b"", timeout_s: int = 20) -> Meetings:
    """The rendezvous of one of two nodes, as ``relight run --master-port`` makes it."""
    return Meetings(
        RendezvousParameters("static", f"127.0.0.1:{port}", "job", 2, 2, rank=rank, timeout=timeout_s), secret
    )


def meet(meetings: list[Meetings], handlers: list[RendezvousHandler]) -> list[Any]:
    """Have all nodes join at once. Return each node's information about the incarnation, or its error."""
    results: list[Any] = [None] * len(handlers)

    def join(rank: int) -> None:
        try:
            results[rank] = meetings[rank].seen(handlers[rank].next_rendezvous())
        except Exception as error:  # noqa: BLE001 compared by the test
            results[rank] = error

    threads = [threading.Thread(target=join, args=(rank,), daemon=True) for rank in reversed(range(len(handlers)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return results


def as_a_rank(info: RendezvousInfo) -> TCPStore:
    """Return the store that ``init_process_group`` makes from ``MASTER_ADDR`` and ``MASTER_PORT``."""
    where = info.bootstrap_store_info
    assert where is not None
    return TCPStore(
        where.master_addr, where.master_port, None, False, timeout=timedelta(seconds=5), wait_for_workers=False
    )


def test_an_incarnation_reads_no_address_of_an_ended_one() -> None:
    """Ranks of a new life find nothing that ranks of the life before have written, at the same port."""
    port = free_port()
    meetings = [node(port, rank) for rank in range(2)]
    handlers = [meeting.handler() for meeting in meetings]
    first = meet(meetings, handlers)
    assert [info.rank for info in first] == [0, 1] and handlers[0].num_nodes_waiting() == 0
    dead = as_a_rank(first[1])
    dead.set("default_pg/0//rank_1", "127.0.0.1:35508")
    second = meet(meetings, handlers)  # node 1 asks for it, whichever comes first
    assert second[0].bootstrap_store_info.master_port == port
    assert not as_a_rank(second[1]).check(["default_pg/0//rank_1"])
    with pytest.raises(RuntimeError):
        dead.check(["default_pg/0//rank_1"])
    second[0].store.set("relight/told/0", "{}")
    assert second[1].store.get("relight/told/0") == b"{}"


def test_a_node_with_ended_ranks_is_noticed() -> None:
    """Node 0 learns that another node waits for a new incarnation. The other learns that node 0 has begun one."""
    port = free_port()
    meetings = [node(port, rank) for rank in range(2)]
    handlers = [meeting.handler() for meeting in meetings]
    meet(meetings, handlers)
    waits = threading.Thread(target=handlers[1].next_rendezvous, daemon=True)
    waits.start()
    until = time.monotonic() + 15
    while not handlers[0].num_nodes_waiting():
        assert time.monotonic() < until
        time.sleep(0.05)
    handlers[0].next_rendezvous()
    waits.join(15)
    assert not waits.is_alive()
    begins = threading.Thread(target=handlers[0].next_rendezvous, daemon=True)
    begins.start()
    while not handlers[1].num_nodes_waiting():
        assert time.monotonic() < until
        time.sleep(0.05)
    handlers[1].next_rendezvous()
    begins.join(15)
    assert not begins.is_alive()


def test_a_node_that_ends_the_job_ends_it_for_the_others() -> None:
    """A node that asks for a new incarnation learns that there is none. Without other nodes a node gives up in time."""
    port = free_port()
    meetings = [node(port, rank) for rank in range(2)]
    handlers = [meeting.handler() for meeting in meetings]
    meet(meetings, handlers)
    handlers[1].shutdown()
    with pytest.raises(RendezvousClosedError):
        handlers[0].next_rendezvous()
    for rank in range(2):
        with pytest.raises(RendezvousTimeoutError):
            node(free_port(), rank, timeout_s=1).handler().next_rendezvous()


def test_values_of_another_secret_are_refused() -> None:
    """Exchanged values have the job's signature, as in a dynamic rendezvous."""
    port = free_port()
    meetings = [node(port, 0, b"a" * 32), node(port, 1, b"b" * 32)]
    result = meet(meetings, [meeting.handler() for meeting in meetings])
    result[0].store.set("relight/told/0", "{}")
    with pytest.raises(Forged):
        result[1].store.get("relight/told/0")


def test_a_taken_port_and_a_missing_number_are_named() -> None:
    """Each is an error of the command's options, with a hint."""
    from relight.supervise import static_nodes

    with socket.socket() as taken, pytest.MonkeyPatch.context() as patched:
        patched.setattr(static_nodes, "_PORT_S", 0.2)
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ConfigError, match="cannot meet at port") as caught:
            node(taken.getsockname()[1], 0).handler().next_rendezvous()
        assert "--master-port" in str(caught.value.hint)
    with pytest.raises(ConfigError, match="this node's number"):
        Meetings(RendezvousParameters("static", "127.0.0.1:29500", "job", 2, 2), b"").handler()
