"""Capture of modules: names without wrappers, direct writes, hooks, extra state, mismatches."""

from __future__ import annotations

import gc
import os
import weakref

import pytest
import torch
from roundtrip import load, raw, restore, save
from torch import nn

from relight.capture import capture, plan_restore
from relight.capture.module_state import plain_state
from relight.errors import IncompatibleState
from relight.layout.sources import HostMemorySink


def net(seed: int) -> nn.Sequential:
    """Return a small module with buffers."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(3, 2))


def equal(source: nn.Module, target: nn.Module) -> bool:
    """Return whether two modules have bit-identical states."""
    a, b = source.state_dict(), target.state_dict()
    return a.keys() == b.keys() and all(raw(a[key]) == raw(b[key]) for key in a)


def test_a_module_is_restored_in_place_and_directly() -> None:
    """Write parameters and buffers in place, without a second copy, and increase autograd's version counters."""
    source, target = net(1), net(2)
    stored = save({"model": source}, rng=False)
    where = {key: (tensor.data_ptr(), tensor._version) for key, tensor in target.state_dict(keep_vars=True).items()}
    plan = plan_restore({"model": target}, stored.tensors, stored.tree, where="test")
    assert all(sink.view() is not None for sink in plan.sinks.values())
    restore(stored, {"model": target})
    assert equal(source, target)
    for key, tensor in target.state_dict(keep_vars=True).items():
        assert tensor.data_ptr() == where[key][0] and tensor._version > where[key][1], key


def test_roles_and_trainable_marks() -> None:
    """Record parameters as ``param`` and buffers as ``buffer``. Only what an optimizer can change is trainable."""
    model = net(1)
    model[0].weight.requires_grad_(False)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    items = {item.name: item for item in capture({"model": model, "opt": optimizer}).items}
    assert items["model/0.weight"].role == "param" and not items["model/0.weight"].trainable
    assert items["model/3.weight"].trainable and items["model/1.running_mean"].role == "buffer"
    assert items["model/1.num_batches_tracked"].role == "buffer"
    assert all(item.role == "rng" for name, item in items.items() if name.startswith("rng/"))


def test_channels_last_memory_is_restored_in_its_own_layout() -> None:
    """Keep a parameter's memory format, and write the stored elements."""
    source, target = net(1).to(memory_format=torch.channels_last), net(2)
    restore(save({"model": source}, rng=False), {"model": target})
    assert equal(source, target) and target[0].weight.is_contiguous()
    again = net(3).to(memory_format=torch.channels_last)
    restore(save({"model": target}, rng=False), {"model": again})
    assert equal(again, target) and again[0].weight.is_contiguous(memory_format=torch.channels_last)


def test_compiled_modules_are_saved_under_their_own_names() -> None:
    """Remove torch.compile's path element from names, for the whole module and for parts."""
    plain, whole, part = net(1), net(2), net(3)
    part[3] = torch.compile(part[3])
    for module in (torch.compile(whole), part):
        assert list(load(save({"model": module}, rng=False))["model"]) == list(plain.state_dict())
        restore(save({"model": plain}, rng=False), {"model": module})
    assert equal(plain, whole)
    assert [raw(t) for t in part.state_dict().values()] == [raw(t) for t in plain.state_dict().values()]
    target = net(4)
    restore(save({"model": part}, rng=False), {"model": target})
    assert equal(target, plain)


def test_optimizer_names_are_free_of_wrappers() -> None:
    """Restore optimizer state of a partly compiled model into an uncompiled one by name."""
    source, target = net(1), net(2)
    source[3] = torch.compile(source[3])
    first, second = torch.optim.Adam(source.parameters()), torch.optim.Adam(target.parameters())
    sum(p.sum() for p in source.parameters()).backward()
    first.step()
    restore(save({"model": source, "opt": first}, rng=False), {"model": target, "opt": second})
    for p, q in zip(source.parameters(), target.parameters(), strict=True):
        assert torch.equal(first.state[p]["exp_avg"], second.state[q]["exp_avg"])


def test_data_parallel_wrappers_are_taken_off() -> None:
    """Save the module inside DDP, compiled or not, and restore it into and from a bare module."""
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        source, target = net(1), net(2)
        wrapped = nn.parallel.DistributedDataParallel(source)
        for module in (wrapped, torch.compile(wrapped), nn.parallel.DistributedDataParallel(torch.compile(net(5)))):
            tree = load(save({"model": module}, rng=False))["model"]
            assert list(tree) == list(net(0).state_dict())
        restore(save({"model": torch.compile(wrapped)}, rng=False), {"model": target})
        assert equal(source, target)
    finally:
        torch.distributed.destroy_process_group()


