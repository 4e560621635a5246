"""A rank's program for one cell of the matrix: it saves in one way until it is killed, or restores in another way and saves once more.

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

import layouts
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

import relight
from relight.checkpointer.save_handle import Save

SAVES = 20_000
"""Upper bound of the saves of one process. It is killed long before."""


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


@torch.no_grad()
def advance(net: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Write the step's values in place, as an update does."""
    for _, tensor, expected in held(net, optimizer, step):
        if isinstance(tensor, DTensor):
            tensor.to_local().copy_(distribute_tensor(expected, tensor.device_mesh, tensor.placements).to_local())
        else:
            tensor.copy_(expected)


def wrongs(net: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> list[str]:
    """Return the names of tensors with wrong bits at the end of a step. Collective."""
    return [
        name for name, tensor, expected in held(net, optimizer, step) if not torch.equal(layouts.full(tensor), expected)
    ]


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


def save(order: dict[str, Any], net: nn.Module, optimizer: torch.optim.Optimizer, ckpt: relight.Checkpointer) -> None:
    """Save repeatedly until killed. Report which steps are durable, and which are drained."""
    start = ckpt.restore()
    waiting: dict[int, Save] = {}
    far: dict[int, Save] = {}
    for step in range(start, start + SAVES):
        ckpt.barrier()
        advance(net, optimizer, step)
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
    order: dict[str, Any], net: nn.Module, optimizer: torch.optim.Optimizer, ckpt: relight.Checkpointer
) -> None:
    """Report the restored step, its source and its wrong tensors; then save once more."""
    source: dict[str, Any] = {}
    relight.observe.subscribe(
        lambda event: source.update(source=event.fields["source"]) if event.name == "restore.done" else None
    )
    start = ckpt.restore()
    wrong = wrongs(net, optimizer, start - 1) if start else []
    advance(net, optimizer, start)
    ckpt.save(start)
    ckpt.close(save=False)
    print_json(start=start, wrong=wrong, own=ckpt["own"]["rank"], **source)


def main() -> None:
    """Run what the order specifies."""
    rank, world, port = map(int, sys.argv[1:4])
    order = json.loads(sys.argv[4])
    torch.set_num_threads(1)
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
    if order["nodes"]:
        os.environ["RELIGHT_NODE"] = f"node{rank}"
    if world > 1:
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        dist.init_process_group("gloo", rank=rank, world_size=world)
    net = layouts.spread(order["layout"], zero=order["verb"] == "restore")
    optimizer = layouts.optimizer_of(net, zero=False)
    ckpt = relight.Checkpointer(
        where(order), model=net, optimizer=optimizer, own={"rank": rank}, per_rank=["own"], signals=False,
        limits=relight.Limits(deadline_s=60), on_failure="raise", **options_of(order),
    )  # fmt: skip
    {"save": save, "restore": restore}[order["verb"]](order, net, optimizer, ckpt)
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
