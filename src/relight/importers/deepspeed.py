"""Import DeepSpeed's checkpoints: ZeRO's flat partitions, merged into whole tensors by the files' metadata, and
universal checkpoints."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from relight.errors import CorruptCheckpoint, IncompatibleState, UnsafeContent
from relight.format import Leaf
from relight.importers.content import MODULE, OPTIMIZER, SCHEDULER, Content, ImportedComponent, is_module
from relight.importers.files import Files, pread
from relight.importers.pickles import UnpickledObject
from relight.importers.tensors import AssembledTensor, Joined, Spec, is_tensor, row_major
from relight.importers.torch_file import read_torch
from relight.layout import Bytes, Source
from relight.units import count_text

_OPTIM = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_MODEL = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
_TAKEN = {
    "module", "optimizer", "lr_scheduler", "buffer_names", "param_shapes", "frozen_param_shapes", "frozen_param_fragments", "shared_params",
    "optimizer_state_dict",
}  # fmt: skip
_SMALL_BYTES = 64


class FlatRange(NamedTuple):
    """Elements of a flat tensor that belong to a parameter."""

    flat: Spec
    start: int
    elements: int


def detect_deepspeed(files: Files) -> Content | None:
    """Return the content of a DeepSpeed folder; None for other folders. In a parent folder, follow ``latest``."""
    prefix = ""
    if files.has("latest") and any("/" in name and _MODEL.fullmatch(name.rpartition("/")[2]) for name in files.stamps):
        tag = files.text("latest")
        if not tag or "/" in tag or tag in (".", "..") or tag not in files.folders:
            raise UnsafeContent(f"'latest' names {tag[:80]!r}, which is not a folder here", where=files.where("latest"))
        prefix = f"{tag}/"
    names = files.names(prefix.rstrip("/"))
    models = {match: name for name in names if (match := _MODEL.fullmatch(name))}
    optims = {match: name for name in names if (match := _OPTIM.fullmatch(name))}
    if not models:
        return None
    where = files.where(prefix.rstrip("/"))
    if any(int(match[2]) for match in (*models, *optims)):
        raise _several(files, prefix, models, len({match[2] for match in (*models, *optims)}))
    if any(re.match(r"(?:layer_\d|expp_rank_|.*_expert_)", name) for name in names):
        raise IncompatibleState("pipeline layers or experts in separate files are not supported", where=where)
    model_files = [name for _, name in sorted(((int(match[1] or 0), name) for match, name in models.items()))]
    model_state = _dict(read_torch(files, f"{prefix}{model_files[0]}"), files.where(f"{prefix}{model_files[0]}"))
    if f"{prefix}zero" in files.folders:
        return _universal(files, prefix, model_state)
    ranks = [name for _, name in sorted((int(match[1]), name) for match, name in optims.items())]
    if [int(_OPTIM.fullmatch(name)[1]) for name in ranks] != list(range(len(ranks))):  # type: ignore[index]
        raise CorruptCheckpoint("ranks are missing: there are " + ", ".join(ranks[:8]), where=where)
    partitions = [
        _dict(_dict(read_torch(files, f"{prefix}{name}"), where).get("optimizer_state_dict"), where) for name in ranks
    ]
    if not partitions:
        return _unpartitioned(files, model_state)
    stage = _stage(partitions[0].get("zero_stage"), where)
    _check_count(partitions, where)
    content = Content(
        "zero", f"DeepSpeed ZeRO stage {stage}, {count_text(len(partitions), 'rank')}{_version(model_state)}"
    )
    shapes = _shapes(model_state, where)
    if stage == 3:
        other_states = [_dict(read_torch(files, f"{prefix}{name}"), where) for name in model_files[1:]]
        _stage3(content, model_state, other_states, partitions, shapes, where)
    else:
        _stage12(content, model_state, partitions, shapes, where)
    _take_rest(content, model_state)
    return content


def _several(files: Files, prefix: str, models: Mapping[re.Match[str], str], count: int) -> IncompatibleState:
    """Return the error for several model-parallel ranks.

    Relight does not merge their pieces: the merge rules, if any, are patterns and formulas of the training script, which
    would have to be executed.
    """
    state = read_torch(files, prefix + min(models.values()))
    rules = state.get("universal_checkpoint_info") if isinstance(state, dict) else None
    problem = f"pieces of {count} model-parallel ranks"
    if isinstance(rules, dict) and rules:
        shown = ", ".join(sorted(map(str, rules))[:4])[:120]
        return IncompatibleState(
            f"{problem}; universal_checkpoint_info describes how to merge them ({shown}), in patterns that only DeepSpeed applies",
            where=files.where(prefix.rstrip("/")),
            hint="python -m deepspeed.checkpoint.ds_to_universal --input_folder … --output_folder …, and import that",
        )
    return IncompatibleState(
        f"{problem}, and no universal_checkpoint_info: the checkpoint does not record how each tensor was sharded",
        where=files.where(prefix.rstrip("/")),
        hint="load it with the script that wrote it and save on one model-parallel rank, or with universal_checkpoint_info in client_state",
    )


# -- stages


def _stage12(
    content: Content,
    model_state: Mapping[str, Any],
    partitions: list[dict[str, Any]],
    shapes: list[dict[str, tuple[int, ...]]],
    where: str,
) -> None:
    runs = (
        _runs_by_mappings(partitions, where)
        if all("param_slice_mappings" in partition for partition in partitions)
        else None
    )
    if runs is None:
        raise IncompatibleState(
            "no param_slice_mappings: written by DeepSpeed before 0.8",
            where=where,
            hint="convert it with its own zero_to_fp32.py",
        )
    shape_of = {name: shape for group in shapes for name, shape in group.items()}
    if set(shape_of) != set(runs):
        raise CorruptCheckpoint(
            f"partitions of {len(runs)} parameters, but param_shapes lists {len(shape_of)}", where=where
        )
    model = dict(_dict(model_state.get("module"), where))
    names_of = {name: index for index, group in enumerate(shapes) for name in group}
    bases = [_base(partition, where) for partition in partitions]
    state: dict[str, dict[str, Any]] = {}
    for name, shape in shape_of.items():
        group = names_of[name]
        flats = [_list(partition.get("single_partition_of_fp32_groups"), where) for partition in partitions]
        model[name] = _whole(
            [FlatRange(_flat(flats[rank], group, where), *bounds) for rank, bounds in runs[name]],
            shape,
            ("fp32", name),
            where,
        )
        state[name] = _moments(bases, group, dict(runs[name]), name, shape, where)
    content.components["model"] = ImportedComponent(MODULE, model)
    _optimizer(content, bases[0].get("param_groups"), [list(group) for group in shapes], state, where)
    _log_precision(content, model_state, set(shape_of))


def _runs_by_mappings(partitions: list[dict[str, Any]], where: str) -> dict[str, list[tuple[int, tuple[int, int]]]]:
    """Return, for each parameter, its elements in each rank's partition, in order."""
    ranges: dict[str, list[tuple[int, tuple[int, int]]]] = {}
    for rank, partition in enumerate(partitions):
        for group in _list(partition["param_slice_mappings"], where):
            for name, address in _dict(group, where).items():
                if not isinstance(address, UnpickledObject) or not isinstance(address.state, dict):
                    raise UnsafeContent("an entry of param_slice_mappings is not in DeepSpeed's form", where=where)
                start, count = address.state.get("start"), address.state.get("numel")
                if type(start) is not int or type(count) is not int or min(start, count) < 0:
                    raise UnsafeContent(f"{str(name)[:80]!r} has an invalid offset or length", where=where)
                ranges.setdefault(str(name), []).append((rank, (start, count)))
    return ranges


