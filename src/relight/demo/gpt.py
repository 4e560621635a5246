"""A small GPT: learned positions, pre-norm blocks, one matrix for embedding and output."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Block(nn.Module):
    """Causal self-attention and a feed-forward layer, each with a residual connection."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.norm_attention = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.norm_forward = nn.LayerNorm(width)
        self.forward_in = nn.Linear(width, 4 * width)
        self.forward_out = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[batch, time, width]`` to the same shape."""
        x = x + self._drop(self.attention_out(self._attend(self.norm_attention(x))))
        return x + self._drop(self.forward_out(F.gelu(self.forward_in(self.norm_forward(x)))))

    def _attend(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        heads = self.query_key_value(x).view(batch, time, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        query, key, value = heads.unbind(0)
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        return mixed.transpose(1, 2).reshape(batch, time, width)

    def _drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout, self.training)


class GPT(nn.Module):
    """Predicts the next byte. ``context``: the maximum number of input bytes."""

    def __init__(
        self, *, vocabulary: int = 256, context: int, width: int, layers: int, heads: int, dropout: float = 0.1
    ) -> None:
        super().__init__()
        self.dropout = dropout
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.output = nn.Linear(width, vocabulary, bias=False)
        self.output.weight = self.tokens.weight
        self.apply(_initialise)
        for name, parameter in self.named_parameters():
            # as in GPT-2: keeps the scale of the sum over all blocks
            if name.endswith(("attention_out.weight", "forward_out.weight")):
                nn.init.normal_(parameter, std=0.02 / (2 * layers) ** 0.5)

    def forward(self, bytes_in: Tensor) -> Tensor:
        """Map byte values ``[batch, time]`` to logits ``[batch, time, vocabulary]``."""
        places = torch.arange(bytes_in.shape[1], device=bytes_in.device)
        x = F.dropout(self.tokens(bytes_in) + self.positions(places), self.dropout, self.training)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.output(self.norm(x))
        return logits

    def loss(self, bytes_in: Tensor, bytes_next: Tensor) -> Tensor:
        """Return the mean cross-entropy in nats per byte."""
        return F.cross_entropy(self(bytes_in).flatten(0, 1), bytes_next.flatten())


def _initialise(module: nn.Module) -> None:
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
