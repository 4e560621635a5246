"""What our own objects can do is declared: as a property, in a base class, or in a protocol that ``isinstance`` checks.

``getattr(store, "lanes", 1)`` finds a misspelt or missing attribute to be absent, and no type checker sees it. So ``getattr`` and
``hasattr`` with a constant name are for objects that others made: the table has the owner and the names for each file.
"""

from __future__ import annotations

import ast

from tests.house.tree import PRODUCT, SOURCES, rel

OTHERS: dict[str, tuple[str, str]] = {
    "capture/accelerator.py": (
        "the accelerator's module: of torch or another package",
        "is_initialized get_device_name",
    ),
    "capture/capture.py": ("the script's modules and stateful objects", "state_dict"),
    "capture/delivered.py": ("batches of the script's loader", "__array_interface__"),
    "capture/environment.py": ("numpy, or a stand-in for it", "__version__"),
    "capture/flat_params.py": ("parameters: DTensors have placements", "placements"),
    "capture/kinds.py": (
        "components of the script: distinguished by what they have",
        "state_dict load_state_dict last_epoch get_last_lr hook __module__ collected_params shadow_params",
    ),
    "capture/loader_watch.py": (
        "the script's loaders, samplers and datasets",
        "set_epoch epoch state_dict load_state_dict dataset sampler __dict__",
    ),
    "capture/loaders.py": ("the script's loaders", "sampler state_dict in_order"),
    "capture/objects.py": (
        "values of the script, of any class",
        "__dict__ __tensor_flatten__ __members__ __wrapped__",
    ),
    "capture/optimizers.py": ("torch's ZeroRedundancyOptimizer", "optim"),
    "capture/own_loading.py": (
        "the script's modules and tensor classes",
        "__tensor_flatten__ __torch_dispatch__",
    ),
    "capture/plain_forms.py": (
        "configuration objects of the script and of other packages",
        "get_secret_value __next__ model_fields to_dict __struct_fields__ __attrs_attrs__",
    ),
    "capture/reposition.py": ("torchdata's order of batches", "load_state_dict sampler_iter"),
    "capture/revision.py": ("the module __main__, which has a file or none", "__file__"),
    "capture/rng.py": ("torch, and generators of torch, numpy and Python", "bit_generator numpy tobytes"),
    "capture/node_loaders.py": (
        "torchdata's loader of nodes",
        "_cached_item _cached_state_dict _it _iter_for_state_dict",
    ),
    "capture/sampler_shards.py": ("the script's loader and sampler", "in_order __index__"),
    "capture/swap.py": ("torch's AveragedModel", "n_averaged module"),
    "capture/typed_values.py": ("the script's named tuples", "_fields _make"),
    "capture/units.py": (
        "samplers and data sets of several libraries",
        "leave sampler batch_size seed initial_seed drop_last shuffle data_source dataset _ex_iterable ex_iterable ex_iterables",
    ),
    "checkpointer/lost_workers.py": ("sys: in an interactive session", "ps1"),
    "checkpointer/metric_feed.py": ("metrics of the script", "device ndim type detach"),
    "checkpointer/metric_values.py": ("metrics of the script", "dtype kind size __float__ item copy"),
    "checkpointer/options.py": ("what the script gave in the place of an option", "name __index__"),
    "checkpointer/outside_state.py": ("components of the script", "__dict__"),
    "checkpointer/resource_use.py": ("the accelerator's module: of torch or another package", "utilization"),
    "checkpointer/ungiven.py": ("optimizers and objects of the script", "hooked __dict__"),
    "cli/audited.py": ("click: not in every release", "_protected_args"),
    "errors.py": ("a value of any class, in a message", "shape dtype"),
    "format/step_number.py": ("the script's step: of numpy, torch or another library", "dtype shape"),
    "observe/progress_bar.py": ("IPython, and its shell, which has a kernel or none", "get_ipython kernel"),
    "integrations/accelerate.py": ("accelerate's enum and loaders", "value iteration"),
    "integrations/dcp_orders.py": ("torch's plans: not in every release", "usable"),
    "integrations/dcp_write.py": ("a save planner of torch or the script", "lookup_object"),
    "integrations/deepspeed.py": (
        "DeepSpeed's optimizers",
        "optimizer round_robin_bit16_groups single_partition_of_fp32_groups real_dp_process_group",
    ),
    "integrations/frameworks.py": ("values of the script", "state_dict load_state_dict"),
    "integrations/lightning.py": ("Lightning's trainer", "datamodule"),
    "integrations/transformers.py": ("accelerate's wrapper of an optimizer", "optimizer"),
    "policy/tiers.py": ("what the script gave as a path; this room does not import os", "__fspath__"),
    "policy/triggers.py": ("what the script gave as an amount or trigger", "total_seconds __name__"),
    "prove/recorder.py": ("values of the script; torch and numpy are not imported for them", "detach cpu tobytes"),
    "restore/elastic_state.py": ("the script's dataset", "state_dict"),
    "settings/amounts.py": ("what the script gave as an amount", "total_seconds is_cuda __float__ __index__"),
    "serve/gate.py": ("socket: on Linux only", "TCP_DEFER_ACCEPT"),
    "snapshot/hooks.py": ("torch's mark of an optimizer's step", "hooked"),
    "store/buffers.py": ("mmap: on Linux only", "MADV_HUGEPAGE"),
    "store/disk.py": ("os and libc: on Linux only", "O_DIRECT fallocate fallocate64"),
    "supervise/launch.py": (
        "torch's LaunchConfig: not in every release",
        "signals_to_handle shutdown_timeout event_log_handler",
    ),
    "supervise/nvml.py": ("an error of NVIDIA's library", "value"),
    "torch_private/flat_parameters.py": (
        "torch's FullyShardedDataParallel",
        "_inter_node_pg _fsdp_flattened _is_flat_param _fqns _full_param_padded",
    ),
    "torch_private/loaders.py": ("torch's loaders", "_iterator _generate_state"),
    "torch_private/modules.py": ("torch's modules", "_non_persistent_buffers_set _version"),
    "torch_private/names.py": ("classes and functions of torch", "__annotations__ __code__ __func__"),
    "torch_private/optimizers.py": ("torch's schedulers of schedulers", "_schedulers"),
    "torch_private/tensors.py": (
        "tensors: not in every release of torch",
        "DisableTorchFunctionSubclass to_local wait _coalesced_ _make_per_tensor_quantized_tensor _make_per_channel_quantized_tensor shard_order _indices _values dim",
    ),
    "torch_private/torchdata.py": ("torchdata's loader and its iterator", "next_iter_state _iterator state_dict"),
    "torch_private/torchrun.py": ("torch's rendezvous handlers", "_op_executor _state_holder"),
}
"""For each file: the objects of others that it asks, and the names of the attributes."""


