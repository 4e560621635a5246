"""``make exports``: models of transformers, saved by Relight, exported, loaded by ``from_pretrained``: the same logits, to the bit."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, PretrainedConfig, Qwen2Config
from transformers import __version__ as version

import relight
from relight.catalog import open_run
from relight.export import Options, execute_export, plan_export
from relight.store import open_bytes

SMALL = {
    "vocab_size": 500,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
}


def configs() -> Iterator[tuple[str, PretrainedConfig]]:
    """Tied and untied."""
    yield "GPT-2, tied", GPT2Config(vocab_size=500, n_embd=64, n_layer=3, n_head=4, n_positions=64)
    yield "Llama, untied", LlamaConfig(**SMALL, num_key_value_heads=2, tie_word_embeddings=False)
    yield "Llama, tied", LlamaConfig(**SMALL, num_key_value_heads=2, tie_word_embeddings=True)
    yield "Qwen2, untied", Qwen2Config(**SMALL, num_key_value_heads=2, tie_word_embeddings=False)


def check(config: PretrainedConfig, dtype: torch.dtype, shard: int | None, folder: Path) -> bool:
    """Whether the logits of what comes back are those of what was saved, in that dtype."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    relight.save(folder / "runs" / "run", {"model": model}, step=1)
    run = open_run(open_bytes(folder / "runs"), "run")
    name = str(dtype).removeprefix("torch.")
    execute_export(
        plan_export(run.open(run.history().live[-1]), folder / "out", Options(shard_bytes=shard, dtype=name))
    )
    config.save_pretrained(folder / "out")
    back, loading = AutoModelForCausalLM.from_pretrained(folder / "out", dtype=dtype, output_loading_info=True)
    assert not any(loading.get(key) for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), loading
    # not the whole model: buffers that are in no checkpoint are unchanged after the import
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    tokens = torch.randint(0, 500, (2, 32))
    with torch.no_grad():
        return torch.equal(back.eval()(tokens).logits, model(tokens).logits)


def main() -> None:
    """Each model, in float32 and bfloat16, in one file and in several."""
    print(f"transformers {version}, torch {torch.__version__}")
    failed = 0
    for name, config in configs():
        for dtype in (torch.float32, torch.bfloat16):
            for shard in (None, 100_000):
                with tempfile.TemporaryDirectory() as folder:
                    same = check(config, dtype, shard, Path(folder))
                failed += not same
                print(
                    f"{'same logits' if same else 'OTHER LOGITS'}  {name}, {dtype}, {'one file' if shard is None else 'sharded'}"
                )
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