class Tied(nn.Module):
    """Embedding and head that share one weight."""

    def __init__(self, tie: bool = True) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(4, 3), nn.Linear(3, 4, bias=False)
        if tie:
            self.head.weight = self.embed.weight


def test_tied_weights_are_saved_once_and_stay_tied() -> None:
    """Store one item for both names, and restore it without breaking the tie."""
    source, target = Tied(), Tied()
    stored = save({"model": source}, rng=False)
    assert [tensor.name for tensor in stored.tensors] == ["model/embed.weight"]
    restore(stored, {"model": target})
    assert target.head.weight is target.embed.weight and torch.equal(source.head.weight, target.head.weight)


def test_a_tie_that_was_cut_gets_both_places_filled() -> None:
    """Restore a weight that was stored tied into both weights of an untied module."""
    source, target = Tied(), Tied(tie=False)
    restore(save({"model": source}, rng=False), {"model": target})
    assert torch.equal(source.embed.weight, target.head.weight) and torch.equal(
        source.embed.weight, target.embed.weight
    )


def test_a_tie_that_was_not_there_is_a_mismatch() -> None:
    """Refuse two stored weights for a live tied weight, because one of them would be lost silently."""
    with pytest.raises(IncompatibleState):
        restore(save({"model": Tied(tie=False)}, rng=False), {"model": Tied()})


def test_every_mismatch_is_named_in_one_error_before_a_byte_is_written() -> None:
    """Report missing and unexpected entries, wrong shapes and wrong dtypes, one line each. The live module is
    unchanged."""
    stored = save(
        {"model": nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2), "c": nn.Linear(2, 2)})}, rng=False
    )
    live = nn.ModuleDict({"a": nn.Linear(3, 2), "b": nn.Linear(2, 2).double(), "d": nn.Linear(2, 2)})
    before = {key: value.clone() for key, value in live.state_dict().items()}
    with pytest.raises(IncompatibleState) as caught:
        plan_restore({"model": live}, stored.tensors, stored.tree, where="test")
    text = "\n".join(caught.value.details)
    for name in ("a.weight", "b.weight", "b.bias", "c.weight", "c.bias", "d.weight", "d.bias"):
        assert f"model/{name}" in text
    assert "[2, 2]" in text and "[2, 3]" in text and "float64" in text
    assert all(torch.equal(before[key], value) for key, value in live.state_dict().items())


@pytest.mark.parametrize("piece", [0, 3])
def test_without_strict_what_fits_is_taken_and_the_rest_listed(piece: int) -> None:
    """Restore entries with a fitting shape, and cast dtypes. List the others and leave them unchanged."""
    source = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2), "c": nn.Linear(2, 2)})
    live = nn.ModuleDict({"a": nn.Linear(3, 2), "b": nn.Linear(2, 2).double(), "d": nn.Linear(2, 2)})
    kept = live["a"].weight.detach().clone()
    plan = restore(save({"model": source}, rng=False), {"model": live}, strict=False, piece=piece)
    assert torch.equal(live["b"].weight, source["b"].weight.double()) and live["b"].weight.dtype == torch.float64
    assert torch.equal(live["a"].weight, kept) and torch.equal(live["a"].bias, source["a"].bias)
    text = "\n".join(plan.skipped)
    assert "model/a.weight" in text and "model/c.weight" in text and "model/d.weight" in text


def test_only_restores_part_of_a_module() -> None:
    """Restore the selected entries. The other entries and the generators stay unchanged."""
    source, target = net(1), net(2)
    kept = target[0].weight.detach().clone()
    restore(save({"model": source, "n": 3}), {"model": target}, only=["model/3.*"])
    assert torch.equal(source[3].weight, target[3].weight) and torch.equal(kept, target[0].weight)


@pytest.mark.parametrize(
    "rename", [{"model/encoder.*": "model/backbone.*"}, lambda path: path.replace("encoder", "backbone")]
)
def test_renamed_entries_and_their_optimizer_state_find_their_place(rename) -> None:
    """Restore a renamed module's weights and optimizer state under the new names."""
    source, target = nn.ModuleDict({"encoder": nn.Linear(2, 2)}), nn.ModuleDict({"backbone": nn.Linear(2, 2)})
    first, second = torch.optim.Adam(source.parameters()), torch.optim.Adam(target.parameters())
    source["encoder"](torch.ones(1, 2)).sum().backward()
    first.step()
    restore(save({"model": source, "opt": first}, rng=False), {"model": target, "opt": second}, rename=rename)
    assert torch.equal(source["encoder"].weight, target["backbone"].weight)
    moment = second.state[target["backbone"].weight]["exp_avg"]
    assert torch.equal(first.state[source["encoder"].weight]["exp_avg"], moment)


