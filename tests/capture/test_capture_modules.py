"""Modules: their own names under any wrapper, direct writing, hooks, extra state, mismatches."""

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
    """A small module with buffers."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(3, 2))


def equal(one: nn.Module, other: nn.Module) -> bool:
    """Equal states to the bit."""
    a, b = one.state_dict(), other.state_dict()
    return a.keys() == b.keys() and all(raw(a[key]) == raw(b[key]) for key in a)


def test_a_module_is_restored_in_place_and_directly() -> None:
    """Parameters and buffers are written where they lie, with no second copy, and autograd is told."""
    one, other = net(1), net(2)
    stored = save({"model": one}, rng=False)
    where = {key: (tensor.data_ptr(), tensor._version) for key, tensor in other.state_dict(keep_vars=True).items()}
    plan = plan_restore({"model": other}, stored.tensors, stored.tree, where="test")
    assert all(sink.view() is not None for sink in plan.sinks.values())
    restore(stored, {"model": other})
    assert equal(one, other)
    for key, tensor in other.state_dict(keep_vars=True).items():
        assert tensor.data_ptr() == where[key][0] and tensor._version > where[key][1], key


def test_roles_and_trainable_marks() -> None:
    """Parameters are params, buffers buffers; only what an optimizer holds and may change is trainable."""
    model = net(1)
    model[0].weight.requires_grad_(False)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    items = {item.name: item for item in capture({"model": model, "opt": optimizer}).items}
    assert items["model/0.weight"].role == "param" and not items["model/0.weight"].trainable
    assert items["model/3.weight"].trainable and items["model/1.running_mean"].role == "buffer"
    assert items["model/1.num_batches_tracked"].role == "buffer"
    assert all(item.role == "rng" for name, item in items.items() if name.startswith("rng/"))


def test_channels_last_memory_is_restored_in_its_own_layout() -> None:
    """A parameter keeps its memory format; its elements are the stored ones."""
    one, other = net(1).to(memory_format=torch.channels_last), net(2)
    restore(save({"model": one}, rng=False), {"model": other})
    assert equal(one, other) and other[0].weight.is_contiguous()
    again = net(3).to(memory_format=torch.channels_last)
    restore(save({"model": other}, rng=False), {"model": again})
    assert equal(again, other) and again[0].weight.is_contiguous(memory_format=torch.channels_last)


def test_compiled_modules_are_saved_under_their_own_names() -> None:
    """torch.compile's path element never reaches the checkpoint, for the whole module and for parts of it."""
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
    """State of a run with a compiled part goes into one without, by name."""
    one, other = net(1), net(2)
    one[3] = torch.compile(one[3])
    first, second = torch.optim.Adam(one.parameters()), torch.optim.Adam(other.parameters())
    sum(p.sum() for p in one.parameters()).backward()
    first.step()
    restore(save({"model": one, "opt": first}, rng=False), {"model": other, "opt": second})
    for p, q in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(first.state[p]["exp_avg"], second.state[q]["exp_avg"])


def test_data_parallel_wrappers_are_taken_off() -> None:
    """DDP, compiled or not, saves what the module inside saves; it is restored into and from a bare one."""
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        one, other = net(1), net(2)
        wrapped = nn.parallel.DistributedDataParallel(one)
        for module in (wrapped, torch.compile(wrapped), nn.parallel.DistributedDataParallel(torch.compile(net(5)))):
            tree = load(save({"model": module}, rng=False))["model"]
            assert list(tree) == list(net(0).state_dict())
        restore(save({"model": torch.compile(wrapped)}, rng=False), {"model": other})
        assert equal(one, other)
    finally:
        torch.distributed.destroy_process_group()


class Tied(nn.Module):
    """Embedding and head on one weight."""

    def __init__(self, tie: bool = True) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(4, 3), nn.Linear(3, 4, bias=False)
        if tie:
            self.head.weight = self.embed.weight


