"""Bytes of an accelerator's tensors are read and written in other threads only after its streams are done."""

from __future__ import annotations

import pytest
import torch

from relight.capture import accelerator, capture, plan_restore, targets, tensors
from relight.format import Tensor, encode_tree


def test_a_restore_waits_before_and_after_it_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait for each device twice: before the first sink is used, and when all are filled."""
    waits: list[torch.device] = []
    monkeypatch.setattr(targets, "finish_kernels", waits.append)
    monkeypatch.setattr(
        targets, "_is_cpu", lambda tensor: False
    )  # for this test, host memory stands for an accelerator's
    captured = capture({"a": torch.ones(3), "b": torch.zeros(2)}, rng=False)
    stored = [Tensor(item.name, item.dtype, item.shape, item.role, 0, 0, item.source.length) for item in captured.items]
    plan = plan_restore({"a": torch.zeros(3), "b": torch.ones(2)}, stored, encode_tree(captured.tree))
    assert waits == [torch.device("cpu")]
    plan.finish()
    assert waits == [torch.device("cpu")] * 2


def test_a_source_waits_before_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait in ``fill`` for the streams of the tensor's device, and never for host memory."""
    synchronized: list[torch.device] = []
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("meta"))
    monkeypatch.setattr(torch.accelerator, "synchronize", synchronized.append)
    tensors.TensorSource(torch.ones(4, 4).t()).fill(0, memoryview(bytearray(64)))
    assert synchronized == []
    tensors.finish_kernels(torch.device("meta"))
    assert synchronized == [torch.device("meta")]
    tensors.finish_kernels(torch.device("cuda", 0))
    assert len(synchronized) == 1, "it is not the accelerator that this process uses"


def test_a_torch_that_raises_without_an_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch 2.6 raises where later versions return None. Both mean that there is none."""

    def none_here() -> None:
        raise RuntimeError("Cannot access accelerator device when none is available.")

    monkeypatch.setattr(torch.accelerator, "current_accelerator", none_here)
    assert accelerator.accelerator_kind() is None and accelerator.device_names() == []
    assert not accelerator.copies_are_queued(torch.device("cpu"))
    accelerator.finish_kernels(torch.device("cuda", 0))
