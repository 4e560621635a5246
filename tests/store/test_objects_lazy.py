"""Single tensors of a checkpoint in an object store: only the chunks that are needed are requested."""

from __future__ import annotations

import pytest
import torch

import relight
from relight.layout import CHUNK_BYTES
from relight.store.objects import ObjectStore


def test_a_slice_requests_its_chunks(s3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 32 MiB one row requests one chunk, and opening requests none."""
    weights = torch.randn(1024, 8192)
    relight.save(f"{s3}/ck/lazy", {"model": {"weights": weights}}, step=3)
    requested: list[int] = []
    read_range = ObjectStore.read_range

    def counted(self: ObjectStore, path: str, etag: str | None, offset: int, into: memoryview) -> None:
        requested.append(len(into))
        read_range(self, path, etag, offset, into)

    monkeypatch.setattr(ObjectStore, "read_range", counted)
    with relight.load(f"{s3}/ck/lazy", lazy=True) as checkpoint:
        rows = checkpoint.get_slice("model/weights")
        assert not requested and rows.get_shape() == [1024, 8192]
        assert torch.equal(rows[1000], weights[1000])
    assert CHUNK_BYTES - (1 << 20) < sum(requested) <= CHUNK_BYTES
