"""Modules whose parameters were flattened: the same names, shapes and values as without; what cannot be told apart is refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from msgspec.structs import replace
from roundtrip import restore, save
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing, checkpoint_wrapper
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from relight.capture import CaptureCache, capture, plan_restore
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
    recall = CaptureCache()
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
    with pytest.raises(IncompatibleState, match="its own state_dict code"):
        capture({"model": flattened(net, False)}, rng=False)
    turned = nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    with pytest.raises(IncompatibleState, match="not row by row"):
        capture({"model": flattened(turned, False)}, rng=False)


@pytest.fixture
def first_of_two() -> Iterator[None]:
    """Rank 0 of two, with a backend that moves nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def cut(net: nn.Module, strategy: str, keep: bool, **options: Any) -> FullyShardedDataParallel:
    return FullyShardedDataParallel(
        net, sharding_strategy=ShardingStrategy[strategy], auto_wrap_policy=ModuleWrapPolicy({Block}), use_orig_params=keep,
        device_id=torch.device("cpu"), **options,
    )  # fmt: skip


def handles(net: nn.Module) -> list[Any]:
    return [one._handle for one in net.modules() if isinstance(one, FullyShardedDataParallel)]


@pytest.mark.usefixtures("first_of_two")
@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
def test_the_next_forward_pass_gathers_what_was_restored(strategy: str, keep: bool) -> None:
    """What a forward pass before the restore had gathered, and kept for the next one, is given back."""
    net = cut(Net(), strategy, keep)
    plain = Net()
    stored = save({"model": plain}, rng=False)
    with torch.no_grad():
        net(torch.zeros(1, 3))
    assert any(one.flat_param._full_param_padded.untyped_storage().size() for one in handles(net))
    with torch.no_grad():
        for one in handles(net):
            one.flat_param._local_shard.fill_(7)
    restore(stored, {"model": net})
    assert not any(one.flat_param._full_param_padded.untyped_storage().size() for one in handles(net))
    expected = {name: bytes(tensor.detach().numpy().tobytes()) for name, tensor in plain.state_dict().items()}
    for item, data in zip(capture({"model": net}, rng=False).items, save({"model": net}, rng=False, piece=1).data, strict=True):
        assert data and data in expected[item.name.removeprefix("model/")]


@pytest.mark.usefixtures("first_of_two")
@pytest.mark.parametrize("keep", [False, True])
def test_a_module_without_its_wrapper_is_refused(keep: bool) -> None:
    """Only the wrapper knows what the parameters are: its inside alone would lose them."""
    for kinds in ({Block}, set()):
        net = FullyShardedDataParallel(
            Net(), auto_wrap_policy=ModuleWrapPolicy(kinds), use_orig_params=keep, device_id=torch.device("cpu")
        )  # fmt: skip
        with pytest.raises(IncompatibleState, match="flattened by a.* around the module that was given"):
            capture({"model": net.module}, rng=False)


@pytest.mark.usefixtures("first_of_two")
@pytest.mark.parametrize("keep", [False, True])
def test_wrappers_put_in_later_leave_no_trace_in_names(keep: bool) -> None:
    """Activation checkpointing applied to what is sharded already."""
    net = cut(Net(), "FULL_SHARD", keep)
    apply_activation_checkpointing(net, check_fn=lambda one: isinstance(one, nn.Linear))
    items = capture({"model": net}, rng=False).items
    assert {one.name.removeprefix("model/") for one in items} <= Net().state_dict().keys()


@pytest.mark.usefixtures("first_of_two")
def test_a_forward_pass_that_no_backward_followed_changes_nothing() -> None:
    """The loss was not finite, say: torch leaves its views in place of the parameters then."""
    net = cut(Net(), "SHARD_GRAD_OP", True)
    optimizer = torch.optim.AdamW(net.parameters())
    before = values({"optimizer": optimizer, "model": net})
    net(torch.ones(1, 3))
    assert values({"optimizer": optimizer, "model": net}) == before


@pytest.mark.usefixtures("first_of_two")
def test_buffers_have_the_dtype_they_train_in_before_the_first_step_too() -> None:
    """Torch casts them at the first forward pass: what is saved behind it is restored before it."""
    precision = MixedPrecision(param_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16)
    dtypes = [one.dtype for one in capture({"model": cut(Net(), "FULL_SHARD", True, mixed_precision=precision)}, rng=False).items]
    net = cut(Net(), "FULL_SHARD", True, mixed_precision=precision)
    with torch.no_grad():
        net(torch.zeros(1, 3))
    assert [one.dtype for one in capture({"model": net}, rng=False).items] == dtypes
    assert "bfloat16" in dtypes and "float32" in dtypes


def stepped(net: nn.Module) -> torch.optim.Optimizer:
    """AdamW, with state for what has elements here."""
    optimizer = torch.optim.AdamW(net.parameters())
    for number, parameter in enumerate(net.parameters()):
        if parameter.numel():
            moments = {key: torch.full_like(parameter, number + 1.0) for key in ("exp_avg", "exp_avg_sq")}
            optimizer.state[parameter] = {"step": torch.tensor(7.0), **moments}
    return optimizer


@pytest.mark.usefixtures("first_of_two")
def test_what_is_flattened_with_one_of_another_shape_begins_anew_and_that_is_said() -> None:
    """Half a state is worse than none; whatever the order of the components."""

    class Wide(Net):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Linear(3, 3, bias=True)

    plain = Net()
    stored = save({"model": plain, "optimizer": stepped(plain)}, rng=False)
    for order in (("model", "optimizer"), ("optimizer", "model")):
        other = cut(Wide(), "FULL_SHARD", False)
        tensors = [replace(one, shape=(4, 3), length=48) if one.name == "model/blocks.0.layer.weight" else one for one in stored.tensors]
        live = {"model": other, "optimizer": stepped(other)}
        plan = plan_restore({name: live[name] for name in order}, tensors, stored.tree, strict=False, where="test")
        assert any("blocks.0.layer.weight" in one and "is not restored" in one for one in plan.skipped), plan.skipped


@pytest.mark.usefixtures("first_of_two")
@pytest.mark.parametrize("keep", [False, True])
def test_a_pattern_takes_one_moment(keep: bool) -> None:
    """The others stay as they are."""
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
    """Nobody knows which of the ranks' it would be."""
    net = cut(Net(), "FULL_SHARD", False)
    optimizer = stepped(net)
    next(iter(optimizer.state.values()))["scales"] = torch.ones(2)
    with pytest.raises(IncompatibleState, match="scales is neither like the flattened parameter nor a scalar"):
        capture({"model": net, "optimizer": optimizer}, rng=False)


@pytest.mark.usefixtures("alone")
def test_an_optimizer_with_its_own_way_counts_each_parameters_steps_once() -> None:
    """A flattened one has one count for all; those that it is loaded into have one each."""
    net = flattened(Net(), False, Block)
    stored = save({"model": net, "optimizer": stepped(net)}, rng=False)
    plain = Net()
    optimizer = torch.optim.AdamW(plain.parameters())
    optimizer.register_load_state_dict_post_hook(lambda one: None)
    restore(stored, {"model": plain, "optimizer": optimizer})
    steps = [state["step"] for state in optimizer.state.values()]
    assert len(set(map(id, steps))) == len(steps) > 1
