"""A rank's program that saves and loads through torch.distributed.checkpoint, in any layout.

``python dcp_ranks.py RANK WORLD PORT PLAN``: the plan is a JSON list of ``[verb, layout, place, options]``.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from inspect import signature
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "ranks"))

import layouts
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import relight.integrations.dcp
from relight.integrations.dcp import StorageReader, StorageWriter


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def extra(step: int, zero: bool = False) -> dict[str, Any]:
    """Return nested values. The entry ``only<rank>`` exists on this rank alone."""
    if zero:
        values: dict[str, Any] = {
            "step": 0,
            "list": [torch.zeros(3), {"x": None, "t": torch.zeros(())}],
            "rank": {"a": 0},
            "names": None,
        }
    else:
        values = {
            "step": step,
            "list": [torch.arange(3.0), {"x": (1, 2.5), "t": torch.tensor(4.5)}],
            "rank": {"a": 1},
            "names": {"b", "c"},
        }
    values["empty"] = torch.empty(0, 3)
    mine = f"only{rank()}"
    values[mine] = {
        "values": [torch.full((2,), 0.0 if zero else rank() + 1.0), {"y": None if zero else mine}],
        "scalar": torch.tensor(0.0 if zero else 7.0),
    }
    return values


def made(layout: str, zero: bool) -> tuple[Any, Any]:
    net = layouts.spread(layout, zero)
    return net, layouts.optimizer_of(net, zero)


def save(
    layout: str, place: str, steps: list[int], how: str = "sync", caching: bool = False, native: bool = False
) -> dict[str, Any]:
    net, optimizer = made(layout, False)
    writer = None if native else StorageWriter(place, timeout_s=60)
    ids = []
    for step in steps:
        model, optim = get_state_dict(net, optimizer)
        state = {"model": model, "optim": optim, **extra(step)}
        caches = (
            caching and "enable_plan_caching" in signature(DefaultSavePlanner).parameters
        )  # torch 2.6 has no cache of plans
        planner = DefaultSavePlanner(enable_plan_caching=True) if caches else DefaultSavePlanner()
        if writer is not None:
            writer.step = step
        where = {"checkpoint_id": place} if native else {"storage_writer": writer}
        if how == "sync":
            dcp.save(state, planner=planner, **where)
        else:
            dcp.async_save(state, planner=planner, **where, **in_process() if how == "process" else {}).result()
        if writer is not None and writer.report is not None:
            ids.append(writer.report.id)
    return {"ids": ids}


def in_process() -> dict[str, Any]:
    """Return the option by which DCP saves from another process. torch 2.6 lacks it."""
    from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

    return {"async_checkpointer_type": AsyncCheckpointerType.PROCESS}


def comparable(value: Any) -> str:
    """Return a text to compare values by: tensors by their printed form, sets sorted. A set's own order depends on
    insertion where hashes collide."""
    return repr(sorted(value) if isinstance(value, set) else value)


def load(layout: str, place: str, which: Any = "latest", extras: bool = True) -> dict[str, Any]:
    net, optimizer = made(layout, True)
    model, optim = get_state_dict(net, optimizer)
    values = extra(0, zero=True) if extras else {}
    state = {"model": model, "optim": optim, **values}
    reader = StorageReader(place, which)
    try:
        dcp.load(state, storage_reader=reader)
    except CheckpointException as error:
        return {
            "error": {
                str(failed_rank): [type(failure[0]).__name__, str(failure[0])]
                for failed_rank, failure in error.failures.items()
            }
        }
    set_state_dict(net, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
    wrong = layouts.wrongs(net, optimizer)
    if extras:
        expected = extra(state["step"])
        wrong += [key for key, value in expected.items() if comparable(state[key]) != comparable(value)]
    return {"wrong": wrong, "id": reader.loaded, "step": state.get("step")}


def refused(layout: str, place: str) -> dict[str, Any]:
    """Save a value that one rank cannot save. No rank saves, and no rank waits."""
    state = {"w": torch.ones(3), "bad": object() if rank() == 1 else 1, f"own{rank()}": object() if rank() == 1 else 1}
    try:
        dcp.save(state, storage_writer=StorageWriter(place, step=9, timeout_s=60))
    except CheckpointException as error:
        return {
            "error": {
                str(failed_rank): [type(failure[0]).__name__, str(failure[0])]
                for failed_rank, failure in error.failures.items()
            }
        }
    return {}


def restore(layout: str, place: str) -> dict[str, Any]:
    """Restore what DCP's own writer left into live objects."""
    net, optimizer = made(layout, True)
    relight.integrations.dcp.restore(place, model=net, optim=optimizer)
    return {"wrong": layouts.wrongs(net, optimizer)}


def spoil(layout: str, place: str, step: int, of: int) -> dict[str, Any]:
    """Flip one bit in a pack that a rank wrote."""
    if rank() == 0:
        pack = next(Path(place).glob(f"{step:010d}-*/pack-{of:05d}-*"))
        data = bytearray(pack.read_bytes())
        data[-9] ^= 1
        pack.write_bytes(data)
    dist.barrier()
    return {}


VERBS = {"spoil": spoil, "save": save, "load": load, "refused": refused, "restore": restore}


def main() -> None:
    number, world, port = map(int, sys.argv[1:4])
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    if world > 1:
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(number), WORLD_SIZE=str(world))
        dist.init_process_group("gloo", rank=number, world_size=world)
    for verb, layout, place, options in json.loads(sys.argv[4]):
        print(json.dumps({"verb": verb, "layout": layout, **VERBS[verb](layout, place, **options)}), flush=True)
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
