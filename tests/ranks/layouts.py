"""Ways to spread one state over ranks, and a rank's program that saves or restores it in any of them.

``python layouts.py RANK WORLD PORT PLAN``: the plan is a JSON list of ``[verb, layout, run, …]``. The values are functions of names alone, so
that any rank of any layout can check, to the bit, whether what it restored is right.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import zlib
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import relight

WIDTH = 24


class Block(nn.Module):
    """Two layers, a norm, and a buffer."""

    def __init__(self, width: int, odd: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width + odd)
        self.down = nn.Linear(2 * width + odd, width, bias=False)
        self.norm = nn.LayerNorm(width)
        self.register_buffer("count", torch.zeros(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    """Blocks by number, an embedding, and a parameter of few rows: fewer than ranks."""

    def __init__(self, blocks: tuple[int, ...] = (0, 1, 2), ends: bool = True, odd: int = 3) -> None:
        super().__init__()
        if ends:
            self.embed = nn.Embedding(50, WIDTH)
            self.scale = nn.Parameter(torch.ones(2, 3))
        self.blocks = nn.ModuleDict({str(number): Block(WIDTH, odd) for number in blocks})

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks.values():
            x = block(x)
        return x @ self.embed.weight.T * self.scale.sum()


def value_of(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Return the value of the tensor of that name."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.randn(shape, generator=generator)


def fill(net: nn.Module, zero: bool) -> None:
    with torch.no_grad():
        for name, tensor in [*net.named_parameters(), *net.named_buffers()]:
            tensor.copy_(torch.zeros(tensor.shape) if zero else value_of(name, tuple(tensor.shape)))


def mesh(*shape: int, device: str = "cpu") -> Any:
    return init_device_mesh(device, shape, mesh_dim_names=tuple("abc"[: len(shape)]))


def tensor_parallel(net: Net, group: Any) -> None:
    for block in net.blocks.values():
        parallelize_module(block, group, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def shard(net: Net, group: Any) -> None:
    for block in net.blocks.values():
        fully_shard(block, mesh=group)
    fully_shard(net, mesh=group)


def flatten(net: Net, group: Any, strategy: str, *, keep: bool) -> FullyShardedDataParallel:
    """Flat parameters. ``keep``: the optimizer is given the original ones."""
    return FullyShardedDataParallel(
        net,
        device_mesh=group,
        sharding_strategy=ShardingStrategy[strategy],
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        use_orig_params=keep,
        device_id=torch.device("cpu"),
    )


def by_hand(net: Net, grid: Any, placements: list[Any]) -> None:
    """Make every parameter a DTensor with these placements, as far as its shape allows."""
    for module in net.modules():
        for key, parameter in list(module._parameters.items()):
            if parameter is not None:
                fitting = [Replicate() if isinstance(p, Shard) and p.dim >= parameter.ndim else p for p in placements]
                module._parameters[key] = nn.Parameter(distribute_tensor(parameter.detach(), grid, fitting))


def spread(layout: str, zero: bool, device: str = "cpu") -> nn.Module:
    """Return the net, filled and spread in that layout. ``device``: of the layouts plain, ddp, fsdp and tensor."""
    if layout.startswith("pipeline"):
        stage = dist.get_rank() * 2 // dist.get_world_size()
        net = Net((0, 1), True) if stage == 0 else Net((2,), False)
    else:
        net = Net()
    fill(net.to(device), zero)
    size = dist.get_world_size() if dist.is_initialized() else 1
    if layout in ("ddp", "stepped_apart"):
        return DistributedDataParallel(net)
    if layout == "fsdp":
        shard(net, mesh(size, device=device))
    elif layout in ("flat", "flat_whole"):
        return flatten(net, mesh(size), "FULL_SHARD", keep=layout == "flat")
    elif layout == "flat_copies":
        return flatten(net, mesh(2, size // 2), "HYBRID_SHARD", keep=True)
    elif layout == "flat_same":
        return flatten(net, mesh(size), "NO_SHARD", keep=False)
    elif layout == "hsdp":
        shard(net, mesh(2, size // 2))
    elif layout == "tensor":
        tensor_parallel(net, mesh(size, device=device))
    elif layout == "tensor_fsdp":
        grid = mesh(size // 2, 2)
        tensor_parallel(net, grid["b"])
        shard(net, grid["a"])
    elif layout == "pipeline_fsdp":
        grid = mesh(2, size // 2)
        shard(net, grid["b"])
    elif layout == "columns":
        by_hand(net, mesh(size), [Shard(1)])
    elif layout == "grid":
        by_hand(net, mesh(2, size // 2), [Shard(0), Shard(1)])
    elif layout == "cube":
        by_hand(net, mesh(2, 1, size // 2), [Shard(0), Replicate(), Shard(0)])
    elif layout == "copies":
        by_hand(net, mesh(size), [Replicate()])
    return net


def named(net: nn.Module) -> dict[str, torch.Tensor]:
    return {name.removeprefix("module."): tensor for name, tensor in [*net.named_parameters(), *net.named_buffers()]}


def optimizer_of(net: nn.Module, zero: bool, layout: str = "") -> torch.optim.Optimizer:
    """AdamW with moments that follow from the parameters. ``stepped_apart``: each rank has those of some parameters."""
    lr = 0.25 if zero else 0.125
    if layout == "in_line":
        whole = optimizer = line_up(net)
        optimizer.param_groups[0]["lr"] = lr
    elif layout == "stepped_apart":
        whole = ZeroRedundancyOptimizer(net.parameters(), torch.optim.AdamW, lr=lr)
        optimizer = whole.optim
    else:
        whole = optimizer = torch.optim.AdamW(net.parameters(), lr=lr)
    if not zero:
        for parameter in [param for group in optimizer.param_groups for param in group["params"]]:
            value = parameter.detach()
            # flattened, without elements on this rank, so never stepped
            if not value.numel() and not isinstance(parameter, DTensor):
                continue
            optimizer.state[parameter] = {"step": torch.tensor(7.0), "exp_avg": value * 2, "exp_avg_sq": value * value}
    return whole


def line_up(net: nn.Module) -> torch.optim.Optimizer:
    """AdamW of one flat tensor: this rank's run of all parameters laid end to end, as ZeRO's first stages have it."""
    parameters = list(net.parameters())
    line, size, rank = (
        torch.cat([parameter.detach().flatten() for parameter in parameters]),
        dist.get_world_size(),
        dist.get_rank(),
    )
    each = -(-len(line) // size)
    flat = nn.Parameter(nn.functional.pad(line, (0, size * each - len(line)))[rank * each : (rank + 1) * each].clone())
    relight.flattened(flat, parameters)
    return torch.optim.AdamW([flat])


def wrongs_in_line(net: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    """``wrongs``, of an optimizer that was lined up."""
    (flat,) = optimizer.param_groups[0]["params"]
    parameters, size, rank = dict(net.named_parameters()), dist.get_world_size(), dist.get_rank()
    line = torch.cat([value_of(name, tuple(parameter.shape)).flatten() for name, parameter in parameters.items()])
    here = nn.functional.pad(line, (0, size * len(flat) - len(line)))[rank * len(flat) : (rank + 1) * len(flat)]
    wrong = [
        name
        for name, parameter in named(net).items()
        if not torch.equal(parameter.detach(), value_of(name, tuple(parameter.shape)))
    ]
    for what, actual, expected in (
        ("flat", flat.detach(), here),
        ("exp_avg", optimizer.state[flat]["exp_avg"], here * 2),
        ("exp_avg_sq", optimizer.state[flat]["exp_avg_sq"], here**2),
    ):
        wrong += [what] * (not torch.equal(actual, expected))
    return (
        wrong
        + ["step"] * (float(optimizer.state[flat]["step"]) != 7)
        + ["lr"] * (optimizer.param_groups[0]["lr"] != 0.125)
    )


def full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().full_tensor() if isinstance(tensor, DTensor) else tensor.detach()


def wrongs(net: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    """Return the names of what differs from what was saved. Collective."""
    if isinstance(net, FullyShardedDataParallel):
        return wrongs_flat(net, optimizer)
    if optimizer.param_groups[0]["params"][0].ndim == 1 and len(optimizer.param_groups[0]["params"]) == 1:
        return wrongs_in_line(net, optimizer)
    wrong = []
    wrapped = getattr(optimizer, "optim", optimizer)
    parameters = {id(param) for group in wrapped.param_groups for param in group["params"]}
    for name, tensor in named(net).items():
        expected = value_of(name, tuple(tensor.shape))
        if not torch.equal(full(tensor), expected):
            wrong.append(name)
        if id(tensor) in parameters:
            state = wrapped.state[tensor]
            for key, moment in (("exp_avg", expected * 2), ("exp_avg_sq", expected * expected)):
                if not torch.equal(full(state[key]), moment):
                    wrong.append(f"{name}: {key}")
            if float(state["step"]) != 7:
                wrong.append(f"{name}: step")
    if optimizer.param_groups[0]["lr"] != 0.125:
        wrong.append("lr")
    return wrong


def wrongs_flat(net: FullyShardedDataParallel, optimizer: torch.optim.Optimizer) -> list[str]:
    """Return what ``wrongs`` does, with the contents of the flat parameters as torch itself reports them."""
    wrong = []
    with FullyShardedDataParallel.summon_full_params(net):
        for name, tensor in [*net.named_parameters(), *net.named_buffers()]:
            name = name.replace("_fsdp_wrapped_module.", "")
            if not torch.equal(tensor, value_of(name, tuple(tensor.shape))):
                wrong.append(name)
    for key, moment in (("exp_avg", lambda value: value * 2), ("exp_avg_sq", lambda value: value * value)):
        with torch.no_grad():  # store the moment in the parameters, so that torch gathers it
            for parameter in net.parameters():
                if parameter.numel():
                    parameter.copy_(optimizer.state[parameter][key])
                    wrong += ["step"] * (float(optimizer.state[parameter]["step"]) != 7)
        with FullyShardedDataParallel.summon_full_params(net):
            for name, tensor in net.named_parameters():
                name = name.replace("_fsdp_wrapped_module.", "")
                if not torch.equal(tensor, moment(value_of(name, tuple(tensor.shape)))):
                    wrong.append(f"{name}: {key}")
    if optimizer.param_groups[0]["lr"] != 0.125:
        wrong.append("lr")
    return wrong


def place(run: str, options: dict[str, Any]) -> str:
    """Return the run's URL. Ranks that do not write get a URL that cannot be opened."""
    return run if options.get("writer") != "rank 0" or not dist.get_rank() else "nowhere://" + run


