"""``make hour``: an hour on a real clock in which nothing is wrong, and much looks like it; ``relight run`` must raise no alarm.

Two ranks have steps of half to one and a half times the usual length, saves in the background every few seconds, and
unannounced evaluations. For minutes at a time the disk is thirty times slower for the process that writes saves.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from relight.supervise.launch import SAVED

SLOWER = 30
SLOW_DISK = f"""
import os, sys, time
if "relight.agent.server" in " ".join(sys.orig_argv):
    def slowed(call):
        def made(*arguments, **named):
            began = time.perf_counter()
            try:
                return call(*arguments, **named)
            finally:
                if os.path.exists(os.environ["SOAK_SLOW"]):
                    time.sleep(min(5.0, {SLOWER - 1} * (time.perf_counter() - began)))
        return made
    for name in ("pwrite", "pwritev", "fsync", "fdatasync"):
        setattr(os, name, slowed(getattr(os, name)))
"""
JOB = """
import os, random, sys, time
import torch, torch.distributed as dist
from torch import nn
import relight
dist.init_process_group("gloo")
torch.set_num_threads(1)
rank, rng = int(os.environ["RANK"]), random.Random(int(os.environ["RANK"]))
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(1024, 2048), nn.Tanh(), nn.Linear(2048, 1024))
optimizer = torch.optim.SGD(model.parameters(), 1e-3, momentum=0.9)
with relight.Checkpointer(sys.argv[1], model=model, optimizer=optimizer, save=relight.every(steps=30)) as ckpt:
    for step in range(ckpt.restore(), 10**9):
        time.sleep(rng.uniform(0.05, 0.15))
        if step % 500 == 499:
            time.sleep(rng.uniform(0.5, 1.5))
        optimizer.zero_grad()
        loss = model(torch.randn(4, 1024)).square().mean()
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        ckpt.step(step, loss=loss)
"""


def main() -> int:
    """Exit code 1 if there was an alarm."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="soak-") as top:
        folder = Path(top)
        (folder / "sitecustomize.py").write_text(SLOW_DISK)
        (folder / "job.py").write_text(JOB)
        slow, events = folder / "slow", folder / "events"
        path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH", "")]))
        with events.open("w") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "relight", "run", "--nproc-per-node", "2", str(folder / "job.py"), str(folder / "store" / "run")],
                cwd=folder, env={**os.environ, "PYTHONPATH": path, "SOAK_SLOW": str(slow)}, stdout=output, stderr=subprocess.STDOUT,
            )  # fmt: skip
            began, turn = time.monotonic(), options.minutes * 60 / 12
            while (spent := time.monotonic() - began) < options.minutes * 60 and process.poll() is None:
                if int(spent / turn) % 2:
                    slow.touch()
                else:
                    slow.unlink(missing_ok=True)
                time.sleep(1)
                if int(spent) % 60 == 0:
                    print(f"{spent / 60:.0f} min, {'slow' if slow.exists() else 'usual'} disk", flush=True)
            slow.unlink(missing_ok=True)
            process.send_signal(signal.SIGTERM)
            code = process.wait(120)
        lines = [line for line in events.read_text().splitlines() if "relight:" in line]
        alarms = [
            line
            for line in lines
            if re.search(r"→|no progress|is stopped|done nothing|life [2-9]", line) and "ended as it was" not in line
        ]
        alarms = [line for line in alarms if "SIGTERM" not in line and "→ end" not in line]
        saved = [
            json.loads(path.read_text())["spent"]
            for path in (folder / "store" / "run" / "incidents").glob("*.account.json")
        ]
        print(f"{options.minutes:g} minutes, exit code {code}, {len(alarms)} alarms; where the time went: {saved}")
        print("\n".join(alarms or lines[-3:]))
        return 1 if alarms or code != SAVED else 0


if __name__ == "__main__":
    sys.exit(main())