def test_tied_weights_are_saved_once_and_stay_tied() -> None:
    """One item for both names; restoring leaves the tie and the values."""
    one, other = Tied(), Tied()
    stored = save({"model": one}, rng=False)
    assert [tensor.name for tensor in stored.tensors] == ["model/embed.weight"]
    restore(stored, {"model": other})
    assert other.head.weight is other.embed.weight and torch.equal(one.head.weight, other.head.weight)


def test_a_tie_that_was_cut_gets_both_places_filled() -> None:
    """Stored once, live twice: both get the values."""
    one, other = Tied(), Tied(tie=False)
    restore(save({"model": one}, rng=False), {"model": other})
    assert torch.equal(one.embed.weight, other.head.weight) and torch.equal(one.embed.weight, other.embed.weight)


def test_a_tie_that_was_not_there_is_a_mismatch() -> None:
    """Stored as two, live as one: one of the two would be lost silently, so it is refused."""
    with pytest.raises(IncompatibleState):
        restore(save({"model": Tied(tie=False)}, rng=False), {"model": Tied()})


def test_every_mismatch_is_named_in_one_error_before_a_byte_is_written() -> None:
    """Missing, unexpected, of another shape, of another dtype: one line each; the live module is untouched."""
    stored = save({"model": nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2), "c": nn.Linear(2, 2)})}, rng=False)
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
    """Shapes must fit, dtypes are cast; the rest stays as it was and is listed."""
    one = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2), "c": nn.Linear(2, 2)})
    live = nn.ModuleDict({"a": nn.Linear(3, 2), "b": nn.Linear(2, 2).double(), "d": nn.Linear(2, 2)})
    kept = live["a"].weight.detach().clone()
    plan = restore(save({"model": one}, rng=False), {"model": live}, strict=False, piece=piece)
    assert torch.equal(live["b"].weight, one["b"].weight.double()) and live["b"].weight.dtype == torch.float64
    assert torch.equal(live["a"].weight, kept) and torch.equal(live["a"].bias, one["a"].bias)
    text = "\n".join(plan.skipped)
    assert "model/a.weight" in text and "model/c.weight" in text and "model/d.weight" in text


def test_only_restores_part_of_a_module() -> None:
    """The named entries are restored, the others and the generators stay."""
    one, other = net(1), net(2)
    kept = other[0].weight.detach().clone()
    restore(save({"model": one, "n": 3}), {"model": other}, only=["model/3.*"])
    assert torch.equal(one[3].weight, other[3].weight) and torch.equal(kept, other[0].weight)


@pytest.mark.parametrize("rename", [{"model/encoder.*": "model/backbone.*"}, lambda path: path.replace("encoder", "backbone")])
def test_renamed_entries_and_their_optimizer_state_find_their_place(rename) -> None:
    """A module that was renamed since gets its weights and its optimizer state under the new names."""
    one, other = nn.ModuleDict({"encoder": nn.Linear(2, 2)}), nn.ModuleDict({"backbone": nn.Linear(2, 2)})
    first, second = torch.optim.Adam(one.parameters()), torch.optim.Adam(other.parameters())
    one["encoder"](torch.ones(1, 2)).sum().backward()
    first.step()
    restore(save({"model": one, "opt": first}, rng=False), {"model": other, "opt": second}, rename=rename)
    assert torch.equal(one["encoder"].weight, other["backbone"].weight)
    moment = second.state[other["backbone"].weight]["exp_avg"]
    assert torch.equal(first.state[one["encoder"].weight]["exp_avg"], moment)


def test_a_component_can_be_renamed() -> None:
    """``{"old/*": "new/*"}`` maps a whole component, as the hint of the error says."""
    one, other = net(1), net(2)
    restore(
        save({"net": one, "count": {"n": 3}}, rng=False), {"model": other, "counts": {}}, rename={"net/*": "model/*", "count/*": "counts/*"}
    )
    assert equal(one, other)


