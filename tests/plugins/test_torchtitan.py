"""torchtitan's manager by Relight: killed and resumed, and the settings that it cannot follow."""

from __future__ import annotations

import pytest
from killing import killed_and_resumed

import relight
from relight.errors import ConfigError

pytest.importorskip("torchtitan", reason="torchtitan is not installed: make plugins")


def test_the_example_resumes_to_the_bit(tmp_path) -> None:
    """Repeat the uninterrupted run's losses and rates, killed twice, in the first and the second epoch. Keep the
    requested number of checkpoints."""
    killed_and_resumed(["examples/torchtitan_manager.py"], [8, 25], tmp_path)
    run = relight.open(tmp_path / "killed" / "run" / "checkpoint" / "run")
    assert [checkpoint.step for checkpoint in run.checkpoints()] == [39, 40]


def test_settings_of_another_format_are_refused() -> None:
    """Refuse at once what only torchtitan's own format can do."""
    from relight.integrations.torchtitan import CheckpointManager

    with pytest.raises(ConfigError, match="last_save_in_hf"):
        CheckpointManager.Config(enable=True, last_save_in_hf=True).build(
            dataloader=None, model_parts=[], optimizers=[], lr_schedulers=None, states={}, sd_adapter=None
        )
    assert (
        CheckpointManager.Config(enable=False)
        .build(dataloader=None, model_parts=[], optimizers=[], lr_schedulers=None, states={}, sd_adapter=None)
        .load()
        is False
    )
