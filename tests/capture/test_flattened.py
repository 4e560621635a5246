"""Modules whose parameters were flattened: the same names, shapes and values as without; what cannot be told apart is refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from relight.capture import Recall, capture
from relight.errors import IncompatibleState


class Block(nn.Module):
    """A layer, a buffer that is saved, and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 5)
        self.register_buffer("seen", torch.arange(4.0))
        self.register_buffer("cache", torch.zeros(2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.layer(x).sum(-1, keepdim=True)


class Extra(Block):
    """With a state besides."""

    def get_extra_state(self) -> Any:
        return {"version": 3}


class Net(nn.Module):
    """Two blocks, and an embedding that is tied."""

    def __init__(self, second: type[Block] = Block) -> None:
        super().__init__()
        self.embed = nn.Linear(3, 3, bias=False)
        self.blocks = nn.ModuleList([Block(), second()])
        self.out = nn.Linear(3, 3)
        self.out.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.out(x)  # type: ignore[no-any-return]


@pytest.fixture
def alone() -> Iterator[None]:
    """A group of one process."""
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def flattened(net: nn.Module, keep: bool, *kinds: type[nn.Module]) -> FullyShardedDataParallel:
    return FullyShardedDataParallel(
        net, sharding_strategy=ShardingStrategy.NO_SHARD, auto_wrap_policy=ModuleWrapPolicy(set(kinds)), use_orig_params=keep,
        device_id=torch.device("cpu"),
    )  # fmt: skip


def trained(net: nn.Module) -> dict[str, Any]:
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    net(torch.linspace(0, 1, 12).view(4, 3)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return {"model": net, "optimizer": optimizer}


def values(components: dict[str, Any]) -> dict[str, Any]:
    """What is captured, by name: role, whether it is trained, bytes. A tied one under each name."""
    found = capture(components, rng=False)
    told = {}

    def visit(node: Any, path: str) -> None:
        if isinstance(node, dict):
            for key, value in node.items():
                visit(value, f"{path}/{key}")
        elif hasattr(node, "tensors") and node.tensors:
            item = found.items[node.tensors[0]]
            data = bytearray(item.source.length)
            item.source.fill(0, memoryview(data))
            told[path] = (item.role, item.trainable, item.shape, bytes(data))
        else:
            told[path] = node

    visit(found.tree, "")
    return told


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("keep", [False, True])
def test_it_is_captured_as_if_nothing_had_been_flattened(keep: bool) -> None:
    """Names, roles, shapes, bytes, ties, buffers, states besides; an optimizer's moments by parameter."""
    torch.manual_seed(0)
    plain = values(trained(Net(Extra)))
    torch.manual_seed(0)
    found = values(trained(flattened(Net(Extra), keep, Block, Extra)))
    assert found.keys() == plain.keys()
    for key, value in plain.items():
        if key != "/optimizer/groups":
            assert found[key] == value, key
    assert sorted(found["/optimizer/groups"][0]["params"]) == sorted(plain["/optimizer/groups"][0]["params"])


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("keep", [False, True])
def test_it_is_walked_once(keep: bool) -> None:
    """The second capture takes the first one's walk over, also behind a forward pass that nothing followed."""
    components = trained(flattened(Net(), keep, Block))
    recall = Recall()
    first = capture(components, rng=False, recall=recall)
    assert first.fixed is not None
    with torch.no_grad():
        components["model"](torch.zeros(1, 3))
    assert capture(components, rng=False, recall=recall).fixed is first.fixed


@pytest.mark.usefixtures("alone")
def test_wrappers_further_in_leave_no_trace_in_names() -> None:
    """Activation checkpointing inside."""
    net = Net()
    net.blocks[0] = checkpoint_wrapper(net.blocks[0])
    names = set(capture(trained(flattened(net, False)), rng=False).tree["model"])
    assert names == Net().state_dict().keys()


@pytest.mark.usefixtures("alone")
def test_what_cannot_be_told_apart_is_refused() -> None:
    """A module's own way of giving its state; parameters that do not lie row by row."""

    class Own(nn.Linear):
        def state_dict(self, *args: Any, **kwargs: Any) -> Any:
            return {}

    net = Net()
    net.out = Own(3, 3)  # type: ignore[assignment]
    with pytest.raises(IncompatibleState, match="its own way of giving its state"):
        capture({"model": flattened(net, False)}, rng=False)
    turned = nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    with pytest.raises(IncompatibleState, match="not row by row"):
        capture({"model": flattened(turned, False)}, rng=False)
