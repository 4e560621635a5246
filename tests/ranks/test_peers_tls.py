"""Peers of encrypted runs: real ranks with one agent for each node, and a capture of the loopback interface meanwhile."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import protected_ranks
import pytest
import torch

import relight
from relight.format import hexdigest
from relight.keys import write_key_file

pytestmark = pytest.mark.distributed

CAPTURE = """
import select, socket, sys
packets = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
packets.bind(("lo", 0))
packets.setsockopt(socket.SOL_SOCKET, 33, 256 << 20)  # SO_RCVBUFFORCE
print("ready", flush=True)
with open(sys.argv[1], "wb") as file:
    while True:
        ready, _, _ = select.select([packets, sys.stdin], [], [])
        if packets in ready:
            data, (_, _, kind, *_) = packets.recvfrom(1 << 17)
            if kind != socket.PACKET_OUTGOING:  # each packet is seen twice
                file.write(data)
        else:
            break
"""


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    torch.set_num_threads(1)
    result = str(tmp_path / "store" / "run")
    yield result
    for pid in protected_ranks.agents(result, 8).values():
        os.kill(pid, signal.SIGKILL)


@contextlib.contextmanager
def capture(path: Path) -> Iterator[None]:
    """Record what passes the loopback interface."""
    try:
        socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0).close()
    except PermissionError:
        pytest.skip("capturing packets needs CAP_NET_RAW; tests/peers/test_tls.py records through relays")
    process = subprocess.Popen(
        [sys.executable, "-c", CAPTURE, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdin is not None and process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    try:
        yield
    finally:
        process.stdin.close()
        process.wait(60)
        process.stdout.close()


def in_the_clear(packets: bytes, reports: list[tuple[int, dict[str, object]]]) -> set[str]:
    """Return what the captured packets show."""
    weights = protected_ranks.value(0).numpy().tobytes()
    samples = [weights[place : place + 48] for place in range(0, len(weights) - 48, len(weights) // 9)]
    tokens = {bytes.fromhex(str(report["token"])) for _, report in reports if "token" in report}
    assert len(tokens) == 1 and len(tokens.copy().pop()) == 32
    name = protected_ranks.names()[0].encode()
    needles = {"weights": samples, "names": [b'"model/%s"' % name, b'"model.%s"' % name], "token": list(tokens)}
    return {what for what, each in needles.items() if any(needle in packets for needle in each)}


@pytest.mark.parametrize(
    ("encrypt", "tls", "shown"),
    [
        (True, None, set()),
        (True, False, {"weights", "names"}),
        (False, None, {"weights", "names", "token"}),
        (False, True, {"token"}),
    ],
    ids=["encrypted", "encrypted, tls=False", "not encrypted", "not encrypted, tls=True"],
)
def test_what_a_reader_of_the_network_sees(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, encrypt: bool, tls: bool | None, shown: set[str]
) -> None:
    """A save and a restore with peers, captured. The peers of an encrypted run show no weights, no tensor's name and no
    token, over their own connections and over the ranks' process group. ``tls=False`` shows weights, and is reported
    once. Without encryption, the ranks exchange the token in the clear."""
    monkeypatch.setenv(protected_ranks.MARK, str(1 + secrets.randbelow(10**9)))
    if encrypt:
        write_key_file(str(tmp_path / "a.key"))
        monkeypatch.setenv("RELIGHT_KEY", f"file:{tmp_path / 'a.key'}")
    peers = relight.Peers(copies=1, tls=tls)
    with capture(tmp_path / "packets"):
        saves = protected_ranks.job(url, 2, peers, 1)
        assert all(report["held"] for _, report in saves if "held" in report)
        protected_ranks.lose(url, {1}, 2)
        restores = protected_ranks.job(url, 2, peers, 0)
    assert {report["digest"] for _, report in restores} == {protected_ranks.expected(0)}
    assert dict(restores)[1]["source"] == "peers", restores
    packets = (tmp_path / "packets").read_bytes()
    assert len(packets) > 12 * protected_ranks.ELEMENTS
    assert in_the_clear(packets, saves) == shown
    for reports in (saves, restores):
        events = [(name, rank) for rank, report in reports for name, _ in report.get("events", ())]
        warned = [rank for name, rank in events if name == "peers.unencrypted"]
        assert warned == ([0] if encrypt and tls is False else [])
        assert "peers.refused" not in dict(events), "no agent of the job is refused"


@pytest.mark.parametrize("tls", [False, True], ids=["clear", "tls"])
def test_a_followers_parts_come_from_the_agents_of_other_nodes(
    url: str, tls: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if no store has the bytes. On a node without an agent of the run, they are missing."""
    protected_ranks.job(url, 2, relight.Peers(copies=1, tls=tls), 2)
    for pack in Path(url).glob("*/pack-*"):
        pack.unlink()
    model = torch.nn.ParameterDict(
        {name: torch.nn.Parameter(torch.zeros(4, protected_ranks.ELEMENTS // 4)) for name in "abc"}
    )
    monkeypatch.setenv("RELIGHT_NODE", "node0")
    with relight.follow(url, model) as follower:
        switched = follower.poll()
        assert switched is not None and switched.source == "peers", follower.error
    digest = hexdigest(b"".join(value.detach().numpy().tobytes() for value in model.values()))
    assert digest == protected_ranks.expected(1)
    monkeypatch.setenv("RELIGHT_NODE", "node7")
    with relight.follow(url, model) as follower:
        assert follower.poll() is None and isinstance(follower.error, relight.CorruptCheckpoint)