def test_a_component_can_be_renamed() -> None:
    """Rename a whole component by ``{"old/*": "new/*"}``, as the error's hint recommends."""
    source, target = net(1), net(2)
    restore(
        save({"net": source, "count": {"n": 3}}, rng=False),
        {"model": target, "counts": {}},
        rename={"net/*": "model/*", "count/*": "counts/*"},
    )
    assert equal(source, target)


class Extra(nn.Module):
    """A module with extra state that is not a tensor."""

    def __init__(self, note: object) -> None:
        super().__init__()
        self.inner = nn.Linear(1, 1)
        self.note = note

    def get_extra_state(self) -> object:
        return self.note

    def set_extra_state(self, state: object) -> None:
        self.note = state


@pytest.mark.parametrize("note", [{"amax": [1.0, 2.0]}, torch.arange(3), "text", None], ids=repr)
def test_extra_state_is_carried(note: object) -> None:
    """Pass what ``get_extra_state`` returned to ``set_extra_state``, in nested modules too."""
    source, target = nn.Sequential(Extra(note)), nn.Sequential(Extra("nothing"))
    restore(save({"model": source}, rng=False), {"model": target})
    if isinstance(note, torch.Tensor):
        assert torch.equal(target[0].note, note)
    else:
        assert target[0].note == note
    assert torch.equal(source[0].inner.weight, target[0].inner.weight)


class Custom(nn.Module):
    """A module with its own loading code, which counts the loads."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((2,), 3.0))
        self.loads = 0

    def _load_from_state_dict(self, state_dict, prefix, *rest) -> None:
        self.loads += 1
        super()._load_from_state_dict(state_dict, prefix, *rest)


def test_modules_with_their_own_loading_code_load_by_it() -> None:
    """Run hooks and overridden loading code. Write directly only into modules that have neither."""
    source, target = nn.Sequential(Custom(), nn.Linear(2, 2)), nn.Sequential(Custom(), nn.Linear(2, 2))
    restore(save({"model": source}, rng=False), {"model": target})
    assert target[0].loads == 1 and equal(source, target)
    hooked, ran = nn.Linear(2, 2), []
    hooked.register_load_state_dict_post_hook(lambda module, keys: ran.append(1))
    restore(save({"model": nn.Linear(2, 2)}, rng=False), {"model": hooked})
    assert ran


def test_entries_that_are_not_the_parameters_go_through_the_module() -> None:
    """Reverse a state-dict hook that returns renamed copies by the module's load hook."""

    def outward(module, state, prefix, metadata):
        state[prefix + "renamed"] = state.pop(prefix + "weight").clone()
        return state

    def inward(module, state, prefix, *rest):
        if prefix + "renamed" in state:
            state[prefix + "weight"] = state.pop(prefix + "renamed")

    def hooked(seed: int) -> nn.Linear:
        torch.manual_seed(seed)
        linear = nn.Linear(2, 2)
        linear._register_state_dict_hook(outward)
        linear.register_load_state_dict_pre_hook(inward)
        return linear

    source, target = hooked(1), hooked(2)
    restore(save({"model": source}, rng=False), {"model": target})
    assert torch.equal(source.weight, target.weight)


def test_spectral_norm_and_parametrizations_resume() -> None:
    """Restore torch's old and new reparametrisations with their buffers."""
    makers = [
        lambda: nn.utils.spectral_norm(nn.Linear(3, 3)),
        lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(3, 3)),
        lambda: nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)),
    ]
    for make in makers:
        source, target = make(), make()
        x = torch.randn(2, 3)
        source(x)
        restore(save({"model": source}, rng=False), {"model": target})
        assert equal(source, target) and torch.equal(source.eval()(x), target.eval()(x))


def test_state_missing_from_a_state_dict_is_reported() -> None:
    """List non-persistent buffers as missed."""
    model = nn.Module()
    model.register_buffer("position", torch.ones(2), persistent=False)
    captured = capture({"model": model}, rng=False)
    assert any("position" in line for line in captured.missed)
    assert any("model" in line for line in captured.found)


def test_averaged_models_resume() -> None:
    """Restore an AveragedModel with its count and weights. It continues with the same averages."""
    model = net(1)
    averaged = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    averaged.update_parameters(model)
    averaged.update_parameters(net(7))
    fresh_model = net(2)
    fresh = torch.optim.swa_utils.AveragedModel(
        fresh_model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
    )
    restore(save({"model": model, "ema": averaged}, rng=False), {"model": fresh_model, "ema": fresh})
    assert equal(averaged, fresh) and int(fresh.n_averaged) == 2
    for module in (averaged, fresh):
        module.update_parameters(net(8))
    assert equal(averaged, fresh)


