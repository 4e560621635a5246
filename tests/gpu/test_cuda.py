"""What only CUDA has: graphs, NCCL, a failed assertion on the device, a limit of the process's memory. ``make gpu``."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import nn

import relight

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA here")]
QUEUE = relight.Limits(when_busy="queue")


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bytes in host memory, in row-major order."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).cpu()


def test_replays_of_a_graph_wait_for_the_copies(tmp_path: Path) -> None:
    """A CUDA graph contains the optimizer's step, which calls no hook: ``barrier()`` before each replay queues it after the copies."""
    model = nn.Sequential(
        nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 4096), nn.GELU(), nn.Linear(4096, 1024)
    ).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, capturable=True)
    batch = torch.randn(32, 1024, device="cuda")

    def one() -> None:
        optimizer.zero_grad(set_to_none=True)
        model(batch).square().mean().backward()
        optimizer.step()

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            one()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    optimizer.zero_grad(set_to_none=True)
    with torch.cuda.graph(graph):
        one()
    with relight.Checkpointer(tmp_path / "r", save=None, model=model, optimizer=optimizer, limits=QUEUE) as ckpt:
        ckpt.restore()
        snapshots = {}
        for step in range(8):
            ckpt.barrier()
            graph.replay()
            kept = {name: tensor.clone() for name, tensor in model.state_dict().items()}
            save = ckpt.save(step, block=False)
            ckpt.barrier()
            graph.replay()  # writes to the weights at once, after the copies
            save.wait(60)
            snapshots[step] = {name: bits(tensor) for name, tensor in kept.items()}
    for step in (0, 7):
        stored = relight.load(tmp_path / "r", step)["model"]
        for name, expected in snapshots[step].items():
            assert torch.equal(bits(stored[name]), expected), (step, name)


def test_a_full_device_does_not_stop_saves(tmp_path: Path) -> None:
    """Without device memory for packs, every tensor is transferred separately."""
    parameters = nn.ParameterList([nn.Parameter(torch.randn(50_000, device="cuda")) for _ in range(300)])
    torch.cuda.empty_cache()
    properties = torch.cuda.get_device_properties(0)
    torch.cuda.set_per_process_memory_fraction(torch.cuda.memory_reserved() / properties.total_memory)
    fillers = []
    try:
        for size in (64 << 20, 8 << 20, 1 << 20, 1 << 18):
            with contextlib.suppress(torch.OutOfMemoryError):
                while True:
                    fillers.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
        with relight.Checkpointer(tmp_path / "r", save=None, model=parameters, limits=QUEUE) as ckpt:
            ckpt.restore()
            assert ckpt.save(0).error is None
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    stored = relight.load(tmp_path / "r")["model"]
    assert all(torch.equal(stored[name], tensor.cpu()) for name, tensor in parameters.state_dict().items())


SCRIPT = """
import sys, torch, relight
model = torch.nn.Linear(2048, 2048).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
with relight.Checkpointer(sys.argv[1], model=model, optimizer=optimizer, save=relight.every(steps=1)) as ckpt:
    for step in range(ckpt.restore(), 20):
        if step == 9:
            ckpt.save(8)
        loss = model(torch.randn(8, 2048, device="cuda")).square().mean()
        optimizer.zero_grad(); loss.backward(); optimizer.step()
        if step == 10:
            torch.cuda.synchronize()
            torch.zeros(4, device="cuda")[torch.tensor([9], device="cuda")] # a device-side assertion
        ckpt.step(step)
"""


def test_a_device_that_fails_ends_the_process_and_loses_nothing(tmp_path: Path) -> None:
    """A failed assertion in a kernel makes every later call fail. The process ends soon, and earlier checkpoints are complete."""
    began = time.monotonic()
    ended = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path / "r")],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "RELIGHT_BACKGROUND": "1"},
    )
    print(f"ended with {ended.returncode} after {time.monotonic() - began:.1f} s\n{ended.stderr[-3000:]}")
    assert ended.returncode == 1 and "device-side assert" in ended.stderr
    assert time.monotonic() - began < 60
    assert bool(torch.isfinite(relight.load(tmp_path / "r", 8)["model"]["weight"]).all())


@pytest.mark.parametrize("way", ["ddp", "fsdp2"])
def test_ranks_on_nccl(tmp_path: Path, way: str) -> None:
    """A job of one rank, with NCCL as its only back end: shards and replicas on the device, restored to the bit."""
    script = f"""
import sys, torch, relight, torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
dist.init_process_group("nccl")
torch.cuda.set_device(0)
def make(seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256)).cuda()
    if {way!r} == "fsdp2":
        for layer in model: fully_shard(layer)
        fully_shard(model)
    else:
        model = nn.parallel.DistributedDataParallel(model, device_ids=[0])
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)
def run(model, optimizer, steps, ckpt=None):
    for step in steps:
        torch.manual_seed(step)
        loss = model(torch.randn(16, 256, device="cuda")).square().mean()
        optimizer.zero_grad(); loss.backward(); optimizer.step()
        if ckpt: ckpt.step(step)
    return [p.detach() for p in model.parameters()]
local = lambda t: t.to_local() if hasattr(t, "to_local") else t
expected = run(*make(0), range(10))
for seed, end in ((0, 6), (5, 10)):
    model, optimizer = make(seed)
    with relight.Checkpointer(sys.argv[1], model=model, optimizer=optimizer, save=relight.every(steps=2)) as ckpt:
        found = run(model, optimizer, range(ckpt.restore(), end), ckpt)
assert all(torch.equal(local(a), local(b)) for a, b in zip(found, expected, strict=True))
dist.destroy_process_group()
print("equal")
"""
    path = tmp_path / "job.py"
    path.write_text(script)
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "1",
        str(path),
        str(tmp_path / "r"),
    ]
    ended = subprocess.run(
        command, capture_output=True, text=True, timeout=150, env={**os.environ, "RELIGHT_BACKGROUND": "1"}
    )
    assert ended.returncode == 0 and "equal" in ended.stdout, ended.stderr[-4000:]
