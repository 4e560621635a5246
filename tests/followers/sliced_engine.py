"""One of the ranks of an engine that follow together: ``python sliced_engine.py RANK WORLD PORT RUN LAST``. Prints each step."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from small_decoder import HEADS, PADDED, Decoder, engine, expected, fill

import relight
from relight.integrations.engines import engine_views


def main() -> None:
    """Follow until the last step. Compare the slices with the whole model after each switch."""
    rank, world, port, run, last = sys.argv[1:]
    tp_rank, tp_size = int(rank), int(world)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=tp_rank, world_size=tp_size)
    live, whole = engine(tp_size, torch.bfloat16), Decoder()
    views = engine_views(live, heads=HEADS, padded=PADDED, tp_rank=tp_rank, tp_size=tp_size)
    with relight.follow(run, views, every=0.05) as follower:
        while follower.checkpoint is None or follower.checkpoint.step < int(last):
            switched = follower.wait(60)
            assert switched is not None
            fill(whole, switched.step)
            for name, tensor in expected(whole, tp_rank, tp_size).items():
                assert torch.equal(live[name], tensor.bfloat16()), (switched.step, name)
            print(switched.step, switched.bytes, flush=True)
    dist.destroy_process_group()


main()