class Extra(nn.Module):
    """Has state that is no tensor."""

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
    """What ``get_extra_state`` gives, ``set_extra_state`` gets, deep inside a module too."""
    one, other = nn.Sequential(Extra(note)), nn.Sequential(Extra("nothing"))
    restore(save({"model": one}, rng=False), {"model": other})
    if isinstance(note, torch.Tensor):
        assert torch.equal(other[0].note, note)
    else:
        assert other[0].note == note
    assert torch.equal(one[0].inner.weight, other[0].inner.weight)


class Custom(nn.Module):
    """Loads by its own code: stores the square."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((2,), 3.0))
        self.loads = 0

    def _load_from_state_dict(self, state_dict, prefix, *rest) -> None:
        self.loads += 1
        super()._load_from_state_dict(state_dict, prefix, *rest)


def test_modules_with_their_own_loading_code_load_by_it() -> None:
    """Hooks and overridden loading run; direct writing is only for modules that would do nothing else."""
    one, other = nn.Sequential(Custom(), nn.Linear(2, 2)), nn.Sequential(Custom(), nn.Linear(2, 2))
    restore(save({"model": one}, rng=False), {"model": other})
    assert other[0].loads == 1 and equal(one, other)
    hooked, ran = nn.Linear(2, 2), []
    hooked.register_load_state_dict_post_hook(lambda module, keys: ran.append(1))
    restore(save({"model": nn.Linear(2, 2)}, rng=False), {"model": hooked})
    assert ran


def test_entries_that_are_not_the_parameters_go_through_the_module() -> None:
    """A state dict hook that gives copies under other names is undone by its load hook."""

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

    one, other = hooked(1), hooked(2)
    restore(save({"model": one}, rng=False), {"model": other})
    assert torch.equal(one.weight, other.weight)


def test_spectral_norm_and_parametrizations_resume() -> None:
    """torch's own reparametrisations, old and new, come back with their buffers."""
    makers = [
        lambda: nn.utils.spectral_norm(nn.Linear(3, 3)),
        lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(3, 3)),
        lambda: nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)),
    ]
    for make in makers:
        one, other = make(), make()
        x = torch.randn(2, 3)
        one(x)
        restore(save({"model": one}, rng=False), {"model": other})
        assert equal(one, other) and torch.equal(one.eval()(x), other.eval()(x))


def test_what_a_state_dict_leaves_out_is_reported() -> None:
    """Buffers that are not persistent are listed as missed."""
    model = nn.Module()
    model.register_buffer("position", torch.ones(2), persistent=False)
    captured = capture({"model": model}, rng=False)
    assert any("position" in line for line in captured.missed)
    assert any("model" in line for line in captured.found)


