"""The port where the ranks of an incarnation meet: no connection gets it, and all nodes use the same one."""

from __future__ import annotations

import random
import socket
import threading
from pathlib import Path

import pytest

pytest.importorskip("torch")

from torch.distributed import HashStore
from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousStoreInfo

from relight.comm import ports
from relight.comm.ports import FIRST, LAST, free_port
from relight.supervise.rendezvous_port import OWN_STORE, with_own_port


def test_a_port_is_free_and_given_to_no_connection() -> None:
    """The chosen ports are below the range that the kernel gives to connections."""
    given = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="ascii").split()[0])
    for _ in range(50):
        port = free_port()
        assert FIRST <= port <= LAST < given
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", port))


@pytest.mark.parametrize("address", ["127.0.0.1", "0.0.0.0", "::1", "::"])
def test_a_port_in_use_is_not_free(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    """A port in use at any address is not chosen; the next drawn port is."""
    used, unused = free_port(), free_port()
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as taken:
        try:
            taken.bind((address, used))
        except OSError as error:
            pytest.skip(f"this machine has no {address}: {error}")
        drawn = iter([used, used, unused])
        monkeypatch.setattr(random, "randint", lambda *_: next(drawn))
        assert free_port() == unused


@pytest.mark.parametrize("range_text", ["1024 65000\n", "20000 60999\n", ""])
def test_where_connections_may_be_given_any_port_the_kernel_chooses(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, range_text: str
) -> None:
    """If the kernel's range overlaps, the kernel chooses. If the range is unknown, Linux' default counts."""
    (tmp_path / "range").write_text(range_text, encoding="ascii")
    monkeypatch.setattr(ports, "_GIVEN", tmp_path / "range")
    assert (FIRST <= free_port() <= LAST) == (not range_text)


def agreed(store: HashStore, rank: int, world: int) -> RendezvousInfo:
    """Return torch's rendezvous information, with a port from the kernel."""
    return RendezvousInfo(store, rank, world, RendezvousStoreInfo("head", 40_000))


def test_all_nodes_use_the_port_that_the_first_has_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """All nodes use the port that the first one chose, in any order of arrival."""
    monkeypatch.setenv(OWN_STORE, "1")
    store, results = HashStore(), dict[int, RendezvousStoreInfo]()

    def join(rank: int) -> None:
        info = with_own_port(agreed(store, rank, 3)).bootstrap_store_info
        assert info is not None
        results[rank] = info

    threads = [threading.Thread(target=join, args=(rank,)) for rank in (2, 1, 0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(results) == 3 and len({(info.master_addr, info.master_port) for info in results.values()}) == 1
    assert results[0].master_addr == "head" and FIRST <= results[0].master_port <= LAST


def test_a_store_that_lives_share_stays_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that incarnations share listens already, so its port is unchanged."""
    monkeypatch.setenv(OWN_STORE, "0")
    info = agreed(HashStore(), 0, 1)
    assert with_own_port(info) is info
