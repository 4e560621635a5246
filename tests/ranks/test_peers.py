"""Peers: real ranks with one agent for each node, kills, and restores of bytes that no disk has."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import protected_ranks
import pytest
import torch

import relight
from relight.errors import ConfigError
from relight.testing.store_suite import refuses

pytestmark = pytest.mark.distributed


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    torch.set_num_threads(1)
    result = str(tmp_path / "store" / "run")
    yield result
    for pid in protected_ranks.agents(result, 8).values():
        os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize(
    ("world", "peers", "lost", "then"),
    [
        (4, relight.Peers(data=2, parity=2), {1, 2}, 4),
        (3, relight.Peers(data=2, parity=1, tls=True), {0}, 2),
        (2, relight.Peers(copies=1), {1}, 3),
    ],
    ids=["two of four, parity", "one of three, fewer ranks then, tls", "one of two, a copy, more ranks then"],
)
def test_lost_nodes_are_restored_from_the_others(
    url: str, world: int, peers: relight.Peers, lost: set[int], then: int
) -> None:
    """After the loss of agents, memory and packs every rank restores the last save bit-exactly from its peers'
    memory."""
    saves = protected_ranks.job(url, world, peers, 2)
    assert all(report["held"] for _, report in saves if "held" in report)
    protected_ranks.lose(url, lost, world)
    restores = dict(protected_ranks.job(url, then, peers, 0))
    assert {report["start"] for report in restores.values()} == {2}
    assert {report["digest"] for report in restores.values()} == {protected_ranks.expected(1)}, restores
    assert {report["source"] for report in restores.values()} == {"peers"}, restores


@pytest.mark.parametrize("tls", [False, True], ids=["clear", "tls"])
def test_ranks_that_end_by_an_error_leave_their_agents_and_what_these_hold(url: str, tls: bool) -> None:
    """If one rank is killed, the others end by an exception. The next incarnation restores from memory, and the lost node from its peer.

    Symptom: agents refused each other's connections, because the run seemed to be over.
    """
    peers = relight.Peers(copies=1, tls=tls)
    protected_ranks.job(url, 2, peers, 1, raises=True)
    protected_ranks.lose(url, {1}, 2)
    restores = dict(protected_ranks.job(url, 2, peers, 0))
    assert {report["digest"] for report in restores.values()} == {protected_ranks.expected(0)}
    assert restores[1]["source"] == "peers", restores


def test_more_losses_than_parity_fall_back_to_what_is_on_disk(url: str) -> None:
    """If more nodes are lost than parity covers, the checkpoint on disk is restored without a hang."""
    peers = relight.Peers(data=2, parity=1)
    protected_ranks.job(url, 3, peers, 1)
    agent_pids = protected_ranks.agents(url, 3)
    for node in (0, 1):
        os.kill(agent_pids[node], signal.SIGKILL)
    restores = dict(protected_ranks.job(url, 3, peers, 0))
    assert {report["digest"] for report in restores.values()} == {protected_ranks.expected(0)}
    assert {report["source"] for report in restores.values()} == {"store"}, restores


@pytest.mark.parametrize("error", [errno.EAGAIN, errno.EMFILE, errno.ENOMEM], ids=errno.errorcode.get)
def test_a_node_that_cannot_start_its_agent_trains_without_peers(
    url: str, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    """A node at its limit of processes, descriptors or memory emits ``peers.failed``, and the job restores and saves.

    Symptom: ``restore()`` raised BlockingIOError on that rank, and the other ranks waited for it.
    """
    popen = subprocess.Popen

    def refused(command: list[str], *words: Any, **named: Any) -> Any:
        if os.environ.get("RELIGHT_NODE") == "node1" and "relight.agent.server" in command:
            raise OSError(error, os.strerror(error))
        return popen(command, *words, **named)

    monkeypatch.setattr(subprocess, "Popen", refused)
    reports = dict(protected_ranks.job(url, 2, relight.Peers(copies=1), 0))
    failed = [[fields for name, fields in reports[rank]["events"] if name == "peers.failed"] for rank in (0, 1)]
    assert not failed[0] and len(failed[1]) == 1 and os.strerror(error) in failed[1][0], failed


def test_a_loopback_address_is_not_announced_to_other_machines(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """If only loopback addresses are left, and the job has several machines, each node reports that once.

    Symptom: each save had "127.0.0.1 … connection refused", and no message had the cause or the setting.
    """
    monkeypatch.setenv("RELIGHT_PEERS_HOST", "127.0.0.1")
    monkeypatch.setattr("socket.gethostname", lambda: os.environ.get("RELIGHT_NODE", "test"))
    reports = dict(protected_ranks.job(url, 2, relight.Peers(copies=1), 0))
    for rank in (0, 1):
        failed = [fields for name, fields in reports[rank]["events"] if name.startswith("peers.")]
        assert len(failed) == 1 and "other machines cannot reach its agent at 127.0.0.1:" in failed[0], failed


def test_what_makes_no_sense_is_refused_at_once(tmp_path: Path) -> None:
    """Invalid options raise ConfigError."""
    for options in (
        {},
        {"copies": 0},
        {"copies": 1, "data": 2},
        {"data": 40, "parity": 1},
        {"data": 4, "parity": 5},
        {"copies": 1, "bytes_per_second": 0},
        {"copies": 1, "tls": "yes"},
    ):
        refuses(ConfigError, lambda options=options: relight.Peers(**options))
    copies = relight.Peers(copies=1)
    refuses(
        ConfigError, lambda: relight.Checkpointer(tmp_path / "run", x=torch.zeros(1), peers=copies, background=False)
    )
    refuses(ConfigError, lambda: relight.Checkpointer(tmp_path / "run", x=torch.zeros(1), peers="one"))  # type: ignore[arg-type]


def test_one_rank_has_no_peers(tmp_path: Path) -> None:
    """A single rank with ``peers=`` emits ``peers.failed`` and trains on."""
    before = relight.observe.counters["peers.failed"]
    with relight.Checkpointer(
        tmp_path / "run", x=torch.ones(3), peers=relight.Peers(copies=1), background=True
    ) as ckpt:
        ckpt.restore()
        ckpt.save(0)
    assert relight.observe.counters["peers.failed"] == before + 1
