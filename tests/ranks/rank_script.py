"""How a script of one rank begins: ``SCRIPT RANK WORLD PORT JSON``."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import torch
import torch.distributed as dist


def begin() -> tuple[int, dict[str, Any]]:
    """Join the other ranks by gloo, with one thread for torch. Return this rank, and the options."""
    rank, world, port = map(int, sys.argv[1:4])
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=world)
    return rank, json.loads(sys.argv[4])
