"""``python child.py SCENARIO [NAME …]``: a scenario with a torch that calls these private names otherwise.

Names with a colon are in C: they are removed. Prints the names that were reported as missing, one a line.
"""

# ruff: noqa: E402 - torch is imported after its names are replaced

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "capture")]
from renamed import remove, rename

if __name__ == "__main__":
    in_python = [name for name in sys.argv[2:] if ":" not in name]
    if in_python:
        rename(in_python)
    if len(in_python) < len(sys.argv) - 2:
        remove([name for name in sys.argv[2:] if ":" in name])

import copy
from typing import Any

import torch
import torch.distributed as dist
from roundtrip import restore, save
from torch import nn
from torch.utils.data import DataLoader, Dataset

import relight.observe
from relight.capture import CaptureCache, capture
from relight.errors import RelightError

SCENARIOS: dict[str, Callable[[], None]] = {}
"""The scenarios by name, filled below."""


def scenario(function: Callable[[], None]) -> Callable[[], None]:
    """Register a scenario."""
    SCENARIOS[function.__name__] = function
    return function


class Net(nn.Module):
    """Layers, tied weights, a buffer that is saved, one that is not, and one without a value."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.second.weight = self.first.weight
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("seen", torch.zeros(2))
        self.register_buffer("cache", torch.zeros(2), persistent=False)
        self.register_buffer("empty", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.second(self.first(x)))  # type: ignore[no-any-return]


def trained(seed: int, net: nn.Module | None = None) -> dict[str, Any]:
    """Return a module and its optimizer after two steps."""
    torch.manual_seed(seed)
    net = Net() if net is None else net
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    for _ in range(2):
        net(torch.randn(4, 3)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {"model": net, "optimizer": optimizer}


def same_state(a: dict[str, Any], b: dict[str, Any]) -> bool:
    """Return whether two modules and their optimizers have the same tensors."""
    states = [{**x["model"].state_dict(), **_moments(x["optimizer"])} for x in (a, b)]
    return states[0].keys() == states[1].keys() and all(
        torch.equal(value, states[1][key]) for key, value in states[0].items()
    )


def _moments(optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    states = enumerate(optimizer.state.values())
    return {f"{number}/{key}": value for number, state in states for key, value in state.items()}


def forget_seen(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    """Remove a buffer from a state."""
    del state[f"{prefix}seen"]


@scenario
def modules() -> None:
    """Save and restore modules, by a first and by a second capture; hooks and own code are noticed."""
    first, other, cache = trained(0), trained(1), CaptureCache()
    save(first, recall=cache)
    with torch.no_grad():
        first["model"].first.weight.add_(1)
    stored = save(first, recall=cache)
    restore(stored, other)
    assert same_state(first, other)
    names = {tensor.name for tensor in stored.tensors}
    assert {"model/first/weight", "model/seen"} <= {name.replace(".", "/") for name in names}, names
    assert not any("cache" in name for name in names)
    assert any("cache is not persistent" in line for line in capture(first).missed)
    first["model"].register_state_dict_post_hook(forget_seen)
    assert not any("seen" in tensor.name for tensor in save(first, recall=cache).tensors)


@scenario
def wrapped() -> None:
    """A compiled module has the names of the module inside, and so has one with activation checkpointing."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    plain = trained(0)
    names = [tensor.name for tensor in save({"model": plain["model"]}).tensors]
    compiled = torch.compile(copy.deepcopy(plain["model"]))
    inside = copy.deepcopy(plain["model"])
    inside.first = checkpoint_wrapper(inside.first)
    for model in (compiled, inside):
        assert [tensor.name for tensor in save({"model": model}).tensors] == names


class Grows(nn.Module):
    """A module of a class that takes a buffer of any length."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.register_buffer("rows", torch.ones(length))

    def _load_from_state_dict(self, state: Any, prefix: str, *more: Any) -> None:
        self.rows = torch.empty_like(state[f"{prefix}rows"])
        super()._load_from_state_dict(state, prefix, *more)  # type: ignore[misc]


@scenario
def own_loading() -> None:
    """A class that takes another shape gets it, or the stored shape is refused."""
    stored, live = save({"model": Grows(5)}), Grows(3)
    try:
        restore(stored, {"model": live})
    except RelightError as error:
        print("refused:", error)
        assert live.rows.shape == (3,)
    else:
        assert live.rows.shape == (5,)


@scenario
def optimizers() -> None:
    """Hooks of an optimizer's state are noticed; moments that a fresh optimizer lacks are made without its hooks."""
    first, fresh = trained(0), {"model": Net()}
    optimizer = torch.optim.AdamW(fresh["model"].parameters(), lr=0.1)
    calls: list[object] = []
    optimizer.register_step_post_hook(lambda *args: calls.append(args))
    restore(save(first), {**fresh, "optimizer": optimizer})
    assert same_state(first, {**fresh, "optimizer": optimizer}) and not calls
    from relight.capture.objects import first_state
    from relight.capture.optimizers import is_custom

    optimizer.state.clear()
    assert len(first_state(optimizer)) == len(list(fresh["model"].parameters())) and not calls
    assert not is_custom(optimizer)
    optimizer.register_load_state_dict_post_hook(lambda optimizer: None)
    assert is_custom(optimizer)


