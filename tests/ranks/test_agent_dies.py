"""An agent dies when one rank has given it its part of a save, and another has not yet."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from relight.comm.ports import free_port

SCRIPT = """
import json, os, signal, sys, time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

import relight
from relight.agent.launch import address_of
from relight.comm.local_sockets import LocalDirectory, peer_of
from relight.checkpointer.background import Background

folder, rank = Path(sys.argv[1]), int(os.environ["RANK"])
dist.init_process_group("gloo", timeout=timedelta(seconds=100))
begun, save = folder / "begun", Background.save


def agent():
    with LocalDirectory() as directory, directory.connect(address_of(str(folder / "store"), "run"), 5.0) as found:
        return peer_of(found)[0]


def after_the_other(self, *arguments):
    while not begun.exists():
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    Background.save = save
    return None  # as if it had been reached in the moment of its death: this rank makes its part itself


model = torch.nn.Linear(8, 8)
ckpt = relight.Checkpointer(folder / "store" / "run", model=model, save=relight.every(steps=1), background=True, limits=relight.Limits(deadline_s=40))
ckpt.restore()
ckpt.step(0).wait(60)
pid = agent()
dist.barrier()
if rank:
    Background.save = after_the_other
else:
    os.kill(pid, signal.SIGSTOP)  # it is given its part, and does nothing with it
before = time.monotonic()
ckpt.step(1)
if not rank:
    begun.touch()
dist.barrier()
took = time.monotonic() - before
ckpt.save(2)
ckpt.close()
(folder / f"took-{rank}").write_text(json.dumps(took))
"""


@pytest.mark.distributed
def test_no_rank_waits_for_a_part_that_died_with_the_agent(tmp_path: Path) -> None:
    """The rank that saves in the foreground learns at once that this checkpoint will not exist.

    The other rank could report it only at its next step, which already waits. Training continues, and so do saves.
    """
    (tmp_path / "script.py").write_text(SCRIPT)
    port = str(free_port())
    environment = {
        **os.environ,
        "RELIGHT_BACKGROUND": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "WORLD_SIZE": "2",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, str(tmp_path / "script.py"), str(tmp_path)]
    ranks = [
        subprocess.Popen(
            command, env={**environment, "RANK": str(rank)}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for rank in range(2)
    ]
    outputs = [rank.communicate(timeout=200)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], outputs
    assert max(json.loads((tmp_path / f"took-{rank}").read_text()) for rank in range(2)) < 20, outputs
    steps = [
        json.loads(path.read_text())["body"] for path in sorted((tmp_path / "store" / "run" / "log").glob("*.json"))
    ]
    assert [record["body"]["step"] for record in steps if record["kind"] == "COMMIT"] == [0, 2], outputs
