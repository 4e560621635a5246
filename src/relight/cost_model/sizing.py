"""Size of a model's checkpoint, by part: from its configuration, its number of parameters, or a live model."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from relight.errors import ConfigError
from relight.policy.argument_checks import number_of

Shape = tuple[int, int, tuple[int, ...]]
"""Number of such tensors in a layer, number of layers, and the tensor's shape."""


@dataclass(frozen=True, slots=True)
class Precision:
    """Bytes per value of the model's weights, of their master copy, and of the optimizer's moments."""

    weight: float
    master: float
    moment: float
    description: str


PRECISIONS = {
    "bf16": Precision(2, 4, 4, "weights in bfloat16, master weights and moments in float32"),
    "fp16": Precision(2, 4, 4, "weights in float16, master weights and moments in float32"),
    "fp32": Precision(4, 0, 4, "all in float32, as autocast and FSDP's mixed precision keep it"),
    "bf16-pure": Precision(2, 0, 2, "all in bfloat16"),
}
BLOCK = 256
"""Values that share a scale of 4 bytes in 8-bit states (bitsandbytes' block size)."""
OPTIMIZERS = {
    "adamw": "two moments of each value",
    "adam8bit": f"two moments of a byte each, and a scale of 4 bytes for {BLOCK}",
    "lion": "one momentum of each value",
    "sgd": "one momentum of each value",
    "adafactor": "of each matrix a row and a column, of each vector one moment; in float32",
    "muon": "one momentum of each hidden matrix, two moments of embeddings and vectors",
}


@dataclass(frozen=True, slots=True)
class ModelSize:
    """Numbers that determine a model's size. ``shapes`` is empty if only the number of parameters is known."""

    name: str
    parameters: int
    active: int
    """Parameters that are active for one token: fewer in a mixture of experts."""
    shapes: tuple[Shape, ...] = ()
    embeddings: int = 0
    """Parameters of the embeddings and the head."""
    description: str = ""


@dataclass(frozen=True, slots=True)
class Size:
    """Bytes of a checkpoint, by part."""

    parts: Mapping[str, int]
    description: str

    @property
    def bytes(self) -> int:
        """Return the bytes of all parts."""
        return sum(self.parts.values())


