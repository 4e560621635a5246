"""Where the ranks of a life meet: no connection is given that port, and all nodes are told the same."""

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
    """The kernel's begin behind the last that is chosen."""
    given = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="ascii").split()[0])
    for _ in range(50):
        port = free_port()
        assert FIRST <= port <= LAST < given
        with socket.socket() as one:
            one.bind(("127.0.0.1", port))


@pytest.mark.parametrize("address", ["127.0.0.1", "0.0.0.0", "::1", "::"])
def test_what_somebody_listens_at_is_not_free(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    """At whatever address: the next that is drawn is taken."""
    held, other = free_port(), free_port()
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as taken:
        try:
            taken.bind((address, held))
        except OSError as error:
            pytest.skip(f"this machine has no {address}: {error}")
        drawn = iter([held, held, other])
        monkeypatch.setattr(random, "randint", lambda *_: next(drawn))
        assert free_port() == other


@pytest.mark.parametrize("told", ["1024 65000\n", "20000 60999\n", ""])
def test_where_connections_may_be_given_any_port_the_kernel_chooses(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, told: str) -> None:
    """A machine that was set so. What is not told is Linux' own."""
    (tmp_path / "range").write_text(told, encoding="ascii")
    monkeypatch.setattr(ports, "_GIVEN", tmp_path / "range")
    assert (FIRST <= free_port() <= LAST) == (not told)


def told(store: HashStore, rank: int, world: int) -> RendezvousInfo:
    """What torch agrees on, with a port that was the kernel's."""
    return RendezvousInfo(store, rank, world, RendezvousStoreInfo("head", 40_000))


def test_all_nodes_are_told_what_the_first_has_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever comes first."""
    monkeypatch.setenv(OWN_STORE, "1")
    store, found = HashStore(), dict[int, RendezvousStoreInfo]()

    def join(rank: int) -> None:
        said = with_own_port(told(store, rank, 3)).bootstrap_store_info
        assert said is not None
        found[rank] = said

    joins = [threading.Thread(target=join, args=(rank,)) for rank in (2, 1, 0)]
    for one in joins:
        one.start()
    for one in joins:
        one.join(30)
    assert len(found) == 3 and len({(said.master_addr, said.master_port) for said in found.values()}) == 1
    assert found[0].master_addr == "head" and FIRST <= found[0].master_port <= LAST


def test_a_store_that_lives_share_stays_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """It listens already."""
    monkeypatch.setenv(OWN_STORE, "0")
    said = told(HashStore(), 0, 1)
    assert with_own_port(said) is said
