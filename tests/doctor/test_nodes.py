"""``relight doctor --nodes``: nodes compare their facts within a time limit, even if one is missing, dies or sends garbage."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

import at_hand
import pytest
from planted_faults import nodes

from relight.comm.ports import free_port
from relight.doctor import DoctorFacts, collect, judge
from relight.doctor.facts_nodes import collect_nodes
from relight.errors import ConfigError, StoreUnavailable
from relight.supervise.node_exchange import Meeting, NodeAddress, seat_of


class Board:
    """An exchange between threads. ``spoil`` replaces messages by other bytes."""

    def __init__(self, spoil: dict[str, bytes] | None = None) -> None:
        self._sent: dict[str, bytes] = {}
        self._spoil = spoil or {}

    def of(self, rank: int) -> Any:
        """Return the exchange's end for one rank."""
        return End(self, rank)

    def put(self, key: str, data: bytes) -> None:
        """Store a message."""
        self._sent[key] = self._spoil.get(key, data)

    def find(self, what: str, of: Collection[int], within_s: float) -> dict[int, bytes]:
        """Return the messages that arrive in time."""
        ends = time.monotonic() + within_s
        while True:
            messages = {rank: self._sent[f"{what}/{rank}"] for rank in of if f"{what}/{rank}" in self._sent}
            if len(messages) == len(of) or time.monotonic() > ends:
                return messages
            time.sleep(0.002)


class End:
    """One rank's end of a board."""

    def __init__(self, board: Board, rank: int) -> None:
        self._board, self._rank = board, rank

    def send(self, what: str, data: bytes) -> None:
        """See ``Exchange``."""
        self._board.put(f"{what}/{self._rank}", data)

    def receive(self, what: str, of: Collection[int], within_s: float) -> dict[int, bytes]:
        """See ``Exchange``."""
        return self._board.find(what, of, within_s)


def compared(paths: list[Path], count: int, spoil: dict[str, bytes] | None = None) -> list[set[str]]:
    """Return the findings between nodes of each rank in ``paths``; ``count`` nodes are expected."""
    board, findings = Board(spoil), dict[int, set[str]]()

    def check_node(rank: int, facts: DoctorFacts) -> None:
        seen = collect_nodes(facts, rank, count, board.of(rank), 0.3)
        findings[rank] = {finding.name for finding in judge(DoctorFacts(nodes=seen)) if finding.part == "nodes"}

    threads = [
        threading.Thread(target=check_node, args=(rank, collect(str(path), quick=True)))
        for rank, path in enumerate(paths)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return [findings[rank] for rank in range(len(paths))]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Create a store with runs."""
    at_hand.fill(tmp_path / "runs")
    return tmp_path / "runs"


def test_nodes_that_are_alike_find_nothing_and_leave_nothing(place: Path) -> None:
    """All nodes see node 0's file in the store, and the file is removed afterwards."""
    before = sorted(place.rglob("*"))
    assert compared([place] * 3, 3) == [set()] * 3
    assert sorted(place.rglob("*")) == before


def test_a_store_of_its_own_is_found_by_all(place: Path, tmp_path: Path) -> None:
    """A node has another store at the path, or none."""
    at_hand.fill(tmp_path / "other" / "runs")
    assert compared([place, tmp_path / "other" / "runs"], 2) == [{"node-store"}] * 2
    assert compared([place, tmp_path / "none"], 2) == [{"node-store"}] * 2


def test_a_silent_or_invalid_node_is_missing_and_the_rest_is_compared(place: Path) -> None:
    """A missing node, or one that sends garbage, is reported within the time limit."""
    began = time.monotonic()
    assert compared([place] * 2, 3) == [{"node-missing"}] * 2
    assert time.monotonic() - began < 20
    for nonsense in (b"", b"\xff" * 1000, b"\x83" + b"\xa4host\x01" * 3, b"\xdf\xff\xff\xff\xff"):
        assert compared([place] * 2, 2, {"facts/1": nonsense}) == [{"node-missing"}] * 2, nonsense
    assert compared([place] * 2, 2, {"clock/1": b"\xff"}) == [set()] * 2
    assert compared([place] * 2, 2, {"go/0": b"../../etc/passwd"}) == [set()] * 2


def test_no_value_of_a_setting_is_shown() -> None:
    """Nodes compare digests, and the finding shows neither digests nor values."""
    (finding,) = [
        finding for finding in judge(nodes(settings={"RELIGHT_KEY": "2f"})) if finding.name == "node-settings"
    ]
    assert "2f" not in f"{finding.evidence}{finding.what}"
    assert "node 1 (b)" in finding.where


def test_the_address_of_nodes_is_from_variables_or_options(monkeypatch: pytest.MonkeyPatch) -> None:
    """The address comes from torchrun's variables or from options; an invalid one is an error."""
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE"):
        monkeypatch.delenv(name, raising=False)
    assert seat_of("[::1]:29400", "1/2") == NodeAddress("::1", 29400, 1, 2, False)
    assert seat_of("a:1", "0/1").holds
    for wrong in (
        ("", ""),
        ("a", "0/2"),
        ("a:1", "2"),
        ("a:1", "2/2"),
        ("a:0", "0/2"),
        ("a:99999", "0/2"),
        (":1", "0/2"),
        ("a:1", ""),
        ("a:1", "x/y"),
        ("", "0/2"),
    ):
        with pytest.raises(ConfigError):
            seat_of(*wrong)
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "4"), ("MASTER_ADDR", "n"), ("MASTER_PORT", "7")):
        monkeypatch.setenv(name, value)
    assert seat_of("", "") == NodeAddress("n", 7, 0, 4, True)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    assert not seat_of("", "").holds
    monkeypatch.setenv("RANK", "five")
    with pytest.raises(ConfigError):
        seat_of("", "")


