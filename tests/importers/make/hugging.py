"""Writes a Hugging Face model folder and a Trainer's checkpoint with transformers itself, into a given folder."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import transformers
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments


class Rows(torch.utils.data.Dataset):
    """A data set of a few rows of tokens."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = torch.arange(index, index + 8) % 32
        return {"input_ids": row, "labels": row}


def main(out: Path) -> None:
    """Train a tiny model three steps, and save it. torch's own state of it is in ``expected.pt`` in the same folder."""
    torch.manual_seed(7)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=32, n_positions=8, n_embd=8, n_layer=1, n_head=2))
    args = TrainingArguments(
        str(out / "run"),
        max_steps=3,
        save_steps=3,
        per_device_train_batch_size=2,
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        seed=7,
    )
    trainer = Trainer(model, args, train_dataset=Rows())
    trainer.train()
    (out / "run" / "checkpoint-3").rename(out / "checkpoint-3")
    (out / "run").rmdir()
    (out / "checkpoint-3" / "training_args.bin").touch()
    model.save_pretrained(out / "sharded", max_shard_size="2kB")
    torch.save({"model": model.state_dict(), "optimizer": trainer.optimizer.state_dict()}, out / "expected.pt")
    versions = {"transformers": transformers.__version__, "torch": torch.__version__, "seed": 7}
    (out / "versions.json").write_text(json.dumps(versions) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
