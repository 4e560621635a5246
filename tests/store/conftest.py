"""One server for all the tests of a process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.store.servers import Server, moto


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """An S3-compatible server."""
    with moto(tmp_path_factory.mktemp("moto")) as server:
        yield server


@pytest.fixture
def s3(s3_server: Server, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL of a new, empty bucket, with the environment set so that it is reached."""
    for name, value in s3_server.environment.items():
        monkeypatch.setenv(name, value)
    return f"s3://{s3_server.new_bucket()}"
