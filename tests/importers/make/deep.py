"""Writes checkpoints of ZeRO stages 1, 2 and 3, and universal ones, with DeepSpeed itself on two CPU ranks."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

os.environ.setdefault("DS_ACCELERATOR", "cpu")
import torch

WORLD = 2


class Net(torch.nn.Module):
    """A module with sizes that no number of ranks divides, a buffer, and a parameter that is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(5, 7)
        self.norm = torch.nn.LayerNorm(7)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, 7))
        self.frozen = torch.nn.Linear(7, 7)
        self.last = torch.nn.Linear(7, 4)
        self.frozen.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the loss."""
        return self.last(self.frozen((self.norm(self.first(x)) * self.scale).to(x.dtype))).float().square().mean()


def groups(model: torch.nn.Module) -> list[dict[str, object]]:
    """Return two groups with different settings, not in the model's order."""
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    return [
        {"params": [parameter for name, parameter in named if parameter.ndim < 2], "weight_decay": 0.0},
        {"params": [parameter for name, parameter in named if parameter.ndim > 1], "weight_decay": 0.1},
    ]


def rank_main(rank: int, out: str, stage: int, port: int) -> None:
    """Train three steps, then save a checkpoint."""
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(WORLD),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    import deepspeed

    # DeepSpeed would compile this faster sum of one machine for minutes
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None
    torch.manual_seed(stage)
    deepspeed.init_distributed("gloo")
    model = Net()
    optimizer = torch.optim.AdamW(groups(model), lr=1e-2)
    engine, _, _, _ = deepspeed.initialize(
        model=model,
        optimizer=optimizer,
        lr_scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 2),
        config={
            "train_micro_batch_size_per_gpu": 4,
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 8},
            "bf16": {"enabled": True},
        },
    )
    for step in range(3):
        torch.manual_seed(step * WORLD + rank)
        engine.backward(engine(torch.randn(4, 5, dtype=torch.bfloat16)))
        engine.step()
    engine.save_checkpoint(out, tag="global_step3", client_state={"note": "kept", "step": 3})
    torch.distributed.barrier()


def universal(folder: Path, out: Path) -> None:
    """Convert its ranks' files to a universal checkpoint with DeepSpeed's own tool."""
    from deepspeed.checkpoint import ds_to_universal

    arguments = argparse.Namespace(
        input_folder=str(folder / "global_step3"),
        output_folder=str(out),
        num_extract_workers=1,
        num_merge_workers=1,
        keep_temp_folder=False,
        strict=True,
        inject_missing_state=True,
    )
    ds_to_universal.main(arguments)


def main(out: Path) -> None:
    """Write each stage into its own folder, and for stages with partitions the universal checkpoint as reference."""
    import deepspeed

    for stage in (1, 2, 3, 0):
        folder = out / f"stage{stage}"
        folder.mkdir(parents=True, exist_ok=True)
        torch.multiprocessing.spawn(rank_main, (str(folder), stage, 29500 + stage), nprocs=WORLD)
        for name in ("zero_to_fp32.py", "zero_to_torch.py"):
            (folder / name).unlink(missing_ok=True)
        if stage:
            universal(folder, out / f"universal{stage}")
    (out / "latest_universal").unlink(missing_ok=True)
    versions = {"deepspeed": deepspeed.__version__, "torch": torch.__version__, "seed": "the stage"}
    (out / "versions.json").write_text(json.dumps(versions) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