def constant_names(source: str) -> list[tuple[int, str]]:
    """Return line and name of each ``getattr`` and ``hasattr`` with a constant name."""
    return [
        (call.lineno, call.args[1].value)
        for call in ast.walk(ast.parse(source))
        if isinstance(call, ast.Call)
        and isinstance(call.func, ast.Name)
        and call.func.id in ("getattr", "hasattr")
        and len(call.args) > 1
        and isinstance(call.args[1], ast.Constant)
        and isinstance(call.args[1].value, str)
    ]


def test_own_capabilities_are_declared() -> None:
    """No file asks an object for a named attribute, except those of others that the table lists."""
    undeclared = [
        f"{rel(path)}:{line}: {name}"
        for path in SOURCES
        for line, name in constant_names(path.read_text(encoding="utf-8"))
        if name not in OTHERS.get(rel(path), ("", ""))[1].split()
    ]
    assert not undeclared, (
        f"declare it (a property, a base class, a protocol), or add the owner of the object to the table: {undeclared}"
    )


def test_the_table_has_nothing_else() -> None:
    """Each listed name is still asked for."""
    for name, (_, attributes) in OTHERS.items():
        asked = {attribute for _, attribute in constant_names((PRODUCT / name).read_text(encoding="utf-8"))}
        assert asked == set(attributes.split()), name


def test_the_test_finds_a_named_attribute() -> None:
    """Both functions are found, with and without a default; a computed name is not."""
    source = 'getattr(store, "lanes", 1)\nhasattr(sink, "skip")\ngetattr(reader, name)\n'
    assert constant_names(source) == [(1, "lanes"), (2, "skip")]
