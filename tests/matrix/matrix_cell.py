"""A rank's program for one cell of the matrix: it saves in one way until it is killed, or restores in another way and saves once more;
or it follows what is saved.

``python matrix_cell.py RANK WORLD PORT ORDER``: the order is a JSON object. A tensor's values follow from its name and the step's number,
so that any rank of any layout can check a restored tensor bit by bit. Some tensors never change: saves share their chunks.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "ranks"))
sys.path.append(str(Path(__file__).parents[2]))
sys.path.append(str(Path(__file__).parents[2] / "examples" / "production"))

import layouts
import torch
import torch.distributed as dist
from curve import Curve
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

import relight
import relight.integrations.trackers.tracker as trackers
from relight.checkpointer.save_handle import Save

SAVES = 20_000
"""Upper bound of the saves of one process. It is killed long before."""
trackers.INTERVAL_S = 0.1  # so that kills find rows in every state


def print_json(**report: Any) -> None:
    """Print one JSON line with a single write."""
    os.write(1, f"{json.dumps(report)}\n".encode())


def value(name: str, shape: tuple[int, ...], step: int) -> torch.Tensor:
    """Return the tensor's values at the end of a step. The embedding and the first block are frozen. Other tensors
    change little, so that delta coding saves bytes."""
    base = layouts.value_of(name, shape)
    if name.startswith(("embed", "blocks.0")) or not base.is_floating_point():
        return base
    generator = torch.Generator().manual_seed(zlib.crc32(f"{name}@{step}".encode()))
    return base + 1e-3 * torch.randn(shape, generator=generator)


def held(
    net: nn.Module, optimizer: torch.optim.Optimizer, step: int
) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Yield each tensor of model and optimizer with its name and its expected values at the end of a step."""
    for name, tensor in layouts.named(net).items():
        expected = value(name, tuple(tensor.shape), step)
        yield name, tensor, expected
        if isinstance(tensor, nn.Parameter):
            state = optimizer.state[tensor]
            yield f"{name}: exp_avg", state["exp_avg"], expected * 2
            yield f"{name}: exp_avg_sq", state["exp_avg_sq"], expected * expected


def pieces(tensor: torch.Tensor, expected: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return this rank's piece of a tensor, and of its expected values."""
    if not isinstance(tensor, DTensor):
        return tensor.detach(), expected
    mine = distribute_tensor(expected, tensor.device_mesh, tensor.placements, src_data_rank=None)
    return tensor.detach().to_local(), mine.to_local()


def advance(net: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Write the step's values in place, as an update does."""
    for _, tensor, expected in held(net, optimizer, step):
        piece, values = pieces(tensor, expected)
        piece.copy_(values)


def wrongs(net: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> list[str]:
    """Return the names of tensors with wrong bits on this rank at the end of a step."""
    both = ((name, pieces(tensor, expected)) for name, tensor, expected in held(net, optimizer, step))
    return [name for name, (piece, values) in both if not torch.equal(piece.cpu(), values.cpu())]


def options_of(order: dict[str, Any]) -> dict[str, Any]:
    """Return the Checkpointer's options from the order."""
    options = dict(order["options"])
    if "compact" in options:
        options["compact"] = relight.Compact(**options["compact"])
    if "peers" in options:
        options["peers"] = relight.Peers(**options["peers"])
    return options


def where(order: dict[str, Any]) -> Any:
    """Return a path or tiers."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    urls = (
        order["urls"]
        if order["options"].get("writer") != "rank 0" or not rank
        else [f"nowhere://{url}" for url in order["urls"]]
    )
    return urls[0] if len(urls) == 1 else relight.Tiers(hot=urls[0], cold=urls[1])


def save(
    order: dict[str, Any],
    net: nn.Module,
    optimizer: torch.optim.Optimizer,
    ckpt: relight.Checkpointer,
    tracker: Curve | None,
) -> None:
    """Save repeatedly until killed. Report which steps are durable, and which are drained."""
    start = ckpt.restore()
    waiting: dict[int, Save] = {}
    far: dict[int, Save] = {}
    for step in range(start, start + SAVES):
        ckpt.barrier()
        advance(net, optimizer, step)
        if tracker is not None:
            tracker.log(step, loss=step / 8)
        waiting[step] = far[step] = ckpt.save(step, block=False)
        time.sleep(order["pause_s"])
        for what, handles in (("done", waiting), ("drained", far)):
            for number, handle in list(handles.items()):
                if handle.error is not None:
                    raise handle.error
                if getattr(handle, what):
                    del handles[number]
                    print_json(**{what: number})


def restore(
    order: dict[str, Any],
    net: nn.Module,
    optimizer: torch.optim.Optimizer,
    ckpt: relight.Checkpointer,
    tracker: Curve | None,
) -> None:
    """Report the restored step, its source and its wrong tensors; then save once more."""
    source: dict[str, Any] = {}
    relight.observe.subscribe(
        lambda event: source.update(source=event.fields["source"]) if event.name == "restore.done" else None
    )
    start = ckpt.restore()
    wrong = wrongs(net, optimizer, start - 1) if start else []
    advance(net, optimizer, start)
    if tracker is not None:
        tracker.log(start, loss=start / 8)
    ckpt.save(start)
    ckpt.close(save=False)
    if tracker is not None:
        tracker.close()
    print_json(start=start, wrong=wrong, own=ckpt["own"]["rank"], **source)


def follow(url: str) -> None:
    """Report each checkpoint that a follower takes, and its wrong tensors, until killed."""
    net = layouts.spread("plain", zero=True)
    with relight.follow(url, net) as follower:
        while True:
            switched = follower.wait()
            assert switched is not None
            wrong = [
                name
                for name, tensor in layouts.named(net).items()
                if not torch.equal(tensor.detach(), value(name, tuple(tensor.shape), switched.step))
            ]
            print_json(followed=switched.step, wrong=wrong)


def device_of(order: dict[str, Any], rank: int) -> str:
    """Return the rank's device: the processor, or the simulated accelerator, which is registered."""
    if order["device"] == "host":
        return "cpu"
    from tests.device import sim_ranks, simulated

    simulated.load().adversary(rank, "mixed")
    dist.Backend.register_backend("host", sim_ranks.HostGroup, devices=[simulated.NAME])
    return simulated.NAME


def main() -> None:
    """Run what the order specifies."""
    rank, world, port = map(int, sys.argv[1:4])
    order = json.loads(sys.argv[4])
    torch.set_num_threads(1)
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
    if order["verb"] == "follow":
        follow(order["urls"][0])
    if order["nodes"]:
        os.environ["RELIGHT_NODE"] = f"node{rank}"
    device = device_of(order, rank)
    if world > 1:
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        dist.init_process_group("gloo" if device == "cpu" else "cpu:gloo,sim:host", rank=rank, world_size=world)
    net = layouts.spread(order["layout"], zero=order["verb"] == "restore", device=device)
    optimizer = layouts.optimizer_of(net, zero=False)
    tracker = Curve(order["curve"]) if order["curve"] else None
    parts = {"model": net, "optimizer": optimizer, "own": {"rank": rank}} | ({"tracker": tracker} if tracker else {})
    ckpt = relight.Checkpointer(
        where(order), **parts, per_rank=["own"], signals=False,
        limits=relight.Limits(deadline_s=60), on_failure="raise", **options_of(order),
    )  # fmt: skip
    {"save": save, "restore": restore}[order["verb"]](order, net, optimizer, ckpt, tracker)
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
