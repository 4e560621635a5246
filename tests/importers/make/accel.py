"""Writes a folder with Accelerate's own ``save_state``, into the folder that is its argument."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import accelerate
import torch


def main(out: Path) -> None:
    """Train three steps of two layers with AdamW and named parameters, and save."""
    accelerate.utils.set_seed(3)
    accelerator = accelerate.Accelerator(cpu=True)
    model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Linear(6, 2))
    optimizer = torch.optim.AdamW(model.named_parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    loader = torch.utils.data.DataLoader(torch.randn(12, 4), batch_size=4, shuffle=True)
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    for batch in loader:
        accelerator.backward(model(batch).square().mean())
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    accelerator.step = 3
    accelerator.save_state(str(out / "state"))
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, out / "expected.pt")
    versions = {"accelerate": accelerate.__version__, "torch": torch.__version__, "seed": 3}
    (out / "versions.json").write_text(json.dumps(versions) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
