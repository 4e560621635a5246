"""Two replica groups under torchft: the second dies by SIGKILL, comes back, and gets its state from the first by way of a store.

``python examples/torchft_groups.py STORE [STEP]``: at STEP it kills itself, once. Both end with the same weights, killed or not.
"""

import multiprocessing
import os
import signal
import sys

import torch
from torch import nn
from torch.distributed import TCPStore

from relight.integrations.torchft import Transport  # relight:

STEPS = 30


def group(number, lighthouse, path, kill):
    """One replica group of one process."""
    from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

    torch.manual_seed(number)  # the second begins with other weights, and gets the first's
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    def state():
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    def load(found):
        model.load_state_dict(found["model"])
        optimizer.load_state_dict(found["optimizer"])

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(), load_state_dict=load, state_dict=state, min_replica_size=2, replica_id=f"group_{number}", rank=0,
        world_size=1, lighthouse_addr=lighthouse, store_addr="127.0.0.1", store_port=store.port,
        checkpoint_transport=Transport(path),  # relight:
    )  # fmt: skip
    parallel, managed = DistributedDataParallel(manager, model), Optimizer(manager, optimizer)
    while manager.current_step() < STEPS:
        managed.zero_grad()
        x = torch.randn(16, 8, generator=torch.Generator().manual_seed(manager.current_step() * 2 + number))
        loss = (parallel(x) - x.sum(1, keepdim=True)).square().mean()
        loss.backward()
        managed.step()
        print(
            f"group {number} of {manager.num_participants()}: step {manager.current_step():>3}  loss {loss.item():.6f}",
            flush=True,
        )
        if number == 1 and manager.current_step() == kill:
            os.kill(os.getpid(), signal.SIGKILL)
    print(f"group {number} ends with {model.weight.double().sum().item()!r}", flush=True)
    manager.shutdown(wait=False)


if __name__ == "__main__":
    from torchft.coordination import LighthouseServer

    path = os.path.abspath(sys.argv[1] if len(sys.argv) > 1 else "runs/torchft")
    kill = int(sys.argv[2]) if len(sys.argv) > 2 else 0
    lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=2, join_timeout_ms=1000)
    start = multiprocessing.get_context("spawn").Process
    first, second = (start(target=group, args=(number, lighthouse.address(), path, kill)) for number in (0, 1))
    first.start()
    second.start()
    second.join()
    if second.exitcode == -signal.SIGKILL:
        print("group 1 is killed, and comes back", flush=True)
        second = start(target=group, args=(1, lighthouse.address(), path, 0))
        second.start()
        second.join()
    first.join()
    lighthouse.shutdown()
