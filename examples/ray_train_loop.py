"""Ray Train with Relight: a worker dies in the midst, Ray starts all again, and the losses are those of a run in which none did.

``python examples/ray_train_loop.py RUN [STEP]``: at STEP the first worker kills itself with SIGKILL, once.
"""

import os
import signal
import sys
from pathlib import Path

import ray
import torch
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

import relight
from relight.integrations.ray_train import report, where  # relight:


def work(config):
    """Train on one worker."""
    torch.manual_seed(0)
    rank = torch.distributed.get_rank()
    model = torch.nn.parallel.DistributedDataParallel(
        torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    # relight:
    with relight.Checkpointer(config["run"], model=model, optimizer=optimizer, save=relight.every(steps=4)) as ckpt:
        for step in range(ckpt.restore(), 24):  # relight:
            x = torch.randn(16, 8, generator=torch.Generator().manual_seed(step * 2 + rank))
            loss = (model(x) - x.sin().sum(1, keepdim=True)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if rank == 0:
                with open(config["out"], "a") as out:
                    out.write(f"step {step + 1:>4}  loss {loss.item():.9f}\n")
            if rank == 0 and step + 1 == config["kill"] and not os.path.exists(config["out"] + ".killed"):
                Path(config["out"] + ".killed").touch()
                os.kill(os.getpid(), signal.SIGKILL)
            # relight: in place of ray.train.report(…, checkpoint=…)
            report(ckpt, ckpt.step(step, loss=loss), {"loss": loss.item()})


run = os.path.abspath(sys.argv[1] if len(sys.argv) > 1 else "runs/ray")
os.makedirs(run + ".ray", exist_ok=True)
ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
trainer = TorchTrainer(
    work,
    train_loop_config={"run": run, "out": run + ".ray/losses", "kill": int(sys.argv[2]) if len(sys.argv) > 2 else 0},
    torch_config=TorchConfig(backend="gloo"),
    scaling_config=ScalingConfig(num_workers=2, resources_per_worker={"CPU": 0.5}),
    run_config=RunConfig(storage_path=run + ".ray", name="example", failure_config=FailureConfig(max_failures=2)),
)
result = trainer.fit()
print(Path(run + ".ray/losses").read_text(), end="")
print("newest:", where(result.checkpoint)[1], "with", ", ".join(relight.load(*where(result.checkpoint))))
