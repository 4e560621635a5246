"""Nodes that protect each other: real ranks, an agent a node, kills, and a restore that no disk could give."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

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
    found = str(tmp_path / "store" / "run")
    yield found
    for pid in protected_ranks.agents(found, 8).values():
        os.kill(pid, signal.SIGKILL)


def lose(url: str, nodes: set[int], world: int) -> None:
    """Kill those nodes' agents, and take their ranks' packs from the disk."""
    there = protected_ranks.agents(url, world)
    assert there.keys() == set(range(world))
    for node in nodes:
        os.kill(there[node], signal.SIGKILL)
        for pack in Path(url).rglob(f"pack-{node:05d}-*"):
            pack.unlink()
    time.sleep(0.2)


@pytest.mark.parametrize(
    ("world", "peers", "lost", "then"),
    [
        (4, relight.Peers(data=2, parity=2), {1, 2}, 4),
        (3, relight.Peers(data=2, parity=1), {0}, 2),
        (2, relight.Peers(copies=1), {1}, 3),
    ],
    ids=["two of four, parity", "one of three, fewer ranks then", "one of two, a copy, more ranks then"],
)
def test_lost_nodes_are_restored_from_the_others(url: str, world: int, peers: relight.Peers, lost: set[int], then: int) -> None:
    """With their memory, their agents and their packs gone: every rank has the last save's bits, read from its peers' memory."""
    told = protected_ranks.job(url, world, peers, 2)
    assert all(one["held"] for _, one in told if "held" in one)
    lose(url, lost, world)
    heard = dict(protected_ranks.job(url, then, peers, 0))
    assert {one["start"] for one in heard.values()} == {2}
    assert {one["digest"] for one in heard.values()} == {protected_ranks.expected(1)}, heard
    assert {one["source"] for one in heard.values()} == {"peers"}, heard


def test_ranks_that_end_by_an_error_leave_their_agents_and_what_these_hold(url: str) -> None:
    """One rank is killed, so the others' exchanges fail, and they end by an exception: the next life restores from memory, and a node that
    is lost meanwhile from its peer's. Symptom: agents closed to each other, "Connection refused", as the run seemed to be over."""
    peers = relight.Peers(copies=1)
    protected_ranks.job(url, 2, peers, 1, raises=True)
    lose(url, {1}, 2)
    heard = dict(protected_ranks.job(url, 2, peers, 0))
    assert {one["digest"] for one in heard.values()} == {protected_ranks.expected(0)}
    assert heard[1]["source"] == "peers", heard


def test_more_losses_than_parity_fall_back_to_what_is_on_disk(url: str) -> None:
    """Two of three are lost where one may be: what the disk has is restored, and nothing hangs."""
    peers = relight.Peers(data=2, parity=1)
    protected_ranks.job(url, 3, peers, 1)
    there = protected_ranks.agents(url, 3)
    for node in (0, 1):
        os.kill(there[node], signal.SIGKILL)
    heard = dict(protected_ranks.job(url, 3, peers, 0))
    assert {one["digest"] for one in heard.values()} == {protected_ranks.expected(0)}
    assert {one["source"] for one in heard.values()} == {"store"}, heard


def test_what_makes_no_sense_is_refused_at_once(tmp_path: Path) -> None:
    """Each with an error that says what to give instead."""
    for options in (
        {},
        {"copies": 0},
        {"copies": 1, "data": 2},
        {"data": 40, "parity": 1},
        {"data": 4, "parity": 5},
        {"copies": 1, "bytes_per_second": 0},
    ):
        refuses(ConfigError, lambda options=options: relight.Peers(**options))
    one = relight.Peers(copies=1)
    refuses(ConfigError, lambda: relight.Checkpointer(tmp_path / "run", x=torch.zeros(1), peers=one, background=False))
    refuses(ConfigError, lambda: relight.Checkpointer(tmp_path / "run", x=torch.zeros(1), peers="one"))  # type: ignore[arg-type]


def test_one_rank_has_no_peers(tmp_path: Path) -> None:
    """It is told, and trains on."""
    before = relight.observe.counters["peers.failed"]
    with relight.Checkpointer(tmp_path / "run", x=torch.ones(3), peers=relight.Peers(copies=1), background=True) as ckpt:
        ckpt.restore()
        ckpt.save(0)
    assert relight.observe.counters["peers.failed"] == before + 1
