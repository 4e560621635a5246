"""A small decoder, and the tensors of one rank of an engine that serves it."""

from __future__ import annotations

import zlib

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

HIDDEN, HEAD, QUERIES, KEYS, INNER, VOCAB = 64, 16, 8, 2, 96, 250
PADDED_VOCAB = 256
HEADS = {"q_proj": QUERIES, "k_proj": KEYS, "v_proj": KEYS}
PADDED = {"*embed_tokens.weight": VOCAB, "lm_head.weight": VOCAB}


class Block(nn.Module):
    """A decoder layer's weights, as Hugging Face names them."""

    def __init__(self) -> None:
        super().__init__()
        self.self_attn, self.mlp = nn.Module(), nn.Module()
        for name, rows in (("q_proj", QUERIES * HEAD), ("k_proj", KEYS * HEAD), ("v_proj", KEYS * HEAD)):
            self.self_attn.add_module(name, nn.Linear(HIDDEN, rows))
        self.self_attn.o_proj = nn.Linear(QUERIES * HEAD, HIDDEN, bias=False)
        self.mlp.gate_proj, self.mlp.up_proj = (nn.Linear(HIDDEN, INNER, bias=False) for _ in range(2))
        self.mlp.down_proj = nn.Linear(INNER, HIDDEN, bias=False)
        self.input_layernorm = nn.RMSNorm(HIDDEN)


class Decoder(nn.Module):
    """A model of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCAB, HIDDEN)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.lm_head = nn.Linear(HIDDEN, VOCAB, bias=False)


def fill(model: nn.Module, step: int) -> None:
    """Set each weight to values that depend on its name and the step alone, however it is sharded."""
    for name, parameter in model.named_parameters():
        generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {step}".encode()))
        values = torch.randn(parameter.shape, generator=generator)
        if isinstance(parameter, DTensor):
            values = distribute_tensor(values, parameter.device_mesh, parameter.placements)
        with torch.no_grad():
            parameter.copy_(values)


def engine(tp_size: int, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Return one rank's tensors, as vLLM and SGLang lay them out: fused, cut, and with a padded vocabulary."""
    keys, padded = max(1, KEYS // tp_size), PADDED_VOCAB // tp_size
    qkv, inner = (QUERIES // tp_size + 2 * keys) * HEAD, INNER // tp_size
    shapes: dict[str, tuple[int, ...]] = {"embed_tokens.weight": (padded, HIDDEN), "lm_head.weight": (padded, HIDDEN)}
    for layer in ("layers.0", "layers.1"):
        shapes |= {
            f"{layer}.self_attn.qkv_proj.weight": (qkv, HIDDEN),
            f"{layer}.self_attn.qkv_proj.bias": (qkv,),
            f"{layer}.self_attn.o_proj.weight": (HIDDEN, QUERIES * HEAD // tp_size),
            f"{layer}.mlp.gate_up_proj.weight": (2 * inner, HIDDEN),
            f"{layer}.mlp.down_proj.weight": (HIDDEN, inner),
            f"{layer}.input_layernorm.weight": (HIDDEN,),
        }
    return {name: torch.zeros(shape, dtype=dtype) for name, shape in shapes.items()}


def expected(model: Decoder, tp_rank: int, tp_size: int) -> dict[str, torch.Tensor]:
    """Return what the rank's tensors must be, computed from the whole model."""

    def rows(tensor: torch.Tensor, count: int, index: int) -> torch.Tensor:
        size = len(tensor) // count
        return tensor[size * index : size * (index + 1)]

    wanted: dict[str, torch.Tensor] = {}
    state = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    groups = min(KEYS, tp_size)
    for layer in ("layers.0", "layers.1"):
        for kind in ("weight", "bias"):
            parts = [rows(state[f"{layer}.self_attn.q_proj.{kind}"], tp_size, tp_rank)]
            for part in ("k_proj", "v_proj"):
                whole = state[f"{layer}.self_attn.{part}.{kind}"]
                parts.append(rows(whole, groups, tp_rank * groups // tp_size))
            wanted[f"{layer}.self_attn.qkv_proj.{kind}"] = torch.cat(parts)
        gate_up = [rows(state[f"{layer}.mlp.{part}.weight"], tp_size, tp_rank) for part in ("gate_proj", "up_proj")]
        wanted[f"{layer}.mlp.gate_up_proj.weight"] = torch.cat(gate_up)
        for part in ("self_attn.o_proj", "mlp.down_proj"):
            wanted[f"{layer}.{part}.weight"] = rows(state[f"{layer}.{part}.weight"].T, tp_size, tp_rank).T
        wanted[f"{layer}.input_layernorm.weight"] = state[f"{layer}.input_layernorm.weight"]
    for name in ("embed_tokens.weight", "lm_head.weight"):
        filled = torch.zeros(PADDED_VOCAB, HIDDEN)
        filled[:VOCAB] = state[name]
        wanted[name] = rows(filled, tp_size, tp_rank)
    return wanted
