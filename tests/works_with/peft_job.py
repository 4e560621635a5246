"""A training of a LoRA adapter on a frozen GPT-2: ``peft_job.py WAY RUN``. It prints the loss of each step; tests kill it.

``model``: the whole model is a component. ``adapter``: the adapter alone. ``trainer``: with Hugging Face's Trainer.
``qlora``: as ``trainer``, and the base has weights of 4 bits.
"""

import sys
import tempfile
from typing import Any

import torch
from peft import (
    LoraConfig,
    get_peft_model,
    get_peft_model_state_dict,
    prepare_model_for_kbit_training,
    set_peft_model_state_dict,
)
from transformers import (
    BitsAndBytesConfig,
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

import relight
from relight.integrations.transformers import TrainerCheckpoints

STEPS = 60
way, run = sys.argv[1], sys.argv[2]


class Adapter:
    """The adapter's weights, by PEFT's own functions."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def state_dict(self) -> dict[str, Any]:
        """Return the weights that PEFT saves."""
        return dict(get_peft_model_state_dict(self.model))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load them."""
        set_peft_model_state_dict(self.model, state)


class Print(TrainerCallback):
    """Print a line for each step."""

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" in logs:
            print(f"step {state.global_step:>4}  loss {logs['loss']!r} grad_norm {logs['grad_norm']!r}", flush=True)


set_seed(0)
torch.set_num_threads(1)
tokens = torch.randint(0, 4096, (160, 12))
base = GPT2LMHeadModel(
    GPT2Config(vocab_size=4096, n_positions=12, n_embd=256, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
)
if way == "qlora":
    with tempfile.TemporaryDirectory() as folder:
        base.save_pretrained(folder)
        quantized = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=torch.float32
        )  # fmt: skip
        base = GPT2LMHeadModel.from_pretrained(folder, quantization_config=quantized, device_map="cpu")
    base = prepare_model_for_kbit_training(base)
model = get_peft_model(
    base,
    LoraConfig(
        r=4, lora_alpha=8, lora_dropout=0.1, target_modules=["c_attn"], fan_in_fan_out=True, task_type="CAUSAL_LM"
    ),
)
options: dict[str, Any] = {"save": relight.every(steps=5), "compact": True}
if way in ("trainer", "qlora"):
    arguments = TrainingArguments(
        output_dir=tempfile.mkdtemp(), max_steps=STEPS, per_device_train_batch_size=4, learning_rate=1e-3, logging_steps=1, report_to=[],
        disable_tqdm=True, use_cpu=True, seed=0, save_strategy="no",
    )  # fmt: skip
    checkpoints = TrainerCheckpoints(run, **options)
    data = [{"input_ids": row, "labels": row} for row in tokens]
    trainer = Trainer(model, arguments, train_dataset=data, callbacks=[Print(), checkpoints])
    trainer.train(resume_from_checkpoint=checkpoints.resume(trainer))
else:
    trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3)  # with names: the optimizer's state is found without the model
    component = {"model": model} if way == "model" else {"adapter": Adapter(model)}
    model.train()
    with relight.Checkpointer(run, optimizer=optimizer, **component, **options) as ckpt:
        for step in range(ckpt.restore(), STEPS):
            batch = tokens[torch.randint(0, len(tokens), (4,))]
            loss = model(input_ids=batch, labels=batch).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            print(f"step {step + 1:>4}  loss {loss.item()!r}", flush=True)
            ckpt.step(step)
