"""The devices on which the example trains: the processor, or the simulated accelerator of Relight's tests."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parents[2]


def join_ranks(kind: str, seed: int) -> torch.device:
    """Join the process group of the device's kind, ``cpu`` or ``sim``, and return this rank's device.

    ``seed``: of the order in which the simulated accelerator runs what is queued on its streams.
    """
    if kind == "cpu":
        dist.init_process_group("gloo")
        return torch.device("cpu")
    sys.path.append(str(ROOT))
    from tests.device import sim_ranks, simulated

    accelerator = simulated.load()
    dist.Backend.register_backend("host", sim_ranks.HostGroup, devices=[simulated.NAME])
    dist.init_process_group("cpu:gloo,sim:host")
    device = torch.device(simulated.NAME, int(os.environ["LOCAL_RANK"]))
    accelerator.set_device(device.index)
    accelerator.adversary(seed + dist.get_rank(), "mixed")
    return device
