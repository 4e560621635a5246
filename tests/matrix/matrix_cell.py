"""A rank's program for one cell of the matrix: it saves in one way until it is killed, or restores in another and saves once more.

``python matrix_cell.py RANK WORLD PORT ORDER``: the order is a JSON object. What tensors hold follows from their names and the step's number,
so that any rank of any layout can tell whether what it restored is right, to the bit. Some of it never changes: saves have it in common.
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
"""Nobody lets it come so far."""


def say(**told: Any) -> None:
    """A line, in one piece."""
    os.write(1, f"{json.dumps(told)}\n".encode())


def value(name: str, shape: tuple[int, ...], step: int) -> torch.Tensor:
    """What the tensor of that name holds at the end of that step. The embedding, and the first block, are frozen; others change a little, so
    that there is something to gain by differences."""
    base = layouts.value_of(name, shape)
    if name.startswith(("embed", "blocks.0")) or not base.is_floating_point():
        return base
    generator = torch.Generator().manual_seed(zlib.crc32(f"{name}@{step}".encode()))
    return base + 1e-3 * torch.randn(shape, generator=generator)


def held(net: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Each tensor of model and optimizer, by name, and what it holds at the end of that step."""
    for name, tensor in layouts.named(net).items():
        expected = value(name, tuple(tensor.shape), step)
        yield name, tensor, expected
        if isinstance(tensor, nn.Parameter):
            state = optimizer.state[tensor]
            yield f"{name}: exp_avg", state["exp_avg"], expected * 2
            yield f"{name}: exp_avg_sq", state["exp_avg_sq"], expected * expected


@torch.no_grad()
def advance(net: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """In place, as an update does."""
    for _, tensor, expected in held(net, optimizer, step):
        if isinstance(tensor, DTensor):
            tensor.to_local().copy_(distribute_tensor(expected, tensor.device_mesh, tensor.placements).to_local())
        else:
            tensor.copy_(expected)


def wrongs(net: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> list[str]:
    """What is not as it was at the end of that step, to the bit. Collective."""
    return [name for name, tensor, expected in held(net, optimizer, step) if not torch.equal(layouts.full(tensor), expected)]


def options_of(order: dict[str, Any]) -> dict[str, Any]:
    """What the Checkpointer is given besides components."""
    options = dict(order["options"])
    if "compact" in options:
        options["compact"] = relight.Compact(**options["compact"])
    if "peers" in options:
        options["peers"] = relight.Peers(**options["peers"])
    return options


def where(order: dict[str, Any]) -> Any:
    """A path, or tiers."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    urls = order["urls"] if order["options"].get("writer") != "rank 0" or not rank else [f"nowhere://{url}" for url in order["urls"]]
    return urls[0] if len(urls) == 1 else relight.Tiers(hot=urls[0], cold=urls[1])


def save(order: dict[str, Any], net: nn.Module, optimizer: torch.optim.Optimizer, ckpt: relight.Checkpointer) -> None:
    """Save after save, until killed; tells which steps are safe, and where."""
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
                    say(**{what: number})


def restore(order: dict[str, Any], net: nn.Module, optimizer: torch.optim.Optimizer, ckpt: relight.Checkpointer) -> None:
    """What is restored, from where, what of it is wrong; and one more save."""
    found: dict[str, Any] = {}
    relight.observe.subscribe(lambda event: found.update(source=event.fields["source"]) if event.name == "restore.done" else None)
    start = ckpt.restore()
    wrong = wrongs(net, optimizer, start - 1) if start else []
    advance(net, optimizer, start)
    ckpt.save(start)
    ckpt.close(save=False)
    say(start=start, wrong=wrong, own=ckpt["own"]["rank"], **found)


def main() -> None:
    """As the order says."""
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
