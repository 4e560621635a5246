"""Import Megatron's legacy checkpoints: one file for each model-parallel rank, merged by arguments and tensor names.

The files do not record how a tensor was sharded. Megatron shards each of its own layers in one way, so the tensor's name
determines the dimension. The arguments, which are in each file, determine the size of the whole tensor. Both must agree.
Tensors with other names are refused.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from relight.errors import CorruptCheckpoint, IncompatibleState, UnsafeContent
from relight.format import DTYPES
from relight.importers.content import (
    MODULE,
    OPTIMIZER,
    SCHEDULER,
    Content,
    ImportedComponent,
    check_walkable,
    is_module,
    is_optimizer,
    optimizer_of,
)
from relight.importers.files import Files
from relight.importers.pickles import UnpickledObject
from relight.importers.tensors import AssembledTensor, Joined, Tiled, is_tensor
from relight.importers.torch_file import read_torch
from relight.layout import Box, Source

_CONVERT = "load it with Megatron once and save it as torch_dist (--ckpt-convert-format torch_dist), and import that"
ROWS, COLUMNS, ALIKE = "cut in its rows", "cut in its columns", "the same on all"
_LAYER = re.compile(r"(?:(.*)\.)?layers\.(\d+)\.(.+)")
_WAYS = (
    (re.compile(r"(?:.*\.)?(?:word_embeddings\.weight|output_layer\.(?:weight|bias))"), ROWS, "vocabulary"),
    (re.compile(r"word_embeddings_for_head\.weight"), ROWS, "vocabulary"),
    (re.compile(r".*attention\.(?:linear_qkv|query_key_value)\.(?:weight|bias)"), ROWS, "qkv"),
    (re.compile(r".*attention\.(?:linear_proj|dense)\.weight"), COLUMNS, "heads"),
    (re.compile(r".*\.mlp\.(?:linear_fc1|dense_h_to_4h)\.(?:weight|bias)"), ROWS, "inner"),
    (re.compile(r".*\.mlp\.(?:linear_fc2|dense_4h_to_h)\.weight"), COLUMNS, "between"),
    (re.compile(r".*attention\.(?:linear_proj|dense)\.bias|.*\.mlp\.(?:linear_fc2|dense_4h_to_h)\.bias"), ALIKE, ""),
    (re.compile(r"(?:.*[._])?(?:layer_?norm|norm)(?:[._][a-z_]+)?[._](?:weight|bias)"), ALIKE, ""),
    (re.compile(r"(?:.*\.)?position_embeddings\.weight"), ALIKE, ""),
)
"""Tensor names of Megatron's GPT (Megatron-Core and older): how each is sharded, and the key of its whole size."""
_USUAL = {
    "expert_model_parallel_size": 1, "num_experts": 0, "pipeline_model_parallel_layout": 0, "pipeline_model_parallel_split_rank": 0,
    "encoder_pipeline_model_parallel_size": 0, "mtp_num_layers": 0,
}  # fmt: skip
"""Arguments of models that are merged in another way, and their usual values."""
_TIED = re.compile(r"(?:.*\.)?output_layer\.weight|word_embeddings_for_head\.weight")
_EMBEDDING = re.compile(r"(?:.*\.)?word_embeddings\.weight")


def detect_legacy(files: Files, ranks: Mapping[re.Match[str], str]) -> Content:
    """Return the content. One rank's file is a whole model; several files are merged.

    Raise ``IncompatibleState``, with the reason, if they cannot be merged.
    """
    if len(ranks) == 1:
        return _one_rank(files, next(iter(ranks.values())))
    places = {(int(match[2]), int(match[3] or 0)): name for match, name in ranks.items()}
    shown = f"a legacy Megatron checkpoint of {len(ranks)} model-parallel ranks"
    if len(places) != len(ranks) or any(match[4] for match in ranks):
        raise _refusal(files, f"{shown}: experts in separate files are not supported")
    states = {place: _read(files, name) for place, name in places.items()}
    first = states.get((0, 0))
    if first is None:
        raise CorruptCheckpoint("the file of rank 0 is missing", where=files.path)
    sizes = _Sizes(files, first, shown)
    missing = [(tp, pp) for tp in range(sizes.tensor) for pp in range(sizes.pipeline) if (tp, pp) not in states]
    if missing or len(states) != sizes.tensor * sizes.pipeline:
        counts = (
            f"{sizes.tensor} tensor-parallel × {sizes.pipeline} pipeline ranks by its arguments, {len(states)} files"
        )
        raise CorruptCheckpoint(
            f"{counts}: {f'rank {missing[0]} is missing' if missing else 'too many'}", where=files.path
        )
    stages = [_stage(files, states, place, sizes) for place in sizes.stages()]
    content = Content(
        "megatron", f"Megatron legacy checkpoint, {sizes.tensor} tensor-parallel × {sizes.pipeline} pipeline ranks"
    )
    content.components["model"] = ImportedComponent(MODULE, _numbered(files, stages, sizes, content))
    if any("optimizer" in state for state in states.values()) or any(
        name.endswith("/distrib_optim.pt") for name in files.stamps
    ):
        content.left_out.append(
            (
                "optimizer",
                f"each of {len(states)} ranks numbers its parameters, and no file maps a number to a parameter",
            )
        )
    content.notes.append("the vocabulary is padded, as Megatron pads it")
    take_rest(content, first)
    return content


