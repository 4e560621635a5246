"""The shipped conformance suite on object stores."""

from __future__ import annotations

import random
import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.store.servers import Server, azurite, azurite_command, make_container

from relight.store import ByteStore
from relight.store.objects import ObjectStore
from relight.testing.store_suite import StoreSuite


class TestS3(StoreSuite):
    @pytest.fixture(autouse=True)
    def _bucket(self, s3: str) -> None:
        self.url = s3

    def make(self, tmp_path: Path) -> ByteStore:
        return ObjectStore(f"{self.url}/some/prefix")


@pytest.fixture(scope="module")
def azure_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Start Azure's emulator."""
    with azurite(tmp_path_factory.mktemp("azurite")) as server:
        yield server


@pytest.mark.skipif(azurite_command() is None, reason="azurite is not installed: make azure")
class TestAzure(StoreSuite):
    @pytest.fixture(autouse=True)
    def _container(self, azure_server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
        for name, value in azure_server.environment.items():
            monkeypatch.setenv(name, value)
        self.name = f"c-{secrets.token_hex(6)}"
        make_container(azure_server, self.name)

    def make(self, tmp_path: Path) -> ByteStore:
        return ObjectStore(f"az://{self.name}/some/prefix")

    def test_a_large_object_in_blocks(self, tmp_path: Path) -> None:
        """Many blocks are written in order and read back at any offset. An aborted object is not listed."""
        store = self.make(tmp_path)
        data = random.Random(1).randbytes((20 << 20) + 5)
        writer = store.write("dir/large", len(data))
        for start in range(0, len(data), 1 << 20):
            writer.write_at(start, memoryview(data)[start : start + (1 << 20)])
        writer.finish()
        reader = store.open("dir/large")
        room = bytearray(len(data) - 7)
        reader.read_into(7, memoryview(room))
        assert room == data[7:]
        writer = store.write("dir/other", len(data))
        writer.write_at(0, memoryview(data)[: 9 << 20])
        writer.abort()
        assert [entry.name for entry in store.list("dir")] == ["large"]
