"""The address that an agent announces, on machines without a route by IPv4. Each is a network namespace."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from relight.peers import is_loopback

SCRIPT = """
import contextlib, socket
from relight.peers import PeerService, Remote
peers = PeerService(token=b"t" * 32, memory=None, notify=lambda *_: None)
with contextlib.closing(Remote([peers.address], b"t" * 32, 5.0)) as remote:
    print(peers.address.rpartition(":")[0], len(remote.answered))
peers.close()
"""
NAMESPACES = ("unshare", "--net", "--mount", "--uts")


def announced(folder: Path, *commands: str) -> list[str]:
    """Return the address that an agent announces in a namespace after these commands, and whether it answers there."""
    if subprocess.run([*NAMESPACES, "ip", "link", "set", "lo", "up"], capture_output=True).returncode:
        pytest.skip("no network namespace may be made here")
    (folder / "hosts").write_text("10.9.8.7 far-away\n10.9.8.6 node-a\n127.0.1.1 node-b\n")
    shell = ["ip link set lo up", f"mount --bind {folder}/hosts /etc/hosts", *commands, 'exec "$@"']
    done = subprocess.run(
        [*NAMESPACES, "sh", "-c", " && ".join(shell), "sh", sys.executable, "-c", SCRIPT],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-1000:]
    return done.stdout.split()


def test_a_route_by_ipv6_is_enough(tmp_path: Path) -> None:
    """Without a route by IPv4, an agent announces its address on the one by IPv6, and listens there."""
    commands = ("ip -6 addr add fd00:1::5/128 dev lo", "ip -6 route add default dev lo src fd00:1::5")
    assert announced(tmp_path, *commands) == ["[fd00:1::5]", "1"]


def test_the_host_name_has_an_address(tmp_path: Path) -> None:
    """Without a route, an agent announces the address of its machine's name, if the machine has this address."""
    address = "ip addr add 10.9.8.6/32 dev lo"
    assert announced(tmp_path, address, "hostname node-a") == ["10.9.8.6", "1"]
    assert announced(tmp_path, address, "hostname far-away") == ["127.0.0.1", "1"]


def test_loopback_is_the_last_resort(tmp_path: Path) -> None:
    """An agent on a machine with no other address announces 127.0.0.1."""
    assert announced(tmp_path, "hostname node-b") == ["127.0.0.1", "1"]


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "[::1]", "localhost", "LOCALHOST"])
def test_a_loopback_address_is_known(host: str) -> None:
    """Another node cannot reach an agent at a loopback address, which may be a name."""
    assert is_loopback(f"{host}:4000") and is_loopback(f"{host}:4000#0123")
    assert not is_loopback("localhost.example:4000") and not is_loopback("10.0.0.1:4000")
