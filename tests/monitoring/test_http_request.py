"""Requests to servers that a person named: within a deadline and a size, without their secrets in errors."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest

from relight.errors import ConfigError, StoreUnavailable
from relight.http_request import request, url_shown, without_user


@pytest.fixture
def slow_server() -> Iterator[str]:
    """Start a server that sends a byte of its response each tenth of a second, without an end. Return its address."""
    ends = threading.Event()
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(1 << 16)
            connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
            while not ends.wait(0.1):
                try:
                    connection.sendall(b"x")
                except OSError:
                    return

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{listener.getsockname()[1]}/path?token=hunter2"
    ends.set()
    thread.join(5)
    listener.close()


def test_a_response_has_a_deadline(slow_server: str) -> None:
    """A server that never stops sending costs the timeout, and no more. The error has no parameters."""
    began = time.monotonic()
    with pytest.raises(StoreUnavailable, match="no answer within") as caught:
        request(slow_server, headers={}, timeout_s=1.0, bytes_max=1 << 20, what="it")
    assert time.monotonic() - began < 3
    assert "hunter2" not in str(caught.value) and "/path" in str(caught.value)


def test_a_response_has_a_size(slow_server: str) -> None:
    """More bytes than the limit are an error at once."""
    with pytest.raises(StoreUnavailable, match="sends more than"):
        request(slow_server, headers={}, timeout_s=20.0, bytes_max=5, what="it")


def test_users_leave_the_address() -> None:
    """User and password become a header. No text for messages has them."""
    url, headers = without_user("https://me:hun%2Fter2@host:8443/a?b=c")
    assert url == "https://host:8443/a?b=c" and headers["Authorization"].startswith("Basic ")
    assert url_shown("https://me:hunter2@host:8443/a?b=c#d") == "https://host:8443/a"
    assert url_shown("hunter2") == "…"
    with pytest.raises(ConfigError) as caught:
        without_user("file:///etc/hunter2")
    assert "etc" in str(caught.value)
    with pytest.raises(ConfigError) as caught:
        without_user("https://me:hunter2@")
    assert "hunter2" not in str(caught.value)
