"""torchft: a replica group sends its state through a store, and a restarted group receives it."""

from __future__ import annotations

import re
import threading
import time
from datetime import timedelta

import pytest
from killing import run

import relight
from relight.errors import CorruptCheckpoint, StoreUnavailable

pytest.importorskip("torchft", reason="torchft is not installed: make plugins")

import torch  # noqa: E402

from relight.integrations.torchft import Transport  # noqa: E402

pytestmark = pytest.mark.filterwarnings("default")  # the framework's own warnings, and torch's warnings about it
PATIENCE = timedelta(seconds=20)


def test_what_is_sent_is_received(tmp_path) -> None:
    """Wait in the receiver until the state is sent, and return it bit-identical. Keep two of the sent checkpoints."""
    sender, receiver = Transport(str(tmp_path)), Transport(str(tmp_path))
    state = {"user": {"w": torch.randn(64, 3)}, "torchft": {"step": 3, "batches_committed": 12}}
    late = threading.Timer(1.0, lambda: sender.send_checkpoint([1], 3, state, PATIENCE))
    late.start()
    got = receiver.recv_checkpoint(0, sender.metadata(), 3, PATIENCE)
    late.join()
    assert torch.equal(got["user"]["w"], state["user"]["w"]) and got["torchft"] == state["torchft"]
    for step in (4, 5):
        sender.send_checkpoint([1], step, state, PATIENCE)
    assert [checkpoint.step for checkpoint in relight.open(sender.metadata()).checkpoints()] == [4, 5]


def test_waiting_has_an_end(tmp_path) -> None:
    """Wait no longer than the given time for a group that never sends."""
    began = time.monotonic()
    with pytest.raises(StoreUnavailable, match="step 7"):
        Transport(str(tmp_path)).recv_checkpoint(2, str(tmp_path / "nothing"), 7, timedelta(seconds=1))
    assert time.monotonic() - began < 5


def test_damage_is_not_received(tmp_path) -> None:
    """A byte that changed on the way is an error, not a weight."""
    sender = Transport(str(tmp_path))
    sender.send_checkpoint([1], 1, {"w": torch.zeros(100_000)}, PATIENCE)
    pack = next(tmp_path.rglob("pack-*.safetensors"))
    data = bytearray(pack.read_bytes())
    data[-1] ^= 1
    pack.chmod(0o600)
    pack.write_bytes(data)
    with pytest.raises(CorruptCheckpoint):
        Transport(str(tmp_path)).recv_checkpoint(0, sender.metadata(), 1, PATIENCE)


def test_a_killed_group_comes_back_with_the_others_state(tmp_path) -> None:
    """Kill the second of two groups, which have a lighthouse, with SIGKILL at step 10. Both end with the uninterrupted
    run's weights."""
    straight = run(["examples/torchft_groups.py", str(tmp_path / "a")], env={"OMP_NUM_THREADS": "1"})
    killed = run(["examples/torchft_groups.py", str(tmp_path / "b"), "10"], env={"OMP_NUM_THREADS": "1"})
    assert "group 1 is killed, and comes back" in killed.text
    ends = [re.findall(r"group \d ends with (\S+)", attempt.text) for attempt in (straight, killed)]
    assert len(ends[0]) == len(ends[1]) == 2 and len({*ends[0], *ends[1]}) == 1, ends
