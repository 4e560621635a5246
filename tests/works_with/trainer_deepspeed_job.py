"""Hugging Face's Trainer under DeepSpeed, with files in Relight's format: ``trainer_deepspeed_job.py RUN``, ``ZERO`` is the stage.

It prints the loss of each step, and resumes from the newest folder of the Trainer; tests kill it.
"""

import os
import sys
from typing import Any

import torch
import transformers
from transformers import GPT2Config, GPT2LMHeadModel, TrainerCallback, TrainingArguments, set_seed
from transformers.trainer_utils import get_last_checkpoint

from relight.integrations.deepspeed_engine import CheckpointEngine


class Trainer(transformers.Trainer):
    """The Trainer, with DeepSpeed's files in Relight's format."""

    def create_scheduler(self, *args: Any, **kwargs: Any) -> Any:
        """Set the engine's format. The engine exists now, and the Trainer has not loaded a checkpoint yet."""
        self.accelerator.deepspeed_engine_wrapped.engine.checkpoint_engine = CheckpointEngine()
        return super().create_scheduler(*args, **kwargs)


class Print(TrainerCallback):
    """Print a line for each step."""

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" in logs and args.process_index == 0:
            print(f"step {state.global_step:>4}  loss {logs['loss']!r}", flush=True)


run = sys.argv[1]
set_seed(0)
torch.set_num_threads(1)
tokens = torch.randint(0, 64, (64, 8), generator=torch.Generator().manual_seed(1))
model = GPT2LMHeadModel(
    GPT2Config(vocab_size=64, n_positions=8, n_embd=16, n_layer=1, n_head=1, bos_token_id=0, eos_token_id=0)
)
config = {
    "train_micro_batch_size_per_gpu": "auto",
    "zero_optimization": {"stage": int(os.environ.get("ZERO", "2"))},
    "zero_force_ds_cpu_optimizer": False,
}
arguments = TrainingArguments(
    output_dir=run, max_steps=20, per_device_train_batch_size=4, learning_rate=1e-2, logging_steps=1, report_to=[],
    disable_tqdm=True, use_cpu=True, seed=0, save_strategy="steps", save_steps=4, deepspeed=config, ddp_backend="gloo",
)  # fmt: skip
data = [{"input_ids": row, "labels": row} for row in tokens]
trainer = Trainer(model, arguments, train_dataset=data, callbacks=[Print()])
trainer.train(resume_from_checkpoint=get_last_checkpoint(run) if os.path.isdir(run) else None)
