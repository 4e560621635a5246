"""A training with a loader of a library: ``loader_job.py NAME WORKERS FOLDER RUN``. It prints loss and batch of each step; tests kill it."""

import sys
import zlib
from pathlib import Path

import torch
from tests.works_with.loader_kinds import KINDS, WIDTH

import relight

STEPS = 170

if __name__ == "__main__":
    name, workers, folder, run = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4]
    torch.set_num_threads(1)
    torch.manual_seed(0)
    loading = KINDS[name].make(folder, workers)
    model = torch.nn.Sequential(torch.nn.Linear(WIDTH, 32), torch.nn.GELU(), torch.nn.Linear(32, WIDTH))
    optimizer = torch.optim.AdamW(model.parameters())
    passes = {"epoch": 0}
    with relight.Checkpointer(
        run, model=model, optimizer=optimizer, loader=loading.loader, passes=passes, save=relight.every(steps=10)
    ) as ckpt:
        step = ckpt.restore()
        while step < STEPS:
            if loading.set_epoch is not None:
                loading.set_epoch(passes["epoch"])
            for batch in loading.loader:
                x = batch["x"] if isinstance(batch, dict) else batch
                loss = (model(x) - x.sin()).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                checksum = zlib.crc32(x.contiguous().numpy().tobytes())
                print(f"step {step + 1:>4}  loss {loss.item()!r} batch {checksum}", flush=True)
                ckpt.step(step)
                step += 1
                if step == STEPS:
                    break
            else:
                passes["epoch"] += 1
