"""Writes a snapshot with torchsnapshot itself, into the folder that is its argument."""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path

import torch

warnings.simplefilter("ignore")


def main(out: Path) -> None:
    """Save a module, its optimizer after three steps, and a value of every kind that the format has entries for."""
    import torchsnapshot

    torch.manual_seed(13)
    model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.BatchNorm1d(6), torch.nn.Linear(6, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(5, 4)).square().mean().backward()
        optimizer.step()
    progress = torchsnapshot.StateDict(
        step=3, note="kept", rate=0.25, flag=True, raw=b"abc", table={"a": [1, torch.ones(2)]}
    )
    torchsnapshot.Snapshot.take(str(out / "snapshot"), {"model": model, "optim": optimizer, "progress": progress})
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, out / "expected.pt")
    versions = {"torchsnapshot": torchsnapshot.__version__, "torch": torch.__version__, "seed": 13}
    (out / "versions.json").write_text(json.dumps(versions) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