def test_a_restored_graph_cannot_be_used_backward_unnoticed() -> None:
    """Raise autograd's error for an in-place change if a restore overwrites a tensor that was saved for backward."""
    model = nn.Linear(2, 2)
    stored = save({"model": model}, rng=False)
    x = torch.ones(1, 2, requires_grad=True)
    loss = model(x).sum()
    restore(stored, {"model": model})
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_inference_tensors_and_frozen_parameters_are_restored() -> None:
    """Restore frozen parameters, and parameters made in inference mode, as any others."""
    source = nn.Linear(2, 2).requires_grad_(False)
    with torch.inference_mode():
        target = nn.Linear(2, 2)
    restore(save({"model": source}, rng=False), {"model": target})
    assert torch.equal(source.weight, target.weight)
    restore(save({"model": source}, rng=False), {"model": target}, piece=1)
    transposed = nn.Linear(2, 2)
    with torch.inference_mode():
        transposed.weight = nn.Parameter(torch.zeros(2, 2).t(), requires_grad=False)
    restore(save({"model": source}, rng=False), {"model": transposed})
    assert torch.equal(source.weight, transposed.weight)


def test_a_finished_plan_keeps_nothing_alive() -> None:
    """Free a restore's temporaries when it ends, without the garbage collector. A module that loads by itself needs a
    second copy."""
    stored = save({"model": nn.Sequential(Custom(), nn.Linear(2, 2)), "d": {"n": 1}}, rng=False)
    live = nn.Sequential(Custom(), nn.Linear(2, 2))
    gc.collect()
    gc.disable()
    try:
        plan = restore(stored, {"model": live, "d": {}})
        lasting = {id(tensor) for tensor in live.parameters()}
        made = [
            weakref.ref(sink.owner)
            for sink in plan.sinks.values()
            if isinstance(sink, HostMemorySink) and id(sink.owner) not in lasting
        ]
        gone = weakref.ref(plan)
        del plan
        assert made and gone() is None and all(tensor() is None for tensor in made)
    finally:
        gc.enable()


class Versioned(nn.Module):
    """A module that converts states older than its second version when it loads."""

    _version = 2

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((2,), 3.0))

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, *rest) -> None:
        if local_metadata.get("version") != 2:
            state_dict[prefix + "weight"] = -state_dict[prefix + "weight"]
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)


def test_modules_receive_the_version_that_saved_them() -> None:
    """Pass the version to a module's loading code, so that a state of the present version is not converted."""
    source, target = Versioned(), Versioned()
    with torch.no_grad():
        source.weight.fill_(5)
    restore(save({"model": source}, rng=False), {"model": target})
    assert target.weight.tolist() == [5, 5]


class Indirect(nn.Module):
    """A module with its own saving code."""

    def _save_to_state_dict(self, destination, prefix, keep_vars) -> None:
        destination[prefix + "x"] = torch.zeros(1)


@pytest.mark.parametrize("nested", [False, True])
def test_a_plain_modules_state_is_what_state_dict_gives(nested: bool) -> None:
    """Return the names, tensors and order of ``state_dict``. Shared modules occur twice; absent parameters and
    non-persistent buffers do not occur."""
    shared = nn.Linear(2, 2, bias=False)
    module = nn.ModuleDict(
        {"a": net(1), "b": shared, "c": nn.ParameterList([nn.Parameter(torch.zeros(1))]), "d": shared}
    )
    module.register_buffer("transient", torch.zeros(1), persistent=False)
    module.register_buffer("absent", None)
    if nested:
        module = nn.Sequential(module, nn.MultiheadAttention(4, 2), nn.LSTM(2, 2))
    state, expected = plain_state(module), module.state_dict(keep_vars=True)
    assert state is not None and list(state) == list(expected)
    assert all(state[key] is expected[key] for key in expected)


@pytest.mark.parametrize("kind", ["class", "hook", "load hook", "instance"])
def test_a_module_with_ideas_of_its_own_is_asked(kind: str) -> None:
    """Leave the state to ``state_dict`` if hooks or own code may change it."""
    part = Indirect() if kind == "class" else nn.Linear(2, 2)
    if kind == "hook":
        part._register_state_dict_hook(lambda module, state, prefix, metadata: state)
    if kind == "load hook":
        part.register_load_state_dict_post_hook(lambda module, keys: None)
    if kind == "instance":
        part.state_dict = lambda *args, **options: {}
    assert plain_state(nn.Sequential(nn.Linear(2, 2), part)) is None
