"""A capture that reuses the previous one equals a full capture, whatever changed in between."""

from __future__ import annotations

import random
import sys

import pytest
import torch
from torch import nn

from relight.capture import CaptureCache, capture
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
        return [(item.name, item.dtype, item.shape, item.role, item.trainable, bytes_of(item)) for item in state.items]

    return flat(first) == flat(second) and encode_tree(first.tree) == encode_tree(second.tree)


def other_memory(model, optimizer, rng):
    parameter = rng.choice(list(model.parameters()))
    parameter.data = torch.randn_like(parameter)


def transposed(model, optimizer, rng):
    model.square.weight.data = model.square.weight.data.t()


def other_dtype(model, optimizer, rng):
    model.square.bias.data = model.square.bias.data.to(rng.choice((torch.float64, torch.bfloat16, torch.float32)))


def frozen(model, optimizer, rng):
    parameter = rng.choice(list(model.parameters()))
    parameter.requires_grad_(not parameter.requires_grad)


def tied(model, optimizer, rng):
    model.other.weight = model.square.weight


def replaced(model, optimizer, rng):
    model.other = nn.Linear(8, 8)
    optimizer.add_param_group({"params": list(model.other.parameters())})


def state_gone(model, optimizer, rng):
    optimizer.state.pop(rng.choice(list(optimizer.state) or [None]), None)


def resized(model, optimizer, rng):
    state = rng.choice(list(optimizer.state.values()) or [None])
    if state and "exp_avg" in state:
        state["exp_avg"] = torch.randn_like(state["exp_avg"])


def stepped(model, optimizer, rng):
    for parameter in model.parameters():
        parameter.grad = None
    try:
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
    except RuntimeError:  # the dtypes no longer fit each other, so there is no step
        pass


def transposed_in_place(model, optimizer, rng):
    model.square.weight.data.t_()
    with torch.no_grad():
        model.square.weight.t_()


def buffer_replaced(model, optimizer, rng):
    model.other.register_buffer("count", torch.full((rng.choice((1, 3)),), 7.0), persistent=rng.choice((True, False)))


def buffer_kept_or_not(model, optimizer, rng):
    model._non_persistent_buffers_set.symmetric_difference_update({"mask"})


def hooked(model, optimizer, rng):
    def hook(module, state, prefix, metadata):
        state["more"] = 1.5

    handle = model._register_state_dict_hook(hook)
    if rng.random() < 0.5:
        handle.remove()


def own_way(model, optimizer, rng):
    usual = model.other.state_dict

    def state_dict(*args, **kwargs):
        state = usual(*args, **kwargs)
        state[kwargs.get("prefix", "") + "more"] = 2.5
        return state

    model.other.state_dict = state_dict


def renamed(model, optimizer, rng):
    children = model.spare._modules
    children[rng.choice("xyz")] = children.pop(next(iter(children)))


def dropped(model, optimizer, rng):
    model._modules.pop("added", None)
    if rng.random() < 0.5:
        model.added = rng.choice((nn.BatchNorm1d(8), nn.Sequential(nn.Linear(2, 2)), Odd()))


def hyper(model, optimizer, rng):
    optimizer.param_groups[0]["lr"] = rng.choice((rng.random(), torch.tensor(rng.random())))


def counted(model, optimizer, rng):
    for state in list(optimizer.state.values())[:1]:
        state["calls"] = state.get("calls", 0) + 1000


def reloaded(model, optimizer, rng):
    optimizer.load_state_dict(optimizer.state_dict())


def extra(model, optimizer, rng):
    optimizer.state["global"] = {"best": rng.random(), "tensor": torch.randn(2)}


class Odd(nn.Module):
    """A module with custom state."""

    def get_extra_state(self):
        return {"drawn": random.random()}

    def set_extra_state(self, state):
        pass


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.square, self.other = nn.Linear(8, 8), nn.Linear(8, 8)
        self.spare = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
        self.register_buffer("mask", torch.ones(8).expand(8, 8))

    def forward(self, x):
        return self.other(self.square(x))


CHANGES = [
    other_memory, transposed, transposed_in_place, other_dtype, frozen, tied, replaced, state_gone, resized, stepped, buffer_replaced,
    buffer_kept_or_not, own_way, hooked, renamed, dropped, hyper, counted, reloaded, extra,
]  # fmt: skip


@pytest.mark.parametrize("seed", range(60))
def test_an_incremental_capture_equals_a_full_one(seed: int) -> None:
    """Compare names, roles, bytes and tree with a full capture after random changes."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters())
    recall = CaptureCache()
    for _ in range(12):
        stepped(model, optimizer, rng)
        parts = {
            "first": {"shared": model.square.weight.detach(), "own": torch.randn(3), "n": rng.random()},
            "model": model,
            "optimizer": optimizer,
            "rng_": torch.Generator().manual_seed(1),
        }
        if rng.random() < 0.1:
            parts["second"] = nn.Linear(2, 2)
        random.seed(seed)
        try:
            plain = capture(parts)
        except Exception as error:
            with pytest.raises(type(error)):
                capture(parts, recall=recall)
        else:
            random.seed(seed)
            assert same(capture(parts, recall=recall), plain)
            random.seed(seed)
            assert same(capture(parts, recall=recall), plain), "the second time in a row"
        rng.choice(CHANGES)(model, optimizer, rng)


def test_most_of_a_second_capture_is_known() -> None:
    """Reuse the items of parameters and moments without inspecting them again."""
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters())
    stepped(model, optimizer, random.Random(0))
    recall = CaptureCache()
    first = capture({"model": model, "optimizer": optimizer}, recall=recall)
    second = capture({"model": model, "optimizer": optimizer}, recall=recall)
    assert first.fixed is second.fixed is not None
    known = {id(item) for item in first.items}
    assert sum(id(item) in known for item in second.items) == 8 + 1 + 12


def calls(parts, recall) -> int:
    """Return how many Python functions a capture calls."""
    count = 0

    def watch(frame, event, arg):
        nonlocal count
        count += event == "call"

    sys.setprofile(watch)
    try:
        capture(parts, recall=recall)
    finally:
        sys.setprofile(None)
    return count


def test_a_second_capture_calls_almost_nothing_for_a_tensor() -> None:
    """Call less than one further Python function for each further tensor."""
    counts = []
    for layers in (100, 200):
        model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(layers)))
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.randn(1, 2)).sum().backward()
        optimizer.step()
        parts, recall = {"model": model, "optimizer": optimizer}, CaptureCache()
        capture(parts, recall=recall)
        counts.append(calls(parts, recall))
    assert counts[1] - counts[0] < 0.9 * 100 * 8, counts