def test_a_first_node_that_is_not_there_is_an_error_in_time() -> None:
    """If node 0 does not answer in time, that is an error; so is a port in use."""
    began = time.monotonic()
    with pytest.raises(StoreUnavailable, match="does not answer"):
        Meeting(NodeAddress("127.0.0.1", free_port(), 1, 2, False), 1.0)
    assert time.monotonic() - began < 15
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))  # noqa: S104
        taken.listen()
        with pytest.raises(StoreUnavailable, match="port"):
            Meeting(NodeAddress("127.0.0.1", int(taken.getsockname()[1]), 0, 2, True), 1.0)


def start(place: Path, rank: int, count: int, port: int, **settings: str) -> subprocess.Popen[str]:
    """Start the command as on a node."""
    command = [sys.executable, "-m", "relight", "doctor", str(place), "--quick", "--nodes", "--json", "--within", "8"]
    return subprocess.Popen(
        [*command, "--meet", f"127.0.0.1:{port}", "--node", f"{rank}/{count}"],
        env={**os.environ, **settings},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.slow
def test_real_processes_meet_and_none_hangs_if_one_is_missing(place: Path) -> None:
    """Two of two nodes with a different setting; two of three nodes; one node without node 0, which is an error."""
    for count, wanted in ((2, {"node-settings"}), (3, {"node-settings", "node-missing"})):
        port, began = free_port(), time.monotonic()
        running = [start(place, rank, count, port, RELIGHT_GRACE_S=str(30 + rank)) for rank in range(2)]
        for process in running:
            out, error = process.communicate(timeout=80)
            assert process.returncode == 1, error
            findings = {finding["name"] for finding in json.loads(out)["findings"] if finding["part"] == "nodes"}
            assert findings == wanted, error
            reported = json.loads(out)["nodes"]
            assert [node["there"] for node in reported] == [True, True, False][:count]
            assert all(node["sees_store"] and abs(node["ahead_s"]) < 5 for node in reported[:2])
        assert time.monotonic() - began < 70
    alone = start(place, 1, 2, free_port())
    out, error = alone.communicate(timeout=60)
    assert alone.returncode != 0
    assert "does not answer" in error + out