@scenario
def schedulers() -> None:
    """A rollback lowers the rates of schedulers inside a scheduler."""
    from relight.restore import rollback
    from relight.torch_private.optimizers import inner_schedulers

    optimizer = torch.optim.SGD(Net().parameters(), lr=1.0)
    inner = [torch.optim.lr_scheduler.ConstantLR(optimizer), torch.optim.lr_scheduler.StepLR(optimizer, 3)]
    outer = torch.optim.lr_scheduler.SequentialLR(optimizer, inner, [2])
    assert list(inner_schedulers(outer)) == inner and not inner_schedulers(inner[0])
    rollback._cut_schedule(outer, 0.5, set())
    assert [schedule.base_lrs for schedule in inner] == [[0.5], [0.5]]


class Numbers(Dataset[torch.Tensor]):
    """Samples with a random number of the worker's."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        import numpy

        return torch.tensor([index, numpy.random.randint(1 << 30)])


@scenario
def loaders() -> None:
    """A loader with workers continues in the middle of an epoch with the batches that were left."""
    from relight.capture.loaders import loader_state, restore_loader, watch_loaders

    def made(persistent: bool) -> DataLoader[torch.Tensor]:
        loader = DataLoader(Numbers(), batch_size=2, shuffle=True, num_workers=1, persistent_workers=persistent)
        watch_loaders({"loader": loader})
        return loader

    for persistent in (False, True):
        torch.manual_seed(3)
        first = made(persistent)
        iterator = iter(first)
        next(iterator)
        state, random = loader_state(first), torch.get_rng_state()
        rest = [batch[:, 0].tolist() for batch in iterator]
        second = made(persistent)
        restore_loader(second, state)
        torch.set_rng_state(random)
        assert [batch[:, 0].tolist() for batch in second] == rest


@scenario
def signals() -> None:
    """Workers deliver their batches, whether they are protected from signals or not."""
    from relight.checkpointer import workers

    workers.protect()
    workers.protect()
    assert len(list(DataLoader(Numbers(), batch_size=2, num_workers=1))) == 4


@scenario
def torchdata() -> None:
    """torchdata's loader continues in the middle of an epoch, twice."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    from relight.capture.loaders import loader_state, restore_loader, watch_loaders

    state = None
    for began in (0, 2, 4):
        loader = StatefulDataLoader(range(12), batch_size=2)
        watch_loaders({"loader": loader})
        if state is not None:
            restore_loader(loader, state)
        iterator = iter(loader)
        assert [batch.tolist() for batch in (next(iterator), next(iterator))] == [
            [2 * number, 2 * number + 1] for number in (began, began + 1)
        ]
        state = loader_state(loader)


@scenario
def outside() -> None:
    """Attributes of torch's are not reported as state that is in no checkpoint."""
    from relight.checkpointer.outside_state import OutsideState

    class OwnSGD(torch.optim.SGD):
        """An optimizer of the script's."""

    optimizer = OwnSGD(Net().parameters(), lr=0.1)
    watched = OutsideState({"optimizer": optimizer}, reports=False)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    optimizer.zero_grad()
    optimizer.step()
    print("outside:", watched.sentences)


@scenario
def numpy_seeds() -> None:
    """The seed that a worker gives numpy is the one of torch."""
    from relight.torch_private.loaders import numpy_seed

    for base, worker in ((5, 0), (2**62 + 12345, 3)):
        print([int(number) for number in numpy_seed(base, worker)])


