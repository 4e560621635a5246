"""A GPT on real text under FSDP2, and tensor parallelism if asked for: the production example's whole trainer.

When and how it saves stands in relight.toml.

``relight run --nproc-per-node 4 train.py --hot DIRECTORY/RUN --cold s3://BUCKET/RUN --steps 400 --losses FILE``

``--plant``, ``--without``, ``--until`` and ``--device`` are run.py's.
"""

import argparse
import json
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from accelerator import join_ranks
from curve import Curve
from mischief import Mischief
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import relight
from relight.demo.gpt import GPT
from relight.demo.text import read_text

CONTEXT, BATCH = 64, 8

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--hot", required=True, help="the run on a near disk")
parser.add_argument("--cold", required=True, help="the run in an object store")
parser.add_argument("--steps", type=int, default=400)
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--tp", type=int, default=1, help="so many ranks share each feed-forward layer")
parser.add_argument("--losses", required=True, help="a file that gets a line a step")
parser.add_argument("--curve", help="a file that a tracker writes")
parser.add_argument("--device", default="cpu", help="cpu, or sim: Relight's simulated accelerator")
parser.add_argument("--without", type=int, default=-1, help="a step that is left out from the beginning")
parser.add_argument("--until", type=int, help="the step before which this start ends")
parser.add_argument("--plant", default="", help="a directory of trouble")
options = parser.parse_args()

torch.set_num_threads(1)
device = join_ranks(options.device, options.seed)
rank, ranks = dist.get_rank(), dist.get_world_size()
mesh = init_device_mesh(device.type, (ranks // options.tp, options.tp), mesh_dim_names=("dp", "tp"))
share, shares = (
    mesh["dp"].get_local_rank(),
    mesh["dp"].size(),
)  # share of each batch; ranks that share layers have the same one
mischief = Mischief(options.plant, rank)

torch.manual_seed(options.seed)
model = GPT(context=CONTEXT, width=64, layers=4, heads=4).to(device)
for block in model.blocks:
    if options.tp > 1:
        parallelize_module(block, mesh["tp"], {"forward_in": ColwiseParallel(), "forward_out": RowwiseParallel()})
    fully_shard(block, mesh=mesh["dp"])
fully_shard(model, mesh=mesh["dp"])
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.steps)
torch.manual_seed(options.seed + 1 + share)  # dropout differs from share to share; Relight keeps each rank's generator

text = torch.frombuffer(bytearray(read_text(1_000_000)), dtype=torch.uint8).long()


def batch_of(step: int) -> torch.Tensor:
    """Return this rank's share of the step's samples, which do not depend on the number of ranks."""
    starts = torch.randint(
        len(text) - CONTEXT - 1, (BATCH,), generator=torch.Generator().manual_seed(options.seed * 1_000_003 + step)
    )
    return torch.stack([text[start : start + CONTEXT + 1] for start in starts[share::shares].tolist()]).to(device)


tiers = relight.Tiers(  # relight: near and far, each with what it keeps
    hot=relight.tier(options.hot, keep=relight.keep(last=3)),
    cold=relight.tier(options.cold, keep=relight.keep(last=5, every=100)),
)
tracker = Curve(options.curve) if options.curve else None  # relight: continues its curve after a resume
parts = {"model": model, "optimizer": optimizer, "scheduler": schedule} | ({"tracker": tracker} if tracker else {})
with relight.Checkpointer(tiers, **parts) as ckpt:  # relight:
    for step in range(ckpt.restore(), options.until or options.steps):  # relight:
        if mischief.over(step):
            break
        if ckpt.should_skip(step) or step == options.without:  # relight: a batch that broke the run before
            continue
        samples = batch_of(step)
        loss = F.cross_entropy(model(samples[:, :-1]).flatten(0, 1), samples[:, 1:].flatten())
        loss = mischief.during(step, loss)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        if rank == 0:
            row = {
                "step": step,
                "loss": mean.item() / ranks,
                "ranks": ranks,
                "device": str(loss.device),
                "at": time.time(),
            }
            with open(options.losses, "a") as log:
                log.write(json.dumps(row) + "\n")
        if tracker:
            tracker.log(step, loss=mean.item() / ranks)  # relight:
        ckpt.step(step, loss=loss)  # relight:
if tracker:
    tracker.close()  # relight:
dist.destroy_process_group()
