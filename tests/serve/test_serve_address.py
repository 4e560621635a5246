"""The address of ``relight serve`` is printed once connections are accepted there, and not before."""

from __future__ import annotations

import gc
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.cli import at_hand


@pytest.fixture(autouse=True)
def process() -> Iterator[None]:
    """Restore the settings that the server changes for its process."""
    before = sys.getswitchinterval(), gc.get_threshold()
    yield
    sys.setswitchinterval(before[0])
    gc.set_threshold(*before[1])


def test_no_address_is_printed_of_a_port_that_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """If the port is in use, only the error is printed, and no address."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        arguments = [
            "serve",
            str(tmp_path / "runs"),
            "--anonymous-read",
            "--state",
            str(tmp_path / "s.sqlite"),
            "--listen",
        ]
        at_hand.fill(tmp_path / "runs")
        answer = at_hand.in_process(monkeypatch, capfd, [*arguments, f"127.0.0.1:{port}"])
    assert answer.code == 2 and "cannot listen there" in answer.err and "http://" not in answer.err


def test_the_address_is_printed_when_connections_are_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """When the address is printed, a client can connect."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    at_hand.fill(tmp_path / "runs")
    reached: list[bool] = []

    def run(self: object, sockets: list[socket.socket]) -> None:
        reached.append("http://127.0.0.1" in capfd.readouterr().err)
        with socket.create_connection(("127.0.0.1", port), 5):
            reached.append(True)
        for listening in sockets:
            listening.close()

    monkeypatch.setattr("uvicorn.Server.run", run)
    arguments = ["serve", str(tmp_path / "runs"), "--anonymous-read", "--state", str(tmp_path / "s.sqlite"), "--listen"]
    assert at_hand.in_process(monkeypatch, capfd, [*arguments, f"127.0.0.1:{port}"]).code == 0
    assert reached == [True, True]