def from_count(text: str) -> ModelSize:
    """Return a model with that number of parameters: ``8B``, ``405B``, ``1T``, ``124M``.

    Where shapes matter (Adafactor, Muon), the model is treated as a Llama of that size: its hidden size is the cube
    root of 100/12 times the parameters, and its vocabulary has 128,000 tokens.
    """
    parameters = number_of(text, "a number of parameters")
    side = (parameters * 100 / 12) ** (1 / 3)
    embeddings = min(parameters // 2, round(2 * side * 128_000)) if parameters > 1e9 else 0
    return ModelSize(text.strip(), parameters, parameters, (), embeddings, f"{parameters:,} parameters")


def size_of(model: ModelSize, precision: str = "bf16", optimizer: str = "adamw") -> Size:
    """Return the parts of one checkpoint.

    Gradients are not saved. Loaders, generators and plain values take kilobytes and are left out.
    """
    how = PRECISIONS.get(precision)
    if how is None:
        raise ConfigError(f"there is no precision {precision[:40]!r}", hint=f"one of {', '.join(PRECISIONS)}")
    if optimizer not in OPTIMIZERS:
        raise ConfigError(f"there is no optimizer {optimizer[:40]!r}", hint=f"one of {', '.join(OPTIMIZERS)}")
    parts = {"weights": round(model.parameters * how.weight)}
    if how.master:
        parts["master weights"] = round(model.parameters * how.master)
    parts["optimizer"] = round(_optimizer_bytes(model, how, optimizer))
    return Size(parts, f"{how.description}; {optimizer}: {OPTIMIZERS[optimizer]}")


def _optimizer_bytes(model: ModelSize, how: Precision, optimizer: str) -> float:
    if optimizer == "adamw":
        return 2 * how.moment * model.parameters
    if optimizer == "adam8bit":
        return 2 * (1 + 4 / BLOCK) * model.parameters
    if optimizer in ("lion", "sgd"):
        return how.moment * model.parameters
    if optimizer == "muon":
        return how.moment * (model.parameters + _not_hidden(model))
    if not model.shapes:
        side = (model.parameters * 100 / 12) ** (1 / 3)
        return float(4 * 2 * model.parameters / side)
    return 4.0 * sum(
        count * layers * (sum(shape[-2:]) * math.prod(shape[:-2]) if len(shape) > 1 else shape[0])
        for count, layers, shape in model.shapes
    )


def _not_hidden(model: ModelSize) -> int:
    """Return the parameters that Muon leaves to AdamW: embeddings, the head, vectors."""
    return model.embeddings + sum(count * layers * shape[0] for count, layers, shape in model.shapes if len(shape) == 1)


def from_config(config: Mapping[str, object], name: str = "") -> ModelSize:
    """Return the model of a Hugging Face ``config.json`` (plain JSON): dense decoders, grouped queries, latent
    attention, expert mixtures.

    ``ConfigError`` if it is not such a configuration. Missing settings have the defaults of ``transformers``.
    """
    inner = config.get("text_config")
    get = _ConfigReader(config := inner if isinstance(inner, Mapping) else config)
    hidden, layers, vocab = (
        get.one("hidden_size", "n_embd", "d_model"),
        get.one("num_hidden_layers", "n_layer", "num_layers"),
        get.one("vocab_size"),
    )
    kind = str(config.get("model_type", "unknown"))[:40]
    shapes: list[Shape] = [*_attention(get, kind, hidden, layers), *_feed_forward(get, kind, hidden, layers)]
    old = kind in _OLD
    norms = 2 * hidden if old else hidden  # a LayerNorm has a bias, too
    shapes += [(2, layers, (norms,)), (1, 1, (norms,))]
    if kind in ("gemma2", "gemma3_text"):
        shapes.append((2, layers, (hidden,)))
    tied = bool(config.get("tie_word_embeddings", kind in _TIED))
    tables = vocab * hidden * (1 if tied else 2)
    tables += get.one("n_positions", "max_position_embeddings", default=0) * hidden if kind in ("gpt2", "opt") else 0
    shapes += [(1 if tied else 2, 1, (vocab, hidden))]
    if tables > vocab * hidden * (1 if tied else 2):
        shapes.append((1, 1, (tables // hidden - vocab * (1 if tied else 2), hidden)))
    total = sum(count * depth * math.prod(shape) for count, depth, shape in shapes)
    idle = _idle(get, hidden, layers)
    description = f"{kind}, {layers} layers of {hidden:,}, {total:,} parameters" + (
        f", {total - idle:,} of them active for a token" if idle else ""
    )
    return ModelSize(name or kind, total, total - idle, tuple(shapes), tables, description)


_OLD = ("gpt2", "gpt_neox", "opt", "gptj")
_TIED = ("gpt2", "gemma", "gemma2", "gemma3_text", "opt")
_MOST = 10**9


class _ConfigReader:
    """Whole numbers of a configuration, by any of their names."""

    def __init__(self, config: Mapping[str, object]) -> None:
        self._config = config

    def one(self, *names: str, default: int | None = None) -> int:
        """Return the first of these settings that exists, else the default.

        ``ConfigError`` if it is invalid, or without a default.
        """
        for name in names:
            value = self._config.get(name)
            if value is None:
                continue
            if type(value) is not int or not 0 <= value <= _MOST:
                raise ConfigError(f"{name} must be a whole number, not {str(value)[:40]!r}", where="config.json")
            return value
        if default is None:
            hint = "a config.json of a language model, as Hugging Face has it; or give the number of parameters, such as 8B"
            raise ConfigError(f"this configuration has no {names[0]}", where="config.json", hint=hint)
        return default

    def flag(self, name: str, default: bool) -> bool:
        """Return a truth value."""
        value = self._config.get(name)
        return default if value is None else bool(value)


def _attention(get: _ConfigReader, kind: str, hidden: int, layers: int) -> list[Shape]:
    heads = get.one("num_attention_heads", "n_head")
    if heads < 1:
        raise ConfigError("a model has at least one attention head", where="config.json")
    if get.one("kv_lora_rank", default=0):
        return _latent(get, hidden, layers, heads)
    side = get.one("head_dim", default=hidden // heads)
    keys = get.one("num_key_value_heads", default=heads) * side
    shapes: list[Shape] = [
        (1, layers, (heads * side, hidden)),
        (2, layers, (keys, hidden)),
        (1, layers, (hidden, heads * side)),
    ]
    if kind in _OLD or get.flag("attention_bias", False):
        shapes += [(1, layers, (heads * side,)), (2, layers, (keys,)), (1, layers, (hidden,))]
    elif kind.startswith("qwen2"):
        shapes += [(1, layers, (heads * side,)), (2, layers, (keys,))]
    if kind.startswith("qwen3"):
        shapes.append((2, layers, (side,)))
    return shapes


def _latent(get: _ConfigReader, hidden: int, layers: int, heads: int) -> list[Shape]:
    """Return the shapes of DeepSeek's latent attention: queries and keys through a low-rank projection."""
    rank, rope, nope = get.one("kv_lora_rank"), get.one("qk_rope_head_dim"), get.one("qk_nope_head_dim")
    value, queries = get.one("v_head_dim"), get.one("q_lora_rank", default=0)
    width = heads * (nope + rope)
    shapes: list[Shape] = [(1, layers, (width, queries)), (1, layers, (queries, hidden)), (1, layers, (queries,))]
    shapes = shapes if queries else [(1, layers, (width, hidden))]
    shapes += [(1, layers, (rank + rope, hidden)), (1, layers, (rank,)), (1, layers, (heads * (nope + value), rank))]
    return [*shapes, (1, layers, (hidden, heads * value))]


def _feed_forward(get: _ConfigReader, kind: str, hidden: int, layers: int) -> list[Shape]:
    inner = get.one("intermediate_size", "n_inner", "ffn_dim", default=4 * hidden)
    if kind in _OLD:
        return [(2, layers, (inner, hidden)), (1, layers, (inner,)), (1, layers, (hidden,))]
    experts, width, shared, dense = _experts(get, layers)
    if not experts:
        return [(3, layers, (inner, hidden))]
    sparse = layers - dense
    shapes: list[Shape] = [(3 * experts, sparse, (width, hidden)), (1, sparse, (experts, hidden))]
    shapes += [(3, dense, (inner, hidden))] if dense else []
    shapes += [(3, sparse, (shared, hidden))] if shared else []
    if kind == "qwen2_moe":
        shapes.append((1, sparse, (1, hidden)))
    if kind == "deepseek_v3":
        shapes.append((1, sparse, (experts,)))
    return shapes


def _experts(get: _ConfigReader, layers: int) -> tuple[int, int, int, int]:
    """Return the experts of a layer, the width of one, the width of the shared experts, and the number of layers
    without experts."""
    experts = get.one("num_local_experts", "n_routed_experts", "num_experts", default=0)
    if not experts:
        return 0, 0, 0, layers
    width = get.one("moe_intermediate_size", "intermediate_size")
    shared = get.one("shared_expert_intermediate_size", default=get.one("n_shared_experts", default=0) * width)
    return experts, width, shared, min(layers, get.one("first_k_dense_replace", default=0))


def _idle(get: _ConfigReader, hidden: int, layers: int) -> int:
    """Return the parameters of the experts that are inactive for a token."""
    experts, width, _, dense = _experts(get, layers)
    chosen = min(experts, get.one("num_experts_per_tok", "moe_k", default=experts))
    return 3 * (experts - chosen) * width * hidden * (layers - dense)
