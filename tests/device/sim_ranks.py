"""Ranks on simulated accelerators: a back end of torch.distributed for them, and a job that is saved, ended and resumed.

``python tests/device/sim_ranks.py ddp|fsdp2 STORE``, as one rank of torchrun. The collectives copy to host memory and use Gloo.
"""

from __future__ import annotations

import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from tests.device import simulated
from torch import nn
from torch.distributed.fsdp import fully_shard

import relight


class HostGroup(dist.ProcessGroup):
    """Collectives on device tensors, by Gloo on copies in host memory."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._gloo = dist.ProcessGroupGloo(store, rank, size, timeout)

    def getBackendName(self) -> str:
        return "host"

    @property
    def group_name(self) -> str:
        return str(dist.distributed_c10d._world.pg_names[self])

    def _done(self, value: Any) -> Any:
        future: torch.futures.Future[Any] = torch.futures.Future(
            devices=[torch.device(simulated.NAME, torch.sim.current_device())]
        )
        future.set_result(value)
        return torch._C._distributed_c10d._create_work_from_future(future)

    def allreduce(self, tensors: list[torch.Tensor], options: Any = None) -> Any:
        host = [tensor.cpu() for tensor in tensors]
        self._gloo.allreduce(host, options).wait()
        for tensor, result in zip(tensors, host, strict=True):
            tensor.copy_(result)
        return self._done(tensors)

    def allreduce_coalesced(self, tensors: list[torch.Tensor], options: Any = None) -> Any:
        plain = dist.AllreduceOptions()
        plain.reduceOp = options.reduceOp
        return [self.allreduce([tensor], plain) for tensor in tensors][-1]

    def broadcast(self, tensors: list[torch.Tensor], options: Any = None) -> Any:
        host = [tensor.cpu() for tensor in tensors]
        self._gloo.broadcast(host, options).wait()
        for tensor, result in zip(tensors, host, strict=True):
            tensor.copy_(result)
        return self._done(tensors)

    def scatter(self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], options: Any = None) -> Any:
        host = [tensor.cpu() for tensor in outputs]
        self._gloo.scatter(host, [[tensor.cpu() for tensor in each] for each in inputs], options).wait()
        for tensor, result in zip(outputs, host, strict=True):
            tensor.copy_(result)
        return self._done(outputs)

    def allgather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], options: Any = None) -> Any:
        host = [[tensor.cpu() for tensor in each] for each in outputs]
        self._gloo.allgather(host, [tensor.cpu() for tensor in inputs]).wait()
        for each, results in zip(outputs, host, strict=True):
            for tensor, result in zip(each, results, strict=True):
                tensor.copy_(result)
        return self._done(outputs)

    def _allgather_base(self, output: torch.Tensor, given: torch.Tensor, options: Any = None) -> Any:
        parts = [given.cpu() for _ in range(self.size())]
        self._gloo.allgather([parts], [given.cpu()]).wait()
        output.copy_(torch.cat([part.reshape(-1) for part in parts]).view(output.shape))
        return self._done(output)

    def _reduce_scatter_base(self, output: torch.Tensor, given: torch.Tensor, options: Any = None) -> Any:
        host = given.cpu()
        plain = dist.AllreduceOptions()
        average = options is not None and options.reduceOp == dist.ReduceOp.AVG
        self._gloo.allreduce([host], plain).wait()
        mine = host.reshape(self.size(), -1)[self.rank()]
        output.copy_((mine / self.size() if average else mine).view(output.shape))
        return self._done(output)

    all_gather_single = _allgather_base
    reduce_scatter_single = _reduce_scatter_base  # their names since torch 2.13

    def barrier(self, options: Any = None) -> Any:
        self._gloo.barrier().wait()
        return self._done([])


def make(way: str, seed: int, device: torch.device) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 700), nn.GELU(), nn.Dropout(0.1), nn.Linear(700, 64)).to(device)
    if way == "fsdp2":
        for layer in (model[0], model[3]):
            fully_shard(layer)
        fully_shard(model)
    else:
        model = nn.parallel.DistributedDataParallel(model, device_ids=None)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def run(
    model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, device: torch.device, ckpt: Any = None
) -> list[torch.Tensor]:
    for step in steps:
        generator = torch.Generator().manual_seed(step * 7 + dist.get_rank())
        loss = model(torch.randn(8, 64, generator=generator).to(device)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if ckpt is not None:
            ckpt.step(step)
    return [parameter.detach() for parameter in model.parameters()]


def host(tensor: Any) -> torch.Tensor:
    return (tensor.to_local() if hasattr(tensor, "to_local") else tensor).cpu()


def main() -> None:
    way, store = sys.argv[1:]
    simulated.load()
    dist.Backend.register_backend("host", HostGroup, devices=[simulated.NAME])
    dist.init_process_group("cpu:gloo,sim:host")
    device = torch.device(simulated.NAME, dist.get_rank())
    torch.sim.set_device(device.index)
    expected = run(*make(way, 0, device), range(8), device)
    for seed, end in ((0, 5), (5, 8)):
        torch.sim.adversary(seed + dist.get_rank(), "mixed")
        model, optimizer = make(way, seed, device)
        with relight.Checkpointer(store, model=model, optimizer=optimizer, save=relight.every(steps=2)) as ckpt:
            resumed = run(model, optimizer, range(ckpt.restore(), end), device, ckpt)
    assert all(torch.equal(host(a), host(b)) for a, b in zip(resumed, expected, strict=True))
    dist.destroy_process_group()
    print("equal")


if __name__ == "__main__":
    main()