def test_averaged_models_resume() -> None:
    """An AveragedModel comes back with its count and its weights, and goes on averaging the same."""
    model = net(1)
    averaged = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    averaged.update_parameters(model)
    averaged.update_parameters(net(7))
    fresh_model = net(2)
    fresh = torch.optim.swa_utils.AveragedModel(fresh_model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    restore(save({"model": model, "ema": averaged}, rng=False), {"model": fresh_model, "ema": fresh})
    assert equal(averaged, fresh) and int(fresh.n_averaged) == 2
    for one in (averaged, fresh):
        one.update_parameters(net(8))
    assert equal(averaged, fresh)


def test_a_restored_graph_cannot_be_used_backward_unnoticed() -> None:
    """A tensor saved for backward and then overwritten by a restore makes autograd complain, as any in-place write does."""
    model = nn.Linear(2, 2)
    stored = save({"model": model}, rng=False)
    x = torch.ones(1, 2, requires_grad=True)
    loss = model(x).sum()
    restore(stored, {"model": model})
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_inference_tensors_and_frozen_parameters_are_restored() -> None:
    """Parameters made in inference mode or frozen are written like others."""
    one = nn.Linear(2, 2).requires_grad_(False)
    with torch.inference_mode():
        other = nn.Linear(2, 2)
    restore(save({"model": one}, rng=False), {"model": other})
    assert torch.equal(one.weight, other.weight)
    restore(save({"model": one}, rng=False), {"model": other}, piece=1)
    transposed = nn.Linear(2, 2)
    with torch.inference_mode():
        transposed.weight = nn.Parameter(torch.zeros(2, 2).t(), requires_grad=False)
    restore(save({"model": one}, rng=False), {"model": transposed})
    assert torch.equal(one.weight, transposed.weight)


def test_a_finished_plan_keeps_nothing_alive() -> None:
    """Temporaries of a restore (a second copy, where a module loads by itself) go when it ends, not when the collector comes round."""
    stored = save({"model": nn.Sequential(Custom(), nn.Linear(2, 2)), "d": {"n": 1}}, rng=False)
    live = nn.Sequential(Custom(), nn.Linear(2, 2))
    gc.collect()
    gc.disable()
    try:
        plan = restore(stored, {"model": live, "d": {}})
        lasting = {id(tensor) for tensor in live.parameters()}
        made = [
            weakref.ref(sink.owner) for sink in plan.sinks.values() if isinstance(sink, HostMemorySink) and id(sink.owner) not in lasting
        ]
        gone = weakref.ref(plan)
        del plan
        assert made and gone() is None and all(tensor() is None for tensor in made)
    finally:
        gc.enable()


class Versioned(nn.Module):
    """Converts states of before its second version when it loads."""

    _version = 2

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((2,), 3.0))

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, *rest) -> None:
        if local_metadata.get("version") != 2:
            state_dict[prefix + "weight"] = -state_dict[prefix + "weight"]
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)


def test_modules_that_look_at_their_version_see_the_one_they_have() -> None:
    """A state saved by this code is not converted as if it were an old one's."""
    one, other = Versioned(), Versioned()
    with torch.no_grad():
        one.weight.fill_(5)
    restore(save({"model": one}, rng=False), {"model": other})
    assert other.weight.tolist() == [5, 5]


class Indirect(nn.Module):
    """Saves by itself."""

    def _save_to_state_dict(self, destination, prefix, keep_vars) -> None:
        destination[prefix + "x"] = torch.zeros(1)


@pytest.mark.parametrize("nested", [False, True])
def test_a_plain_modules_state_is_what_state_dict_gives(nested: bool) -> None:
    """Same names, same tensors, same order: shared modules twice, absent parameters and transient buffers not at all."""
    shared = nn.Linear(2, 2, bias=False)
    module = nn.ModuleDict({"a": net(1), "b": shared, "c": nn.ParameterList([nn.Parameter(torch.zeros(1))]), "d": shared})
    module.register_buffer("transient", torch.zeros(1), persistent=False)
    module.register_buffer("absent", None)
    if nested:
        module = nn.Sequential(module, nn.MultiheadAttention(4, 2), nn.LSTM(2, 2))
    state, expected = plain_state(module), module.state_dict(keep_vars=True)
    assert state is not None and list(state) == list(expected)
    assert all(state[key] is expected[key] for key in expected)


@pytest.mark.parametrize("kind", ["class", "hook", "load hook", "instance"])
def test_a_module_with_ideas_of_its_own_is_asked(kind: str) -> None:
    """Whatever may make its state another than its tensors is left to ``state_dict`` itself."""
    part = Indirect() if kind == "class" else nn.Linear(2, 2)
    if kind == "hook":
        part._register_state_dict_hook(lambda module, state, prefix, metadata: state)
    if kind == "load hook":
        part.register_load_state_dict_post_hook(lambda module, keys: None)
    if kind == "instance":
        part.state_dict = lambda *args, **options: {}
    assert plain_state(nn.Sequential(nn.Linear(2, 2), part)) is None
