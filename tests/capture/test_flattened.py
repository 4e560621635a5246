"""Flattened modules: names, shapes and values equal those of unflattened modules. An ambiguous state is refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from msgspec.structs import replace
from roundtrip import restore, save
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from relight.capture import CaptureCache, capture, plan_restore
from relight.errors import IncompatibleState


class Block(nn.Module):
    """A layer, a buffer that is saved, and a buffer that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 5)
        self.register_buffer("seen", torch.arange(4.0))
        self.register_buffer("cache", torch.zeros(2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.layer(x).sum(-1, keepdim=True)


class Extra(Block):
    """A block with an extra state."""

    def get_extra_state(self) -> Any:
        return {"version": 3}


class Net(nn.Module):
    """Two blocks and a tied embedding."""

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
    """Initialise a process group of one process."""
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def flattened(net: nn.Module, keep: bool, *kinds: type[nn.Module]) -> FullyShardedDataParallel:
    return FullyShardedDataParallel(
        net,
        sharding_strategy=ShardingStrategy.NO_SHARD,
        auto_wrap_policy=ModuleWrapPolicy(set(kinds)),
        use_orig_params=keep,
        device_id=torch.device("cpu"),
    )


def trained(net: nn.Module) -> dict[str, Any]:
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    net(torch.linspace(0, 1, 12).view(4, 3)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return {"model": net, "optimizer": optimizer}


def values(components: dict[str, Any]) -> dict[str, Any]:
    """Return each captured tensor by name, with its role, whether it is trained, its shape and bytes. A tied tensor is
    listed under each name."""
    captured = capture(components, rng=False)
    result = {}

    def visit(node: Any, path: str) -> None:
        if isinstance(node, dict):
            for key, value in node.items():
                visit(value, f"{path}/{key}")
        elif hasattr(node, "tensors") and node.tensors:
            item = captured.items[node.tensors[0]]
            data = bytearray(item.source.length)
            item.source.fill(0, memoryview(data))
            result[path] = (item.role, item.trainable, item.shape, bytes(data))
        else:
            result[path] = node

    visit(captured.tree, "")
    return result


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("keep", [False, True])
def test_a_flattened_state_is_captured_like_a_plain_one(keep: bool) -> None:
    """Capture the names, roles, shapes, bytes, ties, buffers and extra states of the unflattened module, and an
    optimizer's moments by parameter."""
    torch.manual_seed(0)
    plain = values(trained(Net(Extra)))
    torch.manual_seed(0)
    flat = values(trained(flattened(Net(Extra), keep, Block, Extra)))
    assert flat.keys() == plain.keys()
    for key, value in plain.items():
        if key != "/optimizer/groups":
            assert flat[key] == value, key
    assert sorted(flat["/optimizer/groups"][0]["params"]) == sorted(plain["/optimizer/groups"][0]["params"])


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("keep", [False, True])
def test_a_flattened_state_is_traversed_once(keep: bool) -> None:
    """Reuse the first capture's walk in the second, also after a forward pass without a backward pass."""
    components = trained(flattened(Net(), keep, Block))
    recall = CaptureCache()
    first = capture(components, rng=False, recall=recall)
    assert first.fixed is not None
    with torch.no_grad():
        components["model"](torch.zeros(1, 3))
    assert capture(components, rng=False, recall=recall).fixed is first.fixed


@pytest.mark.usefixtures("alone")
def test_wrappers_further_in_leave_no_trace_in_names() -> None:
    """Remove activation-checkpointing wrappers inside the module from names."""
    net = Net()
    net.blocks[0] = checkpoint_wrapper(net.blocks[0])
    names = set(capture(trained(flattened(net, False)), rng=False).tree["model"])
    assert names == Net().state_dict().keys()


@pytest.mark.usefixtures("alone")
def test_a_flattened_state_that_cannot_be_split_is_refused() -> None:
    """Refuse a module with its own ``state_dict`` code, and parameters that are not stored row by row."""

    class Own(nn.Linear):
        def state_dict(self, *args: Any, **kwargs: Any) -> Any:
            return {}

    net = Net()
    net.out = Own(3, 3)  # type: ignore[assignment]
    with pytest.raises(IncompatibleState, match="its own state_dict code"):
        capture({"model": flattened(net, False)}, rng=False)
    turned = nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    with pytest.raises(IncompatibleState, match="not row by row"):
        capture({"model": flattened(turned, False)}, rng=False)


@pytest.fixture
def first_of_two() -> Iterator[None]:
    """Initialise rank 0 of two, with a backend that transfers nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def cut(net: nn.Module, strategy: str, keep: bool, **options: Any) -> FullyShardedDataParallel:
    return FullyShardedDataParallel(
        net,
        sharding_strategy=ShardingStrategy[strategy],
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        use_orig_params=keep,
        device_id=torch.device("cpu"),
        **options,
    )


def handles(net: nn.Module) -> list[Any]:
    return [module._handle for module in net.modules() if isinstance(module, FullyShardedDataParallel)]


@pytest.mark.usefixtures("first_of_two")
@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
def test_the_next_forward_pass_gathers_what_was_restored(strategy: str, keep: bool) -> None:
    """Free what a forward pass before the restore had gathered and kept for the next one."""
    net = cut(Net(), strategy, keep)
    plain = Net()
    stored = save({"model": plain}, rng=False)
    with torch.no_grad():
        net(torch.zeros(1, 3))
    assert any(handle.flat_param._full_param_padded.untyped_storage().size() for handle in handles(net))
    with torch.no_grad():
        for handle in handles(net):
            handle.flat_param._local_shard.fill_(7)
    restore(stored, {"model": net})
    assert not any(handle.flat_param._full_param_padded.untyped_storage().size() for handle in handles(net))
    expected = {name: bytes(tensor.detach().numpy().tobytes()) for name, tensor in plain.state_dict().items()}
    for item, data in zip(
        capture({"model": net}, rng=False).items, save({"model": net}, rng=False, piece=1).data, strict=True
    ):
        assert data and data in expected[item.name.removeprefix("model/")]


@pytest.mark.usefixtures("first_of_two")
@pytest.mark.parametrize("keep", [False, True])
def test_a_module_without_its_wrapper_is_refused(keep: bool) -> None:
    """Refuse the wrapper's inner module: only the wrapper knows the parameters, which would be lost."""
    for kinds in ({Block}, set()):
        net = FullyShardedDataParallel(
            Net(), auto_wrap_policy=ModuleWrapPolicy(kinds), use_orig_params=keep, device_id=torch.device("cpu")
        )
        with pytest.raises(IncompatibleState, match="flattened by a.* around the module that was given"):
            capture({"model": net.module}, rng=False)


@pytest.mark.usefixtures("first_of_two")
@pytest.mark.parametrize("keep", [False, True])
def test_wrappers_put_in_later_leave_no_trace_in_names(keep: bool) -> None:
    """Remove activation-checkpointing wrappers from names that were applied to a sharded module."""
    net = cut(Net(), "FULL_SHARD", keep)
    apply_activation_checkpointing(net, check_fn=lambda module: isinstance(module, nn.Linear))
    items = capture({"model": net}, rng=False).items
    assert {item.name.removeprefix("model/") for item in items} <= Net().state_dict().keys()


@pytest.mark.usefixtures("first_of_two")
def test_a_forward_pass_that_no_backward_followed_changes_nothing() -> None:
    """Capture the same values after a forward pass without a backward pass, such as after a non-finite loss. Torch
    leaves views in place of the parameters then."""
    net = cut(Net(), "SHARD_GRAD_OP", True)
    optimizer = torch.optim.AdamW(net.parameters())
    before = values({"optimizer": optimizer, "model": net})
    net(torch.ones(1, 3))
    assert values({"optimizer": optimizer, "model": net}) == before


@pytest.mark.usefixtures("first_of_two")
def test_buffers_have_the_dtype_they_train_in_before_the_first_step_too() -> None:
    """Capture buffers with their training dtype before the first forward pass, in which torch casts them. A checkpoint
    from a later step fits a new module then."""
    precision = MixedPrecision(param_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16)
    dtypes = [
        item.dtype
        for item in capture({"model": cut(Net(), "FULL_SHARD", True, mixed_precision=precision)}, rng=False).items
    ]
    net = cut(Net(), "FULL_SHARD", True, mixed_precision=precision)
    with torch.no_grad():
        net(torch.zeros(1, 3))
    assert [item.dtype for item in capture({"model": net}, rng=False).items] == dtypes
    assert "bfloat16" in dtypes and "float32" in dtypes


def stepped(net: nn.Module) -> torch.optim.Optimizer:
    """Return AdamW with state for each parameter that has elements on this rank."""
    optimizer = torch.optim.AdamW(net.parameters())
    for number, parameter in enumerate(net.parameters()):
        if parameter.numel():
            moments = {key: torch.full_like(parameter, number + 1.0) for key in ("exp_avg", "exp_avg_sq")}
            optimizer.state[parameter] = {"step": torch.tensor(7.0), **moments}
    return optimizer


@pytest.mark.usefixtures("first_of_two")
def test_a_flattened_state_with_one_wrong_shape_is_skipped_and_reported() -> None:
    """Skip the whole flattened state if one tensor in it does not fit: half a state is worse than none. The components'
    order does not matter."""

    class Wide(Net):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Linear(3, 3, bias=True)

    plain = Net()
    stored = save({"model": plain, "optimizer": stepped(plain)}, rng=False)
    for order in (("model", "optimizer"), ("optimizer", "model")):
        wide = cut(Wide(), "FULL_SHARD", False)
        tensors = [
            replace(tensor, shape=(4, 3), length=48) if tensor.name == "model/blocks.0.layer.weight" else tensor
            for tensor in stored.tensors
        ]
        live = {"model": wide, "optimizer": stepped(wide)}
        plan = plan_restore({name: live[name] for name in order}, tensors, stored.tree, strict=False, where="test")
        assert any("blocks.0.layer.weight" in message and "is not restored" in message for message in plan.skipped), (
            plan.skipped
        )


@pytest.mark.usefixtures("first_of_two")
@pytest.mark.parametrize("keep", [False, True])
def test_a_pattern_takes_one_moment(keep: bool) -> None:
    """Restore one moment by a pattern, and leave the others unchanged."""
    plain = Net()
    stored = save({"model": plain, "optimizer": stepped(plain)}, rng=False)
    net = cut(Net(), "FULL_SHARD", keep)
    optimizer = stepped(net)
    for state in optimizer.state.values():
        for tensor in state.values():
            tensor.zero_()
    restore(stored, {"model": net, "optimizer": optimizer}, only=["optimizer/state/*/exp_avg"])
    for state in optimizer.state.values():
        assert state["exp_avg"].any() and not state["exp_avg_sq"].any() and not state["step"]


@pytest.mark.usefixtures("first_of_two")
def test_state_that_is_not_like_its_parameter_is_refused() -> None:
    """Refuse state of another shape: it is unknown which rank's it would be."""
    net = cut(Net(), "FULL_SHARD", False)
    optimizer = stepped(net)
    next(iter(optimizer.state.values()))["scales"] = torch.ones(2)
    with pytest.raises(IncompatibleState, match="scales is neither like the flattened parameter nor a scalar"):
        capture({"model": net, "optimizer": optimizer}, rng=False)


@pytest.mark.usefixtures("alone")
def test_an_optimizer_with_its_own_way_counts_each_parameters_steps_once() -> None:
    """Restore the one step count of a flattened parameter into one separate count for each parameter."""
    net = flattened(Net(), False, Block)
    stored = save({"model": net, "optimizer": stepped(net)}, rng=False)
    plain = Net()
    optimizer = torch.optim.AdamW(plain.parameters())
    optimizer.register_load_state_dict_post_hook(lambda _: None)
    restore(stored, {"model": plain, "optimizer": optimizer})
    steps = [state["step"] for state in optimizer.state.values()]
    assert len(set(map(id, steps))) == len(steps) > 1
