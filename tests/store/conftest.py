"""One server for all the tests of a process."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from tests.store.servers import Server, moto, rados

WHICH = os.environ.get("RELIGHT_TEST_S3", "moto")


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Start an S3-compatible server: moto, or with ``RELIGHT_TEST_S3=rados`` Ceph's object gateway."""
    start = rados if WHICH == "rados" else moto
    with start(tmp_path_factory.mktemp("server")) as server:
        yield server


@pytest.fixture
def s3(s3_server: Server, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL of a new, empty bucket, with the environment set so that it is reached."""
    for name, value in s3_server.environment.items():
        monkeypatch.setenv(name, value)
    return f"s3://{s3_server.new_bucket()}"