def _moments(
    bases: list[dict[str, Any]],
    group: int,
    runs: Mapping[int, tuple[int, int]],
    name: str,
    shape: tuple[int, ...],
    where: str,
) -> dict[str, Any]:
    """Return the optimizer state of one parameter. Partitioned tensors are merged; scalars come from its first rank."""
    moments: dict[str, Any] = {}
    first = next(iter(runs))
    for key, value in _dict(_dict(bases[first]["state"], where).get(group, {}), where).items():
        if is_tensor(value) and len(value.shape) == 1:
            pieces = [
                FlatRange(_flat(_dict(_dict(bases[rank]["state"], where).get(group), where), key, where), *bounds)
                for rank, bounds in runs.items()
            ]
            moments[key] = _whole(pieces, shape, (key, name), where)
        else:
            moments[key] = _scalar(value, (key, name))
    return moments


def _stage3(
    content: Content,
    model_state: Mapping[str, Any],
    others: list[dict[str, Any]],
    partitions: list[dict[str, Any]],
    shapes: list[dict[str, tuple[int, ...]]],
    where: str,
) -> None:
    """Merge a checkpoint of ZeRO stage 3.

    Each parameter is cut into equal pieces, one for each rank; the last piece is padded. A rank concatenates its pieces
    of all parameters.
    """
    world = len(partitions)
    shape_of = {name: shape for group in shapes for name, shape in group.items()}
    flats = [
        [
            _flat(_list(partition.get("fp32_flat_groups"), where), i, where)
            for i in range(len(_list(partition["fp32_flat_groups"], where)))
        ]
        for partition in partitions
    ]
    bases = [_dict(partition.get("optimizer_state_dict"), where) for partition in partitions]
    model = {
        key: value
        for key, value in _dict(model_state.get("module"), where).items()
        if key in (model_state.get("buffer_names") or ())
    }
    state: dict[str, dict[str, Any]] = {}
    offset = 0
    for name, shape in shape_of.items():
        piece = -(-math.prod(shape) // world)
        runs = [_spread(flats[rank], offset, piece, where) for rank in range(world)]
        model[name] = _cut(runs, lambda rank, index: flats[rank][index], shape, ("fp32", name), where)
        groups = sorted({index for index, _, _ in runs[0]})
        first = _dict(_dict(bases[0].get("state", {}), where).get(groups[0] if groups else 0, {}), where)
        parameter_state: dict[str, Any] = {}
        for key, value in first.items():
            if is_tensor(value) and len(value.shape) == 1:
                parameter_state[key] = _cut(runs, _keyed(bases, key, where), shape, (key, name), where)
            else:
                parameter_state[key] = _scalar(value, (key, name))
        state[name] = parameter_state
        offset += piece
    if any(offset != sum(math.prod(flat.shape) for flat in rank_flats) for rank_flats in flats):
        raise CorruptCheckpoint(
            f"partitions of {sum(math.prod(flat.shape) for flat in flats[0])} elements instead of {offset}", where=where
        )
    _frozen(model, model_state, others, world, where)
    content.components["model"] = ImportedComponent(MODULE, model)
    _optimizer(content, bases[0].get("param_groups"), [list(group) for group in shapes], state, where)
    _log_precision(content, model_state, set(shape_of))


def _keyed(bases: list[dict[str, Any]], key: str, where: str) -> Any:
    return lambda rank, index: _flat(_dict(_dict(bases[rank].get("state"), where).get(index), where), key, where)


def _spread(flats: Sequence[Spec], offset: int, count: int, where: str) -> list[tuple[int, int, int]]:
    """Return the elements ``offset`` to ``offset + count`` of a rank's concatenated flat tensors, as ``(index, start, count)``."""
    ranges, begin = [], 0
    for index, flat in enumerate(flats):
        length = math.prod(flat.shape)
        lo, hi = max(offset, begin), min(offset + count, begin + length)
        if lo < hi:
            ranges.append((index, lo - begin, hi - lo))
        begin += length
    if sum(element_range[2] for element_range in ranges) != count:
        raise CorruptCheckpoint("partitions that end before their parameters do", where=where)
    return ranges


def _cut(
    runs: list[list[tuple[int, int, int]]], flat_of: Any, shape: tuple[int, ...], key: Any, where: str
) -> AssembledTensor:
    """Return one parameter, merged from all ranks' pieces, without the padding of the last."""
    elements_left = math.prod(shape)
    pieces: list[FlatRange] = []
    for rank, rank_runs in enumerate(runs):
        for index, start, count in rank_runs:
            take = min(count, elements_left)
            pieces.append(FlatRange(flat_of(rank, index), start, take))
            elements_left -= take
    return _whole(pieces, shape, key, where)


def _frozen(
    model: dict[str, Any], model_state: Mapping[str, Any], others: list[dict[str, Any]], world: int, where: str
) -> None:
    """Add the parameters that are not trained. Each rank's model file has a piece of them."""
    shapes = model_state.get("frozen_param_shapes")
    if not shapes:
        return
    files = [model_state, *others]
    if len(files) != world:
        raise CorruptCheckpoint(f"frozen parameters of {world} ranks, in the files of {len(files)}", where=where)
    for name, shape in _dict(shapes, where).items():
        pieces, elements_left = [], math.prod(_shape(shape, where))
        for state in files:
            flat = _flat(_dict(state.get("frozen_param_fragments"), where), name, where)
            take = min(elements_left, math.prod(flat.shape))
            pieces.append(FlatRange(flat, 0, take))
            elements_left -= take
        model[name] = _whole(pieces, _shape(shape, where), ("frozen", name), where)


# -- universal, and without partitions


def _universal(files: Files, prefix: str, model_state: Mapping[str, Any]) -> Content:
    """Import ``zero/<parameter>/{fp32,exp_avg,…}.pt``: one file for each whole tensor."""
    content = Content("universal", f"DeepSpeed universal checkpoint{_version(model_state)}")
    where = files.where(f"{prefix}zero")
    parameters: dict[str, dict[str, Any]] = {}
    for name in sorted(files.stamps):
        inner = name.removeprefix(f"{prefix}zero/")
        parameter, _, file = inner.rpartition("/")
        if inner == name or not parameter or "/" in parameter or not file.endswith(".pt"):
            continue
        value = read_torch(files, name)
        parameters.setdefault(parameter, {})[file.removesuffix(".pt")] = value
    shapes = _shapes(model_state, where)
    shape_of = {name: shape for group in shapes for name, shape in group.items()} | _frozen_shapes(model_state, where)
    model = (
        {key: value for key, value in (model_state.get("module") or {}).items() if is_tensor(value)}
        if is_module(model_state.get("module"))
        else {}
    )
    state: dict[str, dict[str, Any]] = {}
    for name, parts in parameters.items():
        shape = shape_of.get(name)
        parts = {key: _shaped(_param(value), shape) for key, value in parts.items()}
        weight = parts.pop("fp32", None)
        if not is_tensor(weight):
            raise CorruptCheckpoint("no fp32.pt", where=f"{where}/{name[:80]}")
        model[name] = weight
        if parts:
            state[name] = {
                key: value if is_tensor(value) else _scalar(value, (key, name)) for key, value in parts.items()
            }
    members = [[name for name in group if name in state] for group in shapes]
    if sum(map(len, members)) != len(state):
        raise CorruptCheckpoint("the optimizer has parameters that the model's file does not list", where=where)
    content.components["model"] = ImportedComponent(MODULE, model)
    common = (
        read_torch(files, f"{prefix}zero/optimizer_state.pt") if files.has(f"{prefix}zero/optimizer_state.pt") else {}
    )
    base = (
        common.get("base_optimizer_state") or common.get("optimizer_state_dict") or common
        if isinstance(common, dict)
        else {}
    )
    base = _dict(base, where)
    _common_scalars(base.get("state"), members, state)
    _optimizer(content, base.get("param_groups"), members, state, where)
    _take_rest(content, model_state)
    return content


def _shaped(value: Any, shape: tuple[int, ...] | None) -> Any:
    """Return a tensor in its parameter's shape: stage 3 writes tensors flat."""
    flat = isinstance(value, Spec) and value.in_order and len(value.shape) == 1
    if flat and shape is not None and value.shape != shape and math.prod(value.shape) == math.prod(shape):
        return value._replace(shape=shape, stride=row_major(shape))
    return value


def _common_scalars(common: Any, members: list[list[str]], state: dict[str, dict[str, Any]]) -> None:
    """Add scalars that a group shares and that were not written for each parameter, such as stage 3's step count."""
    for index, names in enumerate(members):
        group_state = common.get(index) if isinstance(common, dict) else None
        shared = (
            {key: value for key, value in group_state.items() if is_tensor(value) and not value.shape}
            if isinstance(group_state, dict)
            else {}
        )
        for name in names:
            state[name] = {**{key: _scalar(value, (key, name)) for key, value in shared.items()}, **state[name]}


def _frozen_shapes(model_state: Mapping[str, Any], where: str) -> dict[str, tuple[int, ...]]:
    return {
        str(name): _shape(shape, where)
        for name, shape in _dict(model_state.get("frozen_param_shapes") or {}, where).items()
    }


def _param(value: Any) -> Any:
    """Return a universal file's tensor: the value itself, or its entry ``param``."""
    return value.get("param") if isinstance(value, dict) else value


def _unpartitioned(files: Files, model_state: Mapping[str, Any]) -> Content:
    """Import a checkpoint without ZeRO: one file with the module and, in some cases, the optimizer in torch's form."""
    from relight.importers.content import is_optimizer, optimizer_of

    content = Content("deepspeed", f"DeepSpeed checkpoint without ZeRO{_version(model_state)}")
    content.components["model"] = ImportedComponent(MODULE, dict(_dict(model_state.get("module"), files.path)))
    optimizer = model_state.get("optimizer")
    if isinstance(optimizer, dict) and is_optimizer(optimizer):
        content.components["optimizer"] = ImportedComponent(OPTIMIZER, optimizer_of(optimizer))
    elif optimizer is not None:
        content.kept["optimizer"] = optimizer
        content.left_out.append(("optimizer", "in DeepSpeed's own form: kept as values, no component takes it"))
    _take_rest(content, model_state)
    return content


# -- shared by all formats


def _optimizer(
    content: Content, groups: Any, members: list[list[str]], state: dict[str, dict[str, Any]], where: str
) -> None:
    """Add the optimizer under its parameters' names, group by group."""
    if not isinstance(groups, list) or len(groups) != len(members):
        if len(members) == 1 or not isinstance(groups, list):
            content.left_out.append(
                ("optimizer/groups", "the settings of its groups are not recorded: only its parameters' state is taken")
            )
        else:
            raise CorruptCheckpoint(f"settings of {len(groups)} groups, parameters of {len(members)}", where=where)
        groups = [{} for _ in members]
    node = [
        {**{k: v for k, v in _dict(g, where).items() if k not in ("params", "param_names")}, "params": m}
        for g, m in zip(groups, members, strict=True)
    ]
    content.components["optimizer"] = ImportedComponent(
        OPTIMIZER, {"state": {name: entries for name, entries in state.items() if entries}, "groups": node, "extra": {}}
    )


def _take_rest(content: Content, model_state: Mapping[str, Any]) -> None:
    """Take tied weights, the step, the scheduler and the client's state. The scaler is left out: it is an object of DeepSpeed's own."""
    _tie(content, model_state.get("shared_params"))
    step = model_state.get("global_steps")
    content.first_step = 1
    content.step = step if type(step) is int and 0 <= step < 10**15 else None
    scheduler = model_state.get("lr_scheduler")
    if isinstance(scheduler, dict) and scheduler:
        content.components["scheduler"] = ImportedComponent(SCHEDULER, scheduler)
    content.kept |= {
        key: value for key, value in model_state.items() if key not in _TAKEN and type(key) is str and value is not None
    }
    if model_state.get("shared_params"):
        content.kept["shared_params"] = model_state["shared_params"]
    content.notes.append("DeepSpeed saves no random number generators")
    content.left_out.append(("loss scaler", "an object of DeepSpeed's own"))


def _tie(content: Content, shared: Any) -> None:
    """Give each name of a tied weight the tensor of the name under which it is stored. Without that, ZeRO 1 and 2 have a 16-bit copy."""
    model = content.components["model"].node
    for alias, name in shared.items() if isinstance(shared, dict) else ():
        if type(alias) is str and type(name) is str and name in model:
            model[alias] = model[name]


def _log_precision(content: Content, model_state: Mapping[str, Any], trained: set[str]) -> None:
    module = _dict(model_state.get("module") or {}, "")
    halves = [
        key
        for key, value in module.items()
        if key in trained and is_tensor(value) and value.shape and math.prod(value.shape)
    ]
    if halves and any(module[key].dtype != "float32" for key in halves):
        content.left_out.append(
            (f"{len(halves)} weights in 16 bits", "the fp32 weights that they were rounded from are taken")
        )


def _check_count(partitions: list[dict[str, Any]], where: str) -> None:
    counts = partitions[0].get("partition_count")
    expected = (
        max(counts, default=0) if isinstance(counts, list) and all(type(count) is int for count in counts) else counts
    )
    if expected != len(partitions):
        raise CorruptCheckpoint(
            f"files of {count_text(len(partitions), 'rank')}, but {str(expected)[:20]} wrote the checkpoint",
            where=where,
        )


def _stage(value: Any, where: str) -> int:
    stage = value.args[0] if isinstance(value, UnpickledObject) and value.args else value
    if stage not in (1, 2, 3) or type(stage) is not int:
        raise IncompatibleState(f"ZeRO stage {str(stage)[:20]} is not supported", where=where)
    return stage


def _base(partition: Mapping[str, Any], where: str) -> dict[str, Any]:
    base = partition.get("base_optimizer_state")
    if isinstance(base, list):  # elastic checkpoints have one dict for each group, without padding
        return {"state": dict(enumerate(base)), "param_groups": partition.get("param_groups")}
    state_dict = _dict(base, where)
    return {"state": {}, **state_dict}


def _whole(pieces: list[FlatRange], shape: tuple[int, ...], key: Any, where: str) -> AssembledTensor:
    """Return a parameter, merged from ranges of flat tensors. Raise ``CorruptCheckpoint`` if the number of elements is
    wrong."""
    runs: list[tuple[Source, int, int]] = []
    dtype = pieces[0].flat.dtype if pieces else "float32"
    for flat, start, count in pieces:
        if flat.dtype != dtype or start + count > math.prod(flat.shape):
            raise CorruptCheckpoint(
                f"{str(key[1])[:80]!r} is outside its partition, or in one of another dtype", where=where
            )
        runs.append((flat.source(), start * flat.itemsize, count * flat.itemsize))
    if sum(count for _, _, count in pieces) != math.prod(shape):
        raise CorruptCheckpoint(
            f"{str(key[1])[:80]!r}: {sum(run[2] for run in pieces)} elements instead of {math.prod(shape)}", where=where
        )
    return AssembledTensor(dtype, shape, Joined(runs), (where, key))


def _scalar(value: Any, key: Any) -> Any:
    """Return a parameter's own copy of a scalar that its group shares."""
    if (
        isinstance(value, Spec)
        and value.home is not None
        and value.length <= _SMALL_BYTES
        and value.stride == row_major(value.shape)
    ):
        with value.home.files.open(value.home.name) as handle:
            where = value.home.files.where(value.home.name)
            data = pread(handle, value.span.offset + value.offset * value.itemsize, value.length, where)
        return AssembledTensor(value.dtype, value.shape, Bytes(data), ("scalar", key))
    return value


def _shapes(model_state: Mapping[str, Any], where: str) -> list[dict[str, tuple[int, ...]]]:
    shapes = model_state.get("param_shapes")
    groups = shapes if isinstance(shapes, list) else [shapes]
    groups_of_shapes = [
        {str(name): _shape(shape, where) for name, shape in _dict(group, where).items()} for group in groups
    ]
    if len({name for group in groups_of_shapes for name in group}) != sum(map(len, groups_of_shapes)):
        raise UnsafeContent("a parameter twice", where=where)
    return groups_of_shapes


def _shape(value: Any, where: str) -> tuple[int, ...]:
    shape = value.meta if isinstance(value, Leaf) and value.kind == "torch_size" else value
    if (
        not isinstance(shape, (tuple, list))
        or len(shape) > 64
        or any(type(extent) is not int or not 0 <= extent < 2**63 for extent in shape)
    ):
        raise UnsafeContent("an impossible shape", where=where)
    return tuple(shape)


def _flat(groups: Any, key: Any, where: str) -> Spec:
    try:
        partition = groups[key]
    except (KeyError, IndexError, TypeError):
        raise CorruptCheckpoint(f"a partition is missing: {str(key)[:40]}", where=where) from None
    if not isinstance(partition, Spec) or not (len(partition.shape) == 1 or partition.in_order):
        raise UnsafeContent("a partition that is not a flat tensor", where=where)
    return partition


def _dict(value: Any, where: str) -> dict[Any, Any]:
    if not isinstance(value, dict):
        raise UnsafeContent("not as DeepSpeed writes it: something other than a dict", where=where)
    return value


def _list(value: Any, where: str) -> list[Any]:
    if not isinstance(value, (list, tuple)):
        raise UnsafeContent("not as DeepSpeed writes it: something other than a list", where=where)
    return list(value)


def _version(model_state: Mapping[str, Any]) -> str:
    version = model_state.get("ds_version")
    return f", version {version}" if isinstance(version, str) and re.fullmatch(r"[\w.+-]{1,30}", version) else ""