def take_rest(content: Content, state: Mapping[Any, Any]) -> None:
    """Take everything but the tensors of the model and the optimizer: step, scheduler, generators, other values."""
    step = state.get("iteration")
    content.first_step = 1
    content.step = step if type(step) is int and 0 <= step < 10**15 else None
    scheduler = state.get("opt_param_scheduler")
    if isinstance(scheduler, dict):
        content.components["scheduler"] = ImportedComponent(SCHEDULER, scheduler)
    handled = re.compile(r"optimizer|opt_param_scheduler|model\d*|rng_state")
    content.kept |= {key: value for key, value in state.items() if type(key) is str and not handled.fullmatch(key)}
    if "args" in state:
        content.kept["args"] = _arguments(state["args"]) or state["args"]
    if "rng_state" in state:
        content.kept["rng_state"] = state["rng_state"]
        content.left_out.append(
            ("rng", "Megatron's generators of several ranks and regions: kept as values, and not restored")
        )


class _Sizes:
    """The sizes of the model and of its parallel layout, from the arguments."""

    def __init__(self, files: Files, first: Mapping[Any, Any], shown: str) -> None:
        arguments = _arguments(first.get("args"))
        self._files, self._arguments, self._shown = files, arguments, shown
        self.tensor, self.pipeline = (
            self.number("tensor_model_parallel_size"),
            self.number("pipeline_model_parallel_size"),
        )
        self.layers, self.virtual = self.number("num_layers"), self.number("virtual_pipeline_model_parallel_size", 1)
        for name, usual in _USUAL.items():
            if (arguments.get(name) or usual) != usual:
                raise _refusal(files, f"{shown} with {name} {str(arguments[name])[:20]}, which is not supported")
        self.tied = not arguments.get("untie_embeddings_and_output_weights")
        self.whole: dict[str, int] = {}
        self.gated = False
        if self.tensor > 1:
            self._of_tensors(first)

    def number(self, name: str, otherwise: int | None = None) -> int:
        """Return a positive argument. Raise ``IncompatibleState`` if it is missing."""
        value = self._arguments.get(name)
        value = otherwise if value is None else value
        if type(value) is not int or not 0 < value < 2**40:
            raise _refusal(
                self._files, f"{self._shown}, and its arguments lack {name}, without which they cannot be merged"
            )
        return value

    def stages(self) -> list[tuple[int, int]]:
        """Return the model's ranges of layers, in order: ``(virtual stage, pipeline rank)``."""
        return [(virtual, rank) for virtual in range(self.virtual) for rank in range(self.pipeline)]

    def _of_tensors(self, first: Mapping[Any, Any]) -> None:
        version, heads = first.get("checkpoint_version"), self.number("num_attention_heads")
        if not isinstance(version, (int, float)) or not version >= 2:
            old = str(version)[:10]
            raise _refusal(
                self._files, f"{self._shown} of version {old}: before 2, queries, keys and values are in another order"
            )
        groups = self.number("num_query_groups", heads) if self._arguments.get("group_query_attention") else heads
        channels = self.number("kv_channels", max(1, self.number("hidden_size") // heads))
        if groups % self.tensor or self._arguments.get("attention_output_gate"):
            raise _refusal(
                self._files,
                f"{self._shown} with {groups} groups of queries on {self.tensor} ranks, which is not supported",
            )
        if type(self._arguments.get("swiglu")) is not bool:
            raise _refusal(
                self._files, f"{self._shown}, and its arguments lack swiglu, without which they cannot be merged"
            )
        self.gated, inner = self._arguments["swiglu"], self.number("ffn_hidden_size")
        self.whole = {
            "vocabulary": self.number("padded_vocab_size"), "qkv": channels * (heads + 2 * groups), "heads": channels * heads,
            "inner": inner * (2 if self.gated else 1), "between": inner,
        }  # fmt: skip


def _stage(
    files: Files, states: Mapping[tuple[int, int], Mapping[Any, Any]], place: tuple[int, int], sizes: _Sizes
) -> dict[str, Any]:
    """Return one range of layers, merged, under its own numbers."""
    virtual, pipeline = place
    key = f"model{virtual}" if sizes.virtual > 1 else "model"
    shares = []
    for tensor in range(sizes.tensor):
        share = states[tensor, pipeline].get(key)
        check_walkable(share, files.path)
        shares.append(
            {name: tensor_piece for name, tensor_piece in joined(share).items() if not name.endswith("_extra_state")}
        )
    if not shares[0] or any(share.keys() != shares[0].keys() for share in shares):
        unshared = sorted({name for share in shares for name in share if not all(name in other for other in shares)})
        why = f"{unshared[0][:120]!r} is not on all tensor-parallel ranks" if unshared else f"no tensors in {key!r}"
        raise CorruptCheckpoint(why, where=files.path)
    if sizes.tensor == 1:
        return shares[0]
    return {name: _whole(files, name, [share[name] for share in shares], place, sizes) for name in shares[0]}


def _whole(files: Files, name: str, pieces: Sequence[Any], place: tuple[int, int], sizes: _Sizes) -> AssembledTensor:
    first, where = pieces[0], f"{files.path}: {name[:120]}"
    if any((piece.dtype, piece.shape) != (first.dtype, first.shape) for piece in pieces):
        raise CorruptCheckpoint("its shape or dtype differs between ranks", where=where)
    way, of = next(((way, of) for pattern, way, of in _WAYS if pattern.fullmatch(name)), ("", ""))
    if not way:
        raise _refusal(
            files, f"unknown tensor {name[:120]!r}: how {sizes.tensor} tensor-parallel ranks shard it is not recorded"
        )
    key = ("megatron", files.path, place, name)
    sources = [piece.source() for piece in pieces]
    if way == ALIKE:
        return AssembledTensor(first.dtype, first.shape, _Alike(sources, where), key)
    across = 0 if way == ROWS else 1
    if len(first.shape) <= across or first.shape[across] * sizes.tensor != sizes.whole[of]:
        shard_shape, whole_shape = " × ".join(map(str, first.shape)), sizes.whole[of]
        sizes_text = (
            f"{shard_shape} on each of {sizes.tensor} ranks, {way}, do not make the {whole_shape} of its arguments"
        )
        raise _refusal(files, f"{name[:120]!r}: {sizes_text}")
    shape = tuple(extent * (sizes.tensor if number == across else 1) for number, extent in enumerate(first.shape))
    if way == COLUMNS:
        boxes = [(Box((0, rank * first.shape[1]), first.shape), source) for rank, source in enumerate(sources)]
        return AssembledTensor(first.dtype, shape, Tiled(first.dtype, shape, boxes, where), key)
    length = math.prod(first.shape) * DTYPES[first.dtype].itemsize
    if of == "inner" and sizes.gated:  # each rank has a part of the gate, followed by a part of the gated weights
        halves = [(source, start, length // 2) for start in (0, length // 2) for source in sources]
        return AssembledTensor(first.dtype, shape, Joined(halves), key)
    return AssembledTensor(first.dtype, shape, Joined([(source, 0, length) for source in sources]), key)


def _numbered(files: Files, stages: Sequence[dict[str, Any]], sizes: _Sizes, content: Content) -> dict[str, Any]:
    """Return all ranges, with consecutive layer numbers."""
    merged: dict[str, Any] = {}
    begin, homes = 0, set()
    for stage in stages:
        numbers = set()
        for name, tensor in stage.items():
            match = _LAYER.fullmatch(name)
            if match is not None:
                numbers.add(int(match[2]))
                homes.add(match[1] or "")
                name = f"{match[1]}.layers.{begin + int(match[2])}.{match[3]}".lstrip(".")
            elif name in merged or (sizes.tied and merged and _TIED.fullmatch(name)):
                _drop_copy(files, name, tensor, merged, sizes, content)
                continue
            merged[name] = tensor
        if numbers != set(range(len(numbers))):
            raise CorruptCheckpoint(
                f"a stage with the layers {sorted(numbers)[:8]} …: some are missing", where=files.path
            )
        begin += len(numbers)
    if len(homes) != 1 or begin != sizes.layers:
        counts = f"{begin} layers in {len(stages)} stages below {len(homes)} names"
        raise _refusal(files, f"{counts}, but its arguments specify {sizes.layers}: the order of the layers is unknown")
    return merged


def _drop_copy(files: Files, name: str, tensor: Any, state: dict[str, Any], sizes: _Sizes, content: Content) -> None:
    """Drop the last stage's copy of a tied embedding; take the first stage's. When it is read, both are compared."""
    first = next((candidate for candidate in state if _EMBEDDING.fullmatch(candidate)), None)
    if first is None or not sizes.tied or not (_TIED.fullmatch(name) or name == first):
        raise _refusal(files, f"{name[:120]!r} is in several stages, and is not a tied embedding")
    first_tensor = state[first]
    if (first_tensor.dtype, first_tensor.shape) != (tensor.dtype, tensor.shape):
        raise CorruptCheckpoint(f"{first[:80]!r} is tied to {name[:80]!r}, of another shape or dtype", where=files.path)
    source = _Alike([first_tensor.source(), tensor.source()], f"{files.path}: {name[:120]}")
    state[first] = AssembledTensor(
        first_tensor.dtype, first_tensor.shape, source, ("megatron", files.path, "tied", first)
    )
    if name != first:
        content.notes.append(f"{name} is the last stage's copy of {first}, which is taken")


class _Alike:
    """A tensor with copies on several ranks: the first copy's bytes, compared with the other copies."""

    def __init__(self, sources: Sequence[Source], where: str) -> None:
        self._sources, self._where, self.length = sources, where, sources[0].length

    def view(self) -> memoryview | None:
        """Return None: the copies are compared when they are read."""
        return None

    def fill(self, start: int, into: memoryview) -> None:
        """Read the first copy. Raise ``CorruptCheckpoint`` if another copy has other bytes."""
        _read_source(self._sources[0], start, into)
        buffer = memoryview(bytearray(len(into)))
        for copy_source in self._sources[1:]:
            _read_source(copy_source, start, buffer)
            if buffer != into:
                raise CorruptCheckpoint("copies that should be equal differ", where=self._where, hint=_CONVERT)


def _read_source(source: Source, start: int, into: memoryview) -> None:
    view = source.view()
    if view is not None:
        into[:] = view[start : start + len(into)]
    else:
        source.fill(start, into)


def _one_rank(files: Files, file: str) -> Content:
    """Return the content of a model that was not sharded."""
    state = _read(files, file)
    content = Content("megatron", "Megatron legacy checkpoint, 1 rank")
    check_walkable(state.get("model"), files.where(file))
    model = joined(state.get("model"))
    if not is_module(model):
        raise IncompatibleState("a model that is not a dict of tensors by name", where=files.where(file))
    content.components["model"] = ImportedComponent(MODULE, model)
    optimizer = state.get("optimizer")
    inner = optimizer.get("optimizer") if isinstance(optimizer, dict) and not is_optimizer(optimizer) else optimizer
    if isinstance(inner, dict) and is_optimizer(inner):
        content.components["optimizer"] = ImportedComponent(OPTIMIZER, optimizer_of(inner))
    if isinstance(optimizer, dict) and inner is not optimizer:
        content.kept["optimizer_common"] = {key: value for key, value in optimizer.items() if key != "optimizer"}
        content.left_out.append(("fp32 weights", "by number, as Megatron's optimizer has them: kept as values"))
    take_rest(content, state)
    return content


def _arguments(given: Any) -> dict[Any, Any]:
    """Return Megatron's command-line arguments: a namespace's attributes."""
    arguments = given.state if isinstance(given, UnpickledObject) else given
    return arguments if isinstance(arguments, dict) else {}


def _read(files: Files, name: str) -> dict[Any, Any]:
    content = read_torch(files, name)
    if not isinstance(content, dict):
        raise UnsafeContent("something other than a dict", where=files.where(name))
    return content


def joined(node: Any, prefix: str = "") -> dict[str, Any]:
    """Return tensors by their full names."""
    tensors: dict[str, Any] = {}
    for key, value in node.items() if isinstance(node, dict) else ():
        if isinstance(value, dict):
            tensors.update(joined(value, f"{prefix}{key}."))
        elif is_tensor(value):
            tensors[f"{prefix}{key}"] = value
    return tensors


def _refusal(files: Files, what: str) -> IncompatibleState:
    return IncompatibleState(what, where=files.path, hint=_CONVERT)