@scenario
def versions() -> None:
    """A write to a tensor is noticed, and no write is not."""
    from relight.capture.capture import fingerprint
    from relight.snapshot import GuardedTensors
    from relight.torch_private.tensors import version_counter

    for tensor in (torch.zeros(5), torch.zeros(4, 4).t()[1:], torch.zeros(3, dtype=torch.bfloat16), torch.zeros(())):
        before = version_counter(tensor)
        assert version_counter(tensor) == before
        tensor.add_(1)
        assert version_counter(tensor) != before
    assert version_counter(torch.zeros(0)) == version_counter(torch.zeros(0))
    state, cache = trained(0), CaptureCache()
    capture(state, recall=cache)
    before, print_before = cache.glance(), fingerprint(state)
    assert cache.glance() == before and fingerprint(state) == print_before
    with torch.no_grad():
        state["model"].first.weight.mul_(2)
    assert cache.glance() != before and fingerprint(state) != print_before
    guarded = GuardedTensors([("a", torch.zeros(1 << 16), 0), ("b", torch.zeros(9), 1 << 18)])
    marks = guarded.begin()
    assert not marks.touched()
    guarded.tensors[0][1 << 15] = 1  # far from the samples
    assert marks.touched() == {"a"}
    with torch.inference_mode():
        assert version_counter(torch.zeros(2)) == 0


@scenario
def values() -> None:
    """Sparse and quantized tensors are saved and made again."""
    sparse = torch.sparse_coo_tensor([[1, 1, 0]], [2.0, 3.0, 4.0], (3,))
    channels = torch.quantize_per_channel(
        torch.arange(6.0).view(2, 3), torch.tensor([0.5, 0.25]).double(), torch.tensor([1, 2]), 0, torch.qint8
    )
    state = {
        "sparse": sparse,
        "coalesced": sparse.coalesce(),
        "tensor": torch.quantize_per_tensor(torch.arange(6.0).view(3, 2).t(), 0.5, 3, torch.quint8),
        "wide": torch.quantize_per_tensor(torch.tensor([1e9, -7.0]), 1.0, 0, torch.qint32),
        "channels": channels,
    }
    target: dict[str, Any] = dict.fromkeys(state)
    result = restore(save({"values": state}), {"values": target})
    made = result.values["values"]
    assert torch.equal(made["sparse"].to_dense(), sparse.to_dense()) and made["coalesced"].is_coalesced()
    for name in ("tensor", "wide", "channels"):
        assert torch.equal(made[name].int_repr(), state[name].int_repr()) and made[name].dtype == state[name].dtype
    assert made["tensor"].q_zero_point() == 3 and torch.equal(
        made["channels"].q_per_channel_scales(), channels.q_per_channel_scales()
    )


@scenario
def sharded() -> None:
    """A DTensor is saved from this rank's part."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor
    from torch.distributed.tensor.placement_types import Placement

    from relight.capture.sharded import local_of, spread_of
    from relight.torch_private.tensors import strided_factor

    class Halves(Placement):
        """A placement of another torch."""

    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    whole = torch.arange(6.0).view(2, 3)
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("a", "b"))
    tensor = distribute_tensor(whole, mesh, [Shard(0), Shard(1)])
    assert torch.equal(local_of(tensor), whole)
    spread = spread_of(tensor)
    assert not isinstance(spread, str) and spread.placements == ((0, 1), (1, 1))
    print("halves:", strided_factor(Halves()))
    print("twice:", spread_of(distribute_tensor(whole, mesh, [Shard(0), Shard(0)])))


@scenario
def flattened() -> None:
    """A module of FullyShardedDataParallel has the names and values of the one inside, or is refused."""
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

    from relight.torch_private.flat_parameters import is_flattened_elsewhere

    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    net = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    expected = save({"model": net})
    outer = FullyShardedDataParallel(
        copy.deepcopy(net),
        sharding_strategy=ShardingStrategy.NO_SHARD,
        use_orig_params=False,
        device_id=torch.device("cpu"),
    )
    (flat,) = outer.parameters()
    print("flat:", is_flattened_elsewhere(flat), is_flattened_elsewhere(next(net.parameters())))
    try:
        assert save({"model": outer}).data == expected.data
    except RelightError as error:
        print("refused:", error)


class Packed(nn.Parameter):
    """A parameter with a scale, as in bitsandbytes."""


class PackedLinear(nn.Module):
    """A module that saves the scale in addition to the weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.Tensor._make_subclass(Packed, torch.ones(4), False)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)  # type: ignore[misc]
        destination[f"{prefix}weight.scale"] = torch.ones(1)


@scenario
def subclasses() -> None:
    """A parameter of a subclass that only adds attributes is saved, or refused."""
    try:
        save({"model": PackedLinear()})
    except RelightError as error:
        print("refused:", error)


if __name__ == "__main__":
    relight.observe.subscribe(
        lambda event: event.name == "torch.name_missing" and print("missing", event.fields["missing"])
    )
    SCENARIOS[sys.argv[1]]()
