"""A capture that knows the one before gives the same as one that does not, whatever happened in between."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn

from relight.capture import capture
from relight.format import encode_tree


def bytes_of(item) -> bytes:
    data = bytearray(item.source.length)
    view = item.source.view()
    if view is not None:
        data[:] = view
    else:
        item.source.fill(0, memoryview(data))
    return bytes(data)


def same(first, second) -> bool:
    def flat(state):
        return [(one.name, one.dtype, one.shape, one.role, one.trainable, bytes_of(one)) for one in state.items]

    return flat(first) == flat(second) and encode_tree(first.tree) == encode_tree(second.tree)


def other_memory(model, optimizer, rng):
    one = rng.choice(list(model.parameters()))
    one.data = torch.randn_like(one)


def transposed(model, optimizer, rng):
    model.square.weight.data = model.square.weight.data.t()


def other_dtype(model, optimizer, rng):
    model.square.bias.data = model.square.bias.data.to(rng.choice((torch.float64, torch.bfloat16, torch.float32)))


def frozen(model, optimizer, rng):
    one = rng.choice(list(model.parameters()))
    one.requires_grad_(not one.requires_grad)


def tied(model, optimizer, rng):
    model.other.weight = model.square.weight


def replaced(model, optimizer, rng):
    model.other = nn.Linear(8, 8)
    optimizer.add_param_group({"params": list(model.other.parameters())})


def state_gone(model, optimizer, rng):
    optimizer.state.pop(rng.choice(list(optimizer.state) or [None]), None)


def resized(model, optimizer, rng):
    state = rng.choice(list(optimizer.state.values()) or [None])
    if state:
        state["exp_avg"] = torch.randn_like(state["exp_avg"])


def stepped(model, optimizer, rng):
    for parameter in model.parameters():
        parameter.grad = None
    try:
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
    except RuntimeError:  # dtypes no longer fit each other: then there is no step
        pass


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.square, self.other = nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("mask", torch.ones(8).expand(8, 8))

    def forward(self, x):
        return self.other(self.square(x))


CHANGES = [other_memory, transposed, other_dtype, frozen, tied, replaced, state_gone, resized, stepped]


@pytest.mark.parametrize("seed", range(30))
def test_what_was_seen_before_changes_nothing(seed: int) -> None:
    """Random changes between captures: names, roles, bytes and tree are those of a capture that knows nothing."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters())
    seen: dict = {}
    for _ in range(12):
        stepped(model, optimizer, rng)
        parts = {"model": model, "optimizer": optimizer, "rng_": torch.Generator().manual_seed(1)}
        try:
            plain = capture(parts)
        except Exception as error:
            with pytest.raises(type(error)):
                capture(parts, seen=seen)
        else:
            assert same(capture(parts, seen=seen), plain)
            assert same(capture(parts, seen=seen), plain), "the second time in a row"
        rng.choice(CHANGES)(model, optimizer, rng)


def test_most_of_a_second_capture_is_known() -> None:
    """Parameters and moments are not looked at again: their items are the very ones."""
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters())
    stepped(model, optimizer, random.Random(0))
    seen: dict = {}
    first = capture({"model": model, "optimizer": optimizer}, seen=seen)
    second = capture({"model": model, "optimizer": optimizer}, seen=seen)
    known = {id(item) for item in first.items}
    assert sum(id(item) in known for item in second.items) == 16
