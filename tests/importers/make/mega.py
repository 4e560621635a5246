"""Writes a checkpoint of two ranks with Megatron's ``dist_checkpointing`` (torch_dist), and their legacy files."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch

WORLD = 2


def whole() -> dict[str, torch.Tensor]:
    """Return the whole tensors of all ranks."""
    generator = torch.Generator().manual_seed(11)
    shapes = {
        "embedding.word_embeddings.weight": (8, 6),
        "decoder.layers.mlp.linear_fc2.weight": (2, 6, 4),
        "decoder.final_layernorm.weight": (6,),
    }
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    state = {
        f"optimizer.state.{key}.{name}": torch.rand(tensor.shape, generator=generator)
        for name, tensor in tensors.items()
        for key in KEYS
    }
    return {**{name: tensor.bfloat16() for name, tensor in tensors.items()}, **state}


KEYS = ("fp32_param", "exp_avg", "exp_avg_sq")


def rank_main(rank: int, out: str, port: int) -> None:
    """Write one rank's part: some rows of the embedding, some columns of the layers, and all of the rest."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": str(WORLD)}
    torch.distributed.init_process_group("gloo", rank=rank, world_size=WORLD)
    torch.cuda.synchronize = lambda *args: None  # Megatron calls it although there is nothing to wait for
    torch.cuda.current_device = lambda: "cpu"
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor

    state: dict[str, object] = {}
    for name, tensor in whole().items():
        if "word_embeddings" in name:
            state[name] = ShardedTensor.from_rank_offsets(
                name, tensor[rank * 4 : rank * 4 + 4].contiguous(), (0, rank, 2)
            )
        elif "layers" in name:
            for layer in range(2):
                piece = tensor[layer, :, rank * 2 : rank * 2 + 2].contiguous()
                offsets = ((0, layer, 2), (2, rank, 2))
                state[f"{name}{layer}"] = ShardedTensor.from_rank_offsets(name, piece, *offsets, prepend_axis_num=1)
        else:
            state[name] = ShardedTensor.from_rank_offsets(name, tensor, replica_id=rank)
    state["extra"] = ShardedObject("decoder.layers.mlp._extra_state", {"amax": 1.5}, (2,), (rank,))
    state["iteration"] = 100
    state["checkpoint_version"] = 3.0
    state["opt_param_scheduler"] = {"max_lr": 0.01, "num_steps": 800}
    state["optimizer"] = {"param_groups": [{"lr": 0.01, "betas": (0.9, 0.95), "step": 100, "params": []}]}
    folder = Path(out) / "iter_0000100"
    if rank == 0:
        folder.mkdir(parents=True)
    torch.distributed.barrier()
    dist_checkpointing.save(state, str(folder))
    legacy(Path(out), rank)
    torch.distributed.destroy_process_group()


def legacy(out: Path, rank: int) -> None:
    """Write the layout of ``--ckpt-format torch``: a file for each rank, without a rule to join them."""
    folder = out / "legacy" / "iter_0000100" / f"mp_rank_{rank:02d}"
    folder.mkdir(parents=True)
    model = {name: tensor for name, tensor in whole().items() if not name.startswith("optimizer")}
    torch.save({"iteration": 100, "checkpoint_version": 3.0, "model": model}, folder / "model_optim_rng.pt")
    (out / "legacy" / "latest_checkpointed_iteration.txt").write_text("100")


def main(out: Path) -> None:
    """Run two processes that write it."""
    import megatron.core

    torch.multiprocessing.spawn(rank_main, (str(out), 29541), nprocs=WORLD)
    (out / "latest_checkpointed_iteration.txt").write_text("100")
    versions = {"megatron-core": megatron.core.__version__, "torch": torch.__version__, "seed": 11}
    (out / "versions.json").write_text(json.dumps(versions) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
