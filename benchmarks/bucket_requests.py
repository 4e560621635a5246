"""Requests that a save sends to a bucket, counted by the server.

``python -m benchmarks.bucket_requests``: jobs of 1, 2 and 4 ranks save in the background to an S3-compatible server (moto), with states
of 2 and 64 MiB that change completely. Each job runs twice, with four and with eight saves: the difference is the cost of four saves.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.store.servers import make_bucket, moto

JOB = """
import sys
import torch
import relight

saves, megabytes, last = (int(word) for word in sys.argv[1:])
if torch.distributed.is_torchelastic_launched():
    torch.distributed.init_process_group("gloo")
torch.manual_seed(0)
weight = torch.nn.Parameter(torch.empty(megabytes << 18))
model = torch.nn.ParameterDict({"weight": weight})
keep = relight.keep(last=last) if last else None
with relight.Checkpointer("s3://bucket/runs/demo", model=model, save=None, keep=keep, background=True) as ckpt:
    for step in range(ckpt.restore(), saves):
        with torch.no_grad():
            weight.normal_()
        ckpt.step(step)
        ckpt.save(step, block=False).wait(60)
"""
REQUEST = re.compile(r'"(GET|PUT|POST|DELETE|HEAD) (\S+) HTTP')
KINDS = ("PUT, POST", "LIST", "GET, HEAD", "DELETE")


def kind_of(method: str, address: str) -> str:
    """Return the kind by which S3 bills a request."""
    if method == "GET" and "list-type" in address:
        return "LIST"
    return next(kind for kind in KINDS if method in kind)


def requests(ranks: int, megabytes: int, saves: int, last: int) -> Counter[str]:
    """Count the requests of one job by kind."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "job.py").write_text(JOB)
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
        with moto(folder) as server:
            make_bucket(server, "bucket")
            subprocess.run(
                [sys.executable, *launcher, str(folder / "job.py"), str(saves), str(megabytes), str(last)],
                env={**os.environ, **server.environment, "RELIGHT_LOG": "warnings", "OMP_NUM_THREADS": "1"},
                check=True,
            )
        return Counter(kind_of(*request) for request in REQUEST.findall((folder / "moto.log").read_text()))


def main() -> None:
    """Print a row for each job."""
    print(f"{'ranks':>5} {'MiB':>4} {'keep':>8}  " + "  ".join(f"{kind:>9}" for kind in KINDS))
    for ranks, megabytes, last in [(1, 2, 0), (1, 2, 2), (1, 64, 0), (1, 64, 2), (2, 64, 0), (4, 64, 0)]:
        few, many = (requests(ranks, megabytes, saves, last) for saves in (4, 8))
        shown = "  ".join(f"{(many[kind] - few[kind]) / 4:>9.1f}" for kind in KINDS)
        print(f"{ranks:>5} {megabytes:>4} {f'last={last}' if last else 'all':>8}  {shown}", flush=True)


if __name__ == "__main__":
    main()
