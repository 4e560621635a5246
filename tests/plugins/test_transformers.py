"""Hugging Face's Trainer: killed and gone on."""

from __future__ import annotations

import pytest
from killing import killed_and_resumed

pytest.importorskip("transformers", reason="transformers is not installed: make plugins")

pytestmark = pytest.mark.filterwarnings("default")  # the framework's own, and torch's of it


def test_the_example_goes_on_to_the_bit(tmp_path) -> None:
    """Killed in three places, one right behind an epoch's end: losses, gradients' norms, rates and evaluations are the straight run's."""
    killed_and_resumed(["examples/transformers_trainer.py"], [5, 21, 44], tmp_path)


def test_two_ranks_go_on_to_the_bit(tmp_path) -> None:
    """The same under torchrun with two ranks over gloo, each with its own part of the data."""
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "examples/transformers_trainer.py"]
    killed_and_resumed(command, [7, 33], tmp_path, {"OMP_NUM_THREADS": "1"})


def test_a_run_that_has_begun_is_not_begun_anew(tmp_path) -> None:
    """Without ``resume``, or with a folder of somebody else's, training does not start over the run."""
    from types import SimpleNamespace

    from relight.errors import ConfigError
    from relight.interop.transformers import Checkpoints

    with pytest.raises(ConfigError, match="does not know its Trainer"):
        Checkpoints(tmp_path / "run").on_train_begin(None, SimpleNamespace(global_step=0), None)
