"""Start the ranks of a job, and read what they print."""

from __future__ import annotations

import functools
import json
import os
import signal
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from proofs.warm import Warm
from relight.comm.ports import free_port

HERE = Path(__file__).parent


IMPORTED = (
    "torch.distributed.checkpoint.state_dict", "torch.distributed.fsdp", "torch.distributed.optim", "torch.distributed.tensor.parallel",
    "relight.checkpointer", "relight.integrations.dcp",
)  # fmt: skip
"""What ranks' programs begin with."""


@functools.cache
def warm() -> Warm:
    """The process that forks ranks, for this process. It ends with this one."""
    return Warm(IMPORTED, {**os.environ, "OMP_NUM_THREADS": "1"})


class Job:
    """``world`` processes of a script in this folder, which are given rank, world, port and ``arguments``."""

    def __init__(self, script: str, world: int, arguments: Sequence[str], **environment: str) -> None:
        port = free_port()
        self._outputs = [tempfile.TemporaryFile("w+") for _ in range(world)]
        given = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
        self.ranks = [
            warm().start(
                [str(HERE / script), str(rank), str(world), str(port), *arguments],
                output.fileno(),
                output.fileno(),
                given,
            )
            for rank, output in enumerate(self._outputs)
        ]

    def wait(self, seconds: float) -> list[int]:
        """Exit codes, by rank. What has not ended by then is killed."""
        try:
            return [rank.wait(seconds) for rank in self.ranks]
        finally:
            for rank in self.ranks:
                if rank.poll() is None:
                    rank.send_signal(signal.SIGKILL)
                    rank.wait()

    def output(self, rank: int) -> str:
        """All that a rank has printed."""
        self._outputs[rank].flush()
        self._outputs[rank].seek(0)
        return self._outputs[rank].read()

    def reports(self, rank: int) -> list[dict[str, Any]]:
        """Return the JSON objects that a rank printed, each at the begin of a line.

        An event may follow on the same line: another thread can print it before the object's line break.
        """
        decoder = json.JSONDecoder()
        return [decoder.raw_decode(line)[0] for line in self.output(rank).splitlines() if line.startswith("{")]

    def close(self) -> None:
        for output in self._outputs:
            output.close()


def run(
    script: str, world: int, arguments: Sequence[str], seconds: float = 300.0, **environment: str
) -> list[list[dict[str, Any]]]:
    """Return what each rank reported. Raise ``AssertionError`` with the output of every rank if one did not end
    well."""
    job = Job(script, world, arguments, **environment)
    try:
        codes = job.wait(seconds)
        assert codes == [0] * world, "\n".join(
            f"rank {rank}: {code}\n{job.output(rank)}" for rank, code in enumerate(codes)
        )
        return [job.reports(rank) for rank in range(world)]
    finally:
        job.close()
