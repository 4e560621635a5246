"""Hugging Face's Trainer, saving through Relight. Kill it at any moment and run it again: the last line is the same."""

import sys
import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments, set_seed

import relight
from relight.integrations.transformers import TrainerCheckpoints  # relight:


class Print(TrainerCallback):
    """A line a step."""

    def on_log(self, args, state, control, logs=None, **kwargs):
        if state.is_world_process_zero and "loss" in logs:
            print(
                f"step {state.global_step:>4}  loss {logs['loss']!r} grad_norm {logs['grad_norm']!r} rate {logs['learning_rate']!r}",
                flush=True,
            )
        if state.is_world_process_zero and "eval_loss" in logs:
            print(f"after {state.global_step:>3}  eval_loss {logs['eval_loss']!r}", flush=True)


set_seed(0)
tokens = torch.randint(0, 64, (160, 24))
data = [{"input_ids": row, "labels": row} for row in tokens]
model = GPT2LMHeadModel(
    GPT2Config(vocab_size=64, n_positions=24, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
)
arguments = TrainingArguments(
    output_dir=tempfile.mkdtemp(), max_steps=60, per_device_train_batch_size=4, gradient_accumulation_steps=2, learning_rate=1e-3,
    logging_steps=1, eval_strategy="steps", eval_steps=7, report_to=[], disable_tqdm=True, use_cpu=True, seed=0,
    save_strategy="no",  # relight: Relight saves
)  # fmt: skip
path = sys.argv[1] if len(sys.argv) > 1 else "runs/transformers"
checkpoints = TrainerCheckpoints(path, save=relight.every(steps=3), keep=relight.keep(last=3))  # relight:
# relight:
trainer = Trainer(model, arguments, train_dataset=data, eval_dataset=data[:16], callbacks=[Print(), checkpoints])
trainer.train(resume_from_checkpoint=checkpoints.resume(trainer))  # relight:
