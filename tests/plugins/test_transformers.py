"""Hugging Face's Trainer: killed and resumed."""

from __future__ import annotations

import pytest
from killing import killed_and_resumed

pytest.importorskip("transformers", reason="transformers is not installed: make plugins")

pytestmark = pytest.mark.filterwarnings("default")  # the framework's own warnings, and torch's warnings about it


@pytest.mark.shows(
    tool="Trainer",
    package="transformers",
    feature="killed and resumed",
    outcome="exact",
    why="the example: with evaluations",
)
def test_the_example_resumes_to_the_bit(tmp_path) -> None:
    """Repeat the uninterrupted run's losses, gradient norms, rates and evaluations. It is killed in three places, one
    directly after an epoch's end."""
    killed_and_resumed(["examples/transformers_trainer.py"], [5, 21, 44], tmp_path)


@pytest.mark.shows(
    tool="Trainer", package="transformers", feature="killed and resumed, 2 ranks", outcome="exact", why="gloo"
)
def test_two_ranks_resume_to_the_bit(tmp_path) -> None:
    """Repeat them under torchrun with two ranks over gloo, each with its own part of the data."""
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "examples/transformers_trainer.py"]
    killed_and_resumed(command, [7, 33], tmp_path, {"OMP_NUM_THREADS": "1"})


def test_a_run_that_has_begun_is_not_started_again(tmp_path) -> None:
    """Refuse to train over an existing run if the callback does not know its Trainer."""
    from types import SimpleNamespace

    from relight.errors import ConfigError
    from relight.integrations.transformers import TrainerCheckpoints

    with pytest.raises(ConfigError, match="has not been given its Trainer"):
        TrainerCheckpoints(tmp_path / "run").on_train_begin(None, SimpleNamespace(global_step=0), None)


def test_not_resumed_it_starts_from_scratch_over_an_existing_run(tmp_path) -> None:
    """With ``resume=False``, restore nothing from an existing run, and delete nothing of it. The next resume continues
    from the new training."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments, set_seed

    import relight
    from relight.integrations.transformers import TrainerCheckpoints

    class Losses(TrainerCallback):
        """The logged loss of each step."""

        def __init__(self) -> None:
            self.of: dict[int, float] = {}

        def on_log(self, args, state, control, logs=None, **kwargs):
            if "loss" in (logs or {}):
                self.of[state.global_step] = logs["loss"]

    def train(name: str, steps: int, seed: int = 0, **options) -> dict[int, float]:
        set_seed(seed)
        data = [
            {"input_ids": row, "labels": row}
            for row in torch.randint(0, 16, (64, 8), generator=torch.Generator().manual_seed(1))
        ]
        model = GPT2LMHeadModel(
            GPT2Config(vocab_size=16, n_positions=8, n_embd=8, n_layer=1, n_head=1, bos_token_id=0, eos_token_id=0)
        )
        arguments = TrainingArguments(
            output_dir=str(tmp_path / "out"), max_steps=steps, per_device_train_batch_size=4, logging_steps=1, report_to=[],
            disable_tqdm=True, use_cpu=True, seed=seed, save_strategy="no", lr_scheduler_type="constant", learning_rate=1e-2,
        )  # fmt: skip
        checkpoints = TrainerCheckpoints(
            tmp_path / name, save=relight.every(steps=1), signals=False, background=False, **options
        )
        losses = Losses()
        trainer = Trainer(model, arguments, train_dataset=data, callbacks=[losses, checkpoints])
        trainer.train(resume_from_checkpoint=checkpoints.resume(trainer))
        return losses.of

    straight = train("straight", 6, seed=1)
    train("run", 3)
    assert train("run", 4, seed=1, resume=False) == {step: straight[step] for step in range(1, 5)}
    checkpoints = relight.open(tmp_path / "run").checkpoints()
    assert [checkpoint.step for checkpoint in checkpoints] == [1, 2, 3, 1, 2, 3, 4]
    assert train("run", 6, seed=1) == {step: straight[step] for step in (5, 6)}
