"""Writes legacy checkpoints of Megatron-Core's own GPT, one file for each rank, for several ways of parallelism.

Megatron builds one rank's model after the other in this process, on torch's fake process group. Its own
``sharded_state_dict`` states which part of the whole each tensor is. A whole tensor is random numbers that depend only
on its name, and ``whole.json`` has its shape.
"""

from __future__ import annotations

import json
import shutil
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch

HEADS, HIDDEN, LAYERS, VOCABULARY, INNER, GROUPS = 4, 16, 4, 24, 20, 2
WAYS: dict[str, dict[str, Any]] = {
    "tp2": {"tensor": 2},
    "tp2_gated": {"tensor": 2, "swiglu": True, "tied": False, "grouped": True},
    "tp2_pp2": {"tensor": 2, "pipeline": 2},
    "pp2_untied": {"pipeline": 2, "tied": False},
    "pp2_virtual": {"pipeline": 2, "virtual": 2, "swiglu": True},
}


def whole_of(key: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Return random numbers that depend only on the name."""
    seed = int.from_bytes(key.encode(), "little") % (2**63)
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def model_of(rank: int, world: int, way: dict[str, Any]) -> list[Any]:
    """Return one rank's models, one for each virtual stage."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig
    from torch.testing._internal.distributed.fake_pg import FakeStore

    tensor, pipeline, virtual = way.get("tensor", 1), way.get("pipeline", 1), way.get("virtual")
    torch.distributed.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    parallel_state.initialize_model_parallel(tensor, pipeline, virtual, create_gloo_process_groups=False)
    config = TransformerConfig(
        num_layers=LAYERS, hidden_size=HIDDEN, num_attention_heads=HEADS, ffn_hidden_size=INNER, use_cpu_initialization=True,
        num_query_groups=GROUPS if way.get("grouped") else HEADS, gated_linear_unit=bool(way.get("swiglu")), tensor_model_parallel_size=tensor,
        pipeline_model_parallel_size=pipeline, virtual_pipeline_model_parallel_size=virtual, params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
    )  # fmt: skip
    models = []
    for number in range(virtual or 1):
        stage = {"ignore_virtual": False, "vp_stage": number} if virtual else {}
        first = parallel_state.is_pipeline_first_stage(**stage)
        last = parallel_state.is_pipeline_last_stage(**stage)
        models.append(
            GPTModel(
                config,
                get_gpt_layer_local_spec(),
                VOCABULARY,
                32,
                pre_process=first,
                post_process=last,
                share_embeddings_and_output_weights=way.get("tied", True),
                **({"vp_stage": number} if virtual else {}),
            )
        )
    return models


def fill(model: Any, wholes: dict[str, torch.Tensor]) -> None:
    """Set each tensor of a model to its part of the whole, which Megatron defines."""
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

    def put(tensor: Any) -> None:
        if isinstance(tensor, ShardedTensorFactory):
            for piece in tensor.build().values() if isinstance(tensor.build(), dict) else tensor.build():
                put(piece)
        elif isinstance(tensor, ShardedTensor):
            whole = wholes.setdefault(tensor.key, whole_of(tensor.key, tuple(tensor.global_shape)))
            place = tuple(
                slice(start, start + extent)
                for start, extent in zip(tensor.global_offset, tensor.data.shape, strict=False)
            )
            if tensor.prepend_axis_num:
                inner = zip(tensor.global_offset[tensor.prepend_axis_num :], tensor.data.shape, strict=True)
                place = (
                    *tensor.global_offset[: tensor.prepend_axis_num],
                    *(slice(start, start + extent) for start, extent in inner),
                )
            with torch.no_grad():
                tensor.data.copy_(whole[place].reshape(tensor.data.shape))

    for tensor in model.sharded_state_dict().values():
        put(tensor)


def write(out: Path, way: dict[str, Any], wholes: dict[str, torch.Tensor]) -> None:
    """Write all ranks' files for one way of parallelism."""
    from megatron.core import parallel_state

    tensor, pipeline, virtual = way.get("tensor", 1), way.get("pipeline", 1), way.get("virtual")
    arguments = Namespace(
        tensor_model_parallel_size=tensor, pipeline_model_parallel_size=pipeline, virtual_pipeline_model_parallel_size=virtual,
        num_layers=LAYERS, hidden_size=HIDDEN, num_attention_heads=HEADS, kv_channels=HIDDEN // HEADS, ffn_hidden_size=INNER,
        group_query_attention=bool(way.get("grouped")), num_query_groups=GROUPS if way.get("grouped") else 1, padded_vocab_size=VOCABULARY,
        swiglu=bool(way.get("swiglu")), untie_embeddings_and_output_weights=not way.get("tied", True), expert_model_parallel_size=1,
        num_experts=None, params_dtype=torch.bfloat16,
    )  # fmt: skip
    for rank in range(tensor * pipeline):
        models = model_of(rank, tensor * pipeline, way)
        tp, pp = parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_pipeline_model_parallel_rank()
        for model in models:
            fill(model, wholes)
        name = f"mp_rank_{tp:02d}" if pipeline == 1 else f"mp_rank_{tp:02d}_{pp:03d}"
        folder = out / "iter_0000100" / name
        folder.mkdir(parents=True)
        saved = {
            "args": arguments,
            "checkpoint_version": 3.0,
            "iteration": 100,
            "opt_param_scheduler": {"max_lr": 0.01, "num_steps": 800},
        }
        for number, model in enumerate(models):
            saved[f"model{number}" if virtual else "model"] = model.state_dict_for_save_checkpoint()
        torch.save(saved, folder / "model_optim_rng.pt")
        parallel_state.destroy_model_parallel()
        torch.distributed.destroy_process_group()
    (out / "latest_checkpointed_iteration.txt").write_text("100")


def main(out: Path) -> None:
    """Write the files of every way, and the shapes of the whole tensors."""
    import megatron.core

    # Megatron calls these even without an accelerator
    torch.cuda.current_device, torch.Tensor.cuda = (lambda: "cpu"), (lambda self, *args: self)
    for name, way in WAYS.items():
        folder, wholes = out / name, dict[str, torch.Tensor]()
        shutil.rmtree(folder, ignore_errors=True)
        write(folder, way, wholes)
        shapes = {key: list(tensor.shape) for key, tensor in sorted(wholes.items())}
        (folder / "whole.json").write_text(json.dumps(shapes, indent=1) + "\n")
    versions = {"megatron-core": megatron.core.__version__, "torch": torch.__version__}
    (out / "versions.json").write_text(json.dumps(versions, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
