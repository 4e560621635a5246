"""The demo's model."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from relight.demo.gpt import GPT  # noqa: E402
from relight.demo.shape import FULL, QUICK, DemoSize  # noqa: E402


def build(shape: DemoSize, dropout: float = 0.1) -> GPT:
    """The model of that size."""
    return GPT(context=shape.context, width=shape.width, layers=shape.layers, heads=shape.heads, dropout=dropout)


def test_about_ten_million_parameters() -> None:
    """The full demo trains about 10 M parameters. The tied matrix counts once."""
    count = sum(parameter.numel() for parameter in build(FULL).parameters())
    assert 9e6 < count < 12e6


def test_a_prediction_depends_only_on_earlier_bytes() -> None:
    """The prediction for a byte does not depend on later bytes."""
    torch.manual_seed(0)
    model = build(QUICK).eval()
    first = torch.randint(0, 256, (1, QUICK.context))
    second = first.clone()
    second[0, 20:] = torch.randint(0, 256, (QUICK.context - 20,))
    assert torch.equal(model(first)[0, :20], model(second)[0, :20])
    assert not torch.equal(model(first)[0, 20:], model(second)[0, 20:])


def test_dropout_is_on() -> None:
    """Two training passes differ, so a resume with other random numbers would be noticed."""
    torch.manual_seed(0)
    model = build(QUICK)
    x = torch.randint(0, 256, (2, QUICK.context))
    assert not torch.equal(model.loss(x, x), model.loss(x, x))


def test_learns() -> None:
    """A few steps on one batch make the loss smaller."""
    torch.manual_seed(0)
    model = build(QUICK, dropout=0.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x = torch.randint(0, 256, (2, QUICK.context + 1))
    losses = []
    for _ in range(8):
        loss = model.loss(x[:, :-1], x[:, 1:])
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.5
