"""DeepSpeed's ZeRO on two ranks, with its files in Relight's format: killed and resumed."""

from __future__ import annotations

import pytest
from killing import killed_and_resumed

import relight
from relight.errors import IncompatibleState, UnsafeContent

pytest.importorskip("deepspeed", reason="deepspeed is not installed: make plugins")

pytestmark = pytest.mark.filterwarnings("default")  # the framework's own warnings, and torch's warnings about it


@pytest.mark.parametrize("stage", ["1", "2", "3"])
def test_the_example_resumes_to_the_bit(stage: str, tmp_path) -> None:
    """Repeat the uninterrupted run's losses with each stage of ZeRO on two ranks, killed twice."""
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "examples/deepspeed_zero.py"]
    env = {"ZERO": stage, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "MKL_CBWR": "COMPATIBLE"}
    killed_and_resumed(command, [10, 22], tmp_path, env)


@pytest.mark.parametrize("stage", ["2", "3"])
def test_the_trainer_of_transformers_resumes_to_the_bit(stage: str, tmp_path) -> None:
    """Under Hugging Face's Trainer, repeat the losses on two ranks, killed twice. The Trainer saves, in Relight's format."""
    pytest.importorskip("transformers", reason="transformers is not installed: make plugins")
    command = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        "-m",
        "tests.works_with.trainer_deepspeed_job",
    ]
    env = {"ZERO": stage, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "MKL_CBWR": "COMPATIBLE"}
    killed_and_resumed(command, [6, 14], tmp_path, env)
    assert relight.Store(next((tmp_path / "killed" / "run" / "checkpoint-20").rglob("*optim_states.pt"))).runs == [
        "run"
    ]


class Foreign:
    """An object of a class that no checkpoint restores."""


def test_its_own_objects_come_back_and_others_are_refused(tmp_path) -> None:
    """Restore a loss scaler as its class with its fields. Report an object of any other class, and neither save nor
    create it."""
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler

    from relight.integrations.deepspeed_engine import CheckpointEngine

    engine = CheckpointEngine()
    scaler = DynamicLossScaler(
        init_scale=4.0,
        scale_window=7,
        min_scale=1,
        delayed_shift=1,
        consecutive_hysteresis=False,
        raise_error_at_min_scale=True,
        dtype=None,
    )
    engine.save({"loss_scaler": scaler, "n": 3}, tmp_path / "one.pt")
    back = engine.load(tmp_path / "one.pt")
    assert (
        type(back["loss_scaler"]) is DynamicLossScaler and vars(back["loss_scaler"]) == vars(scaler) and back["n"] == 3
    )
    with pytest.raises(IncompatibleState, match="Foreign"):
        engine.save({"client": Foreign()}, tmp_path / "two.pt")
    relight.save(tmp_path / "three.pt" / "run", {"file": {"x": {"relight.deepspeed": "Popen", "fields": {}}}}, step=0)
    with pytest.raises(UnsafeContent, match="Popen"):
        engine.load(tmp_path / "three.pt")