def save(layout: str, run: str, **options: Any) -> dict[str, Any]:
    net = spread(layout, zero=False)
    optimizer = optimizer_of(net, zero=False, layout=layout)
    rank = dist.get_rank() if dist.is_initialized() else 0
    ckpt = relight.Checkpointer(
        place(run, options),
        model=net,
        optimizer=optimizer,
        own={"rank": rank},
        per_rank=["own"],
        signals=False,
        **options,
    )
    made = [ckpt.save(step).id for step in (3, 4)]
    ckpt.close(save=False)
    return {"ids": made}


def restore(layout: str, run: str, **options: Any) -> dict[str, Any]:
    net = spread(layout, zero=True)
    optimizer = optimizer_of(net, zero=True, layout=layout)
    ckpt = relight.Checkpointer(
        place(run, options),
        model=net,
        optimizer=optimizer,
        own={"rank": -1},
        per_rank=["own"],
        signals=False,
        **options,
    )
    start = ckpt.restore()
    report = {
        "start": start,
        "wrong": wrongs(net, optimizer),
        "own": ckpt["own"]["rank"],
        "bytes": ckpt._progress.resumed.bytes_read,
    }
    ckpt.close(save=False)
    return report


VERBS = {"save": save, "restore": restore}


def main() -> None:
    rank, world, port = map(int, sys.argv[1:4])
    torch.set_num_threads(1)
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
    if world > 1:
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        dist.init_process_group("gloo", rank=rank, world_size=world)
    for verb, layout, run, options in json.loads(sys.argv[4]):
        print(
            json.dumps({"verb": verb, "layout": layout, "run": run, **VERBS[verb](layout, run, **options)}), flush=True
        )
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
