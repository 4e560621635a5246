"""The saved states: GPTs with AdamW that really train on the CPU, and equal bytes spread over ever more tensors."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from blake3 import blake3
from torch import Tensor, nn

from relight.demo.gpt import GPT
from relight.demo.text import read_text


@dataclass(frozen=True)
class Shape:
    """A GPT and its training around a save; or, with ``tensors``, that number of tensors."""

    layers: int = 0
    width: int = 0
    heads: int = 1
    vocabulary: int = 256
    batch: int = 1
    context: int = 64
    steps: int = 0
    """Steps timed before and after each save without one, and the fewest timed with it; 0: nothing is trained."""
    saves: int = 1
    """Saves timed in training."""
    tensors: int = 0
    bytes: int = 0


SHAPES = {
    "S": Shape(layers=8, width=320, heads=8, vocabulary=256, batch=4, context=64, steps=6, saves=5),
    "M": Shape(layers=12, width=768, heads=12, vocabulary=50257, batch=1, context=64, steps=5, saves=2),
    "L": Shape(layers=24, width=1024, heads=16, vocabulary=50257, batch=1, context=64, steps=4, saves=1),
    **{f"spread-1e{power}": Shape(tensors=10**power, bytes=512 << 20) for power in (2, 3, 4, 5)},
}
SIZES = {"S": ["S"], "M": ["M"], "L": ["L"], "spread": [name for name in SHAPES if name.startswith("spread")]}


class Many(nn.Module):
    """``tensors`` parameters of equal size, as random as weights are."""

    def __init__(self, tensors: int, size: int) -> None:
        super().__init__()
        for number in range(tensors):
            self.register_parameter(f"p{number:06d}", nn.Parameter(torch.randn(size) * 0.02))


@dataclass
class Workload:
    """Live objects to save, and ``train``, which does one step."""

    shape: Shape
    model: nn.Module
    optimizer: torch.optim.Optimizer
    train: Callable[[], None]

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor of the state, by name, each storage once."""
        seen = set()
        for name, value in self.model.state_dict().items():
            if value.data_ptr() not in seen:
                seen.add(value.data_ptr())
                yield f"model.{name}", value
        for number, (_, state) in enumerate(self.optimizer.state.items()):
            for key in sorted(state):
                if isinstance(state[key], Tensor):
                    yield f"optimizer.{number}.{key}", state[key]

    @property
    def bytes(self) -> int:
        """Return the bytes of all tensors."""
        return sum(value.nbytes for _, value in self.tensors())

    def digest(self) -> dict[str, bytes]:
        """A hash of each tensor."""
        return {
            name: blake3(_raw(value), max_threads=blake3.AUTO if value.nbytes > 1 << 20 else 1).digest()
            for name, value in self.tensors()
        }

    def nudge(self) -> None:
        """Change every tensor a little, in place and without memory: a save must not find what it has already saved."""
        with torch.no_grad():
            torch._foreach_mul_([value for _, value in self.tensors() if value.ndim], 1.0009765625)

    def scramble(self) -> None:
        """Make sure that what a load leaves out is noticed."""
        with torch.no_grad():
            for _, value in self.tensors():
                value.zero_()


def build(name: str, seed: int) -> Workload:
    """The workload of that name."""
    shape = SHAPES[name]
    torch.manual_seed(seed)
    torch.set_num_threads(os.cpu_count() or 1)
    if shape.tensors:
        many = Many(shape.tensors, shape.bytes // 4 // shape.tensors)
        return Workload(shape, many, torch.optim.SGD(many.parameters(), lr=0.1), lambda: None)
    model = GPT(
        vocabulary=shape.vocabulary,
        context=shape.context,
        width=shape.width,
        layers=shape.layers,
        heads=shape.heads,
        dropout=0.0,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    text = torch.frombuffer(bytearray(read_text()), dtype=torch.uint8)
    generator = torch.Generator().manual_seed(seed)

    def train() -> None:
        starts = torch.randint(len(text) - shape.context - 1, (shape.batch,), generator=generator)
        pieces = torch.stack([text[start : start + shape.context + 1] for start in starts.tolist()]).long()
        loss = model.loss(pieces[:, :-1], pieces[:, 1:])
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()

    return Workload(shape, model, optimizer, train)


def state_bytes(name: str) -> int:
    """Bytes of the workload's state, without building it."""
    shape = SHAPES[name]
    if shape.tensors:
        return shape.bytes // 4 // shape.tensors * 4 * shape.tensors
    with torch.device("meta"):
        model = GPT(
            vocabulary=shape.vocabulary,
            context=shape.context,
            width=shape.width,
            layers=shape.layers,
            heads=shape.heads,
        )
    parameters = list(model.parameters())
    return sum(parameter.nbytes * 3 + 4 for parameter in parameters)


def _raw(value: Tensor) -> memoryview:
    return memoryview(value.detach().contiguous().reshape(-1).view(torch.uint8).numpy())
