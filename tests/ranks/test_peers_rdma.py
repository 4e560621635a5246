"""Peers that use RDMA: real ranks with one agent for each node, each with a NIXL process of its own."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import protected_ranks
import pytest
import torch

import relight
from relight.keys import write_key_file
from relight.peers import rdma

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.skipif(rdma.installed() is None, reason=f"NIXL is not installed: {rdma.INSTALL}"),
]


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    torch.set_num_threads(1)
    result = str(tmp_path / "store" / "run")
    yield result
    for pid in protected_ranks.agents(result, 8).values():
        os.kill(pid, signal.SIGKILL)


def nixl_maps(agent: int) -> list[str]:
    """Return the mappings of each NIXL process of an agent."""
    children = [int(pid) for path in Path(f"/proc/{agent}/task").glob("*/children") for pid in path.read_text().split()]
    return [text for pid in children if "libucp" in (text := Path(f"/proc/{pid}/maps").read_text())]


def test_a_lost_node_is_restored_from_peers(url: str) -> None:
    """Two ranks save, and one node is lost: the other agent has parity that it read by RDMA. The agents load no NIXL themselves."""
    peers = relight.Peers(copies=1, plane="rdma")
    saves = protected_ranks.job(url, 2, peers, 2)
    assert all(report["held"] for _, report in saves if "held" in report)
    for agent in protected_ranks.agents(url, 2).values():
        assert "libucp" not in Path(f"/proc/{agent}/maps").read_text()
        (maps,) = nixl_maps(agent)
        assert "memfd:relight (" in maps, "a slot is shared"
    protected_ranks.lose(url, {1}, 2)
    restores = protected_ranks.job(url, 2, peers, 0)
    assert {report["digest"] for _, report in restores} == {protected_ranks.expected(1)}
    reports = dict(restores)
    assert reports[1]["source"] == "peers", restores
    assert "peers.fallback" not in dict(reports[1]["events"])


def test_an_encrypted_run_does_not_use_rdma(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With TLS no agent starts NIXL, although RDMA is wanted, and the restore reports why."""
    write_key_file(str(tmp_path / "a.key"))
    monkeypatch.setenv("RELIGHT_KEY", f"file:{tmp_path / 'a.key'}")
    peers = relight.Peers(copies=1, plane="rdma")
    saves = protected_ranks.job(url, 2, peers, 1)
    assert all(report["held"] for _, report in saves if "held" in report)
    assert [nixl_maps(agent) for agent in protected_ranks.agents(url, 2).values()] == [[], []]
    protected_ranks.lose(url, {1}, 2)
    reports = dict(protected_ranks.job(url, 2, peers, 0))
    assert reports[1]["source"] == "peers" and "'tls'" in dict(reports[1]["events"])["peers.fallback"], reports
